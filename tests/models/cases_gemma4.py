"""Small Gemma 4 configs: different heads, windows and tied embeddings, and every variant alone and combined."""

from __future__ import annotations

import random
from typing import Any

from tests.models.parity import Case

BASE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "max_position_embeddings": 640, "sliding_window": 8,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 97, "final_logit_softcapping": 30.0,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
MOE = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 12}
K_EQ_V = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
PER_LAYER = {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 103}
SHARED = {
    "num_hidden_layers": 7,
    "num_kv_shared_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2 + ["full_attention"],
}


def _case(name: str, prompt: int = 19, chunk: int = 5, **values: Any) -> Case:
    return Case(name, "Gemma4ForCausalLM", "Gemma4TextConfig", BASE | values, prompt, chunk)


CASES = (
    _case("as_31b", **K_EQ_V, global_head_dim=64),  # a quarter of a head rotates: keys are stored in part
    _case("whole_keys", **K_EQ_V),  # the heads are too small for that
    _case("window_wider_than_all", sliding_window=300),
    _case("window_wider_than_prompt", sliding_window=32, chunk=19),
    _case("window_of_two", sliding_window=2, prompt=7, chunk=3),
    _case("odd_heads", num_attention_heads=15, num_key_value_heads=5, num_global_key_value_heads=3, attention_k_eq_v=True),
    _case("one_head", num_attention_heads=1, num_key_value_heads=1, head_dim=2, global_head_dim=6, hidden_size=7),
    _case("untied", tie_word_embeddings=False, final_logit_softcapping=None),
    _case("biased", attention_bias=True, rms_norm_eps=1e-3, chunk=19),
    _case("as_26b_a4b", **MOE, **K_EQ_V, global_head_dim=64),
    _case("one_expert", **(MOE | {"num_experts": 1, "top_k_experts": 1}), num_attention_heads=2),
    _case("many_experts", **(MOE | {"num_experts": 40, "top_k_experts": 7}), chunk=19),
    _case("per_layer_inputs", **PER_LAYER),
    _case("shared_kv", **SHARED, sliding_window=5, chunk=7),
    _case("as_e2b", **SHARED, **PER_LAYER, use_double_wide_mlp=True, num_key_value_heads=1, sliding_window=6),
    _case("all_variants", **SHARED, **PER_LAYER, **MOE, **K_EQ_V, tie_word_embeddings=False, chunk=1),
    _case(
        "ropes",
        rope_parameters={
            "sliding_attention": {
                "rope_type": "proportional",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.6,
                "factor": 2.0,
            },
            "full_attention": {"rope_type": "default", "rope_theta": 1e5},
        },
        hidden_activation="silu",
    ),
)

SLIDING, FULL = "sliding_attention", "full_attention"


def draw(seed: int) -> Case:
    """Return a random config: every field that changes the result varies, in combinations that transformers accepts.

    The weights have little noise, since much noise costs both implementations precision and only the config is tested here.
    """
    rng = random.Random(seed)
    layers, heads = rng.randint(1, 7), rng.choice([1, 2, 3, 5, 6, 7, 12, 15])
    kinds = [*(rng.choice([SLIDING, SLIDING, FULL]) for _ in range(layers - 1)), FULL]
    kv_heads = [n for n in range(1, heads + 1) if heads % n == 0]
    values = {
        "vocab_size": rng.randint(30, 130), "hidden_size": rng.randint(5, 40), "intermediate_size": rng.randint(3, 50),
        "num_hidden_layers": layers, "layer_types": kinds, "num_attention_heads": heads, "head_dim": 2 * rng.randint(1, 9),
        "num_key_value_heads": rng.choice(kv_heads), "sliding_window": rng.choice([2, 3, 5, 8, 13, 19, 20, 32, 100]),
        "hidden_size_per_layer_input": rng.choice([0, 0, 4, 5, 8]), "attention_k_eq_v": rng.random() < 0.5,
        "tie_word_embeddings": rng.random() < 0.6, "attention_bias": rng.random() < 0.2, "max_position_embeddings": 640,
        "final_logit_softcapping": rng.choice([None, 30.0, 1.5]), "rms_norm_eps": rng.choice([1e-6, 1e-5, 1e-2]),
        "hidden_activation": rng.choice(["gelu_pytorch_tanh", "gelu_pytorch_tanh", "gelu", "silu", "relu"]),
        "use_double_wide_mlp": rng.random() < 0.4, "use_bidirectional_attention": rng.choice([None, "vision"]),
    }  # fmt: skip
    values["vocab_size_per_layer_input"] = values["vocab_size"] + rng.choice([0, 7])
    values |= _draw_heads(rng, kinds, kv_heads)
    shareable = [n for n in range(1, layers) if set(kinds[layers - n :]) <= set(kinds[: layers - n])]
    if shareable and rng.random() < 0.5:
        values["num_kv_shared_layers"] = rng.choice(shareable)
    if rng.random() < 0.35:
        experts = rng.randint(1, 9)
        values |= {"enable_moe_block": True, "num_experts": experts, "top_k_experts": rng.randint(1, experts)}
        values["moe_intermediate_size"] = rng.randint(1, 20)
    if rng.random() < 0.5:
        values["rope_parameters"] = {SLIDING: _draw_rope(rng), FULL: _draw_rope(rng)}
    prompt = rng.randint(1, 40)
    return Case(
        f"random {seed}", "Gemma4ForCausalLM", "Gemma4TextConfig", values, prompt, rng.choice([1, 2, 3, 7, prompt]), 0.04
    )


def _draw_heads(rng: random.Random, kinds: list[str], kv_heads: list[int]) -> dict[str, Any]:
    """Return the head fields of full layers, in one of their two spellings, and sometimes those of sliding layers too."""
    own = {"head_dim": 2 * rng.randint(1, 12), "num_key_value_heads": rng.choice(kv_heads)}
    spelling = rng.choice(["global", "global", "full layers", "all layers", "none"])
    if spelling == "global":
        return {
            "global_head_dim": own["head_dim"],
            "num_global_key_value_heads": rng.choice([None, own["num_key_value_heads"]]),
        }
    wanted = (
        {FULL: own} if spelling == "full layers" else {SLIDING: {"head_dim": 6}, FULL: own} if spelling == "all layers" else {}
    )
    return {"per_layer_config": {i: dict(wanted[kind]) for i, kind in enumerate(kinds) if kind in wanted}}


def _draw_rope(rng: random.Random) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": rng.choice(["default", "proportional"]), "rope_theta": rng.choice([10.0, 1e4, 1e6])}
    return rope | ({"partial_rotary_factor": rng.choice([0.0, 0.1, 0.25, 0.7, 1.0])} if rope["rope_type"] != "default" else {})
