"""What a model costs: bytes it holds, bytes and operations a token, and the tokens a second that a GPU's bandwidth allows.

Pure functions of a model's weights (values aren't looked at, so a model on "meta" does) and of the GPU catalogue. At
batch 1 every weight that a token uses is read once for it, so bandwidth / bytes read is a limit that no program passes.
It knows no path, no loader and no front end.
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

from toolkit.core.display import render
from toolkit.core.errors import ModelError
from toolkit.gpu.catalogue import CATALOGUE, GpuSpec
from toolkit.models.costs import Cost, named_weights
from toolkit.weights.packed import PackedMatrix

if TYPE_CHECKING:
    import pandas as pd

CONTEXT = 4096  # tokens before the one that is counted, unless asked otherwise
BOUND = "an upper limit: the GPU's bandwidth / the bytes that a token reads"
LENGTHS = (0, 512, 1024, 2048, 4096, 32768, 131072)  # at which a state is weighed, and at the longest a model is made for


@dataclass(frozen=True)
class Holding:
    """What a model holds under one name, its layers together: `where` is "mlp.gate_up", `kind` a dtype or a scheme."""

    where: str
    kind: str
    parameters: int
    n_bytes: int


@dataclass(frozen=True)
class Bound:
    """The most tokens a second that one GPU can make of a model at batch 1, and whether the model fits."""

    card: GpuSpec
    needs_bytes: int  # weights and state; no workspace
    memory_s: float  # a token's bytes at the datasheet's bandwidth
    reached_s: float  # ... at the bandwidth that a streaming kernel reaches
    arithmetic_s: float  # a token's operations at the datasheet's rate

    @property
    def fits(self) -> bool:
        return self.needs_bytes <= self.card.memory_bytes

    @property
    def limit(self) -> str:
        """ "bandwidth" or "arithmetic": which of the two takes longer."""
        return "bandwidth" if self.memory_s >= self.arithmetic_s else "arithmetic"

    @property
    def tok_per_s(self) -> float:
        """By the datasheet: nothing is faster."""
        return _per_s(max(self.memory_s, self.arithmetic_s))

    @property
    def reached_tok_per_s(self) -> float:
        """At the bandwidth that a streaming kernel reaches: what a very good program can come near to."""
        return _per_s(max(self.reached_s, self.arithmetic_s))


@dataclass(frozen=True)
class State:
    """KV and recurrent state at a `length`: what a token reads of it, what memory it takes, and a token's operations."""

    length: int
    read_bytes: int
    held_bytes: int
    flops: int


@dataclass(frozen=True, repr=False)
class Costs:
    """What one token costs a model when `context` tokens came before it. Frozen facts; every table is a view of them.

    `parts` has one Cost for each part and kind, `holdings` what is held under which name, `states` what a longer or a
    shorter context changes. `exact` is False for a model whose parts aren't known: then every weight is taken to be
    read once, and the state is unknown.
    """

    name: str
    place: str  # the device, or "meta": shapes alone
    context: int
    dtype: torch.dtype
    parts: tuple[Cost, ...]
    holdings: tuple[Holding, ...]
    states: tuple[State, ...]
    exact: bool = True

    def __repr__(self) -> str:
        return str(render("text", self))

    def _repr_html_(self) -> str:
        return str(render("html", self))

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts)

    @property
    def weight_bytes(self) -> int:
        """All weights, as they are held."""
        return sum(part.weight_bytes for part in self.parts)

    @property
    def read_bytes(self) -> int:
        """Weights that one token reads."""
        return sum(part.read_bytes for part in self.parts)

    @property
    def state_bytes(self) -> int:
        """KV that one token reads, and recurrent state that it reads and writes back."""
        return sum(part.state_bytes for part in self.parts)

    @property
    def token_bytes(self) -> int:
        """All that one token reads."""
        return self.read_bytes + self.state_bytes

    @property
    def state_held_bytes(self) -> int:
        """Memory that the state of `context` tokens takes."""
        return sum(part.state_held_bytes for part in self.parts)

    @property
    def state_per_token_bytes(self) -> int:
        """By how much the state grows with one more token."""
        return sum(part.state_per_token_bytes for part in self.parts)

    @property
    def fixed_state_bytes(self) -> int:
        """State that grows no more at this context: full windows, recurrent states."""
        return self.state_held_bytes - self.context * self.state_per_token_bytes

    @property
    def flops(self) -> int:
        return sum(part.flops for part in self.parts)

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return 1 + max((number for part in self.parts for number in part.layers), default=-1)

    def bound(self, card: GpuSpec) -> Bound:
        """What `card` could do at most."""
        return Bound(
            card=card,
            needs_bytes=self.weight_bytes + self.state_held_bytes,
            memory_s=self.token_bytes / card.bandwidth_bytes_per_s,
            reached_s=self.token_bytes / card.reached_bandwidth_bytes_per_s,
            arithmetic_s=self.flops / (card.fp32_flops if self.dtype == torch.float32 else card.bf16_flops),
        )

    def bounds(self, cards: Iterable[GpuSpec] | None = None) -> list[Bound]:
        """Of every card (the catalogue's, unless given), the fastest first."""
        chosen = CATALOGUE.values() if cards is None else cards
        return sorted((self.bound(card) for card in chosen), key=lambda bound: -bound.reached_tok_per_s)

    def longest_context(self, card: GpuSpec) -> int | None:
        """The longest context whose state fits beside the weights; None where not even the weights fit.

        At most 128K, or as long as the model is made for. Between two weighed lengths the state is taken to grow evenly.
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
        """What each layer is made of: ("delta net + experts", ..., "attention (full) + experts")."""
        made: list[list[str]] = [[] for _ in range(self.layers)]
        for part in self.parts:
            if part.part not in ("router", "per-layer inputs") and "norm" not in part.part:
                for number in part.layers:
                    made[number].append(label(part))
        return tuple(" + ".join(dict.fromkeys(names)) for names in made)

    def by_kind(self) -> dict[str, tuple[int, int]]:
        """(parameters, bytes) by dtype or scheme, the most bytes first."""
        found: dict[str, tuple[int, int]] = {}
        for held in self.holdings:
            parameters, n_bytes = found.get(held.kind, (0, 0))
            found[held.kind] = parameters + held.parameters, n_bytes + held.n_bytes
        return dict(sorted(found.items(), key=lambda item: -item[1][1]))

    def to_pandas(self) -> pd.DataFrame:
        """A row a part: what it holds, and what a token costs it. Bytes and operations, not scaled."""
        import pandas as pd

        columns = ("parameters", "weight_bytes", "read_bytes", "state_bytes", "state_per_token_bytes", "state_held_bytes")
        rows = [
            {"part": label(p), "layers": len(p.layers)} | {name: getattr(p, name) for name in (*columns, "flops")}
            for p in self.parts
        ]
        return pd.DataFrame(rows).set_index("part")

    def gpus(self, cards: Iterable[GpuSpec] | None = None) -> pd.DataFrame:
        """A row a card: the most tokens a second by its datasheet and at the bandwidth it reaches, what limits, what fits.

        Modelled, all of it; `how` says how each card's reached bandwidth is known.
        """
        import pandas as pd

        rows = [
            {
                "gpu": bound.card.key,
                "tok_per_s_limit": bound.tok_per_s,
                "tok_per_s_reachable": bound.reached_tok_per_s,
                "limited_by": bound.limit,
                "bandwidth_bytes_per_s": bound.card.bandwidth_bytes_per_s,
                "reached_bandwidth_bytes_per_s": bound.card.reached_bandwidth_bytes_per_s,
                "how": bound.card.source("reached_bandwidth_bytes_per_s").how,
                "memory_bytes": bound.card.memory_bytes,
                "needs_bytes": bound.needs_bytes,
                "fits": bound.fits,
                "longest_context": self.longest_context(bound.card) if self.exact else None,
            }
            for bound in self.bounds(cards)
        ]
        return pd.DataFrame(rows).set_index("gpu").astype({"longest_context": "Int64"})

    def contexts(self) -> pd.DataFrame:
        """A row a context length: weights and state that a token reads there, operations, memory of the state."""
        import pandas as pd

        rows = [
            {
                "context": state.length,
                "read_bytes": self.read_bytes,
                "state_bytes": state.read_bytes,
                "state_held_bytes": state.held_bytes,
                "flops": state.flops,
            }
            for state in self.states
        ]
        return pd.DataFrame(rows).set_index("context")


def costs_of(model: Any, context: int | None = None, name: str | None = None) -> Costs:
    """What one token costs `model` after `context` tokens (4,096, or as many as it is made for); looks at no value.

    A model of ours says what its parts are. Of any other (a torch module, or one that wraps it as `inner`) only what it
    holds is known. Raises ModelError for what is no model, and for a context below 0.
    """
    module = model if isinstance(model, nn.Module) else getattr(model, "inner", None)
    if not isinstance(module, nn.Module):
        raise ModelError(f"costs of a {type(model).__name__}", "not a model", "Give a loaded model, a name or a path")
    longest = _longest(model)
    if context is None:
        context = min(CONTEXT, longest or CONTEXT)
    if isinstance(context, bool) or not isinstance(context, int) or context < 0:
        raise ModelError(f"costs at context={context!r:.60}", "not a number of tokens", "Give a whole number from 0 on")
    own: Any = getattr(model, "costs", None)
    exact = callable(own)
    most = max(min(longest or 0, LENGTHS[-1]), context)
    lengths = sorted({context, most, *(n for n in LENGTHS if n <= most)})
    weighed = {n: _merged(own(n)) for n in lengths} if exact else {context: _guessed(module)}
    source = Path(getattr(getattr(model, "report", None), "source", "")).parts[-2:]  # "demo/qwen3", "folder/file.gguf"
    return Costs(
        name=name or "/".join(source) or (type(model).__module__.rpartition(".")[2] if exact else type(module).__name__),
        place=_place(model, module),
        context=context,
        dtype=_dtype(module),
        parts=weighed[context],
        holdings=_holdings(module),
        states=tuple(_state(length, parts) for length, parts in weighed.items()),
        exact=exact,
    )


def label(part: Cost) -> str:
    """The name of a part, with its kind: "attention (sliding)"."""
    return f"{part.part} ({part.kind})" if part.kind else part.part


def runs(pattern: Iterable[str]) -> list[tuple[int, str]]:
    """Neighbours that are alike, counted: a, a, b -> (2, a), (1, b)."""
    return [(len(list(group)), name) for name, group in groupby(pattern)]


def period(pattern: tuple[str, ...]) -> tuple[str, ...]:
    """The shortest beginning of `pattern` that it repeats, whole or cut off at the end."""
    lengths = (n for n in range(1, len(pattern) + 1) if all(x == pattern[i % n] for i, x in enumerate(pattern)))
    return pattern[: next(lengths, 0)]


def _per_s(seconds: float) -> float:
    return 1.0 / seconds if seconds > 0 else float("inf")


def _state(length: int, parts: tuple[Cost, ...]) -> State:
    read, held = sum(part.state_bytes for part in parts), sum(part.state_held_bytes for part in parts)
    return State(length, read, held, sum(part.flops for part in parts))


def _merged(parts: Iterable[Cost]) -> tuple[Cost, ...]:
    """The costs of the same part and kind as one, in the order in which they come first."""
    found: dict[str, Cost] = {}
    for part in parts:
        old = found.get(label(part))
        found[label(part)] = part if old is None else _sum(old, part)
    return tuple(found.values())


def _sum(a: Cost, b: Cost) -> Cost:
    return Cost(
        part=a.part,
        kind=a.kind,
        layers=tuple(sorted({*a.layers, *b.layers})),
        parameters=a.parameters + b.parameters,
        weight_bytes=a.weight_bytes + b.weight_bytes,
        read_bytes=a.read_bytes + b.read_bytes,
        state_bytes=a.state_bytes + b.state_bytes,
        state_per_token_bytes=a.state_per_token_bytes + b.state_per_token_bytes,
        state_held_bytes=a.state_held_bytes + b.state_held_bytes,
        flops=a.flops + b.flops,
    )


_LAYER = re.compile(r".*?\b(\d+)\.(\w+)")
_NUMBERED = re.compile(r"^.*?\b\d+\.|(?<=\.)\d+\.")


def _holdings(model: nn.Module) -> tuple[Holding, ...]:
    """What is held under which name, layers together, each weight once."""
    seen: set[int] = set()
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for name, weight in named_weights(model):
        if id(weight) in seen:
            continue
        seen.add(id(weight))
        kind = weight.scheme.name if isinstance(weight, PackedMatrix) else str(weight.dtype).removeprefix("torch.")
        where = _where(name)
        parameters, n_bytes = found.get((where, kind), (0, 0))
        found[where, kind] = parameters + weight.numel(), n_bytes + weight.nbytes
    return tuple(Holding(*key, *sums) for key, sums in found.items())


def _where(name: str) -> str:
    """The name of a weight without its layer; "qkv.q_k_v", the whole of several matrices, is "qkv"."""
    where = _NUMBERED.sub("", name).removesuffix(".weight").removesuffix(".bias")
    path, _, leaf = where.rpartition(".")
    return path if leaf.replace("_", "") == path.rpartition(".")[2].replace("_", "") else where


def _guessed(model: nn.Module) -> tuple[Cost, ...]:
    """The parts of a module that nobody described, by name: tables are looked up in, everything else is read once."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    every = list(named_weights(model))
    uses = Counter(id(weight) for _, weight in every)
    found: list[Cost] = []
    for name, weight in {id(weight): (name, weight) for name, weight in reversed(every)}.values():  # by its first name
        layer = _LAYER.match(name)
        part = layer[2] if layer else name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        looked_up = id(weight) in tables and uses[id(weight)] == 1
        read = weight.nbytes // weight.shape[0] if looked_up else weight.nbytes
        layers = (int(layer[1]),) if layer else ()
        found.append(Cost(part, layers, weight.numel(), weight.nbytes, read, 0, 0, 0, 0 if looked_up else 2 * weight.numel()))
    return _merged(reversed(found))


def _longest(model: Any) -> int | None:
    config = getattr(model, "config", None)
    longest = getattr(getattr(config, "text_config", config), "max_position_embeddings", None)
    return longest if isinstance(longest, int) else None


def _place(model: Any, module: nn.Module) -> str:
    """Where the weights are: the device's name where the model knows it, else torch's."""
    first = next(module.parameters(), None)
    if first is not None and first.is_meta:
        return "meta"
    device = getattr(getattr(model, "device", None), "name", None)
    place = str(device or ("nowhere" if first is None else first.device))
    return f"{place}, sizes only" if getattr(getattr(model, "report", None), "sizes_only", False) else place


def _dtype(model: nn.Module) -> torch.dtype:
    """What the model computes in: as it says, else the dtype of most of its floating-point weights."""
    said = getattr(model, "dtype", None)
    if isinstance(said, torch.dtype):
        return said
    totals: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.dtype.is_floating_point:
            totals[parameter.dtype] = totals.get(parameter.dtype, 0) + parameter.numel()
    return max(totals, key=lambda dtype: totals[dtype], default=torch.float32)
