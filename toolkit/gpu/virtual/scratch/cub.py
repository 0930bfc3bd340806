"""Sizes in bytes of the temporary storage that CUB's device-wide algorithms ask for.

The formulas follow the dispatch code of CUB (DeviceScan, DeviceReduce, DeviceSelect, DeviceRunLengthEncode, DeviceRadixSort).
Their constants, such as the elements per tile, were fitted to the sizes that PyTorch 2.11 with CUDA 13.0 requested from its
allocator on an H200.
"""

from __future__ import annotations

import math

import torch

from toolkit.gpu.virtual.effects.operations import SMALL_SORT
from toolkit.gpu.virtual.scratch.script import Free, Script, Take, brief

SMS = 132  # multiprocessors of an H200 and an H100, which determine the size of a grid
_ALIGNMENT = 256  # AliasTemporaries aligns the storage, and each of its parts
_EXTRA_TILES = 32  # a decoupled look-back reads the status of one warp of tiles before the first

# Elements per tile, by bytes of the element or the key where the tile depends on it.
_SCAN_TILE = {4: 1920, 8: 896}
_HALF_SCAN_TILE = 3840
FLAGS_SCAN_TILE = 3072  # the scan that numbers the distinct values of a sorted array
_SELECT_TILE = {1: 6528, 2: 1280, 4: 6528, 8: 4224}
RUNS_TILE = 384  # DeviceRunLengthEncode
DISTINCT_ROWS_TILE = 320  # unique_by_key in Thrust, with a comparison of rows
_COUNT_TILE = 4096
_SORT_PAIRS_TILE = {1: 3456, 2: 5632, 4: 5376, 8: 4608}  # the values have 8 bytes
_SORT_KEYS_TILE = {1: 9728, 2: 9728, 4: 6912, 8: 5760}
_SORT_INT32_KEYS_TILE = 7296
_SORT_SEGMENTS_TILE = 5760
_ONE_BLOCK_SORT = {1: 4864, 2: 4864, 4: 4864, 8: 2304}  # most elements that one block sorts: 256 threads of 19 or 9 each

# Onesweep radix sort: bits per pass, bytes of a pass's digit counts (256 of 8 bytes), and of a tile's look-back (256 of 4).
_RADIX_BITS, _PASS_BYTES, _LOOK_BACK_BYTES = 8, 2048, 1024
_MANY_SEGMENTS = 128  # from this number of rows on, each row is sorted separately (Sort.cu)


def up(n_bytes: int) -> int:
    """Return `n_bytes` rounded up to the alignment of CUB's storage."""
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT


def storage_bytes(*parts: int) -> int:
    """Return the bytes of aligned `parts`, of the part of one byte that every algorithm has, and of aligning the storage."""
    return _ALIGNMENT - 1 + _ALIGNMENT + sum(map(up, parts))


def _tiles(n: int, tile: int) -> int:
    return _EXTRA_TILES + math.ceil(n / tile)


def scan_bytes(n: int, dtype: torch.dtype) -> int:
    """Return the bytes of DeviceScan over `n` elements: status and value of each tile, in one word for primitive types."""
    if dtype.itemsize < 4 and dtype.is_floating_point:  # not a primitive type: status, sum and prefix are three arrays
        tiles = _tiles(n, _HALF_SCAN_TILE)
        return storage_bytes(4 * tiles, 2 * tiles, 2 * tiles)
    size = 8 if dtype.itemsize == 8 else 4
    return storage_bytes(2 * size * _tiles(n, _SCAN_TILE[size]))


ONE_TILE_SCAN_BYTES = scan_bytes(1, torch.int64)


def count_bytes(n: int) -> int:
    """Return the bytes of DeviceReduce counting `n` flags: a partial count per resident block; one byte for a single tile."""
    return 1 if n <= _COUNT_TILE else _ALIGNMENT - 1 + up(SMS * 8 * 5 * 4)


def status_bytes(n: int, tile: int) -> int:
    """Return the bytes of DeviceSelect, DeviceRunLengthEncode or a scan of flags: a status of 8 bytes for each tile."""
    return storage_bytes(8 * _tiles(n, tile))


def select_bytes(n: int, itemsize: int = 8) -> int:
    """Return the bytes of DeviceSelect over `n` values of `itemsize` bytes, or over 8-byte positions selected by flags."""
    return status_bytes(n, _SELECT_TILE[itemsize])


def _onesweep_bytes(n: int, tile: int, bits: int, *buffers: int) -> int:
    """Return the bytes of a onesweep sort by `bits`. Several passes alternate between the result and `buffers`."""
    passes = math.ceil(bits / _RADIX_BITS)
    return storage_bytes(_LOOK_BACK_BYTES * math.ceil(n / tile), _PASS_BYTES * passes, *(buffers if passes > 1 else ()))


def sort_pairs_bytes(n: int, itemsize: int, bits: int | None = None) -> int:
    """Return the bytes of DeviceRadixSort of `n` keys with 8-byte values, by the lowest `bits` (default: all; bool has one)."""
    if n <= _ONE_BLOCK_SORT[8]:
        return 1
    bits = (1 if itemsize == 1 else 8 * itemsize) if bits is None else max(bits, 1)
    return _onesweep_bytes(n, _SORT_PAIRS_TILE[itemsize], bits, itemsize * n, 8 * n)


def sort_keys_bytes(n: int, dtype: torch.dtype) -> int:
    """Return the bytes of DeviceRadixSort of `n` keys without values."""
    size = dtype.itemsize
    if n <= _ONE_BLOCK_SORT[size]:
        return 1
    return _onesweep_bytes(n, _SORT_INT32_KEYS_TILE if dtype == torch.int32 else _SORT_KEYS_TILE[size], 8 * size, size * n)


def sort_script(n: int, rows: int, itemsize: int, *, strided: bool) -> Script:
    """Return the temporaries of torch.sort for `n` elements in `rows` rows (Sort.cpp, Sort.cu).

    `strided` says that the sorted dimension is not contiguous.
    """
    length = n // rows
    indices, values = Take(8 * n), Take(itemsize * n)
    if length <= SMALL_SORT:
        return [Take(8 * length)]
    if rows == 1:
        return [indices, *brief(sort_pairs_bytes(n, itemsize)), Free(indices)]
    copies = [values, values, indices] if strided else []
    if rows >= _MANY_SEGMENTS:  # DeviceSegmentedSort
        return [*copies, indices, *brief(_ALIGNMENT - 1 + up(itemsize * n) + up(8 * n))]
    sort_all, sort_rows = sort_pairs_bytes(n, itemsize), _onesweep_bytes(n, _SORT_SEGMENTS_TILE, _RADIX_BITS)
    return [*copies, indices, indices, values, *brief(sort_all), Free(values), *brief(sort_rows)]
