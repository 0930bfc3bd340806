"""Tests of reading PyTorch's memory snapshots: files that PyTorch 2.11 wrote on an H200, and small ones built here."""

import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch

import toolkit as tk
from tests.host_memory import HostPeak
from toolkit.core.errors import TraceError
from toolkit.gpu.virtual.allocator.blocks import Blocks
from toolkit.trace.columns import KINDS
from toolkit.trace.snapshot import read as snapshot
from toolkit.trace.snapshot.block_sizes import ACTION, Rules, block_sizes

DATA = Path(__file__).parent / "data"
SAMPLES = ("snapshot_h200_all.pickle", "snapshot_h200_python.pickle")
MiB = 1 << 20
BASE = 0x7F0000000000
FRAMES = [
    {"name": "empty", "filename": "??", "line": 0},
    {"name": "forward", "filename": "/opt/venv/lib/python3.12/site-packages/torch/nn/modules/linear.py", "line": 134},
    {"name": "forward", "filename": "/home/me/model.py", "line": 41},
    {"name": "<module>", "filename": "/home/me/train.py", "line": 7},
]
WHERE = "/home/me/train.py:7 > /home/me/model.py:41"


def entry(action, addr, size, time_us=1000, frames=FRAMES, stream=0, **more):
    return {
        "action": action, "addr": addr, "size": size, "stream": stream, "time_us": time_us, "compile_context": "N/A",
        "user_metadata": "", "frames": frames, **more,
    }  # fmt: skip


def segment(address, size, *blocks, stream=0, device=0, **more):
    """Build a segment of adjacent blocks (size, requested, state)."""
    made, at = [], address
    for n, requested, state in blocks:
        made.append({"address": at, "size": n, "requested_size": requested, "state": state, "frames": FRAMES})
        at += n
    return {
        "device": device, "address": address, "total_size": size, "stream": stream, "segment_type": "large",
        "segment_pool_id": (0, 0), "is_expandable": False, "frames": [], "blocks": made, **more,
    }  # fmt: skip


def snap(segments, *traces, **settings):
    return {"segments": segments, "device_traces": list(traces), "allocator_settings": settings, "external_annotations": []}


def opened(tmp_path, value, protocol=4):
    path = tmp_path / "a.pickle"
    path.write_bytes(value if isinstance(value, bytes) else pickle.dumps(value, protocol))
    return tk.open_trace(path)


def rows(trace, *columns):
    return list(zip([KINDS[k] for k in trace["kind"]], *(trace[c].tolist() for c in columns), strict=True))


def equal(one, other):
    assert one.text("where") == other.text("where")
    for column in ("kind", "start_ns", "bytes", "stream", "device", "address", "requested"):
        assert one[column].tolist() == other[column].tolist(), column
    assert one.meta["opening"] == other.meta["opening"]


def balance(trace):
    return int(trace["bytes"][trace.is_kind("alloc")].sum() - trace["bytes"][trace.is_kind("free")].sum())


# ---- files of PyTorch


@pytest.mark.parametrize("name", SAMPLES)
def test_every_byte_of_a_real_file_is_accounted_for(name):
    trace = tk.open_trace(DATA / name)
    live = [
        block
        for s in pickle.loads((DATA / name).read_bytes())["segments"]
        for block in s["blocks"]
        if "alloc" in block["state"]
    ]
    assert balance(trace) == sum(block["size"] for block in live)
    assert trace.meta["unaccounted_bytes"] == 0
    assert trace.meta["format"] == "pytorch-snapshot"
    assert trace.meta["clock"] == "measured"
    assert trace.meta["allocator_settings"]["expandable_segments"] is False
    opening = trace.meta["opening"]
    assert (trace["start_ns"][:opening] == 0).all()
    assert set(trace["kind"][:opening].tolist()) == {KINDS.index("alloc"), KINDS.index("segment_alloc")}
    assert any(where == "/home/user/project/probe.py:26" for where in trace.text("where"))


def test_a_real_block_that_was_not_cut_has_its_size():
    trace = tk.open_trace(DATA / SAMPLES[0])
    assert ("alloc", 22 * MiB, 21 * MiB + 512) in rows(trace, "bytes", "requested")


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_and_the_dicts_themselves_give_the_same(tmp_path, name, protocol):
    held = pickle.loads((DATA / name).read_bytes())
    trace = tk.open_trace(DATA / name)
    equal(opened(tmp_path, held, protocol), trace)


def test_sizes_replayed_are_those_that_the_snapshot_has_for_live_blocks(monkeypatch):
    monkeypatch.setattr("toolkit.trace.snapshot.rows._correct", lambda *_: None)
    for name in SAMPLES:
        assert tk.open_trace(DATA / name).meta["unaccounted_bytes"] == 0


# ---- what becomes of entries


def test_entries_become_rows(tmp_path):
    value = snap(
        [segment(BASE, 2 * MiB, (1024, 1000, "active_allocated"), (2 * MiB - 1024, 0, "inactive"))],
        [
            entry("segment_alloc", BASE, 2 * MiB, 1000), entry("alloc", BASE, 1000, 1001), entry("alloc", BASE + 1024, 5, 1002),
            entry("free_requested", BASE + 1024, 5, 1003), entry("free_completed", BASE + 1024, 5, 1004),
            entry("snapshot", 0, 0, 1005),
        ],
    )  # fmt: skip
    trace = opened(tmp_path, value)
    assert rows(trace, "start_ns", "bytes", "address", "requested") == [
        ("segment_alloc", 0, 2 * MiB, BASE, -1), ("alloc", 1000, 1024, BASE, 1000), ("alloc", 2000, 512, BASE + 1024, 5),
        ("free", 3000, 512, BASE + 1024, 5),
    ]  # fmt: skip
    assert trace.text("where") == [WHERE] * 4
    assert trace.meta["opening"] == trace.meta["unaccounted_bytes"] == 0
    assert trace.meta["start_us"] == 1000


def test_what_was_there_before_comes_first(tmp_path):
    value = snap(
        [segment(BASE, 2 * MiB, (512, 9, "active_allocated"), (512, 0, "inactive"), (2 * MiB - 1024, 0, "inactive"))],
        [entry("free_requested", BASE + 512, 100, 5000), entry("free_completed", BASE + 512, 100, 5000)],
    )
    trace = opened(tmp_path, value)
    assert rows(trace, "start_ns", "bytes", "address") == [
        ("segment_alloc", 0, 2 * MiB, BASE), ("alloc", 0, 512, BASE + 512), ("alloc", 0, 512, BASE),
        ("free", 0, 512, BASE + 512),
    ]  # fmt: skip
    assert trace.meta["opening"] == 3
    assert trace.text("where") == [None, None, WHERE, WHERE]


def test_a_file_without_history_is_its_blocks(tmp_path):
    value = snap([segment(BASE, 20 * MiB, (3 * MiB, 3 * MiB, "active_allocated"), (17 * MiB, 0, "inactive"))])
    assert rows(opened(tmp_path, value), "bytes") == [("segment_alloc", 20 * MiB), ("alloc", 3 * MiB)]
    assert not len(opened(tmp_path, snap([])))


def test_a_block_freed_and_still_in_use_by_a_stream_is_no_allocation(tmp_path):
    value = snap([segment(BASE, 20 * MiB, (3 * MiB, 3 * MiB, "active_awaiting_free"), (17 * MiB, 0, "inactive"))])
    assert rows(opened(tmp_path, value), "bytes") == [("segment_alloc", 20 * MiB)]


def test_segments_given_back_were_there(tmp_path):
    value = snap(
        [], [entry("segment_free", BASE, 2 * MiB), entry("segment_alloc", BASE, 4 * MiB), entry("segment_free", BASE, 4 * MiB)]
    )
    found = rows(opened(tmp_path, value), "bytes")
    assert found == [
        ("segment_alloc", 2 * MiB),
        ("segment_free", 2 * MiB),
        ("segment_alloc", 4 * MiB),
        ("segment_free", 4 * MiB),
    ]


def test_expandable_segments_grow_and_shrink(tmp_path):
    held = segment(BASE, 40 * MiB, (3 * MiB, 3 * MiB - 512, "active_allocated"), (37 * MiB, 0, "inactive"), is_expandable=True)
    history = [entry("segment_map", BASE + 20 * MiB, 20 * MiB), entry("segment_unmap", BASE + 40 * MiB, 20 * MiB)]
    trace = opened(tmp_path, snap([held], history, expandable_segments=True))
    assert rows(trace, "bytes", "address") == [
        ("segment_alloc", 20 * MiB, BASE), ("segment_alloc", 20 * MiB, BASE + 40 * MiB), ("alloc", 3 * MiB, BASE),
        ("segment_alloc", 20 * MiB, BASE + 20 * MiB), ("segment_free", 20 * MiB, BASE + 40 * MiB),
    ]  # fmt: skip


def test_failed_allocations_are_events(tmp_path):
    oom = entry("oom", 0, 8 << 30)
    del oom["addr"]
    trace = opened(tmp_path, snap([], [oom | {"device_free": 1 << 30}]))
    assert rows(trace, "bytes", "address", "requested") == [("oom", 8 << 30, -1, 8 << 30)]


def test_devices_streams_and_times(tmp_path):
    one = [entry("alloc", BASE, 512, 2000, stream=0x5550000), entry("alloc", BASE + 512, 512, 1999)]
    two = [entry("alloc", BASE, 512, 1500)]
    trace = opened(tmp_path, snap([], one, two))
    assert trace["device"].tolist() == [1, 0, 0]
    assert trace["start_ns"].tolist() == [0, 500_000, 500_000]  # setting the clock back must not reorder the events of a device
    assert trace["stream"].tolist() == [0, 1, 0]


def test_of_several_gpus_the_fullest_or_the_chosen_one_is_shown(tmp_path):
    """What a GPU held before the history began counts, too."""
    value = snap(
        [
            segment(BASE, 6000 * MiB, (6000 * MiB, 6000 * MiB, "active_allocated")),
            segment(BASE, 64 * MiB, (10 * MiB, 10 * MiB, "active_allocated"), (54 * MiB, 0, "inactive"), device=1),
        ],
        [], [entry("alloc", BASE, 10 * MiB)],
    )  # fmt: skip
    path = tmp_path / "a.pickle"
    path.write_bytes(pickle.dumps(value))
    use = tk.open_memory(path)
    assert use.peak_bytes == 6000 * MiB
    assert use.line() == 'peak 5.86 GiB, kept 0 B (unknown device, GPU 0, one of 2: device="cuda:1" shows another)'
    for device in (1, "cuda:1", torch.device("cuda", 1)):
        use = tk.open_memory(path, device=device)
        assert use.kept_bytes == use.peak_bytes == 10 * MiB
        assert "GPU 1, one of 2" in repr(use)
        assert use.what_if(["rtx-4090"])["fits"].all()
    for device in (2, -1, True, "cuda", "virtual:h200", "cuda:1\n"):
        with pytest.raises(TraceError, match=r'the file has memory of GPU 0 and GPU 1\. Give an index, or a name: "cuda:1"'):
            tk.open_memory(path, device=device)
    path.write_bytes(pickle.dumps(snap(value["segments"][:1])))
    assert tk.open_memory(path, device=0).line() == "peak 5.86 GiB, kept 0 B (unknown device)"


def test_bytes_that_history_and_blocks_disagree_about_are_said(tmp_path):
    trace = opened(tmp_path, snap([], [entry("alloc", BASE, 512)]))
    assert trace.meta["unaccounted_bytes"] == -512


def test_blocks_of_older_files_have_a_history(tmp_path):
    held = segment(BASE, 2 * MiB, (512, 0, "inactive"), (1024, 0, "active_allocated"), (2 * MiB - 1536, 0, "inactive"))
    for block in held["blocks"]:
        del block["address"], block["frames"], block["requested_size"]
    held["blocks"][1]["history"] = [{"addr": BASE + 512, "real_size": 700, "frames": FRAMES}]
    del held["frames"], held["is_expandable"], held["segment_pool_id"]
    value = {"segments": [held], "device_traces": [[{"action": "alloc", "addr": BASE, "size": 512, "stream": 0}]]}
    trace = opened(tmp_path, value)
    assert rows(trace, "bytes", "address", "requested")[1:] == [
        ("alloc", 1024, BASE + 512, 700), ("alloc", 512, BASE, 512),
    ]  # fmt: skip
    assert trace.text("where") == [None, WHERE, None]


# ---- sizes of blocks


def test_a_remainder_of_up_to_a_mebibyte_belongs_to_the_block():
    def sizes(*requests, **rules):
        actions = [ACTION["segment_alloc"], *(ACTION["alloc"] for _ in requests)]
        address = [BASE, *(BASE + at for at, _ in requests)]
        size = [20 * MiB, *(n for _, n in requests)]
        return block_sizes(np.array(actions), np.array(address), np.array(size), Rules(**rules)).tolist()[1:]

    assert sizes((0, 19 * MiB)) == [20 * MiB]
    assert sizes((0, 19 * MiB - 512)) == [19 * MiB - 512]
    assert sizes((0, 19 * MiB), expandable=True) == [19 * MiB]
    assert sizes((0, 18 * MiB), max_split_bytes=16 * MiB) == [20 * MiB]
    assert sizes((2 * MiB, 3 * MiB), (0, 1 * MiB + 512)) == [3 * MiB, 2 * MiB]
    assert sizes((0, 100)) == [512]


def test_sizes_rounded_between_powers_of_two():
    divisions = {str(1 << i): 4 if i < 3 else 0 for i in range(16)}
    rules = Rules.of({"roundup_power2_divisions": divisions})
    assert rules.rounded(np.array([0, 1200, 4 * MiB, 5 * MiB + 1, 9 * MiB])).tolist() == [0, 1536, 4 * MiB, 6 * MiB, 9 * MiB]
    assert rules.rounded(np.array([5000])).tolist() == [5120]
    assert Rules.of({"roundup_power2_divisions": "?", "max_split_size": "x"}) == Rules()


@pytest.mark.parametrize("seed", range(5))
def test_replayed_sizes_are_the_allocators(seed):
    rng, blocks = random.Random(seed), Blocks(1 << 40)
    known, live, history, real = set(), [], [], []
    for _ in range(2000):
        if live and rng.random() < 0.48:
            block = live.pop(rng.randrange(len(live)))
            history.append((ACTION["free_completed"], block.address, block.requested))
            real.append(block.requested)
            blocks.give(block)
            continue
        n = rng.choice((rng.randint(1, MiB), rng.randint(MiB, 12 * MiB), rng.randint(10 * MiB, 60 * MiB)))
        block = blocks.take(n, 0)
        first = last = block
        while first.before is not None:
            first = first.before
        while last.after is not None:
            last = last.after
        if first.address not in known:
            known.add(first.address)
            history.append((ACTION["segment_alloc"], first.address, last.address + last.size - first.address))
            real.append(history[-1][2])
        history.append((ACTION["alloc"], block.address, n))
        real.append(block.size)
        live.append(block)
    table = np.array(history)
    assert block_sizes(table[:, 0], table[:, 1], table[:, 2]).tolist() == real


# ---- large files


def large(n_entries, n_stacks=500, depth=25):
    """Build a history like PyTorch's: each entry has its own list of frames, and entries share the frames."""
    rng = random.Random(0)
    frames = [{"name": f"f{i}", "filename": f"/home/me/m{i % 40}.py", "line": 1 + i} for i in range(2000)]
    stacks = [rng.sample(frames, depth) for _ in range(n_stacks)]
    held, traces = [], []
    for i in range(n_entries // 2):
        address, size = BASE + rng.randrange(1 << 20) * 512, rng.choice((100, 70000, 1 << 20))
        for j, action in enumerate(("free_requested", "free_completed") if i % 2 else ("alloc", "alloc")):
            traces.append(entry(action, address + j, size, 10**15 + 2 * i + j, list(rng.choice(stacks))))
            traces[-1]["compile_context"] = "".join(("N", "/A"))
    return snap(held, traces)


@pytest.mark.parametrize("protocol", [4, 5])
def test_entries_of_large_files_are_skimmed(tmp_path, monkeypatch, protocol):
    made = []
    monkeypatch.setattr(snapshot, "Entries", lambda *_: made.append(snapshot_entries()) or made[-1])
    value = large(120_000)
    path = tmp_path / "large.pickle"
    path.write_bytes(pickle.dumps(value, protocol))
    assert path.stat().st_size > 20 * 10**6
    del value
    peak = HostPeak()
    tk.open_trace(path)
    assert peak.grown_bytes() < 8 * path.stat().st_size
    (entries,) = made
    assert len(entries.columns["action"]) == 120_000
    assert entries.skimmed > 0.98 * 120_000


snapshot_entries = snapshot.Entries


def test_both_ways_of_reading_agree(tmp_path):
    value = large(6000, depth=7)
    value["device_traces"][0][3000]["frames"] = []
    value["device_traces"][0][3001].pop("frames")
    value["device_traces"][0][3002]["size"] = 1 << 40
    value["device_traces"][0][3003]["frames"] = value["device_traces"][0][10]["frames"]
    value["device_traces"][0][3004]["frames"] = value["device_traces"][0][10]["frames"][:1]
    value["device_traces"][0][3005]["frames"] = value["device_traces"][0][10]["frames"] * 300
    value["device_traces"][0][3006]["user_metadata"] = "ünd " * 100
    slow = opened(tmp_path, value, 2)
    equal(opened(tmp_path, value, 4), slow)


def test_a_snapshot_that_is_none(tmp_path):
    for value, says in (({"a": 1}, "'a'"), ([], "a list"), ({"device_traces": []}, "without 'segments'"), (None, "NoneType")):
        with pytest.raises(TraceError, match=says):
            opened(tmp_path, value)
    for value in ({"segments": 3}, snap([3]), snap([{}]), snap([], [3]), snap([], [{}]), snap([], [{"action": "alloc"}])):
        with pytest.raises(TraceError):
            opened(tmp_path, value)


def test_the_benchmark_opens_what_it_makes(tmp_path):
    from toolkit.bench.snapshot import make
    from toolkit.bench.snapshot import opened as measured

    make(tmp_path / "a.pickle", 0.01, 5)
    record = measured(tmp_path / "a.pickle")
    assert record["rows"] > 10_000
    assert record["opening"] == record["unaccounted_bytes"] == 0
    assert record["file_bytes"] / record["seconds"] > 0
