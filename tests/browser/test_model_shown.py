"""A model that shows itself, in a real JupyterLab: as a result, and in the Lab's model panel; light and dark."""

from __future__ import annotations

from conftest import command, ready
from test_lab_app import APP, field, fill, press, tab
from test_timeline_in_lab import shot

VIEW = ".tk-model"

# Every text of the view whose contrast with what is behind it is below WCAG AA's 4.5, or that is cut off.
FAULTS = """() => {
  const channel = (c) => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4 };
  const rgb = (text) => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = (node) => { for (let at = node; at; at = at.parentElement) {
      const found = rgb(getComputedStyle(at).backgroundColor); if (found.length === 3 || found[3] > 0.9) return found }
    return [255, 255, 255] };
  const faults = [];
  for (const view of document.querySelectorAll(".tk-model")) {
    for (const node of view.querySelectorAll("*")) {
      const written = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
      if (node.closest("svg") || !node.offsetParent || !written) continue;
      const a = light(rgb(getComputedStyle(node).color)), b = light(behind(node));
      const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      if (ratio < 4.5) faults.push(`${node.className}: ${node.textContent.slice(0, 30)}: ${ratio.toFixed(1)}`);
      const cut = node.scrollWidth > node.clientWidth + 1 && getComputedStyle(node).display !== "inline";
      if (cut) faults.push(`cut: ${node.textContent}`);
    }
    for (const text of view.querySelectorAll("svg .tk-area")) {
      const box = text.parentElement.querySelector("rect").getBBox(), own = text.getBBox();
      if (own.x + own.width > box.x + box.width + 1) faults.push(`over: ${text.textContent}`);
    }
    if (view.scrollWidth > view.clientWidth + 1) faults.push(`view is wider than its place: ${view.scrollWidth}`);
  }
  return faults }"""


def look(page, name: str) -> None:
    page.wait_for_selector(VIEW, timeout=60_000)
    page.locator(VIEW).first.scroll_into_view_if_needed()
    page.wait_for_timeout(300)
    shot(page, name)
    assert page.evaluate(FAULTS) == []


def theme(page, name: str) -> None:
    command(page, "apputils:change-theme", {"theme": f"JupyterLab {name.title()}"})
    page.wait_for_selector(f"body[data-jp-theme-light='{str(name == 'light').lower()}']", state="attached")


def test_a_model_shows_itself(notebook) -> None:
    source = "import toolkit as tk\ntk.costs('random/gemma4-31b', scheme='q4_k_m', context=32768)"
    page = notebook(source, "print(tk.costs('random/qwen3-0.6b'))")
    for name in ("dark", "light"):
        theme(page, name)
        look(page, f"model-{name}")
    assert page.locator(f"{VIEW} svg rect").count() > 6
    assert page.locator(f"{VIEW} .tk-layers i").count() == 60
    page.locator(f"{VIEW} summary").click()
    page.wait_for_selector(f"{VIEW} details[open] td:visible")
    page.set_viewport_size({"width": 760, "height": 1700})
    page.wait_for_timeout(400)
    look(page, "model-narrow")
    assert "28 layers" in page.inner_text(".jp-OutputArea-output pre")


def test_the_labs_model_panel(notebook) -> None:
    page = notebook(APP, run=False)
    ready(page)
    command(page, "notebook:run-cell-and-select-next")
    page.wait_for_selector(".tk-lab button:text-is('Load')", timeout=60_000)
    fill(page, "Model", "random/qwen3.5-35b-a3b")
    field(page, "Scheme").select_option("q4_k_m")
    press(page, "What it costs")
    page.wait_for_selector(f".tk-lab {VIEW} :text('34.7 billion parameters')", timeout=60_000)
    for name in ("dark", "light"):
        theme(page, name)
        look(page, f"lab-costs-{name}")
    fill(page, "Device", "virtual:l4")
    press(page, "Load")  # nothing is drawn: sizes only
    page.wait_for_selector(".tk-lab :text('is on')", timeout=60_000)
    page.wait_for_selector(f".tk-lab {VIEW} :text('sizes only')")
    tab(page, "Generate")
    fill(page, "Prompt", "1 2 3")
    fill(page, "Max tokens", 2)
    field(page, "B").select_option("(none)")
    press(page, "Generate")
    page.wait_for_selector(".tk-lab :text('Done.')", timeout=60_000)
    tab(page, "Load")
    field(page, "Scheme").select_option("plain, not quantized")
    press(page, "Load")
    page.wait_for_selector(".tk-lab .tk-error :text('virtual:l4 has')", timeout=60_000)
    assert page.locator(f".tk-lab {VIEW} :text('sizes only')").count() > 0  # the loaded model stays
    shot(page, "lab-error")
