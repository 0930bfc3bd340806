"""Tests of the Lab's work while its end is shown: what is pressed, changed or cancelled then, and what another Lab may do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import ipywidgets as widgets
import pytest

from toolkit.core.errors import DeviceError
from toolkit.ui.lab import load_panel
from toolkit.ui.lab.app import Lab
from toolkit.ui.lab.code import CopyAsCode

SOON_S = 60  # on a machine that is busy with other tests


@pytest.fixture
def app() -> Iterator[Lab]:
    lab = Lab()
    yield lab
    lab.close()


def in_the_kernel(call: Callable[[], object]) -> None:
    """Call as the kernel's main thread does, which isn't the thread of the work."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(SOON_S)
    assert not thread.is_alive()


def at_the_end(app: Lab, monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    """Call in the kernel's main thread when the next work has ended and the buttons are enabled, before its thread ends."""
    said, calls = app._say_state, iter([call])

    def say_state() -> None:
        said()
        if threading.current_thread() is app.work._worker:
            in_the_kernel(next(calls, lambda: None))

    monkeypatch.setattr(app, "_say_state", say_state)


def test_a_button_that_is_pressed_as_soon_as_it_is_enabled_begins_its_work(app: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def press() -> None:
        assert not app.memory.look_button.disabled
        app.memory.look_button.click()

    at_the_end(app, monkeypatch, press)
    app.memory.refresh_button.click()
    assert app.wait(SOON_S)
    assert "Nothing on a GPU" in app.memory.hidden_view.value
    assert not app.memory.look_button.disabled
    app.memory.hidden_view.value = ""
    app.memory.refresh_button.click()  # it is not begun again
    assert app.wait(SOON_S)
    assert app.memory.hidden_view.value == ""


def test_a_field_that_changes_when_a_plan_has_ended_is_planned_again(app: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    at_the_end(app, monkeypatch, lambda: setattr(app.plan.context_field, "value", 512))
    app.plan.plan_button.click()
    assert app.wait(SOON_S)
    assert app.error is None
    assert app.plan.plan is not None
    assert app.plan.plan.context == 512
    assert "it fits" in app.plan.status.value


def test_generate_names_the_model_that_is_chosen_while_other_work_runs(app: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def costs(path: str, scheme: str | None) -> SimpleNamespace:
        in_the_kernel(lambda: setattr(app.loading.model_field, "value", "demo/gemma4"))
        return SimpleNamespace(_repr_html_=lambda: "")

    monkeypatch.setattr(load_panel, "costs", costs)
    app.loading.look()
    assert app.wait(SOON_S)
    assert app.error is None
    assert "Generate loads <b>demo/gemma4</b> onto" in app.decoding.status.value


def test_wait_waits_for_what_was_asked_for_at_the_end(app: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    enable, waited = app.memory.enable, list[bool]()

    def enabled(idle: bool) -> None:
        enable(idle)
        if not idle and threading.current_thread() is not threading.main_thread():
            in_the_kernel(lambda: waited.append(app.wait(0.01)))

    at_the_end(app, monkeypatch, app.memory.look_button.click)
    monkeypatch.setattr(app.memory, "enable", enabled)
    app.memory.refresh_button.click()
    assert app.wait(SOON_S)
    assert waited == [False]
    assert "Nothing on a GPU" in app.memory.hidden_view.value


def test_work_that_has_ended_is_not_cancelled(app: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    at_the_end(app, monkeypatch, app.work.cancel_button.click)
    app.memory.refresh_button.click()
    assert app.wait(SOON_S)
    assert "Looking: done after" in app.work.text.value


def test_code_is_that_of_the_fields_when_it_is_written_twice_at_once() -> None:
    field, wrote, threads = widgets.Text("before"), threading.Event(), list[threading.Thread]()

    def snippets() -> dict[str, str]:
        found = field.value
        if found == "before" and code is not None and not threads:
            threads.append(threading.Thread(target=lambda: (setattr(field, "value", "after"), wrote.set())))
            threads[0].start()
            wrote.wait(0.3)  # longer than it takes, unless it waits for this
        return {"Load": found}

    code = None
    code = CopyAsCode(snippets, [field])
    code.update()
    threads[0].join(SOON_S)
    assert code.snippets == [["Load", "import toolkit as tk\n\nafter"]]


def test_another_lab_waits_until_the_end_is_shown(app: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the model away of a Lab that isn't busy, and would fail beside one that still is."""
    other, device = Lab(), SimpleNamespace(name="virtual:h200", memory=lambda: SimpleNamespace(total_bytes=0))
    model = SimpleNamespace(device=device)

    def open_device(name: str) -> SimpleNamespace:
        if app.model is not None:
            raise DeviceError(f"opening {name}", "live tensors", "Delete them first")
        return device

    def load(path: str, **options: object) -> SimpleNamespace:
        other.load()  # it waits for its turn; once it has that, this does nothing
        return model

    monkeypatch.setattr(load_panel, "open_device", open_device)
    monkeypatch.setattr(load_panel, "load", load)
    monkeypatch.setattr(load_panel, "html_of", lambda model: "")
    for lab in (app, other):
        monkeypatch.setattr(lab.decoding, "refresh", lambda: None)
    at_the_end(app, monkeypatch, lambda: other.wait(1))  # as long as it takes to show the end on a slow machine
    app.load()
    assert app.wait(SOON_S)
    assert app.error is None
    assert other.wait(SOON_S)
    assert other.error is None
    assert (app.model, other.model) == (None, model)
    other.close()
