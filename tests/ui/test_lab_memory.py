"""Tests of the Lab's Memory panel without a browser, with the demo model on a virtual GPU."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from toolkit.core.errors import CancelledError, DeviceError, ToolkitError
from toolkit.gpu.catalogue import CATALOGUE
from toolkit.gpu.opening import open_device
from toolkit.trace.opening import open_trace
from toolkit.ui.lab import memory_panel as module
from toolkit.ui.lab.app import Lab
from toolkit.ui.lab.memory_panel import MOST, MemoryPanel, hidden_html, measured_html, what_if_html
from toolkit.ui.memory.widget import MemoryTimeline
from toolkit.vram.hidden import Hidden
from toolkit.vram.measure import Scope, memory
from toolkit.vram.sessions import CellUse
from toolkit.vram.what_if import what_if


@pytest.fixture
def app() -> Iterator[Lab]:
    lab = Lab(device="virtual:h200", model="demo/qwen3")
    yield lab
    lab.close()
    lab.wait(20)
    lab.loading.model = None
    lab.memory.uses.clear()
    gc.collect()
    device = open_device("virtual:h200")
    if device.limit_bytes != device.memory().total_bytes:
        lab.memory._lift_budget()


def done(lab: Lab) -> None:
    assert lab.wait(120)


def press(lab: Lab, button) -> None:
    button.click()
    done(lab)


def generated(lab: Lab, tokens: int = 4) -> Lab:
    lab.load()
    done(lab)
    lab.decoding.tokens_field.value = tokens
    lab.generate()
    done(lab)
    assert lab.error is None
    return lab


def test_before_anything_the_panel_says_what_to_do(app: Lab) -> None:
    panel = app.memory
    assert "Every load and every generation" in panel.note.value
    assert panel.measured.table == ""
    assert panel.actions.layout.display == "none"
    assert app.work.cancel_button.disabled
    press(app, panel.cells_button)
    assert "%memory on" in panel.cells_status.value
    press(app, panel.look_button)
    assert "Nothing on a GPU" in panel.hidden_view.value


def test_loads_and_generations_are_measured_and_named(app: Lab) -> None:
    panel = generated(app).memory
    names = [what for what, _ in panel.uses.values()]
    assert names == ["load demo/qwen3", "generate, roundtrip, up to 4 tokens", "generate, double-buffered, up to 4 tokens"]
    (_, load), (_, run), _ = panel.uses.values()
    weights = sum(parameter.nbytes for parameter in app.model.parameters())
    assert load.kept_bytes >= weights
    assert load.baseline_bytes == 0
    assert {owner.split(".")[1] for owner in load.by("owner")["owner"] if owner.startswith("lab.")} == {"model"}
    assert run.baseline_bytes == load.end_bytes
    assert run.peak_bytes > run.baseline_bytes
    assert run.kept_bytes == 0
    assert panel.measured.table.count("<tr>") == 4
    assert panel.measured.table.index("double-buffered") < panel.measured.table.index("demo/qwen3")  # the last one first
    assert "virtual:h200" in panel.now.value
    assert "no budget" in panel.now.value


def test_a_row_opens_its_picture_and_what_was_held(app: Lab) -> None:
    panel = generated(app).memory
    panel.measured.chosen = 2
    timeline, table = panel.shown.children
    assert isinstance(timeline, MemoryTimeline)
    assert timeline.use is panel.uses[2][1]
    assert "Held at the peak" in table.value
    assert "lab.model" in table.value
    assert panel.actions.layout.display != "none"
    panel.measured.chosen = 1
    assert panel.shown.children[0].use is panel.uses[1][1]
    assert timeline.comm is None  # closed
    panel.measured.chosen = -1
    assert panel.shown.children == ()


def test_a_budget_is_set_refused_and_lifted(app: Lab) -> None:
    panel = app.memory
    panel.budget_field.value = "lots"
    press(app, panel.set_button)
    assert "24 GiB" in panel.budget_status.value
    assert panel.budget_field.value == "lots"
    panel.budget_field.value = "64 mib"
    press(app, panel.set_button)
    assert app.error is None
    assert open_device("virtual:h200").limit_bytes == 64 << 20
    assert "budget <b>64.0 MiB" in panel.now.value
    assert "tk-cap" in panel.now.value
    assert "<span>the bar ends at 80.0 MiB</span>" in panel.now.value
    app.load()
    done(app)
    panel.budget_field.value = "1 MiB"
    press(app, panel.set_button)
    assert "tk-error" in panel.budget_status.value
    assert open_device("virtual:h200").limit_bytes == 64 << 20  # the previous limit is unchanged
    press(app, panel.lift_button)
    assert "no budget" in panel.now.value
    assert open_device("virtual:h200").limit_bytes == open_device("virtual:h200").memory().total_bytes


def test_out_of_memory_in_a_load_says_who_held_what(app: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    # Skip the check, as if other processes had taken GPU memory between the check and the load.
    monkeypatch.setattr("toolkit.loading.loader.check_room", lambda *_: None)
    panel = app.memory
    panel.budget_field.value = "4 MiB"
    press(app, panel.set_button)
    app.load()
    done(app)
    assert app.model is None
    assert "tk-why" in app.loading.status.value
    assert "Allocated at that moment:" in app.loading.status.value
    _, use = panel.uses[1]
    assert use.shortage is not None
    assert "out of memory" in panel.measured.table
    panel.budget_field.value = "lots"
    press(app, panel.set_button)
    assert "tk-why" not in panel.budget_status.value  # of that error alone


def test_out_of_memory_in_a_generation_proposes_something(app: Lab, empty_card) -> None:
    app.loading.model_field.value, app.decoding.prompt_field.value = "random/qwen3-0.6b", " ".join(map(str, range(400)))
    app.decoding.b_field.value, panel = "(none)", app.memory
    app.load()
    done(app)
    panel.budget_field.value = f"{app.model.device.memory().reserved_bytes + (4 << 20)}"
    press(app, panel.set_button)
    app.generate()
    done(app)
    assert isinstance(app.error, torch.OutOfMemoryError)
    assert "What would help" in app.decoding.status.value
    assert "lab.model" in app.decoding.status.value
    held = app.model.device.memory().allocated_bytes
    weights = sum(parameter.nbytes for parameter in app.model.parameters())
    assert held < 1.02 * weights  # the error keeps nothing alive


def test_a_budget_says_what_it_cannot_limit(app: Lab, empty_card) -> None:
    freed, held = (torch.ones(9 << 18, device=empty_card.torch) for _ in range(2))  # in one segment of 20 MiB
    del freed
    app.memory.budget_field.value = "12 MiB"
    with pytest.warns(UserWarning, match="free parts"):
        press(app, app.memory.set_button)
    assert "errors list the holders. But the allocator holds 20.0 MiB" in app.memory.budget_status.value
    del held
    press(app, app.memory.set_button)
    assert app.memory.budget_status.value.endswith("errors list the holders.")


def test_a_cancelled_load_is_listed_as_that_and_holds_nothing(app: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path, device, **_):
        kept = torch.ones(1 << 20, device=device.torch)  # in the traceback of the error
        assert len(kept)
        raise CancelledError("loading", "it was cancelled", "Load it again")

    monkeypatch.setattr("toolkit.ui.lab.load_panel.load", load)
    gc.disable()
    try:
        app.load()
        done(app)
        assert open_device("virtual:h200").memory().allocated_bytes == 0
    finally:
        gc.enable()
    assert "<em>cancelled</em>" in app.memory.measured.table


def test_what_cannot_be_measured_runs_all_the_same(app: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(Scope):
        def __enter__(self):
            raise DeviceError("a history", "<another> tool keeps it", "Stop that")

    monkeypatch.setattr(module, "Scope", Refused)
    app.load()
    done(app)
    assert app.model is not None
    assert "&lt;another&gt; tool" in app.memory.note.value

    class Broken(Scope):
        def end(self, variables, error=None):
            super().end({}, error)
            raise RuntimeError("dictionary changed size during iteration")

    monkeypatch.setattr(module, "Scope", Broken)
    app.load()
    done(app)
    assert (app.error, app.memory.uses) == (None, {})
    assert "changed size" in app.memory.note.value


def test_what_if_says_which_gpus_would_have_done(app: Lab) -> None:
    app.loading.model_field.value = "random/gemma4-31b"
    app.load()
    done(app)
    panel = app.memory
    panel.measured.chosen = 1
    press(app, panel.what_if_button)
    assert app.error is None
    shown = panel.what_if_view.value
    assert all(gpu in shown for gpu in CATALOGUE)
    assert '<td>rtx-4090</td><td>23.6 GiB</td><td class="tk-no">fails</td><td class="tk-no">fails</td>' in shown
    assert '<td>h200</td><td>140 GiB</td><td class="tk-yes">fits</td>' in shown
    assert "requested by" in shown
    assert app.work.bar.layout.display == "none"
    app.work.cancelled.set()
    with pytest.raises(CancelledError):
        panel._what_if()


def test_another_row_chosen_during_what_if_shows_no_answer_of_the_first(app: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    panel = generated(app, 2).memory

    def slow(*args, **options):
        panel.measured.chosen = 2
        return what_if(*args, **options)

    monkeypatch.setattr(module, "what_if", slow)
    panel.measured.chosen = 1
    press(app, panel.what_if_button)
    assert app.error is None
    assert panel.shown.children[0].use is panel.uses[2][1]
    assert (panel.what_if_view.value, panel.status.value) == ("", "")
    press(app, panel.what_if_button)
    assert "generate, roundtrip" in panel.what_if_view.value


@pytest.mark.parametrize("act", [MemoryPanel._show, MemoryPanel._chosen])
def test_a_measurement_that_is_dropped_while_its_row_is_read_is_no_error(
    app: Lab, act: Callable[[MemoryPanel], object]
) -> None:
    """Work drops the oldest measurement while the kernel's main thread shows it."""
    panel = generated(app, 2).memory
    panel.measured.chosen = 1

    class Dropped(dict):
        def __contains__(self, number: object) -> bool:
            panel.uses = {n: use for n, use in self.items() if n > 1}
            return super().__contains__(number)

    panel.uses = Dropped(panel.uses)
    act(panel)


def test_saving_takes_the_name_as_it_is_meant(app: Lab, tmp_path: Path) -> None:
    panel = generated(app, 2).memory
    press(app, panel.page_button)
    assert "Choose a row" in panel.status.value
    panel.measured.chosen = 1
    panel.file_field.value = str(tmp_path / "run.2")
    press(app, panel.page_button)
    assert "<html" in (tmp_path / "run.2.html").read_text(encoding="utf-8")
    panel.file_field.value = str(tmp_path / "run.2.html")
    press(app, panel.snapshot_button)
    assert len(open_trace(tmp_path / "run.2.pickle"))
    assert str(tmp_path) in panel.status.value
    for name in (" ", str(tmp_path / "none" / "x")):
        panel.file_field.value = name
        for button in (panel.page_button, panel.snapshot_button):
            press(app, button)
            assert "tk-error" in panel.status.value
    assert not list(tmp_path.glob(".toolkit-*"))


def test_hidden_memory_is_listed_and_released(app: Lab) -> None:
    gpu = open_device("virtual:h200")

    def fails() -> None:
        lost = torch.ones(1 << 18, device=gpu.torch)
        raise ValueError(len(lost))

    try:
        fails()
    except ValueError as error:
        sys.last_exc = error  # as a notebook leaves it; releasing takes it away
    press(app, app.memory.look_button)
    assert "lost in fails() (the traceback of ValueError)" in app.memory.hidden_view.value
    assert "1.00 MiB in all" in app.memory.hidden_view.value
    press(app, app.memory.release_button)
    assert "Released 1.00 MiB" in app.memory.hidden_view.value
    assert gpu.memory().allocated_bytes == 0


def test_the_model_of_the_lab_is_not_hidden(app: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    generated(app, 2)
    shell = SimpleNamespace(user_ns={"Out": {1: app}, "_": app}, user_ns_hidden={})
    monkeypatch.setattr(module, "ipython_shell", lambda: shell)
    press(app, app.memory.look_button)
    assert "Nothing on a GPU is held without a variable." in app.memory.hidden_view.value


def test_the_cells_of_a_session_are_shown(app: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = open_device("virtual:h200")
    with memory(gpu) as use:
        torch.ones(1 << 18, device=gpu.torch)
    cells = [
        CellUse(n, f"<{n}>", "ok", "gpu", 0, use.peak_bytes, 0, 0, 0, 0, 0.0, 0.0, str(tmp_path / "gone.trace")) for n in (1, 2)
    ]
    vars(cells[0])["use"] = use
    magics = SimpleNamespace(session=SimpleNamespace(cells=cells), budget_bytes=None, recorder=object())
    monkeypatch.setattr(module, "_magics", lambda: magics)
    press(app, app.memory.cells_button)
    assert app.error is None
    assert "2 cells measured" in app.memory.cells_status.value
    assert "tk-session" in app.memory.cells_view.value
    assert "gone.trace" in app.memory.cells_view.value  # that one's error, and the other's picture
    assert "tk-picture" in app.memory.cells_view.value
    app.work.cancelled.set()
    with pytest.raises(CancelledError):
        app.memory._show_cells()


def test_on_the_cpu_there_is_nothing_to_count(app: Lab) -> None:
    app.loading.device_field.value = "cpu"
    app.load()
    done(app)
    assert app.error is None
    assert "isn't counted" in app.memory.now.value
    app.memory.measured.chosen = 1
    assert "only host memory" in app.memory.shown.children[0].value
    press(app, app.memory.what_if_button)
    assert "no allocations" in app.memory.status.value


def test_only_the_last_measurements_are_kept(app: Lab) -> None:
    gpu, panel = open_device("virtual:h200"), app.memory
    for n in range(MOST + 2):
        with panel.measuring(f"<{n}>", gpu):
            torch.ones(8, device=gpu.torch)
        panel.measured.chosen = 1
    assert list(panel.uses) == list(range(3, MOST + 3))
    assert f"last {MOST}" in panel.note.value
    assert f"&lt;{MOST + 1}&gt;" in panel.measured.table
    assert panel.shown.children == ()  # the chosen one is gone


def test_texts_are_escaped_and_empty_tables_say_so() -> None:
    assert "tk-wrap" in measured_html({})
    assert "Nothing" in hidden_html([])
    assert "&lt;x&gt;" in hidden_html([Hidden(8, "<x>", None), Hidden(16, "y", "cell 1")])
    gpu = open_device("virtual:h200")
    with memory(gpu) as use:
        torch.ones(1 << 18, device=gpu.torch)
    assert "&lt;b&gt;" in what_if_html("<b>", {"by default": what_if(use.trace, ["l4"]).to_dict("records")[:1]})
    with pytest.raises(ToolkitError):
        what_if(use.trace, ["nothing"])
