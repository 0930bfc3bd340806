"""The data of a timeline: the lanes of a trace, and small views of any range of time.

A `Track` indexes one trace by lane (sorted starts, prefix sums), so that a view of a million events takes few binary searches.
A `Scene` puts one or two tracks on one time axis and returns views as bytes: single events if there are few, else one segment
per bin of pixels with its busy share, count and bytes. `page.js` does the same binning in JavaScript, for pages without Python.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.core.errors import ToolkitError
from toolkit.core.units import bytes_text, seconds_text
from toolkit.trace.columns import KINDS
from toolkit.trace.events import Trace

LANE_KINDS = ("sync", "mark", "kernel", "h2d", "d2h", "d2d", "p2p", "memset")  # top to bottom
LABELS = {
    "sync": "host waits", "mark": "host marks", "kernel": "kernels", "h2d": "H2D", "d2h": "D2H", "d2d": "D2D",
    "p2p": "P2P", "memset": "memset",
}  # fmt: skip
MAX_SEGMENTS = 2000  # per view: 20 bytes each, 40 KB in all
MAX_LANES = 36  # per track; further streams are gathered in "other streams"
MAX_STEPS = 96  # step boundaries in a view
MAX_TEXTS = 240  # (name, where) pairs in a view
MAX_TEXTS_LENGTH = 9000  # total characters of these pairs
MAX_TEXT = 96  # characters of a name or a line in a view
NO_TEXT = 65535
MODELLED = 128  # bit of a segment's kind: its time is modelled
SUBPIXELS = 16  # x positions are whole sixteenths of a pixel
OTHER_STREAMS = 1 << 20
SEGMENT = (
    ("row", "<u4"),  # row of the trace: the event, or the first event of a bin
    ("count", "<u4"),  # number of events that start in the bin; 0 if an earlier event continues
    ("bytes", "<f4"),
    ("x0", "<u2"),
    ("x1", "<u2"),
    ("text", "<u2"),  # index into the header's texts; 65535: not included, request the facts
    ("kind", "u1"),  # index into KINDS, plus MODELLED
    ("level", "u1"),  # busy share of a bin, 255 means 100 %
)


@dataclass(frozen=True)
class Lane:
    """Events of one kind on one stream in order of start, with the sums that binary searches need."""

    kind: str
    rank: int
    device: int
    stream: int
    rows: NDArray[np.int64]  # rows of the trace
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    latest_end: NDArray[np.int64]  # latest end of this and all earlier events
    fresh: NDArray[np.int64]  # start of the part of each event that no earlier event covers
    busy: NDArray[np.int64]  # [n + 1] time covered by the first i events
    bytes: NDArray[np.int64]  # [n + 1] prefix sum
    modelled: NDArray[np.int64]  # [n + 1] prefix sum

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
        self.steps, self.step_names = _steps(trace)
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

    @property
    def clock(self) -> str:
        """The clock of the events: "measured", "modelled" or "mixed". Without events, the clock in the trace's meta."""
        events = sum(len(lane.rows) for lane in self.lanes)
        modelled = sum(int(lane.modelled[-1]) for lane in self.lanes)
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

    def meta(self) -> dict[str, Any]:
        """Return the description that the front end draws around the events (JSON-able)."""
        several = len({lane.device for lane in self.lanes if lane.kind not in ("sync", "mark")}) > 1
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
    if lane.kind not in ("sync", "mark"):
        place += [f"GPU {lane.device}"] if several else []
        place += ["other streams" if lane.stream == OTHER_STREAMS else f"stream {max(lane.stream, 0)}"]
    total = int(lane.bytes[-1])
    return {
        "label": LABELS[lane.kind],
        "place": ", ".join(place),
        "kind": lane.kind,
        "count": len(lane.rows),
        "bytes": bytes_text(total) if total else "",
    }


def _steps(trace: Trace) -> tuple[NDArray[np.int64], list[str]]:
    """Return number, start and end of each step [n, 3], and names, from step marks or else from the events' step numbers."""
    mark = (trace["kind"] == KINDS.index("mark")) & (trace["step"] >= 0)
    if mark.any():
        rows = np.flatnonzero(mark)
        table = np.stack([trace["step"][rows], trace["start_ns"][rows], trace["start_ns"][rows] + trace["dur_ns"][rows]], 1)
        order = np.argsort(table[:, 1], kind="stable")
        return table[order].astype(np.int64), [string_of(trace, "name", rows[i]) or "" for i in order]
    inside = np.flatnonzero(trace["step"] >= 0)
    if not len(inside):
        return np.zeros((0, 3), np.int64), []
    numbers, inverse = np.unique(trace["step"][inside], return_inverse=True)
    first = np.full(len(numbers), np.iinfo(np.int64).max)
    last = np.zeros(len(numbers), np.int64)
    np.minimum.at(first, inverse, trace["start_ns"][inside])
    np.maximum.at(last, inverse, trace["start_ns"][inside] + trace["dur_ns"][inside])
    table = np.stack([numbers, first, last], 1).astype(np.int64)
    return table[np.argsort(first, kind="stable")], ["" for _ in numbers]


def _lanes(trace: Trace) -> list[Lane]:
    shown = np.zeros(len(KINDS), np.int64) - 1
    for position, kind in enumerate(LANE_KINDS):
        shown[KINDS.index(kind)] = position
    position = shown[trace["kind"]]
    position[(trace["kind"] == KINDS.index("mark")) & (trace["step"] >= 0)] = -1  # step marks are boundaries, not a lane
    rows = np.flatnonzero(position >= 0)
    if not len(rows):
        return []
    position = position[rows]
    on_host = position < 2
    # One small integer per place, in the order in which lanes are shown; equal integers are one lane.
    place = np.where(on_host, -1, trace["device"][rows].astype(np.int64)) + 1
    stream = np.where(on_host, 0, np.maximum(trace["stream"][rows].astype(np.int64), 0))
    place = (trace["rank"][rows].astype(np.int64) << 16) + place
    places, place = np.unique(place, return_inverse=True)
    streams, stream = np.unique(stream, return_inverse=True)
    key = (place * len(streams) + stream) * len(LANE_KINDS) + position
    counts = np.bincount(key, minlength=len(places) * len(streams) * len(LANE_KINDS))
    if np.count_nonzero(counts) > MAX_LANES:
        kept = np.argsort(counts.reshape(len(places), len(streams), -1).sum((0, 2)))[::-1][: MAX_LANES // 8]
        names = np.append(streams[np.sort(kept)], OTHER_STREAMS)
        new = np.full(len(streams), len(names) - 1)
        new[np.sort(kept)] = np.arange(len(kept))
        streams, stream = names, new[stream]
        key = (place * len(streams) + stream) * len(LANE_KINDS) + position
    order = np.argsort(key.astype(np.uint16) if key.max() < 1 << 16 else key, kind="stable")
    bounds = np.flatnonzero(np.diff(key[order])) + 1
    return [_lane(trace, rows[part], int(streams[stream[part[0]]])) for part in np.split(order, bounds)]


def _lane(trace: Trace, rows: NDArray[np.int64], stream: int) -> Lane:
    starts = trace["start_ns"][rows]
    if np.any(starts[1:] < starts[:-1]):  # some readers leave rows unsorted
        order = np.argsort(starts, kind="stable")
        rows, starts = rows[order], starts[order]
    ends = starts + np.maximum(trace["dur_ns"][rows], 0)
    latest = np.maximum.accumulate(ends)
    before = np.concatenate([starts[:1], latest[:-1]])
    fresh = np.maximum(starts, before)
    first = int(rows[0])
    return Lane(
        kind=KINDS[int(trace["kind"][first])], rank=int(trace["rank"][first]), device=int(trace["device"][first]),
        stream=stream, rows=rows, starts=starts, ends=ends, latest_end=latest, fresh=fresh,
        busy=_prefix(latest - fresh), bytes=_prefix(trace["bytes"][rows]), modelled=_prefix(trace["clock"][rows]),
    )  # fmt: skip


class Scene:
    """One or two tracks (A above B) on one axis: time since each track's start, or since the start of its step `align`."""

    def __init__(self, tracks: Sequence[Track]) -> None:
        self.tracks = tuple(tracks)

    def meta(self) -> dict[str, Any]:
        """Return the description of all tracks for the front end (JSON-able)."""
        return {"tracks": [track.meta() for track in self.tracks], "kinds": list(KINDS)}

    def origins(self, align: int | None = None) -> list[int]:
        """Return, for each track, the time in its own nanoseconds that is at 0 of the axis."""
        steps = [track.step_range(align) if align is not None else None for track in self.tracks]
        return [step[1] if step else track.start_ns for step, track in zip(steps, self.tracks, strict=True)]

    def bounds(self, align: int | None = None) -> tuple[int, int]:
        """Return the first and the last nanosecond on the axis. The range is never empty."""
        pairs = list(zip(self.tracks, self.origins(align), strict=True))
        low = min(track.start_ns - origin for track, origin in pairs)
        return low, max(low + 1000, *(track.end_ns - origin for track, origin in pairs))

    def view(self, t0: float, t1: float, width: int, align: int | None = None, **echo: Any) -> bytes:
        """Return the view of [t0, t1) of the axis on `width` pixels, in less than 100 KB.

        Layout: the uint32 length of a JSON header (padded to 4), the header, then the columns of the segments. The header
        contains `echo`, so that the front end knows which request this answers.
        """
        width = int(np.clip(width, 16, 4000))
        low, high = self.bounds(align)
        if not t1 > t0:
            t0, t1 = low, high
        origins = self.origins(align)
        parts: list[tuple[Track, dict[str, NDArray[Any]]]] = []
        counts, steps, hidden = [], [], []
        for track, origin in zip(self.tracks, origins, strict=True):
            window = (t0 + origin, t1 + origin)
            segments = lane_segments(track.lanes, window, width, MAX_SEGMENTS // len(self.tracks))
            counts.append([len(s["row"]) for s in segments])
            parts.extend((track, s) for s in segments)
            shown, every = _steps_in(track, window)
            steps.append([[n, start - origin, end - origin, name] for n, start, end, name in shown])
            hidden.append(every)
        texts, codes = _texts(parts)
        header = {
            **echo, "t0": t0, "t1": t1, "width": width, "align": align, "bounds": [low, high],
            "counts": counts, "steps": steps, "every": hidden, "texts": texts,
        }  # fmt: skip
        blob = json.dumps(header, separators=(",", ":")).encode()
        blob += b" " * (-len(blob) % 4)
        columns = []
        for name, dtype in SEGMENT:
            values = [codes] if name == "text" else [s[name] for _, s in parts] or [codes]
            columns.append(np.concatenate(values).astype(dtype).tobytes())
        return struct.pack("<I", len(blob)) + blob + b"".join(columns)

    def overview(self, width: int = 1000) -> bytes:
        """Return the view of the whole axis, for the first picture, before any request."""
        return self.view(*self.bounds(), width=width, seq=0, vid="")

    def find_step(
        self, track: int, step: int | None = None, near: float = 0.0, move: int = 0, align: int | None = None
    ) -> list[float] | None:
        """Return [number, start, end] on the axis of the step number `step`, or `move` steps from the step at `near`."""
        chosen, origin = self.tracks[track], self.origins(align)[track]
        if not len(chosen.steps):
            return None
        if step is not None:
            found = chosen.step_range(step)
        else:
            at = int(np.searchsorted(chosen.steps[:, 1], near + origin + 0.5, side="right")) - 1
            found = tuple(chosen.steps[int(np.clip(at + move, 0, len(chosen.steps) - 1))].tolist())
        return [found[0], found[1] - origin, found[2] - origin] if found else None


def string_of(trace: Trace, column: str, row: int | np.int64) -> str | None:
    code = int(trace[column][row])
    return trace.strings[code] if code >= 0 else None


def _short(trace: Trace, code: int) -> str:
    return trace.strings[code][:MAX_TEXT] if code >= 0 else ""


def _steps_in(track: Track, window: tuple[float, float]) -> tuple[list[tuple[int, int, int, str]], int]:
    """Return the steps that touch the window, or only every n-th if there are many, and n."""
    table = track.steps
    touching = np.flatnonzero((table[:, 2] >= window[0]) & (table[:, 1] < window[1]))
    every = 1
    for every in (m * 10**p for p in range(10) for m in (1, 2, 5)):
        if len(touching) / every <= MAX_STEPS:
            break
    if every > 1:
        touching = touching[table[touching, 0] % every == 0][: 2 * MAX_STEPS]
    return [(*table[i].tolist(), track.step_names[i][:40]) for i in touching], every


def _candidates(lane: Lane, window: tuple[float, float]) -> tuple[int, int]:
    """Return the range [first, last) of the lane's events that may touch the window."""
    first = int(np.searchsorted(lane.latest_end, window[0], side="left"))
    return first, max(first, int(np.searchsorted(lane.starts, window[1], side="left")))


def lane_segments(
    lanes: Sequence[Lane], window: tuple[float, float], width: int, budget: int, bins: int | None = None
) -> list[dict[str, NDArray[Any]]]:
    """Return the segments of each lane, at most `budget` in all. Lanes with few events come first; the others share the rest.

    `bins` is the highest number of segments for one lane (default: one per pixel).
    """
    ranges = [_candidates(lane, window) for lane in lanes]
    counts = [last - first for first, last in ranges]
    left, share = budget, {}
    for position, i in enumerate(np.argsort(counts, kind="stable").tolist()):
        share[i] = min(bins or width, left // (len(lanes) - position))
        left -= min(counts[i], share[i])
    return [
        _single_events(lane, ranges[i], window, width) if counts[i] <= share[i] else _binned(lane, window, width, share[i])
        for i, lane in enumerate(lanes)
    ]


def _single_events(lane: Lane, span: tuple[int, int], window: tuple[float, float], width: int) -> dict[str, NDArray[Any]]:
    part = slice(*span)
    starts, ends = lane.starts[part], lane.ends[part]
    size, modelled = np.diff(lane.bytes[span[0] : span[1] + 1]), np.diff(lane.modelled[span[0] : span[1] + 1])
    touches = ends >= window[0]
    scale = width * SUBPIXELS / (window[1] - window[0])
    columns = {
        "row": lane.rows[part],
        "count": np.ones(len(starts)),
        "bytes": size,
        "x0": np.clip((starts - window[0]) * scale, 0, width * SUBPIXELS),
        "x1": np.clip((ends - window[0]) * scale, 0, width * SUBPIXELS),
        "kind": KINDS.index(lane.kind) + MODELLED * modelled,
        "level": np.full(len(starts), 255),
    }
    return {name: column[touches] for name, column in columns.items()}


def _binned(lane: Lane, window: tuple[float, float], width: int, bins: int) -> dict[str, NDArray[Any]]:
    edges = np.linspace(window[0], window[1], bins + 1)
    index = np.searchsorted(lane.starts, edges, side="left")
    first, count = index[:-1], np.diff(index)
    busy = np.diff(lane.covered(edges)) / np.diff(edges)
    used = np.flatnonzero((count > 0) | (busy > 0))
    first, count = first[used], count[used]
    row = np.where(count > 0, first, np.maximum(first - 1, 0))
    last = np.where(count > 0, first + count, row + 1)
    x = np.round(np.linspace(0, width * SUBPIXELS, bins + 1))
    return {
        "row": lane.rows[row],
        "count": count,
        "bytes": lane.bytes[last] - lane.bytes[row],
        "x0": x[used],
        "x1": x[used + 1],
        "kind": KINDS.index(lane.kind) + MODELLED * (lane.modelled[last] > lane.modelled[row]),
        "level": np.clip(np.ceil(busy[used] * 255), 1, 255),
    }


def _texts(parts: Sequence[tuple[Track, dict[str, NDArray[Any]]]]) -> tuple[list[list[str]], NDArray[np.int64]]:
    """Return at most MAX_TEXTS (name, where) pairs of single events, and the index of each segment's pair or NO_TEXT."""
    table: dict[tuple[str, str], int] = {}
    length = 0
    codes = [np.zeros(0, np.int64)]
    for track, segments in parts:
        rows, trace = segments["row"], track.trace
        pair = (trace["name"][rows].astype(np.int64) << 32) | (trace["where"][rows].astype(np.int64) & 0xFFFFFFFF)
        unique, inverse = np.unique(pair, return_inverse=True)
        known = np.full(len(unique), NO_TEXT)
        for i in np.unique(inverse[segments["count"] <= 1]).tolist():
            name, where = int(unique[i] >> 32), int(unique[i] << 32 >> 32)
            text = _short(trace, name), _short(trace, where)
            if text not in table and len(table) < MAX_TEXTS and length < MAX_TEXTS_LENGTH:
                table[text] = len(table)
                length += len(json.dumps(text))
            known[i] = table.get(text, NO_TEXT)
        codes.append(known[inverse])
    return [list(text) for text in table], np.concatenate(codes)
