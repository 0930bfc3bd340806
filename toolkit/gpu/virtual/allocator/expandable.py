"""Expandable segments: one range of addresses per stream and size class, which is mapped to memory in granules.

This follows c10/cuda/CUDACachingAllocator.cpp with expandable_segments:True. A range is larger than the GPU's memory, so that
it is never exhausted. Mapped blocks are free or allocated, and the unmapped block after them can be mapped to extend the last
one. Releasing memory unmaps whole granules and keeps the addresses.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from toolkit.gpu.virtual.allocator.segments import LARGE_SEGMENT_BYTES, SMALL_SEGMENT_BYTES, Block, FreeList, Segments


class ExpandableSegments(Segments):
    """Segments that can grow and shrink in place."""

    def _grown(self, free_list: FreeList, size: int) -> Block | None:
        """Return a free block of at least `size`, mapping as much memory as needed; None if the GPU is full."""
        block = self._growable(free_list, size)
        if not block.mapped:
            mapped = self._map(block, min(block.size, size))
            if mapped is None:
                return None
            block = mapped
        while block.size < size:
            following = block.after
            mapped = None if following is None else self._map(following, min(size - block.size, following.size))
            if mapped is None:
                return None
            block = mapped
        self._pull(block)
        return block

    def _growable(self, free_list: FreeList, size: int) -> Block:
        """Return the first of consecutive free or unmapped blocks that have `size` addresses in total."""
        for address in free_list.unmapped:
            start = self._at[address]
            if start.before is not None and start.before.free:
                start = start.before
            room, block = 0, start
            while room < size and (block.free or not block.mapped):
                room += block.size
                if block.after is None:
                    break
                block = block.after
            if room >= size:
                return start
        granule = _granule(free_list)
        space = -(-(self.total_bytes + self.total_bytes // 8) // granule) * granule
        block = Block(self._next_address, space, free_list, None, None)
        block.expandable, block.mapped = True, False
        self._heads[block.address] = block
        self._next_address += space
        self._put_unmapped(block)
        return block

    def _map(self, block: Block, n_bytes: int) -> Block | None:
        """Map the first `n_bytes` of an unmapped block, rounded up to granules. Return them joined with free neighbors."""
        granule = _granule(block.free_list)
        n_bytes = -(-n_bytes // granule) * granule
        if self.reserved_bytes + n_bytes > self.total_bytes:
            return None
        self._pull_unmapped(block)
        if n_bytes < block.size:
            self._put_unmapped(block.cut(n_bytes))
        block.mapped = True
        address = block.address
        for other in (block.after, block.before):
            if other is not None and other.free:
                self._pull(other)
                low, high = (other, block) if other is block.before else (block, other)
                low.absorb(high)
                block = low
        self._put(block)
        self._take_memory(block.free_list.pool, address, n_bytes)
        return block

    def _unmap(self, block: Block) -> None:
        """Unmap the whole granules of a free block."""
        granule = _granule(block.free_list)
        head = block
        while head.before is not None:
            head = head.before
        start = head.address + -(-(block.address - head.address) // granule) * granule
        end = head.address + (block.address + block.size - head.address) // granule * granule
        if start >= end:
            return
        self._pull(block)
        if start > block.address:
            block, low = block.cut(start - block.address), block
            self._put(low)
        if end < block.address + block.size:
            self._put(block.cut(end - block.address))
        block.mapped = False
        self._return_memory(block.free_list.pool, start, end - start)
        for other in (block.after, block.before):
            if other is not None and not other.mapped:
                self._pull_unmapped(other)
                low, high = (other, block) if other is block.before else (block, other)
                low.absorb(high)
                block = low
        if block.whole:
            del self._heads[block.address]
        else:
            self._put_unmapped(block)

    def _put_unmapped(self, block: Block) -> None:
        self._at[block.address] = block
        insort(block.free_list.unmapped, block.address)

    def _pull_unmapped(self, block: Block) -> None:
        del self._at[block.address]
        unmapped = block.free_list.unmapped
        del unmapped[bisect_left(unmapped, block.address)]


def _granule(free_list: FreeList) -> int:
    return SMALL_SEGMENT_BYTES if free_list.pool.small else LARGE_SEGMENT_BYTES
