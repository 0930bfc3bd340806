"""The demo models as data: the shape of each, how long it is trained, and how its weights start.

A shape is the config.json it ships with, less what every demo has. Each fits into 4 MB as bf16, and wherever it can,
every row is a whole number of 256 weights, so that all quantised formats can hold it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

POSITIONS = 1024  # what every demo can attend to


@dataclass(frozen=True)
class Miniature:
    """How one demo model is made.

    `shape`: fields of its config.json. `steps` of about `rows_scale` * 4,000 tokens each. `start`: gives a parameter (by
    name) its first values where the usual ones (norms one, biases zero, the rest normal) would train badly.
    """

    architecture: str  # the class in transformers, as config.json names it
    shape: Mapping[str, Any]
    steps: int
    rows_scale: int = 1
    peak_rate: float = 2e-3
    start: Callable[[str, nn.Parameter], None] | None = None


def _start_gemma4(name: str, weight: nn.Parameter) -> None:
    """Attention's scale is 1, so normed heads of one would begin far too sure: their product starts at 1 / sqrt(head_dim)."""
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        weight.fill_(weight.shape[0] ** -0.25)


def _start_qwen3_5(name: str, weight: nn.Parameter) -> None:
    """Delta-net heads that forget at different speeds: after 2 to 500 tokens, evenly spread in the logarithm.

    What they forget by is learnt through `dt_bias` alone: `decay` must stay below 0.
    """
    if name.endswith("decay"):
        weight.fill_(-1.0).requires_grad_(False)
    if name.endswith("dt_bias"):
        tokens = torch.logspace(math.log10(2), math.log10(500), weight.shape[0], device=weight.device)
        weight.copy_(torch.log(torch.expm1(1 / tokens)))  # softplus of it is 1 / tokens


_ROTARY = {"rope_type": "default", "rope_theta": 10_000.0}

MINIATURES: dict[str, Miniature] = {
    "qwen3": Miniature(
        "Qwen3ForCausalLM",
        {
            "model_type": "qwen3",
            "dtype": "float32",
            "vocab_size": 768,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": POSITIONS,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "hidden_act": "silu",
            "rope_parameters": _ROTARY,
            "layer_types": ["full_attention"] * 3,
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
            "model_type": "qwen3_5_moe_text",
            "dtype": "float32",
            "vocab_size": 768,
            "hidden_size": 256,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "linear_conv_kernel_dim": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "max_position_embeddings": POSITIONS,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
            "tie_word_embeddings": True,
            "attention_bias": False,
            "hidden_act": "silu",
        },
        steps=2376,
        rows_scale=3,
        start=_start_qwen3_5,
    ),
}
