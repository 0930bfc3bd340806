"""Tests of the programs' table, of a few measurements on the virtual GPU, and of the records of a real and of a virtual H200.

The records are compared without running anything. If a change of the rules changes what a program does on a virtual GPU,
measure it again: `python -m tests.programs.report --device virtual:h200 --out tests/programs/virtual_h200.json NAME`, with
cuDNN installed (the extra `cudnn`), and for programs with convolutions also without.
"""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

import pytest

from tests.programs import CLASSES, programs
from tests.programs.report import compare, differences, main, measure

HERE = Path(__file__).parent
# One program each that reads back, trains, samples, uses streams, transforms, and multiplies by groups.
SLICE = (
    "vision.detection_boxes", "training.sgd_groups", "serving.nucleus_sampling", "transfers.prefetch_stream",
    "spectral.long_convolution", "experts.grouped_training",
)  # fmt: skip

# Known deviations of the virtual record from the H200's: reason -> programs, for the copies and for the peak. A listed program
# that no longer deviates fails the test, as does an unlisted one that deviates.
COPIES: dict[str, tuple[str, ...]] = {}
PEAKS: dict[str, tuple[str, ...]] = {
    "cuDNN's Winograd and split algorithms, and cuBLAS's splits, can't be known without a GPU": (
        "vision.super_resolution", "diffusion.ddpm_training", "vision.mobilenet_inference",
    ),
    "second derivatives run in another order: CUDA's thread numbers its autograd nodes itself": ("numeric.physics_informed",),
}  # fmt: skip
WITHOUT_CUDNN = ("vision.resnet_training", "vision.unet_segmentation", "vision.video_classification", "audio.ctc_training")


def _record(name: str) -> dict[str, Any]:
    return json.loads((HERE / f"{name}.json").read_text())


def test_the_table_lists_a_hundred_programs():
    counts = collections.Counter(name.split(".")[0] for name in programs())
    assert counts == CLASSES
    assert sum(CLASSES.values()) == 100


@pytest.mark.parametrize("name", SLICE)
def test_a_measurement_repeats_and_equals_the_h200(name):
    found = measure(name, "virtual:h200", details=True)
    assert "unstable" not in found
    assert sum(found["allocations"]) == 0
    assert differences(_record("h200")["programs"][name], found) == []


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


@pytest.mark.parametrize("record", ["h200", "virtual_h200", "virtual_h200_before", "virtual_h200_without_cudnn"])
def test_the_stored_records_have_every_program(record):
    assert list(_record(record)["programs"]) == list(programs())


def test_no_program_raised_or_changed_on_the_h200():
    assert [name for name, found in _record("h200")["programs"].items() if "error" in found or "unstable" in found] == []


def test_without_cudnn_some_more_peaks_deviate():
    real, virtual = _record("h200")["programs"], _record("virtual_h200_without_cudnn")["programs"]
    found = {name for name in real if any(figure == "peak" for figure, _ in differences(real[name], virtual[name]))}
    assert found == {*WITHOUT_CUDNN, *(name for names in PEAKS.values() for name in names)}


def test_the_virtual_record_deviates_from_the_h200_where_it_is_known_to():
    assert _record("virtual_h200")["cudnn"] is not None
    real, virtual = (_record(name)["programs"] for name in ("h200", "virtual_h200"))
    found = {name: {figure for figure, _ in differences(real[name], virtual[name])} for name in real}
    copies = {name for name, figures in found.items() if figures & {"h2d", "d2h", "d2d", "error"}}
    peaks = {name for name, figures in found.items() if figures & {"peak", "error"}}
    assert copies == {name for names in COPIES.values() for name in names}
    assert peaks == {name for names in PEAKS.values() for name in names}
    assert all("final" not in figures for figures in found.values())
