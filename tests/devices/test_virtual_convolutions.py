"""Tests of the memory of convolutions: copied operands, and workspaces as cuDNN says, compared with those of an H200."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import toolkit as tk
from tests.golden.convolutions import MEASURED, PASSES, measured, modelled
from toolkit.gpu.virtual import cudnn

RECORD = json.loads(MEASURED.with_suffix(".json").read_text())


def peak(work: Callable[[], object]) -> int:
    gpu = tk.device("virtual:h200")
    gpu.reset_peak()
    base = gpu.memory().allocated_bytes
    result = work()
    del result
    return gpu.memory().peak_bytes - base


@pytest.fixture
def x() -> torch.Tensor:
    return torch.zeros(4, 100, 40, device=tk.device("virtual:h200").torch)  # [B, T, C], 64,000 bytes


def test_operands_without_cudnns_memory_format_are_copied(x):
    w, out = torch.zeros(64, 40, 5, device=x.device), 4 * 64 * 96 * 4
    plain = x.transpose(1, 2).contiguous()
    workspace = peak(lambda: F.conv1d(plain, w)) - out
    assert peak(lambda: F.conv1d(plain.repeat(1, 1, 2)[..., ::2], w)) >= 2 * 64_000 + 64_000 + out + workspace - 512
    # As an image with one row, the transposed input is in channels_last, so that the weight is copied into that format.
    assert peak(lambda: F.conv1d(x.transpose(1, 2), w)) >= out + w.nbytes


def test_a_cudnn_that_needs_a_driver_counts_as_absent(tmp_path, monkeypatch):
    for pattern in cudnn._LIBRARIES:
        name = f"part/lib/{pattern.replace('*', '13')}"
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    drivers = {"libcudnn_engines_runtime_compiled.so.9"}  # what needs one

    def open_library(path, mode):
        if Path(path).name in drivers:
            raise OSError("libcuda.so.1: cannot open shared object file: No such file or directory")
        return SimpleNamespace(cudnnGetVersion=lambda: 92801)

    monkeypatch.setattr(cudnn.sys, "platform", "linux")
    monkeypatch.setattr(cudnn, "ctypes", SimpleNamespace(CDLL=open_library, RTLD_GLOBAL=0))
    monkeypatch.setattr(cudnn.importlib.util, "find_spec", lambda _: SimpleNamespace(submodule_search_locations=[tmp_path]))
    assert cudnn.library.__wrapped__() is None
    drivers.clear()
    assert cudnn.library.__wrapped__().cudnnGetVersion() == 92801


def test_workspaces_are_those_that_cudnn_says():
    _, calls = measured()
    sizes = [
        (found[which][1] if len(found[which]) == 4 else 0, modelled(case, which)[0])
        for case, found in calls[:12]
        for which in PASSES
    ]
    if cudnn.version() is None:
        assert {here for _, here in sizes} == {0}
        return
    equal = sum(there == here for there, here in sizes)
    same = cudnn.version() // 100 == RECORD["cudnn"] // 100  # others may choose other algorithms than that of the H200
    assert equal >= 0.8 * len(sizes) if same else equal > len(sizes) / 2


def test_the_record_of_the_comparison_has_every_call():
    about, calls = measured()
    alone = sum(len(found[which]) <= 4 for _, found in calls for which in PASSES)
    assert {key: RECORD[key] for key in about} == about
    assert RECORD["counted"]["all"]["calls"] == alone
    assert RECORD["counted"]["random"]["equal"] > 0.9 * RECORD["counted"]["random"]["calls"]
