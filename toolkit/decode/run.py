"""`Run`: the result of one generation, with its tokens, its rate and the trace of its copies."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.core.display import render
from toolkit.core.errors import RecorderError, TraceError
from toolkit.core.schema import convert
from toolkit.core.units import number_text, plural
from toolkit.trace.copies import copies_per_step
from toolkit.trace.events import Trace

if TYPE_CHECKING:
    import pandas as pd

FULL = "the context is full"
FEW = 8  # tokens of a run whose rate contains its first steps
RECORDED, AFTER = "while recorded", "after a recording"  # on CUDA, a process's first recording leaves CUPTI attached


def tokens_per_s(known_ns: Sequence[int], late: bool) -> float | None:
    """Return the tokens per second, given the times at which the host knew each token; None for fewer than two.

    The first intervals are not counted, because kernels may be compiled, graphs captured and launches recorded in them: four of
    more than eight tokens, or one of more than three. With `late`, tokens were read one step late: the second one after the
    launches of two steps, and the last one right after the one before it. So of more than three tokens, the last isn't counted.
    """
    first = 4 if len(known_ns) > FEW else 1 if len(known_ns) > 3 else 0
    known_ns = known_ns[first : -1 if late and len(known_ns) > 3 else None]
    return (len(known_ns) - 1) * 1e9 / (known_ns[-1] - known_ns[0]) if len(known_ns) > 1 else None


@dataclass(frozen=True)
class Run:
    """The result of one generation.

    The rate leaves out the first intervals between tokens, because kernels may be compiled, graphs captured and launches
    recorded in them: the first four of more than eight tokens, the first of four to eight. Strategies that read tokens one step
    late don't count the last of more than three tokens, which needs no step of its own.

    Attributes:
        text: The new text, without the end-of-sequence token, up to a stop string.
        tokens: The new tokens, including the end-of-sequence token if the model produced one.
        prompt_tokens: The tokens of the prompt.
        strategy: The name of the strategy.
        stop_reason: Why the text ended: "eos", "stop" (a stop string), "length" (`max_new_tokens`, or a full context) or
            "cancelled".
        tok_per_s: The rate at which the host got to know tokens; None for fewer than two tokens.
        clock: The clock of the rate, "measured" or "modelled".
        device: The name of the device.
        fallback: Why the run went on without the graphs of its strategy; None if it used them or has none.
        prefill_chunk: The number of prompt tokens that were fed at a time; None if the model's own loop ran.
        slowed: Why the rate is too low: "while recorded", or "after a recording" on CUDA; otherwise empty.
        context_full: Whether "length" means that the context was full before `max_new_tokens` were generated.
    """

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    strategy: str
    stop_reason: str  # "eos" | "stop" | "length" | "cancelled"
    tok_per_s: float | None
    clock: str  # "measured" | "modelled"
    device: str
    recorded: Trace | None = field(default=None, repr=False)
    fallback: str | None = None  # why the run went on without the graphs of its strategy, if it did
    prefill_chunk: int | None = None
    slowed: str = RECORDED  # why the rate is too low; files of earlier versions don't say it
    context_full: bool = False  # neither do they say this

    @property
    def trace(self) -> Trace:
        """The events of this run. Raises RecorderError for a run with record=False.

        Inside an outer `tk.record` block, this is the trace of that block; it can be read after the block ends.
        """
        if self.recorded is None:
            raise RecorderError("the trace of a run", "it wasn't recorded", "Generate with record=True")
        return self.recorded

    @property
    def title(self) -> str:
        """The name of the strategy, with "without graphs" if the run went on without them."""
        return self.strategy if self.fallback is None else f"{self.strategy} without graphs"

    @property
    def rate_text(self) -> str:
        """The rate, its clock, and why it is too low if it is, such as "3,928 tok/s modelled"; "" without a rate."""
        return "" if self.tok_per_s is None else f"{number_text(self.tok_per_s)} tok/s {self.clock} {self.slowed}".rstrip()

    def copies(self) -> pd.DataFrame:
        """Return the copies between host and device, one row per step; `Trace.copies` describes the columns."""
        return copies_per_step(self.trace)

    def timeline(self, other: Run | None = None) -> Any:
        """Return the interactive timeline of this run, next to that of `other` if it is given."""
        return render("timeline", self) if other is None else render("timeline", self, other)

    def to_html(self, path: str | os.PathLike[str], other: Run | None = None) -> Path:
        """Write a self-contained page with the timeline and the table of copies, next to those of `other` if it is given."""
        written: Path = render("page", self, path, other)
        return written

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the run to `path`: its trace, with its title in `meta["title"]` and all other fields in `meta["run"]`.

        `tk.open_trace` and the Lab open the file. The write is atomic.
        """
        trace, facts = self.trace, {one.name: getattr(self, one.name) for one in fields(self) if one.name != "recorded"}
        return Trace(trace.columns, trace.strings, {"title": self.title, **trace.meta, "run": facts}).save(path)

    def __repr__(self) -> str:
        return f"Run({self._summary()}: {self._shown_text()!r})"

    def _repr_html_(self) -> str:
        return f"<div><code>{html.escape(self._shown_text())}</code><br><small>{html.escape(self._summary())}</small></div>"

    def _summary(self) -> str:
        rate = f", {self.rate_text}" if self.rate_text else ""
        name = self.title if self.fallback is None else f"{self.title} ({self.fallback})"
        why = f"{self.stop_reason} ({FULL})" if self.context_full else self.stop_reason
        return f"{name} on {self.device}, {plural(len(self.tokens), 'token')}, stopped by {why}{rate}"

    def _shown_text(self) -> str:
        text = self.text or " ".join(map(str, self.tokens))
        return text if len(text) <= 200 else text[:200] + "..."


def run_of(trace: Trace) -> Run | None:
    """Return the run that `Run.save` stored in the meta of `trace`, or None. Raises TraceError if its fields are damaged."""
    if "run" not in trace.meta:
        return None
    try:
        return replace(convert(trace.meta["run"], Run), recorded=trace)
    except ValueError as error:
        raise TraceError("reading a saved run", f"the facts of the run are damaged ({error})", "Save the run again") from error
