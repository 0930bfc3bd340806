"""Tests of captured graphs on the virtual GPU: values as in an eager run, times and memory as those of a CUDA graph."""

from __future__ import annotations

import gc
import time
from itertools import pairwise

import pytest
import torch

import toolkit as tk
from tests.speed import within
from toolkit.core.errors import DeviceError
from toolkit.core.units import GiB, MiB
from toolkit.gpu.opening import open_device
from toolkit.gpu.virtual.threads import here
from toolkit.kernels.kv_codes import find_kv_scheme
from toolkit.ops.codes import CODES_SHARE

COPIES = ("h2d", "d2h", "d2d")


@pytest.fixture(autouse=True)
def gpu():
    gc.collect()
    device = open_device("virtual:h200")
    torch.vgpu.empty_cache()
    device.sync()
    return device


class Step:
    """A small decode step: the next token depends on the token, the position and a state that is updated in place."""

    def __init__(self, width=64):
        torch.manual_seed(0)
        self.table = torch.randn(50, width, device="vgpu")
        self.weight = torch.randn(width, width, device="vgpu") / width**0.5
        self.state = torch.zeros(width, device="vgpu")
        self.token = torch.zeros(1, dtype=torch.int64, device="vgpu")
        self.position = torch.zeros(1, dtype=torch.int64, device="vgpu")
        self()
        self.begin()

    def begin(self, token=7):
        self.state.zero_()
        self.position.zero_()
        self.token.fill_(token)

    def __call__(self):
        self.state.add_(self.table.index_select(0, self.token)[0] @ self.weight + self.position)
        self.token.copy_((self.table @ self.state.sin()).argmax().view(1))
        self.position.add_(1)

    def eager(self, count):
        """The first token and `count` computed ones; the tensors are as at the beginning afterwards."""
        self.begin()
        tokens = [7]
        for _ in range(count):
            self()
            tokens.append(self.token.item())
        self.begin()
        return tokens


def never():
    return False


REFUSED = {
    "item": (lambda x, host: x.item(), r"Tensor.item\(\) waits for the device"),
    "condition": (lambda x, host: bool(x > 0), r"Tensor.item\(\) waits for the device"),
    "nonzero": (lambda x, host: x.nonzero(), "aten::nonzero waits for the device"),
    "upload": (lambda x, host: x.copy_(host, non_blocking=True), "aten::copy_ copies from pageable host memory"),
    "download": (lambda x, host: x.cpu(), "aten::copy_ copies to pageable host memory"),
    "waiting copy": (lambda x, host: x.copy_(host.pin_memory()), "aten::copy_ waits for the device"),
    "synchronize": (lambda x, host: torch.vgpu.synchronize(), "cudaDeviceSynchronize waits for the device"),
    "event": (lambda x, host: torch.vgpu.current_stream().record_event().synchronize(), "cudaEventSynchronize waits"),
}  # fmt: skip


class TestCapture:
    def test_changes_no_value_and_runs_nothing(self, gpu):
        step = Step()
        host, pinned = torch.zeros(1).pin_memory(), torch.ones(1).pin_memory()
        number = torch.zeros(1, device="vgpu")

        def work():
            step()
            host.copy_(number, non_blocking=True)
            number.copy_(pinned, non_blocking=True)
            step.state.add_(torch.rand(64, device="vgpu"))

        before = [t.cpu() for t in (step.state, step.token, step.position)]
        random, ends = torch.get_rng_state(), dict(gpu.machine.stream_ends)
        with gpu.record() as trace:
            graph = gpu.capture(work)
        assert not trace.is_kind("kernel", "sync", "memset", *COPIES).any()
        assert gpu.machine.stream_ends == ends
        assert all(torch.equal(a, b.cpu()) for a, b in zip(before, (step.state, step.token, step.position), strict=True))
        assert (host.item(), number.item()) == (0, 0)
        assert torch.equal(torch.get_rng_state(), random)
        graph.replay()
        assert (step.position.item(), number.item()) == (1, 1)

    def test_is_known_to_the_stream(self, gpu):
        """PyTorch's optimizers ask the current stream."""
        found = []
        graph = gpu.capture(lambda: found.append(torch.accelerator.current_stream().is_capturing()))
        graph.replay()
        assert found == [True, True]
        assert not torch.vgpu.current_stream().is_capturing()

    def test_counts_nodes(self, gpu):
        step = Step()
        with gpu.record() as trace:
            step()
        graph = gpu.capture(step)
        assert graph.nodes == trace.is_kind("kernel", "memset", *COPIES).sum() > 5

    def test_takes_the_host_as_long_as_the_launches(self, gpu):
        step = Step()
        start = gpu.now_ns()
        step()
        eager = gpu.now_ns() - start
        gpu.capture(step)
        assert gpu.now_ns() - start == 2 * eager

    def test_needs_memory_for_the_intermediate_results(self, gpu):
        x = torch.zeros(1, device="vgpu")
        with gpu.sizes_only(), pytest.raises(torch.OutOfMemoryError):
            gpu.capture(lambda: x.add_(torch.ones(200 * GiB, dtype=torch.uint8, device="vgpu").sum()))
        assert x.item() == 0
        gpu.capture(lambda: x.add_(1))

    @pytest.mark.parametrize("name", REFUSED)
    def test_refuses_what_cuda_cannot_capture(self, gpu, name):
        work, found = REFUSED[name]
        x, before = torch.ones(1, device="vgpu"), gpu.memory().allocated_bytes

        def bad():
            x.add_(1)
            work(x, torch.zeros(1))

        with pytest.raises(DeviceError, match=f"capturing a graph: {found}"):
            gpu.capture(bad)
        torch.vgpu.empty_cache()
        assert x.item() == 1
        assert here().graph is None
        assert gpu.memory().allocated_bytes == before

    def test_refuses_another_graph_inside(self, gpu):
        x = torch.ones(1, device="vgpu")
        inner = gpu.capture(lambda: x.add_(1))
        with pytest.raises(DeviceError, match=r"captures or replays another graph\. Capture them one by one"):
            gpu.capture(inner.replay)
        inner.replay()
        assert x.item() == 2


class TestReplay:
    def test_computes_what_an_eager_run_computes(self, gpu):
        step = Step()
        expected = step.eager(20)
        graph, found = gpu.capture(step), [7]
        for _ in range(20):
            graph.replay()
            found.append(step.token.item())
        assert found == expected
        assert len(set(expected)) > 3

    def test_is_one_launch_on_the_host(self, gpu):
        step = Step()
        graph = gpu.capture(step)
        start = gpu.now_ns()
        graph.replay()
        assert gpu.now_ns() - start == gpu.spec.graph_launch_host_ns

    def test_small_nodes_follow_each_other_by_the_time_of_a_node(self, gpu):
        x = torch.zeros(8, device="vgpu")
        graph = gpu.capture(lambda: [x.add_(1) for _ in range(10)])
        gpu.sync()
        with gpu.record() as trace:
            graph.replay()
        starts = trace["start_ns"][trace.is_kind("kernel")].tolist()
        assert starts[0] == gpu.spec.graph_launch_host_ns
        assert {b - a for a, b in pairwise(starts)} == {gpu.spec.graph_node_ns}

    def test_a_large_node_delays_the_next_by_its_whole_time(self, gpu):
        x = torch.ones(2048, 2048, device="vgpu")
        out = torch.empty_like(x)
        graph = gpu.capture(lambda: torch.mm(x, x, out=out).add_(1))
        with gpu.record() as trace:
            graph.replay()
        start, dur = (trace[name][trace.is_kind("kernel")].tolist() for name in ("start_ns", "dur_ns"))
        assert dur[0] > 100_000
        assert start[1] - start[0] - dur[0] == gpu.spec.graph_node_ns - gpu.spec.kernel_floor_ns

    def test_copies_and_lines_are_recorded_and_allocations_are_not(self, gpu):
        step = Step()
        graph = gpu.capture(step)
        with gpu.record() as trace, gpu.step(3, "decode"):
            graph.replay()
        nodes = trace.select(trace.is_kind("kernel", "memset", *COPIES))
        assert (len(nodes), len(trace)) == (graph.nodes, graph.nodes + 2)  # the launch and the mark
        assert trace.is_kind("d2d").sum() == 1
        assert set(nodes["step"].tolist()) == {3}
        assert all(where.startswith("tests/devices/test_virtual_graphs.py:") for where in nodes.text("where"))

    def test_runs_on_the_current_stream_and_after_its_work(self, gpu):
        x, y, stream = torch.ones(2048, 2048, device="vgpu"), torch.zeros(8, device="vgpu"), torch.vgpu.Stream()
        graph = gpu.capture(lambda: y.add_(1))
        gpu.sync()
        with gpu.record() as trace, torch.vgpu.stream(stream):
            x @ x
            graph.replay()
        start, dur, streams = (trace[name][trace.is_kind("kernel")].tolist() for name in ("start_ns", "dur_ns", "stream"))
        assert start[1] >= start[0] + dur[0]
        assert streams == [stream.number] * 2

    def test_refuses_a_wait_that_only_a_replay_makes(self, gpu):
        x, waits = torch.ones(1, device="vgpu"), []
        graph = gpu.capture(lambda: x.item() if waits else x.add_(1))
        waits.append(True)
        with pytest.raises(DeviceError, match=r"replaying a graph: Tensor.item\(\) waits for the device"):
            graph.replay()
        assert x.item() == 1

    def test_has_the_gradient_mode_of_the_capture(self, gpu):
        weight, out = torch.ones(3, device="vgpu", requires_grad=True), torch.zeros(3, device="vgpu")
        with torch.no_grad():
            graph = gpu.capture(lambda: out.copy_(weight * 2))
        graph.replay()
        assert not out.requires_grad
        assert out.tolist() == [2, 2, 2]


class TestMemory:
    def test_the_pool_is_reserved_from_the_capture_until_free(self, gpu):
        x, out = torch.ones(4 * MiB, device="vgpu"), torch.zeros(4 * MiB, device="vgpu")
        before = gpu.memory()
        gpu.reset_peak()
        graph = gpu.capture(lambda: torch.sum(torch.stack([x + 1, x * 2]), 0, out=out))
        after = gpu.memory()
        assert after.allocated_bytes == before.allocated_bytes
        assert after.peak_bytes - before.allocated_bytes == 4 * x.nbytes
        assert after.reserved_bytes - before.reserved_bytes == 4 * x.nbytes
        torch.vgpu.empty_cache()
        assert gpu.memory() == after
        gpu.reset_peak()
        graph.replay()
        assert gpu.memory().peak_bytes == before.allocated_bytes
        graph.free()
        torch.vgpu.empty_cache()
        assert gpu.memory().reserved_bytes == before.reserved_bytes

    def test_other_tensors_do_not_use_the_pool(self, gpu):
        x = torch.ones(4 * MiB, device="vgpu")
        graph = gpu.capture(lambda: x.copy_(x + 1))
        reserved = gpu.memory().reserved_bytes
        y = torch.empty_like(x)
        assert gpu.memory().reserved_bytes == reserved + x.nbytes
        pools = {segment["segment_pool_id"] for segment in torch.vgpu.memory_snapshot()}
        (private,) = pools - {(0, 0)}
        assert [segment["total_size"] for segment in torch.vgpu.memory_snapshot(private)] == [x.nbytes]
        graph.free()
        del y

    def test_a_graph_that_is_garbage_has_freed_its_pool(self, gpu):
        x = torch.ones(4 * MiB, device="vgpu")
        graph = gpu.capture(lambda: x.copy_(x + 1))
        reserved = gpu.memory().reserved_bytes
        del graph
        torch.vgpu.empty_cache()
        assert gpu.memory().reserved_bytes == reserved - x.nbytes

    def test_memory_that_is_needed_is_taken_from_freed_pools_only(self, gpu):
        with gpu.sizes_only():
            x = torch.empty(50 * GiB, dtype=torch.uint8, device="vgpu")
            graph = gpu.capture(lambda: x.copy_(x + 1))
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(50 * GiB, dtype=torch.uint8, device="vgpu")
            graph.replay()
            graph.free()
            torch.empty(50 * GiB, dtype=torch.uint8, device="vgpu")

    def test_a_replay_needs_no_free_memory(self, gpu):
        x = torch.zeros(1 << 20, device="vgpu")

        def work():
            x.add_(torch.empty(1 << 20, device="vgpu").fill_(1)).add_(torch.arange(1 << 20, device="vgpu"))

        graph = gpu.capture(work)
        try:
            torch.vgpu.empty_cache()
            gpu.limit(gpu.memory().reserved_bytes)
            graph.replay()
        finally:
            gpu.limit(None)
        assert x[:3].tolist() == [1, 2, 3]

    def test_a_freed_graph_does_not_run(self, gpu):
        x = torch.zeros(1, device="vgpu")
        graph = gpu.capture(lambda: x.add_(1))
        graph.free()
        graph.free()
        with pytest.raises(DeviceError, match="its memory was freed"):
            graph.replay()
        assert x.item() == 0


class TestLoop:
    def test_yields_the_tokens_of_an_eager_run(self, gpu):
        step = Step()
        expected = step.eager(12)
        loop = gpu.capture_loop(step, step.token)
        assert [token for token, _ in loop.run(13, (), never)] == expected
        assert step.position.item() == 12
        step.begin()
        assert [token for token, _ in loop.run(13, (), never, ahead=2)] == expected

    def test_is_one_launch_without_copies_and_waits(self, gpu):
        step = Step()
        step.token.copy_(step.token + 1)
        loop = gpu.capture_loop(step, step.token)
        with gpu.record() as trace:
            start = gpu.now_ns()
            known = [at for _, at in loop.run(6, (), never)]
        assert not trace.is_kind("sync", "h2d", "d2h", "alloc", "free").any()
        assert trace.is_kind("d2d").sum() == 5  # of the step itself
        kernels = trace.select(trace.is_kind("kernel", "d2d"))
        starts, ends = kernels["start_ns"], kernels["start_ns"] + kernels["dur_ns"]
        assert starts[0] == gpu.spec.graph_launch_host_ns
        assert len(kernels) == 1 + 5 * loop.nodes
        assert (starts[1:] - starts[:-1]).min() >= gpu.spec.graph_node_ns
        assert (starts[1:] - ends[:-1]).max() <= gpu.spec.graph_node_ns - gpu.spec.d2d_floor_ns
        published = [name == "publish_token" for name in kernels.text("name")]
        assert [at - start for at in known] == ends[published].tolist()
        assert gpu.now_ns() == known[-1]

    def test_each_iteration_is_a_step(self, gpu):
        step = Step()
        loop = gpu.capture_loop(step, step.token)
        with gpu.record() as trace:
            tokens = list(loop.run(4, (), never))
        assert [(mark.step, mark.name) for mark in trace.marks()] == [(1, "decode"), (2, "decode"), (3, "decode")]
        kernels = trace.select(trace.is_kind("kernel", "d2d"))
        assert [(kernels["step"] == i).sum() for i in range(-1, 4)] == [1, 0, *[loop.nodes] * 3]
        ends = [mark.start_ns + mark.dur_ns for mark in trace.marks()]
        assert [b[1] - a[1] for a, b in pairwise(tokens[1:])] == [b - a for a, b in pairwise(ends)]

    @pytest.mark.parametrize("at", [0, 1, 5])
    def test_ends_by_an_end_token(self, gpu, at):
        step = Step()
        expected = step.eager(12)
        first = expected.index(expected[at])
        loop = gpu.capture_loop(step, step.token)
        assert [token for token, _ in loop.run(13, {expected[at]}, never)] == expected[: first + 1]
        assert step.position.item() == first

    def test_a_limit_of_one_computes_nothing(self, gpu):
        step = Step()
        loop = gpu.capture_loop(step, step.token)
        assert [token for token, _ in loop.run(1, (), never)] == [7]
        assert step.position.item() == 0

    def test_stop_cancels_it_after_one_more_step(self, gpu):
        step = Step()
        expected = step.eager(5)
        loop, seen = gpu.capture_loop(step, step.token), []
        for token, _ in loop.run(100, (), lambda: len(seen) == 5):
            seen.append(token)
        assert seen == expected[:5]
        assert step.position.item() == 5  # four steps, and one in vain

    def test_closing_it_cancels_it(self, gpu):
        step = Step()
        loop = gpu.capture_loop(step, step.token)
        run = loop.run(100, (), never)
        next(run), next(run)
        with pytest.raises(DeviceError, match="it is running"):
            loop.free()
        with pytest.raises(DeviceError, match="it is running already"):
            next(loop.run(100, (), never))
        run.close()
        assert step.position.item() == 2
        loop.free()
        with pytest.raises(DeviceError, match="its memory was freed"):
            next(loop.run(2, (), never))

    def test_an_interrupt_leaves_the_device_usable(self, gpu):
        step, calls = Step(), []

        def interrupted():
            calls.append(1)
            if len(calls) == 4:
                raise KeyboardInterrupt
            step()

        loop = gpu.capture_loop(interrupted, step.token)
        reserved = gpu.memory().reserved_bytes
        with pytest.raises(KeyboardInterrupt):
            list(loop.run(100, (), never))
        assert len(calls) == 4
        assert here().graph is None
        assert (here().step, here().stream) == (-1, 0)
        loop.free()
        torch.vgpu.empty_cache()
        assert gpu.memory().reserved_bytes < reserved
        assert step.token.item() >= 0

    def test_the_device_goes_on_while_the_host_is_busy_unless_it_is_too_far_ahead(self, gpu):
        step = Step()
        loop = gpu.capture_loop(step, step.token)

        def ends(ahead):
            step.begin()
            gpu.sync()
            with gpu.record() as trace:
                for _ in loop.run(4, (), never, ahead):
                    gpu.machine.spend(1_000_000)
            published = [name == "publish_token" for name in trace.text("name")]
            return trace["start_ns"][published].tolist()

        free, bound = ends(None), ends(1)
        step_ns = free[1] - free[0]
        assert step_ns < 30_000
        assert {b - a for a, b in pairwise(free)} == {step_ns}
        late = [b - a for a, b in pairwise(bound)]
        assert late[0] == step_ns  # the host read the first token at once
        assert all(1_000_000 - step_ns <= ns <= 1_000_000 + step_ns for ns in late[1:])
        two = [b - a for a, b in pairwise(ends(2))]
        assert two[:2] == [step_ns] * 2
        assert two[2] > 900_000

    @pytest.mark.parametrize("make", [
        lambda: torch.zeros(2, dtype=torch.int64, device="vgpu"),
        lambda: torch.zeros(1, dtype=torch.int32, device="vgpu"),
        lambda: torch.zeros(1, dtype=torch.int64),
    ], ids=["two", "int32", "host"])  # fmt: skip
    def test_refuses_another_token(self, gpu, make):
        with pytest.raises(DeviceError, match="a loop with this token"):
            gpu.capture_loop(lambda: None, make())
        with pytest.raises(DeviceError, match="reading this token"):
            gpu.poll(make())

    @pytest.mark.parametrize(("limit", "ahead"), [(0, None), (3, 0)])
    def test_refuses_to_run_no_token(self, gpu, limit, ahead):
        step = Step()
        with pytest.raises(DeviceError, match="of at least 1"):
            next(gpu.capture_loop(step, step.token).run(limit, (), never, ahead))


def test_poll_reads_a_number_without_a_copy(gpu):
    token = torch.full((1,), 1 << 40, device="vgpu")
    with gpu.record() as trace:
        start = gpu.now_ns()
        assert gpu.poll(token.add_(7)) == (1 << 40) + 7
        taken_ns = gpu.now_ns() - start
    assert not trace.is_kind("sync", "h2d", "d2h", "d2d").any()
    kernels = trace.select(trace.is_kind("kernel"))
    assert list(kernels.text("name"))[1:] == ["publish_once"]
    assert taken_ns == (kernels["start_ns"] + kernels["dur_ns"])[1]


class Decode:
    """A decode step of a model: embeds the token, advances the cache, and chooses the next token."""

    def __init__(self, name, gpu, context, **options):
        self.model = tk.load(name, device=gpu, progress=False, **options)
        self.context = context
        self.token, self.position = (torch.zeros(1, dtype=torch.int64, device="vgpu") for _ in range(2))
        self.begin()
        self()

    def begin(self, kv=None, position=0):
        """Use a new cache."""
        self.cache = self.model.new_cache(self.context, *([] if kv is None else [kv]))
        self.token.fill_(7)
        self.position.fill_(position)

    def __call__(self):
        hidden = self.model.advance(self.model.embed(self.token.view(1, 1)), self.position, self.cache, self.context)
        self.token.copy_(self.model.logits(hidden).view(-1).argmax().view(1))
        self.position.add_(1)


class TestModel:
    """Captured steps of models."""

    @pytest.fixture(autouse=True)
    def no_grad(self):
        with torch.no_grad():
            yield

    @pytest.mark.parametrize(("name", "kv"), [
        ("demo/qwen3", None), ("demo/qwen3", "k4v8"), ("demo/gemma4", None), ("demo/qwen3.5-moe", None),
    ])  # fmt: skip
    def test_same_tokens_as_an_eager_run(self, gpu, name, kv):
        step = Decode(name, gpu, 64)
        step.begin(kv)
        expected = [7]
        for _ in range(12):
            step()
            expected.append(step.token.item())
        step.begin(kv)
        loop = gpu.capture_loop(step, step.token)
        with gpu.record(lines=False) as trace:
            assert [token for token, _ in loop.run(13, (), never)] == expected
        assert len(set(expected)) > 3
        assert not trace.is_kind("sync", "h2d", "d2h").any()

    @pytest.mark.parametrize("kv", [None, "k4v8"])
    def test_attention_takes_longer_at_later_positions(self, gpu, kv):
        step = Decode("random/qwen3-8b", gpu, 32768, scheme="q4_k_m")
        step.begin(kv)
        graph = gpu.capture(step)

        def attention_ns(position):
            step.position.fill_(position)
            with gpu.record(lines=False) as trace:
                graph.replay()
            of_attention = [name in ("attention", "attention_codes") for name in trace.text("name")]
            assert sum(of_attention) == 36
            return trace["dur_ns"][of_attention].mean()

        near, middle, far = (attention_ns(position) for position in (0, 16384, 32767))
        slot_bytes = 2 * 8 * 128 * 2 if kv is None else 8 * find_kv_scheme(kv).bytes_per_token(128) / CODES_SHARE[kv]
        rate = gpu.spec.reached_bandwidth_bytes_per_s
        assert far - near == pytest.approx(32767 * slot_bytes / rate * 1e9, rel=0.02)
        assert middle - near < 0.6 * (far - near)

    def test_sizes_only(self, gpu):
        step = Decode("random/qwen3-8b", gpu, 4096, scheme="q4_k_m")
        step.position.zero_()
        start = time.process_time()
        loop = gpu.capture_loop(step, step.token)
        times = [at for _, at in loop.run(4, (), never)]
        assert within(time.process_time() - start, 10)
        assert step.position.item() == 3
        assert 1e6 < times[2] - times[1] < 3e6  # an H200 replays this step in about 2 ms
