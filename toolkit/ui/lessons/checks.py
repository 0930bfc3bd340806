"""Checked questions for the lesson notebooks: the learner predicts a number or a choice, runs the code, and compares.

Verdicts are text, so that they read the same in JupyterLab, in a terminal and in a test.
"""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from html import escape
from numbers import Integral
from typing import Any


@dataclass(frozen=True)
class Verdict:
    """The result of a check: one line per number and the explanation, and whether all numbers are right.

    `asks` is True if there was nothing to check yet, because a prediction is open, isn't among the choices or isn't a number.
    """

    lines: tuple[str, ...]
    right: bool
    asks: bool = False

    def with_line(self, line: str) -> Verdict:
        """Return the verdict with another line at its end, unless that is empty."""
        return replace(self, lines=(*self.lines, line)) if line else self

    def __repr__(self) -> str:
        return "\n".join(self.lines)

    def _repr_html_(self) -> str:
        """Return the lines as HTML, which a notebook wraps between words."""
        return "".join(f"<div>{inline(line)}</div>" for line in repr(self).splitlines())


def inline(text: str) -> str:
    """Return a line of text as HTML. What is between backticks is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))


def failed(function: Callable[..., Any], error: Exception) -> dict[str, bool]:
    """Return the condition that a learner's function runs, which `error` says it doesn't.

    So the check shows the line and a hint, and not the traceback through the functions that the line calls.
    """
    name = getattr(function, "__name__", repr(function))
    code = getattr(function, "__code__", None)
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code is code]
    where = f" in its line {lines[-1] - code.co_firstlineno + 1}" if code is not None and lines else ""
    said = (str(error).splitlines() or ["no message"])[0]
    return {f"`{name}` should run to its end, but it raised {type(error).__name__}{where}: {said}": False}


def compare(
    predicted: Mapping[str, float | str | None],
    found: Mapping[str, float | str],
    within: float = 0.0,
    who: str = "the trace",
    choices: Collection[str] = (),
    tell: bool = True,
    names: Collection[str] = (),
) -> Verdict:
    """Compare predictions with the numbers or choices that `who` found, name by name.

    A number is right if it is off by at most the share `within` (0.05: 5 %); a tensor of one number counts as one, and for
    anything else the verdict asks for a number. A text is right if it is equal; if it isn't among `choices`, the verdict lists
    them. As long as a prediction is None, or one of `names` is missing, the verdict asks for it and shows no answer. Nothing
    is right if `who` found NaN or infinity. `tell` shows what was found. A wrong prediction raises no error.
    """
    if not isinstance(predicted, Mapping) or not predicted:
        asked = "Write a prediction for each name, as in the cell as it was: a dict of names and values."
        return Verdict((asked,), False, True)
    if other := [name for name in predicted if name not in found]:
        asked = f"Nothing is called {other[0]!r} here. Keep the names of the cell above, and run both cells."
        return Verdict((asked,), False, True)
    if missing := [repr(name) for name in names if name not in predicted]:
        asked = f"The prediction for {', '.join(missing)} is missing. Write it in the cell above, then run both cells."
        return Verdict((asked,), False, True)
    open_ones = [repr(name) for name, value in predicted.items() if value is None]
    if open_ones:
        asked = f"Write your prediction for {', '.join(open_ones)} in the cell above, then run both cells."
        return Verdict((asked,), False, True)
    texts = [name for name in predicted if isinstance(found[name], str)]
    unknown = [value for name in texts if choices and not (isinstance(value := predicted[name], str) and value in choices)]
    if unknown:
        return Verdict((f"{unknown[0]!r} is not one of the choices: {', '.join(map(repr, choices))}.",), False, True)
    if odd := [name for name, value in predicted.items() if name not in texts and _number(value) is None]:
        asked = f"The prediction for {odd[0]!r} is {predicted[odd[0]]!r}. Write a number without quotes, then run both cells."
        return Verdict((asked,), False, True)
    if nothing := [name for name in predicted if not _is_known(found[name])]:
        asked = f"{who} says {found[nothing[0]]} for {nothing[0]}, which can't be compared. Run all cells above again."
        return Verdict((asked[0].upper() + asked[1:],), False, True)
    lines = []
    for name, value in predicted.items():
        said = "right" if _same(value, found[name], within) else "wrong"
        answer = f", {who} says {_number_text(found[name])}" if tell else ""
        mine = _number_text(value)
        if said == "wrong" and mine == _number_text(found[name]):  # they differ in digits that are not shown
            mine = str(value)
        lines.append(f"{said}: {name} - you said {mine}{answer}")
    return Verdict(tuple(lines), all(line.startswith("right") for line in lines))


def _is_known(found: float | str) -> bool:
    return isinstance(found, str) or math.isfinite(found)


def _same(value: object, found: float | str, within: float) -> bool:
    if isinstance(found, str):
        return value == found
    number = _number(value)
    return number is not None and abs(number - found) <= within * abs(found)


def _number(value: Any) -> float | None:
    """Return a number, or a tensor of one number, as a float. Return None for anything else."""
    try:
        return None if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _number_text(value: object) -> str:
    """Return a number as text: integers in full, others with three digits. Texts stay as they are."""
    if isinstance(value, Integral):
        return f"{value:,}"
    number = _number(value)
    if number is None:
        return str(value)
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"
