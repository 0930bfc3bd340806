"""Tests of the figures and tables of decode speeds: round ticks, and no columns without a figure."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import toolkit.bench
from toolkit.ui.figures.speed import roofline_figure
from toolkit.ui.figures.speed_page import write_speed_page

RECORD = json.loads((Path(toolkit.bench.__file__).parent / "results" / "h200_speed_qwen3-8b.json").read_text())


def test_logarithmic_axes_say_whole_numbers() -> None:
    figure = roofline_figure([RECORD])
    assert list(figure.layout.xaxis.ticktext) == ["5", "10"]
    assert list(figure.layout.yaxis.ticktext) == ["200", "500", "1,000"]
    low, high = (10**exponent for exponent in figure.layout.xaxis.range)
    assert all(low < x < high for trace in figure.data if trace.mode == "markers" for x in trace.x)
    assert "GiB" in figure.layout.xaxis.title.text


def test_columns_that_the_record_lacks_are_left_out(tmp_path: Path) -> None:
    page = write_speed_page([RECORD], tmp_path / "page.html").read_text()
    assert '<th scope="col">first token</th>' in page
    assert "kernels per step" not in page
    counted = copy.deepcopy(RECORD)
    counted["rows"][0]["strategies"]["cuda-graph"]["kernels_per_step"] = 3
    page = write_speed_page([counted], tmp_path / "counted.html").read_text()
    assert '<th scope="col">kernels per step</th>' in page
