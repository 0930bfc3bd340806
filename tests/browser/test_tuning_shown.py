"""A tuning in a real JupyterLab: light, dark, narrow, empty, with nothing that runs; and the Lab's Tune panel."""

from __future__ import annotations

import json
from pathlib import Path

from conftest import command, expect, ready, run_all
from test_lab_app import field, press, tab
from test_model_shown import FAULTS, theme
from test_timeline_in_lab import shot
from tuned import __file__ as TUNED

LESSON = Path(__file__).parent.parent.parent / "notebooks" / "07_autotune_per_gpu.ipynb"
VIEW = ".tk-tuning"
SETUP = f"""import sys; sys.path.insert(0, {str(Path(TUNED).parent)!r})
from IPython.display import display
from tuned import every_verdict, nothing_runs
from toolkit.tune.results import Tuning"""
SHOWN = "display(every_verdict(), nothing_runs(), Tuning(()))"
# The real kernels; what compiling them would take minutes to find is made up.
QUICK = """import toolkit as tk
from toolkit.ui.lab import tune_panel as lab_tune
lab_tune.tune.explore = lambda kernel, shape, gpus, progress, cancel: (progress(1, 2, "a config"), every_verdict())[1]
lab = tk.Lab()
lab"""

# The parts that scroll sideways.
WIDER = """() => [...document.querySelectorAll(".tk-tuning .tk-scroll")].filter((part) => part.scrollWidth > part.clientWidth)
  .map((part) => `${part.innerText.slice(0, 40)}: ${part.scrollWidth} of ${part.clientWidth} pixels`)"""


def look(page, name: str) -> None:
    page.wait_for_selector(VIEW, timeout=60_000)
    page.locator(VIEW).first.scroll_into_view_if_needed()
    page.wait_for_timeout(300)
    shot(page, name)
    assert page.evaluate(FAULTS.replace(".tk-model", VIEW)) == []


def test_a_tuning_is_legible_and_answers_to_clicks(notebook) -> None:
    page = notebook(f"{SETUP}\n{SHOWN}")
    page.set_viewport_size({"width": 1400, "height": 1500})
    for name in ("dark", "light"):
        theme(page, name)
        look(page, f"tuning-{name}")
    first = page.locator(VIEW).first
    assert first.locator(".tk-row td i:visible").count() == 9 * 12
    assert first.locator(".tk-row .tk-won").count() == 9
    first.locator("label:has-text('shared memory') input").check()
    assert "131,072" in first.locator(".tk-row td.tk-excluded").first.inner_text()
    assert page.locator(VIEW).nth(1).locator("input.tk-c1").is_checked()  # the other table has a choice of its own
    assert first.locator(".tk-more:visible").count() == 0
    command(page, "application:toggle-left-area")
    for width in (1440, 900):
        page.set_viewport_size({"width": width, "height": 1500})
        page.wait_for_timeout(400)
        assert page.evaluate(WIDER) == []
    command(page, "application:toggle-left-area")
    first.locator(".tk-row td").nth(5).click()
    assert first.locator(".tk-more:visible svg").count() == 9
    assert "SASS" in first.locator(".tk-more:visible td").first.inner_text()
    first.locator("summary").first.click()
    look(page, "tuning-open")
    page.set_viewport_size({"width": 640, "height": 1500})
    page.wait_for_timeout(400)
    look(page, "tuning-narrow")
    page.locator(VIEW).nth(2).scroll_into_view_if_needed()
    assert "Nothing was tuned." in page.locator(VIEW).nth(2).inner_text()
    shot(page, "tuning-empty")


def test_the_labs_tune_panel(notebook) -> None:
    page = notebook(f"{SETUP}\n{QUICK}", run=False)
    ready(page)
    command(page, "notebook:run-cell-and-select-next")
    page.wait_for_selector(".tk-lab .lm-TabBar-tab", timeout=60_000)
    tab(page, "Tune")
    press(page, "List the kernels")
    page.wait_for_selector(".tk-lab .jupyter-widgets.jupyter-button:text-is('Explore'):not([disabled])", timeout=90_000)
    field(page, "Kernel").select_option("int4_matmul")
    field(page, "Shape").select_option("qwen3-8b down")
    page.locator(".tk-lab .jupyter-widgets.jupyter-button:text-is('Explore')").scroll_into_view_if_needed()
    shot(page, "lab-tune-fields")
    press(page, "Explore")
    page.wait_for_selector(f".tk-lab {VIEW} .tk-won", timeout=60_000)
    page.locator(".tk-lab :text('Done in')").first.scroll_into_view_if_needed()
    note = page.locator(f".tk-lab {VIEW} .tk-figure-notes").bounding_box()
    assert note["height"] < 60, "the Lab's style sheet squeezes the note about the figures"
    for name in ("dark", "light"):
        theme(page, name)
        look(page, f"lab-tune-{name}")


def test_the_lesson_runs_as_it_is(lab, opened) -> None:
    (lab.root / "07.ipynb").write_text(json.dumps(json.loads(LESSON.read_text())))
    page = opened("07.ipynb")
    run_all(page, timeout_s=150)
    page.wait_for_selector(VIEW, timeout=60_000)
    assert page.locator(".jp-OutputArea-output[data-mime-type*='stderr']").count() == 0
    expect(page.locator(f"{VIEW} .tk-row td.tk-excluded")).to_have_count(6)
    look(page, "lesson-07")
