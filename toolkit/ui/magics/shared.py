"""What the magics share: options whose errors are usage, cells with await, and errors shown as a sentence."""

from __future__ import annotations

import argparse
from typing import Any

from IPython.core.error import UsageError
from IPython.display import display


class Parser(argparse.ArgumentParser):
    """Options of a magic: what is wrong with them is a UsageError, which IPython shows without a traceback."""

    def __init__(self, prog: str, description: str = "") -> None:
        super().__init__(prog=prog, description=description, add_help=False, allow_abbrev=False)

    def error(self, message: str) -> Any:
        """Raises UsageError."""
        raise UsageError(f"{message}\n{self.format_usage()}")


def awaits(shell: Any, cell: str) -> bool:
    """Does a cell await at its top level? A magic can't run such a cell."""
    try:
        return bool(shell.should_run_async(cell, transformed_cell=shell.transform_cell(cell)))
    except SyntaxError:  # said when the cell runs
        return False


def failure_of(failed: BaseException) -> BaseException:
    """What to raise after a cell that a magic ran and that failed with `failed`, so that "run all" stops here."""
    if isinstance(failed, SyntaxError):  # IPython would show it once more
        return UsageError("the cell has a syntax error")
    return plain(failed, shown=True)


def plain(error: BaseException, shown: bool = False) -> BaseException:
    """`error`, so that IPython prints its sentence alone, or nothing where it was shown before."""
    error._render_traceback_ = lambda *_: [] if shown else [f"{type(error).__name__}: {error}"]  # type: ignore[attr-defined]
    return error


def show(thing: Any) -> None:
    """Display a thing under the cell that runs."""
    display(thing)  # type: ignore[no-untyped-call]
