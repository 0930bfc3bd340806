"""Read GGUF files: typed metadata, then tensor names, shapes and offsets, then the tensors, often quantized in blocks.

Supports little-endian files of versions 2 and 3. Every count and length is checked against the rest of the file before
memory is allocated for it, so rejecting a damaged file takes time at most proportional to its size.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolkit.core.errors import FormatError
from toolkit.core.units import plural
from toolkit.weights.repacking import GGUF_KINDS
from toolkit.weights.stored import BROKEN, Mapped, Shards, Stored, Weights, check_apart, plain_rows, too_short

PLAIN = {0: ("F32", torch.float32), 1: ("F16", torch.float16), 30: ("BF16", torch.bfloat16)}
QUANTISED = {2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K"}
BLOCKS = {kind: (layout.weights, layout.nbytes) for kind, layout in GGUF_KINDS.items()}  # weights and bytes per block
UNSUPPORTED = {  # types that llama.cpp defines but this reader can't decode: the error names them
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
MAX_DIMENSIONS = 8
MAX_PARTS = 9_999
MAX_DEPTH = 4  # of nested arrays
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1", 10: "<u8", 11: "<i8", 12: "<f8"}


class GgufFile(Weights):
    """One .gguf file: `metadata` maps keys to values, `stored` maps tensor names to entries (shapes are [out, in])."""

    def __init__(self, path: Path) -> None:
        """Map the file, then read and check its header. Raises FormatError, which names the fault, if the file is invalid."""
        self.mapped = Mapped(path, "GGUF file", smallest=24)
        magic, version, tensors, pairs = struct.unpack_from("<4sIQQ", self.mapped.bytes, 0)
        if magic != b"GGUF":
            raise self.mapped.error(f"it begins with {magic!r}, not with b'GGUF'", "Give a GGUF file")
        if version not in (2, 3):
            kind = "big-endian" if version in (2 << 24, 3 << 24) else f"version {version:,}"
            raise self.mapped.error(f"it is {kind}", "Convert it to a little-endian GGUF of version 3")
        cursor = _Cursor(self.mapped, 24)
        self.metadata = self._metadata(cursor, pairs)
        self.stored = self._tensors(cursor, tensors)

    def raw(self, name: str, start_row: int = 0, stop_row: int | None = None) -> dict[str, Tensor]:
        stored, start, stop = self.span(name, start_row, stop_row)
        if stored.dtype is not None:
            return {"values": plain_rows(self.mapped, stored, start, stop)}
        elements, nbytes = BLOCKS[stored.kind]
        row = stored.columns // elements * nbytes
        return {"blocks": self.mapped.tensor(stored.start + start * row, (stop - start) * row).view(stop - start, row)}

    def _metadata(self, cursor: _Cursor, pairs: int) -> dict[str, Any]:
        cursor.expect(pairs, 8 + 4 + 1, "metadata entries")
        found: dict[str, Any] = {}
        for _ in range(pairs):
            key = cursor.string("a metadata key")
            if key in found:
                raise self.mapped.error(f"metadata key {key!r} occurs twice", BROKEN)
            found[key] = cursor.value(cursor.number("<u4"), f"metadata {key!r:.80}")
        return found

    def _tensors(self, cursor: _Cursor, count: int) -> dict[str, Stored]:
        cursor.expect(count, 8 + 4 + 4 + 8, "tensors")
        entries = [self._entry(cursor) for _ in range(count)]
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20:
            raise self.mapped.error(f"general.alignment is {alignment!r:.40}", BROKEN)
        data = -(-cursor.at // alignment) * alignment
        found: dict[str, Stored] = {}
        for name, shape, kind, offset in entries:
            if name in found:
                raise self.mapped.error(f"tensor {name!r} occurs twice", BROKEN, tensor=name)
            if offset % alignment:
                raise self.mapped.error(
                    f"tensor {name!r} starts at {offset:,}, not a multiple of {alignment}", BROKEN, tensor=name
                )
            found[name] = self._stored(name, shape, kind, data + offset)
        check_apart(self.mapped, found.values())
        return found

    def _entry(self, cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
        name = cursor.string("a tensor's name")
        dimensions = cursor.number("<u4")
        if dimensions > MAX_DIMENSIONS:
            raise self.mapped.error(f"tensor {name!r} has {dimensions:,} dimensions", BROKEN, tensor=name)
        shape = tuple(cursor.number("<u8") for _ in range(dimensions))[::-1]  # GGUF lists the innermost dimension first
        return name, shape, cursor.number("<u4"), cursor.number("<u8")

    def _stored(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> Stored:
        elements = math.prod(shape)
        if kind in PLAIN:
            label, dtype = PLAIN[kind]
            nbytes = elements * dtype.itemsize
        elif kind in QUANTISED:
            label, dtype = QUANTISED[kind], None
            block, block_bytes = BLOCKS[label]
            if not shape or shape[-1] % block:
                found = f"tensor {name!r} of shape {list(shape)} in {label} doesn't divide into blocks of {block}"
                raise self.mapped.error(found, BROKEN, tensor=name)
            nbytes = elements // block * block_bytes
        else:
            do = f"Use a file quantized as {', '.join([label for label, _ in PLAIN.values()] + list(QUANTISED.values()))}"
            label = UNSUPPORTED.get(kind, f"number {kind}")
            raise self.mapped.error(f"tensor {name!r} has the type {label}, which isn't supported", do, tensor=name)
        if start + nbytes > len(self.mapped):
            raise too_short(self.mapped, f"tensor {name!r}", start + nbytes)
        if math.prod(max(n, 1) for n in shape) >= 1 << 60:
            raise self.mapped.error(f"tensor {name!r} has the impossible shape {list(shape)}", BROKEN, tensor=name)
        return Stored(name, shape, label, dtype, start, nbytes, self.mapped.path)


class _Cursor:
    """Reads the header sequentially and checks before every read that it ends within the file."""

    def __init__(self, mapped: Mapped, at: int) -> None:
        self.mapped, self.at = mapped, at

    def expect(self, count: int, smallest: int, what: str) -> None:
        """Raise FormatError if the rest of the file can't hold `count` items of at least `smallest` bytes each."""
        left = len(self.mapped) - self.at
        if count * smallest > left:
            found = f"the header promises {count:,} {what}, but {left:,} bytes are left"
            raise self.mapped.error(found, "Download it again: it is damaged or cut off")

    def take(self, nbytes: int, what: str) -> bytes:
        self.expect(nbytes, 1, f"bytes of {what}")
        self.at += nbytes
        return self.mapped.bytes[self.at - nbytes : self.at]

    def number(self, kind: str) -> Any:
        return np.frombuffer(self.take(int(kind[2]), "a number"), kind)[0].item()

    def string(self, what: str) -> str:
        raw = self.take(struct.unpack("<Q", self.take(8, what))[0], what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.mapped.error(f"{what} isn't UTF-8 text", BROKEN) from error

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            number = self.number(_SCALARS[kind])
            return bool(number) if kind == _BOOL else number
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY or depth == MAX_DEPTH:
            raise self.mapped.error(f"{what} has the unknown value type {kind}", BROKEN)
        inner, count = self.number("<u4"), self.number("<u8")
        if inner in _SCALARS:
            code = _SCALARS[inner]
            self.expect(count, int(code[2]), f"numbers in {what}")
            numbers = np.frombuffer(self.take(count * int(code[2]), what), code)
            return (numbers.astype(bool) if inner == _BOOL else numbers).tolist()
        self.expect(count, 8, f"items in {what}")
        read: Callable[[], Any] = (
            (lambda: self.string(what)) if inner == _STRING else (lambda: self.value(inner, what, depth + 1))
        )
        return [read() for _ in range(count)]


class GgufParts(Shards):
    """A model split over several files (PREFIX-00001-of-00003.gguf, ...); the metadata is that of the first file."""

    def __init__(self, parts: Sequence[GgufFile]) -> None:
        super().__init__(parts)
        self.metadata = parts[0].metadata


def open_gguf(path: Path) -> GgufFile | GgufParts:
    """Open a .gguf file, with all other parts if the model is split. Raises FormatError for invalid or missing files."""
    if path.is_dir():
        raise FormatError(f"GGUF file {path}", "it is a folder", "Give the path of the .gguf file in it")
    file = GgufFile(path)
    count = file.metadata.get("split.count", 0)
    if type(count) is not int or not 0 <= count <= MAX_PARTS:
        raise file.mapped.error(f"split.count is {count!r:.40}", BROKEN)
    return file if count <= 1 else _open_parts(file, path, count)


def _open_parts(file: GgufFile, path: Path, count: int) -> GgufParts:
    """Open all parts of the split model that `file` belongs to. Raises FormatError if a name and its metadata disagree."""
    named = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", path.name, re.DOTALL | re.IGNORECASE)
    if not named or int(named[3]) != count:
        found = f"it is one of {count:,} parts of a split model, but its name doesn't say so"
        raise file.mapped.error(found, f"Restore the names of the parts: NAME-00001-of-{count:05d}.gguf and so on")
    paths = [path.with_name(f"{named[1]}-{i + 1:05d}-of-{count:05d}{named[4]}") for i in range(count)]
    missing = [part.name for part in paths if not os.path.exists(part)]
    if missing:
        found = f"its folder lacks {len(missing):,} of {plural(count, 'part')}: {', '.join(missing[:4])}"
        raise file.mapped.error(found, "Download the missing files into the same folder", missing=missing)
    parts = [GgufFile(part) for part in paths]
    for i, part in enumerate(parts):
        said = (part.metadata.get("split.no"), part.metadata.get("split.count"))
        if said != (i, count):
            found = f"its metadata says part {said[0]!r:.20} of {said[1]!r:.20} (from 0), its name says {i} of {count}"
            raise part.mapped.error(found, "Download the parts of one model under their original names")
    whole = GgufParts(parts)
    promised = whole.metadata.get("split.tensors.count", len(whole.stored))
    if promised != len(whole.stored):
        found = f"the parts hold {len(whole.stored):,} tensors, but the first part promises {promised!r:.40}"
        raise file.mapped.error(found, "Download all parts again from one source")
    return whole
