"""How large the blocks of CUDA's caching allocator are, from a history that says only what was asked for.

The rules are those in `toolkit.gpu.virtual.allocator.blocks`, which a test holds this against. In the pool of large blocks a
remainder of up to 1 MiB is not cut off, so that how large a block is depends on what lay behind it: the history is
replayed. Arrays only: no file, no frames.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# what an entry of a history says was done; the first is for all that aren't known
ACTIONS = (
    "other", "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap",
    "oom", "free",
)  # fmt: skip
ACTION = {name: i for i, name in enumerate(ACTIONS)}
ROUND_BYTES = 512  # all sizes are multiples of this
SMALL_BYTES = 1 << 20  # blocks up to this size have a pool of their own, in which remainders are always cut off
_FIRST_INTERVAL = 20  # `roundup_power2_divisions` has a setting for each power of two from 1 MiB to 32 GiB
_INTERVALS = 16

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Rules:
    """The allocator's settings that change the size of blocks.

    `expandable`: blocks lie in expandable segments, where every remainder is cut off. `max_split_bytes`: blocks from this size
    on are never cut. `divisions`: into how many parts the way to the next power of two is cut, by interval; 0: not at all.
    """

    expandable: bool = False
    max_split_bytes: int | None = None
    divisions: tuple[int, ...] = ()

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Rules:
        """The rules in a snapshot's "allocator_settings". What isn't there or has another type is as PyTorch has it."""
        split, divisions = settings.get("max_split_size"), settings.get("roundup_power2_divisions")
        parts = [divisions.get(str(1 << i), 0) for i in range(_INTERVALS)] if isinstance(divisions, Mapping) else []
        whole = all(type(part) is int and 0 <= part < 1 << 20 for part in parts)
        return cls(
            settings.get("expandable_segments") is True,
            split if type(split) is int and split > 0 else None,
            tuple(parts) if whole and any(part > 1 for part in parts) else (),
        )

    def rounded(self, size: Ints) -> Ints:
        """`size` as the allocator rounds them: nothing stays nothing."""
        even = -(-size // ROUND_BYTES) * ROUND_BYTES
        if not self.divisions:
            return even
        power = np.frexp(np.maximum(size, 1))[1].astype(np.int64) - 1  # of the largest power of two that isn't larger
        parts = np.array(self.divisions, np.int64)[np.clip(power - _FIRST_INTERVAL, 0, _INTERVALS - 1)]
        floor = np.left_shift(np.int64(1), power)
        step = np.maximum(floor // np.maximum(parts, 1), 1)
        divided = floor + -(-(size - floor) // step) * step
        return np.where((parts > 1) & (size > ROUND_BYTES * parts), divided, even)


def block_sizes(action: NDArray[Any], address: Ints, size: Ints, rules: Rules | None = None) -> Ints:
    """How large the block of each alloc is, one device's entries in order; for all other entries, their size as it is.

    `action` [N] has indices into ACTIONS, `size` [N] the bytes that were asked for. What lay in memory when the history began
    goes before it, as entries: the segments, then the blocks by falling address, so that each finds its neighbour behind it.
    A block in a segment that isn't known, or one that grows (segment_map), ends where its size was rounded to.
    """
    rules = rules or Rules()
    rounded = rules.rounded(size)
    is_alloc = action == ACTION["alloc"]
    sizes: Ints = np.where(is_alloc, rounded, size)
    if rules.expandable:
        return sizes
    segment = (action == ACTION["segment_alloc"]) | (action == ACTION["segment_free"])
    freed = (action == ACTION["free_completed"]) | (action == ACTION["free"])
    rows = np.flatnonzero(((is_alloc | freed) & (rounded > SMALL_BYTES)) | segment)
    pool = _Pool(rules)
    steps = {
        ACTION["alloc"]: pool.alloc, ACTION["free"]: pool.free, ACTION["free_completed"]: pool.free,
        ACTION["segment_alloc"]: pool.segment_alloc, ACTION["segment_free"]: pool.segment_free,
    }  # fmt: skip
    columns = (action[rows].tolist(), address[rows].tolist(), sizes[rows].tolist())
    sizes[rows] = [steps[what](where, n) for what, where, n in zip(*columns, strict=True)]
    return sizes


class _Pool:
    """The large blocks in use and the segments, by address. Each step returns the size of what it was about."""

    def __init__(self, rules: Rules) -> None:
        self.uncut = rules.max_split_bytes or 1 << 62
        self.used: list[int] = []
        self.segments: list[int] = []
        self.ends: dict[int, int] = {}  # of segments, by where they begin

    def alloc(self, address: int, size: int) -> int:
        """Take a block of `size` bytes at `address`, and what is left behind it where that isn't cut off."""
        used, at = self.used, bisect_right(self.used, address)
        place = bisect_right(self.segments, address) - 1
        end = self.ends[self.segments[place]] if place >= 0 else 0
        if at < len(used) and used[at] < end:
            end = used[at]
        if not at or used[at - 1] != address:
            used.insert(at, address)
        left = end - address - size
        return size + left if 0 <= left <= SMALL_BYTES or (left > 0 and size >= self.uncut) else size

    def free(self, address: int, size: int) -> int:
        """Give the block at `address` back."""
        at = bisect_left(self.used, address)
        if at < len(self.used) and self.used[at] == address:
            del self.used[at]
        return size

    def segment_alloc(self, address: int, size: int) -> int:
        """Know of a segment."""
        if address not in self.ends:
            insort(self.segments, address)
        self.ends[address] = address + size
        return size

    def segment_free(self, address: int, size: int) -> int:
        """Forget a segment."""
        if self.ends.pop(address, None) is not None:
            del self.segments[bisect_left(self.segments, address)]
        return size
