"""Shipped traces: opened by name, listed by errors, and without anything of the machine that recorded them."""

from __future__ import annotations

import re

import pytest

import toolkit as tk
from toolkit.core.errors import TraceError, UnknownNameError
from toolkit.trace import shipped
from toolkit.trace.events import Trace, TraceBuilder
from toolkit.trace.shipped import shipped_names


@pytest.fixture
def two(tmp_path, monkeypatch):
    """The folder of two shipped traces."""
    trace = TraceBuilder()
    trace.add("kernel", 0, 1000, step=1, stream=0, name="add")
    for name in ("roundtrip", "cuda-graph"):
        path = tmp_path / "h200" / "qwen3" / f"{name}.trace"
        path.parent.mkdir(parents=True, exist_ok=True)
        trace.build({"strategy": name}).save(path)
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    return tmp_path


def test_a_trace_is_opened_by_its_name(two):
    assert shipped_names() == ("h200/qwen3/cuda-graph", "h200/qwen3/roundtrip")
    trace = tk.open_trace("h200/qwen3/roundtrip")
    assert trace.meta["strategy"] == "roundtrip"
    assert trace.copies()["kernels"].tolist() == [1]


def test_a_file_of_the_same_name_comes_first(two, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "elsewhere" / "h200" / "qwen3"
    other.mkdir(parents=True)
    tk.open_trace("h200/qwen3/roundtrip").save(other / "roundtrip")
    monkeypatch.chdir(tmp_path / "elsewhere")
    Trace.load(other / "roundtrip").select([]).save(other / "roundtrip")
    assert len(tk.open_trace("h200/qwen3/roundtrip")) == 0


def test_a_wrong_name_lists_the_names(two):
    with pytest.raises(UnknownNameError, match='Did you mean "h200/qwen3/roundtrip"') as error:
        tk.open_trace("h200/qwen3/rountrip")
    assert "h200/qwen3/cuda-graph, h200/qwen3/roundtrip" in str(error.value)
    with pytest.raises(UnknownNameError, match="h200/qwen3/cuda-graph, h200/qwen3/roundtrip"):
        tk.open_trace("h200")
    with pytest.raises(TraceError, match="no such file"):
        tk.open_trace("trace.json.gz")


@pytest.mark.parametrize("name", [name for name in shipped_names() if name.startswith("h200/")])
def test_kernels_of_shipped_traces_have_their_layer(name):
    trace = tk.open_trace(name)
    step = max(trace["step"][trace.is_kind("kernel")])
    layers = trace["layer"][trace.is_kind("kernel") & (trace["step"] == step)].tolist()
    assert sorted(set(layers)) == [-1, *range(36 if "8b" in name else 3)]


def test_shipped_traces_were_measured_and_name_no_machine():
    assert {name.split("/")[2] for name in shipped_names() if name.startswith("h200/qwen3/")} == set(tk.STRATEGIES)
    line = re.compile(r"(?:[\w.-]+/)*[\w.-]+\.py:\d+")
    size = 0
    for name in shipped_names():
        trace = tk.open_trace(name)
        gpu, model, strategy = name.split("/")
        assert (trace.meta["clock"], trace.meta["strategy"]) == ("measured", strategy)
        assert trace.meta["model"].endswith(f"/{model}")
        assert re.sub(r"^\d+x", "", gpu) in trace.meta["gpu"].lower()
        assert len(trace.ranks()) == (int(gpu[0]) if gpu[0].isdigit() else 0)
        assert trace.meta["tok_per_s"] > 0
        assert all(line.fullmatch(where) for where in set(trace.text("where")) - {None})
        for text in (*trace.strings, *map(str, trace.meta.values())):
            assert not re.search(r"(^|[\s\"'])[/~]|\\|@|home|root|/tmp|/work", text), text
        size += (shipped.FOLDER / f"{name}{shipped.SUFFIX}").stat().st_size
    assert size < 1_000_000
