"""What the lesson "What a token costs" says in words and numbers is what the app says."""

from __future__ import annotations

from pathlib import Path

import pytest

import toolkit as tk
from toolkit.bench.published import LLAMA_CPP
from toolkit.models.shapes import SHAPES
from toolkit.ui.lessons.what_a_token_costs import MEASURED, lesson
from toolkit.weights.schemes import SCHEMES


def test_the_measured_rates_are_those_of_the_reports() -> None:
    assert {f"random/{name}": rate for name, rate in MEASURED.items()} == {name: at[64] for name, at in LLAMA_CPP.items()}
    costs = {name: tk.costs(f"random/{name}", context=0, scheme="q4_k_m") for name in MEASURED}
    shares = {name: MEASURED[name] / one.bound(tk.GPUS["h200"]).reached_tok_per_s for name, one in costs.items()}
    assert 0.27 < shares["qwen3-8b"] < 0.4  # "about a third of the limit with the large models"
    assert 0.27 < shares["gemma4-31b"] < 0.4
    assert shares["qwen3.5-35b-a3b"] < 0.15  # "much less with the sparse one"
    assert costs["qwen3-8b"].read_bytes == pytest.approx(4.67e9, rel=0.005)


def test_the_figures_of_the_cards() -> None:
    card = tk.GPUS["rtx-5090"]
    assert (card.bandwidth_bytes_per_s, card.bf16_flops) == (1.792e12, 209.5e12)
    h200 = tk.GPUS["h200"]
    assert h200.reached_bandwidth_bytes_per_s == pytest.approx(4.22e12, rel=0.005)
    assert h200.reached_bandwidth_bytes_per_s / h200.bandwidth_bytes_per_s == pytest.approx(0.88, abs=0.005)


def test_the_text_has_the_bits_and_bytes_of_the_schemes() -> None:
    text = (Path(__file__).parents[2] / "notebooks" / "02_what_a_token_costs.ipynb").read_text(encoding="utf-8")
    low, high = (f"{SCHEMES[name].bits_per_weight:.1f}" for name in ("q4_k", "q6_k"))
    assert f"most matrices take {low} bits per weight" in text
    assert f"the most important ones take {high}." in text
    assert f"between {low} and {high}," in lesson.questions["bits"].hint
    weights = tk.costs("random/qwen3-8b", context=0, scheme="q4_k_m").read_bytes
    assert f"`q4_k_m`: {weights / 2**30:.2f} GiB" in text
    assert f"{weights / 2**30:.2f} * 2**30" in lesson.questions["context"].answer


def test_the_figures_of_the_models() -> None:
    qwen, gemma, sparse = (SHAPES[name].config for name in ("qwen3-8b", "gemma4-31b", "qwen3.5-35b-a3b"))
    names = ("num_hidden_layers", "num_key_value_heads", "head_dim", "max_position_embeddings")
    assert [qwen[name] for name in names] == [36, 8, 128, 40_960]
    assert (gemma["sliding_window"], sparse["num_experts"], sparse["num_experts_per_tok"]) == (1024, 256, 8)
    assert sum(kind == "sliding_attention" for kind in gemma["layer_types"]) * 6 == len(gemma["layer_types"]) * 5
    assert sparse["full_attention_interval"] == 4
