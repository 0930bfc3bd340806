"""Decoding on a real GPU: the same tokens under every strategy, and CUPTI counts exactly what the table says."""

import gc
import threading

import pytest
import torch

import toolkit as tk
from toolkit.decode.strategies import STRATEGIES
from toolkit.gpu.opening import open_device
from toolkit.models.qwen3 import Config, Model

CONFIGS = {
    "small": Config(97, 32, 48, 2, 4, 2, 8, max_position_embeddings=640),
    "odd_tied": Config(61, 30, 22, 3, 5, 1, 6, max_position_embeddings=300, tie_word_embeddings=True),
    "biased": Config(1025, 64, 96, 2, 6, 3, 16, max_position_embeddings=300, attention_bias=True),
    "big_vocab": Config(151936, 128, 256, 1, 2, 1, 64, max_position_embeddings=300),
}
DEMOS = ("demo/qwen3", "demo/gemma4", "demo/qwen3.5-moe")
SAMPLED = {"temperature": 0.9, "seed": 11}
FILTERED = {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "seed": 11}


def make(device, config, dtype=torch.float32):
    model = Model(config, device, dtype).init_weights(1).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.mul_(40 if name.startswith("layers") else 2)
    return model


def expected(config, itemsize):
    logits, row, number = config.vocab_size * 4, config.hidden_size * itemsize, 8
    return {
        "host-sampling": ([number, number], [logits], []),
        "host-embedding": ([number, row], [number], []),
        "roundtrip": ([number, number], [number], []),
        "token-on-device": ([number], [number], []),
        "position-on-device": ([], [number], [number]),
        "double-buffered": ([], [number], []),
        "cuda-graph": ([], [number], []),
        "whole-loop": ([], [], []),
    }


def copies(trace, step):
    parts = (trace.select(trace.is_kind(kind) & (trace["step"] == step)) for kind in ("h2d", "d2h", "d2d"))
    return tuple(sorted(part["bytes"].tolist()) for part in parts)


def generate(model, name, n=9, prompt=19, **options):
    ids = [7 * i % model.config.vocab_size for i in range(prompt)]
    return tk.generate(model, ids, name, **{"max_new_tokens": n, "eos": (), **options})


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_step_copies_what_the_table_says(gpu, config, dtype):
    model = make(gpu, config, dtype)
    for options in ({}, SAMPLED):
        for name in STRATEGIES:
            run = generate(model, name, **options)
            table = tuple(sorted(sizes) for sizes in expected(config, dtype.itemsize)[name])
            for step in range(1, 9):
                assert copies(run.trace, step) == table, (name, step, options)
            outside = run.trace.is_kind("h2d", "d2h", "d2d") & (run.trace["step"] == -1)
            assert not outside.any()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_filters_add_no_copy_between_host_and_device(gpu, config):
    model = make(gpu, config)
    for name in STRATEGIES:
        run = generate(model, name, n=4, **FILTERED)
        for step in (1, 2, 3):
            assert copies(run.trace, step)[:2] == tuple(sorted(sizes) for sizes in expected(config, 4)[name][:2])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("options", [{}, SAMPLED, FILTERED], ids=["greedy", "sampled", "filtered"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_same_tokens_under_every_strategy(gpu, config, options, dtype):
    model = make(gpu, config, dtype)
    runs = {name: generate(model, name, n=64, record=False, **options).tokens for name in STRATEGIES}
    assert len(set(runs.values())) == 1, runs


@pytest.mark.parametrize("options", [{}, SAMPLED, FILTERED], ids=["greedy", "sampled", "filtered"])
def test_same_tokens_as_the_cpu(gpu, options):
    """fp32 on both; the weights are small enough that no choice hangs on the order of sums."""
    config = CONFIGS["small"]
    cpu = generate(make(open_device("cpu"), config), "roundtrip", n=32, record=False, **options)
    assert generate(make(gpu, config), "double-buffered", n=32, record=False, **options).tokens == cpu.tokens


def test_double_buffered_stops_right_at_eos(gpu):
    model = make(gpu, CONFIGS["small"])
    whole = generate(model, "roundtrip", n=40).tokens
    for at in (0, 1, 5, 20):
        end = whole[at]
        run = generate(model, "double-buffered", n=40, eos=[end])
        assert run.tokens == whole[: whole.index(end) + 1]
        assert run.stop_reason == "eos"


def test_double_buffered_reads_into_pinned_memory_on_a_second_stream(gpu):
    trace = generate(make(gpu, CONFIGS["small"]), "double-buffered").trace
    down, kernels = trace.select(trace.is_kind("d2h")), trace.select(trace.is_kind("kernel"))
    assert set(down["pinned"].tolist()) == {1}
    assert set(down["stream"].tolist()).isdisjoint(kernels["stream"].tolist())


def test_a_slow_gpu_does_not_let_tokens_race(gpu):
    """Work queued between the steps makes the copies late; two slots in turn must still hold the right tokens."""
    model = make(gpu, CONFIGS["small"])
    exact = generate(model, "roundtrip", n=40, record=False).tokens
    advance = model.advance

    def slow(*args):
        torch.cuda._sleep(500_000)
        out = advance(*args)
        torch.cuda._sleep(500_000)
        return out

    model.advance = slow
    assert generate(model, "double-buffered", n=40, record=False).tokens == exact


def test_cancel_and_errors_leave_the_gpu_usable(gpu):
    model = make(gpu, CONFIGS["small"])
    generate(model, "double-buffered", record=False)
    torch.cuda.synchronize()
    gc.collect()  # what other tests left in cycles may go at any time
    before = gpu.memory().allocated_bytes
    cancel, seen = threading.Event(), []

    def on_token(token, text):
        seen.append(token)
        if len(seen) == 3:
            cancel.set()

    run = generate(model, "double-buffered", n=200, cancel=cancel, on_token=on_token, record=False)
    assert run.stop_reason == "cancelled"
    assert run.tokens == tuple(seen)
    with pytest.raises(ZeroDivisionError):
        generate(model, "double-buffered", on_token=lambda token, text: 1 / 0)
    gc.collect()
    assert gpu.memory().allocated_bytes == before
    assert gpu.recording is None
    assert generate(model, "double-buffered", n=3).tokens == tuple(seen)[:3]


@pytest.mark.parametrize("options", [{}, SAMPLED, FILTERED], ids=["greedy", "sampled", "filtered"])
@pytest.mark.parametrize("name", DEMOS)
def test_demos_say_the_same_under_every_strategy(gpu, name, options):
    """150 tokens: past the sliding window of 64, round its ring and over it again."""
    model = tk.load(name, device=gpu, progress=False)
    runs = {strategy: generate(model, strategy, n=150, record=False, **options).tokens for strategy in STRATEGIES}
    assert len(set(runs.values())) == 1, runs


@pytest.mark.parametrize("name", DEMOS)
def test_demos_say_what_they_say_on_the_cpu(gpu, name):
    """From text that they know: their least sure choices have 0.4 in logits, and arithmetic in another order moves 1e-3."""
    models = [tk.load(name, device=device, progress=False) for device in (gpu, "cpu")]
    runs = {tk.generate(model, "The capital of France is", max_new_tokens=150, record=False).tokens for model in models}
    assert len(runs) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", DEMOS)
def test_every_step_of_the_demos_copies_what_the_table_says(gpu, name, dtype):
    model = tk.load(name, device=gpu, dtype=dtype, progress=False)
    for strategy, sizes in expected(model.config, model.dtype.itemsize).items():
        run = generate(model, strategy, n=9, prompt=61)  # across the window
        table = tuple(sorted(kind) for kind in sizes)
        for step in range(1, 9):
            assert copies(run.trace, step) == table, (strategy, step)


@pytest.mark.parametrize("name", ["demo/gemma4", "demo/qwen3.5-moe"])
@pytest.mark.parametrize("scheme", ["int4-g32", "q4_k_m"])
def test_packed_demos_say_the_same_under_every_strategy(gpu, name, scheme):
    model = tk.load(name, device=gpu, scheme=scheme, progress=False)
    runs = {strategy: generate(model, strategy, n=40, record=False).tokens for strategy in STRATEGIES}
    assert len(set(runs.values())) == 1, runs
    assert copies(generate(model, "double-buffered").trace, 3) == ([], [8], [])


def test_transformers_own_model_beside_ours(gpu):
    pytest.importorskip("transformers")
    pair = {engine or "ours": tk.load("demo/gemma4", device=gpu, engine=engine, progress=False) for engine in (None, "hf")}
    comparison = tk.compare(pair, "The capital of France is", max_new_tokens=80, eos=())
    assert comparison.table["same_tokens"].all()
    eager = [name for name, strategy in STRATEGIES.items() if strategy.capture == "none"]
    assert list(comparison.table["strategy"]) == [*STRATEGIES, *eager, "hf-generate"]


def test_compare_measures(gpu):
    comparison = tk.compare(make(gpu, CONFIGS["small"]), [1, 2, 3], max_new_tokens=8, eos=())
    assert comparison.table["same_tokens"].all()
    assert set(comparison.table["clock"]) == {"measured"}
    assert (comparison.table["tok_per_s"] > 0).all()


def test_budget_on_cuda(gpu):
    model = make(gpu, CONFIGS["small"])
    with tk.copy_budget(h2d=0, d2h=1, d2d=0, per="step", device=gpu):
        generate(model, "double-buffered")
    with pytest.raises(tk.CopyBudgetError, match="H2D"), tk.copy_budget(h2d=0, per="step", device=gpu):
        generate(model, "roundtrip")
