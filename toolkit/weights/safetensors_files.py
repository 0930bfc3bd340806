"""Read safetensors files: a JSON header (names, dtypes, shapes, byte ranges), then the bytes of the tensors.

A checkpoint is one file, or several with an index. The whole header is checked before any tensor is read.
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from toolkit.core.errors import FormatError
from toolkit.core.files import read_regular
from toolkit.core.schema import parse_json
from toolkit.core.units import plural
from toolkit.weights.stored import BROKEN, Mapped, Shards, Stored, Weights, check_apart, nearest, plain_rows, too_short

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMENSIONS = 16
INDEX = "model.safetensors.index.json"


class SafetensorsFile(Weights):
    """One .safetensors file."""

    def __init__(self, path: Path, opened: BinaryIO | None = None) -> None:
        """Map the file, or `opened`, and check its header. Raises FormatError, which names the tensor, if one is invalid."""
        self.mapped = Mapped(path, "safetensors file", smallest=8, opened=opened)
        length = int.from_bytes(self.mapped.bytes[:8], "little")
        if length > MAX_HEADER_BYTES:
            found = f"the first 8 bytes give a header of {length:,} bytes, more than the format allows"
            raise self.mapped.error(found, "Check that it is a safetensors file, or download it again: it may be damaged")
        if 8 + length > len(self.mapped):
            raise too_short(self.mapped, "the header", 8 + length)
        header = self._header(length)
        self.stored = {name: self._stored(name, entry, 8 + length) for name, entry in header.items()}
        self._check_cover(8 + length)

    def raw(self, name: str, start_row: int = 0, stop_row: int | None = None) -> dict[str, Tensor]:
        return {"values": plain_rows(self.mapped, *self.span(name, start_row, stop_row))}

    def _header(self, length: int) -> dict[str, Any]:
        try:
            header = json.loads(self.mapped.bytes[8 : 8 + length].decode(), object_pairs_hook=_no_twins)
        except (ValueError, RecursionError) as error:
            raise self.mapped.error(f"the header isn't JSON ({error})", BROKEN) from error
        if not isinstance(header, dict):
            raise self.mapped.error(f"the header is a JSON {type(header).__name__}, not an object", BROKEN)
        header.pop("__metadata__", None)
        return header

    def _stored(self, name: str, entry: Any, data: int) -> Stored:
        """Check and return the entry of one tensor; `data` is the file offset from which byte ranges count."""
        try:
            kind, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            whole = [start, end, *shape]
        except (TypeError, KeyError, ValueError) as error:
            raise self.mapped.error(f"the entry of tensor {name!r} is malformed ({entry!r:.100})", BROKEN) from error
        if not isinstance(kind, str) or kind not in DTYPES:
            do = f"Convert it to one of {', '.join(DTYPES)}"
            raise self.mapped.error(f"tensor {name!r} has the unknown dtype {kind!r:.40}", do, tensor=name)
        fine = isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS and all(type(n) is int and n >= 0 for n in whole)
        if not fine or math.prod(max(n, 1) for n in shape) >= 1 << 60:
            raise self.mapped.error(f"tensor {name!r} has an impossible shape or byte range", BROKEN, tensor=name)
        nbytes = math.prod(shape) * DTYPES[kind].itemsize
        if end - start != nbytes:
            found = f"tensor {name!r} of shape {shape} in {kind} needs {nbytes:,} bytes, but its range has {end - start:,}"
            raise self.mapped.error(found, BROKEN, tensor=name)
        if data + end > len(self.mapped):
            raise too_short(self.mapped, f"tensor {name!r}", data + end)
        return Stored(name, tuple(shape), kind, DTYPES[kind], data + start, nbytes, self.mapped.path)

    def _check_cover(self, data: int) -> None:
        """Raise FormatError unless the tensors fill the file, as the format requires: a gap means a wrong header."""
        check_apart(self.mapped, self.stored.values())
        filled = sum(tensor.nbytes for tensor in self.stored.values())
        if data + filled != len(self.mapped):
            found = f"the tensors fill {filled:,} of the {len(self.mapped) - data:,} bytes after the header"
            raise self.mapped.error(found, BROKEN)


def open_safetensors(path: Path) -> Weights:
    """Open the weights in `path`: a .safetensors file, or a folder with one file or all shards, with or without an index.

    Raises FormatError if there are no weights, a shard is missing, a file is damaged, or the folder can't be read.
    """
    if not path.is_dir():
        return SafetensorsFile(path)
    index = path / INDEX
    if os.path.exists(index):
        return _open_index(index)
    files = sorted(path.glob("*.safetensors"))
    whole = path / "model.safetensors"
    if whole in files:
        return SafetensorsFile(whole)
    if not files:
        raise _no_weights(path)
    counts = {int(m[1]) for f in files if (m := re.fullmatch(r".*-\d+-of-(\d+)\.safetensors", f.name))}
    if len(counts) > 1 or (counts and counts != {len(files)}) or (not counts and len(files) > 1):
        found = f"no index, and {len(files)} files ({', '.join(f.name for f in files[:4])}) that aren't one complete checkpoint"
        raise FormatError(f"weights in {path}", found, f"Get the missing files and {INDEX}, or leave one model.safetensors")
    return Shards([SafetensorsFile(file) for file in files])


def _open_index(index: Path) -> Weights:
    """Open the shards named by an index. Raises FormatError if they contradict it."""
    asked = f"index {index}"
    weight_map = read_json(index, "index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise FormatError(asked, "it has no weight_map from tensor to file names", "Get it from the checkpoint's source again")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or "\\" in name or "\0" in name or name in ("", ".", ".."):
            raise FormatError(
                asked, f"it names {name!r:.100}, which isn't a file of the same folder", "Don't trust this checkpoint"
            )
    missing = [name for name in names if not os.path.exists(index.parent / name)]  # never raises for odd names
    if missing:
        found = f"its folder lacks {len(missing):,} of {plural(len(names), 'shard')}: {', '.join(missing[:4])}"
        raise FormatError(asked, found, "Download the missing files into the same folder", missing=missing)
    files = {name: SafetensorsFile(index.parent / name) for name in names}
    for tensor, name in weight_map.items():
        if tensor not in files[name].stored:
            raise FormatError(asked, f"tensor {tensor!r} isn't in {name}", nearest(tensor, files[name].stored))
    return Shards(list(files.values()))


def read_json(path: Path, what: str, max_bytes: int = 256 << 20) -> dict[str, Any]:
    """Read the JSON object in `path`. Raises FormatError if it is unreadable, isn't an object or exceeds `max_bytes`."""
    asked = f"{what} {path}"
    try:
        content: Any = parse_json(read_regular(path, asked, FormatError, max_bytes).decode())
    except ValueError as error:
        raise FormatError(asked, f"it isn't JSON ({error!s:.120})", "Get it from the checkpoint's source again") from error
    if not isinstance(content, dict):
        raise FormatError(asked, f"it holds a JSON {type(content).__name__}, not an object", "Get it from its source again")
    return content


def _no_weights(path: Path) -> FormatError:
    try:
        files = sorted(path.iterdir())
    except OSError as error:
        found = f"the folder can't be read ({error.strerror or error})"
        return FormatError(f"weights in {path}", found, "Check its permissions")
    if any(file.suffix.lower() == ".gguf" for file in files):
        return FormatError(f"weights in {path}", "no .safetensors file, but a GGUF file", "Give the path of the GGUF file")
    for file in files:
        if file.suffix in PICKLES:
            return pickled(file)
    return FormatError(f"weights in {path}", "no .safetensors file", "Download the model's weights into the folder too")


PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def pickled(path: Path) -> FormatError:
    """Return the error for a pickle file, which could run arbitrary code when opened."""
    do = (
        "Use the checkpoint's safetensors, or convert it if you trust it: "
        "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
    )
    return FormatError(f"weights {path}", "it is a pickle, which could run any code, so it isn't opened", do)


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twin = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twin!r:.100} occurs twice")
    return found
