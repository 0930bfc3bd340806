"""The names and numbers that CUPTI-based tools (PyTorch's profiler, Nsight Systems) write, as event kinds and streams.

The numbers are those of `cupti_activity.h`. The readers of Chrome and Nsight traces use this module.
"""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

DEFAULT_STREAM = 7  # the number CUPTI gives to the legacy default stream of a process's first context
NO_STREAM = 0xFFFFFFFF  # CUPTI_SYNCHRONIZATION_INVALID_VALUE, also seen as -1

# CUpti_ActivityMemcpyKind ("array" is texture memory on the device). Nsight adds 11 to 13 for migrations of managed memory.
# Host to host (9) is left out since it does not involve the device.
MEMCPY_KINDS = {1: "h2d", 2: "d2h", 3: "h2d", 4: "d2h", 5: "d2d", 6: "d2d", 7: "d2d", 8: "d2d", 10: "p2p"}
MEMCPY_KINDS |= {11: "h2d", 12: "d2h", 13: "d2d"}
_LETTERS = {"HtoD": "h2d", "HtoA": "h2d", "DtoH": "d2h", "AtoH": "d2h", "PtoP": "p2p"} | dict.fromkeys(
    ("DtoD", "AtoA", "AtoD", "DtoA"), "d2d"
)
_SYNC = re.compile(r"(cu|cuda|hip)(Stream|Device|Event|Ctx|Context)Synchronize(_ptsz)?(_v\d+)?$")
_COPY_KERNEL = re.compile(r"memcpy\d*(_\w+)?$")
_MEMCPY = re.compile(r"(?:memcpy|copy)\s*(?:unified )?([HDAP])\w*?-?(?:to|2)-?([HDAP])", re.IGNORECASE)


@lru_cache(maxsize=4096)
def parse_memcpy(name: str) -> tuple[str | None, int]:
    """Return the kind and `pinned` of a copy from its name: "Memcpy DtoH (Device -> Pinned)" gives ("d2h", 1).

    Also accepts "[CUDA memcpy Device-to-Host]" (Nsight) and "MemcpyD2H" (XLA). The kind is None for host-to-host copies.
    """
    match = _MEMCPY.search(name)
    if match is None:
        return None, -1
    kind = _LETTERS.get(f"{match[1].upper()}to{match[2].upper()}")
    return kind, pinned_of(kind, name)


def pinned_of(kind: str | None, memory: str) -> int:
    """Return the `pinned` column of a copy, given a text that contains the kind of host memory ("Pinned", "Pageable")."""
    if kind not in ("h2d", "d2h"):
        return -1
    return 1 if "Pinned" in memory else 0 if "Pageable" in memory else -1


@lru_cache(maxsize=4096)
def is_wait(api_name: str) -> bool:
    """Return whether a runtime or driver call blocks the host until the device has finished."""
    return _SYNC.match(api_name) is not None


def is_copy_kernel(name: str) -> bool:
    """Return whether a kernel is CUDA's implementation of a device-to-device copy. The size of such a copy is not recorded.

    CUDA graphs instantiated before CUPTI was first used run these kernels ("memcpy32_post") for their copy nodes.
    """
    return name.startswith("memcpy") and _COPY_KERNEL.match(name) is not None


def number_streams(streams: NDArray[np.int64]) -> NDArray[np.int32]:
    """Map CUPTI stream numbers to 0 for the default stream, 1, 2, ... for others in order of appearance, and -1 for none."""
    numbers = {DEFAULT_STREAM: 0, 0: 0, -1: -1, NO_STREAM: -1}
    special = len(numbers)
    seen, first = np.unique(streams, return_index=True)
    for raw in seen[np.argsort(first)].tolist():
        numbers.setdefault(raw, len(numbers) - special + 1)
    values = np.array([numbers[raw] for raw in seen.tolist()], np.int32)
    return values[np.searchsorted(seen, streams)] if len(streams) else np.empty(0, np.int32)
