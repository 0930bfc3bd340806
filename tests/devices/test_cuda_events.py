"""Tests of the conversion of profiler events to a trace, with events made by hand, and of the CPU as a device."""

import sys
import threading
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import toolkit as tk
from toolkit.core.distributed import Shard
from toolkit.core.errors import DeviceError, RecorderError
from toolkit.gpu.cuda.events import has_calls, read_events
from toolkit.gpu.cuda.session import Anchor, Announced, Captured, Range, Session
from toolkit.trace.columns import KINDS

AHEAD = 1_700_000_000_000_000_000  # the profiler's clock against the host's
DRIFT = 1.00002  # and how much faster it runs
THREAD = 77


@dataclass
class Event:
    """An event as in `kineto_results.events()`, created from times on the host's clock."""

    text: str
    at: int
    dur: int = 2_000
    cuda: bool = False
    gpu: int = 0
    resource: int = THREAD
    link: int = 0
    detail: str = ""
    size: int = 0
    annotation: bool = False

    def name(self):
        return self.text

    def start_ns(self):
        return AHEAD + round(self.at * DRIFT)

    def duration_ns(self):
        return self.dur

    def device_type(self):
        return SimpleNamespace(name="CUDA" if self.cuda else "CPU")

    def device_index(self):
        return self.gpu

    def device_resource_id(self):
        return self.resource

    def correlation_id(self):
        return self.link

    def metadata_json(self):
        return self.detail

    def nbytes(self):
        return self.size

    def is_user_annotation(self):
        return self.annotation


def call(name, at, link, dur=2_000, thread=THREAD):
    return Event(name, at, dur, resource=thread, link=link, detail=f'\n "cbid": 1, "correlation": {link}')


def ran(name, at, link, n_bytes=0, stream=7, gpu=0):
    detail = f'\n "stream": {stream}, "bytes": {n_bytes}, "memory bandwidth (GB/s)": inf'
    return Event(name, at, cuda=True, gpu=gpu, resource=stream, link=link, detail=detail)


def sync(link, stream, at=0):
    return Event("Stream Sync", at, cuda=True, resource=stream, link=link, detail='"cuda_sync_kind": "Stream Sync"')


def session(**options):
    """A session from 1 ms to 10 ms, with two anchors on both sides."""
    anchors = [Anchor(t, t + 4_000) for t in (900_000, 950_000, 10_010_000, 10_050_000)]
    given = {"log": None, "cell": 7, "began_ns": 1_000_000, "ended_ns": 10_000_000, "anchors": anchors}
    return Session(0, **{**given, **options})


def read(events, made=None):
    made = made or session()
    anchors = [call("cudaDeviceSynchronize", a.before_ns + 1_000, 900 + i) for i, a in enumerate(made.anchors)]
    return read_events([*anchors, *events], made, {"device": "cuda:0"})


def kinds(trace):
    return [KINDS[code] for code in trace["kind"]]


def test_copies_kernels_and_memsets_have_their_bytes_memory_and_stream():
    trace = read([
        call("cudaMemcpyAsync", 2_000_000, 1), ran("Memcpy HtoD (Pageable -> Device)", 2_010_000, 1, 4004),
        call("cudaLaunchKernel", 3_000_000, 2), ran("void mm<float>()", 3_010_000, 2, stream=21),
        call("cudaMemsetAsync", 4_000_000, 3), ran("Memset (Device)", 4_010_000, 3, 512),
        call("cuLaunchKernelEx", 5_000_000, 4), ran("triton_kernel", 5_010_000, 4),
        call("cudaMemcpyAsync", 6_000_000, 5), ran("Memcpy DtoH (Device -> Pinned)", 6_010_000, 5, 8, stream=13),
    ])  # fmt: skip
    launches, trace = trace.select(trace.is_kind("launch")), trace.select(~trace.is_kind("launch"))
    calls = ["cudaMemcpyAsync", "cudaLaunchKernel", "cudaMemsetAsync", "cuLaunchKernelEx", "cudaMemcpyAsync"]
    assert launches.text("name") == calls
    assert launches["stream"].tolist() == trace["stream"].tolist()
    assert set(launches["device"]) == {-1}
    assert kinds(trace) == ["h2d", "kernel", "memset", "kernel", "d2h"]
    assert trace["bytes"].tolist() == [4004, 0, 512, 0, 8]
    assert trace["pinned"].tolist() == [0, -1, -1, -1, 1]
    assert trace["stream"].tolist() == [0, 1, 0, 0, 2]
    assert set(trace["cell"]) == {7}
    assert trace.meta == {"device": "cuda:0", "steps_from": None, "lines": False}


def test_times_are_the_hosts_although_the_clocks_differ_and_drift():
    at = np.arange(1_100_000, 9_900_000, 400_000)
    events = [e for i, t in enumerate(at.tolist()) for e in (call("cudaLaunchKernel", t - 50_000, i + 1), ran("k", t, i + 1))]
    trace = read(events)
    off_ns = trace["start_ns"][trace.is_kind("kernel")] - (at - 1_000_000)
    assert np.abs(off_ns).max() <= 1_000  # half of the slack of an anchor


def test_the_users_waits_alone_with_the_stream_they_waited_for():
    trace = read([
        call("cudaStreamSynchronize", 2_000_000, 1, dur=70_000), sync(1, 7), call("cudaEventSynchronize", 3_000_000, 2),
        call("cudaDeviceSynchronize", 4_000_000, 3), sync(3, -1), call("cudaEventQuery", 5_000_000, 4), sync(4, -1),
        call("cudaDeviceSynchronize", 10_070_000, 5),
    ])  # fmt: skip
    assert trace.text("name") == ["cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize"]
    assert trace["stream"].tolist() == [0, -1, -1]
    assert trace["dur_ns"].tolist() == [70_000, 2_000, 2_000]


def test_steps_are_those_of_the_launch_and_leave_marks():
    ranges = [Range(2_000_000, 3_000_000, 0, "prefill"), Range(3_000_000, 4_000_000, 1, "decode")]
    events = [call("cudaLaunchKernel", t, i) for i, t in ((1, 2_500_000), (2, 2_600_000), (3, 3_500_000), (4, 4_500_000))]
    events += [ran("k", 2_510_000, 1), ran("late", 3_800_000, 2), ran("k", 3_900_000, 3), ran("k", 4_510_000, 4)]
    trace = read(events, session(ranges=ranges))
    kernel = trace.is_kind("kernel")
    assert trace["step"][kernel].tolist() == [0, 0, 1, -1]
    assert [(mark.name, mark.step, mark.start_ns, mark.dur_ns) for mark in trace.marks()] == [
        ("prefill", 0, 1_000_000, 1_000_000), ("decode", 1, 2_000_000, 1_000_000),
    ]  # fmt: skip
    assert trace.meta["steps_from"] == "marks"


def test_all_nodes_of_a_graph_share_its_launch():
    ranges = [Range(2_000_000, 3_000_000, 5, "decode")]
    nodes = [ran("Memcpy HtoD (Pinned -> Device)", 3_100_000, 1, 8), ran("k", 3_200_000, 1), ran("memcpy32_post", 3_300_000, 1)]
    trace = read([call("cudaGraphLaunch", 2_900_000, 1), *nodes], session(ranges=ranges))
    trace = trace.select(~trace.is_kind("mark"))
    assert kinds(trace) == ["launch", "h2d", "kernel", "d2d"]
    assert set(trace["step"]) == {5}


def test_what_was_launched_before_or_after_the_block_is_left_out():
    events = [call("cudaLaunchKernel", t, i) for i, t in ((1, 980_000), (2, 1_500_000), (3, 10_005_000))]
    events += [ran("before", 1_400_000, 1), ran("inside", 10_300_000, 2), ran("after", 10_400_000, 3)]
    assert read(events).text("name") == ["cudaLaunchKernel", "inside"]


def test_an_event_without_a_known_launch_counts_by_its_own_time():
    assert read([ran("inside", 5_000_000, 99), ran("outside", 11_000_000, 98)]).text("name") == ["inside"]


def test_other_gpus_operations_and_annotations_on_the_device_are_not_events():
    trace = read([
        ran("other", 2_000_000, 1, gpu=1), Event("aten::mm", 2_000_000, link=1),
        Event("decode", 2_000_000, cuda=True, annotation=True),
        Event("Activity Buffer Request", 2_000_000, gpu=-1), Event("warm up", 3_000_000, annotation=True),
        Event("toolkit.step 1 decode", 3_000_000, annotation=True),
    ])  # fmt: skip
    assert kinds(trace) == ["mark"]
    assert [(mark.name, mark.step) for mark in trace.marks()] == [("warm up", -1)]


def test_allocations_of_the_gpu():
    trace = read([
        Event("[memory]", 2_000_000, 0, cuda=True, size=512), Event("[memory]", 3_000_000, 0, cuda=True, size=-512),
        Event("[memory]", 4_000_000, 0, size=64), Event("[memory]", 5_000_000, 0, cuda=True, gpu=1, size=1024),
    ])  # fmt: skip
    assert kinds(trace) == ["alloc", "free"]
    assert trace["bytes"].tolist() == [512, 512]


def test_no_events_are_an_empty_trace_and_no_calls_an_error():
    assert len(read([])) == 0
    with pytest.raises(RecorderError, match="no runtime calls"):
        read_events([], session(), {})
    assert not has_calls([ran("k", 1, 1)])
    assert has_calls([call("cudaDeviceSynchronize", 1, 1)])


# ---- devices


def test_a_gpu_without_cuda_is_an_error_that_names_the_virtual_one():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA GPU here")
    with pytest.raises(DeviceError, match="virtual:h200"):
        tk.device("cuda")


def test_the_cpu_runs_everything_and_records_marks():
    cpu = tk.device("cpu")
    with tk.record(cpu) as trace:
        with cpu.step(0, "prefill"):
            torch.ones(8) + 1
        with pytest.raises(ZeroDivisionError), cpu.step(1, "decode"):
            raise ZeroDivisionError
    assert [(mark.name, mark.step) for mark in trace.marks()] == [("prefill", 0), ("decode", 1)]
    assert trace.meta["steps_from"] == "marks"
    assert trace.meta["clock"] == cpu.clock == "measured"
    assert trace.copies()["h2d_count"].tolist() == [0, 0]
    assert cpu.torch == torch.device("cpu")
    assert cpu.now_ns() <= cpu.now_ns()
    cpu.sync(), cpu.reset_peak(), cpu.memory()


def test_the_cpu_records_on_any_thread_and_joins_an_outer_block():
    cpu, found = tk.device("cpu"), []

    def work():
        with tk.record(cpu) as outer, tk.record(cpu) as inner, cpu.step(0, "decode"):
            pass
        found.append((outer is inner, len(outer)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(True, 1)]


def test_stopping_what_never_began_is_an_error():
    with pytest.raises(RecorderError, match="no recording is running"):
        tk.device("cpu").stop()


# ---- a recording that is interrupted: played with a GPU that isn't there


class Profiler:
    def __init__(self):
        self.entered = self.left = 0
        self.kineto_results = SimpleNamespace(events=list)

    def __enter__(self):
        self.entered += 1

    def __exit__(self, *_):
        self.left += 1


@pytest.fixture
def played(monkeypatch):
    """Return a CudaGpu with a profiler that counts its uses, and with waits that raise the given error."""
    from toolkit.gpu.cuda import device as cuda

    gpu = object.__new__(cuda.CudaGpu)
    gpu.index, gpu.name, gpu.gpu_name, gpu._session, gpu._profiler = 0, "cuda:0", "none", None, None
    made = SimpleNamespace(gpu=gpu, profilers=[], fails=None, waits=0)

    def wait(_):
        made.waits += 1
        if made.fails is not None and made.waits == made.fails:
            raise KeyboardInterrupt

    def profiler(**_):
        made.profilers.append(Profiler())
        return made.profilers[-1]

    monkeypatch.setattr(cuda, "_profiler", profiler)
    monkeypatch.setattr(cuda, "_check_cupti", lambda _: None)
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    return made


@pytest.mark.parametrize("at", range(1, 13))
@pytest.mark.parametrize("lines", [True, False])
def test_an_interrupt_at_any_wait_leaves_no_profiler_running(played, at, lines):
    tracer = sys.gettrace()
    played.fails = at  # 1: before; 2 to 6: while starting; 7 to 12: while stopping
    with pytest.raises(KeyboardInterrupt), played.gpu.record(lines=lines):
        pass
    assert all(profiler.entered == profiler.left for profiler in played.profilers)
    assert sys.gettrace() is tracer
    assert played.gpu.recording is None
    with pytest.raises(RecorderError, match="no runtime calls"), played.gpu.record(lines=lines):  # it starts and stops again
        pass
    assert played.profilers[-1].left == 1


def test_two_gpus_can_not_record_at_once(played):
    from toolkit.gpu.cuda import device as cuda

    other = object.__new__(cuda.CudaGpu)
    other.index, other.name, other._session, other._profiler = 1, "cuda:1", None, None
    played.gpu.start(lines=False)
    with pytest.raises(RecorderError, match="another recording"):
        other.start(lines=False)
    with pytest.raises(RecorderError, match="no runtime calls"):
        played.gpu.stop()
    with pytest.raises(RecorderError, match="no recording is running"):
        played.gpu.stop()


# ---- collectives


SUM, JOIN = "one_shot_all_reduce", "one_shot_all_gather"
PAIR = Shard(1, 2)


def collectives_of(trace):
    mine = trace.select(trace.is_kind("collective"))
    columns = [mine.text(name) for name in ("operation", "algorithm", "group")]
    return list(zip(*columns, *(mine[name].tolist() for name in ("bytes", "group_size", "seq", "rank", "step")), strict=True))


def test_collectives_have_the_columns_that_were_announced():
    names = [SUM, "matmul", JOIN, "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "sum"]
    events = [part for i, name in enumerate(names) for part in launched(name, 2_000_000 + 10_000 * i, 1 + i)]
    announced = [
        Announced(1_990_000, "all_reduce", 10_752, 2, "one-shot"),
        Announced(2_015_000, "all_gather", 4_096, 2, "one-shot"),
        Announced(2_028_000, "all_reduce", 1 << 20, 2, "NCCL"),
    ]
    trace = read(events, session(announced=announced, shard=PAIR, ranges=[Range(1_900_000, 2_500_000, 3, "decode")]))
    assert collectives_of(trace) == [
        ("all_reduce", "one-shot", "0", 10_752, 2, 0, 1, 3),
        ("all_gather", "one-shot", "0", 4_096, 2, 1, 1, 3),
        ("all_reduce", "NCCL, ring, LL", "0", 1 << 20, 2, 2, 1, 3),
    ]
    assert kinds(trace).count("kernel") == 2
    assert set(trace["rank"].tolist()) == {1}


def launched(name, at, link):
    return call("cudaLaunchKernel", at, link), ran(name, at + 5_000, link)


def test_a_graph_repeats_the_collectives_that_were_announced_in_its_capture():
    announced = [Announced(1_550_000, "all_reduce", 512, 2, "one-shot"), Announced(1_600_000, "all_gather", 64, 2, "one-shot")]
    announced.append(Announced(1_950_000, "all_reduce", 2_048, 2, "one-shot"))
    events = list(launched(SUM, 1_955_000, 9))
    for link in (1, 2):
        at = 1_000_000 + 1_000_000 * link
        nodes = [ran(name, at + 20_000 + 5_000 * i, link) for i, name in enumerate((SUM, "matmul", JOIN))]
        events += [call("cudaGraphLaunch", at, link), *nodes]
    given = session(
        announced=announced, shard=PAIR, captures={7: Captured(1_500_000, 1_900_000)}, launches=[(1_995_000, 7), (2_995_000, 7)]
    )
    found = [(operation, size, seq) for operation, _, _, size, _, seq, _, _ in collectives_of(read(events, given))]
    once = [("all_reduce", 512), ("all_gather", 64)]
    assert found == [("all_reduce", 2_048, 0), *((*each, 1 + i) for i, each in enumerate(once * 2))]


def test_collectives_that_nobody_announced_have_what_is_recorded():
    nccl = ran("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 2_010_000, 1)
    nccl.detail += (
        ', "Collective name": "allreduce", "dtype": "BFloat16", "In msg nelems": 8, "Out msg nelems": 8, "Group size": 2, '
        '"Process Group Name": "7", "Seq": 5'
    )
    nccl.detail = nccl.detail.replace("inf", "0")
    events = [call("cudaLaunchKernelExC", 2_000_000, 1), nccl, *launched(SUM, 3_000_000, 2)]
    wanted = [("all_reduce", "ring, LL", "7", 16, 2, 5, 0, -1), ("all_reduce", "one-shot", None, 0, -1, 0, 0, -1)]
    assert collectives_of(read(events)) == wanted
