"""The demo models as data: their shapes, training lengths and initial weights.

A shape has the fields of the model's config.json, except those that all demo models share. Each model takes less than 4 MB in
bf16. As far as possible, rows have a multiple of 256 weights, so that all quantization formats can store them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

POSITIONS = 1024  # context length of every demo model


@dataclass(frozen=True)
class Miniature:
    """The recipe of one demo model.

    `shape` has fields of its config.json. It is trained for `steps` of about `rows_scale` * 4,000 tokens each. `start` sets the
    initial values of parameters, by name, for which the usual ones (norms 1, biases 0, others normal) would train badly.
    """

    architecture: str  # name of the class in transformers, as in config.json
    shape: Mapping[str, Any]
    steps: int
    rows_scale: int = 1
    peak_rate: float = 2e-3
    start: Callable[[str, nn.Parameter], None] | None = None


def _start_gemma4(name: str, weight: nn.Parameter) -> None:
    """Scale the query and key norms, because Gemma's attention scale is 1: logits then start at 1 / sqrt(head_dim)."""
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        weight.fill_(weight.shape[0] ** -0.25)


def _start_qwen3_5(name: str, weight: nn.Parameter) -> None:
    """Let delta-net heads forget at different speeds: after 2 to 500 tokens, spaced evenly on a logarithmic scale.

    Only `dt_bias` is trained; `decay` is fixed, because it must stay below 0.
    """
    if name.endswith("decay"):
        weight.fill_(-1.0).requires_grad_(False)
    if name.endswith("dt_bias"):
        tokens = torch.logspace(math.log10(2), math.log10(500), weight.shape[0], device=weight.device)
        weight.copy_(torch.log(torch.expm1(1 / tokens)))  # the softplus of this is 1 / tokens


_ROTARY = {"rope_type": "default", "rope_theta": 10_000.0}

MINIATURES: dict[str, Miniature] = {
    "qwen3": Miniature(
        "Qwen3ForCausalLM",
        {
            "model_type": "qwen3", "dtype": "float32", "vocab_size": 768, "hidden_size": 256, "intermediate_size": 512,
            "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
            "max_position_embeddings": POSITIONS, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": True,
            "attention_bias": False, "hidden_act": "silu", "rope_parameters": _ROTARY, "layer_types": ["full_attention"] * 3,
            "use_sliding_window": False,
        },
        steps=1400,  # the weights that ship are of 700, on rows drawn in another order
    ),
    "gemma4": Miniature(
        "Gemma4ForCausalLM",
        {
            "model_type": "gemma4_text",
            "dtype": "float32",
            "vocab_size": 768,
            "hidden_size": 256,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "num_global_key_value_heads": 1,
            "global_head_dim": 128,
            "attention_k_eq_v": True,
            "sliding_window": 64,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "rope_parameters": {
                "sliding_attention": _ROTARY,
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
            },
            "max_position_embeddings": POSITIONS,
            "rms_norm_eps": 1e-6,
            "final_logit_softcapping": 30.0,
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "attention_bias": False,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 768,
            "num_kv_shared_layers": 0,
            "enable_moe_block": False,
            "use_double_wide_mlp": False,
            "bos_token_id": None,
        },
        steps=3351,
        rows_scale=3,
        start=_start_gemma4,
    ),
    "qwen3.5-moe": Miniature(
        "Qwen3_5MoeForCausalLM",
        {
            "model_type": "qwen3_5_moe_text", "dtype": "float32", "vocab_size": 768, "hidden_size": 256, "num_hidden_layers": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"], "num_attention_heads": 4, "num_key_value_heads": 1,
            "head_dim": 64, "linear_conv_kernel_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 8,
            "linear_key_head_dim": 32, "linear_value_head_dim": 32, "num_experts": 6, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "max_position_embeddings": POSITIONS,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
            "tie_word_embeddings": True, "attention_bias": False, "hidden_act": "silu",
        },
        steps=2376,
        rows_scale=3,
        start=_start_qwen3_5,
    ),
}  # fmt: skip
