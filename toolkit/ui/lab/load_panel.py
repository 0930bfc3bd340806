"""The Lab's Load tab: choose a GPU, a model and a scheme; load the model, or see what it costs without loading it."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from toolkit.core.distributed import WHOLE, Shard
from toolkit.core.errors import CancelledError, DeviceError, ToolkitError
from toolkit.core.units import bytes_text, seconds_text
from toolkit.gpu.catalogue import CATALOGUE
from toolkit.gpu.opening import open_device
from toolkit.gpu.virtual.device import open_card, spec_of
from toolkit.loading.checkpoint import DEMOS, resolve
from toolkit.loading.download import Repository
from toolkit.loading.loader import check_load, load
from toolkit.models.model import Model
from toolkit.models.shapes import SHAPES
from toolkit.planning.describe import costs
from toolkit.ranks.cluster import Cluster, checked, cluster, several
from toolkit.ranks.remote import RankedModel
from toolkit.ui.figures.model import html_of
from toolkit.ui.lab.code import CopyAsCode, Name, call
from toolkit.ui.lab.fields import Panel, button, field, row, without_gpu
from toolkit.ui.lab.memory_panel import MemoryPanel
from toolkit.ui.lab.ranks import loaded_html, name_of
from toolkit.ui.lab.work import Work
from toolkit.weights.recipes import RECIPES

_SCHEMES = [("as stored", ""), ("plain, not quantized", "none"), *((name, name) for name in sorted(RECIPES))]
_WELCOME = """<div><b>New here?</b> Press <b>Start</b>. It loads the model below onto the device below (a virtual GPU needs no
hardware), generates text with two decode strategies, and shows what each of them copied between host and GPU.</div>"""
_NO_GPU = 'Choose "virtual:h200" or another virtual GPU as Device: it needs no hardware'
_NO_GPUS = 'Choose "virtual:2xh200" or other virtual GPUs as Device: they need no hardware'
_CLOSED = "The cluster is closed, and its processes have ended. Press Load to open a new one."
_EMPTY = "Nothing is loaded. Choose a device and a model, then press Load."


class LoadPanel(Panel):
    """The panel. `memory()` returns the panel that measures loads. `started` is called by Start, `loaded` after a load."""

    def __init__(
        self, work: Work, memory: Callable[[], MemoryPanel], device: str, model: str, started: Callable[[], None],
        loaded: Callable[[], None],
    ) -> None:  # fmt: skip
        self.model: Model | RankedModel | None = None
        self.cluster: Cluster | None = None  # on which `model` is, if the device has several GPUs
        self.loaded: tuple[str, str, Any] | None = None  # the device, model and scheme that `model` was loaded from
        self._work, self._memory, self._loaded = work, memory, loaded
        self.device_field = field(widgets.Combobox, device, "Device", options=_device_names(), ensure_option=False,
                                  placeholder="virtual:2xh200, cuda, ...")  # fmt: skip
        self.model_field = field(widgets.Combobox, model, "Model", options=_model_names(), ensure_option=False,
                                 placeholder="demo/NAME, random/NAME, ORG/REPO, a folder")  # fmt: skip
        self.scheme_field = field(widgets.Dropdown, "", "Scheme", options=_SCHEMES)
        self.load_button = button("Load", "download", self.load, "Load the model onto the device", primary=True)
        self.look_button = button(
            "What it costs", "search", self.look, "Show the memory of the model and the cost of a token, without loading it"
        )
        self.close_button = button(
            "Close the cluster", "power-off", self.close_cluster, "End its processes and free their memory"
        )
        self.start_button = button("Start", "rocket", started, "Load, generate and compare", primary=True)
        self.welcome = widgets.HBox([self.start_button, widgets.HTML(_WELCOME)])
        self.welcome.add_class("tk-start")
        self.status, self.model_view = widgets.HTML(_EMPTY), widgets.HTML()
        fields = (self.device_field, self.model_field, self.scheme_field)
        self.code = CopyAsCode(self._snippets, fields)
        super().__init__(
            self.welcome, row(*fields), row(self.load_button, self.look_button, self.close_button), self.code,
            self.status, self.model_view,
        )  # fmt: skip
        _panels.add(self)

    def load(self) -> None:
        """Load the chosen model, like the Load button. Returns at once, and does nothing if other work is running."""
        self._work.run(f"Loading {self.model_field.value.strip()}", self.load_now, self.status, alone=True)

    def look(self) -> None:
        """Show the model without loading it, like the "What it costs" button. Returns at once."""
        self._work.run("Costs", self._look, self.status)

    def close_cluster(self) -> None:
        """Close the cluster, like the button. Returns at once, and does nothing if other work is running."""
        self._work.run("Closing the cluster", lambda: self.end_cluster(_CLOSED), self.status)

    def enable(self, idle: bool) -> None:
        """Enable or disable the buttons. If a failure has closed the cluster, say so."""
        for one in (self.load_button, self.look_button, self.start_button, self.close_button):
            one.disabled = not idle
        if idle and self.cluster is not None and self.cluster.closed:
            self.cluster = self.model = self.loaded = None
            self.model_view.value = ""
            self.status.value = self.status.value if "tk-error" in self.status.value else _CLOSED
        self.close_button.layout.display = "none" if self.cluster is None else ""

    @property
    def scheme(self) -> str | None:
        """The chosen scheme; None keeps the weights as they are stored."""
        return self.scheme_field.value or None

    def chosen(self) -> tuple[str, str, Any]:
        """Return the device, model and scheme of the fields. Raises ToolkitError if one of the first two is empty."""
        name, path, scheme = self._fields()
        if not name:
            raise ToolkitError("a device", "its field is empty", 'Type "virtual:h200", or "cuda" on a machine with a GPU')
        if not path:
            raise ToolkitError("a model", "its field is empty", 'Type "demo/qwen3", a Hugging Face folder, or a .gguf file')
        return name, path, scheme

    def _fields(self) -> tuple[str, str, Any]:
        return self.device_field.value.strip(), self.model_field.value.strip(), self.scheme

    def source(self) -> str:
        """Return the code that loads the loaded model, or the chosen one if none is loaded."""
        return _source(*(self.loaded or self._fields()))

    def unload(self, why: str) -> None:
        """Release the model, and say why."""
        self.model, self.loaded, self.model_view.value, self.status.value = None, None, "", why
        self._loaded()

    def end_cluster(self, why: str) -> None:
        """Close the cluster, if there is one, with its model, and say why."""
        held, self.cluster = self.cluster, None
        if held is not None:
            self.unload(why)
            held.close()

    def opened(self, name: str) -> Any:
        """Open the device. If models of other Labs prevent that, unload them: a Lab survives when its cell runs again."""
        try:
            with without_gpu(name, _NO_GPU):
                return open_device(name)
        except DeviceError:
            others = [panel for panel in _panels if panel is not self and panel.model is not None and not panel._work.busy]
            if not others or not name.startswith("virtual:"):
                raise
            for panel in others:
                panel.unload(f"Unloaded, because another Lab opened {escape(name)}. Press Load to continue here.")
        gc.collect()
        return open_device(name)

    def load_now(self) -> None:
        """Load the chosen model in this thread."""
        name, path, scheme = self.chosen()
        found = _check_names(name, path)  # first: what can never be loaded must not cost the loaded model
        if self.model is not None and not isinstance(found, Repository):  # some on the Hub have no shapes until downloaded
            _check_load(name, found, scheme)
        self.unload(f"Loading {escape(path)} onto {escape(name)} ...")
        gc.collect()  # the previous model may fill the GPU, or prevent the choice of another virtual GPU
        for panel in [panel for panel in _panels if panel is not self and not panel._work.busy]:
            panel.end_cluster("Closed, because another Lab loaded a model. Press Load to continue here.")
        began = time.monotonic()
        try:
            place, held, names = (self._load_on_ranks if several(name) else self._load_here)(name, path, scheme)
            if self._work.cancelled.is_set():  # a load of Hugging Face doesn't ask
                raise CancelledError(f"loading {path}", "it was cancelled", "Press Load to start again")
        except BaseException:
            self.model, self.model_view.value = None, ""
            self.status.value = _EMPTY  # the error is shown in the tab that began the load, which may be another one
            raise
        self.loaded = name, path, scheme
        took = seconds_text(time.monotonic() - began)
        self.welcome.layout.display = "none"
        self.status.value = (
            f"<b>{escape(path)}</b> is on <b>{escape(place)}</b> ({took}){held}. "
            f"Next: the tab <b>Generate and compare</b>. In a cell: {names}."
        )
        self._loaded()

    def _load_here(self, name: str, path: str, scheme: Any) -> tuple[str, str, str]:
        """Load the model in this process. Returns the name of its device, the memory there, and what to type in a cell."""
        self.end_cluster(self.status.value)

        def progress(done: int, total: int, tensor: str) -> None:
            if self._work.due() or done >= total:
                self._memory().tick()
                self._work.share(done, total)
                self.status.value = f"{bytes_text(done)} of {bytes_text(total)}: {escape(tensor)}"

        device = self.opened(name)
        with self._memory().measuring(f"load {path}", device):
            self.model = load(path, device=device, scheme=scheme, progress=progress, cancel=self._work.cancelled)
        assert not isinstance(self.model, RankedModel)
        self.model_view.value = html_of(self.model)
        return device.name, _held(device), "lab.model"

    def _load_on_ranks(self, name: str, path: str, scheme: Any) -> tuple[str, str, str]:
        """Load the model onto all ranks of a cluster, which stays open for the next model; see `_load_here`."""
        if self.cluster is None or self.cluster.closed or several(name) != (self.cluster.device, self.cluster.ranks):
            self.end_cluster("")
            self.status.value = f"Starting the processes of {escape(name)} ..."
            self.cluster = cluster(name)
        if self._work.cancelled.is_set():
            self.end_cluster("")
            raise CancelledError(f"loading {path}", "it was cancelled", "Press Load to start again")
        self.status.value = f"Loading {escape(path)} onto {escape(name_of(self.cluster))} ..."
        with self._memory().measuring(f"load {path}", None):
            model = load(path, scheme=scheme, progress=False, cancel=self._work.cancelled, cluster=self.cluster)
        self.model, self.model_view.value = model, loaded_html(model)
        return name_of(self.cluster), "", "lab.model, lab.cluster"

    def _look(self) -> None:
        _, path, scheme = self.chosen()
        self.status.value = f"Looking at {escape(path)} ..."
        self.model_view.value = costs(path, scheme=scheme)._repr_html_()
        self.status.value = f"What <b>{escape(path)}</b> costs. It was not loaded for this."

    def _snippets(self) -> dict[str, str]:
        name, path, scheme = self._fields()
        return {"Load": f"{_source(name, path, scheme)}\nmodel", "What it costs": call("tk.costs", path, scheme=scheme)}


_panels: weakref.WeakSet[LoadPanel] = weakref.WeakSet()


def _check_names(name: str, path: str) -> Path | Repository:
    """Return the files of a model or its repository. Raises ToolkitError if there is no such device or model.

    Opens no virtual GPU: another one may hold the loaded model.
    """
    with without_gpu(name, _NO_GPUS if several(name) else _NO_GPU):
        if several(name):
            checked(name)
        elif name.startswith("virtual:"):
            spec_of(name.removeprefix("virtual:"))
        else:
            open_device(name)
    return resolve(path)


def _check_load(name: str, path: Path, scheme: str | None) -> None:
    """Raise ToolkitError if the model can't be loaded onto the device, however much of the device's memory is freed."""
    each, ranks = several(name) or (name, 1)
    total, opened = 0, open_card()
    if opened is not None and opened.name == each and ranks == 1:
        total = opened.limit_bytes
    elif each.startswith("virtual:"):
        total = spec_of(each.removeprefix("virtual:")).memory_bytes
    elif ranks == 1:  # this process must not open the GPUs of ranks
        total = open_device(each).limit_bytes
    check_load(path, scheme, each, total, WHOLE if ranks == 1 else Shard(0, ranks))


def _source(name: str, path: str, scheme: Any) -> str:
    if several(name):
        loaded = call("tk.load", path, scheme=scheme, cluster=Name("cluster"))
        return f"cluster = {call('tk.cluster', name)}\nmodel = {loaded}"
    return f"model = {call('tk.load', path, device=name, scheme=scheme)}"


def _device_names() -> list[str]:
    import torch

    cuda = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    pair = [f"{len(cuda)}xcuda"] if len(cuda) > 1 else []
    return [*cuda, *pair, *(f"virtual:{card}" for card in CATALOGUE), "virtual:8GiB", "virtual:2xh200", "virtual:8xh200"]


def _model_names() -> list[str]:
    demos = sorted(f"demo/{path.parent.name}" for path in DEMOS.glob("*/config.json"))
    return [*demos, *(f"random/{name}" for name in SHAPES)]


def _held(device: Any) -> str:
    memory = device.memory()
    return f": {bytes_text(memory.allocated_bytes)} of {bytes_text(memory.total_bytes)} in use" if memory.total_bytes else ""
