"""The Lab's Tune panel: choose a kernel, a shape and GPUs, and see the config that each GPU gets. Needs no GPU.

It calls `tk.tune.explore`, which compiles for any GPU of the catalogue and times nothing. Work runs in the Lab's thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from html import escape

import ipywidgets as widgets

from toolkit import tune
from toolkit.core.errors import ToolkitError
from toolkit.core.units import seconds_text
from toolkit.gpu.catalogue import CATALOGUE
from toolkit.kernels.base import Kernel
from toolkit.tune.results import Tuning
from toolkit.ui.figures.tuning import html
from toolkit.ui.lab.fields import button, field, progress_bar, row, start

FIRST_GPUS = ("rtx-4090", "rtx-5090", "a100-80g", "h200")


class TunePanel(widgets.VBox):  # type: ignore[misc]  # ipywidgets has no types
    """The panel. `begin(what, work, status)` runs `work` in a thread; `stop` cancels it by setting `cancelled`."""

    def __init__(
        self,
        begin: Callable[[str, Callable[[], None], widgets.HTML], None],
        stop: Callable[[], None],
        cancelled: threading.Event,
    ) -> None:
        self.tuning: Tuning | None = None
        self._begin, self._cancelled = begin, cancelled
        self._kernels: Mapping[str, Kernel] = {}
        self.kernel_field = field(widgets.Dropdown, None, "Kernel", 60)
        self.shape_field = field(widgets.Dropdown, None, "Shape", 60, layout={"width": "360px"})
        self.gpus_field = field(
            widgets.SelectMultiple, FIRST_GPUS, "GPUs", 60, options=list(CATALOGUE), rows=len(CATALOGUE),
            tooltip="Ctrl or Shift for several",
        )  # fmt: skip
        self.list_button = button("List the kernels", "list", self.list_kernels, primary=True)
        self.explore_button = button("Explore", "search", self.explore, primary=True)
        self.cancel_button = button("Cancel exploring", "stop", stop)
        self.progress, self.view = progress_bar(), widgets.HTML()
        self.status = widgets.HTML("Explore compiles every config for every chosen GPU, on this machine's CPU.")
        self.kernel_field.observe(lambda _: self._offer_shapes(), "value")
        super().__init__([
            widgets.HTML("<h3>Tune</h3>"),
            row(self.kernel_field, self.shape_field, self.gpus_field),
            row(self.list_button, self.explore_button, self.cancel_button, self.progress),
            self.status, self.view,
        ])  # fmt: skip
        self.add_class("tk-panel")

    def list_kernels(self) -> None:
        """List the kernels, like the button. Importing them takes seconds and needs Triton. Returns at once."""
        self._begin("list", self._list, self.status)

    def explore(self) -> None:
        """Explore, like the Explore button. Returns at once, and does nothing if other work is running."""
        self._begin("explore", self._explore, self.status)

    def enable(self, idle: bool, what: str) -> None:
        """Enable or disable the buttons: either nothing runs (`idle`), or `what` does."""
        self.list_button.disabled = not idle
        self.explore_button.disabled = not idle or not self._kernels
        self.cancel_button.disabled = idle or what != "explore"
        self.kernel_field.disabled = self.shape_field.disabled = not self._kernels
        if idle:
            self.progress.layout.display = "none"

    def _list(self) -> None:
        self.status.value = "Importing the kernels ..."
        self._kernels = tune.kernels()
        self.kernel_field.options = list(self._kernels)
        self.kernel_field.value = next(iter(self._kernels))
        self.status.value = f"{len(self._kernels)} kernels."

    def _offer_shapes(self) -> None:
        kernel = self._kernels[self.kernel_field.value]
        self.shape_field.options = list(kernel.known)

    def _explore(self) -> None:
        kernel, shape, gpus = self.kernel_field.value, self.shape_field.value, self.gpus_field.value
        if not gpus:
            raise ToolkitError("exploring configs", "no GPU is chosen", "Choose one or more in the list of GPUs")
        self.tuning, self.view.value = None, ""
        start(self.progress)
        self.status.value = f"Compiling {escape(kernel)} for {', '.join(gpus)} ..."

        def show(done: int, total: int, what: str) -> None:
            self.progress.max, self.progress.value = max(total, 1), done
            self.status.value = f"{done} of {total} compiled{': ' if what else ''}{escape(what)}"

        began = time.monotonic()
        self.tuning = tune.explore(kernel, shape, gpus, progress=show, cancel=self._cancelled)
        took = seconds_text(time.monotonic() - began)
        self.view.value = html(self.tuning)
        self.status.value = f"Done in {took}. The results are cached. In a cell: lab.tune.tuning."
