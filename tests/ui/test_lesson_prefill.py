"""What the lesson "Prefill and decode" says in words and numbers is what the app says."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

import toolkit as tk
from toolkit.ui.lessons.prefill_and_decode import (
    AT_ONCE,
    FEW,
    MEASURED,
    MEASURED_PROMPT,
    QUESTIONS,
    Layers,
    at_once,
    crossover,
    fed_in_parts,
    few,
    layers_of,
    least_of,
    limits,
    prefill_beside_decode,
    prompt_flops,
    roofs,
)

RESULTS = Path(tk.__file__).parent / "bench" / "results"


@pytest.fixture(scope="module")
def costs():
    return tk.costs("random/qwen3-8b", context=0)


def test_the_measured_rates_are_those_of_the_records() -> None:
    for name, (seconds, rate) in MEASURED.items():
        record = json.loads((RESULTS / f"h200_speed_{name}.json").read_text())
        (row,) = (row for row in record["rows"] if row["context"] == MEASURED_PROMPT)
        assert (record["gpu"], record["model"], record["scheme"]) == ("NVIDIA H200", f"random/{name}", "q4_k_m")
        assert (seconds, rate) == (row["prefill"]["seconds"], row["strategies"]["cuda-graph"]["tok_per_s"])
        about = tk.costs(f"random/{name}", context=MEASURED_PROMPT, scheme="q4_k_m")
        assert about.token_bytes == pytest.approx(row["bytes_per_token"], rel=0.01)


def test_the_figures_in_the_text(costs) -> None:
    cards = {name: tk.GPUS[name] for name in ("l4", "rtx-5090", "h200")}
    assert round(crossover(cards["rtx-5090"])) == 117
    assert (cards["h200"].bf16_flops, cards["h200"].bandwidth_bytes_per_s) == (989.4e12, 4.8e12)
    assert all(crossover(card) > 100 for card in cards.values())  # "less than a hundredth of their arithmetic"
    layers = layers_of(costs)
    assert layers.read_bytes == pytest.approx(13.9e9, rel=0.005)
    assert layers.flops == pytest.approx(13.9e9, rel=0.005)
    assert prompt_flops("random/qwen3-8b", MEASURED_PROMPT) == pytest.approx(16.3e9, rel=0.005)
    bits = 8 * tk.costs("random/qwen3-8b", context=0, scheme="q4_k_m").read_bytes / (costs.read_bytes / 2)
    assert bits == pytest.approx(5, abs=0.1)  # "about 5 bits on average"
    assert 16 / bits == pytest.approx(3, abs=0.3)  # "about three times as fast"


def test_both_cards_hold_the_model(costs) -> None:
    assert all(costs.bound(tk.GPUS[name]).fits for name in ("rtx-3090", "l4"))


def test_a_recorded_prefill_is_next_to_a_decode_step() -> None:
    trace = tk.open_trace("h200/qwen3/roundtrip")
    scene = prefill_beside_decode(trace).scene
    assert [track.title for track in scene.tracks] == ["prefill, 19 tokens", "decode step, 1 token"]
    assert [set(track.trace["step"].tolist()) for track in scene.tracks] == [{0}, {2}]
    low, high = scene.first_range(scene.opening["step"])
    assert low <= 0
    assert high >= max(track.end_ns - track.start_ns for track in scene.tracks)  # all of both is shown
    works_us = trace.select(trace.is_kind("kernel") & (trace["step"] == 2))["dur_ns"].sum() / 1e3
    assert works_us < 0.5 * 1e6 / trace.meta["tok_per_s"]  # "the host takes longer", also without a recording


def test_the_times_have_two_regimes() -> None:
    """Above the limit at every length, about level below the crossover, and proportional above it."""
    model = tk.load("random/qwen3-8b", device=tk.device("virtual:rtx-5090"), progress=False)
    table = at_once(model, {1: 10.8, 16: 11.7, 128: 13.8, 512: 48.5, 2048: 214.2})
    assert list(table.index) == list(AT_ONCE)
    layers, card = layers_of(tk.costs("random/qwen3-8b", context=0)), tk.GPUS["rtx-5090"]
    assert all(ms > 1e3 * least_of(layers, n, card) for n, ms in table["ms"].items())
    assert table["ms"][64] < 1.15 * table["ms"][1]
    assert table["ms"][512] == pytest.approx(2 * table["ms"][256], rel=0.1)
    assert [few(times) for times in (1.1, 4, 16)] == list(FEW)


def test_a_roof_is_a_slope_and_a_level(costs) -> None:
    for line in roofs(layers_of(costs), "l4", "h200").lines:
        card = tk.GPUS[line.name]
        assert line.x[1] == pytest.approx(crossover(card), rel=0.01)
        assert [*line.y[1:]] == pytest.approx([card.bf16_flops / 1e12] * 2)
        assert line.y[0] == pytest.approx(line.y[1] / line.x[1])
        assert all(a < b for a, b in pairwise(line.x))


def test_the_limit_is_checked_by_what_it_returns() -> None:
    layers = Layers(read_bytes=14 * 10**9, flops=14 * 10**9)
    assert all(limits(lambda tokens, card: least_of(layers, tokens, card), layers).values())
    reads_once = limits(lambda _, card: layers.read_bytes / card.bandwidth_bytes_per_s, layers)
    assert list(reads_once.values()) == [True, False, True, False]


def test_parts_of_a_prompt_are_checked_by_what_they_do() -> None:
    """The solution passes. At once takes too much memory, token by token too many kernels, and a lost part is wrong."""
    model = tk.load("demo/qwen3", device=tk.device("virtual:rtx-5090"), progress=False)
    names: dict = {}
    exec(QUESTIONS["in parts"].answer, names)
    feed = names["feed"]
    tries = (
        feed,
        lambda model, ids, cache, chunk: feed(model, ids, cache, ids.shape[1]),
        lambda model, ids, cache, chunk: feed(model, ids, cache, 1),
        lambda model, ids, cache, chunk: feed(model, ids[:, :-1], cache, chunk),
    )
    assert [list(fed_in_parts(each, model).values()) for each in tries] == [
        [True, True, True],
        [True, False, True],
        [True, True, False],
        [False, True, True],
    ]


def test_a_function_that_raises_an_error_gets_its_line_and_the_hint() -> None:
    """The last part is shorter, and many forget that."""
    model = tk.load("demo/qwen3", device=tk.device("virtual:rtx-5090"), progress=False)

    def feed(model, ids, cache, chunk):
        for start in range(0, ids.shape[1], chunk):
            stop = start + chunk
            hidden = model.advance(model.embed(ids[:, start:stop]), cache.slots[start:stop], cache, stop)
        return hidden[:, -1:]

    (said,) = fed_in_parts(feed, model)
    assert said.startswith("`feed` should run to its end, but it raised ModelError in its line 4: 96 tokens: the cache")
    allocated = model.device.memory().allocated_bytes
    fed_in_parts(feed, model)
    assert model.device.memory().allocated_bytes == allocated
    layers = Layers(read_bytes=14 * 10**9, flops=14 * 10**9)
    for wrong in (lambda tokens, card: None, None):
        ((said, met),) = limits(wrong, layers).items()
        assert "it raised TypeError" in said
        assert not met
