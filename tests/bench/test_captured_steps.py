"""A captured step takes about as long on the virtual H200 as on a real one."""

from __future__ import annotations

import gc
import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import toolkit as tk
from toolkit.bench.captured_steps import PROMPTS, bench, compare, main
from toolkit.gpu.device import Device

RESULTS = Path(__file__).parents[2] / "toolkit" / "bench" / "results"
WITHIN = 0.15
GPU = "virtual:h200"


def shipped(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


@pytest.fixture(scope="module")
def modelled() -> dict[str, Any]:
    gc.collect()
    return bench(GPU)


def test_modelled_steps_take_as_long_as_measured_ones(modelled: dict[str, Any]) -> None:
    found = compare(modelled, shipped("h200_captured_steps"))
    assert [(name, prompt) for name, prompt, *_ in found] == [(name, n) for name, lengths in PROMPTS.items() for n in lengths]
    for name, prompt, ms, measured_ms in found:
        assert ms == pytest.approx(measured_ms, rel=WITHIN), (name, prompt)


def test_the_shipped_record_is_current(modelled: dict[str, Any]) -> None:
    """If this fails, run `python -m toolkit.bench.captured_steps --device virtual:h200 --out` with the record's path."""
    assert modelled["rows"] == shipped("virtual_h200_captured_steps")["rows"]


def test_steps_with_other_formats_of_the_cache_are_not_compared() -> None:
    plain, int8, int4 = ({"model": "random/qwen3-8b", "prompt": 64, **kv} for kv in ({}, {"kv": "int8"}, {"kv": "int4"}))
    modelled = {"rows": [{**plain, "ms": 1.0}, {**int8, "ms": 2.0}]}
    measured = {"rows": [{**int8, "ms": 3.0}, {**int4, "ms": 4.0}, {**plain, "ms": 5.0}]}
    assert compare(modelled, measured) == [("random/qwen3-8b", 64, 2.0, 3.0), ("random/qwen3-8b", 64, 1.0, 5.0)]


@pytest.mark.parametrize("strategy", ["cuda-graph", "whole-loop"])
def test_strategies_that_capture_take_as_long_as_the_step(strategy: str) -> None:
    """After 64 tokens; longer prompts would take minutes. The first two steps under "cuda-graph" also capture."""
    measured = {row["model"]: row["ms"] for row in shipped("h200_captured_steps")["rows"] if row["prompt"] == 64}
    gpu = tk.device(GPU)
    for name, ms in measured.items():
        times: list[int] = []
        with gpu.sizes_only():
            model = tk.load(name, device=gpu, scheme="q4_k_m", progress=False)
            heard = partial(_note, times, gpu)
            tk.generate(model, [1] * 64, strategy, max_new_tokens=9, eos=(), record=False, on_token=heard)
        assert median(b - a for a, b in pairwise(times)) / 1e6 == pytest.approx(ms, rel=WITHIN), name
        del model
        gc.collect()


def _note(times: list[int], gpu: Device, *heard: object) -> None:
    times.append(gpu.now_ns())


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.bench.captured_steps.PROMPTS", {"random/qwen3-8b": (8,)})
    assert main(["--device", "virtual:rtx-4090", "--out", str(tmp_path / "record.json")]) == 0
    (row,) = json.loads((tmp_path / "record.json").read_text())["rows"]
    assert (row["model"], row["prompt"]) == ("random/qwen3-8b", 8)
    assert 4 < row["ms"] < 9  # 4.7 GB at 1 TB/s
    gc.collect()
    tk.device(GPU)


@pytest.mark.parametrize(("arguments", "said"), [
    (["--prompts", "many"], "argument --prompts: 'many' is not a whole number"), (["--prompts", "-5"], "argument --prompts"),
    (["--prompts", "8,"], "argument --prompts: '8,' has an empty entry"), (["--kernels", "read"], "--kernels needs --tune"),
    (["--kernels", ""], "argument --kernels: '' has no entry"), (["--kv", "plain,,int8"], "argument --kv"),
])  # fmt: skip
def test_arguments_that_make_no_sense(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--device", GPU, *arguments])
    assert said in capsys.readouterr().err


def test_a_kernel_that_does_not_exist_is_not_tuned() -> None:
    with pytest.raises(tk.errors.UnknownNameError, match="kernel 'atention_decode'"):
        main(["--device", GPU, "--tune", "--kernels", "atention_decode"])
