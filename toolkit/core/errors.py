"""Errors that say what was asked, what was found, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from functools import partial


class ToolkitError(Exception):
    """Base of every error the toolkit raises on purpose.

    `asked` is what the caller wanted, `found` what stood in the way, `do` what would work. Further keyword arguments
    are kept in `facts`, so that a program (or a widget) can use the numbers without parsing the sentence.
    """

    def __init__(self, asked: str, found: str, do: str, **facts: object) -> None:
        self.asked, self.found, self.do, self.facts = asked, found, do, facts
        super().__init__(f"{asked}: {found}. {do}")

    def __reduce__(self) -> tuple[object, ...]:
        make: Callable[..., ToolkitError] = type(self)
        return partial(make, **self.facts), (self.asked, self.found, self.do)


class FormatError(ToolkitError):
    """A weights file (safetensors, GGUF, config.json, tokenizer.json) that can't be read as what it claims to be."""


class ModelError(ToolkitError):
    """A model, or an input to one, that the toolkit doesn't support: architecture, shapes, prompt length, batch."""


class DeviceError(ToolkitError):
    """A device that doesn't exist, isn't reachable, or is busy as another card."""


class RecorderError(ToolkitError):
    """Recording can't start or can't be read: another profiler is active, CUPTI is missing, the block still runs."""


class TraceError(ToolkitError):
    """A trace file that is damaged, of an unknown format, or newer than this toolkit."""


class CopyBudgetError(ToolkitError):
    """More copies crossed than `tk.copy_budget` allowed; the message names the lines that copied."""


class BudgetError(ToolkitError):
    """A memory budget that can't be set, or that what was asked for doesn't fit in; `facts` has the bytes."""


class PackageError(ToolkitError):
    """An exported package that can't be made where it should be, or isn't what it says, or isn't for this machine."""


class CancelledError(ToolkitError):
    """Long work that was cancelled; what it had taken was given back."""


class UnknownNameError(ToolkitError):
    """A name (device, strategy, model, option) that isn't known; the message names the nearest one that is."""


def unknown_name(what: str, name: object, known: Iterable[str]) -> UnknownNameError:
    """The error for a `name` that is none of `known`: suggests the nearest, lists the rest."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f'Did you mean "{near[0]}"? ' if near else ""
    return UnknownNameError(f"{what} {name!r}", "no such name", f"{hint}Known: {', '.join(names)}", known=names)
