"""The host's memory of this process: what is resident, and the most that was, for scopes that nest.

Linux keeps the most of the whole process (VmHWM) and lets it start again; so a scope that begins folds what there was
into the scopes around it. Elsewhere the peak is what was seen at the ends of scopes, and `exact` says so.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_lock = threading.Lock()
_open: list[HostScope] = []


@dataclass
class HostScope:
    """Resident bytes of this process at the beginning, the most since, and at the end. `exact`: is the most measured?"""

    before_bytes: int = 0
    peak_bytes: int = 0
    after_bytes: int = 0
    exact: bool = False


def resident_bytes() -> int:
    """What this process holds of the host's memory now; 0 where the system doesn't tell."""
    return _read()[0]


def started_bytes() -> int:
    """What the processes that this one started, and those that they started, hold of the host's memory beside files' pages.

    0 where the system doesn't tell.
    """
    return sum(_own_bytes(pid) for pid in _started(os.getpid()))


def _started(pid: int) -> list[int]:
    children = [int(word) for path in Path("/proc").glob(f"{pid}/task/*/children") for word in _text(path).split()]
    return [*children, *(deeper for child in children for deeper in _started(child))]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # of a thread that ended meanwhile
        return ""


def _own_bytes(pid: int) -> int:
    try:
        line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) << 10
    except (OSError, StopIteration):
        return 0


def begin() -> HostScope:
    """Begin to follow the host's memory."""
    with _lock:
        resident = _fold()
        scope = HostScope(resident, resident, exact=_restart())
        _open.append(scope)
        return scope


def end(scope: HostScope) -> HostScope:
    """End: the scope has its numbers."""
    with _lock:
        scope.after_bytes = _fold()
        _open.remove(scope)
        return scope


def _fold() -> int:
    """Give the peak so far to every open scope; what is resident now."""
    resident, peak = _read()
    for scope in _open:
        scope.peak_bytes = max(scope.peak_bytes, peak if scope.exact else resident)
    return resident


def _restart() -> bool:
    """Let the process's peak start again. Is that possible here?"""
    try:
        _CLEAR.write_text("5")  # man 5 proc: resets the peak of resident memory
    except OSError:
        return False
    return True


def _read() -> tuple[int, int]:
    """(resident, most resident) in bytes."""
    try:
        fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if line.startswith("Vm"))
        return tuple(int(fields[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]
    except (OSError, KeyError):
        return (_usage(), _usage())


def _usage() -> int:
    if sys.platform == "win32":
        return 0
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10
