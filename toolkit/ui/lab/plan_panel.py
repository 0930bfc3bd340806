"""The Lab's Plan and export panel: the memory for exporting and running the chosen model against a budget, and the export.

It calls `tk.plan`, which needs no GPU, and `tk.export`, which exports for the chosen CUDA GPU, or for this CPU if a virtual GPU
is chosen. Work runs in the Lab's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from html import escape
from typing import Any

import ipywidgets as widgets

from toolkit.core.errors import ToolkitError
from toolkit.core.units import GiB, bytes_text
from toolkit.exporting.exporter import Package, export
from toolkit.exporting.progress import memory_now
from toolkit.gpu.opening import open_device
from toolkit.kernels.kv_codes import KV_SCHEMES
from toolkit.planning.describe import describe, plan
from toolkit.planning.plans import Plan
from toolkit.ui.figures.plan import html, package_html
from toolkit.ui.lab.fields import button, field, progress_bar, row, start

BUDGETS = (0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192)  # GiB


class PlanPanel(widgets.VBox):  # type: ignore[misc]  # ipywidgets has no types
    """The panel. `begin(what, work, status)` runs `work` in a thread; `chosen()` returns the Lab's (device, model, scheme)."""

    def __init__(
        self,
        begin: Callable[[str, Callable[[], None], widgets.HTML], None],
        stop: Callable[[], None],
        cancelled: threading.Event,
        chosen: Callable[[], tuple[str, str, Any]],
    ) -> None:
        self.plan: Plan | None = None
        self.package: Package | None = None
        self._begin, self._cancelled, self._chosen = begin, cancelled, chosen
        self._described: tuple[tuple[str, Any], Any] | None = None  # the model on "meta" of the last plan
        options = [("automatic", "auto"), ("plain", None), *((name, name) for name in KV_SCHEMES)]
        budgets = [(bytes_text(int(size * GiB)), int(size * GiB)) for size in BUDGETS]
        self.context_field = field(widgets.BoundedIntText, 4096, "Context", min=2, max=1 << 20, layout={"width": "190px"})
        self.kv_field = field(widgets.Dropdown, "auto", "KV", 30, options=options)
        self.budget_field = field(
            widgets.SelectionSlider, 4 * GiB, "Budget", options=budgets, continuous_update=False, layout={"width": "420px"}
        )
        self.folder_field = field(widgets.Text, "package", "Folder")
        self.plan_button = button("Plan", "bar-chart", self.show, primary=True)
        tip = "Compile the model ahead of time into the folder, for the CUDA GPU above or else for this CPU"
        self.export_button = button("Export", "archive", self.export, tip)
        self.cancel_button = button("Cancel export", "stop", stop)
        self.progress, self.view = progress_bar(), widgets.HTML()
        self.status = widgets.HTML("Press Plan to predict the memory for exporting and running the model above.")
        self.budget_field.observe(lambda _: self.plan is not None and self.show(), "value")
        super().__init__([
            widgets.HTML("<h3>Plan and export</h3>"),
            row(self.context_field, self.kv_field, self.budget_field),
            row(self.plan_button, self.folder_field, self.export_button, self.cancel_button, self.progress),
            self.status, self.view,
        ])  # fmt: skip
        self.add_class("tk-panel")

    def show(self) -> None:
        """Plan, like the Plan button, and like the budget slider once there is a plan. Returns at once."""
        self._begin("plan", self._plan, self.status)

    def export(self) -> None:
        """Export, like the Export button. Returns at once, and does nothing if other work is running."""
        self._begin("export", self._export, self.status)

    def enable(self, idle: bool, what: str) -> None:
        """Enable or disable the buttons: either nothing runs (`idle`), or `what` does."""
        self.plan_button.disabled = self.export_button.disabled = not idle
        self.cancel_button.disabled = idle or what != "export"
        if idle:
            self.progress.layout.display = "none"

    def _plan(self) -> None:
        device, path, scheme = self._chosen()
        self.status.value = f"Planning {escape(path)} ..."
        shapes, budget = self._shapes(path, scheme), self.budget_field.value
        named = f"{path}, {scheme}" if scheme else path
        self.plan = plan(shapes, device, budget, self.context_field.value, kv=self.kv_field.value, name=named)
        self.view.value = html(self.plan)
        fits = "It fits" if self.plan.fits else "It doesn't fit, for the reasons below"
        self.status.value = f"{fits}. This is a prediction: nothing was allocated. In a cell: lab.plan.plan."

    def _shapes(self, path: str, scheme: Any) -> Any:
        """Return the model on "meta", built once. Lower the context field to the model's number of positions."""
        if self._described is None or self._described[0] != (path, scheme):
            self._described = (path, scheme), describe(path, scheme)
        model = self._described[1]
        self.context_field.value = min(self.context_field.value, model.config.max_position_embeddings)
        return model

    def _export(self) -> None:
        name, path, scheme = self._chosen()
        device = open_device(name)
        device = device if device.torch.type == "cuda" else open_device("cpu")
        folder = self.folder_field.value.strip()
        if not folder:
            raise ToolkitError("an export", "the folder field is empty", "Type the name of a new folder")
        self.package = None
        start(self.progress)

        def show(phase: str, share: float, what: str) -> None:
            self.progress.value = share
            held, used = memory_now(device.torch if device.torch.type == "cuda" else None)
            memory = f"{bytes_text(held)} of host memory" + (f", {bytes_text(used)} of GPU memory" if used else "")
            self.status.value = f"{escape(phase)}{': ' if what else ' ...'}{escape(what)}; in use: {memory}"

        self._shapes(path, scheme)
        kv = None if self.kv_field.value == "auto" else self.kv_field.value
        self.package = export(
            path, folder, device=device, budget=self.budget_field.value, context=self.context_field.value, kv=kv, scheme=scheme,
            progress=show, cancel=self._cancelled,
        )  # fmt: skip
        self.view.value = package_html(self.package)
        self.status.value = f"{escape(repr(self.package))}. In a cell: lab.plan.package.load()."
