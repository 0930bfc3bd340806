"""`tk.compare`: generate from one prompt with several decode strategies, or several models, and compare the runs.

The comparison counts the copies and host waits in each run's recording, so it works with any strategy and device.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.core.display import render
from toolkit.core.errors import RecorderError, ToolkitError
from toolkit.core.remote import Remote
from toolkit.core.units import bytes_text, number_text
from toolkit.decode.loop import generate
from toolkit.decode.run import AFTER, FEW, Run
from toolkit.decode.sampling import checked
from toolkit.decode.strategies import STRATEGIES, OwnLoop, Strategy, find_strategy, strategies_of
from toolkit.models.model import Model, check_model
from toolkit.trace.columns import COPY_KINDS
from toolkit.trace.copies import copies_per_step
from toolkit.trace.differences import brief_time
from toolkit.trace.events import Trace

if TYPE_CHECKING:
    import pandas as pd

WARM_UP_TOKENS = 4  # a captured step is captured by the third one
LATE = "The rates are too low, because an earlier recording left CUPTI attached. Restart the kernel and compare first."
SHORT = f"Rates of up to {FEW} tokens contain the first steps, which are slower. Generate more tokens to compare rates."


@dataclass(frozen=True)
class Comparison:
    """The runs of one prompt in the requested order. `runs` is keyed by strategy, or by "model: strategy" for several models.

    `table` is a DataFrame with one row per run. Its columns are `model` (if there are several), `strategy`, `same_tokens`
    (equal to the tokens of the first run), `tok_per_s` (of another run, which was not recorded), `clock` ("measured" or
    "modelled"), and averages per decode step: `kernels`, `launches` (calls that launched kernels, copies or graphs),
    `h2d_count` and `h2d_bytes`, the same for d2h and d2d, and `host_wait_us`. Under strategies with graphs, the averages leave
    out the first decode step, which is launched kernel by kernel. The rate of a run in `runs` is that of the table.
    `timed_late` is True if rates on CUDA were measured after this process's first recording, which makes them too low.
    """

    runs: Mapping[str, Run]
    table: pd.DataFrame
    timed_late: bool = False

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write a self-contained page with every run's timeline."""
        written: Path = render("page", self, path)
        return written

    def titled(self) -> dict[str, Run]:
        """Return the runs by what tables and pages call them: runs that went on without graphs say so."""
        return {label.removesuffix(run.strategy) + run.title: run for label, run in self.runs.items()}

    def __repr__(self) -> str:
        return "\n".join([*self._remarks(), self._shown().to_string(index=False), *self._warnings()])

    def _repr_html_(self) -> str:
        shown = self._shown()  # short names in the head, so that a page of 900 pixels shows all columns
        table: str = shown.rename(columns=lambda name: str(name).removesuffix("/step")).to_html(index=False)
        table = re.sub(r"\((\S+) (\S+)\)", r"(\1&nbsp;\2)", table)  # "(8 B)" stays on one line
        remarks = "".join(f"<p>{html.escape(remark)}</p>" for remark in self._remarks())
        return f"{remarks}{table}<small>{self._note()}</small>"

    def _remarks(self) -> list[str]:
        """Return sentences about runs that went on without their graphs, and about runs that differ in their kernels."""
        reasons: dict[str, list[str]] = {}
        for title, run in self.titled().items():
            if run.fallback is not None:
                reasons.setdefault(run.fallback, []).append(title)
        fallen = [f"{', '.join(titles)}: {reason}." for reason, titles in reasons.items()]
        return [*fallen, *filter(None, [self._kernels()])]

    def _kernels(self) -> str:
        """Return a sentence if the runs differ in their kernels: their times then differ by more than copies and waits."""
        of_count: dict[float, list[str]] = {}
        for label, count in zip(self.titled(), self.table["kernels"], strict=True):
            of_count.setdefault(float(count), []).append(label)
        if len(of_count) < 2:
            return ""
        parts = [f"{number_text(count)} in {', '.join(labels)}" for count, labels in sorted(of_count.items())]
        return f"Kernels per step differ: {'; '.join(parts)}."

    def _shown(self) -> pd.DataFrame:
        """Return the table for display, with units, per decode step."""
        names = [column for column in ("model", "strategy") if column in self.table]
        shown = self.table[names].assign(strategy=[run.title for run in self.runs.values()])
        shown["same tokens"] = self.table["same_tokens"]
        shown["tok/s"] = [
            "-" if np.isnan(rate) else f"{f'{rate:,.0f}' if rate >= 100 else f'{rate:.3g}'} {clock}"
            for rate, clock in zip(self.table["tok_per_s"], self.table["clock"], strict=True)
        ]
        for name in ("kernels", "launches"):
            shown[f"{name}/step"] = ["-" if n < 0 else number_text(n) for n in self.table[name]]
        for kind in COPY_KINDS:
            pairs = zip(self.table[f"{kind}_count"], self.table[f"{kind}_bytes"], strict=True)
            shown[f"{kind.upper()}/step"] = [f"{number_text(n)} ({bytes_text(size)})" if n else "0" for n, size in pairs]
        shown["host waits/step"] = [brief_time(1e3 * us) for us in self.table["host_wait_us"]]
        return shown

    def _note(self) -> str:
        note = "Kernels, launches, copies and waits are those of one decode step of a recorded run. "
        note += "Rates are those of runs without recording, which may be faster. "
        note += "A modelled time is the virtual GPU's estimate, not a measurement."
        return " ".join([note, *self._warnings()])

    def _warnings(self) -> list[str]:
        """Return sentences about rates that can't be compared with those of other runs."""
        short = any(run.tok_per_s is not None and len(run.tokens) <= FEW for run in self.runs.values())
        return [LATE] * self.timed_late + [SHORT] * (short and len(self.runs) > 1)


@dataclass(frozen=True)
class Entry:
    """One row of a comparison: the model, its name (empty if there is only one model), and the strategy."""

    name: str
    model: Model
    strategy: Strategy | OwnLoop

    @property
    def label(self) -> str:
        return f"{self.name}: {self.strategy.name}" if self.name else self.strategy.name


def compare(
    model: Model | Remote | Mapping[str, Model] | list[Model] | tuple[Model, ...],
    prompt: Any,
    decode: Iterable[str | Strategy] | None = None,
    *,
    lines: bool = True,
    **options: Any,
) -> Comparison:
    """Generate from `prompt` with each strategy of `decode` (default: all) and compare the runs.

    `model` may be several models on one device, as a list or a mapping: `tk.compare({"ours": a, "theirs": b}, prompt)`. A
    strategy that only some models support, such as "hf-generate", runs on those models only. A model that a cluster holds is
    compared alone, on all ranks. `options` are passed to `generate`.

    Every strategy is timed without recording before the first recording starts, because a recorded run launches every kernel
    from Python, on a real GPU and on a virtual one. CUPTI also stays attached after a process's first recording and slows down
    every later launch (demo model on an H200: from 850 to 680 tok/s); a comparison that starts after a recording says so.
    After `cancel` is set, the table holds the strategies whose recording had started, at least the first one.

    Raises RecorderError if the device is being recorded, UnknownNameError for an unknown strategy, and ToolkitError for models
    on different devices, for different ones with one name, and for an empty list of models or strategies.
    """
    if unknown := options.keys() - signature(generate).parameters:
        raise TypeError(f"compare() got an unexpected keyword argument {min(unknown)!r}")
    _, options = checked({**options, "lines": lines})
    if isinstance(model, Remote):
        return model.compare(prompt, decode, **options)  # type: ignore[no-any-return]
    names: Any = decode
    if decode is not None:
        names = list(decode) if isinstance(decode, Iterable) and not isinstance(decode, str) else [decode]
    entries = _entries(_named(model), names)
    device = entries[0].model.device
    if device.recording is not None:
        raise RecorderError(
            "tk.compare", f"{device.name} is being recorded", "End that recording first, because each run makes its own"
        )
    if "record" in options:
        raise ToolkitError("tk.compare with record=", "it always records its runs, to count their copies", "Leave out record=")
    timed = _timed(entries, prompt, options)
    runs: dict[str, Run] = {}
    for entry in entries:
        run = generate(entry.model, prompt, entry.strategy, **options)
        runs[entry.label] = with_rate_of(run, timed.get(entry.label))
        if run.stop_reason == "cancelled":
            break
    return Comparison(runs, _table(entries, runs), any(run.slowed == AFTER for run in runs.values()))


def unrecorded(model: Model | Remote, prompt: Any, decode: str | Strategy | OwnLoop, **options: Any) -> Run:
    """Generate without recording, for the rate. A short run before it compiles the kernels, unless times are modelled."""
    clock = model.clock if isinstance(model, Remote) else model.device.clock
    if clock == "measured":
        short = {**options, "max_new_tokens": WARM_UP_TOKENS, "on_token": None}
        generate(model, prompt, decode, **short, record=False)
    return generate(model, prompt, decode, **options, record=False)


def with_rate_of(run: Run, timed: Run | None) -> Run:
    """Return `run` with the rate of `timed`, the same run without recording; with none if `timed` is None."""
    return replace(run, tok_per_s=None) if timed is None else replace(run, tok_per_s=timed.tok_per_s, slowed=timed.slowed)


def _named(model: Model | Mapping[str, Model] | list[Model] | tuple[Model, ...]) -> dict[str, Model]:
    """Return the models by name; a single model has the empty name."""
    models: dict[str, Model] = {}
    if isinstance(model, Mapping):
        for name, each in model.items():
            if models.setdefault(str(name), each) is not each:
                raise _same_name("models", str(name))
    elif isinstance(model, list | tuple):
        models = {f"model {i}": each for i, each in enumerate(model, 1)}
    else:
        models = {"": model}
    if not models:
        raise ToolkitError("comparing models", "the list of models is empty", "Give at least one model")
    if any(isinstance(each, Remote) for each in models.values()):
        raise ToolkitError(
            f"comparing {len(models)} models", "a cluster holds one of them", "Compare models of clusters one at a time"
        )
    for each in models.values():
        check_model(each)
    devices = {each.device.name for each in models.values()}
    if len(devices) > 1:
        found = f"they are on several devices: {', '.join(sorted(devices))}"
        raise ToolkitError(f"comparing {len(models)} models", found, "Load them onto one device")
    return models


def _entries(models: Mapping[str, Model], decode: Sequence[str | Strategy] | None) -> list[Entry]:
    """Return each model with each requested strategy that it supports."""
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
        raise ToolkitError("comparing strategies", "the list is empty", f"Give at least one of: {', '.join(STRATEGIES)}")
    of_label: dict[str, Entry] = {}
    for entry in entries:
        if of_label.setdefault(entry.label, entry) != entry:
            raise _same_name("strategies", entry.label)
    return list(of_label.values())


def _same_name(what: str, name: str) -> ToolkitError:
    return ToolkitError(f"comparing {what}", f"two different ones are called {name!r}", "Give one of them another name")


def _timed(entries: Sequence[Entry], prompt: Any, options: dict[str, Any]) -> dict[str, Run]:
    """Return a run of each entry without recording; a cancel leaves out the rest."""
    runs: dict[str, Run] = {}
    for entry in entries:
        run = unrecorded(entry.model, prompt, entry.strategy, **{**options, "on_token": None})
        if run.stop_reason == "cancelled":
            break
        runs[entry.label] = run
    return runs


def _table(entries: Sequence[Entry], runs: Mapping[str, Run]) -> pd.DataFrame:
    import pandas as pd

    first = next(iter(runs.values()))
    rows = []
    for entry, run in zip(entries, runs.values(), strict=False):  # a cancel leaves fewer runs than entries
        per_step = steady_steps(run.trace)
        counted = [name for name in per_step if name in ("kernels", "launches") or name.endswith(("_count", "_bytes"))]
        means = {column: _whole(per_step[column].mean()) for column in counted}
        wait_us = float(per_step["host_wait_us"].mean()) if len(per_step) else 0.0
        names = {"model": entry.name, "strategy": run.strategy} if entry.name else {"strategy": run.strategy}
        rate = float("nan") if run.tok_per_s is None else run.tok_per_s
        same = run.tokens == first.tokens
        rows.append({**names, "same_tokens": same, "tok_per_s": rate, "clock": run.clock, **means, "host_wait_us": wait_us})
    return pd.DataFrame(rows)


def decode_steps(trace: Trace) -> pd.DataFrame:
    """Return `copies_per_step` of the decode steps, without prefill, drain and events outside of steps."""
    steps = {mark.step for mark in trace.marks() if mark.name == "decode"}
    table = copies_per_step(trace)
    return table[table["step"].isin(steps)]


def steady_steps(trace: Trace) -> pd.DataFrame:
    """Return `decode_steps` without the step that runs before its graph is captured: it launches kernels one by one.

    That is the first one, if it launches no graph, and a graph is launched later: in another step, or, as a loop, outside of
    steps.
    """
    steps = decode_steps(trace)
    graph = [code for code, text in enumerate(trace.strings) if "GraphLaunch" in text]
    launches = trace.is_kind("launch") & np.isin(trace["name"], graph)
    if not len(steps) or not launches.any():
        return steps
    first = steps["step"].min()
    begin = min(mark.start_ns for mark in trace.marks() if mark.step == first)
    later = launches & (trace["step"] != first) & (trace["start_ns"] > begin)
    captured = later.any() and not (launches & (trace["step"] == first)).any()
    return steps[steps["step"] != first] if captured else steps


def _whole(x: float) -> float | int:
    """Return a mean as an int if it is whole, and 0 if it is NaN (the mean of no steps)."""
    return 0 if np.isnan(x) else int(x) if x == int(x) else float(x)
