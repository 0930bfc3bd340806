"""Helpers of the magics: option parsing, cells with `await`, results of cells, and errors without tracebacks."""

from __future__ import annotations

import argparse
import sys
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pandas as pd
from IPython.core.displayhook import DisplayHook
from IPython.core.error import UsageError
from IPython.display import display


class Parser(argparse.ArgumentParser):
    """Parses the options of a magic. Wrong options raise a UsageError, which IPython shows without a traceback."""

    def __init__(self, prog: str, description: str = "") -> None:
        super().__init__(prog=prog, description=description, add_help=False, allow_abbrev=False)

    def error(self, message: str) -> Any:
        """Raise UsageError with the message and the usage."""
        raise UsageError(f"{message}\n{self.format_usage()}")


def awaits(shell: Any, cell: str) -> bool:
    """Return whether a cell uses `await` at its top level. A magic can't run such a cell."""
    try:
        return bool(shell.should_run_async(cell, transformed_cell=shell.transform_cell(cell)))
    except SyntaxError:  # reported when the cell runs
        return False


def silenced(shell: Any, cell: str) -> bool:
    """Return whether a cell ends in a semicolon, so that its result isn't displayed."""
    try:
        return bool(DisplayHook.semicolon_at_end_of_expression(shell.transform_cell(cell)))
    except (SyntaxError, tokenize.TokenError):  # reported when the cell runs
        return False


@contextmanager
def displayed_later(shell: Any, cell: str) -> Iterator[list[Any]]:
    """Display the results of `cell`, which runs in this block, only when the block has ended, unless the cell is `silenced`.

    Yields the list of results. To display a tensor, PyTorch copies its values to the host, one at a time.
    """
    results: list[Any] = []
    trap, now = shell.display_trap, sys.displayhook
    hook, shown_by = trap.hook, now if trap.is_active else trap.hook  # the trap is active if a cell called the magic
    trap.hook = sys.displayhook = results.append
    try:
        yield results
    finally:
        trap.hook, sys.displayhook = hook, now
        if silenced(shell, cell):
            results.clear()
        for value in results:
            shown_by(value)


def failure_of(failed: BaseException) -> BaseException:
    """Return the exception to raise after a magic's cell failed with `failed`, so that "Run All Cells" stops here."""
    if isinstance(failed, SyntaxError):  # IPython would show the error twice
        return UsageError("the cell has a syntax error")
    return plain(failed, shown=True)


def plain(error: BaseException, shown: bool = False) -> BaseException:
    """Return `error`, changed so that IPython prints only its message, or nothing if it has been `shown` already."""
    error._render_traceback_ = lambda *_: [] if shown else [f"{type(error).__name__}: {error}"]  # type: ignore[attr-defined]
    return error


def show(thing: Any) -> None:
    """Display an object under the running cell. Tables have all of their columns, also in a terminal."""
    with pd.option_context("display.max_columns", None, "display.max_colwidth", None, "display.width", 1000):
        display(thing)  # type: ignore[no-untyped-call]
