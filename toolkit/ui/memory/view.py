"""What a picture of memory shows: stacked bands of who held the bytes, exact at any zoom, small whatever the trace's size.

A `MemoryView` groups the blocks of a ledger into a few bands and answers `columns`: for every pixel the moment when most
was held within that pixel, so that no peak is lost however far out one looks. Two million events are a reduction over
one column and a look at sums kept every `_EVERY` events. Knows numpy and the ledger; knows no widget and no browser.

The axis counts events (each allocation and free is as wide as any other) or nanoseconds. State 0 is what was held when the
recording began, state k what was held after its k-th event.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.core.errors import unknown_name
from toolkit.trace.columns import CLOCKS
from toolkit.trace.ledger import BY, NOWHERE, OTHER_KIND, UNOWNED, Ledger, place_text

Ints = NDArray[np.int64]
AXES = ("events", "time")
BEFORE, REST = "held before", "everything else"
MOST_ROWS = 20  # holders listed for a moment
MOST_MARKS = 60  # boundaries of steps or cells in a view
_EVERY = 128  # events between two kept sums
_STEADY = 0.5  # a band that holds this much of its own peak on average lies below those that come and go
_UNEVEN = 0.25  # of the parts of the time, how many have events at least where the time is worth an axis
_PARTS = 200
_OUTSIDE = {"step": "outside of every step", "cell": "outside of every cell"}
_ROOT = re.compile(r"Out\[\d+\]|[^.\[ ]+")
_PART = re.compile(r"\.[^.\[ ]+|\[[^\]]*\]")


@dataclass(frozen=True)
class Band:
    """One of the stacked bands: its name, the name in words (a line with its source), and its bytes.

    `role` is "group", "rest" (of the groups without a band of their own) or "before" (held before, nobody knows by whom).
    """

    name: str
    words: str
    role: str
    at_peak_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Columns:
    """What `MemoryView.columns` found, an entry a pixel; `bands` is [bands, pixels]."""

    x0: float
    x1: float
    position: Ints  # of the ledger
    total: Ints
    bands: Ints
    reserved: Ints
    time_ns: Ints


@dataclass(frozen=True)
class Holding:
    """One of the rows of a moment: who held how many bytes, in how many blocks, and from which place of the code."""

    bytes: int
    blocks: int
    owner: str
    kind: str
    words: str
    code: str  # the line's source, "" where it isn't known
    place: str  # "cell 7 line 3"


@dataclass(frozen=True)
class Moment:
    """What was alive at a position: the largest holders, and the sum of all others. `total_bytes` is of all of them."""

    position: int
    time_ns: int
    total_bytes: int
    rows: tuple[Holding, ...]
    rest_bytes: int
    rest_holders: int


class MemoryView:
    """The memory of a ledger, grouped `by` one of BY into at most `most` bands, what is left over, and what was held before.

    Raises UnknownNameError for another grouping.
    """

    def __init__(self, ledger: Ledger, by: str = "owner", most: int = 11) -> None:
        self.ledger, self.most = ledger, most
        first = ledger.opening
        self.held: Ints = np.concatenate([[ledger.baseline_bytes], ledger.held[first:]])  # of every state
        times = ledger.trace["start_ns"][ledger.rows[first:]].astype(np.float64)
        begun, ended = (float(times[0]), float(times[-1])) if len(times) else (0.0, 0.0)
        quiet = 0 <= begun <= ended - begun  # the recording began at 0; a clock that counts from elsewhere is no quiet time
        self.times = np.concatenate([[0.0 if quiet else begun], times])  # of every state
        self._group(by)

    def regrouped(self, by: str) -> MemoryView:
        """The same memory in other bands."""
        made = copy.copy(self)
        made._group(by)
        return made

    # ---- bands

    def _group(self, by: str) -> None:
        if by not in BY:
            raise unknown_name("grouping", by, BY)
        self.by = by
        codes, names = self._named(by)
        blocks, n = self.ledger.blocks, len(names)
        peak, last = self.ledger.peak, len(self.ledger.rows)
        at_peak = np.bincount(codes, blocks.bytes * ((blocks.begin <= peak) & (blocks.end > peak)), n)
        own = self.ledger.own_peaks(codes, n)
        order = np.argsort(-(at_peak + own), kind="stable")
        chosen = [i for i in order.tolist() if names[i] != BEFORE]
        rest = chosen[self.most :]
        into = np.arange(n, dtype=np.int64)
        into[rest] = n
        names = [*names, REST]
        merged = into[codes]
        at_peak = np.bincount(merged, blocks.bytes * ((blocks.begin <= peak) & (blocks.end > peak)), n + 1)
        own = self.ledger.own_peaks(merged, n + 1) if rest else np.append(own, 0)
        lived = np.minimum(blocks.end, last) - np.maximum(blocks.begin, self.ledger.opening - 1)
        mean = np.bincount(merged, blocks.bytes * lived, n + 1) / len(self.held)
        unknown = bool(len(blocks.begin) + np.count_nonzero(blocks.end < last) < last)  # frees of what the trace never saw
        used = {*chosen[: self.most], *([n] if rest or unknown else []), *(i for i in range(n) if names[i] == BEFORE)}
        shown = sorted(used, key=lambda i: (names[i] != BEFORE, mean[i] < _STEADY * own[i], -own[i], str(names[i])))
        self.bands = tuple(
            Band(str(names[i]), self._words(names[i]), _role(names[i]), int(at_peak[i]), int(own[i])) for i in shown
        )
        code = np.zeros(n + 1, np.uint8)
        code[shown] = np.arange(len(shown))
        self._sum(code[merged], len(shown), int(code[n]))

    def _named(self, by: str) -> tuple[Ints, list[Any]]:
        """(code of each block, names): owners cut to few enough variables, what was held before under its own name."""
        codes, names = self.ledger.group(by)
        if by == "owner":
            short = [self._variables.get(name, name) for name in names]
            found = {name: i for i, name in enumerate(dict.fromkeys(short))}
            codes, names = np.array([found[name] for name in short], np.int64)[codes] if names else codes, list(found)
        missing = {"owner": UNOWNED, "line": NOWHERE, "where": NOWHERE, "cell": -1, "step": -1}.get(by)
        old = self.ledger.blocks.begin < self.ledger.opening
        nobody = names.index(missing) if missing in names else -1
        if nobody >= 0 and bool((old & (codes == nobody)).any()):
            codes = np.where(old & (codes == nobody), len(names), codes)
            names = [*names, BEFORE]
        kept, codes = np.unique(codes, return_inverse=True)
        return codes.astype(np.int64), [names[i] for i in kept.tolist()]

    def _words(self, name: Any) -> str:
        if name in (BEFORE, REST):
            return str(name)
        if self.by in _OUTSIDE:
            return f"{self.by} {name}" if name >= 0 else _OUTSIDE[self.by]
        return place_text(name, self.source) if self.by in ("line", "where") else str(name)

    def _sum(self, code: NDArray[np.uint8], n: int, unknown: int) -> None:
        """Note each event's band, and what the bands held every `_EVERY` events."""
        blocks, change = self.ledger.blocks, self.ledger.change
        self._band = np.full(len(change), unknown, np.uint8)
        self._band[blocks.begin] = code
        freed = blocks.end < len(change)
        self._band[blocks.end[freed]] = code[freed]
        chunks = len(change) // _EVERY + 1
        cell = np.arange(len(change)) // _EVERY * n + self._band
        sums = np.bincount(cell, change, chunks * n).reshape(chunks, n).astype(np.int64)
        self._kept = np.concatenate([np.zeros((1, n), np.int64), np.cumsum(sums, axis=0)])

    def bands_at(self, position: Ints) -> Ints:
        """[bands, positions]: the bytes of every band at each position of the ledger."""
        n, whole = len(self.bands), (position + 1) // _EVERY
        found = self._kept[whole]  # [positions, bands]
        if n and len(self._band):
            event = whole[:, None] * _EVERY + np.arange(_EVERY)
            at, offset = np.nonzero(event <= position[:, None])
            event = event[at, offset]
            more = np.bincount(at * n + self._band[event], self.ledger.change[event], len(position) * n)
            found = found + more.reshape(len(position), n).astype(np.int64)
        return np.ascontiguousarray(found.T)

    # ---- axes

    def bounds(self, axis: str = "events") -> tuple[float, float]:
        """First and last place on an axis; never an empty range."""
        if _known(axis) == "events":
            return 0.0, float(len(self.held))
        trace, low = self.ledger.trace, float(self.times[0])
        ran = slice(int(trace.meta.get("opening", 0)), None)
        ends = (trace["start_ns"][ran] + trace["dur_ns"][ran]).max(initial=0)
        return low, max(float(ends), float(self.times[-1]) + max(1.0, 0.004 * (float(self.times[-1]) - low)))

    @cached_property
    def axis(self) -> str:
        """The axis to begin with: events, where much of the time has none."""
        low, high = self.bounds("time")
        parts = min(_PARTS, max(len(self.times) - 1, 1))
        filled = len(np.unique(((self.times[1:] - low) / (high - low) * parts).astype(np.int64)))
        return "events" if filled < _UNEVEN * parts or len(self.times) < 4 else "time"

    def x_of(self, position: int, axis: str) -> float:
        """Where on an axis a position begins."""
        state = min(max(position - self.ledger.opening + 1, 0), len(self.held) - 1)
        return float(state) if _known(axis) == "events" else float(self.times[state])

    def _first(self, axis: str, x: NDArray[np.float64], after: bool = False) -> Ints:
        """The first state that begins at x or later (with `after`, later)."""
        if _known(axis) == "time":
            return np.searchsorted(self.times, x, side="right" if after else "left").astype(np.int64)
        found = np.floor(x) + 1 if after else np.ceil(x)
        return np.clip(found, 0, len(self.held)).astype(np.int64)

    def columns(self, x0: float, x1: float, width: int, axis: str = "events") -> Columns:
        """For each of `width` pixels of [x0, x1): the moment when most was held, and what was held then, by whom.

        A pixel without events has what was held before it. The tallest of all pixels is the ledger's peak.
        """
        low, high = self.bounds(axis)
        if not low - (high - low) <= x0 < x1 <= high + (high - low):
            x0, x1 = low, high
        width = int(np.clip(width, 1, 20_000))
        edges = np.linspace(x0, x1, width + 1)
        first = self._first(axis, edges)
        state = np.maximum(self._first(axis, edges[:-1], after=True) - 1, 0)  # what holds where the pixel begins
        filled = np.flatnonzero(first[:-1] < first[1:])
        if len(filled):
            held, starts = self.held[first[0] : first[-1]], first[:-1][filled] - first[0]
            tops = np.maximum.reduceat(held, starts)
            hits = np.flatnonzero(held == np.repeat(tops, np.diff(np.append(starts, len(held)))))
            top = hits[np.searchsorted(hits, starts)] + first[0]
            state[filled] = np.where(self.held[top] > self.held[state[filled]], top, state[filled])
        return self._of_states(state, x0, x1)

    def _of_states(self, state: Ints, x0: float, x1: float) -> Columns:
        position = state + self.ledger.opening - 1
        reserved = np.zeros(len(state), np.int64)
        if self.knows_reserved:
            reserved = np.where(position >= 0, self.ledger.reserved[np.maximum(position, 0)], 0)
        times = self.times[state].astype(np.int64)
        return Columns(x0, x1, position, self.held[state], self.bands_at(position), reserved, times)

    def moments(self, most: int) -> Columns:
        """At most about `most` moments that draw the whole: all of them, or the highest of each part; in order."""
        if len(self.held) <= most:
            return self._of_states(np.arange(len(self.held)), *self.bounds("events"))
        found = [self.columns(*self.bounds(axis), most // 2, axis).position for axis in AXES]
        state = np.unique(np.concatenate([*found, [len(self.ledger.rows) - 1]])) - self.ledger.opening + 1
        return self._of_states(state, *self.bounds("events"))

    @cached_property
    def knows_reserved(self) -> bool:
        return len(self.ledger.reserved) > 0 and self.ledger.peak_reserved_bytes > 0

    # ---- what else is drawn

    @property
    def source(self) -> dict[str, str]:
        """The source of lines, where it is known."""
        return dict(self.ledger.trace.meta.get("source") or {})

    @cached_property
    def clock(self) -> str:
        """ "measured" or "modelled": what the times are."""
        rows = self.ledger.rows[self.ledger.opening :]
        modelled = bool((self.ledger.trace["clock"][rows] == CLOCKS.index("modelled")).any())
        return "modelled" if modelled else str(self.ledger.trace.meta.get("clock", "measured")) if not len(rows) else "measured"

    @cached_property
    def divided(self) -> tuple[str, Ints, Ints]:
        """(by "step", "cell" or "", the states at which another one begins, their numbers)."""
        rows = self.ledger.rows[self.ledger.opening :]
        for what in ("step", "cell"):
            label = self.ledger.trace[what][rows]
            begins = np.flatnonzero(np.diff(label, prepend=label[:1] - 1)) if len(label) else label
            if len(begins) > 1:
                return what, begins.astype(np.int64) + 1, label[begins].astype(np.int64)
        return "", np.zeros(0, np.int64), np.zeros(0, np.int64)

    def marks(self, x0: float, x1: float, axis: str, most: int = MOST_MARKS) -> list[tuple[float, int]]:
        """(x, number) where steps or cells begin, every so many where there are many; -1 where none does, but one ends."""
        _, states, numbers = self.divided
        x = states.astype(np.float64) if _known(axis) == "events" else self.times[states]
        inside = np.flatnonzero((x >= x0) & (x < x1))
        every = next(m * 10**p for p in range(12) for m in (1, 2, 5) if len(inside) <= most * m * 10**p)
        if every > 1:
            inside = inside[numbers[inside] % every == 0][: 2 * most]
        return [(float(x[i]), int(numbers[i])) for i in inside.tolist()]

    @cached_property
    def shortages(self) -> list[tuple[int, int]]:
        """(position, bytes asked for) of every allocation that failed."""
        trace = self.ledger.trace
        rows = np.flatnonzero(trace.is_kind("oom") & (trace["device"] == self.ledger.device))
        position = np.searchsorted(self.ledger.rows, rows) - 1
        return list(zip(position.tolist(), trace["bytes"][rows].tolist(), strict=True))

    # ---- who

    def at(self, position: int, most: int = MOST_ROWS) -> Moment:
        """Who held what at a position of the ledger: the `most` largest, and the rest summed."""
        ledger = self.ledger
        position = min(max(position, ledger.opening - 1), len(ledger.rows) - 1)
        return self._listed(ledger.alive(position), position, most)

    def kept(self, most: int = MOST_ROWS) -> Moment:
        """What was allocated while the recording ran, and is alive at its end."""
        last = len(self.ledger.rows) - 1
        alive = self.ledger.alive(last)
        return self._listed(alive[self.ledger.blocks.begin[alive] >= self.ledger.opening], last, most)

    def _listed(self, alive: Ints, position: int, most: int) -> Moment:
        """Blocks as the holders that they belong to; the total is theirs."""
        blocks = self.ledger.blocks
        row, size = blocks.row[alive], blocks.bytes[alive]
        _, first, which = np.unique(self._holder[alive], return_index=True, return_inverse=True)
        total, count = np.bincount(which, size, len(first)).astype(np.int64), np.bincount(which, minlength=len(first))
        order = np.argsort(-total, kind="stable")
        rows = tuple(self._holding(int(row[first[i]]), int(total[i]), int(count[i])) for i in order[:most].tolist())
        time_ns, rest = int(self.times[position - self.ledger.opening + 1]), int(total[order[most:]].sum())
        return Moment(position, time_ns, int(size.sum()), rows, rest, max(len(order) - most, 0))

    def holders_of(self, blocks: Ints) -> tuple[list[list[str]], Ints]:
        """([variable, owner, kind, source, place] of each holder, for each of `blocks` the number of its holder)."""
        _, first, which = np.unique(self._holder[blocks], return_index=True, return_inverse=True)
        rows = [self._holding(int(self.ledger.blocks.row[blocks[i]]), 0, 1) for i in first.tolist()]
        facts = [[self._variables.get(r.owner, r.owner), r.owner, r.kind, r.code, r.place] for r in rows]
        return facts, which.astype(np.int64)

    @cached_property
    def _holder(self) -> Ints:
        """A code of each block: equal for those of one variable, kind and place."""
        trace, row, texts = self.ledger.trace, self.ledger.blocks.row, self.ledger.trace.strings
        code = {text: i for i, text in enumerate(dict.fromkeys(self._variables.values()))}
        owner = np.array([code.get(self._variables.get(text, ""), -1) for text in texts] + [-1], np.int64)[trace["owner"][row]]
        n = len(texts) + 1
        return ((owner + 1) * n + trace["name"][row] + 1) * n + trace["where"][row] + 1

    @cached_property
    def _variables(self) -> dict[str, str]:
        """Every owner, and the variable that stands for it."""
        trace = self.ledger.trace
        names = [trace.strings[code] for code in np.unique(trace["owner"][self.ledger.blocks.row]).tolist() if code >= 0]
        return dict(zip(names, _shortened(names, self.most), strict=True))

    def _holding(self, row: int, size: int, blocks: int) -> Holding:
        trace = self.ledger.trace
        owner, kind, where = (
            missing if trace[column][row] < 0 else trace.strings[int(trace[column][row])]
            for column, missing in (("owner", UNOWNED), ("name", OTHER_KIND), ("where", NOWHERE))
        )
        outer, _, inner = where.partition(" > ")
        owner = self._variables.get(owner, owner) if blocks > 1 else owner
        code = self.source.get(outer) or self.source.get(inner) or ""
        if where == NOWHERE and row < int(trace.meta.get("opening", 0)):
            where = "before the recording"
        return Holding(size, blocks, owner, kind, place_text(where, self.source), code, place_text(where, {}))


def _known(axis: str) -> str:
    if axis not in AXES:
        raise unknown_name("axis", axis, AXES)
    return axis


def _role(name: Any) -> str:
    return {BEFORE: "before", REST: "rest"}.get(name, "group") if isinstance(name, str) else "group"


def _shortened(names: list[str], most: int) -> list[str]:
    """Owners as paths of variables, cut as far from the root as leaves at most `most` of them; at the root where none does."""
    found = [_cut(name, 1) for name in names]
    for depth in range(2, 7):
        longer = [_cut(name, depth) for name in names]
        if len(set(longer)) > most:
            break
        found = longer
    return found


def _cut(name: str, depth: int) -> str:
    """The first `depth` parts of "model.layers.0.weight"; what only a traceback holds is one group."""
    if " (the traceback of " in name:
        return name.rpartition(" (")[2].rstrip(")")
    root = _ROOT.match(name)
    if root is None or name == UNOWNED:
        return name
    parts = _PART.findall(name[root.end() :].partition(" ")[0])
    return root[0] + "".join(parts[: depth - 1])
