"""Format bytes, seconds, rates and counts as text, and parse sizes in bytes."""

from __future__ import annotations

import io
import os
import re
import sys
from typing import TYPE_CHECKING

from toolkit.core.errors import ToolkitError, brief
from toolkit.core.numbers import integer, real

if TYPE_CHECKING:
    import torch

KiB, MiB, GiB, TiB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_BINARY = (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB))
_SCALES = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": KiB, "mib": MiB, "gib": GiB, "tib": TiB,
}  # fmt: skip


def bytes_text(n: float) -> str:
    """Format `n` bytes in binary units with three significant digits: 8 -> "8 B", 6.3e9 -> "5.87 GiB"."""
    for unit, size in _BINARY:
        if abs(n) >= size:
            return f"{_three(n / size)} {unit}"
    return f"{int(n)} B"


def seconds_text(s: float) -> str:
    """Format `s` seconds with three significant digits, in s, ms, µs or ns: 7.3e-6 -> "7.30 µs"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(s) >= size:
            return f"{_three(s / size)} {unit}"
    return f"{s * 1e9:.0f} ns"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: torch.bfloat16 -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def decimal_text(n: float, unit: str) -> str:
    """Format `n` with a decimal prefix and three significant digits: (65.8e9, "FLOP") -> "65.8 GFLOP".

    Used for operations. Sizes have binary units (`bytes_text`), and bandwidths both (`bandwidth_text`).
    """
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(n) >= 0.9995 * size:
            return f"{_three(n / size)} {prefix}{unit}"
    return f"{n:.0f} {unit}"


def bandwidth_text(bytes_per_s: float) -> str:
    """Format a bandwidth as datasheets do, and in the unit of sizes: 4.8e12 -> "4,800 GB/s (4,470 GiB/s)".

    Datasheets count in powers of 1000 (GB). Sizes are in powers of 1024 (GiB), and only GiB/s can be divided by them.
    """
    return f"{bytes_per_s / 1e9:,.0f} GB/s ({bytes_per_s / GiB:,.0f} GiB/s)"


def count_text(n: float) -> str:
    """Format a count with three significant digits: 8.19e9 -> "8.19 billion"."""
    for word, size in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if abs(n) >= 0.9995 * size:
            return f"{_three(n / size)} {word}"
    return f"{n:,.0f}"


def plural(n: int, noun: str, several: str = "") -> str:
    """Return "1 rank" or "2 ranks". `several` is the plural of a noun that doesn't only add an s."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {several or noun + 's'}"


def number_text(n: float) -> str:
    """Format `n` with four significant digits, and whole thousands in full: 15436.2 -> "15,436", 39.42 -> "39.42"."""
    return f"{n:,.0f}" if abs(n) >= 999.95 else f"{n:.4g}"


def _three(x: float) -> str:
    return f"{x:.0f}" if abs(x) >= 100 else f"{x:.1f}" if abs(x) >= 10 else f"{x:.2f}"


def parse_bytes(value: int | float | str) -> int:
    """Return a size in bytes, given as a number (8e9) or a text ("24 GiB", "8GiB", "8 gb", "8e9").

    GiB, MiB and KiB are powers of 1024; GB, MB and kB are powers of 1000. A comma separates thousands ("1,024 MB"). Raises
    ToolkitError for anything else, also for 0.5 and 1.5, which are hardly meant in bytes.
    """
    found: float | None = None
    scale = 1
    if isinstance(value, str):
        number = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]*\.?[0-9]+)(?:e[+-]?[0-9]+)?"
        match = re.fullmatch(rf"\s*({number})\s*([a-z]*)\s*", value.lower())
        if match and match[2] in _SCALES:
            scale = _SCALES[match[2]]
            found = float(match[1].replace(",", "")) * scale
    else:
        found = real(value) if (whole := integer(value)) is None else whole
    if found is not None and 0 <= found < 1e18 and not (found % 1 and found < (KiB if scale == 1 else 1)):
        return int(found)
    what = "not a number of bytes" if found is None or not 0 <= found < 1e18 else "not a whole number of bytes"
    raise ToolkitError(f"a size of {brief(value)}", what, 'Write it as "24 GiB", "8 GB" or a number of bytes')


def unit_hint(n_bytes: int | None) -> str:
    """Return a sentence on units for an error about a budget, if it is so small that its unit was probably forgotten."""
    return "" if n_bytes is None or n_bytes >= 2 * MiB else '. A number without a unit is in bytes: write "24 GiB"'


def print_any_text() -> None:
    """Let standard output and standard error replace characters that their encoding lacks ("µ" in ASCII) by "?"."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def drop_output() -> None:
    """Send the rest of standard output nowhere, because its reader has closed the pipe (`| head`)."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def unwritten(error: OSError) -> int:
    """Print why standard output, such as a file on a full disk, can't be written. Returns the exit status of the command."""
    drop_output()
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    return 1
