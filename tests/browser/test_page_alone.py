"""A written page, opened from disk: it draws, asks nothing of the network, and its JavaScript finds what Python finds."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from synthetic import decode_loop, many_events, ranks
from test_view import parse

from toolkit.trace.columns import KINDS
from toolkit.trace.opening import open_trace
from toolkit.ui.timeline import overview
from toolkit.ui.timeline.page import write_page
from toolkit.ui.timeline.track import Track
from toolkit.ui.timeline.view import MODELLED, Scene

FRAME = ".tk-timeline"
EVIL = "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'</script>"


def colors(page) -> int:
    return page.evaluate("""() => { const canvas = document.querySelector(".tk-timeline canvas");
      const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      return new Set(new Uint32Array(data.buffer)).size }""")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_opens_from_disk(browser, tmp_path: Path, scheme: str) -> None:
    path = write_page({"roundtrip": decode_loop(), EVIL: decode_loop(h2d=0, scale=0.6)}, tmp_path / "a.html", title=EVIL)
    page = browser.new_context(color_scheme=scheme, viewport={"width": 1200, "height": 800}).new_page()
    asked, said = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(path.as_uri())
    page.wait_for_selector(f"{FRAME}[data-ms]")
    assert colors(page) > 20
    assert page.input_value("#tk-b") == "1"
    assert page.inner_text(".tk-answer").startswith(f"{EVIL} takes")
    page.focus(".tk-timeline canvas")
    for key in ("n", "+", "ArrowRight", "o", "o", "."):
        page.keyboard.press(key)
        page.wait_for_timeout(150)
    page.wait_for_selector(".tk-detail:not([hidden]) dd")
    page.click(".tk-timeline button:text('Table')")
    page.wait_for_selector(".tk-tables tbody tr")
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert page.title() == EVIL.strip()
    page.context.close()


@pytest.mark.parametrize("share", [(0.0, 1.0), (0.31, 0.05), (0.5, 0.001), (0.7, 0.00002)], ids=str)
def test_javascript_and_python_see_the_same(browser, tmp_path: Path, share: tuple[float, float]) -> None:
    trace = many_events(60_000)
    page = browser.new_page()
    page.goto(write_page(trace, tmp_path / "a.html").as_uri())
    page.wait_for_selector(f"{FRAME}[data-ms]")
    track = Track(trace, "a")
    low, high = Scene([track]).bounds()
    t0, t1 = low + share[0] * (high - low), low + sum(share) * (high - low)
    names = ["counts", "row", "count", "bytes", "x0", "x1", "kind", "level", "steps", "every", "bounds"]
    there = page.evaluate(
        "([request, names]) => { const view = window.tkProvider.makeView(request); view.kind = [...view.kind];"
        " return names.map((name) => Array.from(view[name])) }",
        [{"t0": t0, "t1": t1, "width": 900, "align": None}, names],
    )
    there = dict(zip(names, there, strict=True))
    here = parse(Scene([track]).view(t0, t1, 900))
    for name in ("counts", "every", "bounds", "steps"):
        assert there[name] == here[name], name
    for name, tolerance in {"count": 0, "bytes": 0, "kind": 0, "x0": 1, "x1": 1, "level": 1}.items():
        assert np.abs(np.array(there[name], float) - here[name]).max() <= tolerance, name
    # rows are numbered without the step marks, which the page keeps apart
    kept = np.cumsum(~(trace.is_kind("mark"))) - 1
    assert there["row"] == kept[here["row"]].tolist()
    asked = """async () => {
      const find = async (move, last) => (await tkProvider.find({ text: "memcpy", near: -1, move, last })).number;
      const step = async (move) => (await tkProvider.step({ track: 0, step: 2, move }))[0];
      const copies = (await tkProvider.find({ text: "D2H", near: -1, move: 1 })).count;
      const layer = (text) => tkProvider.find({ text, near: -1, move: 1 });
      const layers = [(await layer("Layer 2")).count, await layer("layer -1")];
      const visited = [await find(1, null), await find(1, 1), await find(-1, 3), await find(-1, 1)];
      return [copies, layers, ...visited, await step(1), await step(-1)];
    }"""
    copies, layers, *found, last, after, before = page.evaluate(asked)
    assert layers == [Scene([track]).find("layer 2", -1, 1)["count"], None]
    assert copies == Scene([track]).find("D2H", -1, 1)["count"] > 0
    assert (found, last) == ([1, 2, 2], Scene([track]).find("memcpy", -1, -1)["number"])
    assert (after, before) == tuple(Scene([track]).find_step(0, 2, move=move)[0] for move in (1, -1))
    page.close()


def test_javascript_and_python_say_the_same_of_several_ranks(browser, tmp_path: Path) -> None:
    trace = ranks(3)
    page = browser.new_page()
    page.goto(write_page(trace, tmp_path / "a.html").as_uri())
    page.wait_for_selector(f"{FRAME}[data-ms]")
    scene = Scene([Track(trace, "a")])
    shown = np.flatnonzero(~trace.is_kind("mark"))  # a page keeps the marks of steps apart
    asked = """async (n) => { const facts = [];
      for (let row = 0; row < n; row++) facts.push(await tkProvider.facts(0, row));
      const view = (t0, t1) => tkProvider.makeView({ t0, t1, width: 900, align: null }).links;
      const { count } = await tkProvider.find({ text: "all_reduce", near: -1, move: 1 });
      return [facts, [view(0, 3e6), view(2.06e6, 2.1e6)], count] }"""
    facts, links, found = page.evaluate(asked, len(shown))
    assert facts == [overview.facts(scene.tracks[0], int(row)) for row in shown]
    assert links == [parse(scene.view(*window, 900))["links"] for window in ((0, 3e6), (2.06e6, 2.1e6))]
    assert found == scene.find("all_reduce", -1, 1)["count"]
    page.close()


def test_measured_and_modelled_side_by_side_are_labelled(browser, tmp_path: Path) -> None:
    path = write_page(decode_loop(clock="measured"), tmp_path / "a.html", decode_loop())
    page = browser.new_page()
    page.goto(path.as_uri())
    page.wait_for_selector(f"{FRAME}[data-ms]")
    words = page.inner_text(".tk-legend")
    assert "solid: measured time" in words
    assert "hatched: modelled time" in words
    assert "modelled, not measured" in page.inner_text(FRAME)
    page.close()


def test_overlapping_events_count_once_in_the_share_of_their_lane(browser, tmp_path: Path) -> None:
    """As in "Sums". In a CUDA graph, a kernel may begin before the previous one of its stream ends."""
    page = browser.new_page()
    page.add_init_script("""window.drawn = []; const pen = CanvasRenderingContext2D.prototype, { fillText } = pen;
      pen.fillText = function (...given) { drawn.push(given[0]); fillText.apply(this, given) }""")
    page.goto(open_trace("h200/qwen3/cuda-graph").to_html(tmp_path / "a.html").as_uri())
    page.wait_for_selector(f"{FRAME}[data-ms]")
    page.focus(f"{FRAME} canvas")
    page.keyboard.press("s")
    sums = page.locator(".tk-sums tr:has-text('kernels stream 0')")
    sums.wait_for()
    drawn = page.evaluate("drawn")
    parts = zip(drawn, drawn[1:], drawn[2:], strict=False)
    shares = [share for lane, share, place in parts if (lane, place) == ("kernels", "stream 0")]
    assert shares[-1] == re.search(r"\((.+ %)\)", sums.inner_text())[1]
    page.close()


def test_without_scripts_a_still_picture_and_tables_remain(browser, tmp_path: Path) -> None:
    path = write_page(decode_loop(), tmp_path / "a.html")
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(path.as_uri())
    assert page.locator("noscript img").is_visible()
    assert page.locator("details table tbody tr").count() == 6
    context.close()


def test_a_browser_that_cannot_inflate_shows_the_still_picture(browser, tmp_path: Path) -> None:
    page = browser.new_page()
    page.add_init_script("delete window.DecompressionStream")
    page.goto(write_page(many_events(60_000), tmp_path / "a.html").as_uri())
    page.wait_for_selector("#tk-place img")
    assert "A still picture follows" in page.inner_text("#tk-place")
    page.close()


def test_the_table_button_shows_the_copies_of_the_chosen_runs(browser, tmp_path: Path) -> None:
    page = browser.new_page()
    page.goto(write_page({"a": decode_loop(), "b": decode_loop(h2d=0, steps=4)}, tmp_path / "a.html").as_uri())
    page.wait_for_selector(f"{FRAME}[data-ms]")
    page.select_option("#tk-a", "1")
    page.select_option("#tk-b", "")
    page.wait_for_function("() => document.querySelector('.tk-timeline canvas').ariaLabel.startsWith('Timeline of b')")
    page.click(f"{FRAME} button:text('Table')")
    page.wait_for_selector(".tk-tables table")
    assert page.inner_text(".tk-tables caption") == "b: copies per step"
    assert page.locator(".tk-tables tbody tr").count() == 4
    assert page.locator(".tk-tables tbody tr").first.inner_text().split("\t")[:3] == ["0", "12", "not recorded"]
    page.close()


def test_kinds_fit_a_byte() -> None:
    assert len(KINDS) < MODELLED


def test_headings_of_ranks_can_be_read_over_lines(browser, tmp_path: Path) -> None:
    """Lines of collectives and steps cross the headings, so each text covers them first."""
    page = browser.new_page()
    page.add_init_script("""window.drawn = []; for (const name of ["fillRect", "fillText"]) {
      const pen = CanvasRenderingContext2D.prototype, draw = pen[name];
      pen[name] = function (...args) { drawn.push([name, ...args]); return draw.apply(this, args); } }""")
    page.goto(write_page(ranks(2), tmp_path / "a.html").as_uri())
    page.wait_for_selector(f"{FRAME}[data-ms]")
    page.wait_for_function("drawn.some(([name, text]) => name === 'fillText' && `${text}`.includes('came last in'))")
    drawn = page.evaluate("drawn")
    found = [i for i, (_, text, *_) in enumerate(drawn) if "came last in" in str(text)]
    assert len(found) >= 2
    for i in found:
        (before, left, top, _, high), (_, _, x, y) = drawn[i - 1], drawn[i]
        assert before == "fillRect"
        assert left < x
        assert top < y < top + high
    page.close()


@pytest.mark.parametrize("with_collectives", [False, True])
def test_the_legend_explains_lines_only_if_there_are_collectives(browser, tmp_path: Path, with_collectives: bool) -> None:
    page, trace = browser.new_page(), ranks(2)
    trace = trace if with_collectives else trace.select(~trace.is_kind("collective"))
    page.goto(write_page(trace, tmp_path / "a.html").as_uri())
    page.wait_for_selector(f"{FRAME}[data-ms]")
    assert ("line: one collective" in page.inner_text(".tk-legend")) == with_collectives
    page.close()
