"""Memory use of a device over a trace, by owner, kind, line, cell and step.

A `Ledger` pairs each alloc of a trace with its free and computes the bytes held over time, the peak, and the share of each
group. It uses every event of the allocator, not samples, so its numbers are as exact as the trace.

Positions count the alloc and free events of one device in order; "at position p" means just after event p. Blocks that were
alive when the recording began (the first `trace.meta["opening"]` rows) form the baseline and never count as the peak.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from toolkit.core.errors import unknown_name
from toolkit.core.units import bytes_text
from toolkit.trace.columns import KINDS
from toolkit.trace.events import Trace
from toolkit.trace.waits import ranks_of

if TYPE_CHECKING:
    import pandas as pd

Ints = NDArray[np.int64]
BY = ("owner", "kind", "where", "line", "cell", "step")
UNOWNED, NOWHERE = "(no variable)", "(unknown line)"
_INDEX = r"(?<!\bOut)\[\d+\]"  # an element of a list
_WITHIN = re.compile(_INDEX + r"| \(its graph: [^)]*\)")
OTHER_KIND = "activations"  # the kind of tensors that are not named as weights, cache or the like


@dataclass(frozen=True)
class Blocks:
    """One entry per allocated block: positions of its alloc and its free (the number of positions if it is never freed), its
    size in bytes, and the row of its alloc in the trace."""

    begin: Ints
    end: Ints
    bytes: Ints
    row: Ints


class Ledger:
    """The memory of one device over a trace. The default `device` is that of the trace, or the one that allocated the most.

    Of a trace of several ranks, it is the memory of the rank that allocated the most (on `device`), and `trace` is the trace of
    that rank.

    Bytes include the allocator's rounding, as in `torch.cuda.memory_allocated`. `baseline_bytes` is the memory allocated
    when the recording began, `end_bytes` when it ended, and `peak_bytes` the maximum in between.
    """

    def __init__(self, trace: Trace, device: int | None = None) -> None:
        if len(ranks_of(trace)) > 1:
            trace = trace.of_rank(_busiest_rank(trace, device))
        self.trace = trace
        memory = trace.is_kind("alloc", "free")
        if device is None:
            device = trace.meta.get("device_index")
        self.device = self._busiest(memory) if device is None else int(device)
        on = trace["device"] == self.device
        self.rows: Ints = np.flatnonzero(memory & on)
        self._allocs = trace["kind"][self.rows] == KINDS.index("alloc")
        self.change: Ints = np.where(self._allocs, 1, -1) * trace["bytes"][self.rows]
        self.held: Ints = np.cumsum(self.change)
        self.opening = int(np.searchsorted(self.rows, int(trace.meta.get("opening", 0))))  # events of the baseline
        self._segments: Ints = np.flatnonzero(trace.is_kind("segment_alloc", "segment_free") & on)

    def _busiest(self, memory: NDArray[np.bool_]) -> int:
        """Return the device that allocated the most bytes after the opening, or the first device with memory events."""
        rows = np.flatnonzero(memory | self.trace.is_kind("segment_alloc"))
        since = rows[rows >= int(self.trace.meta.get("opening", 0))]
        since = since[self.trace.is_kind("alloc")[since]]
        if not len(since):
            return int(self.trace["device"][rows[0]]) if len(rows) else 0
        devices, which = np.unique(self.trace["device"][since], return_inverse=True)
        return int(devices[np.bincount(which, self.trace["bytes"][since]).argmax()])

    # ---- totals

    @property
    def baseline_bytes(self) -> int:
        return int(self.held[self.opening - 1]) if self.opening else 0

    @property
    def end_bytes(self) -> int:
        return int(self.held[-1]) if len(self.held) else 0

    @cached_property
    def peak(self) -> int:
        """The position of the peak, or of the last baseline event (-1 if none) if the baseline is never exceeded."""
        ran = self.held[self.opening :]
        if not len(ran) or int(ran.max()) <= self.baseline_bytes:
            return self.opening - 1
        return self.opening + int(ran.argmax())

    @property
    def peak_bytes(self) -> int:
        return int(self.held[self.peak]) if self.peak >= 0 else 0

    @property
    def kept_bytes(self) -> int:
        """`end_bytes` minus `baseline_bytes`; negative if memory was freed on balance."""
        return self.end_bytes - self.baseline_bytes

    @cached_property
    def freed_bytes(self) -> int:
        """Bytes of the baseline that were freed while the recording ran."""
        old = self.blocks.begin < self.opening
        return int(self.blocks.bytes[old & (self.blocks.end < len(self.rows))].sum())

    @cached_property
    def _taken(self) -> Ints:
        """Bytes reserved from the driver: before the first segment event, and after each segment event."""
        sign = np.where(self.trace["kind"][self._segments] == KINDS.index("segment_alloc"), 1, -1)
        return np.concatenate([[0], np.cumsum(sign * self.trace["bytes"][self._segments])])

    @cached_property
    def reserved(self) -> Ints:
        """Bytes reserved from the driver at each position; zeros if the trace has no segment events."""
        return self._taken[np.searchsorted(self._segments, self.rows)]

    @property
    def peak_reserved_bytes(self) -> int:
        """Maximum of the bytes reserved from the driver after the opening; 0 if the trace has no segment events."""
        old = np.searchsorted(self._segments, int(self.trace.meta.get("opening", 0)))
        return int(self._taken[old:].max())

    @cached_property
    def cached(self) -> Ints:
        """Bytes reserved but not allocated at each position; zeros if the trace has no segment events."""
        return np.maximum(self.reserved - self.held, 0) if len(self._segments) else np.zeros_like(self.held)

    # ---- blocks

    @cached_property
    def blocks(self) -> Blocks:
        """Allocs paired with their frees, by address.

        A free whose alloc is not in the trace has no block. Events without an address are paired if their sizes are equal: a
        free ends the latest of these blocks.
        """
        address = self.trace["address"][self.rows]
        key = np.where(address >= 0, address, -1 - np.abs(self.change))
        order = np.argsort(key, kind="stable")
        allocs = self._allocs[order]
        level = np.cumsum(np.where(allocs, 1, -1)) + ~allocs  # an alloc and its free are neighbours among those of one level
        place = np.lexsort((level, key[order]))
        order, level = order[place], level[place]
        same = (key[order][1:] == key[order][:-1]) & (level[1:] == level[:-1])
        pairs = np.flatnonzero(same & self._allocs[order][:-1] & ~self._allocs[order][1:])
        end = np.full(len(self.rows), len(self.rows), np.int64)
        end[order[pairs]] = order[pairs + 1]
        begin = np.flatnonzero(self._allocs)
        return Blocks(begin, end[begin], self.change[begin], self.rows[begin])

    def alive(self, at: int | None = None) -> Ints:
        """Return the indices of the blocks alive at a position (default: the peak), the largest first."""
        at = self.peak if at is None else at
        found = np.flatnonzero((self.blocks.begin <= at) & (self.blocks.end > at))
        return found[np.argsort(-self.blocks.bytes[found], kind="stable")]

    def position(self, time_ns: int) -> int:
        """Return the last position at or before a time of the trace, or -1 if there is none."""
        return int(np.searchsorted(self.trace["start_ns"][self.rows], time_ns, side="right")) - 1

    def group(self, by: str) -> tuple[Ints, list[Any]]:
        """Return the group code of each block and the group names. Raises UnknownNameError if `by` is not in BY."""
        if by not in BY:
            raise unknown_name("grouping", by, BY)
        row = self.blocks.row
        if by in ("cell", "step"):
            found, codes = np.unique(self.trace[by][row], return_inverse=True)
            return codes.astype(np.int64), found.tolist()
        if by == "line":
            return self._renamed("where", line_of, NOWHERE)
        missing = {"owner": UNOWNED, "kind": OTHER_KIND, "where": NOWHERE}[by]
        return self._renamed({"kind": "name"}.get(by, by), lambda text: text, missing)

    def _renamed(self, column: str, name: Callable[[str], str], missing: str) -> tuple[Ints, list[Any]]:
        """Return the group codes and names of a text column, grouped by `name(text)`."""
        found, codes = np.unique(self.trace[column][self.blocks.row], return_inverse=True)
        texts = [name(self.trace.strings[code]) if code >= 0 else missing for code in found.tolist()]
        groups = {text: i for i, text in enumerate(dict.fromkeys(texts))}
        return np.array([groups[text] for text in texts], np.int64)[codes] if texts else codes.astype(np.int64), list(groups)

    # ---- tables

    def holders(self, at: int | None = None) -> pd.DataFrame:
        """Return the memory held at a position (default: the peak), one row per owner, kind and line, the largest first.

        Columns: bytes, blocks (count), share (of the bytes held), owner, kind, where, cell and step (of the largest block).
        """
        import pandas as pd

        alive = self.alive(at)
        codes = {by: self.group(by) for by in ("owner", "kind", "where")}
        key = np.stack([codes[by][0][alive] for by in codes]) if len(alive) else np.zeros((3, 0), np.int64)
        _, first, which = np.unique(key, axis=1, return_index=True, return_inverse=True)
        size = np.bincount(which.ravel(), self.blocks.bytes[alive], len(first)).astype(np.int64)
        order = np.argsort(-size, kind="stable")
        largest = alive[first[order]]  # `alive` is sorted by size, so the first block of a group is its largest
        table: dict[str, Any] = {"bytes": size[order], "blocks": np.bincount(which.ravel(), minlength=len(first))[order]}
        table["share"] = size[order] / max(int(size.sum()), 1)
        for by, (code, names) in codes.items():
            table[by] = [names[c] for c in code[largest].tolist()]
        for by in ("cell", "step"):
            table[by] = self.trace[by][self.blocks.row[largest]]
        return pd.DataFrame(table)

    def by(self, what: str) -> pd.DataFrame:
        """Return one row per owner, kind, where, line, cell or step (`what`), sorted by the bytes held at the peak.

        Columns: `what`, at_peak_bytes (at the peak of the total), peak_bytes (the maximum of the group), end_bytes,
        allocated_bytes (sum of all allocations of the recording) and blocks. Baseline blocks are included, except in
        allocated_bytes. By "kind", there is a row for cached memory (reserved but not allocated) if the trace has segment
        events.
        """
        import pandas as pd

        codes, names = self.group(what)
        b, n = self.blocks, len(names)

        def total(mask: NDArray[np.bool_]) -> Ints:
            return np.bincount(codes[mask], b.bytes[mask], n).astype(np.int64)

        table = {
            what: names, "at_peak_bytes": total((b.begin <= self.peak) & (b.end > self.peak)),
            "peak_bytes": self.own_peaks(codes, n), "end_bytes": total(b.end == len(self.rows)),
            "allocated_bytes": total(b.begin >= self.opening), "blocks": np.bincount(codes, minlength=n),
        }  # fmt: skip
        frame = pd.DataFrame(table)
        cached = self.cached[max(self.opening - 1, 0) :]
        if what == "kind" and cached.any():
            at_peak = int(self.cached[self.peak]) if self.peak >= 0 else 0
            frame.loc[len(frame)] = ["cached", at_peak, int(cached.max()), int(self._taken[-1]) - self.end_bytes, 0, 0]
        return frame.sort_values(["at_peak_bytes", "peak_bytes"], ascending=False, ignore_index=True)

    def own_peaks(self, codes: Ints, n: int) -> Ints:
        """Return the maximum number of bytes that each group held at any time."""
        b, freed = self.blocks, self.blocks.end < len(self.rows)
        at = np.concatenate([b.begin, b.end[freed]])
        change = np.concatenate([b.bytes, -b.bytes[freed]])
        group = np.concatenate([codes, codes[freed]])
        order = np.lexsort((at, group))
        running, group = np.cumsum(change[order]), group[order]
        peaks = np.zeros(n, np.int64)
        if len(group):
            starts = np.flatnonzero(np.diff(group, prepend=-1))
            before = np.where(starts > 0, running[starts - 1], 0)
            peaks[group[starts]] = np.maximum.reduceat(running, starts) - before
        return peaks

    def over(self, what: str) -> pd.DataFrame:
        """Return the total over time, one row per run of events of the same "cell" or "step" (`what`).

        Columns: `what`, baseline_bytes (before the first event), peak_bytes, end_bytes, kept_bytes (end - baseline), events.
        Raises UnknownNameError for another `what`.
        """
        import pandas as pd

        if what not in ("cell", "step"):
            raise unknown_name("grouping over time", what, ("cell", "step"))
        label, held = self.trace[what][self.rows][self.opening :], self.held[self.opening :]
        starts = np.flatnonzero(np.diff(label, prepend=label[0] - 1)) if len(label) else np.zeros(0, np.int64)
        ends = np.append(starts[1:], len(label))
        before = np.where(starts > 0, held[starts - 1], self.baseline_bytes) if len(label) else starts
        peaks = np.maximum.reduceat(held, starts) if len(label) else starts
        last = held[ends - 1] if len(label) else starts
        return pd.DataFrame({
            what: label[starts], "baseline_bytes": before, "peak_bytes": np.maximum(peaks, before), "end_bytes": last,
            "kept_bytes": last - before, "events": ends - starts,
        })  # fmt: skip

    # ---- words

    def sentences(self, at: int | None = None, most: int = 5) -> list[str]:
        """Return sentences about those that held the most memory at a position (default: the peak), at most `most`.

        Elements of one list that one line allocated are one sentence. The source lines come from `trace.meta["source"]`.
        Example: "4.00 GiB: logits.float() in cell 7 line 3, held by `out`".
        """
        alike: dict[tuple[str, str], list[Any]] = {}
        for row in self.holders(at).itertuples():
            alike.setdefault((whole(row.owner), row.where), []).append(row)
        source = self.trace.meta.get("source", {})
        lines = []
        for (_, where), rows in sorted(alike.items(), key=lambda group: -sum(row.bytes for row in group[1]))[:most]:
            size, blocks = sum(row.bytes for row in rows), sum(row.blocks for row in rows)
            count = f" in {blocks:,} blocks" if blocks > 1 else ""
            held = together(row.owner for row in rows)
            held = f", held by {held}" if held != f"`{UNOWNED}`" else ""
            lines.append(f"{bytes_text(size)}{count}: {place_text(where, source)}{held}")
        return lines

    def __repr__(self) -> str:
        peak, kept = bytes_text(self.peak_bytes), bytes_text(self.kept_bytes)
        return f"Ledger(peak {peak}, baseline {bytes_text(self.baseline_bytes)}, kept {kept}, {len(self.rows):,} events)"


def devices_of(trace: Trace) -> list[int]:
    """Return the devices whose memory is in a trace."""
    devices = trace["device"][trace.is_kind("alloc", "free", "segment_alloc", "segment_free")]
    return np.flatnonzero(np.bincount(devices[devices >= 0])).tolist()


def fullest(trace: Trace) -> int | None:
    """Return the device with the highest peak, or None if the trace has no memory of several devices."""
    devices = devices_of(trace)
    if len(devices) < 2:
        return None
    ledgers = [Ledger(trace, device) for device in devices]
    return max(ledgers, key=lambda ledger: (ledger.peak_bytes, ledger.peak_reserved_bytes)).device


def _busiest_rank(trace: Trace, device: int | None) -> int:
    """Return the rank that allocated the most bytes (on `device`), or the first one of the trace."""
    ranks, which = np.unique(trace["rank"], return_inverse=True)
    counted = trace.is_kind("alloc") & (True if device is None else trace["device"] == device)
    allocated = np.where(counted, trace["bytes"], 0)
    return int(ranks[np.bincount(which, allocated).argmax()])


def whole(owner: str) -> str:
    """Return the variable without the elements and the graph: "history" for "history[3] (its graph: MulBackward0)"."""
    return _WITHIN.sub("", owner)


def together(owners: Iterable[str]) -> str:
    """Return owners that have the same `whole`, in words: "`x`", "elements of `history`" or "`loss` and its graph"."""
    different = list(dict.fromkeys(owners))
    if len(different) == 1:
        return f"`{different[0]}`"
    name = whole(different[0])
    return f"elements of `{name}`" if any(re.search(_INDEX, one) for one in different) else f"`{name}` and its graph"


def line_of(where: str) -> str:
    """Return the line of the user's code: the outer frame of "cell 7:3 > model.py:41"."""
    return where.partition(" > ")[0]


def place_text(where: str, source: dict[str, str]) -> str:
    """Return a place in words, with its source if known: "x.float() in cell 7 line 3, through model.py line 41".

    The source of the inner line is only given if that of the outer one is unknown.
    """
    outer, _, inner = where.partition(" > ")
    words = _line_words(outer, source)
    return f"{words}, through {_line_words(inner, {} if outer in source else source)}" if inner else words


def _line_words(place: str, source: dict[str, str]) -> str:
    file, colon, line = place.rpartition(":")
    words = f"{file} line {line}" if colon and line.isdigit() else place
    return f"{source[place]} in {words}" if source.get(place) else words
