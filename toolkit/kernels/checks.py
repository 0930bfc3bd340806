"""Checks of the tensors before a launch, with an error that names the tensor instead of wrong results."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from toolkit.core.errors import ModelError
from toolkit.core.units import dtype_name

ALIGNMENT = 16  # bytes: a GPU's widest load; PyTorch's allocator aligns to it, slices may not


def check_word(asked: str, name: str, value: str, known: Collection[str]) -> None:
    """Raise ModelError unless `value` is one of `known`. `name` is that of the field of a shape."""
    if value not in known:
        raise ModelError(f"{asked}: {name}={value!r}", "not known", f"Give one of {', '.join(known)}")


def check_tensor(
    kernel: str,
    name: str,
    tensor: Tensor,
    shape: Sequence[int],
    dtypes: torch.dtype | Sequence[torch.dtype],
    like: Tensor,
    alignment: int = ALIGNMENT,
    apart: bool = False,
) -> None:
    """Raise ModelError unless `tensor` has this shape and dtype, and is contiguous, aligned, and on the device of `like`.

    With `apart`, the rows of a matrix need only be contiguous by themselves.
    """
    allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
    asked = f"{kernel}, {name}"
    if tuple(tensor.shape) != tuple(shape):
        raise ModelError(asked, f"shape {list(tensor.shape)} where {list(shape)} is needed", "Give it in that shape")
    if tensor.dtype not in allowed:
        names = " or ".join(dtype_name(dtype) for dtype in allowed)
        raise ModelError(asked, f"{str(tensor.dtype).removeprefix('torch.')} where {names} is needed", "Convert it")
    if tensor.device != like.device:
        raise ModelError(asked, f"on {tensor.device}, the rest on {like.device}", "Move it there")
    if not (tensor.stride(-1) == 1 if apart else tensor.is_contiguous()):
        raise ModelError(asked, f"strides {list(tensor.stride())}: not contiguous", "Call .contiguous()")
    # Tensors that stand for others, as in tracing, have no address.
    if type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta and tensor.data_ptr() % alignment:
        raise ModelError(asked, f"begins {tensor.data_ptr() % alignment} B past a multiple of {alignment}", "Clone it")
