"""Record the blocks of a test: copies and memory by line of source, as plain data for reports and baselines.

A line is identified by its file, relative to the folder of the test, and its source text. So a baseline stays valid when lines
move.
"""

from __future__ import annotations

import gc
import linecache
import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NotRequired, TypedDict

import numpy as np
import torch

from toolkit.core.callers import is_installed, short_path
from toolkit.core.errors import RecorderError
from toolkit.decode.copy_budget import events_of
from toolkit.gpu import allocation_scopes
from toolkit.gpu.allocation_log import log
from toolkit.gpu.device import Device
from toolkit.testing.watch import KeptGraphs, Watch
from toolkit.trace.events import Trace
from toolkit.trace.ledger import Ledger

KINDS = ("h2d", "d2h", "d2d", "pageable", "waits")
UNKNOWN = "(unknown line)"


class LineMemory(NamedTuple):
    """The bytes of one line of source."""

    most: int = 0  # held at a time
    allocated: int = 0  # in all
    at_peak: int = 0  # held when the block held the most


class Measured(TypedDict):
    """What one test did on one device, by line of source."""

    copies: NotRequired[dict[str, dict[str, tuple[int, int]]]]  # kind of KINDS -> line -> (number, bytes)
    peak_bytes: NotRequired[int]
    memory: NotRequired[dict[str, tuple[int, int, int]]]  # line -> LineMemory
    kept_nodes: NotRequired[int]  # autograd nodes of earlier steps that were kept


class Lines:
    """Finds the source of places such as "src/train.py:31", and names them relative to the folder of a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Path | None] = {}
        self._keys: dict[str | None, str] = {}

    def key(self, place: str | None) -> str:
        """Return "train.py: loss.backward()" for a place, or for the innermost line of a chain of places."""
        if place not in self._keys:
            file, number = self.split(place)
            self._keys[place] = UNKNOWN if file is None else f"{self.name(file)}: {self.source(file, number)}"
        return self._keys[place]

    def split(self, place: str | None) -> tuple[Path | None, int]:
        """Return the file and the line number of a place."""
        name, _, number = (place or "").rpartition(" > ")[2].rpartition(":")
        return (self._file(name), int(number)) if name and number.isdecimal() else (None, 0)

    def name(self, file: Path) -> str:
        """Return a file's path relative to the folder of the test; its short path if it belongs to an installed package."""
        if is_installed(str(file)):
            return short_path(str(file))
        return Path(os.path.relpath(file, self.folder)).as_posix()

    def source(self, file: Path, number: int) -> str:
        """Return the text of a line, without its indentation."""
        return linecache.getline(str(file), number).strip()

    def _file(self, name: str) -> Path:
        if name not in self._files:
            folders = (Path.cwd(), *map(Path, sys.path))
            self._files[name] = next((folder / name for folder in folders if os.path.isfile(folder / name)), None)
        return self._files[name] or Path(name)


@dataclass
class Block:
    """What one recorded block left: its events, its allocations, and what was noted about variables."""

    trace: Trace | None
    memory: Ledger | None
    watch: Watch | None
    graphs: KeptGraphs | None


class Recorder:
    """Records blocks of a test: `with recorder as trace:`. The fixture `toolkit_trace` is one.

    The trace is complete when its block has ended. Blocks follow one another; they don't nest.
    """

    def __init__(self, gpu: Device, memory: bool = False, limit_bytes: int | None = None) -> None:
        self._gpu, self._memory, self._limit_bytes = gpu, memory, limit_bytes
        self._open: list[object] = []
        self.blocks: list[Block] = []

    def __enter__(self) -> Trace:
        if self._open or self._gpu.recording is not None:
            found = f"{self._gpu.name} is being recorded, so the block's events can't be told apart from others"
            raise RecorderError("toolkit_trace", found, "End that recording first")
        watch = scope = graphs = None
        if self._memory:
            _forget(self._gpu)
            graphs = KeptGraphs()
            scope = allocation_scopes.begin(self._gpu)
            if self._limit_bytes is not None:
                log.watch = watch = Watch(self._limit_bytes, lambda: self._gpu.memory().allocated_bytes)
        recording = self._gpu.record()
        try:
            trace = recording.__enter__()
        except BaseException:
            log.watch = None
            if scope is not None:
                allocation_scopes.drop(scope)
            raise
        if graphs is not None:
            graphs.__enter__()
        self._open = [trace, recording, scope, watch, graphs]
        return trace

    def __exit__(self, *error: object) -> None:
        trace, recording, scope, watch, graphs = self._open
        self._open, log.watch = [], None
        if graphs is not None:
            graphs.__exit__()  # type: ignore[attr-defined]
        try:
            recording.__exit__(*error)  # type: ignore[attr-defined]
        finally:
            memory = Ledger(allocation_scopes.end(scope)) if scope is not None else None  # type: ignore[arg-type]
        self.blocks.append(Block(trace, memory, watch, graphs))  # type: ignore[arg-type]


def _forget(gpu: Device) -> None:
    """Free what earlier tests left, so that a peak doesn't depend on their order."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):  # pytest sets them to a failed test's error
        vars(sys).pop(name, None)
    gc.collect()
    if gpu.torch.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()


def measured(blocks: list[Block], lines: Lines, copies: bool, memory: bool) -> Measured:
    """Return what the blocks did: copies added up over all of them, and the memory of the one with the highest peak."""
    found: Measured = {}
    if copies:
        found["copies"] = {kind: by_line([events_of(b.trace, kind) for b in blocks if b.trace], lines) for kind in KINDS}
    if memory:
        ledger = highest(blocks).memory
        assert ledger is not None
        found["peak_bytes"] = ledger.peak_bytes
        found["memory"] = {key: (m.most, m.allocated, m.at_peak) for key, m in memory_by_line(ledger, lines).items()}
        found["kept_nodes"] = most_kept(blocks).nodes
    return found


def highest(blocks: list[Block]) -> Block:
    """Return the block with the highest peak."""
    return max(blocks, key=lambda block: block.memory.peak_bytes if block.memory else 0)


def most_kept(blocks: list[Block]) -> KeptGraphs:
    """Return what was noted about graphs in the block that kept the most of them."""
    return max((block.graphs for block in blocks if block.graphs is not None), key=lambda graphs: graphs.nodes)


def by_line(traces: list[Trace], lines: Lines) -> dict[str, tuple[int, int]]:
    """Return the number and the bytes of the events by line, the most events first."""
    number, size = Counter[str](), Counter[str]()
    for trace in traces:
        for where, n_bytes in zip(trace.text("where"), trace["bytes"].tolist(), strict=True):
            key = lines.key(where)
            number[key] += 1
            size[key] += n_bytes
    return {key: (n, size[key]) for key, n in sorted(number.items(), key=lambda item: (-item[1], item[0]))}


def memory_by_line(ledger: Ledger, lines: Lines) -> dict[str, LineMemory]:
    """Return the bytes of each line."""
    codes, names = ledger.group("where")
    keys = [lines.key(name) for name in names]
    index = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    codes = np.array([index[key] for key in keys])[codes] if keys else codes
    peaks = ledger.own_peaks(codes, len(index))
    sizes = ledger.blocks.bytes
    total = np.bincount(codes, sizes * (ledger.blocks.begin >= ledger.opening), len(index))
    alive = ledger.alive()
    at_peak = np.bincount(codes[alive], sizes[alive], len(index))
    return {key: LineMemory(int(peaks[i]), int(total[i]), int(at_peak[i])) for key, i in sorted(index.items())}


def totals(copies: Mapping[str, Mapping[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    """Return the number and the bytes of each kind of copy."""
    return {kind: (sum(n for n, _ in by.values()), sum(b for _, b in by.values())) for kind, by in copies.items()}
