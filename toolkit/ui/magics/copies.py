"""The `%%copies` magic, which shows the copies of a notebook cell. The cell runs in the shell like any other cell."""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, magics_class

from toolkit.core.errors import CopyBudgetError, ToolkitError
from toolkit.decode.copy_budget import copy_budget
from toolkit.gpu.opening import open_device
from toolkit.gpu.virtual.device import open_card
from toolkit.trace.columns import COPY_KINDS
from toolkit.trace.copies import copies_per_step
from toolkit.trace.events import Trace
from toolkit.ui.magics.shared import Parser, awaits, displayed_later, failure_of, plain, show
from toolkit.vram import owners


def _parser() -> Parser:
    parser = Parser("%%copies", "Run the cell and show its copies.")
    parser.add_argument("--device", default=None, help="virtual:h200, cuda, ... (default: the one in use)")
    for kind in ("h2d", "d2h", "d2d"):
        parser.add_argument(f"--budget-{kind}", type=int, default=None, metavar="N", help=f"at most N {kind} copies")
    parser.add_argument("--timeline", action="store_true", help="also show the timeline")
    return parser


def lines_table(trace: Trace) -> Any:
    """Return the lines that copied or waited, the most bytes first: where, kind, clock, count, bytes and time."""
    events = trace.to_pandas()
    events = events[events["kind"].isin(["h2d", "d2h", "d2d", "p2p", "sync"])]
    events = events.assign(where=events["where"].astype(object).fillna("(unknown)"), kind=events["kind"].astype(str))
    grouped = events.groupby(["where", "kind", "clock"], observed=True, as_index=False)
    table = grouped.agg(count=("bytes", "size"), bytes=("bytes", "sum"), time_s=("dur_ns", lambda ns: ns.sum() / 1e9))
    return table.sort_values(["bytes", "count"], ascending=False, ignore_index=True)


@magics_class
class CopyMagics(Magics):
    """`%%copies`."""

    @cell_magic
    def copies(self, line: str, cell: str) -> None:
        """%%copies [--device NAME] [--budget-h2d N] [--budget-d2h N] [--budget-d2d N] [--timeline]

        Run the cell on the device (default: the one in use, else "auto") and show its copies per step and the lines that
        caused them, counted from the line below %%copies. The cell's result is displayed afterwards, unless the cell ends in a
        semicolon, and the copies of its display are not counted. If a budget is exceeded, an error names the lines. If the
        device is being recorded already, the cell's events go to that recording and nothing is shown. Cells with `await` are
        not supported: they raise UsageError.
        """
        try:
            options = _parser().parse_args(shlex.split(line))
            device = open_device(options.device or ("vgpu" if open_card() else "auto"))
        except ValueError as error:  # unclosed quotes
            raise UsageError(str(error)) from None
        except ToolkitError as error:
            raise plain(error) from None
        if awaits(self.shell, cell):
            raise UsageError("%%copies can't run a cell with await. Write `with tk.record(device) as trace:` around it.")
        limits = {kind: getattr(options, f"budget_{kind}") for kind in COPY_KINDS}
        guarded = any(limit is not None for limit in limits.values())
        inside, over, result = device.recording is not None, None, None
        try:
            with (
                displayed_later(self.shell, cell) as later,
                copy_budget(**limits, device=device) if guarded else nullcontext(),
                device.record() as trace,
            ):
                result = self.shell.run_cell(cell, store_history=False)  # type: ignore[union-attr]
        except CopyBudgetError as error:
            over = error
        except ToolkitError as error:
            raise plain(error) from None
        failed = result.error_before_exec or result.error_in_exec if result is not None else None
        if inside:
            print(f"{device.name} is being recorded already: that recording has the copies of this cell.")
        elif len(trace) or failed is None:
            _report(trace, options.timeline)
            if any(place[0] != "cpu" for place in owners.walk(("result", value) for value in later)):
                print("The copies that display the cell's result are not counted.")
        if failed is not None:
            raise failure_of(failed)
        if over is not None:
            raise plain(over)


def _report(trace: Trace, timeline: bool) -> None:
    """Show the copies per step, the lines that caused them and, if `timeline`, the timeline."""
    if len(trace):
        show(copies_per_step(trace))
    else:
        print("Nothing ran on the device, and nothing was copied.")
    if len(lines := lines_table(trace)):
        show(lines)
    if timeline:
        show(trace.timeline())


def register(shell: Any) -> None:
    """Register the magics with `shell`, as `%load_ext toolkit` does."""
    from toolkit.ui.magics.memory import MemoryMagics

    shell.register_magics(CopyMagics, MemoryMagics(shell))
