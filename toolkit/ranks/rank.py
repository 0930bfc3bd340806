"""What runs on a rank: open its device, enter the group of torch.distributed, and run functions.

The functions of this module run in the processes that `toolkit.ranks.engines` starts. Errors of the user's function don't reach
ipyparallel, which would keep them, and with them the tensors of their frames. `execute` returns them as text.
"""

from __future__ import annotations

import gc
import os
import pickle
import platform
import signal
import threading
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from toolkit.core.callers import is_installed
from toolkit.core.distributed import announcing, backend_of, leave
from toolkit.core.errors import RankError, ToolkitError, brief
from toolkit.core.version import __version__
from toolkit.gpu.device import Device, Memory
from toolkit.gpu.opening import open_device
from toolkit.gpu.virtual.device import VirtualGpu
from toolkit.ranks.begun import begun, published
from toolkit.vram.budget import budget
from toolkit.vram.measure import MemoryUse

if TYPE_CHECKING:
    import pandas as pd

IDLE_S = 5.0  # for a GPU to end its work after a function that failed
_COLLECTIVES = os.path.join(os.path.dirname(torch.__file__), "distributed") + os.sep
_GLOO = "third_party/gloo/"  # in its errors, which may be raised in the user's line: work.wait()
_opened: list[Device] = []  # keeps the device of this rank open
_entered: list[weakref.ref[Any]] = []  # the group that this rank has entered last


@dataclass(frozen=True)
class Failure:
    """Why a function ended without a result on a rank.

    `lost_peer` is True if a collective failed, which is the consequence of another rank's failure. `interrupted` is True if the
    function was stopped by SIGINT. `file` and `line` are those of the user's code. `do` says what to do.
    """

    reason: str  # "raised ValueError"
    message: str = ""  # "no such token"
    file: str = ""
    line: int = 0
    traceback: str = ""
    lost_peer: bool = False
    interrupted: bool = False
    do: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a function returned on a rank, pickled; or why it failed.

    `alone` is True if the function has left the group or entered another one. `begun` has the exchanges begun, by group.
    """

    value: bytes | None = None
    failure: Failure | None = None
    alone: bool = False
    begun: dict[str, int] = field(default_factory=dict)


def versions() -> dict[str, str]:
    """Return the versions that all ranks must share."""
    return {"toolkit": __version__, "torch": torch.__version__, "Python": platform.python_version()}


def prepare(rank: int, ranks: int, device: str) -> dict[str, str]:
    """Open the device of this rank, set the environment variables that torchrun sets, and return the `versions`."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    gpu = open_device(f"cuda:{rank}" if device == "cuda" else device)
    if device == "cuda":
        torch.cuda.set_device(gpu.torch)
    _opened[:] = [gpu]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only functions that run are interrupted
    return versions()


def _device() -> Device:
    """Return the device of this rank, which is opened again if a function has opened another virtual GPU."""
    _opened[:] = [open_device(_opened[0].name)]
    return _opened[0]


def enter(rank: int, ranks: int, device: str, store: str, timeout_s: float) -> None:
    """Enter a new default group of torch.distributed. `store` is the path of a new file that all ranks share."""
    leave()
    gpu = _device()
    _check_idle(gpu)
    if isinstance(gpu, VirtualGpu):
        gpu.machine.collectives = 0  # ranks that were stopped have counted different ones
    meeting = dist.FileStore(store, ranks)  # type: ignore[attr-defined]
    dist.init_process_group(
        backend_of(device == "cuda"), timeout=timedelta(seconds=timeout_s), store=meeting, rank=rank, world_size=ranks
    )
    _entered[:] = [weakref.ref(dist.group.WORLD)]
    dist.barrier()


def _check_idle(gpu: Device) -> None:
    """Raise RankError if a GPU has failed, or is still working: it may wait in a kernel for a rank that has stopped."""
    if gpu.torch.type != "cuda":
        return
    found: list[str] = []

    def wait() -> None:
        try:
            gpu.sync()
            found.append("")
        except RuntimeError as error:
            found.append(str(error))

    waiting = threading.Thread(target=wait, name="toolkit sync", daemon=True)
    waiting.start()
    waiting.join(IDLE_S)
    if not found or found[0]:
        why = found[0] if found else f"{gpu.name} is still working after {IDLE_S:g} s"
        raise RankError("entering a new group", why, "Open the cluster again")


def execute(payload: bytes, folder: str | None = None) -> Outcome:
    """Run a pickled (function, arguments, keyword arguments). For `folder` see `published`.

    After a failure, this rank leaves the group, so that the others stop waiting for it.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        function, args, kwargs = pickle.loads(payload)
        with announcing(), published(folder):
            value = function(*args, **kwargs)
        outcome = _packed(value)
        del value, function, args, kwargs
    except BaseException as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        outcome = Outcome(failure=_failure(error))
        traceback.clear_frames(error.__traceback__)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if outcome.failure is not None:
        leave()
        gc.collect()
    return outcome


def memory_now() -> Memory:
    """Return the memory of this rank's device."""
    return _device().memory()


def set_budget(size: int | float | str | None) -> None:
    """Limit the memory of this rank's device, as `tk.budget`."""
    budget(size, _device())


def at_peak(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> pd.DataFrame:
    """Return who held memory at the peak that `function` measured on this rank. Raises ToolkitError if it measured nothing."""
    found = function(*args, **kwargs)
    if not isinstance(found, MemoryUse):
        name = getattr(function, "__name__", brief(function))
        what = f"it returned {brief(found)}, not a measurement"
        raise ToolkitError(f"the memory of {name}", what, "Return m of its block: with tk.memory() as m")
    return found.at_peak()


def _packed(value: object) -> Outcome:
    try:
        group = dist.group.WORLD
        return Outcome(pickle.dumps(value), alone=group is None or group is not _entered[0](), begun=begun())
    except Exception as error:
        do = "Return plain values and CPU tensors"
        return Outcome(failure=Failure("returned what can't be pickled", f"{error}. {do}"))


def _failure(error: BaseException) -> Failure:
    first, seen = error, {id(error)}
    while first.__cause__ is not None and id(first.__cause__) not in seen:  # an error may be its own cause
        first = first.__cause__
        seen.add(id(first))
    frames = _frames(error.__traceback__)
    # a ToolkitError needs no line of the toolkit, and wrong arguments need not that of the call in this file
    unknown = ("", 0) if isinstance(error, ToolkitError) or frames[-1][0] == __file__ else frames[-1]
    file, line = next((frame for frame in reversed(frames) if not is_installed(frame[0])), unknown)
    origin = _frames(first.__traceback__)[-1:]  # none if the cause was created, but not raised
    lost = isinstance(first, RuntimeError) and (any(file.startswith(_COLLECTIVES) for file, _ in origin) or _GLOO in str(first))
    interrupted = isinstance(error, KeyboardInterrupt)
    reason = "was interrupted" if interrupted else f"raised {type(error).__name__}"
    message, do = (f"{error.asked}: {error.found}", error.do) if isinstance(error, ToolkitError) else (str(error), "")
    told = f"On rank {os.environ['RANK']}:\n{''.join(traceback.format_exception(error))}"
    return Failure(reason, message, file, line, told, lost, interrupted, do)


def _frames(found: TracebackType | None) -> list[tuple[str, int]]:
    """Return (file, line) of the frames of a traceback, outermost first."""
    return [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(found)]
