"""Record the blocks of a test: copies and memory by line of source, as plain data for reports and baselines.

A line is identified by its file, relative to the folder of the test, and its source text. So a baseline stays valid when lines
move. While a block holds more memory than its limit, `Watch` notes which variables hold it: later they are gone.
"""

from __future__ import annotations

import gc
import linecache
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NotRequired, TypedDict

import numpy as np
import torch
from torch import nn

from toolkit.core.callers import is_installed, short_path
from toolkit.core.errors import RecorderError
from toolkit.decode.copy_budget import events_of
from toolkit.gpu import allocation_scopes
from toolkit.gpu.allocation_log import log
from toolkit.gpu.device import Device
from toolkit.trace.events import Trace
from toolkit.trace.ledger import Ledger
from toolkit.vram import owners

KINDS = ("h2d", "d2h", "d2d", "pageable", "waits")
UNKNOWN = "(unknown line)"


class Measured(TypedDict):
    """What one test did on one device, by line of source."""

    copies: NotRequired[dict[str, dict[str, tuple[int, int]]]]  # kind of KINDS -> line -> (number, bytes)
    peak_bytes: NotRequired[int]
    memory: NotRequired[
        dict[str, tuple[int, int, int]]
    ]  # line -> bytes: most held at a time, allocated in all, held at the peak


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
        return (self._file(name), int(number)) if name and number.isdigit() else (None, 0)

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
            self._files[name] = next((folder / name for folder in folders if (folder / name).is_file()), None)
        return self._files[name] or Path(name)


@dataclass(frozen=True)
class Frame:
    """A function of the user's that was running: file, line, its first line, and whether it is a method of a module."""

    file: Path
    line: int
    first: int
    of_module: bool


@dataclass
class Watch:
    """Notes who holds the memory whenever a block holds more than `limit_bytes`, and again when the excess has doubled."""

    limit_bytes: int
    allocated: Callable[[], int]
    next_bytes: int = 0
    frames: list[Frame] = field(default_factory=list)  # the outermost first
    held: dict[int, str] = field(default_factory=dict)  # address -> "index of a frame:path of a variable"; -1: a global

    def __call__(self) -> None:
        excess = self.allocated() - self.limit_bytes
        if excess <= self.next_bytes:
            return
        self.next_bytes = 2 * excess
        running: list[FrameType] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if not is_installed(frame.f_code.co_filename):
                running.insert(0, frame)
            frame = frame.f_back
        self.frames, variables = [], []
        for index, frame in enumerate(running):
            names, code = owners.locals_of(frame), frame.f_code
            of_module = isinstance(names.get("self"), nn.Module)
            self.frames.append(Frame(Path(code.co_filename), frame.f_lineno, code.co_firstlineno, of_module))
            if code.co_name != "<module>":
                variables += [(f"{index}:{name}", value) for name, value in names.items()]
        for frame in running:
            variables += [(f"-1:{name}", value) for name, value in frame.f_globals.items() if not name.startswith("__")]
        self.held = {address: holder.owner for (_, address), holder in owners.walk(variables).items()}


@dataclass
class Block:
    """What one recorded block left: its events, its allocations, and what the watch noted."""

    trace: Trace | None
    memory: Ledger | None
    watch: Watch | None


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
        watch = scope = None
        if self._memory:
            _forget(self._gpu)
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
        self._open = [trace, recording, scope, watch]
        return trace

    def __exit__(self, *error: object) -> None:
        trace, recording, scope, watch = self._open
        self._open, log.watch = [], None
        try:
            recording.__exit__(*error)  # type: ignore[attr-defined]
        finally:
            memory = Ledger(allocation_scopes.end(scope)) if scope is not None else None  # type: ignore[arg-type]
        self.blocks.append(Block(trace, memory, watch))  # type: ignore[arg-type]


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
        found["memory"] = memory_by_line(ledger, lines)
    return found


def highest(blocks: list[Block]) -> Block:
    """Return the block with the highest peak."""
    return max(blocks, key=lambda block: block.memory.peak_bytes if block.memory else 0)


def by_line(traces: list[Trace], lines: Lines) -> dict[str, tuple[int, int]]:
    """Return the number and the bytes of the events by line, the most events first."""
    number, size = Counter[str](), Counter[str]()
    for trace in traces:
        for where, n_bytes in zip(trace.text("where"), trace["bytes"].tolist(), strict=True):
            key = lines.key(where)
            number[key] += 1
            size[key] += n_bytes
    return {key: (n, size[key]) for key, n in sorted(number.items(), key=lambda item: (-item[1], item[0]))}


def memory_by_line(ledger: Ledger, lines: Lines) -> dict[str, tuple[int, int, int]]:
    """Return bytes by line: the most that it held at a time, those that it allocated in all, and those held at the peak."""
    codes, names = ledger.group("where")
    keys = [lines.key(name) for name in names]
    index = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    codes = np.array([index[key] for key in keys])[codes] if keys else codes
    peaks = ledger.own_peaks(codes, len(index))
    sizes = ledger.blocks.bytes
    total = np.bincount(codes, sizes * (ledger.blocks.begin >= ledger.opening), len(index))
    alive = ledger.alive()
    at_peak = np.bincount(codes[alive], sizes[alive], len(index))
    return {key: (int(peaks[i]), int(total[i]), int(at_peak[i])) for key, i in sorted(index.items())}


def totals(copies: Mapping[str, Mapping[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    """Return the number and the bytes of each kind of copy."""
    return {kind: (sum(n for n, _ in by.values()), sum(b for _, b in by.values())) for kind, by in copies.items()}
