"""Where the virtual GPU's memory is: segments taken from the card, cut into blocks, as CUDA's caching allocator does it.

The rules are those of c10/cuda/CUDACachingAllocator.cpp. Sizes are rounded up to 512 bytes; blocks of up to 1 MiB come from
segments of 2 MiB, larger ones from segments of 20 MiB, and from 10 MiB on from a segment of their own, rounded up to 2 MiB.
The smallest free block of the same stream that is large enough is taken; it is cut where at least 512 bytes (small) or more
than 1 MiB (large) would be left, and a block counts with what was left uncut. Freed blocks join their free neighbours and
stay reserved. With expandable segments a stream has one range of addresses for small and one for large blocks, of which
2 MiB or 20 MiB at a time are backed by memory. It knows no tensors, no clock and no error: sizes only.
"""

from __future__ import annotations

from bisect import bisect_left

from toolkit.gpu.virtual.allocator.expandable import Growing
from toolkit.gpu.virtual.allocator.pieces import SMALL_BYTES, Block, Shelf, segment_bytes
from toolkit.gpu.virtual.allocator.settings import ROUND_BYTES, Settings, rounded

MOST_UNCUT_BYTES = 20 << 20  # a block that is never cut may be this much larger than what is asked for

__all__ = ["Block", "Blocks", "Settings", "rounded", "segment_bytes"]


class Blocks(Growing):
    """The blocks of a card of `total_bytes`. Not for several threads at once: its owner has the lock.

    `limit_bytes` is what the process may take of the card.
    """

    def __init__(self, total_bytes: int, settings: Settings | None = None) -> None:
        super().__init__(total_bytes)
        self.limit_bytes: int | None = None
        self.use(settings or Settings())

    def use(self, settings: Settings) -> None:
        """Let `settings` hold from now on."""
        self.settings = settings
        self._steps, self._max_split = settings.steps(), settings.max_split_bytes
        self._plain = self._max_split is None and not settings.expandable_segments

    def take(self, n_bytes: int, stream: int) -> Block | None:
        """A block for `n_bytes` on `stream`; None where the card is full, even without what is cached."""
        size = rounded(n_bytes, self._steps) if self._steps else -(-n_bytes // ROUND_BYTES) * ROUND_BYTES
        shelf = self._shelves.get((size <= SMALL_BYTES, stream)) or self._shelf(size <= SMALL_BYTES, stream)
        pool = shelf.pool
        counters = self.counters
        if counters.loosened:
            counters.note_loose()
        pool.requests += 1
        block = self._cached(shelf, size) or self._fresh(shelf, size)
        if block is None:
            return None
        left = block.size - size
        if left >= ROUND_BYTES and (pool.small or block.expandable or self._cuts(size, left)):
            was_whole = block.before is None and block.after is None
            self._put(block.cut(size))
            if not block.expandable:
                pool.cut(was_whole, size, left)
                counters.loosened = True
        elif not block.expandable and not block.whole:
            pool.fill(block.size)
        block.requested = n_bytes
        pool.taken += 1
        pool.taken_bytes += block.size
        pool.taken_requested += n_bytes
        counters.grown = True
        if self._max_split is not None and block.size >= self._max_split:
            counters.oversize_allocations.rise(1)
        return block

    def give(self, block: Block) -> None:
        """Take a block back. It joins its free neighbours, and stays reserved."""
        counters, pool, size = self.counters, block.shelf.pool, block.size
        if counters.grown:
            counters.note_grown()
        pool.given += 1
        pool.given_bytes += size
        pool.given_requested += block.requested
        block.requested = 0
        if self._max_split is not None and size >= self._max_split:
            counters.oversize_allocations.fall(1)
        joined = 0
        other = block.after
        if other is not None and other.free:
            self._pull(other)
            block.absorb(other)
            joined = 1
        other = block.before
        if other is not None and other.free:
            self._pull(other)
            other.absorb(block)
            block, joined = other, joined + 1
        if not block.expandable:
            whole = block.before is None and block.after is None
            if (whole or joined == 2) and counters.loosened:  # fewer pieces than before
                counters.note_loose()
            pool.loosen(joined, size, block.size, whole)
            counters.loosened = True
        self._put(block)

    def fits(self, n_bytes: int) -> bool:
        """Could `n_bytes` be had, giving up what is cached where need be? With expandable segments: perhaps."""
        size = rounded(n_bytes, self._steps)
        limit = self.total_bytes if self.limit_bytes is None else min(self.total_bytes, self.limit_bytes)
        if self.settings.expandable_segments:
            return self.counters.bytes + size <= limit
        small = size <= SMALL_BYTES
        cached = any(s.free and s.free[-1][0] >= size for s in self._shelves.values() if s.pool.small == small)
        return cached or self.reserved_bytes - self._idle_bytes() + segment_bytes(size) <= limit

    def release(self) -> None:
        """Give the segments that are wholly free, and the free parts of expandable ones, back to the card."""
        self.counters.syncs += 1
        for shelf in self._in_order():
            blocks = [self._at[address] for _, address in shelf.free]
            for block in blocks:
                if not block.expandable and block.whole:
                    self._drop(block)
            for block in blocks:
                if block.expandable:
                    self._unmap(block)

    # ---- finding

    def _shelf(self, small: bool, stream: int) -> Shelf:
        pool = self.counters.small if small else self.counters.large
        shelf = self._shelves[small, stream] = Shelf(pool, stream)
        return shelf

    def _in_order(self) -> list[Shelf]:
        """Large blocks before small ones, then by stream: the order in which they are given back."""
        return [self._shelves[key] for key in sorted(self._shelves)]

    def _cuts(self, size: int, left: int) -> bool:
        """Is what a large block has `left` cut off, for a request of `size`?"""
        if self.settings.expandable_segments:
            return True
        return left > SMALL_BYTES and (self._max_split is None or size < self._max_split)

    def _cached(self, shelf: Shelf, size: int) -> Block | None:
        free = shelf.free
        at = bisect_left(free, (size, -1))
        if at == len(free):
            return None
        if not self._plain:
            chosen = self._suited(shelf, size, at)
            if chosen is None:
                return None
            at = chosen
        block = self._at.pop(free[at][1])
        del free[at]
        block.free = False
        return block

    def _suited(self, shelf: Shelf, size: int, at: int) -> int | None:
        """Which free block from position `at` on will do, under max_split_size_mb or with segments that can grow."""
        free, limit = shelf.free, self._max_split
        if self.settings.expandable_segments:
            while at + 1 < len(free) and self._at[free[at][1]].expandable and self._reach(free[at + 1]) < self._reach(free[at]):
                at += 1
        if limit is not None and size < limit <= free[at][0]:
            return None
        if limit is not None and size >= limit and free[at][0] >= size + MOST_UNCUT_BYTES:
            return None
        return at

    def _reach(self, entry: tuple[int, int]) -> int:
        """The size a free block could grow to in place."""
        after = self._at[entry[1]].after
        return entry[0] + (after.size if after is not None and not after.mapped else 0)

    # ---- taking from the card

    def _fresh(self, shelf: Shelf, size: int) -> Block | None:
        if self.settings.garbage_collection_threshold and self.limit_bytes is not None:
            self._collect(self.limit_bytes)
        block = self._segment(shelf, size)
        if block is None and self._max_split is not None and self._give_oversized(shelf, size):
            block = self._segment(shelf, size)
        if block is None:
            self.release()
            self.counters.retries += 1
            block = self._segment(shelf, size)
        if block is None:
            self.counters.ooms += 1
        return block

    def _segment(self, shelf: Shelf, size: int) -> Block | None:
        """A block from the card, not cut yet; None where there is no room for it."""
        needed = segment_bytes(size)
        if self.limit_bytes is not None and self.reserved_bytes + needed > self.limit_bytes:
            return None
        if self.settings.expandable_segments:
            return self._grown(shelf, size)
        if self.reserved_bytes + needed > self.total_bytes:
            return None
        block = Block(self._next_address, needed, shelf, None, None)
        self._next_address += needed
        self._heads[block.address] = block
        self._take_memory(shelf.pool, block.address, needed)
        shelf.pool.segments.rise(1)
        self.counters.segments.rise(1)
        if self._max_split is not None and needed >= self._max_split:
            self.counters.oversize_segments.rise(1)
        return block

    def _drop(self, block: Block) -> None:
        """Give a segment that is wholly free back to the card."""
        self._pull(block)
        del self._heads[block.address]
        pool = block.shelf.pool
        self._return_memory(pool, block.address, block.size)
        pool.segments.fall(1)
        self.counters.segments.fall(1)
        if self._max_split is not None and block.size >= self._max_split:
            self.counters.oversize_segments.fall(1)

    def _idle_bytes(self) -> int:
        return sum(block.size for block in self._at.values() if block.free and block.whole)

    # ---- giving back to the card

    def _give_oversized(self, shelf: Shelf, size: int) -> bool:
        """With max_split_size_mb: give back a free block that is large enough, or several, the largest first."""
        limit = self._max_split or 0
        wanted, freed = max(size, limit), 0
        at = bisect_left(shelf.free, (wanted, -1))
        if at < len(shelf.free) and not self._at[shelf.free[at][1]].expandable:
            self._drop(self._at[shelf.free[at][1]])
            return True
        for n_bytes, address in reversed(shelf.free[:at]):
            if freed >= wanted or n_bytes < limit:
                break
            if not self._at[address].expandable:
                freed += n_bytes
                self._drop(self._at[address])
        return freed >= wanted

    def _collect(self, limit: int) -> None:
        """Give back whole large segments that have lain idle longest, until the threshold is kept, rounds at a time."""
        excess = self.reserved_bytes - int(self.settings.garbage_collection_threshold * limit)
        if excess <= 0:
            return
        requests = self.counters.large.requests
        shelves = [shelf for shelf in self._in_order() if not shelf.pool.small]
        idle = [b for shelf in shelves for _, address in shelf.free if (b := self._at[address]).whole]
        age = sum(requests - block.since for block in idle)
        while excess > 0 and idle:
            threshold = age / len(idle)
            old = [b for b in idle if not b.expandable and requests - b.since >= threshold]
            if not old:
                return
            for block in old:
                age -= requests - block.since
                excess -= block.size
                self._drop(block)
            idle = [block for block in idle if block not in old]
