"""Measure the GPU memory of a block of code: `with tk.memory() as m:`, `@tk.memory`.

A scope records a range of the allocation log (`gpu/allocation_scopes.py`), names the variable that owns each live block
(`owners.py`), and sums the bytes (`trace/ledger.py`). Scopes may nest. Each one has its own exact peak, and no allocator
counter is reset. Code that raises, is interrupted or awaits is measured, too.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from time import perf_counter
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from toolkit.core.callers import ipython_shell
from toolkit.core.collector import no_collection
from toolkit.core.display import render
from toolkit.core.errors import RecorderError, ToolkitError, TraceError, brief, kind_of, with_causes
from toolkit.core.flags import flag
from toolkit.core.signals import signals_deferred
from toolkit.core.units import bytes_text, seconds_text
from toolkit.gpu import allocation_scopes, host_memory
from toolkit.gpu.allocation_log import log
from toolkit.gpu.catalogue import Gpus
from toolkit.gpu.device import Device
from toolkit.gpu.opening import open_device
from toolkit.trace.events import Trace, TraceBuilder
from toolkit.trace.ledger import Ledger, devices_of, fullest
from toolkit.vram import hidden, owners
from toolkit.vram.advice import Shortage, explain
from toolkit.vram.attribution import with_owners
from toolkit.vram.frames import locals_of
from toolkit.vram.what_if import what_if

if TYPE_CHECKING:
    import pandas as pd

F = TypeVar("F", bound=Callable[..., Any])
_EXPLAINED = "Where the memory went:"  # first line of the note that is added to an out-of-memory error
_MEASURED = {"opening", "elapsed_s"}  # metadata of measurements; recordings have neither
HOST_ONLY = {"none": "no GPU memory used", "cpu": "memory of the CPU isn't counted"}  # devices without memory of a GPU
_HOST_ADVICE = (
    'Only memory of GPUs is counted. Without one, open a virtual GPU, gpu = tk.device("virtual:h200"), and create the tensors '
    "with device=gpu.torch."
)


class MemoryUse:
    """The memory use of a block of code. Created by `tk.memory`, or by `tk.open_memory` from a file.

    All sizes are in bytes as the allocator counts them:

    - `peak_bytes`: the maximum allocated during the block (`torch.cuda.max_memory_allocated` after a reset at its start).
    - `baseline_bytes`: allocated when the block began. `end_bytes`: allocated when it ended.
    - `kept_bytes`: `end_bytes - baseline_bytes`. `freed_bytes`: the part of the baseline that the block freed.

    `trace` holds every event. The measurement is complete when the block has ended; reading it earlier raises RecorderError.
    Only memory of GPUs is counted. If no GPU was in use, sizes are 0. Reading sizes of a measurement of "cpu" raises
    RecorderError, except for those of the host: `host_peak_bytes` and `host_tensor_bytes`.
    """

    def __init__(self, trace: Trace | None = None, gpu: int | None = None) -> None:
        self._trace, self._gpu = trace, gpu
        self.host: host_memory.HostScope | None = None
        self.shortage: Shortage | None = None  # the explanation of an out-of-memory error

    @property
    def trace(self) -> Trace:
        if self._trace is None:
            found, do = "its block is still running", "Leave the `with tk.memory()` block first"
            raise RecorderError("reading a measurement of memory", found, do)
        return self._trace

    @cached_property
    def ledger(self) -> Ledger:
        return Ledger(self.trace, self._gpu)

    @property
    def _counted(self) -> Ledger:
        """The ledger, for the sizes that users read: those of the CPU would all be 0. Raises RecorderError for the CPU."""
        if self.device == "cpu":
            do = 'Measure on a GPU or a virtual one, such as "virtual:h200", or read host_peak_bytes'
            raise RecorderError("reading the memory of cpu", "only the memory of GPUs is counted", do)
        return self.ledger

    @property
    def device(self) -> str:
        """The name of the device, or "none" if no GPU was in use."""
        return str(self.trace.meta.get("device", "unknown"))

    @property
    def peak_bytes(self) -> int:
        return self._counted.peak_bytes

    @property
    def baseline_bytes(self) -> int:
        return self._counted.baseline_bytes

    @property
    def end_bytes(self) -> int:
        return self._counted.end_bytes

    @property
    def kept_bytes(self) -> int:
        return self._counted.kept_bytes

    @property
    def freed_bytes(self) -> int:
        return self._counted.freed_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """The maximum that the allocator reserved from the driver."""
        return self._counted.peak_reserved_bytes

    @property
    def host_peak_bytes(self) -> int:
        """The maximum resident host memory of this process; 0 if unknown."""
        return int(self.trace.meta.get("host", {}).get("peak_bytes", 0))

    @property
    def host_tensor_bytes(self) -> int:
        """Host memory of the tensors that variables held at the end of the block."""
        return int(self.trace.meta.get("host", {}).get("tensor_bytes", 0))

    @property
    def elapsed_s(self) -> float:
        """The time that the block took on the host, in seconds."""
        return float(self.trace.meta.get("elapsed_s", 0.0))

    def at_peak(self) -> pd.DataFrame:
        """Return the owners of the memory at the peak, one row per owner, kind and line, the largest first.

        Columns: `bytes`, `blocks` (their number), `share` (of the bytes held), `owner`, `kind`, `where`, and the `cell` and
        `step` of the largest block.
        """
        return self._counted.holders()

    def by(self, what: str) -> pd.DataFrame:
        """Return the memory grouped by "owner", "kind", "where", "line", "cell" or "step", the largest at the peak first.

        Columns: that name, `at_peak_bytes` (at the peak of the total), `peak_bytes` (the maximum of the group), `end_bytes`,
        `allocated_bytes` (the sum of all allocations in the block) and `blocks`. By "kind", there is a row for cached memory,
        which is reserved but not allocated, if the trace has segments.
        """
        return self._counted.by(what)

    def line(self) -> str:
        """Return the measurement as one line of text."""
        if self.device in HOST_ONLY:
            return f"{HOST_ONLY[self.device]}, host peak {bytes_text(self.host_peak_bytes)}{self._took()}"
        parts = [f"peak {bytes_text(self.peak_bytes)}", f"kept {_signed(self.kept_bytes)}"]
        parts += [f"freed {bytes_text(self.freed_bytes)}"] if self.freed_bytes else []
        if self.trace.meta.get("failed"):
            parts.append(f"ended with {self.trace.meta['failed']}")
        if self.trace.meta.get("unaccounted_bytes"):
            parts.append(f"history incomplete by {bytes_text(abs(self.trace.meta['unaccounted_bytes']))}")
        if self._partial:
            parts.append("without what was allocated before the recording")
        if self.trace.meta.get("problem"):
            parts.append(f"owners not found: {self.trace.meta['problem']}")
        return f"{', '.join(parts)} ({self.device}{self._which()}{self._took()})"

    @property
    def _partial(self) -> bool:
        """Whether this is the trace of a recording, which doesn't say what was allocated before."""
        return not _MEASURED & self.trace.meta.keys()

    def _which(self) -> str:
        """Return which GPU this is, if there is memory of several, and how to see another, unless this one was asked for."""
        there, shown = devices_of(self.trace), self.ledger.device
        if len(there) < 2:
            return ""
        other = next(device for device in there if device != shown)
        asked = self.ledger.trace.meta.get("device_index") is not None
        return f", GPU {shown}" + ("" if asked else f', one of {len(there)}: device="cuda:{other}" shows another')

    def _took(self) -> str:
        """Return the wall time of the block, on a virtual GPU too, or nothing for a snapshot, which doesn't say it."""
        return f", wall time {seconds_text(self.elapsed_s)}" if self.elapsed_s else ""

    def __repr__(self) -> str:
        if self._trace is None:
            return "MemoryUse(still running)"
        said = [self.advice()] if self.device in HOST_ONLY else self.ledger.sentences()
        return "\n".join([self.line(), *(f"  {sentence}" for sentence in said)])

    def advice(self) -> str:
        """Return what to do to count the memory, if none of a GPU was counted; otherwise ""."""
        return _HOST_ADVICE if self.device in HOST_ONLY else ""

    def what_if(self, gpus: Gpus = None, settings: str | Iterable[str] | None = None) -> pd.DataFrame:
        """Replay the allocations on other GPUs and with other allocator settings: one row per pair.

        `gpus` are GPUs of the catalogue or their keys, or one of them (default: all). `settings` are texts in the syntax of
        PYTORCH_CUDA_ALLOC_CONF, or one of them (default: PyTorch's defaults, and expandable segments). The columns include
        `fits`, `peak_allocated_bytes`, `peak_reserved_bytes`, where the replay fails (`fails_at`, `fails_cell`, `fails_step`)
        with which request (`asked_bytes`), and `smallest_bytes`: the memory of the smallest GPU on which the block fits with
        these settings, including the CUDA context. Raises UnknownNameError for an unknown GPU, and TraceError for a trace that
        doesn't say what was allocated before its recording began.
        """
        if self._partial:
            found, do = "the trace doesn't say what was allocated before its recording began", "Measure the run with tk.memory"
            raise TraceError("a replay on other GPUs", found, do)
        return what_if(self.trace, gpus, settings, device=self._counted.device)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the measurement to `path` atomically. `tk.open_memory` reads it."""
        return self.trace.save(path)

    def timeline(self) -> Any:
        """Return the interactive timeline of this measurement. Needs the `lab` extra."""
        _ = self._counted  # raises for the CPU
        return render("timeline", self)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write a self-contained HTML page with the timeline and its tables. Needs no front-end package."""
        return Path(render("page", self, path))

    def _repr_html_(self) -> str | None:
        return None if self._trace is None else render("html", self)

    def to_snapshot(self, path: str | os.PathLike[str]) -> Path:
        """Write the events as a PyTorch memory snapshot, which pytorch.org/memory_viz opens."""
        from toolkit.trace.snapshot.write import write_snapshot

        return write_snapshot(self.trace, path)


class Scope:
    """A `with tk.memory()` block. `asked` says whether the user wrote it: see `allocation_scopes.asked_for`."""

    def __init__(self, device: Device | str | torch.device | None, *, lines: bool = True, asked: bool = False) -> None:
        self._device, self._lines, self._asked = device, flag("lines", lines), asked
        self.use = MemoryUse()

    def __enter__(self) -> MemoryUse:
        if getattr(self, "_begun", None) in log.scopes:
            found, do = "this object already measures a block that has not ended", "Use another one for the inner block"
            raise RecorderError("measuring the memory of a block", found, do)
        device = None if self._device is None else open_device(self._device)
        self.use = MemoryUse()
        begun = None
        try:
            with signals_deferred:
                begun = self._begun = allocation_scopes.begin(device, lines=self._lines, asked=self._asked)
            self._host = host_memory.begin()
            self._start_s = perf_counter()
        except BaseException:  # without a value, the `with` statement never calls `__exit__`
            if begun is not None:
                allocation_scopes.drop(begun)
            raise
        return self.use

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        try:
            self.end(variables_of(sys._getframe(1)), error)
        except BaseException:  # an interrupt while the variables are collected
            allocation_scopes.drop(self._begun)
            raise

    def __del__(self) -> None:
        begun = getattr(self, "_begun", None)
        if begun in log.scopes:  # an interrupt came before the first line of `__exit__`
            allocation_scopes.drop(begun)

    def end(self, variables: Mapping[str, Any], error: BaseException | None = None) -> MemoryUse:
        """End the block and return its measurement. `variables` are the names that may own memory."""
        with no_collection():  # a collection would free what the trace still has
            try:
                elapsed_s = perf_counter() - self._start_s
                self.use.host = host_memory.end(self._host)
                trace = allocation_scopes.end(self._begun)
            except KeyboardInterrupt:
                allocation_scopes.drop(self._begun)
                raise
            except Exception as problem:
                if error is None:
                    raise
                trace = TraceBuilder().build({"device": "none", "problem": repr(problem)})  # the user's own error is raised
            meta: dict[str, Any] = {"elapsed_s": elapsed_s, "host": dict(vars(self.use.host))}
            if error is not None:
                meta["failed"] = type(error).__name__
            try:
                limit = owners.Limit()
                found = _holders(variables, error, limit)
                if limit.reached:
                    meta["problem"] = "there are more objects than a search looks at"
                meta["host"]["tensor_bytes"] = sum(holder.bytes for (on, _), holder in found.items() if on == "cpu")
                self.use._trace = with_owners(trace, found, meta)
                if (full := out_of_memory(error)) is not None:
                    _explained(self.use, full, variables, found)
            except Exception as problem:  # reading the user's variables may raise, and must not hide the user's own error
                self.use._trace = Trace(trace.columns, trace.strings, {**trace.meta, **meta, "problem": repr(problem)})
            return self.use


def why_out_of_memory(error: BaseException, variables: Mapping[str, Any]) -> Shortage:
    """Explain an out-of-memory error that was raised outside of any scope, and add the explanation to the error as a note."""
    with no_collection():  # as above
        with signals_deferred:  # an interrupt between the two would leave the scope open
            trace = allocation_scopes.end(allocation_scopes.begin())
        found = _holders(variables, error)
        return _explained(MemoryUse(with_owners(trace, found, {})), error, variables, found)


def out_of_memory(error: BaseException | None) -> torch.OutOfMemoryError | None:
    """Return the out-of-memory error among `error`, its causes and the members of groups, or None."""
    return next((one for one in with_causes(error) if isinstance(one, torch.OutOfMemoryError)), None)


def explained(error: BaseException) -> bool:
    """Return whether an out-of-memory error already has the note with its explanation."""
    return any(note.startswith(_EXPLAINED) for note in getattr(error, "__notes__", ()))


def _explained(
    use: MemoryUse, error: BaseException, variables: Mapping[str, Any], found: Mapping[owners.Place, owners.Holder]
) -> Shortage:
    """Explain an out-of-memory error. Only the innermost scope adds the note: it has the most precise lines."""
    use.shortage = explain(use.ledger, variables, found, error, int(use.trace.meta.get("limit_bytes", 0)))
    if not explained(error):
        error.add_note(f"{_EXPLAINED}\n{use.shortage}")
    return use.shortage


def memory(device: Any = None, *, lines: bool = True) -> Any:
    """Measure the memory of a block (`with tk.memory() as m:`) or of each call of a function (`@tk.memory`).

    `device` is a Device or a name that `tk.device` accepts. By default it is the device in use: the open virtual GPU, otherwise
    CUDA. Tensors on the CPU aren't counted: for "cpu", only the host memory of the whole process is measured.

    `lines=False` does not record the allocating lines. This avoids most of the overhead; bytes and steps stay exact. A
    decorated function prints one line per call and stores its last measurement as `function.memory`. See `MemoryUse`.

    Raises ToolkitError if anything but a function is decorated, and DeviceError if the device cannot be opened.
    """
    if device is None or isinstance(device, Device | str | torch.device):
        return _Both(device, lines=lines, asked=True)
    return _decorated(device)


class _Both(Scope):
    """The result of `tk.memory(device)`, which works as a context manager and as a decorator."""

    def __repr__(self) -> str:
        return "tk.memory(...), to be used as `with tk.memory() as m:` or as a decorator"

    def __getattr__(self, name: str) -> Any:
        if hasattr(MemoryUse, name):
            raise AttributeError(f"tk.memory() has no {name!r}, but the measurement of a block has: with tk.memory() as m: ...")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __call__(self, function: F) -> F:
        return _decorated(function, self._device, self._lines)


def _decorated(function: F, device: Device | str | torch.device | None = None, lines: bool = True) -> F:
    if isinstance(function, type):
        raise ToolkitError(f"measuring memory of the class {function.__name__}", "it is no function", "Decorate its methods")
    if isinstance(function, staticmethod) or not callable(function):
        found, do = "it is neither a function nor a device", 'Give a function, or a device such as "cuda:1"'
        if hasattr(function, "__get__"):  # property, classmethod and the like
            found, do = "it is not a function", f"Put @tk.memory below @{type(function).__name__}"
        raise ToolkitError(f"measuring the memory of {kind_of(function)}", found, do)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        found = "its body runs only while its values are consumed"
        do = "Write `with tk.memory():` around the loop that consumes them"
        raise ToolkitError(f"measuring each call of the generator {function.__name__}", found, do)

    class Call(Scope):
        """Measures one call. Its block is in `wrapper`, whose caller holds the variables."""

        def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
            use = wrapper.memory = self.end(variables_of(sys._getframe(2)), error)  # type: ignore[attr-defined]
            print(f"{getattr(function, '__qualname__', type(function).__name__)}: {use.line()}")

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            with Call(device, lines=lines, asked=True):
                return await function(*args, **kwargs)

    else:

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with Call(device, lines=lines, asked=True):
                return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def open_memory(path: str | os.PathLike[str], *, device: int | str | torch.device | None = None) -> MemoryUse:
    """Open a measurement that `MemoryUse.save` wrote, a PyTorch memory snapshot, or another trace that has allocations.

    `device` is the GPU to show if the file has several: its index, or a name such as "cuda:1". By default it is the measured
    one, or else the one with the highest peak, which includes memory that was allocated before the history of a snapshot began.

    Traces of recordings, such as those of saved runs, don't say what was allocated before, and their peak is without it.
    Nothing in the file is executed. Raises TraceError if the file is none of them, or has no memory of `device`.
    """
    from toolkit.trace.opening import open_allocations

    trace = open_allocations(path, _MEASURED)
    if device is not None:
        return MemoryUse(trace, _gpu_in(trace, device, path))
    return MemoryUse(trace, None if "elapsed_s" in trace.meta else fullest(trace))


def _gpu_in(trace: Trace, device: object, path: object) -> int:
    """Return the index of a GPU whose memory is in the trace of a file."""
    match, there = re.fullmatch(r"(cuda:)?([0-9]{1,5})", str(device)), devices_of(trace)
    if match is None or int(match[2]) not in there:
        found = f"the file has memory of {' and '.join(f'GPU {index}' for index in there) or 'no GPU'}"
        raise TraceError(f"the memory of the GPU {brief(device)} in {brief(path)}", found, 'Give an index, or a name: "cuda:1"')
    return int(match[2])


# ---- owners


def _holders(
    variables: Mapping[str, Any], error: BaseException | None, limit: owners.Limit | None = None
) -> dict[owners.Place, owners.Holder]:
    """Return the owner of each place: variables first, then tracebacks and kept results."""
    visible, held = hidden.find(variables, ipython_shell(), error, limit)
    return held | visible


def variables_of(frame: FrameType | None) -> dict[str, Any]:
    """Return the variables visible in a frame: its globals and its locals."""
    return {} if frame is None else {**frame.f_globals, **locals_of(frame)}


def _signed(n_bytes: int) -> str:
    return f"{'+' if n_bytes > 0 else '-' if n_bytes < 0 else ''}{bytes_text(abs(n_bytes))}"
