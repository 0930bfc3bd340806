"""Memory over time in a real JupyterLab and as a page: painted, zoomed by mouse and keys, legible in both themes."""

from __future__ import annotations

from base64 import b64encode
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from conftest import command, expect, ready, reopen, saved
from memory_events import GIB, HOSTILE, many_events, recording, small, use_of
from memory_events import __file__ as EVENTS
from test_model_shown import FAULTS, theme
from test_timeline_in_lab import CORNER, shot

import toolkit as tk
from toolkit.ui.memory.page import write_memory_page
from toolkit.ui.memory.picture import image, svg, view_of

if TYPE_CHECKING:
    from playwright.sync_api import Locator

VIEW, LIVE = ".tk-memory", ".tk-memory.tk-live"
CANVAS = f"{LIVE} canvas"
SETUP = f"""import sys; sys.path.insert(0, {str(Path(EVENTS).parent)!r})
import torch, toolkit as tk
from IPython.display import HTML, display
from memory_events import many_events, recording, small, use_of
from toolkit.vram.measure import memory
gpu = tk.device("virtual:rtx-5090")
net = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)]).to(gpu.torch)"""
LEAK = """losses = []
with memory() as leak:
    for i in range(30):
        losses.append(net(torch.ones(64, 512, device=gpu.torch)).pow(2).sum())"""
SHOWN = """from types import SimpleNamespace
from toolkit.ui.memory.picture import line_html, session_html
def boom():
    big = torch.ones(1 << 24, device=gpu.torch)
    torch.empty(1 << 40, device=gpu.torch)
try:
    with memory() as failed: boom()
except torch.OutOfMemoryError: pass
with memory() as nothing: pass
many = use_of(many_events(10_000))
uses = [leak, failed, nothing, many] * 4
rows = [SimpleNamespace(number=n, title="with memory() as m: ...", device=use.device, status="error" if use is failed else "ok",
        baseline_bytes=use.baseline_bytes, peak_bytes=use.peak_bytes, end_bytes=use.end_bytes)
        for n, use in enumerate(uses, 1)]"""


NEAR_LIMIT = [("alloc", i, 50 << 20) for i in range(9)] + [("free", i, 50 << 20) for i in range(9)]
FAILED = (("segment_alloc", 0, 8 * GIB), ("alloc", 1, 5 * GIB), ("oom", -1, 400 * GIB), ("free", 1, 5 * GIB))
LITTLE = (("alloc", 1, 100 * GIB), ("alloc", 2, GIB), ("free", 2, GIB), ("alloc", 3, GIB))
STILLS = {  # name: (measurement, budget, axis)
    "short": (small(clock="modelled"), 5 * GIB + GIB // 8, None),
    "near its limit": (use_of(recording(*NEAR_LIMIT, total_bytes=460 << 20, limit_bytes=460 << 20)), None, None),
    "over its budget": (use_of(recording(*NEAR_LIMIT)), 440 << 20, "events"),
    "out of memory": (use_of(recording(*FAILED)), 6 * GIB, None),
    "above 0": (use_of(recording(*LITTLE, opening=1)), 101 * GIB + GIB // 4, None),
    "long": (use_of(many_events(100_000)), 40 << 20, "events"),
    "long, over time": (use_of(many_events(100_000, 1)), 40 << 20, "time"),
}
# [text, left, top, right, bottom] of every visible text. Texts in a <use> can't be measured, so copies replace it.
TEXTS = """() => { const plot = document.querySelector("#plot");
  for (const use of document.querySelectorAll("use")) use.replaceWith(plot.cloneNode(true));
  plot?.parentElement.remove();
  return [...document.querySelectorAll("text")].map((text) => [text.textContent, text.getBoundingClientRect()])
    .filter(([, box]) => box.width).map(([text, box]) => [text, box.left, box.top, box.right, box.bottom]) }"""

# The share of pixels in which two screenshots differ clearly; 1 if they differ in size.
DIFFERENT = """async (shots) => {
  const [a, b] = await Promise.all(shots.map(async (shot) => {
    const image = new Image(), pen = new OffscreenCanvas(1, 1).getContext("2d");
    image.src = `data:image/png;base64,${shot}`;
    await image.decode();
    [pen.canvas.width, pen.canvas.height] = [image.width, image.height];
    pen.drawImage(image, 0, 0);
    return pen.getImageData(0, 0, image.width, image.height) }));
  if (a.width !== b.width || a.height !== b.height) return 1;
  return a.data.filter((value, i) => Math.abs(value - b.data[i]) > 96).length / a.data.length }"""


def look(page, name: str) -> None:
    page.wait_for_selector(f"{VIEW}:visible", timeout=60_000)  # a still is hidden
    page.wait_for_timeout(400)
    shot(page, name)
    assert page.evaluate(FAULTS.replace(".tk-model", VIEW)) == []


def status(page) -> Locator:
    return page.locator(f"{LIVE} .tk-status")


def colors(page) -> int:
    return page.evaluate("""(selector) => { const canvas = document.querySelector(selector);
      const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      return new Set(new Uint32Array(data.buffer)).size }""", CANVAS)  # fmt: skip


def test_hover_click_zoom_pan_and_keys(notebook) -> None:
    page = notebook(SETUP, LEAK, "leak.timeline()")
    page.set_viewport_size({"width": 1300, "height": 1300})
    page.wait_for_selector(f"{LIVE}[data-ms]")
    assert colors(page) > 5
    canvas = page.locator(CANVAS)
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 60, box["y"] + 290)
    page.wait_for_selector(".tk-tip:not([hidden]) b")
    tip = page.inner_text(".tk-tip")
    assert "modelled" in tip
    assert "after event" in tip
    page.mouse.click(box["x"] + box["width"] - 60, box["y"] + 200)
    page.wait_for_selector(".tk-detail :text('losses')")
    assert "losses.append" in page.inner_text(".tk-detail")
    look(page, "memory-light-pinned")
    whole = status(page).inner_text()
    page.mouse.wheel(0, -600)
    expect(status(page)).not_to_have_text(whole)
    zoomed = status(page).inner_text()
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 200, steps=4)
    page.mouse.up()
    expect(status(page)).not_to_have_text(zoomed)
    page.mouse.dblclick(box["x"] + 400, box["y"] + 100)
    expect(status(page)).to_have_text(whole)
    canvas.focus()
    cells = page.locator(".jp-Cell").count()
    for key in ("ArrowUp", "ArrowRight", "ArrowLeft", "ArrowDown", "+", "-"):
        before = status(page).inner_text()
        page.keyboard.press(key)
        expect(status(page), key).not_to_have_text(before)
    page.keyboard.press("0")
    expect(status(page)).to_have_text(whole)
    page.keyboard.press("Escape")
    page.wait_for_selector(".tk-detail[hidden]", state="attached")
    page.keyboard.press("p")
    page.wait_for_selector(".tk-detail :text('at the peak')")
    seen = page.inner_text(".tk-detail .tk-sub")
    page.keyboard.press(",")
    page.wait_for_function("(seen) => !document.querySelector('.tk-detail .tk-sub').innerText.includes(seen)", arg=seen)
    assert page.locator(".jp-Cell").count() == cells  # JupyterLab took none of the keys for its own


def test_grouping_axis_and_bands_can_be_chosen(notebook) -> None:
    page = notebook(SETUP, LEAK, "leak.timeline()")
    page.set_viewport_size({"width": 1300, "height": 1300})
    page.wait_for_selector(f"{LIVE}[data-ms]")
    theme(page, "dark")
    for by, found in (("line", "losses.append"), ("kind", "weights"), ("owner", "losses")):
        page.select_option(f"{LIVE} select >> nth=0", by)
        page.wait_for_selector(f".tk-legend button:has-text('{found}')")
    axis = page.locator(f"{LIVE} select").nth(1)
    page.select_option(f"{LIVE} select >> nth=1", "events" if axis.input_value() == "time" else "time")
    page.wait_for_timeout(300)
    page.select_option(f"{LIVE} select >> nth=1", "events")
    page.wait_for_selector(".tk-status:text('events 0 to')")
    page.click(".tk-legend button:has-text('losses')")
    page.wait_for_selector(".tk-legend button[aria-pressed=true]:has-text('losses')")
    look(page, "memory-dark-band")
    page.keyboard.press("Enter")  # the button kept its focus
    page.wait_for_selector(".tk-legend button[aria-pressed=false]:has-text('losses')")
    page.click(f"{LIVE} button:text('Stretch')")
    page.focus(CANVAS)
    for _ in range(3):
        page.keyboard.press("+")
    page.wait_for_selector(".tk-status:text('stretched')")
    page.click(f"{LIVE} button:text('Peak')")
    page.wait_for_selector(".tk-detail :text('at the peak')")
    page.locator(".jp-Cell").last.scroll_into_view_if_needed()
    look(page, "memory-dark-stretched")
    page.set_viewport_size({"width": 720, "height": 1300})
    page.wait_for_timeout(600)
    page.locator(LIVE).scroll_into_view_if_needed()
    look(page, "memory-dark-narrow")


def test_still_pictures_are_legible(notebook) -> None:
    lines = "for use in (leak, failed, nothing): display(HTML(line_html(use, 30 << 20)))"
    opened = "display(HTML(line_html(failed, 60 << 20, is_open=True)), many)"
    page = notebook(SETUP, LEAK, SHOWN, lines, opened)
    page.set_viewport_size({"width": 1300, "height": 2200})
    page.wait_for_selector(f"{VIEW}[open] img", timeout=60_000)
    for name in ("dark", "light"):
        theme(page, name)
        page.locator(".jp-Cell").last.scroll_into_view_if_needed()
        look(page, f"memory-still-{name}")
        assert page.evaluate(CORNER, ".tk-memory img") == (
            [0, 0, 0, 0] if name == "dark" else [255, 255, 255, 255]
        )  # dark: the page's color
    assert page.locator(f"{VIEW}[open] img").evaluate("(image) => image.complete && image.naturalWidth > 0")
    assert page.locator(f"{VIEW}.tk-line").count() == 4
    assert page.locator(f"{VIEW}.tk-line[open]").count() == 1
    page.locator(f"{VIEW}.tk-line summary").first.click()
    assert page.locator(f"{VIEW}.tk-line[open]").count() == 2


@pytest.mark.parametrize("width", [360, 410, 600, 960])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_still_picture_is_readable_at_any_width(browser, width: int, scheme: str) -> None:
    wide = browser.new_page(viewport={"width": 1200, "height": 500}, color_scheme=scheme)
    alone = browser.new_page(viewport={"width": width, "height": 500}, color_scheme=scheme)
    for name, (use, budget_bytes, axis) in STILLS.items():
        picture = svg(view_of(use), budget_bytes, axis)
        place = f"<div style='width:{width}px;color-scheme:{scheme}'>"
        wide.set_content(f"<body style='margin:0'>{place}{image(picture, name)}</div>")
        alone.set_content(f"<body style='margin:0'>{picture}")
        shots = wide.locator("img").screenshot(), alone.locator("svg").first.screenshot()
        different = alone.evaluate(DIFFERENT, [b64encode(shot).decode() for shot in shots])
        assert different < 0.01, name  # the image looks the same, so its texts are as large as those below
        texts = alone.evaluate(TEXTS)
        assert [text for text, *_ in texts if text.startswith("peak")], name
        assert min(bottom - top for _, _, top, _, bottom in texts) >= 11, name
        assert [text for text, left, _, right, _ in texts if left < 0 or right > width] == [], name
        over = [
            (a[0], b[0]) for a, b in combinations(texts, 2)
            if a[1] < b[3] and b[1] < a[3] and a[2] + 2 < b[4] and b[2] + 2 < a[4]  # the tops of boxes are empty
        ]  # fmt: skip
        assert over == [], name
    wide.close()
    alone.close()


def test_the_table_of_what_is_held_fits_into_a_narrow_window(notebook) -> None:
    page = notebook(SETUP, LEAK, "leak", "leak.timeline()")
    page.set_viewport_size({"width": 900, "height": 1300})  # JupyterLab's file browser takes a third of it
    page.focus(CANVAS)
    page.keyboard.press("p")
    page.wait_for_selector(".tk-detail:not([hidden]) td")
    for name in ("light", "dark"):
        theme(page, name)
        look(page, f"memory-table-narrow-{name}")
        tables = page.locator(f"{VIEW} .tk-scroll:visible")
        widths = tables.evaluate_all("(all) => all.map((e) => [e.scrollWidth, e.clientWidth])")
        assert len(widths) == 2
        assert all(needed <= width for needed, width in widths), widths


@pytest.mark.parametrize("width", [1000, 800, 700])
def test_long_names_fit_into_a_window_of_medium_width(browser, tmp_path: Path, width: int) -> None:
    gpu = tk.device("virtual:h200")
    with tk.memory(gpu) as use:
        activations_of_the_last_layer_before_its_norm = torch.ones(64, 512, device=gpu.torch)
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(write_memory_page(use, tmp_path / "a.html").as_uri())
    table = page.locator(f"{VIEW} .tk-scroll", has_text="activations_of_the_last_layer_before_its_norm").first
    needed, room = table.evaluate("(e) => [e.scrollWidth, e.clientWidth]")
    assert needed <= room
    page.close()
    del activations_of_the_last_layer_before_its_norm


def test_a_session_answers_to_clicks_without_a_script(notebook) -> None:
    shown = "HTML(session_html(rows, [line_html(use, is_open=True) for use in uses], 60 << 20))"
    page = notebook(SETUP, LEAK, SHOWN, shown)
    page.set_viewport_size({"width": 1300, "height": 1500})
    page.wait_for_selector(".tk-session", timeout=60_000)
    assert page.locator(".tk-cell:visible").count() == 1
    assert "out of memory" in page.inner_text(".tk-cell:visible")
    page.locator(".tk-bars label").nth(0).click()
    assert "cell 1" in page.inner_text(".tk-cell:visible .tk-sub >> nth=0")
    page.locator(".tk-bars input").nth(0).focus()
    page.keyboard.press("ArrowRight")
    assert "cell 2" in page.inner_text(".tk-cell:visible .tk-sub >> nth=0")
    for name in ("dark", "light"):
        theme(page, name)
        page.locator(".tk-session").scroll_into_view_if_needed()
        look(page, f"memory-session-{name}")


def test_a_saved_notebook_shows_its_picture_without_a_kernel(notebook, lab) -> None:
    page = notebook(SETUP, LEAK, "leak.timeline()")
    page.wait_for_selector(f"{LIVE}[data-ms]")
    kept = saved(page, lab)["cells"][2]["outputs"][1]["data"]
    assert "peak" in "".join(kept["text/plain"])
    assert "data:image/svg+xml" in "".join(kept["text/html"])
    reopen(page, lab, f"{LIVE}[data-painted]")
    assert colors(page) > 5
    page.focus(CANVAS)
    page.keyboard.press("+")  # nobody answers: the last view is stretched, and says so
    page.wait_for_selector(".tk-status:text('the last view')", timeout=8000)


@pytest.mark.timed
@pytest.mark.usefixtures("new_tab")
def test_two_million_events(notebook, capsys: pytest.CaptureFixture[str]) -> None:
    page = notebook(
        SETUP, "use = use_of(many_events()); use.ledger.blocks; len(use.trace)", "use.timeline()", run=False, timed=True
    )
    ready(page)
    for _ in range(3):
        command(page, "notebook:run-cell-and-select-next")
    page.wait_for_selector(f"{LIVE}[data-ms]", timeout=90_000)
    page.focus(CANVAS)
    rounds = []
    for _ in range(3):  # what else the machine does only adds time: the best of three rounds counts
        took = []
        for key in ("+", "+", "+", "ArrowRight", "ArrowLeft", "+", "+", "-", "-", "0"):
            seq = page.get_attribute(LIVE, "data-seq")
            page.keyboard.press(key)
            page.wait_for_function("([s, seq]) => document.querySelector(s).dataset.seq !== seq", arg=[LIVE, seq])
            took.append(float(page.get_attribute(LIVE, "data-ms")))
        rounds.append(max(took))
        if rounds[-1] < 150:
            break
    with capsys.disabled():
        print(f"\n2,000,000 events: slowest of ten zooms and pans {min(rounds):.0f} ms")
    assert min(rounds) < 150


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_opens_from_disk(browser, tmp_path: Path, scheme: str) -> None:
    uses = [use_of(many_events(4000, seed)) for seed in range(3)]
    path = write_memory_page(uses, tmp_path / "a.html", title=HOSTILE)
    page = browser.new_context(color_scheme=scheme, viewport={"width": 1200, "height": 1500}).new_page()
    asked, said = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(path.as_uri())
    page.wait_for_selector(f"{LIVE}[data-painted]:visible")
    assert page.locator(f"{LIVE}:visible").count() == 1
    page.locator(".tk-bars label").nth(1).click()
    page.wait_for_selector(f".tk-d1 {LIVE}[data-painted]")
    live = page.locator(f".tk-d1 {LIVE}")
    live.locator("canvas").focus()
    for key in ("+", "ArrowRight", "0", "p"):
        page.keyboard.press(key)
        page.wait_for_timeout(120)
    page.wait_for_selector(".tk-d1 .tk-detail:not([hidden]) :text('at the peak')")
    live.locator("select").nth(0).select_option("kind")
    page.wait_for_selector(".tk-d1 .tk-legend button:has-text('gradients')")
    shot(page, f"memory-page-{scheme}")
    assert page.evaluate(FAULTS.replace(".tk-model", VIEW)) == []
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert page.title() == " ".join(HOSTILE.split())
    page.context.close()


@pytest.mark.parametrize("axis", ["events", "time"])
def test_javascript_and_python_see_the_same(browser, tmp_path: Path, axis: str) -> None:
    use = use_of(many_events(1800))  # few enough for every moment and block to be embedded
    page = browser.new_page()
    page.goto(write_memory_page(use, tmp_path / "a.html").as_uri())
    page.wait_for_selector(f"{LIVE}[data-painted]")
    view = view_of(use, "kind")
    low, high = view.bounds(axis)
    for a, b in ((0.0, 1.0), (0.2, 0.7), (0.5, 0.51), (0.5, 0.5001)):
        x0, x1 = low + a * (high - low), low + b * (high - low)
        asked = {"by": "kind", "axis": axis, "x0": x0, "x1": x1, "width": 600}
        there = page.evaluate(
            "async (asked) => { const view = await window.tkProvider.view(asked); return {"
            " position: [...view.position], total: [...view.total], held: view.held.map((b) => [...b]) } }",
            asked,
        )
        here = view.columns(x0, x1, 600, axis)
        assert there["total"] == here.total.tolist()
        assert there["position"] == here.position.tolist()
        assert np.array_equal(there["held"], here.bands)
    for position in (use.ledger.peak, 0, 777):
        there = page.evaluate("(position) => window.tkProvider.at(position)", position)
        here = view.at(position)
        assert there["total"] == here.total_bytes
        assert [row[0] for row in there["rows"]] == [row.bytes for row in here.rows]
        assert there["rest"] == [here.rest_bytes, here.rest_holders]
    page.close()


def test_without_scripts_still_pictures_remain(browser, tmp_path: Path) -> None:
    path = write_memory_page([use_of(many_events(2000)), use_of(many_events(2000, 1))], tmp_path / "a.html")
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(path.as_uri())
    assert page.locator("img.tk-picture:visible").count() == 1
    page.locator(".tk-bars label").nth(1).click()
    assert page.locator(".tk-d1 img.tk-picture").is_visible()
    context.close()
