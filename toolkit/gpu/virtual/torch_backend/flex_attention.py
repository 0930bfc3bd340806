"""flex_attention on the virtual GPU, outside of `torch.compile`: PyTorch's unfused implementation, operation by operation.

On CUDA, PyTorch traces such a call with `torch.compile(backend="eager")`, and then runs the same operations. Here they run
without being traced. The trace would also give the graph of the backward pass, so that gradients are not supported.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._higher_order_ops.flex_attention import flex_attention as operator
from torch._higher_order_ops.flex_attention import sdpa_dense
from torch.nn.attention import flex_attention as public

from toolkit.gpu.virtual.dispatch import COMPILED
from toolkit.gpu.virtual.tensor import VirtualTensor
from toolkit.gpu.virtual.torch_backend.subclasses import on_device

_NO_GRADIENT = (
    "the virtual GPU does not support gradients of flex_attention: of query, key, value, or tensors that score_mod uses. "
    "Call it under torch.no_grad(), or train with scaled_dot_product_attention and a mask"
)
_validate_device = public._validate_device
_environment = public.setup_compilation_env  # type: ignore[attr-defined]
_call = threading.local()  # `_call.virtual` says whether the call that runs on this thread has tensors of the virtual GPU
_AUTOCAST = DispatchKeySet(DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]


def _validate(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Check the operands of a call of `flex_attention`. Raises RuntimeError where the virtual GPU doesn't support it."""
    virtual = isinstance(query, VirtualTensor)
    if not virtual:
        _validate_device(query, key, value)
    elif torch.compiler.is_dynamo_compiling() or get_eval_frame_callback():
        raise RuntimeError(COMPILED)
    _call.virtual = virtual


@contextmanager
def _compilation_environment() -> Iterator[Any]:
    with _environment() as backend:
        if _call.virtual:
            with torch.compiler.set_stance("force_eager"):
                yield backend
        else:
            yield backend


def _autocast(*args: Any) -> Any:
    """Run the operator with query, key and value (the first three operands) in the dtype of autocast."""
    dtype = torch.get_autocast_dtype("vgpu")
    with _ExcludeDispatchKeyGuard(_AUTOCAST):
        return operator(*(x.to(dtype) for x in args[:3]), *args[3:])


def _autograd(*args: Any) -> Any:
    """Run the operator. Raises RuntimeError if its results depend on a tensor that requires a gradient.

    Such a tensor may be one that `score_mod` uses without being given it.
    """
    results = sdpa_dense(*args)
    if any(x.requires_grad for x in results):
        raise RuntimeError(_NO_GRADIENT)
    return results


def install() -> None:
    """Let `flex_attention` take tensors of the virtual GPU, for this process. It acts as before on other devices."""
    public._validate_device = _validate
    public.setup_compilation_env = _compilation_environment  # type: ignore[attr-defined]
    for cls in (VirtualTensor, on_device(torch.nn.Parameter)):
        operator.py_impl(cls)(sdpa_dense)
    operator.py_impl(DispatchKey.AutogradPrivateUse1)(_autograd)  # type: ignore[attr-defined]
    operator.py_impl(DispatchKey.AutocastPrivateUse1)(_autocast)  # type: ignore[attr-defined]
