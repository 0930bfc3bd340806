"""Tests of the modelled times: launches queue, waits block, streams run concurrently, and all times are reproducible."""

from __future__ import annotations

import threading
from itertools import pairwise

import numpy as np
import pytest
import torch

from toolkit.core.errors import RecorderError
from toolkit.gpu.opening import open_device


@pytest.fixture(autouse=True)
def gpu():
    device = open_device("virtual:h200")
    device.sync()
    return device


def big(n=2048):
    return torch.ones(n, n, device="vgpu")


def rows(trace, kind):
    mask = trace.is_kind(kind)
    return list(
        zip(trace["start_ns"][mask].tolist(), trace["dur_ns"][mask].tolist(), trace["stream"][mask].tolist(), strict=True)
    )


def test_launches_return_before_the_work_is_done(gpu):
    x = big()
    gpu.sync()
    start = gpu.now_ns()
    x @ x
    launched = gpu.now_ns()
    gpu.sync()
    assert launched - start < 50_000
    assert gpu.now_ns() - launched > 100_000  # 17 GFLOP at 67 TFLOP/s


def test_kernels_of_a_stream_follow_each_other(gpu):
    x = big()
    with gpu.record() as trace:
        for _ in range(4):
            x = x @ x
    kernels = rows(trace, "kernel")
    assert len(kernels) == 4
    assert all(b[0] >= a[0] + a[1] for a, b in pairwise(kernels))
    assert set(trace["clock"].tolist()) == {1}
    assert trace.meta["clock"] == "modelled"


def test_a_recording_begins_when_the_gpu_is_idle(gpu):
    x = big()
    x @ x  # takes more than 100 us
    with gpu.record() as trace:
        torch.ones(3, device="vgpu").sum().item()
    assert trace.copies().host_wait_us.sum() < 20


@pytest.mark.parametrize("fill", ["zero_", "uniform_", "normal_", "random_", "exponential_"])
def test_filling_only_writes(gpu, fill):
    x = torch.empty(1 << 26, device="vgpu")
    with gpu.record() as trace:
        x.fill_(1)
        getattr(x, fill)()
    (_, one, _), (_, filled, _) = rows(trace, "kernel")
    assert filled == one


def test_small_kernels_have_gaps(gpu):
    """On a stream that never runs empty, a kernel starts `kernel_gap_ns` after the end of the one before it."""
    x, small = big(), torch.ones(8, device="vgpu")
    with gpu.record() as trace:
        x @ x
        for _ in range(20):
            small.mul_(2)
    gaps = [b[0] - a[0] - a[1] for a, b in pairwise(rows(trace, "kernel"))]
    assert gaps == [gpu.spec.kernel_gap_ns] * 20


def test_launches_from_a_tape_cost_the_same_and_views_nothing(gpu):
    x = torch.ones(64, 64, device="vgpu")
    gpu.sync()
    start = gpu.now_ns()
    with gpu.from_tape():
        (x.t()[:8].t() @ x[:8].view(8, 64)).mul_(2).add_(1)
    assert gpu.now_ns() - start == 3 * gpu.spec.tape_host_ns
    with gpu.record() as trace, gpu.from_tape():  # a recorder launches each operation
        x.mul_(2)
        launched = gpu.now_ns()
        x.view(-1).mul_(2)
        assert gpu.now_ns() - launched == gpu.spec.view_host_ns + gpu.spec.op_host_ns + gpu.spec.python_host_ns
    assert len(rows(trace, "kernel")) == 2


def test_item_waits_for_the_stream(gpu):
    x = big()
    with gpu.record() as trace:
        (x @ x)[0, 0].item()
    (kernel,), (copy,), (wait,) = rows(trace, "kernel"), rows(trace, "d2h"), rows(trace, "sync")
    assert copy[0] >= kernel[0] + kernel[1]
    assert wait[0] + wait[1] >= copy[0] + copy[1]
    assert trace["bytes"][trace.is_kind("d2h")].tolist() == [4]
    assert trace["pinned"][trace.is_kind("d2h")].tolist() == [1]


def test_streams_run_concurrently(gpu):
    x, stream = big(), torch.vgpu.Stream()
    gpu.sync()
    with gpu.record() as trace:
        x @ x
        with torch.vgpu.stream(stream):
            assert torch.vgpu.current_stream() == stream
            x @ x
        assert torch.vgpu.current_stream() == torch.vgpu.default_stream()
    first, second = rows(trace, "kernel")
    assert second[0] < first[0] + first[1]
    assert (first[2], second[2]) == (0, stream.number)


@pytest.mark.parametrize("order", ["wait_stream", "wait_event", "event.wait"])
def test_events_order_streams(gpu, order):
    x, side = big(), torch.vgpu.Stream()
    with gpu.record() as trace:
        x @ x
        if order == "wait_stream":
            side.wait_stream(torch.vgpu.current_stream())
        else:
            event = torch.vgpu.current_stream().record_event()
            side.wait_event(event) if order == "wait_event" else event.wait(side)
        with torch.vgpu.stream(side):
            x @ x
    first, second = rows(trace, "kernel")
    assert second[0] >= first[0] + first[1]


def test_event_timing():
    x = big()
    start, end = (torch.vgpu.Event(enable_timing=True) for _ in range(2))
    start.record()
    x @ x
    end.record()
    assert not end.query()
    with pytest.raises(RuntimeError, match="must be completed"):
        start.elapsed_time(end)
    end.synchronize()
    assert end.query()
    assert 0.1 < start.elapsed_time(end) < 10
    with pytest.raises(RuntimeError, match="enable_timing"):
        start.elapsed_time(torch.vgpu.Event())


def test_pinned_copies_do_not_wait_and_pageable_ones_do(gpu):
    pinned, pageable = torch.ones(1 << 20).pin_memory(), torch.ones(1 << 20)
    for host, waits in ((pinned, 0), (pageable, 0)):
        with gpu.record() as trace:
            host.to("vgpu", non_blocking=True)
        assert len(rows(trace, "sync")) == waits
        assert trace["pinned"][trace.is_kind("h2d")].tolist() == [int(host is pinned)]
    with gpu.record() as trace:
        device = pageable.to("vgpu")
        pinned.copy_(device, non_blocking=True)
        device.cpu()
    assert len(rows(trace, "sync")) == 2
    assert trace["pinned"][trace.is_kind("d2h")].tolist() == [1, 0]


@pytest.mark.parametrize("size", [1 << 10, 1 << 22])
def test_copies_of_pageable_memory_return_when_it_may_be_used_again(gpu, size):
    """To pageable memory when the copy has ended, and from it when the driver has staged it, whatever the stream does."""
    a = torch.ones(1024, 1024, device="vgpu")
    pageable, device = torch.ones(size), torch.ones(size, device="vgpu")
    took, waits = {}, 0
    for name, target, source in (
        ("to pinned", pageable.pin_memory(), device), ("to pageable", pageable, device),
        ("from pinned", device, pageable.pin_memory()), ("from pageable", device, pageable),
    ):  # fmt: skip
        gpu.sync()
        with gpu.record() as trace:
            a @ a
            target.copy_(source, non_blocking=True)
        call, ends = trace.is_kind("launch").nonzero()[0][-1], trace["start_ns"] + trace["dur_ns"]
        took[name] = int(trace["dur_ns"][call])
        waits += trace.is_kind("sync").sum()
        assert (ends[call] >= ends[trace.is_kind("d2h", "h2d")][0]) == (name == "to pageable")
    assert not waits
    staged_ns = 4e9 * size / gpu.spec.h2d_pageable_bytes_per_s
    assert (took["from pageable"] > staged_ns) if size > 1 << 14 else (took["from pageable"] == gpu.spec.h2d_host_ns)
    assert max(took["to pinned"], took["from pinned"]) < 10_000


def test_times_are_the_same_every_run(gpu):
    def run():
        gpu.sync()
        with gpu.record() as trace:
            x = torch.arange(1000.0, device="vgpu")
            for _ in range(5):
                x = x.softmax(0).sort()[0] * 2
            x.sum().item()
        return trace

    first, second = run(), run()
    for column in ("start_ns", "dur_ns", "kind", "bytes", "stream"):
        assert first[column].tolist() == second[column].tolist()


def test_steps_mark_what_their_host_code_causes(gpu):
    with gpu.record() as trace:
        x = torch.ones(3, device="vgpu")
        for step in range(2):
            with gpu.step(step, "decode" if step else "prefill"):
                x = x + 1
                x.sum().item()
    marks = list(trace.marks())
    assert [(mark.name, mark.step) for mark in marks] == [("prefill", 0), ("decode", 1)]
    assert marks[0].start_ns + marks[0].dur_ns <= marks[1].start_ns
    assert trace["step"][trace.is_kind("d2h")].tolist() == [0, 1]
    assert trace["step"][trace.is_kind("kernel")].tolist() == [-1, 0, 0, 1, 1]
    assert all(where.startswith("tests/devices/test_virtual_time.py:") for where in trace.text("where")[:2])


def test_the_backward_pass_belongs_to_who_called_it(gpu):
    w, stream = torch.ones(3, 3, device="vgpu", requires_grad=True), torch.vgpu.Stream()
    with gpu.record() as trace, gpu.step(3, "train"), torch.vgpu.stream(stream):
        (w @ w).relu().sum().backward()
    kernels = trace.select(trace.is_kind("kernel"))
    assert len(kernels) > 6
    assert set(kernels["step"].tolist()) == {3}
    assert set(kernels["stream"].tolist()) == {stream.number}
    assert len(set(kernels.text("where"))) == 1


def test_recording_twice(gpu):
    with gpu.record() as outer, gpu.record() as inner:
        torch.ones(3, device="vgpu")
    assert inner is outer
    with pytest.raises(RecorderError, match="no recording is running"):
        gpu.stop()
    gpu.start(lines=False)
    with pytest.raises(RecorderError, match="already running"):
        gpu.start(lines=False)
    gpu.stop()


def test_threads_have_their_own_stream_and_step(gpu):
    errors = []

    def work(number):
        try:
            stream = torch.vgpu.Stream()
            with torch.vgpu.stream(stream), gpu.step(number, "decode"):
                for _ in range(20):
                    x = torch.tensor([1.0, 2.0], device="vgpu").requires_grad_()
                    (x * x.new_tensor([2.0, 3.0])).sum().backward()
                    assert x.grad.tolist() == [2, 3]
                assert torch.vgpu.current_stream() == stream
        except BaseException as error:
            errors.append(error)

    with gpu.record() as trace:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert not errors
    d2h = trace.is_kind("d2h")
    assert sorted(set(trace["step"][d2h].tolist())) == list(range(6))
    assert all((trace["step"][d2h] == i).sum() == 20 for i in range(6))
    assert len(set(trace["stream"][d2h].tolist())) == 6
    assert torch.vgpu.current_stream() == torch.vgpu.default_stream()


class TestModule:
    """torch.vgpu has the functions and classes of torch.cuda."""

    def test_one_device(self, gpu):
        module = torch.get_device_module("vgpu")
        assert module is torch.vgpu
        assert (module.device_count(), module.current_device(), module.is_available()) == (1, 0, True)
        assert module.get_device_name(0) == gpu.spec.name
        assert module.get_device_capability("vgpu:0") == gpu.spec.compute_capability
        assert module.get_device_properties().multi_processor_count == gpu.spec.sms
        assert module.is_bf16_supported()
        with module.device(0):
            module.set_device("vgpu")
        module.synchronize()
        torch.accelerator.synchronize()
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            module.set_device(1)

    def test_random_state(self):
        torch.vgpu.manual_seed_all(5)
        state = torch.vgpu.get_rng_state()
        first = torch.rand(3, device="vgpu").tolist()
        torch.vgpu.set_rng_state(state)
        assert torch.rand(3, device="vgpu").tolist() == first
        with torch.random.fork_rng(devices=[0], device_type="vgpu"):
            torch.rand(3, device="vgpu")

    def test_stream_objects(self):
        x = torch.ones(3, device="vgpu")
        stream = torch.vgpu.Stream(priority=-1)
        x.record_stream(stream)
        stream.synchronize()
        assert stream.query()
        assert stream != torch.vgpu.default_stream()
        assert {stream: 1}[torch.vgpu.Stream(number=stream.number)] == 1
        torch.vgpu.set_stream(torch.vgpu.default_stream())
        with torch.vgpu.stream(None):
            pass

    def test_streams_come_from_pools_of_32(self, gpu):
        streams = [torch.vgpu.Stream() for _ in range(33)]
        assert len(set(streams)) == 32
        assert streams[32] == streams[0]
        assert torch.vgpu.Stream(priority=-1) not in streams
        torch.vgpu.empty_cache()
        reserved = gpu.memory().reserved_bytes
        for _ in range(40):
            with torch.vgpu.Stream():
                torch.ones(3, device="vgpu")
        assert gpu.memory().reserved_bytes - reserved == 32 * (2 << 20)

    @pytest.mark.parametrize("name", ["Stream", "Event"])
    def test_subclasses_are_those_of_pytorch(self, name):
        original = getattr(torch, name)

        class Mine(original):
            def __new__(cls, note):
                return super().__new__(cls, "cpu")

            def __init__(self, note):
                self.note = note

        assert Mine("a").note == "a"
        assert type(Mine("a")) is Mine
        assert isinstance(Mine("a"), original)
        assert issubclass(Mine, original)
        assert not isinstance(original("cpu"), Mine)
        assert not isinstance(torch.vgpu.Event(), Mine)

    def test_memory_of_the_accelerator(self, gpu):
        x = torch.ones(1000, device="vgpu")
        held = gpu.memory().allocated_bytes
        assert torch.accelerator.memory_allocated() == torch.accelerator.memory.memory_allocated() == held >= x.nbytes

    def test_streams_and_events_of_any_device(self, gpu):
        """`torch.Stream` and `torch.Event` are those of torch.vgpu on the virtual GPU, and PyTorch's own elsewhere."""
        x, host = torch.ones(1 << 20, device="vgpu"), torch.empty(1 << 20).pin_memory()
        side, written = torch.Stream("vgpu", priority=-1), torch.Event("vgpu", enable_timing=True)
        read = torch.Event(enable_timing=True)
        with gpu.record() as trace:
            x.mul_(2)
            written.record()
            with side:
                assert torch.accelerator.current_stream() == side == torch.vgpu.current_stream()
                side.wait_event(written)
                host.copy_(x, non_blocking=True)
                read.record()
        (kernel,), (copy,) = rows(trace, "kernel"), rows(trace, "d2h")
        assert (kernel[2], copy[2]) == (0, side.stream_id)
        assert copy[0] >= kernel[0] + kernel[1]
        read.synchronize()
        assert written.elapsed_time(read) >= copy[1] / 1e6
        assert side.query()
        assert isinstance(side, torch.Stream)
        assert isinstance(read, torch.Event)
        torch.accelerator.set_stream(side)
        assert torch.accelerator.current_stream() == side
        torch.accelerator.set_stream(torch.vgpu.default_stream())
        elsewhere = torch.Event("cpu")
        assert isinstance(elsewhere, torch.Event)
        assert not isinstance(elsewhere, torch.vgpu.Event)


@pytest.mark.parametrize(
    ("step", "name"),
    [("decode", 0), ("0", "decode"), (1.5, "decode"), (None, "decode"), (-1, "decode"), (1 << 31, "decode"), (0, 5)],
)
@pytest.mark.parametrize("kind", ["cpu", "virtual:h200"])
def test_a_step_without_a_number_or_a_name_is_refused_where_it_begins(kind, step, name):
    device = open_device(kind)
    with device.record() as trace:
        with pytest.raises(RecorderError, match=r"^marking step .* Write device\.step\(3, \"decode\"\)"):
            device.step(step, name)
        with device.step(np.int64(2), "decode"):
            pass
    assert [(mark.step, mark.name) for mark in trace.marks()] == [(2, "decode")]


def test_a_recording_inside_another_one_is_read_when_both_have_ended(gpu):
    with gpu.record() as outer:
        with gpu.record() as inner:
            big(8)
        with pytest.raises(RecorderError, match="its recording, or one around it, has not ended"):
            inner.copies()
    assert len(inner) == len(outer) > 0
