"""The timeline in a real JupyterLab: painted, moved by mouse and keys, kept in a saved notebook, fast with a million events."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import command, expect, ready, reopen, run_all, saved, subshell
from synthetic import __file__ as SYNTHETIC
from synthetic import decode_loop

if TYPE_CHECKING:
    from playwright.sync_api import Locator

SETUP = f"""import sys; sys.path.insert(0, {str(Path(SYNTHETIC).parent)!r})
from synthetic import decode_loop, many_events
from toolkit.ui.timeline.widget import Timeline"""
ONE = "Timeline(decode_loop())"
TWO = "Timeline(decode_loop(), decode_loop(h2d=0, scale=.7), titles=('roundtrip', 'double-buffered'))"
FRAME = ".tk-timeline"
GUTTER = 184
CANVAS = ".tk-timeline canvas"

# Runs in the page: do something, then wait for the next view that was answered and painted. Milliseconds, and its bytes.
ANSWERED = """async ([act, selector]) => {
  const frame = document.querySelector(selector), canvas = frame.querySelector("canvas"), seq = frame.dataset.seq;
  const box = canvas.getBoundingClientRect(), began = performance.now();
  const at = { bubbles: true, cancelable: true, clientX: box.left + 600, clientY: box.top + 90 };
  if (act.wheel) canvas.dispatchEvent(new WheelEvent("wheel", { ...at, deltaY: act.wheel }));
  else canvas.dispatchEvent(new KeyboardEvent("keydown", { key: act.key, bubbles: true }));
  const frames = () => new Promise((next) => requestAnimationFrame(next));
  while (frame.dataset.seq === seq) { await frames(); if (performance.now() - began > 5000) throw new Error("no answer"); }
  await frames();
  return [performance.now() - began, Number(frame.dataset.bytes)];
}"""


def shot(page, name: str) -> None:
    """Keep a picture where TOOLKIT_SHOTS names a folder, for people to look at."""
    if folder := os.environ.get("TOOLKIT_SHOTS"):
        page.screenshot(path=f"{folder}/{name}.png")


def status(page) -> Locator:
    return page.locator(".tk-timeline .tk-status")


def colors(page) -> int:
    """How many colors the canvas shows: 1 is a blank one."""
    return page.evaluate("""(selector) => { const canvas = document.querySelector(selector);
      const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      return new Set(new Uint32Array(data.buffer)).size }""", CANVAS)  # fmt: skip


# Whether any lane shows an event: its pixels differ from those of an empty lane.
PAINTED = """(selector) => { const canvas = document.querySelector(selector), r = devicePixelRatio;
  const { data } = canvas.getContext("2d").getImageData(190 * r, 72 * r, canvas.width - 200 * r, canvas.height - 80 * r);
  return new Set(new Uint32Array(data.buffer)).size > 4 }"""


def answered(page, **act: object) -> tuple[float, int]:
    return page.evaluate(ANSWERED, [act, FRAME])


def test_hover_click_zoom_pan_and_keys(notebook) -> None:
    page = notebook(SETUP, ONE)
    page.wait_for_selector(f"{FRAME}[data-ms]")
    assert colors(page) > 20
    canvas = page.locator(CANVAS)
    box = canvas.bounding_box()
    plot = box["width"] - GUTTER

    # it opens on the step in the middle, under a sentence
    assert "recording takes 121 µs; waits 4 µs; 12 kernels; 2 H2D copies (16 B)" in page.inner_text(".tk-answer")
    trace = decode_loop()
    step = trace.is_kind("mark") & (trace["step"] == 3)
    (begin,), (took,) = trace["start_ns"][step], trace["dur_ns"][step]
    opened = status(page).inner_text()
    assert "shown, from 4.84 µs before the start of step 3" in opened

    # hover over its D2D: name, bytes and the line appear
    row = (trace.is_kind("d2d") & (trace["step"] == 3)).argmax()
    x = GUTTER + plot * ((trace["start_ns"][row] + trace["dur_ns"][row] / 2 - begin) / took + 0.04) / 1.08
    page.mouse.move(box["x"] + x, box["y"] + 68 + 3 * 25 + 10)
    page.wait_for_selector(".tk-tip:not([hidden]) :text('models/cache.py:31')")
    assert "2.00 MiB" in page.inner_text(".tk-tip")
    assert "modelled" in page.inner_text(".tk-tip")
    page.mouse.click(box["x"] + x, box["y"] + 68 + 3 * 25 + 10)
    page.wait_for_selector(".tk-detail :text('2,097,152 B')")

    canvas.focus()
    page.keyboard.press("o")
    expect(status(page)).not_to_contain_text("of step")
    whole = status(page).inner_text()
    answered(page, wheel=-600)
    expect(status(page)).not_to_have_text(whole)
    zoomed = status(page).inner_text()
    page.mouse.move(box["x"] + 700, box["y"] + 90)
    page.mouse.down()
    page.mouse.move(box["x"] + 500, box["y"] + 90, steps=4)
    page.mouse.up()
    expect(status(page)).not_to_have_text(zoomed)
    page.mouse.dblclick(box["x"] + 400, box["y"] + 60)
    expect(status(page)).to_have_text(whole)
    page.keyboard.down("Shift")
    page.mouse.move(box["x"] + 300, box["y"] + 90)
    page.mouse.down()
    page.mouse.move(box["x"] + 400, box["y"] + 90, steps=3)
    page.mouse.up()
    page.keyboard.up("Shift")
    page.wait_for_selector(".tk-sums :text('host waits')")
    page.keyboard.press("Enter")
    expect(status(page)).not_to_have_text(whole)
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("Escape")
    page.wait_for_selector(".tk-sums[hidden]", state="attached")
    cells = page.locator(".jp-Cell").count()
    for key in ("ArrowRight", "ArrowLeft", "ArrowUp", "ArrowDown", "+", "-"):
        before = status(page).inner_text()
        page.keyboard.press(key)
        expect(status(page), key).not_to_have_text(before)
    page.keyboard.press("Home")
    expect(status(page)).to_have_text(whole)
    page.keyboard.press("o")
    expect(status(page)).to_have_text(opened)
    page.keyboard.press("n")
    page.keyboard.press("n")
    page.wait_for_function("() => document.querySelector('.tk-timeline input').value === '5'")
    page.keyboard.press("p")
    page.wait_for_function("() => document.querySelector('.tk-timeline input').value === '4'")
    page.keyboard.press("/")
    page.keyboard.type("layer_7")
    page.keyboard.press("Enter")
    page.wait_for_selector(".tk-found:text('5 of 6')")
    page.wait_for_selector(".tk-detail dd:text('models/qwen3.py:47')")
    page.keyboard.press("Escape")
    for _ in range(30):  # no zoom ends between two events
        page.keyboard.press("+")
    expect(status(page)).to_contain_text("50 ns shown")
    assert page.evaluate(PAINTED, CANVAS)
    page.keyboard.press("n")
    expect(status(page)).to_contain_text("of step 5")
    page.keyboard.press("Escape")
    page.wait_for_selector(".tk-detail[hidden]", state="attached")
    page.keyboard.press(".")
    page.wait_for_selector(".tk-detail dd:text('host memory'), .tk-detail dt:text('bytes')")
    page.fill(".tk-timeline input", "4")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('.tk-timeline input').value === '4'")
    assert page.locator(".jp-Cell").count() == cells  # JupyterLab took none of the keys for its own
    page.click(".tk-timeline button:text('Table')")
    page.wait_for_selector(".tk-tables table")
    assert page.locator(".tk-tables tbody tr").count() == 6
    shot(page, "timeline-light")


def test_enter_goes_to_the_step_that_was_typed_while_a_cell_runs(notebook, tmp_path: Path) -> None:
    go = tmp_path / "go"
    first = f"{SETUP}\nimport pathlib, time, ipywidgets\nipywidgets.HTML('a first widget')"
    shown = f"display({ONE})\nwhile not pathlib.Path({str(go)!r}).exists():\n    time.sleep(0.1)"
    page = notebook(first, shown, run=False)
    ready(page)
    command(page, "notebook:run-cell-and-select-next")
    page.wait_for_selector(":text-is('a first widget')")
    subshell(page)
    command(page, "notebook:run-cell-and-select-next")
    page.wait_for_selector(f"{FRAME}[data-ms]")
    for typed, step in (("2", "2"), ("99", "5")):
        page.get_by_label("Go to step").select_text()
        page.keyboard.type(typed)
        page.keyboard.press("Enter")
        expect(status(page)).to_contain_text(f"of step {step}")
        expect(page.get_by_label("Go to step")).to_have_value(step)
    page.keyboard.press("p")  # the timeline has the focus
    expect(status(page)).to_contain_text("of step 4")
    assert page.is_visible(".jp-InputPrompt:text('[*]')")
    go.touch()


def test_two_runs_side_by_side_in_the_dark_theme(notebook) -> None:
    page = notebook(SETUP, TWO, dark=True)
    page.wait_for_selector(f"{FRAME}[data-ms]")
    said = page.inner_text(".tk-answer")
    assert said.startswith(
        "double-buffered takes 82.6 µs instead of 121 µs; waits 2.8 µs instead of 4 µs; 2 H2D copies fewer; same kernels"
    )
    assert page.input_value(".tk-timeline input") == "3"
    background = page.evaluate("() => getComputedStyle(document.querySelector('.tk-timeline')).backgroundColor")
    assert sum(int(part) for part in background[4:-1].split(",")[:3]) < 200, background
    assert colors(page) > 20
    page.keyboard.press("Tab")
    shot(page, "timeline-dark")


# The color of the first pixel of the picture that is shown.
CORNER = """(selector) => { const image = [...document.querySelectorAll(selector)].find((one) => one.offsetParent);
  const canvas = document.createElement("canvas"), pen = canvas.getContext("2d");
  canvas.width = image.naturalWidth; canvas.height = image.naturalHeight;
  pen.drawImage(image, 0, 0);
  return [...pen.getImageData(1, 1, 1, 1).data] }"""


def test_the_still_picture_follows_the_theme(notebook) -> None:
    """As in a notebook without a kernel, or in a front end without widgets."""
    page = notebook(SETUP, "from IPython.display import HTML\nHTML(Timeline(decode_loop())._still())")
    page.wait_for_selector(".tk-place-of-picture img")
    for name, corner in (("Dark", [0, 0, 0, 0]), ("Light", [255, 255, 255, 255])):  # dark: the page's color
        command(page, "apputils:change-theme", {"theme": f"JupyterLab {name}"})
        page.wait_for_selector(f"body[data-jp-theme-light='{str(name == 'Light').lower()}']", state="attached")
        page.wait_for_timeout(300)
        shot(page, f"timeline-still-{name}")
        assert page.evaluate(CORNER, ".tk-place-of-picture img") == corner


def test_a_trace_without_steps_has_no_empty_row_for_them(notebook) -> None:
    events = "one = decode_loop()\none = one.select(~one.is_kind('mark'))\nTimeline(one)"
    bare = "Timeline(type(one)({**one.columns, 'step': one['step'] * 0 - 1}, one.strings, one.meta))"
    page = notebook(SETUP, events, bare)
    expect(page.locator(f"{FRAME}[data-ms]")).to_have_count(2)
    with_steps, without = (canvas.bounding_box()["height"] for canvas in page.locator(CANVAS).all())
    assert with_steps - without == 20


def test_a_short_run_is_not_in_python_after_its_end(notebook) -> None:
    page = notebook(
        "import toolkit as tk",
        "tk.open_trace('h200/qwen3/roundtrip').timeline(tk.open_trace('h200/qwen3/cuda-graph'))",  # 64 and 24 ms
    )
    page.wait_for_selector(f"{FRAME}[data-ms]")
    page.click(".tk-timeline button:text-is('Overview')")
    page.wait_for_selector(".tk-timeline button:text-is('One step')")
    page.click(".tk-timeline button:text-is('Sums')")
    page.wait_for_selector(".tk-sums :text('neither launching nor waiting')")
    rows = page.locator(".tk-sums tr:has-text('host')").all_inner_texts()
    for run in ("A roundtrip", "B cuda-graph"):
        shares = [float(re.search(r"\(<?([\d.]+) %\)", row)[1]) for row in rows if row.startswith(run)]
        assert sum(shares) == pytest.approx(100, abs=1.5), rows


# JupyterLab loads its renderer of formulas (50 to 70 ms of the page's only thread) for the first text or HTML of a page:
# in a notebook with text cells when it is opened, and else for the still picture that comes with the timeline.
TEXT = "from IPython.display import Markdown; display(Markdown('# A text'))"


@pytest.mark.timed
@pytest.mark.usefixtures("new_tab")
@pytest.mark.parametrize("text", [True, False], ids=["text", "no-text"])
def test_a_million_events(notebook, text: bool, capsys: pytest.CaptureFixture[str]) -> None:
    made = "trace = many_events(1_000_000); len(trace)"
    page = notebook(SETUP, TEXT if text else "", made, "Timeline(trace)", run=False, timed=True)
    ready(page)
    for _ in range(3):
        command(page, "notebook:run-cell-and-select-next")
    page.wait_for_selector(".jp-OutputArea-output :text('1000000')", timeout=60_000)
    if text:
        page.wait_for_selector(".jp-RenderedMarkdown h1")
        page.wait_for_timeout(500)
    paint = page.evaluate("""async () => {
      const began = performance.now();
      window.jupyterapp.commands.execute("notebook:run-cell");
      while (!document.querySelector(".tk-timeline[data-painted]")) await new Promise((next) => requestAnimationFrame(next));
      return performance.now() - began;
    }""")
    assert colors(page) > 10
    page.wait_for_selector(f"{FRAME}[data-ms]")
    acts = (
        [{"wheel": -300}] * 8
        + [{"key": "ArrowRight"}] * 4
        + [{"key": "ArrowLeft"}] * 4
        + [{"key": "-"}] * 8
        + [{"key": "+"}] * 12
    )
    rounds, size = [], 0
    for _ in range(3):  # what else the machine does only adds time: the best of three rounds counts
        answers = [answered(page, **act) for act in acts]
        size = max(size, *(n for _, n in answers))
        rounds.append(sorted(ms for ms, _ in answers))
        if rounds[-1][-1] < 150:
            break
    took = min(rounds, key=lambda times: times[-1])
    said = f"{len(took)} pans and zooms, median {took[len(took) // 2]:.0f} ms, slowest {took[-1]:.0f} ms"
    with capsys.disabled():
        where = "below a text" if text else "in a page without text"
        print(f"\n1,000,000 events {where}: first paint {paint:.0f} ms; {said}; largest view {size / 1000:.1f} kB")
    assert size < 100_000
    assert paint < 1500
    assert took[-1] < 150


def test_a_saved_notebook_shows_its_timeline_without_a_kernel_and_runs_again(notebook, lab) -> None:
    page = notebook(SETUP, ONE)
    page.wait_for_selector(f"{FRAME}[data-ms]")
    answered(page, key="n")  # the status says so before, and the view is what is saved
    expect(status(page)).to_contain_text("of step 4")
    seen = status(page).inner_text()
    found = saved(page, lab)
    assert len(json.dumps(found["metadata"]["widgets"])) < 110_000
    kept = found["cells"][1]["outputs"][1]["data"]
    assert "modelled time" in "".join(kept["text/plain"])
    assert "data:image/svg+xml" in "".join(kept["text/html"])

    reopen(page, lab, f"{FRAME}[data-painted]")
    assert colors(page) > 20
    expect(status(page)).to_contain_text(seen.split(" · ")[0])
    page.focus(CANVAS)
    page.keyboard.press("+")  # nobody answers: the last view is stretched, and says so
    page.wait_for_selector(".tk-status:text('the last view')", timeout=8000)
    run_all(page)
    page.wait_for_selector(f"{FRAME}[data-ms]")


def test_restarting_the_kernel_leaves_the_view_and_running_again_mends_it(notebook) -> None:
    page = notebook(SETUP, ONE)
    page.wait_for_selector(f"{FRAME}[data-ms]")
    page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart().then(() => true)")
    ready(page)
    page.wait_for_timeout(500)
    if page.locator(CANVAS).count():
        page.focus(CANVAS)
        page.keyboard.press("+")
        page.wait_for_selector(".tk-status:text('the last view')", timeout=8000)
    run_all(page)
    page.wait_for_selector(f"{FRAME}[data-ms]")
    answered(page, key="+")
