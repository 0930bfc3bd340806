"""Tests of the figures and tables of decode speeds: round ticks, and no columns without a figure."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

from test_colors import contrast

import toolkit.bench
import toolkit.ui
from toolkit.decode.strategies import STRATEGIES
from toolkit.ui.figures.speed import COLORS, GAP, OTHER, roofline_figure, speed_figure
from toolkit.ui.figures.speed_page import write_speed_page

RECORD = json.loads((Path(toolkit.bench.__file__).parent / "results" / "h200_speed_qwen3-8b.json").read_text())


def test_logarithmic_axes_say_whole_numbers() -> None:
    figure = roofline_figure([RECORD])
    assert list(figure.layout.xaxis.ticktext) == ["5", "10"]
    assert list(figure.layout.yaxis.ticktext) == ["200", "500", "1,000"]
    low, high = (10**exponent for exponent in figure.layout.xaxis.range)
    assert all(low < x < high for trace in figure.data if trace.mode == "markers" for x in trace.x)
    assert "GiB" in figure.layout.xaxis.title.text


def drawn(record: dict[str, Any], *names: str) -> dict[str, Any]:
    """The record with the measurements of its last strategy under these names."""
    rows = [{**row, "strategies": dict.fromkeys(names, [*row["strategies"].values()][-1])} for row in record["rows"]]
    return {**record, "rows": rows}


def test_a_strategy_has_one_color_and_symbol_in_all_figures_of_a_page(tmp_path: Path) -> None:
    few, own = drawn(RECORD, "whole-loop", "roundtrip"), drawn(RECORD, "its own loop")
    all_of_them = drawn(RECORD, *STRATEGIES, "another loop") | {"clock": "modelled"}
    page = write_speed_page([few, all_of_them, own], tmp_path / "page.html").read_text()
    parts = [part.partition("</script>")[0] for part in page.split('<script type="application/json">')[1:]]
    colors: dict[str, set[str]] = {}
    symbols: dict[str, set[str]] = {}
    for trace in (trace for part in parts for trace in json.loads(part)["data"] if trace["name"][:6] != "limit:"):
        both = {trace["marker"]["color"], trace.get("line", trace["marker"])["color"]}
        colors.setdefault(trace["name"].partition(",")[0], set()).update(both)
        symbols.setdefault(trace["name"].partition(",")[0], set()).add(trace["marker"]["symbol"].removesuffix("-open"))
    assert set(colors) == {*STRATEGIES, "its own loop", "another loop"}
    assert {len(found) for found in colors.values()} == {1}
    assert len(set.union(*colors.values())) == len(colors)
    assert {len(found) for found in symbols.values()} == {1}
    assert len(set.union(*symbols.values())) == len(symbols)
    for record in (few, all_of_them):  # as on pages of their own
        for trace in speed_figure(record).data:
            if (name := trace.name.partition(",")[0]) in STRATEGIES:
                assert trace.line.color in colors[name]


def test_colors_are_readable_on_both_pages() -> None:
    grounds = re.findall(r"background: (#\w{6}); color", (Path(toolkit.ui.__file__).parent / "page.css").read_text())
    assert len(grounds) == 2
    for color in (*COLORS, GAP, OTHER):
        assert min(contrast(color, ground) for ground in grounds) >= 3


def test_columns_that_the_record_lacks_are_left_out(tmp_path: Path) -> None:
    page = write_speed_page([RECORD], tmp_path / "page.html").read_text()
    assert '<th scope="col">first token</th>' in page
    assert "kernels per step" not in page
    counted = copy.deepcopy(RECORD)
    counted["rows"][0]["strategies"]["cuda-graph"]["kernels_per_step"] = 3
    page = write_speed_page([counted], tmp_path / "counted.html").read_text()
    assert '<th scope="col">kernels per step</th>' in page
