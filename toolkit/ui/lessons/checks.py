"""Checked questions for the lesson notebooks: the learner predicts a number or a choice, runs the code, and compares.

Verdicts are text, so that they read the same in JupyterLab, in a terminal and in a test.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from html import escape
from numbers import Real

_wrong: dict[str, set[str]] = {}  # the different wrong predictions of each question with a hint, by the hint


@dataclass(frozen=True)
class Verdict:
    """The result of a check: one line per number and the explanation, and whether all numbers are right."""

    lines: tuple[str, ...]
    right: bool

    def __repr__(self) -> str:
        return "\n".join(self.lines)

    def _repr_html_(self) -> str:
        """Return the lines as HTML, which a notebook wraps between words."""
        return "".join(f"<div>{escape(line)}</div>" for line in repr(self).splitlines())


def check(
    predicted: Mapping[str, float | str | None],
    found: Mapping[str, float | str],
    why: str = "",
    within: float = 0.0,
    who: str = "the trace",
    hint: str = "",
    choices: Collection[str] = (),
) -> Verdict:
    """Compare predictions with the numbers or choices that `who` found, name by name.

    A number is right if it is off by at most the share `within` (0.05: 5 %). A text is right if it is equal; if it isn't among
    `choices`, the verdict lists them. As long as a prediction is None, the verdict asks for it and shows no answer. With a
    `hint`, the first wrong prediction gets the hint, and the answer is shown after the second one. `why` is shown together with
    the answer. A wrong prediction raises no error.
    """
    open_ones = [name for name, value in predicted.items() if value is None]
    if open_ones:
        return Verdict((f"Write your prediction for {', '.join(open_ones)} first, then run this cell again.",), False)
    unknown = [value for value in predicted.values() if choices and isinstance(value, str) and value not in choices]
    if unknown:
        return Verdict((f"{unknown[0]!r} is not one of the choices: {', '.join(map(repr, choices))}.",), False)
    same = {name: _same(value, found[name], within) for name, value in predicted.items()}
    right = all(same.values())
    tell = right or not hint or _tried_before(hint, predicted)
    lines = []
    for name, value in predicted.items():
        answer = f", {who} says {_number_text(found[name])}" if tell else ""
        lines.append(f"{'right' if same[name] else 'wrong'}: {name} - you said {_number_text(value)}{answer}")
    after = why if tell else f"Hint: {hint}"
    return Verdict((*lines, *([after] if after else [])), right)


def _same(value: object, found: float | str, within: float) -> bool:
    if isinstance(found, str):
        return value == found
    return isinstance(value, Real) and abs(float(value) - found) <= within * abs(found)


def _tried_before(hint: str, predicted: Mapping[str, object]) -> bool:
    """Note a wrong prediction, and return whether there was another one before."""
    wrong = _wrong.setdefault(hint, set())
    wrong.add(repr(predicted))
    return len(wrong) > 1


def _number_text(value: object) -> str:
    """Return a number as text: integers in full, floats with three digits."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def counts_of_step(run: object, step: int = 2) -> dict[str, int]:
    """Return the copies of one decode step of a run by direction, such as {"h2d": 2, "d2h": 1, "d2d": 0}.

    Step 0 is the prefill and step 1 may include warm-up; from step 2 on the loop is in its steady state.
    """
    table = run.copies().set_index("step")  # type: ignore[attr-defined]
    return {kind: int(table.loc[step, f"{kind}_count"]) for kind in ("h2d", "d2h", "d2d")}
