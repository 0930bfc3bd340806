"""Expandable segments: a range of addresses for each stream and size class, memory put behind a granule at a time.

As c10/cuda/CUDACachingAllocator.cpp does with expandable_segments:True. A range is larger than the card, so it never runs
out; blocks in it that have memory behind them ("mapped") are free or held, and what lies behind them can be mapped to let
the last one grow. Giving back takes the memory from whole granules and keeps the addresses. Sizes and addresses only.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from toolkit.gpu.virtual.allocator.pieces import LARGE_SEGMENT_BYTES, SMALL_SEGMENT_BYTES, Block, Ground, Shelf


class Growing(Ground):
    """Segments that grow and shrink in place."""

    def _grown(self, shelf: Shelf, size: int) -> Block | None:
        """A free block of at least `size`, memory put behind as many addresses as it takes."""
        block = self._growable(shelf, size)
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

    def _growable(self, shelf: Shelf, size: int) -> Block:
        """Free or unmapped blocks in a row that have addresses for `size`: the first of them."""
        for address in shelf.unmapped:
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
        granule = _granule(shelf)
        space = -(-(self.total_bytes + self.total_bytes // 8) // granule) * granule
        block = Block(self._next_address, space, shelf, None, None)
        block.expandable, block.mapped = True, False
        self._heads[block.address] = block
        self._next_address += space
        self._put_unmapped(block)
        return block

    def _map(self, block: Block, n_bytes: int) -> Block | None:
        """Put memory behind the first `n_bytes` of an unmapped block, rounded up to granules; joined, as a free block."""
        granule = _granule(block.shelf)
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
        self._take_memory(block.shelf.pool, address, n_bytes)
        return block

    def _unmap(self, block: Block) -> None:
        """Take the memory from whole granules of a free block."""
        granule = _granule(block.shelf)
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
        self._return_memory(block.shelf.pool, start, end - start)
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
        insort(block.shelf.unmapped, block.address)

    def _pull_unmapped(self, block: Block) -> None:
        del self._at[block.address]
        unmapped = block.shelf.unmapped
        del unmapped[bisect_left(unmapped, block.address)]


def _granule(shelf: Shelf) -> int:
    return SMALL_SEGMENT_BYTES if shelf.pool.small else LARGE_SEGMENT_BYTES
