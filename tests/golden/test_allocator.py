"""Tests that the virtual GPU's allocator has the counters of CUDA's on an H200, step by step, under various settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.golden.allocator import EVERY, KEYS, LIMITS, run
from toolkit.gpu.virtual.allocator.blocks import Blocks, Settings

MEASURED = json.loads((Path(__file__).parent / "h200_allocator.json").read_text())


class Placed(Blocks):
    """Blocks with segments at the driver's addresses, since the lower of two free blocks of equal size is used."""

    places: list[int]

    def _segment(self, shelf, size):
        if not self.settings.expandable_segments and self.places:
            self._next_address = self.places[0]
        block = super()._segment(shelf, size)
        if block is not None and not self.settings.expandable_segments:
            self.places.pop(0)
        return block


@pytest.mark.parametrize("measured", MEASURED["runs"], ids=lambda x: f"{x['settings'] or 'default'}-{x['seed']}")
def test_every_counter_is_that_of_an_h200(measured):
    blocks = Placed(150_000_000_000, Settings.parse(measured["settings"]))
    blocks.limit_bytes, blocks.places = LIMITS[measured["seed"]], list(measured["segments"])
    rows = []
    for at, _ in enumerate(run(measured["seed"], blocks.take, blocks.give)):
        if at % EVERY == 0:
            figures = blocks.counters.figures()
            rows.append([figures[key] for key in KEYS])
    assert rows == measured["rows"]
    figures = blocks.counters.figures()
    assert figures == dict(zip(MEASURED["names"], measured["stats"], strict=True))
