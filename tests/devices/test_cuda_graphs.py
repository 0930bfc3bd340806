"""Tests of CUDA graphs without a GPU: the lines and steps of their nodes, and the conversation of host and loop."""

from __future__ import annotations

import functools
import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_cuda_events import call, ran, read, session

from toolkit.core.distributed import Shard
from toolkit.core.errors import DeviceError
from toolkit.gpu.cuda import graphs, loops
from toolkit.gpu.cuda.loops import CANCEL, LIMIT, PUBLISHED, READ, SHARED, CudaLoop
from toolkit.gpu.cuda.session import Announced, Captured, LoopRun, Range


class Lines:
    """Stands for a `LineLog`: the line is the time in units of 10 µs, the layer the last digit of that in units of 100 µs."""

    problem = None

    def where(self, threads, times_ns):
        return [f"model.py:{time // 10_000}" for time in times_ns.tolist()]

    def layers(self, threads, times_ns):
        return (times_ns // 100_000) % 10


NAMES = ["embed", "matmul", "sample"]
CAPTURED = Captured(1_500_000, 1_900_000)
CAPTURED_CALLS = [call(name, 1_610_000 + 100_000 * i, 50 + i) for i, name in enumerate(["cuLaunchKernelEx"] * 3)]


def replay(link, at):
    return [call("cudaGraphLaunch", at, link), *(ran(name, at + 20_000 + 5_000 * i, link) for i, name in enumerate(NAMES))]


def test_a_replayed_kernel_has_the_line_that_captured_it():
    events = [*CAPTURED_CALLS, *replay(1, 2_100_000), *replay(2, 3_100_000)]
    ranges = [Range(2_000_000, 3_000_000, 1, "decode"), Range(3_000_000, 4_000_000, 2, "decode")]
    trace = read(events, session(log=Lines(), ranges=ranges, captures={7: CAPTURED}, launches=[(2_095_000, 7), (3_095_000, 7)]))
    kernels = trace.select(trace.is_kind("kernel"))
    assert kernels["step"].tolist() == [1, 1, 1, 2, 2, 2]
    assert kernels.text("where") == ["model.py:161", "model.py:171", "model.py:181"] * 2
    assert kernels["layer"].tolist() == [6, 7, 8] * 2


@pytest.mark.parametrize("captures", [{}, {7: Captured(100, 200)}, {7: Captured(1_500_000, 1_750_000)}])
def test_without_all_calls_of_the_capture_nodes_have_the_line_of_the_launch(captures):
    trace = read([*CAPTURED_CALLS, *replay(1, 2_100_000)], session(log=Lines(), captures=captures, launches=[(2_095_000, 7)]))
    assert set(trace.select(trace.is_kind("kernel")).text("where")) == {"model.py:210"}


def test_a_graph_that_somebody_else_launches_is_left_alone():
    trace = read([*CAPTURED_CALLS, *replay(1, 2_100_000)], session(log=Lines(), captures={7: CAPTURED}))
    assert set(trace.select(trace.is_kind("kernel")).text("where")) == {"model.py:210"}


class Graph:
    """Stands for a `torch.cuda.CUDAGraph`. A capture that was invalidated can't be ended, and has no pool then."""

    def __init__(self, valid):
        self.valid, self.done = valid, []

    def capture_begin(self, *, pool, capture_error_mode):
        assert capture_error_mode == "thread_local"

    def capture_end(self):
        if not self.valid:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.done.append("ended")

    def pool(self):
        raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")

    def reset(self):
        self.done.append("reset")


def not_permitted():
    raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


def interrupted():
    raise KeyboardInterrupt


@pytest.mark.parametrize(("work", "valid", "error", "done"), [
    (not_permitted, False, DeviceError, [("stop", 0, (0, 7)), ("release", 0, (0, 7))]),
    (interrupted, True, KeyboardInterrupt, ["ended", "reset"]),
])  # fmt: skip
def test_the_memory_of_a_capture_that_failed_is_given_back(monkeypatch, work, valid, error, done):
    graph = Graph(valid)
    monkeypatch.setattr(graphs.torch.cuda, "graph_pool_handle", lambda: (0, 7))
    for name, what in (("_cuda_endAllocateToPool", "stop"), ("_cuda_releasePool", "release")):
        undone = functools.partial(lambda what, *of: graph.done.append((what, *of)), what)
        monkeypatch.setattr(graphs.torch._C, name, undone, raising=False)
    with pytest.raises(error):
        graphs._capture(graph, work, torch.device("cuda", 0))
    assert graph.done == done


def loop_events(iterations):
    """The events of a loop whose CUPTI reports some iterations, of 50 µs each; each publication takes 2 µs."""
    events = [call("cudaGraphLaunch", 2_100_000, 1), ran("publish_token", 2_120_000, 1)]
    for n in range(iterations):
        start = 2_125_000 + 50_000 * n
        events += [ran(name, start + 10_000 * i, 1) for i, name in enumerate(NAMES)] + [ran("publish_token", start + 45_000, 1)]
    return events


@pytest.mark.parametrize("first", [1, 2], ids="first={}".format)
@pytest.mark.parametrize("reported", [1, 3], ids="iterations={}".format)
def test_steps_of_a_loop(reported, first):
    gpu_clock = 5_000_000_000  # of the first publication's end, on a clock of its own
    run = LoopRun(2_098_000, np.array([gpu_clock + 50_000 * i for i in range(4)]), first)
    given = session(log=Lines(), captures={7: CAPTURED}, launches=[(2_097_000, 7)], loops=[run])
    trace = read([*CAPTURED_CALLS, *loop_events(reported)], given)
    marks = list(trace.marks())
    assert [(mark.name, mark.step) for mark in marks] == [("decode", first + i) for i in range(3)]
    kernels = trace.select(trace.is_kind("kernel"))
    assert kernels["step"].tolist() == [-1] + [first + n for n in range(reported) for _ in range(4)]
    body = [where for where, name in zip(kernels.text("where"), kernels.text("name"), strict=True) if name in NAMES]
    assert body == ["model.py:161", "model.py:171", "model.py:181"] * reported
    starts = trace.select(trace.is_kind("mark"))["start_ns"].tolist()
    assert np.diff(starts) == pytest.approx(50_000, abs=100)
    assert starts[0] == pytest.approx(2_122_000 - given.began_ns, abs=2_100)


def test_iterations_that_are_reported_without_their_launch():
    """As by CUPTI of CUDA 13.0."""
    events = loop_events(3)
    for event in events[2:]:
        event.link = 0
    run = LoopRun(2_098_000, np.array([5_000_000_000 + 50_000 * i for i in range(4)]), 1)
    announced = [Announced(1_650_000, "all_reduce", 512, 2, "one-shot")]
    given = session(captures={7: CAPTURED}, launches=[(2_097_000, 7)], loops=[run], announced=announced, shard=Shard(0, 2))
    for event in events:
        event.text = event.text.replace("matmul", "one_shot_all_reduce")
    trace = read([*CAPTURED_CALLS, *events], given)
    assert trace["step"][trace.is_kind("kernel")].tolist() == [-1] + [n for n in (1, 2, 3) for _ in range(3)]
    sums = trace.select(trace.is_kind("collective"))
    assert list(zip(sums["step"], sums["bytes"], sums["seq"], strict=True)) == [(1, 512, 0), (2, 512, 1), (3, 512, 2)]


def test_a_loop_without_its_first_publication_has_no_steps():
    run = LoopRun(2_098_000, np.array([5, 6]), 1)
    trace = read(replay(1, 2_100_000), session(launches=[(2_097_000, 7)], loops=[run]))
    assert not list(trace.marks())
    assert trace["step"].tolist() == [-1] * 4  # the launch, too


# ---- the host's side of a loop, with a thread that plays the GPU


class Gpu:
    """Plays the GPU: publishes 100, 101, ... as `publish_token` does, after it was launched."""

    def __init__(self, monkeypatch, stops_after=None):
        self.stops_after, self.computed, self.finished = stops_after, 0, threading.Event()
        loop = self.loop = object.__new__(CudaLoop)
        loop._device, loop._running, loop._executable = torch.device("cuda", 0), False, "executable"
        loop._shared = torch.zeros(SHARED, dtype=torch.int64)
        loop._stream = SimpleNamespace(wait_stream=lambda stream: None, cuda_stream=0)
        loop._launched, self.runs = (lambda: None), []
        loop._ran = lambda at_ns, token_ns, first: self.runs.append((first, token_ns))
        zeros = torch.zeros

        def remembered(*shape, pin_memory=False, **options):
            made = zeros(*shape, **options)
            self.ring = made if len(shape) == 2 else self.ring
            return made

        self.ring = None
        monkeypatch.setattr(loops.torch, "zeros", remembered)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        monkeypatch.setattr(loops.torch.cuda, "device", lambda device: threading.Lock())  # any context manager
        monkeypatch.setattr(loops.torch.cuda, "current_stream", lambda device: None)
        event = SimpleNamespace(record=lambda stream: None, query=self.finished.is_set, synchronize=self.finished.wait)
        monkeypatch.setattr(loops.torch.cuda, "Event", lambda: event)
        runtime = SimpleNamespace(cudaGraphLaunch=self.launch)
        monkeypatch.setattr(loops, "bindings", lambda name: runtime)
        monkeypatch.setattr(loops, "PATIENCE_S", 0.05)

    def launch(self, executable, stream):
        self.thread = threading.Thread(target=self.work)
        self.thread.start()
        return (0,)

    def work(self):
        shared, ring = self.loop._shared.numpy(), self.ring.numpy()
        _, _, _, limit, ahead, _, count, _ = shared.tolist()
        assert count == len(self.ends)
        more, done = True, 0
        while more:
            ring[done] = 100 + done, 1000 * done
            done += 1
            shared[PUBLISHED] = self.computed = done
            more = done < limit and 99 + done not in self.ends and done != self.stops_after
            while more and ahead and done - shared[READ] >= ahead and not shared[CANCEL]:
                pass
            more = more and not shared[CANCEL]
        self.finished.set()

    def run(self, limit, ends=(), stop=lambda: False, ahead=None, first=1):
        self.ends = ends
        return self.loop.run(limit, ends, stop, ahead, first)


def test_the_host_reads_every_token_in_order(monkeypatch):
    gpu = Gpu(monkeypatch)
    found = list(gpu.run(500, first=2))
    assert [token for token, _ in found] == list(range(100, 600))
    times = [at_ns for _, at_ns in found]
    assert times == sorted(times)
    ((first, token_ns),) = gpu.runs
    assert (first, token_ns.tolist()) == (2, list(range(0, 500_000, 1000)))
    assert gpu.loop._shared[LIMIT] == 500


def test_it_ends_at_an_end_token(monkeypatch):
    gpu = Gpu(monkeypatch)
    assert [token for token, _ in gpu.run(500, ends=(7, 110))] == list(range(100, 111))
    assert gpu.computed == 11


@pytest.mark.parametrize("ahead", [1, 5])
def test_the_gpu_runs_ahead_no_further_than_it_may(monkeypatch, ahead):
    gpu, seen = Gpu(monkeypatch), []
    for token, _ in gpu.run(50, ahead=ahead):
        seen.append(token)
        assert gpu.computed <= len(seen) - 1 + ahead
    assert seen == list(range(100, 150))


def test_cancel_and_close_end_the_loop(monkeypatch):
    gpu, seen = Gpu(monkeypatch), []
    for token, _ in gpu.run(1 << 20, stop=lambda: len(seen) == 3, ahead=4):
        seen.append(token)
    assert len(seen) == 3
    assert gpu.finished.is_set()
    gpu = Gpu(monkeypatch)
    tokens = gpu.run(1 << 20, ahead=4)
    next(tokens)
    with pytest.raises(DeviceError, match="running already"):
        next(gpu.loop.run(5, (), lambda: False))
    with pytest.raises(DeviceError, match="it is running"):
        gpu.loop.free()
    tokens.close()
    assert gpu.finished.is_set()
    assert not gpu.loop._running


def test_an_interrupt_while_waiting_ends_the_loop(monkeypatch):
    gpu = Gpu(monkeypatch)

    def interrupted(seconds):
        raise KeyboardInterrupt

    tokens = gpu.run(1 << 20, ahead=1)
    next(tokens)
    gpu.loop._shared[PUBLISHED] = 0  # the next token isn't there yet
    monkeypatch.setattr(loops.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(tokens)
    assert gpu.finished.is_set()


def test_a_gpu_that_stops_is_an_error_not_a_hang(monkeypatch):
    gpu = Gpu(monkeypatch, stops_after=3)
    with pytest.raises(DeviceError, match="stopped after 3 tokens"):
        list(gpu.run(10))


class OneToken(Gpu):
    """Plays the GPU: publishes the number 42 as `publish_once` does, `after_s` seconds after its launch, or when it is told."""

    def __init__(self, monkeypatch, after_s=0.0):
        super().__init__(monkeypatch)
        self.after_s = after_s
        monkeypatch.setattr(loops.torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
        monkeypatch.setattr(loops, "bindings", lambda name: SimpleNamespace(cuLaunchKernel=self.launch_kernel))
        zeros = loops.torch.zeros

        def remembered(*shape, **options):
            self.shared = zeros(*shape, **options)
            return self.shared

        monkeypatch.setattr(loops.torch, "zeros", remembered)

    def launch_kernel(self, kernel, *rest):
        assert kernel == "publish_once"
        if self.after_s is not None:
            self.publish_after(self.after_s)
        return (0,)

    def publish_after(self, seconds):
        threading.Timer(seconds, self.publish).start()

    def publish(self):
        self.shared[1] = 42
        self.shared[PUBLISHED] = 1
        self.finished.set()


@pytest.mark.parametrize("after_s", [0.0, 0.2])
def test_a_polled_token(monkeypatch, after_s):
    OneToken(monkeypatch, after_s)
    assert loops.polled(torch.zeros(1, dtype=torch.int64), "publish_once") == 42


@pytest.mark.usefixtures("python_handles_interrupts")
@pytest.mark.parametrize("during", ["launch", "wait"])
def test_the_memory_of_a_polled_token_outlasts_an_interrupt(monkeypatch, during):
    gpu = OneToken(monkeypatch, after_s=None)

    def interrupted(*_):
        gpu.publish_after(0.2)
        if during == "launch":
            signal.raise_signal(signal.SIGINT)
        else:
            raise KeyboardInterrupt

    event = loops.torch.cuda.Event()
    monkeypatch.setattr(event, "record", interrupted if during == "launch" else event.record)
    if during == "wait":
        monkeypatch.setattr(loops.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loops.polled(torch.zeros(1, dtype=torch.int64), "publish_once")
    assert gpu.finished.is_set()


@pytest.mark.parametrize(("limit", "ahead"), [(0, None), (5, 0)])
def test_bad_arguments(monkeypatch, limit, ahead):
    with pytest.raises(DeviceError, match="at least 1"):
        list(Gpu(monkeypatch).run(limit, ahead=ahead))
    with pytest.raises(DeviceError, match="end tokens"):
        list(Gpu(monkeypatch).run(5, ends=range(loops.MOST_ENDS + 1)))
