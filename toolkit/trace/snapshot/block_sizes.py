"""Compute the block sizes of CUDA's caching allocator from a memory history, which has only the requested sizes.

The rules are those of `toolkit.gpu.virtual.allocator.blocks`; a test compares the two. In the pool of large blocks, a remainder
of up to 1 MiB stays part of the block, so a block's size depends on the memory behind it. The history is therefore replayed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# the actions of history entries; "other" stands for unknown ones
ACTIONS = (
    "other", "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap",
    "oom", "free",
)  # fmt: skip
ACTION = {name: i for i, name in enumerate(ACTIONS)}
ROUND_BYTES = 512  # all sizes are multiples of this
SMALL_BYTES = 1 << 20  # the largest block of the small pool, in which remainders are always split off
_FIRST_INTERVAL = 20  # `roundup_power2_divisions` has a setting for each power of two from 1 MiB to 32 GiB
_INTERVALS = 16

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Rules:
    """The allocator settings that affect block sizes.

    `expandable`: segments are expandable, so every remainder is split off. `max_split_bytes`: blocks of at least this size are
    never split. `divisions`: number of rounding steps between powers of two, one entry per interval; 0 for no such rounding.
    """

    expandable: bool = False
    max_split_bytes: int | None = None
    divisions: tuple[int, ...] = ()

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Rules:
        """Return the rules in a snapshot's "allocator_settings". Missing or invalid values get PyTorch's defaults."""
        split, divisions = settings.get("max_split_size"), settings.get("roundup_power2_divisions")
        parts = [divisions.get(str(1 << i), 0) for i in range(_INTERVALS)] if isinstance(divisions, Mapping) else []
        whole = all(type(part) is int and 0 <= part < 1 << 20 for part in parts)
        return cls(
            settings.get("expandable_segments") is True,
            split if type(split) is int and split > 0 else None,
            tuple(parts) if whole and any(part > 1 for part in parts) else (),
        )

    def rounded(self, size: Ints) -> Ints:
        """Return `size` rounded up as the allocator does; 0 stays 0."""
        even = -(-size // ROUND_BYTES) * ROUND_BYTES
        if not self.divisions:
            return even
        power = np.frexp(np.maximum(size, 1))[1].astype(np.int64) - 1  # floor(log2(size))
        parts = np.array(self.divisions, np.int64)[np.clip(power - _FIRST_INTERVAL, 0, _INTERVALS - 1)]
        floor = np.left_shift(np.int64(1), power)
        step = np.maximum(floor // np.maximum(parts, 1), 1)
        divided = floor + -(-(size - floor) // step) * step
        return np.where((parts > 1) & (size > ROUND_BYTES * parts), divided, even)


def block_sizes(action: NDArray[Any], address: Ints, size: Ints, rules: Rules | None = None) -> Ints:
    """Return the block size of each alloc among the ordered entries of one device; other entries keep their size.

    `action` [N] has indices into ACTIONS, `size` [N] the requested bytes. The caller puts the memory in use at the beginning
    first: the segments, then the blocks by descending address, so that each block's successor is known. A block in an unknown
    or growing segment (segment_map) gets its rounded size.
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
    """The large blocks in use and the segments, by address. Each method returns the size of its block or segment."""

    def __init__(self, rules: Rules) -> None:
        self.uncut = rules.max_split_bytes or 1 << 62
        self.used: list[int] = []
        self.segments: list[int] = []
        self.ends: dict[int, int] = {}  # of segments, by start address

    def alloc(self, address: int, size: int) -> int:
        """Allocate `size` bytes at `address`. The result includes the remainder behind them if it is not split off."""
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
        """Free the block at `address`."""
        at = bisect_left(self.used, address)
        if at < len(self.used) and self.used[at] == address:
            del self.used[at]
        return size

    def segment_alloc(self, address: int, size: int) -> int:
        """Add a segment."""
        if address not in self.ends:
            insort(self.segments, address)
        self.ends[address] = address + size
        return size

    def segment_free(self, address: int, size: int) -> int:
        """Remove a segment."""
        if self.ends.pop(address, None) is not None:
            del self.segments[bisect_left(self.segments, address)]
        return size
