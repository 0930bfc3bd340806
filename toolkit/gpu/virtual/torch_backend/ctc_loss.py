"""ctc_loss on the virtual GPU: lengths in host tensors become numbers, as on CUDA. PyTorch would upload them for a subclass.

PyTorch has no meta kernel for the gradient, so that its shape is given here for tensors without values.
"""

from __future__ import annotations

from typing import Any

import torch

from toolkit.gpu.virtual.dispatch import SPECIAL
from toolkit.gpu.virtual.host_kernels import HOSTS

aten = torch.ops.aten


def ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: torch.Tensor, target_lengths: torch.Tensor,
    blank: int = 0, reduction: int = 1, zero_infinity: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Return the loss of log_probs [T, N, C] for targets [N, S] or their concatenation, with lengths [N]."""
    lengths = (x.to("cpu", torch.int64).tolist() for x in (input_lengths, target_lengths))
    return aten.ctc_loss.IntList(log_probs, targets, *lengths, blank, reduction, zero_infinity)


def _backward(grad: torch.Tensor, log_probs: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Return the gradient of log_probs [T, N, C] on the host; `rest` are the other operands of `_ctc_loss_backward`."""
    return log_probs.new_empty(log_probs.shape) if log_probs.is_meta else aten._ctc_loss_backward(grad, log_probs, *rest)


def _handler(func: Any) -> Any:
    if func._overloadname == "Tensor":
        return lambda args, kwargs: ctc_loss(*args, **kwargs)
    return lambda args, kwargs: func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)  # type: ignore[attr-defined]


def register() -> list[torch.library.Library]:
    """Register ctc_loss for the virtual GPU, with and without autograd. The caller keeps the libraries alive."""
    library = torch.library.Library("aten", "IMPL")
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        library.impl("ctc_loss.Tensor", ctc_loss, key)
    SPECIAL["ctc_loss"] = _handler
    HOSTS["_ctc_loss_backward"] = _backward
    return [library]
