"""What a timeline shows of several ranks: a heading for each, lines between the events of a collective, and who waited.

`ranks.js` draws the headings and the lines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.core.units import seconds_text
from toolkit.trace.columns import KINDS
from toolkit.trace.waits import collectives_of

if TYPE_CHECKING:
    from toolkit.ui.timeline.track import Track

MAX_LINKS = 120  # collectives in a view with lines between their events
LONG_NS = 10_000  # the shortest wait that a note names


class Links:
    """The collectives of a trace that several ranks have, in order of start: arrays [n, R] as in `Collectives`."""

    def __init__(self, track: Track) -> None:
        found = collectives_of(track.trace)
        keep = found.matched & (np.where(found.present, track.lane_of[found.row], 0) >= 0).all(1)
        self.ranks, self.late, self.wait = found.ranks, found.late[keep], found.wait[keep]
        self.row, self.start = found.row[keep], found.start[keep]
        self.lane = np.where(self.row >= 0, track.lane_of[self.row], -1)
        never = np.iinfo(np.int64)  # without collectives, the arrays have no columns
        self.first = np.where(self.row >= 0, self.start, never.max).min(1, initial=never.max)
        self.end = found.end[keep].max(1, initial=never.min)

    def within(self, window: tuple[float, float], origin: int) -> list[list[Any]]:
        """Return the collectives that touch a window, or none if there are too many for lines.

        Each is [position of the rank that came last among the following (-1: none), [lane, start on the axis], ...].
        """
        chosen = np.flatnonzero((self.first < window[1]) & (self.end >= window[0]))
        return self.points(chosen, self.start - origin) if len(chosen) <= MAX_LINKS else []

    def points(self, chosen: Any, *values: Any) -> list[list[Any]]:
        """Return [position of the last rank or -1, [lane, values of the event ...], ...] of each chosen collective."""
        made = []
        for i in chosen.tolist():
            ranks = np.flatnonzero(self.row[i] >= 0).tolist()
            points = [[int(self.lane[i, r]), *(int(value[i, r]) for value in values)] for r in ranks]
            made.append([ranks.index(int(self.late[i])) if self.late[i] >= 0 else -1, *points])
        return made


def longest_wait(track: Track) -> str:
    """Return one sentence about the longest wait of a rank for another one, or "" if none took LONG_NS."""
    links = track.links
    if links is None or links.wait.max(initial=0) < LONG_NS:
        return ""
    i, r = np.unravel_index(links.wait.argmax(), links.wait.shape)
    row, late = int(links.row[i, r]), links.ranks[int(links.late[i])]
    step = int(track.trace["step"][row])
    where = f"in step {step}" if step >= 0 else "outside of steps"
    what = _text(track, "operation", row) or "collective"
    return f"Longest wait: rank {links.ranks[int(r)]} waited {_time(int(links.wait[i, r]))} for rank {late} ({what}, {where})."


def headings(track: Track) -> list[dict[str, Any]]:
    """Return the heading of each rank: how often it came last, how long it waited, and the error of its clock."""
    links, metas = track.links, track.trace.meta.get("ranks") or {}
    if links is None:
        return []
    errors = {clock["rank"]: clock["error_us"] for clock in track.trace.meta.get("clocks") or [] if clock["error_us"]}
    made = []
    for rank in track.ranks:
        parts = [f"rank {rank}", str(metas.get(str(rank), {}).get("device", ""))]
        if rank in links.ranks and len(links.late):
            i = links.ranks.index(rank)
            parts.append(f"came last in {int((links.late == i).sum()):,} of {int((links.row[:, i] >= 0).sum()):,} collectives")
            parts.append(f"waited {_time(int(links.wait[:, i].sum()))}")
        parts += [f"clock error {errors[rank]:.1f} µs"] if rank in errors else []
        made.append({"rank": rank, "text": " · ".join(part for part in parts if part)})
    return made


def facts(track: Track, row: int) -> list[tuple[str, str | None]]:
    """Return what is known about an event that communicates, as (label, text or None)."""
    trace = track.trace
    texts = {name: _text(track, name, row) for name in ("operation", "algorithm", "group")}
    size, seq, peer = (int(trace[name][row]) for name in ("group_size", "seq", "peer"))
    ranks = f"{size} ranks" if size >= 0 else None
    group = ", ".join(part for part in (texts["group"], ranks) if part is not None)
    other = None if peer < 0 else f"rank {peer}" if texts["operation"] else f"GPU {peer}"
    return [
        ("operation", texts["operation"]), ("algorithm", texts["algorithm"]), ("process group", group or None),
        ("number", str(seq) if seq >= 0 else None), ("other end", other), ("waited", _waited(track, row)),
    ]  # fmt: skip


def _waited(track: Track, row: int) -> str | None:
    """Return how long the rank of a collective's event waited, and for which one."""
    links = track.links
    if links is None or KINDS[int(track.trace["kind"][row])] != "collective":
        return None
    found = np.argwhere(links.row == row)
    if not len(found):
        return None
    i, rank = found[0].tolist()
    last = int(links.late[i])
    if last < 0:
        return "not: all ranks came at the same time"
    if rank == last:
        return f"not: it came last, and others waited up to {_time(int(links.wait[i].max()))}"
    return f"{_time(int(links.wait[i, rank]))} for rank {links.ranks[last]}, which came last"


def _time(ns: int) -> str:
    return seconds_text(ns / 1e9) if ns else "0 µs"


def _text(track: Track, name: str, row: int) -> str | None:
    code = int(track.trace[name][row])
    return track.trace.strings[code] if code >= 0 else None
