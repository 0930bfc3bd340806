"""The virtual GPU's memory: what is allocated, the most that was, and the error when it is full.

Sizes are rounded to 512 bytes as CUDA's caching allocator rounds them. A block lives as long as the storage of its
host tensor, so views cost nothing and frees are seen when they happen. This file knows no tensors and no clock: it is
told sizes, and tells whoever listens.
"""

from __future__ import annotations

import threading
from collections import Counter

import torch

from toolkit.units import bytes_text

ROUND_BYTES = 512


def rounded(n_bytes: int) -> int:
    """`n_bytes` as the allocator counts them: the next multiple of 512, and nothing for nothing."""
    return -(-n_bytes // ROUND_BYTES) * ROUND_BYTES


class Memory:
    """Counts blocks against a capacity. Reserved equals allocated: this allocator keeps no cache.

    `allocate` returns the block's size in bytes, which `free` takes back. Both may be called from every thread; `free`
    also from the garbage collector in the middle of an `allocate`, hence the re-entrant lock.
    """

    def __init__(self, total_bytes: int, name: str) -> None:
        self.total_bytes, self.name = total_bytes, name
        self.allocated_bytes = self.peak_bytes = self.blocks = 0
        self.allocations = self.frees = 0
        self._lock = threading.RLock()
        self._holders: Counter[str] = Counter()  # bytes by the line that allocated them, where it is known

    def allocate(self, n_bytes: int, where: str | None = None) -> int:
        """Take `n_bytes`, rounded up. Raises torch.OutOfMemoryError, with what holds the memory, where they don't fit."""
        size = -(-n_bytes // ROUND_BYTES) * ROUND_BYTES
        with self._lock:
            total = self.allocated_bytes + size
            if total > self.total_bytes:
                raise self.out_of_memory(n_bytes)
            self.allocated_bytes = total
            if total > self.peak_bytes:
                self.peak_bytes = total
            self.blocks += 1
            self.allocations += 1
            if where is not None:
                self._holders[where] += size
        return size

    def check(self, n_bytes: int) -> None:
        """Raises torch.OutOfMemoryError where `n_bytes` more would not fit."""
        if self.allocated_bytes + rounded(n_bytes) > self.total_bytes:
            raise self.out_of_memory(n_bytes)

    def free(self, size: int, where: str | None = None) -> None:
        """Give back a block of `size` bytes, as `allocate` returned them."""
        with self._lock:
            self.allocated_bytes -= size
            self.blocks -= 1
            self.frees += 1
            if where is not None:
                self._holders[where] -= size
                if not self._holders[where]:
                    del self._holders[where]

    def reset_peak(self) -> None:
        """Let the peak start again from what is allocated now."""
        self.peak_bytes = self.allocated_bytes

    @property
    def reserved_bytes(self) -> int:
        return self.allocated_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        return self.peak_bytes

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.allocated_bytes

    def out_of_memory(self, n_bytes: int) -> torch.OutOfMemoryError:
        """The error that a CUDA device raises when `n_bytes` don't fit, and which lines hold the memory."""
        used = bytes_text(self.allocated_bytes)
        text = (
            f"CUDA out of memory. Tried to allocate {bytes_text(n_bytes)}. GPU 0 has a total capacity of "
            f"{bytes_text(self.total_bytes)} of which {bytes_text(self.free_bytes)} is free. Of the allocated memory {used} is "
            f"allocated by PyTorch, in {self.blocks:,} blocks (virtual {self.name})."
        )
        lines = [f"  {bytes_text(size):>9}  {where}" for where, size in self._holders.most_common(5)]
        return torch.OutOfMemoryError("\n".join([text, "Held by the lines that allocated most:", *lines] if lines else [text]))
