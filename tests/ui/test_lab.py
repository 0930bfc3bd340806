"""Tests of the Lab without a browser: buttons, worker thread and errors, with fake loading and generation."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from synthetic import decode_loop

from toolkit.core.errors import CancelledError, DeviceError, FormatError, ToolkitError
from toolkit.core.progress import Reporter
from toolkit.decode import compare
from toolkit.decode.run import RECORDED, Run
from toolkit.decode.strategies import STRATEGIES
from toolkit.trace.events import Trace, TraceBuilder
from toolkit.ui.lab import generate_panel, load_panel
from toolkit.ui.lab.app import TABS, Lab
from toolkit.ui.lab.fields import error_html, path_of
from toolkit.ui.lab.generate_panel import _ended, prompt_of
from toolkit.ui.lab.history import Entry, copies_html
from toolkit.ui.progress import CellProgress, ProgressBar

BROKEN = "demo/gemma4"  # it is found, but the stand-in for `load` can't read it
SOON_S = 60  # on a machine that is busy with other tests


class Gate:
    """Holds the work at the pause with the number `at`, until the test opens it: no test guesses how far a thread has got."""

    def __init__(self, at: int = 1) -> None:
        self.at, self.count = at, 0
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.count += 1
        if self.count == self.at:
            self.reached.set()
            assert self.opened.wait(SOON_S)


def held(model: SimpleNamespace, at: int = 1) -> Gate:
    """Let the next work of the stand-ins wait at a gate."""
    model.pause = Gate(at)
    return model.pause


class Device:
    name, graphs, recording, clock = "virtual:h200", True, None, "modelled"

    def memory(self) -> SimpleNamespace:
        return SimpleNamespace(allocated_bytes=1 << 20, total_bytes=1 << 30)


def stand_in_generate(model, prompt, decode, *, max_new_tokens, on_token, cancel, record=True, **options):
    """Yields "tick " for every token; the prompt "fail" raises after three tokens. Runs are slower while they are recorded."""
    said = []
    for i in range(max_new_tokens):
        if cancel.is_set():
            break
        if prompt == "fail" and i == 3:
            raise ToolkitError("a token", "no <more>", "Ask for less")
        model.pause()
        said.append("tick ")
        on_token(i, "tick ")
    model.calls.append((decode, record, options))
    reason = "length" if len(said) == max_new_tokens else "cancelled"
    trace, rate, slowed = (decode_loop(), 123.4, RECORDED) if record else (None, 456.7, "")
    tokens = tuple(range(len(said)))
    return Run("".join(said), tokens, (), decode, reason, rate, "modelled", "virtual:h200", trace, slowed=slowed)


def generates(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Run]) -> None:
    for module in (generate_panel, compare):
        monkeypatch.setattr(module, "generate", function)


@pytest.fixture
def model() -> SimpleNamespace:
    return SimpleNamespace(device=Device(), calls=[], pause=lambda: None, inner=torch.nn.Linear(3, 2), tokenizer=object())


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch, model: SimpleNamespace) -> Lab:
    def load(path, device, scheme, progress, cancel):
        model.scheme = scheme
        for done in range(1, 11):
            progress(done << 20, 10 << 20, f"layer.{done}")
            if cancel.is_set():
                raise CancelledError("loading", "it was cancelled", "Load it again")
            model.pause()
        if path == BROKEN:
            raise FormatError(f"loading {path!r}", "a tensor is <missing>", "Check the path")
        return model

    monkeypatch.setattr(load_panel, "load", load)
    monkeypatch.setattr(load_panel, "open_device", lambda name: Device())
    generates(monkeypatch, stand_in_generate)
    return Lab()


def test_without_a_gpu_the_fields_name_what_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    app = Lab(device="cuda")
    app.load()
    assert app.wait(SOON_S)
    assert "Choose &quot;virtual:h200&quot; or another virtual GPU as Device" in app.loading.status.value
    assert isinstance(app.error, DeviceError)
    assert app.plan.target_field.value == "cuda"
    app.plan.show()
    assert app.wait(SOON_S)
    assert "or another GPU of the catalogue as Target" in app.plan.status.value
    app.loading.device_field.value = " "
    app.load()
    assert app.wait(SOON_S)
    assert "its field is empty" in app.loading.status.value


def loaded(app: Lab) -> Lab:
    app.loading.load_button.click()
    assert app.wait(SOON_S)
    return app


def test_a_newcomer_sees_tabs_and_one_click_loads_and_compares(app: Lab, model: SimpleNamespace) -> None:
    assert app.tabs.titles == TABS
    assert app.tabs.selected_index == 0
    assert "virtual:rtx-5090" in app.loading.device_field.options
    assert "no model is loaded" in app.state.value
    assert "demo/qwen3" in app.decoding.status.value
    assert "There are no runs yet" in app.traces.list_view.value
    app.decoding.tokens_field.value = 3
    app.loading.start_button.click()
    assert app.wait(SOON_S)
    assert app.error is None
    assert TABS[app.tabs.selected_index] == "Generate and compare"
    assert list(app.runs) == ["roundtrip", "double-buffered"]
    assert app.loading.welcome.layout.display == "none"
    assert "demo/qwen3" in app.state.value


def test_load_then_generate_two_strategies(app: Lab, model: SimpleNamespace) -> None:
    loaded(app)
    assert app.model is model
    assert "1.00 MiB of 1.00 GiB" in app.loading.status.value
    (
        app.decoding.tokens_field.value,
        app.decoding.temperature_field.value,
        app.decoding.top_k_field.value,
        app.decoding.top_p_field.value,
        app.decoding.seed_field.value,
    ) = 6, 0.8, 5, 0.9, 42
    app.decoding.generate_button.click()
    assert app.wait(SOON_S)
    assert app.error is None
    assert list(app.runs) == ["roundtrip", "double-buffered"]
    assert app.run is app.runs["double-buffered"]
    options = {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "seed": 42}
    names = ("roundtrip", "double-buffered")  # both are timed before the first one is recorded
    assert model.calls == [(name, record, options) for record in (False, True) for name in names]
    assert app.decoding.output.value.count("tick tick tick tick tick tick") == 2
    assert app.decoding.output.value.count("456.7 tok/s modelled)") == 2
    assert app.decoding.table.value.count("456.7<br>modelled<") == 2
    assert (app.run.tok_per_s, app.run.slowed) == (456.7, "")
    assert "2 (16 B)" in app.decoding.table.value
    assert "modelled" in app.decoding.table.value
    assert [track.title for track in app.decoding.timeline_box.children[0].scene.tracks] == ["roundtrip", "double-buffered"]
    assert app.work.bar.value == 1.0
    assert (app.decoding.generate_button.disabled, app.work.cancel_button.disabled) == (False, True)


def test_the_model_shows_itself_and_a_scheme_is_passed_on(app: Lab, model: SimpleNamespace) -> None:
    app.loading.scheme_field.value = "q4_k_m"
    loaded(app)
    assert model.scheme == "q4_k_m"
    assert "Where the bytes are" in app.loading.model_view.value
    app.loading.model_field.value = BROKEN
    app.load()
    assert app.wait(SOON_S)
    assert app.loading.model_view.value == ""


def test_what_it_costs_is_told_without_loading(app: Lab, model: SimpleNamespace) -> None:
    app.loading.model_field.value, app.loading.scheme_field.value = "random/qwen3-0.6b", "int4"
    app.loading.look_button.click()
    assert app.wait(SOON_S)
    assert "random/qwen3-0.6b, int4" in app.loading.model_view.value
    assert "nothing is loaded" in app.loading.model_view.value
    assert app.model is None
    assert "No model is loaded" in app.decoding.status.value
    assert not app.loading.look_button.disabled
    app.loading.model_field.value = "random/qwen3-0.6c"
    app.loading.look()
    assert app.wait(SOON_S)
    assert "random/qwen3-0.6b" in app.loading.status.value  # the nearest name


def test_strategies_are_those_of_the_loaded_model(app: Lab, model: SimpleNamespace) -> None:
    assert list(app.decoding.a_field.options) == list(STRATEGIES)
    app.decoding.a_field.value, app.decoding.b_field.value = "whole-loop", "host-sampling"
    loaded(app)
    assert list(app.decoding.a_field.options) == list(STRATEGIES)
    assert (app.decoding.a_field.value, app.decoding.b_field.value) == ("whole-loop", "host-sampling")
    model.device.graphs = False
    eager = [name for name, strategy in STRATEGIES.items() if strategy.capture == "none"]
    loaded(app)
    assert (list(app.decoding.a_field.options), list(app.decoding.b_field.options)) == (eager, ["(none)", *eager])
    assert (app.decoding.a_field.value, app.decoding.b_field.value) == ("roundtrip", "host-sampling")
    app.decoding.b_field.value = "(none)"
    model.only_loops, model.loops = "it has a loop of its own", {"hf-generate": None}
    loaded(app)
    assert (list(app.decoding.a_field.options), app.decoding.a_field.value, app.decoding.b_field.value) == (
        ["hf-generate"],
        "hf-generate",
        "(none)",
    )


def test_models_and_schemes_are_offered(app: Lab) -> None:
    assert {"demo/qwen3", "random/gemma4-31b"} <= set(app.loading.model_field.options)
    assert {"", "none", "q4_k_m", "int4"} <= {value for _, value in app.loading.scheme_field.options}


def test_filters_are_offered_unless_the_temperature_is_0(app: Lab) -> None:
    panel = app.decoding
    panel.top_k_field.value, panel.top_p_field.value = 5, 0.9
    for temperature, filters in ((0.8, {"top_k": 5, "top_p": 0.9}), (0.0, {"top_k": None, "top_p": None})):
        panel.temperature_field.value = temperature
        assert filters.items() <= panel._options().items()
        assert [one.disabled for one in (panel.top_k_field, panel.top_p_field)] == [temperature == 0] * 2


def test_one_strategy_and_neutral_sampling_options(app: Lab, model: SimpleNamespace) -> None:
    loaded(app).decoding.b_field.value = "(none)"
    app.decoding.tokens_field.value = 2
    app.generate()
    assert app.wait(SOON_S)
    options = {"temperature": 0.0, "top_k": None, "top_p": None, "seed": 0}
    assert model.calls == [("roundtrip", False, options), ("roundtrip", True, options)]
    assert len(app.decoding.timeline_box.children[0].scene.tracks) == 1


def test_text_streams_at_most_ten_times_a_second_and_a_last_time(
    app: Lab, model: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded(app).decoding.b_field.value = "(none)"
    app.decoding.tokens_field.value = 200
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("toolkit.ui.lab.work.time", SimpleNamespace(monotonic=lambda: clock.now))

    def pause() -> None:
        clock.now += 0.004

    model.pause = pause
    seen: list[tuple[float, str]] = []
    app.decoding.output.observe(lambda change: seen.append((clock.now, change["new"])), "value")
    app.generate()
    assert app.wait(SOON_S)
    streamed = seen[1:-1]
    assert len(streamed) >= 3
    gaps = [b[0] - a[0] for a, b in pairwise(streamed)]
    assert min(gaps) > 0.1
    assert seen[-1][1].count("tick") == 200


def test_cancel_keeps_the_text_and_skips_the_second_strategy(app: Lab, model: SimpleNamespace) -> None:
    loaded(app)
    gate, app.decoding.tokens_field.value = held(model, 5), 4000
    app.generate()
    assert gate.reached.wait(SOON_S)
    app.work.cancel_button.click()
    app.work.cancel_button.click()
    gate.opened.set()
    assert app.wait(SOON_S)
    assert app.run.stop_reason == "cancelled"
    assert "tick" in app.decoding.output.value
    assert "(roundtrip was not recorded, double-buffered was not started)" in app.decoding.status.value
    assert not app.history.entries
    assert "Generating: cancelled after" in app.work.text.value
    app.decoding.tokens_field.value = 3
    app.generate()  # the next one is not cancelled by the last press
    assert app.wait(SOON_S)
    assert app.run.stop_reason == "length"


def test_double_clicks_are_ignored(app: Lab, model: SimpleNamespace) -> None:
    loaded(app).decoding.b_field.value = "(none)"
    gate, app.decoding.tokens_field.value = held(model), 20
    for _ in range(5):
        app.decoding.generate_button.click()
        app.loading.load_button.click()
    gate.opened.set()
    assert app.wait(SOON_S)
    assert len(model.calls) == 2  # one without recording, and one recorded
    gate, threads = held(model), [threading.Thread(target=app.generate) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gate.opened.set()
    assert app.wait(SOON_S)
    assert len(model.calls) == 4


def cancelled_at(app: Lab, gate: Gate, status: str) -> None:
    """Generate, and cancel at the gate, where the status says so."""
    app.generate()
    assert gate.reached.wait(SOON_S)
    assert status in app.decoding.status.value
    app.cancel()
    gate.opened.set()
    assert app.wait(SOON_S)


def test_work_that_cancel_does_not_stop_is_done(app: Lab) -> None:
    under_way, go_on = threading.Event(), threading.Event()
    app.work.run("Saving", lambda: (under_way.set(), go_on.wait(SOON_S)), app.loading.status)
    assert under_way.wait(SOON_S)
    app.cancel()
    assert "Cancelling" in app.work.text.value
    go_on.set()
    assert app.wait(SOON_S)
    assert "Saving: done after" in app.work.text.value


def test_cancel_while_recording_keeps_what_was_recorded(app: Lab, model: SimpleNamespace) -> None:
    loaded(app)
    app.decoding.tokens_field.value = 50
    cancelled_at(app, held(model, 2 * 50 + 10), "Recording <b>roundtrip")  # both strategies are timed before
    assert "(roundtrip was not recorded, double-buffered was not recorded)" in app.decoding.status.value
    assert not app.history.entries
    assert {run.tokens for run in app.runs.values()} == {tuple(range(50))}  # those of the runs before
    cancelled_at(app, held(model, 3 * 50 + 10), "Recording <b>double-buffered")
    assert "(double-buffered was not recorded)" in app.decoding.status.value
    assert [entry.title for entry in app.history.entries.values()] == ["roundtrip, demo/qwen3"]
    assert app.runs["double-buffered"].tokens == tuple(range(50))
    assert app.decoding.timeline_box.children


def test_an_error_says_asked_found_do_and_is_kept(app: Lab) -> None:
    loaded(app).decoding.prompt_field.value = "fail"
    app.generate()
    assert app.wait(SOON_S)
    assert "no &lt;more&gt;" in app.decoding.status.value
    assert "Ask for less" in app.decoding.status.value
    assert isinstance(app.error, ToolkitError)
    assert "tick" in app.decoding.output.value  # what was said before the error stays
    assert not app.decoding.generate_button.disabled


@pytest.mark.parametrize("short", ["roundtrip", "double-buffered"])
def test_a_shortage_of_memory_is_measured_and_explained(app: Lab, monkeypatch: pytest.MonkeyPatch, short: str) -> None:
    """Last, because measuring another run would replace the explanation."""
    calls = []

    def generate(model, prompt, decode, *, record=True, **options):
        calls.append((decode, record))
        if decode == short:
            raise torch.OutOfMemoryError("out of memory")
        return stand_in_generate(model, prompt, decode, record=record, **options)

    generates(monkeypatch, generate)
    loaded(app).decoding.tokens_field.value = 2
    app.generate()
    assert app.wait(SOON_S)
    before = [] if short == "roundtrip" else [("roundtrip", False)]
    assert calls == [*before, (short, False), *((name, True) for name, _ in before), (short, True)]
    assert isinstance(app.error, torch.OutOfMemoryError)
    assert len(app.history.entries) == len(before)
    assert "Recording" not in app.decoding.status.value


def test_a_limit_of_no_tokens_is_an_error(app: Lab, model: SimpleNamespace) -> None:
    loaded(app).decoding.tokens_field.value = 0
    app.generate()
    assert app.wait(SOON_S)
    assert "at least 1" in app.decoding.status.value
    assert model.calls == []


def test_while_a_cell_records_the_last_runs_stay(app: Lab, model: SimpleNamespace) -> None:
    loaded(app).generate()
    assert app.wait(SOON_S)
    runs, entries = dict(app.runs), dict(app.history.entries)
    model.device.recording = object()
    app.generate()
    assert app.wait(SOON_S)
    assert runs
    assert "virtual:h200 is being recorded" in app.decoding.status.value
    assert (app.runs, app.history.entries) == (runs, entries)


def test_a_failure_of_b_leaves_the_run_of_a(app: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(model, prompt, decode, **options):
        if decode == "double-buffered":
            raise ToolkitError("a token", "no more", "Ask for less")
        return stand_in_generate(model, prompt, decode, **options)

    generates(monkeypatch, generate)
    loaded(app).decoding.tokens_field.value = 2
    app.generate()
    assert app.wait(SOON_S)
    assert "no more" in app.decoding.status.value
    assert len(app.decoding.timeline_box.children[0].scene.tracks) == 1
    assert "(stopped after 0 tokens)" in app.decoding.output.value
    assert app.traces.a_field.options == (("1: roundtrip, demo/qwen3", 1),)
    app.traces.a_field.options = ()  # none is chosen
    app.traces.file_field.value = "kept"
    assert [name for name, _ in app.traces.code.snippets] == ["Open"]


def test_other_fields_after_a_load_change_nothing_that_was_loaded(app: Lab) -> None:
    loaded(app)
    app.loading.model_field.value, app.loading.scheme_field.value, app.loading.device_field.value = "missing", "int4", "cpu"
    assert "device='cpu', scheme='int4'" in app.loading.code.snippets[0][1]
    ((_, code),) = app.decoding.code.snippets
    assert "model = tk.load('demo/qwen3', device='virtual:h200')" in code
    app.decoding.tokens_field.value = 2
    app.generate()
    assert app.wait(SOON_S)
    app._loaded()
    assert "demo/qwen3 on virtual:h200" in app.state.value
    assert [entry.title for entry in app.history.entries.values()] == ["roundtrip, demo/qwen3", "double-buffered, demo/qwen3"]
    assert {entry.setup for entry in app.history.entries.values()} == {"model = tk.load('demo/qwen3', device='virtual:h200')"}


@pytest.mark.parametrize("name", ["/", ".", "..", "out/..", "~no-such-user"])
def test_a_path_without_a_file_name_is_an_error_and_has_no_code(app: Lab, name: str) -> None:
    with pytest.raises(ToolkitError, match=r"Type a path|Add the name"):
        path_of(name, ".html")
    app.history.add("a", decode_loop(), None, "tk.open_trace('a')")
    app.traces.refresh()
    for panel in (app.memory, app.traces):
        before = [action for action, _ in panel.code.snippets]
        panel.file_field.value = name
        assert [action for action, _ in panel.code.snippets] == [action for action in before if "Save" not in action]


def test_a_late_clock_does_not_draw_over_the_end(app: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    drawing, ended = threading.Event(), threading.Event()

    def tick(_: threading.Event) -> None:
        drawing.set()
        ended.wait(SOON_S)
        time.sleep(0.05)
        app.work.draw()

    monkeypatch.setattr(app.work, "_tick", tick)
    app.work.run("Waiting", lambda: (drawing.wait(SOON_S), ended.set()), app.loading.status)
    assert app.wait(SOON_S)
    time.sleep(0.1)
    assert "Waiting: done after" in app.work.text.value


def test_a_failed_load_leaves_no_model(app: Lab) -> None:
    loaded(app).loading.model_field.value = BROKEN
    app.load()
    assert app.wait(SOON_S)
    assert app.model is None
    assert "No model is loaded" in app.decoding.status.value
    assert "Check the path" in app.loading.status.value
    assert app.error.__traceback__ is None


def test_a_load_that_fails_for_generate_does_not_seem_to_go_on(app: Lab) -> None:
    app.loading.model_field.value = BROKEN
    app.generate()
    assert app.wait(SOON_S)
    assert "Check the path" in app.decoding.status.value
    assert "Nothing is loaded" in app.loading.status.value


@pytest.mark.parametrize(("device", "path", "told"), [
    ("virtual:h2000", "demo/qwen3", "h2000"), ("virtual:2xh2000", "demo/qwen3", "h2000"),
    ("virtual:65xh200", "demo/qwen3", "from 1 to 64"), ("64xcuda", "demo/qwen3", "they need no hardware"),
    ("virtual:h200", "demo/qwen", "demo/qwen"), ("virtual:h200", "random/qwen", "random/qwen3-8b"),
    ("virtual:h200", "no/such/model.gguf", "no/such/model.gguf"),
])  # fmt: skip
def test_a_mistyped_name_keeps_the_model(app: Lab, model: SimpleNamespace, device: str, path: str, told: str) -> None:
    loaded(app)
    refused(app, model, device, path, told)
    app.decoding.tokens_field.value = 2
    app.generate()
    assert app.wait(SOON_S)
    assert app.error is None


@pytest.mark.parametrize(("name", "content", "told"), [
    ("damaged.gguf", b"GGUF\x03\x00\x00\x00\x05", "damaged.gguf"), ("model/config.json", b'{"model_type": "gpt2"}', "gpt2"),
    ("model/config.json", b'{"model_type": "qwen3"', "config.json"),
])  # fmt: skip
def test_a_damaged_file_keeps_the_model(
    app: Lab, model: SimpleNamespace, tmp_path: Path, name: str, content: bytes, told: str
) -> None:
    loaded(app)
    (tmp_path / "model").mkdir()
    (tmp_path / name).write_bytes(content)
    refused(app, model, "virtual:h200", str(tmp_path / name).removesuffix("/config.json"), told)


@pytest.mark.parametrize(("device", "path", "told"), [
    ("virtual:rtx-5090", "random/qwen3-235b-a22b", "Use a larger card"),
    ("virtual:1MiB", "demo/qwen3", "virtual:1MiB has 1.00 MiB<"),
    ("virtual:2xrtx-5090", "random/qwen3-235b-a22b", "Use a larger card"),
])  # fmt: skip
def test_a_model_that_never_fits_keeps_the_model(app: Lab, model: SimpleNamespace, device: str, path: str, told: str) -> None:
    loaded(app)
    refused(app, model, device, path, told)


def refused(app: Lab, model: SimpleNamespace, device: str, path: str, told: str) -> None:
    """Press Load for `path`, which fails as `told`. The loaded model stays."""
    app.loading.device_field.value, app.loading.model_field.value = device, path
    app.load()
    assert app.wait(SOON_S)
    assert isinstance(app.error, ToolkitError)
    assert told in app.loading.status.value
    assert app.model is model
    assert "demo/qwen3 on virtual:h200" in app.state.value
    assert app.loading.model_view.value


def test_cancel_ends_a_load(app: Lab, model: SimpleNamespace) -> None:
    gate = held(model)
    app.load()
    assert gate.reached.wait(SOON_S)
    app.cancel()
    gate.opened.set()
    assert app.wait(SOON_S)
    assert app.model is None
    assert "Cancelled" in app.loading.status.value
    assert app.error is None


def test_other_errors_are_named_without_a_wall() -> None:
    text = error_html(RuntimeError("boom <b>" + "x" * 5000))
    assert "RuntimeError: boom &lt;b&gt;" in text
    assert len(text) < 1000
    assert "no message" in error_html(KeyboardInterrupt())


def test_text_of_a_file_is_not_run_as_html() -> None:
    bad = "<img src=x onerror=alert()>"
    trace = decode_loop()
    run = Run("", (1, 2), (), bad, "length", 5.0, bad, bad, trace, slowed=bad)
    table = copies_html(
        [Entry(1, bad, trace, run, ""), Entry(2, bad, Trace(trace.columns, trace.strings, {"clock": bad}), None, "")]
    )
    assert "&lt;img" in table
    assert "<img" not in table


def test_table_of_a_run_without_decode_steps() -> None:
    trace = decode_loop(steps=1, clock="measured")
    run = Run("", (1,), (), "roundtrip", "length", None, "measured", "cpu", trace)
    assert "<td>-</td>" in copies_html([Entry(1, "a <run>", run.trace, run, "")])


def test_tokens_are_compared_for_one_prompt_and_model() -> None:
    def entry(tokens: tuple[int, ...], prompt: tuple[int, ...] = (7,), model: str = "demo/qwen3") -> Entry:
        run = Run("", tokens, prompt, "roundtrip", "length", None, "measured", "cpu", trace)
        return Entry(1, "a", trace, run, "", model=model)

    trace = decode_loop()
    others = {
        "yes": [entry((1,)), entry((1,), model="")],
        "no": [entry((2,)), entry((2,), model="")],
        "-": [entry((2,), (8,)), entry((2,), model="demo/gemma4"), Entry(1, "a", trace, None, "")],
    }
    for same, entries in others.items():
        for other in entries:
            assert f"</small></td><td>{same}</td>" in copies_html([entry((1,)), other]).rpartition("<tr>")[2]


def test_why_a_text_ended_is_as_a_run_says_it() -> None:
    run = Run("", (1,), (), "roundtrip", "length", None, "measured", "cpu")
    assert _ended(run) == "1 token, reached max tokens"
    full = replace(run, context_full=True)
    assert _ended(full) == "1 token, the context is full"
    assert "stopped by length (the context is full)" in repr(full)


def test_table_of_runs_counts_kernels_and_launches() -> None:
    builder = TraceBuilder()
    for start in (0, 100):
        builder.add("launch", start, 1, device=-1, step=start // 100, name="cudaLaunchKernel")
        builder.add("kernel", start + 2, 5, stream=0, step=start // 100, name="matmul")
        builder.add("kernel", start + 9, 5, stream=0, step=start // 100, name="norm")
    launched, without = (copies_html([Entry(1, "a", trace, None, "")]) for trace in (builder.build({}), decode_loop()))
    assert "<td>2</td><td>1</td>" in launched
    assert "<td>12</td><td>-</td>" in without


def test_high_rates_have_no_exponent() -> None:
    run = Run("", (1, 2), (), "whole-loop", "length", 15436.2, "modelled", "virtual:h200", decode_loop(), slowed="")
    assert run.rate_text == "15,436 tok/s modelled"
    assert "<td>15,436<br>modelled</td>" in copies_html([Entry(1, "a", run.trace, run, "")])


class Work(Reporter):
    """Half of some work, long enough for a bar."""

    def __init__(self) -> None:
        super().__init__("loading", True, None, "")
        self._bar = CellProgress(self)
        self._bar._began -= 1
        self.report((), 0.5, "1 of 2", "")


@pytest.mark.parametrize(("then", "how"), [
    ("raise KeyboardInterrupt", "interrupted"), ("pass", "stopped"), ("work.report((), 1.0, '2 of 2', '', end=True)", "done"),
])  # fmt: skip
def test_a_bar_in_a_cell_says_how_its_work_ended(then: str, how: str) -> None:
    shell = InteractiveShell.instance()
    shell.user_ns["Work"] = Work
    shell.run_cell(f"work = Work()\n{then}")
    bar = shell.user_ns["work"]._bar
    assert f"Loading (Interrupt cancels): {how} after" in bar._bar.text.value
    assert bar._left not in shell.events.callbacks["post_run_cell"]


def test_the_time_left_is_that_of_the_load_and_not_of_its_download(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 100.0, 110.0])
    monkeypatch.setattr("toolkit.ui.progress.time", SimpleNamespace(monotonic=lambda: next(clock)))
    bar = ProgressBar(lambda: None)
    bar.begin("Loading", 0.0)
    bar.bar.value = 1.0  # the download has ended
    bar.share(1, 10)
    bar.share(5, 10)
    assert bar.text.value == "Loading: 50 %, 110 s, about 10 s left"


def test_closing_stops_the_work(app: Lab, model: SimpleNamespace) -> None:
    loaded(app)
    gate, app.decoding.tokens_field.value = held(model, 5), 4000
    app.generate()
    assert gate.reached.wait(SOON_S)
    app.close()
    gate.opened.set()
    assert app.wait(SOON_S)
    assert gate.count == 5


def test_a_cell_may_go_through_the_runs_while_more_are_added(app: Lab, model: SimpleNamespace) -> None:
    loaded(app)
    app.decoding.tokens_field.value = 50
    gate = held(model, 50 + 10)  # of the second strategy
    app.generate()
    assert gate.reached.wait(SOON_S)
    runs = iter(app.runs)
    gate.opened.set()
    assert app.wait(SOON_S)
    assert list(runs) == ["roundtrip"]
    assert list(app.runs) == ["roundtrip", "double-buffered"]


@pytest.mark.parametrize("act", [Lab._say_state, lambda app: app.decoding.code.update()])
def test_a_model_may_be_unloaded_while_the_kernel_names_it(
    app: Lab, monkeypatch: pytest.MonkeyPatch, model: SimpleNamespace, act: Callable[[Lab], object]
) -> None:
    """Another Lab's work unloads it, or a load of this one does."""
    loaded(app)
    reads = iter([model])
    monkeypatch.setattr(load_panel.LoadPanel, "model", property(lambda _: next(reads, None)), raising=False)
    act(app)


@pytest.mark.parametrize("end", [Lab.cancel, Lab.close])
def test_a_load_that_ends_after_it_was_cancelled_leaves_no_model(
    app: Lab, monkeypatch: pytest.MonkeyPatch, model: SimpleNamespace, end: Callable[[Lab], None]
) -> None:
    """One that doesn't ask, such as that of a model of Hugging Face. Out[] may hold a Lab that was closed."""

    def load(path: str, **options: object) -> SimpleNamespace:
        end(app)
        return model

    monkeypatch.setattr(load_panel, "load", load)
    app.load()
    assert app.wait(SOON_S)
    assert (app.error, app.model, app.loading.loaded, app.loading.model_view.value) == (None, None, None, "")
    assert "Cancelled" in app.loading.status.value


def test_work_that_ends_after_its_lab_was_closed_opens_no_timeline(app: Lab, model: SimpleNamespace) -> None:
    """An open one would hold all events of its run until the kernel ends."""
    loaded(app)
    app.decoding.tokens_field.value = 50
    gate = held(model, 3 * 50 + 10)
    app.generate()
    assert gate.reached.wait(SOON_S)
    app.close()
    gate.opened.set()
    assert app.wait(SOON_S)
    assert len(app.history.entries) == 1
    assert app.decoding.timeline_box.children == ()


def test_a_closed_lab_holds_no_memory(app: Lab) -> None:
    """ipywidgets holds every widget that is open, and so did the buttons of a closed Lab its model."""
    other = Lab()
    loaded(other)
    other.generate()
    assert other.wait(10)
    lost = weakref.ref(other)
    other.close()
    del other
    gc.collect()
    assert lost() is None


def test_a_new_run_closes_the_timeline_of_the_last_one(app: Lab) -> None:
    """An open one would hold all events of its run until the kernel ends."""
    loaded(app)
    shown = []
    for _ in range(2):
        app.generate()
        assert app.wait(10)
        shown += app.decoding.timeline_box.children
    assert [timeline.comm is None for timeline in shown] == [True, False]
    assert shown[0].layout.comm is None


def test_an_empty_model_field_is_named(app: Lab) -> None:
    app.loading.model_field.value = " "
    app.load()
    assert app.wait(SOON_S)
    assert "field is empty" in app.loading.status.value


def test_another_card_makes_other_labs_let_go(monkeypatch: pytest.MonkeyPatch, app: Lab, model: SimpleNamespace) -> None:
    loaded(app)

    def open_device(name: str) -> Device:
        if app.model is not None:
            raise DeviceError(f"opening {name}", "live tensors", "Delete them first")
        return Device()

    monkeypatch.setattr(load_panel, "open_device", open_device)
    second = Lab(device="virtual:rtx-5090")
    second.load()
    assert second.wait(SOON_S)
    assert second.error is None
    assert second.model is model
    assert app.model is None
    assert "No model is loaded" in app.decoding.status.value
    assert "another Lab opened virtual:rtx-5090" in app.loading.status.value
    app.loading.device_field.value = "cuda"  # what fails for another reason takes nothing away
    monkeypatch.setattr(load_panel, "open_device", lambda name: (_ for _ in ()).throw(DeviceError(name, "no CUDA", "")))
    app.load()
    assert app.wait(SOON_S)
    assert second.model is model


def test_one_of_several_labs_loads_or_generates_at_a_time(app: Lab, model: SimpleNamespace) -> None:
    """They share the device: its clock would add up the work of both, and two recordings can't be made at once."""
    loaded(app).decoding.b_field.value = "(none)"
    third = loaded(Lab())
    second = loaded(Lab())
    gate, second.decoding.a_field.value, second.decoding.b_field.value = held(model), "host-sampling", "(none)"
    app.generate()
    assert gate.reached.wait(SOON_S)
    second.generate()
    third.load()
    for other in (second, third):
        for _ in range(SOON_S * 100):
            if "waiting for another Lab" in other.work.text.value:
                break
            time.sleep(0.01)
        assert "waiting for another Lab" in other.work.text.value
    third.cancel()
    assert third.wait(SOON_S)
    assert "Cancelled. It was waiting for another Lab." in third.loading.status.value
    assert third.model is model
    gate.opened.set()
    assert app.wait(SOON_S)
    assert second.wait(SOON_S)
    assert [strategy for strategy, *_ in model.calls] == ["roundtrip"] * 2 + ["host-sampling"] * 2
    assert app.error is second.error is None


def test_without_a_tokenizer_the_prompt_is_token_ids() -> None:
    bare, speaking = SimpleNamespace(tokenizer=None), SimpleNamespace(tokenizer=object())
    assert prompt_of("1, 2 30", bare) == [1, 2, 30]
    assert prompt_of("1, 2 30", speaking) == "1, 2 30"
    for text in ("", "The capital", "1.5", "-3", "\u0663"):
        with pytest.raises(ToolkitError, match="1 2 3 4"):
            prompt_of(text, bare)
