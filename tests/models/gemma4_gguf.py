"""Write a Gemma 4 GGUF file as llama.cpp's converter does, with tensor names from the gguf package's map and unchanged values.

The rules that are not in that map follow convert_hf_to_gguf (Gemma4Model): tensors that are renamed before the lookup, the
metadata keys, and the tensor that describes the proportional rotary embedding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.models.parity import FLOAT32

ARCH = gguf.MODEL_ARCH.GEMMA4


def gguf_name(theirs: str, layers: int) -> str:
    """Return the converter's name of the checkpoint's tensor `theirs`."""
    bare = theirs.replace("language_model.", "")
    if bare.endswith("layer_scalar") or (".experts." in bare and not bare.endswith(".weight")):
        bare += ".weight"
    if bare.endswith("router.scale"):
        return f"blk.{bare.split('.')[2]}.ffn_gate_inp.scale"
    if bare.endswith("router.per_expert_scale"):
        return f"blk.{bare.split('.')[2]}.ffn_down_exps.scale"
    found = gguf.get_tensor_name_map(ARCH, layers).get_name(bare, try_suffixes=(".weight", ".bias"))
    assert found is not None, f"the converter has no name for {theirs}"
    return found


def write(path: Path, values: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    """Write a file for the text config `values`, which has `global_head_dim`, with `weights` by checkpoint name."""
    writer = gguf.GGUFWriter(path, "gemma4")
    _metadata(writer, values)
    for name, tensor in weights.items():
        if not (name == "lm_head.weight" and values.get("tie_word_embeddings", True)):
            writer.add_tensor(gguf_name(name, values["num_hidden_layers"]), tensor.to(FLOAT32).numpy())
    half = values["global_head_dim"] // 2
    turning = int(values["global_head_dim"] * _rope(values, "full_attention")["partial_rotary_factor"] / 2)
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * turning + [1e30] * (half - turning), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _rope(values: dict[str, Any], kind: str) -> dict[str, Any]:
    usual = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
    }
    return values.get("rope_parameters", usual)[kind]


def _metadata(writer: gguf.GGUFWriter, values: dict[str, Any]) -> None:
    layers, shared = values["num_hidden_layers"], values.get("num_kv_shared_layers", 0)
    sliding = [kind == "sliding_attention" for kind in values["layer_types"]]
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_embedding_length(values["hidden_size"])
    writer.add_block_count(layers)
    width = values["intermediate_size"]
    doubled = values.get("use_double_wide_mlp", False)
    writer.add_feed_forward_length([width if i < layers - shared else 2 * width for i in range(layers)] if doubled else width)
    writer.add_head_count(values["num_attention_heads"])
    full, usual = values.get("num_global_key_value_heads"), values["num_key_value_heads"]
    writer.add_head_count_kv(usual if full is None else [usual if one else full for one in sliding])
    for add, size in (("", values["global_head_dim"]), ("_swa", values["head_dim"])):
        getattr(writer, f"add_key_length{add}")(size)
        getattr(writer, f"add_value_length{add}")(size)
        getattr(writer, f"add_rope_dimension_count{add}")(size)
    writer.add_rope_freq_base(_rope(values, "full_attention")["rope_theta"])
    writer.add_rope_freq_base_swa(_rope(values, "sliding_attention")["rope_theta"])
    writer.add_layer_norm_rms_eps(values.get("rms_norm_eps", 1e-6))
    writer.add_sliding_window(values["sliding_window"])
    writer.add_sliding_window_pattern(sliding)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(values.get("hidden_size_per_layer_input") or 0)
    if values.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(values["final_logit_softcapping"])
    if values.get("num_experts"):
        writer.add_expert_count(values["num_experts"])
        writer.add_expert_used_count(values["top_k_experts"])
        writer.add_expert_feed_forward_length(values["moe_intermediate_size"])
    writer.add_eos_token_id(1)
