"""From the profiler's events to the table: which host call launched each device event, from which line and step.

A pure function of what the profiler returned and what the session noted meanwhile; needs no GPU, so that it is tested
without one. Times of the profiler are moved onto the host's clock by anchors: runtime calls that both sides timed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from toolkit.core.errors import RecorderError
from toolkit.gpu.line_log import LineLog
from toolkit.trace.cupti import is_copy_kernel, is_wait, number_streams, parse_memcpy
from toolkit.trace.events import Trace, TraceBuilder
from toolkit.trace.steps import steps_from_ranges

_BYTES = re.compile(r'"bytes": ?"?(\d+)')
_STEP_RANGE = "toolkit.step "
_MEMORY = "[memory]"
ANCHOR_CALL = "cudaDeviceSynchronize"
CUPTI_ADVICE = "Run outside of nsys, ncu and other profilers, and check that CUPTI may be used (its library, permissions)"


class Anchor(NamedTuple):
    """A runtime call as the host timed it, from outside."""

    before_ns: int
    after_ns: int


class Range(NamedTuple):
    """A step's range on the host's clock."""

    start_ns: int
    end_ns: int
    step: int
    name: str


@dataclass
class Session:
    """What a recording noted on the host, on the clock of `time.perf_counter_ns`."""

    index: int  # of the GPU
    log: LineLog | None
    cell: int = -1
    began_ns: int = 0
    ended_ns: int = 0
    anchors: list[Anchor] = field(default_factory=list)  # those before `began_ns`, then those after `ended_ns`
    ranges: list[Range] = field(default_factory=list)


class _Event(NamedTuple):
    """One of the profiler's events, times in ns on its own clock."""

    name: str
    on_device: bool
    gpu: int  # its number
    resource: int  # stream of a device event, thread of a call
    start_ns: int
    dur_ns: int
    correlation: int
    detail: str  # its metadata, JSON without the braces
    bytes: int  # of an allocation; negative: a free
    annotation: bool  # a range of record_function


class _Row(NamedTuple):
    """A row to be, times still on the profiler's clock."""

    kind: str
    start_ns: int
    dur_ns: int
    bytes: int
    stream: int  # as CUPTI numbers it
    pinned: int
    name: str | None
    thread: int  # that caused it
    cause_ns: int  # when that thread caused it


def has_calls(events: Iterable[Any]) -> bool:
    """Whether the profiler saw a runtime call at all: without CUPTI it sees none, and says nothing."""
    return any(event.name() == ANCHOR_CALL for event in events)


def read_events(events: Iterable[Any], session: Session, meta: dict[str, Any]) -> Trace:
    """The trace of a session. `events` are the profiler's (`kineto_results.events()`)."""
    found = [_plain(event) for event in events if not event.name().startswith("aten::")]
    calls = {e.correlation: e for e in found if not e.on_device and '"cbid"' in e.detail}
    rows = _device_rows(found, calls, session.index)
    rows += _wait_rows(found, calls)
    rows += _memory_rows(found, session.index)
    clock = HostClock(found, session.anchors)
    cause = clock.to_host(np.array([row.cause_ns for row in rows], np.int64))
    start = clock.to_host(np.array([row.start_ns for row in rows], np.int64)) - session.began_ns
    inside = (session.began_ns <= cause) & (cause <= session.ended_ns)
    step = _steps(cause, session.ranges)
    where: list[str | None] = [None] * len(rows)
    if session.log is not None:
        where = session.log.where(np.array([row.thread for row in rows], np.int64), cause)
    order = np.argsort(start, kind="stable")
    stream = np.empty(len(rows), np.int32)
    stream[order] = number_streams(np.array([row.stream for row in rows], np.int64)[order])
    builder = TraceBuilder()
    for i in order[inside[order]].tolist():
        row = rows[i]
        builder.add(
            row.kind, int(start[i]), row.dur_ns, bytes=row.bytes, stream=int(stream[i]), device=session.index,
            step=int(step[i]), cell=session.cell, pinned=row.pinned, name=row.name, where=where[i],
        )  # fmt: skip
    _add_marks(builder, found, clock, session)
    meta = dict(meta, steps_from="marks" if session.ranges else None, lines=session.log is not None)
    if session.log is not None and session.log.problem:
        meta["lines_problem"] = session.log.problem
    return builder.build(meta)


def _steps(times_ns: NDArray[np.int64], ranges: list[Range]) -> NDArray[np.int32]:
    """The step whose range holds each time, -1 for none."""
    columns = np.array([(r.start_ns, r.end_ns, r.step) for r in ranges], np.int64).reshape(-1, 3)
    return steps_from_ranges(times_ns, columns[:, 0], columns[:, 1], columns[:, 2])


def _plain(event: Any) -> _Event:
    name, detail = event.name(), event.metadata_json()
    return _Event(
        name, event.device_type().name == "CUDA", event.device_index(), event.device_resource_id(), event.start_ns(),
        event.duration_ns(), event.correlation_id(), detail, event.nbytes(), event.is_user_annotation(),
    )  # fmt: skip


def _device_rows(found: list[_Event], calls: dict[int, _Event], index: int) -> list[_Row]:
    """Kernels, copies and memsets of one GPU, each with the call that launched it (a graph's nodes share theirs)."""
    rows = []
    for e in found:
        if not e.on_device or e.gpu != index or e.annotation or e.name == _MEMORY or "cuda_sync_kind" in e.detail:
            continue
        kind: str | None = "d2d" if is_copy_kernel(e.name) else "kernel"
        n_bytes, pinned = 0, -1
        if e.name.startswith(("Memcpy", "Memset")):
            match = _BYTES.search(e.detail)
            n_bytes = int(match[1]) if match else 0
            kind, pinned = parse_memcpy(e.name) if e.name.startswith("Memcpy") else ("memset", -1)
        if kind is not None:
            call = calls.get(e.correlation)
            thread, cause = (call.resource, call.start_ns) if call else (-1, e.start_ns)
            rows.append(_Row(kind, e.start_ns, e.dur_ns, n_bytes, e.resource, pinned, e.name, thread, cause))
    return rows


def _wait_rows(found: list[_Event], calls: dict[int, _Event]) -> list[_Row]:
    """The calls that blocked the host; CUPTI's own record of them knows the stream."""
    streams = {e.correlation: e.resource for e in found if e.on_device and "cuda_sync_kind" in e.detail}
    return [
        _Row("sync", e.start_ns, e.dur_ns, 0, streams.get(e.correlation, -1), -1, e.name, e.resource, e.start_ns)
        for e in calls.values()
        if is_wait(e.name)
    ]


def _memory_rows(found: list[_Event], index: int) -> list[_Row]:
    rows = []
    for e in found:
        if e.name == _MEMORY and e.on_device and e.gpu == index:
            kind = "alloc" if e.bytes > 0 else "free"
            rows.append(_Row(kind, e.start_ns, 0, abs(e.bytes), -1, -1, None, e.resource, e.start_ns))
    return rows


def _add_marks(builder: TraceBuilder, found: list[_Event], clock: HostClock, session: Session) -> None:
    """The steps' ranges, and the user's own record_function ranges as marks that are no step."""
    for r in session.ranges:
        start = r.start_ns - session.began_ns
        builder.add("mark", start, r.end_ns - r.start_ns, device=-1, step=r.step, cell=session.cell, name=r.name)
    own = [e for e in found if e.annotation and not e.on_device and not e.name.startswith(_STEP_RANGE)]
    starts = clock.to_host(np.array([e.start_ns for e in own], np.int64)) - session.began_ns
    for e, start in zip(own, starts.tolist(), strict=True):
        if 0 <= start <= session.ended_ns - session.began_ns:
            builder.add("mark", start, e.dur_ns, device=-1, cell=session.cell, name=e.name)


class HostClock:
    """Moves the profiler's times onto the host's clock.

    Each anchor brackets one runtime call: before <= start and end <= after bound the difference between the clocks.
    The tightest before and after the recording give it at both ends, and a straight line in between (clocks drift).
    """

    def __init__(self, found: list[_Event], anchors: list[Anchor]) -> None:
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
        """Profiler's times as host's times, in ns."""
        return times_ns - self._offset - ((times_ns - self._at) * self._slope).astype(np.int64)


def _tightest(calls: list[tuple[int, int]], anchors: list[Anchor]) -> tuple[int, int]:
    """When, and by how much the profiler's clock is ahead of the host's: the middle of the narrowest bracket."""
    brackets = [
        (a.after_ns - a.before_ns - (end - start), start, (start - a.before_ns + end - a.after_ns) // 2)
        for (start, end), a in zip(calls, anchors, strict=False)
    ]
    sound = [bracket for bracket in brackets if bracket[0] >= 0]  # less than 0: another thread's call, not this one
    _, at, ahead = min(sound or brackets)
    return at, ahead
