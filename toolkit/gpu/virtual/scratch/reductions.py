"""Temporaries of reductions: partial results of the blocks that share an output, and casts and masks before the reduction.

`split_reduction` follows setReduceConfig in ATen/native/cuda/Reduce.cuh. The rules follow what ATen's CUDA code allocates, in
its order, as measured with the golden programs and a sweep over sizes on an H200 (PyTorch 2.11).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from toolkit.gpu.virtual.effects.operations import operand
from toolkit.gpu.virtual.scratch.cub import SMS
from toolkit.gpu.virtual.scratch.script import MAKE_RESULTS, Args, Free, Kwargs, Rule, Script, Take, brief, scratch

LEAST_SPLIT = 32768  # no reduction of fewer elements is split over blocks
_THREADS_PER_SM = 2048
_THREADS = 512  # maximum number of threads per block
_MOST_VALUES, _LEAST_VALUES = 256, 16  # numbers of values per thread: max_input_per_thread, min_values_per_thread
_CHUNK = 65536  # elements of a list's tensors that a block reduces (kChunkSize)
_PAIR_BYTES = 16  # size of a partial result that is a value and its position, or a mean and a variance


class _Dim(NamedTuple):
    size: int
    stride: int


def split_reduction(source: torch.Tensor, dims: Sequence[int] | None, acc_bytes: int) -> Script:
    """Return the temporaries of reducing `source` over `dims` (None or empty: over all): partial results and semaphores.

    There are none unless several blocks work on the same output. A partial result has `acc_bytes`.
    """
    if source.numel() < LEAST_SPLIT:
        return ()
    reduced, kept = _merged(source, dims, reduced=True), _merged(source, dims, reduced=False)
    inputs, outputs = math.prod(dim.size for dim in reduced), math.prod(dim.size for dim in kept)
    along_fastest = not kept or (bool(reduced) and reduced[0].stride < kept[0].stride)
    if along_fastest:
        first, other = reduced[0].size if reduced else 1, outputs
    else:
        first, other = kept[0].size, inputs
    vector = 1  # neighboring outputs that a thread reduces
    if along_fastest and len(reduced) == 1 and not kept and reduced[0].stride == 1 and first > 128:
        first //= 4
    elif not along_fastest and kept[0].stride == 1:
        vector = math.gcd(4, kept[0].size, *(dim.stride for dim in (*kept[1:], *reduced)))
        first //= vector
    width, height = _block_shape(first, other, vector)
    step_in, step_out = (width, 1) if along_fastest else (1, width)
    if math.ceil(inputs / step_in) < min(height * 16, _MOST_VALUES):
        return ()  # the rows of a block reduce to different outputs
    values, columns = math.ceil(inputs / (step_in * height)), math.ceil(outputs // vector / step_out)
    blocks_at_once = SMS * (_THREADS_PER_SM // (width * height))
    if values < _MOST_VALUES or columns > blocks_at_once:
        return ()
    wanted = min(math.ceil(blocks_at_once / columns), math.ceil(values / _LEAST_VALUES))
    blocks = max(wanted, math.ceil(values / _MOST_VALUES))
    if blocks <= 1:
        return ()
    partial = Take(acc_bytes * outputs * blocks * (1 if along_fastest else width * vector))
    return [partial, *brief(4 * columns), Free(partial)]


def full_reduction(n: int, acc_bytes: int) -> Script:
    """Return the temporaries of reducing `n` contiguous elements to one."""
    return split_reduction(torch.empty(n, device="meta"), None, acc_bytes) if n >= LEAST_SPLIT else ()


def _merged(source: torch.Tensor, dims: Sequence[int] | None, *, reduced: bool) -> list[_Dim]:
    """Return the dimensions that are reduced (or kept), fastest first, adjacent ones merged as TensorIterator does."""
    rank = source.dim()
    over = {d % rank for d in dims} if dims and rank else set(range(rank))
    chosen = [_Dim(source.shape[d], source.stride(d)) for d in range(rank) if (d in over) is reduced and source.shape[d] != 1]
    merged: list[_Dim] = []
    for dim in sorted(chosen, key=lambda dim: dim.stride):
        if merged and merged[-1].size * merged[-1].stride == dim.stride:
            merged[-1] = _Dim(merged[-1].size * dim.size, merged[-1].stride)
        else:
            merged.append(dim)
    return merged


def _block_shape(first: int, other: int, vector: int) -> tuple[int, int]:
    """Return width and height of a block of threads, powers of two (set_block_dimension)."""
    most = _THREADS // vector
    wide, high = (1 << min(n, most).bit_length() - 1 if n else 1 for n in (first, other))
    height = min(high, most // min(wide, 32))
    return min(wide, most // height), height


def _dims(args: Args, kwargs: Kwargs, i: int = 1) -> Any:
    dims = operand(args, kwargs, i, "dim")
    return [dims] if isinstance(dims, int) and not isinstance(dims, bool) else dims if isinstance(dims, list | tuple) else None


def _acc_bytes(dtype: torch.dtype) -> int:
    return 8 if dtype.itemsize == 8 or not dtype.is_floating_point else 4


@scratch("sum", "mean", "prod", "nansum")
def _sum(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """Integers are summed as int64: narrower ones are cast first."""
    source = args[0]
    dtype = source.dtype
    if not dtype.is_floating_point and dtype != torch.int64 and not dtype.is_complex and kwargs.get("dtype") is None:
        cast = Take(8 * source.numel())
        return [MAKE_RESULTS, cast, *split_reduction(source, _dims(args, kwargs), 8), Free(cast)]
    return split_reduction(source, _dims(args, kwargs), _acc_bytes(dtype))


def _reduction(acc_bytes: Callable[[torch.Tensor], int], dim_at: int = 1) -> Rule:
    """Return the rule of a reduction whose partial results have `acc_bytes(operand)`; its dimensions are operand `dim_at`."""
    return lambda args, kwargs, out: split_reduction(args[0], _dims(args, kwargs, dim_at), acc_bytes(args[0]))


scratch("argmax", "argmin", "std", "var", "std_mean", "var_mean")(_reduction(lambda source: _PAIR_BYTES))
scratch("linalg_vector_norm")(_reduction(lambda source: _acc_bytes(source.dtype), dim_at=2))
scratch("aminmax")(_reduction(lambda source: 2 * source.element_size()))


@scratch("_foreach_norm")
def _foreach_norm(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """Partial norms: as many for every tensor as the largest one has chunks (ForeachReduceOp.cu)."""
    tensors = args[0]
    chunks = max(math.ceil(x.numel() / _CHUNK) for x in tensors)
    return [partial := Take(_acc_bytes(tensors[0].dtype) * len(tensors) * chunks), MAKE_RESULTS, Free(partial)]


@scratch("amax", "amin", "any", "all", "max", "min")
def _extreme(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """With positions (max over a dimension) a partial result is a pair. max of two tensors is elementwise."""
    if len(args) > 1 and isinstance(args[1], torch.Tensor):
        return ()
    return split_reduction(args[0], _dims(args, kwargs), _PAIR_BYTES if isinstance(out, tuple) else args[0].element_size())


@scratch("count_nonzero")
def _count_nonzero(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """The sum of a boolean mask as int64; of other dtypes the mask is computed first."""
    source, n = args[0], args[0].numel()
    mask = [] if source.dtype == torch.bool else [Take(n)]
    return [*mask, MAKE_RESULTS, Take(8 * n), *split_reduction(source, _dims(args, kwargs), 8)] if n else ()


@scratch("logsumexp")
def _logsumexp(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """The maximum, a mask of infinite maxima, and the exponentials of the differences."""
    source, dims = args[0], _dims(args, kwargs)
    if not source.numel() or not source.is_floating_point():
        return ()
    n = source.numel() // math.prod(source.shape[d] for d in (dims or range(source.dim())))
    size = source.element_size()
    largest, largest_abs = Take(n * size), Take(n * size)
    maximum = [largest, *split_reduction(source, dims, size), largest_abs, *brief(n), Free(largest_abs)]
    return [*maximum, Take(source.nbytes), MAKE_RESULTS, *split_reduction(source, dims, _acc_bytes(source.dtype))]


@scratch("mse_loss", "smooth_l1_loss", "huber_loss")
def _loss(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """The loss of each element, then their mean or sum."""
    n = args[0].numel()
    if out is None or out.dim() or not args[0].dim() or not n:
        return ()
    return [MAKE_RESULTS, Take(out.element_size() * n), *full_reduction(n, 4)]
