"""`tk.device` opens a device by name, and `tk.record` records the events of one."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from toolkit.core.distributed import local_rank
from toolkit.core.errors import DeviceError, brief, kind_of, unknown_name
from toolkit.core.flags import flag
from toolkit.gpu.catalogue import CATALOGUE, GpuSpec
from toolkit.gpu.cuda.device import open_cpu, open_cuda
from toolkit.gpu.device import Device
from toolkit.gpu.virtual.device import check_single, current_virtual, open_virtual, spec_of
from toolkit.trace.events import Trace


def record(device: Device | str, *, lines: bool = True) -> AbstractContextManager[Trace]:
    """Record every copy, kernel, wait and allocation of any PyTorch code: `with tk.record(device) as trace:`.

    `device` is a name for `tk.device`, or a device. The trace is filled when the block ends. A recording inside another one of
    the same device joins it: both are one trace. For `lines` and errors see `Device.record`.
    """
    return open_device(device).record(lines=flag("lines", lines))


def open_device(device: Device | str | torch.device = "auto") -> Device:
    """Return the device called `device`: "cuda", "cuda:1", "cpu", "virtual:rtx-5090", "virtual:8GiB", or "auto".

    "cuda" is the first CUDA GPU, or that of this process among those that torchrun started on this machine (LOCAL_RANK), unless
    each process sees a single GPU. "virtual:8GiB" is a virtual H200 with that much memory; any size from 1 MiB on is possible.
    "auto" is "cuda" if there is a CUDA GPU, otherwise "virtual:h200". A `Device` is returned as it is. Raises DeviceError
    if the device does not exist, and UnknownNameError, which suggests the nearest name, if the name is unknown. A virtual GPU
    follows PYTORCH_ALLOC_CONF, and warns if it can't.

    PyTorch takes the device as `Device.torch`, as in `torch.ones(3, device=gpu.torch)`. A process has one virtual GPU at a
    time: opening another one while tensors are on it is a DeviceError.
    """
    if isinstance(device, Device):
        return device
    name = _meant(device)
    kind, _, rest = name.partition(":")
    if kind == "virtual":
        return open_virtual(rest)
    if kind == "vgpu" and rest in ("", "0"):
        return current_virtual()
    if kind == "cpu" and rest in ("", "0"):
        return open_cpu()
    if kind == "cuda" and (not rest or rest.isdecimal()):
        return open_cuda(int(rest) if rest else _own_gpu())
    check_single(name)
    raise unknown_name("device", name, ["auto", "cpu", "cuda", *(f"virtual:{card}" for card in CATALOGUE)])


def virtual_name(device: Device | str | torch.device) -> str:
    """Return the name of the virtual GPU that `open_device` would return, without opening it; "" for another device.

    Raises UnknownNameError for an unknown virtual GPU.
    """
    if not isinstance(device, Device):
        kind, _, rest = _meant(device).partition(":")
        if kind == "virtual":
            spec_of(rest)
            return f"virtual:{rest}"
        if kind != "vgpu":
            return ""
        device = open_device(device)
    return "" if device.torch.type in ("cpu", "cuda") else device.name


def _meant(device: object) -> str:
    """Return the text of a device's name, with that of a device in place of "auto"."""
    name = name_of(device)
    return name if name != "auto" else "cuda" if _cuda_count() else "virtual:h200"


def name_of(device: object) -> str:
    """Return the text of a device's name. Raises DeviceError for a cluster, the figures of a GPU, and what is no device."""
    if isinstance(device, GpuSpec):
        do = f'Pass "virtual:{device.key}" for a virtual one, or "cuda" for the GPU of this machine'
        raise DeviceError(f"the device {device.key}", "these are the figures of a GPU, not a device", do)
    each, ranks = getattr(device, "device", None), getattr(device, "ranks", None)
    if isinstance(ranks, int):
        do = f'Pass it to tk.load as cluster=. For a plan, pass device="{each}" and tensor_parallel={ranks}'
        raise DeviceError(f"the device {brief(device)}", "a cluster has a device for each rank", do)
    if not isinstance(device, str | torch.device):
        raise DeviceError("a device", kind_of(device), 'Give a name, such as "virtual:h200", or what tk.device returned')
    return str(device)


def _own_gpu() -> int:
    return 0 if _cuda_count() == 1 else local_rank()


def _cuda_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
