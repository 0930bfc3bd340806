"""The Lab on two virtual GPUs in a real JupyterLab: load, compare, see both ranks, and restart the kernel."""

from __future__ import annotations

import psutil
from conftest import command, ready
from test_lab_app import fill, press, tab
from test_timeline_in_lab import FRAME, colors, shot

APP = "import toolkit as tk\nlab = tk.Lab()\nlab"


def test_a_pair_loads_compares_and_ends_with_the_kernel(notebook, lab) -> None:
    page = notebook(APP, "print(*lab.cluster.pids)", run=False)
    ready(page)
    command(page, "notebook:run-cell-and-select-next")
    page.wait_for_selector(".tk-lab button:text-is('Start')", timeout=60_000)
    fill(page, "Device", "virtual:2xh200")
    press(page, "Start")
    page.wait_for_selector(".tk-lab .tk-out:text('Paris')", timeout=120_000)
    page.wait_for_selector(f".tk-lab {FRAME}[data-ms]", timeout=90_000)
    page.wait_for_selector(".tk-lab :text('Done.')")
    assert "2 x virtual:h200" in page.inner_text(".tk-lab table:has-text('same tokens')")
    assert colors(page) > 20
    page.set_viewport_size({"width": 1280, "height": 1500})
    page.wait_for_timeout(500)
    shot(page, "lab-pair")
    tab(page, "Load")
    assert "on 2 x virtual:h200" in page.inner_text(".tk-lab .tk-panel:visible")
    shot(page, "lab-pair-load")
    page.locator(".jp-CodeCell .jp-InputPrompt").nth(1).click()
    command(page, "notebook:run-cell")
    page.wait_for_selector(".jp-RenderedText pre", timeout=20_000)
    ranks = [psutil.Process(int(pid)) for pid in page.inner_text(".jp-RenderedText pre").split()]
    assert len(ranks) == 2
    kernel = page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.id")
    page.goto("about:blank")  # an open notebook may have a request under way, which a restart ends with an error
    lab.ask(f"kernels/{kernel}/restart", "POST")
    assert not psutil.wait_procs(ranks, timeout=30)[1]
