"""Data of published checkpoints, from public copies and listings of them.

They are config.json (without the fields that only vision and audio use), tensor names, and metadata of converted GGUF files.
"""

from __future__ import annotations

from typing import Any

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


def _gemma4(every: int, **text: Any) -> dict[str, Any]:
    layers = text["num_hidden_layers"]
    shared = {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2, "dtype": "bfloat16", "eos_token_id": 1,
        "expert_intermediate_size": None, "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "initializer_range": 0.02, "model_type": "gemma4_text", "pad_token_id": 0,
        "layer_types": [FULL if (i + 1) % every == 0 else SLIDING for i in range(layers)], "rms_norm_eps": 1e-06,
        "rope_parameters": {
            FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "tie_word_embeddings": True, "use_cache": True, "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
    }  # fmt: skip
    return {
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "dtype": "bfloat16",
        "eos_token_id": [1, 106], "boi_token_id": 255999, "image_token_id": 258880, "tie_word_embeddings": True,
        "transformers_version": "5.5.0.dev0", "text_config": shared | text, "vision_soft_tokens_per_image": 280,
        "vision_config": {"model_type": "gemma4_vision", "hidden_size": 1152, "num_hidden_layers": 27},
    }  # fmt: skip


_LARGE = {
    "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "max_position_embeddings": 262144, "num_kv_shared_layers": 0,
    "sliding_window": 1024, "use_bidirectional_attention": "vision", "use_double_wide_mlp": False,
}  # fmt: skip
_SMALL = {
    "attention_k_eq_v": False, "enable_moe_block": False, "hidden_size_per_layer_input": 256, "max_position_embeddings": 131072,
    "moe_intermediate_size": None, "num_attention_heads": 8, "num_experts": None, "num_global_key_value_heads": None,
    "sliding_window": 512, "top_k_experts": None, "use_bidirectional_attention": None,
}  # fmt: skip
_QWEN3 = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128,
    "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 40960, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
_QWEN3_MOE = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": [],
    "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8, "num_key_value_heads": 4,
    "output_router_logits": False, "router_aux_loss_coef": 0.001, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN3_30B = _QWEN3_MOE | {
    "hidden_size": 2048, "intermediate_size": 6144, "max_window_layers": 48, "moe_intermediate_size": 768,
    "num_attention_heads": 32, "num_hidden_layers": 48,
}  # fmt: skip


def _qwen3_5(kind: str, tied: bool, **text: Any) -> dict[str, Any]:
    layers = text["num_hidden_layers"]
    shared = {
        "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16",
        "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
        "initializer_range": 0.02, "layer_types": [FULL if i % 4 == 3 else LINEAR for i in range(layers)],
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": f"{kind}_text",
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "rms_norm_eps": 1e-06, "use_cache": True,
        "tie_word_embeddings": tied, "vocab_size": 248320,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
        },
    }  # fmt: skip
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": kind, "image_token_id": 248056,
        "text_config": shared | text, "tie_word_embeddings": tied, "transformers_version": "4.57.0.dev0",
        "vision_config": {"model_type": kind, "depth": 12, "deepstack_visual_indexes": [], "hidden_size": 768},
    }  # fmt: skip


CONFIGS: dict[str, dict[str, Any]] = {
    "google/gemma-4-31B-it": _gemma4(
        6, **_LARGE, enable_moe_block=False, hidden_size=5376, intermediate_size=21504, num_attention_heads=32,
        moe_intermediate_size=None, num_experts=None, num_global_key_value_heads=4, num_hidden_layers=60,
        num_key_value_heads=16, top_k_experts=None,
    ),
    "google/gemma-4-26B-A4B-it": _gemma4(
        6, **_LARGE, enable_moe_block=True, hidden_size=2816, intermediate_size=2112, num_attention_heads=16,
        moe_intermediate_size=704, num_experts=128, num_global_key_value_heads=2, num_hidden_layers=30,
        num_key_value_heads=8, top_k_experts=8,
    ),
    "google/gemma-4-E2B-it": _gemma4(
        5, **_SMALL, hidden_size=1536, intermediate_size=6144, num_hidden_layers=35, num_key_value_heads=1,
        num_kv_shared_layers=20, use_double_wide_mlp=True,
    ),
    "google/gemma-4-E4B-it": _gemma4(
        6, **_SMALL, hidden_size=2560, intermediate_size=10240, num_hidden_layers=42, num_key_value_heads=2,
        num_kv_shared_layers=18, use_double_wide_mlp=False,
    ),
    "Qwen/Qwen3-4B": _QWEN3 | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728,
        "max_window_layers": 36, "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-8B": _QWEN3 | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
        "max_window_layers": 36, "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-30B-A3B": _QWEN3_30B,
    "Qwen/Qwen3-30B-A3B-Thinking-2507": _QWEN3_30B | {"max_position_embeddings": 262144, "rope_theta": 10000000},
    "Qwen/Qwen3-235B-A22B": _QWEN3_MOE | {
        "hidden_size": 4096, "intermediate_size": 12288, "max_window_layers": 94, "moe_intermediate_size": 1536,
        "num_attention_heads": 64, "num_hidden_layers": 94,
    },
    "Qwen/Qwen3.5-0.8B": _qwen3_5(
        "qwen3_5", True, hidden_size=1024, intermediate_size=3584, linear_num_value_heads=16, num_attention_heads=8,
        num_hidden_layers=24, num_key_value_heads=2,
    ),
    "Qwen/Qwen3.5-27B": _qwen3_5(
        "qwen3_5", False, hidden_size=5120, intermediate_size=17408, linear_num_value_heads=48, num_attention_heads=24,
        num_hidden_layers=64, num_key_value_heads=4,
    ),
    "Qwen/Qwen3.5-35B-A3B": _qwen3_5(
        "qwen3_5_moe", False, hidden_size=2048, linear_num_value_heads=32, moe_intermediate_size=512, num_attention_heads=16,
        num_experts=256, num_experts_per_tok=8, num_hidden_layers=40, num_key_value_heads=2, output_router_logits=False,
        shared_expert_intermediate_size=512,
    ),
}  # fmt: skip

_MTP = ("mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.layers.0.self_attn.q_proj.weight")
_VISION = {
    "gemma4": (
        "model.embed_vision.embedding_projection.weight",
        "model.vision_tower.patch_embedder.input_proj.weight",
        "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight",
        "model.audio_tower.layers.0.lconv1d.depthwise_conv1d.weight",
        "model.embed_audio.embedding_projection.weight",
    ),
    "qwen3_5": ("model.visual.blocks.0.attn.qkv.weight", "model.visual.merger.linear_fc1.weight", *_MTP),
    "qwen3_5_moe": (
        "model.visual.pos_embed.weight",
        *_MTP,
        "mtp.layers.0.mlp.experts.gate_up_proj",
        "mtp.layers.0.mlp.experts.255.down_proj.weight",
    ),
}


def stored_names(values: dict[str, Any]) -> set[str]:
    """Return the tensor names of the checkpoint with this config. Vision and drafting tensors are represented by a few."""
    kind, text = values["model_type"], values.get("text_config", values)
    prefix = "model.language_model." if "text_config" in values else "model."
    names = {f"{prefix}embed_tokens.weight", f"{prefix}norm.weight", *_VISION.get(kind, ())}
    if not values["tie_word_embeddings"]:
        names.add("lm_head.weight")
    if text.get("hidden_size_per_layer_input"):
        for name in ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"):
            names.add(f"{prefix}{name}.weight")
    for i in range(text["num_hidden_layers"]):
        full = text.get("layer_types", {i: FULL})[i] == FULL if "layer_types" in text else True
        of_layer = _gemma4_layer(text, full) if kind == "gemma4" else _qwen_layer(text, full)
        names |= {f"{prefix}layers.{i}.{name}" for name in of_layer}
    return names


def _gemma4_layer(text: dict[str, Any], full: bool) -> list[str]:
    attention = ["q_proj", "k_proj", "o_proj", "q_norm", "k_norm"]
    attention += [] if full and text["attention_k_eq_v"] else ["v_proj"]
    norms = ["input", "post_attention", "pre_feedforward", "post_feedforward"]
    names = [f"self_attn.{name}.weight" for name in attention] + [f"{name}_layernorm.weight" for name in norms]
    names += ["mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight", "layer_scalar"]
    if text["enable_moe_block"]:
        names += [f"{name}.weight" for name in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2")]
        names += ["pre_feedforward_layernorm_2.weight", "router.proj.weight", "router.scale", "router.per_expert_scale"]
        names += ["experts.gate_up_proj", "experts.down_proj"]
    if text["hidden_size_per_layer_input"]:
        names += [f"{n}.weight" for n in ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")]
    return names


def _qwen_layer(text: dict[str, Any], full: bool) -> list[str]:
    attention = ["q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "q_norm.weight", "k_norm.weight"]
    delta = ["A_log", "dt_bias", "conv1d.weight", "norm.weight", "out_proj.weight"]
    delta += [f"in_proj_{name}.weight" for name in ("qkv", "z", "b", "a")]
    names = [f"self_attn.{name}" for name in attention] if full else [f"linear_attn.{name}" for name in delta]
    names += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    projections = [f"{name}_proj.weight" for name in ("gate", "up", "down")]
    if "num_experts" not in text:
        return names + [f"mlp.{name}" for name in projections]
    names.append("mlp.gate.weight")
    if "shared_expert_intermediate_size" in text:
        names += [f"mlp.shared_expert.{name}" for name in projections] + ["mlp.shared_expert_gate.weight"]
        return [*names, "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return names + [f"mlp.experts.{e}.{name}" for e in range(text["num_experts"]) for name in projections]


METADATA: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3.5-35B-A3B": {
        "general.architecture": "qwen35moe", "qwen35moe.block_count": 40, "qwen35moe.context_length": 262144,
        "qwen35moe.embedding_length": 2048, "qwen35moe.attention.head_count": 16, "qwen35moe.attention.head_count_kv": 2,
        "qwen35moe.attention.layer_norm_rms_epsilon": 9.999999974752427e-07, "qwen35moe.attention.key_length": 256,
        "qwen35moe.attention.value_length": 256, "qwen35moe.rope.dimension_sections": [11, 11, 10, 0],
        "qwen35moe.rope.freq_base": 10000000.0, "qwen35moe.rope.dimension_count": 64, "qwen35moe.expert_count": 256,
        "qwen35moe.expert_used_count": 8, "qwen35moe.expert_feed_forward_length": 512,
        "qwen35moe.expert_shared_feed_forward_length": 512, "qwen35moe.ssm.conv_kernel": 4, "qwen35moe.ssm.state_size": 128,
        "qwen35moe.ssm.group_count": 16, "qwen35moe.ssm.time_step_rank": 32, "qwen35moe.ssm.inner_size": 4096,
        "qwen35moe.full_attention_interval": 4, "tokenizer.ggml.eos_token_id": 248046,
    },
    "Qwen/Qwen3.5-27B": {
        "general.architecture": "qwen35", "qwen35.block_count": 64, "qwen35.context_length": 262144,
        "qwen35.embedding_length": 5120, "qwen35.feed_forward_length": 17408, "qwen35.attention.head_count": 24,
        "qwen35.attention.head_count_kv": 4, "qwen35.attention.key_length": 256, "qwen35.attention.value_length": 256,
        "qwen35.attention.layer_norm_rms_epsilon": 9.999999974752427e-07, "qwen35.rope.dimension_count": 64,
        "qwen35.rope.dimension_sections": [11, 11, 10, 0], "qwen35.rope.freq_base": 10000000.0, "qwen35.ssm.conv_kernel": 4,
        "qwen35.ssm.state_size": 128, "qwen35.ssm.group_count": 16, "qwen35.ssm.time_step_rank": 48,
        "qwen35.ssm.inner_size": 6144, "qwen35.full_attention_interval": 4,
    },
    "google/gemma-4-26B-A4B-it": {
        "general.architecture": "gemma4", "gemma4.block_count": 30, "gemma4.context_length": 262144,
        "gemma4.embedding_length": 2816, "gemma4.attention.head_count": 16,
        "gemma4.attention.head_count_kv": [8, 8, 8, 8, 8, 2] * 5, "gemma4.feed_forward_length": 2112,
        "gemma4.expert_feed_forward_length": 704, "gemma4.attention.key_length": 512, "gemma4.attention.value_length": 512,
        "gemma4.attention.key_length_swa": 256, "gemma4.attention.value_length_swa": 256, "gemma4.vocab_size": 262144,
        "gemma4.rope.freq_base": 1000000.0, "gemma4.rope.freq_base_swa": 10000.0, "gemma4.rope.dimension_count": 512,
        "gemma4.rope.dimension_count_swa": 256, "gemma4.attention.layer_norm_rms_epsilon": 9.999999974752427e-07,
        "gemma4.expert_count": 128, "gemma4.expert_used_count": 8, "gemma4.final_logit_softcapping": 30.0,
        "gemma4.attention.sliding_window": 1024, "gemma4.attention.shared_kv_layers": 0,
        "gemma4.embedding_length_per_layer_input": 0,
        "gemma4.attention.sliding_window_pattern": [True, True, True, True, True, False] * 5,
    },
    "google/gemma-4-E2B-it": {
        "general.architecture": "gemma4", "gemma4.block_count": 35, "gemma4.context_length": 131072,
        "gemma4.embedding_length": 1536, "gemma4.embedding_length_per_layer_input": 256,
        "gemma4.feed_forward_length": [6144] * 15 + [12288] * 20, "gemma4.attention.head_count": 8,
        "gemma4.attention.head_count_kv": 1, "gemma4.attention.key_length": 512, "gemma4.attention.key_length_swa": 256,
        "gemma4.attention.value_length": 512, "gemma4.attention.value_length_swa": 256, "gemma4.vocab_size": 262144,
        "gemma4.attention.sliding_window": 512, "gemma4.attention.shared_kv_layers": 20, "gemma4.rope.dimension_count": 512,
        "gemma4.rope.dimension_count_swa": 256, "gemma4.attention.layer_norm_rms_epsilon": 9.999999974752427e-07,
        "gemma4.final_logit_softcapping": 30.0, "gemma4.rope.freq_base": 1000000.0, "gemma4.rope.freq_base_swa": 10000.0,
        "gemma4.attention.sliding_window_pattern": [True, True, True, True, False] * 7,
    },
}  # fmt: skip
