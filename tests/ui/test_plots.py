"""Tests of the figures drawn from a trace."""

from __future__ import annotations

import pytest
from synthetic import decode_loop

from toolkit.trace.events import TraceBuilder
from toolkit.ui.figures.plots import copies_per_step_figure, waits_per_step_figure


def test_bars_are_the_copies_of_each_step() -> None:
    bars = {bar.name: list(bar.y) for bar in copies_per_step_figure(decode_loop()).data}
    assert bars == {"H2D": [2] * 6, "D2H": [1] * 6, "D2D": [1] * 6}
    sizes = copies_per_step_figure(decode_loop(), "bytes").data[0].y
    assert list(sizes) == [16] * 6


@pytest.mark.parametrize(("clock", "shape"), [("modelled", "/"), ("measured", None)])
def test_modelled_waits_are_hatched_and_named(clock: str, shape: str | None) -> None:
    (bar,) = waits_per_step_figure(decode_loop(clock=clock)).data
    assert bar.marker.pattern.shape == shape
    assert clock in bar.name


def test_an_empty_trace() -> None:
    assert copies_per_step_figure(TraceBuilder().build({})).data
