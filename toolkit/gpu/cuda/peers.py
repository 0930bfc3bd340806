"""GPUs of several ranks that reach each other's memory: `connect` allocates memory on each that all ranks write to.

The memory is PyTorch's symmetric memory. Multicast over NVLink is never used.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from toolkit.core.distributed import Shard, gather, switch_multicast_off
from toolkit.core.errors import DeviceError

_BOOT = Path("/proc/sys/kernel/random/boot_id")  # tells machines with the same name apart
_NAME_BYTES = 128
T = TypeVar("T")


@dataclass(frozen=True)
class Shared:
    """Memory of the same size on the GPU of each rank. Keep it for as long as a rank may write.

    Attributes:
        own: int64, this rank's memory, which the others write to; zeros at first.
        addresses: int64 [ranks], on the GPU, the addresses of the memory of all ranks in this process.
    """

    own: Tensor
    addresses: Tensor
    handle: Any


def connect(device: torch.device, shard: Shard, count: int) -> tuple[Shared | None, str]:
    """Allocate `count` int64 zeros on the GPU of each rank. All ranks must call it.

    Returns None and the reason if the GPUs can't reach each other's memory. Raises DeviceError if two ranks use one GPU.
    """
    switch_multicast_off()
    places = gather(_place(device))
    names = [bytes(row.tolist()).rstrip(b"\0").decode() for row in places]
    for rank, name in enumerate(names):
        if names.index(name) < rank:
            found = f"ranks {names.index(name)} and {rank} both use {name.replace(' ', ', GPU ')}"
            raise DeviceError(f"a model over {shard.ranks} ranks on CUDA", found, 'Load on device="cuda", one GPU per rank')
    why_not = _agreed(_unreachable(device, names, names[shard.rank].rpartition(" ")[0]))
    if why_not:
        return None, why_not
    memory, why_not = _together(partial(_allocated, device, count + shard.ranks))
    if memory is None:
        return None, why_not
    return _together(partial(_exchanged, device, memory, count))


def _together(step: Callable[[], T]) -> tuple[T | None, str]:
    """Take a step that all ranks take. Returns its result, or None and the reason of the first rank for which it failed."""
    found: T | None = None
    try:
        found, why_not = step(), ""
    except RuntimeError as error:
        why_not = str(error).partition("\n")[0][:160]
    why_not = _agreed(why_not)
    return (None, why_not) if why_not else (found, "")


def _allocated(device: torch.device, count: int) -> Tensor:
    from torch._C._distributed_c10d import _SymmetricMemory

    with torch.cuda.device(device):
        # Not `symm_mem.empty`, whose memory pool counts as memory of the caching allocator.
        return _SymmetricMemory.empty_strided_p2p((count,), (1,), torch.int64, device)


def _exchanged(device: torch.device, memory: Tensor, count: int) -> Shared:
    """Exchange the addresses of `memory`, which has an entry per rank after the first `count`."""
    import torch.distributed as dist
    from torch.distributed._symmetric_memory import rendezvous

    with torch.cuda.device(device):
        handle = rendezvous(memory, dist.distributed_c10d._get_default_group().group_name)
        memory[:count].zero_()
        memory[count:].copy_(torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device="cpu"))
        torch.cuda.synchronize(device)  # the exchange of reasons that follows is a barrier: no rank writes before
    return Shared(memory[:count], memory[count:], handle)


def _place(device: torch.device) -> Tensor:
    """Return the machine and the GPU's UUID as text of `_NAME_BYTES` bytes."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    machine = f"{socket.gethostname()[:40]}/{boot}"
    text = f"{machine} {torch.cuda.get_device_properties(device).uuid}".encode()
    return torch.frombuffer(bytearray(text.ljust(_NAME_BYTES, b"\0")), dtype=torch.uint8)


def _unreachable(device: torch.device, names: list[str], here: str) -> str:
    """Return why this GPU, on the machine `here`, can't reach those of the other ranks, or ""."""
    visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    mine = device.index
    for rank, name in enumerate(names):
        machine, _, uuid = name.rpartition(" ")
        if machine != here:
            return f"rank {rank} is on another machine"
        if uuid not in visible:
            return f"the GPU of rank {rank} is not visible to the other ranks"
        if visible[uuid] != mine and not torch.cuda.can_device_access_peer(mine, visible[uuid]):
            return f"cuda:{mine} has no peer access to cuda:{visible[uuid]}"
    return ""


def _agreed(reason: str) -> str:
    """Return the reason of the first rank that has one."""
    row = torch.frombuffer(bytearray(reason.encode()[:256].ljust(256, b"\0")), dtype=torch.uint8)
    found = [bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in gather(row)]
    return next((f"{text} (rank {rank})" for rank, text in enumerate(found) if text), "")
