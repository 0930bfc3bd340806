"""Which operations take memory for themselves while they run, how much, and when: a script for each (see `rules_scratch`).

Each rule follows what ATen's CUDA code allocates, in its order, as the golden programs and a sweep over sizes showed it on
an H200 (PyTorch 2.11). Rules are asked before an operation's results are on the device; `out` is what it will return, as
host tensors. An operation without a rule takes nothing but its results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from toolkit.gpu.virtual.effects.operations import many_blocks, operand
from toolkit.gpu.virtual.scratch.libraries import (
    LEAST_GLOBAL,
    OUT,
    RESULT,
    SMS,
    Script,
    count_bytes,
    flags_scan_bytes,
    reduce_script,
    runs_bytes,
    scan_bytes,
    scratch,
    select_bytes,
    sort_keys_bytes,
    sort_pairs_bytes,
    sort_script,
    whole_script,
)

# ---- reductions


def _dims(args: tuple[Any, ...], kwargs: dict[str, Any], i: int = 1) -> Any:
    dims = operand(args, kwargs, i, "dim")
    return [dims] if isinstance(dims, int) and not isinstance(dims, bool) else dims if isinstance(dims, list | tuple) else None


def _acc(dtype: torch.dtype) -> int:
    return 8 if dtype.itemsize == 8 or not dtype.is_floating_point else 4


@scratch("sum", "mean", "prod", "nansum")
def _sum(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    """Integers are summed as int64, for which a narrower operand is copied."""
    source = args[0]
    dtype = source.dtype
    if not dtype.is_floating_point and dtype != torch.int64 and not dtype.is_complex and kwargs.get("dtype") is None:
        n = 8 * source.numel()
        return [OUT, n, *reduce_script(source, _dims(args, kwargs), 8), -n] if n else ()
    return reduce_script(source, _dims(args, kwargs), _acc(dtype)) if source.numel() >= LEAST_GLOBAL else ()


@scratch("amax", "amin", "any", "all", "max", "min")
def _extreme(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    """With positions (max over a dimension) each partial result is a pair."""
    source = args[0]
    if source.numel() < LEAST_GLOBAL or (len(args) > 1 and isinstance(args[1], torch.Tensor)):
        return ()
    return reduce_script(source, _dims(args, kwargs), 16 if isinstance(out, tuple) else source.element_size())


@scratch("argmax", "argmin", "std", "var", "std_mean", "var_mean")
def _pairs(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    return reduce_script(args[0], _dims(args, kwargs), 16) if args[0].numel() >= LEAST_GLOBAL else ()


@scratch("linalg_vector_norm")
def _norm(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    return reduce_script(args[0], _dims(args, kwargs, 2), _acc(args[0].dtype)) if args[0].numel() >= LEAST_GLOBAL else ()


@scratch("aminmax")
def _aminmax(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    return reduce_script(args[0], _dims(args, kwargs), 2 * args[0].element_size())


@scratch("count_nonzero")
def _count_nonzero(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    """A mask, and the sum of it as integers."""
    source = args[0]
    n = source.numel()
    mask = [] if source.dtype == torch.bool or not n else [n]
    return [*mask, OUT, 8 * n, *reduce_script(source, _dims(args, kwargs), 8)] if n else ()


@scratch("logsumexp")
def _logsumexp(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    """The largest, which of them are infinite, and the exponentials of what is left."""
    source, dims = args[0], _dims(args, kwargs)
    if not source.numel() or not source.is_floating_point():
        return ()
    n = source.numel() // math.prod(source.shape[d] for d in (dims or range(source.dim())))
    size, exponentials = n * source.element_size(), source.nbytes
    largest = reduce_script(source, dims, source.element_size())
    return [size, *largest, size, n, -n, -size, exponentials, OUT, *reduce_script(source, dims, _acc(source.dtype))]


@scratch("mse_loss", "smooth_l1_loss", "huber_loss")
def _loss(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    """The loss of each element, then their mean or sum."""
    if out is None or out.dim() or not args[0].dim():
        return ()
    n = args[0].numel()
    return [OUT, out.element_size() * n, *whole_script(n, 4)] if n else ()


# ---- sorting and searching


@scratch("sort")
def _sort(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    self = args[0]
    dim = kwargs.get("dim", next((a for a in args[1:] if isinstance(a, int) and not isinstance(a, bool)), -1))
    if not self.dim() or not self.numel():
        return ()
    rows = self.numel() // self.shape[dim]
    return sort_script(self.numel(), rows, self.element_size(), strided=self.stride(dim) != 1 and self.shape[dim] > 1)


@scratch("median")
def _median(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    """Of everything: a sort, and whether the last is a number."""
    return [*_ordered(args[0]), 1, OUT] if isinstance(out, torch.Tensor) and args[0].numel() else ()


@scratch("nanmedian")
def _nanmedian(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    """Of everything: a sort, a count of what is no number, and picking by position."""
    n, size = args[0].numel(), args[0].element_size()
    if not isinstance(out, torch.Tensor) or not n:
        return ()
    counted = [n, 8, 8 * n, *whole_script(n, 8), -8 * n]
    return [*_ordered(args[0]), *counted, 8, size, 8, -size, -8, -8, -n, OUT]


def _ordered(source: torch.Tensor) -> Script:
    n, size = source.numel(), source.element_size()
    return [size * n, 8 * n, *sort_script(n, 1, size, strided=False), *([-8 * n] * (2 if n <= 4096 else 1))]


def _top(rows: int, length: int, itemsize: int) -> Script:
    """Radix selection by several blocks a row (TensorTopK.cu): what each has found, digit counts, and their scans."""
    if not many_blocks(rows, length):
        return []
    per_thread = max(4, min(math.ceil(rows * length / (SMS * 6 * 256)), 64))
    blocks = rows * math.ceil(length / (256 * per_thread))
    return [rows * itemsize, 8 * rows, 8 * rows, 512 * blocks, 1024 * rows, 4 * blocks, 4 * blocks, 1279, -1279]


@scratch("topk")
def _topk(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    self = args[0]
    if not self.dim() or not self.numel() or args[1] == 0:
        return ()
    dim = operand(args, kwargs, 2, "dim", -1)
    copied = [] if self.is_contiguous() else [self.nbytes]
    length = self.shape[dim]
    taken = [*copied, *_top(self.numel() // length, length, self.element_size())]
    return [OUT, *taken] if taken else ()


def _unique_script(n: int, dtype: torch.dtype, inverse: bool, counts: bool) -> Script:
    """Sorted, then the distinct ones chosen; positions of the sorted ones give the inverse (Unique.cu, UniqueCub.cu)."""
    size = dtype.itemsize * n
    tail = [RESULT[0], 8, *([RESULT[2]] if counts else [])]
    chosen = runs_bytes(n) if counts else select_bytes(n, dtype.itemsize)
    tail += [chosen, -chosen, -8]
    if not inverse:
        keys = sort_keys_bytes(n, dtype)
        return [size, keys, -keys, *tail]
    pairs, flags = sort_pairs_bytes(n, dtype.itemsize), flags_scan_bytes(n)
    return [size, 8 * n, 8 * n, pairs, -pairs, -8 * n, 8 * n, RESULT[1], flags, -flags, -8 * n, *tail, -8 * n, -size]


@scratch("_unique2", "_unique")
def _unique(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    self = args[0]
    n = self.numel()
    if not n:
        return ()
    inverse, counts = operand(args, kwargs, 2, "return_inverse", False), operand(args, kwargs, 3, "return_counts", False)
    if self.dtype == torch.bool:
        return [4, c := count_bytes(n), -c, OUT, 16]
    return _unique_script(n, self.dtype, inverse, counts)


@scratch("unique_consecutive")
def _unique_consecutive(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    n = args[0].numel()
    if not n:
        return ()
    counts = operand(args, kwargs, 2, "return_counts", False)
    flags = (
        [RESULT[1], 4 * n, f := flags_scan_bytes(n), -f, -4 * n] if operand(args, kwargs, 1, "return_inverse", False) else []
    )
    chosen = runs_bytes(n) if counts else select_bytes(n, args[0].element_size())
    return [*flags, RESULT[0], 8, *([RESULT[2]] if counts else []), chosen, -chosen]


@scratch("unique_dim", "unique_dim_consecutive")
def _unique_dim(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    """Row numbers, sorted by comparing rows; then the distinct ones of them."""
    n = args[0].shape[args[1]]
    if not n:
        return ()
    merge, distinct = 511 + -(-8 * n // 256) * 256, 1023 + -(-8 * (32 + math.ceil(n / 320)) // 256) * 256
    return [8 * n, merge, -merge, distinct, -distinct, OUT]


@scratch("isin")
def _isin(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    """Few candidates: every pair is compared. Many: both made distinct and sorted together (TensorCompare.cpp)."""
    elements, tests = args[0], args[1]
    if not isinstance(elements, torch.Tensor) or not isinstance(tests, torch.Tensor) or not elements.numel():
        return ()
    n, m = elements.numel(), tests.numel()
    if m < 10 * n**0.145:
        return [OUT, n * m, n]
    if kwargs.get("assume_unique", False) or elements.dtype != tests.dtype:
        return ()
    size = elements.element_size()
    apart = [int(torch.unique(getattr(x, "_host", x)).numel()) for x in (elements, tests)]
    d = sum(apart)
    sizes = {RESULT[0]: size * n, RESULT[1]: 8 * n}
    first = [sizes.get(step, step) for step in _unique_script(n, elements.dtype, True, False)]
    second = [size * m if step == RESULT[0] else step for step in _unique_script(m, tests.dtype, False, False)]
    ordered = [size * d, -size * m, -size * n, size * d, 8 * d, *sort_script(d, 1, size, strided=False)]
    return [OUT, *first, *second, -size * m, *ordered, -8 * d, d, d, n]


@scratch("histc")
def _histc(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    """Without bounds, the smallest and the largest are looked for."""
    self = args[0]
    if operand(args, kwargs, 2, "min", 0) != operand(args, kwargs, 3, "max", 0) or not self.numel():
        return ()
    item = self.element_size()
    return [OUT, item, *whole_script(self.numel(), item), -item]


@scratch("bincount")
def _bincount(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    n, size = args[0].numel(), args[0].element_size()
    return [size, *whole_script(n, size), -size, OUT] if n else ()


@scratch("searchsorted", "bucketize")
def _searchsorted(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    """A number is made a tensor, and cast."""
    numbers = [a for a in args[:2] if isinstance(a, int | float)]
    edges = [a for a in args[:2] if isinstance(a, torch.Tensor)]
    return [OUT, 8, *([] if edges[0].element_size() == 8 else [edges[0].element_size()])] if numbers and edges else ()


@scratch("equal")
def _equal(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    a, b = args[0], args[1]
    n = a.numel()
    if a.shape != b.shape or not n or (a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.dtype == b.dtype):
        return ()
    return [n, 1, *whole_script(n, 1)]


# ---- running sums, random numbers


@scratch("cumsum", "cumsum_", "cumprod", "cumprod_", "_logcumsumexp")
def _scan(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    """A whole tensor goes through CUB, rows through one kernel (ScanKernels.cpp); integers are summed as int64."""
    self = args[0]
    n = self.numel()
    if not n or not self.dim() or (len(args) < 2 and "dim" not in kwargs):
        return ()
    dtype = operand(args, kwargs, 2, "dtype") or (self.dtype if self.is_floating_point() else torch.int64)
    cast = [dtype.itemsize * n] if dtype != self.dtype else []
    whole = self.shape[operand(args, kwargs, 1, "dim")] == n
    return [OUT, *cast, *([scan_bytes(n, dtype)] if whole else [])] if cast or whole else ()


@scratch("repeat_interleave")
def _repeat_interleave(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    """Where each one begins; without output_size, whether none is negative."""
    n = args[0].numel()
    if not n or not isinstance(args[0], torch.Tensor) or len(args) > 1:
        return ()
    cast = [] if args[0].dtype == torch.int64 else [8 * n]
    script = [8 * n, *cast, scan := scan_bytes(n, torch.int64), -scan, *(-x for x in cast)]
    checked = [] if kwargs.get("output_size") is not None else [n, 1, *whole_script(n, 1), -1, -n]
    return [*script, *checked, OUT]


@scratch("randperm")
def _randperm(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    """Positions sorted by random keys, of as many bits as make repeats rare (Randperm.cu)."""
    n = args[0]
    if not isinstance(n, int) or n < 1:
        return ()
    bits = min(64, math.ceil(math.log2(n - (6 * n * n + 1) / (12 * math.log(0.9)))))
    key_bytes = 4 if bits <= 32 else 8
    return [OUT, 8, -8, 8 * n, key_bytes * n, key_bytes * n, sort_pairs_bytes(n, key_bytes, bits)]


@scratch("multinomial")
def _multinomial(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    """Without replacement: checks, then the largest of p / exponential. With it: sums, normalised and scanned."""
    p, k = args[0], args[1]
    size, n = p.element_size(), p.numel()
    rows = p.shape[0] if p.dim() == 2 else 1
    if operand(args, kwargs, 2, "replacement", False) and k > 1:
        return [OUT, n * size, n * size, n * size, *([scan_bytes(n, p.dtype)] if rows == 1 else [])]
    check = [size, *whole_script(n, size), 1]
    sums = [size * rows, *reduce_script(p, [-1], 4), *([rows] if p.dim() == 2 else []), 1]
    freed = [*([-rows] if p.dim() == 2 else []), -size * rows, 1, -1]
    script = [OUT, *check, *check, 1, -1, -size, -1, -size, *sums, *freed, n * size]
    length = p.shape[-1]
    if k == 1:
        return [*script, *reduce_script(p, [-1], 16)]
    return [*script, size * k * rows, *_top(rows, length, size)]


@scratch("normal")
def _normal(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[int]:
    """Deviations in a tensor are checked before and after."""
    std = next((a for a in args[1:2] if isinstance(a, torch.Tensor)), None)
    if std is None or not std.numel():
        return ()
    size, whole = std.element_size(), whole_script(std.numel(), std.element_size())
    return [size, *whole, 1, -1, -size, OUT, size, *whole, 1]
