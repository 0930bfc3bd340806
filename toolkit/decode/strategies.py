"""The decode strategies: `Strategy`, a frozen dataclass, and the presets in `STRATEGIES`.

A strategy only describes a decode step; `loop.py` builds the loop from it. Two strategies therefore differ in nothing but their
fields. A model may also bring loops of its own (`OwnLoop`), which run unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Literal

from toolkit.core.errors import ToolkitError, unknown_name
from toolkit.models.model import Model


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
            memory on a second stream while this step runs, so the host is one step behind.
        capture: The work that is recorded once and replayed: only "none" so far.
        crosses: The copies per decode step, in words.

    Raises ToolkitError for combinations that cannot work.
    """

    name: str
    token: Literal["host", "host-row", "device"]
    position: Literal["host", "array", "device"]
    sampler: Literal["host", "device"]
    readback: Literal["wait", "overlap"]
    crosses: str
    capture: Literal["none"] = "none"

    def __post_init__(self) -> None:
        if self.readback == "overlap" and (self.token != "device" or self.sampler != "device"):
            found = "the host needs the token before the next step, but would read it one step late"
            raise ToolkitError(f"strategy {self.name!r}", found, 'With readback="overlap", token and sampler must be "device"')
        if self.sampler == "host" and self.token == "device":
            found = "the host chooses the token, but the next step expects it on the device"
            raise ToolkitError(f"strategy {self.name!r}", found, 'With sampler="host", token must be "host" or "host-row"')


STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy("host-sampling", "host", "host", "host", "wait", "logits D2H (vocab × 4 B), token and position H2D"),
        Strategy("host-embedding", "host-row", "host", "device", "wait", "token D2H, embedding row and position H2D"),
        Strategy("roundtrip", "host", "host", "device", "wait", "token D2H (8 B), token and position H2D"),
        Strategy("token-on-device", "device", "host", "device", "wait", "token D2H, position H2D"),
        Strategy("position-on-device", "device", "array", "device", "wait", "token D2H, position D2D"),
        Strategy("double-buffered", "device", "device", "device", "overlap", "token D2H of the step before, overlapped"),
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

    A model declares `loops` (name to function), and `only_loops` (a reason) if none of `STRATEGIES` can drive it.
    """
    own: Known = {name: OwnLoop(name, run) for name, run in getattr(model, "loops", {}).items()}
    return own if getattr(model, "only_loops", None) is not None else {**STRATEGIES, **own}


def find_strategy(
    strategy: str | Strategy | OwnLoop, known: Mapping[str, Strategy | OwnLoop] = STRATEGIES
) -> Strategy | OwnLoop:
    """Return the strategy in `known` with this name; a strategy object is returned unchanged. Raises UnknownNameError."""
    if isinstance(strategy, Strategy | OwnLoop):
        return strategy
    if not isinstance(strategy, str) or strategy not in known:
        raise unknown_name("decode strategy", strategy, known)
    return known[strategy]
