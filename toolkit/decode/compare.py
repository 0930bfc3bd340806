"""Strategies side by side, and a guard that fails when more is copied than was agreed.

Both count what a recording holds; neither knows how a token is decoded or how a device records.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.core.display import render
from toolkit.core.errors import RecorderError, ToolkitError
from toolkit.core.units import bytes_text, seconds_text
from toolkit.decode.loop import generate
from toolkit.decode.run import Run
from toolkit.decode.strategies import STRATEGIES, OwnLoop, Strategy, find_strategy, strategies_of
from toolkit.models.model import Model
from toolkit.trace.columns import COPY_KINDS
from toolkit.trace.events import Trace, copies_per_step

if TYPE_CHECKING:
    import pandas as pd

WARM_UP_TOKENS = 4
LATE = "Rates are too low: timed after a recording in this process, which leaves CUPTI attached. Restart and compare first."


@dataclass(frozen=True)
class Comparison:
    """Runs of one prompt, by strategy, in the order asked for; of several models, by "model: strategy".

    `table` has a row a run: `model` where there are several, `strategy`, `same_tokens` (as the first run's), `tok_per_s`
    and the `clock` it is on,
    and per decode step, on average, `<h2d|d2h|d2d>_count`, `<...>_bytes` and `host_wait_s`. `timed_late`: the measured
    rates come from after this process's first recording, so they are too low.
    """

    runs: Mapping[str, Run]
    table: pd.DataFrame
    timed_late: bool = False

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write a self-contained page with every run's timeline."""
        written: Path = render("page", self, path)
        return written

    def __repr__(self) -> str:
        text: str = self._shown().to_string(index=False)
        return f"{text}\n{LATE}" if self.timed_late else text

    def _repr_html_(self) -> str:
        table: str = self._shown().to_html(index=False)
        return f"{table}<small>{self._note()}</small>"

    def _shown(self) -> pd.DataFrame:
        """The table for people: units written out, per decode step."""
        names = [column for column in ("model", "strategy") if column in self.table]
        shown = self.table[names].assign(**{"same tokens": self.table["same_tokens"]})
        shown["tok/s"] = [
            "-" if np.isnan(rate) else f"{rate:,.0f} {clock}"
            for rate, clock in zip(self.table["tok_per_s"], self.table["clock"], strict=True)
        ]
        for kind in COPY_KINDS:
            pairs = zip(self.table[f"{kind}_count"], self.table[f"{kind}_bytes"], strict=True)
            shown[f"{kind.upper()}/step"] = [f"{count:.4g} ({bytes_text(size)})" if count else "0" for count, size in pairs]
        shown["host waits/step"] = [seconds_text(s) for s in self.table["host_wait_s"]]
        return shown

    def _note(self) -> str:
        note = "Copies and waits per decode step. A modelled time is the virtual GPU's estimate, not a measurement."
        return f"{note} {LATE}" if self.timed_late else note


@dataclass(frozen=True)
class Entry:
    """One row of a comparison: which model, under what name (empty where there is but one), and how it decodes."""

    name: str
    model: Model
    strategy: Strategy | OwnLoop

    @property
    def label(self) -> str:
        return f"{self.name}: {self.strategy.name}" if self.name else self.strategy.name


def compare(
    model: Model, prompt: Any, decode: Iterable[str | Strategy] | None = None, *, lines: bool = True, **options: Any
) -> Comparison:
    """Generate from `prompt` under each strategy of `decode` (None: all), and compare.

    `model` may be several models on one device, as a list or by name: `tk.compare({"ours": a, "theirs": b}, prompt)`. A
    strategy that only some of them know (a loop of their own, as "hf-generate") is run for those.

    `options` are those of `generate`. Where the clock is measured, every strategy is warmed up and timed without recording,
    before the first is recorded: CUPTI stays attached after a process's first recording, and slows every launch from then
    on (the demo model on an H200: from 850 to 680 tok/s). A comparison after a recording says so. On the virtual GPU one
    run gives both. Set `cancel` to stop: the table then has the strategies that were begun.
    """
    names = [decode] if isinstance(decode, str | Strategy) else decode if decode is None else list(decode)
    entries = _entries(_named(model), names)
    device = entries[0].model.device
    if device.recording is not None:
        raise RecorderError(
            "comparing", f"{device.name} is being recorded", "Leave that block first: each run is recorded by itself"
        )
    if "record" in options:
        raise ToolkitError("comparing with record=", "comparing counts what recordings hold", "Leave the option away")
    late = device.clock == "measured" and device.recorded  # asked before this comparison's own recordings
    rates = _timed(entries, prompt, options) if device.clock == "measured" else {}
    runs: dict[str, Run] = {}
    for entry in entries:
        run = runs[entry.label] = generate(entry.model, prompt, entry.strategy, lines=lines, **options)
        rates.setdefault(entry.label, run.tok_per_s)
        if run.stop_reason == "cancelled":
            break
    return Comparison(runs, _table(entries, runs, rates), late)


def _named(model: Model) -> dict[str, Any]:
    """The models to compare, by name; one alone has none."""
    if isinstance(model, Mapping):
        models = {str(name): each for name, each in model.items()}
    elif isinstance(model, list | tuple):
        models = {f"model {i}": each for i, each in enumerate(model, 1)}
    else:
        return {"": model}
    devices = {each.device.name for each in models.values()}
    if len(devices) != 1:
        found = f"they are on {', '.join(sorted(devices))}" if devices else "there are none"
        raise ToolkitError(f"comparing {len(models)} models", found, "Load them onto one device")
    return models


def _entries(models: Mapping[str, Any], decode: Sequence[str | Strategy] | None) -> list[Entry]:
    """Every model with every strategy that is asked for and that it knows."""
    known = {name: {**STRATEGIES, **strategies_of(each)} for name, each in models.items()}
    asked = {name: list(strategies_of(each)) if decode is None else decode for name, each in models.items()}
    if decode is not None:
        of_all = {name: each for names in known.values() for name, each in names.items()}
        for each in decode:
            find_strategy(each, of_all)
    entries = [
        Entry(name, model, find_strategy(each, known[name]))
        for name, model in models.items()
        for each in asked[name]
        if not isinstance(each, str) or each in known[name]
    ]
    if not entries:
        raise ToolkitError("comparing", "no strategies", f"Name some of {', '.join(STRATEGIES)}")
    return list({entry.label: entry for entry in entries}.values())


def _timed(entries: Sequence[Entry], prompt: Any, options: dict[str, Any]) -> dict[str, float | None]:
    """Tokens per second of each entry, warmed up and unrecorded; those that were begun before a cancel."""
    quiet = {**options, "on_token": None, "record": False}
    rates: dict[str, float | None] = {}
    for entry in entries:
        generate(entry.model, prompt, entry.strategy, **{**quiet, "max_new_tokens": WARM_UP_TOKENS})
        run = generate(entry.model, prompt, entry.strategy, **quiet)
        if run.stop_reason == "cancelled":
            break
        rates[entry.label] = run.tok_per_s
    return rates


def _table(entries: Sequence[Entry], runs: Mapping[str, Run], rates: Mapping[str, float | None]) -> pd.DataFrame:
    import pandas as pd

    first = next(iter(runs.values()))
    rows = []
    for entry, run in zip(entries, runs.values(), strict=False):  # fewer runs than entries after a cancel
        per_step = decode_steps(run.trace)
        means = {column: _whole(per_step[column].mean()) for column in per_step if column.endswith(("_count", "_bytes"))}
        wait_s = float(per_step["host_wait_s"].mean()) if len(per_step) else 0.0
        names = {"model": entry.name, "strategy": run.strategy} if entry.name else {"strategy": run.strategy}
        rate = rates[entry.label] or float("nan")
        same = run.tokens == first.tokens
        rows.append({**names, "same_tokens": same, "tok_per_s": rate, "clock": run.clock, **means, "host_wait_s": wait_s})
    return pd.DataFrame(rows)


def decode_steps(trace: Trace) -> pd.DataFrame:
    """`copies_per_step` of the decode steps alone: without prefill, drain, and what lies outside of steps."""
    steps = {mark.step for mark in trace.marks() if mark.name == "decode"}
    table = copies_per_step(trace)
    return table[table["step"].isin(steps)]


def _whole(x: float) -> float | int:
    """A mean as an int where it is one, which it is when every step copies the same; 0 for the mean of nothing."""
    return 0 if np.isnan(x) else int(x) if x == int(x) else float(x)
