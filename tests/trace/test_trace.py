"""Tests of the event table: it returns the events it was given, is immutable, and damaged files raise errors, never crash."""

import json
import os
import pickle
import threading
import zipfile

import numpy as np
import pytest
import torch

from toolkit.core.errors import RecorderError, TraceError, UnknownNameError
from toolkit.gpu.opening import open_device, record
from toolkit.trace.columns import CLOCKS, COLUMNS, COMMUNICATION, KINDS, TEXT_COLUMNS
from toolkit.trace.copies import copies_per_step
from toolkit.trace.events import Mark, Trace, TraceBuilder
from toolkit.trace.opening import open_trace
from toolkit.vram.measure import open_memory


def random_trace(n: int, seed: int = 0) -> Trace:
    """Return a trace of `n` events with every kind and unusual values in every column."""
    rng = np.random.default_rng(seed)
    builder = TraceBuilder()
    names = [None, "", "matmul", 'quo"ted \\ \n', "größer ✓", "x" * 300]
    for _ in range(n):
        communication = {
            "operation": [None, "all_reduce"][rng.integers(2)], "algorithm": [None, "ring, LL", "one-shot"][rng.integers(3)],
            "group": [None, "0", "tp"][rng.integers(3)], "group_size": int(rng.integers(-1, 9)),
            "seq": int(rng.integers(-1, 2**40)), "peer": int(rng.integers(-1, 9)),
        }  # fmt: skip
        builder.add(
            KINDS[rng.integers(len(KINDS))], int(rng.integers(0, 10**14)), int(rng.integers(0, 10**9)),
            bytes=int(rng.integers(0, 2**40)), stream=int(rng.integers(-1, 5)), device=int(rng.integers(-1, 3)),
            rank=int(rng.integers(0, 3)), step=int(rng.integers(-1, 9)), cell=int(rng.integers(-1, 9)),
            pinned=int(rng.integers(-1, 2)), clock=CLOCKS[rng.integers(2)], name=names[rng.integers(6)],
            where=[None, "a.py:1", "cell 7:2"][rng.integers(3)], owner=[None, "weights"][rng.integers(2)],
            layer=int(rng.integers(-1, 99)),
            **(communication if rng.integers(2) else {}),
        )  # fmt: skip
    return builder.build({"device": "virtual:h200", "clock": "modelled", "steps_from": None, "sizes_only": False})


def same(a: Trace, b: Trace) -> None:
    """Assert that both traces hold the same events, even if their string tables are ordered differently."""
    assert len(a) == len(b)
    for name in COLUMNS:
        if name in TEXT_COLUMNS:
            assert a.text(name) == b.text(name), name
        else:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)
    assert a.meta == b.meta


@pytest.mark.parametrize("n", [0, 1, 2, 63, 1001])
def test_save_and_load_give_the_same_trace(tmp_path, n):
    trace = random_trace(n, seed=n)
    same(Trace.load(trace.save(tmp_path / "a.trace")), trace)


def test_events_are_sorted_by_start_and_ties_keep_their_order():
    builder = TraceBuilder()
    for start, name in ((5, "c"), (3, "a"), (5, "d"), (3, "b")):
        builder.add("kernel", start, name=name)
    assert builder.build({}).text("name") == ["a", "b", "c", "d"]


def test_columns_are_frozen_and_copies_of_what_was_given():
    trace = random_trace(5)
    for name in COLUMNS:
        with pytest.raises(ValueError, match="read-only"):
            trace[name][0] = 1
        assert trace[name].dtype == COLUMNS[name]
    given = {name: np.zeros(3, dtype) for name, dtype in COLUMNS.items()}
    made = Trace(given, ["a"], {})
    given["bytes"][0] = 99
    assert made["bytes"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "spoil", [lambda c: c.pop("bytes"), lambda c: c.update(bytes=np.zeros(2)), lambda c: c.update(more=c["bytes"])]
)
def test_columns_of_unequal_make_are_an_error(spoil):
    columns = {name: np.zeros(3, dtype) for name, dtype in COLUMNS.items()}
    spoil(columns)
    with pytest.raises(TraceError, match="unequal"):
        Trace(columns, [], {})


def test_a_builder_goes_on_and_builds_from_any_row():
    builder = TraceBuilder()
    builder.add("kernel", 1, name="a")
    first = builder.build({})
    since = len(builder)
    builder.add("d2h", 2, bytes=8, name="b")
    second = builder.build({}, since)
    assert (len(first), len(second)) == (1, 1)
    assert second.text("name") == ["b"]
    assert second["bytes"].tolist() == [8]


def test_a_builder_takes_events_of_many_threads():
    builder = TraceBuilder()

    def work(n):
        for i in range(500):
            builder.add("kernel", i, name=f"{n}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = builder.build({}).text("name")
    assert {name: names.count(name) for name in set(names)} == {"0": 500, "1": 500, "2": 500, "3": 500}


def test_a_pending_trace_can_not_be_read_until_it_is_filled():
    trace = Trace.pending()
    assert repr(trace) == "Trace(still recording)"
    for read in (len, lambda t: t["bytes"], lambda t: t.copies(), lambda t: t.to_pandas(), lambda t: list(t.marks())):
        with pytest.raises(RecorderError, match="has not ended"):
            read(trace)
    trace.fill(random_trace(3))
    assert len(trace) == 3
    with pytest.raises(RecorderError, match="already contains events"):
        trace.fill(random_trace(3))


def test_select_by_mask_and_by_index():
    trace = random_trace(50)
    picked = trace.select(trace.is_kind("h2d", "mark"))
    assert set(picked["kind"]) <= {KINDS.index("h2d"), KINDS.index("mark")}
    assert trace.select(np.array([4, 2]))["start_ns"].tolist() == trace["start_ns"][[4, 2]].tolist()
    assert len(trace.select(np.zeros(50, bool))) == len(trace.select([])) == 0
    assert len(trace.select(slice(2, 5))) == 3


@pytest.mark.parametrize(("mask", "found"), [
    (None, "None"), (5, "5"), ("h2d", "'h2d'"), ([True], "1 value of type bool"), ([0.5, 1.5], "2 values of type float64"),
    ([3, 50], "2 values of type int64 from 3 to 50"), ([-51], "1 value of type int64 from -51 to -51"),
])  # fmt: skip
def test_a_mask_of_another_kind_is_refused(mask, found):
    with pytest.raises(TraceError, match=f"the mask is {found}. Give 50 booleans"):
        random_trace(50).select(mask)


@pytest.mark.parametrize("value", [float("nan"), object(), {1, 2}], ids=["NaN", "object", "set"])
@pytest.mark.parametrize("write", [Trace.save, Trace.to_chrome], ids=["save", "chrome"])
def test_meta_that_json_cannot_hold_is_refused_and_no_file_is_left(tmp_path, write, value):
    trace = random_trace(3)
    with pytest.raises(TraceError, match=r"its meta doesn't fit into JSON .*Keep finite numbers"):
        write(Trace(trace.columns, trace.strings, {"value": value}), tmp_path / "a.trace")
    assert list(tmp_path.iterdir()) == []


def test_marks():
    builder = TraceBuilder()
    builder.add("mark", 10, 5, step=0, name="prefill")
    builder.add("mark", 2, 1)
    builder.add("kernel", 3)
    assert list(builder.build({}).marks()) == [Mark("", 2, 1, -1), Mark("prefill", 10, 5, 0)]


def test_collectives_and_peer_copies_have_columns_of_their_own():
    builder = TraceBuilder()
    builder.add("kernel", 1, step=0)
    for rank in (0, 1):
        builder.add(
            "collective", 2, 5, bytes=64, rank=rank, step=0, operation="all_reduce", algorithm="one-shot", group="tp",
            group_size=2, seq=7,
        )  # fmt: skip
    builder.add("p2p", 3, 4, bytes=8, step=0, peer=1)
    trace = builder.build({})
    assert trace["seq"].tolist() == [-1, 7, 7, -1]
    assert trace["group_size"].tolist() == [-1, 2, 2, -1]
    assert trace["peer"].tolist() == [-1, -1, -1, 1]
    assert trace.text("operation") == [None, "all_reduce", "all_reduce", None]
    assert trace.copies()["kernels"].tolist() == [2, 1]  # of each rank; a collective is a kernel, too


def test_traces_without_collectives_do_not_pay_for_them(tmp_path):
    builder = TraceBuilder()
    for start in range(9):
        builder.add("kernel", start)
    trace = builder.build({})
    for kept in (trace, trace.select(trace["start_ns"] > 3), Trace.load(trace.save(tmp_path / "a.trace"))):
        assert kept["seq"].strides == kept["group"].strides == (0,)
        assert set(kept["seq"].tolist()) == {-1}
    with np.load(tmp_path / "a.trace") as file:
        assert not set(file.files) & set(COMMUNICATION)


def test_to_pandas_decodes():
    frame = random_trace(40).to_pandas()
    trace = random_trace(40)
    assert list(frame.columns) == list(COLUMNS)
    assert frame["kind"].tolist() == [KINDS[code] for code in trace["kind"]]
    assert [None if isinstance(x, float) else x for x in frame["name"]] == trace.text("name")


# ---- copies per step


def test_equal_texts_have_one_code():
    trace = random_trace(20)
    codes = len(trace.strings) + np.arange(20) % 3
    found = Trace({**trace.columns, "name": codes}, [*trace.strings, "half \ud800", "half \ud801", "other"], {})
    assert found.text("name") == ["half ?", "half ?", "other"] * 6 + ["half ?"] * 2
    assert found.text("where") == trace.text("where")
    assert len(set(found.strings)) == len(found.strings)
    assert found.to_pandas()["name"].tolist() == found.text("name")


def test_a_column_that_does_not_exist_is_named():
    with pytest.raises(UnknownNameError, match='Did you mean "bytes"'):
        random_trace(3)["byte"]


@pytest.mark.parametrize("read", [list, lambda t: t[0], lambda t: t[:2], lambda t: t[None]], ids=["list", "0", ":2", "None"])
def test_events_by_number_are_refused_with_what_to_use(read):
    with pytest.raises(UnknownNameError, match=r"^trace\[.*is the name of a column. Use trace.to_pandas\(\)"):
        read(random_trace(3))


@pytest.mark.parametrize("kind", ["H2D", ["h2d"], None])
def test_a_kind_that_does_not_exist_is_named(kind):
    with pytest.raises(UnknownNameError, match="Known: alloc, collective, d2d"):
        random_trace(3).is_kind(kind)


@pytest.mark.parametrize("column", ["kind", "bytes", "nome"])
def test_only_text_columns_are_decoded(column):
    with pytest.raises(UnknownNameError, match="Known: algorithm, group, name, operation, owner, where"):
        random_trace(3).text(column)


def test_copies_per_step_adds_up():
    builder = TraceBuilder()
    for step in (0, 1, 2):
        builder.add("mark", 100 * step, 90, device=-1, step=step, name="decode")
        builder.add("h2d", 100 * step + 1, 5, bytes=8, step=step)
        builder.add("h2d", 100 * step + 2, 5, bytes=8, step=step)
        builder.add("d2h", 100 * step + 3, 5, bytes=3_000_000_000, step=step)
        builder.add("d2d", 100 * step + 4, 5, bytes=1, step=step)
        builder.add("p2p", 100 * step + 5, 5, bytes=7, step=step)
        builder.add("sync", 100 * step + 6, 500_000_000, step=step)
        builder.add("alloc", 100 * step + 7, bytes=512, step=step)
    builder.add("kernel", 1, step=1)
    table = copies_per_step(builder.build({}))
    assert table["step"].tolist() == [0, 1, 2]
    assert table["h2d_count"].tolist() == [2, 2, 2]
    assert table["h2d_bytes"].tolist() == [16, 16, 16]
    assert table["d2h_bytes"].tolist() == [3_000_000_000] * 3
    assert table["d2d_count"].tolist() == [1, 1, 1]
    assert table[["p2p_count", "p2p_bytes"]].to_numpy().tolist() == [[1, 7]] * 3
    assert table["kernels"].tolist() == [0, 1, 0]
    assert table["host_wait_us"].tolist() == [500_000] * 3
    assert set(table["clock"]) == {"measured"}


@pytest.mark.parametrize("kind", ["h2d", "sync"])
def test_what_lies_outside_of_steps_is_shown_where_something_was_copied(kind):
    builder = TraceBuilder()
    builder.add("mark", 0, 10, step=0, name="prefill")
    builder.add("h2d", 1, bytes=8, step=0)
    builder.add(kind, 20, bytes=8, step=-1)
    assert builder.build({}).copies()["step"].tolist() == ([-1, 0] if kind == "h2d" else [0])


def test_a_step_with_one_modelled_event_is_modelled():
    builder = TraceBuilder()
    builder.add("h2d", 0, step=0)
    builder.add("h2d", 1, step=1)
    builder.add("d2h", 2, step=1, clock="modelled")
    assert builder.build({}).copies()["clock"].tolist() == ["measured", "modelled"]


def test_copies_of_an_empty_trace_are_an_empty_table():
    table = TraceBuilder().build({}).copies()
    assert len(table) == 0
    assert "h2d_count" in table.columns


# ---- files


def test_saving_replaces_whole_or_not_at_all(tmp_path, monkeypatch):
    path = random_trace(3).save(tmp_path / "a.trace")
    before = path.read_bytes()
    monkeypatch.setattr(np, "savez_compressed", lambda file, **_: file.write(b"half") and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        random_trace(9).save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.trace"]


def test_a_saved_trace_has_the_usual_permissions(tmp_path):
    (tmp_path / "other").touch()
    path = random_trace(1).save(tmp_path / "a.trace")
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_saving_where_there_is_no_folder_is_a_trace_error(tmp_path):
    with pytest.raises(TraceError, match="folder"):
        random_trace(1).save(tmp_path / "none" / "a.trace")


def test_cut_short_anywhere_is_a_trace_error(tmp_path):
    whole = random_trace(40).save(tmp_path / "a.trace").read_bytes()
    path = tmp_path / "cut"
    for n in [0, 1, 3, 10, 100, *range(200, len(whole), 397), len(whole) - 1]:
        path.write_bytes(whole[:n])
        with pytest.raises(TraceError):
            Trace.load(path)


def test_flipped_bytes_are_an_error_or_change_nothing_that_crashes(tmp_path):
    whole = random_trace(40).save(tmp_path / "a.trace").read_bytes()
    rng = np.random.default_rng(0)
    path = tmp_path / "flipped"
    for _ in range(300):
        spoiled = bytearray(whole)
        for at in rng.integers(0, len(whole), 3):
            spoiled[at] ^= int(rng.integers(1, 256))
        path.write_bytes(spoiled)
        try:
            trace = Trace.load(path)
        except TraceError:
            continue
        trace.copies(), trace.text("name"), repr(trace)


def rewrite(source, target, **entries):
    """Write a copy of a saved trace with some arrays replaced."""
    with np.load(source) as file:
        arrays = {name: file[name] for name in file.files}
    np.savez(target, **{**arrays, **entries})
    return target


def header(**changes):
    content = {"format": "toolkit-trace", "version": 1, "strings": ["a"], "meta": {}} | changes
    return np.frombuffer(json.dumps(content).encode(), np.uint8)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"header": header(version=5)}, "version 5"),
        ({"header": header(version="x")}, "damaged"),
        ({"header": header(format="other")}, "not a trace"),
        ({"header": header(strings=3)}, "damaged"),
        ({"header": header(meta=3)}, "damaged"),
        ({"header": np.frombuffer(b"[1]", np.uint8)}, "damaged"),
        ({"header": np.frombuffer(b"\xff\xfe", np.uint8)}, "damaged"),
        ({"name": np.full(3, 7)}, "'name'"),
        ({"where": np.full(3, -2)}, "'where'"),
        ({"group": np.full(3, 7)}, "'group'"),
        ({"group_size": np.full(3, 1 << 40)}, "'group_size'"),
        ({"bytes": np.full(3, 1 << 63, np.uint64)}, "'bytes'"),
        ({"kind": np.full(3, 200)}, "'kind'"),
        ({"clock": np.full(3, 2)}, "'clock'"),
        ({"bytes": np.zeros(2, np.int64)}, "unequal"),
        ({"bytes": np.zeros((3, 1), np.int64)}, "column of integers"),
        ({"bytes": np.zeros(3)}, "column of integers"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else x,
)
def test_files_that_lie_are_trace_errors(tmp_path, entries, said):
    builder = TraceBuilder()
    for i in range(3):
        builder.add("kernel", i, name="a")
    path = rewrite(builder.build({}).save(tmp_path / "a.npz"), tmp_path / "b.npz", **entries)
    with pytest.raises(TraceError, match=rf"^opening the trace '.*b\.npz': .*{said}"):
        Trace.load(path)


def test_a_file_of_version_1_opens_without_what_it_did_not_have(tmp_path):
    builder = TraceBuilder()
    builder.add("alloc", 0, bytes=512, address=4096, requested=8, where="a.py:1")
    with np.load(builder.build({}).save(tmp_path / "new.npz")) as file:
        old = {name: file[name] for name in file.files if name not in ("address", "requested")}
    content = json.loads(bytes(old["header"])) | {"version": 1}
    np.savez(tmp_path / "old.npz", **old | {"header": np.frombuffer(json.dumps(content).encode(), np.uint8)})
    trace = Trace.load(tmp_path / "old.npz")
    assert trace["address"].tolist() == trace["requested"].tolist() == trace["seq"].tolist() == [-1]
    assert trace["bytes"].tolist() == [512]
    assert trace.text("where") == ["a.py:1"]


@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
def test_a_checkpoint_is_named(tmp_path, new):
    torch.save({"weight": torch.ones(3)}, tmp_path / "model.pt", _use_new_zipfile_serialization=new)
    for function in (open_trace, open_memory):
        with pytest.raises(TraceError, match=r"a file of torch.save, such as a checkpoint\. tk\.open_trace opens"):
            function(tmp_path / "model.pt")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.zip", {"a.txt": "x", "b.txt": "x"}, "a zip archive of 'a.txt', 'b.txt'. tk.open_trace opens"),
        ("a.npz", {"a.npy": "x"}, "a zip archive of 'a.npy'. tk.open_trace opens"),
        ("a.zip", {}, "a zip archive of no files. tk.open_trace opens"),
        ("a.gguf", b"GGUF\3", "the weights of a model. Load models with tk.load. tk.open_trace opens"),
        ("a.safetensors", b"\2\0\0\0\0\0\0\0{}", "the weights of a model. Load models with tk.load. tk.open_trace opens"),
        ("a.txt", b"hello", "its format is unknown. tk.open_trace opens"),
        ("a.pt", b"hello", "not a pickle of protocol 2 or later. tk.open_trace opens"),
    ],
)
def test_files_of_other_formats_are_named(tmp_path, name, content, said):
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for member, text in content.items():
                archive.writestr(member, text)
    with pytest.raises(TraceError, match=said):
        open_trace(tmp_path / name)


def test_a_missing_column_is_a_trace_error(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, header=header())
    with pytest.raises(TraceError, match=r"damaged or not a trace \(it has no column 'start_ns'\)"):
        Trace.load(path)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("bomb",)


def test_nothing_in_a_file_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pickled = tmp_path / "a.trace"
    pickled.write_bytes(pickle.dumps(Bomb()))
    inside = rewrite(random_trace(1).save(tmp_path / "b.trace"), tmp_path / "b.npz", bytes=np.array([Bomb()], object))
    for path in (pickled, inside):
        with pytest.raises(TraceError):
            Trace.load(path)
    assert not (tmp_path / "bomb").exists()


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04", b"\x93NUMPY\x01\x00"], ids=["empty", "text", "zip", "npy"])
def test_other_files_are_trace_errors(tmp_path, content):
    path = tmp_path / "a.trace"
    path.write_bytes(content)
    with pytest.raises(TraceError):
        Trace.load(path)


def test_an_array_or_a_zip_of_something_else_is_a_trace_error(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(3))
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as file:
        file.writestr("hello", "x")
    for name in ("a.npy", "b.npz", "nothing", "."):
        with pytest.raises(TraceError):
            Trace.load(tmp_path / name)


def test_strings_stay_apart_if_the_garbage_collector_interns_another_one_meanwhile():
    builder = TraceBuilder()

    class Interrupted(str):
        """A string during whose hashing a callback records an event, as a weakref's does."""

        def __hash__(self) -> int:
            builder.add("mark", 0, name="between")
            return str.__hash__(self)

    builder.add("mark", 1, name=Interrupted("first"))
    builder.add("mark", 2, name="second")
    assert {"first", "second", "between"} == set(builder.build({}).text("name"))


def test_calls_that_copy_to_pageable_memory_are_waits():
    """They return when the copy has ended; the call on the other stream, and that of a copy to pinned memory, don't wait."""
    built = TraceBuilder()
    for stream, pinned, begins, took, copied in (
        (0, 0, 1000, 9000, 8000),
        (7, 0, 1500, 100, 4000),
        (0, 1, 20_000, 300, 25_000),
    ):
        built.add("launch", begins, took, step=1, stream=stream, device=-1, name="cudaMemcpyAsync")
        built.add("d2h", copied, 500, bytes=8, step=1, stream=stream, pinned=pinned)
    built.add("sync", 10_100, 400, step=1, stream=0, device=-1)
    assert built.build({}).copies()["host_wait_us"].tolist() == [9.4]


def test_the_host_waits_for_logits_in_the_copy_itself_on_an_h200():
    table = open_trace("h200/qwen3-8b/host-sampling").copies()
    assert (table["host_wait_us"] > 100).all()  # the waits alone are shorter than 30 µs
    assert (open_trace("h200/qwen3-8b/roundtrip").copies()["host_wait_us"] < 30).all()  # to pinned memory


def test_a_copy_to_pageable_memory_is_a_wait_of_the_host_if_pytorch_does_not_wait():
    gpu = open_device("virtual:h200")
    device, took = torch.ones(1 << 20, device=gpu.torch), []
    for host in (torch.ones(1 << 20), torch.ones(1 << 20).pin_memory()):
        gpu.sync()
        with record(gpu) as trace:
            host.copy_(device, non_blocking=True)
        assert not trace.is_kind("sync").any()
        took.append(trace.copies()["host_wait_us"].item())
    assert took[0] > (1 << 22) / gpu.spec.d2h_pageable_bytes_per_s * 1e6
    assert took[1] == 0
