# mypy: allow-untyped-calls, no-warn-return-any, no-warn-unused-ignores
# (PyTorch's extension points carry no types.)
"""torch.autocast("vgpu"): run operations in lower precision, in fp32, or in the widest dtype of their inputs, as on CUDA.

The lists are those of PyTorch's documentation of CUDA autocast. Unlike on CUDA, where the cast weights are cached for the
duration of the block, weights are cast at each use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from toolkit.gpu.virtual.operands import mapped, tensors_in

_KEY = "AutocastPrivateUse1"
LOWER = (
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "linear", "matmul",
    "mm", "bmm", "mv", "addmm", "addmv", "addr", "baddbmm", "addbmm", "chain_matmul", "linalg_multi_dot",
    "linalg_vecdot", "scaled_dot_product_attention", "prelu", "convolution",
)  # fmt: skip
FP32 = (
    "softmax.int", "log_softmax.int", "layer_norm", "group_norm", "rms_norm", "nll_loss", "cross_entropy_loss", "mse_loss",
    "l1_loss", "smooth_l1_loss", "binary_cross_entropy_with_logits", "kl_div", "cosine_embedding_loss",
    "cosine_similarity", "cumsum", "cumprod", "sum", "sum.dim_IntList", "prod", "prod.dim_int", "norm.Scalar",
    "norm.ScalarOpt_dim", "exp", "expm1", "log", "log10", "log2", "log1p", "pow.Tensor_Scalar", "pow.Tensor_Tensor",
    "pow.Scalar", "rsqrt", "reciprocal", "softplus", "sinh", "cosh", "tan", "acos", "asin", "erfinv", "cdist", "pdist",
    "renorm",
)  # fmt: skip
PROMOTE = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put", "scatter_add", "tensordot", "cat",
    "stack", "vdot",
)  # fmt: skip


def register() -> list[torch.library.Library]:
    """Register the casts of autocast for the virtual GPU. The caller keeps the libraries alive."""
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, _KEY)
    named = torch.library.Library("aten", "IMPL")
    for names, target in ((LOWER, _lower), (FP32, _fp32), (PROMOTE, _widest)):
        for name in names:
            packet, _, overload = name.partition(".")
            func = getattr(getattr(torch.ops.aten, packet), overload or "default")
            named.impl(func, _casting(func, target), _KEY)
    return [everything, named]


def _lower(tensors: list[torch.Tensor]) -> torch.dtype:
    return torch.get_autocast_dtype("vgpu")


def _fp32(tensors: list[torch.Tensor]) -> torch.dtype:
    return torch.float32


def _widest(tensors: list[torch.Tensor]) -> torch.dtype:
    return torch.float32 if any(x.dtype == torch.float32 for x in tensors) else torch.get_autocast_dtype("vgpu")


def _casting(func: Any, target: Callable[[list[torch.Tensor]], torch.dtype]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in tensors_in((args, kwargs)) if _castable(x)]
        dtype = target(tensors)

        def cast(x: Any) -> Any:
            return x.to(dtype) if _castable(x) and x.dtype != dtype else x

        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))):
            args, kwargs = mapped(cast, (args, kwargs))
            return func(*args, **kwargs)

    return run


def _castable(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "vgpu" and x.is_floating_point() and x.dtype != torch.float64
