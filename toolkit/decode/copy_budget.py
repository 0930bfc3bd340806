"""`tk.copy_budget`: a context manager that fails if a block of code copies more often between host and device than allowed.

It records the block and counts the copies, so it works with any PyTorch code, on a real or a virtual GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from toolkit.core.blocks import block
from toolkit.core.errors import CopyBudgetError, DeviceError, RecorderError, ToolkitError, unknown_name
from toolkit.core.numbers import integer
from toolkit.core.units import bytes_text
from toolkit.gpu.device import Device
from toolkit.gpu.opening import open_device
from toolkit.trace.events import Trace


@block("with tk.copy_budget(h2d=0, d2h=1):")
def copy_budget(
    h2d: int | None = None,
    d2h: int | None = None,
    d2d: int | None = None,
    per: str = "block",
    device: Device | str | None = None,
    pageable: int | None = None,
    waits: int | None = None,
) -> Iterator[None]:
    """Raise CopyBudgetError if the block copies more often than allowed: `with tk.copy_budget(h2d=0, d2h=1):`.

    Args:
        h2d, d2h, d2d: The number of copies allowed in each direction; None allows any number.
        per: "block" applies the limits to the whole block, "step" to every step in it except the prefill.
        device: The device to record. Default: the virtual GPU that is open, else "auto".
        pageable: The number of H2D and D2H copies allowed from and to host memory that is not pinned.
        waits: The number of times that the host may wait for the device: `.item()`, `synchronize()`, blocking copies.

    Exceptions from the block propagate. Raises ToolkitError for a limit that isn't a number of copies, and RecorderError if the
    device is already being recorded, because its copies can't be told apart from the block's, and with `per="step"` if the
    block has no steps.
    """
    budget = {"h2d": h2d, "d2h": d2h, "d2d": d2d, "pageable": pageable, "waits": waits}
    check_budget(budget, per)
    gpu = _in_use() if device is None else open_device(device)
    if gpu.recording is not None:
        found = f"{gpu.name} is being recorded, so the block's copies can't be told apart from other copies"
        raise RecorderError("a copy budget", found, "Begin that recording inside of the tk.copy_budget block, or end it first")
    with gpu.record() as trace:
        yield
    for excess in over_budget(trace, budget, per):
        raise excess.error()


def check_budget(budget: Mapping[str, int | None], per: str) -> None:
    """Raise ToolkitError if a limit is not a number of copies, or `per` is neither "block" nor "step"."""
    for kind, limit in budget.items():
        if limit is not None and integer(limit, least=0) is None:
            raise ToolkitError(
                f"a copy budget of {kind}={limit!r}",
                "not a number of copies",
                "Give a whole number of at least 0, or None for no limit",
            )
    if per not in ("block", "step"):
        raise unknown_name("copy budget per", per, ("block", "step"))


@dataclass(frozen=True)
class Excess:
    """A block or step that exceeds its budget: the events of each kind that has too many, and the numbers allowed."""

    what: str  # "the block", "step 3"
    events: Mapping[str, Trace]
    budget: Mapping[str, int | None]

    def error(self) -> CopyBudgetError:
        """Return the error, whose message names the lines that copied."""
        allowed = " and ".join(counted(self.budget[kind], kind) for kind in self.events)
        found = "; ".join(f"{counted(len(copies), kind)} from {_lines(copies)}" for kind, copies in self.events.items())
        counts = {kind: len(copies) for kind, copies in self.events.items()}
        do = "Keep the copied values on one device, or raise the budget"
        return CopyBudgetError(f"at most {allowed} in {self.what}", found, do, counts=counts, budget=dict(self.budget))


def over_budget(trace: Trace, budget: Mapping[str, int | None], per: str) -> Iterator[Excess]:
    """Yield the block, or the steps of the block, that exceed the budget. Raises RecorderError for steps if there are none."""
    if per == "block":
        yield from _over(trace, budget, "the block")
        return
    steps = Counter(mark.step for mark in trace.marks() if mark.step >= 0 and mark.name != "prefill")
    if not steps:
        raise RecorderError(
            'a copy budget with per="step"',
            "the block has no steps",
            'Mark them with device.step(i, "decode"), or leave out per="step"',
        )
    for step, times in sorted(steps.items()):  # two generations in one block both have a step 1
        allowed = {kind: None if limit is None else limit * times for kind, limit in budget.items()}
        what = f"step {step}" + (f", run {times} times" if times > 1 else "")
        yield from _over(trace.select(trace["step"] == step), allowed, what)


def events_of(trace: Trace, kind: str) -> Trace:
    """Return the events that a limit called `kind` counts: "h2d", "d2h", "d2d", "pageable" or "waits"."""
    if kind == "pageable":
        return trace.select(trace.is_kind("h2d", "d2h") & (trace["pinned"] == 0))
    return trace.select(trace.is_kind("sync" if kind == "waits" else kind))


def _over(trace: Trace, budget: Mapping[str, int | None], what: str) -> Iterator[Excess]:
    found = {kind: events_of(trace, kind) for kind, limit in budget.items() if limit is not None}
    over = {kind: copies for kind, copies in found.items() if len(copies) > (budget[kind] or 0)}
    if over:
        yield Excess(what, over, budget)


def counted(n: int | None, kind: str) -> str:
    """Return a number of events in words: (2, "h2d") -> "2 H2D copies"."""
    if kind == "waits":
        return f"{n} wait{'' if n == 1 else 's'}"
    name = "pageable" if kind == "pageable" else kind.upper()
    return f"{n} {name} cop{'y' if n == 1 else 'ies'}"


def _lines(copies: Trace) -> str:
    """Return the lines that copied or waited, most events first, as "file:line × n (bytes)"."""
    totals: dict[str, tuple[int, int]] = {}
    for where, size in zip(copies.text("where"), copies["bytes"].tolist(), strict=True):
        count, total = totals.get(where or "an unknown line", (0, 0))
        totals[where or "an unknown line"] = (count + 1, total + size)
    ordered = sorted(totals.items(), key=lambda item: -item[1][0])
    shown = [
        f"{where} × {count}" + (f" ({bytes_text(total)})" if total else "")  # waits have no bytes
        for where, (count, total) in ordered[:8]
    ]
    return ", ".join(shown) + (f" and {len(ordered) - 8} more lines" if len(ordered) > 8 else "")


def _in_use() -> Device:
    """Return the virtual GPU that is open, else the device that "auto" selects."""
    try:
        return open_device("vgpu")
    except DeviceError:
        return open_device("auto")
