"""One trace of a timeline, with its lanes and steps.

A `Track` indexes its events by lane (sorted starts, prefix sums), so that a view of a million events takes few binary searches.
The prefix sums are computed when a view first needs them: one that shows single events doesn't.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.core.errors import ToolkitError
from toolkit.core.units import bytes_text, seconds_text
from toolkit.trace.columns import HOST_KINDS, KINDS, LANES
from toolkit.trace.differences import steps_of
from toolkit.trace.events import Trace

MAX_LANES = 36  # per track; further streams are gathered in "other streams"
OTHER_STREAMS = 1 << 20


@dataclass(frozen=True)
class Lane:
    """Events of one kind on one stream in order of start, with the sums that binary searches need."""

    trace: Trace
    kind: str
    rank: int
    device: int
    stream: int
    rows: NDArray[np.int64]  # rows of the trace
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    latest_end: NDArray[np.int64]  # latest end of this and all earlier events

    @cached_property
    def fresh(self) -> NDArray[np.int64]:
        """Start of the part of each event that no earlier event covers."""
        return np.maximum(self.starts, np.concatenate([self.starts[:1], self.latest_end[:-1]]))

    @cached_property
    def busy(self) -> NDArray[np.int64]:
        """[n + 1] time covered by the first i events."""
        return _prefix(self.latest_end - self.fresh)

    @cached_property
    def bytes(self) -> NDArray[np.int64]:
        """[n + 1] bytes of the first i events."""
        return _prefix(self.trace["bytes"][self.rows])

    @cached_property
    def modelled(self) -> NDArray[np.int64]:
        """[n + 1] number of events with modelled times among the first i."""
        return _prefix(self.trace["clock"][self.rows])

    def covered(self, t: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the time covered by events up to each `t`."""
        n = np.searchsorted(self.fresh, t, side="right")
        last = np.maximum(n - 1, 0)
        part = np.clip(t - self.fresh[last], 0, self.busy[last + 1] - self.busy[last])
        return np.where(n > 0, self.busy[last] + part, 0.0)


def _prefix(values: NDArray[Any]) -> NDArray[np.int64]:
    sums = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=sums[1:])
    return sums


def named(thing: Any, title: str | None = None) -> tuple[str, Trace]:
    """Return (title, trace) of a Trace or a Run. The title of a Run is its strategy. Raises ToolkitError for other types."""
    trace = getattr(thing, "trace", thing)
    if not isinstance(trace, Trace):
        raise ToolkitError("a timeline", f"a {type(thing).__name__}", "Give it a Trace or the result of tk.generate")
    meta = trace.meta
    return title or str(getattr(thing, "strategy", None) or meta.get("title") or meta.get("strategy") or "recording"), trace


class Track:
    """An indexed trace. `lanes` are from top to bottom; `steps` are (number, start_ns, end_ns) in order of start."""

    def __init__(self, trace: Trace, title: str) -> None:
        self.trace, self.title = trace, title
        self.steps_table = steps_of(trace)
        self.steps, self.step_names = self.steps_table.table, self.steps_table.names
        self.lanes = _lanes(trace)
        starts = [lane.starts[0] for lane in self.lanes] + ([self.steps[0, 1]] if len(self.steps) else [])
        ends = [lane.latest_end[-1] for lane in self.lanes] + ([self.steps[:, 2].max()] if len(self.steps) else [])
        self.start_ns, self.end_ns = (int(min(starts)), int(max(ends))) if starts else (0, 0)

    def step_range(self, step: int) -> tuple[int, int, int] | None:
        """Return (number, start, end) of the step with this number, or of the step with the nearest number."""
        if not len(self.steps):
            return None
        nearest = self.steps[np.argmin(np.abs(self.steps[:, 0] - step))]
        return int(nearest[0]), int(nearest[1]), int(nearest[2])

    @cached_property
    def clock(self) -> str:
        """The clock of the events: "measured", "modelled" or "mixed". Without events, the clock in the trace's meta."""
        events = sum(len(lane.rows) for lane in self.lanes)
        modelled = sum(np.count_nonzero(self.trace["clock"][lane.rows]) for lane in self.lanes)
        if not events:
            return str(self.trace.meta.get("clock", "measured"))
        return "measured" if not modelled else "modelled" if modelled == events else "mixed"

    def notes(self) -> list[str]:
        """Return the caveats of this trace, such as modelled times."""
        notes = []
        if not self.lanes:
            notes.append("No events: nothing was copied, launched or waited for while this was recorded.")
        if self.clock != "measured" and self.lanes:
            notes.append("Times are modelled, not measured (hatched).")
        if self.trace.meta.get("sizes_only"):
            notes.append("Sizes only: tensors held no values. Bytes and times are modelled; tokens are meaningless.")
        if self.trace.meta.get("steps_from") == "guessed":
            notes.append("Steps are inferred from a repeating pattern of kernels.")
        return notes

    @cached_property
    def meta(self) -> dict[str, Any]:
        """The description that the front end draws around the events (JSON-able)."""
        several = len({lane.device for lane in self.lanes if lane.kind not in HOST_KINDS}) > 1
        ranks = len({lane.rank for lane in self.lanes}) > 1
        numbers = self.steps[:, 0]
        return {
            "title": self.title,
            "device": str(self.trace.meta.get("device", "unknown device")),
            "clock": self.clock,
            "events": sum(len(lane.rows) for lane in self.lanes),
            "steps": [int(numbers.min()), int(numbers.max())] if len(numbers) else None,
            "span": seconds_text((self.end_ns - self.start_ns) / 1e9),
            "notes": self.notes(),
            "lanes": [_lane_meta(lane, several, ranks) for lane in self.lanes],
        }


def _lane_meta(lane: Lane, several: bool, ranks: bool) -> dict[str, Any]:
    place = [f"rank {lane.rank}"] if ranks else []
    if lane.kind not in HOST_KINDS:
        place += [f"GPU {lane.device}"] if several else []
        place += ["other streams" if lane.stream == OTHER_STREAMS else f"stream {max(lane.stream, 0)}"]
    total = int(lane.trace["bytes"][lane.rows].sum())
    return {
        "label": LANES[lane.kind],
        "place": ", ".join(place),
        "kind": lane.kind,
        "rank": lane.rank,
        "count": len(lane.rows),
        "bytes": bytes_text(total) if total else "",
    }


def _lanes(trace: Trace) -> list[Lane]:
    shown = np.full(len(KINDS), -1, np.int64)
    for position, kind in enumerate(LANES):
        shown[KINDS.index(kind)] = position
    position = shown[trace["kind"]]
    position[(trace["kind"] == KINDS.index("mark")) & (trace["step"] >= 0)] = -1  # step marks are boundaries, not a lane
    rows = np.flatnonzero(position >= 0)
    if not len(rows):
        return []
    position = position[rows]
    on_host = position < len(HOST_KINDS)
    # One small integer per place, in the order in which lanes are shown; equal integers are one lane.
    place = np.where(on_host, -1, trace["device"][rows].astype(np.int64)) + 1
    stream = np.where(on_host, 0, np.maximum(trace["stream"][rows].astype(np.int64), 0))
    place += trace["rank"][rows].astype(np.int64) << 16
    places, place = _unique(place)
    streams, stream = _unique(stream)
    key = (place * len(streams) + stream) * len(LANES) + position
    counts = np.bincount(key, minlength=len(places) * len(streams) * len(LANES))
    if np.count_nonzero(counts) > MAX_LANES:
        kept = np.argsort(counts.reshape(len(places), len(streams), -1).sum((0, 2)))[::-1][: MAX_LANES // 8]
        names = np.append(streams[np.sort(kept)], OTHER_STREAMS)
        new = np.full(len(streams), len(names) - 1)
        new[np.sort(kept)] = np.arange(len(kept))
        streams, stream = names, new[stream]
        key = (place * len(streams) + stream) * len(LANES) + position
        counts = np.bincount(key)
    order = np.argsort(key.astype(np.uint16) if key.max() < 1 << 16 else key, kind="stable")
    parts = np.split(order, np.cumsum(counts[counts > 0])[:-1])
    return [_lane(trace, rows[part], int(streams[stream[part[0]]])) for part in parts]


def _unique(values: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return what `np.unique(values, return_inverse=True)` returns, without sorting if the values are close to each other."""
    low = int(values.min())
    if int(values.max()) - low > 1 << 20:
        return np.unique(values, return_inverse=True)
    values = values - low
    found = np.flatnonzero(np.bincount(values))
    position = np.zeros(int(found[-1]) + 1, np.int64)
    position[found] = np.arange(len(found))
    return found + low, position[values]


def _lane(trace: Trace, rows: NDArray[np.int64], stream: int) -> Lane:
    starts = trace["start_ns"][rows]
    if np.any(starts[1:] < starts[:-1]):  # some readers leave rows unsorted
        order = np.argsort(starts, kind="stable")
        rows, starts = rows[order], starts[order]
    ends = starts + np.maximum(trace["dur_ns"][rows], 0)
    first = int(rows[0])
    return Lane(
        trace, kind=KINDS[int(trace["kind"][first])], rank=int(trace["rank"][first]), device=int(trace["device"][first]),
        stream=stream, rows=rows, starts=starts, ends=ends, latest_end=np.maximum.accumulate(ends),
    )  # fmt: skip


def string_of(trace: Trace, column: str, row: int | np.int64) -> str | None:
    code = int(trace[column][row])
    return trace.strings[code] if code >= 0 else None
