"""Read the integer arrays of a .npz archive, and bound what the compressed data of a trace may become in memory."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Container
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from toolkit.core.errors import TraceError

ALLOWANCE_BYTES = 64 << 20
MOST_PER_BYTE = 100  # of what compressed traces really are: about 10, repetitive ones 30
OPENED = (
    "tk.open_trace opens files of Trace.save, Chrome JSON (.json, .json.gz), Nsight Systems (.sqlite), and PyTorch memory "
    "snapshots (torch.cuda.memory._dump_snapshot)"
)
CHECKPOINT = "it is a file of torch.save, such as a checkpoint"


def most_unpacked(packed_bytes: int) -> int:
    """Return the most bytes that compressed data of this size may become: 64 MiB and 100 bytes per byte."""
    return ALLOWANCE_BYTES + MOST_PER_BYTE * packed_bytes


def check_archive(file: BinaryIO, asked: str) -> None:
    """Raise TraceError that says what a zip archive is if it is no trace, and zipfile.BadZipFile if it is damaged."""
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
    if "header.npy" in names:
        return
    found = f"it is a zip archive of {', '.join(repr(name)[:40] for name in names[:3]) or 'no files'}"
    raise TraceError(asked, CHECKPOINT if any(name.endswith("data.pkl") for name in names) else found, OPENED)


def read_arrays(file: BinaryIO, size: int, names: Container[str]) -> dict[str, NDArray[Any]]:
    """Return the one-dimensional integer arrays called `names` in the archive `file` of `size` bytes.

    Raises ValueError before anything is decompressed if they would be larger than `most_unpacked` bytes, and ValueError,
    zipfile.BadZipFile, zlib.error, EOFError or NotImplementedError if the archive is damaged.
    """
    with zipfile.ZipFile(file) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        wanted = {name: info for name, info in members.items() if name in names}
        total, most = sum(info.file_size for info in wanted.values()), most_unpacked(size)
        if total > most:
            raise ValueError(f"{size:,} bytes would become {total:,}, and at most {most:,} are read")
        return {name: _array(name, archive.read(info)) for name, info in wanted.items()}


def _array(name: str, data: bytes) -> NDArray[Any]:
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise ValueError(f"array {name!r} has the format version {version}")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    if len(shape) != 1 or dtype.kind not in "iu" or len(data) - file.tell() != shape[0] * dtype.itemsize:
        raise ValueError(f"array {name!r} is not a column of integers")
    return np.frombuffer(data, dtype, offset=file.tell())
