# mypy: allow-untyped-calls, no-warn-return-any, no-warn-unused-ignores
# (PyTorch's extension points carry no types.)
"""Storages on the virtual GPU, as `torch.load(map_location="vgpu")` and `torch.UntypedStorage(device="vgpu")` create them.

PyTorch itself would crash while allocating such a storage. A `DeviceStorage` is host memory that reports the virtual GPU as its
device; device memory is allocated when a tensor uses it.
"""

from __future__ import annotations

from typing import Any

import torch

from toolkit.gpu.virtual.dispatch import machine
from toolkit.gpu.virtual.effects.effect import WAIT, h2d

_new: Any = torch._C.StorageBase.__new__


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


def _make(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    if device is None:
        return _new(cls, *args, **kwargs)
    if torch.device(device).type != "vgpu":
        return _new(cls, *args, device=device, **kwargs)
    return _new(DeviceStorage, *args, **kwargs)


def install() -> None:
    """Make torch.UntypedStorage create storages on the virtual GPU, in this process."""
    torch.UntypedStorage.__new__ = _make  # type: ignore[method-assign, assignment]
