"""Tests of guessing the steps of a recording without step markers, and of marking them as guessed."""

import pytest
import torch

import toolkit as tk
from toolkit.trace.assemble import with_guessed_steps
from toolkit.trace.events import TraceBuilder


def decode_loop(steps_from=None):
    """Three steps of two kernels and one D2H copy each, after a prefill of four kernels; the host waits for each copy."""
    builder, now = TraceBuilder(), 0
    for name in ("embed", "up", "down", "sample"):
        builder.add("kernel", now, 5, name=name, stream=0)
        now += 10
    for _ in range(6):
        builder.add("alloc", now - 1, bytes=512)
        for name in ("layer", "sample"):
            builder.add("kernel", now, 5, name=name, stream=0)
            now += 10
        builder.add("sync", now - 2, 8)
        builder.add("d2h", now, 5, bytes=8, name="copy", stream=0)
        now += 10
    return builder.build({"steps_from": steps_from})


def test_a_recording_without_steps_gets_them_guessed_waits_included():
    trace = with_guessed_steps(decode_loop())
    assert trace.meta["steps_from"] == "guessed"
    assert repr(trace) == "Trace(unknown device: 16 kernel, 6 d2h, 6 sync, 6 alloc; steps are guessed)"
    table = trace.copies().set_index("step")
    assert table.index.tolist() == [0, 1, 2, 3, 4, 5]
    assert table["d2h_count"].tolist() == [1] * 6
    assert table["kernels"].tolist() == [6, 2, 2, 2, 2, 2]
    assert (table["host_wait_us"] == 0.008).all()


@pytest.mark.parametrize("ahead", [5, 45])
def test_a_launch_is_in_the_step_of_the_event_that_it_started(ahead):
    """Also if the host runs ahead of the GPU by more than a step, of 30 ns here."""
    builder = TraceBuilder()
    for n in range(18):
        builder.add("launch", 10 * n - ahead, 2, name="launch", stream=0, device=-1)
        kind = "d2h" if n % 3 == 2 else "kernel"
        builder.add(kind, 10 * n, 5, bytes=8 * (kind == "d2h"), name=f"{n % 3}", stream=0)
    table = with_guessed_steps(builder.build({"steps_from": None})).copies()
    assert table["step"].tolist() == list(range(6))
    assert table["kernels"].tolist() == [2] * 6
    assert table["launches"].tolist() == [3] * 6


def test_a_launch_of_a_graph_is_in_its_step():
    builder = TraceBuilder()
    for n in range(6):
        builder.add("launch", 100 * n, 5, name="cudaGraphLaunch", stream=0, device=-1)
        for i in range(2):
            builder.add("kernel", 100 * n + 10 + 10 * i, 5, name=f"{i}", stream=0)
        builder.add("d2h", 100 * n + 40, 5, bytes=8, name="copy", stream=0)
    table = with_guessed_steps(builder.build({"steps_from": None})).copies()
    assert table["launches"].tolist() == [1] * 6


def test_steps_that_are_known_stay_and_no_pattern_is_no_step():
    known = decode_loop(steps_from="marks")
    assert with_guessed_steps(known) is known
    assert "guessed" not in repr(known)
    builder = TraceBuilder()
    for i, name in enumerate("abcdefg"):
        builder.add("kernel", i, 1, name=name)
    lone = builder.build({"steps_from": None})
    assert with_guessed_steps(lone) is lone
    empty = TraceBuilder().build({})
    assert with_guessed_steps(empty) is empty


@pytest.mark.parametrize("new", [4, 16])
@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
def test_step_0_of_an_unmodified_generate_is_the_prefill(new, options):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, eos_token_id=2
        )
    )
    gpu, ids = tk.device("virtual:h200"), torch.tensor([[1, 5, 3]])
    with tk.record(gpu) as trace:  # the model reads back while it sets up, and with a dynamic cache twice in a step
        model.to(gpu.torch).generate(
            ids.to(gpu.torch), max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0, **options
        )
    table = trace.copies()
    assert table["step"].tolist() == list(range(new))
    assert table["kernels"].idxmax() == 0
    assert table["kernels"][1:].max() - table["kernels"][1:].min() <= 1
    assert table["d2h_count"][1:].nunique() == 1
    assert repr(trace).endswith("; steps are guessed)")
