"""Host memory of this process: resident bytes and their peak, for scopes that may nest.

Linux keeps the peak of the process (VmHWM), which can be reset. Before a new scope resets it, the open scopes take it into
their own peaks. On other systems the peak is the largest value seen when a scope began or ended, and `HostScope.exact` is
False.
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


@dataclass(eq=False)  # two scopes with the same figures are not one
class HostScope:
    """Resident bytes of this process at the start, peak and end of a scope. `exact`: whether the system measured the peak."""

    before_bytes: int = 0
    peak_bytes: int = 0
    exact: bool = False


def resident_bytes() -> int:
    """Return the resident bytes of this process; 0 if the system does not report them."""
    return _read()[0]


def started_bytes() -> int:
    """Return the resident bytes of all descendants of this process, excluding pages that map files.

    Returns 0 if the system does not report them.
    """
    return sum(_own_bytes(pid) for pid in _descendants(os.getpid()))


def _descendants(pid: int) -> list[int]:
    children = [int(word) for path in Path("/proc").glob(f"{pid}/task/*/children") for word in _text(path).split()]
    return [*children, *(deeper for child in children for deeper in _descendants(child))]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the thread has ended
        return ""


def _own_bytes(pid: int) -> int:
    try:
        line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) << 10
    except (OSError, StopIteration):
        return 0


def begin() -> HostScope:
    """Begin a scope."""
    with _lock:
        resident = _fold()
        scope = HostScope(resident, resident, exact=_reset_peak())
        _open.append(scope)
        return scope


def end(scope: HostScope) -> HostScope:
    """End a scope, and return it with its figures filled in."""
    with _lock:
        _fold()
        _open.remove(scope)
        return scope


def _fold() -> int:
    """Raise the peak of every open scope to the peak so far if that is higher. Return the resident bytes."""
    resident, peak = _read()
    for scope in _open:
        scope.peak_bytes = max(scope.peak_bytes, peak if scope.exact else resident)
    return resident


def _reset_peak() -> bool:
    """Reset the peak of the process (man 5 proc, clear_refs). Return whether the system can do that."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def _read() -> tuple[int, int]:
    """Return (resident bytes, their peak)."""
    try:
        fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if line.startswith("Vm"))
        return tuple(int(fields[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]
    except (OSError, KeyError):
        return (_peak_bytes(), _peak_bytes())


def _peak_bytes() -> int:
    if sys.platform == "win32":
        return 0
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10
