# mypy: allow-untyped-calls, no-warn-return-any, no-warn-unused-ignores
# (PyTorch's extension points carry no types.)
"""Sparse tensors (COO, and compressed ones such as CSR) on the virtual GPU.

A sparse tensor is PyTorch's own, and its parts (indices, values) are tensors of the virtual GPU. For most operations, PyTorch
has one function for the CPU and CUDA, which consists of operations on the parts (COMPOSED). It runs here, and its parts arrive
in `dispatch`. The others (OWN) are written here like CUDA's (ATen/native/sparse/cuda). All the rest is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from toolkit.gpu.virtual.dispatch import SPARSE, SPECIAL, devices_differ
from toolkit.gpu.virtual.operands import tensors_in
from toolkit.gpu.virtual.torch_backend import sparse_kernels
from toolkit.gpu.virtual.torch_backend.sparse_kernels import kernels, row_offsets

aten = torch.ops.aten
Tensor = torch.Tensor
_KEYS = torch._C.DispatchKey
_COO, _COMPRESSED, _STRIDED = _KEYS.SparseCPU, _KEYS.SparseCsrCPU, _KEYS.CPU
_COMPOSITES = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")
_OURS = {"SparsePrivateUse1": _COO, "SparseCsrPrivateUse1": _COMPRESSED}  # dispatch key -> key of PyTorch's implementation

# Operations that have one function for the CPU and CUDA in native_functions.yaml, and call no kernels except through others.
_BY_VALUE = {
    "abs", "asin", "asinh", "atan", "atanh", "ceil", "conj_physical", "deg2rad", "erf", "erfinv", "expm1", "floor", "frac",
    "isinf", "isnan", "isneginf", "isposinf", "log1p", "neg", "rad2deg", "relu", "round", "sgn", "sign", "signbit", "sin",
    "sinh", "sqrt", "tan", "tanh", "threshold_backward", "trunc",
}  # fmt: skip
_MATRICES = (torch.sparse_coo, torch.sparse_csr)
_CROSSING = {"copy_", "copy_sparse_to_sparse_", "empty_like"}  # between the host and the device
_BY_DIMENSION = {"_coalesce", "_to_dense", "add", "mul"}  # go through the indices of each sparse dimension
_STRUCTURE = {
    "empty", "empty_like", "clone", "copy_", "zero_", "resize_as_sparse_", "sparse_dim", "dense_dim", "_nnz", "values",
    "_to_dense", "_to_sparse", "_to_sparse_csr", "_to_sparse_csc", "mm",
}  # fmt: skip
COMPOSED: dict[Any, set[str]] = {
    _COO: _BY_VALUE | _STRUCTURE | {
        "_coalesced_", "_dimI", "_dimV", "_indices", "_sparse_broadcast_to", "_sparse_coo_tensor_with_dims",
        "_sparse_coo_tensor_with_dims_and_tensors", "_values", "add", "any", "cat", "copy_sparse_to_sparse_", "div",
        "floor_divide", "indices", "is_coalesced", "mul", "mv", "nan_to_num", "narrow_copy", "native_norm", "norm", "permute",
        "pow", "sparse_mask", "sparse_resize_", "sparse_resize_and_clear_", "sub", "sum", "unsqueeze", "zeros",
    },
    _COMPRESSED: _BY_VALUE | _STRUCTURE | {
        "addmm", "ccol_indices", "col_indices", "crow_indices", "fill_", "mul", "resize_", "row_indices",
    },
}  # fmt: skip


# ---- operations that CUDA implements itself


def _coalesce(self: Tensor) -> Tensor:
    """Sum the values of equal indices: sort by flattened index, read back how many are distinct (SparseCUDATensor.cu)."""
    size, dims = self.size(), self.sparse_dim()
    if self._nnz() < 2:
        return self.clone()._coalesced_(True)
    flat, order, starts = kernels.distinct_entries(self._indices(), size[:dims])
    values = kernels.sum_entries(self._values().contiguous(), order, starts)
    if dims == 1:
        indices = flat.unsqueeze(0)
    else:
        indices = flat.new_empty(dims, len(flat))
        for d in reversed(range(dims)):
            row = indices.narrow(0, d, 1).squeeze(0)
            row.copy_(flat)
            flat.divide_(size[d], rounding_mode="trunc")
            row.add_(flat, alpha=-size[d])
    return aten._sparse_coo_tensor_unsafe(indices, values, size, is_coalesced=True)


def _clone(self: Tensor, *, memory_format: Any = None) -> Tensor:
    """Copy the parts. But those of a new gradient are shared, as by CUDA's AccumulateGrad.

    PyTorch copies them here, since it only shares parts without a Python object (use_count in accumulate_grad.h).
    """
    node = torch._C._current_autograd_node()
    if node is not None and node.name() == "torch::autograd::AccumulateGrad" and not torch.is_grad_enabled():
        indices, values = self._indices(), self._values()
        if indices.is_contiguous() and values.is_contiguous():
            return aten._sparse_coo_tensor_unsafe(indices, values, self.size())
    return aten.clone.default._op_dk(_COO, self, memory_format=memory_format)


def _addmm(self: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    return _addmm_out(self, a, b, beta=beta, alpha=alpha, out=self.new_empty(0))


def _addmm_(self: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    return _addmm_out(self, a, b, beta=beta, alpha=alpha, out=self)


def _addmm_out(self: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Tensor) -> Tensor:
    """out = beta self + alpha a b, for COO `a` [M, K] and strided `b` [K, N], by cuSPARSE (SparseCUDATensorMath.cu)."""
    _check_product(self, a, b, out)
    (m, _), n = a.size(), b.size(1)
    term = self if self is out else self.expand(m, n)
    out.resize_(m, n)
    a = a.coalesce()
    rows, columns = a._indices()
    offsets = row_offsets(rows, m)
    columns = columns.to(torch.int32)
    return _multiply_(out, term, offsets, columns, a._values(), b, beta, alpha)


def _multiply_(
    out: Tensor, term: Tensor, offsets: Tensor, columns: Tensor, values: Tensor, b: Tensor, beta: Any, alpha: Any
) -> Tensor:  # fmt: skip
    """out = beta term + alpha times the CSR matrix, times b. cuSPARSE writes columns, so that rows are copied to and fro."""
    m, n = out.size()
    if beta == 0:
        out.zero_()
    elif term is not out:
        out.copy_(term)
    by_columns = out.stride(0) == 1 and out.stride(1) == m
    product = out if by_columns else out.t().clone(memory_format=torch.contiguous_format).t()
    if len(values):
        in_rows, in_columns = b.stride(1) == 1 and b.stride(0) != n, b.stride(0) == 1 and b.stride(1) == b.size(0)
        b = b if in_rows or in_columns else b.contiguous()
        kernels.spmm_(product, offsets, columns, values, b, beta, alpha)
    return out if by_columns else out.copy_(product)


def _compressed_addmm_out(self: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Tensor) -> Tensor:
    """out = beta self + alpha a b, for CSR `a` [M, K] and strided `b` [K, N] (SparseBlasImpl.cpp, spmm).

    Measured: a product without a term copies none (tests/programs/h200.json, graphs.pagerank).
    """
    _check_product(self, a, b, out)
    shape = (a.size(0), b.size(1))
    if self is not out:
        out.resize_(shape)
        if beta != 0:
            out.copy_(self.expand(shape))
    if not out.numel():
        return out
    if not a._nnz() or not b.numel():
        return out.zero_() if beta == 0 else out.mul_(beta)
    result, b = _for_library(out), _for_library(b)
    kernels.spmm_(result, a.crow_indices(), a.col_indices(), a.values(), b, beta, alpha)
    return out if result is out else out.copy_(result)


def _compressed_addmm_(self: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    return _compressed_addmm_out(self, a, b, beta=beta, alpha=alpha, out=self)


def _for_library(x: Tensor) -> Tensor:
    """Return a matrix whose rows or columns are contiguous."""
    (rows, columns), (down, across) = x.size(), x.stride()
    fits = (across == 1 and down >= max(columns, 1)) or (down == 1 and across >= max(rows, 1))
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _check_product(self: Tensor, a: Tensor, b: Tensor, out: Tensor) -> None:
    """Raise RuntimeError unless a product is of a sparse matrix [M, K] and a strided one [K, N], as CUDA supports it."""
    if any(x.layout is not torch.strided for x in (self, b, out)) or a.layout not in _MATRICES:
        raise _refusal("addmm, except of a COO or CSR matrix and a strided one")
    if a.dim() != 2 or a.dense_dim() or b.dim() != 2 or a.size(1) != b.size(0):
        raise RuntimeError(f"addmm: shapes {tuple(a.shape)} and {tuple(b.shape)} can't be multiplied")
    half = a.dtype in (torch.float16, torch.bfloat16)
    if not (a.is_floating_point() or a.is_complex()) or (half and a.layout is torch.sparse_coo):
        raise NotImplementedError(f"the product of a {a.layout} matrix is not implemented for {a.dtype} on CUDA")


def _add_out(self: Tensor, other: Tensor, *, alpha: Any = 1, out: Tensor) -> Tensor:
    """out = self + alpha other, for a sparse `other` (SparseCUDATensorMath.cu). The sum of two is not coalesced."""
    if self.layout is torch.strided:
        return _add_to_strided(self, other, alpha, out)
    if other.layout is not torch.sparse_coo:
        raise RuntimeError("add(sparse, dense) is not supported. Use add(dense, sparse) instead.")
    if self.size() != other.size() or self.sparse_dim() != other.sparse_dim():
        raise RuntimeError(f"add: sizes {tuple(self.size())} and {tuple(other.size())}, or their sparse dimensions, differ")
    if not other._nnz():
        return aten.copy_sparse_to_sparse_(out, self)
    if not self._nnz():
        return torch.mul(other, alpha, out=out)
    dtype = torch.result_type(self, other)
    if out.dtype != dtype:
        raise _refusal("add of sparse tensors into another dtype")
    values = other._values().to(dtype)
    values = values if alpha == 1 else values.mul(alpha)
    indices = torch.cat([self._indices(), other._indices()], 1)
    values = torch.cat([self._values().to(dtype), values], 0)
    _replace(out, indices, values, other)
    if out._nnz() > out.numel():
        summed = out.coalesce()
        _replace(out, summed._indices(), summed._values(), other)
    return out


def _replace(out: Tensor, indices: Tensor, values: Tensor, like: Tensor) -> None:
    """Make `indices` and `values` the parts of `out`."""
    made = aten._sparse_coo_tensor_unsafe(indices, values, like.size(), is_coalesced=False)
    torch.Tensor.data.__set__(out, made)  # type: ignore[attr-defined]


def _add_to_strided(self: Tensor, other: Tensor, alpha: Any, out: Tensor) -> Tensor:
    if self.size() != other.size():
        raise RuntimeError(f"add: expected equal sizes, but found {tuple(self.size())} and {tuple(other.size())}")
    if not other._nnz():
        return out.resize_as_(self).copy_(self)
    dtype = torch.result_type(self, other)
    result = out if out.dtype == dtype else torch.empty_like(self, dtype=dtype)
    term, values = self.to(dtype), other._values().to(dtype)
    if result is not term:
        result.resize_as_(self).copy_(term)
    elif not result.is_contiguous():
        raise RuntimeError("add: CUDA dense-sparse addition with a non-contiguous output tensor does not work")
    if values.numel():
        dims = other.sparse_dim()
        if other.is_coalesced():
            kernels.add_entries_(result, other._indices(), values.contiguous(), alpha)
        else:
            indices = other._indices()
            flat = indices.squeeze(0) if dims == 1 else kernels.flatten_indices(indices, self.size()[:dims])
            rows = result.view(self.size()[:dims].numel(), self.size()[dims:].numel())
            rows.index_add_(0, flat, values.reshape(len(flat), -1), alpha=alpha)
    return out if result is out else out.copy_(result)


def _mul_out(self: Any, other: Any, *, out: Tensor) -> Tensor:
    """The product with a strided tensor, or with one without dimensions, consists of operations on the parts."""
    sparse = [x for x in (self, other) if isinstance(x, Tensor) and x.layout is torch.sparse_coo and x.dim()]
    if len(sparse) == 2:
        raise _refusal("the product of two sparse tensors element by element")
    return aten.mul.out._op_dk(_COO, self, other, out=out)


OWN: dict[Any, dict[str, Callable[..., Tensor]]] = {
    _COO: {
        "_coalesce": _coalesce, "clone": _clone, "addmm": _addmm, "addmm_": _addmm_, "addmm.out": _addmm_out,
        "add.out": _add_out, "mul.out": _mul_out,
    },
    _COMPRESSED: {"addmm.out": _compressed_addmm_out, "addmm_": _compressed_addmm_},
}  # fmt: skip


# ---- dispatch


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation with a sparse operand. Raises RuntimeError if it isn't supported."""
    layouts = {x.layout for x in tensors_in((args, kwargs))}
    return _run(_COO if layouts <= {torch.strided, torch.sparse_coo} else _COMPRESSED, func, *args, **kwargs)


def _run(key: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation whose implementation on the CPU has the dispatch key `key`."""
    name, overload = func._schema.name.removeprefix("aten::"), func._overloadname
    sparse = [x for x in tensors_in((args, kwargs)) if x.layout is not torch.strided]
    if name.removesuffix("_") in _BY_DIMENSION and sparse and not any(x.dim() for x in sparse):
        raise _refusal(name.strip("_"), "a sparse tensor without dimensions", "Use its number, x.item()")
    if name not in _CROSSING and any(x.is_cpu and x.dim() for x in tensors_in((args, kwargs))):
        raise devices_differ(torch.device("cpu"))
    own = OWN[key].get(f"{name}.{overload}" if overload != "default" else name)
    if own is not None:
        return own(*args, **kwargs)
    if not _composed(name, key) or not _has_kernel(func.name(), key.name):
        raise _refusal(name)
    try:
        return func._op_dk(key, *args, **kwargs)
    except RuntimeError as error:
        if "DispatchStub: missing kernel" in str(error):
            raise _refusal(name) from None
        raise


_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key  # type: ignore[attr-defined]


def _composed(name: str, key: Any) -> bool:
    return name in COMPOSED[key] or name.removesuffix("_") in COMPOSED[key]


def _refusal(what: str, operand: str = "sparse tensors", instead: str = "Call to_dense() first") -> RuntimeError:
    return RuntimeError(
        f"the virtual GPU does not support this operation with {operand}: {what}. {instead}, or keep the sparse tensor on the "
        "CPU"
    )


def _with_composites(key: Any) -> list[Any]:
    """Return the operations that would run a composite instead of the fallback: `clone` has one for strided tensors."""
    found = []
    for full in torch._C._dispatch_get_registrations_for_dispatch_key(key.name):  # type: ignore[attr-defined]
        name, _, overload = full.removeprefix("aten::").partition(".")
        if any(_has_kernel(full, x) for x in _COMPOSITES):
            found.append(getattr(getattr(aten, name), overload or "default"))
    return found


def _handler(key: Any) -> Callable[[Any], Any]:
    """Return the handler of operations that make sparse tensors of strided ones."""
    return lambda func: lambda args, kwargs: func._op_dk(key, *args, **kwargs)


def register() -> list[torch.library.Library]:
    """Register the operations for sparse tensors of the virtual GPU. The caller keeps the libraries alive."""
    library, everything = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    for key, on_cpu in _OURS.items():
        everything.fallback(functools.partial(_run, on_cpu), key)
        for func in _with_composites(on_cpu):
            library.impl(func, functools.partial(_run, on_cpu, func), key)
    SPARSE[:] = [run]
    SPECIAL["_sparse_coo_tensor_with_dims_and_tensors"] = _handler(_COO)
    for name in ("_to_sparse", "_to_sparse_csr", "_to_sparse_csc", "_embedding_bag_backward"):
        SPECIAL[name] = _handler(_STRIDED)
    return [library, everything, sparse_kernels.register()]
