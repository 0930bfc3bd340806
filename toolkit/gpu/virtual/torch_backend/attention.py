# mypy: allow-untyped-calls, no-warn-return-any, no-warn-unused-ignores
# (PyTorch's extension points carry no types.)
"""scaled_dot_product_attention on the virtual GPU: one operation with a gradient, as on CUDA.

By default PyTorch would decompose it into about 25 operations. If CUDA uses a fused kernel (`sdp_choice`), PyTorch's fused
operation for other devices runs here, which has an autograd formula. The CPU's fused kernel computes its values, so they equal
those of the CPU. If CUDA uses the unfused path, the decomposition runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from toolkit.gpu.virtual.dispatch import SPECIAL, machine
from toolkit.gpu.virtual.effects.attention import MASK_ALIGNMENT, MATH, SUMS_ALIGNMENT, aligned, sdp_choice
from toolkit.gpu.virtual.host_kernels import HOSTS
from toolkit.gpu.virtual.tensor import VirtualTensor

aten = torch.ops.aten
Tensor = torch.Tensor
SEEDS = 1 << 24  # fp32 holds smaller integers exactly


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Return [B, H, T, D] for query [B, H, T, D], key and value [B, H, S, D], or fewer heads with `enable_gqa`."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # converted to an additive mask
        seen, hidden = query.new_zeros(()), query.new_full((), float("-inf"))
        attn_mask = torch.where(attn_mask, seen, hidden)
        del seen, hidden  # frees their device memory before attention runs
    if fused(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa):
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask[None]
        if attn_mask is not None and query.element_size() != 2 and not aligned(attn_mask):
            slots = attn_mask.shape[-1]
            attn_mask = nn.functional.pad(attn_mask, (0, MASK_ALIGNMENT - slots % MASK_ALIGNMENT))[..., :slots]
        # CUDA's kernels keep the sums for the gradient only if one is needed. That flag takes the place of the argument for a
        # debug mask, which is not supported here.
        wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (query, key, value, attn_mask))
        return aten._scaled_dot_product_fused_attention_overrideable(
            query, key, value, attn_mask, dropout_p, is_causal, wanted, scale=scale
        )[0]  # fmt: skip
    return aten._scaled_dot_product_attention_math.default(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, causal: bool, gqa: bool) -> bool:
    """Return whether CUDA uses one fused kernel, and the host's fused kernel supports the operands."""
    if mask is not None and causal:  # an error
        return False
    if not all(isinstance(x, VirtualTensor) for x in (q, k, v, *(() if mask is None else (mask,)))):
        return False
    capability = machine().spec.compute_capability
    if sdp_choice(q, k, v, mask, dropout_p, causal, enable_gqa=gqa, capability=capability) == MATH:
        return False
    if mask is not None and mask.requires_grad and q.element_size() == 2:
        return False
    return q.shape[-1] == v.shape[-1] and q.shape[1] % k.shape[1] == 0 and (gqa or q.shape[1] == k.shape[1])


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0, causal: bool = False,
    keep_sums: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Run the fused operation on host tensors.

    CUDA keeps sums for the gradient, and in half precision the state of its random numbers, which has no values here. With
    dropout, the sums are the seed of what was dropped, so that copies of them, as hooks of saved tensors make, are as good.
    """
    none = [torch.empty(0, dtype=torch.int64) for _ in range(3)]
    if dropout_p:
        weights = _weights(q, k, mask, causal, scale)
        sums = weights.new_full(q.shape[:3], int(torch.randint(SEEDS, (1,))))
        kept = _kept(weights, dropout_p, sums)
        out = ((weights * kept) @ _every_head(v, q).float()).to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    else:
        out, sums = aten._scaled_dot_product_flash_attention_for_cpu(
            q, _every_head(k, q), _every_head(v, q), 0.0, causal, attn_mask=mask, scale=scale
        )
    out = _laid_out(out, q)
    if not keep_sums:
        return out, none[0], None, None, q.shape[2], k.shape[2], *none
    if q.element_size() == 2:
        none[:2] = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
    else:
        sums = nn.functional.pad(sums, (0, -q.shape[2] % SUMS_ALIGNMENT))
    return out, sums, None, None, q.shape[2], k.shape[2], *none


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, wanted: Any, out: Tensor, sums: Tensor,
    *rest: Any, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Run the gradient on host tensors. `rest`: sequence offsets and lengths (4), dropout, causal, random-number state (2)."""
    keys, values, dropout_p, causal = _every_head(k, q), _every_head(v, q), *rest[4:6]
    bias = None
    if dropout_p or (mask is not None and wanted[3]):
        weights = _weights(q, k, mask, causal, scale)
        kept = _kept(weights, dropout_p, sums) if dropout_p else 1.0
        pulled = (grad.float() @ values.float().transpose(-2, -1)) * kept
        scores = weights * (pulled - (pulled * weights).sum(-1, keepdim=True))
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        grads: Any = [scores @ keys.float() * factor, scores.transpose(-2, -1) @ q.float() * factor,
                 (weights * kept).transpose(-2, -1) @ grad.float()]  # fmt: skip
        if mask is not None and wanted[3]:
            bias = scores.sum_to_size(mask.shape).to(mask.dtype) if mask.shape != scores.shape else scores.to(mask.dtype)
    else:
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, keys, values, out, sums[..., : q.shape[2]].contiguous(), 0.0, causal, attn_mask=mask, scale=scale
        )
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        grads = (grads[0], *(x.unflatten(1, (-1, groups)).sum(2) for x in grads[1:]))
    return *(_laid_out(x, like) for x, like in zip(grads, (q, k, v), strict=True)), bias


def _kept(weights: Tensor, dropout_p: float, seeds: Tensor) -> Tensor:
    """Return the factors of the probabilities after dropout, drawn from a seed, which all of `seeds` are."""
    if weights.is_meta or not weights.numel():
        return torch.ones_like(weights)
    random = torch.Generator().manual_seed(int(seeds.flatten()[0]))
    return torch.empty_like(weights).bernoulli_(1 - dropout_p, generator=random) / ((1 - dropout_p) or 1.0)


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    """Return the probabilities [B, H, T, S] in fp32."""
    scores = q.float() @ _every_head(k, q).float().transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return (scores if mask is None else scores + mask).softmax(-1).nan_to_num(0.0)


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """Return a result [B, H, T, D] with the strides it has on CUDA: in half precision those of `like`, else of [B, T, H, D]."""
    b, h, t, d = like.shape
    empty = torch.empty_like(like) if like.element_size() == 2 else like.new_empty(b, t, h, d).transpose(1, 2)
    return x if x.stride() == empty.stride() and x.dtype == like.dtype else empty.copy_(x)


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
