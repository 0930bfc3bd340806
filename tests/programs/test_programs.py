"""Tests of the programs' table, of a few of their measurements on the virtual GPU, and of the comparison of two records."""

from __future__ import annotations

import collections
import json
from pathlib import Path

import pytest

from tests.programs import CLASSES, programs
from tests.programs.report import compare, differences, main, measure

# One program each that reads back, trains, samples and uses streams.
SLICE = ("vision.detection_boxes", "training.sgd_groups", "serving.nucleus_sampling", "transfers.prefetch_stream")


def test_the_table_lists_a_hundred_programs():
    counts = collections.Counter(name.split(".")[0] for name in programs())
    assert counts == CLASSES
    assert sum(CLASSES.values()) == 100


@pytest.mark.parametrize("name", SLICE)
def test_a_measurement_is_complete_and_repeats(name):
    found = measure(name, "virtual:h200", details=True)
    assert "error" not in found
    assert "unstable" not in found
    assert found["peak_bytes"] > 0
    assert found["final_bytes"] == 0
    assert sum(found["allocations"]) == 0
    assert found["copies"]["h2d"]
    assert found["copies"]["d2h"]


def test_an_error_is_recorded_with_its_line(monkeypatch):
    from tests.programs import numeric

    def gaussian_process(device):
        raise ValueError("no")

    monkeypatch.setitem(vars(numeric), "gaussian_process", gaussian_process)
    gaussian_process.__module__ = numeric.__name__
    assert measure("numeric.gaussian_process", "virtual:h200")["error"] == "ValueError: no"


def _found(d2h: int = 3, peak: int = 1024, **more: object) -> dict[str, object]:
    return {"copies": {"h2d": [[8, 1]], "d2h": [[4, d2h]], "d2d": []}, "peak_bytes": peak, "final_bytes": 0, **more}


def test_two_records_are_compared(tmp_path, capsys):
    real = {"programs": {"a.one": _found(), "a.two": _found(), "b.three": _found(), "b.four": _found()}}
    virtual = {"programs": {"a.one": _found(), "a.two": _found(d2h=1, peak=512), "b.three": {"error": "ValueError: no"}}}
    assert differences(real["programs"]["a.two"], virtual["programs"]["a.two"]) == [
        ("d2h", "d2h of 4 B: 3 there, 1 here"),
        ("peak", "peak: 1,024 B there, 512 B here"),
    ]
    lines = compare(real, virtual)
    assert [line.split()[:4] for line in lines[1:5]] == [
        ["one", "a", "yes", "yes"], ["two", "a", "no", "no"], ["three", "b", "no", "no"], ["four", "b", "no", "no"],
    ]  # fmt: skip
    assert "raises here: ValueError: no" in lines[3]
    assert "not measured here" in lines[4]
    assert lines[-1] == "of 4 programs, equal: copies 1, peak 1, final 2, h2d 2, d2h 1, d2d 2"
    for name, record in (("real", real), ("virtual", virtual)):
        (tmp_path / name).write_text(json.dumps(record))
    assert main(["--compare", str(tmp_path / "real"), str(tmp_path / "virtual")]) == 0
    assert capsys.readouterr().out.splitlines() == lines


def test_the_stored_record_has_every_program():
    record = json.loads((Path(__file__).parent / "virtual_h200.json").read_text())
    assert list(record["programs"]) == list(programs())
