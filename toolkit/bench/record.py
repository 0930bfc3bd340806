"""Benchmark records: where and with which versions a benchmark ran, and the JSON file that it writes.

Every record begins with the fields of `about`, so that records can be compared.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

from toolkit.core.errors import FormatError, ToolkitError
from toolkit.core.files import check_writable, read_regular, replace_text, shown
from toolkit.core.schema import convert, parse_json
from toolkit.core.version import __version__
from toolkit.gpu.opening import open_device

LARGEST = 64 << 20  # bytes of a record
_NUMBERS = re.compile(r"\[\s+(-?[\d.e+-]+(?:,\s+-?[\d.e+-]+)*)\s+\]")  # a list of numbers, one per line


def about(device: str) -> dict[str, Any]:
    """Return the date, the device, the GPU's name, the clock ("measured" or "modelled"), and the versions and commit."""
    gpu = open_device(device)
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": gpu.name,
        "gpu": torch.cuda.get_device_name(gpu.torch) if gpu.torch.type == "cuda" else gpu.spec.name if gpu.spec else None,
        "clock": gpu.clock,
        "toolkit": __version__,
        "commit": commit_of(Path(__file__)),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
    }


def commit_of(file: Path) -> str | None:
    """Return the commit of the repository that has `file`; None if no repository has it, or if git is not installed."""
    with suppress(OSError):
        asked = (["ls-files", "--error-unmatch", file.name], ["rev-parse", "HEAD"])
        known, head = (
            subprocess.run(["git", *words], cwd=file.parent, capture_output=True, text=True, check=False) for words in asked
        )
        return head.stdout.strip() if not known.returncode else None
    return None


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Run a benchmark's command line, and exit with the status that it returns. Prints errors of the toolkit as one line."""
    try:
        sys.exit(main())
    except ToolkitError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        print("Interrupted", file=sys.stderr)
        sys.exit(130)  # as the shell reports an end by SIGINT


def out_file(text: str) -> Path:
    """Return the path that was given for `--out`. Raises argparse.ArgumentTypeError if no file can be written there."""
    try:
        return check_writable(text, ToolkitError)
    except ToolkitError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def whole(text: str, least: int = 1) -> int:
    """Return the number in `text`, an option. Raises argparse.ArgumentTypeError unless it is whole and at least `least`."""
    with suppress(ValueError):
        if (found := int(text)) >= least:
            return found
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")


def listed_names(text: str) -> list[str]:
    """Return the names in `text`, an option, separated by commas. Spaces around them don't count.

    Raises argparse.ArgumentTypeError if there is none, or if one is empty.
    """
    found = [name.strip() for name in text.split(",")]
    if not all(found):
        what = "an empty entry" if any(found) else "no entry"
        raise argparse.ArgumentTypeError(f"{text!r} has {what}: give one, or several separated by commas")
    return found


def listed_numbers(text: str) -> list[int]:
    """Return the numbers in `text`, as `listed_names`. Raises argparse.ArgumentTypeError unless each is whole and above 0."""
    return [whole(name) for name in listed_names(text)]


def write_record(record: dict[str, Any], out: Path | None) -> None:
    """Write `record` to the file `out` as JSON, or print it if `out` is None. A list of numbers takes one line.

    Raises ToolkitError if the file can't be written. The record is then printed.
    """
    text = _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", json.dumps(record, indent=1)) + "\n"
    if out is None:
        print(text, end="")
        return
    try:
        replace_text(out, text, ToolkitError)
    except ToolkitError:
        print(text, end="")
        raise


def read_record(path: Path, kind: Any) -> dict[str, Any]:
    """Return the record in a JSON file. Its fields have at least the names and types of `kind`, a TypedDict.

    Raises FormatError if the file can't be read, or has no such record.
    """
    asked = f"the record in {shown(path)}"
    try:
        record: dict[str, Any] = parse_json(read_regular(path, asked, FormatError, LARGEST), dict[str, Any])
        if missing := [name for name in kind.__annotations__ if name not in record]:
            raise ValueError(f"it has no field {missing[0]!r}")
        convert(record, kind)
        return record
    except ValueError as error:
        raise FormatError(asked, str(error), "Give a file that this benchmark wrote with --out") from error


def process_bytes(*fields: str) -> list[int]:
    """Return fields of /proc/self/status, such as "VmRSS", in bytes. Zeros where the system has no such file or fields."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return [int(lines[field].split()[0]) * 1024 for field in fields]
    except (OSError, KeyError, ValueError):
        return [0] * len(fields)
