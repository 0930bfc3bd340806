"""One trace of a timeline, with its lanes and steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from toolkit.core.errors import ToolkitError, TraceError, kind_of
from toolkit.core.units import bytes_text, seconds_text
from toolkit.trace.columns import HOST_KINDS, LANES
from toolkit.trace.differences import steps_of
from toolkit.trace.events import Trace
from toolkit.ui.timeline.lanes import OTHER_STREAMS, Lane, Place, places_of
from toolkit.ui.timeline.ranks import Links, headings, longest_wait

FEW = 20_000  # events that a view can put into lanes by itself


def named(thing: Any, title: str | None = None) -> tuple[str, Trace]:
    """Return (title, trace) of a Trace or a Run. Raises ToolkitError for other types."""
    trace = getattr(thing, "trace", thing)
    if not isinstance(trace, Trace):
        raise ToolkitError("a timeline", kind_of(thing), "Give it a Trace or the result of tk.generate")
    meta = trace.meta
    return title or str(getattr(thing, "title", None) or meta.get("title") or meta.get("strategy") or "recording"), trace


def tracks_of(pairs: Sequence[tuple[str, Trace]]) -> list[Track]:
    """Return the tracks of (title, trace) pairs. Equal titles get numbers, such as "roundtrip 1" and "roundtrip 2"."""
    titles, seen, tracks = [title for title, _ in pairs], Counter[str](), []
    for title, trace in pairs:
        seen[title] += 1
        tracks.append(Track(trace, f"{title} {seen[title]}" if titles.count(title) > 1 else title))
    return tracks


class Track:
    """A trace with its `lanes` from top to bottom. `steps` are (number, start_ns, end_ns) in order of start.

    `places` has the place of each lane and its number of events; `lane_of` says which lane shows each event (-1: none).
    """

    def __init__(self, trace: Trace, title: str) -> None:
        self.trace, self.title = trace, title
        self.steps_table = steps_of(trace)
        self.steps, self.step_names = self.steps_table.table, self.steps_table.names
        self.places, self.lane_of = places_of(trace)
        self.ends = trace["start_ns"] + np.maximum(trace["dur_ns"], 0)
        shown = self.lane_of >= 0
        never = np.iinfo(np.int64)
        start = min(trace["start_ns"].min(where=shown, initial=never.max), self.steps[:, 1].min(initial=never.max))
        end = max(self.ends.max(where=shown, initial=never.min), self.steps[:, 2].max(initial=never.min))
        self.start_ns, self.end_ns = (int(start), int(end)) if start <= end else (0, 0)

    @cached_property
    def lanes(self) -> list[Lane]:
        """The lanes with all their events."""
        return [Lane.of(self.trace, place.kind, np.flatnonzero(self.lane_of == i)) for i, place in enumerate(self.places)]

    def lanes_in(self, window: tuple[float, float]) -> list[Lane]:
        """Return lanes with at least all events that touch `window`. For a short window they take less time than `lanes`."""
        if "lanes" in self.__dict__:
            return self.lanes
        rows = np.flatnonzero((self.trace["start_ns"] < window[1]) & (self.ends >= window[0]))
        if len(rows) > FEW:
            return self.lanes
        lane = self.lane_of[rows]
        return [Lane.of(self.trace, place.kind, rows[lane == i]) for i, place in enumerate(self.places)]

    @cached_property
    def ranks(self) -> list[int]:
        """The ranks that have lanes, in order."""
        return sorted({place.rank for place in self.places})

    @cached_property
    def links(self) -> Links | None:
        """The collectives of several ranks; None if there is one rank, or too many for a table of ranks and collectives."""
        try:
            return Links(self) if len(self.ranks) > 1 else None
        except TraceError:
            return None

    def step_range(self, step: int) -> tuple[int, int, int] | None:
        """Return (number, start, end) of the step with this number, or of the step with the nearest number."""
        if not len(self.steps):
            return None
        nearest = self.steps[np.argmin(np.abs(self.steps[:, 0] - step))]
        return int(nearest[0]), int(nearest[1]), int(nearest[2])

    @cached_property
    def clock(self) -> str:
        """The clock of the events: "measured", "modelled" or "mixed". Without events, the clock in the trace's meta."""
        if not self.places:
            return str(self.trace.meta.get("clock", "measured"))
        modelled, events = np.count_nonzero(self.trace["clock"][self.lane_of >= 0]), sum(self.places.values())
        return "measured" if not modelled else "modelled" if modelled == events else "mixed"

    def notes(self) -> list[str]:
        """Return the caveats of this trace, such as modelled times."""
        notes = []
        if not self.places:
            notes.append("No events: nothing was copied, launched or waited for while this was recorded.")
        if self.clock != "measured" and self.places:
            notes.append("Times are modelled, not measured (hatched).")
        if self.trace.meta.get("sizes_only"):
            notes.append("Sizes only: tensors held no values. Bytes and times are modelled; tokens are meaningless.")
        if self.trace.meta.get("steps_from") == "guessed":
            notes.append("Steps are inferred from a repeating pattern of kernels.")
        notes += self.trace.meta.get("notes") or []
        return notes + list(filter(None, [longest_wait(self)]))

    @cached_property
    def meta(self) -> dict[str, Any]:
        """The description that the front end draws around the events (JSON-able)."""
        gpus = {(place.rank, place.device) for place in self.places if place.device >= 0}
        several = {rank for rank, number in Counter(rank for rank, _ in gpus).items() if number > 1}  # ranks with several GPUs
        moved = np.flatnonzero((self.trace["bytes"] != 0) & (self.lane_of >= 0))
        sizes = np.zeros(len(self.places), np.int64)
        np.add.at(sizes, self.lane_of[moved], self.trace["bytes"][moved])
        numbers = self.steps[:, 0]
        return {
            "title": self.title,
            "device": str(self.trace.meta.get("device", "unknown device")),
            "clock": self.clock,
            "events": sum(self.places.values()),
            "steps": [int(numbers.min()), int(numbers.max())] if len(numbers) else None,
            "span": seconds_text((self.end_ns - self.start_ns) / 1e9),
            "notes": self.notes(),
            "ranks": headings(self),
            "lanes": [
                _label(place, place.rank in several, len(self.ranks) > 1)
                | {"count": count, "bytes": bytes_text(size) if size else ""}
                for (place, count), size in zip(self.places.items(), sizes.tolist(), strict=True)
            ],
        }


def _label(place: Place, several: bool, ranks: bool) -> dict[str, Any]:
    where: list[str] = []
    if place.device >= 0:
        where += [f"GPU {place.device}"] if several else []
        where += ["other streams" if place.stream == OTHER_STREAMS else f"stream {place.stream}"]
    elif place.kind not in HOST_KINDS:
        where.append("host")  # such as a collective of gloo
    whole = [f"rank {place.rank}", *where] if ranks else where
    texts = {"label": LANES[place.kind], "place": ", ".join(whole), "within": ", ".join(where)}
    return texts | {"kind": place.kind, "rank": place.rank}


def string_of(trace: Trace, column: str, row: int | np.int64) -> str | None:
    code = int(trace[column][row])
    return trace.strings[code] if code >= 0 else None
