"""Trace files made to exhaust memory or time, to run code, or to be read wrongly: each is refused, quickly and in words."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import sqlite3
import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import without_permission
from tests.host_memory import HostPeak
from tests.speed import within
from toolkit.core.errors import ToolkitError, TraceError
from toolkit.trace.arrays import most_unpacked
from toolkit.trace.columns import COLUMNS
from toolkit.trace.events import TraceBuilder
from toolkit.trace.opening import open_trace
from toolkit.trace.snapshot.rows import covered
from toolkit.trace.steps import guess_steps

PREFIX = "CUPTI_ACTIVITY_KIND_"


@pytest.fixture(autouse=True)
def quickly() -> Iterator[None]:
    began = time.process_time()
    yield
    assert within(time.process_time() - began, 5)


def chrome(path: Path, events: list[dict[str, Any]], **head: Any) -> Path:
    path.write_text(json.dumps(head | {"traceEvents": events}))
    return path


def kernel(i: int = 0, **other: Any) -> dict[str, Any]:
    args = {"device": 0, "stream": 7, "correlation": i}
    return {"ph": "X", "cat": "kernel", "name": "k", "ts": i, "dur": 1, "pid": 0, "tid": 7, "args": args} | other


def nsys(path: Path, *statements: str) -> Path:
    with sqlite3.connect(path) as connection:
        connection.execute(
            f"CREATE TABLE {PREFIX}KERNEL (start, end, deviceId, streamId, correlationId, demangledName, shortName)"
        )
        connection.execute("CREATE TABLE StringIds (id, value)")
        connection.execute("INSERT INTO StringIds VALUES (1, 'a')")
        connection.execute(f"INSERT INTO {PREFIX}KERNEL VALUES (1, 2, 0, 7, 1, 1, 1)")
        for statement in statements:
            connection.execute(statement)
    connection.close()
    return path


# ---- bombs


def test_a_small_archive_that_would_become_large_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive, archive.open("bytes.npy", "w") as file:
        for _ in range(200):
            file.write(bytes(1 << 20))
    host = HostPeak()
    with pytest.raises(TraceError, match="bytes would become"):
        open_trace(path)
    assert host.grown_bytes() < 64 << 20


def test_a_small_gzip_file_that_would_become_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json.gz"
    with gzip.open(path, "wb", compresslevel=9) as file:
        file.write(b'{"traceEvents": [')
        for _ in range(80):
            file.write(b" " * (1 << 20))
    host = HostPeak()
    with pytest.raises(TraceError, match="become more than"):
        open_trace(path)
    assert host.grown_bytes() < 256 << 20


def test_compressed_files_of_other_formats_say_to_decompress_them(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.add("kernel", 0, name="a")
    builder.build({}).save(tmp_path / "a.trace")
    with sqlite3.connect(tmp_path / "a.sqlite") as connection:
        connection.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
    connection.close()
    (tmp_path / "a.pickle").write_bytes(pickle.dumps({"segments": [], "device_traces": []}))
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b'{"traceEvents": []}'))
    for path in sorted(tmp_path.iterdir()):
        packed = tmp_path / f"{path.name}.gz"
        packed.write_bytes(gzip.compress(path.read_bytes()))
        with pytest.raises(TraceError, match=r"only Chrome traces are read in compressed form\. Decompress it first: gunzip"):
            open_trace(packed)


def test_real_traces_are_far_from_the_bound(tmp_path: Path) -> None:
    builder = TraceBuilder()
    for i in range(20_000):
        builder.add("kernel", 1000 * i, 900, name=f"kernel {i % 40}", step=i // 40)
    trace = builder.build({"device": "x"})
    size = trace.save(tmp_path / "x").stat().st_size
    assert sum(column.nbytes for column in trace.columns.values()) < 50 * size
    packed = trace.to_chrome(tmp_path / "x.json.gz").stat().st_size
    assert len(gzip.decompress((tmp_path / "x.json.gz").read_bytes())) < 50 * packed
    assert most_unpacked(0) >= 64 << 20


# ---- quadratic work


@pytest.mark.parametrize("category", ["kernel", "cuda_runtime", "python_function", "foreign"])
def test_many_threads_processes_and_streams(tmp_path: Path, category: str) -> None:
    events = [
        kernel(i, cat=category, name="a.py(1): f", pid=f"p{i}", tid=i, args={"device": 0, "stream": i, "correlation": i})
        for i in range(40_000)
    ]
    events += [{"ph": "M", "name": "process_name", "pid": f"p{i}", "args": {"name": "GPU"}} for i in range(40_000)]
    found = open_trace(chrome(tmp_path / "x.json", [*events, kernel()]))
    assert len(found)


def test_nested_braces_before_the_events(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"a": "' + '\\"distributedInfo\\": {' * 40_000 + '", "traceEvents": [' + json.dumps(kernel()) + "]}")
    assert len(open_trace(path)) == 1
    path.write_text('{"distributedInfo": {' * 40_000 + '"traceEvents": [' + json.dumps(kernel()) + "]}")
    assert len(open_trace(path)) == 1


def test_many_patterns_in_the_names() -> None:
    assert guess_steps(np.tile(np.arange(30_000), 3), np.zeros(90_000, bool)) is not None
    rng = np.random.default_rng(0)
    guess_steps(rng.permutation(np.repeat(np.arange(30_000), 3)), rng.random(90_000) < 0.5)


def test_many_overlapping_segments() -> None:
    n = 60_000
    start, size = np.arange(n), np.full(n, 2 * n) - np.arange(n)
    address, length, whose = covered(start, size, np.arange(n) % 2 == 0)
    assert len(address) == len(length) == len(whose)


def test_covered_is_what_painting_in_order_gives() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        n = int(rng.integers(0, 8))
        start, size, taken = rng.integers(0, 20, n), rng.integers(0, 8, n), rng.random(n) < 0.6
        cells = np.full(40, -1)
        for i in range(n):
            cells[start[i] : start[i] + size[i]] = i if taken[i] else -1
        found = np.full(40, -1)
        for at, length, who in zip(*covered(start, size, taken), strict=True):
            found[at : at + length] = who
        assert (found == cells).all()


# ---- values


@pytest.mark.parametrize(
    ("event", "found"),
    [
        (kernel(args={"device": 70_000, "stream": 7}), "'device' has the value 70000"),
        (kernel(cat="user_annotation", name="toolkit.step 4294967299 x"), "4294967299|out of bounds"),
        (kernel(cat="user_annotation", name=f"toolkit.step {'9' * 5000} x"), "unexpected fields"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_numbers_that_do_not_fit_are_refused(tmp_path: Path, event: dict[str, Any], found: str) -> None:
    with pytest.raises(TraceError, match=rf"^opening the trace '.*x\.json'.*({found})"):
        open_trace(chrome(tmp_path / "x.json", [event, kernel()]))


def test_every_narrow_column_is_checked(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.add("kernel", 0, name="a")
    good = builder.build({})
    for name, dtype in COLUMNS.items():
        if np.iinfo(dtype).bits < 64:
            with pytest.raises(TraceError, match=f"column '{name}' has the value"):
                type(good)({**good.columns, name: np.array([1 << 40])}, good.strings, {})


@pytest.mark.parametrize("times", [{"ts": 4e15}, {"ts": -9.2e15}, {"ts": 1e17}, {"dur": 9e15}, {"dur": 1.8e16}])
@pytest.mark.parametrize("category", ["kernel", "user_annotation", "cuda_runtime", "python_function", "of another tool"])
def test_times_of_centuries_are_counted_as_unreadable(tmp_path: Path, category: str, times: dict[str, float]) -> None:
    """Profilers write such times for events whose begin or end they missed."""
    event = kernel(cat=category, name="a.py(1): f") | times
    plain = kernel(1, cat="of another tool" if category == "of another tool" else "kernel")
    with pytest.warns(UserWarning, match="1 event has unexpected fields and is left out"):
        found = open_trace(chrome(tmp_path / "x.json", [event, plain]))
    assert (len(found), found.meta["unreadable_events"], found["dur_ns"].tolist()) == (1, 1, [round(plain["dur"] * 1000)])


@pytest.mark.parametrize("name", [None, 5, float("nan"), [], {}, True])
def test_names_that_are_no_text_are_counted_as_unreadable(tmp_path: Path, name: Any) -> None:
    for category in ("kernel", "user_annotation", "python_function", "cuda_runtime"):
        with pytest.warns(UserWarning, match="x.json: 1 event has unexpected fields and is left out"):
            found = open_trace(chrome(tmp_path / "x.json", [kernel(cat=category, name=name), kernel()]))
        assert found.meta["unreadable_events"] == 1
        found.save(tmp_path / "saved")
        with pytest.raises(TraceError, match="1 event has unexpected fields, and no other event"):
            open_trace(chrome(tmp_path / "x.json", [kernel(cat=category, name=name)]))


def test_copies_of_negative_sizes_are_counted_as_unreadable(tmp_path: Path) -> None:
    copies = [kernel(cat="gpu_memcpy", name="Memcpy HtoD", args={"stream": 7, "device": 0, "bytes": n}) for n in (-8, 8)]
    with pytest.warns(UserWarning, match="1 event has unexpected fields"):
        found = open_trace(chrome(tmp_path / "x.json", copies))
    assert found["bytes"].tolist() == [8]


def test_a_thread_whose_only_function_is_unreadable(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="1 event has"):
        found = open_trace(chrome(tmp_path / "x.json", [kernel(cat="python_function", name="a.py(1): f", dur=1e17), kernel()]))
    assert (len(found), found.meta["unreadable_events"]) == (1, 1)


def test_half_surrogates_in_names_can_be_saved(tmp_path: Path) -> None:
    found = open_trace(chrome(tmp_path / "x.json", [kernel(name="half \ud800")]))
    assert found.text("name") == ["half ?"]
    for written in (found.save(tmp_path / "a"), found.to_chrome(tmp_path / "b.json")):
        assert open_trace(written).text("name") == ["half ?"]


def test_half_surrogates_in_headers_can_be_shown_and_saved(tmp_path: Path) -> None:
    """Of GPUs and process groups, of the processes of other tools, and in our own files."""
    groups = [{"pg_name": "half \ud800", "ranks": [0]}]
    head = {"deviceProperties": [{"name": "half \ud800"}], "distributedInfo": {"rank": 0, "pg_config": groups}}
    title = {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "GPU 0 \ud800"}}
    other = chrome(tmp_path / "other.json", [title, {"ph": "X", "name": "k", "pid": 1, "tid": 1, "ts": 1, "dur": 1}])
    found = open_trace(chrome(tmp_path / "x.json", [kernel()], **head))
    assert (found.meta["device"], found.meta["groups"]) == ("half ?", {"half ?": [0]})
    assert open_trace(other).meta["device"] == "GPU 0 ?"
    found.meta["title"] = "half \ud800"
    for written in (found.save(tmp_path / "a"), found.to_chrome(tmp_path / "b.json")):
        trace = open_trace(written)
        assert trace.meta == found.meta | {"title": "half ?"}
        repr(trace).encode()
        trace.to_html(tmp_path / "page.html")


@pytest.mark.filterwarnings("ignore:.*unexpected fields")
@pytest.mark.parametrize("digits", ["9" * 5000, "1e999", "-1e999", "NaN"])
def test_numbers_beyond_all_types(tmp_path: Path, digits: str) -> None:
    for field in ("ts", "dur", "pid"):
        path = tmp_path / "x.json"
        path.write_text(f'{{"traceEvents": [{json.dumps(kernel())[:-1]}, "{field}": {digits}}}, {json.dumps(kernel(1))}]}}')
        with suppress(TraceError):
            open_trace(path)


# ---- databases


@pytest.mark.parametrize(
    "statements",
    [
        (f"DROP TABLE {PREFIX}KERNEL", f"CREATE VIEW {PREFIX}KERNEL AS SELECT 1 AS start, 2 AS end"),
        ("DROP TABLE StringIds", "CREATE VIEW StringIds AS SELECT 1 AS id, hex(randomblob(9)) AS value"),
        ("DROP TABLE StringIds", "CREATE VIRTUAL TABLE StringIds USING fts4(id, value)"),
        (
            "DROP TABLE StringIds",
            "CREATE TABLE StringIds (id, value AS (hex(id)))",
            "INSERT INTO StringIds VALUES (1)",
        ),
    ],
    ids=["view", "view of names", "virtual", "generated"],
)
def test_nothing_in_a_database_is_executed(tmp_path: Path, statements: tuple[str, ...]) -> None:
    path = nsys(tmp_path / "x.sqlite", *statements)
    with suppress(TraceError):
        assert open_trace(path).text("name") == [None]


def test_a_view_disguised_as_a_table_is_refused(tmp_path: Path) -> None:
    path = nsys(tmp_path / "x.sqlite", "CREATE VIEW v AS SELECT 1 AS id, hex(randomblob(9)) AS value")
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA writable_schema=ON")
        connection.execute("DELETE FROM sqlite_master WHERE name = 'StringIds'")
        connection.execute(
            "UPDATE sqlite_master SET type='table', name='StringIds', tbl_name='StringIds', rootpage=3, "
            "sql=replace(sql, 'VIEW v', 'VIEW StringIds') WHERE name = 'v'"
        )
    connection.close()
    with pytest.raises(TraceError, match="damaged"):
        open_trace(path)


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO StringIds VALUES (2, 5)",
        "INSERT INTO StringIds VALUES ('2', 'b')",
        "INSERT INTO StringIds VALUES (2, x'00ff')",
        f"INSERT INTO {PREFIX}KERNEL VALUES (NULL, 2, 0, 7, 1, 1, 1)",
        f"INSERT INTO {PREFIX}KERNEL VALUES (1, 2, 'zero', 7, 1, 1, 1)",
        f"INSERT INTO {PREFIX}KERNEL VALUES (1.5, 2, 0, 7, 1, 1, 1)",
        f"INSERT INTO {PREFIX}KERNEL VALUES (1, 2, 70000, 7, 1, 1, 1)",
        f"INSERT INTO {PREFIX}KERNEL VALUES (-9223372036854775808, 9223372036854775807, 0, 7, 1, 1, 1)",
    ],
)
def test_columns_of_other_types_are_refused(tmp_path: Path, statement: str) -> None:
    with pytest.raises(TraceError):
        open_trace(nsys(tmp_path / "x.sqlite", statement))


def test_pages_that_are_linked_many_times_are_refused(tmp_path: Path) -> None:
    """Every entry of an inner page of a large table is made to lead to the same leaf."""
    path = nsys(tmp_path / "x.sqlite", "CREATE TABLE t (a)")
    with sqlite3.connect(path) as connection:
        connection.executemany("INSERT INTO StringIds VALUES (?, ?)", [(i, f"text {i}" * 20) for i in range(2, 30_000)])
        root = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'StringIds'").fetchone()[0]
    connection.close()
    data = bytearray(path.read_bytes())
    at = (root - 1) * 4096
    assert data[at] == 5, "an inner page"
    for i in range(int.from_bytes(data[at + 3 : at + 5])):
        cell = at + int.from_bytes(data[at + 12 + 2 * i : at + 14 + 2 * i])
        data[cell : cell + 4] = root.to_bytes(4)
    path.write_bytes(data)
    with pytest.raises(TraceError):
        open_trace(path)


# ---- what is no file


@pytest.mark.parametrize("kind", [set, iter, dict.fromkeys])
def test_paths_without_an_order_are_refused(tmp_path: Path, kind: Any) -> None:
    """The ranks of files that don't state theirs follow from the order, which is another one each time."""
    with pytest.raises(TraceError, match=r"Give a path, or a list of paths: sorted\(FOLDER\.glob"):
        open_trace(kind([tmp_path / "a.json", tmp_path / "b.json"]))


@pytest.mark.parametrize("path", [None, 5, b"x", "a\0b", "half \ud800", "", "long" * 1000], ids=lambda path: ascii(path)[:20])
def test_paths_that_name_no_file(path: Any) -> None:
    with pytest.raises(TraceError):
        open_trace(path)
    with pytest.raises(ToolkitError):
        TraceBuilder().build({}).to_html(path)


@pytest.mark.parametrize("name", ["closed", "closed/a.trace"])
def test_folders_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    TraceBuilder().build({}).save(closed / "a.trace")
    said = rf"^opening the trace '{name}': it can't be read \(Permission denied\)"
    with without_permission(closed, monkeypatch), pytest.raises(TraceError, match=said):
        open_trace(name)


def test_pipes_and_devices_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(TraceError, match="not a regular file"):
            open_trace(path)
    with pytest.raises(TraceError, match="a folder without files that end in"):
        open_trace(tmp_path)
