"""The budgets that marks set, and the check of a test against its budget and its baseline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from toolkit.core.errors import ToolkitError, unknown_name
from toolkit.core.units import bytes_text, parse_bytes, plural
from toolkit.decode.copy_budget import check_budget, counted, events_of, over_budget
from toolkit.testing.blame import Blame, of_copies, of_graphs, of_lines, of_peak
from toolkit.testing.measure import KINDS, Block, Lines, Measured, highest, most_kept, totals

if TYPE_CHECKING:
    from toolkit.trace.events import Trace

UPDATE = "If this is intended: pytest --copies-update"
_NO_BASELINE = "If these numbers are right, store them: pytest --copies-update"


@dataclass(frozen=True)
class Budget:
    """The limits of a test. A mark without limits asks for the comparison with the baseline."""

    copies: Mapping[str, int | None] | None = None  # None: not marked
    per: str = "block"
    memory: bool = False
    peak_bytes: int | None = None


class Problem(NamedTuple):
    """A broken budget: what was measured and allowed, the lines to blame, and what to do."""

    title: str
    blames: list[Blame]
    do: str

    def __str__(self) -> str:
        rows = [self.title]
        for i, blame in enumerate(self.blames[:6]):
            rows += [f"{'>' if i == 0 else ' '} {blame.line}: {blame.source}".rstrip(": "), f"      {blame.did}"]
        if len(self.blames) > 6:
            rows.append(f"  and {len(self.blames) - 6} more lines")
        return "\n".join([*rows, self.do])


def parse(
    copies: tuple[tuple[Any, ...], Mapping[str, Any]] | None, peak: tuple[tuple[Any, ...], Mapping[str, Any]] | None
) -> Budget:
    """Return the budget of two marks, given as their arguments. Raises ToolkitError for arguments that are wrong."""
    limits: dict[str, int | None] | None = None
    per, peak_bytes = "block", None
    if copies is not None:
        args, options = copies
        if args:
            found = f"{plural(len(args), 'argument')} without a name"
            raise ToolkitError("@pytest.mark.copies", found, "Name them: @pytest.mark.copies(h2d=0, d2h=1)")
        for name in options:
            if name not in (*KINDS, "per"):
                short = name.replace("to", "2")  # CUDA calls the kinds htod, dtoh and dtod
                meant = short if short in KINDS else None
                raise unknown_name("argument of @pytest.mark.copies", name, (*KINDS, "per"), meant)
        limits = {kind: options.get(kind) for kind in KINDS}
        asked = options.get("per", "test")
        if asked not in ("test", "step"):
            raise unknown_name("@pytest.mark.copies per", asked, ("test", "step"))
        per = "step" if asked == "step" else "block"
        check_budget(limits, per)
        if per == "step" and not any(limit is not None for limit in limits.values()):
            raise ToolkitError("@pytest.mark.copies(per='step')", "no limit", "Give one, such as d2h=1")
    if peak is not None:
        args, options = peak
        if options or len(args) > 1:
            found = f"{len(args)} arguments" if not options else f"arguments with names ({', '.join(options)})"
            raise ToolkitError("@pytest.mark.peak_memory", found, 'Give one size: @pytest.mark.peak_memory("2 GiB")')
        peak_bytes = parse_bytes(args[0]) if args else None
    return Budget(limits, per, peak is not None, peak_bytes)


def check(
    budget: Budget, blocks: list[Block], found: Measured, before: Measured | None, lines: Lines, update: bool
) -> Iterator[Problem]:
    """Yield the budgets that a test broke. `update` accepts whatever only the baseline forbids."""
    if budget.copies is not None:
        if any(limit is not None for limit in budget.copies.values()):
            yield from _over_limits(budget, blocks, before, lines)
        elif not update:
            yield from _over_baseline(blocks, found, before, lines)
    if budget.memory and (budget.peak_bytes is not None or not update):
        yield from _over_peak(budget, blocks, before, lines)
    if budget.memory and budget.peak_bytes is None and not update:
        yield from _over_graphs(blocks, before, lines)


def _over_limits(budget: Budget, blocks: list[Block], before: Measured | None, lines: Lines) -> Iterator[Problem]:
    assert budget.copies is not None
    several = len(blocks) > 1
    for number, block in enumerate(blocks, 1):
        assert block.trace is not None
        for excess in over_budget(block.trace, budget.copies, budget.per):
            broken = [f"{counted(len(t), kind)}, {excess.budget[kind]} allowed" for kind, t in excess.events.items()]
            where = "" if excess.what == "the block" else f" in {excess.what}"
            where += f" in block {number}" if several else ""
            known = before if not where else None  # a baseline counts whole tests
            do = "If this is intended, raise the limits of @pytest.mark.copies"
            yield Problem(
                f"copies{where}: {'; '.join(broken)}",
                of_copies({kind: [t] for kind, t in excess.events.items()}, known, lines),
                do,
            )


def _over_baseline(blocks: list[Block], found: Measured, before: Measured | None, lines: Lines) -> Iterator[Problem]:
    now = totals(found["copies"])
    if before is None or "copies" not in before:
        listed = ", ".join(counted(n, kind) for kind, (n, _) in now.items())
        yield Problem(f"copies: no baseline ({listed})", [], _NO_BASELINE)
        return
    then = totals(before["copies"])
    broken: list[str] = []
    traces: dict[str, list[Trace]] = {}
    for kind, (number, size) in now.items():
        old_number, old_size = then.get(kind, (0, 0))
        if number > old_number:
            broken.append(f"{counted(number, kind)}, {old_number:,} in the baseline")
        elif size > old_size:
            broken.append(f"{bytes_text(size)} in {counted(number, kind)}, {bytes_text(old_size)} in the baseline")
        else:
            continue
        traces[kind] = [events_of(block.trace, kind) for block in blocks if block.trace is not None]
    if broken:
        yield Problem(f"copies: {'; '.join(broken)}", of_copies(traces, before, lines), UPDATE)


def _over_peak(budget: Budget, blocks: list[Block], before: Measured | None, lines: Lines) -> Iterator[Problem]:
    block = highest(blocks)
    assert block.memory is not None
    peak = block.memory.peak_bytes
    if budget.peak_bytes is not None:
        if peak > budget.peak_bytes:
            title = f"peak memory: {_size(peak, budget.peak_bytes)}, {bytes_text(budget.peak_bytes)} allowed"
            yield Problem(
                title, of_peak(block, before, lines), "If this is intended, raise the limit of @pytest.mark.peak_memory"
            )
    elif before is None or "peak_bytes" not in before:
        yield Problem(f"peak memory: no baseline ({bytes_text(peak)})", [], _NO_BASELINE)
    elif peak > before["peak_bytes"]:
        title = f"peak memory: {_size(peak, before['peak_bytes'])}, {bytes_text(before['peak_bytes'])} in the baseline"
        yield Problem(title, of_peak(block, before, lines), UPDATE)
    else:
        grown = of_lines(block, before, lines) if peak == before["peak_bytes"] else []
        if grown:
            yield Problem(f"memory by line: {grown[0].did}; the peak is as before", grown, UPDATE)


def _over_graphs(blocks: list[Block], before: Measured | None, lines: Lines) -> Iterator[Problem]:
    graphs, then = most_kept(blocks), (before or {}).get("kept_nodes")
    if then is not None and graphs.nodes > then:
        title = f"autograd graphs: {graphs.nodes:,} nodes of earlier steps are kept, {then:,} in the baseline"
        yield Problem(title, of_graphs(graphs, lines), UPDATE)


def _size(n_bytes: int, other: int) -> str:
    """Return bytes as text; with the exact difference if the text of both is the same."""
    text = bytes_text(n_bytes)
    return f"{text} ({n_bytes - other:,} B more)" if text == bytes_text(other) else text
