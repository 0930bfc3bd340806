"""The sizes of a model, or of the part that a rank holds, from which plans are computed. They follow from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from toolkit.decode.prefix import most_positions
from toolkit.gpu.catalogue import GpuSpec
from toolkit.gpu.virtual.allocator.blocks import Blocks
from toolkit.models import chunks
from toolkit.models.cache import Recurrent, Ring
from toolkit.models.cache_codes import CodedKeysValues
from toolkit.models.model import CausalLM
from toolkit.ops.codes import Codebook, dequantized_bytes
from toolkit.ops.products import DECODED
from toolkit.weights.packed import CHUNK_WEIGHTS, PackedMatrix

SLOTS = 2  # size of the small cache from which the sizes of larger ones are computed; those of packages have more


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model, or of a rank's part of it, from which a plan is computed, in bytes on a device."""

    weights: int
    states: tuple[tuple[int, int | None], ...]  # per tensor of a cache: bytes per slot, maximum of slots (None: the context)
    fixed: tuple[int, ...]  # bytes of each tensor whose size does not depend on the context
    table: int  # the embedding table, unpacked
    largest: int  # the largest packed matrix, unpacked; 0 if none is packed
    token_bytes: int  # the activations of one token
    heads: int  # query heads of a layer
    coded: int  # numbers in the keys of one token, in the widest layer with a quantized cache; 0 without such a cache
    queries: int  # numbers in the queries of one token there
    dtype: torch.dtype
    unpacked: tuple[int, int]  # numbers of a packed matrix that a product holds in plain at once: in layers, in the head
    vocab: int
    positions: int  # maximum context of the model
    fewest: int  # minimum slots of a cache; more than 2 for a package
    most_tokens: int  # maximum that are processed at once; a package was compiled for a number

    def state_bytes(self, context: int) -> int:
        """Return the bytes of a cache for `context` tokens: keys, values, recurrent states, rotary tables, slot indices."""
        context = max(context, self.fewest)
        growing = (each * min(context, slots or context) for each, slots in self.states)
        return allocated_bytes([*growing, *self.fixed])

    @property
    def logits_bytes(self) -> int:
        """The bytes of one token's logits, in fp32, and of the copies of them that sampling makes. Each rank has all logits."""
        return 4 * 3 * self.vocab

    def activation_bytes(self, tokens: int) -> int:
        """Return the bytes of activations for `tokens` processed at once, and of the logits of one token."""
        return tokens * self.token_bytes + self.logits_bytes

    def attention_bytes(self, tokens: int, context: int, on_cpu: bool) -> int:
        """Return the bytes of temporary tensors that grow with the context while `tokens` attend to it.

        Prompts dequantize the keys and values of one layer. On the CPU, single tokens do so as well, and the scores of all
        heads are held in fp32, up to three times at once.
        """
        scores = 3 * 4 * self.heads * tokens * context if on_cpu else 0
        if tokens == 1 and not on_cpu:
            return scores
        return scores + dequantized_bytes(tokens, context, self.queries, self.coded, self.dtype.itemsize)

    def plain_bytes(self, tokens: int, on_cpu: bool) -> int:
        """Return the bytes of the part of a packed matrix that a product holds in plain while `tokens` are processed.

        On a GPU, kernels multiply packed matrices directly, except by more than `DECODED` tokens in fp16 or fp32.
        """
        if not on_cpu and (tokens <= DECODED or self.dtype == torch.bfloat16):
            return 0
        values = max(self.unpacked) if on_cpu else self.unpacked[0]
        return values * (4 + (self.dtype.itemsize if self.dtype != torch.float32 else 1))  # in fp32, and rounded or the codes

    def chunk(self, card: GpuSpec | None) -> int:
        """Return the number of prompt tokens that the model processes at once on `card`, or on the CPU if it is None."""
        found = chunks.LEAST if card is None else chunks.chunk_for(self.token_bytes, card.memory_bytes)
        return min(found, self.most_tokens)


def sizes_of(model: CausalLM, kv: str | None = None) -> Sizes:
    """Return the sizes of a model, which may be on "meta"; `kv` as in `tk.generate`. Allocates a small cache."""
    plain = model.dtype.itemsize
    packed = [m for m in model.modules() if isinstance(m, PackedMatrix)]
    config: Any = model.config
    cache = model.new_cache(SLOTS, kv)
    slots = len(cache.slots)
    states: list[tuple[int, int | None]] = [(cache.slots.itemsize, None)]
    states += [(table[0].nbytes, None) for table in cache.ropes.values()]
    fixed: list[int] = []
    book: Codebook | None = None  # all layers share one
    heads, coded, queries = -(-config.num_attention_heads // model.shard.ranks), 0, 0
    for state in cache.states:
        if isinstance(state, CodedKeysValues):
            coded, queries = max(coded, state.kv_heads * state.head_dim), max(queries, heads * state.head_dim)
            book = state.book
        for tensor in () if state is None else state.tensors():
            if isinstance(state, Recurrent):
                fixed.append(tensor.nbytes)
            else:
                window = config.sliding_window if isinstance(state, Ring) else None
                states.append((tensor.nbytes // (state.size if isinstance(state, Ring) else slots), window))
    fixed += [table.nbytes for table in (book.tensors() if book is not None else ())]
    cache.free()
    return Sizes(
        weights=allocated_bytes([p.nbytes for p in model.parameters()]), states=tuple(states), fixed=tuple(fixed),
        table=model.vocab.held * config.hidden_size * plain,
        largest=max((m.shape[-2] * m.shape[-1] * plain for m in packed), default=0), token_bytes=model.token_bytes,
        heads=heads, coded=coded, queries=queries, dtype=model.dtype,
        unpacked=(most_unpacked(model.layers), most_unpacked(model)),
        vocab=config.vocab_size, positions=most_positions(model), fewest=slots,
        most_tokens=getattr(model, "chunk", chunks.MOST),
    )  # fmt: skip


def sizes_by_rank(models: Sequence[CausalLM], kv: str | None = None) -> tuple[Sizes, ...]:
    """Return the sizes of each rank's model. Ranks with equal parts have the same model, which is looked at once."""
    found = {id(model): sizes_of(model, kv) for model in {id(model): model for model in models}.values()}
    return tuple(found[id(model)] for model in models)


def most_unpacked(module: nn.Module) -> int:
    """Return how many numbers of a packed matrix, or stack of them, the products of `module` hold in plain at once."""
    found = [0]
    for matrix in (one for one in module.modules() if isinstance(one, PackedMatrix)):
        unit = math.prod(matrix.shape[1:])  # a row, or a matrix of the stack
        found.append(min(matrix.shape[0], max(1, CHUNK_WEIGHTS // unit)) * unit)
    return max(found)


def allocated_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes that CUDA's caching allocator allocates for tensors of these sizes, by its own rules."""
    blocks = Blocks(1 << 60)
    taken = [blocks.take(size, 0) for size in sizes if size]
    return sum(block.size for block in taken if block is not None)
