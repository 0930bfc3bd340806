"""torch.cond on the virtual GPU.

PyTorch compiles it, and then runs the operations of one branch. The virtual GPU runs the branch directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from toolkit.gpu.virtual.operands import tensors_in
from toolkit.gpu.virtual.tensor import VirtualTensor

_cond = torch.cond


def cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any = ()) -> Any:
    """Replace torch.cond. As on CUDA, reading a condition on the device copies it to the host, and waits."""
    if torch.compiler.is_dynamo_compiling() or not any(isinstance(x, VirtualTensor) for x in tensors_in((pred, operands))):
        return _cond(pred, true_fn, false_fn, operands)
    return (true_fn if pred else false_fn)(*operands)


def install() -> None:
    """Replace torch.cond in this process. It acts as before on other devices."""
    torch.cond = cond
