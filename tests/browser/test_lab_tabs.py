"""The Lab by keyboard alone, and every tab of it in both themes and at both widths: texts are legible and not cut off."""

from __future__ import annotations

import pytest
from conftest import command, ready
from test_lab_app import APP, SWITCH
from test_model_shown import FAULTS, theme
from test_timeline_in_lab import FRAME, shot

from toolkit.ui.lab.app import TABS

# The text of what has the focus: of a button or a tab its own, of a field that of its label.
FOCUSED = """() => { const at = document.activeElement, label = at.closest(".jupyter-widgets")?.querySelector(".widget-label");
  return at.closest(".tk-lab") ? (at.innerText?.trim() || label?.innerText || at.ariaLabel || "").split("\\n")[0] : "" }"""
# The canvases that are shown in colors of another theme.
STALE = """async () => { for (let i = 0; i < 2; i++) await new Promise((next) => requestAnimationFrame(next));
  const shown = [...document.querySelectorAll(".tk-lab .tk-timeline canvas")].filter((canvas) => canvas.offsetParent);
  return shown.flatMap((canvas) => {
    const probe = canvas.parentElement.appendChild(document.createElement("i"));
    probe.style.color = "var(--tk-bg)";
    const wanted = getComputedStyle(probe).color.match(/\\d+/g).slice(0, 3).join();
    probe.remove();
    const found = [...canvas.getContext("2d").getImageData(1, 1, 1, 1).data].slice(0, 3).join();
    return found === wanted ? [] : [`canvas is ${found}, not ${wanted}`];
  }) }"""


def look(page, state: str, width: int, dress: str) -> list[str]:
    """Open every tab. Returns what can't be read, with its place."""
    faults = []
    page.set_viewport_size({"width": width, "height": 1000})
    theme(page, dress)
    page.evaluate("() => document.querySelector('.tk-lab').scrollIntoView()")
    for title in TABS:
        page.evaluate(SWITCH, title)
        found = page.evaluate(FAULTS.replace(".tk-model", ".tk-lab")) + page.evaluate(STALE)
        faults += [f"{state}, {title}, {dress}, {width}: {fault}" for fault in found]
        shot(page, f"tabs-{state}-{title.split()[0].lower()}-{dress}-{width}")
    return faults


def reach(page, text: str, key: str = "Tab") -> None:
    """Press the key until what has this text or label has the focus."""
    passed = []
    for _ in range(40):
        page.keyboard.press(key)
        passed.append(page.evaluate(FOCUSED))
        if passed[-1] == text:
            return
    raise AssertionError(f"{text!r} was not reached with {key}: {passed}")


@pytest.mark.timeout(300)  # 45 seconds with a load of six on two cores
def test_by_keyboard_alone_and_every_tab_is_legible_in_both_themes_and_widths(notebook) -> None:
    page = notebook(APP, run=False)
    ready(page)
    command(page, "notebook:run-cell")
    page.wait_for_selector(".tk-lab button:text-is('Load')", timeout=60_000)
    assert look(page, "empty", 900, "dark") == []
    page.evaluate(SWITCH, "Load")
    page.locator(".jp-CodeCell .jp-InputPrompt").first.click()

    reach(page, "Start")
    page.keyboard.press("Enter")
    page.wait_for_selector(f".tk-lab {FRAME}[data-ms]", timeout=90_000)
    page.wait_for_selector(".tk-lab :text('Done.')")
    page.wait_for_selector(".tk-lab .jupyter-widgets.jupyter-button:text-is('Plan'):not([disabled])", state="attached")
    reach(page, "Load", "Shift+Tab")  # the tab
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    reach(page, "Context")
    page.keyboard.press("Control+a")
    page.keyboard.type("512")
    reach(page, "Plan")
    page.keyboard.press("Enter")
    page.wait_for_selector(".tk-lab .tk-plan :text('context 512')", timeout=60_000)
    faults = [fault for width in (1440, 900) for dress in ("light", "dark") for fault in look(page, "filled", width, dress)]
    assert faults == []
