"""Where the virtual GPU's memory is: segments taken from the card, cut into blocks, as CUDA's caching allocator does it.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with its default settings: sizes are rounded up to 512 bytes;
blocks of up to 1 MiB come from segments of 2 MiB, larger ones from segments of 20 MiB, and from 10 MiB on from a
segment of their own, rounded up to 2 MiB. The smallest free block of the same stream that is large enough is taken; it is
cut where at least 512 bytes (small) or more than 1 MiB (large) would be left, and a block counts with what was left
uncut. Freed blocks join their free neighbours and stay reserved. It knows no tensors, no clock and no error: sizes only.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict

ROUND_BYTES = 512
SMALL_BYTES = 1 << 20
SMALL_SEGMENT_BYTES = 2 << 20
LARGE_SEGMENT_BYTES = 20 << 20
OWN_SEGMENT_BYTES = 10 << 20


def rounded(n_bytes: int) -> int:
    """`n_bytes` as the allocator rounds them: the next multiple of 512, and nothing for nothing."""
    return -(-n_bytes // ROUND_BYTES) * ROUND_BYTES


def segment_bytes(size: int) -> int:
    """How much is taken from the card for a block of `size` bytes where no free block will do."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES


class Block:
    """`size` bytes at `address` of the card, of which `requested` were asked for; `before` and `after` it in its segment."""

    __slots__ = ("address", "after", "before", "free", "pool", "requested", "size")

    def __init__(self, address: int, size: int, pool: tuple[bool, int], before: Block | None, after: Block | None) -> None:
        self.address, self.size, self.pool, self.before, self.after = address, size, pool, before, after
        self.requested, self.free = 0, False


class Blocks:
    """The blocks of a card of `total_bytes`. Not for several threads at once: its owner has the lock."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.reserved_bytes = 0
        self._next_address = 0
        self._free: defaultdict[tuple[bool, int], list[tuple[int, int]]] = defaultdict(list)  # (size, address), sorted
        self._at: dict[int, Block] = {}  # the free ones, by address

    def take(self, n_bytes: int, stream: int) -> Block | None:
        """A block for `n_bytes` on `stream`; None where the card is full, even without what is cached."""
        size = rounded(n_bytes)
        pool = (size <= SMALL_BYTES, stream)
        block = self._cached(pool, size) or self._fresh(pool, size)
        if block is None:
            return None
        left = block.size - size
        if left >= ROUND_BYTES if pool[0] else left > SMALL_BYTES:
            rest = Block(block.address + size, left, pool, block, block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.after, block.size = rest, size
            self._put(rest)
        block.requested = n_bytes
        return block

    def give(self, block: Block) -> None:
        """Take a block back. It joins its free neighbours, and stays reserved."""
        block.requested = 0
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._pull(other)
                low, high = (other, block) if other is block.before else (block, other)
                low.size, low.after = low.size + high.size, high.after
                if low.after is not None:
                    low.after.before = low
                block = low
        self._put(block)

    def fits(self, n_bytes: int) -> bool:
        """Could `n_bytes` be had, giving up what is cached where need be?"""
        size = rounded(n_bytes)
        cached = any(free and free[-1][0] >= size for (small, _), free in self._free.items() if small == (size <= SMALL_BYTES))
        return cached or self.reserved_bytes - self._idle_bytes() + segment_bytes(size) <= self.total_bytes

    def release(self) -> None:
        """Give the segments that are wholly free back to the card."""
        for block in [block for block in self._at.values() if block.before is None and block.after is None]:
            self._pull(block)
            self.reserved_bytes -= block.size

    def _cached(self, pool: tuple[bool, int], size: int) -> Block | None:
        free = self._free[pool]
        at = bisect_left(free, (size, -1))
        if at == len(free):
            return None
        block = self._at[free[at][1]]
        self._pull(block)
        return block

    def _fresh(self, pool: tuple[bool, int], size: int) -> Block | None:
        needed = segment_bytes(size)
        if self.reserved_bytes + needed > self.total_bytes:
            self.release()
            if self.reserved_bytes + needed > self.total_bytes:
                return None
        block = Block(self._next_address, needed, pool, None, None)
        self._next_address += needed
        self.reserved_bytes += needed
        return block

    def _put(self, block: Block) -> None:
        block.free = True
        self._at[block.address] = block
        insort(self._free[block.pool], (block.size, block.address))

    def _pull(self, block: Block) -> None:
        block.free = False
        del self._at[block.address]
        free = self._free[block.pool]
        del free[bisect_left(free, (block.size, block.address))]

    def _idle_bytes(self) -> int:
        return sum(block.size for block in self._at.values() if block.before is None and block.after is None)
