"""The data of a recording on CUDA: the host's notes (`Session`), the profiler's events, and the clock that relates both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from toolkit.core.distributed import WHOLE, Shard
from toolkit.core.errors import RecorderError
from toolkit.gpu.line_log import LineLog

ANCHOR_CALL = "cudaDeviceSynchronize"
CUPTI_ADVICE = "Run outside of nsys, ncu and other profilers, and check that CUPTI is installed and permitted"


class Anchor(NamedTuple):
    """A runtime call that the host timed: the times before and after it."""

    before_ns: int
    after_ns: int


class Range(NamedTuple):
    """A decode step on the host's clock."""

    start_ns: int
    end_ns: int
    step: int
    name: str


class Captured(NamedTuple):
    """When the host captured a graph."""

    began_ns: int
    ended_ns: int


class LoopRun(NamedTuple):
    """A launch of a loop: when the host launched it, when the GPU published each token, and the number of its first step.

    `launched_ns` is on the host's clock, `token_ns` on the GPU's own.
    """

    launched_ns: int
    token_ns: NDArray[np.int64]
    first: int


class Announced(NamedTuple):
    """A collective that the toolkit launches next, or captures: the host's time, and its columns of a trace."""

    at_ns: int
    operation: str
    bytes: int
    ranks: int
    algorithm: str


@dataclass
class Session:
    """The data that a recording collected on the host. Times are those of `time.perf_counter_ns`."""

    index: int  # of the GPU
    log: LineLog | None
    cell: int = -1
    began_ns: int = 0
    ended_ns: int = 0
    anchors: list[Anchor] = field(default_factory=list)  # half of them before `began_ns`, half after `ended_ns`
    ranges: list[Range] = field(default_factory=list)
    captures: dict[int, Captured] = field(default_factory=dict)  # by the number of the graph
    launches: list[tuple[int, int]] = field(default_factory=list)  # of graphs: the time before the call, the graph's number
    loops: list[LoopRun] = field(default_factory=list)
    announced: list[Announced] = field(default_factory=list)
    shard: Shard = WHOLE  # of this process


class Event(NamedTuple):
    """An event of the profiler. Times are in ns on the profiler's clock."""

    name: str
    on_device: bool
    gpu: int  # device index
    resource: int  # stream of a device event, thread of a call
    start_ns: int
    dur_ns: int
    correlation: int
    detail: str  # metadata: JSON without the braces
    bytes: int  # of an allocation; negative for a free
    annotation: bool  # a range of record_function


class Row(NamedTuple):
    """A row of the trace, with times still on the profiler's clock."""

    kind: str
    start_ns: int
    dur_ns: int
    bytes: int
    stream: int  # as CUPTI numbers it
    pinned: int
    name: str | None
    thread: int  # the host thread that caused the event
    cause_ns: int  # the time of the call that caused it
    link: int = 0  # correlation with that call
    detail: str = ""  # as in `Event`


class HostClock:
    """Converts the profiler's times to the host's clock.

    Each anchor brackets one runtime call: before <= start and end <= after bound the difference between the clocks. The
    tightest brackets before and after the recording give the difference at both ends; it is interpolated in between, as clocks
    drift.
    """

    def __init__(self, found: list[Event], anchors: list[Anchor]) -> None:
        calls = sorted((e.start_ns, e.start_ns + e.dur_ns) for e in found if e.name == ANCHOR_CALL and not e.on_device)
        if not calls or not anchors:
            raise RecorderError("reading a recording", "CUPTI reported no runtime calls", CUPTI_ADVICE)
        half = len(anchors) // 2
        first = _tightest(calls[:half], anchors[:half])
        rough = first[1]
        last_calls = [min(calls, key=lambda c: abs(c[0] + c[1] - 2 * rough - a.before_ns - a.after_ns)) for a in anchors[half:]]
        last = _tightest(last_calls, anchors[half:])
        self._at, self._offset = first
        self._slope = (last[1] - first[1]) / max(last[0] - first[0], 1)

    def to_host(self, times_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return times of the profiler as times of the host, in ns."""
        return times_ns - self._offset - ((times_ns - self._at) * self._slope).astype(np.int64)


def _tightest(calls: list[tuple[int, int]], anchors: list[Anchor]) -> tuple[int, int]:
    """Return a time and by how much the profiler's clock is ahead then: the middle of the narrowest bracket."""
    brackets = [
        (a.after_ns - a.before_ns - (end - start), start, (start - a.before_ns + end - a.after_ns) // 2)
        for (start, end), a in zip(calls, anchors, strict=False)
    ]
    sound = [bracket for bracket in brackets if bracket[0] >= 0]  # negative: the call is another thread's
    _, at, ahead = min(sound or brackets)
    return at, ahead
