"""Where the time of a step goes: its parts add up, and every kernel has the bytes of its operation."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import toolkit as tk
from toolkit.bench.decode import Bench
from toolkit.bench.decode_runs import host_time, recorded
from toolkit.bench.step_breakdown import Expected, breakdown, expected_launches
from toolkit.core.errors import ModelError
from toolkit.decode.prefix import Prefix
from toolkit.planning.costs import costs_of
from toolkit.trace.events import TraceBuilder
from toolkit.ui.figures.kernel_table import REST, WHOLE, kernel_table

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton to describe launches")


def trace_of(kernels, steps=range(4, 8)):
    """A trace of steps of 100 µs with `kernels`: (name, start, duration) in µs."""
    trace = TraceBuilder()
    for step in steps:
        for name, start, length in kernels:
            trace.add("kernel", 1000 * (100 * step + start), 1000 * length, step=step, stream=7, name=name)
        trace.add("d2h", 1000 * (100 * step + 80), 5_000, step=step, stream=8)
    return trace.build({})


def test_overlapping_kernels_share_the_step():
    found = breakdown(trace_of([("matmul", 0, 40), ("norm", 30, 20), ("norm", 60, 10), ("early", 65, 5)]))
    assert found == {
        "step_us": 100.0, "gap_us": 40.0,
        "kernels": [
            {"name": "matmul", "count": 1, "us": 40.0, "gap_us": 30.0, "bytes": None},  # after the end of the step before
            {"name": "norm", "count": 2, "us": 20.0, "gap_us": 10.0, "bytes": None},
            {"name": "early", "count": 1, "us": 0.0, "gap_us": 0.0, "bytes": None},  # it ends with the kernel before it
        ],
    }  # fmt: skip
    assert breakdown(TraceBuilder().build({})) is None
    assert breakdown(trace_of([("matmul", 0, 40)], steps=[5])) is None


def test_launches_get_the_labels_of_their_operations():
    trace = trace_of([("_matmul", 0, 10), ("_part", 10, 2), ("_matmul", 12, 20), ("void add<float>", 32, 1)])
    expected = [
        Expected("matmul n=1", ("_matmul",), 100), Expected("matmul n=2", ("_part", "_matmul"), 300), Expected("add", ("",), 8),
    ]  # fmt: skip
    found = breakdown(trace, expected)
    assert {row["name"]: (row["count"], row["us"], row["bytes"]) for row in found["kernels"]} == {
        "matmul n=2": (2, 22.0, 300), "matmul n=1": (1, 10.0, 100), "add": (1, 1.0, 8),
    }  # fmt: skip
    more = breakdown(trace, [*expected, Expected("add", ("", ""), 8)])
    assert {row["name"]: row["bytes"] for row in more["kernels"]} == {
        "matmul n=2": 300, "matmul n=1": 100, "void add<float>": None,
    }  # fmt: skip
    other = breakdown(trace, [Expected("matmul n=1", ("_matmul",), 100)])
    assert {row["name"]: row["bytes"] for row in other["kernels"]} == {"_matmul": None, "_part": None, "void add<float>": None}


@needs_triton
@pytest.mark.parametrize("name", ["random/qwen3-8b", "random/gemma4-31b", "random/qwen3.5-35b-a3b"])
def test_the_kernels_of_a_large_model(name):
    model = tk.load(name, "virtual:h200", scheme="q4_k_m", progress=False)
    bench = Bench(model, ["cuda-graph"], 8, 1, 2048, None)
    (row,) = bench.run([64], ["recorded"])
    step = row["breakdown"]
    assert sum(one["us"] + one["gap_us"] for one in step["kernels"]) == pytest.approx(step["step_us"])
    assert sum(one["gap_us"] for one in step["kernels"]) == pytest.approx(step["gap_us"])
    assert [one["us"] for one in step["kernels"]] == sorted((one["us"] for one in step["kernels"]), reverse=True)
    assert sum(one["count"] for one in step["kernels"]) == row["strategies"]["cuda-graph"]["kernels_per_step"]
    moved = sum(one["bytes"] for one in step["kernels"])
    assert costs_of(model, 64).token_bytes < moved < 1.01 * costs_of(model, 64).token_bytes  # activations, too
    head, rows = kernel_table({"rows": [row], "read_bytes_per_s": 4.22e12})
    assert head == ["kernel", "launches", "64 tokens: µs", "at the bandwidth", "difference"]
    assert [line[0] for line in rows[-2:]] == [REST, WHOLE]
    for column in range(2, 5):
        numbers = [float(line[column].replace(",", "")) for line in rows]
        assert sum(numbers[:-1]) == pytest.approx(numbers[-1], abs=0.1 * len(rows))


@needs_triton
def test_the_launches_of_a_real_gpu_are_those_that_its_kernels_describe(monkeypatch):
    model = tk.load("random/qwen3-8b", "virtual:h200", scheme="q4_k_m", progress=False)
    ids = list(range(17))
    prefix = Prefix(model, ids[:-1], 40)
    monkeypatch.setattr(type(model.device), "clock", "measured")
    names = [name for one in expected_launches(prefix, ids, "whole-loop", 512) for name in one.kernels]
    assert names.count("_decode") == names.count("_combine") == 36
    assert names.count("_norm_kernel") == 73
    assert names.count("_matmul") == 163
    assert names.count("") == 3


def test_logits_that_choose_no_token_are_an_error():
    model = tk.load("demo/qwen3", device="virtual:h200", progress=False)
    prefix = Prefix(model, [1, 2], 40)
    model.norm.weight.data.fill_(torch.nan)
    for measure in (expected_launches, host_time):
        with pytest.raises(ModelError, match="choosing token 0 of the text: the highest logit is NaN or infinite"):
            measure(prefix, [1, 2, 3], "roundtrip", 512)


def test_a_step_on_the_cpu_has_no_kernels():
    model = tk.load("demo/qwen3", "cpu", progress=False)
    prefix = Prefix(model, [1, 2], 40)
    assert expected_launches(prefix, [1, 2, 3], "roundtrip", 512) == []
    assert breakdown(recorded(prefix, [1, 2, 3], "roundtrip")[1]) is None


def test_a_record_without_breakdowns_has_no_table():
    older = {"strategy": "cuda-graph", "step_us": 100.0, "gap_us": 40.0, "kernels": [{"name": "a", "count": 1, "us": 60.0}]}
    _, rows = kernel_table({"rows": [{"context": 8, "breakdown": older}], "read_bytes_per_s": 1e12})
    assert rows == [["a", "1", "60.0", "-", "-"], [WHOLE, "1", "60.0", "-", "-"]]
    assert kernel_table({"rows": [{"context": 8, "why_not": "no"}], "read_bytes_per_s": None})[1] == []
