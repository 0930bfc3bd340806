"""Tests of writing traces as memory snapshots: they read back unchanged, and PyTorch's own viewer opens them."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

import toolkit as tk
from tests.host_memory import HostPeak
from tests.trace.test_snapshot import BASE, DATA, SAMPLES, MiB, balance, entry, equal, large, opened, segment, snap
from toolkit.core.errors import TraceError
from toolkit.trace.events import TraceBuilder
from toolkit.trace.snapshot.write import write_snapshot


def again(trace, tmp_path):
    """Write a trace as a snapshot and read it back."""
    return tk.open_trace(write_snapshot(trace, tmp_path / "written.pickle"))


@pytest.mark.parametrize("name", SAMPLES)
def test_pytorchs_own_files_come_back(tmp_path, name):
    trace = tk.open_trace(DATA / name)
    back = again(trace, tmp_path)
    equal(back, trace)
    assert back.meta["unaccounted_bytes"] == 0
    assert back.meta["allocator_settings"] == trace.meta["allocator_settings"]
    equal(again(back, tmp_path), trace)


def test_a_recording_of_the_virtual_gpu_comes_back(tmp_path):
    device = tk.device("virtual:h200")
    with tk.record(device) as trace:
        kept = [torch.empty(n, dtype=torch.uint8, device=device.torch) for n in (100, 21 * MiB + 512, 3 * MiB, 19 * MiB)]
        del kept[1:3]
        kept.append(torch.empty(20 * MiB, dtype=torch.uint8, device=device.torch))
    memory = trace.select(trace.is_kind("alloc", "free"))
    back = again(trace, tmp_path)
    found = back.select(back.is_kind("alloc", "free"))
    assert back.meta["clock"] == trace.meta["clock"] == "modelled"
    assert back.meta["device"] == trace.meta["device"]
    for column in ("kind", "address", "requested"):
        assert found[column].tolist() == memory[column].tolist()
    assert found.text("where") == memory.text("where")
    assert balance(back) == balance(trace)


def test_devices_failures_and_openings_come_back(tmp_path):
    one = [
        entry("segment_alloc", BASE, 20 * MiB, 10),
        entry("alloc", BASE, 19 * MiB, 11, stream=77),
        entry("oom", 0, 9 << 40, 12),
    ]
    del one[2]["addr"]
    two = [entry("free_requested", BASE + 4 * MiB, 3 * MiB, 9), entry("free_completed", BASE + 4 * MiB, 3 * MiB, 9)]
    two += [entry("segment_free", BASE + 100 * MiB, 2 * MiB, 10)]
    kept = segment(BASE, 20 * MiB, (4 * MiB, 3 * MiB, "active_allocated"), (16 * MiB, 0, "inactive"), device=1)
    held = segment(BASE, 20 * MiB, (20 * MiB, 19 * MiB, "active_allocated"))
    trace = opened(tmp_path, snap([held, kept], [*one[:2], one[2] | {"device_free": 5}], two))
    assert trace.meta["opening"] == 4
    back = again(trace, tmp_path)
    equal(back, trace)
    assert back.meta["unaccounted_bytes"] == trace.meta["unaccounted_bytes"] == 0


def test_blocks_without_a_segment_come_back_without_one(tmp_path):
    builder = TraceBuilder()
    builder.add("alloc", 1000, bytes=512, address=BASE, requested=10, where="cell 7:3 > model.py:41", name="weights", owner="w")
    builder.add("alloc", 2000, bytes=5 * MiB, address=BASE + MiB, where="odd place")
    builder.add("kernel", 2500, 10, name="mm")
    builder.add("free", 3000, bytes=512, address=BASE, requested=10)
    trace = builder.build({"device": "a card", "clock": "measured"})
    back = again(trace, tmp_path)
    assert back["bytes"].tolist() == [512, 5 * MiB, 512]
    assert back.text("where")[:1] == ["cell 7:3 > model.py:41"]
    raw = pickle.loads((tmp_path / "written.pickle").read_bytes())
    assert [s["total_size"] for s in raw["segments"]] == [5 * MiB]
    assert [e["user_metadata"] for e in raw["device_traces"][0]] == ["weights", "", "", ""]
    assert [f["filename"] for f in raw["device_traces"][0][0]["frames"]] == ["model.py", "cell 7"]


def test_segments_are_blocks_from_end_to_end(tmp_path):
    trace = tk.open_trace(DATA / SAMPLES[0])
    raw = pickle.loads(write_snapshot(trace, tmp_path / "a.pickle").read_bytes())
    real = pickle.loads((DATA / SAMPLES[0]).read_bytes())
    for made, true in zip(
        sorted(raw["segments"], key=lambda s: s["address"]), sorted(real["segments"], key=lambda s: s["address"]), strict=True
    ):
        assert made["blocks"][0]["address"] == made["address"]
        assert sum(block["size"] for block in made["blocks"]) == made["total_size"]
        for key in ("address", "total_size", "allocated_size", "requested_size", "segment_type", "device", "stream"):
            assert made[key] == true[key], key


def test_what_has_no_memory_or_no_addresses_is_no_snapshot(tmp_path):
    for kind, says in (("kernel", "no memory events"), ("alloc", "no addresses")):
        builder = TraceBuilder()
        builder.add(kind, 0, 1, bytes=512)
        with pytest.raises(TraceError, match=says):
            write_snapshot(builder.build({}), tmp_path / "a.pickle")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("view", ["stats", "trace", "trace_plot", "segment_plot"])
def test_pytorchs_viewer_reads_it(tmp_path, view):
    path = write_snapshot(tk.open_trace(DATA / SAMPLES[0]), tmp_path / "a.pickle")
    out = tmp_path / "out.html"
    viewer = torch.cuda.__path__[0] + "/_memory_viz.py"
    command = [sys.executable, viewer, view, str(path)] + (["-o", str(out)] if "plot" in view else [])
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "cudaMalloc" in done.stdout if view == "trace" else out.exists() or "MiB" in done.stdout


def test_many_rows_need_little_memory(tmp_path):
    path = tmp_path / "a.pickle"
    path.write_bytes(pickle.dumps(large(60_000)))
    trace = tk.open_trace(path)
    peak = HostPeak()
    back = again(trace, tmp_path)
    assert peak.grown_bytes() < 100 * MiB
    equal(back, trace)
    assert (tmp_path / "written.pickle").stat().st_size < 200 * len(trace)
    assert np.array_equal(back["bytes"], trace["bytes"])
