"""How much memory CUDA's libraries take for themselves inside an operation: the sizes of CUB's and of reductions' buffers.

A script says when temporaries are alive relative to the results: a number takes so many bytes, its negative gives the
latest such temporary back, `OUT` makes the results that are not made yet, `RESULT[i]` one of them. What is left is given
back when the operation ends. The formulas were fitted to what PyTorch 2.11 with CUDA 13.0 asked of its allocator on an
H200, and follow the dispatch of CUB (DeviceScan, DeviceReduce, DeviceSelect, DeviceRadixSort) and ATen/native/cuda/Reduce.cuh.
Numbers only; the operations are in `rules_scratch_ops`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

Script = list[int]
Rule = Callable[[tuple[Any, ...], dict[str, Any], Any], Sequence[int]]
SCRATCH: dict[str, Rule] = {}  # by the operation's name without "aten::" and overload
OUT = 0
RESULT = (1 << 62, (1 << 62) + 1, (1 << 62) + 2, (1 << 62) + 3)  # results one by one; no size is so large
SMS = 132  # of an H200 and H100: grids are sized by them
_ALIGNMENT = 256
_PADDING = 255 + _ALIGNMENT  # CUB aligns each part to 256 bytes, and the whole; a part of one byte is in every one
_STATUS_PADDING = 32  # tiles more than there are, which a look-back may read

_PRIMITIVE_SCAN = {4: (8, 1920), 8: (16, 896)}  # element bytes -> (bytes a tile, elements a tile)
_HALF_SCAN_TILE = 3840
_SELECT_TILE = {1: 6528, 2: 1280, 4: 6528, 8: 4224}
_PAIRS_TILE = {1: 3456, 2: 5632, 4: 5376, 8: 4608}  # by bytes of the key; the value has 8
_KEYS_TILE = {1: 9728, 2: 9728, 4: 6912, 8: 5760}
_INT_KEYS_TILE = 7296
_SEGMENT_PAIRS_TILE = 5760
_RUNS_TILE = 384
_FLAGS_TILE = 3072
_SINGLE_TILE = {1: 4864, 2: 4864, 4: 4864, 8: 2304}  # 256 threads of 19 elements, of 8 bytes: 9
_RADIX_BITS = 8
_COUNT_TILE = 4096


def scratch(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operations by name."""

    def register(function: Rule) -> Rule:
        SCRATCH.update(dict.fromkeys(names, function))
        return function

    return register


def up(n_bytes: int) -> int:
    """Rounded up to CUB's alignment."""
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT


def _tiles(n: int, size: int) -> int:
    return _STATUS_PADDING + math.ceil(n / size)


def scan_bytes(n: int, dtype: torch.dtype) -> int:
    """DeviceScan over `n` elements: a status and a value for each tile, in one word where that is possible."""
    size = dtype.itemsize
    if size < 4 and dtype.is_floating_point:  # half precision is no type of CUB's: status, sum and prefix lie apart
        tiles = _tiles(n, _HALF_SCAN_TILE)
        return _PADDING + up(4 * tiles) + 2 * up(2 * tiles)
    word, tile = _PRIMITIVE_SCAN[8 if size == 8 else 4]
    return _PADDING + up(word * _tiles(n, tile))


def flags_scan_bytes(n: int) -> int:
    """The scan of 0 and 1 that numbers distinct values, 4 bytes each."""
    return _PADDING + up(8 * _tiles(n, _FLAGS_TILE))


def count_bytes(n: int) -> int:
    """DeviceReduce that counts `n` flags: one tile needs nothing, more a partial count for each block the card can run."""
    return 1 if n <= _COUNT_TILE else 255 + up(SMS * 8 * 5 * 4)


def select_bytes(n: int, itemsize: int = 8) -> int:
    """DeviceSelect over `n` elements; flags, which select 8-byte positions, or values of `itemsize`."""
    return _PADDING + up(8 * _tiles(n, _SELECT_TILE[itemsize]))


def runs_bytes(n: int) -> int:
    """DeviceRunLengthEncode over `n` elements."""
    return _PADDING + up(8 * _tiles(n, _RUNS_TILE))


def _onesweep(n: int, tile: int, bits: int, buffers: int) -> int:
    passes = math.ceil(bits / _RADIX_BITS)
    look_back = 1024 * math.ceil(n / tile)
    return (buffers if passes > 1 else 0) + look_back + passes * 2048 + _PADDING


def sort_pairs_bytes(n: int, itemsize: int, bits: int | None = None) -> int:
    """DeviceRadixSort of `n` keys with 8-byte values, by the lowest `bits`."""
    if n <= _SINGLE_TILE[8]:
        return 1
    bits = (1 if itemsize == 1 else 8 * itemsize) if bits is None else max(bits, 1)
    return _onesweep(n, _PAIRS_TILE[itemsize], bits, up(itemsize * n) + up(8 * n))


def sort_keys_bytes(n: int, dtype: torch.dtype) -> int:
    """DeviceRadixSort of `n` keys alone."""
    size = dtype.itemsize
    if n <= _SINGLE_TILE[size]:
        return 1
    tile = _INT_KEYS_TILE if dtype == torch.int32 else _KEYS_TILE[size]
    return _onesweep(n, tile, 8 * size, up(size * n))


def sort_script(n: int, rows: int, itemsize: int, *, strided: bool) -> Script:
    """What sorting takes beside its results (Sort.cpp, Sort.cu): up to 4096 a row of indices, longer rows radix buffers."""
    length = n // rows
    if length <= 4096:
        return [8 * length]
    if rows == 1:
        return [8 * n, size := sort_pairs_bytes(n, itemsize), -size, -8 * n]
    before = [itemsize * n, itemsize * n, 8 * n] if strided else []
    if rows >= 128:  # each row by itself
        return [*before, 8 * n, size := 255 + up(itemsize * n) + up(8 * n), -size]
    # all rows at once, then back into their rows
    first, second = sort_pairs_bytes(n, itemsize), _onesweep(n, _SEGMENT_PAIRS_TILE, _RADIX_BITS, 0)
    return [*before, 8 * n, 8 * n, itemsize * n, first, -first, -itemsize * n, second, -second]


# ---- reductions (ATen/native/cuda/Reduce.cuh)

LEAST_GLOBAL = 32768  # elements below which no reduction is split over blocks
_THREADS = 512
_MOST_VALUES, _LEAST_VALUES = 256, 16  # a thread reads
_BLOCKS = 2048 // _THREADS  # a multiprocessor runs


def reduce_script(source: torch.Tensor, dims: Sequence[int] | None, acc_bytes: int) -> Script:
    """A reduction of `source` over `dims` (all, where None or empty): partial results, and a counter for each block column.

    Only where one output is worked on by several blocks; `acc_bytes` is what is kept for each partial result.
    """
    if source.numel() < LEAST_GLOBAL:
        return []
    reduced, kept = _merged(source, dims)
    inputs, outputs = math.prod(size for size, _ in reduced), math.prod(size for size, _ in kept)
    along = not kept or (bool(reduced) and reduced[0][1] < kept[0][1])  # is it the fastest dimension that is reduced?
    first, other = ((reduced[0][0], outputs) if reduced else (1, outputs)) if along else (kept[0][0], inputs)
    vector = 1
    if along and len(reduced) == 1 and not kept and reduced[0][1] == 1 and first > 128:
        first //= 4
    elif not along and kept[0][1] == 1:
        vector = _vector(kept, reduced)
        first //= vector
    width, height = _block(first, other, vector)
    step_in, step_out = (width, 1) if along else (1, width)
    if math.ceil(inputs / step_in) >= min(height * 16, _MOST_VALUES):
        step_in *= height
        split = True
    else:
        step_out *= height
        split = False
    values, columns = math.ceil(inputs / step_in), math.ceil(outputs // vector / step_out)
    target = SMS * (2048 // (width * height))
    if not split or values < _MOST_VALUES or columns > target:
        return []
    blocks = max(
        min(math.ceil(target / columns), math.ceil(values / _LEAST_VALUES)), math.ceil(values / _MOST_VALUES)
    )  # fmt: skip
    if blocks <= 1:
        return []
    size = acc_bytes * outputs * blocks * (1 if along else width * vector)
    return [size, 4 * columns, -4 * columns, -size]


def whole_script(n: int, acc_bytes: int) -> Script:
    """The reduction of `n` elements in a row to one."""
    return reduce_script(torch.empty(n, device="meta"), None, acc_bytes) if n >= LEAST_GLOBAL else []


def _merged(source: torch.Tensor, dims: Sequence[int] | None) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(size, stride) of the dimensions that are reduced and of those that stay, fastest first, merged where they can be."""
    rank = source.dim()
    over = {d % rank for d in dims} if dims and rank else set(range(rank))
    parts = [(size, stride, d in over) for d, (size, stride) in enumerate(zip(source.shape, source.stride(), strict=True))]
    result = []
    for wanted in (True, False):
        merged: list[tuple[int, int]] = []
        for size, stride, _ in sorted((p for p in parts if p[2] is wanted and p[0] != 1), key=lambda p: p[1]):
            if merged and merged[-1][0] * merged[-1][1] == stride:
                merged[-1] = (merged[-1][0] * size, merged[-1][1])
            else:
                merged.append((size, stride))
        result.append(merged)
    return result[0], result[1]


def _vector(kept: list[tuple[int, int]], reduced: list[tuple[int, int]]) -> int:
    """How many neighbouring outputs a thread works on."""
    vector = 4
    for n in (kept[0][0], *(stride for _, stride in (*kept[1:], *reduced))):
        while n % vector:
            vector //= 2
    return vector


def _block(first: int, other: int, vector: int) -> tuple[int, int]:
    most = _THREADS // vector
    wide, high = (1 << min(n, most).bit_length() - 1 if n else 1 for n in (first, other))
    height = min(high, most // min(wide, 32))
    return min(wide, most // height), height
