# mypy: allow-untyped-calls, no-warn-return-any, no-warn-unused-ignores
# (PyTorch's extension points carry no types.)
"""torch.autocast("vgpu"): run operations in lower precision, in fp32, or in the widest dtype of their inputs, as on CUDA.

The lists are those of ATen/autocast_mode.h. As there, operands are cast from the last to the first, the casts of weights are
kept until the outermost block ends, and some operations return fp32 without a cast of their operand.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from toolkit.gpu.virtual.operands import mapped, tensors_in

_KEY = "AutocastPrivateUse1"
_DTYPE_THIRD = ("aten::softmax", "aten::log_softmax")  # dtype is their third positional parameter
LOWER = (
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "linear", "matmul",
    "mm", "bmm", "mv", "addmm", "addmv", "addr", "baddbmm", "addbmm", "chain_matmul", "linalg_multi_dot",
    "linalg_vecdot", "scaled_dot_product_attention", "prelu", "convolution",
)  # fmt: skip
FP32 = (
    "layer_norm", "group_norm", "rms_norm", "nll_loss", "cross_entropy_loss", "mse_loss",
    "l1_loss", "smooth_l1_loss", "binary_cross_entropy_with_logits", "kl_div", "cosine_embedding_loss",
    "cosine_similarity", "norm.Scalar",
    "norm.ScalarOpt_dim", "exp", "expm1", "log", "log10", "log2", "log1p", "pow.Tensor_Scalar", "pow.Tensor_Tensor",
    "pow.Scalar", "rsqrt", "reciprocal", "softplus", "sinh", "cosh", "tan", "acos", "asin", "erfinv", "cdist", "pdist",
    "renorm",
)  # fmt: skip
FP32_RESULT = (
    "softmax.int", "log_softmax.int", "cumsum", "cumprod", "sum", "sum.dim_IntList", "prod", "prod.dim_int",
    "linalg_vector_norm", "linalg_matrix_norm",
)  # fmt: skip
PROMOTE = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put", "scatter_add", "tensordot", "cat",
    "stack", "vdot",
)  # fmt: skip


_weights: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}  # casts of weights, by the id of the weight
_clear = torch.clear_autocast_cache


def register() -> list[torch.library.Library]:
    """Register the casts of autocast for the virtual GPU. The caller keeps the libraries alive."""
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, _KEY)
    named = torch.library.Library("aten", "IMPL")
    for names, target in ((LOWER, _lower), (FP32, _fp32), (PROMOTE, _widest), (FP32_RESULT, None)):
        for name in names:
            packet, _, overload = name.partition(".")
            func = getattr(getattr(torch.ops.aten, packet), overload or "default")
            named.impl(func, _widening(func) if target is None else _casting(func, target), _KEY)
    torch.clear_autocast_cache = _clear_weights  # torch.autocast calls it when the outermost block ends
    return [everything, named]


def _clear_weights() -> None:
    _weights.clear()
    _clear()


def _lower(tensors: list[torch.Tensor]) -> torch.dtype:
    return torch.get_autocast_dtype("vgpu")


def _fp32(tensors: list[torch.Tensor]) -> torch.dtype:
    return torch.float32


def _widest(tensors: list[torch.Tensor]) -> torch.dtype:
    return torch.float32 if any(x.dtype == torch.float32 for x in tensors) else torch.get_autocast_dtype("vgpu")


def _without_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY)))


def _casting(func: Any, target: Callable[[list[torch.Tensor]], torch.dtype]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = target([x for x in tensors_in((args, kwargs)) if _castable(x)])
        with _without_autocast():
            args, kwargs = _last_first(lambda x: _cast(x, dtype), args, kwargs)
            return func(*args, **kwargs)

    return run


def _last_first(cast: Callable[[Any], Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Cast the operands in the order in which C++ evaluates the arguments of a call."""
    named = {name: mapped(cast, x) for name, x in reversed(kwargs.items())}
    return tuple([mapped(cast, x) for x in reversed(args)][::-1]), {name: named[name] for name in kwargs}


def _cast(x: Any, dtype: torch.dtype) -> Any:
    """Return `x` in `dtype`. The cast of a weight is kept, as in cached_cast."""
    if not _castable(x) or x.dtype == dtype:
        return x
    weight = x.dtype == torch.float32 and dtype == torch.get_autocast_dtype("vgpu") and x.requires_grad and x.is_leaf
    if not weight or x._is_view() or not torch.is_autocast_cache_enabled() or torch.is_inference_mode_enabled():
        return x.to(dtype)
    known = _weights.get(id(x))
    if known is None or known[0]() is not x:
        with torch.enable_grad():  # a later use may want gradients
            known = _weights[id(x)] = (weakref.ref(x), x.to(dtype))
    return known[1]


def _widening(func: Any) -> Callable[..., Any]:
    """Return `func` with a result in fp32, unless the caller asks for another dtype."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if _castable(args[0]) and kwargs.get("dtype") is None and not (len(args) > 2 and isinstance(args[2], torch.dtype)):
            kwargs["dtype"] = torch.float32
            args = args[:2] if func._schema.name in _DTYPE_THIRD else args
        with _without_autocast():
            return func(*args, **kwargs)

    return run


def _castable(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "vgpu" and x.is_floating_point() and x.dtype != torch.float64
