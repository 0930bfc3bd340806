"""Tests of the Chrome trace reader and writer: files from an H200, from other tools, damaged ones, and round trips."""

import contextlib
import gzip
import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import toolkit as tk
from tests.speed import within
from tests.trace.test_trace import random_trace, same
from toolkit.core.errors import TraceError
from toolkit.trace.columns import KINDS
from toolkit.trace.events import TraceBuilder

DATA = Path(__file__).parent / "data"
REAL = ["stack", "steps", "graph", "pattern"]


def rows(trace, *kinds):
    part = trace.select(trace.is_kind(*kinds)) if kinds else trace
    return [(KINDS[k], b, p) for k, b, p in zip(part["kind"], part["bytes"], part["pinned"], strict=True)]


def write(path, events, **more):
    path.write_text(json.dumps({"schemaVersion": 1, **more, "traceEvents": events}))
    return path


def kernel(name="k", ts=10.0, dur=1.0, correlation=1, **args):
    args = {"device": 0, "stream": 7, "correlation": correlation, **args}
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur, "args": args}


def call(name="cudaLaunchKernel", ts=9.0, dur=0.5, correlation=1, tid=1):
    args = {"correlation": correlation, "cbid": 211}
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


def ranged(name, ts, dur):
    return {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur}


# ---- what PyTorch's profiler wrote on an H200


def test_copies_allocations_and_functions_of_a_real_trace():
    trace = tk.open_trace(DATA / "stack.json.gz")
    assert rows(trace, "h2d", "d2h", "d2d") == [
        ("h2d", 4000, 0), ("h2d", 16384, 1), ("h2d", 4, 0), ("d2h", 4, 1), ("d2d", 4000, -1), ("d2h", 4000, 1),
        ("d2h", 4000, 0),
    ]  # fmt: skip
    assert trace.meta["device"] == "NVIDIA H200"
    assert trace.meta["lines"] == "functions"
    assert trace["bytes"][trace.is_kind("alloc")].sum() == trace["bytes"][trace.is_kind("free")].sum() == 34304
    copied = trace.select(trace.is_kind("h2d", "d2h", "d2d"))
    assert set(copied.text("where")) == {"decode.py:13"}
    assert set(trace.text("where")) == {"decode.py:13", "decode.py:34", "decode.py:44"}  # autograd's thread too
    assert copied["stream"].tolist() == [0] * 6 + [1]


def test_waits_of_a_real_trace_without_the_profilers_own():
    trace = tk.open_trace(DATA / "stack.json.gz")
    waits = trace.select(trace.is_kind("sync"))
    assert waits.text("name").count("cudaDeviceSynchronize") == 1
    assert waits.text("name").count("cudaEventSynchronize") == 1
    assert waits["stream"].tolist() == [0, 0, 0, -1, 1, -1, 1]


def test_profiler_steps_of_a_real_trace():
    trace = tk.open_trace(DATA / "steps.json.gz")
    assert trace.meta["steps_from"] == "ProfilerStep"
    table = trace.copies().set_index("step")
    assert table.index.tolist() == [1, 2, 3]
    assert table["h2d_bytes"].tolist() == [20388] * 3
    assert table["d2h_count"].tolist() == [3] * 3
    assert table["kernels"].tolist() == [4] * 3


def test_copies_inside_a_graph_of_a_real_trace():
    trace = tk.open_trace(DATA / "graph.json.gz")
    assert trace.meta["steps_from"] == "marks"
    table = trace.copies()
    assert table["step"].tolist() == [0, 1, 2]
    assert table[["h2d_count", "d2h_count", "d2d_count", "kernels"]].to_numpy().tolist() == [[1, 1, 1, 1]] * 3
    assert [mark.name for mark in trace.marks()] == ["decode"] * 3


def test_steps_of_a_real_trace_without_any_marks_are_guessed():
    trace = tk.open_trace(DATA / "pattern.json.gz")
    assert trace.meta["steps_from"] == "guessed"
    table = trace.copies()
    assert table["step"].tolist() == list(range(6))
    assert table["d2h_bytes"].tolist() == [8] * 6
    assert table["kernels"].tolist() == [4] * 6


@pytest.mark.parametrize("name", REAL)
def test_a_plain_file_under_any_name_gives_the_same(tmp_path, name):
    plain = tmp_path / "whatever.bin"
    plain.write_bytes(gzip.decompress((DATA / f"{name}.json.gz").read_bytes()))
    trace, packed = tk.open_trace(plain), tk.open_trace(DATA / f"{name}.json.gz")
    assert (trace.meta.pop("title"), packed.meta.pop("title")) == ("whatever.bin", f"{name}.json.gz")
    same(trace, packed)


# ---- details of the format


def test_a_step_is_that_of_the_launch(tmp_path):
    events = [
        ranged("ProfilerStep#4", 0, 10),
        ranged("ProfilerStep#5", 10, 10),
        call(ts=9),
        kernel(ts=15),
        kernel(ts=30, correlation=2),
    ]
    trace = tk.open_trace(write(tmp_path / "a", [*events, call(ts=11, correlation=2)]))
    assert trace["step"][trace.is_kind("kernel")].tolist() == [4, 5]


def test_times_are_exact_to_the_nanosecond(tmp_path):
    events = [kernel(ts=4392425523975.957, dur=0.928), kernel(ts=4392425523976.001, dur=1.0)]
    trace = tk.open_trace(write(tmp_path / "a", events))
    assert trace["start_ns"].tolist() == [0, 44]
    assert trace["dur_ns"].tolist() == [928, 1000]


def test_numbers_that_are_not_json_are_read(tmp_path):
    path = write(tmp_path / "a", [kernel(bandwidth=-123.0), kernel(bandwidth=-321.0, ts=20)])
    path.write_text(path.read_text().replace("-123.0", "inf").replace("-321.0", "-nan"))
    assert len(tk.open_trace(path)) == 2


def test_control_characters_and_broken_utf8_are_read(tmp_path):
    path = write(tmp_path / "a", [kernel(name="a-tab-b-bad-c")])
    path.write_bytes(path.read_bytes().replace(b"-tab-", b"\t").replace(b"-bad-", b"\xff"))
    assert tk.open_trace(path).text("name") == ["a\tb\ufffdc"]


@pytest.mark.parametrize("end", ["]", "", ","], ids=["closed", "open", "comma"])
def test_a_bare_list_may_stay_open(tmp_path, end):
    path = tmp_path / "a"
    path.write_text("[" + json.dumps(kernel()) + end)
    assert len(tk.open_trace(path)) == 1


def test_old_category_names_are_read(tmp_path):
    copy = {"ph": "X", "cat": "Memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "pid": 0, "tid": "7", "ts": 1, "dur": 1}
    old = [
        {**kernel(), "cat": "Kernel"},
        {**call(), "cat": "Runtime"},
        {**copy, "args": {"bytes": 8, "device": 0, "stream": 7}},
    ]
    assert rows(tk.open_trace(write(tmp_path / "a", old)), "kernel", "d2h") == [("d2h", 8, 1), ("kernel", 0, -1)]


def test_events_with_odd_fields_are_counted_not_fatal(tmp_path):
    odd = [{**kernel(), "ts": "soon"}, {**kernel(), "args": 3}, {"ph": "X", "cat": "kernel"}, {"cat": ["x"]}, [], 3, None, "x"]
    with pytest.warns(UserWarning, match="events have unexpected fields and are left out"):
        trace = tk.open_trace(write(tmp_path / "a", [*odd, kernel()]))
    assert trace.is_kind("kernel").sum() >= 1
    assert trace.meta["unreadable_events"] >= 3


@pytest.mark.parametrize("field", ["ts", "dur"])
def test_numbers_too_large_spoil_no_other_event(tmp_path, field):
    large = [{**kernel(), field: 1e300}, {**call(), field: 1e300}, {**kernel(), "args": {"stream": 2**70}}]
    alone = tk.open_trace(write(tmp_path / "a", [call(), kernel()]))
    with pytest.warns(UserWarning, match="b: 3 events"):
        trace = tk.open_trace(write(tmp_path / "b", [*large, call(), kernel()]))
    assert all((trace[column] == alone[column]).all() for column in ("start_ns", "dur_ns", "kind", "stream"))


def test_a_negative_duration_counts_as_none(tmp_path):
    events = [{**kernel(), "dur": -5}, ranged("a", 10, -5)]
    assert tk.open_trace(write(tmp_path / "a", events))["dur_ns"].tolist() == [0, 0]


def test_the_rank_of_a_distributed_trace(tmp_path):
    path = write(tmp_path / "a", [kernel()], distributedInfo={"backend": "nccl", "rank": 3, "world_size": 8})
    assert tk.open_trace(path)["rank"].tolist() == [3]


def test_fields_may_follow_the_events(tmp_path):
    path = tmp_path / "a"
    fields = {"deviceProperties": [{"name": "H200"}], "distributedInfo": {"rank": 3, "world_size": 8}}
    head = {"schemaVersion": 1, "traceEvents": [kernel(ts=5)]}
    path.write_text(json.dumps({**head, **fields, "baseTimeNanoseconds": 1000}))
    trace = tk.open_trace(path)
    assert trace["rank"].tolist() == [3]
    assert (trace.meta["device"], trace.meta["world_size"], trace.meta["origin_ns"]) == ("H200", 8, 6000)
    path.write_text(json.dumps(head)[:-1] + ', "stackFrames": {}, }')  # not JSON
    assert tk.open_trace(path).meta["origin_ns"] == 5000


# ---- other tools


def test_a_trace_of_xla_on_a_gpu(tmp_path):
    def named(what, pid, tid, name):
        return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}

    def ran(name, tid, ts, **args):
        return {"ph": "X", "name": name, "pid": 3, "tid": tid, "ts": ts, "dur": 2.5, "args": args}

    events = [
        named("process_name", 3, 0, "/device:GPU:1"), named("thread_name", 3, 14, "Stream #14(Memcpy,Compute)"),
        named("thread_name", 3, 99, "XLA Ops"), named("process_name", 701, 0, "/host:CPU"),
        ran("MemcpyH2D", 14, 1.0, memcpy_details="kind_src:pinned kind_dst:device size:64 dest:0 async:1"),
        ran("fusion_3", 14, 2.0, hlo_op="fusion.3"), ran("MemcpyD2H", 14, 5.0, memcpy_details="kind_dst:pageable size:4"),
        ran("fusion_3", 99, 2.0), {**ran("PjitFunction", 1, 0.5), "pid": 701},
    ]  # fmt: skip
    path = tmp_path / "a"
    path.write_text(json.dumps({"displayTimeUnit": "ns", "metadata": {}, "traceEvents": events}))
    trace = tk.open_trace(path)
    assert rows(trace) == [("h2d", 64, 1), ("kernel", 0, -1), ("d2h", 4, 0)]
    assert trace["device"].tolist() == [1, 1, 1]
    assert trace.meta["device"] == "/device:GPU:1"


def test_a_trace_without_devices_becomes_marks(tmp_path):
    events = [{"ph": "X", "name": f"work {i % 2}", "pid": 1, "tid": 1, "ts": 10 * i, "dur": 5} for i in range(4)]
    events += [{"ph": "B", "name": "open", "pid": 1, "tid": 1, "ts": 3}, {"ph": "C", "name": "n", "ts": 1, "args": {"n": 1}}]
    path = tmp_path / "a"
    path.write_text(json.dumps(events))
    trace = tk.open_trace(path)
    assert [mark.name for mark in trace.marks()] == ["work 0", "work 1", "work 0", "work 1"]


# ---- bad files


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
def test_cut_short_anywhere_is_a_trace_error(tmp_path, packed):
    whole = (DATA / "graph.json.gz").read_bytes()
    whole = whole if packed else gzip.decompress(whole).rstrip()
    path = tmp_path / "cut"
    for n in [0, 1, 2, 5, *range(20, len(whole), len(whole) // 60), len(whole) - 1]:
        path.write_bytes(whole[:n])
        with pytest.raises(TraceError):
            tk.open_trace(path)


def test_flipped_bytes_never_crash(tmp_path):
    whole = bytearray(gzip.decompress((DATA / "graph.json.gz").read_bytes()))
    rng = np.random.default_rng(0)
    path = tmp_path / "flipped"
    for _ in range(150):
        spoiled = whole.copy()
        for at in rng.integers(0, len(whole), 4):
            spoiled[at] = int(rng.integers(0, 256))
        path.write_bytes(spoiled)
        with contextlib.suppress(TraceError):
            tk.open_trace(path).copies()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"   \n ", "its format is unknown"),
        (b"{}", "traceEvents"),
        (b'{"a": 1}', "traceEvents"),
        (b"{nonsense", "not JSON"),
        (b'{"a": [1, 2', "not JSON"),
        (b'{"a": "' + b"x" * 3_000_000, "not JSON|no .traceEvents."),
        (b'{"traceEvents": []}', "no events"),
        (b"[]", "no events"),
        (b'[{"ph": "B", "name": "a", "ts": 1}, {"ph": "E", "ts": 2}]', "neither events of a GPU nor ranges"),
        (b'{"schemaVersion": 1, "traceEvents": [{"ph": "M", "name": "process_name"}]}', "neither events of a GPU nor ranges"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[}", "text ends|not JSON"),
        (b'{"traceEvents": [{"a": 1}', "text ends"),
        (b'{"traceEvents": [{"a": 1}]', "ends after"),
        (b"\x1f\x8b\x08\x00garbage", "compressed"),
        (b"\x80\x04\x95hello", "pickle"),
        (b"\x89PNG\r\n", "its format is unknown"),
        (b"PK\x03\x04hello", "damaged"),
    ],
    ids=lambda x: repr(x)[:24],
)
def test_what_is_no_trace_is_a_trace_error_that_says_why(tmp_path, content, said):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=said):
        tk.open_trace(path)


def test_a_profile_of_the_cpu_alone_says_so(tmp_path):
    path = tmp_path / "a.json"
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        torch.ones(8).add_(1)
    profiled.export_chrome_trace(str(path))
    with pytest.raises(TraceError, match=r"operations of the CPU, and nothing of a GPU.*ProfilerActivity\.CUDA"):
        tk.open_trace(path)


def test_a_profile_of_the_cpu_with_steps_opens_with_a_warning(tmp_path):
    steps = [ranged(f"ProfilerStep#{i}", 10 * i, 8) for i in range(3)]
    operation = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 2}
    with pytest.warns(UserWarning, match="a.json: it has .* nothing of a GPU, so only ranges are shown"):
        trace = tk.open_trace(write(tmp_path / "a.json", [*steps, operation]))
    assert [mark.step for mark in trace.marks()] == [0, 1, 2]


def test_a_report_in_nsights_own_format_says_how_to_export_it(tmp_path):
    path = tmp_path / "a.nsys-rep"
    path.write_bytes(b"QDSTRM\x00\x01")
    with pytest.raises(TraceError, match="nsys export --type sqlite"):
        tk.open_trace(path)


@pytest.mark.parametrize("path", ["nothing.json", "."])
def test_no_file_is_a_trace_error(path):
    with pytest.raises(TraceError):
        tk.open_trace(path)


# ---- out and in again


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
@pytest.mark.parametrize("n", [1, 63, 1001])
def test_what_is_written_is_read_back_equal(tmp_path, n, suffix):
    trace = random_trace(n, seed=n)
    same(tk.open_trace(trace.to_chrome(tmp_path / f"a{suffix}")), trace)


@pytest.mark.parametrize("name", REAL)
def test_a_real_trace_written_and_read_back_is_equal(tmp_path, name):
    trace = tk.open_trace(DATA / f"{name}.json.gz")
    same(tk.open_trace(trace.to_chrome(tmp_path / "a.json")), trace)


def test_an_own_trace_saved_is_opened_too(tmp_path):
    trace = random_trace(20)
    same(tk.open_trace(trace.save(tmp_path / "a.trace")), trace)


def test_the_file_follows_the_viewers_conventions(tmp_path):
    builder = TraceBuilder()
    builder.add("mark", 0, 100, device=-1, step=0, name="decode", clock="modelled")
    builder.add("alloc", 1, bytes=512, clock="modelled")
    builder.add("kernel", 10, 5, stream=0, name="mm", clock="modelled")
    for name, start, dur in (("early", 12, 6), ("third", 16, 4), ("inside", 17, 2)):  # early overlaps mm and third
        builder.add("kernel", start, dur, stream=0, name=name, clock="modelled")
    builder.add("d2h", 20, 5, bytes=8, stream=1, name="Memcpy DtoH", where="a.py:3", clock="modelled")
    builder.add("free", 30, bytes=512, clock="modelled")
    trace = builder.build({"device": "virtual:h200", "gpu": "NVIDIA H200"})
    events = json.loads(trace.to_chrome(tmp_path / "a.json").read_text())["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "C", "X", "i"}
    assert all(isinstance(e["pid"], int) and isinstance(e.get("tid", 0), int) for e in events)
    titles = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] in ("process_name", "thread_name")}
    assert titles[0, 0] == "GPU 0: NVIDIA H200 (modelled)"
    kernels = {e["name"]: titles[e["pid"], e["tid"]] for e in events if e.get("cat") == "kernel"}
    assert kernels == dict.fromkeys(("mm", "third", "inside"), "kernels stream 0") | {"early": "kernels stream 0, overlapping"}
    copy = next(e for e in events if e["name"] == "Memcpy DtoH")
    assert titles[copy["pid"], copy["tid"]] == "D2H stream 1"
    assert copy["args"] == {"kind": "d2h", "bytes": 8, "stream": 1, "where": "a.py:3", "clock": "modelled"}
    assert (copy["ts"], copy["dur"]) == (0.02, 0.005)
    assert [e["args"] for e in events if e["ph"] == "C"] == [{"bytes since the recording began": n} for n in (512, 0)]


def test_a_counter_of_memory_says_whether_it_includes_what_was_there_before(tmp_path):
    builder = TraceBuilder()
    builder.add("alloc", 0, bytes=512, address=0)
    builder.add("alloc", 5, bytes=1024, address=512)
    for meta, name in (({"opening": 1}, "bytes"), ({}, "bytes since the recording began")):
        events = json.loads(builder.build(meta).to_chrome(tmp_path / "a.json").read_text())["traceEvents"]
        assert [event["args"] for event in events if event["ph"] == "C"] == [{name: 512}, {name: 1536}]


def test_many_events_that_overlap_are_written_in_seconds(tmp_path):
    builder, began = TraceBuilder(), time.process_time()
    for i in range(30_000):
        builder.add("kernel", i, 10**6 + i, stream=0)
    path = builder.build({}).to_chrome(tmp_path / "a.json")
    assert within(time.process_time() - began, 10)  # 40 s, if each event is compared with all that overlap it
    events = json.loads(path.read_text())["traceEvents"]
    assert len({event["tid"] for event in events if event["ph"] == "X"}) == 16


def test_an_own_chrome_file_that_was_spoiled_is_a_trace_error(tmp_path):
    path = random_trace(9).to_chrome(tmp_path / "a.json")
    text = path.read_text()
    for old, new in (('"kind": "', '"kind": "not '), ('"toolkit": {', '"toolkit": [{'), ('"ts": ', '"ts": "x", "us": ')):
        path.write_text(text.replace(old, new))
        with pytest.raises(TraceError):
            tk.open_trace(path)


@pytest.mark.parametrize("version", [2, "2"])
def test_a_file_of_a_later_version_is_refused(tmp_path, version):
    path = random_trace(5).to_chrome(tmp_path / "a.json")
    path.write_text(path.read_text().replace('"version": 1', f'"version": {json.dumps(version)}', 1))
    with pytest.raises(TraceError, match=f"format version {version!r}; this toolkit reads versions up to 1. Upgrade"):
        tk.open_trace(path)


# ---- layers


def module(name, ts, dur, tid=1):
    return {"ph": "X", "cat": "python_function", "name": f"nn.Module: {name}", "pid": 1, "tid": tid, "ts": ts, "dur": dur}


def test_layers_are_the_outermost_repeated_modules_in_the_order_in_which_they_ran(tmp_path):
    events = []
    for step in (0, 100):
        events += [module("Net_0", step, 99), module("EmbeddingLayer_0", step + 1, 8)]
        for i, name in enumerate(("EncoderLayer_0", "EncoderLayer_1", "DecoderBlock_3", "DecoderBlock_4")):
            events += [module(name, step + 10 + 20 * i, 18), module("SparseBlock_0", step + 12 + 20 * i, 9)]
        events += [module("DropoutLayer_7", step + 95, 2)]
    events += [module("OtherLayer_0", 105, 90, tid=2), module("LayerNorm_0", 300, 50)]
    launched = [(ts, 1) for ts in (5, 9, 13, 25, 29, 31, 51, 75, 96, 115, 175)] + [(115, 2), (310, 1)]
    launched += [(140, 3)]  # of a thread without Python, such as that of autograd
    events += [module("Net_0", 139, 3, tid=4) | {"name": "data.py(5): load"}]
    launched += [(140, 4)]  # of a thread that runs no layer
    for i, (ts, tid) in enumerate(launched):
        events += [call(ts=ts, correlation=i, tid=tid), kernel(ts=400 + i, correlation=i)]
    (tmp_path / "a.json").write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    trace = tk.open_trace(tmp_path / "a.json")
    layers = trace["layer"][trace.is_kind("kernel")].tolist()
    assert layers == [-1, -1, 0, 0, -1, 1, 2, 3, -1, 0, 3, -1, -1, 1, -1]
    assert set(trace["layer"][trace.is_kind("launch")].tolist()) == {-1, 0, 1, 2, 3}


def test_layers_of_what_the_profiler_wrote(tmp_path):
    """The profiler of this PyTorch names modules as `open_trace` expects."""

    class Block(torch.nn.Linear):
        pass

    net = torch.nn.Sequential(*(Block(8, 8) for _ in range(3)))
    with torch.profiler.profile(with_stack=True) as profiler:
        net(net(torch.ones(2, 8)))
    profiler.export_chrome_trace(str(tmp_path / "cpu.json"))
    written = json.loads((tmp_path / "cpu.json").read_text())
    calls = [event for event in written["traceEvents"] if event.get("name") == "aten::addmm"]
    for i, event in enumerate(calls):  # as if each product had launched a kernel
        launch = call(ts=event["ts"], correlation=i) | {key: event[key] for key in ("pid", "tid")}
        written["traceEvents"] += [launch, kernel(ts=event["ts"] + 10**6, correlation=i)]
    (tmp_path / "a.json").write_text(json.dumps(written))
    trace = tk.open_trace(tmp_path / "a.json")
    assert trace["layer"][trace.is_kind("kernel")].tolist() == [0, 1, 2, 0, 1, 2]


# ---- size


def big_file(path: Path, megabytes: int) -> int:
    """Write a file like PyTorch's profiler: steps of 432 operations, each with Python frames, calls, arrows and a kernel."""
    function = '  {\n    "ph": "X", "cat": "python_function", "name": "model.py(%d): forward", "pid": 1, "tid": 1,\n'
    function += (
        '    "ts": %.3f, "dur": 6.9,\n    "args": {\n      "Python parent id": 1, "Python id": 2, "Ev Idx": 3\n    }\n  },\n'
    )
    operation = '  {\n    "ph": "X", "cat": "cpu_op", "name": "aten::mul", "pid": 1, "tid": 1,\n    "ts": %.3f, "dur": 6.1,\n'
    operation += (
        '    "args": {\n      "External id": %d, "Input Dims": [[1, 1, 4096], []], "Input type": ["float"]\n    }\n  },\n'
    )
    launch = '  {\n    "ph": "X", "cat": "cuda_runtime", "name": "%s", "pid": 1, "tid": 1,\n    "ts": %.3f, "dur": 4.1,\n'
    launch += '    "args": {\n      "External id": 5, "cbid": 211, "correlation": %d\n    }\n  },\n'
    arrow = '  {\n    "ph": "%s", "id": %d, "pid": 1, "tid": 1, "ts": %.3f,\n    "cat": "ac2g", "name": "ac2g"\n  },\n'
    run = '  {\n    "ph": "X", "cat": "%s", "name": "%s", "pid": 0, "tid": 7,\n    "ts": %.3f, "dur": 1.216,\n    "args": {\n'
    run += '      "External id": 5, "device": 0, "context": 1, "stream": 7, "correlation": %d, "bytes": 8,'
    run += ' "registers per thread": 32, "grid": [1, 1, 1], "block": [128, 1, 1]\n    }\n  },\n'
    now, correlation, steps, written = 4392425522136.01, 0, 0, 0
    with path.open("w") as file:
        file.write('{\n"schemaVersion": 1,\n"traceEvents": [\n')
        while written < megabytes * 10**6:
            steps, parts = steps + 1, []
            for i in range(432):
                now, correlation, name = (
                    now + 7.013,
                    correlation + 1,
                    f"void at::native::kernel_{i % 12}<float, Functor<{i % 12}>>",
                )
                parts.append(function % (60 + i % 12, now) + operation % (now + 0.2, correlation))
                parts.append(launch % ("cudaLaunchKernel", now + 1, correlation) + arrow % ("s", correlation, now + 1))
                parts.append(run % ("kernel", name, now + 6, correlation) + arrow % ("f", correlation, now + 6))
            correlation += 1
            parts.append(launch % ("cudaMemcpyAsync", now + 8, correlation))
            parts.append(run % ("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", now + 9, correlation))
            now += 20
            written += file.write("".join(parts))
        file.write('  {"name": "end", "ph": "i", "ts": 1}\n]}\n')
    return steps


@pytest.mark.slow  # it writes and reads 200 MB
def test_two_hundred_megabytes_open_in_bounded_time_and_memory(tmp_path):
    if shutil.disk_usage(tmp_path).free < 10**9:
        pytest.skip("less than 1 GB of disk is free, the file takes 200 MB")
    path = tmp_path / "big.json"
    steps = big_file(path, 200)
    code = f"import toolkit as tk; t = tk.open_trace({str(path)!r}); print(int(t['step'].max()), len(t))"
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_AS, (2 * 10**9,) * 2); {code}"
    done = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True, check=True)
    path.unlink()
    elapsed_s = min(time.monotonic() - start, 1.5 * (resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before))
    assert done.stdout.split() == [str(steps - 1), str(steps * 866)]  # 433 launches
    assert within(elapsed_s, 20)
