"""The Lab's Generate and compare tab: generate from one prompt with one or two decode strategies, and see what each copied."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from html import escape
from typing import Any

import ipywidgets as widgets

from toolkit.core.errors import ModelError, RecorderError, ToolkitError
from toolkit.decode.loop import generate
from toolkit.decode.strategies import STRATEGIES, strategies_of
from toolkit.models.model import Model
from toolkit.ranks.remote import RankedModel
from toolkit.ui.lab.code import CopyAsCode, Name, call
from toolkit.ui.lab.fields import Panel, button, field, replace_children, row
from toolkit.ui.lab.history import Entry, History, copies_html, timeline_of
from toolkit.ui.lab.load_panel import LoadPanel
from toolkit.ui.lab.memory_panel import MemoryPanel
from toolkit.ui.lab.ranks import place_of
from toolkit.ui.lab.work import Work

_NONE = "(none)"
_FIRST, _SECOND = "roundtrip", "double-buffered"  # the strategies that are compared at first
_LOADING, _READY = "Loading the model first ...", "Ready."
_KEPT = "The tab <b>Traces</b> keeps these runs. In a cell: lab.run, lab.runs, lab.model."
_EMPTY = "No model is loaded. Generate loads <b>{}</b> onto <b>{}</b> first."


class GeneratePanel(Panel):
    """The panel. `added` is called when runs were added to `history`."""

    def __init__(
        self, work: Work, memory: MemoryPanel, loading: LoadPanel, history: History, prompt: str, added: Callable[[], None]
    ) -> None:
        self._work, self._memory, self._loading, self._history, self._added = work, memory, loading, history, added
        narrow, names = {"width": "190px"}, list(STRATEGIES)
        self.prompt_field = field(widgets.Textarea, prompt, "Prompt", 84, layout={"width": "98%", "height": "56px"})
        self.a_field = field(widgets.Dropdown, _FIRST, "Strategy A", 84, options=names)
        self.b_field = field(widgets.Dropdown, _SECOND, "B", 20, options=[_NONE, *names])
        self.tokens_field = field(widgets.IntText, 64, "Max tokens", 84, layout=narrow)
        self.temperature_field = field(widgets.BoundedFloatText, 0.0, "Temperature", 84, min=0, max=5, step=0.1, layout=narrow)
        self.top_k_field = field(widgets.BoundedIntText, 0, "Top-k (0: off)", 90, min=0, max=1 << 20, layout=narrow)
        self.top_p_field = field(widgets.BoundedFloatText, 1.0, "Top-p", 84, min=0.01, max=1, step=0.05, layout=narrow)
        self.seed_field = field(widgets.IntText, 0, "Seed", 84, layout=narrow)
        self.generate_button = button("Generate", "play", self.generate, "Generate with A, then with B", primary=True)
        self.status, self.output, self.table = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self.timeline_box = widgets.VBox()
        options = (self.temperature_field, self.top_k_field, self.top_p_field, self.seed_field)
        chosen = (self.a_field, self.b_field, self.tokens_field)
        places = (loading.device_field, loading.model_field, loading.scheme_field)
        self.code = CopyAsCode(self._snippets, (self.prompt_field, *chosen, *options, *places))
        for one in places:
            one.observe(lambda _: self.refresh(), "value")
        super().__init__(
            self.prompt_field, row(*chosen), row(*options), row(self.generate_button), self.code, self.status, self.output,
            self.timeline_box, self.table,
        )  # fmt: skip
        self.refresh()

    def generate(self) -> None:
        """Generate text, like the Generate button. Returns at once, and does nothing if other work is running."""
        self._work.run("Generating", self.generate_now, self.status)

    def enable(self, idle: bool) -> None:
        """Enable or disable the buttons."""
        self.generate_button.disabled = not idle
        if idle and self._loading.model is None:  # the load failed, or the cluster has ended
            if self.status.value in (_LOADING, _READY) or self.status.value.endswith(_KEPT):
                self._say_empty()
            self.code.update()

    def refresh(self) -> None:
        """Offer the strategies of the loaded model, and say whether one is loaded."""
        model = self._loading.model
        if model is None and self._work.busy:
            self.status.value = _LOADING
        elif model is None:
            self._say_empty()
        else:
            self._offer(model.strategies if isinstance(model, RankedModel) else strategies_of(model))
            self.status.value = _READY
        self.code.update()

    def _say_empty(self) -> None:
        places = (self._loading.model_field.value, self._loading.device_field.value)
        self.status.value = _EMPTY.format(*(escape(value) for value in places))

    def _offer(self, names: Iterable[str]) -> None:
        """Offer these strategies. A chosen strategy remains chosen if it is among them."""
        names = list(names)
        for one, options, usual in ((self.a_field, names, _FIRST), (self.b_field, [_NONE, *names], _SECOND)):
            if list(one.options) != options:
                chosen = one.value
                one.options = options
                one.value = next(name for name in (chosen, usual, options[0]) if name in options)

    def _strategies(self) -> list[str]:
        a, b = self.a_field.value, self.b_field.value
        return [a] if b in (_NONE, a) else [a, b]

    def _options(self) -> dict[str, Any]:
        return {
            "max_new_tokens": self.tokens_field.value, "temperature": self.temperature_field.value,
            "top_k": self.top_k_field.value or None, "top_p": self.top_p_field.value if self.top_p_field.value < 1 else None,
            "seed": self.seed_field.value,
        }  # fmt: skip

    def generate_now(self) -> None:
        """Load the chosen model if none is loaded, and generate, in this thread."""
        limit, prompt, options = self.tokens_field.value, self.prompt_field.value, self._options()
        if limit < 1:
            raise ModelError("generating", f"{limit} tokens", "Give a number of at least 1")
        if self._loading.model is None:
            self._loading.load_now()
        names, model = self._strategies(), self._loading.model
        loaded, setup = self._loading.loaded, self._loading.source()
        assert model is not None  # or loading raised
        assert loaded is not None
        given = prompt_of(prompt, model)
        device = None if isinstance(model, RankedModel) else model.device
        if device is not None and device.recording is not None:
            do = "Wait until that run or block has ended, because each run of the Lab makes its own recording"
            raise RecorderError("generating in the Lab", f"{device.name} is being recorded", do)
        self._history.runs = {}
        self.output.value, self.table.value, self.timeline_box.children = "", "", ()
        done: list[str] = []
        entries: list[Entry] = []
        for i, name in enumerate(names):
            pieces: list[str] = []

            def on_token(_token: int, text: str, i: int = i, name: str = name, pieces: list[str] = pieces) -> None:
                pieces.append(text)
                if self._work.due():
                    self._memory.tick()
                    self._work.share(i * limit + len(pieces), limit * len(names))
                    self.output.value = "".join([*done, _text_html(name, prompt, "".join(pieces), f"{len(pieces)} tokens ...")])

            self.status.value = f"Generating with <b>{escape(name)}</b> on {escape(place_of(model))} ..."
            if i or device is not None:  # of a cluster, nothing is known before the first run ends
                self._work.share(i * limit, limit * len(names))
            hear = None if device is None else on_token  # the ranks of a cluster can't call it
            with self._memory.measuring(f"generate, {name}, up to {limit} tokens", device):
                run = generate(model, given, name, on_token=hear, cancel=self._work.cancelled, **options)
            self._history.runs[name] = run
            self._work.share(i + 1, len(names))
            source = _call(name, given, options)
            entries.append(self._history.add(f"{name}, {loaded[1]}", run.trace, run, source, setup))
            self._added()  # now: if the next strategy fails, this run stays
            done.append(_text_html(name, prompt, run.text, _ended(run)))
            self.output.value = "".join(done)
            if run.stop_reason == "cancelled":
                break
        self._show(entries, names)

    def _show(self, entries: list[Entry], names: list[str]) -> None:
        self.status.value = "Drawing ..."
        self.table.value = copies_html(entries)
        replace_children(self.timeline_box, timeline_of(entries))
        cancelled = entries[-1].run is not None and entries[-1].run.stop_reason == "cancelled"
        left = f" ({names[len(entries)]} was not started)" if len(entries) < len(names) else ""
        said = f"Cancelled. The tokens so far are kept{left}." if cancelled else "Done."
        self.status.value = f"{said} {_KEPT}"

    def _snippets(self) -> dict[str, str]:
        names, source, prompt = self._strategies(), self._loading.source(), self.prompt_field.value
        with suppress(ToolkitError):  # the prompt doesn't suit the model: Generate says so
            prompt = prompt if self._loading.model is None else prompt_of(prompt, self._loading.model)
        if len(names) == 1:
            return {"Generate": f"{source}\nrun = {_call(names[0], prompt, self._options())}\nrun.timeline()"}
        compared = call("tk.compare", Name("model"), prompt, names, **self._options())
        show = "display(comparison)\na, b = comparison.runs.values()\na.timeline(b)"
        return {"Generate": f"{source}\ncomparison = {compared}\n{show}"}


def _call(name: str, prompt: str | list[int], options: dict[str, Any]) -> str:
    """Return the code that generates with the strategy `name`."""
    return call("tk.generate", Name("model"), prompt, name, **options)


def prompt_of(text: str, model: Model | RankedModel) -> str | list[int]:
    """Return the prompt: the text, or the token ids in it if the model (random/NAME) has no tokenizer.

    Raises ToolkitError if there is no tokenizer and the text isn't a list of numbers.
    """
    if model.has_tokenizer if isinstance(model, RankedModel) else model.tokenizer is not None:
        return text
    words = text.replace(",", " ").split()
    if not words or not all(word.isdecimal() and word.isascii() for word in words):
        found = "this model has no tokenizer, so text can't be encoded"
        raise ToolkitError(f"the prompt {text!r:.60}", found, "Type token ids into the field, for example: 1 2 3 4")
    return [int(word) for word in words]


def _ended(run: Any) -> str:
    why = {"eos": "end of text", "length": "reached max tokens", "cancelled": "cancelled"}.get(run.stop_reason, run.stop_reason)
    rate = f", {run.tok_per_s:,.4g} tok/s {run.clock} while recorded" if run.tok_per_s else ""
    return f"{len(run.tokens)} token{'' if len(run.tokens) == 1 else 's'}, {why}{rate}"


def _text_html(name: str, prompt: str, text: str, note: str) -> str:
    head = f"<b>{escape(name)} <span>({escape(note)})</span></b>"
    return f'<div class="tk-out">{head}<span>{escape(prompt)}</span>{escape(text)}</div>'
