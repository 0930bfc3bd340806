"""The memory functions of `torch.vgpu`, with the names and results of those in `torch.cuda`."""

from __future__ import annotations

import torch

from toolkit.core.units import bytes_text
from toolkit.gpu.virtual.allocator.blocks import Block
from toolkit.gpu.virtual.allocator.memory import Memory
from toolkit.gpu.virtual.dispatch import machine

DeviceLike = torch.device | str | int | None


def index_of(device: DeviceLike) -> int:
    """Return 0, the only ordinal. Raises RuntimeError for another one, and ValueError for another type of device."""
    index = device if isinstance(device, int) else 0 if device is None else torch.device(device).index or 0
    if not isinstance(device, int) and device is not None and torch.device(device).type != "vgpu":
        raise ValueError(f"Expected a vgpu device, but got: {device}")
    if index not in (0, -1):
        raise RuntimeError(f"invalid device ordinal: vgpu:{index} was requested, and the only virtual GPU is vgpu:0")
    return 0


def _memory(device: DeviceLike) -> Memory:
    index_of(device)
    return machine().memory


def memory_allocated(device: DeviceLike = None) -> int:
    return _memory(device).allocated_bytes


def max_memory_allocated(device: DeviceLike = None) -> int:
    return _memory(device).peak_bytes


def memory_reserved(device: DeviceLike = None) -> int:
    return _memory(device).reserved_bytes


def max_memory_reserved(device: DeviceLike = None) -> int:
    return _memory(device).peak_reserved_bytes


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Reset all peaks to the current figures."""
    _memory(device).reset_peak()


def reset_accumulated_memory_stats(device: DeviceLike = None) -> None:
    """Reset the "allocated" and "freed" figures to 0."""
    _memory(device).reset_accumulated()


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """Return the free and the total bytes."""
    memory = _memory(device)
    return memory.free_bytes, memory.total_bytes


get_memory_info = mem_get_info


def memory_stats(device: DeviceLike = None) -> dict[str, int]:
    """Return the counters of torch.cuda.memory_stats. "active" equals "allocated": no block waits for another stream."""
    return _memory(device).stats()


def memory_snapshot(mempool_id: tuple[int, int] | None = None) -> list[dict[str, object]]:
    """Return the segments with their blocks, as torch.cuda.memory_snapshot does, of all memory pools or of one.

    A pool is (0, 0), or (0, n) for the private pool of a captured graph.
    """
    found = [_segment(blocks) for blocks in machine().memory.segments()]
    return [x for x in found if mempool_id is None or x["segment_pool_id"] == tuple(mempool_id)]


def _segment(blocks: list[Block]) -> dict[str, object]:
    held = [block for block in blocks if not block.free]
    size = sum(block.size for block in held)
    return {
        "device": 0, "address": blocks[0].address, "total_size": sum(block.size for block in blocks),
        "allocated_size": size, "active_size": size, "requested_size": sum(block.requested for block in held),
        "stream": max(blocks[0].stream, 0), "segment_type": "small" if blocks[0].free_list.pool.small else "large",
        "segment_pool_id": (0, max(-blocks[0].stream, 0)), "is_expandable": blocks[0].expandable, "frames": [],
        "blocks": [
            {"address": block.address, "size": block.size, "requested_size": block.requested,
             "state": "inactive" if block.free else "active_allocated", "frames": []}
            for block in blocks
        ],
    }  # fmt: skip


_SUMMARY = (
    ("Allocated memory", "allocated_bytes"), ("Active memory", "active_bytes"), ("Requested memory", "requested_bytes"),
    ("GPU reserved memory", "reserved_bytes"), ("Non-releasable memory", "inactive_split_bytes"),
    ("Allocations", "allocation"), ("Active allocs", "active"), ("GPU reserved segments", "segment"),
    ("Non-releasable allocs", "inactive_split"),
)  # fmt: skip


def memory_summary(device: DeviceLike = None, abbreviated: bool = False) -> str:
    """Return the counters as a table, as torch.cuda.memory_summary does."""
    stats, pools = memory_stats(device), ("all",) if abbreviated else ("all", "large_pool", "small_pool")
    ooms, retries = stats["num_ooms"], stats["num_alloc_retries"]
    lines = [
        f"PyTorch memory of {machine().spec.name}: {ooms} out-of-memory errors, {retries} retries after releasing the cache",
        f"{'':26}{'current':>12}{'peak':>12}{'allocated':>12}{'freed':>12}",
    ]
    for title, name in _SUMMARY:
        text = bytes_text if "bytes" in name else "{:,}".format
        for pool in pools:
            figures = [text(stats[f"{name}.{pool}.{kind}"]) for kind in ("current", "peak", "allocated", "freed")]
            label = title if pool == "all" else f"  from the {pool.replace('_', ' ')}"
            lines.append(f"{label:26}" + "".join(f"{x:>12}" for x in figures))
    return "\n".join(lines)


def set_per_process_memory_fraction(fraction: float, device: DeviceLike = None) -> None:
    """Limit this process to a fraction of the GPU's memory; beyond it, allocations raise torch.OutOfMemoryError."""
    index_of(device)
    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    memory = machine().memory
    memory.limit_bytes = int(fraction * memory.total_bytes)


def get_per_process_memory_fraction(device: DeviceLike = None) -> float:
    """Return the fraction of the GPU's memory that this process may reserve; 1 if it was never set."""
    memory = _memory(device)
    return 1.0 if memory.limit_bytes is None else memory.limit_bytes / memory.total_bytes


def empty_cache() -> None:
    """Release all cached segments that are completely free."""
    machine().memory.empty_cache()
