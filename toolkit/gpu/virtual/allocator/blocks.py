"""The caching allocator of the virtual GPU: it places blocks as CUDA's does (c10/cuda/CUDACachingAllocator.cpp).

Sizes are rounded up to 512 bytes. Blocks of up to 1 MiB come from segments of 2 MiB, larger ones from segments of 20 MiB, and
blocks of 10 MiB or more have a segment of their own, rounded up to 2 MiB. The allocator uses the smallest free block of the
stream that is large enough. It splits the block if at least 512 bytes (small) or more than 1 MiB (large) would be left;
otherwise the remainder counts as part of the block. Freed blocks are merged with free neighbors and stay reserved. With
expandable segments a stream has one range of addresses for small and one for large blocks, mapped 2 MiB or 20 MiB at a time.
"""

from __future__ import annotations

from bisect import bisect_left

from toolkit.core.units import MiB
from toolkit.gpu.virtual.allocator.expandable import ExpandableSegments
from toolkit.gpu.virtual.allocator.segments import SMALL_BYTES, Block, FreeList, segment_bytes
from toolkit.gpu.virtual.allocator.settings import ROUND_BYTES, Settings, rounded

__all__ = ["Block", "Blocks", "Settings", "rounded", "segment_bytes"]


class Blocks(ExpandableSegments):
    """The blocks of a GPU with `total_bytes`, of which `limit_bytes` may be reserved. Not thread-safe: the owner locks."""

    def __init__(self, total_bytes: int, settings: Settings | None = None) -> None:
        super().__init__(total_bytes)
        self.limit_bytes: int | None = None
        self.use(settings or Settings())

    def use(self, settings: Settings) -> None:
        """Apply `settings` from now on."""
        self.settings = settings
        self._steps, self._max_split = settings.steps(), settings.max_split_bytes
        self._most_uncut = settings.max_non_split_rounding_mb * MiB
        if settings.per_process_memory_fraction < 1:
            self.limit_bytes = int(settings.per_process_memory_fraction * self.total_bytes)
        self._plain = self._max_split is None and not settings.expandable_segments

    def take(self, n_bytes: int, stream: int) -> Block | None:
        """Allocate `n_bytes` on `stream`. Return None if the GPU is full even after all cached segments are released."""
        size = rounded(n_bytes, self._steps) if self._steps else -(-n_bytes // ROUND_BYTES) * ROUND_BYTES
        free_list = self._free_lists.get((size <= SMALL_BYTES, stream)) or self._free_list(size <= SMALL_BYTES, stream)
        pool = free_list.pool
        counters = self.counters
        if counters.inactive_peak_due:
            counters.update_inactive_peaks()
        pool.requests += 1
        block = self._cached(free_list, size) or self._fresh(free_list, size)
        if block is None:
            return None
        left = block.size - size
        if left >= ROUND_BYTES and (pool.small or block.expandable or self._cuts(size, left)):
            was_whole = block.before is None and block.after is None
            self._put(block.cut(size))
            if not block.expandable:
                pool.cut(was_whole, size, left)
                counters.inactive_peak_due = True
        elif not block.expandable and not block.whole:
            pool.fill(block.size)
        block.requested = n_bytes
        pool.taken += 1
        pool.taken_bytes += block.size
        pool.taken_requested += n_bytes
        counters.allocated_peak_due = True
        if self._max_split is not None and block.size >= self._max_split:
            counters.oversize_allocations.rise(1)
        return block

    def give(self, block: Block) -> None:
        """Free a block: merge it with its free neighbors. Its memory stays reserved."""
        counters, pool, size = self.counters, block.free_list.pool, block.size
        if counters.allocated_peak_due:
            counters.update_allocated_peaks()
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
            if (whole or joined == 2) and counters.inactive_peak_due:  # there will be fewer inactive splits
                counters.update_inactive_peaks()
            pool.give(joined, size, block.size, whole)
            counters.inactive_peak_due = True
        self._put(block)

    def fits(self, n_bytes: int) -> bool:
        """Return whether `n_bytes` can be allocated, if need be after releasing the cache.

        With expandable segments, True does not guarantee it.
        """
        size = rounded(n_bytes, self._steps)
        limit = self.total_bytes if self.limit_bytes is None else min(self.total_bytes, self.limit_bytes)
        if self.settings.expandable_segments:
            return self.counters.bytes + size <= limit
        small = size <= SMALL_BYTES
        cached = any(s.free and s.free[-1][0] >= size for s in self._in_order() if s.pool.small == small)
        return cached or self.reserved_bytes - self._idle_bytes() + segment_bytes(size) <= limit

    def release(self) -> None:
        """Return free segments, and the free granules of expandable ones, to the GPU."""
        self.counters.syncs += 1
        for free_list in self._in_order():
            blocks = [self._at[address] for _, address in free_list.free]
            for block in blocks:
                if not block.expandable and block.whole:
                    self._drop(block)
            for block in blocks:
                if block.expandable:
                    self._unmap(block)

    # ---- search in the free lists

    def _free_list(self, small: bool, stream: int) -> FreeList:
        pool = self.counters.small if small else self.counters.large
        free_list = self._free_lists[small, stream] = FreeList(pool, stream)
        return free_list

    def _in_order(self) -> list[FreeList]:
        """Return the free lists, without those of private pools, in the order in which CUDA releases them.

        Large blocks come before small ones. Within each size class, the lists are sorted by stream.
        """
        return [self._free_lists[key] for key in sorted(self._free_lists) if key[1] not in self._private]

    def _cuts(self, size: int, left: int) -> bool:
        """Return whether a large block is split for a request of `size` that leaves `left` bytes."""
        if self.settings.expandable_segments:
            return True
        return left > SMALL_BYTES and (self._max_split is None or size < self._max_split)

    def _cached(self, free_list: FreeList, size: int) -> Block | None:
        free = free_list.free
        at = bisect_left(free, (size, -1))
        if at == len(free):
            return None
        if not self._plain:
            chosen = self._suited(free_list, size, at)
            if chosen is None:
                return None
            at = chosen
        block = self._at.pop(free[at][1])
        del free[at]
        block.free = False
        return block

    def _suited(self, free_list: FreeList, size: int, at: int) -> int | None:
        """Return the position, from `at` on, of a free block that max_split_size_mb and expandable segments allow to use."""
        free, limit = free_list.free, self._max_split
        if self.settings.expandable_segments:
            while at + 1 < len(free) and self._at[free[at][1]].expandable and self._reach(free[at + 1]) < self._reach(free[at]):
                at += 1
        if limit is not None and size < limit <= free[at][0]:
            return None
        if limit is not None and size >= limit and free[at][0] >= size + self._most_uncut:
            return None
        return at

    def _reach(self, entry: tuple[int, int]) -> int:
        """Return the size to which a free block could be extended in place."""
        after = self._at[entry[1]].after
        return entry[0] + (after.size if after is not None and not after.mapped else 0)

    # ---- reserve memory of the GPU

    def _fresh(self, free_list: FreeList, size: int) -> Block | None:
        if self.settings.garbage_collection_threshold and self.limit_bytes is not None:
            self._collect(self.limit_bytes)
        block = self._segment(free_list, size)
        if block is None and self._max_split is not None and self._give_oversized(free_list, size):
            block = self._segment(free_list, size)
        if block is None:
            self.release()
            self.counters.retries += 1
            block = self._segment(free_list, size)
        if block is None:
            self.counters.ooms += 1
        return block

    def _segment(self, free_list: FreeList, size: int) -> Block | None:
        """Return a new segment as one block; None if there is no room for it."""
        needed = segment_bytes(size)
        if self.limit_bytes is not None and self.reserved_bytes + needed > self.limit_bytes:
            return None
        if self.settings.expandable_segments:
            return self._grown(free_list, size)
        if self.reserved_bytes + needed > self.total_bytes:
            return None
        block = Block(self._next_address, needed, free_list, None, None)
        self._next_address += needed
        self._heads[block.address] = block
        self._take_memory(free_list.pool, block.address, needed)
        free_list.pool.segments.rise(1)
        self.counters.segments.rise(1)
        if self._max_split is not None and needed >= self._max_split:
            self.counters.oversize_segments.rise(1)
        return block

    def _drop(self, block: Block) -> None:
        """Return a free segment to the GPU."""
        self._pull(block)
        del self._heads[block.address]
        pool = block.free_list.pool
        self._return_memory(pool, block.address, block.size)
        pool.segments.fall(1)
        self.counters.segments.fall(1)
        if self._max_split is not None and block.size >= self._max_split:
            self.counters.oversize_segments.fall(1)

    def _idle_bytes(self) -> int:
        idle = (block for block in self._at.values() if block.free and block.whole)
        return sum(block.size for block in idle if block.stream not in self._private)

    # ---- release memory to the GPU

    def _give_oversized(self, free_list: FreeList, size: int) -> bool:
        """Release a free block that is large enough, or several, the largest first. Only used with max_split_size_mb."""
        limit = self._max_split or 0
        wanted, freed = max(size, limit), 0
        at = bisect_left(free_list.free, (wanted, -1))
        if at < len(free_list.free) and not self._at[free_list.free[at][1]].expandable:
            self._drop(self._at[free_list.free[at][1]])
            return True
        for n_bytes, address in reversed(free_list.free[:at]):
            if freed >= wanted or n_bytes < limit:
                break
            if not self._at[address].expandable:
                freed += n_bytes
                self._drop(self._at[address])
        return freed >= wanted

    def _collect(self, limit: int) -> None:
        """Release the large segments that have been unused longest, in rounds, until the reserved bytes meet the threshold."""
        excess = self.reserved_bytes - int(self.settings.garbage_collection_threshold * limit)
        if excess <= 0:
            return
        requests = self.counters.large.requests
        free_lists = [free_list for free_list in self._in_order() if not free_list.pool.small]
        idle = [b for free_list in free_lists for _, address in free_list.free if (b := self._at[address]).whole]
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
