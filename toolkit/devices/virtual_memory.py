"""The virtual GPU's memory: what is allocated and reserved, the most that was, and the error when it is full.

A block lives as long as the storage of its host tensor, so views cost nothing and frees are seen when they happen. Where
blocks lie, and what they take, `virtual_blocks` knows. This file knows no tensors and no clock: it is told sizes.
"""

from __future__ import annotations

import threading
from collections import Counter

import torch

from toolkit.devices.virtual_blocks import Block, Blocks
from toolkit.units import bytes_text


class Memory:
    """Counts blocks against a capacity, as CUDA's caching allocator does.

    `allocate` returns a block, which `free` takes back. Both may be called from every thread; `free` also from the garbage
    collector in the middle of an `allocate`, hence the re-entrant lock, and a list of what came in between.
    """

    def __init__(self, total_bytes: int, name: str) -> None:
        self.total_bytes, self.name = total_bytes, name
        self.allocated_bytes = self.peak_bytes = self.peak_reserved_bytes = self.blocks = 0
        self.requested_bytes = 0
        self.allocations = self.frees = 0
        self._held = Blocks(total_bytes)
        self._lock = threading.RLock()
        self._busy = False
        self._late: list[tuple[Block, str | None]] = []  # freed by the garbage collector while a block was being looked for
        self._holders: Counter[str] = Counter()  # bytes by the line that allocated them, where it is known

    def allocate(self, n_bytes: int, stream: int = 0, where: str | None = None) -> Block:
        """`n_bytes` for work on `stream`. Raises torch.OutOfMemoryError, with what holds the memory, where they don't fit."""
        with self._lock:
            self._busy = True
            try:
                block = self._held.take(n_bytes, stream)
            finally:
                self._busy = False
            while self._late:
                self._give(*self._late.pop())
            if block is None:
                raise self.out_of_memory(n_bytes)
            self.allocated_bytes += block.size
            self.requested_bytes += n_bytes
            self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
            self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
            self.blocks += 1
            self.allocations += 1
            if where is not None:
                self._holders[where] += block.size
        return block

    def check(self, n_bytes: int) -> None:
        """Raises torch.OutOfMemoryError where `n_bytes` more would not fit."""
        with self._lock:
            if n_bytes and not self._held.fits(n_bytes):
                raise self.out_of_memory(n_bytes)

    def free(self, block: Block, where: str | None = None) -> None:
        """Give back a block, as `allocate` returned it."""
        with self._lock:
            if self._busy:
                self._late.append((block, where))
            else:
                self._give(block, where)

    def _give(self, block: Block, where: str | None) -> None:
        size = block.size
        self.allocated_bytes -= size
        self.requested_bytes -= block.requested
        self.blocks -= 1
        self.frees += 1
        self._busy = True
        try:
            self._held.give(block)
        finally:
            self._busy = False
        if where is not None:
            self._holders[where] -= size
            if not self._holders[where]:
                del self._holders[where]

    def empty_cache(self) -> None:
        """Give what is reserved and not allocated back to the card, as far as whole segments are free."""
        with self._lock:
            self._busy = True
            try:
                self._held.release()
            finally:
                self._busy = False

    def reset_peak(self) -> None:
        """Let the peaks start again from what is held now."""
        self.peak_bytes, self.peak_reserved_bytes = self.allocated_bytes, self.reserved_bytes

    @property
    def reserved_bytes(self) -> int:
        return self._held.reserved_bytes

    @property
    def free_bytes(self) -> int:
        """What the card has left: neither allocated nor cached."""
        return self.total_bytes - self.reserved_bytes

    def out_of_memory(self, n_bytes: int) -> torch.OutOfMemoryError:
        """The error that a CUDA device raises when `n_bytes` don't fit, and which lines hold the memory."""
        used = bytes_text(self.allocated_bytes)
        text = (
            f"CUDA out of memory. Tried to allocate {bytes_text(n_bytes)}. GPU 0 has a total capacity of "
            f"{bytes_text(self.total_bytes)} of which {bytes_text(self.free_bytes)} is free. Of the allocated memory {used} is "
            f"allocated by PyTorch, in {self.blocks:,} blocks, and {bytes_text(self.reserved_bytes - self.allocated_bytes)} is "
            f"reserved by PyTorch but unallocated (virtual {self.name})."
        )
        lines = [f"  {bytes_text(size):>9}  {where}" for where, size in self._holders.most_common(5)]
        return torch.OutOfMemoryError("\n".join([text, "Held by the lines that allocated most:", *lines] if lines else [text]))
