"""Scaled dot product attention: which implementation CUDA chooses, and its effects.

Sources: the golden programs sdpa_* and generate_*, and ATen/native/transformers (attention.cpp, cuda/sdp_utils.cpp).
"""

from __future__ import annotations

from typing import Any

import torch

from toolkit.gpu.virtual.effects.effect import Effect, kernel, memset, nbytes
from toolkit.gpu.virtual.effects.operations import rule

MATH, FLASH, EFFICIENT, CUDNN, OVERRIDEABLE = range(5)  # torch.nn.attention.SDPBackend
_ORDER = [FLASH, EFFICIENT, MATH, CUDNN, OVERRIDEABLE]  # in which PyTorch tries them, unless the user sets another
_HALF = (torch.float16, torch.bfloat16)
SUMS_ALIGNMENT = 32  # queries: the memory-efficient kernel writes the sums of its rows for multiples of it (kAlignLSE)
MASK_ALIGNMENT = 8  # elements: the memory-efficient kernel requires the rows of the mask to start at multiples of it


def sdp_choice(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, enable_gqa: bool = False, capability: tuple[int, int],
) -> int:  # fmt: skip
    """Return MATH if CUDA takes the unfused path (several operations), OVERRIDEABLE if one fused kernel runs.

    As select_sdp_backend in cuda/sdp_utils.cpp, it takes the first enabled implementation that supports the operands. Raises
    RuntimeError if there is none. `capability` is the compute capability of the GPU.
    """
    cuda = torch.backends.cuda
    enabled = {
        MATH: cuda.math_sdp_enabled(), FLASH: cuda.flash_sdp_enabled(), EFFICIENT: cuda.mem_efficient_sdp_enabled(),
        CUDNN: cuda.cudnn_sdp_enabled(),
    }  # fmt: skip
    if not any(enabled.values()):
        raise RuntimeError("No viable backend for scaled_dot_product_attention was found.")
    usable = _usable(query, key, value, mask, dropout_p, is_causal, enable_gqa, capability) | {MATH}
    order = torch._C._get_sdp_priority_order()
    if order == _ORDER and capability[0] in (9, 10):  # check_prefer_cudnn_attention
        order = [CUDNN, *order]
    for backend in order:
        if enabled.get(backend) and backend in usable:
            return MATH if backend == MATH else OVERRIDEABLE
    raise RuntimeError("No available kernel. Aborting execution.")


def _usable(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, dropout_p: float, causal: bool, gqa: bool,
    capability: tuple[int, int],
) -> set[int]:  # fmt: skip
    """Return the fused implementations that support the operands (can_use_..._attention in cuda/sdp_utils.cpp).

    The memory-efficient one does not support grouped queries in PyTorch 2.11 (golden program sdpa_gqa).
    """
    half, modern, width = q.dtype in _HALF, capability >= (8, 0), q.shape[-1]
    if any(x.dim() != 4 or 0 in x.shape or x.dtype != q.dtype or x.shape[0] != q.shape[0] for x in (q, k, v)):
        return set()
    contiguous = all(x.stride(-1) == 1 for x in (q, k, v))
    same_heads = q.shape[1] == k.shape[1] == v.shape[1]
    grouped = same_heads or (gqa and k.shape[1] == v.shape[1] and q.shape[1] % k.shape[1] == 0)
    if (mask is not None and mask.stride(-1) != 1) or not (contiguous or width == 1) or not grouped:
        return set()
    found = set()
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    small = (8, 6) <= capability <= (8, 9) or capability[0] == 12  # its gradient needs more shared memory than these have
    fits = not (needs_gradient and small) or width <= 192 or (not dropout_p and width > 224)
    square = not causal or q.shape[2] == k.shape[2]
    if modern and half and mask is None and width == k.shape[-1] == v.shape[-1] <= 256 and fits and square:
        found.add(FLASH)
    alignment = 8 if half else 4 if modern else 1
    dtypes = (*_HALF, torch.float32) if modern else (torch.float16, torch.float32)
    multiples = width == k.shape[-1] and width % alignment == 0 == v.shape[-1] % alignment
    if q.dtype in dtypes and same_heads and contiguous and multiples:
        found.add(EFFICIENT)
    deterministic = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    widths = all(x.shape[-1] <= 128 and x.shape[-1] % 8 == 0 for x in (q, v))
    fixed = mask is None or (not mask.requires_grad and mask.dim() != 3)
    if modern and half and widths and fixed and k.shape[2] > 1 and (dropout_p * 16).is_integer() and not deterministic:
        found.add(CUDNN)
    return found


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
