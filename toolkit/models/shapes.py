"""The configs of public models for `random/NAME`: the fields of their config.json that determine sizes.

`source` is the address at which the config is published. The values were checked against public copies; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Shape:
    """The config of a model, as in its config.json, and the address where it is published."""

    config: Mapping[str, Any]
    source: str


def _shape(repository: str, **config: Any) -> Shape:
    return Shape(MappingProxyType(config), f"https://huggingface.co/{repository}/blob/main/config.json")


def _qwen3(size: str, hidden: int, width: int, layers: int, heads: int, tied: bool) -> Shape:
    return _shape(
        f"Qwen/Qwen3-{size}", model_type="qwen3", vocab_size=151936, hidden_size=hidden, intermediate_size=width,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=8, head_dim=128, rope_theta=1_000_000,
        rms_norm_eps=1e-6, max_position_embeddings=40960, tie_word_embeddings=tied, eos_token_id=151645,
    )  # fmt: skip


def _qwen3_moe(size: str, hidden: int, width: int, expert: int, layers: int, heads: int) -> Shape:
    return _shape(
        f"Qwen/Qwen3-{size}", model_type="qwen3_moe", vocab_size=151936, hidden_size=hidden, intermediate_size=width,
        moe_intermediate_size=expert, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=[], num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=4, head_dim=128,
        rope_theta=1_000_000, rms_norm_eps=1e-6, max_position_embeddings=40960, tie_word_embeddings=False,
        eos_token_id=151645,
    )  # fmt: skip


def _qwen3_5(size: str, kind: str, hidden: int, layers: int, heads: int, kv_heads: int, value_heads: int, **mlp: int) -> Shape:
    return _shape(
        f"Qwen/Qwen3.5-{size}", model_type=kind, vocab_size=248320, hidden_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=256, full_attention_interval=4,
        linear_num_key_heads=16, linear_num_value_heads=value_heads, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_conv_kernel_dim=4, rms_norm_eps=1e-6, max_position_embeddings=262144, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
        eos_token_id=248044, **mlp,
    )  # fmt: skip


def _gemma4(size: str, hidden: int, width: int, layers: int, every: int, heads: int, kv_heads: int, **more: Any) -> Shape:
    """Return a Gemma 4 shape. Every `every`-th layer, counted from one, attends globally; the others have a sliding window."""
    return _shape(
        f"google/gemma-4-{size}", model_type="gemma4_text", vocab_size=262144, hidden_size=hidden, intermediate_size=width,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=256, global_head_dim=512,
        layer_types=["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
        },
        rms_norm_eps=1e-6, final_logit_softcapping=30.0, tie_word_embeddings=True, hidden_activation="gelu_pytorch_tanh",
        eos_token_id=1, **more,
    )  # fmt: skip


_LARGE = {
    "sliding_window": 1024, "attention_k_eq_v": True, "max_position_embeddings": 262144, "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
}  # fmt: skip
_SMALL = {
    "sliding_window": 512, "attention_k_eq_v": False, "max_position_embeddings": 131072, "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
}  # fmt: skip

SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "gemma4-31b": _gemma4("31B", 5376, 21504, 60, 6, 32, 16, num_global_key_value_heads=4, **_LARGE),
        "gemma4-26b-a4b": _gemma4(
            "26B-A4B", 2816, 2112, 30, 6, 16, 8, num_global_key_value_heads=2, enable_moe_block=True, num_experts=128,
            top_k_experts=8, moe_intermediate_size=704, **_LARGE,
        ),
        "gemma4-e4b": _gemma4("E4B", 2560, 10240, 42, 6, 8, 2, num_kv_shared_layers=18, use_double_wide_mlp=False, **_SMALL),
        "gemma4-e2b": _gemma4("E2B", 1536, 6144, 35, 5, 8, 1, num_kv_shared_layers=20, use_double_wide_mlp=True, **_SMALL),
        "qwen3-0.6b": _qwen3("0.6B", 1024, 3072, 28, 16, True),
        "qwen3-1.7b": _qwen3("1.7B", 2048, 6144, 28, 16, True),
        "qwen3-4b": _qwen3("4B", 2560, 9728, 36, 32, True),
        "qwen3-8b": _qwen3("8B", 4096, 12288, 36, 32, False),
        "qwen3-14b": _qwen3("14B", 5120, 17408, 40, 40, False),
        "qwen3-32b": _qwen3("32B", 5120, 25600, 64, 64, False),
        "qwen3-30b-a3b": _qwen3_moe("30B-A3B", 2048, 6144, 768, 48, 32),
        "qwen3-235b-a22b": _qwen3_moe("235B-A22B", 4096, 12288, 1536, 94, 64),
        "qwen3.5-27b": _qwen3_5("27B", "qwen3_5_text", 5120, 64, 24, 4, 48, intermediate_size=17408),
        "qwen3.5-35b-a3b": _qwen3_5(
            "35B-A3B", "qwen3_5_moe_text", 2048, 40, 16, 2, 32, num_experts=256, num_experts_per_tok=8,
            moe_intermediate_size=512, shared_expert_intermediate_size=512,
        ),
        "qwen3.5-122b-a10b": _qwen3_5(
            "122B-A10B", "qwen3_5_moe_text", 3072, 48, 32, 2, 64, num_experts=256, num_experts_per_tok=8,
            moe_intermediate_size=1024, shared_expert_intermediate_size=1024,
        ),
        "qwen3.5-397b-a17b": _qwen3_5(
            "397B-A17B", "qwen3_5_moe_text", 4096, 60, 32, 2, 64, num_experts=512, num_experts_per_tok=10,
            moe_intermediate_size=1024, shared_expert_intermediate_size=1024,
        ),
    }
)  # fmt: skip
