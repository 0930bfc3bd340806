"""rms_norm on the virtual GPU: one operation, as on CUDA, where PyTorch would take it apart for other devices.

Where a gradient is wanted its parts run instead, which have one. Values are the CPU's. Knows no costs.
"""

from __future__ import annotations

from typing import Any

import torch

from toolkit.gpu.virtual import dispatch as virtual_dispatch

aten = torch.ops.aten
_PARTS = torch._C.DispatchKey.CompositeImplicitAutograd  # type: ignore[attr-defined]


def rms_norm(
    x: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """x [..., *normalized_shape] over its root mean square, times `weight` [*normalized_shape]."""
    wants_gradient = torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad))
    if wants_gradient or (weight is not None and weight.dtype != x.dtype):
        return aten.rms_norm.default._op_dk(_PARTS, x, normalized_shape, weight, eps)
    return virtual_dispatch.run(aten._fused_rms_norm.default, (x, normalized_shape, weight, eps), {})[0]


def register() -> list[torch.library.Library]:
    """Let the operation be ours on the device, with and without autograd. Keep the libraries alive."""
    library = torch.library.Library("aten", "IMPL")
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        library.impl("rms_norm", rms_norm, key)
    virtual_dispatch.SPECIAL["rms_norm"] = lambda func: lambda args, kwargs: rms_norm(*args, **kwargs)
    return [library]
