"""How large CUDA's blocks are: its history tells what was asked for, and the counters count what was given.

Sizes are rounded up to 512 bytes. A free block of more than 1 MiB is given whole where no more than 1 MiB would be left
(c10/cuda/CUDACachingAllocator.cpp, should_split), so the free blocks of that pool are followed by address. In
expandable segments every block is cut to size.
"""

from __future__ import annotations

from typing import Any

from toolkit.devices.virtual_blocks import rounded

SMALL_BYTES = 1 << 20  # what is no larger has a pool of its own, in which every block is cut to size


class BlockSizes:
    """The blocks of one device, followed through its history. `allocated_bytes` is what the counters would say."""

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self._size: dict[int, int] = {}  # of allocated blocks, by address, and of those that still await another stream
        self._free: dict[int, int] = {}  # large free blocks, by address
        self._free_end: dict[int, int] = {}  # where a free block ends -> where it begins
        self._starts: set[int] = set()  # of segments: blocks don't join across
        self._expandable = False

    def open_segment(self, segment: dict[str, Any]) -> None:
        """A segment as a snapshot has it, with its blocks."""
        self._expandable |= bool(segment.get("is_expandable"))
        address = segment["address"]
        self._starts.add(address)
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                self._put(address, block["size"])
            else:
                self._size[address] = block["size"]
                self.allocated_bytes += block["size"] if block["state"] == "active_allocated" else 0
            address += block["size"]

    def take(self, action: str, address: int, size: int) -> int:
        """Follow one entry of the history; its bytes as the counters count them."""
        if action == "alloc":
            given = self._size[address] = self._given(address, rounded(size))
            self.allocated_bytes += given
            return given
        if action == "free_requested":
            given = self._size.get(address, rounded(size))
            self.allocated_bytes -= given
            return given
        if action == "free_completed":
            self._join(address, self._size.pop(address, rounded(size)))
        elif action == "segment_alloc":
            self._starts.add(address)
            self._put(address, size)
        elif action == "segment_free":
            self._starts.discard(address)
            self._pull(address)
        elif action in ("segment_map", "segment_unmap"):
            self._expandable = True
        return size

    def _given(self, address: int, size: int) -> int:
        free = self._pull(address)
        if size <= SMALL_BYTES or self._expandable or free is None:
            if free is not None and free > size:
                self._put(address + size, free - size)
            return size
        if free - size > SMALL_BYTES:
            self._put(address + size, free - size)
            return size
        return free

    def _join(self, address: int, size: int) -> None:
        """A block that is free joins its free neighbours."""
        end = address + size
        if end not in self._starts and (after := self._pull(end)) is not None:
            size += after
        before = self._free_end.get(address)
        if before is not None and address not in self._starts:
            size += self._free[before]
            self._pull(before)
            address = before
        self._put(address, size)

    def _put(self, address: int, size: int) -> None:
        self._free[address] = size
        self._free_end[address + size] = address

    def _pull(self, address: int) -> int | None:
        size = self._free.pop(address, None)
        if size is not None:
            del self._free_end[address + size]
        return size
