"""The decode strategies: `Strategy`, a frozen dataclass, and the presets in `STRATEGIES`.

A strategy only describes a decode step; `loop.py` builds the loop from it. Two strategies therefore differ in nothing but their
fields. A model may also bring loops of its own (`OwnLoop`), which run unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args, get_origin, get_type_hints

from toolkit.core.distributed import WHOLE, Shard
from toolkit.core.errors import DeviceError, ToolkitError, unknown_name
from toolkit.models.model import Model
from toolkit.ops.exchange import links


@dataclass(frozen=True)
class Strategy:
    """How a decode step gets its inputs and returns its token.

    Attributes:
        token: The source of the next input. "host" uploads the token id; "host-row" looks up the embedding row in a table on
            the host and uploads the row; "device" uses the sampled tensor, which stays on the device.
        position: "host" uploads the position; "array" copies it on the device from an array that was uploaded once; "device"
            increments it in place.
        sampler: "host" downloads the logits and samples on the host; "device" samples on the device.
        readback: "wait" blocks until the token has been read; "overlap" reads the token of the previous step into pinned
            memory on a second stream while this step runs, so the host is one step behind (it waits for the first token before
            it launches the next step, so that this token arrives early); with "ring", the device writes tokens to mapped host
            memory, from which the host reads them without a copy.
        capture: "none" launches each kernel of each step. "step" captures the kernels of a step in a graph, which later steps
            launch as a whole; copies between host and device stay outside of it. "loop" launches one graph per text, in
            which the device repeats the step; before that, the first step is launched kernel by kernel.
        crosses: The copies per decode step, in words.

    Raises ToolkitError for combinations that cannot work, and UnknownNameError for another value of a field.
    """

    name: str
    token: Literal["host", "host-row", "device"]
    position: Literal["host", "array", "device"]
    sampler: Literal["host", "device"]
    readback: Literal["wait", "overlap", "ring"]
    crosses: str
    capture: Literal["none", "step", "loop"] = "none"

    def __post_init__(self) -> None:
        for name, choices in _choices().items():
            if getattr(self, name) not in choices:
                raise unknown_name(f"strategy {self.name!r}: {name}", getattr(self, name), choices)
        if self.readback == "overlap" and (self.token != "device" or self.sampler != "device"):
            found = "the host needs the token before the next step, but would read it one step late"
            raise ToolkitError(f"strategy {self.name!r}", found, 'With readback="overlap", token and sampler must be "device"')
        if self.sampler == "host" and self.token == "device":
            found = "the host chooses the token, but the next step expects it on the device"
            raise ToolkitError(f"strategy {self.name!r}", found, 'With sampler="host", token must be "host" or "host-row"')
        if (self.readback == "ring") != (self.capture == "loop"):
            found = f"readback={self.readback!r} with capture={self.capture!r}"
            raise ToolkitError(f"strategy {self.name!r}", found, 'Use readback="ring" and capture="loop" together')
        if self.capture == "loop" and {self.token, self.position, self.sampler} != {"device"}:
            found = "the device repeats the step without the host"
            raise ToolkitError(
                f"strategy {self.name!r}", found, 'With capture="loop", token, position and sampler must be "device"'
            )


@cache
def _choices() -> dict[str, tuple[str, ...]]:
    """Return the values that each field of a strategy may have, of those whose type is a Literal."""
    return {name: get_args(kind) for name, kind in get_type_hints(Strategy).items() if get_origin(kind) is Literal}


STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy("host-sampling", "host", "host", "host", "wait", "logits D2H (vocab × 4 B), token and position H2D"),
        Strategy("host-embedding", "host-row", "host", "device", "wait", "token D2H, embedding row and position H2D"),
        Strategy("roundtrip", "host", "host", "device", "wait", "token D2H (8 B), token and position H2D"),
        Strategy("token-on-device", "device", "host", "device", "wait", "token D2H, position H2D"),
        Strategy("position-on-device", "device", "array", "device", "wait", "token D2H, position D2D"),
        Strategy("double-buffered", "device", "device", "device", "overlap", "token D2H of the step before, overlapped"),
        Strategy("cuda-graph", "device", "device", "device", "overlap", "as double-buffered, a graph launch per step", "step"),
        Strategy("whole-loop", "device", "device", "device", "ring", "nothing; one graph launch per text", "loop"),
    )
}


@dataclass(frozen=True)
class OwnLoop:
    """A decode loop that a model brings with it.

    `run(prompt ids, limit, sampling, end ids, cancel)` yields (token id, time in ns at which the host knew it).
    """

    name: str
    run: Callable[..., Generator[tuple[int, int], None, None]]


Known = dict[str, Strategy | OwnLoop]


def strategies_of(model: Model) -> Known:
    """Return the strategies that can decode `model`, by name: those of `STRATEGIES`, and the model's own loops.

    A model declares `loops` (name to function), `only_loops` (a reason) if none of `STRATEGIES` can drive it, and `no_graphs`
    (a reason) if its steps can't be captured.
    """
    own: Known = {name: OwnLoop(name, run) for name, run in getattr(model, "loops", {}).items()}
    if getattr(model, "only_loops", None) is not None:
        return own
    captured = _why_not_captured(model) is None
    return {**{name: each for name, each in STRATEGIES.items() if captured or each.capture == "none"}, **own}


def check_capture(model: Model, strategy: Strategy) -> None:
    """Raise DeviceError if `strategy` captures graphs, and the device or the model doesn't support that."""
    why = None if strategy.capture == "none" else _why_not_captured(model)
    do = 'Use decode="double-buffered", or fallback=True to go on without graphs'
    if why is None and strategy.capture == "loop":
        why, do = _why_not_repeated(model), 'Use decode="cuda-graph", or fallback=True to go on without graphs'
    if why is not None:
        raise DeviceError(f"decoding with {strategy.name!r}", why, do)


def _why_not_captured(model: Model) -> str | None:
    if not model.device.graphs:
        return f"{model.device.name} has no graphs"
    return getattr(model, "no_graphs", None)


def _why_not_repeated(model: Model) -> str | None:
    """Return why the GPU can't repeat a captured step of the model."""
    shard: Shard = getattr(model, "shard", WHOLE)
    why = "" if shard == WHOLE or model.device.torch.type != "cuda" else links(model.device.torch).why_not
    return f"the ranks communicate by NCCL, which the GPU can't repeat by itself, because {why}" if why else None


def find_strategy(
    strategy: str | Strategy | OwnLoop, known: Mapping[str, Strategy | OwnLoop] = STRATEGIES
) -> Strategy | OwnLoop:
    """Return the strategy in `known` with this name; a strategy object is returned unchanged. Raises UnknownNameError."""
    if isinstance(strategy, Strategy | OwnLoop):
        return strategy
    if not isinstance(strategy, str) or strategy not in known:
        raise unknown_name("decode strategy", strategy, known)
    return known[strategy]
