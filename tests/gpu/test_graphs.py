"""Captured steps and whole generations on a real GPU: equal results, copies counted by CUPTI, and errors midway."""

import gc
import threading
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

import toolkit as tk
from tests.gpu.test_decode import CONFIGS, DEMOS, FILTERED, SAMPLED, generate, make
from toolkit.core.errors import DeviceError
from toolkit.decode.compare import decode_steps, steady_steps
from toolkit.decode.strategies import STRATEGIES
from toolkit.gpu.cuda.graphs import bindings, checked
from toolkit.kernels.base import Launch

CAPTURED = [name for name, strategy in STRATEGIES.items() if strategy.capture != "none"]
EAGER = [name for name in STRATEGIES if name not in CAPTURED]


def held_bytes(gpu):
    """Return the bytes that are allocated, and those that stay reserved once cached memory is freed."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    memory = gpu.memory()
    return memory.allocated_bytes, memory.reserved_bytes


def counts(run):
    table = decode_steps(run.trace)
    return table[["h2d_count", "d2h_count", "d2d_count"]].to_numpy().tolist()


@pytest.mark.parametrize("options", [{}, SAMPLED, FILTERED], ids=["greedy", "sampled", "filtered"])
@pytest.mark.parametrize("name", DEMOS)
def test_512_tokens_under_every_strategy(gpu, name, options):
    model = tk.load(name, device=gpu, dtype="bfloat16", progress=False)
    runs = {strategy: generate(model, strategy, n=512, record=False, **options).tokens for strategy in STRATEGIES}
    assert len(set(runs.values())) == 1, runs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", DEMOS)
@torch.no_grad()
def test_logits_of_a_graph_equal_eager_ones_to_the_bit(gpu, name, dtype):
    model = tk.load(name, device=gpu, dtype=dtype, progress=False)
    found = []
    for captured in (False, True):
        cache, position = model.new_cache(64), torch.full((1,), 4, device=gpu.torch)
        token, out = torch.full((1, 1), 5, device=gpu.torch), torch.empty(model.config.vocab_size, device=gpu.torch)

        def step(cache=cache, position=position, token=token, out=out):
            hidden = model.advance(model.embed(token), position.add_(1), cache, 64)
            out.copy_(model.logits(hidden).view(-1))

        step()
        graph = gpu.capture(step) if captured else None
        for _ in range(8):
            step() if graph is None else graph.replay()
        found.append((out.clone(), position.item()))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] == 13


@pytest.mark.parametrize("name", DEMOS)
def test_copies_of_128_steps(gpu, name):
    model = tk.load(name, device=gpu, progress=False)
    for strategy, expected in (("cuda-graph", [0, 1, 0]), ("double-buffered", [0, 1, 0]), ("whole-loop", [0, 0, 0])):
        run = generate(model, strategy, n=129, prompt=19)
        assert counts(run) == [expected] * 128, strategy
        kernels = decode_steps(run.trace)["kernels"].tolist()
        if strategy != "whole-loop":  # CUPTI doesn't report what repeats inside a graph
            assert min(kernels) > 10
            assert len(set(kernels[2:])) == 1  # captures in step 2 fill numbers of PyTorch's random generator


@pytest.mark.parametrize("name", EAGER)
def test_capture_can_be_switched_alone(gpu, name):
    model = make(gpu, CONFIGS["small"])
    eager, captured = (generate(model, replace(STRATEGIES[name], capture=capture), n=24) for capture in ("none", "step"))
    assert captured.tokens == eager.tokens
    assert counts(captured) == counts(eager)


def test_nodes_of_a_step(gpu):
    """Neither copies nor host nodes are in the body of a loop."""
    model = tk.load("demo/qwen3", device=gpu, progress=False)
    token, position = (torch.zeros(1, dtype=torch.int64, device=gpu.torch) for _ in range(2))
    with torch.no_grad():
        cache = model.new_cache(64)

        def step():
            logits = model.logits(model.advance(model.embed(token.view(1, 1)), position.add_(1), cache, 64))
            torch.argmax(logits.view(-1), -1, keepdim=True, out=token)

        step()
        loop = gpu.capture_loop(step, token)
    runtime = bindings("runtime")
    nodes, count = checked(runtime.cudaGraphGetNodes(runtime.cudaGraph_t(loop._body.raw_cuda_graph()), 4096))
    types = Counter(checked(runtime.cudaGraphNodeGetType(node)).name for node in nodes[:count])
    assert set(types) == {"cudaGraphNodeTypeKernel"}
    assert loop.nodes == count + 1
    assert len(list(loop.run(20, (), lambda: False))) == 20
    loop.free()


def test_kernels_of_a_replay_have_the_lines_and_layers_that_captured_them(gpu):
    model = tk.load("demo/qwen3", device=gpu, progress=False)
    lines, layers = {}, {}
    for strategy in ("double-buffered", "cuda-graph", "whole-loop"):
        trace = generate(model, strategy, n=8).trace
        kernels = trace.select(trace.is_kind("kernel") & (trace["step"] == 5))
        kernels = kernels.select([name != "publish_token" for name in kernels.text("name")])
        lines[strategy], layers[strategy] = kernels.text("where"), kernels["layer"].tolist()
    assert lines["cuda-graph"] == lines["double-buffered"]
    assert lines["whole-loop"] in ([], lines["double-buffered"])  # CUPTI may report the first iteration only
    assert layers["cuda-graph"] == layers["double-buffered"]
    assert layers["whole-loop"] in ([], layers["double-buffered"])
    assert [*dict.fromkeys(layers["cuda-graph"])] == [-1, *range(model.config.num_hidden_layers)]
    assert {line.rpartition("/")[0] for line in lines["cuda-graph"]} == {"toolkit/models", "toolkit/decode"}


def test_poll_reads_a_number_without_a_copy(gpu):
    token = torch.full((1,), 1 << 40, device=gpu.torch)
    gpu.poll(token)  # compiles the kernel
    with gpu.record() as trace:
        assert gpu.poll(token.add_(7)) == (1 << 40) + 7
        torch.cuda.synchronize()
    assert not trace.is_kind("h2d", "d2h", "d2d").any()
    assert list(trace.select(trace.is_kind("kernel")).text("name"))[-1] == "publish_once"
    assert (trace.is_kind("sync")).sum() <= 1  # the one of this test


def test_steps_of_a_loop_are_marked(gpu):
    model = tk.load("demo/qwen3", device=gpu, progress=False)
    trace = generate(model, "whole-loop", n=40).trace
    marks = {mark.step: mark for mark in trace.marks() if mark.name == "decode"}
    assert list(marks) == list(range(1, 40))
    looped = trace.select(trace.is_kind("kernel") & (trace["step"] == 2))
    assert len(looped) > 10
    ends = looped["start_ns"] + looped["dur_ns"]
    assert marks[2].start_ns - 10_000 < looped["start_ns"].min() < ends.max() < marks[2].start_ns + marks[2].dur_ns + 10_000
    assert steady_steps(trace)["launches"].max() == 0


@pytest.mark.parametrize("name", CAPTURED)
def test_a_capture_that_fails_leaves_the_gpu_usable(gpu, name, monkeypatch):
    model = make(gpu, CONFIGS["small"])
    expected = generate(model, name, record=False).tokens
    advance = model.advance
    before = held_bytes(gpu)
    with monkeypatch.context() as patch:
        patch.setattr(model, "advance", lambda x, *rest: advance(x, *rest) * float(x.abs().sum().item() >= 0))
        for _ in range(2):
            with pytest.raises(DeviceError, match="captur"):
                generate(model, name, record=False)
    assert held_bytes(gpu) == before
    assert generate(model, name, record=False).tokens == expected


@pytest.mark.parametrize("name", CAPTURED)
def test_out_of_memory_in_a_capture(gpu, name, monkeypatch):
    model = make(gpu, CONFIGS["small"])
    expected = generate(model, name, record=False).tokens
    advance = model.advance

    def greedy(x, positions, *rest):
        if torch.cuda.is_current_stream_capturing():
            torch.empty(1 << 50, dtype=torch.uint8, device=x.device)
        return advance(x, positions, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(model, "advance", greedy)
        with pytest.raises(torch.OutOfMemoryError):
            generate(model, name, record=False)
    assert generate(model, name, record=False).tokens == expected


def test_threads_share_a_model(gpu):
    model = tk.load("demo/qwen3", device=gpu, progress=False)
    expected, found = generate(model, "roundtrip", n=100, record=False).tokens, []

    def work(name):
        found.append(generate(model, name, n=100, record=False).tokens)

    threads = [threading.Thread(target=partial(work, name)) for name in CAPTURED * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4


@pytest.mark.parametrize("name", CAPTURED)
def test_cancel_interrupt_and_a_generation_in_a_callback(gpu, name):
    model = make(gpu, CONFIGS["small"])
    whole = generate(model, "roundtrip", n=200, record=False).tokens
    cancel, seen = threading.Event(), []

    def on_token(token, text):
        seen.append(token)
        if len(seen) == 5:
            cancel.set()

    run = generate(model, name, n=200, cancel=cancel, on_token=on_token, record=False)
    assert run.stop_reason == "cancelled"
    assert run.tokens == whole[: len(run.tokens)]
    assert 5 <= len(run.tokens) <= 7

    def interrupt(token, text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model, name, n=200, on_token=interrupt, record=False)
    inner = []
    run = generate(
        model, name, n=3, on_token=lambda *_: inner.append(generate(model, name, n=9, record=False).tokens), record=False
    )
    assert run.tokens == whole[:3]
    assert set(inner) == {whole[:9]}


def test_memory_is_given_back(gpu):
    model = tk.load("demo/qwen3.5-moe", device=gpu, progress=False)
    for name in CAPTURED:
        generate(model, name, record=False)
    before = held_bytes(gpu)
    for name in CAPTURED * 3:
        generate(model, name, n=300, record=False)
    assert held_bytes(gpu) == before


def test_launches_prefer_the_share_of_shared_memory_that_they_name(gpu):
    kernels = pytest.importorskip("tests.gpu.triton_kernel", reason="Triton isn't installed")
    driver = bindings("driver")
    share = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    x = torch.zeros(8, device=gpu.torch)
    for n, wanted in enumerate((-1, 50, 0, -1), 1):
        compiled = Launch(kernels.add_one, (1,), {"x": x, "n": 8}, {"BLOCK": 8}, carveout=wanted).run()
        assert checked(driver.cuFuncGetAttribute(share, driver.CUfunction(int(compiled.function)))) == wanted
        assert x.tolist() == [n] * 8
