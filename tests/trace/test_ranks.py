"""Tests of traces of several ranks: opened as one, clocks aligned, the late rank blamed, and what does not fit together."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest

import toolkit as tk
from tests.trace.rank_files import NAME, collective, job, plain, write_job, write_rank
from tests.trace.test_trace import same
from toolkit.core.errors import TraceError, UnknownNameError
from toolkit.trace.clocks import align
from toolkit.trace.differences import description_of_ranks, steps_of
from toolkit.trace.events import TraceBuilder
from toolkit.trace.join import join
from toolkit.ui.lessons.two_gpus import two_runs

DATA = Path(__file__).parent / "data"


def quiet(files: list[Path]) -> tk.Trace:
    """Open files that give no reason to warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return tk.open_trace(files)


# ---- clocks and waits


def test_a_real_job_with_nccl():
    """Four steps of DDP and an all-gather each, by PyTorch's profiler on two H100s. In the third, rank 1 sleeps first."""
    trace = quiet([DATA / f"nccl_ddp_h100-{rank}.json.gz" for rank in range(2)])
    table = trace.collectives()
    assert table["operation"].tolist() == ["all_reduce", "all_gather"] * 4
    assert table["step"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]  # not the ranges that PyTorch writes for parts of a step
    assert trace.meta["steps_from"] == "guessed"
    assert set(table["algorithm"]) == {"ring, LL"}
    assert set(table["bytes"]) == {271_392, 524_288}  # of the gradients, and of two ranks' 65,536 floats
    assert set(table["last_rank"]) == {1}
    assert table["rank0_wait_us"].idxmax() == 4
    assert max(clock["error_95_us"] or 0 for clock in trace.meta["clocks"]) < 1


@pytest.mark.parametrize("late_rank", [0, 1])
def test_a_delay_is_recovered_and_blamed_on_its_rank_in_spite_of_the_clocks(tmp_path, late_rank):
    late = dict.fromkeys(range(20, 200, 10), late_rank)
    files = write_job(tmp_path, late, offsets_us=(0, 640), drifts_ppm=(0, -7), delay_us=200, gap_us=50_000)
    trace = quiet(files)
    table = trace.collectives()
    delayed = table[table["seq"].isin([100 + number for number in late])]
    assert set(delayed["last_rank"]) == {late_rank}
    # the delay, and the jitter of up to 3 µs with which ranks arrive in this job
    assert (delayed[f"rank{1 - late_rank}_wait_us"] - 200).abs().max() < 10
    assert (delayed[f"rank{late_rank}_wait_us"] == 0).all()
    others = table.drop(delayed.index)
    assert others[["rank0_wait_us", "rank1_wait_us"]].max(axis=None) < 10
    summary = trace.ranks().set_index("rank")
    assert summary["caused_wait_us"].idxmax() == late_rank
    assert summary.loc[late_rank, "caused_wait_us"] == pytest.approx(200 * len(late), rel=0.1)


def test_the_drift_and_the_error_of_a_clock_are_found(tmp_path):
    files = write_job(tmp_path, ranks=4, offsets_us=(0, -350, 900, 40), drifts_ppm=(0, 50, -80, 0), collectives=600)
    trace = quiet(files)
    clocks = {clock["rank"]: clock for clock in trace.meta["clocks"]}
    for rank, (offset, drift) in enumerate(zip((0, -350, 900, 40), (0, 50, -80, 0), strict=True)):
        assert clocks[rank]["offset_us"] == pytest.approx(offset, abs=2)
        assert clocks[rank]["drift_ppm"] == pytest.approx(drift, abs=5)
        assert clocks[rank]["collectives"] == 600
    assert 0 < clocks[1]["error_us"] < clocks[1]["error_95_us"] < 3
    assert "aligned on the ends of 600 collectives" in trace.meta["notes"][0]
    assert trace.ranks()["clock_error_us"].max() < 2


def test_offsets_of_clocks_are_exact_after_years(tmp_path):
    """A float of the ns since 1970 is off by up to 128."""
    for rank, base in enumerate((1_790_857_026_000_000_000, 1_790_857_026_000_000_100)):
        events = [collective(5.0, 20, 0), collective(105.0, 20, 1)]
        write_rank(tmp_path / f"{rank}.json", rank, 2, events, job(rank, 2) | {"baseTimeNanoseconds": base})
    assert [clock["offset_us"] for clock in quiet([tmp_path / "0.json", tmp_path / "1.json"]).meta["clocks"]] == [0, 0.1]


def test_sums_of_what_was_sent_before_neither_move_a_clock_nor_wait_for_a_late_launch(tmp_path):
    """The host of rank 1 launches all sums 70 µs late; what they add up has arrived, so rank 0 has ended them by then."""
    kinds = [f"one_shot_all_reduce_of_sent{receiver}" for receiver in ("", "_norm_kernel", "_start")] + ["one_shot_all_gather"]
    files = []
    for rank in (0, 1):
        events = [
            collective(1000 * i + (70 if rank and "sent" in name else 0), 5, seq=i, name=name)
            for i, name in enumerate(kinds * 10)
        ]
        files.append(write_rank(tmp_path / f"rank{rank}.json", rank, 2, events))
    trace = quiet(files)
    assert trace.meta["clocks"][1]["offset_us"] == pytest.approx(0, abs=0.1)
    assert "on the ends of 10 collectives" in trace.meta["notes"][0]
    assert not trace.collectives()[["rank0_wait_us", "rank1_wait_us"]].any(axis=None)
    assert not trace.ranks()["last_count"].any()


@pytest.mark.parametrize("name", [NAME, "one_shot_all_reduce_of_sent_norm_kernel"])
def test_the_rank_that_comes_last_leaves_first(tmp_path, name):
    """In the prompt, rank 1 is 500 µs late and leaves 1 µs before rank 0. In the steps that follow, both arrive together."""
    rng, files = np.random.default_rng(0), []
    for rank in (0, 1):
        prompt = [collective(1000 * i + 500 * rank, 520 - 501 * rank, seq=i) for i in range(90)]
        steps = [collective(1000 * i + rng.normal(0, 0.3), 5, seq=i, name=name) for i in range(90, 102)]
        late = [collective(1000 * i + 300 * rank, 5, seq=i, name=name) for i in range(102, 112) if "sent" in name]
        files.append(write_rank(tmp_path / f"rank{rank}.json", rank, 2, prompt + steps + late))
    trace = quiet(files)
    clock = trace.meta["clocks"][1]
    assert clock["offset_us"] == pytest.approx(0, abs=0.3)
    assert clock["error_us"] == pytest.approx(1, abs=0.3)  # most of the collectives are those of the prompt
    assert clock["collectives"] == 102
    assert "on the ends of 102 collectives" in trace.meta["notes"][0]


def test_a_few_that_arrive_together_by_chance_do_not_decide():
    """Collectives through host memory end 50 µs apart, and most ranks arrive 200 µs apart: the median of all is better."""
    rng, offset = np.random.default_rng(0), np.array([0, 3e6])
    true = np.sort(rng.uniform(0, 1e9, 1000))[:, None] + offset
    starts, ends = (true + rng.normal(0, each, true.shape) for each in (200e3, 50e3))
    all_of = np.ones(true.shape, bool)
    near = np.abs(starts[:, 1] - starts[:, 0] - 3e6) < 10e3
    assert 10 < near.sum() < 50
    assert abs(np.median((ends[:, 1] - ends[:, 0])[near]) - 3e6) > 10e3  # they alone would be wrong
    (_, clock), _ = align(starts.astype(np.int64), (ends + 1e6).astype(np.int64), all_of, all_of[:, 0], [0, 0])
    assert clock.offset_ns == pytest.approx(3e6, abs=5e3)


def test_outliers_do_not_move_a_clock():
    rng = np.random.default_rng(0)
    true = np.sort(rng.uniform(0, 1e9, 301))
    ends = np.stack([true, true + 3e5 + rng.normal(0, 300, 301)], 1)
    ends[::4, 1] += 5e6  # a quarter of the collectives end late on this rank
    ends, all_of = ends.astype(np.int64), np.ones((301, 2), bool)
    (_, clock), _ = align(ends - 9000, ends, all_of, all_of[:, 0], [0, 0])
    assert clock.corrected(np.array([3e5, 5e8 + 3e5]).astype(np.int64)) == pytest.approx([0, 5e8], abs=2000)


def test_ranks_that_share_no_group_are_aligned_through_others(tmp_path):
    def of(rank: int, shift: float) -> list[dict]:
        groups = {0: ["a"], 1: ["a", "b"], 2: ["b"]}[rank]
        every = [(name, 100 * i + 50 * (name == "b"), i) for i in range(20) for name in groups]
        return [collective(t + shift, 10, i, **{"Process Group Name": name}) for name, t, i in every]

    shifts = (0.0, 5000.0, -900.0)
    files = [
        write_rank(tmp_path / f"{rank}.json", rank, 3, [plain(shift - 500, 1), *of(rank, shift)])
        for rank, shift in enumerate(shifts)
    ]
    trace = quiet(files)
    starts = {rank: trace["start_ns"][(trace["rank"] == rank) & trace.is_kind("collective")] for rank in range(3)}
    np.testing.assert_array_equal(starts[0] + 50_000, starts[2])
    assert [clock["offset_us"] for clock in trace.meta["clocks"]] == [0, 5000, -900]


@pytest.mark.parametrize("groups", [(None, "a", "a"), ("a", "a", "b", "b"), ("a", "b", "b"), ("a", None, None, "a", "b", "b")])
def test_ranks_that_no_collective_links_to_the_first_are_aligned_with_each_other(tmp_path, groups):
    """Rank by rank, the clock is another 700 µs ahead; all members of a group arrive together."""
    files = []
    for rank, group in enumerate(groups):
        shift = 700 * rank
        mine = [collective(shift + 100 * i, 10, i, **{"Process Group Name": group}) for i in range(20) if group]
        files.append(write_rank(tmp_path / f"{rank}.json", rank, len(groups), [plain(shift - 500, 1), *mine]))
    trace = quiet(files)
    apart = [rank for rank, group in enumerate(groups) if group != groups[0] or (rank and group is None)]
    who = f"rank{'s' if len(apart) > 1 else ''} {', '.join(map(str, apart))} to rank 0"
    assert f"No collective links {who}: the clocks of their hosts are used" in trace.meta["notes"][1]
    clocks = trace.meta["clocks"]
    firsts = [groups.index(group) if group else rank for rank, group in enumerate(groups)]
    assert [clock["offset_us"] for clock in clocks] == [700 * (rank - first) for rank, first in enumerate(firsts)]
    assert trace.ranks()["wait_us"].tolist() == [0] * sum(group is not None for group in groups)


def test_without_common_collectives_the_clocks_of_the_hosts_are_used_and_this_is_said(tmp_path):
    files = [write_rank(tmp_path / f"{rank}.json", rank, 2, [plain(100 + 30 * rank, 5)]) for rank in range(2)]
    trace = quiet(files)
    assert trace["start_ns"].tolist() == [0, 30_000]
    assert "No collective links rank 1 to rank 0: the clocks" in trace.meta["notes"][0]
    assert trace.meta["clocks"][1]["error_us"] is None


def test_the_clocks_of_the_hosts_are_known_without_the_ranks(tmp_path):
    """Programs without torch.distributed, such as several servers, write no `distributedInfo`."""
    files = []
    for rank, base in enumerate((1_700_000_000_000_000_000, 1_700_000_000_000_040_000)):
        head = {"schemaVersion": 1, "baseTimeNanoseconds": base}
        files.append(write_rank(tmp_path / f"rank{rank}.json", rank, 2, [plain(100, 5)], head))
    trace = quiet(files)
    assert trace["start_ns"].tolist() == [0, 40_000]
    assert trace.of_rank(1).meta["origin_ns"] == 1_700_000_000_000_140_000


# ---- tables


def test_copies_have_a_row_per_step_and_rank(tmp_path):
    step = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 1, "ts": 0, "dur": 100}
    copy = {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy PtoP (Device -> Device)", "pid": 0, "tid": 7, "ts": 60, "dur": 2}
    copy["args"] = {"device": 0, "stream": 7, "bytes": 64}
    files = [
        write_rank(tmp_path / f"rank{rank}.json", rank, 2, [step, plain(5, 2), collective(10, 4), *([copy] if rank else [])])
        for rank in range(2)
    ]
    table = quiet(files).copies()
    assert table[["step", "rank", "kernels"]].to_numpy().tolist() == [[1, 0, 2], [1, 1, 2]]
    assert table[["p2p_count", "p2p_bytes"]].to_numpy().tolist() == [[0, 0], [1, 64]]
    assert table[["collective_count", "collective_bytes"]].to_numpy().tolist() == [[1, 10752]] * 2
    alone = write_rank(tmp_path / "alone.json", 0, 1, [step, plain(5, 2), collective(10, 4)])
    assert not {"rank", "p2p_count", "collective_count"} & set(tk.open_trace(alone).copies().columns)
    table = tk.open_trace(write_rank(tmp_path / "two_gpus.json", 0, 1, [step, plain(5, 2), copy])).copies()
    assert table[["p2p_count", "p2p_bytes"]].to_numpy().tolist() == [[1, 64]]
    assert not {"rank", "collective_count"} & set(table.columns)


def test_kernels_outside_of_steps_have_a_row_per_rank_if_there_are_no_steps(tmp_path):
    files = [write_rank(tmp_path / f"{rank}.json", rank, 2, [plain(0, 5), plain(9, 5)]) for rank in range(2)]
    table = quiet(files).copies()
    assert table[["step", "rank", "kernels"]].to_numpy().tolist() == [[-1, 0, 2], [-1, 1, 2]]


@pytest.mark.parametrize(
    "steps", [((3, 4), (3, 4)), ((3, 4), (8, 9)), ((3, 4), (-1, -1)), ((-1, -1), (3, 4)), ((-1, 4), (3, 9))]
)
def test_a_collective_has_the_step_of_the_first_rank_that_knows_it(steps):
    """Rank 1 comes last in one step, and rank 0 in the next one."""
    parts = []
    for rank in range(2):
        builder = TraceBuilder()
        for seq, step in enumerate(steps[rank]):
            begin = 1_000_000 * seq + 50_000 * (rank != seq)
            builder.add(
                "collective",
                begin,
                1_000_000 * seq + 60_000 - begin,
                rank=rank,
                step=step,
                operation="all_reduce",
                group="0",
                seq=seq,
            )
        parts.append(builder.build({"rank": rank}))
    trace = join(parts, ["a", "b"])
    assert trace.collectives()["step"].tolist() == [3, 4]
    assert trace.collectives()["last_rank"].tolist() == [1, 0]
    for step, late in ((3, 1), (4, 0)):
        told = description_of_ranks(trace, "it", step, steps_of(trace))
        assert f"1 collective; rank {late} came last: rank" in told


def test_an_early_end_bounds_a_wait(tmp_path):
    """The root of a broadcast does not wait for the last rank."""
    extra = collective(90_000, 5, 900, name="ncclDevKernel_Broadcast_RING_LL()", **{"Collective name": "broadcast"})
    others = [collective(1000 * i, 10, i) for i in range(20)]
    files = [write_rank(tmp_path / f"{r}.json", r, 2, [*others, extra | {"ts": 90_000 + 100 * r}]) for r in range(2)]
    last = quiet(files).collectives().iloc[-1]
    assert (last["operation"], last["last_rank"], last["rank0_wait_us"]) == ("broadcast", 1, 5.0)


def test_a_trace_without_collectives_has_empty_tables():
    trace = tk.open_trace("h200/qwen3/roundtrip")
    assert len(trace.collectives()) == len(trace.ranks()) == 0
    several = two_runs()[0].ranks()
    assert len(several) == 2
    assert trace.ranks().dtypes.to_dict() == several.dtypes.to_dict()
    assert trace.ranks()["caused_wait_us"].sum() == 0


# ---- saved, and taken apart again


def test_saved_and_loaded_gives_the_same(tmp_path):
    trace = quiet(write_job(tmp_path, {5: 1}, collectives=20, offsets_us=(0, 300)))
    again = tk.open_trace(trace.save(tmp_path / "job.trace"))
    same(again, trace)
    assert again.collectives().equals(trace.collectives())


def test_one_rank_of_a_joined_trace_has_its_own_events_and_meta(tmp_path):
    files = write_job(tmp_path, collectives=20, offsets_us=(0, 300))
    trace, alone = quiet(files), tk.open_trace(files[1])
    part = trace.of_rank(1)
    assert part.text("name") == alone.text("name")
    assert part.meta == alone.meta
    assert len(trace.of_rank(0)) + len(part) == len(trace)
    assert len(alone.of_rank(1)) == len(alone)


@pytest.mark.parametrize("rank", [2, -1, "1", 0.0, None, True, np.arange(2)])
def test_a_rank_that_a_trace_does_not_have_is_refused(tmp_path, rank):
    trace = quiet(write_job(tmp_path, collectives=20, offsets_us=(0, 300)))
    with pytest.raises(UnknownNameError, match=r"^rank .*: the trace has no such rank\. Known: 0, 1$"):
        trace.of_rank(rank)


def test_ranks_without_events_are_known(tmp_path):
    trace = quiet(write_job(tmp_path, collectives=20, offsets_us=(0, 300)))
    nothing = trace.select(trace.is_kind("oom"))
    assert len(nothing.of_rank(1)) == 0
    assert len(TraceBuilder().build({}).of_rank(0)) == 0


def test_a_folder_and_a_list_open_alike(tmp_path):
    (tmp_path / "job").mkdir()
    files = write_job(tmp_path / "job", collectives=10, ranks=3, offsets_us=(0, 1, 2), drifts_ppm=(0, 0, 0))
    same(quiet(tmp_path / "job"), quiet([files[2], files[0], files[1]]))
    files[0] = files[0].rename(files[0].with_stem("\N{SUPERSCRIPT TWO}"))  # a digit, but no number
    same(quiet(tmp_path / "job"), quiet(files))


def test_an_export_for_perfetto_has_processes_per_rank_and_arrows_from_the_last_one(tmp_path):
    trace = quiet(write_job(tmp_path, {5: 1}, collectives=20, offsets_us=(0, 300)))
    path = trace.to_chrome(tmp_path / "job.json")
    same(tk.open_trace(path), trace)
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    gpus = {
        rank: pid for rank in (0, 1) for pid, name in names.items() if name == f"Rank {rank}, GPU 0: NVIDIA H200 (measured)"
    }
    assert sorted(names.values())[::2] == ["Rank 0, GPU 0: NVIDIA H200 (measured)", "Rank 1, GPU 0: NVIDIA H200 (measured)"]
    begins, ends = ([event for event in events if event["ph"] == phase] for phase in "sf")
    assert [event["id"] for event in begins] == [event["id"] for event in ends] == list(range(1, 21))
    delayed = begins[5], ends[5]  # from the late rank to the one that waited, inside of both events
    assert [event["pid"] for event in delayed] == [gpus[1], gpus[0]]
    for event in delayed:
        on = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (event["pid"], event["tid"])]
        assert any(e["ts"] <= event["ts"] <= e["ts"] + e["dur"] and e["args"]["kind"] == "collective" for e in on)


@pytest.mark.parametrize("late", [0, 1])
def test_an_export_for_perfetto_has_arrows_only_to_ranks_that_waited(tmp_path, late):
    trace = two_runs()[late]
    path = trace.to_chrome(tmp_path / "job.json")
    arrows = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] in ("s", "f")]
    assert len(arrows) == 2 * trace.ranks()["last_count"].sum()


def test_an_export_for_perfetto_counts_the_memory_of_each_rank(tmp_path):
    parts = []
    for rank, size in enumerate((512, 2048)):
        builder = TraceBuilder()
        builder.add("alloc", 0, bytes=size)
        builder.add("free", 5, bytes=size)
        parts.append(builder.build({"rank": rank, "origin_ns": 0}))
    path = join(parts, ["a", "b"]).to_chrome(tmp_path / "job.json")
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    counted: dict[str, list[int]] = {}
    for event in events:
        if event["ph"] == "C":
            counted.setdefault(names[event["pid"]], []).append(event["args"]["bytes since the recording began"])
    assert counted == {"Rank 0, Host (measured)": [512, 0], "Rank 1, Host (measured)": [2048, 0]}


def test_an_export_for_perfetto_shows_collectives_of_gloo_on_the_host(tmp_path):
    trace = quiet([DATA / "gloo_rank0.json.gz", DATA / "gloo_rank1.json.gz"])
    path = trace.to_chrome(tmp_path / "job.json")
    same(tk.open_trace(path), trace)
    events = json.loads(path.read_text())["traceEvents"]
    titles = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] in ("process_name", "thread_name")}
    tracks = {(titles[e["pid"], 0], titles[e["pid"], e["tid"]]) for e in events if e["ph"] == "X"}
    assert tracks == {(f"Rank {rank}, Host (measured)", "collectives") for rank in (0, 1)}


# ---- which rank is which, and what does not fit


def anonymous(path: Path) -> Path:
    return write_rank(path, 0, 0, [plain(0, 1), *(collective(10 * i, 4, i) for i in range(4))], {"schemaVersion": 1})


def test_ranks_come_from_names_or_from_the_order(tmp_path):
    named = quiet([anonymous(tmp_path / "job_rank-1.json"), anonymous(tmp_path / "job_rank-0.json")])
    assert sorted(named.meta["ranks"]) == ["0", "1"]
    assert any("names of the files" in note for note in named.meta["notes"])
    ordered = quiet([anonymous(tmp_path / "b.json"), anonymous(tmp_path / "a.json"), anonymous(tmp_path / "c.json")])
    assert sorted(ordered.meta["ranks"]) == ["0", "1", "2"]
    assert any("order of the files" in note for note in ordered.meta["notes"])


@pytest.mark.parametrize(("name", "rank"), [("other.json", 0), ("rank-2.json", 2)])
def test_a_file_that_states_its_rank_keeps_it_beside_files_that_do_not(tmp_path, name, rank):
    stated = write_rank(tmp_path / "stated.json", 1, 3, [plain(5, 1), *(collective(10 * i, 4, i) for i in range(4))])
    last = write_rank(tmp_path / "last.json", 2 - rank, 3, [collective(10 * i, 4, i) for i in range(4)])
    trace = quiet([stated, anonymous(tmp_path / name), last])
    assert [len(trace.of_rank(each)) for each in (1, rank)] == [5, 5]
    assert {each: meta["title"] for each, meta in trace.meta["ranks"].items()} == {
        "1": "stated.json", str(rank): name, str(2 - rank): "last.json",
    }  # fmt: skip
    assert any(note.startswith(f"The ranks of {name} are") for note in trace.meta["notes"])


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path):
    folders = [tmp_path / f"rank{rank}" for rank in (1, 0)]
    for folder in folders:
        folder.mkdir()
    trace = quiet([anonymous(folder / "trace.json") for folder in folders])
    assert trace.meta["notes"][-1] == "Ranks are those in the names of the files: the traces don't state theirs."
    for rank, size in ((0, 2), (1, 4)):
        write_rank(tmp_path / f"rank{rank}" / "trace.json", rank, size, [plain(0, 1)])
    with pytest.raises(TraceError, match=r"rank1/trace\.json is of a job of 4 ranks, rank0/trace\.json is of a job of 2 ranks"):
        tk.open_trace([folder / "trace.json" for folder in folders])
    for folder in folders:
        write_rank(folder / "trace.json", 0, 2, [plain(0, 1)])
    with pytest.raises(TraceError, match=r"rank1/trace\.json and rank0/trace\.json are both of rank 0"):
        tk.open_trace([folder / "trace.json" for folder in folders])


def test_two_traces_of_one_rank_are_an_error_that_names_them(tmp_path):
    files = [write_rank(tmp_path / name, 1, 2, [plain(0, 1)]) for name in ("x.json", "y.json")]
    with pytest.raises(TraceError, match=r"x\.json and y\.json are both of rank 1"):
        tk.open_trace(files)


def test_a_file_that_is_given_twice_is_not_two_ranks(tmp_path):
    write_rank(tmp_path / "x.json", 0, 1, [plain(0, 1)])
    (tmp_path / "folder").mkdir()
    again = tmp_path / "folder" / ".." / "x.json"
    with pytest.raises(TraceError, match=r"x\.json' is in the list 2 times. Give one file per rank"):
        tk.open_trace([tmp_path / "x.json", again])


def test_traces_of_different_jobs_are_an_error_that_names_their_sizes(tmp_path):
    files = [write_rank(tmp_path / f"{rank}.json", rank, 2 + 2 * rank, [plain(0, 1)]) for rank in range(2)]
    with pytest.raises(TraceError, match=r"0\.json is of a job of 2 ranks, 1\.json is of a job of 4 ranks"):
        tk.open_trace(files)


def test_missing_ranks_are_named(tmp_path):
    files = write_job(tmp_path, ranks=4, offsets_us=(0,) * 4, drifts_ppm=(0,) * 4, collectives=10)
    with pytest.warns(UserWarning, match="Of 4 ranks, ranks 1, 3 are missing") as warned:
        trace = tk.open_trace([files[0], files[2]])
    assert [each.filename for each in warned] == [__file__]
    assert any("ranks 1, 3 are missing" in note for note in trace.meta["notes"])
    assert sorted(set(trace["rank"].tolist())) == [0, 2]


def test_warnings_of_a_file_name_the_line_that_opened_the_ranks(tmp_path):
    files = [
        write_rank(tmp_path / f"{rank}.json", rank, 2, [{"ph": "X", "cat": "kernel"}, collective(0, 5)]) for rank in (0, 1)
    ]
    with pytest.warns(UserWarning, match="1 event has unexpected fields") as warned:
        trace = tk.open_trace(files)
    assert [each.filename for each in warned] == [__file__] * 2
    assert "on the ends of 1 collective, so" in trace.meta["notes"][0]


def test_one_collective_does_not_tell_the_error_of_a_clock(tmp_path):
    files = [write_rank(tmp_path / f"{rank}.json", rank, 2, [collective(5 * rank, 10)]) for rank in range(2)]
    trace = quiet(files)
    assert trace["start_ns"].tolist() == [0, 0]
    assert trace.meta["notes"] == [
        "The clocks of the ranks are aligned on the ends of 1 collective, so their error is not known."
    ]
    assert trace.ranks()["clock_error_us"].isna().all()
    trace.to_html(tmp_path / "page.html")


def test_collectives_that_one_rank_lacks_are_named(tmp_path):
    every = [collective(100 * i, 10, i) for i in range(10)]
    files = [write_rank(tmp_path / "0.json", 0, 2, every), write_rank(tmp_path / "1.json", 1, 2, every[3:])]
    with pytest.warns(UserWarning, match="Rank 1 has no event of 3 of the 10 collectives of group '0'"):
        trace = tk.open_trace(files)
    assert trace.collectives()["last_rank"].tolist()[:3] == [-1] * 3
    write_rank(files[1], 1, 2, [plain(0, 5)])
    with pytest.warns(UserWarning, match="Rank 1 has no event of 10 of the 10 collectives of group '0'"):
        tk.open_trace(files)


@pytest.mark.parametrize("numbered", [True, False])
def test_collectives_that_were_counted_may_be_matched_wrongly(tmp_path, numbered):
    """In traces of CUDA graphs, the first collective of a rank that began late has the number 0."""
    for rank in range(2):
        events = [collective(100 * i, 10, i if numbered else None) for i in range(rank, 10)]
        write_rank(tmp_path / f"{rank}.json", rank, 2, events)
    with pytest.warns(UserWarning, match=f"the first of them number {0 if numbered else 9}: its recording began later") as said:
        tk.open_trace(tmp_path)
    assert ("if it began later, wrong ones are matched" in str(said[0].message)) == (not numbered)


def test_the_offset_of_a_clock_that_one_trace_does_not_state(tmp_path):
    files = [DATA / "nccl_ddp_h100-0.json.gz", DATA / "snapshot_h200_all.pickle"]
    with pytest.warns(UserWarning, match="Rank 1 has no event"):
        trace = tk.open_trace(files)
    assert [clock["offset_us"] for clock in trace.meta["clocks"]] == [0, 0]


def test_a_clock_that_jumps_shows_in_the_error(tmp_path):
    for rank in range(2):
        events = [collective(100 * i + (1e6 if rank and i > 5 else 0), 10, i) for i in range(20)]
        write_rank(tmp_path / f"{rank}.json", rank, 2, events)
    trace = quiet(tmp_path)
    assert "differ by 0.0 µs (median) and 1,000,000.0 µs (95 % of them)" in trace.meta["notes"][0]


def test_operations_that_differ_are_named(tmp_path):
    gather = {"name": "ncclDevKernel_AllGather_RING_LL()", "Collective name": "_allgather_base"}
    events = [[collective(100 * i, 10, i, **(gather if i == 2 and rank else {})) for i in range(5)] for rank in range(2)]
    files = [write_rank(tmp_path / f"{rank}.json", rank, 2, events[rank]) for rank in range(2)]
    with pytest.warns(UserWarning, match="disagree on collective 2 of group '0': all_reduce and all_gather"):
        tk.open_trace(files)


REDUCE = ("ncclDevKernel_Reduce_Sum_bf16_RING_LL()", "reduce")


@pytest.mark.parametrize(
    ("name", "call", "operation"),
    [(NAME, "allreduce", "all_reduce"), ("ncclDevKernel_Broadcast_RING_LL()", "broadcast", "broadcast"), (*REDUCE, "reduce")],
)
def test_runs_that_exchange_other_sizes_are_named(tmp_path, name, call, operation):
    """The number and the operation of a collective may be the same in two runs, such as two models."""
    other, own = {"In msg nelems": 77, "Out msg nelems": 77}, {"name": name, "Collective name": call}
    events = [
        [collective(1000 + 100 * i, 20, 100 + i, **own) for i in range(50)],
        [collective(777000 + 133 * i, 30, 100 + i, **(other if i >= 3 else {}) | own) for i in range(50)],
    ]
    files = [write_rank(tmp_path / f"{rank}.json", rank, 2, events[rank]) for rank in range(2)]
    said = f"disagree on collective 103 of group '0': {operation} of 10,752, 154 bytes. .* their waits may be wrong"
    with pytest.warns(UserWarning, match=said):
        trace = tk.open_trace(files)
    assert all(clock["collectives"] <= 3 for clock in trace.meta["clocks"])


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "a new one"},
        {"In msg nelems": 0, "Out msg nelems": 0},
        {"name": "ncclDevKernel_AllGather_RING_LL()", "Collective name": "all_gather", "In msg nelems": 3, "Out msg nelems": 6},
        {"name": "ncclDevKernel_SendRecv()", "Collective name": "all_to_allv", "Out msg nelems": 9999},
        {"name": "ncclDevKernel_ReduceScatter_RING()", "Collective name": "reduce_scatter", "In msg nelems": 9999},
    ],
)
def test_sizes_that_are_unknown_or_may_differ_are_no_disagreement(tmp_path, other):
    same = {name: other[name] for name in ("name", "Collective name") if name in other}
    for rank in range(2):
        events = [collective(100 * i, 10, i, **(other if rank else same)) for i in range(5)]
        write_rank(tmp_path / f"{rank}.json", rank, 2, events)
    assert len(quiet(tmp_path)) == 10


def test_the_size_of_a_collective_is_that_of_its_largest_event(tmp_path):
    """Collectives that were started as one have one number. Their kernels may begin in another order on each rank."""
    sizes = [{"In msg nelems": n, "Out msg nelems": n} for n in (100, 200)]
    for rank in range(2):
        events = [collective(i, 10, 0, stream=7 + i, **sizes[i ^ rank]) for i in range(2)]
        write_rank(tmp_path / f"{rank}.json", rank, 2, events)
    assert len(quiet(tmp_path)) == 4


def test_collectives_after_a_disagreement_do_not_move_the_clocks(tmp_path):
    """gloo writes no groups: ranks that also reduce in a smaller one count other collectives than the rest."""
    gather = {"name": "ncclDevKernel_AllGather_RING_LL()", "Collective name": "_allgather_base"}
    files = []
    for rank in range(3):
        every = [(0.0, {}), (40.0, {}), (80.0, gather)] if rank < 2 else [(0.0, {}), (80.0, gather)]
        events = [
            collective(1000 * step + at, 10, None, **{"Process Group Name": None}, **kind)
            for step in range(20)
            for at, kind in every
        ]
        files.append(write_rank(tmp_path / f"{rank}.json", rank, 3, events))
    with pytest.warns(UserWarning, match="disagree on collective 1 .* their waits may be wrong"):
        trace = tk.open_trace(files)
    assert [clock["offset_us"] for clock in trace.meta["clocks"]] == [0, 0, 0]
    starts = [trace["start_ns"][trace["rank"] == rank].min() for rank in range(3)]
    assert starts == [0, 0, 0]


SHIPPED = ["h200/qwen3/roundtrip", "h200/qwen3/cuda-graph"]


@pytest.mark.parametrize("given", [[], ["nowhere.json", "neither.json"], [SHIPPED[:1]], [SHIPPED, "nowhere.json"], [3]])
def test_lists_that_can_not_be_opened_are_trace_errors(given):
    with pytest.raises(TraceError):
        tk.open_trace(given)


@pytest.mark.parametrize(("name", "do"), [("manifest.json", "tk.load_exported"), ("config.json", "tk.load. ")])
def test_a_folder_of_a_model_is_no_folder_of_traces(tmp_path, name, do):
    (tmp_path / name).write_text("{}")
    (tmp_path / "weights.index.json").write_text("{}")
    with pytest.raises(TraceError, match=f"it is the folder of an? .*Load it with {do}"):
        tk.open_trace(tmp_path)


def test_a_folder_without_traces_is_a_trace_error(tmp_path):
    with pytest.raises(TraceError, match="without files that end in"):
        tk.open_trace(tmp_path)


def test_a_joined_trace_is_not_joined_again(tmp_path):
    files = write_job(tmp_path, collectives=10)
    both = quiet(files)
    with pytest.raises(TraceError, match="several ranks already"):
        join([both, both], ["a", "b"])


# ---- what torch.profiler wrote in two processes with gloo


def test_a_real_job_on_gloo_names_the_rank_that_slept():
    """Rank 1 sleeps for 100 ms before every fourth all-reduce; `tests/trace/record_gloo.py` recorded this."""
    trace = quiet([DATA / "gloo_rank0.json.gz", DATA / "gloo_rank1.json.gz"])
    table = trace.collectives()
    assert table["operation"].tolist() == ["all_reduce"] * 12
    assert (trace.meta["world_size"], trace.meta["groups"]) == (2, {"0": [0, 1]})
    slow = table[table["seq"] % 4 == 3]
    assert set(slow["last_rank"]) == {1}
    assert slow["rank0_wait_us"].between(90_000, 150_000).all()
