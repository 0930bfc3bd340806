"""The pieces the virtual GPU's memory is cut into: blocks, the shelves where free ones lie, and what is taken from the card.

Blocks of a segment know their neighbours and tile it. A shelf holds the free blocks of one stream and size class, sorted by
size and then address, as CUDA's allocator looks through them. It knows no rules for choosing: sizes and addresses only.
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
    """How much is taken from the card for a block of `size` bytes where no free block will do."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES


class Shelf:
    """The free blocks of one stream and size class: (size, address) sorted; and the addresses with no memory behind them."""

    __slots__ = ("free", "pool", "stream", "unmapped")

    def __init__(self, pool: Pool, stream: int) -> None:
        self.pool, self.stream = pool, stream
        self.free: list[tuple[int, int]] = []
        self.unmapped: list[int] = []


class Block:
    """`size` bytes at `address` of the card, of which `requested` were asked for; `before` and `after` it in its segment.

    Without memory behind it (`mapped`) it is only a range of addresses of an expandable segment. `since` says at which
    request it became free, for the collection of what lies idle.
    """

    __slots__ = ("address", "after", "before", "expandable", "free", "mapped", "requested", "shelf", "since", "size")

    def __init__(self, address: int, size: int, shelf: Shelf, before: Block | None, after: Block | None) -> None:
        self.address, self.size, self.shelf, self.before, self.after = address, size, shelf, before, after
        self.requested = self.since = 0
        self.free = self.expandable = False
        self.mapped = True

    @property
    def stream(self) -> int:
        return self.shelf.stream

    @property
    def whole(self) -> bool:
        """Is it a segment of its own?"""
        return self.before is None and self.after is None

    def cut(self, size: int) -> Block:
        """Keep `size` bytes; what was after them, as a block of its own."""
        rest = Block(self.address + size, self.size - size, self.shelf, self, self.after)
        rest.expandable, rest.mapped = self.expandable, self.mapped
        if rest.after is not None:
            rest.after.before = rest
        self.after, self.size = rest, size
        return rest

    def absorb(self, next_one: Block) -> None:
        """Join with the block after it."""
        self.size, self.after = self.size + next_one.size, next_one.after
        if self.after is not None:
            self.after.before = self


class Ground:
    """The segments of a card of `total_bytes`, their blocks, and the shelves. What to take, a subclass decides.

    `tell` hears of every range of memory taken from the card ("segment_alloc") and given back ("segment_free"), with its
    bytes and address.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.tell: Callable[[str, int, int], None] | None = None
        self.counters = Counters()
        self.reserved_bytes = 0
        self._next_address = 0
        self._shelves: dict[tuple[bool, int], Shelf] = {}
        self._at: dict[int, Block] = {}  # the free ones and the unmapped ones, by address
        self._heads: dict[int, Block] = {}  # the first block of each segment, which stays the same object

    def segments(self) -> Iterator[list[Block]]:
        """The segments by address, each as the blocks that tile it. An expandable one is its runs of memory."""
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
        block.free, block.since = True, block.shelf.pool.requests
        self._at[block.address] = block
        insort(block.shelf.free, (block.size, block.address))

    def _pull(self, block: Block) -> None:
        block.free = False
        del self._at[block.address]
        free = block.shelf.free
        del free[bisect_left(free, (block.size, block.address))]
