"""Checked questions for the lesson notebooks: the learner predicts a number, runs, and sees how the two compare.

Text only, so that an answer reads the same in JupyterLab, in a terminal and in a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """The outcome of one checked prediction: what was predicted, what was found, and the reason."""

    lines: tuple[str, ...]
    right: bool

    def __repr__(self) -> str:
        return "\n".join(self.lines)


def check(predicted: Mapping[str, int | None], found: Mapping[str, int], why: str = "") -> Verdict:
    """Compare predicted counts with those found, name by name.

    A prediction that is still None is asked for, and its answer isn't given away; `why` is shown only once
    every prediction has been made. Raises nothing for a wrong answer: it is a lesson, not a test.
    """
    open_ones = [name for name, value in predicted.items() if value is None]
    if open_ones:
        return Verdict((f"Write your prediction for {', '.join(open_ones)} first, then run this cell again.",), False)
    lines = []
    for name, value in predicted.items():
        same = value == found[name]
        lines.append(f"{'right' if same else 'not so'}: {name} - you said {value}, the trace says {found[name]}")
    right = all(predicted[name] == found[name] for name in predicted)
    return Verdict((*lines, *([why] if why else [])), right)


def counts_of_step(run: object, step: int = 2) -> dict[str, int]:
    """Copies of one decode step of a run, by direction: {"h2d": 2, "d2h": 1, "d2d": 0}.

    Step 0 is the prefill and step 1 may still warm something up; from step 2 on the loop is in its steady state.
    """
    table = run.copies().set_index("step")  # type: ignore[attr-defined]
    return {kind: int(table.loc[step, f"{kind}_count"]) for kind in ("h2d", "d2h", "d2d")}
