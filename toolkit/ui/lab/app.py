"""The Lab, an app in the notebook: load, plan, export, generate, compare and tune, and look at memory and traces.

`lab = tk.Lab()` shows it. Its results are `lab.model`, `lab.run`, `lab.runs`, `lab.plan.plan`, `lab.tune.tuning`,
`lab.memory.uses` and `lab.history`. Each tab is a panel in a file of its own, which only calls public functions of the toolkit;
"Copy as code" gives those calls. Work runs in a thread (`work.py`). Every error is shown in its panel, and the exception is
`lab.error`.
"""

from __future__ import annotations

import weakref
from html import escape
from typing import Any

import ipywidgets as widgets

from toolkit.core.callers import current_cell
from toolkit.core.errors import ToolkitError
from toolkit.models.model import Model
from toolkit.ranks.cluster import Cluster
from toolkit.ranks.remote import RankedModel
from toolkit.ui import stills
from toolkit.ui.assets import style_of
from toolkit.ui.lab.fields import close
from toolkit.ui.lab.generate_panel import GeneratePanel
from toolkit.ui.lab.history import History, copies_html, timeline_of
from toolkit.ui.lab.load_panel import LoadPanel
from toolkit.ui.lab.memory_panel import MemoryPanel
from toolkit.ui.lab.plan_panel import PlanPanel
from toolkit.ui.lab.ranks import place_of
from toolkit.ui.lab.rerun import cell, is_held
from toolkit.ui.lab.traces_panel import TracesPanel
from toolkit.ui.lab.tune_panel import TunePanel
from toolkit.ui.lab.work import Work
from toolkit.ui.timeline import overview

TABS = ("Load", "Plan and export", "Generate and compare", "Tune", "Memory", "Traces")


class Lab(widgets.VBox):  # type: ignore[misc]  # ipywidgets has no types
    """The app. `device`, `model` and `prompt` are the first values of its fields.

    If a cell that makes a Lab runs again, the new Lab replaces the old one, which is closed and releases its model, unless
    another variable or the output of another cell still has it.
    """

    def __init__(
        self, device: str = "virtual:h200", model: str = "demo/qwen3", prompt: str = "The capital of France is"
    ) -> None:
        self.history = History()
        self.work = Work(self._enable, lambda: self.memory.why_html())
        self.loading = LoadPanel(self.work, lambda: self.memory, device, model, self.start, self._loaded)
        self.memory = MemoryPanel(self.work, self._holds, self._in_use)
        self.plan = PlanPanel(self.work, self.loading)
        self.decoding = GeneratePanel(self.work, self.memory, self.loading, self.history, prompt, self._added)
        self.tune = TunePanel(self.work)
        self.traces = TracesPanel(self.work, self.history)
        self.panels = (self.loading, self.plan, self.decoding, self.tune, self.memory, self.traces)
        self.state = widgets.HTML()
        self.tabs = widgets.Tab(self.panels, titles=TABS)
        self.state.add_class("tk-state")
        self._still, self._published = stills.new_name(), False
        style = f"{style_of('lab/lab.css')}<style>{stills.hiding(self._still)}</style>"
        super().__init__([widgets.HTML(style), self.state, self.work, self.tabs])
        self.add_class("tk-lab")
        self._loaded()
        self._enable(True)
        self._made_in, self._made_by, self._shown_in = cell(), current_cell(), set[str | None]()
        self._replace_last()

    def _replace_last(self) -> None:
        """Close the Labs that earlier runs of this cell made. The front end has removed them."""
        again = [lab for lab in _labs if lab._made_in is not None and lab._made_in == self._made_in]
        for lab in again:
            if lab._made_by != self._made_by and lab._shown_in <= {self._made_in} and not is_held(lab):
                lab.close()
                lab.loading.unload("Closed, because its cell ran again.")  # Out[] may still hold the Lab
        _labs.add(self)

    @property
    def model(self) -> Model | RankedModel | None:
        """The loaded model."""
        return self.loading.model

    @property
    def cluster(self) -> Cluster | None:
        """The cluster on which the model is, if the device has several GPUs."""
        return self.loading.cluster

    @property
    def run(self) -> Any:
        """The last finished run."""
        return next(reversed(self.runs.values()), None)

    @property
    def runs(self) -> dict[str, Any]:
        """The runs of the last Generate, by strategy."""
        return self.history.runs

    @property
    def error(self) -> BaseException | None:
        """The exception that ended the last work, if any."""
        return self.work.error

    @property
    def busy(self) -> bool:
        """Whether work is running, such as a load or a generation."""
        return self.work.busy

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the running work has ended. Returns False if it still runs after `timeout_s` seconds."""
        return self.work.wait(timeout_s)

    def cancel(self) -> None:
        """Cancel the running work.

        A generation stops after the current step and keeps its tokens, a load stops after the current tensor, and exploring
        stops after the current compilation.
        """
        self.work.cancel()

    def close(self) -> None:
        """Cancel the running work, end the processes of a cluster, and remove the app.

        Nothing but variables then holds the model and the runs.
        """
        self.work.cancelled.set()
        self.loading.end_cluster("")
        for part in self.children:
            close(part)
        super().close()
        _labs.discard(self)

    def start(self) -> None:
        """Load, generate and compare, like the Start button, and open the tab that shows it. Returns at once."""
        self.tabs.selected_index = self.panels.index(self.decoding)
        self.decoding.generate()

    def load(self) -> None:
        """Load the chosen model, like the Load button. Returns at once, and does nothing if other work is running."""
        self.loading.load()

    def generate(self) -> None:
        """Generate text, like the Generate button. Returns at once, and does nothing if other work is running."""
        self.decoding.generate()

    def _enable(self, idle: bool) -> None:
        """Enable or disable the buttons of all panels, and show the memory if no work runs."""
        try:
            if idle:
                self.memory.refresh()  # first: it may find that a cluster has failed, which the Load panel then says
        finally:
            for panel in self.panels:
                panel.enable(idle)
            self._say_state()
        if idle and self._published:
            stills.publish(self._still, self._still_html(), repr(self), update=True)

    def _loaded(self) -> None:
        """Show which model is loaded, and what it can do."""
        self._say_state()
        self.decoding.refresh()

    def _say_state(self) -> None:
        self._state = "no model is loaded"
        model, loaded = self.model, self.loading.loaded  # which another Lab may unload now
        if model is not None and loaded is not None:
            self._state = f"{loaded[1]} on {place_of(model)}"
        self.state.value = f"<b>Decode Lab</b><span>{escape(self._state)}</span>"

    def _added(self) -> None:
        self.traces.refresh()

    def __repr__(self) -> str:
        return f"Lab({self._state}, {len(self.history.entries)} runs)"

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        bundle = super()._repr_mimebundle_(**kwargs)
        self._shown_in.add(cell())
        self._published = stills.publish(self._still, self._still_html(), repr(self)) or self._published
        return {**bundle, "text/plain": "" if self._published else repr(self)}

    def _still_html(self) -> str:
        """Return the model, the last texts, the table of all runs and the picture of the last ones, without a widget."""
        last = [entry for entry in self.history.entries.values() if any(entry.run is run for run in self.runs.values())]
        picture = overview.html(timeline_of(last).scene) if last else ""
        runs = copies_html(self.history.entries.values()) if self.history.entries else "<p>There are no runs yet.</p>"
        note = "<p><small>The Lab as it was when it last ran. Run its cell to use it.</small></p>"
        return f"<p><b>Decode Lab</b>: {escape(self._state)}</p>{self.decoding.output.value}{runs}{picture}{note}"

    def _holds(self) -> dict[str, Any]:
        """Return the objects that the Lab keeps alive, by their names in a cell."""
        return {"lab.model": self.model, "lab.runs": self.runs}

    def _in_use(self) -> Any:
        """Return the device of a budget: the model's, else the device of the field. Raises ToolkitError for a cluster."""
        if isinstance(self.model, RankedModel):
            do = 'Set it on all ranks, in a cell: lab.cluster.budget("8 GiB")'
            raise ToolkitError("a budget", "the model is on the ranks of a cluster, which have a device each", do)
        return self.model.device if self.model is not None else self.loading.opened(self.loading.device_field.value.strip())


_labs: weakref.WeakSet[Lab] = weakref.WeakSet()
