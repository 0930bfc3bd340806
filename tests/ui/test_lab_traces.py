"""Tests of the Lab's history, its Traces panel, and "Copy as code", without a browser, with the demo model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from synthetic import decode_loop

import toolkit as tk
from toolkit.core.errors import TraceError
from toolkit.decode.run import run_of
from toolkit.trace.events import Trace
from toolkit.ui.lab.app import Lab
from toolkit.ui.lab.history import MOST, Entry, History
from toolkit.ui.lab.traces_panel import _made


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """A Lab after Start, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    lab = Lab()
    lab.decoding.tokens_field.value = 3
    lab.start()
    assert lab.wait(120)
    assert lab.error is None
    yield lab
    lab.close()
    lab.loading.model = None
    lab.memory.uses.clear()


def press(lab: Lab, button) -> str:
    button.click()
    assert lab.wait(60)
    return lab.traces.status.value


def test_any_two_runs_are_compared_saved_and_opened_again(app: Lab, tmp_path: Path) -> None:
    panel = app.traces
    labels = [label for label, _ in panel.a_field.options]
    assert labels == ["2: double-buffered, demo/qwen3", "1: roundtrip, demo/qwen3"]
    assert (panel.a_field.value, panel.b_field.value) == (1, 2)
    assert "next to" in press(app, panel.show_button)
    assert "2 (16 B)" in panel.table.value
    assert [track.title for track in panel.timeline_box.children[0].scene.tracks] == ["roundtrip", "double-buffered"]
    panel.file_field.value = "kept.html"
    assert str(tmp_path / "kept.html") in press(app, panel.page_button)
    assert "double-buffered" in (tmp_path / "kept.html").read_text(encoding="utf-8")
    assert str(tmp_path / "kept.trace") in press(app, panel.save_button)
    assert "kept.trace" in panel.open_field.options
    trace = tk.open_trace(tmp_path / "kept.trace")
    assert (run_of(trace).tokens, run_of(trace).text) == (app.runs["roundtrip"].tokens, app.runs["roundtrip"].text)
    with pytest.raises(TraceError, match="damaged"):
        run_of(Trace(trace.columns, trace.strings, {"run": {**trace.meta["run"], "tokens": "none"}}))
    decode_loop().save(tmp_path / "other.trace")
    for name, found in (("kept.trace", "yes"), ("other.trace", "-")):  # a run with its tokens, and a trace
        panel.open_field.value = name
        press(app, panel.open_button)
        assert app.error is None
        row = panel.list_view.value.partition(f": {name}<br>")[2].partition("</tr>")[0]
        assert f"<td>{found}</td>" in row
        assert name in panel.timeline_box.children[0].scene.tracks[0].title or name == "kept.trace"


def test_the_empty_state_names_a_trace_that_opens() -> None:
    lab = Lab()
    found = re.search(r"<code>(.*?)</code>", lab.traces.list_view.value)
    assert found
    lab.traces.open_field.value = found[1]
    press(lab, lab.traces.open_button)
    assert lab.error is None
    assert f"<td>1: {found[1]}<br>" in lab.traces.list_view.value  # not only the last part, which several of them share
    assert lab.traces.timeline_box.children[0].scene.tracks[0].clock == "measured"
    lab.close()


def test_errors_are_shown_in_the_panel(app: Lab, tmp_path: Path) -> None:
    panel = app.traces
    assert "file field is empty" in press(app, panel.open_button)
    panel.open_field.value = "missing.trace"
    assert "tk-error" in press(app, panel.open_button)
    panel.file_field.value = " "
    for button in (panel.page_button, panel.save_button):
        assert "file field is empty" in press(app, button)
    fresh = Lab().traces
    fresh.show()
    assert fresh._work.wait(10)
    assert "none is chosen" in fresh.status.value


def test_the_code_of_each_action_runs(app: Lab, tmp_path: Path) -> None:
    app.traces.save()
    assert app.wait(60)
    app.traces.open_field.value = "run.trace"
    app.memory.budget_field.value = "1 GiB"
    assert repr(app) == "Lab(demo/qwen3 on virtual:h200, 2 runs)"
    assert "data:image/svg+xml" in app._still_html()
    assert "2: double-buffered" in app._still_html()
    slow = {"Export", "List the kernels", "Explore", "What if"}  # their panels' tests call the same functions
    ran = []
    for panel in app.panels:
        for name, code in panel.code.snippets:
            assert code.startswith("import toolkit as tk\n\n")
            compile(code.replace("%", "#"), name, "exec")
            if name not in slow and "%" not in code:
                exec(code, {"display": repr})
                ran.append(name)
    assert {"Load", "Generate", "Plan", "Open", "Show", "Save as HTML", "Set", "Lift"} <= set(ran)
    assert tk.device("virtual:h200").limit_bytes == tk.device("virtual:h200").memory().total_bytes  # lifted
    assert (tmp_path / "memory.pickle").exists()


def test_only_the_last_runs_are_kept() -> None:
    history, trace = History(), decode_loop()
    for _ in range(MOST + 2):
        history.add("a", trace, None, "")
    assert list(history.entries) == list(range(3, MOST + 3))


def test_an_entry_that_is_dropped_while_its_code_is_written_is_no_error() -> None:
    """Work drops the oldest run while the kernel's main thread writes the code again."""
    lab = Lab()

    class Dropped(dict):
        def __contains__(self, number: object) -> bool:
            lab.history.entries = {}
            return super().__contains__(number)

    lab.history.add("a", decode_loop(), None, "tk.open_trace('a')")
    lab.traces.refresh()
    lab.history.entries = Dropped(lab.history.entries)
    lab.traces.file_field.value = "kept"
    assert [name for name, _ in lab.traces.code.snippets] == ["Open", "Show", "Save as HTML", "Save run"]
    lab.close()


def test_the_code_of_runs_of_two_models_loads_one_after_the_other() -> None:
    device = "virtual:rtx-4090"
    setups = [f"model = tk.load('demo/{name}', device='{device}')" for name in ("qwen3", "gemma4")]
    run = "tk.generate(model, 'The', 'roundtrip', max_new_tokens=2)"
    first, again, other = (Entry(i, "", None, None, run, setups[kind]) for i, kind in enumerate((0, 0, 1)))
    assert _made([first, again]) == f"{setups[0]}\na = {run}\nb = {run}"
    assert _made([first, other]) == f"{setups[0]}\na = {run}\ndel model\n{setups[1]}\nb = {run}"
    assert _made([Entry(0, "", None, None, "tk.open_trace('run.trace')")]) == "a = tk.open_trace('run.trace')"
