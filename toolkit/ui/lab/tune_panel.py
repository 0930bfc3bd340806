"""The Lab's Tune panel: choose a kernel, a shape and GPUs, and see the config that each GPU gets. Needs no GPU.

It calls `tk.tune.explore`, which compiles for any GPU of the catalogue and times nothing. Work runs in the Lab's thread.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from html import escape

import ipywidgets as widgets

from toolkit import tune
from toolkit.core.errors import ToolkitError
from toolkit.core.units import seconds_text
from toolkit.gpu.catalogue import CATALOGUE
from toolkit.kernels.base import Kernel
from toolkit.tune.results import Tuning
from toolkit.ui.figures.tuning import html
from toolkit.ui.lab.code import CopyAsCode, call
from toolkit.ui.lab.fields import Panel, button, field, row
from toolkit.ui.lab.work import Work

FIRST_GPUS = ("rtx-4090", "rtx-5090", "a100-80g", "h200")
_EMPTY = """Explore compiles every config of a kernel for every chosen GPU, on this machine's CPU, and shows which one each
GPU gets. No GPU is needed. Press <b>List the kernels</b> first: it imports them, which takes some seconds."""


class TunePanel(Panel):
    """The panel."""

    def __init__(self, work: Work) -> None:
        self.tuning: Tuning | None = None
        self._work = work
        self._kernels: Mapping[str, Kernel] = {}
        self.kernel_field = field(widgets.Dropdown, None, "Kernel", 60)
        self.shape_field = field(widgets.Dropdown, None, "Shape", 60, layout={"width": "360px", "max_width": "98%"})
        self.gpus_field = field(
            widgets.SelectMultiple, FIRST_GPUS, "GPUs", 60, options=list(CATALOGUE), rows=len(CATALOGUE),
            tooltip="Ctrl or Shift for several",
        )  # fmt: skip
        self.list_button = button("List the kernels", "list", self.list_kernels, primary=True)
        self.explore_button = button("Explore", "search", self.explore, primary=True)
        self.status, self.view = widgets.HTML(_EMPTY), widgets.HTML()
        self.kernel_field.observe(lambda _: self._offer_shapes(), "value")
        fields = (self.kernel_field, self.shape_field, self.gpus_field)
        self.code = CopyAsCode(self._snippets, fields)
        chosen = widgets.VBox([*fields[:2], row(self.list_button, self.explore_button), self.code, self.status])
        chosen.add_class("tk-beside")
        super().__init__(row(chosen, self.gpus_field), self.view)

    def list_kernels(self) -> None:
        """List the kernels, like the button. Importing them takes seconds and needs Triton. Returns at once."""
        self._work.run("Importing the kernels", self._list, self.status)

    def explore(self) -> None:
        """Explore, like the Explore button. Returns at once, and does nothing if other work is running."""
        self._work.run("Compiling", self._explore, self.status)

    def enable(self, idle: bool) -> None:
        """Enable or disable the buttons."""
        self.list_button.disabled = not idle
        self.explore_button.disabled = not idle or not self._kernels
        self.kernel_field.disabled = self.shape_field.disabled = not self._kernels

    def _list(self) -> None:
        self.status.value = "Importing the kernels ..."
        if not self._kernels:  # else the fields keep what was chosen
            self._kernels = tune.kernels()
            self.kernel_field.options = list(self._kernels)
            self.kernel_field.value = next(iter(self._kernels))
        self.status.value = f"{len(self._kernels)} kernels. Choose one, a shape and GPUs, and press Explore."

    def _offer_shapes(self) -> None:
        kernel = self._kernels[self.kernel_field.value]
        self.shape_field.options = list(kernel.known)
        self.shape_field.value = next(iter(kernel.known), None)  # ipywidgets leaves it empty

    def _explore(self) -> None:
        kernel, shape, gpus = self.kernel_field.value, self.shape_field.value, self.gpus_field.value
        if kernel is None:
            raise ToolkitError("exploring configs", "no kernel is chosen", "Press List the kernels first, and choose one")
        if not gpus:
            raise ToolkitError("exploring configs", "no GPU is chosen", "Choose one or more in the list of GPUs")
        self.tuning, self.view.value = None, ""
        self.status.value = f"Compiling {escape(kernel)} for {', '.join(gpus)} ..."

        def show(done: int, total: int, what: str) -> None:
            self._work.share(done, total)
            self.status.value = f"{done} of {total} compiled{': ' if what else ''}{escape(what)}"

        began = time.monotonic()
        self.tuning = tune.explore(kernel, shape, gpus, progress=show, cancel=self._work.cancelled)
        took = seconds_text(time.monotonic() - began)
        self.view.value = html(self.tuning)
        what = f"<b>{escape(kernel)}</b>, {escape(shape)}"  # the fields may name others by now
        self.status.value = f"Done in {took}: {what}. The results are cached. In a cell: lab.tune.tuning."

    def _snippets(self) -> dict[str, str]:
        kernel, shape = self.kernel_field.value or "int4_matmul", self.shape_field.value or "gemma4-31b down"
        return {
            "List the kernels": "list(tk.tune.kernels())",
            "Explore": call("tk.tune.explore", kernel, shape, list(self.gpus_field.value)),
        }
