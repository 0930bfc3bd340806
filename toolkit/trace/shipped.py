"""Traces that ship with the package: decode steps that were recorded on real GPUs, to look at where there is none.

A trace is named by its GPU, model and strategy, "h200/qwen3-8b/cuda-graph", and opened by `tk.open_trace`. They are files of
`Trace.save`, written by `python -m toolkit.bench.traces`.
"""

from __future__ import annotations

import os
from pathlib import Path

from toolkit.core.errors import unknown_name

FOLDER = Path(__file__).parent / "recorded"
SUFFIX = ".trace"


def shipped_names() -> tuple[str, ...]:
    """Return the names of all shipped traces."""
    return tuple(sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.glob(f"*/*/*{SUFFIX}")))


def shipped_file(name: str | os.PathLike[str]) -> Path | None:
    """Return the file of the shipped trace `name`, or None if the name doesn't begin with a GPU that has shipped traces.

    Raises UnknownNameError if it does and there is no such trace.
    """
    names, asked = shipped_names(), Path(name).as_posix()
    if asked in names:
        return FOLDER / f"{asked}{SUFFIX}"
    if asked.partition("/")[0] in {known.partition("/")[0] for known in names}:
        raise unknown_name("shipped trace", asked, names)
    return None
