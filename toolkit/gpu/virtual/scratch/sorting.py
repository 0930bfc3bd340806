"""Temporaries of operations that sort, search, scan or draw random numbers.

The rules follow what ATen's CUDA code allocates, in its order, as measured with the golden programs and a sweep over sizes on
an H200 (PyTorch 2.11).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from toolkit.gpu.virtual.effects.data_dependent import compares_pairs
from toolkit.gpu.virtual.effects.operations import SMALL_SORT, known_equality, many_blocks, operand, sorted_dim
from toolkit.gpu.virtual.scratch import cub
from toolkit.gpu.virtual.scratch.cub import scan_bytes, select_bytes, sort_pairs_bytes, sort_script, status_bytes
from toolkit.gpu.virtual.scratch.reductions import full_reduction, split_reduction
from toolkit.gpu.virtual.scratch.script import MAKE_RESULTS, Args, Free, Kwargs, Make, Script, Step, Take, brief, scratch

VALUES, INVERSE, COUNTS = Make(0), Make(1), Make(2)  # the results of the unique operations


@scratch("sort")
def _sort(args: Args, kwargs: Kwargs, out: Any) -> Script:
    self, dim = args[0], sorted_dim(args, kwargs)
    if not self.dim() or not self.numel():
        return ()
    rows = self.numel() // self.shape[dim]
    return sort_script(self.numel(), rows, self.element_size(), strided=self.stride(dim) != 1 and self.shape[dim] > 1)


@scratch("median")
def _median(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """Without dim: a sort, then a test whether the last element is NaN."""
    return [*_sorted_copy(args[0]), Take(1), MAKE_RESULTS] if isinstance(out, torch.Tensor) and args[0].numel() else ()


@scratch("nanmedian")
def _nanmedian(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """Without dim: a sort, a count of the NaNs, then indexing by position."""
    n, size = args[0].numel(), args[0].element_size()
    if not isinstance(out, torch.Tensor) or not n:
        return ()
    mask, count, mask_int64, position = Take(n), Take(8), Take(8 * n), Take(8)
    counting = [mask, count, mask_int64, *full_reduction(n, 8), Free(mask_int64)]
    indexing = [position, Take(size), position, Free(Take(size)), Free(position), Free(position), Free(mask)]
    return [*_sorted_copy(args[0]), *counting, *indexing, MAKE_RESULTS]


def _sorted_copy(source: torch.Tensor) -> Script:
    """torch.sort of all elements: values and positions, of which only the values stay."""
    n, size = source.numel(), source.element_size()
    positions = Take(8 * n)
    freed = [Free(positions)] * (2 if n <= SMALL_SORT else 1)
    return [Take(size * n), positions, *sort_script(n, 1, size, strided=False), *freed]


@scratch("embedding_renorm_")
def _embedding_renorm(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """The sorted indices, then the distinct ones and their number (Embedding.cu)."""
    indices, n = args[1], args[1].numel()
    if not n:
        return ()
    size, length = indices.element_size(), indices.shape[-1] if indices.dim() else 1
    values, positions, short = Take(size * n), Take(8 * n), [Take(8 * length)] if length <= SMALL_SORT else []
    sort = sort_script(n, n // length, size, strided=False) if indices.dim() else short
    freed = [Free(positions), *map(Free, short)]
    return [values, positions, *sort, *freed, Take(size * n), Take(8), *brief(select_bytes(n, size))]


@scratch("topk")
def _topk(args: Args, kwargs: Kwargs, out: Any) -> Script:
    self = args[0]
    if not self.dim() or not self.numel() or args[1] == 0:
        return ()
    length = self.shape[operand(args, kwargs, 2, "dim", -1)]
    copied = [] if self.is_contiguous() else [Take(self.nbytes)]
    return [MAKE_RESULTS, *copied, *_radix_select(self.numel() // length, length, self.element_size())]


def _radix_select(rows: int, length: int, itemsize: int) -> Script:
    """Radix selection by several blocks per row (TensorTopK.cu, namespace mbtopk); nothing if one block selects a row."""
    if not many_blocks(rows, length):
        return ()
    per_thread = max(4, min(math.ceil(rows * length / (cub.SMS * 6 * 256)), 64))
    blocks = rows * math.ceil(length / (256 * per_thread))
    kth_values, digits_wanted, ranks = Take(rows * itemsize), Take(8 * rows), Take(8 * rows)
    digit_counts, digit_sums, block_counts = Take(512 * blocks), Take(1024 * rows), Take(4 * blocks)
    state = [kth_values, digits_wanted, ranks, digit_counts, digit_sums]
    return [*state, block_counts, block_counts, *brief(cub.ONE_TILE_SCAN_BYTES)]


@scratch("_unique2", "_unique")
def _unique(args: Args, kwargs: Kwargs, out: Any) -> Script:
    self, n = args[0], args[0].numel()
    if not n:
        return ()
    if self.dtype == torch.bool:
        return [Take(4), *brief(cub.count_bytes(n)), MAKE_RESULTS, Take(16)]
    inverse, counts = operand(args, kwargs, 2, "return_inverse", False), operand(args, kwargs, 3, "return_counts", False)
    return _sorted_unique(n, self.dtype, inverse, counts)


def _sorted_unique(n: int, dtype: torch.dtype, inverse: bool, counts: bool) -> Script:
    """A sort, then a selection of the distinct values; the positions of the sorted values give the inverse (UniqueCub.cu)."""
    sorted_keys, positions = Take(dtype.itemsize * n), Take(8 * n)
    n_selected = Take(8)
    selecting = brief(status_bytes(n, cub.RUNS_TILE) if counts else select_bytes(n, dtype.itemsize))
    select = [VALUES, n_selected, *([COUNTS] if counts else []), *selecting, Free(n_selected)]
    if not inverse:
        return [sorted_keys, *brief(cub.sort_keys_bytes(n, dtype)), *select]
    sort = [sorted_keys, positions, positions, *brief(sort_pairs_bytes(n, dtype.itemsize)), Free(positions)]
    numbers = Take(8 * n)  # the number of the distinct value at each sorted position
    number = [numbers, INVERSE, *brief(status_bytes(n, cub.FLAGS_SCAN_TILE)), Free(numbers)]
    return [*sort, *number, *select, Free(positions), Free(sorted_keys)]


@scratch("unique_consecutive")
def _unique_consecutive(args: Args, kwargs: Kwargs, out: Any) -> Script:
    n = args[0].numel()
    if not n:
        return ()
    inverse: Script = ()
    if operand(args, kwargs, 1, "return_inverse"):
        flags = Take(4 * n)
        inverse = [INVERSE, flags, *brief(status_bytes(n, cub.FLAGS_SCAN_TILE)), Free(flags)]
    if operand(args, kwargs, 2, "return_counts"):
        return [*inverse, VALUES, Take(8), COUNTS, *brief(status_bytes(n, cub.RUNS_TILE))]
    return [*inverse, VALUES, Take(8), *brief(select_bytes(n, args[0].element_size()))]


@scratch("unique_dim", "unique_dim_consecutive")
def _unique_dim(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """Row numbers, sorted by comparing rows, then a selection of the distinct rows."""
    n = args[0].shape[args[1]]
    merge_sort, select = cub.storage_bytes(8 * n), status_bytes(n, cub.DISTINCT_ROWS_TILE) + 2 * cub.up(1)
    return [Take(8 * n), *brief(merge_sort), *brief(select), MAKE_RESULTS] if n else ()


@scratch("isin")
def _isin(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """Few test elements: every pair is compared. Many: distinct values of both are sorted together (TensorCompare.cpp)."""
    elements, tests = args[0], args[1]
    if not isinstance(elements, torch.Tensor) or not isinstance(tests, torch.Tensor) or not elements.numel():
        return ()
    n, m, size = elements.numel(), tests.numel(), elements.element_size()
    if compares_pairs(n, m):
        return [MAKE_RESULTS, Take(n * m), Take(n)]
    if kwargs.get("assume_unique", False) or elements.dtype != tests.dtype:
        return ()
    d = sum(int(torch.unique(getattr(x, "_host", x)).numel()) for x in (elements, tests))
    # The results of the two inner unique operations are temporaries here.
    inner: dict[Step, Step] = {VALUES: Take(size * n), INVERSE: Take(8 * n)}
    first = [inner.get(step, step) for step in _sorted_unique(n, elements.dtype, True, False)]
    second = [Take(size * m) if step == VALUES else step for step in _sorted_unique(m, tests.dtype, False, False)]
    both, order = Take(size * d), Take(8 * d)  # concatenated: then the sorted values, and their order
    joined = [both, Free(Take(size * m)), Free(Take(size * n)), both, order, *sort_script(d, 1, size, strided=False)]
    flags = Take(d)
    return [MAKE_RESULTS, *first, *second, Free(Take(size * m)), *joined, Free(order), flags, flags, Take(n)]


@scratch("histc")
def _histc(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """Equal bounds stand for the minimum and the maximum, which are computed first."""
    self, item = args[0], args[0].element_size()
    if operand(args, kwargs, 2, "min", 0) != operand(args, kwargs, 3, "max", 0) or not self.numel():
        return ()
    bound = Take(item)
    return [MAKE_RESULTS, bound, *full_reduction(self.numel(), item), Free(bound)]


@scratch("bincount")
def _bincount(args: Args, kwargs: Kwargs, out: Any) -> Script:
    n, largest = args[0].numel(), Take(args[0].element_size())
    bound = [largest, *full_reduction(n, largest.n_bytes), Free(largest)]  # the minimum, then the maximum
    return [*bound, *bound, MAKE_RESULTS] if n else ()


@scratch("searchsorted", "bucketize")
def _searchsorted(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """A Python number becomes a tensor of 8 bytes, which is cast to the dtype of the boundaries."""
    edges = [a for a in args[:2] if isinstance(a, torch.Tensor)]
    if not edges or not any(isinstance(a, int | float) for a in args[:2]):
        return ()
    size = edges[0].element_size()
    return [MAKE_RESULTS, Take(8), *([] if size == 8 else [Take(size)])]


@scratch("equal")
def _equal(args: Args, kwargs: Kwargs, out: Any) -> Script:
    n = args[0].numel()
    return () if not n or known_equality(args[0], args[1]) else [Take(n), Take(1), *full_reduction(n, 1)]


@scratch("cumsum", "cumsum_", "cumprod", "cumprod_", "_logcumsumexp")
def _scan(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """CUB scans a whole tensor, a kernel of PyTorch's the rows of one (ScanKernels.cpp). Integers are summed as int64."""
    self, n = args[0], args[0].numel()
    if not n or not self.dim() or (len(args) < 2 and "dim" not in kwargs):
        return ()
    dtype = operand(args, kwargs, 2, "dtype") or (self.dtype if self.is_floating_point() else torch.int64)
    cast = [Take(dtype.itemsize * n)] if dtype != self.dtype else []
    whole = [Take(scan_bytes(n, dtype))] if self.shape[operand(args, kwargs, 1, "dim")] == n else []
    return [MAKE_RESULTS, *cast, *whole] if cast or whole else ()


@scratch("repeat_interleave")
def _repeat_interleave(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """A scan of the repeats; without output_size also a test that none is negative."""
    repeats, n = args[0], args[0].numel()
    if not n or len(args) > 1:
        return ()
    cast = [] if repeats.dtype == torch.int64 else [Take(8 * n)]
    script = [Take(8 * n), *cast, *brief(scan_bytes(n, torch.int64)), *map(Free, cast)]
    if kwargs.get("output_size") is None:
        flags, flag = Take(n), Take(1)
        script += [flags, flag, *full_reduction(n, 1), Free(flag), Free(flags)]
    return [*script, MAKE_RESULTS]


@scratch("randperm")
def _randperm(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """Positions sorted by random keys, which have enough bits to make duplicates rare (Randperm.cu)."""
    n = args[0]
    if not isinstance(n, int) or n < 1:
        return ()
    bits = min(64, math.ceil(math.log2(n - (6 * n * n + 1) / (12 * math.log(0.9)))))
    size = 4 if bits <= 32 else 8
    return [MAKE_RESULTS, *brief(8), Take(8 * n), Take(size * n), Take(size * n), Take(sort_pairs_bytes(n, size, bits))]


@scratch("multinomial")
def _multinomial(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """With replacement: a copy, normalized and scanned. Without: checks, then the largest of p / exponential noise."""
    p, k = args[0], args[1]
    size, n = p.element_size(), p.numel()
    rows, length = p.shape[0] if p.dim() == 2 else 1, p.shape[-1]
    probabilities = Take(n * size)
    if operand(args, kwargs, 2, "replacement", False) and k > 1:
        scan = [Take(scan_bytes(n, p.dtype))] if rows == 1 else []
        return [MAKE_RESULTS, probabilities, probabilities, probabilities, *scan]
    extreme, flag, sums = Take(size), Take(1), Take(size * rows)
    bound = [extreme, *full_reduction(n, size), flag]  # is the maximum finite, is the minimum not negative?
    row_flags = [Take(rows)] if p.dim() == 2 else []
    positive = [sums, *split_reduction(p, [-1], 4), *row_flags, flag]  # is every row's sum positive?
    freed = [*map(Free, row_flags), Free(sums), *brief(1)]
    checks = [*bound, *bound, *brief(1), Free(extreme), Free(flag), Free(extreme), *positive, *freed]
    if k == 1:
        return [MAKE_RESULTS, *checks, probabilities, *split_reduction(p, [-1], 16)]
    return [MAKE_RESULTS, *checks, probabilities, Take(size * k * rows), *_radix_select(rows, length, size)]


@scratch("normal")
def _normal(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """Standard deviations in a tensor are checked before the result is allocated, and after."""
    std = next((a for a in args[1:2] if isinstance(a, torch.Tensor)), None)
    if std is None or not std.numel():
        return ()
    least, flag = Take(std.element_size()), Take(1)
    check = [least, *full_reduction(std.numel(), std.element_size()), flag]
    return [*check, Free(flag), Free(least), MAKE_RESULTS, *check]
