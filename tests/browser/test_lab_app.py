"""The Lab in a real JupyterLab with the real demo model: load, generate, watch the text grow, cancel, compare, fail; what it
took of the memory."""

from __future__ import annotations

import pytest
from conftest import command, expect, ready, subshell
from test_timeline_in_lab import FRAME, answered, colors, shot

from toolkit.ui.lab.app import TABS

APP = "import toolkit as tk\nlab = tk.Lab()\nlab"


def tab(page, name: str) -> None:
    """Open a tab of the Lab."""
    page.locator(f".tk-lab .lm-TabBar-tab:has-text('{name}')").click()
    page.wait_for_selector(f".tk-lab .lm-TabBar-tab.lm-mod-current:has-text('{name}')")


def field(page, label: str):
    """The input of the widget with this description in the open tab."""
    return (
        page.locator(f".tk-lab .jupyter-widgets:has(> .widget-label:text-is('{label}')):visible")
        .locator("input, select, textarea")
        .first
    )


def fill(page, label: str, value: object) -> None:
    box = field(page, label)
    box.fill(str(value))
    box.press("Tab")


def press(page, name: str) -> None:
    page.locator(f".tk-lab .jupyter-widgets.jupyter-button:text-is('{name}'):visible").click()


def load(page) -> None:
    tab(page, "Load")
    press(page, "Load")
    page.wait_for_selector(".tk-lab :text('is on')", timeout=60_000)
    page.wait_for_selector(".tk-lab .tk-work :text('done after')")


# Milliseconds from a press on a tab until its content was painted.
SWITCH = """async (name) => {
  const tab = [...document.querySelectorAll(".tk-lab .lm-TabBar-tab")].find((one) => one.textContent.trim() === name);
  const box = tab.getBoundingClientRect(), frame = () => new Promise((next) => requestAnimationFrame(next));
  const at = { bubbles: true, cancelable: true, button: 0, clientX: box.x + 5, clientY: box.y + 5 }, began = performance.now();
  tab.dispatchEvent(new PointerEvent("pointerdown", at));
  document.dispatchEvent(new PointerEvent("pointerup", at));
  while (!tab.classList.contains("lm-mod-current") && performance.now() - began < 3000) await frame();
  await frame();
  return performance.now() - began }"""


@pytest.fixture
def app(notebook):
    page = notebook(APP, "print(lab.run.stop_reason, len(lab.run.tokens), lab.error)", run=False)
    ready(page)
    command(page, "notebook:run-cell-and-select-next")
    page.wait_for_selector(".tk-lab button:text-is('Load')", timeout=60_000)
    return page


@pytest.mark.timed
def test_errors_then_load_generate_and_compare(app) -> None:
    page = app
    fill(page, "Model", "no/such/folder")
    press(page, "Load")
    page.wait_for_selector(".tk-lab .tk-error :text('no/such/folder')", timeout=60_000)
    fill(page, "Model", "demo/qwen3")
    fill(page, "Device", "virtual:rtx-5080")
    press(page, "Load")
    page.wait_for_selector(".tk-lab .tk-error :text('Did you mean \"rtx-5090\"')", timeout=60_000)
    tab(page, "Generate and compare")
    assert "No model is loaded" in page.inner_text(".tk-lab .tk-panel:visible")
    fill(page, "Max tokens", 0)
    press(page, "Generate")
    page.wait_for_selector(".tk-lab .tk-error:visible :text('at least 1')", timeout=60_000)
    fill(page, "Max tokens", 12)
    tab(page, "Load")
    fill(page, "Device", "virtual:rtx-5090")
    press(page, "Start")  # opens the tab
    page.wait_for_selector(".tk-lab .tk-out:text('Paris')", timeout=60_000)
    page.wait_for_selector(f".tk-lab {FRAME}[data-ms]", timeout=90_000)
    page.wait_for_selector(".tk-lab :text('Done.')")
    table = page.inner_text(".tk-lab table:has-text('same tokens')")
    assert "roundtrip" in table
    assert "double-buffered" in table
    assert "2 (16 B)" in table
    assert "modelled" in table
    assert colors(page) > 20
    answered(page, key="n")
    shot(page, "lab")
    page.set_viewport_size({"width": 1280, "height": 1500})
    page.wait_for_timeout(500)
    shot(page, "lab-tall")
    rounds = [[page.evaluate(SWITCH, name) for name in TABS] for _ in range(4)]
    assert max(map(min, zip(*rounds, strict=True))) < 100, rounds  # what else the machine does only adds time
    page.locator(".tk-lab .tk-code:visible button:text-is('Save as HTML')").click()
    page.wait_for_selector(".tk-lab .tk-code:visible :text('Copied. Paste it into a cell.')", timeout=30_000)
    field(page, "Save as").fill("both")
    field(page, "Save as").press("Tab")
    page.wait_for_selector(".tk-lab .tk-code:visible pre:has-text(\"a.to_html('both.html', b)\")", timeout=30_000)
    assert "It has changed since it was copied." in page.inner_text(".tk-lab .tk-code:visible")
    press(page, "Save as HTML")
    page.wait_for_selector(".tk-lab :text('both.html: it opens in any browser')", timeout=30_000)
    press(page, "Save run")
    page.wait_for_selector(".tk-lab :text('Open reads it')", timeout=30_000)
    fill(page, "File", "both.trace")
    press(page, "Open")
    page.wait_for_selector(".tk-lab td:text('3: both.trace'):visible", timeout=30_000)
    page.wait_for_selector(f".tk-lab {FRAME}:visible[data-ms]", timeout=30_000)
    shot(page, "lab-traces")
    page.locator(".tk-lab .lm-TabBar-tab.lm-mod-current").focus()
    page.keyboard.press("ArrowLeft")  # the keyboard reaches every tab
    page.keyboard.press("Enter")
    page.wait_for_selector(".tk-lab .lm-TabBar-tab.lm-mod-current:has-text('Memory')")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_the_lab_answers_in_order_while_a_cell_runs(notebook, tmp_path) -> None:
    go = tmp_path / "go"
    cell = f"""import pathlib, time
lab.decoding.tokens_field.value = 20_000
lab.start()
while not pathlib.Path({str(go)!r}).exists():
    time.sleep(0.1)"""
    page = notebook(APP, cell, run=False)
    ready(page)
    command(page, "notebook:run-cell-and-select-next")
    page.wait_for_selector(".tk-lab button:text-is('Load')", timeout=60_000)
    load(page)
    subshell(page)
    page.locator(".jp-CodeCell .jp-InputPrompt").nth(1).click()
    command(page, "notebook:run-cell")
    page.wait_for_selector(".tk-lab .tk-out", timeout=60_000)
    press(page, "Cancel")
    page.wait_for_selector(".tk-lab :text('The tokens so far are kept')", timeout=30_000)
    fill(page, "Max tokens", 4)
    fill(page, "Prompt", "1 2 3")
    press(page, "Generate")
    page.wait_for_selector(".tk-lab :text('Done.')", timeout=60_000)
    assert page.locator(".tk-lab .tk-out > span").first.inner_text() == "1 2 3"
    assert page.is_visible(".jp-InputPrompt:text('[*]')")  # the cell is still running
    go.touch()


def test_cancel_midway_keeps_the_text(app) -> None:
    page = app
    load(page)
    tab(page, "Generate")
    fill(page, "Max tokens", 2000)
    page.evaluate("() => { window.grown = new Set(); window.watch = setInterval(() => "
                  "window.grown.add(document.querySelector('.tk-lab .tk-out')?.textContent.length), 30) }")  # fmt: skip
    press(page, "Generate")
    page.wait_for_function("() => window.grown.size > 4", timeout=60_000)  # it grows while it runs
    press(page, "Cancel")
    page.wait_for_selector(".tk-lab :text('The tokens so far are kept')", timeout=30_000)
    assert "cancelled" in page.inner_text(".tk-lab .tk-out")
    assert "Paris" in page.inner_text(".tk-lab .tk-out")
    assert page.is_visible(".tk-lab :text('roundtrip was not recorded')")
    page.locator(".jp-CodeCell .jp-InputPrompt").nth(1).click()
    command(page, "notebook:run-cell")
    page.wait_for_selector(".jp-RenderedText pre:text('cancelled')", timeout=20_000)
    assert page.inner_text(".jp-RenderedText pre").strip().endswith("None")  # no error


def test_a_plan_against_a_budget(app) -> None:
    page = app
    fill(page, "Device", "virtual:rtx-4090")
    fill(page, "Model", "random/gemma4-31b")
    field(page, "Scheme").select_option("q4_k_m")
    tab(page, "Plan and export")
    expect(field(page, "Target")).to_have_value("rtx-4090")
    fill(page, "Context", 131072)
    field(page, "KV cache").select_option("plain")
    press(page, "Plan")
    page.wait_for_selector(".tk-lab .tk-plan svg", timeout=60_000)
    assert "Lower context to" in page.inner_text(".tk-lab .tk-plan")
    page.locator(".tk-lab .tk-plan summary").click()
    assert "rtx-pro-6000" in page.inner_text(".tk-lab .tk-plan details")
    for name in ("light", "dark"):
        dressed(page, name)
        at_top(page, ".tk-lab .tk-plan", f"lab-plan-{name}")
    field(page, "KV cache").select_option("automatic")
    fill(page, "Context", 32768)
    press(page, "Plan")
    page.wait_for_selector(".tk-lab .tk-plan .tk-yes:text('Fits:')", timeout=60_000)


# ---- the Memory panel

LIVE, ROWS = ".tk-memory.tk-live", ".tk-measured tbody tr"


def dressed(page, name: str) -> None:
    from test_model_shown import theme  # which imports this file

    theme(page, name)


def at_top(page, place: str, name: str) -> None:
    """Scroll `place` to the top, keep a picture, and look for what can't be read."""
    from test_model_shown import FAULTS

    page.locator(place).first.evaluate("(element) => element.scrollIntoView()")
    page.wait_for_timeout(400)
    shot(page, name)
    assert page.evaluate(FAULTS.replace(".tk-model", ".tk-lab .tk-panel:has(.tk-measured)")) == []


def generate(page, tokens: int = 8) -> None:
    tab(page, "Generate")
    fill(page, "Max tokens", tokens)
    press(page, "Generate")
    page.wait_for_selector(".tk-lab :text('Done.')", timeout=90_000)


def test_loads_and_generations_open_their_memory(app) -> None:
    page = app
    page.set_viewport_size({"width": 1300, "height": 1400})
    tab(page, "Memory")
    expect(page.locator(".tk-lab .tk-panel:visible")).to_contain_text("No device is in use")
    at_top(page, ".tk-lab", "lab-memory-empty")
    tab(page, "Load")
    fill(page, "Model", "random/gemma4-31b")
    load(page)
    tab(page, "Generate")
    fill(page, "Prompt", "1 2 3")
    generate(page)
    tab(page, "Memory")
    expect(page.locator(ROWS)).to_have_count(3)
    page.locator(ROWS).nth(2).locator("td").nth(1).click()  # anywhere in the row
    page.wait_for_selector(f".tk-lab {LIVE}[data-ms]", timeout=30_000)
    assert "lab.model.layers" in page.inner_text(f".tk-lab {LIVE} .tk-legend")
    assert "lab.model.layers" in page.inner_text(".tk-lab .tk-held")
    press(page, "What if")
    page.wait_for_selector(".tk-what-if tr:has-text('rtx-4090') .tk-no", timeout=30_000)
    assert page.locator(".tk-what-if tr:has-text('h200') .tk-yes").count() == 2
    for name in ("light", "dark"):
        dressed(page, name)
        at_top(page, ".tk-lab", f"lab-memory-{name}")
        at_top(page, ".tk-lab .tk-held", f"lab-memory-what-if-{name}")
    cells = page.locator(".jp-Cell").count()
    page.locator(f"{ROWS} input").nth(2).focus()
    page.keyboard.press("ArrowUp")
    page.wait_for_selector(f"{ROWS}:nth-child(2) input:checked")
    page.wait_for_selector(".tk-lab .tk-what-if", state="detached")  # it was the other one's
    assert page.evaluate("document.activeElement.closest('.tk-measured') !== null")
    page.keyboard.press("ArrowUp")
    page.wait_for_selector(f"{ROWS}:nth-child(1) input:checked")
    assert page.locator(".jp-Cell").count() == cells
    page.set_viewport_size({"width": 640, "height": 1300})
    page.wait_for_timeout(500)
    at_top(page, ".tk-lab", "lab-memory-narrow")


def test_a_budget_holds_for_loads_and_is_lifted(app, lab) -> None:
    page = app
    page.set_viewport_size({"width": 1300, "height": 1400})
    tab(page, "Memory")
    fill(page, "Budget", "eight")
    press(page, "Set")
    page.wait_for_selector(".tk-lab .tk-error :text('24 GiB')")
    fill(page, "Budget", "600 MiB")
    press(page, "Set")
    page.wait_for_selector(".tk-figures :text('budget 600 MiB')")
    tab(page, "Load")
    fill(page, "Model", "random/qwen3-0.6b")
    press(page, "Load")
    page.wait_for_selector(".tk-lab .tk-error:has-text('virtual:h200 has 600 MiB of 600 MiB free')", timeout=60_000)
    at_top(page, ".tk-lab", "lab-memory-refused")
    tab(page, "Memory")
    at_top(page, ".tk-lab", "lab-memory-budget")
    press(page, "Lift")
    page.wait_for_selector(".tk-figures :text('no budget')")
    load(page)
    tab(page, "Memory")
    page.locator(f"{ROWS} input").nth(0).check()
    page.wait_for_selector(f".tk-lab {LIVE}[data-ms]")
    fill(page, "File", "taken")
    for button, name in (("Save as HTML", "taken.html"), ("Save as PyTorch snapshot", "taken.pickle")):
        press(page, button)
        page.wait_for_selector(f".tk-lab :text('{name} (load')")
        assert (lab.root / name).stat().st_size > 1000


def test_hidden_memory_and_the_cells_of_the_notebook(notebook) -> None:
    lost = "import torch\nx = torch.ones(1 << 20, device='vgpu')\nx * 2"
    page = notebook("%load_ext toolkit\n%memory on", APP, lost, run=False)
    page.set_viewport_size({"width": 1300, "height": 1400})
    ready(page)
    for _ in range(2):
        command(page, "notebook:run-cell-and-select-next")
    page.wait_for_selector(".tk-lab button:text-is('Load')", timeout=60_000)
    load(page)
    tab(page, "Memory")
    press(page, "Look for it")
    page.wait_for_selector(".tk-lab :text('Nothing on a GPU')")  # the Lab's own model isn't hidden
    page.locator(".jp-CodeCell .jp-InputPrompt").nth(2).click()
    command(page, "notebook:run-cell")
    page.wait_for_selector(".jp-OutputArea-prompt:text('[3]:')", timeout=30_000)
    press(page, "Look for it")
    page.wait_for_selector(".tk-lab td:text('Out[3]')")
    press(page, "Show the cells")
    page.wait_for_selector(".tk-lab .tk-session", timeout=30_000)
    for name in ("light", "dark"):
        dressed(page, name)
        at_top(page, ".tk-lab h4:text-is('Held without a variable')", f"lab-memory-cells-{name}")
    press(page, "Release")
    page.wait_for_selector(".tk-lab :text('Released 4.00 MiB')")
    press(page, "Look again")
    page.wait_for_selector(".tk-figures :text('allocated 11.5 MiB')")
