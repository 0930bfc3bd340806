"""What every weights file is to its reader: named tensors in a mapped file, none of them read before it is asked for."""

from __future__ import annotations

import difflib
import math
import mmap
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.core.errors import FormatError
from toolkit.core.units import bytes_text


@dataclass(frozen=True)
class Stored:
    """One tensor in a file: its shape as PyTorch writes it, and where its bytes lie.

    `kind` is the format's own name of the element type ("BF16", "Q4_K", "GPTQ"); `dtype` the torch dtype of elements that
    are stored as such, None where they are quantised. `start` counts from the beginning of the file. `bits`, `group` and
    `centred` say how codes are held where the kind alone doesn't: bits of a code, weights of a row that share a scale,
    and whether every zero is 2^(bits - 1).
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
        """How many rows there are: the leading dimensions, flattened; 1 for a vector or a scalar."""
        return math.prod(self.shape[:-1])

    @property
    def columns(self) -> int:
        """How many values a row has."""
        return self.shape[-1] if self.shape else 1


class Weights(ABC):
    """An open checkpoint. `stored` maps names to what the file says of each tensor."""

    stored: Mapping[str, Stored]

    @abstractmethod
    def raw(self, name: str, start_row: int = 0, stop_row: int | None = None) -> dict[str, Tensor]:
        """Rows `start_row` to `stop_row` (to the end where None) of the tensor called `name`, as they are stored, on the CPU.

        Rows are those of the flattened leading dimensions: a stack of matrices [E, out, in] has E * out of them, a vector
        one. Plain numbers: {"values": [rows, columns]}. GGUF's quantised kinds: {"blocks": uint8 [rows, bytes a row]}.
        Both are views of the mapped file (don't write to them). Kinds of int4 safetensors: {"codes": uint8 [rows,
        columns], "scales" and "zeros": floats [rows, groups]}, a value being (code - zero) * scale; these are unpacked
        into memory of their own, so ask for some rows at a time. Raises FormatError for an unknown name or rows.
        """

    def read(self, name: str) -> Tensor:
        """The whole tensor called `name`, of plain numbers, in its shape: a view of the mapped file (don't write to it).

        Raises FormatError for an unknown name, and for one that is stored quantised.
        """
        stored = self.find(name)
        if stored.dtype is None:
            raise FormatError(f"values of tensor {name!r}", f"it is stored as {stored.kind}", "Read it with raw and unpack it")
        return self.raw(name)["values"].view(stored.shape)

    def span(self, name: str, start_row: int, stop_row: int | None) -> tuple[Stored, int, int]:
        """What is stored under `name`, and the rows asked for; FormatError where it doesn't have them."""
        stored = self.find(name)
        stop = stored.rows if stop_row is None else stop_row
        if not 0 <= start_row <= stop <= stored.rows:
            found = f"it has {stored.rows:,} rows"
            raise FormatError(f"rows {start_row:,} to {stop:,} of tensor {name!r}", found, "Ask for rows that are there")
        return stored, start_row, stop

    def find(self, name: str) -> Stored:
        """What is stored under `name`; FormatError, naming the nearest, where nothing is."""
        if name in self.stored:
            return self.stored[name]
        raise FormatError(f"tensor {name!r}", "no such tensor in the file", nearest(name, self.stored))


class Shards(Weights):
    """Several files read as one."""

    def __init__(self, files: Sequence[Weights]) -> None:
        """Join the files. Raises FormatError where two hold a tensor of the same name."""
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
    """A sentence for an error: the known name most like `name`."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"The nearest is {near[0]!r}" if near else "Nothing has a similar name: is it a checkpoint of another architecture?"


class Mapped:
    """A file mapped into memory: pages come from disk when they are first touched, and are not counted as our own."""

    def __init__(self, path: str | os.PathLike[str], asked: str, smallest: int = 1) -> None:
        """Map the whole file. Raises FormatError where it isn't a regular file of at least `smallest` bytes."""
        self.path, self.asked = os.fspath(path), asked
        try:
            found = os.stat(self.path)  # before open, which would wait for a writer if this were a pipe
            if not stat.S_ISREG(found.st_mode):
                kind = "a folder" if stat.S_ISDIR(found.st_mode) else "not a regular file"
                raise self.error(f"{Path(path).name} is {kind}", "Give the file itself")
            if found.st_size < smallest:
                raise self.error(
                    f"the file has {found.st_size:,} bytes, too few to be one",
                    "Download or copy it again: it is empty or cut off",
                )
            self._file = open(self.path, "rb")  # noqa: SIM115 - open as long as the map, which outlives this call
            # a private mapping: torch wants it writable, the file never changes
            self.bytes = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise self.error(f"it can't be opened ({error.strerror or error})", "Check the path and its permissions") from error

    def __len__(self) -> int:
        return len(self.bytes)

    def tensor(self, start: int, nbytes: int) -> Tensor:
        """Bytes `start` to `start + nbytes` as a uint8 tensor over the map, which lives as long as the tensor.

        Raises FormatError where the file has been cut since it was opened: touching what is gone would end the process.
        """
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        left = os.fstat(self._file.fileno()).st_size
        if left < start + nbytes:
            found = f"the file was cut to {left:,} bytes after it was opened"
            raise self.error(found, "Don't write to a checkpoint while it is loaded; get it again")
        return torch.frombuffer(self.bytes, dtype=torch.uint8, count=nbytes, offset=start)

    def error(self, found: str, do: str, **facts: Any) -> FormatError:
        """A FormatError about this file."""
        return FormatError(f"{self.asked} {self.path}", found, do, path=self.path, **facts)


def plain_rows(mapped: Mapped, stored: Stored, start_row: int, stop_row: int) -> Tensor:
    """Rows of the tensor `stored` [rows, columns], a view of the mapped file; a copy only where they aren't aligned."""
    assert stored.dtype is not None
    row = stored.columns * stored.dtype.itemsize
    start = stored.start + start_row * row
    raw = mapped.tensor(start, (stop_row - start_row) * row)
    if start % stored.dtype.itemsize:
        raw = raw.clone()
    return raw.view(stored.dtype).view(stop_row - start_row, stored.columns)


def check_apart(mapped: Mapped, stored: Iterable[Stored]) -> None:
    """FormatError where two tensors share bytes."""
    end, before = 0, ""
    for tensor in sorted((t for t in stored if t.nbytes), key=lambda t: t.start):
        if tensor.start < end:
            raise mapped.error(f"tensors {before!r} and {tensor.name!r} overlap", BROKEN)
        end, before = tensor.start + tensor.nbytes, tensor.name


def too_short(mapped: Mapped, what: str, needed: int) -> FormatError:
    """The error of a file that ends before what its header promises."""
    found = f"{what} ends at byte {needed:,}, the file has {len(mapped):,} ({bytes_text(len(mapped))}): it is cut off"
    return mapped.error(found, "Download or copy it again", needed_bytes=needed)


BROKEN = "The file is damaged, or its writer is at fault: get it from its source again"
