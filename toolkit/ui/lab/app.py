"""The Lab, an app in the notebook: load a model, plan and export it, generate, tune kernels, and look at the memory.

`lab = tk.Lab()` shows it. Its results are `lab.model`, `lab.run`, `lab.runs`, `lab.plan.plan`, `lab.tune.tuning` and
`lab.memory.uses`. The Lab only calls `tk.device`, `tk.load`, `tk.costs`, `tk.plan`, `tk.export`, `tk.generate` and `tk.tune`.
Work runs in a thread, because widgets don't respond while a cell runs. Every error is shown in its panel, and the exception is
`lab.error`.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from html import escape
from typing import Any

import ipywidgets as widgets

from toolkit.core.errors import CancelledError, DeviceError, ModelError, ToolkitError
from toolkit.core.units import bytes_text, seconds_text
from toolkit.decode.compare import decode_steps
from toolkit.decode.loop import generate
from toolkit.decode.strategies import STRATEGIES, strategies_of
from toolkit.gpu.catalogue import CATALOGUE
from toolkit.gpu.opening import open_device
from toolkit.loading.checkpoint import DEMOS
from toolkit.loading.loader import load
from toolkit.models.model import Model
from toolkit.models.shapes import SHAPES
from toolkit.planning.describe import costs
from toolkit.trace.columns import COPY_KINDS
from toolkit.ui.assets import style_of
from toolkit.ui.figures.model import html_of
from toolkit.ui.lab.fields import button, field, progress_bar, row, start
from toolkit.ui.lab.memory_panel import MemoryPanel
from toolkit.ui.lab.plan_panel import PlanPanel
from toolkit.ui.lab.tune_panel import TunePanel
from toolkit.ui.timeline.widget import Timeline
from toolkit.weights.recipes import RECIPES

UPDATES_PER_S = 8  # front ends drop messages that come much faster
_NONE = "(none)"
_FIRST, _SECOND = "roundtrip", "double-buffered"  # the strategies that are compared at first
_SCHEMES = [("as stored", None), ("plain, not quantized", "none"), *((name, name) for name in sorted(RECIPES))]


class Lab(widgets.VBox):  # type: ignore[misc]  # ipywidgets has no types
    """The app. `device`, `model` and `prompt` are the first values of its fields."""

    def __init__(
        self, device: str = "virtual:h200", model: str = "demo/qwen3", prompt: str = "The capital of France is"
    ) -> None:
        self.model: Model | None = None
        self.run: Any = None  # the last finished run
        self.runs: dict[str, Any] = {}  # by strategy, from the last Generate
        self.error: BaseException | None = None
        self._cancel = threading.Event()
        self._worker: threading.Thread | None = None
        self._what, self._status_line = "", widgets.HTML()  # the running work, and its status line
        self._start = threading.Lock()
        self._make_load(device, model)
        self._make_generate(prompt)
        self.plan = PlanPanel(self._begin, self.cancel, self._cancel, self._chosen)
        self.tune = TunePanel(self._begin, self.cancel, self._cancel)
        self.memory = MemoryPanel(self._begin, self.cancel, self._cancel, self._holds, self._in_use)
        super().__init__([
            widgets.HTML(style_of("lab/lab.css")),
            self._load_panel, self.plan, self._generate_panel, self.tune, self.memory,
        ])  # fmt: skip
        self.add_class("tk-lab")
        self._enable(True)
        _labs.add(self)

    def _make_load(self, device: str, model: str) -> None:
        self.device_field = field(widgets.Combobox, device, "Device", options=_device_names(), ensure_option=False,
                                  placeholder="virtual:8GiB, cuda, ...")  # fmt: skip
        self.model_field = field(widgets.Combobox, model, "Model", options=_model_names(), ensure_option=False,
                                 placeholder="demo/NAME, random/NAME, a folder, a .gguf")  # fmt: skip
        self.scheme_field = field(widgets.Dropdown, None, "Scheme", options=_SCHEMES)
        self.load_button = button("Load", "download", self.load, primary=True)
        self.look_button = button(
            "What it costs", "search", self.look, "Show the memory of the model and the cost of a token, without loading it"
        )
        self.stop_button = button("Cancel load", "stop", self.cancel)
        self.load_progress, self.model_view = progress_bar(), widgets.HTML()
        self.load_status = widgets.HTML("Nothing is loaded yet.")
        self._load_panel = _panel(
            "Load", row(self.device_field, self.model_field, self.scheme_field),
            row(self.load_button, self.look_button, self.stop_button, self.load_progress), self.load_status, self.model_view,
        )  # fmt: skip

    def _make_generate(self, prompt: str) -> None:
        narrow, names = {"width": "190px"}, list(STRATEGIES)
        self.prompt_field = field(widgets.Textarea, prompt, "Prompt", layout={"width": "98%", "height": "56px"})
        self.a_field = field(widgets.Dropdown, _FIRST, "Strategy A", options=names)
        self.b_field = field(widgets.Dropdown, _SECOND, "B", 20, options=[_NONE, *names])
        self.tokens_field = field(widgets.IntText, 64, "Max tokens", 84, layout=narrow)
        self.temperature_field = field(widgets.BoundedFloatText, 0.0, "Temperature", 84, min=0, max=5, step=0.1, layout=narrow)
        self.top_k_field = field(widgets.BoundedIntText, 0, "Top-k (0: off)", 90, min=0, max=1 << 20, layout=narrow)
        self.top_p_field = field(widgets.BoundedFloatText, 1.0, "Top-p", min=0.01, max=1, step=0.05, layout=narrow)
        self.seed_field = field(widgets.IntText, 0, "Seed", layout=narrow)
        self.generate_button = button("Generate", "play", self.generate, primary=True)
        self.cancel_button = button("Cancel", "stop", self.cancel)
        self.progress, self.status = progress_bar(), widgets.HTML("Load a model first.")
        self.output, self.table, self.timeline_box = widgets.HTML(), widgets.HTML(), widgets.VBox()
        self._generate_panel = _panel(
            "Generate", self.prompt_field, row(self.a_field, self.b_field, self.tokens_field),
            row(self.temperature_field, self.top_k_field, self.top_p_field, self.seed_field),
            row(self.generate_button, self.cancel_button, self.progress), self.status, self.output, self.table,
            self.timeline_box,
        )  # fmt: skip

    @property
    def busy(self) -> bool:
        """Whether work is running, such as a load or a generation."""
        return self._worker is not None and self._worker.is_alive()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the running work has ended. Returns False if it still runs after `timeout_s` seconds."""
        if self._worker is not None:
            self._worker.join(timeout_s)
        return not self.busy

    def cancel(self) -> None:
        """Cancel the running work.

        A generation stops after the current step and keeps its tokens, a load stops after the current tensor, and exploring
        stops after the current compilation.
        """
        if self.busy and not self._cancel.is_set():
            self._cancel.set()
            self._status_line.value = "Cancelling ..."

    def close(self) -> None:
        """Cancel the running work and remove the app."""
        self._cancel.set()
        super().close()

    def load(self) -> None:
        """Load the chosen model, like the Load button. Returns at once, and does nothing if other work is running."""
        self._begin("load", self._load, self.load_status)

    def look(self) -> None:
        """Show the model without loading it, like the "What it costs" button. Returns at once."""
        self._begin("look", self._look, self.load_status)

    def generate(self) -> None:
        """Generate text, like the Generate button. Returns at once, and does nothing if other work is running."""
        self._begin("generate", self._generate, self.status)

    def _begin(self, what: str, work: Callable[[], None], status: widgets.HTML) -> None:
        with self._start:
            if self.busy:
                return
            self._cancel.clear()
            self.error, self._what, self._status_line = None, what, status
            self._worker = threading.Thread(target=self._guard, args=(work, status), name=f"lab-{what}", daemon=True)
            self._enable(False)
            self._worker.start()

    def _guard(self, work: Callable[[], None], status: widgets.HTML) -> None:
        """Run `work`. Show its error in `status`, and keep the exception."""
        try:
            work()
        except BaseException as error:  # nothing above this thread would report it
            if isinstance(error, CancelledError):
                status.value = "Cancelled. No model is loaded." if self._what == "load" else f"Cancelled. {escape(error.do)}."
            else:
                self.error = _without_frames(error)
                status.value = error_html(error) + self.memory.why_html()
        finally:
            self.load_progress.layout.display = self.progress.layout.display = "none"
            self._enable(True)

    def _enable(self, idle: bool) -> None:
        self.load_button.disabled = self.look_button.disabled = not idle
        self.stop_button.disabled = idle or self._what != "load"
        self.generate_button.disabled = not idle or self.model is None
        self.cancel_button.disabled = idle or self._what != "generate"
        self.plan.enable(idle, self._what)
        self.tune.enable(idle, self._what)
        self.memory.enable(idle, self._what)

    def _chosen(self) -> tuple[str, str, Any]:
        """Return the device, model and scheme of the fields."""
        return self.device_field.value.strip(), self._path(), self.scheme_field.value

    def _path(self) -> str:
        path: str = self.model_field.value.strip()
        if not path:
            raise ToolkitError("a model", "its field is empty", 'Type "demo/qwen3", a Hugging Face folder, or a .gguf file')
        return path

    def _look(self) -> None:
        path = self._path()
        self.load_status.value = f"Looking at {escape(path)} ..."
        self.model_view.value = costs(path, scheme=self.scheme_field.value)._repr_html_()
        self.load_status.value = f"<b>{escape(path)}</b> without loading it."

    def _load(self) -> None:
        name, path = self.device_field.value.strip(), self._path()
        self.model, self.model_view.value, self.status.value = None, "", "Load a model first."
        gc.collect()  # the previous model may fill the GPU, or prevent the choice of another virtual GPU
        self.load_status.value = f"Loading {escape(path)} on {escape(name)} ..."
        start(self.load_progress)
        beat = _Beat()

        def progress(done: int, total: int, tensor: str) -> None:
            if beat.due() or done >= total:
                self.memory.tick()
                self.load_progress.value = done / total if total else 1.0
                self.load_status.value = f"{bytes_text(done)} of {bytes_text(total)}: {escape(tensor)}"

        began = time.monotonic()
        device = self._open(name)
        with self.memory.measuring(f"load {path}", device):
            self.model = load(path, device=device, scheme=self.scheme_field.value, progress=progress, cancel=self._cancel)
        took = seconds_text(time.monotonic() - began)
        self.load_status.value = f"<b>{escape(path)}</b> is on <b>{escape(device.name)}</b> ({took}){_held(device)}."
        self.model_view.value = html_of(self.model)
        self._offer(strategies_of(self.model))
        self.status.value = "Ready."

    def _offer(self, names: Iterable[str]) -> None:
        """Offer these strategies. A chosen strategy remains chosen if it is among them."""
        names = list(names)
        for one, options, usual in ((self.a_field, names, _FIRST), (self.b_field, [_NONE, *names], _SECOND)):
            if list(one.options) != options:
                chosen = one.value
                one.options = options
                one.value = next(name for name in (chosen, usual, options[0]) if name in options)

    def _holds(self) -> dict[str, Any]:
        """Return the objects that the Lab keeps alive, by their names in a cell."""
        return {"lab.model": self.model, "lab.runs": self.runs}

    def _in_use(self) -> Any:
        """Return the device of a budget: the model's, else the device of the field."""
        return self.model.device if self.model is not None else self._open(self.device_field.value.strip())

    def _open(self, name: str) -> Any:
        """Open the device. If models of other Labs prevent that, unload them: a Lab survives when its cell runs again."""
        try:
            return open_device(name)
        except DeviceError:
            others = [lab for lab in _labs if lab is not self and lab.model is not None and not lab.busy]
            if not others or not name.startswith("virtual:"):
                raise
            for lab in others:
                lab.model, lab.generate_button.disabled, lab.model_view.value = None, True, ""
                lab.load_status.value = f"Unloaded, because another Lab opened {escape(name)}. Press Load to continue here."
        gc.collect()
        return open_device(name)

    def _generate(self) -> None:
        names = [self.a_field.value] + ([self.b_field.value] if self.b_field.value not in (_NONE, self.a_field.value) else [])
        limit, prompt = self.tokens_field.value, self.prompt_field.value
        model = self.model
        assert model is not None  # or the button is disabled
        given = prompt_of(prompt, model)
        if limit < 1:
            raise ModelError("generating", f"{limit} tokens", "Give a number of at least 1")
        options = {
            "max_new_tokens": limit, "temperature": self.temperature_field.value, "top_k": self.top_k_field.value or None,
            "top_p": self.top_p_field.value if self.top_p_field.value < 1 else None, "seed": self.seed_field.value,
        }  # fmt: skip
        self.runs, self.run = {}, None
        self.output.value, self.table.value, self.timeline_box.children = "", "", ()
        start(self.progress, limit * len(names))
        done: list[str] = []
        for i, name in enumerate(names):
            pieces: list[str] = []
            beat = _Beat()

            def on_token(
                _token: int, text: str, i: int = i, name: str = name, pieces: list[str] = pieces, beat: _Beat = beat
            ) -> None:
                pieces.append(text)
                if beat.due():
                    self.memory.tick()
                    self.progress.value = i * limit + len(pieces)
                    self.output.value = "".join([*done, _text_html(name, prompt, "".join(pieces), f"{len(pieces)} tokens ...")])

            self.status.value = f"Generating with <b>{escape(name)}</b> on {escape(model.device.name)} ..."
            with self.memory.measuring(f"generate, {name}, up to {limit} tokens", model.device):
                run = generate(model, given, name, on_token=on_token, cancel=self._cancel, **options)
            self.runs[name] = self.run = run
            self.progress.value = (i + 1) * limit
            done.append(_text_html(name, prompt, run.text, _ended(run)))
            self.output.value = "".join(done)
            if run.stop_reason == "cancelled":
                break
        self._show(names)

    def _show(self, names: list[str]) -> None:
        runs = list(self.runs.values())
        self.status.value = "Drawing ..."
        self.table.value = copies_html(runs)
        pairs = {"titles": tuple(self.runs)} if len(runs) == 2 else {"titles": (next(iter(self.runs)),)}
        old = self.timeline_box.children
        self.timeline_box.children = (Timeline(*(run.trace for run in runs), **pairs),)
        for widget in old:
            widget.close()
        cancelled = runs[-1].stop_reason == "cancelled"
        left = f" ({names[len(runs)]} was not started)" if len(runs) < len(names) else ""
        self.status.value = (
            f"Cancelled. The tokens so far are kept{left}." if cancelled else "Done. In a cell: lab.run, lab.runs, lab.model."
        )


def _without_frames(error: BaseException) -> BaseException:
    """Return `error` without tracebacks, its causes' included. A traceback keeps the tensors of its frames alive."""
    link: BaseException | None = error
    for _ in range(20):  # a chain may be a ring
        if link is None:
            break
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


_labs: weakref.WeakSet[Lab] = weakref.WeakSet()


class _Beat:
    """A timer for updates: `due` returns True at most UPDATES_PER_S times per second."""

    def __init__(self) -> None:
        self._next = 0.0

    def due(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + 1 / UPDATES_PER_S
        return True


def _panel(title: str, *children: widgets.Widget) -> widgets.VBox:
    panel = widgets.VBox([widgets.HTML(f"<h3>{title}</h3>"), *children])
    panel.add_class("tk-panel")
    return panel


def _device_names() -> list[str]:
    import torch

    cuda = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return [*cuda, *(f"virtual:{card}" for card in CATALOGUE), "virtual:8GiB"]


def prompt_of(text: str, model: Model) -> str | list[int]:
    """Return the prompt: the text, or the token ids in it if the model (random/NAME) has no tokenizer.

    Raises ToolkitError if there is no tokenizer and the text isn't a list of numbers.
    """
    if model.tokenizer is not None:
        return text
    words = text.replace(",", " ").split()
    if not words or not all(word.isdecimal() and word.isascii() for word in words):
        found = "this model has no tokenizer, so text can't be encoded"
        raise ToolkitError(f"the prompt {text!r:.60}", found, "Type token ids into the field, for example: 1 2 3 4")
    return [int(word) for word in words]


def _model_names() -> list[str]:
    demos = sorted(f"demo/{path.parent.name}" for path in DEMOS.glob("*/config.json"))
    return [*demos, *(f"random/{name}" for name in SHAPES)]


def _held(device: Any) -> str:
    memory = device.memory()
    return f": {bytes_text(memory.allocated_bytes)} of {bytes_text(memory.total_bytes)} in use" if memory.total_bytes else ""


def _ended(run: Any) -> str:
    why = {"eos": "end of text", "length": "reached max tokens", "cancelled": "cancelled"}.get(run.stop_reason, run.stop_reason)
    rate = f", {run.tok_per_s:,.4g} tok/s {run.clock}" if run.tok_per_s else ""
    return f"{len(run.tokens)} token{'' if len(run.tokens) == 1 else 's'}, {why}{rate}"


def _text_html(name: str, prompt: str, text: str, note: str) -> str:
    head = f"<b>{escape(name)} <span>({escape(note)})</span></b>"
    return f'<div class="tk-out">{head}<span>{escape(prompt)}</span>{escape(text)}</div>'


def copies_html(runs: list[Any]) -> str:
    """Return a table of the mean copies per decode step of each run, without the prefill."""
    head = "".join(f"<th scope='col'>{kind.upper()} / step</th>" for kind in COPY_KINDS)
    rows = []
    for run in runs:
        steps = decode_steps(run.trace)
        cells = [escape(run.strategy), "yes" if run.tokens == runs[0].tokens else "no"]
        cells.append(f"{run.tok_per_s:,.4g} {run.clock}" if run.tok_per_s else "-")
        for kind in COPY_KINDS:
            count, size = steps[f"{kind}_count"].mean(), steps[f"{kind}_bytes"].mean()
            cells.append(f"{count:.3g} ({bytes_text(size)})" if len(steps) and count else "0")
        cells.append(f"{seconds_text(steps['host_wait_s'].mean())} {run.clock}" if len(steps) else "-")
        rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    first = "<th scope='col'>strategy</th><th scope='col'>same tokens</th><th scope='col'>tok/s</th>"
    last = "<th scope='col'>host waits / step</th>"
    return f"<table><thead><tr>{first}{head}{last}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def error_html(error: BaseException) -> str:
    """Return an error as HTML: asked, found, do. Other errors than ToolkitError show their type and first lines."""
    if isinstance(error, ToolkitError):
        parts = {"Asked": error.asked, "Found": error.found, "Do": error.do}
    else:
        message = str(error).strip()[:600] or "no message"
        parts = {"Failed": f"{type(error).__name__}: {message}", "Do": "Look at the exception: lab.error"}
    lines = "".join(f"<div><b>{label}</b> {escape(text)}</div>" for label, text in parts.items())
    return f'<div class="tk-error" role="alert">{lines}</div>'
