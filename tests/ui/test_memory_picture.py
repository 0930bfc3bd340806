"""Tests of static memory views: exact text, small size, valid markup, and escaped names and source lines."""

from __future__ import annotations

import base64
import re
import time
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from memory_events import GIB, HOSTILE, many_events, recording, small, use_of
from test_colors import contrast

from tests.speed import within
from toolkit.core.units import bytes_text
from toolkit.ui.memory.drawing import GRAYS, PALETTE, colors, step_of
from toolkit.ui.memory.page import write_memory_page
from toolkit.ui.memory.picture import html, line_html, session_html, svg, view_of
from toolkit.ui.memory.view import MemoryView


class Reader(HTMLParser):
    """Collects the text and tags of an HTML fragment and checks that the tags are nested correctly."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.open, self.said = [], [], []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag not in ("img", "input", "br", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.said.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.said).split())


def pictures(text: str) -> list[str]:
    return [base64.b64decode(data).decode() for data in re.findall(r"data:image/svg\+xml;base64,([^\"]+)", text)]


def texts(picture: str) -> list[str]:
    return ["".join(text.itertext()) for text in ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]


def rows_of(*sizes: tuple[int, int, int], status: str = "ok", title: str = "x = f()") -> list[SimpleNamespace]:
    return [
        SimpleNamespace(number=n, title=title, status=status, device="gpu", baseline_bytes=a, peak_bytes=b, end_bytes=c)
        for n, (a, b, c) in enumerate(((a * GIB, b * GIB, c * GIB) for a, b, c in sizes), 3)
    ]


def test_the_picture_says_peak_limit_and_clock() -> None:
    view = view_of(small())
    drawn = svg(view, budget_bytes=8 * GIB)
    ET.fromstring(drawn)
    assert "peak 5.00 GiB" in drawn
    assert "budget 8.00 GiB" in drawn
    assert "modelled" not in drawn
    assert "time, measured" in svg(view, axis="time")
    modelled = view_of(small(clock="modelled"))
    assert "time, modelled" in svg(modelled, axis="time")
    assert "times are modelled" in svg(modelled, axis="events")
    assert "modelled, not measured" in html(small(clock="modelled"))
    assert (
        "budget" not in svg(view, budget_bytes=80 * GIB).replace("aria-label", "").split(">", 1)[1]
    )  # far above what is drawn


def test_the_budget_of_the_device_and_the_cards_memory_are_lines() -> None:
    assert "memory of the GPU 6.00 GiB" in texts(svg(view_of(small(total_bytes=6 * GIB, limit_bytes=6 * GIB))))
    assert "budget 6.00 GiB" in texts(svg(view_of(small(total_bytes=9 * GIB, limit_bytes=6 * GIB))))


def test_a_picture_of_little_change_says_where_its_axis_begins() -> None:
    rows = (("alloc", 1, 100 * GIB), ("alloc", 2, GIB), ("free", 2, GIB), ("alloc", 3, GIB))
    drawn = svg(view_of(use_of(recording(*rows, opening=1))))
    assert "the axis begins at 99.5 GiB, not at 0" in drawn
    assert "+512 MiB" in drawn
    assert "not at 0" not in svg(view_of(small()))


@pytest.mark.parametrize("size", [1, 511, 3000, 1 << 20, 5 * GIB, 77 * GIB, 3 << 40])
def test_ticks_are_round_and_few(size: int) -> None:
    step = step_of(size)
    assert step & (step - 1) == 0
    assert size / step < 8.01
    assert size < 4 or size / step >= 3.99


def test_an_empty_measurement_has_a_picture() -> None:
    for trace in (recording(), recording(("alloc", 1, 512), opening=1), recording(("oom", -1, GIB))):
        ET.fromstring(svg(view_of(use_of(trace))))
        assert Reader(html(use_of(trace))).tags.count("img") == 1
    assert "no memory was in use" in svg(view_of(use_of(recording())))
    none = html(use_of(recording(device="none", elapsed_s=1.0)))
    assert "no GPU memory used" in none
    assert "<img" not in none
    assert "no GPU memory used" in line_html(use_of(recording(device="none", elapsed_s=1.0)))


def test_memory_of_the_cpu_is_said_not_to_be_counted(tmp_path: Path) -> None:
    use = use_of(recording(device="cpu", elapsed_s=1.0))
    write_memory_page(use, tmp_path / "page.html")
    for text in (html(use), line_html(use), line_html(use, is_open=True), (tmp_path / "page.html").read_text()):
        body = text.split("</style>")[-1].split("<script")[0]
        assert "memory of the CPU isn&#x27;t counted" in body
        assert "0 B" not in body.replace("host peak 0 B", "")
        assert "<img" not in body
    assert "virtual:h200" in line_html(use, is_open=True)
    cells = [SimpleNamespace(number=1, title="x", status="ok", device="cpu", baseline_bytes=0, peak_bytes=0, end_bytes=0)]
    session = session_html(cells, [line_html(use)])
    assert "1 cell, memory of the CPU isn't counted" in session
    assert "peak 0 B" not in session.replace("host peak 0 B", "")


def test_names_and_code_are_text() -> None:
    use = small(owner=f"{HOSTILE}", where=HOSTILE, source={HOSTILE: HOSTILE}, device=HOSTILE, failed=HOSTILE)
    for by in ("owner", "kind", "line", "cell"):
        text = html(use, by)
        assert "script" not in Reader(text).tags
        assert HOSTILE in Reader(text).text or by in ("kind", "cell")
        for drawn in pictures(text):
            assert "script" not in [node.tag.rpartition("}")[2] for node in ET.fromstring(drawn).iter()]
    rows = rows_of((0, 1, 1), title=HOSTILE)
    assert "script" not in Reader(session_html(rows, [line_html(use)])).tags


def test_small_and_quick(capsys: pytest.CaptureFixture[str]) -> None:
    cell, took = many_events(10_000), []
    for _ in range(5):
        use = use_of(cell)
        began = time.thread_time()
        line = line_html(use, budget_bytes=GIB)
        took.append(time.thread_time() - began)
    drawn = svg(view_of(use))
    with capsys.disabled():
        print(f"\n10,000 events: {len(line) / 1000:.0f} kB in {1e3 * min(took):.0f} ms, picture {len(drawn) / 1000:.0f} kB")
    assert len(line) < 80_000
    assert len(drawn) < 60_000
    assert within(min(took), 0.05)
    most = svg(MemoryView(use_of(many_events(400_000)).ledger, "kind", 11))
    ET.fromstring(most)
    assert len(most) < 60_000


def test_the_picture_has_the_peak_where_it_is() -> None:
    use = use_of(many_events(30_000))
    drawn = svg(view_of(use))
    assert f"peak {bytes_text(use.peak_bytes)}" in drawn


def test_a_line_is_red_over_the_budget_and_out_of_memory() -> None:
    fine = line_html(small(), 8 * GIB)
    assert "tk-over" not in fine.split("</style>")[1]
    assert Reader(fine.split("</style>")[1]).text.startswith("peak 5.00 GiB · kept +1.00 GiB")
    over = line_html(small(), 4 * GIB)
    assert "tk-line tk-over" in over
    assert "over the budget of 4.00 GiB" in over
    failed = line_html(small(failed="OutOfMemoryError"))
    assert "tk-line tk-over" in failed
    assert "out of memory" in Reader(failed).text
    assert "tk-line tk-over" not in line_html(small(failed="ValueError"))
    assert "<details class" in fine
    assert " open>" not in fine
    assert " open>" in line_html(small(), is_open=True)


def test_tables_say_who_where_and_what_stayed() -> None:
    said = Reader(html(small(owner="model.weight"))).text
    for words in (
        "Held at the peak",
        "5.00 GiB in 3 blocks",
        "model.weight",
        "x = f()",
        "cell 1 line 1",
        "1.00 GiB held before",
        "allocated during the measurement stayed",
    ):
        assert words in said, words


def test_a_session_is_bars_and_details() -> None:
    rows = rows_of((0, 2, 1), (1, 6, 1)) + rows_of((1, 4, 4), status="error")
    details = [line_html(small(), is_open=True) for _ in rows]
    text = session_html(rows, details, budget_bytes=5 * GIB)
    read = Reader(text)
    assert read.tags.count("input") == 3
    assert "budget 5.00 GiB" in read.text
    assert "3!" in read.text
    assert text.count("tk-cell tk-d") == 3
    assert text.count("<style>") == 2  # the style sheet once, and which detail is shown
    assert re.findall(r'class="tk-c(\d)"[^>]* checked', text) == ["1"]  # the highest
    assert Reader(session_html([], [])).text


def test_colors_read_on_both_grounds_and_differ() -> None:
    for color in (*PALETTE, *GRAYS.values()):
        assert contrast(color, "#ffffff") >= 2.9, color
        assert contrast(color, "#14181d") >= 3.0, color
    view = MemoryView(use_of(many_events(4000)).ledger, "line")
    assert len(set(colors(view))) == len(view.bands)
    kinds = MemoryView(use_of(many_events(4000)).ledger, "kind")
    assert dict(zip([band.name for band in kinds.bands], colors(kinds), strict=True))["weights"] == PALETTE[0]


def test_reserved_memory_is_a_dashed_line_with_its_most() -> None:
    rows = (("segment_alloc", 0, 8 * GIB), ("alloc", 1, 5 * GIB), ("free", 1, 5 * GIB))
    drawn = svg(view_of(use_of(recording(*rows))))
    assert "reserved by the allocator, peak 8.00 GiB" in texts(drawn)
    assert "stroke-dasharray" in drawn


def test_out_of_memory_is_marked() -> None:
    rows = (("alloc", 1, GIB), ("oom", -1, 2 * GIB), ("free", 1, GIB))
    assert "× out of memory: 2.00 GiB more requested" in texts(svg(view_of(use_of(recording(*rows)))))
    assert "out of memory: 2.00 GiB more requested" in Reader(html(use_of(recording(*rows)))).text
