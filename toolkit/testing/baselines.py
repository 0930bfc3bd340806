"""Baselines: what each test did when `--copies-update` was last given, one JSON file per test module.

The files are in the folder `toolkit_baselines` next to the module, and belong into version control. A test may have one
baseline per device. Lines are stored by their source text, so that a review shows which copies a change adds.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TypedDict

from toolkit.core.errors import FormatError
from toolkit.core.files import open_regular, replacing
from toolkit.core.schema import parse_json
from toolkit.testing.measure import Measured

FOLDER = "toolkit_baselines"
VERSION = 1
Tests = dict[str, dict[str, Measured]]  # name of a test in its module -> name of a device -> what it did


class _File(TypedDict):
    format: str
    version: int
    tests: Tests


def path_of(module: Path) -> Path:
    """Return the file with the baselines of a test module."""
    return module.parent / FOLDER / f"{module.stem}.json"


def read(path: Path) -> Tests:
    """Return the baselines in a file; none if there is no file. Raises FormatError if it can't be read or is damaged."""
    asked, do = f"baselines {path}", "Restore it from version control, or delete it and run pytest --copies-update"
    try:
        with open_regular(path, asked, FormatError) as file:
            found: _File = parse_json(file.read(), _File)
    except ValueError as error:
        raise FormatError(asked, f"it is damaged ({error!s:.200})", do) from error
    except FormatError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            return {}
        raise
    if found["format"] != "toolkit-baselines":
        raise FormatError(asked, "it is not a file of baselines", do)
    if found["version"] > VERSION:
        raise FormatError(
            asked, f"it has format version {found['version']}; this toolkit reads {VERSION}", "Upgrade the toolkit"
        )
    return found["tests"]


def write(path: Path, tests: Tests) -> bool:
    """Write the baselines of a module, or delete the file if there are none. Return whether anything changed.

    Raises FormatError if the file can't be written.
    """
    content = {"format": "toolkit-baselines", "version": VERSION, "tests": dict(sorted(tests.items()))}
    data = _compact(json.dumps(content, indent=1, ensure_ascii=False, sort_keys=True)).encode()
    try:
        existed = path.exists()
        if not tests:
            path.unlink(missing_ok=True)
            return existed
        path.parent.mkdir(parents=True, exist_ok=True)
        if existed and path.read_bytes() == data:
            return False
    except OSError as error:
        do = "Check that you may write to this folder"
        raise FormatError(f"writing the baselines {path}", error.strerror or str(error), do) from error
    with replacing(path, FormatError) as file:
        file.write(data)
    return True


def _compact(text: str) -> str:
    """Put lists of numbers on one line. Text has no line breaks in JSON, so it is not changed."""
    return (
        re.sub(r"\[\n[\s\d,]+\]", lambda found: re.sub(r"\s+", " ", found[0]).replace("[ ", "[").replace(" ]", "]"), text)
        + "\n"
    )
