"""Charts of the lessons: round ticks around all points, and names that don't overlap."""

from __future__ import annotations

import re

import pytest

from toolkit.ui.lessons.chart import Chart, Line, ticks


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 32768, [0, 10_000, 20_000, 30_000, 40_000]),
        (0.1, 4.5, [0, 1, 2, 3, 4, 5]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
        (2, 2, [2]),
    ],
    ids=["tokens", "GiB", "both signs", "one number"],
)
def test_ticks_are_round_and_enclose_the_points(low: float, high: float, expected: list[float]) -> None:
    found = ticks(low, high)
    assert found[: len(expected)] == pytest.approx(expected)
    assert found[0] <= low
    assert found[-1] >= high
    assert len(found) > 1


def test_names_are_apart_and_escaped() -> None:
    chart = Chart(
        (Line("a < b", [0, 1], [0, 5]), Line("c", [0, 1], [0, 5.01]), Line("dots", [0, 1], [0, 4.9], dots=True)), "x", "y"
    )
    svg = chart._repr_html_()
    names = [float(y) for y in re.findall(r'<text x="512.0" y="([\d.]+)"', svg)]
    assert sorted(names)[1] - sorted(names)[0] >= 15
    assert len(names) == 3
    assert "a &lt; b" in svg
    assert "a < b: 5 at 1" in repr(chart)
