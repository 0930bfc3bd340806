"""From a memory history and the memory at its end to rows of a Trace: what was there before, how large each block was.

Arrays only, one device at a time. A history begins somewhere: what lives at its end, or is freed in it, without having been
allocated in it, was there when it began.
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
    """The entries of a device in order; `action` has indices into ACTIONS."""

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
        """Which entries say that one of `actions` was done."""
        return np.isin(self.action, [ACTION[name] for name in actions])


@dataclass(frozen=True)
class _Pairs:
    """Which entry began and which ended a block's life."""

    alloc_of: Ints  # per entry: the alloc that a free belongs to, -1 for none
    first: Ints  # entries that free a block which lived before the history did, and those that end a free begun before it
    last: Ints  # allocs whose block lives on

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
    """Rows of what was there when the history began, rows of what happened, and bytes that the two don't account for.

    `segments` and `blocks` are what is at the end: address, size and stream of each, of blocks also requested, where and state
    (0 where it counts as allocated). The history's first `n_opening` entries say what was there at its beginning.
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
    """Rows of a Trace for entries."""
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
    """The value of each key, all of which are known."""
    order = np.argsort(known, kind="stable")
    return values[order[np.searchsorted(known, keys, sorter=order)]] if len(keys) else keys


def covered(start: Ints, size: Ints, taken: NDArray[np.bool_]) -> tuple[Ints, Ints, Ints]:
    """What memory is taken after all of it was `taken` or given back, in order: where it begins, its size, and by which."""
    bounds = np.unique(np.concatenate([start, start + size]))
    low, high = np.searchsorted(bounds, start), np.searchsorted(bounds, start + size)
    owner = np.full(len(bounds), -1)  # of the memory from a bound to the next: what says that it is taken
    for i in range(len(start)):
        owner[low[i] : high[i]] = i if taken[i] else -1
    changes = np.flatnonzero(np.diff(owner, prepend=-2))
    begins = changes[owner[changes] >= 0]
    ends = np.append(changes, len(owner))[np.searchsorted(changes, begins) + 1]
    return bounds[begins], bounds[ends] - bounds[begins], owner[begins]


def _segments_before(history: History, segments: Table) -> History:
    """The segments there were when the history began: those at its end, with what happened to them undone backwards."""
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
    """The blocks in use when the history began, by falling address, as allocs; which of them count as allocated; their sizes.

    The size of one that is freed in the history isn't known: -1.
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
    """How large blocks were: of each entry, and of each that was there before."""
    order = np.arange(len(history))  # `block_sizes` wants what was there by falling address
    order[:n_opening] = np.lexsort((-history.address[:n_opening], history.does("alloc")[:n_opening]))
    parts = (before, old, history[order])
    action, address, size = (np.concatenate([getattr(part, n) for part in parts]) for n in ("action", "address", "size"))
    sizes = block_sizes(action, address, size, rules)[len(before) :]
    return sizes[len(old) :][np.argsort(order)], sizes[: len(old)].copy()


def _correct(history: History, pairs: _Pairs, blocks: Table, live: NDArray[np.bool_], size: Ints) -> None:
    """The blocks that live at the end have the size that the snapshot says."""
    at = np.searchsorted(history.address[pairs.last], blocks["address"])
    known = live & (at < len(pairs.last))
    known[known] = history.address[pairs.last][at[known]] == blocks["address"][known]
    size[pairs.last[at[known]]] = blocks["size"][known]


def joined_rows(*tables: Table) -> Table:
    """Rows one after another."""
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}


def joined(tables: list[Table]) -> dict[str, Any]:
    """Rows of several devices as columns of a Trace: times from the first event on, streams numbered. Takes opening rows first.

    "start_us" is when the first event was.
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
    """CUDA's handles of streams as numbers: the default stream 0, others 1, 2, ... as first seen."""
    seen, first, which = np.unique(streams, return_index=True, return_inverse=True)
    first[seen == 0] = -1
    rank = np.empty(len(seen), np.int32)
    rank[np.argsort(first)] = np.arange(len(seen)) + (0 not in seen)
    return rank[which]
