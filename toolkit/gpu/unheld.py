"""Name memory on GPUs that no variable holds, such as garbage, in errors for lack of memory.

`toolkit.vram.hidden` finds it. The packages below `toolkit.vram` never import it: the first such error does.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from toolkit.core.collector import no_collection
from toolkit.core.units import bytes_text

_MOST = 5  # owners that an error names
_named = "_names_unheld"  # attribute of an error that has been searched for


def name_in(error: torch.OutOfMemoryError) -> None:
    """Add the owners of memory that no variable holds to the message of an error, once."""
    if not hasattr(error, _named):
        setattr(error, _named, True)
        frees, held = _search()
        if held:
            error.args = ("\n".join([str(error), f"No variable holds this memory, which {frees} frees:", *_rows(held)]),)


def sentence() -> str:
    """Return a sentence on memory that no variable holds, for the end of an error of one line; "" if there is none."""
    frees, held = _search()
    if not held:
        return ""
    return f". {frees} frees memory that no variable holds: {'; '.join(' '.join(row.split()) for row in _rows(held))}"


def _rows(held: list[Any]) -> list[str]:
    rows = [f"  {one}" for one in held[:_MOST]]
    if len(held) > _MOST:
        rows.append(f"  {bytes_text(sum(one.bytes for one in held[_MOST:])):>9}  {len(held) - _MOST} more")
    return rows


def _search() -> tuple[str, list[Any]]:
    """Return what frees memory that no variable holds, and the owners of this memory, the largest first."""
    try:
        with no_collection():  # the import alone creates so many objects that the collector would free what is to be named
            found: tuple[str, list[Any]] = import_module("toolkit.vram.hidden").releasable()
    except Exception:  # inspecting a user's variables may raise, and must not hide the error of the user's code
        return "", []
    except BaseException as stop:  # an interrupt: its traceback would keep all objects alive that the search has looked at
        stop.__traceback__ = None
        raise
    return found
