"""Does it fit? What a device has free, and the refusal that says what is needed, what there is, and what would do."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from toolkit.core.errors import DeviceError
from toolkit.core.units import bytes_text
from toolkit.gpu.device import Device

ROUND_BYTES = 512  # what CUDA's caching allocator rounds every tensor up to
_CGROUP = Path("/sys/fs/cgroup")


def needed_bytes(tensors: Iterable[Tensor]) -> int:
    """What `tensors` take on a device, each rounded up as the allocator does."""
    return sum(-(-tensor.nbytes // ROUND_BYTES) * ROUND_BYTES for tensor in tensors)


def free_bytes(device: Device) -> int:
    """How much memory can still be allocated on the device, whoever else uses it; on the CPU, what this process may use."""
    memory = device.memory()
    if not memory.total_bytes:
        return _host_free()
    free = device.limit_bytes - memory.allocated_bytes
    if device.torch.type == "cuda":
        unused = torch.cuda.mem_get_info(device.torch)[0] + memory.reserved_bytes - memory.allocated_bytes
        free = min(free, unused)
    return free


def check_room(what: str, device: Device, needed: int, smaller: Iterable[tuple[str, int]]) -> None:
    """Refuse at once what can't fit, before gigabytes have crossed. See `too_big`."""
    if needed > free_bytes(device):
        raise too_big(what, device, needed, smaller)


def too_big(what: str, device: Device, needed: int, smaller: Iterable[tuple[str, int]]) -> DeviceError:
    """The error for weights that don't fit. `smaller`: options in the user's words, with the bytes they would need."""
    free, total = free_bytes(device), device.limit_bytes
    of = f" of {bytes_text(total)}" if total else ""
    fitting = next((f"{option} needs {bytes_text(size)}" for option, size in smaller if size <= free), None)
    larger = "machine" if device.torch.type == "cpu" else "card"
    do = f"Free what is on it, or choose a larger {larger}" if fitting is None else f"Smaller: {fitting}"
    return DeviceError(
        f"{what} on {device.name}",
        f"its weights need {bytes_text(needed)}, {device.name} has {bytes_text(free)}{of} free",
        do,
        needed_bytes=needed,
        free_bytes=free,
    )


def _host_free() -> int:
    """Memory that this process can still get: what the machine has, or what its container may use, if that is less."""
    free = _machine_free()
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
            used = int((_CGROUP / "memory.current").read_text()) - int(stat["file"])  # cached files make way
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
