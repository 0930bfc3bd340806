"""The toolkit's exceptions, which users know as `tk.errors`.

Each message says what was asked for, what was found instead, and what to do about it.
"""

from __future__ import annotations

import difflib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial

__all__ = [
    "BudgetError", "CancelledError", "CopyBudgetError", "DeviceError", "FormatError", "HubError", "ModelError", "PackageError",
    "RankError", "RecorderError", "ToolkitError", "TraceError", "UnknownNameError",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)


class ToolkitError(Exception):
    """Base class of the toolkit's exceptions.

    The message is "asked: found. do": the caller's request, the problem, and a remedy. Further keyword arguments are kept in
    `facts`, so that a program can use the numbers without parsing the message.
    """

    def __init__(self, asked: str, found: str, do: str, **facts: object) -> None:
        self.asked, self.found, self.do, self.facts = asked, found, do, facts
        super().__init__(f"{asked}: {found}. {do}")

    def __reduce__(self) -> tuple[object, ...]:
        make: Callable[..., ToolkitError] = type(self)
        return partial(make, **self.facts), (self.asked, self.found, self.do)


class FormatError(ToolkitError):
    """A file (safetensors, GGUF, config.json, tokenizer.json, timings) is damaged or has an unexpected format."""


class HubError(ToolkitError):
    """A model cannot be downloaded: it does not exist, needs a token, does not fit on the disk, or the Hub does not answer."""


class ModelError(ToolkitError):
    """The toolkit does not support a model or an input to it: its architecture, shapes, prompt length or batch size."""


class DeviceError(ToolkitError):
    """A device does not exist, cannot be used, or another virtual GPU is open."""


class RecorderError(ToolkitError):
    """A recording cannot start or be read: another profiler is active, CUPTI is missing, or the block is still running."""


class TraceError(ToolkitError):
    """A trace file is damaged, of an unknown format, newer than this toolkit, or cannot be written."""


class CopyBudgetError(ToolkitError):
    """A block made more copies than `tk.copy_budget` allows; the message names the lines that copied."""


class BudgetError(ToolkitError):
    """A memory budget cannot be set, or the request does not fit in it; `facts` has the bytes."""


class PackageError(ToolkitError):
    """A package cannot be exported, is damaged, or was exported for another machine."""


class RankError(ToolkitError):
    """A group of ranks is missing or differs, or one of its ranks has failed; the message names it if it is known."""


class CancelledError(ToolkitError):
    """Long work was cancelled; its memory has been released."""


class UnknownNameError(ToolkitError):
    """A name (of a device, strategy, model or option) is unknown; the message suggests the nearest known one."""


def kind_of(value: object) -> str:
    """Return the type of a value with its article, for a message: "an int" or "a list"."""
    name = type(value).__name__
    return f"{'an' if name[:1] in 'aeioAEIO' else 'a'} {name}"  # U is mostly spoken as in "a UserDict"


def brief(value: object, most: int = 80) -> str:
    """Return the first `most` characters of `repr(value)`, for a message. Large numbers, which Python may refuse to write in
    decimal digits, are written in hexadecimal ones.
    """
    try:
        text = repr(value)
    except ValueError:
        text = hex(value) if isinstance(value, int) else f"a {type(value).__name__} with a number of too many digits"
    return text[:most]


def unknown_name(what: str, name: object, known: Iterable[str], meant: str | None = None) -> UnknownNameError:
    """Return the error for a `name` that is not in `known`. It suggests `meant`, or a similar name, and lists all of them."""
    names = sorted(known)
    near = meant or _similar(str(name)[:200], names)
    hint = f'Did you mean "{near}"? ' if near else ""
    asked, do = f"{what} {brief(name, 200)}", f"{hint}Known: {', '.join(names) or 'none'}"
    return UnknownNameError(asked, "no such name", do, known=names)


def _similar(name: str, names: list[str]) -> str | None:
    """Return the name most similar to `name`, or None. A common beginning such as "virtual:" or "demo/" doesn't count."""
    for near in difflib.get_close_matches(name, names, n=1):
        start = max(near.rfind(":"), near.rfind("/")) + 1
        if name[:start] != near[:start] or difflib.get_close_matches(name[start:], [near[start:]]):
            return near
    return None


def with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its causes, the errors that were handled when it was raised, and the members of groups, each once."""
    seen: set[int] = set()
    errors = deque([error])
    while errors:
        one = errors.popleft()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            errors += (one.__cause__, one.__context__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ()))
