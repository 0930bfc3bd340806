"""The CUDA recorder against programs whose copies, lines and steps are known."""

import gc
import sys
import threading

import numpy as np
import pytest
import torch

import toolkit as tk
from toolkit.core.errors import DeviceError, RecorderError
from toolkit.trace.events import Trace

FILE = "tests/gpu/test_cuda.py"


def below() -> int:
    """The line below the caller's."""
    return sys._getframe(1).f_lineno + 1


def rows(trace: Trace, *kinds: str) -> list[tuple]:
    """(kind, bytes, pinned) of the events of these kinds, in order of time."""
    part = trace.select(trace.is_kind(*kinds))
    names = ("kernel", "h2d", "d2h", "d2d", "p2p", "memset", "sync", "alloc", "free", "mark")
    return [(names[k], b, p) for k, b, p in zip(part["kind"], part["bytes"], part["pinned"], strict=True)]


def lines(trace: Trace, *kinds: str) -> list[int]:
    """The lines of this file that caused the events of these kinds; every event must have one here."""
    where = trace.select(trace.is_kind(*kinds)).text("where")
    assert all(text and text.rpartition(":")[0].endswith(FILE) for text in where), where
    return [int(text.rpartition(":")[2]) for text in where]


# ---- what crosses


def test_counts_bytes_and_kinds_of_host_memory(gpu):
    host, pinned = torch.ones(1001), torch.ones(4097).pin_memory()
    out = torch.empty(4097, pin_memory=True)
    with tk.record(gpu) as trace:
        a = host.to("cuda:0")
        b = pinned.to("cuda:0", non_blocking=True)
        c = b.clone()
        out.copy_(c, non_blocking=True)
        a.cpu()
        a[7].item()
    assert rows(trace, "h2d", "d2h", "d2d") == [
        ("h2d", 4004, 0), ("h2d", 16388, 1), ("d2d", 16388, -1), ("d2h", 16388, 1), ("d2h", 4004, 0), ("d2h", 4, 1),
    ]  # fmt: skip
    assert set(trace["clock"]) == {0}
    assert trace.meta["clock"] == "measured"
    assert (trace["dur_ns"][trace.is_kind("h2d", "d2h", "d2d", "kernel")] > 0).all()


def test_an_empty_block_leaves_no_events(gpu):
    for lines_too in (True, False):
        with gpu.record(lines=lines_too) as trace:
            pass
        assert len(trace) == 0, trace.to_pandas()


def test_only_the_users_waits_count(gpu):
    x = torch.ones(8, device="cuda:0")
    with tk.record(gpu) as trace:
        x.sum().item()
        torch.cuda.synchronize()
    assert trace.select(trace.is_kind("sync")).text("name") == ["cudaStreamSynchronize", "cudaDeviceSynchronize"]
    assert trace["stream"][trace.is_kind("sync")].tolist() == [0, -1]


def test_memset_and_kernels(gpu):
    with tk.record(gpu) as trace:
        torch.zeros(1024, dtype=torch.uint8, device="cuda:0")
        x = torch.ones(3, device="cuda:0")
        x.add_(1)
    assert trace.is_kind("kernel").sum() + trace.is_kind("memset").sum() == 3


def test_what_was_queued_before_the_block_is_not_in_it(gpu):
    x = torch.ones(4096, 4096, device="cuda:0")
    for _ in range(20):
        x @ x
    with tk.record(gpu) as trace:
        x[0, 0].item()
    assert rows(trace, "kernel", "d2h") == [("d2h", 4, 1)]


def test_copies_inside_a_cuda_graph(gpu):
    given, result = torch.arange(16.0).pin_memory(), torch.zeros(16).pin_memory()
    slot = torch.zeros(16, device="cuda:0")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        slot.copy_(given, non_blocking=True)
        twice = (slot * 2).clone()
        result.copy_(twice, non_blocking=True)
    with tk.record(gpu) as trace:
        for i in range(3):
            with gpu.step(i, "decode"):
                replay = below()
                graph.replay()
                gpu.sync()
    assert result.tolist() == [2.0 * i for i in range(16)]
    assert rows(trace, "h2d", "d2d", "d2h", "kernel") == [
        ("h2d", 64, 1), ("kernel", 0, -1), ("d2d", 64, -1), ("d2h", 64, 1),
    ] * 3  # fmt: skip
    device = trace.is_kind("h2d", "d2d", "d2h", "kernel")
    assert trace["step"][device].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert set(lines(trace, "h2d", "d2d", "d2h", "kernel")) == {replay}


def test_streams_are_numbered_from_the_default_stream(gpu):
    x, side = torch.ones(8, device="cuda:0"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with tk.record(gpu) as trace:
        x.add_(1)
        torch.cuda.default_stream().synchronize()  # otherwise the kernels may begin in any order
        with torch.cuda.stream(side):
            x.mul_(2)
        side.synchronize()
    assert trace["stream"][trace.is_kind("kernel")].tolist() == [0, 1]
    assert trace["stream"][trace.is_kind("sync")].tolist() == [0, 1]


def test_a_triton_kernel_launched_by_the_driver(gpu):
    kernels = pytest.importorskip("tests.gpu.triton_kernel", reason="Triton isn't installed")
    x = torch.ones(128, device="cuda:0")
    kernels.add_one[(1,)](x, 128, BLOCK=128)
    with tk.record(gpu) as trace, gpu.step(4, "decode"):
        launched = below()
        kernels.add_one[(1,)](x, 128, BLOCK=128)
    assert trace.select(trace.is_kind("kernel")).text("name") == ["add_one"]
    assert trace["step"][trace.is_kind("kernel")].tolist() == [4]
    assert lines(trace, "kernel") == [launched]


# ---- which line


def test_lines_of_operators_methods_and_calls(gpu):
    x, index = torch.ones(64, 64, device="cuda:0"), torch.tensor([1, 5])
    x[index], x @ x  # the first use loads modules, which launches nothing but takes time
    torch.cuda.synchronize()
    expected = []
    with tk.record(gpu) as trace:
        for _ in range(30):
            expected.append(below())
            y = x + 1
            expected.append(below())
            y *= 2
            expected.append(below())
            y[3] = 7
            expected += [below()] * 2  # the comparison's kernel, the copy of its answer
            if y[0, 0] > 100:
                raise AssertionError
            expected.append(below())
            torch.nn.functional.relu(y)
            expected += [below()] * 2  # the index crosses, then the kernel
            y[index]
            expected.append(below())
            y.sum(
                dim=0,
            )
    assert lines(trace, "kernel", "h2d", "d2h", "d2d", "memset") == expected


def launch(x):
    return x + 1


LAUNCH = launch.__code__.co_firstlineno + 1


class Model(torch.nn.Module):
    def forward(self, x):
        y = launch(x) * 2
        return y - 3


FORWARD = Model.forward.__code__.co_firstlineno


def test_lines_after_a_call_returned_are_the_callers(gpu):
    model, x = Model(), torch.ones(8, device="cuda:0")
    with tk.record(gpu) as trace:
        for _ in range(10):
            mine = below()
            model(x) + launch(x)
    assert lines(trace, "kernel") == [LAUNCH, FORWARD + 1, FORWARD + 2, LAUNCH, mine] * 10


def test_lines_of_generators_and_exceptions(gpu):
    x = torch.ones(8, device="cuda:0")

    def steps():
        for _ in range(3):
            yield x + 1

    def fails():
        raise ValueError(x + 1)

    expected = []
    with tk.record(gpu) as trace:
        for value in steps():
            expected += [steps.__code__.co_firstlineno + 2, below()]
            value + 1
        try:
            fails()
        except ValueError:
            expected += [fails.__code__.co_firstlineno + 1, below()]
            x + 2
    assert lines(trace, "kernel") == expected


def test_backward_belongs_to_the_line_that_called_it(gpu):
    x = torch.ones(32, 32, device="cuda:0", requires_grad=True)
    (x @ x).sum().backward()
    torch.cuda.synchronize()
    with tk.record(gpu) as trace:
        forward = below()
        loss = (x @ x).sum()
        backward = below()
        loss.backward()
    assert set(lines(trace, "kernel")) == {forward, backward}
    assert lines(trace, "kernel").count(backward) >= 2


def test_waits_and_allocations_have_lines_too(gpu):
    with tk.record(gpu) as trace:
        made = below()
        x = torch.empty(1000, device="cuda:0")
        waited = below()
        torch.cuda.synchronize()
        freed = below()
        del x
    assert rows(trace, "alloc", "sync", "free") == [("alloc", 4096, -1), ("sync", 0, -1), ("free", 4096, -1)]
    assert lines(trace, "alloc", "sync", "free") == [made, waited, freed]


def test_without_lines_there_are_none(gpu):
    with gpu.record(lines=False) as trace:
        torch.ones(8, device="cuda:0").cpu()
    assert rows(trace, "d2h") == [("d2h", 32, 0)]
    assert (trace["where"] == -1).all()
    assert trace.meta["lines"] is False


# ---- steps


def test_steps_follow_the_launch_not_the_run(gpu):
    x, side = torch.ones(4096, 4096, device="cuda:0"), torch.empty(1, pin_memory=True)
    torch.cuda.synchronize()
    with tk.record(gpu) as trace:
        with gpu.step(0, "prefill"):
            for _ in range(10):
                x @ x  # still runs when step 1 begins
        with gpu.step(1, "decode"):
            side.copy_(x[0, :1], non_blocking=True)
        x + 1
    kernels = trace.select(trace.is_kind("kernel"))["step"].tolist()
    assert kernels[:-1] == [0] * (len(kernels) - 1)
    assert kernels[-1] == -1
    assert trace["step"][trace.is_kind("d2h")].tolist() == [1]
    assert [(mark.name, mark.step) for mark in trace.marks()] == [("prefill", 0), ("decode", 1)]
    assert trace.meta["steps_from"] == "marks"
    table = trace.copies().set_index("step")
    assert table.loc[1, "d2h_count"] == 1
    assert table.loc[1, "d2h_bytes"] == 4


def test_the_users_own_ranges_are_marks(gpu):
    with tk.record(gpu) as trace, torch.profiler.record_function("warm up"):
        torch.ones(8, device="cuda:0")
    assert [(mark.name, mark.step) for mark in trace.marks()] == [("warm up", -1)]


def test_a_step_without_a_recording_costs_little_and_does_nothing(gpu):
    with gpu.step(3, "decode"):
        torch.ones(8, device="cuda:0")
    with tk.record(gpu) as trace:
        pass
    assert len(trace) == 0


# ---- recorders in each other's way


def test_another_profiler_is_an_error_before_and_during(gpu):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        with pytest.raises(RecorderError, match="profiler is active"), tk.record(gpu):
            pass
        caught = []

        def record():
            try:
                with tk.record(gpu):
                    pass
            except RecorderError as error:
                caught.append(error)

        worker = threading.Thread(target=record)
        worker.start()
        worker.join()
        assert len(caught) == 1
    with tk.record(gpu) as trace:  # and all is well afterwards
        torch.ones(8).to("cuda:0")
    assert rows(trace, "h2d") == [("h2d", 32, 0)]


def test_a_profiler_started_inside_the_block_does_not_hang_or_hide(gpu):
    other = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with pytest.raises((RecorderError, RuntimeError)), tk.record(gpu), other:
        torch.ones(8).to("cuda:0")
    with tk.record(gpu) as trace:
        torch.ones(8).to("cuda:0")
    assert rows(trace, "h2d") == [("h2d", 32, 0)]


def test_nested_recordings_share_the_outer_one(gpu):
    with tk.record(gpu) as outer, tk.record(gpu) as inner:
        torch.ones(8).to("cuda:0")
    assert inner is outer
    assert len(rows(outer, "h2d")) == 1


def test_an_exception_in_the_block_ends_the_recording(gpu):
    def fails():
        torch.ones(8).to("cuda:0")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), tk.record(gpu) as trace:
        fails()
    assert len(rows(trace, "h2d")) == 1


def test_thirty_recordings_in_a_row(gpu):
    for n in range(1, 31):
        with gpu.record(lines=bool(n % 2)) as trace:
            torch.ones(n).to("cuda:0")
        assert rows(trace, "h2d") == [("h2d", 4 * n, 0)]


def test_recording_on_another_thread(gpu):
    result = {}

    def work():
        with tk.record(gpu) as trace, gpu.step(1, "decode"):
            result["to"] = below()
            x = torch.ones(8).to("cuda:0")
            x.sum().item()
        result["trace"] = trace

    for _ in range(3):
        worker = threading.Thread(target=work)
        worker.start()
        worker.join()
        trace = result["trace"]
        assert rows(trace, "h2d", "d2h") == [("h2d", 32, 0), ("d2h", 4, 1)]
        assert lines(trace, "h2d") == [result["to"]]
        assert set(trace["step"]) == {1}
        assert trace.is_kind("alloc").sum() >= 2


def test_what_other_threads_do_is_recorded_with_its_lines(gpu):
    line = {}

    def work():
        line["to"] = below()
        torch.ones(8).to("cuda:0")

    with tk.record(gpu) as trace:
        worker = threading.Thread(target=work)
        worker.start()
        worker.join()
    assert rows(trace, "h2d") == [("h2d", 32, 0)]
    assert lines(trace, "h2d") == [line["to"]]


# ---- the device itself


def test_memory(gpu):
    gc.collect()
    before = gpu.memory()
    x = torch.empty(1 << 20, dtype=torch.uint8, device="cuda:0")
    gpu.reset_peak()
    after = gpu.memory()
    assert after.allocated_bytes - before.allocated_bytes == x.numel()
    assert after.peak_bytes == after.allocated_bytes <= after.reserved_bytes <= after.total_bytes


def test_a_card_of_the_catalogue_has_its_spec(gpu):
    names = {card.name for card in tk.GPUS.values()}
    assert (gpu.spec is not None) == (torch.cuda.get_device_name(0) in names)


def test_a_gpu_that_is_not_there(gpu):
    with pytest.raises(DeviceError, match="numbered from 0"):
        tk.device("cuda:99")


def test_a_recording_survives_save_and_load(gpu, tmp_path):
    with tk.record(gpu) as trace, gpu.step(0, "prefill"):
        torch.ones(8).to("cuda:0").sum().item()
    again = Trace.load(trace.save(tmp_path / "run.trace"))
    assert again.strings == trace.strings
    assert all(np.array_equal(again[name], trace[name]) for name in trace.columns)
