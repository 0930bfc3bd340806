# mypy: allow-untyped-calls, no-warn-return-any, no-warn-unused-ignores
# (PyTorch's extension points carry no types.)
"""The kernels of CUDA's operations on sparse tensors, as operations on their parts: `torch.ops.vgpu.*`.

`HOSTS` has how each is computed, `effects/sparse.py` and `scratch/sparse.py` have what it does on a CUDA device.
"""

from __future__ import annotations

from typing import Any

import torch

from toolkit.gpu.virtual.host_kernels import HOSTS

Tensor = torch.Tensor
kernels = torch.ops.vgpu
_SCHEMAS = (
    "flatten_indices(Tensor indices, int[] size) -> Tensor",
    "distinct_entries(Tensor indices, int[] size) -> (Tensor, Tensor, Tensor)",
    "sum_entries(Tensor values, Tensor order, Tensor starts) -> Tensor",
    "add_entries_(Tensor(a!) self, Tensor indices, Tensor values, Scalar alpha) -> Tensor(a!)",
    "spmm_(Tensor(a!) self, Tensor rows, Tensor columns, Tensor values, Tensor other, Scalar beta, Scalar alpha) -> Tensor(a!)",
)


def row_offsets(rows: Tensor, m: int) -> Tensor:
    """Return the CSR offsets [M + 1] in int32 of sorted row numbers (_to_csr_int in SparseCUDATensorMath.cu)."""
    offsets = rows.new_empty(m + 1, dtype=torch.int32)
    return torch.ops.aten._convert_indices_from_coo_to_csr.out(rows.to(torch.int32), m, out_int32=True, out=offsets)


def _flatten_indices(indices: Tensor, size: list[int]) -> Tensor:
    """Return the positions [N] of indices [D, N] in a tensor of `size`."""
    flat = torch.zeros_like(indices[0])
    for row, length in zip(indices, size, strict=True):
        flat = flat * length + row
    return flat


def _distinct_entries(indices: Tensor, size: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct positions [K] of indices [D, N], the order [N] that sorts them, and where in it each begins [K].

    As on CUDA, the storage of all three has room for N numbers.
    """
    flat, order = _flatten_indices(indices, size).sort(stable=True)
    first = torch.ones_like(flat, dtype=torch.bool)
    first[1:] = flat[1:] != flat[:-1]
    starts = first.nonzero().squeeze(1)
    distinct = flat[starts]
    for part in (distinct, starts):
        part.untyped_storage().resize_(flat.nbytes)
    return distinct, order, starts


def _sum_entries(values: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    """Return the sums [K, ...] of `values` [N, ...] of equal positions, in fp32 for half precision."""
    out = values.new_zeros(len(starts), *values.shape[1:], dtype=torch.float32 if _is_half(values) else values.dtype)
    if not values.is_meta:
        lengths = torch.diff(starts, append=starts.new_tensor([len(order)]))
        out.index_add_(0, torch.arange(len(starts)).repeat_interleave(lengths), values[order].to(out.dtype))
    return out.to(values.dtype)


def _is_half(values: Tensor) -> bool:
    return values.dtype in (torch.float16, torch.bfloat16)


def _add_entries_(out: Tensor, indices: Tensor, values: Tensor, alpha: Any) -> Tensor:
    """Add alpha times `values` [N, ...] to `out` at distinct indices [D, N]."""
    return out if out.is_meta or values.is_meta else out.index_put_(tuple(indices), values * alpha, accumulate=True)


def _spmm_(
    out: Tensor, offsets: Tensor, columns: Tensor, values: Tensor, other: Tensor, beta: Any, alpha: Any
) -> Tensor:  # fmt: skip
    """out [M, N] = beta out + alpha times the CSR matrix of offsets, columns and values, times `other` [K, N]."""
    if out.is_meta or values.is_meta or other.is_meta:
        return out
    matrix = torch.sparse_csr_tensor(offsets, columns, values, (out.size(0), other.size(0)))
    product = (matrix.to_dense() if _is_half(values) else matrix) @ other
    return out.copy_(product * alpha) if beta == 0 else out.mul_(beta).add_(product, alpha=alpha)


def register() -> torch.library.Library:
    """Define the operations. The caller keeps the library alive."""
    library = torch.library.Library("vgpu", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    HOSTS["vgpu::flatten_indices"] = _flatten_indices
    HOSTS["vgpu::distinct_entries"] = _distinct_entries
    HOSTS["vgpu::sum_entries"] = _sum_entries
    HOSTS["vgpu::add_entries_"] = _add_entries_
    HOSTS["vgpu::spmm_"] = _spmm_
    return library
