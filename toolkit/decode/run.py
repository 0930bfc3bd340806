"""What came of one generation: the tokens, how fast, and the trace of what moved."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.core.display import render
from toolkit.core.errors import RecorderError
from toolkit.trace.events import Trace, copies_per_step

if TYPE_CHECKING:
    import pandas as pd


def tokens_per_s(known_ns: Sequence[int], late: bool) -> float | None:
    """The rate of tokens that the host knew at these times. `late`: each a step late, the last right after the one before."""
    known_ns = known_ns[:-1] if late and len(known_ns) > 2 else known_ns
    return (len(known_ns) - 1) * 1e9 / (known_ns[-1] - known_ns[0]) if len(known_ns) > 1 else None


@dataclass(frozen=True)
class Run:
    """One generation. `tokens` are the new ones, the end-of-sequence token included where it came; `text` is without it.

    `tok_per_s` counts from the moment the host knew the first token to when it knew the last, on the clock that `clock`
    names ("measured" or "modelled"); None for fewer than two tokens. Where tokens are read a step late, the last one, which
    comes without a step of its own, isn't counted (of three tokens or more). A recorded run on a real GPU is slower than an
    unrecorded one.
    """

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    strategy: str
    stop_reason: str  # "eos" | "length" | "cancelled"
    tok_per_s: float | None
    clock: str  # "measured" | "modelled"
    device: str
    recorded: Trace | None = field(default=None, repr=False)

    @property
    def trace(self) -> Trace:
        """The events of this run. RecorderError where it was made with record=False.

        Inside an outer `tk.record` block this is that block's trace: readable after it, and with all its events.
        """
        if self.recorded is None:
            raise RecorderError("the trace of a run", "it wasn't recorded", "Generate with record=True")
        return self.recorded

    def copies(self) -> pd.DataFrame:
        """What crossed between host and device, a row a step: see `toolkit.trace.events.copies_per_step`."""
        return copies_per_step(self.trace)

    def timeline(self, other: Run | None = None) -> Any:
        """The interactive timeline, beside `other`'s where given."""
        return render("timeline", self) if other is None else render("timeline", self, other)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write a self-contained page: timeline and copies table."""
        written: Path = render("page", self, path)
        return written

    def __repr__(self) -> str:
        return f"Run({self._summary()}: {self._shown_text()!r})"

    def _repr_html_(self) -> str:
        return f"<div><code>{html.escape(self._shown_text())}</code><br><small>{html.escape(self._summary())}</small></div>"

    def _summary(self) -> str:
        rate = "" if self.tok_per_s is None else f", {self.tok_per_s:.4g} tok/s {self.clock}"
        return f"{self.strategy} on {self.device}, {len(self.tokens)} tokens, stopped by {self.stop_reason}{rate}"

    def _shown_text(self) -> str:
        text = self.text or " ".join(map(str, self.tokens))
        return text if len(text) <= 200 else text[:200] + "..."
