"""The memory of a virtual GPU: a thread-safe allocator with statistics, and the error that it raises when it is full.

`Blocks` places the blocks and `Counters` counts them. `tensor.hold` allocates and frees one block per storage of a host tensor.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import torch

from toolkit.core.signals import signals_deferred
from toolkit.core.units import bytes_text
from toolkit.gpu.virtual.allocator.blocks import Block, Blocks, Settings

Listener = Callable[[str, int, int], None]  # kind of event, bytes, address


class Memory:
    """A caching allocator like CUDA's, with `total_bytes` of memory.

    `allocate` returns a block, which `free` takes back. Both may be called from any thread, and no signal interrupts them.
    """

    def __init__(self, total_bytes: int, name: str, settings: Settings | None = None) -> None:
        self.total_bytes, self.name = total_bytes, name
        self._held = Blocks(total_bytes, settings)
        self._counters = self._held.counters
        self._listener: Listener | None = None
        self._lock = threading.RLock()
        self._holders: Counter[str] = Counter()  # allocated bytes by the line that allocated them, if it is known

    def allocate(self, n_bytes: int, stream: int = 0, where: str | None = None) -> Block:
        """Allocate `n_bytes` on `stream`, requested by the line `where`.

        Raises torch.OutOfMemoryError, which lists the lines that hold the most memory, if they do not fit.
        """
        with signals_deferred, self._lock:
            block = self._held.take(n_bytes, stream)
            if block is None:
                raise self._refusal(n_bytes)
            if where is not None:
                self._holders[where] += block.size
        return block

    def check(self, n_bytes: int) -> None:
        """Raise torch.OutOfMemoryError if `n_bytes` more do not fit. As on CUDA, the cache has then been released."""
        with signals_deferred, self._lock:
            if n_bytes and not self._held.fits(n_bytes) and self._held.take(n_bytes, 0) is None:
                raise self._refusal(n_bytes)

    def _refusal(self, n_bytes: int) -> torch.OutOfMemoryError:
        if self._listener is not None:
            self._listener("oom", n_bytes, -1)
        return self.out_of_memory(n_bytes)

    def free(self, block: Block, where: str | None = None) -> None:
        """Free a block that `allocate` returned for the line `where`."""
        with signals_deferred, self._lock:
            size = block.size
            self._held.give(block)
            if where is not None:
                self._holders[where] -= size
                if not self._holders[where]:
                    del self._holders[where]

    def new_pool(self) -> int:
        """Create a private pool, as a captured graph has one, and return its number: the `stream` for `allocate`.

        `drop_pool` ends it. Until then, its segments stay reserved and hold nothing but blocks of the pool.
        """
        with signals_deferred, self._lock:
            return self._held.new_pool()

    def drop_pool(self, number: int) -> None:
        """End a private pool: `empty_cache`, or an allocation that needs the memory, returns its segments to the GPU."""
        with signals_deferred, self._lock:
            self._held.drop_pool(number)

    def empty_cache(self) -> None:
        """Return all free segments to the GPU, as torch.cuda.empty_cache."""
        with signals_deferred, self._lock:
            self._held.release()

    def use(self, settings: Settings) -> None:
        """Apply `settings` to all later allocations."""
        with signals_deferred, self._lock:
            self._held.use(settings)

    @property
    def settings(self) -> Settings:
        return self._held.settings

    @property
    def limit_bytes(self) -> int | None:
        """The bytes that may be reserved; None for all of the GPU's memory."""
        return self._held.limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, n_bytes: int | None) -> None:
        self._held.limit_bytes = n_bytes

    @property
    def listener(self) -> Listener | None:
        """A callback for "segment_alloc" and "segment_free" (bytes, address) and "oom" (requested bytes, -1).

        It is called with the allocator's lock held, and must not allocate on the virtual GPU.
        """
        return self._listener

    @listener.setter
    def listener(self, listener: Listener | None) -> None:
        self._listener = self._held.tell = listener

    # ---- figures

    def reset_peak(self) -> None:
        """Reset all peaks to the current figures."""
        with signals_deferred, self._lock:
            self._counters.reset_peaks()

    def reset_accumulated(self) -> None:
        """Reset the accumulated figures to 0."""
        with signals_deferred, self._lock:
            self._counters.reset_accumulated()

    def stats(self) -> dict[str, int]:
        """Return all counters by their names in torch.cuda.memory_stats."""
        with signals_deferred, self._lock:
            limit = self.settings.max_split_bytes
            return dict(sorted((self._counters.figures() | {"max_split_size": -1 if limit is None else limit}).items()))

    def segments(self) -> list[list[Block]]:
        """Return each segment, by address, as the list of its blocks. The blocks change as the program runs."""
        with self._lock:
            return list(self._held.segments())

    @property
    def allocated_bytes(self) -> int:
        return self._counters.bytes

    @property
    def blocks(self) -> int:
        """The number of allocated blocks."""
        return self._counters.blocks

    @property
    def peak_bytes(self) -> int:
        """The peak of the allocated bytes since the last reset."""
        with signals_deferred, self._lock:
            self._counters.update_allocated_peaks()
            return self._counters.peak_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        return self._counters.reserved.peak

    @property
    def reserved_bytes(self) -> int:
        return self._held.reserved_bytes

    @property
    def free_bytes(self) -> int:
        """The bytes that are not reserved."""
        return self.total_bytes - self.reserved_bytes

    def out_of_memory(self, n_bytes: int) -> torch.OutOfMemoryError:
        """Return CUDA's error for an allocation of `n_bytes`, with the lines that hold the most memory."""
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
        return torch.OutOfMemoryError("\n".join([text, "Lines that hold the most memory:", *lines] if lines else [text]))
