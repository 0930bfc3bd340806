"""Convert a memory history of one device and the memory in use at its end to rows of a Trace.

The module also reconstructs the size of each block and the opening: the blocks and segments that existed when the history
began. A block belongs to the opening if it is freed in the history, or alive at the end, without being allocated in it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.trace.assemble import KIND
from toolkit.trace.snapshot.block_sizes import ACTION, Rules, block_sizes

Ints = NDArray[np.int64]
Table = dict[str, Ints]

_ROWS = ("kind", "bytes", "stream", "where", "address", "requested", "time_us")
_KINDS = {
    "alloc": "alloc", "free_requested": "free", "free": "free", "oom": "oom", "segment_alloc": "segment_alloc",
    "segment_map": "segment_alloc", "segment_free": "segment_free", "segment_unmap": "segment_free",
}  # fmt: skip


@dataclass(frozen=True)
class History:
    """The ordered history entries of a device; `action` has indices into ACTIONS."""

    action: Ints
    address: Ints
    size: Ints
    stream: Ints
    time_us: Ints
    where: Ints

    def __len__(self) -> int:
        return len(self.action)

    def __getitem__(self, rows: Any) -> History:
        return History(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def does(self, *actions: str) -> NDArray[np.bool_]:
        """Return a mask of the entries whose action is in `actions`."""
        return np.isin(self.action, [ACTION[name] for name in actions])


@dataclass(frozen=True)
class _Pairs:
    """The entries at which blocks are allocated and freed."""

    alloc_of: Ints  # for each entry that is a free, its alloc; -1 otherwise
    first: Ints  # entries that free a block of the opening, or complete a free requested before the history
    last: Ints  # allocs of blocks that are alive at the end

    @classmethod
    def of(cls, history: History) -> _Pairs:
        alloc, free = history.does("alloc"), history.does("free_requested", "free")
        rows = np.flatnonzero(alloc | free | history.does("free_completed"))
        rows = rows[np.argsort(history.address[rows], kind="stable")]
        address = history.address[rows]
        same = np.concatenate([[False], address[1:] == address[:-1]])[: len(rows)]
        after_alloc = same & np.concatenate([[False], alloc[rows][:-1]])[: len(rows)]
        alloc_of = np.full(len(history), -1)
        freed = np.flatnonzero(free[rows] & after_alloc)
        alloc_of[rows[freed]] = rows[freed - 1]
        ends = np.concatenate([~same[1:], [True]])[: len(rows)]
        return cls(alloc_of, rows[~same & ~alloc[rows]], rows[ends & alloc[rows]])


def device_rows(history: History, segments: Table, blocks: Table, rules: Rules, n_opening: int = 0) -> tuple[Table, Table, int]:
    """Return the rows of the opening, the rows of the history, and the allocated bytes at the end that neither explains.

    `segments` and `blocks` exist at the end of the history. Both have columns address, size and stream; blocks also have
    requested, where and state (0: allocated). The first `n_opening` entries of the history belong to the opening.
    """
    pairs = _Pairs.of(history)
    before = _segments_before(history, segments)
    old, counts, known = _blocks_before(history, pairs, blocks)
    size, old_size = _sizes(history, before, old, rules, n_opening)
    old_size = np.where(known >= 0, known, old_size)
    live = blocks["state"] == 0
    _correct(history, pairs, blocks, live, size)
    freed = np.flatnonzero(pairs.alloc_of >= 0)
    size[freed] = size[pairs.alloc_of[freed]]
    requested = history.size.copy()
    requested[freed] = history.size[pairs.alloc_of[freed]]
    requested[~history.does("alloc", "free_requested", "free")] = -1
    first = np.flatnonzero(history.does("free_requested", "free") & np.isin(np.arange(len(history)), pairs.first))
    size[first] = _looked_up(history.address[first], old.address, old_size)

    opening = joined_rows(
        _rows(before, before.size, np.full(len(before), -1)), _rows(old[counts], old_size[counts], old.size[counts])
    )
    happened = history.does(*_KINDS)
    happened &= ~(history.does("free_requested", "free") & (pairs.alloc_of < 0))
    happened[first] = True
    rest = _rows(history[happened], size[happened], requested[happened])
    rest["time_us"] = np.maximum.accumulate(rest["time_us"]) if len(rest["time_us"]) else rest["time_us"]
    said = int(np.count_nonzero(happened[:n_opening]))
    opening = joined_rows(opening, {name: column[:said] for name, column in rest.items()})
    rest = {name: column[said:] for name, column in rest.items()}
    sums = [int(rows["bytes"][rows["kind"] == KIND[k]].sum()) * sign for rows in (opening, rest) for k, sign in _SIGNS]
    return opening, rest, int(blocks["size"][live].sum()) - sum(sums)


_SIGNS = (("alloc", 1), ("free", -1))


def _rows(history: History, size: Ints, requested: Ints) -> Table:
    """Return rows of a Trace for history entries."""
    kinds = np.zeros(len(ACTION), np.int64)
    for action, kind in _KINDS.items():
        kinds[ACTION[action]] = KIND[kind]
    oom = history.does("oom")
    columns = (
        kinds[history.action], size, history.stream, history.where, np.where(oom, -1, history.address),
        np.where(oom, history.size, requested), history.time_us,
    )  # fmt: skip
    return dict(zip(_ROWS, columns, strict=True))


def _looked_up(keys: Ints, known: Ints, values: Ints) -> Ints:
    """Return the value of each key. All keys must be in `known`."""
    order = np.argsort(known, kind="stable")
    return values[order[np.searchsorted(known, keys, sorter=order)]] if len(keys) else keys


def covered(start: Ints, size: Ints, taken: NDArray[np.bool_]) -> tuple[Ints, Ints, Ints]:
    """Apply the ranges in order, each taken or released. Return start, size and range index of the memory still taken."""
    bounds = np.unique(np.concatenate([start, start + size]))
    low, high = np.searchsorted(bounds, start), np.searchsorted(bounds, start + size)
    last = [-1] * len(bounds)  # the last range that covers the memory from each bound to the next
    following = list(range(len(bounds) + 1))  # union-find: the next bound that has none yet
    for i in range(len(start) - 1, -1, -1):
        at = int(low[i])
        while at < high[i]:
            if following[at] == at:
                last[at], following[at] = i, at + 1
            else:
                following[at] = following[following[at]]
            at = following[at]
    last_range = np.array(last, np.int64)
    owner = np.where((last_range >= 0) & np.append(taken, False)[last_range], last_range, -1)
    changes = np.flatnonzero(np.diff(owner, prepend=-2))
    begins = changes[owner[changes] >= 0]
    ends = np.append(changes, len(owner))[np.searchsorted(changes, begins) + 1]
    return bounds[begins], bounds[ends] - bounds[begins], owner[begins]


def _segments_before(history: History, segments: Table) -> History:
    """Return the segments at the beginning of the history: those at its end, with its segment events undone backwards."""
    events = history[history.does("segment_alloc", "segment_free", "segment_map", "segment_unmap")][::-1]
    starts = np.concatenate([segments["address"], events.address])
    sizes = np.concatenate([segments["size"], events.size])
    streams = np.concatenate([segments["stream"], events.stream])
    gone = np.concatenate([np.zeros(len(segments["size"]), np.bool_), events.does("segment_alloc", "segment_map")])
    maps = np.concatenate([segments["expandable"] != 0, events.does("segment_map", "segment_unmap")])
    address, size, whose = covered(starts, sizes, ~gone)
    kind = np.where(maps[whose], ACTION["segment_map"], ACTION["segment_alloc"])
    none = np.zeros(len(address), np.int64)
    return History(kind, address, size, streams[whose], none, none - 1)


def _blocks_before(history: History, pairs: _Pairs, blocks: Table) -> tuple[History, NDArray[np.bool_], Ints]:
    """Return the blocks of the opening by descending address (as allocs), a mask of the allocated ones, and their sizes.

    The size is -1 (not known) for blocks that are freed in the history.
    """
    stays = ~np.isin(blocks["address"], history.address[history.does("alloc", "free_requested", "free_completed", "free")])
    freed = history[pairs.first]
    unknown = np.full(len(freed), -1)
    parts = (
        (blocks["address"][stays], freed.address), (blocks["requested"][stays], freed.size),
        (blocks["stream"][stays], freed.stream), (blocks["where"][stays], unknown), (blocks["size"][stays], unknown),
        (blocks["state"][stays] == 0, ~freed.does("free_completed")),
    )  # fmt: skip
    columns = [np.concatenate(part) for part in parts]
    order = np.argsort(-columns[0], kind="stable")
    address, size, stream, where, known, counts = (column[order] for column in columns)
    none = np.zeros(len(order), np.int64)
    return History(none + ACTION["alloc"], address, size, stream, none, where), counts.astype(bool), known


def _sizes(history: History, before: History, old: History, rules: Rules, n_opening: int) -> tuple[Ints, Ints]:
    """Return the block sizes of the history entries and those of the opening."""
    order = np.arange(len(history))  # `block_sizes` needs the opening by descending address
    order[:n_opening] = np.lexsort((-history.address[:n_opening], history.does("alloc")[:n_opening]))
    parts = (before, old, history[order])
    action, address, size = (np.concatenate([getattr(part, n) for part in parts]) for n in ("action", "address", "size"))
    sizes = block_sizes(action, address, size, rules)[len(before) :]
    return sizes[len(old) :][np.argsort(order)], sizes[: len(old)].copy()


def _correct(history: History, pairs: _Pairs, blocks: Table, live: NDArray[np.bool_], size: Ints) -> None:
    """Set the sizes of blocks that are alive at the end to those in the snapshot."""
    at = np.searchsorted(history.address[pairs.last], blocks["address"])
    known = live & (at < len(pairs.last))
    known[known] = history.address[pairs.last][at[known]] == blocks["address"][known]
    size[pairs.last[at[known]]] = blocks["size"][known]


def joined_rows(*tables: Table) -> Table:
    """Concatenate the rows of several tables."""
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}


def joined(tables: list[Table]) -> dict[str, Any]:
    """Return the rows of several devices (opening rows first) as columns of a Trace, with streams numbered.

    Times are relative to the first event, whose time is in "start_us".
    """
    empty = {name: np.empty(0, np.int64) for name in (*_ROWS, "device")}
    columns: dict[str, Any] = joined_rows(empty, *tables)
    times = columns.pop("time_us")
    began = int(times[times > 0].min()) if (times > 0).any() else 0
    columns["start_ns"] = np.maximum(times - began, 0) * 1000
    columns["stream"] = _numbered(columns["stream"])
    columns["start_us"] = began
    return columns


def _numbered(streams: Ints) -> NDArray[np.int32]:
    """Number CUDA stream handles: 0 for the default stream, 1, 2, ... for others in order of appearance."""
    seen, first, which = np.unique(streams, return_index=True, return_inverse=True)
    first[seen == 0] = -1
    rank = np.empty(len(seen), np.int32)
    rank[np.argsort(first)] = np.arange(len(seen)) + (0 not in seen)
    return rank[which]
