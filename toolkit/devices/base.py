"""What a device is: something that runs PyTorch code, records what happened, and knows its memory and its time.

`open_device("cuda:0")` gives the real card, `open_device("virtual:rtx-5090")` one that isn't there. Both record into
the same table; this file doesn't know how.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import TYPE_CHECKING, Any

from toolkit.errors import DeviceError, RecorderError
from toolkit.trace import Trace

if TYPE_CHECKING:
    import torch

    from toolkit.devices.spec import GpuSpec


@dataclass(frozen=True)
class Memory:
    """Device memory in bytes: held by live tensors, the most that was, held by the caching allocator, on the card."""

    allocated_bytes: int
    peak_bytes: int
    reserved_bytes: int
    total_bytes: int


class Device(ABC):
    """A place where tensors live and run. Get one from `tk.device`."""

    name: str  # as the user asked for it: "virtual:rtx-5090", "cuda:0", "cpu"
    torch: torch.device  # what `.to()` takes
    spec: GpuSpec | None  # None for the CPU and for a card that isn't in the catalogue
    clock: str  # "measured" or "modelled"

    def __repr__(self) -> str:
        return f"Device({self.name!r})"

    @abstractmethod
    def start(self, *, lines: bool) -> None:
        """Begin to record. Raises RecorderError where it can't."""

    @abstractmethod
    def stop(self) -> Trace:
        """End the recording that `start` began, and return its events."""

    @abstractmethod
    def step(self, step: int, name: str) -> AbstractContextManager[None]:
        """A scope: events that its host code causes belong to decode step `step`; leaves a mark called `name`."""

    @abstractmethod
    def sync(self) -> None:
        """Wait until the device has done all that was queued."""

    @abstractmethod
    def now_ns(self) -> int:
        """This device's host clock in nanoseconds: the wall clock, or the virtual GPU's modelled one."""

    @abstractmethod
    def memory(self) -> Memory:
        """Memory of the device now."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Let `memory().peak_bytes` start again from what is allocated now."""

    @property
    def limit_bytes(self) -> int:
        """How much memory the allocator may take: what `limit` set, else the card's."""
        return self._limit_bytes or self.memory().total_bytes

    def limit(self, n_bytes: int | None) -> None:
        """Let the allocator take at most `n_bytes`; None: as much as the card has."""
        self._set_limit(n_bytes)
        self._limit_bytes = n_bytes

    _limit_bytes: int | None = None

    def _set_limit(self, n_bytes: int | None) -> None:
        raise DeviceError(f"a memory budget on {self.name}", "it has no allocator to cap", 'Use "cuda" or "virtual:h200"')

    @contextmanager
    def record(self, *, lines: bool = True) -> Iterator[Trace]:
        """Record everything that runs on this device inside the `with` block; the trace is readable after it.

        `lines=True` also finds the Python line that caused each event, which slows a real GPU's host code; use False
        where the times matter. Inside another recording of the same device this joins the outer one: both traces then
        hold the outer block's events. Where nothing in the block says what a step is, steps are guessed from a pattern
        that repeats, and `meta["steps_from"]` says so. Raises RecorderError where another profiler is already active.
        """
        from toolkit.traces.table import with_guessed_steps

        outer = _recording.get(self.name)
        if outer is not None:
            yield outer
            return
        trace = _recording[self.name] = Trace.pending()
        _recorded.add(self.name)
        try:
            self.start(lines=lines)
            try:
                yield trace
            finally:
                trace.fill(with_guessed_steps(self.stop()))
        finally:
            del _recording[self.name]

    @property
    def recording(self) -> Trace | None:
        """The trace being recorded now, or None."""
        return _recording.get(self.name)

    @property
    def recorded(self) -> bool:
        """Was anything recorded on this device in this process, or is it being recorded now?"""
        return self.name in _recorded


_recorded: set[str] = set()
_recording: dict[str, Trace] = {}  # per device name: the trace of the outermost open `record` block


def record(device: Device | str, *, lines: bool = True) -> AbstractContextManager[Trace]:
    """`with tk.record(device) as trace:` records every copy, kernel, wait and allocation of any PyTorch code.

    `device` is what `tk.device` takes or returns. The trace is filled when the block ends. See `Device.record`.
    """
    return open_device(device).record(lines=lines)


def open_device(device: Device | str | torch.device = "auto") -> Device:
    """The device called `device`: "cuda", "cuda:1", "cpu", "virtual:rtx-5090", "virtual:8GiB", or "auto".

    "auto" is the first CUDA GPU where there is one, else "virtual:h200". A Device is returned as it is. Raises
    DeviceError where there is no such device, UnknownNameError (naming the nearest) for an unknown name.
    """
    if isinstance(device, Device):
        return device
    name = str(device)
    if name == "auto":
        name = "cuda:0" if _cuda_count() else "virtual:h200"
    kind, _, rest = name.partition(":")
    if kind == "virtual":
        from toolkit.devices.virtual import open_virtual

        return open_virtual(rest)
    if kind == "vgpu":
        from toolkit.devices.virtual import current_virtual

        return current_virtual()
    if kind in ("cuda", "cpu"):
        from toolkit.devices.cuda import open_cpu, open_cuda

        return open_cpu() if kind == "cpu" else open_cuda(int(rest) if rest.isdigit() else 0)
    from toolkit.devices.spec import CATALOGUE
    from toolkit.errors import unknown_name

    raise unknown_name("device", name, ["auto", "cpu", "cuda", *(f"virtual:{card}" for card in CATALOGUE)])


def _cuda_count() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@lru_cache
def _library_prefixes() -> tuple[str, ...]:
    """Folders whose frames are machinery, not cause: torch, Triton's launcher, context managers, and this package's devices."""
    import torch

    triton = importlib.util.find_spec("triton")
    folders = [
        os.path.dirname(torch.__file__),
        *((triton and triton.submodule_search_locations) or ()),
        os.path.dirname(__file__),
    ]
    return (*(folder + os.sep for folder in folders), os.path.join(sysconfig.get_paths()["stdlib"], "contextlib"), "<frozen")


_library: dict[str, bool] = {}  # by file: is it machinery?


def caller() -> str | None:
    """ "file:line" of the innermost frame outside of torch and the devices: the Python line that caused an event.

    Remembers what it learnt about each file: it is asked several times an operation.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        library = _library.get(filename)
        if library is None:
            library = _library[filename] = filename.startswith(_library_prefixes())
        if not library:
            return f"{short_path(filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return None


@lru_cache
def _installed_prefixes() -> tuple[str, ...]:
    """Folders whose frames aren't the user's own code: the standard library, what is installed, and this package."""
    paths = sysconfig.get_paths()
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")} | {own}
    return (*(folder + os.sep for folder in folders), *_library_prefixes())


_installed: dict[str, bool] = {}  # by file: is it none of the user's own?


def chain() -> str | None:
    """Which line led to an allocation: "cell 7:3 > model.py:41", the outermost frame of the user's and the innermost one.

    The outer is the user's own code (of a cell, or a script), the inner the one that `caller` names; just one where they are
    the same.
    """
    frame: FrameType | None = sys._getframe(1)
    inner = outer = None
    while frame is not None:
        filename = frame.f_code.co_filename
        installed = _installed.get(filename)
        if installed is None:
            _library.setdefault(filename, filename.startswith(_library_prefixes()))
            # <string> is of `python -c`, or of a launcher that started this: it says nothing where another file does
            installed = _installed[filename] = filename.startswith((*_installed_prefixes(), "<string>"))
        if inner is None and not _library[filename]:
            inner = frame
        if not installed:
            outer = frame
            if frame.f_code.co_name == "<module>":  # what called the module's code is a launcher
                break
        frame = frame.f_back
    if inner is None:
        return None
    text = f"{short_path(inner.f_code.co_filename)}:{inner.f_lineno}"
    if outer is None or outer is inner:
        return text
    first = f"{short_path(outer.f_code.co_filename)}:{outer.f_lineno}"
    return text if first == text else f"{first} > {text}"  # equal for a comprehension


def short_path(filename: str) -> str:
    """A file's path as a reader knows it: from the package on for installed ones, from the working folder, `cell N`."""
    if "ipykernel_" in filename or filename.startswith("<ipython-input"):
        return cell_name(filename)  # never from the cache: the same text run again is another cell
    return _short_file(filename)


@lru_cache(maxsize=4096)
def _short_file(filename: str) -> str:
    for marker in ("site-packages" + os.sep, "dist-packages" + os.sep):
        if marker in filename:
            return filename.split(marker, 1)[1]
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if filename.startswith(package + os.sep):  # ours, also where it runs from a checkout
        filename = filename.removeprefix(os.path.dirname(package) + os.sep)
    elif filename.startswith(os.getcwd() + os.sep):
        filename = os.path.relpath(filename)
    return filename.replace(os.sep, "/")


def cell_name(filename: str) -> str:
    """ "cell 7" for the source file that IPython made for a notebook cell, else the file's name."""
    compiled = getattr(getattr(shell(), "compile", None), "_filename_map", {})
    number = compiled.get(filename)
    if number is None:
        return os.path.basename(filename)
    return f"cell {min(number, max(current_cell(), 1))}"  # what a magic runs inside a cell is numbered as if it came after


def file_of(short: str) -> str:
    """The file that `short_path` shortened, as far as it can be told: a cell's latest source, or a path as it is."""
    if short.startswith("cell "):
        compiled = getattr(getattr(shell(), "compile", None), "_filename_map", {})
        return next((name for name in reversed(compiled) if cell_name(name) == short), short)
    return short


def current_cell() -> int:
    """The number of the notebook cell that runs now; -1 outside of IPython. Never imports IPython."""
    history = getattr(shell(), "history_manager", None)  # `execution_count` is the next cell's from IPython 9 on
    return len(history.input_hist_parsed) - 1 or -1 if history is not None else -1


def shell() -> Any | None:
    """The notebook's or terminal's IPython that runs this code; None outside of one. Never imports IPython."""
    ipython = sys.modules.get("IPython")
    get = getattr(ipython, "get_ipython", None)
    return get() if get else None


def not_recording(asked: str) -> RecorderError:
    """The error of a `stop` without a `start`."""
    return RecorderError(asked, "no recording runs", "Use `with tk.record(device) as trace:`")


def no_cuda(name: str, found: str) -> DeviceError:
    """The error of asking for a CUDA device that isn't there."""
    return DeviceError(f"device {name!r}", found, 'Use tk.device("virtual:h200"), which needs no GPU')
