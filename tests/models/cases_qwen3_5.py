"""Small Qwen3.5 configs: different kinds of layers, delta net heads, experts and rotary embeddings."""

from __future__ import annotations

from typing import Any

from tests.models.parity import Case

BASE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 640, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 6, "linear_value_head_dim": 10,
}  # fmt: skip
DENSE = BASE | {"intermediate_size": 40}
MOE = BASE | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
FULL, LINEAR = "full_attention", "linear_attention"


def _dense(name: str, prompt: int = 19, chunk: int = 5, **values: Any) -> Case:
    return Case(f"dense_{name}", "Qwen3_5ForCausalLM", "Qwen3_5TextConfig", DENSE | values, prompt, chunk)


def _moe(name: str, prompt: int = 19, chunk: int = 5, **values: Any) -> Case:
    return Case(f"moe_{name}", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", MOE | values, prompt, chunk)


CASES = (
    _dense("usual"),
    _dense("tied", tie_word_embeddings=True, chunk=1),
    _dense("no_linear_layer", layer_types=[FULL] * 3, num_hidden_layers=3),
    _dense("three_values_a_key", linear_num_key_heads=3, linear_num_value_heads=9, chunk=19),
    _dense("one_value_a_key", linear_num_key_heads=3, linear_num_value_heads=3, linear_key_head_dim=1),
    _dense("long_prompt", prompt=150, chunk=66),
    _dense("prompt_of_one", prompt=1),
    _dense("biased", attention_bias=True, rms_norm_eps=1e-3, num_attention_heads=15, num_key_value_heads=5),
    _dense("yarn", rope_parameters=YARN | {"partial_rotary_factor": 0.5}, num_hidden_layers=2, full_attention_interval=2),
    _moe("usual"),
    _moe("one_expert", num_experts=1, num_experts_per_tok=1),
    _moe("all_chosen", num_experts=4, num_experts_per_tok=4, chunk=19),
    _moe("many_experts", num_experts=40, num_experts_per_tok=7, tie_word_embeddings=True),
    _moe("four_values_a_key", linear_num_key_heads=1, linear_num_value_heads=4, linear_key_head_dim=16, prompt=70, chunk=64),
    _moe("conv_of_seven", linear_conv_kernel_dim=7, prompt=5, chunk=3),
    _moe("conv_of_one", linear_conv_kernel_dim=1, chunk=2),
    _moe("one_head", num_attention_heads=1, num_key_value_heads=1, head_dim=2, partial_rotary_factor=1.0, hidden_size=4),
    _moe("whole_heads_turn", rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0}),
    _moe("linear_rope", rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}, full_attention_interval=2),
)
