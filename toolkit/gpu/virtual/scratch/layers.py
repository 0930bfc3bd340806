"""Temporaries of the operations that models consist of: products, attention, normalizations, gradients of embeddings.

The workspace sizes are those of the libraries with PyTorch 2.11 and CUDA 13.0 on an H200. The workspace that cuBLAS allocates
with the first product and keeps is not modelled here.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from toolkit.gpu.virtual.effects.operations import operand
from toolkit.gpu.virtual.scratch.cub import ONE_TILE_SCAN_BYTES, SMS, scan_bytes, sort_pairs_bytes
from toolkit.gpu.virtual.scratch.script import MAKE_RESULTS, Args, Free, Kwargs, Make, Script, Take, brief, scratch

_MANY_INDICES = 3072  # more indices than this are sorted for the gradient of an embedding (Embedding.cu)
_SEGMENT_PART = 10  # indices that one partial sum of that gradient covers (NROWS_PER_THREAD in EmbeddingBackwardKernel.cu)
# Attention in half precision runs in cuDNN.
_WIDE_HEAD = 256  # wider heads accumulate in fp32
_HEAD_MULTIPLE = 8  # other head sizes are padded
_SPLIT_KEYS, _LEAST_SPLITS = 128, 8  # keys per split of a single query. Measured: no workspace for 2 splits, but for 8 and 64
_TILE_QUERIES = 64  # queries, and columns of their gradient, of one tile (kBlockSizeI)
_PROBLEM_BYTES, _TENSOR_MAP_BYTES = 60, 512  # measured: tests/programs/h200.json, experts.grouped_*
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


@scratch("linalg_solve_triangular")
def _solve_triangular(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """The addresses of both matrices, for cuBLAS's batched routine."""
    return [MAKE_RESULTS, Take(8), Take(8)]


@scratch("_cholesky_solve_helper")
def _cholesky_solve(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """The clone of the second operand. That of the first becomes the result."""
    info = Take(4)
    return [info, MAKE_RESULTS, *brief(args[1].nbytes), Free(info)]


@scratch("_ctc_loss", "_ctc_loss_backward")
def _ctc_loss(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """Offsets and lengths; in the backward pass also the probabilities of suffixes, as many as those given (LossCTC.cu)."""
    backward = args[1].is_floating_point()
    lengths = [Take(8 * args[backward].shape[1])] * 3
    return [*lengths, Take(args[6].nbytes), MAKE_RESULTS] if backward else [*lengths, Make(1), MAKE_RESULTS]


@scratch("_softmax", "_log_softmax")
def _softmax(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """An operand that is not contiguous is copied after the result was allocated (SoftMax.cu)."""
    return () if args[0].is_contiguous() else [MAKE_RESULTS, *brief(args[0].nbytes)]


@scratch("_fft_c2r")
def _fft_c2r(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """cuFFT overwrites its operand: a clone."""
    return [MAKE_RESULTS, *brief(args[0].nbytes)]


@scratch("abs", "angle")
def _of_complex(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """The result is complex before its real part is copied (unary_op_impl_with_complex_to_float_out)."""
    return [MAKE_RESULTS, *brief(args[0].nbytes)] if args[0].is_complex() else ()


@scratch("unfold_backward")
def _unfold_backward(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """The positions along the unfolded dimension (UnfoldBackward.h)."""
    return [MAKE_RESULTS, *brief(8 * args[1][args[2]])]


@scratch("_grouped_mm")
def _grouped_mm(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """bf16: the problem of each group (pointers, sizes, strides), and the tensor maps of each multiprocessor (GroupMM.cu)."""
    if args[0].dtype != torch.bfloat16:
        return ()
    groups = operand(args, kwargs, 2, "offs")
    problems = Take(_PROBLEM_BYTES * (groups.numel() if groups is not None else args[0].shape[0]))
    return [MAKE_RESULTS, problems, Take(SMS * _TENSOR_MAP_BYTES), Free(Take(SMS * _TENSOR_MAP_BYTES)), Free(problems)]


@scratch("native_batch_norm")
def _batch_norm(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """In evaluation mode CUDA also allocates the saved mean and deviation, and frees them; cuDNN does not."""
    if (len(args) > 5 and args[5] is True) or args[0].dim() > 2:
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


@scratch("native_dropout")
def _dropout(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """The mask comes before the result, except in evaluation mode (Dropout.cu)."""
    return () if len(args) > 2 and args[2] is False else [Make(1), Make(0)]


@scratch("_scaled_dot_product_fused_attention_overrideable")
def _attention(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """Half precision: the workspace of cuDNN, and copies of heads that must be padded."""
    query, key, value = args[:3]
    if query.element_size() != 2:
        return ()
    heads, rows, size = query.shape[0] * query.shape[1], query.shape[2], query.shape[3]
    if size > _WIDE_HEAD:
        return [MAKE_RESULTS, Take(4 * query.numel())]
    if size % _HEAD_MULTIPLE:
        row_bytes = 2 * -(-size // _HEAD_MULTIPLE) * _HEAD_MULTIPLE
        copies = [Take(x.numel() // size * row_bytes) for x in (query, key, value)]
        return [*copies, MAKE_RESULTS, Take(4 * heads * rows), Take(16), Take(8)]
    state = () if operand(args, kwargs, 6, "return_debug_mask", False) else _RNG_STATE  # kept for the gradient, as results
    if rows > 1:
        return [*(state or (Make(6), Make(7))), MAKE_RESULTS, Take(256)]
    splits = math.ceil(key.shape[2] / _SPLIT_KEYS)
    if splits < _LEAST_SPLITS or operand(args, kwargs, 5, "is_causal", False):
        return [*_RNG_STATE, MAKE_RESULTS]
    return [*_RNG_STATE, MAKE_RESULTS, Take(heads * (2 * size + 4) * splits + 128)]


@scratch("_scaled_dot_product_fused_attention_overrideable_backward")
def _attention_backward(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """fp32: the sums of gradient times result, and partial gradients of the queries. Half precision: cuDNN's workspace.

    Partial gradients: a tile of 64 queries in fp32, with a header, in cutlass (GradQTempStorage in kernel_backward.h). cuDNN
    has the gradient of the queries and the sums in fp32, and with grouped queries the gradients of keys and values per query
    head. Both formulas give the sizes in `tests/programs/h200.json` (attention.*, encoders.*, finetuning.*).
    """
    query, key = args[1], args[2]
    (batch, heads, rows, size), slots = query.shape, key.shape[2]
    sums = 4 * batch * heads * rows
    if query.element_size() == 2:
        grouped = 4 * batch * heads * slots * size if heads != key.shape[1] else 0
        return [MAKE_RESULTS, Take(sums * size + sums + grouped + 256)]
    products, delta = Take(sums * size), Take(sums)
    tiles = math.ceil(rows / _TILE_QUERIES) * math.ceil(size / _TILE_QUERIES)
    partial = Take(batch * heads * tiles * (4 * _TILE_QUERIES**2 + 16))
    copied = [] if args[0].transpose(1, 2).is_contiguous() else [Take(args[0].nbytes)]
    return [*copied, MAKE_RESULTS, products, delta, delta, Free(delta), Free(products), partial]
