"""The table that tuning returns: one row per config and GPU, with methods that name and compare the winners.

Each time is marked as measured or modelled. A GPU's winner is chosen among measured times if there are any, and otherwise
among modelled ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from toolkit.core.display import render
from toolkit.core.errors import ToolkitError, unknown_name
from toolkit.core.units import seconds_text
from toolkit.kernels.base import Config
from toolkit.tune.store import words

if TYPE_CHECKING:
    import pandas as pd


VERDICTS = ("ok", "slow", "untried", "wrong", "failed", "excluded")


@dataclass(frozen=True)
class Row:
    """One config of one problem on one GPU.

    `verdict` is "ok" (correct and timed), "slow" (correct; timed once only), "wrong" (disagrees with the reference), "failed"
    (compiling or launching failed), "excluded" (exceeds the GPU's limits), or "untried" (within the limits, and never run on
    this GPU). `reason` says why in words. `ns` is the time in ns, None if the config does not compile.
    `clock` is "measured" or "modelled". Wrong and excluded configs are never timed, so their times are modelled.
    """

    kernel: str
    shape: str
    gpu: str
    config: Config
    verdict: str
    reason: str = ""
    ns: float | None = None
    clock: str = ""
    spread_ns: float | None = None
    cosine: float | None = None
    max_error: float | None = None
    shared_bytes: int | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    occupancy: float | None = None  # share of an SM's threads, 0 to 1
    occupancy_limit: str = ""
    ptx_bytes: int | None = None
    sass_bytes: int | None = None
    bytes: int | None = None  # bytes that the problem has to read and write
    flops: float | None = None
    memory_ns: float | None = None  # lower bounds of the time on this GPU (roofline)
    compute_ns: float | None = None
    bound: str = ""

    @property
    def usable(self) -> bool:
        """Whether the config can be launched on this GPU, as far as is known."""
        return self.verdict in ("ok", "slow", "untried")


@dataclass(frozen=True)
class Tuning:
    """The rows of one call of `explore` or `warm`, with notes on work that was not done and why.

    Methods raise UnknownNameError for a GPU or problem that the table doesn't have, and ToolkitError if it has several problems
    and `shape` is None.
    """

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def gpus(self) -> list[str]:
        """The keys of the GPUs, in the order of the request."""
        return list(dict.fromkeys(row.gpu for row in self.rows))

    @property
    def shapes(self) -> list[str]:
        """The problems, as "kernel shape"."""
        return list(dict.fromkeys(f"{row.kernel} {row.shape}" for row in self.rows))

    def of(self, gpu: str, shape: str | None = None) -> list[Row]:
        """Return the rows of a GPU (and a problem, named as in `shapes`), in the order of the kernel's space."""
        if gpu not in self.gpus:
            raise unknown_name("GPU of this table", gpu, self.gpus)
        if shape is None and len(self.shapes) > 1:
            found = f"the table has {len(self.shapes)} problems, and none was named"
            raise ToolkitError("the rows of one problem", found, f"Pass shape=, one of: {', '.join(self.shapes)}")
        if shape is not None and shape not in self.shapes:
            raise unknown_name("problem of this table", shape, self.shapes)
        return [row for row in self.rows if row.gpu == gpu and shape in (None, f"{row.kernel} {row.shape}")]

    def best(self, gpu: str, shape: str | None = None) -> Row | None:
        """Return the fastest correct config of a GPU, by measured times if there are any; None if no config runs."""
        usable = [row for row in self.of(gpu, shape) if row.usable and row.ns is not None]
        measured = [row for row in usable if row.clock == "measured" and row.verdict == "ok"]
        return min(measured or usable, key=lambda row: row.ns or 0.0, default=None)

    def fastest(self, gpu: str, verdict: str, shape: str | None = None) -> Row | None:
        """Return the fastest config with a verdict. The fastest "wrong" one is what a tuner without checks might choose."""
        if verdict not in VERDICTS:
            raise unknown_name("verdict", verdict, VERDICTS)
        timed = [row for row in self.of(gpu, shape) if row.verdict == verdict and row.ns is not None]
        return min(timed, key=lambda row: row.ns or 0.0, default=None)

    def line(self, gpu: str, shape: str | None = None) -> str:
        """Return the winner as a line of code with a comment: "Config(...)  # rtx-5090: 35.7 µs modelled, ..."."""
        best, rows = self.best(gpu, shape), self.of(gpu, shape)
        if best is None or best.ns is None:
            why = next((row.reason for row in rows if row.reason), "no config was tried")
            return f"# {gpu}: no config runs on it: {why}"
        same_clock = [row for row in rows if row.usable and row.clock == best.clock and row.ns is not None and row is not best]
        facts = [f"{gpu}: {seconds_text(best.ns / 1e9)} {best.clock}"]
        if same_clock:
            second = min(row.ns or 0.0 for row in same_clock)
            facts.append(f"the next one of {len(same_clock)} takes {100 * (second / best.ns - 1):.1f} % longer")
        for verdict in ("excluded", "wrong", "failed"):
            if count := sum(row.verdict == verdict for row in rows):
                facts.append(f"{count} {verdict}")
        return f"{best.config!r}  # {', '.join(facts)}"

    def loss(self, gpu: str, winner_of: str, shape: str | None = None) -> float | str:
        """Return the slowdown of `gpu` with the winner of another GPU (0.07 for 7 % more time), or why it is unknown."""
        own, other = self.best(gpu, shape), self.best(winner_of, shape)
        if own is None or other is None or own.ns is None:
            return f"no config runs on {gpu if own is None else winner_of}"
        row = next((row for row in self.of(gpu, shape) if row.config == other.config), None)
        if row is None or not row.usable or row.ns is None:
            return (row.reason if row is not None else "") or f"its config was not tried on {gpu}"
        if row.clock != own.clock:
            return f"its time on {gpu} is {row.clock}, and that of {gpu}'s winner is {own.clock}"
        return max(row.ns / own.ns - 1, 0.0)

    def losses(self, shape: str | None = None) -> pd.DataFrame:
        """Return `loss` for every pair: one row per GPU, one column per GPU whose winner it runs."""
        import pandas as pd

        return pd.DataFrame({a: {b: self.loss(b, a, shape) for b in self.gpus} for a in self.gpus})

    def table(self, value: str = "ns", shape: str | None = None) -> pd.DataFrame:
        """Return a field of Row (`value`) with one row per config and one column per GPU."""
        import pandas as pd

        if value not in (names := [f.name for f in dataclasses.fields(Row)]):
            raise unknown_name("field of a row", value, names)
        return pd.DataFrame({gpu: {words(row.config): getattr(row, value) for row in self.of(gpu, shape)} for gpu in self.gpus})

    def summary(self, shape: str | None = None) -> pd.DataFrame:
        """Return one row per GPU: its winner, and the fastest wrong and the fastest excluded config with reasons."""
        import pandas as pd

        found = {}
        for gpu in self.gpus:
            best = self.best(gpu, shape)
            row: dict[str, object] = {"config": words(best.config), "ns": best.ns, "clock": best.clock} if best else {}
            for verdict in VERDICTS:
                row[verdict] = sum(one.verdict == verdict for one in self.of(gpu, shape))
            for verdict in ("wrong", "excluded"):
                other = self.fastest(gpu, verdict, shape)
                row[f"fastest_{verdict}"] = f"{words(other.config)}: {other.reason}" if other is not None else ""
            found[gpu] = row
        return pd.DataFrame.from_dict(found, orient="index")

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per config and GPU, with the config as text and times in ns."""
        import pandas as pd

        names = [f.name for f in dataclasses.fields(Row)]
        return pd.DataFrame([{**_flat(row), "config": words(row.config)} for row in self.rows], columns=names)

    def __repr__(self) -> str:
        lines = []
        for shape in self.shapes:
            lines.append(shape)
            gpus = dict.fromkeys(row.gpu for row in self.rows if f"{row.kernel} {row.shape}" == shape)
            lines += [f"  {self.line(gpu, shape)}" for gpu in gpus]
        return "\n".join([*lines, *(f"Note: {note}" for note in self.notes)]) or "nothing was tuned"

    def _repr_html_(self) -> str:
        return str(render("html", self))


def joined(parts: Iterable[Tuning], notes: Sequence[str] = ()) -> Tuning:
    """Join several tables into one, with each note once."""
    found = list(parts)
    every = dict.fromkeys([*notes, *(note for part in found for note in part.notes)])
    return Tuning(tuple(row for part in found for row in part.rows), tuple(every))


def _flat(row: Row) -> dict[str, object]:
    return {f.name: getattr(row, f.name) for f in dataclasses.fields(Row)}
