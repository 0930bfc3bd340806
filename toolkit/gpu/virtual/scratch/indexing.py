"""Temporaries of operations that find positions or use them: masks, indexing, `where`, and copies across the bus.

See `rules_scratch` for what a script is. Masks are counted, as CUDA counts them, for the room that their positions take.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from toolkit.gpu.virtual.effects.copies import one_run
from toolkit.gpu.virtual.effects.host_reads import MASKS
from toolkit.gpu.virtual.effects.operations import operand
from toolkit.gpu.virtual.scratch.libraries import (
    OUT,
    Script,
    count_bytes,
    scan_bytes,
    scratch,
    select_bytes,
    sort_pairs_bytes,
    whole_script,
)

_broadcast: Any = torch.broadcast_shapes


def _counted(mask: Any) -> Script:
    """The count of what is not zero, then room for its positions, chosen; the positions stay."""
    n, host = mask.numel(), getattr(mask, "_host", mask)
    if not n:
        return [4, 1, -1, 767, -767, -4]
    positions = 8 * mask.dim() * int(torch.count_nonzero(host)) if not host.is_meta else 0
    room = [positions] if positions else []
    copied = [] if mask.is_contiguous() else [n * mask.element_size()]
    return [*copied, 4, c := count_bytes(n), -c, *room, s := select_bytes(n), -s, -4, *(-x for x in copied)]


@scratch("nonzero", "argwhere")
def _nonzero(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    n = args[0].numel()
    if not n:
        return [4, 1, -1, OUT, 767, -767]
    copied = [] if args[0].is_contiguous() else [args[0].nbytes]
    return [*copied, 4, c := count_bytes(n), -c, OUT, s := select_bytes(n), -s]


@scratch("masked_select")
def _masked_select(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    shape = _broadcast(args[0].shape, args[1].shape)
    return [*_counted(args[1].expand(shape)), OUT]


@scratch("masked_scatter_", "masked_scatter")
def _masked_scatter(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    n = args[0].numel()
    return [OUT, 8 * n, scan_bytes(n, torch.int64)] if n else ()


def _located(indices: Any) -> Script:
    """Masks as positions, indices of the host on the device, int32 ones as int64, all of one shape (IndexingUtils.h)."""
    if len(indices) == 1 and indices[0] is not None and indices[0].dtype == torch.int64 and not indices[0].is_cpu:
        return []  # by far the most common
    plain = [i for i in indices if i is not None and i.dtype not in MASKS]
    shape = _broadcast(*[i.shape for i in plain] or [()])
    script: Script = []
    for index in indices:
        if index is None or not index.numel():
            continue
        if index.dtype in MASKS:
            host = getattr(index, "_host", index)
            if not index.is_cpu:
                script += _counted(index)
            elif picked := int(host.count_nonzero()):
                script.append(8 * picked * index.dim())
            continue
        if index.is_cpu:
            script.append(index.numel() * index.element_size())
        if index.dtype == torch.int32:
            script += [8 * index.numel(), *([-4 * index.numel()] if index.is_cpu else [])]
    for index in plain:
        if index.shape != shape and shape.numel():
            script.append(8 * shape.numel())
    freed = [-8 * i.numel() for i in plain if i.shape != shape and i.is_cpu and i.numel() and i.dtype != torch.int32]
    return [*script, *freed]


@scratch("index", "_unsafe_index")
def _index(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    located = _located(args[1])
    return [*located, OUT] if located else ()


@scratch("index_put_", "_index_put_impl_", "index_put", "_unsafe_index_put")
def _index_put(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    """A number is uploaded; to add up, positions are made linear and sorted (Indexing.cu, index_put_with_sort_kernel)."""
    self, indices, values = args[0], args[1], args[2]
    given = [i for i in indices if i is not None]
    first = [OUT] if out is not None else []
    accumulate = operand(args, kwargs, 3, "accumulate", False)
    fills = not accumulate and values.is_cpu and values.numel() == 1 and len(given) == 1 and given[0].dtype in MASKS
    if fills and not given[0].is_cpu:
        return first
    upload = [values.nbytes] if values.is_cpu else []
    script = [*first, *upload, *_located(indices)]
    if not accumulate or not self.numel():
        return script
    backward = torch._C._current_graph_task_id() != -1  # the gradient of an indexing knows its indices to be good
    unsafe = operand(args, kwargs, 4, "unsafe", False) or backward
    return [*script, *_added_up(self, indices, values, checked=not unsafe)]


def _added_up(self: Any, indices: Any, values: Any, *, checked: bool) -> Script:
    given = [i for i in indices if i is not None]
    plain = [i for i in given if i.dtype not in MASKS]
    picked = [int(torch.count_nonzero(getattr(i, "_host", i))) for i in given if i.dtype in MASKS]
    shape = _broadcast(*[i.shape for i in plain], *[(n,) for n in picked])
    n, script = shape.numel(), []
    dims = sum(i.dim() if i.dtype in MASKS else 1 for i in given)
    if not n:
        return []
    for turn in range(dims):
        if checked:
            script += [8, *(g := whole_script(n, 8)), 1, -1, -8, 8, *g, 1, -1, -8]
        script += [8 * n, 8 * n, -8 * n, *([-8 * n] if turn else [])]
    last = max(i for i, index in enumerate(indices) if index is not None) + 1
    slices = math.prod(self.shape[last + dims - len(given) :])
    full = n * slices * math.prod(self.shape[: next(i for i, index in enumerate(indices) if index is not None)])
    spread = [] if values.numel() == full and values.is_contiguous() else [full * values.element_size()]
    bits = max((self.numel() - 1) // max(slices, 1), 1).bit_length()
    sort = sort_pairs_bytes(n, 8, bits)
    return [*script, *spread, 8 * n, 8 * n, 8 * n, sort, -sort]


@scratch("where")
def _where(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    """Numbers of the host are uploaded, operands of another dtype cast."""
    if not isinstance(out, torch.Tensor):
        return ()
    script = []
    for i, source in enumerate(args[:3]):
        if i and source.numel() and (source.is_cpu or source.dtype != out.dtype):
            script.append(source.numel() * out.element_size())
    return [*script, OUT] if script else ()


@scratch("copy_")
def _copy(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    """Across the bus, what is not one run of memory of one dtype goes through a temporary (Copy.cu); see rules_copies.copy."""
    target, source = args[0], args[1]
    from_host = source.is_cpu
    if (not from_host and not target.is_cpu) or not target.numel():
        return ()
    one_dtype = target.dtype == source.dtype
    if one_dtype and one_run(target, source):
        return ()
    casts_here = from_host != bool(operand(args, kwargs, 2, "non_blocking", False))
    size = target.numel() * (target if casts_here else source).element_size()
    if from_host:
        return () if target.is_contiguous() and (one_dtype or casts_here) else (size,)
    in_order = source.is_contiguous() and source.shape == target.shape
    return (size,) if (casts_here and not one_dtype) or not in_order else ()
