"""Run any causal language model of transformers under the toolkit's decode strategies.

`wrap` gives a model the interface of the toolkit's own models, so that `tk.generate`, `tk.compare` and `tk.record` work on it:
embeddings in, a static cache on the device, logits out. The model's own `generate` is available as the decode loop
"hf-generate". transformers is imported when `wrap` is called. Over several ranks, transformers divides the model by its own
plan, with DTensor.
"""

from __future__ import annotations

import copy
import inspect
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.core.current_layer import layers_noted
from toolkit.core.distributed import WHOLE, Shard, check_same, local_rank
from toolkit.core.errors import FormatError, ModelError, ToolkitError, kind_of
from toolkit.core.extras import install_command
from toolkit.core.files import at_home
from toolkit.core.units import dtype_name
from toolkit.gpu.device import Device
from toolkit.gpu.opening import open_device
from toolkit.gpu.virtual.device import VirtualGpu
from toolkit.loading.huggingface_cache import HfCache, why_no_static_cache
from toolkit.loading.report import Report
from toolkit.models.cache import Cache, check_room
from toolkit.models.costs import Shown
from toolkit.text import tokenizer as tokenizers

HF_GENERATE = "hf-generate"
POLL_S = 0.1  # between looks at `cancel`
_alone = threading.RLock()  # of a thread in `hf_generate`, which sets a model's generation_config and torch's generator
_OTHERWISE = "Use fewer ranks, or leave out engine for a model that the toolkit has"


@dataclass(frozen=True)
class Config:
    """The config fields that the toolkit needs; `model_type` is transformers' name of the architecture."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    tie_word_embeddings: bool


def wrap(
    model: str | os.PathLike[str] | nn.Module, device: Device | str = "auto", dtype: torch.dtype | None = None,
    shard: Shard = WHOLE,
) -> HfModel:  # fmt: skip
    """Return a model of transformers on `device`, ready for `tk.generate` and `tk.compare`.

    `model` is a local folder (safetensors only; no code of the checkpoint is run, and nothing is downloaded) or an instance of
    a causal language model. An instance is moved to `device`, put into eval mode, and converted in place if `dtype` is given.
    With device "auto" it is not moved. Weights are loaded through host memory. With a `shard` of several ranks, transformers
    divides the model of a folder; all ranks must call `wrap`.

    Raises ToolkitError if transformers is not installed, FormatError for a folder that it cannot load, and ModelError if
    `model` is not a causal language model or is spread over several devices.
    """
    transformers, began = import_transformers(), time.perf_counter()
    if isinstance(model, nn.Module):
        inner, folder = model, _folder_of(model)
    elif shard != WHOLE:
        folder, device = at_home(model), open_device(device)
        inner = _from_folder(transformers, folder, dtype, **_division(transformers, folder, device, shard))
        _check_division(inner, shard)
    else:
        folder = at_home(model)
        inner = _from_folder(transformers, folder, dtype)
    _check(inner)
    here = next(inner.parameters()).device
    target = open_device(str(here) if isinstance(model, nn.Module) and device == "auto" else device)
    try:
        if dtype is not None and shard == WHOLE:
            for parameter in inner.parameters():  # buffers are not converted: rotary frequencies stay fp32
                parameter.data = parameter.data.to(dtype)
        inner.to(target.torch)
    except (ValueError, NotImplementedError) as error:
        do = f'Load it on {target.name} yourself, and pass device="auto"'
        raise ModelError(f"{type(inner).__name__} on {target.name}", f"it cannot be moved ({error!s:.120})", do) from error
    wrapped = HfModel(inner.eval(), target, shard)
    if folder is not None and not isinstance(model, nn.Module):
        source = "" if shard == WHOLE else str(folder)  # without a source, tables have the name of the class
        wrapped.report = _report(inner, source, target, shard, time.perf_counter() - began)
    if folder is not None and folder.is_dir():
        wrapped.tokenizer = tokenizers.from_folder(folder)
        if wrapped.tokenizer is not None and wrapped.config.eos_token_ids:  # an instance may have others than its folder
            wrapped.tokenizer.eos_ids = wrapped.config.eos_token_ids
    return wrapped


def import_transformers() -> Any:
    """Return the module transformers. Raises ToolkitError if it is not installed."""
    try:
        import transformers
    except ImportError as error:
        do = f"Install the extra: {install_command('hf')}"
        raise ToolkitError('engine="hf"', f"transformers cannot be imported ({error!s:.120})", do) from error
    return transformers


def _division(transformers: Any, folder: Path, device: Device, shard: Shard) -> dict[str, Any]:
    """Return the options by which transformers divides a model.

    Raises ToolkitError if it can't, on this device or at all, and RankError if the ranks load different models.
    """
    asked = f'model {folder} with engine="hf" over {shard.ranks} ranks'
    if isinstance(device, VirtualGpu):
        found = "transformers divides weights as DTensors, and these can't exchange values of virtual GPUs"
        raise ModelError(asked, found, 'Use device="cpu" or "cuda", or leave out engine for a model that the toolkit has')
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from transformers.distributed.configuration_utils import DistributedConfig
    except ImportError as error:
        found = f"transformers {transformers.__version__} has no DistributedConfig"
        raise ToolkitError(asked, found, f"Install a newer one: {install_command('hf')}") from error
    config = folder / "config.json"
    text = config.read_text(errors="replace") if config.is_file() else ""
    check_same(shard, f"loading {folder}", config=text, transformers=transformers.__version__)
    os.environ.setdefault("LOCAL_RANK", str(local_rank()))  # transformers reads it
    mesh = init_device_mesh(device.torch.type, (shard.ranks,))
    return {"distributed_config": DistributedConfig(tp_size=shard.ranks), "device_mesh": mesh}


def _check_division(inner: Any, shard: Shard) -> None:
    """Raise ModelError if transformers has divided nothing, or has divided it so that it can't run."""
    asked, config = f"{kind_of(inner)} over {shard.ranks} ranks", inner.config.get_text_config(decoder=True)
    if not any(_mine(parameter) is not parameter for parameter in inner.parameters()):
        raise ModelError(asked, "transformers has no plan to divide it", "Load it on one GPU: leave out tensor_parallel")
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(config, name, None)
        if count and count % shard.ranks:
            raise ModelError(asked, f"transformers can't divide {count} {name}", _OTHERWISE)
    try:
        with torch.no_grad():
            inner(input_ids=torch.zeros(1, 2, dtype=torch.long, device=inner.device), use_cache=False)
    except Exception as error:  # sizes that the plan doesn't divide show in the first step
        raise ModelError(asked, f"the plan of transformers fails ({_first_line(error)})", _OTHERWISE) from error


def _report(inner: nn.Module, source: str, device: Device, shard: Shard, seconds: float) -> Report:
    """Return the record of a load: the weights that this rank holds, by dtype."""
    held: Counter[str] = Counter()
    for parameter in map(_mine, inner.parameters()):
        held[dtype_name(parameter.dtype)] += parameter.nbytes
    return Report(
        source=source, device=device.name, fused=(), bytes_by_kind=dict(held.most_common()), weight_bytes=held.total(),
        allocated_bytes=held.total(), peak_bytes=None, stored_bytes=held.total(), skipped=(), seconds=seconds, shard=shard,
    )  # fmt: skip


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:160]


def _mine(parameter: nn.Parameter) -> nn.Parameter:
    """Return the part of a parameter that this rank holds. A DTensor has the sizes of the whole."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def _from_folder(transformers: Any, folder: Path, dtype: torch.dtype | None, **more: Any) -> nn.Module:
    asked, logging = f'model {folder} with engine="hf"', transformers.utils.logging
    if not os.path.isfile(folder / "config.json"):
        raise FormatError(asked, "not a folder with a config.json", "Pass a local Hugging Face folder, or a loaded model")
    options = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True, "dtype": dtype or "auto", **more}
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        inner: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(str(folder), **options)
    except Exception as error:  # any architecture may raise any exception
        found = f"transformers {transformers.__version__} cannot load it: {type(error).__name__}: {error!s:.300}".rstrip(".")
        do = "Use a folder with a causal language model in safetensors files that needs no custom code"
        do = _OTHERWISE if more and not isinstance(error, OSError) else do  # OSError: a file is missing, or can't be read
        do = "Download or copy it again" if type(error).__name__ == "SafetensorError" else do
        raise FormatError(asked, found, do) from error
    finally:
        if bars:
            logging.enable_progress_bar()
    return inner.requires_grad_(False)


def _folder_of(model: nn.Module) -> Path | None:
    name = getattr(model, "name_or_path", "")
    return Path(name) if isinstance(name, str) and name else None


def _check(inner: nn.Module) -> None:
    """Raise ModelError for models that no decode loop can run."""
    asked = f"wrapping {kind_of(inner)}"
    config, generate = getattr(inner, "config", None), getattr(inner, "generate", None)
    if config is None or not callable(generate) or getattr(config, "is_encoder_decoder", False):
        do = "Pass a model that AutoModelForCausalLM.from_pretrained returns"
        raise ModelError(asked, "not a causal language model of transformers", do)
    places = {str(parameter.device) for parameter in inner.parameters()}
    if len(places) != 1 or "meta" in places or len(set((getattr(inner, "hf_device_map", None) or {"": 0}).values())) > 1:
        do = "Load the whole model onto one device (without device_map)"
        found = f"its weights are on several devices or offloaded: {', '.join(sorted(places)) or 'it has none'}"
        raise ModelError(asked, found, do)


class HfModel(Shown):
    """A causal language model of transformers with the interface of the toolkit's models. `inner` is the model.

    The toolkit's strategies pass it embeddings (with the rows of per-layer embeddings, if the model has them) and a
    StaticCache. Copies inside the model are counted like any others. `loops` has the model's own `generate`.
    """

    report: Report  # of a model that was loaded from a folder
    no_graphs = "code of transformers may wait for the device, or change from step to step"

    def __init__(self, inner: Any, device: Device, shard: Shard = WHOLE) -> None:
        self.inner, self.device, self.shard = inner, device, shard
        self.dtype: torch.dtype = inner.dtype
        self.tokenizer: tokenizers.Tokenizer | None = None
        self.config = _config(inner)
        self._takes = frozenset(inspect.signature(inner.forward).parameters)
        self.embed = Rows([inner.get_input_embeddings(), *_per_layer(inner)])
        self.only_loops = self._undrivable()

    def __getstate__(self) -> dict[str, Any]:
        """Put the device first: unpickling opens it before it creates the weights on it."""
        return {"device": self.device, **self.__dict__}

    @property
    def loops(self) -> dict[str, Callable[..., Generator[tuple[int, int], None, None]]]:
        """The decode loops of the model itself. Not stored, because a bound method would be a reference cycle."""
        return {HF_GENERATE: self.hf_generate}

    def __call__(self, ids: Tensor) -> Tensor:
        """Return fp32 logits [B, T, vocab] for ids [B, T]."""
        with self._noted():
            logits: Tensor = self.inner(input_ids=ids, use_cache=False).logits
        return logits.float()

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.inner.parameters()  # type: ignore[no-any-return]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.inner.named_parameters()  # type: ignore[no-any-return]

    def new_cache(self, context: int, kv: str | None = None) -> HfCache:
        """Return a StaticCache for `context` tokens. Raises ModelError if `kv` is given or if no strategy can run the model."""
        if kv is not None:
            raise ModelError(f"a cache with kv={kv!r}", "the cache of transformers is not quantized", "Leave out kv=")
        if self.only_loops is not None:
            asked = f"decoding {type(self.inner).__name__} with a strategy of the toolkit"
            raise ModelError(asked, self.only_loops, f'Use decode="{HF_GENERATE}", its own loop')
        return HfCache(self.inner.config, check_room(context), self.device.torch)

    def advance(self, x: Tensor, positions: Tensor, cache: Cache, length: int) -> Tensor:
        """Run `x` (from `embed`) at `positions` [T] and return the logits [1, 1, vocab] of the last token."""
        assert isinstance(cache, HfCache)
        cache.check_part(x.shape[1])
        cache.bound(length)  # raises if the cache is too small
        given: dict[str, Any] = {"inputs_embeds": x, "past_key_values": cache.inner, "use_cache": True}
        if len(self.embed.tables) > 1:
            layers = self.config.num_hidden_layers
            given["inputs_embeds"], rest = x.tensor_split([self.config.hidden_size], -1)
            given["per_layer_inputs"] = rest.unflatten(-1, (layers, -1))
        if "position_ids" in self._takes:
            given["position_ids"] = positions[None]
        if "logits_to_keep" in self._takes:
            given["logits_to_keep"] = 1
        with self._noted():
            logits: Tensor = self.inner(**given).logits
        return logits[:, -1:]

    def _noted(self) -> AbstractContextManager[None]:
        """Return a context in which recorders know the layer. Hooks take time in each step, so there are none without one."""
        if self.device.recording is None:
            return nullcontext()
        lists = [module for module in self.inner.get_decoder().children() if isinstance(module, nn.ModuleList)]
        return layers_noted(next((each for each in lists if len(each) == self.config.num_hidden_layers), ()))

    def logits(self, x: Tensor) -> Tensor:
        """Return the result of `advance` as fp32."""
        return x.float()

    @torch.no_grad()
    def hf_generate(
        self, ids: Sequence[int], limit: int, sampling: Any, ends: Collection[int], cancel: threading.Event
    ) -> Generator[tuple[int, int], None, None]:
        """Run `generate` of transformers and yield (token, time in ns at which the host knew it) when it has finished.

        A streamer would add a copy to every step, so tokens are yielded only at the end. A step begins with its forward pass;
        preparing its inputs counts as part of the previous step. Sampling uses torch's seeded generator, so it draws other
        tokens than the toolkit's strategies. The model's own generation_config is ignored. If another thread runs this loop,
        with any model, this one waits for it.
        """
        while not _alone.acquire(timeout=POLL_S):
            if cancel.is_set():
                return
        try:
            tokens, known_ns = self._generate(ids, limit, sampling, ends, cancel)
        finally:
            _alone.release()
        yield from zip(map(int, tokens.tolist()), known_ns, strict=False)

    def _generate(
        self, ids: Sequence[int], limit: int, sampling: Any, ends: Collection[int], cancel: threading.Event
    ) -> tuple[Tensor, list[int]]:
        """Run `generate` of transformers and return the new tokens, and the times at which they were known."""
        watch = _Watch(self.device, cancel)
        config = _generation_config(self.inner, limit, sampling, ends)
        replaced = _replaced(self.inner, "generation_config", config)
        with watch.steps, _seeded(sampling, self.device), replaced, self._noted():
            hook = self.inner.register_forward_pre_hook(watch.forward, with_kwargs=True)
            try:
                prompt = torch.tensor([ids], device="cpu").to(self.device.torch)
                mask = torch.ones_like(prompt)
                whole = self.inner.generate(prompt, attention_mask=mask, generation_config=config)
                tokens = whole[0, len(ids) :]
            except _CancelledError:
                tokens = torch.cat(watch.fed) if watch.fed else torch.empty(0, device="cpu")
            finally:
                hook.remove()
        watch.known_ns.append(self.device.now_ns())
        return tokens, watch.known_ns

    def _undrivable(self) -> str | None:
        """Return why the toolkit's strategies cannot run this model, or None if they can."""
        missing = [name for name in ("inputs_embeds", "past_key_values") if name not in self._takes]
        if missing:
            return f"its forward() has no argument {' and no '.join(missing)}"
        return why_no_static_cache(self.inner.config)


class Rows(nn.Module):
    """Look up several embedding tables and concatenate their rows: the model's table, then its per-layer table."""

    def __init__(self, tables: Sequence[nn.Module]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(tables)

    def forward(self, ids: Tensor) -> Tensor:
        """Return rows [*ids.shape, sum of the widths of the tables]."""
        rows = [table(ids) for table in self.tables]
        return rows[0] if len(rows) == 1 else torch.cat(rows, -1)

    def on_host(self) -> Rows:
        """Return a copy of the tables on the CPU. Raises ModelError if ranks hold parts of them on GPUs."""
        if any(_mine(table) is not table and table.device.type != "cpu" for table in self.parameters()):
            found = "transformers divides the embedding among the GPUs"
            raise ModelError("an embedding on the host", found, 'Use another strategy, such as decode="double-buffered"')
        tensors: list[Tensor] = [*self.parameters(), *self.buffers()]
        there = {
            id(t): nn.Parameter(t.detach().cpu(), requires_grad=False) if isinstance(t, nn.Parameter) else t.cpu()
            for t in tensors
        }
        return copy.deepcopy(self, there)


class _CancelledError(Exception):
    """Raised to leave `generate` between two steps."""


class _Watch:
    """A hook on every forward pass of this thread: marks steps, records when each token was known, and stops on `cancel`."""

    def __init__(self, device: Device, cancel: threading.Event) -> None:
        self.device, self.cancel = device, cancel
        self.steps = ExitStack()
        self.steps.enter_context(device.step(0, "prefill"))
        self.passes, self.thread = 0, threading.get_ident()
        self.known_ns: list[int] = []
        self.fed: list[Tensor] = []  # the input token [1] of each pass after the first

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if threading.get_ident() != self.thread:  # another thread decodes with the same model
            return
        if self.passes:
            self.known_ns.append(self.device.now_ns())
            self.fed.append(kwargs["input_ids"][0, -1:])
            self.steps.close()
        if self.cancel.is_set():
            raise _CancelledError
        if self.passes:
            self.steps.enter_context(self.device.step(self.passes, "decode"))
        self.passes += 1


def _config(inner: Any) -> Config:
    text = inner.config.get_text_config(decoder=True)
    stated = (getattr(config, "eos_token_id", None) for config in (inner.generation_config, inner.config, text))
    ends = next((each for each in stated if each not in (None, [])), None)
    most = getattr(text, "max_position_embeddings", None)
    return Config(
        model_type=str(text.model_type),
        vocab_size=int(text.vocab_size),
        hidden_size=int(text.hidden_size),
        num_hidden_layers=int(text.num_hidden_layers),
        max_position_embeddings=int(most) if most else 1 << 20,  # without position embeddings there is no limit
        eos_token_ids=tuple(ends) if isinstance(ends, list | tuple) else () if ends is None else (int(ends),),
        tie_word_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
    )


def _per_layer(inner: Any) -> list[nn.Module]:
    """Return the table of per-layer inputs, if any. Without its rows, the model would search for the embedded tokens."""
    table = getattr(inner.get_decoder(), "embed_tokens_per_layer", None)
    return [table] if isinstance(table, nn.Module) else []


def _generation_config(inner: Any, limit: int, sampling: Any, ends: Collection[int]) -> Any:
    from transformers import GenerationConfig

    stop = sorted(ends)
    pad = getattr(inner.config.get_text_config(decoder=True), "pad_token_id", None)
    options: dict[str, Any] = {"do_sample": sampling.temperature > 0, "repetition_penalty": sampling.repetition_penalty}
    options["sequence_bias"] = {(i,): float(number) for i, number in sampling.logit_bias.items()} or None
    if sampling.temperature > 0:
        options |= {"temperature": sampling.temperature, "top_k": sampling.top_k or 0, "min_p": sampling.min_p}
        options["top_p"] = 1.0 if sampling.top_p is None else sampling.top_p
    pad = pad if pad is not None else stop[0] if stop else 0
    return GenerationConfig(max_new_tokens=limit, eos_token_id=stop or None, pad_token_id=pad, use_cache=True, **options)


@contextmanager
def _seeded(sampling: Any, device: Device) -> Iterator[None]:
    """Seed torch's generator, and restore its state afterwards."""
    cards = [device.torch] if device.torch.type == "cuda" else []
    with torch.random.fork_rng(cards, enabled=sampling.temperature > 0):
        if sampling.temperature > 0:
            torch.manual_seed(sampling.seed)
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    old = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, old)
