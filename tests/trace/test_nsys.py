"""Tests of the Nsight Systems reader, on databases built here from its published schema."""

import contextlib
import sqlite3

import pytest

import toolkit as tk
from tests.trace.test_trace import same
from toolkit.core.errors import TraceError
from toolkit.trace.columns import KINDS

TID = 0x1000_0001_0002  # a globalTid
SCHEMA = {
    "StringIds": "id INTEGER PRIMARY KEY, value TEXT NOT NULL",
    "TARGET_INFO_GPU": "vmId INTEGER, id INTEGER, name TEXT, busLocation TEXT, totalMemory INTEGER",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs INTEGER, utcTime TEXT, localTime TEXT",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER, greenContextId INTEGER,"
    " streamId INTEGER, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, shortName INTEGER,"
    " mangledName INTEGER, gridX INTEGER, blockX INTEGER, graphNodeId INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER, streamId INTEGER,"
    " correlationId INTEGER, globalPid INTEGER, bytes INTEGER, copyKind INTEGER, deprecatedSrcId INTEGER, srcKind INTEGER,"
    " dstKind INTEGER, srcDeviceId INTEGER, dstDeviceId INTEGER, graphNodeId INTEGER, copyCount INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMSET": "start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER, streamId INTEGER,"
    " correlationId INTEGER, globalPid INTEGER, value INTEGER, bytes INTEGER, graphNodeId INTEGER, memKind INTEGER",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": "start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER,"
    " streamId INTEGER, correlationId INTEGER, globalPid INTEGER, syncType INTEGER, eventId INTEGER",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER, end INTEGER, eventClass INTEGER, globalTid INTEGER,"
    " correlationId INTEGER, nameId INTEGER, returnValue INTEGER, callchainId INTEGER",
    "NVTX_EVENTS": "start INTEGER, end INTEGER, eventType INTEGER, rangeId INTEGER, category INTEGER, color INTEGER,"
    " text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER",
}
STRINGS = ["void mm<float>(float*)", "mm", "cudaLaunchKernel_v7000", "cudaStreamSynchronize_v3020", "cudaMemcpyAsync_v3020"]


class Database:
    """A small database; like Nsight, it creates a table when the first row is added."""

    def __init__(self, path, drop=()):
        self.path, self.drop = path, set(drop)
        self.connection = sqlite3.connect(path)
        for i, text in enumerate(STRINGS):
            self.put("StringIds", id=i, value=text)

    def put(self, table, **row):
        columns = [c for c in SCHEMA[table].split(", ") if c.strip().split()[0] not in self.drop]
        self.connection.execute(f"CREATE TABLE IF NOT EXISTS {table} ({', '.join(columns)})")
        row = {name: value for name, value in row.items() if name not in self.drop}
        marks = ", ".join("?" * len(row))
        self.connection.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", list(row.values()))

    def step(self, n, text=None, text_id=None):
        """Add a decode step of 1000 ns: two kernels, a pageable H2D copy, a pinned D2H copy on stream 13, and a wait for it."""
        t, c = 1000 * n, 10 * n
        if text is not None or text_id is not None:
            self.put("NVTX_EVENTS", start=t, end=t + 900, eventType=59, text=text, textId=text_id, globalTid=TID)
        for i, (nameId, length) in enumerate(((4, 10), (2, 10), (2, 10), (4, 10), (3, 300))):
            start = t + 50 * i + 10
            self.put(
                "CUPTI_ACTIVITY_KIND_RUNTIME",
                start=start,
                end=start + length,
                globalTid=TID,
                correlationId=c + i,
                nameId=nameId,
            )
        on = {"deviceId": 0, "contextId": 1}
        self.put(
            "CUPTI_ACTIVITY_KIND_MEMCPY", start=t + 400, end=t + 410, streamId=7, correlationId=c, bytes=8, copyKind=1,
            srcKind=0, dstKind=2, **on,
        )  # fmt: skip
        for i in (1, 2):
            start = t + 400 + 100 * i
            self.put(
                "CUPTI_ACTIVITY_KIND_KERNEL", start=start, end=start + 50, streamId=7, correlationId=c + i, demangledName=0,
                shortName=1, **on,
            )  # fmt: skip
        self.put(
            "CUPTI_ACTIVITY_KIND_MEMCPY", start=t + 950, end=t + 1020, streamId=13, correlationId=c + 3, bytes=4, copyKind=2,
            srcKind=2, dstKind=1, **on,
        )  # fmt: skip
        self.put("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", start=t + 215, end=t + 500, streamId=13, correlationId=c + 4, **on)

    def trace(self):
        self.connection.commit()
        self.connection.close()
        return tk.open_trace(self.path)


@pytest.fixture
def database(tmp_path):
    return Database(tmp_path / "report.sqlite")


def test_copies_kernels_waits_and_steps(database):
    database.put("TARGET_INFO_GPU", id=0, name="NVIDIA H200")
    for n in range(4):
        database.step(n, text=f"decode {n}")
    trace = database.trace()
    assert trace.meta["device"] == "NVIDIA H200"
    assert trace.meta["steps_from"] == "nvtx"
    table = trace.copies()
    assert table["step"].tolist() == [0, 1, 2, 3]
    assert table[["h2d_count", "h2d_bytes", "d2h_count", "d2h_bytes", "kernels"]].to_numpy().tolist() == [[1, 8, 1, 4, 2]] * 4
    assert table["host_wait_us"].tolist() == [0.3] * 4
    copies = trace.select(trace.is_kind("h2d", "d2h"))
    assert copies["pinned"].tolist() == [0, 1] * 4
    assert copies["stream"].tolist() == [0, 1] * 4
    assert copies.text("name")[:2] == ["Memcpy HtoD (Pageable -> Device)", "Memcpy DtoH (Device -> Pinned)"]
    waits = trace.select(trace.is_kind("sync"))
    assert set(waits.text("name")) == {"cudaStreamSynchronize"}
    assert set(waits["stream"]) == {1}
    assert set(trace.select(trace.is_kind("kernel")).text("name")) == {STRINGS[0]}
    assert [mark.step for mark in trace.marks()] == [0, 1, 2, 3]


def test_range_names_from_the_string_table(database):
    database.put("StringIds", id=70, value="toolkit.step 5 decode")
    database.step(0, text_id=70)
    trace = database.trace()
    assert trace.meta["steps_from"] == "marks"
    assert [(mark.name, mark.step) for mark in trace.marks()] == [("decode", 5)]
    assert set(trace["step"]) == {5}


def test_without_ranges_steps_are_guessed(database):
    for n in range(6):
        database.step(n)
    trace = database.trace()
    assert trace.meta["steps_from"] == "guessed"
    assert trace.copies()["d2h_count"].tolist() == [1] * 6


def two_processes(database, devices=(0, 1), known=False):
    """The calls of both processes have the correlation ids 1 and 2; the second one launches 500 ns later."""
    for process, (early, gpu) in enumerate(((0, 2000), (500, 2500))):
        pid = (0x2000 + process) << 24
        database.put(
            "NVTX_EVENTS", start=early, end=early + 400, eventType=59, text=f"toolkit.step {process} run", globalTid=pid
        )
        database.put(
            "CUPTI_ACTIVITY_KIND_RUNTIME", start=early + 10, end=early + 20, globalTid=pid + 1, correlationId=1, nameId=2
        )
        database.put(
            "CUPTI_ACTIVITY_KIND_RUNTIME", start=early + 30, end=early + 90, globalTid=pid + 1, correlationId=2, nameId=3
        )
        on = {"deviceId": devices[process], "globalPid": pid, "streamId": 7 + 6 * process}
        database.put("CUPTI_ACTIVITY_KIND_KERNEL", start=gpu, end=gpu + 10, correlationId=1, demangledName=0, shortName=1, **on)
        database.put("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", start=early + 30, end=early + 90, correlationId=2, **on)
    if known:
        database.put("TARGET_INFO_SESSION_START_TIME", utcEpochNs=10**18)
    return database.trace()


@pytest.mark.parametrize("known", [True, False])
def test_processes_of_a_report_are_ranks_on_one_clock(database, known):
    trace = two_processes(database, known=known)
    kernels, waits, marks = (trace.select(trace.is_kind(kind)) for kind in ("kernel", "sync", "mark"))
    assert list(zip(kernels["rank"], kernels["device"], kernels["step"], strict=True)) == [(0, 0, 0), (1, 1, 1)]
    assert list(zip(waits["rank"], waits["step"], strict=True)) == [(0, 0), (1, 1)]
    assert list(zip(marks["rank"], marks["start_ns"], strict=True)) == [(0, 0), (1, 500)]
    assert kernels["start_ns"].tolist() == [2000, 2500]
    assert trace.copies()["launches"].tolist() == [1, 1]
    assert "The ranks are the processes of the report" in trace.meta["notes"][0]
    assert [clock["offset_us"] for clock in trace.meta["clocks"]] == [0, 0]
    assert [("origin_ns" in trace.of_rank(rank).meta) for rank in (0, 1)] == [known] * 2
    assert len(trace.of_rank(1)) == 4


def test_ranks_of_a_report_are_in_the_order_of_their_gpus(database):
    kernels = (trace := two_processes(database, devices=(1, 0))).select(trace.is_kind("kernel"))
    assert sorted(zip(kernels["rank"], kernels["device"], kernels["start_ns"], strict=True)) == [(0, 0, 2500), (1, 1, 2000)]


def test_collectives_of_processes_are_counted_in_each_of_them(database):
    database.put("StringIds", id=90, value="ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    for number in range(10):
        for process in (0, 1):
            on = {"deviceId": process, "globalPid": (0x2000 + process) << 24, "streamId": 7}
            start = 1000 * number + 100 * process
            database.put("CUPTI_ACTIVITY_KIND_KERNEL", start=start, end=1000 * number + 300, demangledName=90, **on)
    table = database.trace().collectives()
    assert table["seq"].tolist() == [*range(10)]
    assert table["last_rank"].tolist() == [1] * 10
    assert table["rank0_wait_us"].tolist() == [0.1] * 10


def test_a_process_without_a_gpu_is_no_rank(database):
    database.step(0, text="step 0")
    database.put("CUPTI_ACTIVITY_KIND_RUNTIME", start=5, end=9, globalTid=0x7000 << 24, correlationId=77, nameId=3)
    assert set(database.trace()["rank"]) == {0}


@pytest.mark.parametrize("known", [True, False])
def test_reports_of_two_ranks_are_placed_by_the_start_of_their_sessions(tmp_path, known):
    for rank, began in enumerate((10**18, 10**18 + 40_000)):
        database = Database(tmp_path / f"rank{rank}.sqlite")
        database.step(0)
        if known:
            database.put("TARGET_INFO_SESSION_START_TIME", utcEpochNs=began)
        database.connection.commit()
        database.connection.close()
    trace = tk.open_trace(tmp_path)
    assert [int(trace["start_ns"][trace["rank"] == rank].min()) for rank in (0, 1)] == [0, 40_000 * known]
    how = "the clocks of their hosts are used" if known else "their recordings begin at the same time"
    assert how in trace.meta["notes"][0]


def test_other_nvtx_events_are_not_ranges(database):
    database.step(0)
    database.put("NVTX_EVENTS", start=1, eventType=34, text="a mark", globalTid=TID)
    database.put("NVTX_EVENTS", start=1, end=2, eventType=75, text="a domain", globalTid=TID)
    assert list(database.trace().marks()) == []


@pytest.mark.parametrize(
    ("number", "kind"), [(3, "h2d"), (4, "d2h"), (8, "d2d"), (9, None), (10, "p2p"), (11, "h2d"), (0, None), (99, None)]
)
def test_kinds_of_copies(database, number, kind):
    database.step(0)
    database.put(
        "CUPTI_ACTIVITY_KIND_MEMCPY", start=1, end=2, deviceId=1, streamId=7, correlationId=999, bytes=77, copyKind=number
    )
    trace = database.trace()
    assert [KINDS[k] for k in trace["kind"][trace["bytes"] == 77]] == ([kind] if kind else [])


def test_memsets_graphs_and_copies_that_run_as_kernels(database):
    database.put("StringIds", id=80, value="memcpy32_post")
    database.put("CUPTI_ACTIVITY_KIND_MEMSET", start=0, end=4, deviceId=0, streamId=7, correlationId=1, value=0, bytes=512)
    database.put("CUPTI_ACTIVITY_KIND_KERNEL", start=5, end=6, deviceId=0, streamId=7, correlationId=2, demangledName=80)
    database.connection.execute(
        "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER,"
        " correlationId INTEGER, graphId INTEGER)"
    )
    database.connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (10, 90, 0, 7, 3, 42)")
    trace = database.trace()
    assert [KINDS[k] for k in trace["kind"]] == ["memset", "d2d", "kernel"]
    assert trace.text("name")[2] == "CUDA graph 42"
    assert trace.meta["graphs"] == "whole"


@pytest.mark.parametrize(
    "drop",
    [["srcKind", "dstKind"], ["demangledName"], ["textId"], ["contextId", "globalPid"], ["streamId"], ["correlationId"]],
    ids=lambda names: names[0],
)  # fmt: skip
def test_a_column_that_a_version_hasnt_is_not_known(tmp_path, drop):
    database = Database(tmp_path / "a.sqlite", drop)
    for n in range(3):
        database.step(n, text=f"step {n}")
    trace = database.trace()
    assert trace.is_kind("h2d").sum() == trace.is_kind("d2h").sum() == 3
    assert trace.is_kind("kernel").sum() == 6
    if "srcKind" in drop:
        assert set(trace["pinned"]) == {-1}
    if "demangledName" in drop:
        assert set(trace.select(trace.is_kind("kernel")).text("name")) == {"mm"}


@pytest.mark.parametrize("only", ["CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"])
def test_one_table_alone_is_enough(database, only):
    row = {"nameId": 3} if only.endswith("RUNTIME") else {"deviceId": 0, "streamId": 7, "demangledName": 0}
    database.put(only, start=5, end=9, correlationId=1, **row)
    assert len(database.trace()) == 1


def test_a_written_chrome_trace_of_it_reads_back_equal(database, tmp_path):
    for n in range(3):
        database.step(n, text=f"step {n}")
    trace = database.trace()
    same(tk.open_trace(trace.to_chrome(tmp_path / "a.json.gz")), trace)


def test_the_file_is_left_alone(database):
    database.step(0)
    database.trace()
    before = database.path.read_bytes()
    tk.open_trace(database.path)
    assert database.path.read_bytes() == before
    assert [path.name for path in database.path.parent.iterdir()] == ["report.sqlite"]


# ---- bad files


def test_a_database_of_something_else_is_a_trace_error(tmp_path):
    path = tmp_path / "a.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE people (name TEXT)")
    connection.commit()
    connection.close()
    with pytest.raises(TraceError, match="another program"):
        tk.open_trace(path)


def test_a_report_without_cuda_says_how_to_record_it(database):
    with pytest.raises(TraceError, match="--trace=cuda"):
        database.trace()


@pytest.mark.parametrize("launched", [False, True], ids=["empty table", "launch"])
def test_a_report_without_work_on_a_gpu_says_how_to_record_it(database, launched):
    if launched:
        database.put("CUPTI_ACTIVITY_KIND_RUNTIME", start=1, end=2, globalTid=TID, correlationId=1, nameId=2)
    else:
        database.put("CUPTI_ACTIVITY_KIND_KERNEL", start=1, end=2)
        database.connection.execute("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL")
    with pytest.raises(TraceError, match=r"it has no events of a GPU\. Record .* --trace=cuda"):
        database.trace()


def test_values_of_odd_types_are_a_trace_error(database):
    database.put("CUPTI_ACTIVITY_KIND_KERNEL", start="soon", end="later", deviceId=0, streamId=7, correlationId=1)
    with pytest.raises(TraceError, match="unexpected"):
        database.trace()


def test_numbers_that_do_not_fit_name_the_file(database):
    database.put("CUPTI_ACTIVITY_KIND_KERNEL", start=1, end=2, deviceId=70_000, streamId=7, correlationId=1)
    with pytest.raises(TraceError, match=r"^opening the trace '.*report\.sqlite': .*'device' has the value 70000"):
        database.trace()


def test_damage_anywhere_is_a_trace_error_or_does_no_harm(database, tmp_path):
    for n in range(20):
        database.step(n, text=f"step {n}")
    database.trace()
    whole, path = database.path.read_bytes(), tmp_path / "cut.sqlite"
    for n in (16, 20, 99, 100, 101, 4096, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:n])
        with pytest.raises(TraceError):
            tk.open_trace(path)
    for at in range(16, len(whole), len(whole) // 150):
        path.write_bytes(whole[:at] + bytes(b ^ 0x5A for b in whole[at : at + 40]) + whole[at + 40 :])
        with contextlib.suppress(TraceError):
            tk.open_trace(path).copies()
