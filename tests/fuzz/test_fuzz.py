"""Thousands of damaged and lying files: each is refused in words or loads as what it says, and nothing worse."""

from __future__ import annotations

import pytest

from tests.fuzz.bases import KINDS, Kind
from tests.fuzz.boxed import run

SLICE = 24  # of the other files, one mutant in 24: `python -m tests.fuzz.report` loads all of them
AT_LEAST = 150  # mutants of every kind; all kinds together are more than 5,000


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_mutants_are_refused_or_load_as_what_they_are(kind: Kind) -> None:
    every = 1 if kind.load is None else SLICE
    tally = run(kind, every)
    assert not tally.faults
    assert tally.mutants >= AT_LEAST // every
    assert tally.refused or kind.name == "session"  # a session without its bad lines is a session
    assert tally.refused + tally.loaded == tally.mutants
    assert tally.peak_mb < 500
