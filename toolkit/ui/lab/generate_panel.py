"""The Lab's Generate and compare tab: generate from one prompt with one or two decode strategies, and see what each copied."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from itertools import count
from typing import Any

import ipywidgets as widgets
import torch

from toolkit.core.errors import ModelError, RecorderError, ToolkitError
from toolkit.core.units import plural
from toolkit.decode.compare import unrecorded, with_rate_of
from toolkit.decode.loop import generate
from toolkit.decode.run import FULL, Run
from toolkit.decode.strategies import STRATEGIES, strategies_of
from toolkit.gpu.device import Device
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
_OBJECTS = "In a cell: lab.run, lab.runs, lab.model."
_KEPT = f"The tab <b>Traces</b> keeps these runs. {_OBJECTS}"
_UNLOADED = "No model is loaded."
_EMPTY = f"{_UNLOADED} Generate loads <b>{{}}</b> onto <b>{{}}</b> first."


@dataclass(frozen=True)
class Asked:
    """What Generate was asked for. `setup` is the code that loads the model, and `typed` the prompt as it was typed."""

    model: Model | RankedModel
    model_name: str
    setup: str
    typed: str
    prompt: str | list[int]
    names: list[str]
    options: dict[str, Any]

    @property
    def limit(self) -> int:
        """The number of tokens of a run, at most."""
        limit: int = self.options["max_new_tokens"]
        return limit

    @property
    def passes(self) -> int:
        """The number of runs: each strategy runs without recording, and then recorded."""
        return 2 * len(self.names)

    @property
    def device(self) -> Device | None:
        """The device of the model; None if the ranks of a cluster hold it."""
        return None if isinstance(self.model, RankedModel) else self.model.device


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
            one.observe(lambda _: self._chose(), "value")
        self.temperature_field.observe(lambda _: self._offer_filters(), "value")
        self._offer_filters()
        super().__init__(
            self.prompt_field, row(*chosen), row(*options), row(self.generate_button), self.code, self.status, self.output,
            self.timeline_box, self.table,
        )  # fmt: skip
        self.refresh()

    def generate(self) -> None:
        """Generate text, like the Generate button. Returns at once, and does nothing if other work is running."""
        self._work.run("Generating", self.generate_now, self.status, alone=True)

    def enable(self, idle: bool) -> None:
        """Enable or disable the buttons."""
        self.generate_button.disabled = not idle
        if idle and self._loading.model is None:  # the load failed, or the cluster has ended
            if self.status.value in (_LOADING, _READY) or self.status.value.endswith(_OBJECTS):
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

    def _chose(self) -> None:
        """Name another device or model, if it is loaded next."""
        if self._loading.model is None and (not self._work.busy or self.status.value.startswith(_UNLOADED)):
            self._say_empty()
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

    def _offer_filters(self) -> None:
        """Enable the filters unless the temperature is 0: the most probable token is then chosen in any case."""
        for one in (self.top_k_field, self.top_p_field):
            one.disabled = self.temperature_field.value == 0

    def _strategies(self) -> list[str]:
        a, b = self.a_field.value, self.b_field.value
        return [a] if b in (_NONE, a) else [a, b]

    def _options(self) -> dict[str, Any]:
        options = {
            "max_new_tokens": self.tokens_field.value, "temperature": self.temperature_field.value,
            "top_k": self.top_k_field.value or None, "top_p": self.top_p_field.value if self.top_p_field.value < 1 else None,
            "seed": self.seed_field.value,
        }  # fmt: skip
        return options if options["temperature"] else options | {"top_k": None, "top_p": None}

    def generate_now(self) -> None:
        """Load the chosen model if none is loaded, and generate, in this thread."""
        prompt, options = self.prompt_field.value, self._options()
        if options["max_new_tokens"] < 1:
            raise ModelError("generating", f"{options['max_new_tokens']} tokens", "Give a number of at least 1")
        if self._loading.model is None:
            self._loading.load_now()
        model, loaded = self._loading.model, self._loading.loaded
        assert model is not None  # or loading raised
        assert loaded is not None
        given, names = prompt_of(prompt, model), self._strategies()
        asked = Asked(model, loaded[1], self._loading.source(), prompt, given, names, options)
        if asked.device is not None and asked.device.recording is not None:
            do = "Wait until that run or block has ended, because each run of the Lab makes its own recording"
            raise RecorderError("generating in the Lab", f"{asked.device.name} is being recorded", do)
        self._history.runs = {}
        self.output.value = self.table.value = ""
        replace_children(self.timeline_box)
        entries: list[Entry] = []
        shortage: torch.OutOfMemoryError | None = None
        try:
            for name in names:  # all rates first: on CUDA, a recording slows down what follows it
                self._history.add_run(name, self._time(asked, name))
                if self._work.cancelled.is_set():
                    break
        except torch.OutOfMemoryError as error:
            shortage = error
        finally:  # if the second strategy fails, the first one is recorded and shown nevertheless
            try:
                self._record_all(asked, entries)
            finally:
                self._draw(entries)
        if shortage is not None:  # once more, measured: that explains the error
            self._record(asked, names[len(self._history.runs)], asked.passes - 1)
            raise shortage
        self._say_ended(names, len(entries))

    def _say_ended(self, names: list[str], recorded: int) -> None:
        """Say what is there. Of the strategies `names`, the first were timed, and the first `recorded` of these recorded."""
        said, timed = "Done.", len(self._history.runs)
        left = [f"{name} was not recorded" for name in names[recorded:timed]]
        left += [f"{name} was not started" for name in names[timed:]]
        if left:
            self._work.stopped = True
            said = f"Cancelled. The tokens so far are kept ({', '.join(left)})."
        self.status.value = f"{said} {_KEPT if recorded else _OBJECTS}"

    def _time(self, asked: Asked, name: str) -> Run:
        """Generate without recording, and show the text with the rate.

        The text grows as it is generated, unless times are measured: decoding and showing it takes time, too.
        """
        before, begun, pieces = self.output.value, len(self._history.runs), list[str]()

        def on_token(_token: int, text: str) -> None:
            pieces.append(text)
            if self._tell(asked, begun, len(pieces)):
                show("".join(pieces), f"{len(pieces)} tokens ...")

        def show(text: str, note: str) -> None:
            self.output.value = before + _text_html(name, asked.typed, text, note)

        self.status.value = f"Generating with <b>{escape(name)}</b> on {escape(place_of(asked.model))} ..."
        if asked.device is not None:  # of a cluster, nothing is known before a run ends
            self._work.share(begun, asked.passes)
        modelled = asked.device is not None and asked.device.clock == "modelled"
        hear = on_token if modelled else None  # the ranks of a cluster can't call it
        try:
            run = unrecorded(asked.model, asked.prompt, name, on_token=hear, cancel=self._work.cancelled, **asked.options)
        except BaseException:
            show("".join(pieces), f"stopped after {len(pieces)} tokens" if modelled else "stopped")
            raise
        self._work.share(begun + 1, asked.passes)
        show(run.text, _ended(run))
        return run

    def _record_all(self, asked: Asked, entries: list[Entry]) -> None:
        """Record the strategies that were timed, and add them to the history and to `entries`, unless the work is cancelled."""
        for name, timed in self._history.runs.items():
            if self._work.cancelled.is_set():
                return
            run = self._record(asked, name, len(asked.names) + len(entries))
            if run.stop_reason == "cancelled":  # the timed run is complete
                return
            run = with_rate_of(run, timed)
            self._history.add_run(name, run)
            source = _call(name, asked.prompt, asked.options)
            entries.append(
                self._history.add(f"{name}, {asked.model_name}", run.trace, run, source, asked.setup, asked.model_name)
            )
            self._added()

    def _record(self, asked: Asked, name: str, begun: int) -> Run:
        """Generate, record, and measure the memory. `begun` is the number of runs before this one."""
        tokens = count(1)

        def on_token(_token: int, _text: str) -> None:
            self._tell(asked, begun, next(tokens))

        self.status.value = f"Recording <b>{escape(name)}</b> on {escape(place_of(asked.model))} ..."
        hear = None if asked.device is None else on_token
        with self._memory.measuring(f"generate, {name}, up to {asked.limit} tokens", asked.device):
            run = generate(asked.model, asked.prompt, name, on_token=hear, cancel=self._work.cancelled, **asked.options)
        self._work.share(begun + 1, asked.passes)
        return run

    def _tell(self, asked: Asked, begun: int, tokens: int) -> bool:
        """Show the progress from time to time, after `begun` runs and `tokens` of the next one; return whether it was time."""
        if not self._work.due():
            return False
        self._memory.tick()
        self._work.share(begun * asked.limit + tokens, asked.passes * asked.limit)
        return True

    def _draw(self, entries: list[Entry]) -> None:
        """Show what was recorded, unless the Lab has been closed: nothing would close the timeline then."""
        if entries and self.comm is not None:
            self.status.value = "Drawing ..."
            self.table.value = copies_html(entries)
            replace_children(self.timeline_box, timeline_of(entries))

    def _snippets(self) -> dict[str, str]:
        names, source, prompt = self._strategies(), self._loading.source(), self.prompt_field.value
        model = self._loading.model
        with suppress(ToolkitError):  # the prompt doesn't suit the model: Generate says so
            prompt = prompt if model is None else prompt_of(prompt, model)
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


def _ended(run: Run) -> str:
    most = FULL if run.context_full else "reached max tokens"
    why = {"eos": "end of text", "length": most}.get(run.stop_reason, run.stop_reason)
    rate = f", {run.rate_text}" if run.rate_text else ""
    return f"{plural(len(run.tokens), 'token')}, {why}{rate}"


def _text_html(name: str, prompt: str, text: str, note: str) -> str:
    head = f"<b>{escape(name)} <span>({escape(note)})</span></b>"
    return f'<div class="tk-out">{head}<span>{escape(prompt)}</span>{escape(text)}</div>'
