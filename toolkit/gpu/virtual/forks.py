"""Refuse the virtual GPU of the parent in a forked process, as CUDA does: locks and threads of the parent don't work there."""

from __future__ import annotations

import os
from typing import Any

from toolkit.gpu.virtual import dispatch

# Source: torch/cuda/__init__.py
_FORKED = (
    "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start method"
)


class _Forked:
    """Takes the place of the machine in a forked process."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(_FORKED)


def in_bad_fork() -> bool:
    """Return whether a virtual GPU was open when this process was forked."""
    return isinstance(dispatch._machine, _Forked)


def _after_fork() -> None:
    if dispatch._machine is not None:
        dispatch.open_machine(_Forked())  # type: ignore[arg-type]


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
