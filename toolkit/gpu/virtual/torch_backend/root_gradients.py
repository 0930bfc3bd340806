"""Gradients that the caller of a backward pass gives, as in `y.backward(gradient)`, on the virtual GPU.

PyTorch raises an error if one with dimensions is on another device than its tensor, but not if one of the two is an object of a
subclass of Tensor. So a gradient on the host would become that of a parameter on the virtual GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from toolkit.gpu.virtual.tensor import VirtualTensor

_make_grads: Any = torch.autograd._make_grads


def _on_the_devices(outputs: Sequence[Any], grads: Sequence[torch.Tensor | None], is_grads_batched: bool) -> Any:
    """Replace torch.autograd._make_grads, which returns the gradients with which a backward pass begins."""
    found = _make_grads(outputs, grads, is_grads_batched)
    for i, (out, grad) in enumerate(zip(outputs, found, strict=False)):
        if grad is None or not grad.dim() or not isinstance(out, torch.Tensor) or grad.device == out.device:
            continue
        if isinstance(out, VirtualTensor) or isinstance(grad, VirtualTensor):
            raise RuntimeError(f"invalid gradient at index {i} - expected device {out.device} but got {grad.device}")
    return found


def install() -> None:
    """Replace the function of PyTorch in this process. It acts as before on other devices."""
    torch.autograd._make_grads = _on_the_devices
