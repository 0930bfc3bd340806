"""linear on the virtual GPU: a bias that is not part of the product is added in place, as on CUDA.

For a subclass of Tensor, as the virtual GPU's is, PyTorch adds it out of place (isTensorSubclassLike in Linear.cpp).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from toolkit.gpu.virtual.dispatch import SPECIAL
from toolkit.gpu.virtual.dispatch_keys import Including, parts_of

aten = torch.ops.aten
_parts = parts_of(aten.linear.default, torch._C.DispatchKey.CompositeImplicitAutograd)  # type: ignore[attr-defined]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x [..., K] times the transpose of `weight` [N, K], plus `bias` [N]."""
    if bias is None or x.dim() == 2 or x.is_contiguous() or forward_ad._current_level >= 0:
        return _parts((x, weight, bias), {})
    if not torch.is_inference_mode_enabled():
        return aten.matmul(x, weight.t()).add_(bias)
    with Including("ADInplaceOrView"):  # as in `parts_of`
        return aten.matmul(x, weight.t()).add_(bias)


def _handler(func: Any) -> Any:
    return lambda args, kwargs: linear(*args, **kwargs)


def register() -> list[torch.library.Library]:
    """Register linear for the virtual GPU, with and without autograd. The caller keeps the libraries alive."""
    library = torch.library.Library("aten", "IMPL")
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        library.impl("linear", linear, key)
    SPECIAL["linear"] = _handler
    return [library]
