"""Check whether a compiled config fits a GPU (shared memory, registers, threads, grid), and compute its occupancy.

Computed from the compiler's figures (`compiling.py`) and the catalogue, without Triton or a GPU. The rules are those of the
CUDA programming guide: the number of blocks per SM is the smallest that registers, shared memory, threads and the limit of
the compute capability allow.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.gpu.catalogue import GpuSpec

WARP = 32
THREADS_PER_BLOCK = 1024
GRID = (2**31 - 1, 65535, 65535)
TENSOR_MEMORY_COLUMNS = 512  # of an SM with fifth-generation tensor cores
# CUDA programming guide, table of technical specifications: resident blocks per SM.
BLOCKS_PER_SM = {(8, 0): 32, (8, 6): 16, (8, 7): 16, (8, 9): 24, (9, 0): 32, (10, 0): 32, (10, 3): 32, (12, 0): 24}
FEWEST_BLOCKS_PER_SM = 16  # for a compute capability that is not in the table
REGISTERS_GRANTED_IN = 256  # registers of a warp are allocated in units of this size
RESERVED_SHARED_BYTES = 1024  # per block, by the driver


@dataclass(frozen=True)
class LaunchUse:
    """The resources of a compiled launch: per thread (registers, spills), per block (shared memory, threads), and its grid."""

    name: str
    grid: tuple[int, ...]
    threads: int
    registers: int
    spill_bytes: int  # stack per thread, for values that do not fit in registers
    shared_bytes: int  # dynamic shared memory, Triton's `metadata.shared`
    tensor_memory: int = 0  # columns
    ptx_bytes: int = 0
    sass_bytes: int = 0

    @property
    def blocks(self) -> int:
        return math.prod(self.grid)


@dataclass(frozen=True)
class Compiled:
    """The result of compiling a config for a compute capability: its launches, or the compiler's `error`."""

    launches: tuple[LaunchUse, ...] = ()
    error: str = ""

    @property
    def shared_bytes(self) -> int:
        return max((use.shared_bytes for use in self.launches), default=0)

    @property
    def registers(self) -> int:
        return max((use.registers for use in self.launches), default=0)

    @property
    def spill_bytes(self) -> int:
        return max((use.spill_bytes for use in self.launches), default=0)

    @property
    def main(self) -> LaunchUse | None:
        """The launch with the most threads, which takes most of the time."""
        return max(self.launches, key=lambda use: use.blocks * use.threads, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON data; `from_dict` is the inverse."""
        return {"launches": [dataclasses.asdict(use) for use in self.launches], "error": self.error}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Compiled:
        """Return the result from JSON data. Raises ValueError, TypeError or KeyError for other data."""
        uses = tuple(LaunchUse(**{**use, "grid": tuple(use["grid"])}) for use in found["launches"])
        for use in uses:
            name, grid, *numbers = dataclasses.astuple(use)
            sane = all(type(number) is int and 0 <= number < 2**63 for number in (*grid, *numbers)) and isinstance(name, str)
            if not sane or 0 in (*grid, use.threads):
                raise ValueError(f"invalid figures of a launch: {use}"[:200])
        if not isinstance(found["error"], str):
            raise TypeError(f"the error {found['error']!r:.40} is not a string")
        return cls(uses, found["error"])


def short_name(spec: GpuSpec) -> str:
    """Return a card's short name: "RTX 5090" for "NVIDIA GeForce RTX 5090"."""
    return spec.name.removeprefix("NVIDIA ").removeprefix("GeForce ")


def obstacle(compiled: Compiled, spec: GpuSpec) -> str:
    """Return why `compiled` cannot be launched on `spec`, in words; "" if it can."""
    if compiled.error:
        return compiled.error
    return next((words for use in compiled.launches if (words := _obstacle(use, spec))), "")


def _obstacle(use: LaunchUse, spec: GpuSpec) -> str:
    card, granted = short_name(spec), spec.smem_per_block_optin_bytes
    if use.shared_bytes > granted:
        return f"needs {use.shared_bytes:,} B of shared memory, {card} allows {granted:,}"
    if use.threads > THREADS_PER_BLOCK:
        return f"needs {use.threads:,} threads per block, {card} allows {THREADS_PER_BLOCK:,}"
    if use.tensor_memory > TENSOR_MEMORY_COLUMNS:
        return f"needs {use.tensor_memory:,} columns of tensor memory, {card} has {TENSOR_MEMORY_COLUMNS:,}"
    if (registers := _warps(use) * _registers_of_warp(use)) > spec.registers_per_sm:
        return f"needs {registers:,} registers per block, {card} has {spec.registers_per_sm:,}"
    for axis, (size, most) in enumerate(zip(use.grid, GRID, strict=False)):
        if size > most:
            return f"needs {size:,} blocks along grid axis {axis}, CUDA allows {most:,}"
    return ""


@dataclass(frozen=True)
class Occupancy:
    """The occupancy of an SM: resident blocks, the share of its threads that they use, and the resource that limits them."""

    blocks_per_sm: int
    share: float  # of the SM's threads, 0 to 1
    limit: str  # "registers", "shared memory", "threads" or "blocks"


def occupancy(use: LaunchUse, spec: GpuSpec) -> Occupancy:
    """Return the occupancy of an SM of `spec` by blocks of `use`."""
    shared = use.shared_bytes + RESERVED_SHARED_BYTES
    room = {
        "threads": spec.threads_per_sm // (_warps(use) * WARP),
        "registers": spec.registers_per_sm // max(_warps(use) * _registers_of_warp(use), 1),
        "shared memory": spec.smem_per_sm_bytes // shared,
        "blocks": BLOCKS_PER_SM.get(spec.compute_capability, FEWEST_BLOCKS_PER_SM),
    }
    limit = min(room, key=lambda name: room[name])
    blocks = room[limit]
    return Occupancy(blocks, blocks * _warps(use) * WARP / spec.threads_per_sm, limit)


def worst_occupancy(launches: Sequence[LaunchUse], spec: GpuSpec) -> Occupancy | None:
    """Return the lowest occupancy of several launches; None if there are none."""
    return min((occupancy(use, spec) for use in launches), key=lambda found: found.share, default=None)


def _warps(use: LaunchUse) -> int:
    return -(-use.threads // WARP)


def _registers_of_warp(use: LaunchUse) -> int:
    return -(-use.registers * WARP // REGISTERS_GRANTED_IN) * REGISTERS_GRANTED_IN
