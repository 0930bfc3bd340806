"""Temporaries of the operations that models consist of: products, attention, normalizations, gradients of embeddings.

The workspace sizes are those of the libraries with PyTorch 2.11 and CUDA 13.0 on an H200. The workspace that cuBLAS allocates
with the first product and keeps is not modelled here.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from toolkit.gpu.virtual.effects.attention import padding_bytes
from toolkit.gpu.virtual.effects.operations import operand
from toolkit.gpu.virtual.scratch.cub import ONE_TILE_SCAN_BYTES, scan_bytes, sort_pairs_bytes
from toolkit.gpu.virtual.scratch.script import MAKE_RESULTS, Args, Free, Kwargs, Script, Take, brief, scratch

_MANY_INDICES = 3072  # more indices than this are sorted for the gradient of an embedding (Embedding.cu)
_SEGMENT_PART = 10  # indices that one partial sum of that gradient covers (NROWS_PER_THREAD in EmbeddingBackwardKernel.cu)
# Attention in half precision runs in cuDNN.
_WIDE_HEAD = 256  # wider heads accumulate in fp32
_HEAD_MULTIPLE = 8  # other head sizes are padded
_SPLIT_KEYS, _LEAST_SPLITS = 128, 8  # keys per split of a single query. Measured: no workspace for 2 splits, but for 8 and 64
_RNG_STATE = (Take(8), Take(8))  # seed and offset


@scratch("native_layer_norm_backward", "_softmax_backward_data", "_log_softmax_backward_data", "_fused_rms_norm_backward")
def _contiguous_gradient(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """An expanded gradient (from a sum) is made contiguous first."""
    return () if args[0].is_contiguous() else [Take(args[0].nbytes), MAKE_RESULTS]


@scratch("mm", "bmm", "addmm", "baddbmm")
def _product(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """Operands that cuBLAS cannot read by rows or by columns are copied (Blas.cpp, prepare_matrix_for_cublas)."""
    a, b = args[-2], args[-1]
    if a.is_contiguous() and b.is_contiguous():
        return ()
    copies = [Take(x.nbytes) for x in (a, b) if x.numel() and not _readable_by_cublas(x)]
    return [MAKE_RESULTS, *copies] if copies else ()


def _readable_by_cublas(x: Any) -> bool:
    (rows, columns), (down, across) = x.shape[-2:], x.stride()[-2:]
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))


@scratch("native_batch_norm")
def _batch_norm(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """In evaluation mode CUDA also allocates the saved mean and deviation, and frees them."""
    if len(args) > 5 and args[5] is True:
        return ()
    channels = Take(4 * args[0].shape[1])
    return [MAKE_RESULTS, channels, channels]


@scratch("embedding_dense_backward")
def _embedding_backward(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """Few indices need only a contiguous gradient. Many are sorted, and their gradients summed in parts (Embedding.cu)."""
    gradient, n, words = args[0], args[1].numel(), args[2]
    copied = [] if gradient.is_contiguous() else [Take(gradient.nbytes)]
    if n <= _MANY_INDICES and not (len(args) > 4 and args[4]):
        return [*copied, MAKE_RESULTS] if copied else ()
    indices = Take(8 * n)
    sort = [indices, indices, indices, *brief(sort_pairs_bytes(n, 8)), Free(indices), MAKE_RESULTS]
    count = [indices, Take(8), indices, *brief(scan_bytes(n, torch.int64)), Free(indices)]
    segments = min(n, words)
    per_segment, partial = Take(8 * segments), Take(8 * (n // _SEGMENT_PART + segments + 1))
    return [*copied, *sort, *count, per_segment, per_segment, *brief(ONE_TILE_SCAN_BYTES), Take(8), partial, partial]


@scratch("_scaled_dot_product_fused_attention_overrideable")
def _attention(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """fp32: the mask is padded. Half precision: the workspace of cuDNN, and copies of heads that must be padded."""
    query, key, value, mask = *args[:3], operand(args, kwargs, 3, "attn_bias")
    if query.element_size() != 2:
        fresh = getattr(mask, "stands_for_padded", False)  # converted from booleans; the padded copy replaces it
        padded = padding_bytes(mask) if isinstance(mask, torch.Tensor) and not fresh else 0
        return [Take(padded), MAKE_RESULTS] if padded else ()
    heads, rows, size = query.shape[0] * query.shape[1], query.shape[2], query.shape[3]
    if size > _WIDE_HEAD:
        return [MAKE_RESULTS, Take(4 * query.numel())]
    if size % _HEAD_MULTIPLE:
        row_bytes = 2 * -(-size // _HEAD_MULTIPLE) * _HEAD_MULTIPLE
        copies = [Take(x.numel() // size * row_bytes) for x in (query, key, value)]
        return [*copies, MAKE_RESULTS, Take(4 * heads * rows), Take(16), Take(8)]
    if rows > 1:
        return [*_RNG_STATE, MAKE_RESULTS, Take(256)]
    splits = math.ceil(key.shape[2] / _SPLIT_KEYS)
    if splits < _LEAST_SPLITS or operand(args, kwargs, 5, "is_causal", False):
        return [*_RNG_STATE, MAKE_RESULTS]
    return [*_RNG_STATE, MAKE_RESULTS, Take(heads * (2 * size + 4) * splits + 128)]
