"""The interface of a model (`Model`) and the base class of the toolkit's own models (`CausalLM`).

Decoding, planning and the notebook user interface accept any `Model`: a loaded one, an exported package, or a wrapped model of
transformers. Loading, exporting and tuning need modules and weights and take a `CausalLM`.
"""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from toolkit import ops
from toolkit.core.current_layer import in_layer
from toolkit.core.distributed import WHOLE, Shard
from toolkit.core.errors import DeviceError, ModelError, kind_of
from toolkit.core.units import dtype_name
from toolkit.models.cache import Cache, Reach, check_one_sequence, check_room
from toolkit.models.costs import Cost, Shown
from toolkit.models.cuts import parts_of, spread
from toolkit.models.layers import Embedding, Linear, Residual, RMSNorm
from toolkit.models.places import initialize
from toolkit.models.problems import problems_of, samples
from toolkit.ops.define import GPUS
from toolkit.weights.packed import PackedMatrix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from toolkit.gpu.device import Device
    from toolkit.kernels.base import Kernel, Shape
    from toolkit.loading.report import Report
    from toolkit.text.tokenizer import Tokenizer


class ModelConfig(Protocol):
    """A dataclass with at least these fields. Names follow Hugging Face's config.json."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def tie_word_embeddings(self) -> bool: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


def length_of(ids: Tensor) -> int:
    """Return T of token ids [B, T]. Raises ModelError for anything else. Reads no values, so the host waits for nothing."""
    if not isinstance(ids, Tensor):
        raise ModelError("token ids", kind_of(ids), "Give a tensor [B, T], such as torch.tensor([[1, 2, 3]])")
    if ids.ndim != 2 or not ids.numel() or ids.dtype not in (torch.int64, torch.int32):
        found = f"a tensor {list(ids.shape)} of {dtype_name(ids.dtype)}"
        raise ModelError("token ids", found, "Give whole numbers [B, T]: B texts of T tokens each. ids[None] is one text")
    return ids.shape[1]


class InputEmbedding(Protocol):
    """Maps token ids of any shape to the rows that `Model.advance` takes, [*ids.shape, size]."""

    def __call__(self, ids: Tensor, /) -> Tensor: ...
    def on_host(self) -> InputEmbedding:
        """Return a copy of the table on the CPU."""


def check_model(model: object) -> None:
    """Raise ModelError unless `model` has the methods of a `Model`."""
    if isinstance(model, type) or not callable(getattr(model, "new_cache", None)):
        raise ModelError("a model", kind_of(model), "Give one that tk.load or tk.load_exported returned")


class Model(Protocol):
    """A causal language model that every decode strategy can drive, one sequence at a time."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def device(self) -> Device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def embed(self) -> InputEmbedding: ...

    def __call__(self, ids: Tensor, /) -> Tensor:
        """Return the fp32 logits [B, T, vocab] of token ids [B, T] on the device."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the weights, in all formats."""

    def new_cache(self, context: int, kv: str | None = None) -> Cache:
        """Return an empty cache for `context` tokens on the device. `kv` names a quantized format (see `tk.generate`)."""

    def advance(self, x: Tensor, positions: Tensor, cache: Cache, length: int) -> Tensor:
        """Feed embedded tokens `x` [1, T, hidden] and return the hidden states [1, T, hidden].

        `positions` [T] ascend by one and stay on the device. `length` is an upper bound on the number of tokens that the cache
        then holds; it limits how much of the cache is read.
        """

    def logits(self, x: Tensor) -> Tensor:
        """Return the fp32 logits [B, T, vocab] of the hidden states that `advance` returned."""


class CausalLM(Shown, nn.Module):
    """Base class of the toolkit's models. They are built on "meta"; a loader or `init_weights` allocates the weights.

    With a `shard` of several ranks, the model holds only that part of the weights and of its caches, and calls collectives: all
    ranks must call it with the same arguments, in the same order, and get the same results.

    `model(ids)` maps token ids [B, T] on the device to fp32 logits [B, T, vocab], with gradients. Decoding uses `new_cache`,
    `embed`, `advance` and `logits`. `tokenizer` is None until a loader finds one. `unquantized` has the names of matrices that
    a scheme was chosen for but can't hold, by reason.
    """

    config: ModelConfig
    embed: Embedding
    layers: nn.ModuleList
    norm: RMSNorm
    report: Report  # set by `tk.load`
    head: Linear | None  # None if the embedding table is the output head too

    def __init__(self, config: ModelConfig, device: Device, dtype: torch.dtype, shard: Shard = WHOLE) -> None:
        super().__init__()
        self.config, self.device, self.dtype, self.shard = config, device, dtype, shard
        self.vocab = spread(config.vocab_size, shard)  # the tokens whose embeddings and logits this rank computes
        self.vocab_sizes = parts_of(config.vocab_size, shard.ranks)  # how many tokens each rank has
        self.tokenizer: Tokenizer | None = None
        self.unquantized: dict[str, tuple[str, ...]] = {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply `fn` to all weights. Raises ModelError if it moves or converts them, as `to` and `half` do."""
        here = torch.empty(0, dtype=self.dtype, device=self.device.torch)
        there = fn(here)
        if (there.device, there.dtype) != (here.device, here.dtype):
            asked = f"moving or converting a model to {dtype_name(there.dtype)} on {there.device}"
            found = f"it was made for {dtype_name(self.dtype)} on {self.device.name}, as its caches and packed weights are"
            raise ModelError(asked, found, "Load it again, with the device= and dtype= that you want")
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """Put the device first: unpickling opens it before it creates the weights on it."""
        return {"device": self.device, **self.__dict__}

    def init_weights(self, seed: int = 0) -> Self:
        """Draw random weights from `seed`, the same on every device, and return the model."""
        initialize(self, self.device.torch, seed)
        return self

    def new_cache(self, context: int, kv: str | None = None) -> Cache:
        """Return an empty cache for `context` tokens, allocated on the model's device without a copy.

        `kv` is "int8", "k4v8" or "int4" to quantize the keys and values of the layers that keep every position. Raises
        ModelError for other numbers of tokens than 1 and more.
        """
        with self.as_loaded():
            return self.make_cache(check_room(context), kv)

    def make_cache(self, context: int, kv: str | None) -> Cache:
        """Return an empty cache; see `new_cache`."""
        raise NotImplementedError  # each architecture has its own

    def as_loaded(self) -> AbstractContextManager[None]:
        """Return a context in which new tensors have sizes only if the weights do, so that they take no memory either."""
        sizes_only = getattr(getattr(self, "report", None), "sizes_only", False)
        return self.device.sizes_only() if sizes_only else nullcontext()

    def advance(self, x: Tensor, positions: Tensor, cache: Cache, length: int) -> Tensor:
        """Feed embedded tokens `x` [1, T, hidden] and return their hidden states [1, T, hidden].

        `positions` [T], on the device, ascend by one and follow those that were fed before. `length` is an upper bound on the
        number of tokens that the cache then holds: it limits how much of the cache is read. Only the device reads the exact
        positions. Raises ModelError if `x` holds several sequences or the cache is too small.
        """
        check_one_sequence(x)
        return self._layers(x, self.passing(x, cache, self.reaches(positions, cache, length)))

    def logits(self, x: Tensor) -> Tensor:
        """Return the fp32 logits [B, T, vocab] of hidden states [B, T, hidden]."""
        weight = self.embed.weight if self.head is None else self.head.weight
        own = ops.matmul(self.norm.operand(x, weight), weight)
        return ops.all_gather(own, self.vocab_sizes, fp32=True)

    def reaches(self, positions: Tensor, cache: Cache, length: int) -> dict[str, Reach]:
        """Return where tokens at `positions` are written and which slots they attend to, by kind of layer."""
        raise NotImplementedError  # each architecture has its own

    def passing(self, x: Tensor, cache: Cache, reaches: dict[str, Reach]) -> Any:
        """Return the state that all layers share while `x` passes through them. Its type is the architecture's own."""
        raise NotImplementedError  # each architecture has its own

    def run_layer(self, layer: int, residual: Residual, at: Any, *given: Tensor | None) -> Residual:
        """Run one layer on a cache. `at` is the result of `passing`, and `given` the layer's additional input, if any."""
        with in_layer(layer):
            out: Residual = self.layers[layer](residual, at, *given)
        return out

    def enter(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Split embedded tokens [B, T, row] into the residual stream [B, T, hidden] and each layer's additional input, if any.

        The additional inputs are contiguous: [B, T, layer_input_size] each.
        """
        return x, ()

    @cached_property
    def token_bytes(self) -> int:
        """An upper estimate of the memory that the activations of one token take while the model processes a prompt.

        The factors were chosen by comparing plans with the virtual GPU in bf16, fp32 and q4_k_m, for Qwen3 0.6B and 8B, Gemma 4
        E2B, E4B and 31B, and Qwen3.5 27B and 35B-A3B. Not every format was compared for each. One plan was too small: 35B-A3B
        in fp32, by 88 MiB (0.07 %). Unpacked matrices need more: their activation functions are not fused.
        """
        packed = [m.shape[-2] for m in self.layers.modules() if isinstance(m, PackedMatrix) and len(m.shape) == 2]
        widest = max(packed or [p.shape[-2] for p in self.layers.parameters() if p.ndim == 2])
        streams, wide = (6, 1.5) if packed else (8, 2.75)
        inputs = 2 * self.config.num_hidden_layers * self.layer_input_size
        numbers = streams * self.config.hidden_size + int(wide * widest) + 6 * self.routed_width + inputs
        return self.dtype.itemsize * numbers

    @property
    def routed_width(self) -> int:
        """The numbers between the two products of the experts that one token uses; 0 if there are none."""
        return 0

    @property
    def layer_input_size(self) -> int:
        """The width of each layer's additional input; 0 if layers have none."""
        return 0

    def source(self, layer: int) -> int:
        """Return the number of the layer whose cache state a layer reads: its own, unless it reuses keys and values."""
        return layer

    def costs(self, length: int) -> tuple[Cost, ...]:
        """Return the cost of each part of the model for one token that follows `length` others."""
        raise NotImplementedError  # each architecture has its own

    def kernel_shapes(self, context: int = 4096, prompt: int = 512, kv: str | None = None) -> list[tuple[Kernel, Shape]]:
        """Return (kernel, shape) of every operation of a prefill of `prompt` tokens and of one decode step.

        The cache is for `context` tokens in the format `kv`. On CUDA, no kernel of the toolkit is launched. Of sampling, the
        greedy choice and the plain draw are included. The model must be on a GPU, real or
        virtual. Raises ModelError on the CPU, where the reference implementations run, DeviceError if Triton isn't installed,
        and torch.OutOfMemoryError if the cache doesn't fit.
        """
        device = self.device.torch
        if device.type not in GPUS:
            where = f"the model is on {self.device.name!r}, where the operators run in plain PyTorch"
            raise ModelError(
                "the kernels of a model", where, 'Load it with device="cuda", or "virtual:h200" for the kernels of a GPU'
            )
        if importlib.util.find_spec("triton") is None:
            raise DeviceError("the kernels of a model", "Triton isn't installed", "On Linux: pip install triton")
        found = problems_of(self, samples(self), (min(prompt, context - 1), 1), context, kv)
        return list(dict.fromkeys((kernel, shape) for kernel, shape, _ in found))

    def _layers(self, x: Tensor, at: Any, rope: Tensor | None = None) -> Tensor:
        """Run all layers on embedded tokens [B, T, hidden] and return hidden states [B, T, hidden]."""
        residual = Residual(x)
        for layer in range(len(self.layers)):
            residual = self.run_layer(layer, residual, at, rope)
        return residual.sum()
