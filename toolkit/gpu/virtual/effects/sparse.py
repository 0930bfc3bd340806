"""Effects of the kernels for sparse tensors, which `torch_backend/sparse.py` calls.

Sources: ATen/native/sparse/cuda (SparseCUDATensor.cu, SparseCUDATensorMath.cu, SparseBlasImpl.cpp), and the programs
graphs.gcn_training, graphs.pagerank and numeric.embedding_bags in tests/programs/h200.json.
"""

from __future__ import annotations

import math
from typing import Any

from toolkit.gpu.virtual.effects.effect import WAIT, Effect, d2d, d2h, kernel, nbytes
from toolkit.gpu.virtual.effects.operations import rule

MERGE_SORT_TILE = 2048  # pairs of 8 and 8 bytes that one block sorts (CUB, DeviceMergeSort)


@rule("vgpu::flatten_indices")
def _flatten_indices(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """The result is filled by arange, then overwritten (FlattenIndicesCommon.h)."""
    return [kernel("arange", nbytes(out)), kernel("flatten_indices", nbytes(args[0]) + 2 * nbytes(out))]


@rule("vgpu::distinct_entries")
def _distinct_entries(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """Positions, two sequences, a sort by position, and a selection whose length is read back. Thrust waits after each."""
    indices, order = args[0], out[1]
    size = nbytes(order)
    flat = [d2d(size)] if len(indices) == 1 else _flatten_indices(args, kwargs, order)
    sequence = [kernel("copy_", size), WAIT]
    passes = math.ceil(math.log2(max(order.numel() / MERGE_SORT_TILE, 1)))
    merges = [kernel("sort"), kernel("sort", 4 * size)] * passes
    select = [kernel("unique"), kernel("unique", 2 * size), WAIT, d2h(4, False), WAIT]
    return [*flat, *sequence, *sequence, kernel("sort", 4 * size), *merges, WAIT, *select]


@rule("vgpu::sum_entries", "vgpu::add_entries_")
def _entries(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    return [kernel("coalesce", sum(nbytes(x) for x in args[:3]))]


@rule("vgpu::spmm_")
def _spmm(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """cuSPARSE: the rows are divided among the blocks, then multiplied."""
    return [kernel("spmm", nbytes(args[1])), kernel("spmm", sum(nbytes(x) for x in args[:5]), 2)]
