"""Tests of quantization recipes: llama.cpp's Q4_K_M tensor by tensor, and the weights that stay unquantized."""

from __future__ import annotations

import pytest

from toolkit.core.errors import UnknownNameError
from toolkit.weights.recipes import RECIPES, recipe
from toolkit.weights.schemes import SCHEMES


def wide_layers(layers: int) -> set[int]:
    """Return the layers in which Q4_K_M uses six bits: the first eighth, the last eighth, every third layer between."""
    first, last = layers // 8, 7 * layers // 8
    return {*range(first), *range(last, layers), *range(first + 2, last, 3)}


# (name without the layer, shape, scheme in ordinary layers, scheme in layers with more bits)
LAYER = {
    "gemma4": [
        ("attention.qkv.q", (8192, 5376), "q4_k", "q4_k"),
        ("attention.qkv.k", (4096, 5376), "q4_k", "q4_k"),
        ("attention.qkv.v", (4096, 5376), "q4_k", "q6_k"),
        ("attention.o", (5376, 8192), "q4_k", "q4_k"),
        ("mlp.gate_up.gate", (21504, 5376), "q4_k", "q4_k"),
        ("mlp.gate_up.up", (21504, 5376), "q4_k", "q4_k"),
        ("mlp.down", (5376, 21504), "q4_k", "q6_k"),
    ],
    "qwen3.5": [
        ("delta.inputs.qkv", (8192, 2048), "q4_k", "q4_k"),
        ("delta.inputs.beta", (32, 2048), "q4_k", "q4_k"),
        ("delta.out", (2048, 4096), "q4_k", "q4_k"),
        ("mlp.experts.gate_up.gate", (256, 512, 2048), "q4_k", "q4_k"),
        ("mlp.experts.down", (256, 2048, 512), "q4_k", "q6_k"),
        ("mlp.shared.down", (2048, 512), "q4_k", "q6_k"),
        ("mlp.gates.router", (256, 2048), None, None),
        ("mlp.gates.shared", (1, 2048), None, None),
        ("attention.q_norm", (256,), None, None),
    ],
}


@pytest.mark.parametrize("family", LAYER)
@pytest.mark.parametrize("layers", [60, 40, 36, 8, 2, 1])
def test_q4_k_m_is_the_mix_of_llama_cpp(family: str, layers: int) -> None:
    mix = recipe("q4_k_m")
    for layer in range(layers):
        for name, shape, narrow, wide in LAYER[family]:
            found = mix.scheme_for(f"layers.{layer}.{name}.weight", shape, layers)
            assert (found and found.name) == (wide if layer in wide_layers(layers) else narrow), (layer, name)


@pytest.mark.parametrize(
    ("name", "tied", "scheme"),
    [("embed.weight", True, "q6_k"), ("embed.weight", False, "q4_k"), ("head.weight", False, "q6_k")],
    ids=["tied embedding", "embedding", "head"],
)
def test_q4_k_m_holds_the_head_in_six_bits(name: str, tied: bool, scheme: str) -> None:
    assert recipe("q4_k_m").scheme_for(name, (151936, 4096), 36, tied) is SCHEMES[scheme]


def test_bytes_of_a_whole_gemma4_31b() -> None:
    """Q4_K_M of Gemma-4 31B: each kind holds as many weights as in the published file, counted from its tensor list."""
    mix, layers = recipe("q4_k_m"), 60
    weights = {"q4_k": 0, "q6_k": 262144 * 5376}
    found = dict.fromkeys(weights, 0)
    for i in range(layers):
        full = i % 6 == 5
        head_dim, kv = (512, 4) if full else (256, 16)
        shapes = {
            "attention.qkv.q": (32 * head_dim, 5376), "attention.qkv.k": (kv * head_dim, 5376),
            "attention.o": (5376, 32 * head_dim), "mlp.gate_up.gate": (21504, 5376),
            "mlp.gate_up.up": (21504, 5376), "mlp.down": (5376, 21504),
        } | ({} if full else {"attention.qkv.v": (kv * head_dim, 5376)})  # fmt: skip
        for name, shape in shapes.items():
            scheme = mix.scheme_for(f"layers.{i}.{name}.weight", shape, layers, tied=True)
            assert scheme is not None
            found[scheme.name] += shape[0] * shape[1]
            six = name in ("attention.qkv.v", "mlp.down") and i in wide_layers(layers)
            weights["q6_k" if six else "q4_k"] += shape[0] * shape[1]
    table = mix.scheme_for("embed.weight", (262144, 5376), layers, tied=True)
    assert table is SCHEMES["q6_k"]
    found["q6_k"] += 262144 * 5376
    assert found == weights
    assert sum(weights.values()) == 30_696_013_824


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(
    ("weight", "shape"),
    [
        ("norm.weight", (256,)), ("layers.0.attention.q_norm.weight", (256,)), ("layers.0.attention.qkv.q.bias", (256,)),
        ("layers.0.delta.conv", (512, 4)), ("layers.0.delta.decay", (32,)), ("layers.0.scale", (1,)),
        ("layers.0.mlp.router.proj.weight", (8, 256)), ("layers.0.mlp.gates.shared.weight", (1, 256)),
        ("layers.0.mlp.down.weight", (256, 40)),
    ],
    ids=["norm", "head norm", "bias", "conv", "decay", "layer scalar", "router", "single row", "row of 40"],
)  # fmt: skip
def test_what_stays_plain(name: str, weight: str, shape: tuple[int, ...]) -> None:
    assert recipe(name).scheme_for(weight, shape, 1) is None


@pytest.mark.parametrize(
    ("name", "weight", "columns", "scheme"),
    [
        ("q4_k_m", "layers.0.mlp.down.weight", 768, "q6_k"),
        ("q4_k_m", "layers.0.mlp.down.weight", 96, "int8-g32"),
        ("q4_k_m", "layers.0.attention.o.weight", 96, "q5_0"),
        ("int4-g128", "layers.0.attention.o.weight", 192, "int4-g64"),
        ("int4-g128", "layers.0.attention.o.weight", 96, "int4-g32"),
        ("int8-g128", "layers.0.attention.o.weight", 192, "int8-g32"),
        ("int4", "layers.0.attention.o.weight", 96, "int4-g32"),
        ("int4", "head.weight", 96, "int8-g32"),
        ("int4-g32", "head.weight", 96, "int4-g32"),
    ],
)
def test_scheme_by_row(name: str, weight: str, columns: int, scheme: str | None) -> None:
    found = recipe(name).scheme_for(weight, (64, columns), 1)
    assert (found and found.name) == scheme


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="q4_k_m"):
        recipe("q4_km")
