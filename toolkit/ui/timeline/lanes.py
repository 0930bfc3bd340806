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

from toolkit.trace.columns import HOST_KINDS, KINDS, LANES
from toolkit.trace.events import Trace

MAX_LANES = 36  # per track and rank; further streams are gathered in "other streams"
MOST_RANKS = 16  # whose lanes are all shown
OTHER_STREAMS = 1 << 31  # above the number of every stream


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
    """Return the places of a trace's lanes from top to bottom with their numbers of events, and each event's lane; -1: none."""
    if not len(trace):
        return {}, np.zeros(0, np.int16)
    codes, values = _codes(trace)
    events = np.bincount(codes)
    place_of = {code: _place(code, values) for code in np.flatnonzero(events).tolist()}
    shown = {code: place for code, place in place_of.items() if place is not None}
    if len(set(shown.values())) > MAX_LANES * min(len({place.rank for place in shown.values()}), MOST_RANKS):
        streams = Counter[int]()
        for code, place in shown.items():
            streams[place.stream] += int(events[code])
        kept = {stream for stream, _ in streams.most_common(MAX_LANES // 8)}
        shown = {code: p if p.stream in kept else p._replace(stream=OTHER_STREAMS) for code, p in shown.items()}
    places = dict.fromkeys(sorted(set(shown.values())), 0)
    number = dict(zip(places, range(len(places)), strict=True))
    lane_of_code = np.full(len(events), -1, np.int16)
    for code, place in shown.items():
        places[place] += int(events[code])
        lane_of_code[code] = number[place]
    return places, lane_of_code[codes]


def _codes(trace: Trace) -> tuple[NDArray[Any], list[NDArray[np.int64]]]:
    """Return a small integer per event, equal for equal kind, rank, device and stream, and the values of the last three."""
    position = np.zeros(len(KINDS), np.int16)
    for i, kind in enumerate(LANES):
        position[KINDS.index(kind)] = i + 1  # 0: in no lane
    codes: NDArray[Any] = position.take(trace["kind"])
    codes[(trace["kind"] == KINDS.index("mark")) & (trace["step"] >= 0)] = 0  # marks of steps are boundaries, not a lane
    values, size = [], len(LANES) + 1
    for name in ("rank", "device", "stream"):
        low, high = int(trace[name].min()), int(trace[name].max())
        if high - low > 64:
            found, index = np.unique(trace[name], return_inverse=True)
        else:
            found, index = np.arange(low, high + 1), trace[name] - low
        values.append(found)
        if len(found) > 1:
            narrow = size * len(found) <= np.iinfo(np.int16).max  # less memory to move
            codes = codes + size * (index.astype(np.int16) if narrow else index.astype(np.int64))
        size *= len(found)
    return codes, values


def _place(code: int, values: list[NDArray[np.int64]]) -> Place | None:
    """Return the place of a code (see `_codes`), or None if no lane shows its events."""
    code, position = divmod(code, len(LANES) + 1)
    if not position:
        return None
    chosen = []
    for found in values:
        code, index = divmod(code, len(found))
        chosen.append(int(found[index]))
    rank, device, stream = chosen
    if tuple(LANES)[position - 1] in HOST_KINDS:
        return Place(rank, -1, 0, position - 1)
    return Place(rank, device, max(stream, 0), position - 1)
