"""Small Qwen3 configs, dense and with experts: different heads, windows, rotary embeddings and numbers of experts."""

from __future__ import annotations

from typing import Any

from tests.models.parity import Case

BASE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 640,
}  # fmt: skip
MOE = BASE | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 160}
WINDOW = {"use_sliding_window": True, "sliding_window": 8}
FULL, SLIDING = "full_attention", "sliding_attention"


def _dense(name: str, prompt: int = 19, chunk: int = 5, **values: Any) -> Case:
    return Case(f"dense_{name}", "Qwen3ForCausalLM", "Qwen3Config", BASE | values, prompt, chunk)


def _moe(name: str, prompt: int = 19, chunk: int = 5, **values: Any) -> Case:
    return Case(f"moe_{name}", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", MOE | values, prompt, chunk)


CASES = (
    _dense("usual"),
    _dense("tied", tie_word_embeddings=True, chunk=1),
    _dense("one_head", num_attention_heads=1, num_key_value_heads=1, head_dim=2),
    _dense("multi_query", num_attention_heads=5, num_key_value_heads=1, head_dim=6),
    _dense("no_gqa", num_attention_heads=3, num_key_value_heads=3, head_dim=10, chunk=19),
    _dense("odd_sizes", vocab_size=61, hidden_size=37, intermediate_size=51, num_attention_heads=10),
    _dense("biased", attention_bias=True, tie_word_embeddings=True),
    _dense("theta_eps", rms_norm_eps=1e-3, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    _dense("linear_rope", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 3.5}),
    _dense("yarn", rope_parameters=YARN),
    _dense(
        "yarn_stated", rope_parameters=YARN | {"attention_factor": 1.25, "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False}
    ),
    _dense("yarn_mscale", rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 1.1}),
    _dense("windows_at_the_end", **WINDOW, max_window_layers=1),
    _dense("windows_by_layer", **WINDOW | {"sliding_window": 3}, layer_types=[SLIDING, FULL, SLIDING], chunk=7),
    _dense("window_wider_than_all", **WINDOW | {"sliding_window": 300}, max_window_layers=0),
    _moe("usual"),
    _moe("shares_as_they_are", norm_topk_prob=False, tie_word_embeddings=True),
    _moe("one_expert", num_experts=1, num_experts_per_tok=1),
    _moe("all_chosen", num_experts=4, num_experts_per_tok=4, chunk=19),
    _moe("many_experts", num_experts=40, num_experts_per_tok=7),
    _moe("every_other_layer", decoder_sparse_step=2, num_hidden_layers=5, mlp_only_layers=[3]),
    _moe("no_expert", num_experts=0, num_experts_per_tok=1),
    _moe("odd_heads", num_attention_heads=15, num_key_value_heads=5, head_dim=6, attention_bias=True, chunk=1),
    _moe("windows", **WINDOW, prompt=30, chunk=11),
)
