"""Temporaries of operations that find positions or use them: masks, indexing, `where`, and copies between host and device.

CUDA counts the entries that a mask picks, so the rules do too: the size of the positions depends on it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from toolkit.gpu.virtual.effects.copies import one_run
from toolkit.gpu.virtual.effects.data_dependent import MASKS
from toolkit.gpu.virtual.effects.operations import operand
from toolkit.gpu.virtual.scratch.cub import count_bytes, scan_bytes, select_bytes, sort_pairs_bytes
from toolkit.gpu.virtual.scratch.reductions import full_reduction
from toolkit.gpu.virtual.scratch.script import MAKE_RESULTS, Args, Free, Kwargs, Make, Script, Step, Take, brief, scratch

_broadcast: Any = torch.broadcast_shapes
_COUNT = Take(4)  # the number of nonzero entries, an int32


def _picked(mask: Any) -> int:
    """Return how many entries of `mask` are nonzero; 0 without values."""
    host = getattr(mask, "_host", mask)
    return 0 if host.is_meta else int(torch.count_nonzero(host))


def _nonzero_script(mask: Any, *positions: Take | Make) -> Script:
    """Count the nonzero entries of `mask`, allocate their `positions`, and select them (Nonzero.cu)."""
    n = mask.numel()
    if not n:
        return [_COUNT, *brief(1), *positions, *brief(select_bytes(0)), Free(_COUNT)]
    copied = [] if mask.is_contiguous() else [Take(mask.nbytes)]
    select = brief(select_bytes(n))
    return [*copied, _COUNT, *brief(count_bytes(n)), *positions, *select, Free(_COUNT), *map(Free, copied)]


def _positions(mask: Any) -> Script:
    """The positions that `mask` picks, which stay until the operation ends."""
    return _nonzero_script(mask, Take(8 * mask.dim() * _picked(mask)))


@scratch("nonzero", "argwhere")
def _nonzero(args: Args, kwargs: Kwargs, out: Any) -> Script:
    return _nonzero_script(args[0], MAKE_RESULTS)


@scratch("masked_select")
def _masked_select(args: Args, kwargs: Kwargs, out: Any) -> Script:
    return [*_positions(args[1].expand(_broadcast(args[0].shape, args[1].shape))), MAKE_RESULTS]


@scratch("masked_scatter_", "masked_scatter")
def _masked_scatter(args: Args, kwargs: Kwargs, out: Any) -> Script:
    n = args[0].numel()
    return [MAKE_RESULTS, Take(8 * n), Take(scan_bytes(n, torch.int64))] if n else ()


def _located(indices: Any) -> Script:
    """Prepare indices (IndexingUtils.h): turn masks into positions, upload host indices, cast int32, expand to one shape."""
    if len(indices) == 1 and indices[0] is not None and indices[0].dtype == torch.int64 and not indices[0].is_cpu:
        return ()  # the most common case
    plain = [i for i in indices if i is not None and i.dtype not in MASKS]
    shape = _broadcast(*[i.shape for i in plain] or [()])
    script: list[Step] = []
    for index in indices:
        if index is None or not index.numel():
            continue
        if index.dtype in MASKS:
            script += [Take(8 * _picked(index) * index.dim())] if index.is_cpu else _positions(index)
            continue
        uploaded = [Take(index.nbytes)] if index.is_cpu else []
        script += uploaded
        if index.dtype == torch.int32:
            script += [Take(8 * index.numel()), *map(Free, uploaded)]
    expanded = [i for i in plain if i.shape != shape]
    script += [Take(8 * shape.numel())] * len(expanded)
    return [*script, *(Free(Take(8 * i.numel())) for i in expanded if i.is_cpu and i.dtype != torch.int32)]


@scratch("index", "_unsafe_index")
def _index(args: Args, kwargs: Kwargs, out: Any) -> Script:
    located = _located(args[1])
    return [*located, MAKE_RESULTS] if located else ()


@scratch("index_put_", "_index_put_impl_", "index_put", "_unsafe_index_put")
def _index_put(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """Host values are uploaded. Accumulation sorts linear positions first (Indexing.cu, index_put_with_sort_kernel)."""
    self, indices, values = args[0], args[1], args[2]
    given = [i for i in indices if i is not None]
    first = [MAKE_RESULTS] if out is not None else []
    accumulate = operand(args, kwargs, 3, "accumulate", False)
    fills = not accumulate and values.is_cpu and values.numel() == 1 and len(given) == 1 and given[0].dtype in MASKS
    if fills and not given[0].is_cpu:
        return first
    upload = [Take(values.nbytes)] if values.is_cpu else []
    script = [*first, *upload, *_located(indices)]
    if not accumulate or not self.numel():
        return script
    backward = torch._C._current_graph_task_id() != -1  # the gradient of an indexing does not check the indices again
    unsafe = operand(args, kwargs, 4, "unsafe", False) or backward
    return [*script, *_accumulated(self, indices, values, checked=not unsafe)]


def _accumulated(self: Any, indices: Any, values: Any, *, checked: bool) -> Script:
    """Linear positions from the indices of each dimension, values of their shape, and a sort by position."""
    given = [i for i in indices if i is not None]
    masks, plain = [i for i in given if i.dtype in MASKS], [i for i in given if i.dtype not in MASKS]
    shape = _broadcast(*[i.shape for i in plain], *[(_picked(i),) for i in masks])
    n, dims = shape.numel(), len(plain) + sum(i.dim() for i in masks)
    if not n:
        return ()
    script: list[Step] = []
    bound, positions = Take(8), Take(8 * n)
    check = [bound, *full_reduction(n, 8), *brief(1), Free(bound)]
    for turn in range(dims):
        script += [*check, *check] if checked else []
        script += [positions, positions, Free(positions), *([Free(positions)] if turn else [])]
    given_at = [i for i, index in enumerate(indices) if index is not None]
    slice_size = math.prod(self.shape[given_at[-1] + 1 + dims - len(given) :])
    full = n * slice_size * math.prod(self.shape[: given_at[0]])
    if values.numel() != full or not values.is_contiguous():
        script.append(Take(full * values.element_size()))
    bits = max((self.numel() - 1) // max(slice_size, 1), 1).bit_length()
    return [*script, positions, positions, positions, *brief(sort_pairs_bytes(n, 8, bits))]


@scratch("where")
def _where(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """Operands on the host are uploaded, those of another dtype are cast."""
    if not isinstance(out, torch.Tensor):
        return ()
    casts = [Take(x.numel() * out.element_size()) for x in args[1:3] if x.numel() and (x.is_cpu or x.dtype != out.dtype)]
    return [*casts, MAKE_RESULTS] if casts else ()


@scratch("copy_")
def _copy(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """Between host and device, anything but one run of memory of one dtype goes through a temporary (Copy.cu).

    `effects.copies.copy` follows the same rules.
    """
    target, source = args[0], args[1]
    from_host = source.is_cpu
    if (not from_host and not target.is_cpu) or not target.numel():
        return ()
    one_dtype = target.dtype == source.dtype
    if one_dtype and one_run(target, source):
        return ()
    casts_here = from_host != bool(operand(args, kwargs, 2, "non_blocking", False))
    temporary = Take(target.numel() * (target if casts_here else source).element_size())
    if from_host:
        return () if target.is_contiguous() and (one_dtype or casts_here) else (temporary,)
    in_order = source.is_contiguous() and source.shape == target.shape
    return (temporary,) if (casts_here and not one_dtype) or not in_order else ()
