# mypy: allow-untyped-calls, no-warn-return-any, no-warn-unused-ignores
# (PyTorch's extension points carry no types.)
"""Storages on the virtual GPU, as `torch.load(map_location="vgpu")` and `torch.UntypedStorage(device="vgpu")` create them.

PyTorch itself would crash while allocating such a storage. A `DeviceStorage` is host memory that reports the virtual GPU as its
device; device memory is allocated when a tensor uses it. `torch.save` writes a `SavedStorage`. DLPack shares storages.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch._tensor import _rebuild_from_type_v2
from torch.utils import dlpack
from torch.utils.serialization import config

from toolkit.gpu.virtual.dispatch import machine
from toolkit.gpu.virtual.effects.effect import WAIT, d2h, h2d
from toolkit.gpu.virtual.tensor import VirtualTensor
from toolkit.gpu.virtual.torch_backend.subclasses import on_host

_new: Any = torch._C.StorageBase.__new__
_from_dlpack, _capsule = dlpack.from_dlpack, torch._C._to_dlpack  # type: ignore[attr-defined]


class DeviceStorage(torch.UntypedStorage):
    """Host memory that represents memory of the virtual GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("vgpu", 0)

    def copy_(self, source: Any, non_blocking: bool | None = None) -> Any:
        """Copy the values of another storage; if it is on the host, execute an H2D copy and a wait."""
        super().copy_(source, non_blocking)
        if source.device.type == "cpu":
            machine().execute(h2d(self.nbytes(), pinned=False))
            machine().execute(WAIT)
        return self


class SavedStorage:
    """The storage of a device tensor for `torch.save`, which writes it once for all tensors that share it."""

    device = torch.device("cpu")  # `install` sets the virtual GPU

    def __init__(self, host: torch.UntypedStorage) -> None:
        self._host, self._cdata = host, host._cdata
        self.nbytes, self.data_ptr = host.nbytes, host.data_ptr

    def cpu(self) -> torch.UntypedStorage:
        """Execute a D2H copy and a wait, and return the values."""
        if self.nbytes():
            machine().execute(d2h(self.nbytes(), pinned=False))
            machine().execute(WAIT)
        return self._host

    def _write_file(self, *args: Any) -> None:
        self.cpu()._write_file(*args)

    def __reduce__(self) -> Any:
        return _restored, (torch.empty(0, dtype=torch.uint8).set_(self.cpu()),)


def _restored(values: torch.Tensor) -> Any:
    return torch.UntypedStorage(values.nbytes, device="vgpu").copy_(values.untyped_storage())


def _reduce(self: VirtualTensor, protocol: Any) -> Any:
    """Pickle through the host. `torch.load` moves the tensor back to the device, or to its `map_location`."""
    host = self._host
    if host.is_meta:
        raise RuntimeError("a sizes-only tensor has no values to save")
    storage = torch.TypedStorage(wrap_storage=host.untyped_storage(), dtype=self.dtype, _internal=True)
    if config.save.use_pinned_memory_for_d2h:  # PyTorch then copies it with a function of C++, which takes no SavedStorage
        storage._fake_device = self.device
        machine().execute(d2h(host.untyped_storage().nbytes(), pinned=True))
        machine().execute(WAIT)
    else:
        storage._untyped_storage = SavedStorage(host.untyped_storage())  # type: ignore[assignment]
    layout = self.storage_offset(), tuple(self.size()), self.stride()
    args: Any = storage, *layout, self.requires_grad, OrderedDict()
    make, cls, state = torch._utils._rebuild_tensor_v2, on_host(type(self)), self.__getstate__()  # type: ignore[attr-defined]
    return (make, args) if cls is torch.Tensor and not state else (_rebuild_from_type_v2, (make, cls, args, state))


def _make(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    if device is None:
        return _new(cls, *args, **kwargs)
    if torch.device(device).type != "vgpu":
        return _new(cls, *args, device=device, **kwargs)
    return _new(DeviceStorage, *args, **kwargs)


def from_dlpack(ext_tensor: Any, *, device: Any = None, copy: bool | None = None) -> torch.Tensor:
    """Replace torch.from_dlpack. A tensor of the virtual GPU never leaves PyTorch: the result shares its memory."""
    if not isinstance(ext_tensor, VirtualTensor):
        return _from_dlpack(ext_tensor, device=device, copy=copy)
    if ext_tensor.requires_grad:
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
    wanted = ext_tensor.device if device is None else torch.device(device)
    if wanted.type != "vgpu" and copy is False:
        raise ValueError(f"cannot move DLPack tensor from device {ext_tensor.device} to {wanted} without copying")
    return ext_tensor.detach().to(wanted, copy=bool(copy))


def _to_dlpack(tensor: torch.Tensor) -> Any:
    """Replace torch.to_dlpack. Raises BufferError for a tensor of the virtual GPU."""
    return tensor.__dlpack__() if isinstance(tensor, VirtualTensor) else _capsule(tensor)


def install() -> None:
    """Replace PyTorch's functions for storages, pickling and DLPack in this process. They act as before on other devices."""
    torch.UntypedStorage.__new__ = _make  # type: ignore[method-assign, assignment]
    SavedStorage.device = torch.device("vgpu", 0)
    for module in (torch, dlpack):
        module.from_dlpack, module.to_dlpack = from_dlpack, _to_dlpack  # type: ignore[attr-defined, assignment]
    VirtualTensor.__reduce_ex__ = _reduce  # type: ignore[method-assign, assignment]
