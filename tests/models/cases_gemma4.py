"""Small Gemma 4 configs that differ in what matters: heads, windows, ties, and each variant by itself and together."""

from __future__ import annotations

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
    _case("as_31b", **K_EQ_V),
    _case("window_wider_than_all", sliding_window=300),
    _case("window_wider_than_prompt", sliding_window=32, chunk=19),
    _case("window_of_two", sliding_window=2, prompt=7, chunk=3),
    _case("odd_heads", num_attention_heads=15, num_key_value_heads=5, num_global_key_value_heads=3, attention_k_eq_v=True),
    _case("one_head", num_attention_heads=1, num_key_value_heads=1, head_dim=2, global_head_dim=6, hidden_size=7),
    _case("untied", tie_word_embeddings=False, final_logit_softcapping=None),
    _case("biased", attention_bias=True, rms_norm_eps=1e-3, chunk=19),
    _case("as_26b_a4b", **MOE, **K_EQ_V),
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
