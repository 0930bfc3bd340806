"""The data of a timeline: small views of any range of time, sums, and searches.

A `Scene` puts one or two tracks on one time axis and returns views as bytes: single events if there are few, else one segment
per bin of pixels with its busy share, count and bytes. `page.js` does the same binning in JavaScript, for pages without Python.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.ma  # np.unique imports it when first called, which a user would wait for
from numpy.typing import NDArray

from toolkit.trace.columns import COPY_KINDS, KINDS
from toolkit.trace.differences import (
    description,
    description_of_ranks,
    difference,
    difference_of_ranks,
    step_facts,
    typical_step,
)
from toolkit.trace.events import Trace
from toolkit.ui.timeline.lanes import Lane
from toolkit.ui.timeline.track import Track

MAX_SEGMENTS = 2000  # per view: 20 bytes each, 40 KB in all
MARGIN = 0.04  # of a step's duration, shown on either side of the step
MAX_STEPS = 96  # step boundaries in a view
MAX_TEXTS = 240  # (name, where) pairs in a view
MAX_TEXTS_LENGTH = 9000  # total characters of these pairs
MAX_TEXT = 96  # characters of a name or a line in a view
NO_TEXT = 65535
MODELLED = 128  # bit of a segment's kind: its time is modelled
_LAYER = re.compile(r"layer (\d{1,5})")
SUBPIXELS = 16  # x positions are whole sixteenths of a pixel
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


class Scene:
    """One or two tracks (A above B) on one axis: time since each track's start, or since the start of its step `align`."""

    def __init__(self, tracks: Sequence[Track]) -> None:
        self.tracks = tuple(tracks)

    def meta(self) -> dict[str, Any]:
        """Return the description of all tracks for the front end (JSON-able)."""
        tracks = [track.meta for track in self.tracks]
        return {"tracks": tracks, "kinds": list(KINDS), "whole": list(self.bounds()), **self.opening}

    @cached_property
    def opening(self) -> dict[str, Any]:
        """The step that is shown first and a sentence about it, as `step` and `sentence`; None and "" without steps."""
        step = typical_step([track.steps_table for track in self.tracks])
        several = [track for track in self.tracks if track.links is not None]
        too_many = len(several) < sum(len(track.ranks) > 1 for track in self.tracks)  # ranks and collectives of a trace
        if several and (len(self.tracks) == 1 or step is None or too_many):
            told = [description_of_ranks(track.trace, track.title, step, track.steps_table) for track in several]
            return {"step": step, "sentence": "; ".join(told)}
        if step is None:
            return {"step": None, "sentence": ""}
        if several:
            a, b = self.tracks
            return {"step": step, "sentence": difference_of_ranks(a.trace, b.trace, (a.title, b.title), step)}
        facts = [step_facts(track.trace, track.title, step, track.steps_table) for track in self.tracks]
        sentence = difference(facts[0], facts[1]) if len(facts) > 1 else description(facts[0])
        return {"step": step, "sentence": sentence}

    def first_range(self, step: int | None) -> tuple[float, float]:
        """Return the range of the axis, aligned at `step`, that shows this step of all tracks. None: the whole axis."""
        if step is None:
            return self.bounds()
        found = [self.find_step(i, step, align=step) for i, track in enumerate(self.tracks)]
        end = max(1000.0, *(each[2] for each in found if each))  # in ns; a step may take no time
        return -MARGIN * end, (1 + MARGIN) * end

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
        counts, steps, hidden, links = [], [], [], []
        for track, origin in zip(self.tracks, origins, strict=True):
            window = (t0 + origin, t1 + origin)
            segments = lane_segments(track.lanes_in(window), window, width, MAX_SEGMENTS // len(self.tracks))
            counts.append([len(s["row"]) for s in segments])
            links.append(track.links.within(window, origin) if track.links else [])
            parts.extend((track, s) for s in segments)
            shown, every = _steps_in(track, window)
            steps.append([[n, start - origin, end - origin, name] for n, start, end, name in shown])
            hidden.append(every)
        texts, codes = _texts(parts)
        header = {
            **echo, "t0": t0, "t1": t1, "width": width, "align": align, "bounds": [low, high],
            "spans": [[t.start_ns - origin, t.end_ns - origin] for t, origin in zip(self.tracks, origins, strict=True)],
            "links": links, "counts": counts, "steps": steps, "every": hidden, "texts": texts,
            "near": None if np.sum([np.sum(c) for c in counts]) else self._nearest(t0, t1, origins),
        }  # fmt: skip
        blob = json.dumps(header, separators=(",", ":")).encode()
        blob += b" " * (-len(blob) % 4)
        columns = []
        for name, dtype in SEGMENT:
            values = [codes] if name == "text" else [s[name] for _, s in parts] or [codes]
            columns.append(np.concatenate(values).astype(dtype).tobytes())
        return struct.pack("<I", len(blob)) + blob + b"".join(columns)

    def _nearest(self, t0: float, t1: float, origins: Sequence[int]) -> list[float | None]:
        """Return, for a range without events, the end of the last event before it and the start of the first one after it."""
        before, after = [], []
        for track, origin in zip(self.tracks, origins, strict=True):
            for lane in track.lanes:
                at = int(np.searchsorted(lane.starts, t0 + origin))
                before += [int(lane.latest_end[at - 1]) - origin] if at else []
                after += [int(lane.starts[at]) - origin] if at < len(lane.starts) else []
        return [max(before, default=None), min(after, default=None)]

    def sums(self, t0: float, t1: float, align: int | None = None) -> list[list[list[float]]]:
        """Return [events that start in the range, time covered in ns, bytes of these events] per track and lane."""
        made = []
        for track, origin in zip(self.tracks, self.origins(align), strict=True):
            window = np.array([t0, t1]) + origin
            of_track = []
            for lane in track.lanes:
                first, last = np.searchsorted(lane.starts, window, side="left").tolist()
                busy = float(np.diff(lane.covered(window))[0])
                of_track.append([last - first, round(busy), int(lane.bytes[last] - lane.bytes[first])])
            made.append(of_track)
        return made

    def find(
        self, text: str, near: float, move: int, align: int | None = None, last: int | None = None
    ) -> dict[str, Any] | None:
        """Return the next event (`move` 1) or the previous one (-1), seen from `near`, that contains `text`.

        Names, lines and the operations of collectives are searched. "h2d", "d2h", "d2d" and "p2p" also find all copies of this
        kind, and "layer 17" all events of a layer.

        The result has its `track`, `row`, `start` and `end` on the axis, its `number` among the `count` found; None if no
        event contains it.
        `last`, the number of the event found before, takes the place of `near`: several events may start at the same time.
        """
        wanted = text.casefold()
        columns = ("name", "where", "operation")
        kind = KINDS.index(wanted) if wanted in (*COPY_KINDS, "p2p") else -1
        of_layer = _LAYER.fullmatch(wanted)
        layer = int(of_layer[1]) if of_layer else -2  # no event has it
        found = []
        for number, (track, origin) in enumerate(zip(self.tracks, self.origins(align), strict=True)):
            codes = np.array([wanted in known.casefold() for known in track.trace.strings] + [False])  # the last one: no text
            for lane in track.lanes:
                direct = [track.trace["kind"][lane.rows] == kind, track.trace["layer"][lane.rows] == layer]
                rows = lane.rows[np.any([*direct, *(codes[track.trace[column][lane.rows]] for column in columns)], axis=0)]
                found.append(np.stack([track.trace["start_ns"][rows] - origin, rows, np.full(len(rows), number)]))
        table = np.concatenate(found, 1) if found else np.zeros((3, 0), np.int64)
        if not wanted or not table.shape[1]:
            return None
        table = table[:, np.lexsort(table[::-1])]
        side: Literal["left", "right"] = "right" if move > 0 else "left"
        after = int(np.searchsorted(table[0], near, side=side)) if last is None else last - (move < 0)
        at = (after if move > 0 else after - 1) % table.shape[1]
        start, row, number = table[:, at].tolist()
        end = start + int(self.tracks[number].trace["dur_ns"][row])
        return {"track": number, "row": row, "start": start, "end": end, "number": at + 1, "count": table.shape[1]}

    def first(self, step: int | None) -> bytes:
        """Return the view of `step`, or of the whole axis if it is None: the first picture, before any request."""
        return self.view(*self.first_range(step), width=1000, align=step, seq=0, vid="")

    def find_step(
        self, track: int, step: int | None = None, near: float = 0.0, move: int = 0, align: int | None = None
    ) -> list[float] | None:
        """Return [number, start, end] on the axis of a step: number `step`, or the nearest number there is.

        With `move` 1 or -1, the step with the next or the previous number. Without `step`, `move` steps from the one at `near`.
        """
        chosen, origin = self.tracks[track], self.origins(align)[track]
        if not len(chosen.steps):
            return None
        if step is not None and move:
            numbers = np.unique(chosen.steps[:, 0])
            at = int(np.searchsorted(numbers, step, side="right")) if move > 0 else int(np.searchsorted(numbers, step)) - 1
            found = chosen.step_range(int(numbers[np.clip(at, 0, len(numbers) - 1)]))
        elif step is not None:
            found = chosen.step_range(step)
        else:
            at = int(np.searchsorted(chosen.steps[:, 1], near + origin + 0.5, side="right")) - 1
            found = tuple(chosen.steps[int(np.clip(at + move, 0, len(chosen.steps) - 1))].tolist())
        return [found[0], found[1] - origin, found[2] - origin] if found else None


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
    starts, ends, rows = lane.starts[part], lane.ends[part], lane.rows[part]
    touches = ends >= window[0]
    scale = width * SUBPIXELS / (window[1] - window[0])
    columns = {
        "row": rows,
        "count": np.ones(len(starts)),
        "bytes": lane.trace["bytes"][rows],
        "x0": np.clip((starts - window[0]) * scale, 0, width * SUBPIXELS),
        "x1": np.clip((ends - window[0]) * scale, 0, width * SUBPIXELS),
        "kind": KINDS.index(lane.kind) + MODELLED * lane.trace["clock"][rows].astype(np.int64),
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
