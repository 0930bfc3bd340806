"""The data of a memory picture: stacked bands of the holders of memory, exact at any zoom and small for any trace.

A `MemoryView` groups the blocks of a ledger into a few bands. `columns` returns, for every pixel, the moment of that pixel at
which most memory was held, so that no peak is lost at any zoom. It stays fast for millions of events because the bands' sums
are stored every `_EVERY` events.

The axis counts events (all allocations and frees are equally wide) or nanoseconds. State 0 is the memory held when the
recording began; state k is the memory held after its k-th event.
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
from toolkit.trace.ledger import BY, NOWHERE, OTHER_KIND, UNOWNED, Ledger, line_of, place_text

Ints = NDArray[np.int64]
AXES = ("events", "time")
BEFORE, REST = "held before", "everything else"
MOST_ROWS = 20  # holders listed for a moment
MOST_MARKS = 60  # boundaries of steps or cells in a view
_EVERY = 128  # events between two stored sums
_STEADY = 0.5  # bands whose mean is at least this share of their own peak are drawn below the others
_PARTS = 200  # number of equal parts of the time
_UNEVEN = 0.25  # if a smaller share of these parts has events, the first axis is events instead of time
_OUTSIDE = {"step": "outside all steps", "cell": "outside all cells"}
_ROOT = re.compile(r"Out\[\d+\]|[^.\[ ]+")
_PART = re.compile(r"\.[^.\[ ]+|\[[^\]]*\]")


@dataclass(frozen=True)
class Band:
    """One of the stacked bands: its name, the name in words (a line with its source), and its bytes.

    `role` is "group", "rest" (all groups without a band of their own) or "before" (held before the recording, owner unknown).
    """

    name: str
    words: str
    role: str
    at_peak_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Columns:
    """The result of `MemoryView.columns`, one entry per pixel. `bands` has shape [bands, pixels]."""

    x0: float
    x1: float
    position: Ints  # in the ledger
    total: Ints
    bands: Ints
    reserved: Ints
    time_ns: Ints


@dataclass(frozen=True)
class Holding:
    """One row of a moment: a holder, its bytes and blocks, and the line of code that allocated them."""

    bytes: int
    blocks: int
    owner: str
    kind: str
    words: str
    code: str  # source of the line, "" if unknown
    place: str  # "cell 7 line 3", with the source of the line that it went through if only that one is known


@dataclass(frozen=True)
class Moment:
    """The blocks alive at a position: the largest holders, and the sum of the others. `total_bytes` counts all of them."""

    position: int
    time_ns: int
    total_bytes: int
    rows: tuple[Holding, ...]
    rest_bytes: int
    rest_holders: int


class MemoryView:
    """The memory of a ledger, grouped `by` one of BY into at most `most` bands, plus one for the rest and one for older memory.

    Raises UnknownNameError if `by` is not one of BY.
    """

    def __init__(self, ledger: Ledger, by: str = "owner", most: int = 11) -> None:
        self.ledger, self.most = ledger, most
        first = ledger.opening
        self.held: Ints = np.concatenate([[ledger.baseline_bytes], ledger.held[first:]])  # bytes of each state
        times = ledger.trace["start_ns"][ledger.rows[first:]].astype(np.float64)
        begun, ended = (float(times[0]), float(times[-1])) if len(times) else (0.0, 0.0)
        quiet = 0 <= begun <= ended - begun  # whether the clock starts at 0 with the recording
        self.times = np.concatenate([[0.0 if quiet else begun], times])  # time of each state
        self._group(by)

    def regrouped(self, by: str) -> MemoryView:
        """Return a view of the same memory, grouped `by` another attribute."""
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
        unknown = bool(len(blocks.begin) + np.count_nonzero(blocks.end < last) < last)  # frees of unrecorded blocks
        used = {*chosen[: self.most], *([n] if rest or unknown else []), *(i for i in range(n) if names[i] == BEFORE)}
        shown = sorted(used, key=lambda i: (names[i] != BEFORE, mean[i] < _STEADY * own[i], -own[i], str(names[i])))
        self.bands = tuple(
            Band(str(names[i]), self._words(names[i]), _role(names[i]), int(at_peak[i]), int(own[i])) for i in shown
        )
        code = np.zeros(n + 1, np.uint8)
        code[shown] = np.arange(len(shown))
        self._sum(code[merged], len(shown), int(code[n]))

    def _named(self, by: str) -> tuple[Ints, list[Any]]:
        """Return (code of each block, names). Owners are shortened to few variables; older blocks without one are BEFORE."""
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
        """Store the band of each event, and the bytes of all bands every `_EVERY` events."""
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
        """Return the bytes of every band at each position of the ledger, shape [bands, positions]."""
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
        """Return the first and the last value of an axis. The range is never empty."""
        if _known(axis) == "events":
            return 0.0, float(len(self.held))
        trace, low = self.ledger.trace, float(self.times[0])
        ran = slice(int(trace.meta.get("opening", 0)), None)
        ends = (trace["start_ns"][ran] + trace["dur_ns"][ran]).max(initial=0)
        return low, max(float(ends), float(self.times[-1]) + max(1.0, 0.004 * (float(self.times[-1]) - low)))

    @cached_property
    def axis(self) -> str:
        """The axis to show first: events if most of the time has no events, else time."""
        low, high = self.bounds("time")
        parts = min(_PARTS, max(len(self.times) - 1, 1))
        filled = len(np.unique(((self.times[1:] - low) / (high - low) * parts).astype(np.int64)))
        return "events" if filled < _UNEVEN * parts or len(self.times) < 4 else "time"

    def x_of(self, position: int, axis: str) -> float:
        """Return the value on an axis at which a position begins."""
        state = min(max(position - self.ledger.opening + 1, 0), len(self.held) - 1)
        return float(state) if _known(axis) == "events" else float(self.times[state])

    def _first(self, axis: str, x: NDArray[np.float64], after: bool = False) -> Ints:
        """Return the first state that begins at or after x (with `after`: strictly after x)."""
        if _known(axis) == "time":
            return np.searchsorted(self.times, x, side="right" if after else "left").astype(np.int64)
        found = np.floor(x) + 1 if after else np.ceil(x)
        return np.clip(found, 0, len(self.held)).astype(np.int64)

    def columns(self, x0: float, x1: float, width: int, axis: str = "events") -> Columns:
        """Return, for each of `width` pixels of [x0, x1), the moment with the most memory, and the bytes of every band then.

        A pixel without events repeats the state before it. The highest pixel of the whole range is the ledger's peak.
        """
        low, high = self.bounds(axis)
        if not low - (high - low) <= x0 < x1 <= high + (high - low):
            x0, x1 = low, high
        width = int(np.clip(width, 1, 20_000))
        edges = np.linspace(x0, x1, width + 1)
        first = self._first(axis, edges)
        state = np.maximum(self._first(axis, edges[:-1], after=True) - 1, 0)  # the state at the start of each pixel
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
        """Return at most about `most` moments in order: all of them, or the highest of each part of the recording."""
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
        """Source code by line, as far as it is known."""
        return dict(self.ledger.trace.meta.get("source") or {})

    @cached_property
    def clock(self) -> str:
        """The clock of the times: "measured" or "modelled"."""
        rows = self.ledger.rows[self.ledger.opening :]
        modelled = bool((self.ledger.trace["clock"][rows] == CLOCKS.index("modelled")).any())
        return "modelled" if modelled else str(self.ledger.trace.meta.get("clock", "measured")) if not len(rows) else "measured"

    @cached_property
    def divided(self) -> tuple[str, Ints, Ints]:
        """("step", "cell" or "", the states at which a new step or cell begins, their numbers)."""
        rows = self.ledger.rows[self.ledger.opening :]
        for what in ("step", "cell"):
            label = self.ledger.trace[what][rows]
            begins = np.flatnonzero(np.diff(label, prepend=label[:1] - 1)) if len(label) else label
            if len(begins) > 1:
                return what, begins.astype(np.int64) + 1, label[begins].astype(np.int64)
        return "", np.zeros(0, np.int64), np.zeros(0, np.int64)

    def marks(self, x0: float, x1: float, axis: str, most: int = MOST_MARKS) -> list[tuple[float, int]]:
        """Return (x, number) where steps or cells begin, only every n-th if there are many. Number -1: outside all of them."""
        _, states, numbers = self.divided
        x = states.astype(np.float64) if _known(axis) == "events" else self.times[states]
        inside = np.flatnonzero((x >= x0) & (x < x1))
        every = next(m * 10**p for p in range(12) for m in (1, 2, 5) if len(inside) <= most * m * 10**p)
        if every > 1:
            inside = inside[numbers[inside] % every == 0][: 2 * most]
        return [(float(x[i]), int(numbers[i])) for i in inside.tolist()]

    @cached_property
    def shortages(self) -> list[tuple[int, int]]:
        """(position, requested bytes) of every failed allocation."""
        trace = self.ledger.trace
        rows = np.flatnonzero(trace.is_kind("oom") & (trace["device"] == self.ledger.device))
        position = np.searchsorted(self.ledger.rows, rows) - 1
        return list(zip(position.tolist(), trace["bytes"][rows].tolist(), strict=True))

    # ---- who

    def at(self, position: int, most: int = MOST_ROWS) -> Moment:
        """Return the holders of memory at a position of the ledger: the `most` largest, and the sum of the rest."""
        ledger = self.ledger
        position = min(max(position, ledger.opening - 1), len(ledger.rows) - 1)
        return self._listed(ledger.alive(position), position, most)

    def kept(self, most: int = MOST_ROWS) -> Moment:
        """Return the holders of the blocks that were allocated during the recording and are alive at its end."""
        last = len(self.ledger.rows) - 1
        alive = self.ledger.alive(last)
        return self._listed(alive[self.ledger.blocks.begin[alive] >= self.ledger.opening], last, most)

    def _listed(self, alive: Ints, position: int, most: int) -> Moment:
        """Group the blocks `alive` by holder, the largest first."""
        blocks = self.ledger.blocks
        row, size = blocks.row[alive], blocks.bytes[alive]
        _, first, which = np.unique(self._holder[alive], return_index=True, return_inverse=True)
        total, count = np.bincount(which, size, len(first)).astype(np.int64), np.bincount(which, minlength=len(first))
        order = np.argsort(-total, kind="stable")
        rows = tuple(self._holding(int(row[first[i]]), int(total[i]), int(count[i])) for i in order[:most].tolist())
        time_ns, rest = int(self.times[position - self.ledger.opening + 1]), int(total[order[most:]].sum())
        return Moment(position, time_ns, int(size.sum()), rows, rest, max(len(order) - most, 0))

    def holders_of(self, blocks: Ints) -> tuple[list[list[str]], Ints]:
        """Return ([variable, owner, kind, source, place] of each holder, the number of the holder of each of `blocks`)."""
        _, first, which = np.unique(self._holder[blocks], return_index=True, return_inverse=True)
        rows = [self._holding(int(self.ledger.blocks.row[blocks[i]]), 0, 1) for i in first.tolist()]
        facts = [[self._variables.get(r.owner, r.owner), r.owner, r.kind, r.code, r.place] for r in rows]
        return facts, which.astype(np.int64)

    @cached_property
    def _holder(self) -> Ints:
        """A code for each block, equal for blocks of the same variable, kind and place."""
        trace, row, texts = self.ledger.trace, self.ledger.blocks.row, self.ledger.trace.strings
        code = {text: i for i, text in enumerate(dict.fromkeys(self._variables.values()))}
        owner = np.array([code.get(self._variables.get(text, ""), -1) for text in texts] + [-1], np.int64)[trace["owner"][row]]
        n = len(texts) + 1
        return ((owner + 1) * n + trace["name"][row] + 1) * n + trace["where"][row] + 1

    @cached_property
    def _variables(self) -> dict[str, str]:
        """The variable that stands for each owner."""
        trace = self.ledger.trace
        names = [trace.strings[code] for code in np.unique(trace["owner"][self.ledger.blocks.row]).tolist() if code >= 0]
        return dict(zip(names, _shortened(names, self.most), strict=True))

    def _holding(self, row: int, size: int, blocks: int) -> Holding:
        trace = self.ledger.trace
        owner, kind, where = (
            missing if trace[column][row] < 0 else trace.strings[int(trace[column][row])]
            for column, missing in (("owner", UNOWNED), ("name", OTHER_KIND), ("where", NOWHERE))
        )
        owner = self._variables.get(owner, owner) if blocks > 1 else owner
        code = self.source.get(line_of(where), "")
        if where == NOWHERE and row < int(trace.meta.get("opening", 0)):
            where = "before the recording"
        place = place_text(where, {} if code else self.source)
        return Holding(size, blocks, owner, kind, place_text(where, self.source), code, place)


def _known(axis: str) -> str:
    if axis not in AXES:
        raise unknown_name("axis", axis, AXES)
    return axis


def _role(name: Any) -> str:
    return {BEFORE: "before", REST: "rest"}.get(name, "group") if isinstance(name, str) else "group"


def _shortened(names: list[str], most: int) -> list[str]:
    """Shorten owners to paths of variables, as long as possible with at most `most` different ones, else to the root."""
    found = [_cut(name, 1) for name in names]
    for depth in range(2, 7):
        longer = [_cut(name, depth) for name in names]
        if len(set(longer)) > most:
            break
        found = longer
    return found


def _cut(name: str, depth: int) -> str:
    """Return the first `depth` parts of a path such as "model.layers.0.weight". All tensors of a traceback are one group."""
    if " (the traceback of " in name:
        return name.rpartition(" (")[2].rstrip(")")
    root = _ROOT.match(name)
    if root is None or name == UNOWNED:
        return name
    parts = _PART.findall(name[root.end() :].partition(" ")[0])
    return root[0] + "".join(parts[: depth - 1])
