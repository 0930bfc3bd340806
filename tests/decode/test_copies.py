"""The copies per decode step on the virtual GPU equal the table of the strategies, for any sizes."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from small_models import ODD, SMALL, make

import toolkit as tk
from toolkit.decode.compare import decode_steps
from toolkit.decode.prefix import Prefix
from toolkit.decode.strategies import STRATEGIES, Strategy

DEVICE = "virtual:h200"


def expected(config, itemsize=4) -> dict[str, dict[str, list[int]]]:
    """Return the bytes of each copy of one decode step, by strategy and direction, as the table of strategies states them."""
    logits, row, number = config.vocab_size * 4, config.hidden_size * itemsize, 8
    return {
        "host-sampling": {"h2d": [number, number], "d2h": [logits], "d2d": []},
        "host-embedding": {"h2d": [number, row], "d2h": [number], "d2d": []},
        "roundtrip": {"h2d": [number, number], "d2h": [number], "d2d": []},
        "token-on-device": {"h2d": [number], "d2h": [number], "d2d": []},
        "position-on-device": {"h2d": [], "d2h": [number], "d2d": [number]},
        "double-buffered": {"h2d": [], "d2h": [number], "d2d": []},
        "cuda-graph": {"h2d": [], "d2h": [number], "d2d": []},
        "whole-loop": {"h2d": [], "d2h": [], "d2d": []},
    }


@pytest.fixture(scope="module", params=[SMALL, ODD], ids=["small", "odd_tied"])
def model(request):
    yield make(tk.device(DEVICE), request.param)
    gc.collect()


def copies(trace, step, kind):
    events = trace.select(trace.is_kind(kind) & (trace["step"] == step))
    return sorted(events["bytes"].tolist())


def check_steps(run, config, itemsize=4):
    steps = [mark.step for mark in run.trace.marks() if mark.name == "decode"]
    for step in steps:
        for kind, sizes in expected(config, itemsize)[run.strategy].items():
            assert copies(run.trace, step, kind) == sorted(sizes), (run.strategy, step, kind)
    return steps


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(("prompt", "n", "chunk"), [(1, 2, 512), (19, 9, 512), (19, 5, 4), (33, 7, 32)], ids=str)
def test_every_decode_step_copies_what_the_table_says(model, name, prompt, n, chunk):
    run = tk.generate(model, [5] * prompt, name, max_new_tokens=n, prefill_chunk=chunk, eos=())
    assert check_steps(run, model.config) == list(range(1, n))
    assert len(decode_steps(run.trace)) == n - 1
    assert run.clock == "modelled"


@pytest.mark.parametrize("name", STRATEGIES)
def test_past_a_bound_of_the_cache(name):
    model = make(tk.device(DEVICE), ODD)
    run = tk.generate(model, [5] * 254, name, max_new_tokens=6, eos=())
    assert check_steps(run, ODD) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_drawn_token_copies_no_more_than_a_greedy_one(model, name):
    run = tk.generate(model, [5] * 7, name, max_new_tokens=4, eos=(), temperature=0.8, seed=3)
    assert check_steps(run, model.config) == [1, 2, 3]


@pytest.mark.parametrize("name", STRATEGIES)
def test_filters_add_no_copies(model, name):
    run = tk.generate(model, [5] * 7, name, max_new_tokens=4, eos=(), temperature=0.8, seed=3, top_k=9, top_p=0.9)
    assert check_steps(run, model.config) == [1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype):
    model = make(tk.device(DEVICE), dtype=dtype)
    for name in STRATEGIES:
        check_steps(tk.generate(model, [5] * 7, name, max_new_tokens=4, eos=()), SMALL, itemsize=2)


@pytest.mark.parametrize("name", STRATEGIES)
def test_prefill_uploads_once_and_moves_nothing_within(model, name):
    ids = list(range(19))
    run = tk.generate(model, ids, name, max_new_tokens=9, prefill_chunk=8, eos=())
    c = model.config
    up = {"host-embedding": [19 * c.hidden_size * 4], "position-on-device": [8 * 8, 19 * 8]}.get(name, [19 * 8])
    down = {"host-sampling": [c.vocab_size * 4], "host-embedding": [8, c.vocab_size * c.hidden_size * 4]}
    down |= {late: [] for late in ("double-buffered", "cuda-graph", "whole-loop")}
    assert copies(run.trace, 0, "h2d") == up
    assert copies(run.trace, 0, "d2h") == down.get(name, [8])
    assert copies(run.trace, 0, "d2d") == []
    outside = run.trace.select(run.trace.is_kind("h2d", "d2h", "d2d") & (run.trace["step"] == -1))
    assert len(outside) == 0


def test_double_buffered_copies_beside_the_step_into_pinned_memory(model):
    run = tk.generate(model, [5] * 19, "double-buffered", max_new_tokens=9, eos=())
    trace = run.trace
    down = trace.select(trace.is_kind("d2h"))
    kernels = trace.select(trace.is_kind("kernel"))
    assert set(down["pinned"].tolist()) == {1}
    assert set(down["stream"].tolist()).isdisjoint(kernels["stream"].tolist())
    for step in range(1, 9):
        (copied_ns,) = (down["start_ns"] + down["dur_ns"])[down["step"] == step].tolist()
        assert copied_ns < kernels["start_ns"][kernels["step"] == step].max(), (
            "the copy ended before the step's last kernel began"
        )


def test_at_eos_one_step_overshoots(model):
    whole = tk.generate(model, [5] * 19, "double-buffered", max_new_tokens=20, eos=())
    end = whole.tokens[3]
    first = whole.tokens.index(end)
    run = tk.generate(model, [5] * 19, "double-buffered", max_new_tokens=20, eos=[end])
    assert run.tokens == whole.tokens[: first + 1]
    assert check_steps(run, model.config) == list(range(1, first + 2)), "the token at EOS was known one step later"
    exact = tk.generate(model, [5] * 19, "roundtrip", max_new_tokens=20, eos=[end])
    assert check_steps(exact, model.config) == list(range(1, first + 1))


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "seed": 8}], ids=["greedy", "drawn"])
def test_same_tokens_as_the_cpu(model, options):
    cpu = make(tk.device("cpu"), model.config)
    expected = tk.generate(cpu, list(range(19)), "roundtrip", max_new_tokens=16, eos=(), **options).tokens
    for name in STRATEGIES:
        assert tk.generate(model, list(range(19)), name, max_new_tokens=16, eos=(), **options).tokens == expected, name


def test_ones_own_strategy(model):
    mine = Strategy("mine", "device", "array", "device", "overlap", "token D2H overlapped, position D2D")
    run = tk.generate(model, [5] * 7, mine, max_new_tokens=4, eos=())
    for step in (1, 2, 3):
        assert [copies(run.trace, step, kind) for kind in ("h2d", "d2h", "d2d")] == [[], [8], [8]]


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_default_device_of_the_process_changes_nothing(model, name):
    ids, options = [5] * 9, {"max_new_tokens": 6, "eos": (), "repetition_penalty": 1.2, "logit_bias": {3: 1.5}}
    usual = tk.generate(model, ids, name, **options)
    with torch.device("vgpu"):
        run = tk.generate(model, ids, name, **options)
        prefix = Prefix(model, ids[:5], 20)
        rest = tk.generate(model, ids, name, prefix=prefix, **options)
        prefix.free()
    assert run.tokens == rest.tokens == usual.tokens
    assert run.copies().equals(usual.copies())
    assert check_steps(rest, model.config)


def test_memory_is_given_back(model):
    gc.collect()
    before = model.device.memory().allocated_bytes
    run = tk.generate(model, [5] * 19, max_new_tokens=5)
    assert model.device.memory().allocated_bytes == before
    assert model.device.memory().peak_bytes > before
    assert run.tokens


def test_events_name_their_lines(model):
    run = tk.generate(model, [5] * 7, "roundtrip", max_new_tokens=4, eos=())
    trace = run.trace
    where = trace.select(trace.is_kind("h2d", "d2h")).text("where")
    assert all(line is not None and "decode/parts.py" in line for line in where)
    bare = tk.generate(model, [5] * 7, "roundtrip", max_new_tokens=4, eos=(), lines=False)
    assert set(bare.trace.text("where")) == {None}


OUT_OF_MEMORY = """
import gc, torch, toolkit as tk
from small_models import SMALL, make
device = tk.device("virtual:16MiB")
model = make(device, SMALL)
gc.collect()
before = device.memory().allocated_bytes
try:
    tk.generate(model, [1] * 600, max_new_tokens=4, prefill_chunk=600)
except torch.OutOfMemoryError as error:
    kept = error  # and its traceback, as a notebook would
else:
    raise SystemExit("600 x 600 scores of 4 heads fit in 16 MiB?")
gc.collect()
left = device.memory().allocated_bytes - before
assert left < 1 << 19, f"{left} B are still held"
assert device.recording is None
assert len(tk.generate(model, [1] * 6, max_new_tokens=4, eos=()).tokens) == 4
"""


def test_out_of_memory_leaves_the_card_usable():
    """Runs in a process of its own, because a process has one virtual card, and this one is small."""
    done = subprocess.run([sys.executable, "-c", OUT_OF_MEMORY], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_in_threads_and_inside_a_callback(model):
    exact = tk.generate(model, [5] * 9, max_new_tokens=6, eos=()).tokens
    found: dict[object, tuple[int, ...]] = {}

    def work(name):
        found[name] = tk.generate(model, [5] * 9, name, max_new_tokens=6, eos=(), record=False).tokens

    threads = [threading.Thread(target=work, args=(name,)) for name in STRATEGIES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    def on_token(token, text):
        found.setdefault("inside", tk.generate(model, [5] * 9, "roundtrip", max_new_tokens=6, eos=()).tokens)

    found["around"] = tk.generate(model, [5] * 9, max_new_tokens=6, eos=(), on_token=on_token).tokens
    assert set(found) == {*STRATEGIES, "inside", "around"}
    assert set(found.values()) == {exact}


def test_the_demo_model_says_the_same_everywhere():
    demo = {device: tk.load("demo/qwen3", device=tk.device(device), progress=False) for device in ("cpu", DEVICE)}
    for options in ({}, {"temperature": 1.2, "top_k": 50, "top_p": 0.98, "seed": 4}):
        runs = {
            (device, name): tk.generate(model, "The capital of France is", name, max_new_tokens=24, record=False, **options)
            for device, model in demo.items()
            for name in (STRATEGIES if device == DEVICE else ["roundtrip"])
        }
        assert len({run.tokens for run in runs.values()}) == 1
        if not options:
            assert all(run.text.startswith(" Paris") for run in runs.values())
