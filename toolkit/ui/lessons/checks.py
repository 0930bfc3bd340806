"""Checked questions for the lesson notebooks: the learner predicts a number, runs the code, and compares.

Verdicts are plain text, so that they read the same in JupyterLab, in a terminal and in a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real


@dataclass(frozen=True)
class Verdict:
    """The result of a check: one line per number and the explanation, and whether all numbers are right."""

    lines: tuple[str, ...]
    right: bool

    def __repr__(self) -> str:
        return "\n".join(self.lines)


def check(
    predicted: Mapping[str, float | None],
    found: Mapping[str, float],
    why: str = "",
    within: float = 0.0,
    who: str = "the trace",
) -> Verdict:
    """Compare predicted numbers with the numbers that `who` found, name by name.

    A prediction is right if it is off by at most the share `within` (0.05: 5 %). As long as a prediction is None, the verdict
    asks for it and shows no answer. `why` is shown once all predictions are there. A wrong prediction raises no error.
    """
    open_ones = [name for name, value in predicted.items() if value is None]
    if open_ones:
        return Verdict((f"Write your prediction for {', '.join(open_ones)} first, then run this cell again.",), False)
    lines, right = [], True
    for name, value in predicted.items():
        same = isinstance(value, Real) and abs(float(value) - found[name]) <= within * abs(found[name])
        right = right and same
        lines.append(
            f"{'right' if same else 'wrong'}: {name} - you said {_number_text(value)}, {who} says {_number_text(found[name])}"
        )
    return Verdict((*lines, *([why] if why else [])), right)


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
