"""The command that installs an extra of the package, for messages. The package is on no index, so `pip` needs its place."""

from __future__ import annotations

import json
import shlex
import sys
from importlib import metadata
from pathlib import Path

NAME = "decode-toolkit"
CLONE = Path(__file__).parents[2]  # the folder of `toolkit`, if it is not installed as a copy


def install_command(extra: str) -> str:
    """Return the command that installs `extra` ("lab", "hf", "ranks") for this Python, from where the toolkit came from."""
    pip = [sys.executable or "python", "-m", "pip", "install"]
    if (CLONE / "pyproject.toml").is_file():
        return shlex.join([*pip, "-e", f"{CLONE}[{extra}]"])
    if (address := _address()) is not None:
        return shlex.join([*pip, f"{NAME}[{extra}] @ {address}"])
    return f"pip install -e '.[{extra}]', in a clone of the toolkit's repository"


def _address() -> str | None:
    """Return the address from which pip installed this copy, with its commit, or None if pip wrote down none (PEP 610)."""
    try:
        written = json.loads(metadata.distribution(NAME).read_text("direct_url.json") or "{}")
        versioned = written.get("vcs_info")
        return f"{versioned['vcs']}+{written['url']}@{versioned['commit_id']}" if versioned else written["url"]
    except (metadata.PackageNotFoundError, ValueError, KeyError):
        return None
