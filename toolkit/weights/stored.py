"""The interface of all checkpoint readers: named tensors in memory-mapped files, read only on request."""

from __future__ import annotations

import difflib
import math
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from toolkit.core.errors import FormatError
from toolkit.core.files import open_regular
from toolkit.core.units import bytes_text


@dataclass(frozen=True)
class Stored:
    """One tensor in a file: its name, its shape in PyTorch's order, and the position of its bytes.

    `kind` is the format's own name for the element type ("BF16", "Q4_K", "GPTQ"). `dtype` is the torch dtype of plain
    elements, None if they are quantized. `start` is the offset from the beginning of the file. For kinds with several
    variants, `bits` is the size of a code, `group` the number of weights of a row that share a scale, and `centred` says
    that every zero is 2^(bits - 1).
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    dtype: torch.dtype | None
    start: int
    nbytes: int
    path: str
    bits: int = 0
    group: int = 0
    centred: bool = False

    @property
    def rows(self) -> int:
        """Number of rows: the product of all dimensions but the last; 1 for a vector or a scalar."""
        return math.prod(self.shape[:-1])

    @property
    def columns(self) -> int:
        """Number of values per row."""
        return self.shape[-1] if self.shape else 1


class Weights(ABC):
    """An open checkpoint. `stored` maps the name of each tensor to its entry in the file."""

    stored: Mapping[str, Stored]

    @abstractmethod
    def raw(self, name: str, start_row: int = 0, stop_row: int | None = None) -> dict[str, Tensor]:
        """Return rows `start_row` to `stop_row` (None: to the end) of tensor `name` as stored, on the CPU.

        Leading dimensions are flattened: a stack of matrices [E, out, in] has E * out rows, a vector has one. Plain tensors
        return {"values": [rows, columns]}, quantized GGUF tensors {"blocks": uint8 [rows, bytes per row]}; both are views of
        the mapped file, so don't write to them. GPTQ, AWQ and HQQ matrices return {"codes": uint8 [rows, columns], "scales"
        and "zeros": floats [rows, groups]}, where value = (code - zero) * scale; these are unpacked copies, so read them in
        chunks. Raises FormatError for an unknown name or rows out of range.
        """

    def read(self, name: str) -> Tensor:
        """Return the whole plain tensor `name` in its shape: a view of the mapped file, so don't write to it.

        Raises FormatError for an unknown name or a quantized tensor.
        """
        stored = self.find(name)
        if stored.dtype is None:
            raise FormatError(f"values of tensor {name!r}", f"it is stored as {stored.kind}", "Read it with raw and unpack it")
        return self.raw(name)["values"].view(stored.shape)

    def span(self, name: str, start_row: int, stop_row: int | None) -> tuple[Stored, int, int]:
        """Return the entry of tensor `name` and the checked row range. Raises FormatError if it is out of range."""
        stored = self.find(name)
        stop = stored.rows if stop_row is None else stop_row
        if not 0 <= start_row <= stop <= stored.rows:
            found = f"it has {stored.rows:,} rows"
            raise FormatError(f"rows {start_row:,} to {stop:,} of tensor {name!r}", found, "Ask for rows in that range")
        return stored, start_row, stop

    def find(self, name: str) -> Stored:
        """Return the entry of tensor `name`. Raises FormatError, which suggests the most similar name, if there is none."""
        if name in self.stored:
            return self.stored[name]
        raise FormatError(f"tensor {name!r}", "no such tensor in the file", nearest(name, self.stored))


class Shards(Weights):
    """Several files that form one checkpoint."""

    def __init__(self, files: Sequence[Weights]) -> None:
        """Join the files. Raises FormatError if two of them hold a tensor of the same name."""
        self._home: dict[str, Weights] = {}
        for file in files:
            for name, stored in file.stored.items():
                if name in self._home:
                    first = Path(self._home[name].stored[name].path).name
                    found = f"{first} and {Path(stored.path).name} both hold it"
                    raise FormatError(f"tensor {name!r}", found, "Remove the file that doesn't belong to this checkpoint")
                self._home[name] = file
        self.stored = {name: file.stored[name] for name, file in self._home.items()}

    def raw(self, name: str, start_row: int = 0, stop_row: int | None = None) -> dict[str, Tensor]:
        self.find(name)
        return self._home[name].raw(name, start_row, stop_row)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a sentence for an error message that suggests the known name most similar to `name`."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"The nearest name is {near[0]!r}" if near else "No name is similar: is it a checkpoint of another architecture?"


class Mapped:
    """A memory-mapped file: pages are read on first access and, being file-backed, aren't private memory of the process."""

    def __init__(self, path: str | os.PathLike[str], asked: str, smallest: int = 1, *, opened: BinaryIO | None = None) -> None:
        """Map the whole file, or `opened`, which is the same file and stays open.

        Raises FormatError unless it is a readable regular file of at least `smallest` bytes.
        """
        self.path, self.asked = os.fspath(path), asked
        try:
            with open_regular(path, f"{asked} {path}", FormatError) if opened is None else nullcontext(opened) as file:
                size = os.fstat(file.fileno()).st_size
                if size < smallest:
                    raise self.error(
                        f"the file has only {size:,} bytes, too few for this format",
                        "Download or copy it again: it is empty or cut off",
                    )
                # A private (copy-on-write) map: torch.frombuffer warns about read-only memory, and the file stays unchanged.
                self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise self.error(f"it can't be opened ({error.strerror or error})", "Check the path and its permissions") from error

    def __len__(self) -> int:
        return len(self.bytes)

    def tensor(self, start: int, nbytes: int) -> Tensor:
        """Return bytes `start` to `start + nbytes` as a uint8 tensor, a view that keeps the map alive.

        Raises FormatError if the file was truncated since it was opened: accessing the lost pages would kill the process.
        """
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        left = self.bytes.size()  # of the file, today
        if left < start + nbytes:
            found = f"the file was truncated to {left:,} bytes after it was opened"
            raise self.error(found, "Download it again, and don't write to a checkpoint while it is loaded")
        return torch.frombuffer(self.bytes, dtype=torch.uint8, count=nbytes, offset=start)

    def error(self, found: str, do: str, **facts: Any) -> FormatError:
        """Return a FormatError about this file."""
        return FormatError(f"{self.asked} {self.path}", found, do, path=self.path, **facts)


def plain_rows(mapped: Mapped, stored: Stored, start_row: int, stop_row: int) -> Tensor:
    """Return rows of a plain tensor as [rows, columns]: a view of the mapped file, or a copy if it isn't aligned."""
    assert stored.dtype is not None
    row = stored.columns * stored.dtype.itemsize
    start = stored.start + start_row * row
    raw = mapped.tensor(start, (stop_row - start_row) * row)
    if start % stored.dtype.itemsize:
        raw = raw.clone()
    return raw.view(stored.dtype).view(stop_row - start_row, stored.columns)


def check_apart(mapped: Mapped, stored: Iterable[Stored]) -> None:
    """Raise FormatError if two tensors share bytes."""
    end, before = 0, ""
    for tensor in sorted((t for t in stored if t.nbytes), key=lambda t: t.start):
        if tensor.start < end:
            raise mapped.error(f"tensors {before!r} and {tensor.name!r} overlap", BROKEN)
        end, before = tensor.start + tensor.nbytes, tensor.name


def too_short(mapped: Mapped, what: str, needed: int) -> FormatError:
    """Return the error for a file that ends before the data that its header promises."""
    found = f"{what} ends at byte {needed:,}, but the file has {len(mapped):,} ({bytes_text(len(mapped))}): it is cut off"
    return mapped.error(found, "Download or copy it again", needed_bytes=needed)


BROKEN = "Download the file from its source again: it is damaged or was written incorrectly"
