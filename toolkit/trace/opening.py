"""Open trace files: the toolkit's own, Chrome/Kineto JSON, Nsight Systems sqlite, and PyTorch's memory snapshots.

The format is recognized by the content of the file. Nothing in a file is executed.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from pathlib import Path

from toolkit.core.errors import TraceError, kind_of
from toolkit.core.files import check_path, open_regular, shown
from toolkit.trace.arrays import OPENED
from toolkit.trace.chrome.scan import EXPORT
from toolkit.trace.events import Trace
from toolkit.trace.join import join
from toolkit.trace.shipped import shipped_file

_SQLITE = b"SQLite format 3\0"
_SUFFIXES = (".json", ".gz", ".trace", ".npz", ".sqlite")  # of trace files in a folder
_OTHER_FOLDERS = {  # by a file in them
    "manifest.json": ("it is the folder of an exported package", "Load it with tk.load_exported"),
    "config.json": ("it is the folder of a model", "Load it with tk.load"),
}
_NUMBER = re.compile(r"(\d+)")
_PICKLE = b"\x80"  # the first byte of a pickle of protocol 2 or later


def open_trace(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> Trace:
    """Return the trace in the file `path`, or the trace of that name that ships with the package.

    A list of files, or a folder of them, is opened as one trace of several ranks, with their clocks aligned on the ends of
    collectives: see `toolkit.trace.join`.

    The format of a file is recognized by its content. Without such a file, "h200/qwen3-8b/cuda-graph" opens steps of this model
    under this strategy that were recorded on an H200: see `toolkit.trace.shipped`.

    Reads our own files (`trace.save`, `trace.to_chrome`), Chrome JSON of PyTorch's profiler, XLA and others (plain or .gz),
    Nsight Systems' sqlite export, and memory snapshots (`torch.cuda.memory._dump_snapshot`), which have no steps. Steps come
    from marks, `ProfilerStep#` or NVTX ranges, or are guessed from a repeating pattern: `trace.meta["steps_from"]` says
    which. Warns if events of a file are left out because their fields are unexpected, and if a profile has ranges but nothing
    of a GPU. Raises TraceError if the file cannot be read or has another format, and UnknownNameError, which lists the names,
    for a shipped trace that doesn't exist.
    """
    if isinstance(path, Sequence) and not isinstance(path, (str, bytes)):
        return _open_ranks(list(path), f"opening the traces of {len(path)} ranks")
    asked = f"opening the trace {shown(path)}"
    if isinstance(path, Iterable) and not isinstance(path, (str, bytes, os.PathLike)):  # their order may differ each time
        raise TraceError(asked, f"it is {kind_of(path)}", "Give a path, or a list of paths: sorted(FOLDER.glob('*.json'))")
    file = check_path(path, asked, TraceError)
    if os.path.isdir(file):
        return _open_ranks(_in_folder(file, asked), asked)
    if not os.path.exists(file):
        file = shipped_file(file) or file
    with open_regular(file, asked, TraceError) as raw:
        start = raw.read(4096)
    packed = start.startswith(b"\x1f\x8b")
    if packed and (start := _unpacked(file, asked)).startswith((b"PK", _SQLITE, _PICKLE, b"\x1f\x8b")):
        raise TraceError(asked, "only Chrome traces are read in compressed form", "Decompress it first: gunzip FILE")
    if start.startswith(b"PK"):
        return Trace.load(file)
    if start.startswith(_SQLITE):
        from toolkit.trace.nsys import read_nsys

        return read_nsys(file)
    if start[:1] == _PICKLE:
        from toolkit.trace.snapshot.read import read_snapshot

        return read_snapshot(file)
    if start.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
        from toolkit.trace.chrome.read import read_chrome

        return read_chrome(file)
    raise _unknown(asked, start, file.suffix)


def open_allocations(path: str | os.PathLike[str], measured: Set[str]) -> Trace:
    """Open a trace for its memory. Raises TraceError if it has no allocations, and no key of `measured` in its meta."""
    asked, give = f"opening the measurement {shown(path)}", "give a file of m.save"
    try:
        trace = open_trace(path)
    except TraceError as error:
        if error.do != EXPORT:
            raise
        snapshot = "a memory snapshot of PyTorch: torch.cuda.memory._dump_snapshot(FILE)"
        raise TraceError(asked, "it is JSON without allocations", f"{give.capitalize()}, or {snapshot}") from None
    if not measured & trace.meta.keys() and not trace.is_kind("alloc", "free").any():
        raise TraceError(asked, "it is a trace without allocations", f"Use tk.open_trace, or {give}")
    return trace


def _open_ranks(files: Sequence[str | os.PathLike[str]], asked: str) -> Trace:
    """Return the traces of several ranks as one; a single trace as it is."""
    if not files:
        raise TraceError(asked, "an empty list", "Give the trace files of all ranks")
    paths = [check_path(file, f"opening the trace {shown(file)}", TraceError) for file in files]
    traces = [open_trace(path) for path in paths]
    for path, times in Counter(map(os.path.realpath, paths)).items():
        if times > 1:
            raise TraceError(asked, f"{shown(path)} is in the list {times} times", "Give one file per rank")
    return traces[0] if len(traces) == 1 else join(traces, _distinct_names(paths), asked)


def _distinct_names(paths: Sequence[Path]) -> list[str]:
    """Return the names of different files, with their folders below a common one if some names are equal."""
    names = [path.name for path in paths]
    if len(set(names)) == len(names):
        return names
    whole = [os.path.abspath(path) for path in paths]
    return [os.path.relpath(path, os.path.commonpath(whole)) for path in whole]


def _in_folder(folder: Path, asked: str) -> list[Path]:
    """Return the trace files in a folder, in the order of their names with numbers as numbers."""
    try:
        files = [file for file in folder.iterdir() if file.suffix in _SUFFIXES and not file.name.startswith(".")]
    except OSError as error:
        raise TraceError(asked, f"it can't be read ({error.strerror})", "Check the path and its permissions") from error
    for name, (found, do) in _OTHER_FOLDERS.items():
        if folder / name in files:
            raise TraceError(asked, found, f"{do}. To open a trace in it, give its file")
    if not files:
        raise TraceError(asked, f"a folder without files that end in {', '.join(_SUFFIXES)}", "Give the files of the ranks")
    return sorted(
        files, key=lambda file: [(not p.isdecimal(), int(p) if p.isdecimal() else 0, p) for p in _NUMBER.split(file.name)]
    )


def _unpacked(file: Path, asked: str) -> bytes:
    try:
        with gzip.open(file) as packed:
            return packed.read(4096)
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(asked, f"its compressed data is damaged ({error})", "Copy the complete file again") from error


def _unknown(asked: str, start: bytes, suffix: str) -> TraceError:
    """Return an error that names the probable format of the file and how to convert it."""
    if not start:
        return TraceError(asked, "it is empty", "Export the trace again")
    if suffix in (".nsys-rep", ".qdrep"):
        do = f"Convert it first: nsys export --type sqlite FILE{suffix}"
        return TraceError(asked, "it is a report that only Nsight Systems can read", do)
    if suffix in (".pkl", ".pickle", ".pt", ".pth"):
        return TraceError(asked, "it is not a pickle of protocol 2 or later", OPENED)
    if start.startswith(b"GGUF") or suffix == ".safetensors":
        return TraceError(asked, "it holds the weights of a model", f"Load models with tk.load. {OPENED}")
    return TraceError(asked, "its format is unknown", OPENED)
