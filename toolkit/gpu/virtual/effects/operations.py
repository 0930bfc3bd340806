"""Rules for operations that are not exactly one kernel: inner copies, values that are read back, waits, several kernels.

A rule maps an operation's operands and results to its effects, in order. Its docstring names its source: golden programs of
`tests/golden`, measured on an H200 with torch 2.11, or a file of PyTorch's sources under ATen/native.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from toolkit.gpu.virtual.effects.copies import copy, on_device
from toolkit.gpu.virtual.effects.effect import WAIT, Effect, d2d, d2h, h2d, kernel, memset, nbytes, read_back

Rule = Callable[[tuple[Any, ...], dict[str, Any], Any], list[Effect]]
RULES: dict[str, Rule] = {}  # by operation name, without "aten::" and overload

# Number of kernels of operations that copy nothing (measured on an H200, small shapes).
KERNELS = {
    "dot": 2, "vdot": 2, "native_group_norm": 2, "count_nonzero": 3, "eye": 2, "masked_scatter_": 4, "randperm": 5,
    "linalg_lu_factor_ex": 6, "logsumexp": 9, "linalg_inv_ex": 13, "linalg_cholesky_ex": 4,
}  # fmt: skip

SMALL_SORT = 4096  # elements of a row up to which sort is one kernel in place (Sort.cpp, should_use_small_sort)


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for the operations called `names`."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def operand(args: tuple[Any, ...], kwargs: dict[str, Any], i: int, name: str, default: Any = None) -> Any:
    """Return the operand at position `i` or called `name`, or `default` if it is missing."""
    return args[i] if len(args) > i else kwargs.get(name, default)


@rule("copy_")
def _copy(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    return copy(args[0], args[1], bool(operand(args, kwargs, 2, "non_blocking", False)))


@rule("_local_scalar_dense")
def _item(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """item_*: a copy of one element to pinned memory, and a wait."""
    return [d2h(args[0].element_size(), True)._replace(cost="item_host_ns"), WAIT]


@rule("fill_")
def _fill(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """fill_gpu0, fill_cpu0: a value on the device is copied; a value on the host is an argument of the kernel."""
    target, value = args[0], args[1]
    if isinstance(value, torch.Tensor) and not value.is_cpu:
        return copy(target, value)
    return [kernel("fill_", nbytes(target))] if target.numel() else []


@rule("pow", "pow_")
def _pow(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """backward_slice_cat: the power of one is a copy (Pow.cpp)."""
    base, exponent = args[0], args[1]
    if isinstance(exponent, int | float) and exponent == 1 and isinstance(base, torch.Tensor):
        return on_device(out, base)
    return [kernel("pow", 2 * nbytes(out))] if out.numel() else []


@rule("native_dropout")
def _dropout(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """dropout: one kernel; in evaluation mode a copy and a mask of ones (Dropout.cu)."""
    if len(args) > 2 and args[2] is False:
        return [*on_device(out[0], args[0]), kernel("fill_", nbytes(out[1]))]
    return [kernel("native_dropout", 2 * nbytes(args[0]))] if args[0].numel() else []


@rule("masked_fill_")
def _masked_fill(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """masked_fill_gpu0: a value on the device is read back first."""
    target, mask, value = args[0], args[1], operand(args, kwargs, 2, "value")
    effects = read_back(value.element_size()) if isinstance(value, torch.Tensor) and not value.is_cpu else []
    return [*effects, kernel("masked_fill_", 2 * nbytes(target) + nbytes(mask))] if target.numel() else effects


@rule("where")
def _where(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """where_cpu_scalar_tensor: operands on the host are uploaded, those of another dtype cast."""
    effects = []
    result = out if isinstance(out, torch.Tensor) else kwargs["out"]
    for i, source in enumerate(args[:3]):
        if source.is_cpu:
            effects += [h2d((source if i == 0 else result).element_size(), False), WAIT]
        elif i and source.dtype != result.dtype:
            effects.append(kernel("copy_", nbytes(source) + source.numel() * result.element_size()))
    return [*effects, kernel("where", 2 * nbytes(result) + nbytes(args[0]))] if result.numel() else effects


@rule("any", "all")
def _any(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """stop_on_eos, eos_check: a copy for a single element (ReduceOps.cpp), else one kernel."""
    source = args[0]
    name = "any"
    if source.numel() != 1:
        return [kernel(name, nbytes(source), 2)]
    return _truth(source)


def _truth(source: torch.Tensor) -> list[Effect]:
    cast = [] if source.dtype == torch.bool else [kernel("copy_", nbytes(source) + 1)]
    return [*cast, d2d(1)]


def any_of(n: int) -> list[Effect]:
    """Return the effects of `any` or `all` of `n` booleans inside another operation."""
    return [kernel("any", n, 2)] if n != 1 else [d2d(1)]


@rule("cat", "_chunk_cat")
def _cat(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """cat_*: one kernel per 128 tensors (64 if strided); copies for one tensor, mixed dtypes, or over 4 dims (Shape.cu)."""
    tensors = list(args[0])
    result = out if isinstance(out, torch.Tensor) else kwargs["out"]
    if result.numel() == 0:
        return []
    contiguous = all(t.is_contiguous() for t in tensors)
    if len(tensors) > 1 and result.dim() <= 4 and len({t.dtype for t in (*tensors, result)}) == 1:
        batch = 128 if contiguous else 64
        share = 2 * nbytes(result) * batch // max(len(tensors), batch)
        return [kernel("cat", share)] * math.ceil(len(tensors) / batch)
    dim = operand(args, kwargs, 1, "dim", 0)
    effects, offset = [], 0
    for tensor in tensors:
        if tensor.dim() == 1 and tensor.numel() == 0:
            continue
        effects += on_device(result.narrow(dim, offset, tensor.shape[dim]), tensor, "cat")
        offset += tensor.shape[dim]
    return effects


def sorting(self: torch.Tensor, values: torch.Tensor, dim: int) -> list[Effect]:
    """sort_*: a copy of `self`; short rows: indices from arange, and one kernel in place; longer ones: a radix sort."""
    effects = on_device(values, self)
    if self.dim() == 0 or self.numel() == 0:
        return effects
    length = self.shape[dim]
    rows = self.numel() // length
    if length <= SMALL_SORT:
        index_bytes = 8 * self.numel()
        indices = [d2d(index_bytes)] if rows == 1 else [kernel("copy_", index_bytes)]
        effects += [kernel("arange", 8 * length), *indices, *on_device(values, self)]
        return [*effects, kernel("sort", 2 * nbytes(self) + 2 * index_bytes, 3)] if length > 1 else effects
    if self.stride(dim) != 1:
        effects.append(kernel("copy_", 2 * nbytes(self)))
        after = [kernel("copy_", 2 * nbytes(self)), kernel("copy_", 16 * self.numel())]
    else:
        after = []
    passes = max(self.element_size(), 1)
    moved = 2 * (nbytes(self) + 8 * self.numel())
    radix = [kernel("sort", 8 * self.numel()), memset(16), memset(8192), kernel("sort", nbytes(self)), kernel("sort", 2048)]
    for _ in range(passes):
        radix += [memset(1024 * math.ceil(self.numel() / 5376)), kernel("sort", moved)]
    return effects + radix + after


@rule("sort", "argsort")
def _sort(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    values = out[0] if isinstance(out, tuple | list) else kwargs["values"]
    return sorting(args[0], values, sorted_dim(args, kwargs))


def sorted_dim(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the dimension that sort sorts, wherever its overloads take it."""
    return kwargs.get("dim", next((a for a in args[1:] if isinstance(a, int) and not isinstance(a, bool)), -1))


@rule("embedding_renorm_")
def _embedding_renorm(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """The indices are sorted, the distinct ones selected, and their rows scaled. Their number stays there (Embedding.cu)."""
    weight, indices = args[0], args[1]
    if not indices.numel():
        return []
    given, values = (torch.empty(indices.shape, dtype=indices.dtype, device="meta") for _ in range(2))
    select = [kernel("unique"), kernel("unique", 2 * nbytes(indices))]
    return [*sorting(given, values, -1), *select, kernel("embedding_renorm_", 2 * nbytes(weight[0]) * indices.numel(), 2)]


@rule("median", "nanmedian")
def _median(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """median: of all elements, a sort. median_dim: one kernel."""
    if isinstance(out, tuple | list):
        return [kernel("median", nbytes(args[0]), 3)]
    flat, values = (torch.empty(args[0].numel(), dtype=args[0].dtype, device="meta") for _ in range(2))
    return [*sorting(flat, values, 0), kernel("ne"), kernel("where")]


def many_blocks(rows: int, length: int) -> bool:
    """Return whether several blocks of topk share a row, as they do if rows are few and long (TensorTopK.cu)."""
    for most_rows, least in ((20, 20000), (40, 10000), (80, 8000), (200, 5000), (800, 3000)):
        if rows <= most_rows:
            return length >= least
    return length >= 4000


def top(rows: int, length: int, itemsize: int, k: int, sort: bool) -> list[Effect]:
    """topk_*: one block per row, or radix passes by several blocks per row (TensorTopK.cu)."""
    effects = []
    if many_blocks(rows, length):
        effects = [kernel("topk"), memset(1024), memset(128)]
        effects += [kernel("topk", rows * length * itemsize) for _ in range(3 * itemsize)]
        effects += [kernel("topk", rows * length * itemsize, 2) for _ in range(6)]
    else:
        effects = [kernel("topk", 2 * rows * length * itemsize, 5)]
    if sort and rows * k > 1:
        effects.append(kernel("topk", 2 * rows * k * (itemsize + 8), 3))
    return effects


@rule("topk")
def _topk(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    self, k = args[0], args[1]
    if self.numel() == 0 or k == 0:
        return []
    if self.dim() == 0:
        return [*on_device(out[0], self), kernel("fill_", 8)]
    length = self.shape[operand(args, kwargs, 2, "dim", -1)]
    return top(self.numel() // length, length, self.element_size(), k, operand(args, kwargs, 4, "sorted", True))


@rule("multinomial")
def _multinomial(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """multinomial_*: probabilities are checked on the device (asserts, no waits), then argmax(p / exponential noise)."""
    p, n = args[0], args[1]
    size, rows = nbytes(p), p.shape[0] if p.dim() == 2 else 1
    if operand(args, kwargs, 2, "replacement", False) and n > 1:
        return [
            d2d(size),
            kernel("multinomial", size),
            kernel("multinomial", size),
            d2d(size),
            *[kernel("multinomial", size)] * 2,
        ]
    checks = [kernel(name, size, floor) for name, floor in (("min", 2), ("ge", 1), ("max", 2), ("lt", 1), ("bitwise_and", 1))]
    checks += [kernel("_assert_async"), kernel("sum", size, 2), kernel("eq")]
    checks += any_of(rows) if p.dim() == 2 else []
    checks += [kernel("bitwise_not"), kernel("_assert_async"), kernel("exponential_", size), kernel("div", 3 * size)]
    if n == 1:
        return [*checks, kernel("argmax", size, 2)]
    return checks + top(rows, p.shape[-1], p.element_size(), n, True)


@rule("normal")
def _normal(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """normal_tensors: standard deviations in a tensor are checked twice, and each result is read back."""
    std = next((a for a in args[1:2] if isinstance(a, torch.Tensor)), None)
    if std is None:
        return [kernel("normal", nbytes(out))] if isinstance(out, torch.Tensor) else []
    check = [kernel("min", nbytes(std), 2), kernel("ge"), *read_back(1)]
    return [*check, *check, kernel("normal"), kernel("mul_", nbytes(std)), kernel("add_", nbytes(std))]


@rule("equal")
def _equal(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """equal*: eq, all, and one byte is read back, unless the answer is known without the values."""
    a, b = args[0], args[1]
    if known_equality(a, b) or a.numel() == 0:
        return []
    return [kernel("eq", 2 * nbytes(a)), *any_of(a.numel()), *read_back(1)]


def known_equality(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether shapes and addresses tell if `a` equals `b`: the shapes differ, or both share their memory."""
    return a.shape != b.shape or (a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.dtype == b.dtype)


@rule("repeat_interleave")
def _repeat_interleave(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """repeat_interleave_*: without output_size, the sum and the test that no repeat is negative are read back."""
    repeats = args[0]
    if repeats.numel() == 0:
        return []
    effects = scan(repeats)
    if kwargs.get("output_size") is None:
        effects += [*read_back(8), kernel("ge", nbytes(repeats)), *any_of(repeats.numel()), *read_back(1)]
    return [*effects, kernel("repeat_interleave", nbytes(out))]


def scan(source: torch.Tensor, rows: int = 1) -> list[Effect]:
    """cumsum_*: two kernels for a whole tensor, one for the rows of a tensor (ScanKernels.cpp)."""
    return (
        [kernel("cumsum"), kernel("cumsum", 2 * nbytes(source), 2)] if rows == 1 else [kernel("cumsum", 2 * nbytes(source), 2)]
    )


@rule("cumsum", "cumsum_", "cumprod", "cumprod_")
def _cumsum(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    source = args[0]
    if source.numel() == 0 or source.dim() == 0:
        return on_device(out, source)
    dtype = operand(args, kwargs, 2, "dtype") or (source.dtype if source.is_floating_point() else torch.int64)
    cast = [kernel("copy_", 9 * source.numel())] if dtype != source.dtype else []
    return cast + scan(source, source.numel() // source.shape[args[1]])


@rule("addmm", "baddbmm", "addmv")
def _addmm(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """addmm, linear_bias: a one-dimensional bias is an epilogue of the product; any other is copied to the result first."""
    bias, a, b = args[0], args[1], args[2]
    product = gemm("addmm", a, b, out)
    row = bias.dim() == 1 and bias.is_contiguous() and a.dim() == 2 == b.dim() and bias.shape[0] == b.shape[-1]
    if (row and min(b.shape) > 1) or kwargs.get("beta", 1) == 0 or out.numel() == 0:
        return product
    return [*on_device(out, bias), *product]


@rule("mm", "bmm", "mv", "addmv_", "_int_mm", "_scaled_mm")
def _mm(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    pair = args[1:3] if len(args) > 2 and isinstance(args[2], torch.Tensor) and args[0].dim() == 1 else args[:2]
    return gemm("mm", pair[0], pair[1], out if isinstance(out, torch.Tensor) else kwargs["out"])


def gemm(name: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> list[Effect]:
    """Return one matrix product, on tensor cores for 16-bit and 8-bit dtypes (by default fp32 does not use them)."""
    if out.numel() == 0 or a.numel() == 0:
        return [kernel("fill_", nbytes(out))] if out.numel() else []
    peak = "bf16_flops" if a.element_size() <= 2 else "fp32_flops"
    moved, flops = nbytes(a) + nbytes(b) + nbytes(out), 2.0 * out.numel() * a.shape[-1]
    return [Effect("kernel", 0, name, flops=flops, moved_bytes=moved, peak=peak, floor=2.1, cost="library_host_ns")]


@rule("_grouped_mm")
def _grouped_mm(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """bf16: one kernel for all groups. Other dtypes: the offsets are read back, then one product per group (GroupedMMUtils.h).

    Measured: `tests/programs/h200.json`, experts.*.
    """
    a, b, offsets = args[0], args[1], operand(args, kwargs, 2, "offs")
    if a.dtype == torch.bfloat16:
        return gemm("_grouped_mm", a, b, out)
    groups = offsets.numel() if offsets is not None else a.shape[0]
    read = [d2h(nbytes(offsets), False), WAIT] if offsets is not None else []
    products = [e._replace(flops=e.flops / groups, moved_bytes=e.moved_bytes // groups) for e in gemm("mm", a, b, out)]
    return [*read, *(products * groups)]


@rule("_fft_c2r")
def _fft_c2r(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """The operand is cloned first, because cuFFT overwrites it (cuda/SpectralOps.cpp; tests/programs, spectral.*)."""
    source = args[0]
    clone = torch.empty_like(source, memory_format=torch.contiguous_format, device="meta")
    return [*on_device(clone, source), kernel("_fft_c2r", nbytes(source) + nbytes(out), 2), kernel("mul_", 2 * nbytes(out))]


@rule("fake_quantize_per_channel_affine_cachemask")
def _fake_quantize(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """The smallest and the largest zero point are read back (FakeQuantPerChannelAffine.cpp)."""
    bounds = [e for name in ("min", "max") for e in (kernel(name, nbytes(args[2]), 2), *read_back(args[2].element_size()))]
    return [*(bounds if not args[2].is_floating_point() else []), *[kernel("fake_quantize", 2 * nbytes(args[0]))] * 2]


@rule("_ctc_loss", "_ctc_loss_backward")
def _ctc_loss(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """The targets are read back; offsets and two kinds of lengths are uploaded (LossCTC.cu; h200.json, audio.ctc_training)."""
    at = 1 if args[1].dtype in (torch.int32, torch.int64) else 2  # the backward has the gradient before them
    read = [d2h(nbytes(args[at]), False), WAIT]
    lengths = [h2d(8 * args[at - 1].shape[1], False), WAIT] * 3
    return [*read, *lengths, kernel("_ctc_loss", 2 * nbytes(args[at - 1]), 3)]


@rule("linalg_solve_triangular")
def _solve_triangular(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """The right-hand side is copied to the result, which is solved in place (BatchLinearAlgebra.cpp)."""
    return [*on_device(out, args[1]), kernel("linalg_solve_triangular", nbytes(args[0]) + 2 * nbytes(out), 3)]


@rule("_cholesky_solve_helper")
def _cholesky_solve(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """Both operands are cloned by columns (cloneBatchedColumnMajor); the first clone becomes the result."""
    return [e for x in args[:2] for e in on_device(_by_columns(x), x)] + [kernel("cholesky_solve", 2 * nbytes(args[1]), 3)]


def _by_columns(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor without values of the shape of `x`, with contiguous columns."""
    return torch.empty_like(x.mT, memory_format=torch.contiguous_format, device="meta").mT


@rule("_linalg_solve_ex")
def _solve(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """A matrix on the right is copied to the result by a kernel; a vector is copied twice, through a temporary (h200.json,
    numeric.option_pricing)."""
    a, b = args[0], args[1]
    moves = [d2d(nbytes(b))] * 2 if b.dim() < a.dim() else on_device(_by_columns(b), b)
    return [*moves, *[kernel("_linalg_solve_ex", nbytes(a))] * 11]


@rule("_linalg_det", "_linalg_slogdet")
def _det(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """det: the matrix is copied for its LU factors, then fourteen small kernels run. slogdet has the same factors
    (LinearAlgebra.cpp, _linalg_slogdet_out)."""
    matrix = args[0]
    move = d2d(nbytes(matrix)) if matrix.is_contiguous() else kernel("copy_", 2 * nbytes(matrix))
    return [move, memset(32), *[kernel("linalg_lu_factor_ex")] * 6, *[kernel("_linalg_det")] * 8]


@rule("native_batch_norm", "_native_batch_norm_legit_no_training")
def _batch_norm(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """batch_norm_eval: the running mean is copied to the saved mean. cuDNN, for three and more dimensions, copies none."""
    training = len(args) > 5 and args[5] is True
    mean = args[3] if len(args) > 3 and isinstance(args[3], torch.Tensor) else None
    saved = [] if training or mean is None or args[0].dim() > 2 else [d2d(nbytes(mean))]
    return [*saved, kernel("native_batch_norm", nbytes(args[0])), kernel("native_batch_norm", 2 * nbytes(args[0]))]


@rule("_foreach_copy_")
def _foreach_copy(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """foreach_copy*: one kernel on the device; one copy per tensor from the host."""
    targets, sources = args[0], args[1]
    if all(not s.is_cpu for s in sources) and all(not t.is_cpu for t in targets):
        return [kernel("_foreach_copy_", 2 * sum(map(nbytes, targets)))]
    non_blocking = bool(operand(args, kwargs, 2, "non_blocking", False))
    return [e for t, s in zip(targets, sources, strict=True) for e in copy(t, s, non_blocking)]
