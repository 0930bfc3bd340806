# mypy: allow-untyped-calls, no-warn-return-any, no-warn-unused-ignores
# (PyTorch's extension points carry no types.)
"""Storages on the virtual GPU: what `torch.load(map_location="vgpu")` and `torch.UntypedStorage(device="vgpu")` make.

PyTorch can't allocate such a storage and would crash. This one is host memory that says it is on the device; the device's
own memory is taken when a tensor holds it. Knows no operations.
"""

from __future__ import annotations

from typing import Any

import torch

from toolkit.gpu.virtual.dispatch import machine
from toolkit.gpu.virtual.effects import effect as rules_effect

_new: Any = torch._C.StorageBase.__new__


class DeviceStorage(torch.UntypedStorage):
    """Host memory that stands for memory of the virtual GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("vgpu", 0)

    def copy_(self, source: Any, non_blocking: bool | None = None) -> Any:
        """Fill from another storage: one copy over the bus, and the wait for it."""
        super().copy_(source, non_blocking)
        if source.device.type == "cpu":
            machine().execute(rules_effect.h2d(self.nbytes(), pinned=False))
            machine().execute(rules_effect.WAIT)
        return self


def _make(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    if device is None:
        return _new(cls, *args, **kwargs)
    if torch.device(device).type != "vgpu":
        return _new(cls, *args, device=device, **kwargs)
    return _new(DeviceStorage, *args, **kwargs)


def install() -> None:
    """Let torch.UntypedStorage make storages on the device, for the whole process."""
    torch.UntypedStorage.__new__ = _make  # type: ignore[method-assign, assignment]
