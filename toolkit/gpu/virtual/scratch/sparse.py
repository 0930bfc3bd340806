"""Temporaries of the kernels for sparse tensors, as measured in tests/programs/h200.json (see `effects/sparse.py`)."""

from __future__ import annotations

import math
from typing import Any

from toolkit.gpu.virtual.effects.sparse import MERGE_SORT_TILE
from toolkit.gpu.virtual.scratch import cub
from toolkit.gpu.virtual.scratch.script import MAKE_RESULTS, Args, Kwargs, Script, brief, scratch

_SPMM_BYTES = 23  # cuSPARSE's workspace, the same for all matrices that were measured


@scratch("vgpu::distinct_entries")
def _distinct_entries(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """Thrust's sort_by_key with a comparison (a merge sort), then its unique_by_key."""
    n = args[0].size(1)
    tiles = 8 * (1 + math.ceil(n / MERGE_SORT_TILE))  # where the tiles of a merge begin
    sort = cub.storage_bytes(8 * n, 8 * n) - cub.up(1) + cub.up(tiles)
    select = cub.status_bytes(n, cub.DISTINCT_ROWS_TILE) + 2 * cub.up(1)
    return [MAKE_RESULTS, *brief(sort), *brief(select)]


@scratch("vgpu::spmm_")
def _spmm(args: Args, kwargs: Kwargs, out: Any) -> Script:
    return brief(_SPMM_BYTES)
