"""The virtual GPU's memory: what is allocated and reserved, the most that was, and the error when it is full.

A block lives as long as the storage of its host tensor, so views cost nothing and frees are seen when they happen. Where
blocks lie, and what they take, `virtual_blocks` knows; `virtual_counters` counts. This file knows no tensors and no
clock: it is told sizes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import torch

from toolkit.core.units import bytes_text
from toolkit.gpu.virtual.allocator.blocks import Block, Blocks, Settings

Listener = Callable[[str, int, int], None]  # what happened, bytes, address


class Memory:
    """Counts blocks against a capacity, as CUDA's caching allocator does.

    `allocate` returns a block, which `free` takes back. Both may be called from every thread; `free` also from the garbage
    collector in the middle of an `allocate`, hence the re-entrant lock, and a list of what came in between.
    """

    def __init__(self, total_bytes: int, name: str, settings: Settings | None = None) -> None:
        self.total_bytes, self.name = total_bytes, name
        self._held = Blocks(total_bytes, settings)
        self._counters = self._held.counters
        self._listener: Listener | None = None
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
                raise self._refusal(n_bytes)
            if where is not None:
                self._holders[where] += block.size
        return block

    def check(self, n_bytes: int) -> None:
        """Raises torch.OutOfMemoryError where `n_bytes` more would not fit."""
        with self._lock:
            if n_bytes and not self._held.fits(n_bytes):
                raise self._refusal(n_bytes)

    def _refusal(self, n_bytes: int) -> torch.OutOfMemoryError:
        if self._listener is not None:
            self._listener("oom", n_bytes, -1)
        return self.out_of_memory(n_bytes)

    def free(self, block: Block, where: str | None = None) -> None:
        """Give back a block, as `allocate` returned it."""
        with self._lock:
            if self._busy:
                self._late.append((block, where))
            else:
                self._give(block, where)

    def _give(self, block: Block, where: str | None) -> None:
        size = block.size
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

    def use(self, settings: Settings) -> None:
        """Let `settings` hold for what is allocated from now on."""
        with self._lock:
            self._held.use(settings)

    @property
    def settings(self) -> Settings:
        return self._held.settings

    @property
    def limit_bytes(self) -> int | None:
        """What may be reserved of the card; None for all of it."""
        return self._held.limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, n_bytes: int | None) -> None:
        self._held.limit_bytes = n_bytes

    @property
    def listener(self) -> Listener | None:
        """Hears of "segment_alloc" and "segment_free" with bytes and address, and of "oom" with the bytes asked for and -1.

        It is called with the allocator's lock held, and must not allocate on the card.
        """
        return self._listener

    @listener.setter
    def listener(self, listener: Listener | None) -> None:
        self._listener = self._held.tell = listener

    # ---- figures

    def reset_peak(self) -> None:
        """Let the peaks start again from what is held now."""
        with self._lock:
            self._counters.reset_peaks()

    def reset_accumulated(self) -> None:
        """Let what was allocated and freed in all count from here."""
        with self._lock:
            self._counters.reset_accumulated()

    def stats(self) -> dict[str, int]:
        """Every counter of torch.cuda.memory_stats, by its name there."""
        with self._lock:
            limit = self.settings.max_split_bytes
            return dict(sorted((self._counters.figures() | {"max_split_size": -1 if limit is None else limit}).items()))

    def segments(self) -> list[list[Block]]:
        """The segments by address, each as the blocks that tile it: to be read at once, they change as the program runs."""
        with self._lock:
            return list(self._held.segments())

    @property
    def allocated_bytes(self) -> int:
        return self._counters.bytes

    @property
    def requested_bytes(self) -> int:
        return self._counters.requested

    @property
    def blocks(self) -> int:
        """How many blocks are allocated."""
        return self._counters.blocks

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated since the last reset."""
        with self._lock:
            self._counters.note_grown()
            return self._counters.peak_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        return self._counters.reserved.peak

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
        allowed = "" if self.limit_bytes is None else f"{bytes_text(self.limit_bytes)} allowed; "
        idle = bytes_text(self.reserved_bytes - self.allocated_bytes)
        text = (
            f"CUDA out of memory. Tried to allocate {bytes_text(n_bytes)}. GPU 0 has a total capacity of "
            f"{bytes_text(self.total_bytes)} of which {bytes_text(self.free_bytes)} is free. {allowed}Of the allocated memory "
            f"{used} is allocated by PyTorch, in {self.blocks:,} blocks, and {idle} is reserved by PyTorch but unallocated "
            f"(virtual {self.name})."
        )
        lines = [f"  {bytes_text(size):>9}  {where}" for where, size in self._holders.most_common(5)]
        return torch.OutOfMemoryError("\n".join([text, "Held by the lines that allocated most:", *lines] if lines else [text]))
