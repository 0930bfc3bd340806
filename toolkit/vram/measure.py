"""What a stretch of code did with memory: `with tk.memory() as m:`, `@tk.memory`.

A scope begins and ends a range of the allocators' history (`devices/history.py`), names what is alive by the variables that
hold it (`owners.py`), and sums it (`ledger.py`). Scopes nest; each has its own peak, exact and without touching
anybody's counters. Code that raises, is interrupted or awaits is measured like any other.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from time import perf_counter
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from toolkit.core.callers import file_of, ipython_shell
from toolkit.core.display import render
from toolkit.core.errors import RecorderError, ToolkitError
from toolkit.core.units import bytes_text, seconds_text
from toolkit.gpu import allocation_scopes
from toolkit.gpu import host_memory as host
from toolkit.gpu.device import Device
from toolkit.gpu.opening import open_device
from toolkit.trace.events import Trace, TraceBuilder
from toolkit.trace.ledger import Ledger, line_of
from toolkit.vram import advice as shortage
from toolkit.vram import owners
from toolkit.vram.what_if import what_if

if TYPE_CHECKING:
    import pandas as pd

F = TypeVar("F", bound=Callable[..., Any])
_EXPLAINED = "Where the memory went:"  # begins the note on an out-of-memory error
# what cuBLAS takes with its first product, and keeps: aten/src/ATen/cuda/CublasHandlePool.cpp, from Hopper on and before
_CUBLAS_BYTES = (4096 * 8 * 1024, 4096 * 2 * 1024 + 16 * 8 * 1024)
_SOURCES = 400  # lines of source that a measurement keeps, those of the most bytes first


class MemoryUse:
    """What code did with memory: made by `tk.memory`, and by `tk.open_memory` from a file. Complete once its block has ended.

    All bytes are as the allocator counts them. `peak_bytes` is the most that was allocated meanwhile (what
    `torch.cuda.max_memory_allocated` says after a reset at the beginning), `baseline_bytes` what was when it began,
    `kept_bytes` what is more at the end, `freed_bytes` what was given back of the baseline. `trace` has every event, `ledger`
    the sums, `host` the resident memory of this process. Reading it while the block runs raises RecorderError.
    """

    def __init__(self, trace: Trace | None = None) -> None:
        self._trace = trace
        self.host: host.HostScope | None = None
        self.shortage: shortage.Shortage | None = None  # what an out-of-memory error meant

    @property
    def trace(self) -> Trace:
        if self._trace is None:
            found, do = "its block still runs", "Leave the `with tk.memory()` block first"
            raise RecorderError("reading a measurement of memory", found, do)
        return self._trace

    @cached_property
    def ledger(self) -> Ledger:
        return Ledger(self.trace)

    @property
    def device(self) -> str:
        """The device's name; "none" where there was only the host."""
        return str(self.trace.meta.get("device", "unknown"))

    @property
    def peak_bytes(self) -> int:
        return self.ledger.peak_bytes

    @property
    def baseline_bytes(self) -> int:
        return self.ledger.baseline_bytes

    @property
    def end_bytes(self) -> int:
        return self.ledger.end_bytes

    @property
    def kept_bytes(self) -> int:
        return self.ledger.kept_bytes

    @property
    def freed_bytes(self) -> int:
        return self.ledger.freed_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """The most that the allocator had taken from the driver."""
        return self.ledger.peak_reserved_bytes

    @property
    def host_peak_bytes(self) -> int:
        """The most that this process held of the host's memory; 0 where that isn't known."""
        return int(self.trace.meta.get("host", {}).get("peak_bytes", 0))

    @property
    def host_tensor_bytes(self) -> int:
        """What variables held of the host's memory in tensors at the end."""
        return int(self.trace.meta.get("host", {}).get("tensor_bytes", 0))

    @property
    def elapsed_s(self) -> float:
        """How long the block took, on the host."""
        return float(self.trace.meta.get("elapsed_s", 0.0))

    def at_peak(self) -> pd.DataFrame:
        """Who held the memory at the peak, the largest first; see `Ledger.holders`."""
        return self.ledger.holders()

    def by(self, what: str) -> pd.DataFrame:
        """What each "owner", "kind", "where", "line", "cell" or "step" had; see `Ledger.by`."""
        return self.ledger.by(what)

    def line(self) -> str:
        """The measurement in one line."""
        if self.device == "none":
            return f"no GPU memory used, host peak {bytes_text(self.host_peak_bytes)}, {seconds_text(self.elapsed_s)}"
        parts = [f"peak {bytes_text(self.peak_bytes)}", f"kept {_signed(self.kept_bytes)}"]
        if self.freed_bytes:
            parts.append(f"freed {bytes_text(self.freed_bytes)}")
        if self.trace.meta.get("failed"):
            parts.append(f"ended with {self.trace.meta['failed']}")
        if self.trace.meta.get("unaccounted_bytes"):
            parts.append(f"history incomplete by {bytes_text(abs(self.trace.meta['unaccounted_bytes']))}")
        if self.trace.meta.get("problem"):
            parts.append(f"owners not found: {self.trace.meta['problem']}")
        return f"{', '.join(parts)} ({self.device}, {seconds_text(self.elapsed_s)})"

    def __repr__(self) -> str:
        if self._trace is None:
            return "MemoryUse(still running)"
        return "\n".join([self.line(), *(f"  {sentence}" for sentence in self.ledger.sentences())])

    def what_if(self, gpus: Iterable[str] | None = None, settings: Iterable[str] | None = None) -> pd.DataFrame:
        """Would it have fit on other GPUs, or with other settings of the allocator? See `replaying.what_if`."""
        return what_if(self.trace, gpus, settings, device=self.ledger.device)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the measurement to `path`, whole or not at all; `tk.open_memory` reads it."""
        return self.trace.save(path)

    def timeline(self) -> Any:
        """The interactive picture of this measurement. Needs the `lab` extra."""
        return render("timeline", self)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write a self-contained page with the picture and its tables (no front-end package needed)."""
        written: Path = render("page", self, path)
        return written

    def _repr_html_(self) -> str | None:
        return None if self._trace is None else render("html", self)

    def to_snapshot(self, path: str | os.PathLike[str]) -> Path:
        """Write PyTorch's snapshot format, which pytorch.org/memory_viz opens."""
        from toolkit.trace.snapshot.write import write_snapshot

        return write_snapshot(self.trace, path)


class Scope:
    """A `with tk.memory()` block."""

    def __init__(self, device: Device | str | None, *, lines: bool = True) -> None:
        self._device, self._lines = device, lines
        self.use = MemoryUse()

    def __enter__(self) -> MemoryUse:
        device = None if self._device is None else open_device(self._device)
        self.use = MemoryUse()
        self._begun = allocation_scopes.begin(device, lines=self._lines)
        self._host = host.begin()
        self._start_s = perf_counter()
        return self.use

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        self.end(variables_of(sys._getframe(1)), error)

    def end(self, variables: Mapping[str, Any], error: BaseException | None = None) -> MemoryUse:
        """End the block: `variables` are those whose names may own memory."""
        elapsed_s = perf_counter() - self._start_s
        self.use.host = host.end(self._host)
        try:
            trace = allocation_scopes.end(self._begun)
        except Exception as problem:
            if error is None:
                raise
            trace = TraceBuilder().build({"device": "none", "problem": repr(problem)})  # the user's own error comes first
        meta: dict[str, Any] = {"elapsed_s": elapsed_s, "host": dict(vars(self.use.host))}
        if error is not None:
            meta["failed"] = type(error).__name__
        try:
            found = _holders(variables, error)
            meta["host"]["tensor_bytes"] = sum(holder.bytes for (on, _), holder in found.items() if on == "cpu")
            self.use._trace = with_owners(trace, found, meta)
            full = _out_of_memory(error)
            if full is not None:
                _explained(self.use, full, variables, found)
        except Exception as problem:  # what people's variables do when looked at must not stand in for what their code did
            self.use._trace = Trace(trace.columns, trace.strings, {**trace.meta, **meta, "problem": repr(problem)})
        return self.use


def why_out_of_memory(error: BaseException, variables: Mapping[str, Any], device: Device | None = None) -> shortage.Shortage:
    """Who holds what while `error` still has its traceback, where no scope ran. Adds it to the error as a note."""
    begun = allocation_scopes.begin(device)
    trace = allocation_scopes.end(begun)
    found = _holders(variables, error)
    return _explained(MemoryUse(with_owners(trace, found, {})), error, variables, found)


def _out_of_memory(error: BaseException | None) -> torch.OutOfMemoryError | None:
    """The out-of-memory error that `error` is, or comes of."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, torch.OutOfMemoryError):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def explained(error: BaseException) -> bool:
    """Does an out-of-memory error say already who held what?"""
    return any(note.startswith(_EXPLAINED) for note in getattr(error, "__notes__", ()))


def _explained(
    use: MemoryUse, error: BaseException, variables: Mapping[str, Any], found: Mapping[owners.Place, owners.Holder]
) -> shortage.Shortage:
    """What an out-of-memory error means, added to it once: the innermost scope knows its lines best."""
    limit = int(use.trace.meta.get("limit_bytes", 0))
    use.shortage = shortage.explain(use.ledger, variables, found, error, limit)
    if not explained(error):
        error.add_note(f"{_EXPLAINED}\n{use.shortage}")
    return use.shortage


def memory(device: Any = None, *, lines: bool = True) -> Any:
    """`with tk.memory() as m:` measures what a block does with memory; `@tk.memory` what each call of a function does.

    `device` is what `tk.device` takes or returns; without it, the device in use: the open virtual GPU, else CUDA.
    `lines=False` doesn't ask which line allocated, which is most of what measuring costs; bytes and steps stay exact. A
    decorated function prints a line a call, and its last measurement is `function.memory`. See MemoryUse for what is known.
    """
    if callable(device) and not isinstance(device, Device):
        return _decorated(device)
    return _Both(device, lines=lines)


class _Both(Scope):
    """`tk.memory(device)`: a block, or a decorator."""

    def __call__(self, function: F) -> F:
        return _decorated(function, self._device, self._lines)


def _decorated(function: F, device: Device | str | None = None, lines: bool = True) -> F:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        found, do = "it runs while somebody takes its values", "Write `with tk.memory():` around what takes them"
        raise ToolkitError(f"measuring each call of the generator {function.__name__}", found, do)

    def begin() -> tuple[Scope, MemoryUse]:
        scope = Scope(device, lines=lines)
        return scope, scope.__enter__()

    def end(scope: Scope, error: BaseException | None) -> None:
        wrapper.memory = scope.end(variables_of(sys._getframe(2)), error)  # type: ignore[attr-defined]
        print(f"{getattr(function, '__qualname__', type(function).__name__)}: {wrapper.memory.line()}")  # type: ignore[attr-defined]

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            scope, _ = begin()
            error: BaseException | None = None
            try:
                return await function(*args, **kwargs)
            except BaseException as raised:
                error = raised
                raise
            finally:
                end(scope, error)
                error = None  # else the error and this frame would keep each other

    else:

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            scope, _ = begin()
            error: BaseException | None = None
            try:
                return function(*args, **kwargs)
            except BaseException as raised:
                error = raised
                raise
            finally:
                end(scope, error)
                error = None  # else the error and this frame would keep each other

    return wrapper  # type: ignore[return-value]


def open_memory(path: str | os.PathLike[str]) -> MemoryUse:
    """A measurement that `MemoryUse.save` wrote, or PyTorch's memory snapshot. Raises TraceError for anything else.

    Nothing in the file is executed.
    """
    from toolkit.trace.opening import open_trace

    return MemoryUse(open_trace(path))


# ---- whose it is


def with_owners(trace: Trace, found: Mapping[owners.Place, owners.Holder], meta: Mapping[str, Any]) -> Trace:
    """`trace` with the owner and kind of every allocation that is alive at its end, as `found` names them by place.

    The others have the kind that their line tells. `meta` is added, and the source of the lines of the most bytes.
    """
    if not len(trace):
        return Trace(trace.columns, trace.strings, {**trace.meta, **meta})
    ledger = Ledger(trace)
    device_type = "vgpu" if str(trace.meta["device"]).startswith("virtual") else "cuda"
    codes = {text: i for i, text in enumerate(trace.strings)}
    owner, name = trace["owner"].copy(), trace["name"].copy()
    nowhere = owners.kind_by_place(None) if trace.meta.get("lines") else None
    kinds = [*map(owners.kind_by_place, trace.strings), nowhere]  # the last for code -1
    by_place = np.array([-1 if kind is None else codes.setdefault(kind, len(codes)) for kind in kinds], np.int32)
    allocs = ledger.blocks.row
    name[allocs] = by_place[trace["where"][allocs]]
    for row in allocs[ledger.blocks.end == len(ledger.rows)].tolist():
        holder = found.get((device_type, int(trace["address"][row])))
        if holder is None and device_type == "cuda" and int(trace["requested"][row]) in _CUBLAS_BYTES:
            holder = owners.Holder("(cuBLAS's workspace)", "workspace", 0)
        if holder is not None:
            owner[row] = codes.setdefault(holder.owner, len(codes))
            if holder.kind != "activations" or name[row] < 0:
                name[row] = codes.setdefault(holder.kind, len(codes))
    columns = {**trace.columns, "owner": owner, "name": name}
    return Trace(columns, list(codes), {**trace.meta, **meta, "source": _sources(ledger)})


def _holders(variables: Mapping[str, Any], error: BaseException | None) -> dict[owners.Place, owners.Holder]:
    """Who holds what: variables first, then what none of them does."""
    shell = ipython_shell()
    return {**owners.hidden(shell, error), **owners.find(variables)}


def variables_of(frame: FrameType | None) -> dict[str, Any]:
    """The variables that a frame sees; a notebook's are its globals."""
    return {} if frame is None else {**frame.f_globals, **owners.locals_of(frame)}


def _sources(ledger: Ledger) -> dict[str, str]:
    """The source of the user's lines that allocated the most, and of those that couldn't."""
    codes, names = ledger.group("line")
    total = np.bincount(codes, ledger.blocks.bytes, len(names))
    places = [names[i] for i in np.argsort(-total)[:_SOURCES].tolist()]
    failed = ledger.trace.select(ledger.trace.is_kind("oom")).text("where")
    found = {}
    for place in (*places, *(line_of(where) for where in failed if where)):
        text = _source_line(place)
        if text:
            found[place] = text
    return found


def _source_line(place: str) -> str | None:
    file, _, line = place.rpartition(":")
    if not file or not line.isdigit():
        return None
    return linecache.getline(file_of(file), int(line)).strip() or None


def _signed(n_bytes: int) -> str:
    return f"{'+' if n_bytes > 0 else '-' if n_bytes < 0 else ''}{bytes_text(abs(n_bytes))}"
