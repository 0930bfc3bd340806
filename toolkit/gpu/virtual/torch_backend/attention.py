# mypy: allow-untyped-calls, no-warn-return-any, no-warn-unused-ignores
# (PyTorch's extension points carry no types.)
"""scaled_dot_product_attention on the virtual GPU: one operation with a gradient, as on CUDA.

By default PyTorch would decompose it into about 25 operations. If CUDA uses a fused kernel (`sdp_choice`), PyTorch's fused
operation for other devices runs here, which has an autograd formula. The CPU's fused kernel computes its values, so they equal
those of the CPU. If CUDA uses the unfused path, and with dropout, the decomposition runs.
"""

from __future__ import annotations

from typing import Any

import torch

from toolkit.gpu.virtual.dispatch import SPECIAL
from toolkit.gpu.virtual.effects.attention import MATH, sdp_choice
from toolkit.gpu.virtual.host_kernels import HOSTS
from toolkit.gpu.virtual.tensor import VirtualTensor

aten = torch.ops.aten
Tensor = torch.Tensor


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Return [B, H, T, D] for query [B, H, T, D], key and value [B, H, S, D], or fewer heads with `enable_gqa`."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # converted to an additive mask
        seen, hidden = query.new_zeros(()), query.new_full((), float("-inf"))
        attn_mask = torch.where(attn_mask, seen, hidden)
        del seen, hidden  # frees their device memory before attention runs
        attn_mask.stands_for_padded = True  # type: ignore[attr-defined]  # on CUDA the padded copy replaces this mask
    if _fused(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa):
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask[None]
        # CUDA's kernels keep the sums for the gradient only if one is needed. That flag takes the place of the argument for a
        # debug mask, which is not supported here.
        wanted = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
        return aten._scaled_dot_product_fused_attention_overrideable(
            query, key, value, attn_mask, dropout_p, is_causal, wanted, scale=scale
        )[0]  # fmt: skip
    return aten._scaled_dot_product_attention_math.default(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, causal: bool, gqa: bool) -> bool:
    """Return whether CUDA uses one fused kernel, and the host's fused kernel supports the operands."""
    cuda = torch.backends.cuda
    if not (cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled()):  # sdpa_kernel(SDPBackend.MATH)
        return False
    if dropout_p or (mask is not None and (mask.requires_grad or causal)):
        return False
    if not all(type(x) is VirtualTensor for x in (q, k, v, *(() if mask is None else (mask,)))):
        return False
    if sdp_choice(q, k, v, mask, dropout_p, causal, enable_gqa=gqa) == MATH:
        return False
    return q.shape[-1] == v.shape[-1] and q.shape[1] % k.shape[1] == 0 and (gqa or q.shape[1] == k.shape[1])


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0, causal: bool = False,
    keep_sums: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Run the fused operation on host tensors."""
    out, log_sum_exp = aten._scaled_dot_product_flash_attention_for_cpu(
        q, _every_head(k, q), _every_head(v, q), 0.0, causal, attn_mask=mask, scale=scale
    )
    none = [torch.empty(0, dtype=torch.int64) for _ in range(3)]  # the random-number state, which is unused without dropout
    return out, log_sum_exp if keep_sums else none[0], None, None, q.shape[2], k.shape[2], *none


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, wanted: Any, out: Tensor, log_sum_exp: Tensor,
    *rest: Any, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Run the gradient on host tensors. `rest`: sequence offsets and lengths (4), dropout, causal, random-number state (2)."""
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, _every_head(k, q), _every_head(v, q), out, log_sum_exp, 0.0, rest[5], attn_mask=mask, scale=scale
    )
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        grads = (grads[0], *(x.unflatten(1, (-1, groups)).sum(2) for x in grads[1:]))
    return *grads, None


def _every_head(x: Tensor, q: Tensor) -> Tensor:
    """Return keys or values, repeated for each query head of their group."""
    groups = q.shape[1] // x.shape[1]
    return x.repeat_interleave(groups, 1) if groups > 1 else x


def register() -> list[torch.library.Library]:
    """Register attention for the virtual GPU, with and without autograd. The caller keeps the libraries alive."""
    library = torch.library.Library("aten", "IMPL")
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        library.impl("scaled_dot_product_attention", attention, key)
    SPECIAL["scaled_dot_product_attention"] = lambda func: lambda args, kwargs: attention(*args, **kwargs)
    HOSTS["_scaled_dot_product_fused_attention_overrideable"] = _forward
    HOSTS["_scaled_dot_product_fused_attention_overrideable_backward"] = _backward
    return [library]
