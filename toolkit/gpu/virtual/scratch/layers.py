"""Temporaries of what models are made of: products, attention, normalisations, gradients of embeddings.

See `rules_scratch` for what a script is. Sizes of workspaces are those of the libraries with PyTorch 2.11 and CUDA 13.0 on an
H200. cuBLAS keeps its own workspace from the first product on, which is not counted here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from toolkit.gpu.virtual.effects.attention import padding_bytes
from toolkit.gpu.virtual.effects.operations import operand
from toolkit.gpu.virtual.scratch.libraries import OUT, scan_bytes, scratch, sort_pairs_bytes

LEAST_SPLITS = 8  # one query over 128 keys each: measured with 2 (no workspace), 8 and 64


@scratch("native_layer_norm_backward", "_softmax_backward_data", "_log_softmax_backward_data", "_fused_rms_norm_backward")
def _contiguous_gradient(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    """A gradient that is one number spread out (from a sum) is written out first."""
    return () if args[0].is_contiguous() else [args[0].nbytes, OUT]


@scratch("mm", "bmm", "addmm", "baddbmm")
def _product(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    """What cuBLAS can't read as rows or columns is copied (Blas.cpp, prepare_matrix_for_cublas)."""
    a, b = args[-2], args[-1]
    if a.is_contiguous() and b.is_contiguous():
        return ()
    copies = [x.numel() * x.element_size() for x in (a, b) if x.numel() and not _as_matrix(x)]
    return [OUT, *copies] if copies else ()


def _as_matrix(x: Any) -> bool:
    (rows, columns), (down, across) = x.shape[-2:], x.stride()[-2:]
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))


@scratch("native_batch_norm")
def _batch_norm(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    """Not training, the saved mean and deviation are made all the same."""
    if len(args) > 5 and args[5] is True:
        return ()
    channels = 4 * args[0].shape[1]
    return [OUT, channels, channels]


@scratch("embedding_dense_backward")
def _embedding_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    """Up to 3072 indices nothing but a gradient spread out; more are sorted, and summed in parts (Embedding.cu)."""
    gradient, indices, words = args[0], args[1], args[2]
    n = indices.numel()
    copied = [] if gradient.is_contiguous() else [gradient.nbytes]
    if n <= 3072 and not (len(args) > 4 and args[4]):
        return [*copied, OUT] if copied else ()
    pairs, scan = sort_pairs_bytes(n, 8), scan_bytes(n, torch.int64)
    most = min(n, words)
    partial = 8 * (n // 10 + most + 1)
    parts = 8 * most
    script = [*copied, 8 * n, 8 * n, 8 * n, pairs, -pairs, -8 * n, OUT, 8 * n, 8, 8 * n, scan, -scan, -8 * n]
    return [*script, parts, parts, 1279, -1279, 8, partial, partial]


@scratch("_scaled_dot_product_fused_attention_overrideable")
def _attention(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    """Half precision: cuDNN with a workspace, odd heads padded, large ones kept in fp32. In fp32: a mask padded."""
    query, key, value, mask = *args[:3], operand(args, kwargs, 3, "attn_bias")
    if query.element_size() != 2:
        fresh = getattr(mask, "stands_for_padded", False)  # made from booleans for this call alone
        padded = padding_bytes(mask) if isinstance(mask, torch.Tensor) and not fresh else 0
        return [padded, OUT] if padded else ()
    heads, rows, size = query.shape[0] * query.shape[1], query.shape[2], query.shape[3]
    if size > 256:
        return [OUT, 4 * query.numel()]
    if size % 8:
        whole = 2 * -(-size // 8) * 8
        return [*(x.numel() // size * whole for x in (query, key, value)), OUT, 4 * heads * rows, 16, 8]
    if rows > 1:
        return [8, 8, OUT, 256]
    splits = math.ceil(key.shape[2] / 128)
    if splits < LEAST_SPLITS or operand(args, kwargs, 5, "is_causal", False):
        return [8, 8, OUT]
    return [8, 8, OUT, heads * (2 * size + 4) * splits + 128]
