"""How much memory this process needed at most, counted anew when asked to: a peak that never falls would hide later ones."""

from __future__ import annotations

from pathlib import Path

import pytest

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class HostPeak:
    """The growth of this process's resident memory at its largest, in bytes, since this object was made. Linux only."""

    def __init__(self) -> None:
        if not _CLEAR.exists():
            pytest.skip("only Linux counts a process's peak anew")
        _CLEAR.write_text("5")  # proc(5): sets the peak to what is resident now
        self.before = resident_bytes("VmRSS")

    def grown_bytes(self) -> int:
        return resident_bytes("VmHWM") - self.before


def resident_bytes(field: str = "VmHWM") -> int:
    """A field of /proc/self/status in bytes: VmRSS is now, VmHWM the peak."""
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(lines[field].split()[0]) * 1024
