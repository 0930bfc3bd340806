"""Strategies that capture graphs: the same tokens and copies as without, other combinations, stop strings, errors midway."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace

import pytest
import torch
from small_models import SMALL, ByteTokenizer, make

import toolkit as tk
from toolkit.core.errors import DeviceError, ModelError
from toolkit.decode.compare import SHORT, decode_steps
from toolkit.decode.loop import AHEAD
from toolkit.decode.strategies import STRATEGIES
from toolkit.text.prompts import StopText

PROMPT = [5 * i % 97 for i in range(19)]
EAGER = [name for name, strategy in STRATEGIES.items() if strategy.capture == "none"]
CAPTURED = [name for name in STRATEGIES if name not in EAGER]
OPTIONS = {
    "greedy": {},
    "drawn": {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "min_p": 0.01, "seed": 5},
    "penalty and bias": {"repetition_penalty": 1.3, "logit_bias": {3: 2.5, 7: float("-inf")}},
}


@pytest.fixture(scope="module")
def model():
    yield make(tk.device("virtual:h200"))
    gc.collect()


def generate(model, strategy, n=12, **options):
    return tk.generate(model, PROMPT, strategy, **{"max_new_tokens": n, "eos": (), **options})


def copies(run):
    table = decode_steps(run.trace)
    return table[[column for column in table if column.endswith(("_count", "_bytes"))]].to_numpy().tolist()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", EAGER)
def test_capture_can_be_switched_alone(model, name, options):
    """A captured step makes the same copies, runs the same kernels, and gives the same tokens."""
    eager, captured = (generate(model, replace(STRATEGIES[name], capture=capture), **options) for capture in ("none", "step"))
    assert captured.tokens == eager.tokens
    assert copies(captured) == copies(eager)
    assert list(decode_steps(captured.trace)["kernels"]) == list(decode_steps(eager.trace)["kernels"])
    assert captured.tok_per_s > 1.5 * eager.tok_per_s


@pytest.mark.parametrize("name", ["double-buffered", "cuda-graph", "whole-loop"])
def test_kernels_have_their_layer_and_the_line_of_the_model(model, name):
    trace = generate(model, name).trace
    kernels = trace.select(trace.is_kind("kernel") & (trace["step"] == 5))
    layers, lines = kernels["layer"].tolist(), kernels.text("where")
    inside = [(layer, line) for layer, line in zip(layers, lines, strict=True) if layer >= 0]
    assert [layer for layer, _ in inside] == sorted(layer for layer, _ in inside)
    assert {layer for layer, _ in inside} == set(range(model.config.num_hidden_layers))
    assert {line.rpartition("/")[0] for _, line in inside} == {"toolkit/models"}
    assert len({line for _, line in inside}) > 4, "the lines tell attention and MLP apart"
    assert layers[0] == layers[-1] == -1, "embedding and sampling belong to no layer"
    without = generate(model, name, lines=False).trace
    assert set(without["layer"].tolist()) == {-1}


def test_kernels_of_experts_have_the_line_of_the_model():
    model = tk.load("demo/qwen3.5-moe", device="virtual:h200", progress=False)
    trace = generate(model, "double-buffered", n=2).trace
    lines = trace.select(trace.is_kind("kernel") & (trace["layer"] >= 0)).text("where")
    assert {line.rpartition("/")[0] for line in lines} == {"toolkit/models"}


@pytest.mark.parametrize("name", ["host-sampling", "roundtrip", "double-buffered"])
def test_rates_contain_no_capture(model, name):
    captured = replace(STRATEGIES[name], capture="step")
    few, many = (generate(model, captured, n=n, record=False).tok_per_s for n in (5, 40))
    assert few == pytest.approx(many, rel=0.02)


@pytest.mark.parametrize("name", CAPTURED)
def test_nothing_is_captured_before_the_first_token(model, name, monkeypatch):
    order = []
    for method in ("capture", "capture_loop"):
        real = getattr(model.device, method)
        noted = lambda *work, real=real, method=method: [order.append(method), real(*work)][1]  # noqa: E731
        monkeypatch.setattr(model.device, method, noted)
    first = generate(model, name, on_token=lambda token, text: order.append(token), n=4).tokens[0]
    assert order[0] == first
    assert not {"capture", "capture_loop"}.isdisjoint(order)
    for n, ends in ((1, ()), (2, ()), (12, [first])):
        order.clear()
        generate(model, name, n=n, eos=ends, on_token=lambda token, text: order.append(token))
        assert order == list(generate(model, "roundtrip", n=n, eos=ends).tokens)


def test_the_loop_begins_after_one_step(model):
    trace = generate(model, "whole-loop", n=6).trace
    marks = [(mark.step, mark.name) for mark in trace.marks()]
    assert marks == [(0, "prefill"), *((step, "decode") for step in range(1, 6))]
    kernels = trace.select(trace.is_kind("kernel"))
    names = {step: [n for n, at in zip(kernels.text("name"), kernels["step"], strict=True) if at == step] for step in range(6)}
    assert names[0][-1] == "publish_once"
    assert names[2] == names[5] == [*names[1], "publish_token"]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_strategy_samples_the_same(model, options):
    assert len({generate(model, name, n=40, record=False, **options).tokens for name in STRATEGIES}) == 1


def test_options_of_sampling_have_an_effect(model):
    greedy, biased = (set(generate(model, "whole-loop", 40, **OPTIONS[name]).tokens) for name in ("greedy", "penalty and bias"))
    assert biased != greedy
    assert 7 not in biased


@pytest.mark.parametrize("name", CAPTURED)
def test_memory_is_given_back(model, name):
    gc.collect()
    before = model.device.memory().allocated_bytes
    assert generate(model, name).tokens
    assert model.device.memory().allocated_bytes == before
    with pytest.raises(ZeroDivisionError):
        generate(model, name, on_token=lambda token, text: 1 / 0)
    gc.collect()
    assert model.device.memory().allocated_bytes == before


@pytest.mark.parametrize("name", CAPTURED)
def test_one_token(model, name):
    run = generate(model, name, n=1)
    assert run.tokens == generate(model, "roundtrip", n=1).tokens
    assert [mark.name for mark in run.trace.marks()][:1] == ["prefill"]


def test_several_generations_at_once(model):
    exact, found = generate(model, "roundtrip", n=30).tokens, {}
    threads = [
        threading.Thread(
            target=lambda name=name, i=i: found.update({(name, i): generate(model, name, n=30, record=False).tokens})
        )
        for name in CAPTURED
        for i in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert set(found.values()) == {exact}


def test_a_model_that_reads_from_the_device_cannot_be_captured(model, monkeypatch):
    advance = model.advance
    monkeypatch.setattr(model, "advance", lambda x, *rest: advance(x, *rest) * float(x.abs().sum().item() >= 0))
    gc.collect()
    before = model.device.memory().allocated_bytes
    for name in CAPTURED:
        with pytest.raises(DeviceError, match=r"Tensor.item\(\) waits for the device"):
            generate(model, name)
    gc.collect()
    assert model.device.memory().allocated_bytes == before
    assert model.device.recording is None
    assert generate(model, "roundtrip").tokens


@pytest.mark.parametrize("name", CAPTURED)
def test_fallback_goes_on_without_graphs_and_says_so(model, name, monkeypatch):
    expected = generate(model, "roundtrip").tokens
    assert generate(model, name, fallback=True).fallback is None
    advance = model.advance
    monkeypatch.setattr(model, "advance", lambda x, *rest: advance(x, *rest) * float(x.abs().sum().item() >= 0))
    run = generate(model, name, fallback=True)
    assert run.tokens == expected
    assert "Tensor.item() waits for the device" in run.fallback
    assert "without graphs" in repr(run)
    cpu = generate(make(tk.device("cpu")), name, fallback=True)
    assert cpu.tokens == expected
    assert cpu.fallback == f"decoding with {name!r}: cpu has no graphs", "without advice that was followed"


def test_comparisons_say_which_runs_had_no_graphs(tmp_path):
    model = make(tk.device("cpu"))
    compared = tk.compare(model, PROMPT, ["roundtrip", "cuda-graph"], max_new_tokens=3, fallback=True)
    reason = "decoding with 'cuda-graph': cpu has no graphs"
    first, _, *rows, short = repr(compared).splitlines()
    assert first == f"cuda-graph without graphs: {reason}."
    assert short == SHORT
    assert SHORT in compared._repr_html_()
    assert SHORT not in repr(tk.compare(model, PROMPT, ["roundtrip", "cuda-graph"], max_new_tokens=9, fallback=True))
    assert rows[-1].split("  ")[0].strip() == "cuda-graph without graphs"
    assert list(compared.runs) == list(compared.table["strategy"]) == ["roundtrip", "cuda-graph"]
    run = compared.runs["cuda-graph"]
    pages = [compared.to_html(tmp_path / "all.html"), run.to_html(tmp_path / "one.html")]
    assert all("cuda-graph without graphs" in page.read_text() for page in pages)
    assert "cuda-graph without graphs" in repr(run.timeline())
    opened = tk.open_trace(run.save(tmp_path / "a.trace"))
    assert "cuda-graph without graphs" in repr(opened.timeline())


@pytest.mark.parametrize("name", CAPTURED)
def test_out_of_memory_midway(model, name):
    gc.collect()
    torch.vgpu.empty_cache()
    before = model.device.memory()
    enough = []
    for spare_mib in (0, 2, 4, 32):
        model.device.limit(before.reserved_bytes + (spare_mib << 20))
        try:
            enough.append(bool(generate(model, name, record=False).tokens))
        except torch.OutOfMemoryError:
            enough.append(False)
        finally:
            model.device.limit(None)
        gc.collect()
        assert model.device.memory().allocated_bytes == before.allocated_bytes
    assert (enough[0], enough[-1]) == (False, True)
    assert generate(model, name).tokens == generate(model, "roundtrip").tokens


@pytest.fixture(scope="module")
def speaking():
    model = make(tk.device("virtual:h200"), SMALL)
    model.tokenizer = ByteTokenizer()
    return model


def stopped(model, name, stop, n=40, **options):
    return tk.generate(model, PROMPT, name, max_new_tokens=n, eos=(), stop=stop, **options)


@pytest.fixture(scope="module")
def whole(speaking):
    """The run of 40 tokens without stop strings."""
    return stopped(speaking, "roundtrip", ())


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("at", [0, 1, 9, 30])
def test_the_text_ends_before_the_first(speaking, whole, name, at):
    stops = [whole.text[at + 3 : at + 6], whole.text[at : at + 2]]
    end = min(whole.text.index(stop) for stop in stops)
    seen: list[str] = []
    run = stopped(speaking, name, stops, on_token=lambda token, text: seen.append(text))
    assert run.text == "".join(seen) == whole.text[:end]
    assert run.stop_reason == "stop"
    assert len(run.tokens) == end + 2 or len(run.tokens) == end + 3


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_stop_that_never_comes_changes_nothing(speaking, whole, name):
    almost = whole.text[-2:] + "!!"  # the text ends with its beginning
    seen: list[str] = []
    run = stopped(speaking, name, almost, on_token=lambda token, text: seen.append(text))
    assert (run.text, run.tokens, run.stop_reason) == (whole.text, whole.tokens, "length")
    assert "".join(seen) == whole.text


def test_few_tokens_are_computed_in_vain(speaking):
    whole = stopped(speaking, "roundtrip", (), n=200, record=False)
    for name, most in (("roundtrip", 0), ("cuda-graph", 1), ("whole-loop", AHEAD)):
        run = stopped(speaking, name, whole.text[8:11], n=200)
        assert len(decode_steps(run.trace)) <= len(run.tokens) - 1 + most, name


@pytest.mark.parametrize("stop", ["", ["a", ""], 5, [None]], ids=repr)
def test_what_is_no_string_is_refused(speaking, stop):
    with pytest.raises(ModelError, match="strings that end the text"):
        stopped(speaking, "roundtrip", stop)


def test_stop_strings_need_a_tokenizer(model):
    with pytest.raises(ModelError, match="tokenizer"):
        stopped(model, "roundtrip", "x")


def test_stop_text_holds_back_only_what_may_be_a_stop():
    text = StopText(["abcd", "bx"])
    assert [text.add(piece) for piece in ("1a", "b", "c", "e", "ab", "x7")] == ["1", "", "", "abce", "", "a"]
    assert text.found
