"""The Lab's history: every run that was generated or opened, numbered, and the table that compares some of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from toolkit.core.units import bytes_text, number_text, seconds_text
from toolkit.decode.compare import steady_steps
from toolkit.decode.run import RECORDED, Run
from toolkit.trace.columns import COPY_KINDS
from toolkit.trace.copies import copies_per_step
from toolkit.trace.events import Trace
from toolkit.ui.timeline.widget import Timeline

RATES = "Rates are of runs without recording. The other columns and the timeline are of recorded runs, which may be slower."
MOST = 20  # number of kept entries; each holds every event of its run


@dataclass(frozen=True)
class Entry:
    """A run, or a trace without one (`run` is None). `source` is the expression that makes it, after the lines of `setup`."""

    number: int
    title: str
    trace: Trace
    run: Run | None
    source: str
    setup: str = ""
    model: str = ""  # its name; files don't say it

    @property
    def label(self) -> str:
        """The number and the title, such as "3: roundtrip, demo/qwen3"."""
        return f"{self.number}: {self.title}"


class History:
    """The kept entries by number, the oldest first."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.runs: dict[str, Run] = {}  # by strategy, from the last Generate
        self._numbers = 0

    def add(self, title: str, trace: Trace, run: Run | None, source: str, setup: str = "", model: str = "") -> Entry:
        """Add a run or a trace. The oldest entry is dropped if there are more than MOST."""
        self._numbers += 1
        entry = Entry(self._numbers, title, trace, run, source, setup, model)
        self.entries = dict([*self.entries.items(), (entry.number, entry)][-MOST:])
        return entry

    def add_run(self, strategy: str, run: Run) -> None:
        """Add a run of the last Generate, or replace that of the same strategy. A cell may be going through `runs`."""
        self.runs = {**self.runs, strategy: run}


def timeline_of(entries: Iterable[Entry]) -> Timeline:
    """Return the timeline of one or two entries. Its titles are the strategies if they differ."""
    entries = list(entries)
    titles = [entry.run.title if entry.run is not None else entry.title for entry in entries]
    if len(set(titles)) < len(titles):
        titles = [entry.label for entry in entries]
    return Timeline(*(entry.trace for entry in entries), titles=tuple(titles))


def _same_tokens(entry: Entry, first: Entry) -> str:
    """Return "yes" or "no", or "-" for runs that aren't expected to have the same tokens: of another prompt or model."""
    a, b = entry.run, first.run
    other = bool(entry.model and first.model) and entry.model != first.model
    if a is None or b is None or other or a.prompt_tokens != b.prompt_tokens:
        return "-"
    return "yes" if a.tokens == b.tokens else "no"


def copies_html(entries: Iterable[Entry]) -> str:
    """Return a table of runs with the mean kernels, launches and copies per decode step, without the prefill.

    A trace without decode steps shows the means of all steps.
    """
    entries, rows = list(entries), []
    first = next((entry for entry in entries if entry.run is not None), None)
    for entry in entries:
        run, steps = entry.run, steady_steps(entry.trace)
        if run is None and not len(steps):
            every = copies_per_step(entry.trace)
            steps = every[every["step"] >= 0]
        same = "-" if first is None else _same_tokens(entry, first)
        device = escape(str(entry.trace.meta.get("device", "unknown device")))
        cells = [f"{escape(entry.label)}<br><small>{device}</small>", same]
        told = "" if run is None else escape(f"{run.clock} {run.slowed}".strip())  # perhaps from somebody's file
        cells.append(f"{number_text(run.tok_per_s)}<br>{told}" if run is not None and run.tok_per_s else "-")
        for column in ("kernels", "launches"):  # launches are -1 where they weren't recorded
            count = steps[column].mean()
            cells.append(number_text(count) if len(steps) and count >= 0 else "-")
        for kind in COPY_KINDS:
            count, size = steps[f"{kind}_count"].mean(), steps[f"{kind}_bytes"].mean()
            cells.append(f"{number_text(count)} ({bytes_text(size)})" if len(steps) and count else "0")
        clock = escape(str(run.clock if run is not None else entry.trace.meta.get("clock", "")))
        wait = seconds_text(steps["host_wait_us"].mean() / 1e6) if len(steps) else "-"
        cells.append(f"{wait}<br>{clock}" if len(steps) else wait)
        rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    per_step = ("kernels", "launches", *(kind.upper() for kind in COPY_KINDS), "host waits")
    head = "".join(f'<th scope="col" rowspan="2">{name}</th>' for name in ("run", "same tokens", "tok/s"))
    head += f'<th scope="colgroup" colspan="{len(per_step)}">mean of a decode step</th></tr><tr>'
    head += "".join(f'<th scope="col">{name}</th>' for name in per_step)
    table = f'<div class="tk-wrap tk-copies"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    return table + (f"<small>{RATES}</small>" if any(e.run is not None and e.run.slowed != RECORDED for e in entries) else "")
