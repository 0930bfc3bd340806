"""`tk.copy_budget`: a context manager that fails if a block of code copies more often between host and device than allowed.

It records the block and counts the copies, so it works with any PyTorch code, on a real or a virtual GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from toolkit.core.errors import CopyBudgetError, DeviceError, RecorderError, ToolkitError, unknown_name
from toolkit.core.units import bytes_text
from toolkit.gpu.device import Device
from toolkit.gpu.opening import open_device
from toolkit.trace.events import Trace


@contextmanager
def copy_budget(
    h2d: int | None = None,
    d2h: int | None = None,
    d2d: int | None = None,
    per: str = "block",
    device: Device | str | None = None,
) -> Iterator[None]:
    """Raise CopyBudgetError if the block copies more often than allowed: `with tk.copy_budget(h2d=0, d2h=1):`.

    Args:
        h2d, d2h, d2d: The number of copies allowed in each direction; None allows any number.
        per: "block" applies the limits to the whole block, "step" to every step in it except the prefill.
        device: The device to record. Default: the virtual GPU that is open, else "auto".

    Exceptions from the block propagate. Raises RecorderError if the device is already being recorded, because its
    copies can't be told apart from the block's, and with `per="step"` if the block has no steps.
    """
    budget = {"h2d": h2d, "d2h": d2h, "d2d": d2d}
    for kind, limit in budget.items():
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 0):
            raise ToolkitError(
                f"a copy budget of {kind}={limit!r}",
                "not a number of copies",
                "Give a whole number of at least 0, or None for no limit",
            )
    if per not in ("block", "step"):
        raise unknown_name("copy budget per", per, ("block", "step"))
    gpu = _in_use() if device is None else open_device(device)
    if gpu.recording is not None:
        found = f"{gpu.name} is being recorded, so the block's copies can't be told apart from other copies"
        raise RecorderError("a copy budget", found, "Begin that recording inside of the tk.copy_budget block, or end it first")
    with gpu.record() as trace:
        yield
    if per == "step":
        _check_steps(trace, budget)
    else:
        _check(trace, budget, "the block")


def _check_steps(trace: Trace, budget: Mapping[str, int | None]) -> None:
    steps = Counter(mark.step for mark in trace.marks() if mark.step >= 0 and mark.name != "prefill")
    if not steps:
        raise RecorderError(
            'a copy budget with per="step"',
            "the block has no steps",
            'Mark them with device.step(i, "decode"), or use per="block"',
        )
    for step, times in sorted(steps.items()):  # two generations in one block both have a step 1
        allowed = {kind: None if limit is None else limit * times for kind, limit in budget.items()}
        _check(trace.select(trace["step"] == step), allowed, f"step {step}" + (f", run {times} times" if times > 1 else ""))


def _check(trace: Trace, budget: Mapping[str, int | None], what: str) -> None:
    """Raise CopyBudgetError if `trace` holds more copies than `budget` allows; the message names the lines that copied."""
    over = {}
    for kind, limit in budget.items():
        copies = trace.select(trace.is_kind(kind))
        if limit is not None and len(copies) > limit:
            over[kind] = copies
    if not over:
        return
    allowed = " and ".join(f"{budget[kind]} {kind.upper()}" for kind in over)
    found = "; ".join(f"{len(copies)} {kind.upper()} copies from {_lines(copies)}" for kind, copies in over.items())
    counts = {kind: len(copies) for kind, copies in over.items()}
    raise CopyBudgetError(
        f"at most {allowed} copies in {what}",
        found,
        "Keep the copied values on one device, or raise the budget",
        counts=counts,
        budget=dict(budget),
    )


def _lines(copies: Trace) -> str:
    """Return the lines that copied, most copies first, as "file:line × n (bytes)"."""
    totals: dict[str, tuple[int, int]] = {}
    for where, size in zip(copies.text("where"), copies["bytes"].tolist(), strict=True):
        count, total = totals.get(where or "an unknown line", (0, 0))
        totals[where or "an unknown line"] = (count + 1, total + size)
    ordered = sorted(totals.items(), key=lambda item: -item[1][0])
    shown = [f"{where} × {count} ({bytes_text(total)})" for where, (count, total) in ordered[:8]]
    return ", ".join(shown) + (f" and {len(ordered) - 8} more lines" if len(ordered) > 8 else "")


def _in_use() -> Device:
    """Return the virtual GPU that is open, else the device that "auto" selects."""
    try:
        return open_device("vgpu")
    except DeviceError:
        return open_device("auto")
