# mypy: allow-untyped-calls, no-warn-return-any, no-warn-unused-ignores
# (PyTorch's extension points carry no types.)
"""one_hot on the virtual GPU, as on CUDA. PyTorch compares the labels with a range on devices that it does not know."""

from __future__ import annotations

import torch

from toolkit.gpu.virtual.dispatch import SPECIAL


def one_hot(labels: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Scatter ones into zeros."""
    if labels.dtype != torch.int64:
        raise RuntimeError("one_hot is only applicable to index tensor of type LongTensor.")
    if not labels.numel() and num_classes <= 0:
        raise RuntimeError("Can not infer total number of classes from empty tensor.")
    classes = int(labels.max()) + 1 if num_classes == -1 else num_classes
    zeros = torch.zeros((*labels.shape, classes), dtype=torch.int64, device=labels.device)
    return zeros.scatter_(-1, labels.unsqueeze(-1), 1)


def register() -> list[torch.library.Library]:
    """Register one_hot for the virtual GPU, with and without autograd. The caller keeps the libraries alive."""
    library = torch.library.Library("aten", "IMPL")
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        library.impl("one_hot", one_hot, key)
    SPECIAL["one_hot"] = lambda func: lambda args, kwargs: one_hot(*args, **kwargs)
    return [library]
