"""Compute the costs of a model: bytes stored, bytes and operations per token, and the tokens/s that a GPU's bandwidth allows.

All costs are pure functions of the shapes of the weights and of the GPU catalogue, so a model on "meta" is enough. At batch
size 1 each weight that a token uses is read once, so bandwidth divided by bytes read is an upper bound of tokens/s.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toolkit.core.errors import ModelError, brief, kind_of
from toolkit.core.numbers import LARGEST, integer
from toolkit.core.units import dtype_name
from toolkit.gpu.catalogue import GpuSpec, find_specs
from toolkit.models.costs import Cost, Shown, named_weights
from toolkit.models.model import Model
from toolkit.weights.packed import PackedMatrix

if TYPE_CHECKING:
    import pandas as pd

CONTEXT = 4096  # default number of tokens before the one whose cost is computed
LENGTHS = (0, 512, 1024, 2048, 4096, 32768, 131072)  # contexts of the tables, besides the model's maximum


@dataclass(frozen=True)
class Holding:
    """The weights of one name, summed over layers: `where` is "mlp.gate_up", `kind` a dtype or a scheme."""

    where: str
    kind: str
    parameters: int
    n_bytes: int


@dataclass(frozen=True)
class Bound:
    """The upper bound of a model's tokens/s on one GPU at batch size 1, and whether the model fits."""

    card: GpuSpec
    needs_bytes: int  # weights and state; no workspace
    memory_s: float  # bytes per token / bandwidth of the datasheet
    reached_s: float  # bytes per token / bandwidth that a streaming kernel reaches
    arithmetic_s: float  # operations per token / peak rate of the datasheet

    @property
    def fits(self) -> bool:
        """Whether weights and state fit into the GPU's memory."""
        return self.needs_bytes <= self.card.memory_bytes

    @property
    def limit(self) -> str:
        """ "bandwidth" or "arithmetic", whichever takes longer."""
        return "bandwidth" if self.memory_s >= self.arithmetic_s else "arithmetic"

    @property
    def tok_per_s(self) -> float:
        """The bound by the datasheet, which no program exceeds."""
        return _per_s(max(self.memory_s, self.arithmetic_s))

    @property
    def reached_tok_per_s(self) -> float:
        """The bound at the bandwidth that a streaming kernel reaches. A very good program comes close to it."""
        return _per_s(max(self.reached_s, self.arithmetic_s))


@dataclass(frozen=True)
class State:
    """KV cache and recurrent state at a context `length`: bytes read per token, bytes stored, and operations per token."""

    length: int
    read_bytes: int
    held_bytes: int
    flops: int


@dataclass(frozen=True, repr=False)
class Costs(Shown):
    """The cost of one token of a model with `context` tokens before it.

    `parts` has one Cost per part and kind, `holdings` the weights by name, and `states` the state at other context lengths.
    `exact` is False for a model that does not describe its parts: each weight then counts as read once, without a state.
    """

    name: str
    place: str  # the device, or "meta": shapes alone
    context: int
    dtype: torch.dtype
    parts: tuple[Cost, ...]
    holdings: tuple[Holding, ...]
    states: tuple[State, ...]
    exact: bool = True

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(part.parameters for part in self.parts)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as stored on the device."""
        return sum(part.weight_bytes for part in self.parts)

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that one token reads."""
        return sum(part.read_bytes for part in self.parts)

    @property
    def state_bytes(self) -> int:
        """Bytes of KV that one token reads, and of recurrent state that it reads and writes."""
        return sum(part.state_bytes for part in self.parts)

    @property
    def token_bytes(self) -> int:
        """Bytes that one token reads: weights and state."""
        return self.read_bytes + self.state_bytes

    @property
    def state_held_bytes(self) -> int:
        """Bytes of the state of `context` tokens."""
        return sum(part.state_held_bytes for part in self.parts)

    @property
    def state_per_token_bytes(self) -> int:
        """Bytes by which the state grows per token."""
        return sum(part.state_per_token_bytes for part in self.parts)

    @property
    def fixed_state_bytes(self) -> int:
        """Bytes of state that do not grow any more at this context: full windows, recurrent states."""
        return self.state_held_bytes - self.context * self.state_per_token_bytes

    @property
    def flops(self) -> int:
        """Floating-point operations per token."""
        return sum(part.flops for part in self.parts)

    @property
    def layers(self) -> int:
        """The number of layers."""
        return 1 + max((number for part in self.parts for number in part.layers), default=-1)

    def bound(self, card: GpuSpec | str) -> Bound:
        """Return the upper bound for `card`, a spec or its key."""
        (card,) = find_specs(card)
        return Bound(
            card=card,
            needs_bytes=self.weight_bytes + self.state_held_bytes,
            memory_s=self.token_bytes / card.bandwidth_bytes_per_s,
            reached_s=self.token_bytes / card.reached_bandwidth_bytes_per_s,
            arithmetic_s=self.flops / (card.fp32_flops if self.dtype == torch.float32 else card.bf16_flops),
        )

    def bounds(self, cards: Iterable[GpuSpec | str] | GpuSpec | str | None = None) -> list[Bound]:
        """Return the bound of each card (a spec or its key; default: the catalogue), the fastest first."""
        return sorted((self.bound(card) for card in find_specs(cards)), key=lambda bound: -bound.reached_tok_per_s)

    def longest_context(self, card: GpuSpec) -> int | None:
        """Return the longest context whose state fits on `card` together with the weights; None if the weights do not fit.

        It is at most 131,072 or the model's maximum. Between two computed lengths the state is interpolated linearly.
        """
        room = card.memory_bytes - self.weight_bytes
        if room < self.states[0].held_bytes:
            return None
        longest = self.states[0].length
        for low, high in zip(self.states, self.states[1:], strict=False):
            if high.held_bytes > room:
                step = (high.held_bytes - low.held_bytes) / (high.length - low.length)
                return low.length + int((room - low.held_bytes) / step)
            longest = high.length
        return longest

    def pattern(self) -> tuple[str, ...]:
        """Return the parts of each layer: ("delta net + experts", ..., "attention (full) + experts")."""
        made: list[list[str]] = [[] for _ in range(self.layers)]
        for part in self.parts:
            if part.part not in ("router", "per-layer inputs") and "norm" not in part.part:
                for number in part.layers:
                    made[number].append(label(part))
        return tuple(" + ".join(dict.fromkeys(names)) for names in made)

    def by_kind(self) -> dict[str, tuple[int, int]]:
        """Return (parameters, bytes) by dtype or scheme, largest first."""
        found: dict[str, tuple[int, int]] = {}
        for held in self.holdings:
            parameters, n_bytes = found.get(held.kind, (0, 0))
            found[held.kind] = parameters + held.parameters, n_bytes + held.n_bytes
        return dict(sorted(found.items(), key=lambda item: -item[1][1]))

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per part: its weights and its cost per token, in bytes and operations."""
        import pandas as pd

        columns = ("parameters", "weight_bytes", "read_bytes", "state_bytes", "state_per_token_bytes", "state_held_bytes")
        rows = [
            {"part": label(p), "layers": len(p.layers)} | {name: getattr(p, name) for name in (*columns, "flops")}
            for p in self.parts
        ]
        return pd.DataFrame(rows).set_index("part")

    def gpus(self, cards: Iterable[GpuSpec | str] | GpuSpec | str | None = None) -> pd.DataFrame:
        """Return one row per card: bounds of tokens/s (datasheet and reached bandwidth), limiting factor, longest context.

        All numbers are modelled. `how` is the source of the card's reached bandwidth.
        """
        import pandas as pd

        columns = [
            "gpu", "tok_per_s_limit", "tok_per_s_reachable", "limited_by", "bandwidth_bytes_per_s",
            "reached_bandwidth_bytes_per_s", "how", "memory_bytes", "needs_bytes", "fits", "longest_context",
        ]  # fmt: skip
        rows = [
            {
                "gpu": bound.card.key, "tok_per_s_limit": bound.tok_per_s, "tok_per_s_reachable": bound.reached_tok_per_s,
                "limited_by": bound.limit, "bandwidth_bytes_per_s": bound.card.bandwidth_bytes_per_s,
                "reached_bandwidth_bytes_per_s": bound.card.reached_bandwidth_bytes_per_s,
                "how": bound.card.source("reached_bandwidth_bytes_per_s").how, "memory_bytes": bound.card.memory_bytes,
                "needs_bytes": bound.needs_bytes, "fits": bound.fits,
                "longest_context": self.longest_context(bound.card) if self.exact else None,
            }
            for bound in self.bounds(cards)
        ]  # fmt: skip
        return pd.DataFrame(rows, columns=columns).set_index("gpu").astype({"longest_context": "Int64"})

    def contexts(self) -> pd.DataFrame:
        """Return one row per context length: bytes of weights and state read per token, operations, bytes of state stored."""
        import pandas as pd

        rows = [
            {
                "context": state.length, "read_bytes": self.read_bytes, "state_bytes": state.read_bytes,
                "state_held_bytes": state.held_bytes, "flops": state.flops,
            }
            for state in self.states
        ]  # fmt: skip
        return pd.DataFrame(rows).set_index("context")


def costs_of(model: Model | nn.Module, context: int | None = None, name: str | None = None) -> Costs:
    """Return the cost of one token of `model` after `context` tokens. The default is that of `tk.costs`.

    The toolkit's models describe their parts. Of any other model (a torch module, or an object with a torch module as `inner`)
    only the weights are known. Raises ModelError if `model` is not a model, or if `context` is not a non-negative integer.
    """
    module = model if isinstance(model, nn.Module) else getattr(model, "inner", None)
    if not isinstance(module, nn.Module):
        raise ModelError(f"costs of {kind_of(model)}", "not a model", "Pass a loaded model, a name or a path")
    longest = _longest(model)
    if context is None:
        context = min(CONTEXT, longest or CONTEXT)
    if (given := integer(context, 0, LARGEST)) is None:
        raise ModelError(f"costs at context={brief(context)}", "not a number of tokens", "Pass an integer from 0 to 2**63 - 1")
    context = given
    own: Any = getattr(model, "costs", None)
    exact = callable(own)
    most = max(min(longest or 0, LENGTHS[-1]), context)
    lengths = sorted({context, most, *(n for n in LENGTHS if n <= most)})
    weighed = {n: _merged(own(n)) for n in lengths} if exact else {context: _guessed(module)}
    source = Path(getattr(getattr(model, "report", None), "source", "")).parts[-2:]  # "demo/qwen3", "folder/file.gguf"
    return Costs(
        name=name or "/".join(source) or (type(module).__module__.rpartition(".")[2] if exact else type(module).__name__),
        place=_place(model, module), context=context, dtype=_dtype(module), parts=weighed[context], holdings=_holdings(module),
        states=tuple(_state(length, parts) for length, parts in weighed.items()), exact=exact,
    )  # fmt: skip


def label(part: Cost) -> str:
    """Return the name of a part with its kind: "attention (sliding)"."""
    return f"{part.part} ({part.kind})" if part.kind else part.part


def runs(pattern: Iterable[str]) -> list[tuple[int, str]]:
    """Count equal neighbors: a, a, b -> (2, a), (1, b)."""
    return [(len(list(group)), name) for name, group in groupby(pattern)]


def period(pattern: tuple[str, ...]) -> tuple[str, ...]:
    """Return the shortest prefix that `pattern` repeats; the last repetition may be incomplete."""
    lengths = (n for n in range(1, len(pattern) + 1) if all(x == pattern[i % n] for i, x in enumerate(pattern)))
    return pattern[: next(lengths, 0)]


def _per_s(seconds: float) -> float:
    return 1.0 / seconds if seconds > 0 else float("inf")


def _state(length: int, parts: tuple[Cost, ...]) -> State:
    read, held = sum(part.state_bytes for part in parts), sum(part.state_held_bytes for part in parts)
    return State(length, read, held, sum(part.flops for part in parts))


def _merged(parts: Iterable[Cost]) -> tuple[Cost, ...]:
    """Merge the costs of equal part and kind, in order of first appearance."""
    found: dict[str, Cost] = {}
    for part in parts:
        old = found.get(label(part))
        found[label(part)] = part if old is None else _sum(old, part)
    return tuple(found.values())


def _sum(a: Cost, b: Cost) -> Cost:
    return Cost(
        part=a.part, kind=a.kind, layers=tuple(sorted({*a.layers, *b.layers})), parameters=a.parameters + b.parameters,
        weight_bytes=a.weight_bytes + b.weight_bytes, read_bytes=a.read_bytes + b.read_bytes,
        state_bytes=a.state_bytes + b.state_bytes, state_per_token_bytes=a.state_per_token_bytes + b.state_per_token_bytes,
        state_held_bytes=a.state_held_bytes + b.state_held_bytes, flops=a.flops + b.flops,
    )  # fmt: skip


_LAYER = re.compile(r".*?\b(\d+)\.(\w+)")
_NUMBERED = re.compile(r"^.*?\b\d+\.|(?<=\.)\d+\.")


def _holdings(model: nn.Module) -> tuple[Holding, ...]:
    """Sum the weights by name over all layers, counting each weight once."""
    seen: set[int] = set()
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for name, weight in named_weights(model):
        if id(weight) in seen:
            continue
        seen.add(id(weight))
        kind = weight.scheme.name if isinstance(weight, PackedMatrix) else dtype_name(weight.dtype)
        where = _where(name)
        parameters, n_bytes = found.get((where, kind), (0, 0))
        found[where, kind] = parameters + weight.numel(), n_bytes + weight.nbytes
    return tuple(Holding(*key, *sums) for key, sums in found.items())


def _where(name: str) -> str:
    """Return the name of a weight without its layer. The fused matrix "qkv.q_k_v" is "qkv"."""
    where = _NUMBERED.sub("", name).removesuffix(".weight").removesuffix(".bias")
    path, _, leaf = where.rpartition(".")
    return path if leaf.replace("_", "") == path.rpartition(".")[2].replace("_", "") else where


def _guessed(model: nn.Module) -> tuple[Cost, ...]:
    """Estimate the costs of a module that does not describe its parts. Embeddings are looked up; all else is read once."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    every = list(named_weights(model))
    uses = Counter(id(weight) for _, weight in every)
    found: list[Cost] = []
    for name, weight in {
        id(weight): (name, weight) for name, weight in reversed(every)
    }.values():  # keeps the first name of a shared weight
        layer = _LAYER.match(name)
        part = layer[2] if layer else name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        looked_up = id(weight) in tables and uses[id(weight)] == 1
        read = weight.nbytes // weight.shape[0] if looked_up else weight.nbytes
        layers = (int(layer[1]),) if layer else ()
        found.append(Cost(part, layers, weight.numel(), weight.nbytes, read, 0, 0, 0, 0 if looked_up else 2 * weight.numel()))
    return _merged(reversed(found))


def _longest(model: Model | nn.Module) -> int | None:
    """Return the longest context of the model, or of the package that it comes from; None if that is unknown."""
    config = getattr(model, "config", None)
    longest = getattr(getattr(config, "text_config", config), "max_position_embeddings", None)
    if hasattr(model, "package"):
        longest = getattr(model, "context", longest)
    return longest if isinstance(longest, int) else None


def _place(model: Model | nn.Module, module: nn.Module) -> str:
    """Return the device of the weights, by the toolkit's name if the model knows it, else by torch's name."""
    first = next(module.parameters(), None)
    if first is not None and first.is_meta:
        return "meta"
    device = getattr(getattr(model, "device", None), "name", None)
    place = str(device or ("nowhere" if first is None else first.device))
    return f"{place}, sizes only" if getattr(getattr(model, "report", None), "sizes_only", False) else place


def _dtype(model: nn.Module) -> torch.dtype:
    """Return the model's dtype if it states one, else the most frequent dtype of its floating-point weights."""
    said = getattr(model, "dtype", None)
    if isinstance(said, torch.dtype):
        return said
    totals: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.dtype.is_floating_point:
            totals[parameter.dtype] = totals.get(parameter.dtype, 0) + parameter.numel()
    return max(totals, key=lambda dtype: totals[dtype], default=torch.float32)
