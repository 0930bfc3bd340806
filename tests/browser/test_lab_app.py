"""The Lab in a real JupyterLab with the real demo model: load, generate, watch the text grow, cancel, compare, fail."""

from __future__ import annotations

import pytest
from conftest import command, ready
from test_timeline_in_lab import FRAME, answered, colours, shot

APP = "import toolkit as tk\nlab = tk.Lab()\nlab"


def field(page, label: str):
    """The input of the widget with this description."""
    return (
        page.locator(f".tk-lab .jupyter-widgets:has(> .widget-label:text-is('{label}'))")
        .locator("input, select, textarea")
        .first
    )


def fill(page, label: str, value: object) -> None:
    box = field(page, label)
    box.fill(str(value))
    box.press("Tab")


def press(page, name: str) -> None:
    page.locator(f".tk-lab button:text-is('{name}')").click()


def load(page) -> None:
    press(page, "Load")
    page.wait_for_selector(".tk-lab :text('is on')", timeout=60_000)
    page.wait_for_selector(".tk-lab button:text-is('Generate'):not([disabled])")


@pytest.fixture
def app(notebook):
    page = notebook(APP, "print(lab.run.stop_reason, len(lab.run.tokens), lab.error)", run=False)
    ready(page)
    command(page, "notebook:run-cell-and-select-next")
    page.wait_for_selector(".tk-lab button:text-is('Load')", timeout=60_000)
    return page


def test_errors_then_load_generate_and_compare(app) -> None:
    page = app
    fill(page, "Model", "no/such/folder")
    press(page, "Load")
    page.wait_for_selector(".tk-lab .tk-error :text('no/such/folder')", timeout=60_000)
    fill(page, "Model", "demo/qwen3")
    fill(page, "Device", "virtual:rtx-5080")
    press(page, "Load")
    page.wait_for_selector(".tk-lab .tk-error :text('Did you mean \"rtx-5090\"')", timeout=60_000)
    assert page.locator(".tk-lab button:text-is('Generate')").is_disabled()
    fill(page, "Device", "virtual:rtx-5090")
    load(page)
    fill(page, "Max tokens", 12)
    press(page, "Generate")
    page.wait_for_selector(".tk-lab .tk-out:text('Paris')", timeout=60_000)
    page.wait_for_selector(f".tk-lab {FRAME}[data-ms]", timeout=90_000)
    page.wait_for_selector(".tk-lab :text('Done.')")
    table = page.inner_text(".tk-lab table:has-text('same tokens')")
    assert "roundtrip" in table
    assert "double-buffered" in table
    assert "2 (16 B)" in table
    assert "modelled" in table
    assert colours(page) > 20
    answered(page, key="n")
    shot(page, "lab")
    page.set_viewport_size({"width": 1280, "height": 1500})
    page.wait_for_timeout(500)
    shot(page, "lab-tall")


def test_cancel_midway_keeps_the_text(app) -> None:
    page = app
    load(page)
    fill(page, "Max tokens", 2000)
    page.evaluate("() => { window.grown = new Set(); window.watch = setInterval(() => "
                  "window.grown.add(document.querySelector('.tk-lab .tk-out')?.textContent.length), 30) }")  # fmt: skip
    press(page, "Generate")
    page.wait_for_function("() => window.grown.size > 4", timeout=60_000)  # it grows while it runs
    press(page, "Cancel")
    page.wait_for_selector(".tk-lab :text('what was decoded is kept')", timeout=30_000)
    assert "cancelled" in page.inner_text(".tk-lab .tk-out")
    assert "Paris" in page.inner_text(".tk-lab .tk-out")
    page.wait_for_selector(f".tk-lab {FRAME}[data-ms]")
    page.locator(".jp-CodeCell .jp-InputPrompt").nth(1).click()
    command(page, "notebook:run-cell")
    page.wait_for_selector(".jp-OutputArea-output pre:text('cancelled')", timeout=20_000)
    assert page.inner_text(".jp-OutputArea-output pre").strip().endswith("None")  # no error
