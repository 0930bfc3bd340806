"""Check that a device has enough free memory, and raise an error that states the need, the free memory and what would fit."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from toolkit.core.errors import DeviceError
from toolkit.core.units import bytes_text
from toolkit.gpu import unheld
from toolkit.gpu.device import Device

ROUND_BYTES = 512  # CUDA's caching allocator rounds each tensor up to a multiple
_CGROUP = Path("/sys/fs/cgroup")
_LARGER = "Use a larger card"
_BUDGET = "Set a larger budget, or use a larger card"


def needed_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of `tensors` on a device, each rounded up as by the allocator."""
    return sum(-(-tensor.nbytes // ROUND_BYTES) * ROUND_BYTES for tensor in tensors)


def free_bytes(device: Device) -> int:
    """Return the bytes that can still be allocated on the device; on the CPU, the memory available to this process."""
    memory = device.memory()
    if not memory.total_bytes:
        return _host_free()
    free = device.limit_bytes - memory.allocated_bytes
    if device.torch.type == "cuda":
        unused = torch.cuda.mem_get_info(device.torch)[0] + memory.reserved_bytes - memory.allocated_bytes
        free = min(free, unused)
    return free


def check_room(what: str, device: Device, needed: int, smaller: Iterable[tuple[str, int]]) -> None:
    """Raise the error of `too_big` if the weights cannot fit, before anything is copied."""
    if needed > free_bytes(device):
        raise too_big(what, device, needed, smaller)


def too_big(what: str, device: Device, needed: int, smaller: Iterable[tuple[str, int]]) -> DeviceError:
    """Return the error for weights that do not fit. `smaller` yields options with the bytes that they need."""
    free, total = free_bytes(device), device.limit_bytes
    of = f" of {bytes_text(total)}" if total else ""
    found = f"its weights need {bytes_text(needed)}, {device.name} has {bytes_text(free)}{of} free"
    if needed <= free and device.torch.type != "cpu":  # the allocation of a segment failed
        found += ", but the allocator takes memory in segments: 20 MiB at a time for tensors of 1 to 10 MiB"
    options = list(smaller)
    if fitting := _fitting(options, free):
        do = f"Use a smaller format: {fitting}"
    elif device.torch.type == "cpu":
        do = "Free memory on it, or use a larger machine"
    elif needed <= total:
        do = "Free memory on it, or use a larger card"
    elif fitting := _fitting(options, total):
        do = f"Free memory on it and use a smaller format ({fitting}), or use a larger card"
    else:  # freeing memory doesn't help
        return _error(what, device.name, found, _LARGER if needed > device.memory().total_bytes else _BUDGET, needed, free)
    return _error(what, device.name, found, do + ("" if device.torch.type == "cpu" else unheld.sentence()), needed, free)


def check_empty(what: str, name: str, total: int, needed: int, smaller: Iterable[tuple[str, int]]) -> None:
    """Raise DeviceError if weights exceed the `total` bytes of the GPU called `name`, which need not be open."""
    if needed > total:
        fitting = _fitting(smaller, total)
        found = f"its weights need {bytes_text(needed)}, {name} has {bytes_text(total)}"
        raise _error(what, name, found, f"Use a smaller format: {fitting}" if fitting else _LARGER, needed, total)


def _fitting(options: Iterable[tuple[str, int]], room: int) -> str:
    return next((f"{option} needs {bytes_text(size)}" for option, size in options if size <= room), "")


def _error(what: str, name: str, found: str, do: str, needed: int, free: int) -> DeviceError:
    return DeviceError(f"{what} on {name}", found, do, needed_bytes=needed, free_bytes=free)


def _host_free() -> int:
    """Return the memory available to this process: that of the machine, or that of its container if it is less."""
    free = _machine_free()
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
            used = int((_CGROUP / "memory.current").read_text()) - int(
                stat["file"]
            )  # the kernel drops cached files when memory is needed
            free = min(free, max(0, int(limit) - used))
    except (OSError, ValueError, KeyError):
        pass
    return free


def _machine_free() -> int:
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return int(os.sysconf("SC_PHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))
