"""The recorder of the shipped traces: what it keeps, and that it writes files that open by name."""

from __future__ import annotations

import numpy as np
import pytest

import toolkit as tk
from toolkit.bench.traces import CASES, Case, main, record_traces, relative, shortened
from toolkit.core.errors import ToolkitError
from toolkit.decode.strategies import STRATEGIES
from toolkit.trace import shipped
from toolkit.trace.events import TraceBuilder

FEW = (
    Case("demo/qwen3", None, ("roundtrip", "cuda-graph"), prompt=19, tokens=12),
    Case("demo/gemma4", None, ("whole-loop",), prompt=8, tokens=10, steps=3),
)


def test_traces_open_by_name(tmp_path, monkeypatch):
    files = record_traces("virtual:h200", tmp_path, FEW)
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in files] == [
        "h200/qwen3/roundtrip.trace", "h200/qwen3/cuda-graph.trace", "h200/gemma4/whole-loop.trace",
    ]  # fmt: skip
    trace = tk.open_trace("h200/qwen3/roundtrip")
    assert set(trace["step"].tolist()) == set(range(12))
    assert not trace.is_kind("alloc", "free").any()
    assert trace["start_ns"].min() == 0
    assert trace.meta["tok_per_s"] > 0
    assert {name: trace.meta[name] for name in ("model", "strategy", "prompt_tokens", "tokens", "clock")} == {
        "model": "demo/qwen3", "strategy": "roundtrip", "prompt_tokens": 19, "tokens": 12, "clock": "modelled",
    }  # fmt: skip
    model = tk.load("demo/qwen3", "virtual:h200", progress=False)
    run = tk.generate(model, list(range(19)), "roundtrip", max_new_tokens=12, eos=())
    assert trace.copies().equals(run.copies())
    loop = tk.open_trace("h200/gemma4/whole-loop")
    assert set(loop["step"].tolist()) == {5, 6, 7}
    assert set(loop.strings) == {text for column in ("name", "where", "owner") for text in loop.text(column) if text}


def test_a_model_that_is_no_case_is_an_error(capsys):
    with pytest.raises(SystemExit):
        main(["--ranks", "2", "--model", "demo/qwen3", "--out", "unused"])
    assert "no case of demo/qwen3" in capsys.readouterr().err


def test_the_first_steps_are_kept_if_only_they_have_kernels():
    trace = TraceBuilder()
    trace.add("kernel", 100, 10, step=0, stream=0, name="add")
    trace.add("kernel", 400, 10, step=2, stream=0, name="add", where="/usr/lib/python3.12/threading.py:12")
    for step in range(1, 10):
        trace.add("mark", 200 * step, 200, step=step, name="decode", device=-1)
    kept = shortened(trace.build({}), 3, {"model": "a"})
    assert np.unique(kept["step"]).tolist() == [2, 3, 4]
    assert (kept["start_ns"].min(), kept.meta) == (0, {"model": "a"})
    assert set(kept.text("where")) == {None, "threading.py:12"}


def test_texts_lose_the_folders_of_a_machine():
    assert relative("/home/someone/run.py:3") == relative(r"C:\Users\someone\run.py:3") == "run.py:3"
    assert relative("toolkit/models/qwen3.py:12") == "toolkit/models/qwen3.py:12"
    kernel = "void at::native::(anonymous namespace)::add<float, 4>(int, float)"
    assert relative(kernel) == kernel


def test_every_strategy_is_recorded():
    assert set(CASES[0].strategies) == set(STRATEGIES)
    assert set(CASES[1].strategies) <= set(STRATEGIES)


def test_the_cpu_has_no_traces(tmp_path):
    with pytest.raises(ToolkitError, match="isn't in tk"):
        record_traces("cpu", tmp_path, FEW)
