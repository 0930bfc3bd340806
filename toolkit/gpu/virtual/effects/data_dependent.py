"""Effects of data-dependent operations, whose results have a size that depends on values, and of indexing.

CUDA must know the size of a result before it allocates it: the operation reads a count back to the host, which waits. Indexing
does this for masks, and uploads indices that are on the host. Sources: the golden programs get_*, set_*, nonzero*, unique*,
bincount*, histc* and isin*, and TensorAdvancedIndexing.cpp and IndexingUtils.h under ATen/native.
"""

from __future__ import annotations

from typing import Any

import torch

from toolkit.gpu.virtual.effects.copies import on_device
from toolkit.gpu.virtual.effects.effect import WAIT, Effect, d2d, d2h, h2d, kernel, nbytes, read_back
from toolkit.gpu.virtual.effects.operations import any_of, operand, rule, sorting

MASKS = (torch.bool, torch.uint8)
_broadcast: Any = torch.broadcast_shapes


def counting(mask: torch.Tensor) -> list[Effect]:
    """nonzero*: count, read back 4 bytes, select. Coordinates of several dimensions take one more kernel."""
    size = nbytes(mask)
    more = [kernel("nonzero", size)] if mask.numel() == 0 else [kernel("nonzero"), kernel("nonzero", size)]
    if mask.numel() and mask.dim() > 1:
        more.append(kernel("nonzero", size))
    return [kernel("nonzero", size, 2), *read_back(4), *more]


@rule("nonzero", "argwhere")
def _nonzero(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    return counting(args[0])


@rule("masked_select")
def _masked_select(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """masked_select*: expand both to one shape, then index by the mask."""
    self, mask = args[0], args[1]
    effects = []
    shape = _broadcast(self.shape, mask.shape)
    if mask.shape != shape:
        effects.append(kernel("copy_", nbytes(mask)))
        mask = mask.expand(shape)
    effects += counting(mask)
    return [*effects, kernel("masked_select", 2 * nbytes(out))] if out.numel() else effects


def locating(self: torch.Tensor, indices: Any) -> list[Effect]:
    """Prepare indices: count masks, upload host indices, cast int32 ones, and expand all of them to one shape."""
    effects: list[Effect] = []
    shape = _broadcast(*[i.shape for i in indices if i is not None and i.dtype not in MASKS] or [()])
    for index in indices:
        if index is None:
            continue
        if index.dtype in MASKS:
            if index.is_cpu:  # evaluated on the host; the coordinates are uploaded from pinned memory without a wait
                picked = int(index.count_nonzero())
                effects += [h2d(8 * picked * index.dim(), True)] if picked else []
            else:
                effects += counting(index)
            continue
        if index.is_cpu and index.numel():
            effects += [h2d(nbytes(index), index.is_pinned()), WAIT]
        if index.shape != shape:
            effects.append(kernel("copy_", 16 * shape.numel()))
        if index.dtype == torch.int32:
            effects.append(kernel("copy_", 12 * index.numel()))
    return effects


@rule("index", "_unsafe_index")
def _index(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    effects = locating(args[0], args[1])
    result = out if isinstance(out, torch.Tensor) else kwargs["out"]
    return [*effects, kernel("index", 2 * nbytes(result) + 8 * result.numel(), 1.3)] if result.numel() else effects


@rule("index_put", "_unsafe_index_put")
def _index_put_copy(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """index_put_values: index_put_ on a copy; but a backward pass writes into its own zeros (backward_index)."""
    backward = operand(args, kwargs, 3, "accumulate", False) and torch._C._current_graph_task_id() != -1
    if backward:
        return _index_put((*args[:3], True, True), {}, out)
    return [*on_device(out, args[0]), *_index_put(args, kwargs, out)]


@rule("index_put_", "_index_put_impl_")
def _index_put(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """set_list_*, set_idx_*, set_mask_*, index_put_*: one mask with one host value is a masked_fill_."""
    self, indices, values = args[0], args[1], args[2]
    accumulate = operand(args, kwargs, 3, "accumulate", False)
    given = [i for i in indices if i is not None]
    if not accumulate and values.is_cpu and values.numel() == 1 and len(given) == 1 and given[0].dtype in MASKS:
        mask = given[0]
        if mask.is_cpu is self.is_cpu:
            return [kernel("masked_fill_", 2 * nbytes(self) + nbytes(mask))] if self.numel() else []
    effects = []
    if values.is_cpu:
        effects += [h2d(nbytes(values), values.is_pinned()), WAIT]
    effects += locating(self, indices)
    moved = 3 * nbytes(values)
    if not accumulate:
        return [*effects, kernel("_index_put_impl_", moved, 1.3)] if self.numel() else effects
    checks = [] if operand(args, kwargs, 4, "unsafe", False) else ["max", "lt", "_assert_async", "min", "ge", "_assert_async"]
    names = [*checks, "arange", "remainder", "mul", "div_", "_index_put_impl_"]
    return [*effects, *map(kernel, names), kernel("_index_put_impl_", moved, 2)]


@rule("_unique2", "_unique")
def _unique(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """unique*: sort, mark, and read back the number of distinct values. The inverse takes five more kernels."""
    self = args[0]
    size = nbytes(self)
    if self.numel() == 0:
        return []
    if self.dtype == torch.bool:
        return [kernel("_unique2", size), kernel("_unique2"), d2h(4, False), WAIT]
    inverse = operand(args, kwargs, 2, "return_inverse", False)
    kernels = [kernel("_unique2", 2 * size, 3) for _ in range(8 if inverse else 3)]
    return [*kernels, *read_back(8)]


@rule("unique_consecutive")
def _unique_consecutive(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    size = nbytes(args[0])
    return [kernel("unique_consecutive", size, 2), kernel("unique_consecutive", size), *read_back(8)] if size else []


@rule("unique_dim", "unique_dim_consecutive")
def _unique_dim(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """unique_dim: a comparison sort of rows with two waits, then a count is read back."""
    size = nbytes(args[0])
    steps = [kernel("arange"), kernel("unique_dim", size), WAIT, kernel("unique_dim", size), kernel("unique_dim", size), WAIT]
    return [*steps, d2h(4, False), WAIT, kernel("index_select", 2 * nbytes(out[0]))]


@rule("bincount")
def _bincount(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """bincount*: the minimum and the maximum are read back before counting."""
    self = args[0]
    if self.numel() == 0:
        return [kernel("fill_", nbytes(out))] if out.numel() else []
    size, item = nbytes(self), self.element_size()
    effects = [kernel("min", size, 2), d2h(item, False), WAIT, kernel("max", size, 2), *read_back(item)]
    return [*effects, kernel("fill_", nbytes(out)), kernel("bincount", size)]


@rule("histc")
def _histc(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """histc*: without bounds, the minimum and the maximum are read back."""
    self = args[0]
    low, high = operand(args, kwargs, 2, "min", 0), operand(args, kwargs, 3, "max", 0)
    effects = [kernel("fill_", nbytes(out))]
    if low == high and self.numel():
        for name in ("min", "max"):
            effects += [kernel(name, nbytes(self), 2), d2h(self.element_size(), False), WAIT]
    return [*effects, kernel("histc", nbytes(self))]


@rule("isin")
def _isin(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """isin*: few test elements are compared with every element; many are sorted together, which reads back two counts."""
    elements, tests = args[0], args[1]
    if not isinstance(elements, torch.Tensor) or not isinstance(tests, torch.Tensor):
        return [kernel("eq", nbytes(elements if isinstance(elements, torch.Tensor) else tests))]
    n, m = elements.numel(), tests.numel()
    if n == 0:
        return []
    if compares_pairs(n, m):
        return [kernel("fill_", n), kernel("eq", 8 * n + 8 * m), *any_of(n * m), d2d(n)]
    unique = kwargs.get("assume_unique", False)
    distinct = n + m if unique else _distinct(elements) + _distinct(tests)
    effects: list[Effect] = []
    if not unique:
        for tensor, inverse in ((elements, True), (tests, False)):
            effects += _unique((tensor, True, inverse), {}, None)
    effects.append(kernel("cat", 2 * distinct * elements.element_size()))
    merged, ordered = (torch.empty(distinct, dtype=elements.dtype, device="meta") for _ in range(2))
    effects += sorting(merged, ordered, 0)
    effects += [kernel("eq", distinct), d2d(distinct - 1), h2d(1, False), WAIT, kernel("index_copy_", distinct)]
    return [*effects, kernel("index", n), d2d(n)]


def compares_pairs(n: int, m: int) -> bool:
    """Return whether isin compares `n` elements with each of `m` test elements; else it sorts them (TensorCompare.cpp)."""
    return m < 10 * n**0.145


def _distinct(tensor: Any) -> int:
    values = getattr(tensor, "_host", tensor)
    return int(torch.unique(values).numel())


@rule("scatter", "scatter_add", "index_add", "index_copy", "masked_scatter", "index_reduce")
def _scatter(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """scatter*, index_add*, index_copy*: a copy of the first operand, then one kernel."""
    self = args[0]
    index = next((a for a in args[1:] if isinstance(a, torch.Tensor)), self)
    return [*on_device(out, self), kernel("scatter", 4 * nbytes(index))] if index.numel() else on_device(out, self)


@rule("index_fill_", "index_fill")
def _index_fill(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """r2_index_fill_tensor: a value on the device is read back. index_fill works on a copy."""
    value = operand(args, kwargs, 3, "value")
    effects = [] if out is args[0] else on_device(out, args[0])
    effects += read_back(value.element_size()) if isinstance(value, torch.Tensor) and not value.is_cpu else []
    return [*effects, kernel("index_fill_", 4 * nbytes(args[2]))] if args[2].numel() else effects


@rule("scatter_reduce")
def _scatter_reduce(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """scatter_reduce: the first operand is copied twice, by the functional form and by the operation."""
    return [*on_device(out, args[0]), *_scatter(args, kwargs, out)]
