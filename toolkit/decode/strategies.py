"""The decode strategies: five answers each, and the names of the combinations worth having.

A strategy is data. Nothing here runs; `loop.py` puts a loop together from the answers, so that two strategies differ in
what they say here and in nothing else. A model may bring loops of its own, which are run as they are: `OwnLoop`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Literal

from toolkit.core.errors import ToolkitError, unknown_name
from toolkit.models.model import Model


@dataclass(frozen=True)
class Strategy:
    """How one decode step gets its inputs and gives its token away.

    token     where the next input comes from: "host" uploads the token id; "host-row" uploads the token's embedding row,
              looked up in a table that stays on the host; "device" takes the sampled tensor itself, which never leaves
    position  "host" uploads it; "array" copies it on the device from an array uploaded once into a fixed slot; "device"
              counts it up in place
    sampler   "host" downloads the logits and chooses there; "device" chooses there
    readback  "wait" reads the token as soon as it is chosen and blocks until it is; "overlap" reads the token of the step
              before into page-locked memory on a second stream while this step runs, so the host is one step behind
    capture   what is recorded ahead and replayed: "none" so far
    crosses   in words, what crosses per decode step
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
            found = "the host needs the token before the next step, and would know it one step later"
            raise ToolkitError(f"strategy {self.name!r}", found, 'With readback="overlap", token and sampler must be "device"')
        if self.sampler == "host" and self.token == "device":
            found = "the token is chosen on the host, and is to be on the device already"
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
    """A decode loop that a model brings with it: `run(prompt ids, limit, sampling, ends, cancel)` gives (token, known ns)."""

    name: str
    run: Callable[..., Generator[tuple[int, int], None, None]]


Known = dict[str, Strategy | OwnLoop]


def strategies_of(model: Model) -> Known:
    """What `model` can be decoded with, by name: all strategies, unless none can drive it, and loops of its own.

    A model says so by `loops` (name to function) and `only_loops` (why no strategy can drive it, None where they can).
    """
    own: Known = {name: OwnLoop(name, run) for name, run in getattr(model, "loops", {}).items()}
    return own if getattr(model, "only_loops", None) is not None else {**STRATEGIES, **own}


def find_strategy(
    strategy: str | Strategy | OwnLoop, known: Mapping[str, Strategy | OwnLoop] = STRATEGIES
) -> Strategy | OwnLoop:
    """The one of `known` called so; one that is given is returned as it is. UnknownNameError names the nearest."""
    if isinstance(strategy, Strategy | OwnLoop):
        return strategy
    if not isinstance(strategy, str) or strategy not in known:
        raise unknown_name("decode strategy", strategy, known)
    return known[strategy]
