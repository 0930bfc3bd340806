"""Write a GGUF file of a real model's shapes with random weights in the Q4_K_M mix, to time loading.

Tensor names and shapes are those that the model files read; formats are those of the recipe "q4_k_m". Weights are random blocks
with small finite scales, cut from a pool, so that writing is as fast as the disk. The file has no tokenizer. Needs the
package gguf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolkit.core.errors import unknown_name
from toolkit.gpu.opening import open_device
from toolkit.loading.checkpoint import open_checkpoint
from toolkit.models.places import spot
from toolkit.models.shapes import SHAPES
from toolkit.weights.recipes import recipe

Pool = np.ndarray[Any, np.dtype[np.uint8]]
KINDS = {"q4_k": "Q4_K", "q6_k": "Q6_K", "q5_0": "Q5_0", "int8-g32": "Q8_0"}
# Byte offset of each fp16 scale in a block, and its value for weights with a standard deviation of about 0.02.
SCALES = {
    "Q4_K": {0: 0.02 / (32 * 4.6), 2: 7.5 * 0.02 / (32 * 4.6)},
    "Q6_K": {208: 0.02 / (64 * 18.5)},
    "Q5_0": {0: 0.02 / 9.2},
    "Q8_0": {0: 0.02 / 74},
}
POOL_BLOCKS = 1 << 17
# Values of unquantized tensors, by the end of their name; all others are 1.
PLAIN = {"ssm_a": -1.0, "ssm_conv1d.weight": 0.25, "ffn_gate_inp_shexp.weight": 0.01}


def write_gguf(name: str, path: Path, layers: int | None = None) -> int:
    """Write the shapes `name` ("gemma4-31b") to `path`, only the first `layers` if given. Returns the bytes of all tensors.

    Raises ToolkitError if there are no shapes of that name.
    """
    import gguf

    if name not in SHAPES:
        raise unknown_name("shapes", name, SHAPES)
    checkpoint = open_checkpoint(f"random/{name}")
    config = _shortened(checkpoint.config, layers)
    architecture, describe = ARCHITECTURES[SHAPES[name].config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"random {name}")
    for key, value in describe(config).items():
        full = f"{architecture}.{key}"
        if isinstance(value, list):
            writer.add_array(full, value)
        else:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(full, value)
    tensors = list(_tensors(checkpoint.architecture, config))
    for tensor, shape, kind in tensors:
        quant = gguf.GGMLQuantizationType[kind]
        elements, nbytes = gguf.GGML_QUANT_SIZES[quant]
        size = int(np.prod(shape)) // elements * nbytes
        raw = (*shape[:-1], shape[-1] // elements * nbytes) if kind in SCALES else shape
        dtype = np.dtype(np.uint8 if kind in SCALES else np.float32)
        writer.add_tensor_info(tensor, raw, dtype, size, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    pools = {kind: _pool(kind, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]) for kind in SCALES}
    total = 0
    for number, (tensor, shape, kind) in enumerate(tensors):
        if kind in SCALES:
            elements = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
            values: Any = _cut(pools[kind], int(np.prod(shape)) // elements, number)
        else:
            values = _plain(tensor, shape, number)
        writer.write_tensor_data(values)
        total += values.nbytes
    writer.close()
    return total


def _shortened(config: Any, layers: int | None) -> Any:
    """Return `config` with only the first `layers` layers, and with Gemma's rotary frequencies stored in the file."""
    changes: dict[str, Any] = {}
    if layers is not None:
        for name in ("layer_types", "intermediate_sizes", "sparse"):
            if hasattr(config, name):
                changes[name] = tuple(x for x in getattr(config, name)[:layers] if name != "sparse" or x < layers)
        if "layer_types" not in changes:
            changes["num_hidden_layers"] = layers
    if hasattr(config, "rope_freqs_stored"):
        changes["rope_freqs_stored"] = True
    return replace(config, **changes)


def _tensors(architecture: Any, config: Any) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield (stored name, shape, format) of every tensor once."""
    model = architecture.Model(config, open_device("cpu"), torch.bfloat16)
    mix, seen = recipe("q4_k_m"), set()
    names = architecture.names_gguf(config, ())
    whole: dict[str, int] = {}  # rows of stored tensors that hold two of the model's
    for source in names.values():
        if source.rows is not None:
            whole[source.names[0]] = max(whole.get(source.names[0], 0), source.rows.stop)
    for ours, source in names.items():
        (stored,) = source.names
        if stored in seen:
            continue
        seen.add(stored)
        shape = tuple(spot(model, ours).weight.shape) or (1,)
        scheme = mix.scheme_for(ours, shape, config.num_hidden_layers, config.tie_word_embeddings)
        if stored in whole:
            shape = (*shape[:-2], whole[stored], shape[-1])
        yield stored, shape, "F32" if scheme is None else KINDS[scheme.name]


def _pool(kind: str, nbytes: int) -> Pool:
    blocks = np.random.default_rng(0).integers(0, 256, (POOL_BLOCKS, nbytes), dtype=np.uint8)
    for at, scale in SCALES[kind].items():
        blocks[:, at : at + 2] = np.full(POOL_BLOCKS, scale, np.float16).view(np.uint8).reshape(-1, 2)
    return blocks


def _cut(pool: Pool, count: int, seed: int) -> Pool:
    """Return `count` blocks of the pool, starting at a place that depends on `seed` and wrapping around."""
    start = seed * 7919 % len(pool)
    out = np.empty((count, pool.shape[1]), np.uint8)
    done = 0
    while done < count:
        some = min(count - done, len(pool) - start)
        out[done : done + some] = pool[start : start + some]
        done, start = done + some, 0
    return out.reshape(-1)


def _plain(name: str, shape: tuple[int, ...], seed: int) -> Any:
    if name == "rope_freqs.weight":  # rotary embedding turns a quarter of the head
        turning = shape[0] // 4
        return np.concatenate([np.ones(turning), np.full(shape[0] - turning, 1e30)]).astype(np.float32)
    if name.endswith("ffn_gate_inp.weight"):
        return (np.random.default_rng(seed).standard_normal(shape) * 0.05).astype(np.float32)
    return np.full(shape, next((value for end, value in PLAIN.items() if name.endswith(end)), 1.0), np.float32)


def _common(config: Any, kv_heads: Any, width: int) -> dict[str, Any]:
    return {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": width,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": kv_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }  # fmt: skip


def _qwen3(config: Any) -> dict[str, Any]:
    found = _common(config, config.num_key_value_heads, config.intermediate_size) | {
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim, "rope.freq_base": 1e6,
    }  # fmt: skip
    if config.num_experts:
        found |= {
            "expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }  # fmt: skip
    return found


def _gemma4(config: Any) -> dict[str, Any]:
    kinds = [config.heads(kind) for kind in config.layer_types]
    found = _common(config, [heads.kv_heads for heads in kinds], config.intermediate_sizes[0]) | {
        "attention.key_length": config.full.head_dim, "attention.value_length": config.full.head_dim,
        "attention.key_length_swa": config.sliding.head_dim, "attention.value_length_swa": config.sliding.head_dim,
        "rope.freq_base": config.full.theta, "rope.freq_base_swa": config.sliding.theta,
        "rope.dimension_count": config.full.head_dim, "rope.dimension_count_swa": config.sliding.head_dim,
        "attention.sliding_window": config.sliding_window, "final_logit_softcapping": config.final_logit_softcapping,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types],
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
    }  # fmt: skip
    if len(set(config.intermediate_sizes)) > 1:
        found["feed_forward_length"] = list(config.intermediate_sizes)
    if config.num_experts:
        found |= {
            "expert_count": config.num_experts, "expert_used_count": config.top_k_experts,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }  # fmt: skip
    return found


def _qwen3_5(config: Any) -> dict[str, Any]:
    found = _common(config, config.num_key_value_heads, config.intermediate_size or config.moe_intermediate_size) | {
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim, "rope.freq_base": 1e7,
        "rope.dimension_count": config.rope.width, "full_attention_interval": 4,
        "ssm.conv_kernel": config.linear_conv_kernel_dim, "ssm.state_size": config.linear_key_head_dim,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "ssm.time_step_rank": config.linear_num_value_heads, "ssm.group_count": config.linear_num_key_heads,
    }  # fmt: skip
    if config.num_experts:
        found |= {
            "expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        }  # fmt: skip
    return found


ARCHITECTURES: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {  # model_type: GGUF's name, its metadata
    "qwen3": ("qwen3", _qwen3), "qwen3_moe": ("qwen3moe", _qwen3), "gemma4_text": ("gemma4", _gemma4),
    "qwen3_5_text": ("qwen35", _qwen3_5), "qwen3_5_moe_text": ("qwen35moe", _qwen3_5),
}  # fmt: skip
