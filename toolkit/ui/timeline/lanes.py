"""The lanes of a timeline: which events of a trace each of them shows, and the sums that views need.

`places_of` assigns every event to a lane without sorting, so that a timeline of a million events opens quickly. A `Lane`
indexes its events by sorted starts and prefix sums, so that a view takes few binary searches. The sums are computed when a view
first needs them: one that shows single events doesn't.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from toolkit.core.errors import TraceError
from toolkit.trace.columns import HOST_KINDS, KINDS, LANES
from toolkit.trace.events import Trace

MOST_LANES = 4096  # of all ranks and devices
MAX_LANES = 36  # per track and rank; further streams are gathered in "other streams"
MOST_RANKS = 16  # whose lanes are all shown
OTHER_STREAMS = 1 << 31  # above the number of every stream
_MOST_CODES = 1 << 16


class Place(NamedTuple):
    """Where a lane is. Places sort from top to bottom. The host's lanes have device -1 and stream 0."""

    rank: int
    device: int
    stream: int
    position: int  # index into LANES

    @property
    def kind(self) -> str:
        return tuple(LANES)[self.position]


@dataclass(frozen=True)
class Lane:
    """Events of one place in order of start, with the sums that binary searches need."""

    trace: Trace
    kind: str
    rows: NDArray[np.int64]  # rows of the trace
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    latest_end: NDArray[np.int64]  # latest end of this and all earlier events

    @classmethod
    def of(cls, trace: Trace, kind: str, rows: NDArray[np.int64]) -> Lane:
        """Return the lane of the events in `rows`."""
        starts = trace["start_ns"][rows]
        if np.any(starts[1:] < starts[:-1]):  # some readers leave rows unsorted
            order = np.argsort(starts, kind="stable")
            rows, starts = rows[order], starts[order]
        ends = starts + np.maximum(trace["dur_ns"][rows], 0)
        return cls(trace, kind, rows, starts, ends, np.maximum.accumulate(ends))

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


def places_of(trace: Trace) -> tuple[dict[Place, int], NDArray[np.int16]]:
    """Return the places of a trace's lanes from top to bottom with their numbers of events, and each event's lane; -1: none.

    Raises TraceError if there are more than MOST_LANES lanes.
    """
    if not len(trace):
        return {}, np.zeros(0, np.int16)
    codes = _codes(trace)
    events = np.bincount(codes)
    row_of = np.zeros(len(events), np.int64)
    row_of[codes] = np.arange(len(codes))  # any event of a code says what the code means
    place_of = {code: _place(trace, row_of[code]) for code in np.flatnonzero(events).tolist()}
    shown = {code: place for code, place in place_of.items() if place is not None}
    if len(set(shown.values())) > MAX_LANES * min(len({place.rank for place in shown.values()}), MOST_RANKS):
        streams = Counter[int]()
        for code, place in shown.items():
            streams[place.stream] += int(events[code])
        kept = {stream for stream, _ in streams.most_common(MAX_LANES // 8)}
        shown = {code: p if p.stream in kept else p._replace(stream=OTHER_STREAMS) for code, p in shown.items()}
    places = dict.fromkeys(sorted(set(shown.values())), 0)
    if len(places) > MOST_LANES:
        found = f"{len({place.rank for place in places}):,} ranks with {len(places):,} lanes; it can show {MOST_LANES:,}"
        raise TraceError("a timeline", found, "Choose a rank, for example trace.of_rank(0).timeline()")
    number = dict(zip(places, range(len(places)), strict=True))
    lane_of_code = np.full(len(events), -1, np.int16)
    for code, place in shown.items():
        places[place] += int(events[code])
        lane_of_code[code] = number[place]
    return places, lane_of_code[codes]


def _codes(trace: Trace) -> NDArray[Any]:
    """Return a small integer per event, which is equal for equal lane kinds, ranks, devices and streams.

    The integers are below `_MOST_CODES` or the number of events, whatever the file says.
    """
    position = np.zeros(len(KINDS), np.int16)
    for i, kind in enumerate(LANES):
        position[KINDS.index(kind)] = i + 1  # 0: in no lane
    codes: NDArray[Any] = position.take(trace["kind"])
    codes[(trace["kind"] == KINDS.index("mark")) & (trace["step"] >= 0)] = 0  # marks of steps are boundaries, not a lane
    size = len(LANES) + 1
    for name in ("rank", "device", "stream"):
        low, high = int(trace[name].min()), int(trace[name].max())
        if high - low > 64:
            found, index = np.unique(trace[name], return_inverse=True)
            n_values = len(found)
        else:
            n_values, index = high - low + 1, trace[name] - low
        if n_values > 1:
            narrow = size * n_values <= np.iinfo(np.int16).max  # less memory to move
            codes = codes + size * (index.astype(np.int16) if narrow else index.astype(np.int64))
        size *= n_values
        if size > _MOST_CODES:  # most of them are no event's
            found, codes = np.unique(codes, return_inverse=True)
            size = len(found)
    return codes


def _place(trace: Trace, row: int) -> Place | None:
    """Return the place of an event, or None if no lane shows it."""
    kind = KINDS[trace["kind"][row]]
    if kind not in LANES or (kind == "mark" and trace["step"][row] >= 0):
        return None
    rank, position = int(trace["rank"][row]), tuple(LANES).index(kind)
    if kind in HOST_KINDS:
        return Place(rank, -1, 0, position)
    return Place(rank, int(trace["device"][row]), max(int(trace["stream"][row]), 0), position)
