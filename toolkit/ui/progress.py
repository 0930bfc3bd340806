"""The progress bar of the Lab and of notebook cells: the share that is done, the time, and Cancel.

In a cell, `core.progress` shows it for long work such as `tk.load`, instead of a line on stderr.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from html import escape
from typing import Any

import ipywidgets as widgets
from IPython.display import display

from toolkit.core.callers import ipython_shell
from toolkit.core.units import seconds_text

_LEAST_S = 0.5  # shorter work shows nothing in a cell


class ProgressBar(widgets.HBox):  # type: ignore[misc]  # ipywidgets has no types
    """The bar. `cancel` is called when Cancel is pressed."""

    def __init__(self, cancel: Callable[[], Any]) -> None:
        self._title, self._phase, self._known = "", "", False
        self._began = self._phase_began = 0.0
        self.bar = widgets.FloatProgress(0.0, min=0, max=1, layout={"width": "220px"})
        self.text = widgets.HTML()
        self.cancel_button = widgets.Button(description="Cancel", icon="stop", tooltip="Cancel this work")
        self.cancel_button.layout.width = "110px"
        self.cancel_button.on_click(lambda _: cancel())
        super().__init__([self.cancel_button, self.bar, self.text], layout={"flex_flow": "row wrap", "align_items": "center"})
        self.add_class("tk-work")

    def begin(self, title: str, began: float | None = None) -> None:
        """Show that work begins (or began at a time of `time.monotonic`), without a share."""
        self._title, self._phase, self._known = title, "", False
        self._began = self._phase_began = time.monotonic() if began is None else began
        self.bar.value, self.cancel_button.disabled = 0.0, False

    def share(self, done: float, total: float = 1.0, phase: str = "") -> None:
        """Show that `done` of `total` is done, of the work or of its present phase. A smaller share begins a new phase."""
        share = min(done / total, 1.0) if total else 1.0
        if phase != self._phase or share < self.bar.value:  # the load after a download
            self._phase, self._phase_began = phase, time.monotonic()
        self.bar.value, self._known = share, True
        self.bar.layout.display = ""
        self.draw()

    def draw(self, note: str = "") -> None:
        """Show the title, the share, the elapsed time, and the remaining time if work goes on as before; or else `note`."""
        now, share = time.monotonic(), self.bar.value
        took = now - self._phase_began
        said = f"{self._title}{', ' if self._phase else ''}{self._phase}: {f'{100 * share:.0f} %, ' if self._known else ''}"
        said += f"{now - self._began:.0f} s"
        if took > 2 and 0.05 < share < 1:
            said += f", about {took / share - took:.0f} s left{' in this phase' if self._phase else ''}"
        self.text.value = escape(note or said)

    def rest(self, how: str = "") -> None:
        """Show how the work ended ("done"), and its time; or, before any work, that nothing is running."""
        self.cancel_button.disabled, self.bar.layout.display = True, "none"
        took = seconds_text(time.monotonic() - self._began)
        text = f"{self._title}: {how} after {took}." if how else "Nothing is running."
        self.text.value = f'<span role="status">{escape(text)}</span>'


class CellProgress:
    """The bar below the running cell, for the reports of a `core.progress.Reporter`.

    Buttons don't answer while a cell runs, so it has no Cancel, and names the notebook's own command.
    """

    def __init__(self, reporter: Any) -> None:
        self._title = f"{reporter.task[:1].upper()}{reporter.task[1:]} (Interrupt cancels)"
        self._bar: ProgressBar | None = None
        self._began = time.monotonic()
        self._shell = ipython_shell()

    def show(self, share: float, phase: str, end: bool) -> None:
        """Show the share of the present phase. Nothing is shown before the work has taken half a second."""
        if self._bar is None:
            if time.monotonic() - self._began < _LEAST_S:
                return
            self._bar = ProgressBar(lambda: None)
            self._bar.children = self._bar.children[1:]
            self._bar.begin(self._title, self._began)
            display(self._bar)
            if self._shell is not None:
                self._shell.events.register("post_run_cell", self._left)
        self._bar.share(share, 1.0, phase)
        if end:
            self._rest("done")

    def _rest(self, how: str) -> None:
        """Show how the work ended, and listen for the end of the cell no longer."""
        assert self._bar is not None
        self._bar.rest(how)
        if self._shell is not None and self._left in self._shell.events.callbacks["post_run_cell"]:
            self._shell.events.unregister("post_run_cell", self._left)

    def _left(self, result: Any) -> None:
        """Show that the work didn't reach its end before the cell did."""
        self._rest("interrupted" if isinstance(result.error_in_exec, KeyboardInterrupt) else "stopped")
