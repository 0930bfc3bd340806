"""A few processes that are killed while they write. `python -m tests.fuzz.kills` kills more."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fuzz.kills import WRITERS, Writer, run


@pytest.mark.parametrize("writer", WRITERS, ids=[writer.name for writer in WRITERS])
def test_a_killed_writer_leaves_nothing_half_written(writer: Writer, tmp_path: Path) -> None:
    tally = run(writer, 1, tmp_path, random.Random(writer.name))
    assert tally.kills == 1
    assert not tally.faults
