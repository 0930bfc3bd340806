"""rms_norm on the virtual GPU: one operation, as on CUDA. PyTorch would decompose it for other devices.

If a gradient is needed, the decomposition runs, since the fused operation has none outside of CUDA.
"""

from __future__ import annotations

from typing import Any

import torch

from toolkit.gpu.virtual.dispatch import SPECIAL, run

aten = torch.ops.aten
_PARTS = torch._C.DispatchKey.CompositeImplicitAutograd  # type: ignore[attr-defined]


def rms_norm(
    x: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """Return x [..., *normalized_shape] divided by its root mean square, times `weight` [*normalized_shape]."""
    wants_gradient = torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad))
    if wants_gradient or (weight is not None and weight.dtype != x.dtype):
        return aten.rms_norm.default._op_dk(_PARTS, x, normalized_shape, weight, eps)
    return run(aten._fused_rms_norm.default, (x, normalized_shape, weight, eps), {})[0]


def register() -> list[torch.library.Library]:
    """Register rms_norm for the virtual GPU, with and without autograd. The caller keeps the libraries alive."""
    library = torch.library.Library("aten", "IMPL")
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        library.impl("rms_norm", rms_norm, key)
    SPECIAL["rms_norm"] = lambda func: lambda args, kwargs: rms_norm(*args, **kwargs)
    return [library]
