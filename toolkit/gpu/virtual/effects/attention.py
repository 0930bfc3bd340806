"""Scaled dot product attention: which implementation CUDA chooses, and its effects.

Sources: the golden programs sdpa_* and generate_*, and ATen/native/transformers (attention.cpp, cuda/sdp_utils.cpp).
"""

from __future__ import annotations

from typing import Any

import torch

from toolkit.gpu.virtual.effects.effect import Effect, kernel, memset, nbytes
from toolkit.gpu.virtual.effects.operations import rule

MATH, OVERRIDEABLE = 0, 4  # torch.nn.attention.SDPBackend
SUMS_ALIGNMENT = 32  # queries: the memory-efficient kernel writes the sums of its rows for multiples of it (kAlignLSE)
MASK_ALIGNMENT = 8  # elements: the memory-efficient kernel requires the rows of the mask to start at multiples of it


def sdp_choice(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, enable_gqa: bool = False,
) -> int:  # fmt: skip
    """Return MATH if CUDA takes the unfused path (several operations), OVERRIDEABLE if one fused kernel runs.

    fp64 has no fused kernel, and fp32 none for grouped queries (golden program sdpa_gqa).
    """
    if query.dim() != 4 or query.dtype == torch.float64 or 0 in query.shape or 0 in key.shape:
        return MATH
    half = query.dtype in (torch.float16, torch.bfloat16)
    grouped = enable_gqa and query.shape[1] != key.shape[1]
    if not half and grouped:
        return MATH
    if any(t.stride(-1) != 1 for t in (query, key, value, *(() if mask is None else (mask,)))):
        return MATH
    if half and grouped and (query.shape[-1] > 256 or (mask is not None and query.shape[-1] > 128)):
        return MATH
    return OVERRIDEABLE


@rule(
    "_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_attention_math",
)  # fmt: skip
def _attention(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """One kernel. In bf16 a counter is cleared first (sdpa_bf16_*)."""
    query, key, value = args[:3]
    half = query.element_size() == 2
    effects: list[Effect] = []
    if half and query.shape[-2] > 1 and query.shape[-1] <= 256:
        effects.append(memset(4))
    flops = 4.0 * query.numel() * key.shape[-2]
    moved = 2 * nbytes(query) + nbytes(key) + nbytes(value)
    peak = "bf16_flops" if half else "fp32_flops"
    attend = Effect("kernel", 0, "scaled_dot_product_attention", flops=flops, moved_bytes=moved, peak=peak, floor=4.5,
                    cost="attention_host_ns")  # fmt: skip
    return [*effects, attend]


def aligned(mask: torch.Tensor) -> bool:
    """Return whether the memory-efficient kernel can read the rows of `mask`; if not, it is padded first (pad_bias)."""
    strides = mask.stride()
    return strides[-1] == 1 and all(s % MASK_ALIGNMENT == 0 for s in strides[:-1])


@rule("_scaled_dot_product_fused_attention_overrideable_backward", "_scaled_dot_product_efficient_attention_backward")
def _attention_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """backward_sdpa: the sum of gradient times output, then one kernel."""
    gradient = args[0]
    return [
        kernel("mul", 3 * nbytes(gradient)),
        kernel("sum", nbytes(gradient), 2),
        kernel("attention_backward", 8 * nbytes(gradient), 8),
    ]
