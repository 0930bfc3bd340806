"""Record the memory of each cell of a notebook, on disk, so that the measurements survive a killed kernel.

A session is a folder with `cells.jsonl` (one line of numbers per cell) and one trace per cell. Opening a session reads the
numbers; the trace of a cell is read when it is first used.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from asyncio import CancelledError
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from filelock import FileLock, Timeout
from msgspec import Meta

from toolkit.core.callers import current_cell
from toolkit.core.errors import ToolkitError, TraceError
from toolkit.core.files import check_path, read_regular, shown
from toolkit.core.schema import convert, parse_json
from toolkit.gpu import allocation_scopes
from toolkit.gpu.device import Device
from toolkit.tune.store import cache_folder
from toolkit.vram.hidden import user_variables
from toolkit.vram.measure import MemoryUse, Scope, open_memory

KEPT_SESSIONS = 20  # older ones are deleted when a session begins, unless their kernels run
_CELLS = "cells.jsonl"
_LARGEST = 64 << 20  # bytes of that file
_Number = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]


@dataclass(frozen=True)
class CellUse:
    """The memory use of one run of a cell, in bytes. `use` is the complete measurement."""

    number: _Number
    title: str  # first line of code
    status: str  # ok, error or interrupted
    device: str
    baseline_bytes: _Number
    peak_bytes: _Number
    end_bytes: _Number
    freed_bytes: _Number
    reserved_bytes: _Number
    host_bytes: _Number
    elapsed_s: float
    ended_s: float  # since the epoch
    file: str = field(repr=False)

    @cached_property
    def use(self) -> MemoryUse:
        """The measurement, read from the session's folder. Raises TraceError if its file is gone."""
        return open_memory(self.file)

    def read(self) -> MemoryUse:
        """Return the measurement without caching it: a session must not hold the events of all its cells."""
        held: MemoryUse | None = self.__dict__.get("use")
        return open_memory(self.file) if held is None else held

    @property
    def kept_bytes(self) -> int:
        return self.end_bytes - self.baseline_bytes


class Session:
    """The cells of a notebook in the order in which they ran, and the folder that stores them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cells: list[CellUse] = []
        self.problem: str | None = None  # why cells cannot be stored; None if they can
        self.budget_bytes: int | None = None
        self._lock = _lock_of(folder)  # held from `begin` until this session or its process ends

    @classmethod
    def begin(cls) -> Session:
        """Create a session in the user's cache folder, and delete the oldest sessions that have ended."""
        name = f"{time.strftime('%Y-%m-%d %H.%M.%S')} {os.getpid()}"
        folder = sessions_folder() / name
        for again in range(2, 100):
            if not folder.exists():
                break
            folder = sessions_folder() / f"{name} {again}"
        session = cls(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with suppress(OSError):  # some network disks have no locks: later sessions may then delete this one
                session._lock.acquire()
        except OSError as error:
            session.problem = f"This session is not saved: {error}. Set TOOLKIT_CACHE to a writable folder."
        for old in list(saved_sessions())[KEPT_SESSIONS:]:
            with suppress(Timeout, OSError):
                with _lock_of(old):
                    pass  # no kernel writes it; the lock is released before, since Windows can't delete an open file
                shutil.rmtree(old, ignore_errors=True)
        return session

    @classmethod
    def open(cls, folder: str | os.PathLike[str] | None = None) -> Session:
        """Open the saved session in `folder` (default: the latest one). Raises TraceError if there is none."""
        if folder is None:
            folder = next(saved_sessions(), None)
            if folder is None:
                raise TraceError("opening a session", "no session was saved", "Start one with %memory on")
        asked = f"opening the session {shown(folder)}"
        session = cls(check_path(folder, asked, TraceError))
        try:
            lines = read_regular(session.folder / _CELLS, asked, TraceError, _LARGEST).split(b"\n")
        except TraceError as error:
            raise TraceError(asked, error.found, "%memory sessions lists the saved ones") from error
        for place, line in enumerate(lines, 1):
            with suppress(ValueError):  # the last line is incomplete if the kernel was killed while writing it
                facts = parse_json(line, dict[str, Any]) | {"file": str(session.folder / f"{place:04}.trace")}
                session.cells.append(convert(facts, CellUse))
        return session

    def add(self, number: int, title: str, status: str, use: MemoryUse) -> CellUse:
        """Append a cell that has run, and save it."""
        file = self.folder / f"{len(self.cells) + 1:04}.trace"
        found = use.ledger
        cell = CellUse(
            number, title, status, use.device, found.baseline_bytes, found.peak_bytes, found.end_bytes, found.freed_bytes,
            found.peak_reserved_bytes, use.host_peak_bytes, use.elapsed_s, time.time(), str(file),
        )  # fmt: skip
        cell.__dict__["use"] = use
        if self.cells and self.problem is None:
            self.cells[-1].__dict__.pop("use", None)  # it is on disk; a session must not hold the events of all its cells
        self.cells.append(cell)
        if self.problem is None:
            try:
                use.save(file)
                facts = {name: value for name, value in asdict(cell).items() if name != "file"}
                with (self.folder / _CELLS).open("a", encoding="utf-8") as log:
                    log.write(json.dumps(facts) + "\n")
            except (OSError, ToolkitError) as error:
                self.problem = f"Cells from {number} on are not saved: {error}"
        return cell

    def find(self, number: int) -> CellUse:
        """Return the last run of the cell with this number. Raises ToolkitError if it was not measured."""
        for cell in reversed(self.cells):
            if cell.number == number:
                return cell
        measured = ", ".join(str(cell.number) for cell in self.cells) or "none"
        raise ToolkitError(
            f"the memory of cell {number}", "it was not measured", f"Choose one of the measured cells: {measured}"
        )


def _lock_of(folder: Path) -> FileLock:
    """Return the lock that the kernel which writes this session holds."""
    return FileLock(folder / ".lock", timeout=0, thread_local=False)


def sessions_folder() -> Path:
    """Return the folder of all sessions."""
    return cache_folder() / "memory"


def saved_sessions() -> Iterator[Path]:
    """Yield the folders of sessions with at least one cell, newest first."""
    try:
        folders = sorted(sessions_folder().iterdir(), reverse=True)
    except OSError:
        return
    yield from (folder for folder in folders if os.path.isfile(folder / _CELLS))


class Recorder:
    """Measure every cell that a shell runs between `on` and `off`. `show(cell, source)` is called when a cell ends."""

    def __init__(self, shell: Any, show: Any, device: Device | None = None) -> None:
        self.shell, self.show, self.device = shell, show, device
        self.session = Session.begin()
        self._running: list[tuple[Scope, Any]] = []  # a stack: a magic may run a cell inside a cell

    def on(self) -> None:
        """Start with the next cell."""
        allocation_scopes.keep()
        self.shell.events.register("pre_run_cell", self._begin)
        self.shell.events.register("post_run_cell", self._end)

    def off(self) -> None:
        """Stop, possibly in the middle of a cell."""
        for name, callback in (("pre_run_cell", self._begin), ("post_run_cell", self._end)):
            with suppress(ValueError):  # already unregistered, for example by a reset of the shell
                self.shell.events.unregister(name, callback)
        while self._running:
            self._running.pop()[0].end({})
        allocation_scopes.release()

    def _begin(self, info: Any) -> None:
        scope = Scope(self.device)
        scope.__enter__()
        self._running.append((scope, info))

    def _end(self, result: Any) -> None:
        info = self._running[-1][1] if result is None and self._running else getattr(result, "info", None)  # None: cancelled
        if all(info is not running for _, running in self._running):  # not measured: the cell that called `on`, or an empty one
            return
        while self._running[-1][1] is not info:
            self._running.pop()[0].end({})
        scope, error = self._running.pop()[0], KeyboardInterrupt() if result is None else None
        if result is not None:
            error = result.error_before_exec or result.error_in_exec
        use = scope.end(user_variables(self.shell), error)
        source = info.raw_cell
        if not info.store_history or _only_asks(source):  # run by a magic inside a cell that is measured
            return
        status = "ok" if error is None else "interrupted" if isinstance(error, KeyboardInterrupt | CancelledError) else "error"
        self.show(self.session.add(current_cell(), title_of(source), status, use), source)


def _only_asks(source: str) -> bool:
    """Return whether a cell contains only %memory magics."""
    lines = [line for line in map(str.strip, source.splitlines()) if line and not line.startswith("#")]
    return bool(lines) and all(re.match(r"%memory\b", line) for line in lines)


def title_of(source: str) -> str:
    """Return the first line of a cell that is not empty, a comment or a cell magic, at most 80 characters."""
    lines = [line.strip() for line in source.splitlines()]
    return next((line for line in lines if line and not line.startswith(("#", "%%"))), lines[0] if lines else "")[:80]
