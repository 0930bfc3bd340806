"""Copies inside singular value, eigenvalue and QR decompositions of one matrix on cuSOLVER.

Source: decompositions of 60 shapes of random matrices in fp32 and fp64 on an H200, with PyTorch 2.11 and CUDA 13.0. Jacobi's
method reads back its error after each sweep. How many sweeps it makes depends on the values: those of random matrices are
modelled. fp32 eigenvalues of 32 and more columns are also found by Jacobi's method.
"""

from __future__ import annotations

from typing import Any

import torch

from toolkit.gpu.virtual.effects.effect import Effect, d2d, kernel, nbytes, read_back
from toolkit.gpu.virtual.effects.operations import operand, rule

SMALL = 32  # rows and columns of matrices that one kernel decomposes (gesvdjBatched)
_FEW = 10  # columns


def _checked() -> list[Effect]:
    """The error codes are combined and read back."""
    return [d2d(1), *read_back(1)]


def _sweeps(n: int, itemsize: int) -> list[Effect]:
    count = 6 if n <= _FEW else 8 if n <= 100 else 10
    return read_back(itemsize) * (count + (itemsize == 8))


@rule("_linalg_svd")
def _svd(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    a, full, vectors = args[0], operand(args, kwargs, 1, "full_matrices", False), operand(args, kwargs, 2, "compute_uv", True)
    work = kernel("_linalg_svd", nbytes(a))
    if a.dim() > 2 or not a.numel():
        return [work]
    (m, n), size = a.shape, a.element_size()
    if max(m, n) <= SMALL:
        parts = [d2d(nbytes(a))] if m != n and vectors and not full else []
        return [work, *parts, *read_back(4), *_checked()]
    k = min(m, n)
    values = [d2d(k * size)]
    if k > SMALL:
        values += [d2d(4 * k), *read_back(4), d2d(k * size)]
    parts = [d2d(nbytes(a))] if m != n and vectors else []
    return [work, *_sweeps(k, size), *values, *parts, *read_back(4), *_checked()]


@rule("_linalg_eigh")
def _eigh(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    a = args[0]
    work, n, size = kernel("_linalg_eigh", nbytes(a)), a.shape[-1], a.element_size()
    if a.dim() > 2 or not a.numel() or (a.dtype == torch.float32 and n >= SMALL):
        return [work]
    return [work, *read_back(size), *_checked()]


@rule("linalg_qr")
def _qr(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    a = args[0]
    m, n = a.shape[-2:]
    return [kernel("linalg_qr", nbytes(a)), *([d2d(m * m * a.element_size())] if a.dim() == 2 and m < n else [])]
