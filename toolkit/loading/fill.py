"""Copy weights from a checkpoint into allocated device memory, a few rows at a time, and convert them on the device.

Rows are copied as stored, directly from the mapped file. They are repacked, dequantized, quantized or cast on the device. The
additional device memory is bounded by `Filler.scratch_bytes`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from toolkit.core.progress import Counter
from toolkit.loading.layout import parts_of, stored_scheme
from toolkit.models.cuts import as_cut
from toolkit.models.places import Source, Spot, held_of, spot
from toolkit.weights.fitting import quantize_minmax
from toolkit.weights.packed import PackedMatrix, dequantize
from toolkit.weights.repacking import columns_of, from_stored
from toolkit.weights.schemes import Scheme
from toolkit.weights.stored import Stored, Weights

CHUNK_BYTES = 256 << 20  # copied at a time if nothing is converted
SCRATCH_BYTES = 256 << 20  # device memory for conversion; less if the largest weight is smaller
# Maximum scratch bytes per weight during conversion (measured by tests/loading/test_loading_int4.py).
UNPACKING, QUANTISING = 16, 24


@dataclass(frozen=True)
class Span:
    """Rows `r0` to `r1` of matrices `m0` to `m1` of a stack. Several matrices always have all of their rows."""

    m0: int
    m1: int
    r0: int
    r1: int


@dataclass(frozen=True)
class Piece:
    """A block of each matrix of a stored tensor, of `nbytes` bytes in all, and the block of our matrix that it fills."""

    stored_rows: range
    stored_columns: range
    rows: slice
    columns: slice
    nbytes: int

    def target(self, parts: Mapping[str, Tensor], scheme: Scheme | None) -> dict[str, Tensor]:
        """Return the memory of the block, as views of the `parts` of the whole weight."""
        per = {"values": 1} if scheme is None else {name: weights for name, (_, weights) in scheme.parts().items()}
        left, right = self.columns.start, self.columns.stop
        return {name: part[:, self.rows, left // per[name] : right // per[name]] for name, part in parts.items()}


@dataclass(frozen=True)
class Filler:
    """Copy stored weights into a model whose memory is allocated. A rank reads only the part that it holds."""

    weights: Weights
    device: torch.device
    scratch_bytes: int
    counter: Counter

    def fill(self, model: nn.Module, names: Mapping[str, Source]) -> None:
        """Copy every weight, in the order of the file, so that the disk is read sequentially."""

        def position(ours: str) -> tuple[str, int]:
            first = self.weights.find(names[ours].names[0])
            return first.path, first.start

        self.counter.begin(
            sum(
                piece.nbytes
                for ours, source in names.items()
                for stored in self._stored(source)
                for piece in pieces(stored, source, spot(model, ours))
            )
        )
        for ours in sorted(names, key=position):
            place, source = spot(model, ours), names[ours]
            scheme = place.weight.scheme if isinstance(place.weight, PackedMatrix) else None
            parts = parts_of(place)
            for i, stored in enumerate(self._stored(source)):
                single = len(source.names) == 1
                target = parts if single else {name: part[i : i + 1] for name, part in parts.items()}
                if source.change is not None or source.shape is not None:
                    self._whole(stored, source, place, target["values"])
                    continue
                for piece in pieces(stored, source, place):
                    self._rows(stored, piece, piece.target(target, scheme), scheme)

    def _stored(self, source: Source) -> Iterator[Stored]:
        return map(self.weights.find, source.names)

    def _whole(self, stored: Stored, source: Source, place: Spot, target: Tensor) -> None:
        """Copy a weight that is reshaped or transformed: as a whole, since it is never large, and converted through fp32."""
        values = self._values(stored, self._across(self.weights.raw(stored.name)), torch.float32)
        values = values.view(stored.shape if source.shape is None else source.shape)
        values = values if source.rows is None else values[..., source.rows, :]
        values = held_of(values, place.cuts)
        target.copy_((values if source.change is None else source.change(values)).view(target.shape))
        self.counter.step(sum(piece.nbytes for piece in pieces(stored, source, place)), stored.name)

    def _rows(self, stored: Stored, piece: Piece, target: Mapping[str, Tensor], scheme: Scheme | None) -> None:
        """Copy a piece of a matrix or of each matrix of a stack, a few rows at a time."""
        matrices, rows = next(iter(target.values())).shape[:2]
        height = stored.rows // matrices  # rows per stored matrix: more than `rows` if others have a part of them
        total, done, told = piece.nbytes, 0, 0
        exact = scheme is not None and scheme == stored_scheme(stored)
        columns = piece.stored_columns
        narrow = replace(stored, shape=(*stored.shape[:-1], len(columns))) if stored.shape else stored
        step = max(1, self._weights_at_once(stored, target, scheme) // stored.columns)
        for span in spans(matrices, rows, step, whole=height == rows):
            start = span.m0 * height + piece.stored_rows.start + span.r0
            raw = self.weights.raw(stored.name, start, start + (span.m1 - span.m0 - 1) * height + span.r1 - span.r0)
            raw = columns_of(stored, raw, columns)
            there = {name: part[span.m0 : span.m1, span.r0 : span.r1] for name, part in target.items()}
            if scheme is None:
                self._put_plain(narrow, raw, there["values"])
            else:
                found = self._packed(narrow, self._across(raw), scheme, exact)
                for name, part in there.items():
                    part.copy_(found[name].view(part.shape))
            done += (span.m1 - span.m0) * (span.r1 - span.r0)
            step_bytes = total * done // (matrices * rows) - told
            told += step_bytes
            self.counter.step(step_bytes, stored.name)

    def _weights_at_once(self, stored: Stored, target: Mapping[str, Tensor], scheme: Scheme | None) -> int:
        """Return how many weights can be copied together within the scratch memory."""
        if scheme is not None:
            return self.scratch_bytes // (UNPACKING if scheme == stored_scheme(stored) else QUANTISING)
        if stored.dtype is None:
            return self.scratch_bytes // UNPACKING
        if stored.dtype == target["values"].dtype:
            return CHUNK_BYTES // stored.dtype.itemsize
        return self.scratch_bytes // stored.dtype.itemsize

    def _across(self, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self.device) for name, tensor in raw.items()}

    def _put_plain(self, stored: Stored, raw: Mapping[str, Tensor], target: Tensor) -> None:
        if stored.dtype is None:
            values = self._values(stored, self._across(raw), target.dtype)
        else:
            values = raw["values"]
            if stored.dtype != target.dtype:  # cast on the device: copy_ would cast on the host
                values = values.to(self.device)
        target.copy_(values.view(target.shape))

    def _values(self, stored: Stored, raw: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return the values [rows, columns] of raw rows on the device, in `dtype`."""
        if stored.dtype is not None:
            return raw["values"].to(dtype)
        scheme = stored_scheme(stored)
        if scheme is not None:
            return dequantize(scheme, from_stored(stored.kind, raw, stored.columns, scheme), dtype)
        codes, scales, zeros = (raw[name].float() for name in ("codes", "scales", "zeros"))
        groups = codes.unflatten(-1, (scales.shape[-1], -1))
        return ((groups - zeros[..., None]) * scales[..., None]).flatten(-2).to(dtype)

    def _packed(self, stored: Stored, raw: Mapping[str, Tensor], scheme: Scheme, exact: bool) -> dict[str, Tensor]:
        """Return the parts [rows, elements] of raw rows on the device, packed in `scheme`; `exact`: as they are stored."""
        if exact:
            return from_stored(stored.kind, raw, stored.columns, scheme)
        return quantize_minmax(self._values(stored, raw, torch.float32), scheme, stored.name)


def pieces(stored: Stored, source: Source, place: Spot) -> Iterator[Piece]:
    """Yield the blocks of each matrix of a stored tensor that the rank holds of the weight at `place`.

    A vector is a matrix of one row.
    """
    *stack, height, width = (1, 1, *place.weight.shape)
    cuts = place.cuts or (as_cut(height), as_cut(width))
    rows, columns = cuts if len(cuts) == 2 else (as_cut(1), cuts[0])
    matrices = math.prod(stack) if len(source.names) == 1 else 1
    first, row = 0 if source.rows is None else source.rows.start, 0
    for start, stop in rows.ranges:
        column = 0
        for left, right in columns.ranges:
            size = (stop - start) * (right - left)
            share = stored.nbytes * size * matrices // max(1, stored.rows * stored.columns)
            ours = slice(row, row + stop - start), slice(column, column + right - left)
            yield Piece(range(first + start, first + stop), range(left, right), *ours, share)
            column += right - left
        row += stop - start


def spans(matrices: int, rows: int, step: int, whole: bool) -> Iterator[Span]:
    """Yield spans of at most `step` rows of a stack. A span covers several matrices only if `whole` ones are contiguous."""
    if whole and rows <= step:
        many = step // rows
        for m in range(0, matrices, many):
            yield Span(m, min(m + many, matrices), 0, rows)
        return
    for m in range(matrices):
        for r in range(0, rows, step):
            yield Span(m, m + 1, r, min(r + step, rows))


def scratch_for(largest_bytes: int) -> int:
    """Return the scratch bytes for a model whose largest weight has `largest_bytes`."""
    return min(SCRATCH_BYTES, largest_bytes)
