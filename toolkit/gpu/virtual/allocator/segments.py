"""Segments of the virtual GPU's memory, the blocks that they consist of, and the lists of free blocks.

The blocks of a segment are linked to their neighbors. A free list holds the free blocks of one stream and size class, sorted
by size and then address, the order in which CUDA's allocator searches them. `Blocks` decides which block to use.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from toolkit.gpu.virtual.allocator.counters import Counters, Pool

SMALL_BYTES = 1 << 20
SMALL_SEGMENT_BYTES = 2 << 20
LARGE_SEGMENT_BYTES = 20 << 20
OWN_SEGMENT_BYTES = 10 << 20


def segment_bytes(size: int) -> int:
    """Return the size of the segment that is reserved for a block of `size` bytes if no free block fits."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES


class FreeList:
    """The free blocks of one stream and size class, as sorted (size, address), and the addresses of unmapped blocks."""

    __slots__ = ("free", "pool", "stream", "unmapped")

    def __init__(self, pool: Pool, stream: int) -> None:
        self.pool, self.stream = pool, stream
        self.free: list[tuple[int, int]] = []
        self.unmapped: list[int] = []


class Block:
    """`size` bytes at `address`, for which `requested` bytes were requested; `before` and `after` are its neighbors.

    A block that is not `mapped` is a range of addresses of an expandable segment without memory behind it. `since` is the
    number of the request at which the block became free, for garbage collection.
    """

    __slots__ = ("address", "after", "before", "expandable", "free", "free_list", "mapped", "requested", "since", "size")

    def __init__(self, address: int, size: int, free_list: FreeList, before: Block | None, after: Block | None) -> None:
        self.address, self.size, self.free_list, self.before, self.after = address, size, free_list, before, after
        self.requested = self.since = 0
        self.free = self.expandable = False
        self.mapped = True

    @property
    def stream(self) -> int:
        return self.free_list.stream

    @property
    def whole(self) -> bool:
        """Whether the block is a whole segment."""
        return self.before is None and self.after is None

    def cut(self, size: int) -> Block:
        """Shrink the block to `size` bytes. Return the rest as a new block."""
        rest = Block(self.address + size, self.size - size, self.free_list, self, self.after)
        rest.expandable, rest.mapped = self.expandable, self.mapped
        if rest.after is not None:
            rest.after.before = rest
        self.after, self.size = rest, size
        return rest

    def absorb(self, next_one: Block) -> None:
        """Extend the block by `next_one`, the block after it."""
        self.size, self.after = self.size + next_one.size, next_one.after
        if self.after is not None:
            self.after.before = self


class Segments:
    """The segments, blocks and free lists of a GPU with `total_bytes`. Subclasses decide which block to use.

    `tell` is called for every range of memory reserved from the GPU ("segment_alloc") and returned to it ("segment_free"),
    with its bytes and address. A captured graph has a pool of its own: free lists whose `stream` is the negative number of the
    pool. As long as it is in `_private`, its segments are neither returned to the GPU nor used for anything else.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._private: set[int] = set()
        self._pools = 0
        self.tell: Callable[[str, int, int], None] | None = None
        self.counters = Counters()
        self.reserved_bytes = 0
        self._next_address = 0
        self._free_lists: dict[tuple[bool, int], FreeList] = {}
        self._at: dict[int, Block] = {}  # free and unmapped blocks by address
        self._heads: dict[int, Block] = {}  # the first block of each segment by address; it stays the same object

    def segments(self) -> Iterator[list[Block]]:
        """Yield each segment, by address, as the list of its blocks. An expandable segment yields each mapped run."""
        for address in sorted(self._heads):
            run: list[Block] = []
            block: Block | None = self._heads[address]
            while block is not None:
                if block.mapped:
                    run.append(block)
                elif run:
                    yield run
                    run = []
                block = block.after
            if run:
                yield run

    def new_pool(self) -> int:
        """Create a private pool, and return its number: the `stream` of its blocks."""
        self._pools -= 1
        self._private.add(self._pools)
        return self._pools

    def drop_pool(self, number: int) -> None:
        """End a private pool. Like every cached segment, its segments are returned to the GPU when memory runs out."""
        self._private.discard(number)

    def _take_memory(self, pool: Pool, address: int, n_bytes: int) -> None:
        self.reserved_bytes += n_bytes
        pool.reserved.rise(n_bytes)
        self.counters.reserved.rise(n_bytes)
        self.counters.device_allocs += 1
        if self.tell is not None:
            self.tell("segment_alloc", n_bytes, address)

    def _return_memory(self, pool: Pool, address: int, n_bytes: int) -> None:
        self.reserved_bytes -= n_bytes
        pool.reserved.fall(n_bytes)
        self.counters.reserved.fall(n_bytes)
        self.counters.device_frees += 1
        if self.tell is not None:
            self.tell("segment_free", n_bytes, address)

    def _put(self, block: Block) -> None:
        block.free, block.since = True, block.free_list.pool.requests
        self._at[block.address] = block
        insort(block.free_list.free, (block.size, block.address))

    def _pull(self, block: Block) -> None:
        block.free = False
        del self._at[block.address]
        free = block.free_list.free
        del free[bisect_left(free, (block.size, block.address))]
