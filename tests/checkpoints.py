"""Small random checkpoints for tests, written with the formats' own packages: Hugging Face folders and GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 300, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False,
}  # fmt: skip
_PARTS = {  # Hugging Face: (GGUF, [out, in] as multiples of the config's sizes)
    "self_attn.q_proj": ("attn_q", ("width", "hidden")),
    "self_attn.k_proj": ("attn_k", ("kv", "hidden")),
    "self_attn.v_proj": ("attn_v", ("kv", "hidden")),
    "self_attn.o_proj": ("attn_output", ("hidden", "width")),
    "mlp.gate_proj": ("ffn_gate", ("ffn", "hidden")),
    "mlp.up_proj": ("ffn_up", ("ffn", "hidden")),
    "mlp.down_proj": ("ffn_down", ("hidden", "ffn")),
    "input_layernorm": ("attn_norm", ("hidden",)),
    "post_attention_layernorm": ("ffn_norm", ("hidden",)),
    "self_attn.q_norm": ("attn_q_norm", ("head",)),
    "self_attn.k_norm": ("attn_k_norm", ("head",)),
}


def shapes(config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Hugging Face name: (GGUF name, shape) of every tensor of a Qwen3."""
    sizes = {
        "hidden": config["hidden_size"], "ffn": config["intermediate_size"], "head": config["head_dim"],
        "width": config["num_attention_heads"] * config["head_dim"], "kv": config["num_key_value_heads"] * config["head_dim"],
    }  # fmt: skip
    table = (config["vocab_size"], config["hidden_size"])
    found = {
        "model.embed_tokens.weight": ("token_embd.weight", table),
        "model.norm.weight": ("output_norm.weight", table[1:]),
    }
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = ("output.weight", table)
    for i in range(config["num_hidden_layers"]):
        for theirs, (short, axes) in _PARTS.items():
            shape = tuple(sizes[a] for a in axes)
            found[f"model.layers.{i}.{theirs}.weight"] = (f"blk.{i}.{short}.weight", shape)
    return found


def random_tensors(config: dict[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights by Hugging Face name: norms around one, the rest normal."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        noise = torch.randn(shape, generator=generator)
        return (noise * 0.05 if len(shape) > 1 else 1 + noise * 0.1).to(dtype)

    return {name: draw(shape) for name, (_, shape) in shapes(config).items()}


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], shards: int = 1) -> Path:
    """A Hugging Face folder of `shards` files (with an index where there are several)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names, weight_map = list(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def hf_logits(folder: Path, ids: list[int]) -> torch.Tensor:
    """fp32 logits [T, vocab] of transformers' own Qwen3 with the weights in `folder`."""
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def random_blocks(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Bytes [rows, bytes a row] of random blocks of `kind` with small finite scales."""
    quant = gguf.GGMLQuantizationType[kind]
    elements, nbytes = gguf.GGML_QUANT_SIZES[quant]
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // elements, nbytes), dtype=np.uint8)
    halves = {
        "Q8_0": {0: 4e-4}, "Q4_0": {0: 6e-3}, "Q4_1": {0: 6e-3, 2: -4.5e-2}, "Q5_0": {0: 3e-3}, "Q5_1": {0: 3e-3, 2: -4.6e-2},
        "Q4_K": {0: 1e-4, 2: 7e-4}, "Q5_K": {0: 5e-5, 2: 7e-4}, "Q6_K": {208: 2e-5},
    }[kind]  # fmt: skip
    for at, scale in halves.items():
        drawn = (scale * rng.uniform(0.5, 1.5, len(blocks))).astype(np.float16)
        blocks[:, at : at + 2] = drawn.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(shape[0], -1)


def write_gguf(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    kind: str = "F32",
    tokenizer: dict[str, Any] | None = None,
    seed: int = 0,
    mixed: dict[str, str] | None = None,
) -> dict[str, torch.Tensor]:
    """A GGUF whose matrices are of `kind` and norms F32. Returns the weights it holds, by Hugging Face name, in fp32.

    F32, F16, BF16 and Q8_0 hold `tensors`; the other kinds hold random blocks, dequantised by the gguf package. `mixed`:
    kinds of single tensors, by the end of their Hugging Face name.
    """
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for key, (value, value_type) in (tokenizer or {}).items():
        writer.add_key_value(
            key, value, value_type, gguf.GGUFValueType.STRING if value_type == gguf.GGUFValueType.ARRAY else None
        )
    rng, held = np.random.default_rng(seed), {}
    for name, (theirs, shape) in shapes(config).items():
        own = next((k for end, k in (mixed or {}).items() if name.endswith(end)), kind)
        value, quant = tensors[name].float().numpy(), gguf.GGMLQuantizationType[own if len(shape) > 1 else "F32"]
        drawn = quant.name not in ("F32", "F16", "BF16", "Q8_0")
        raw = random_blocks(quant.name, shape, rng) if drawn else gguf.quantize(value, quant)
        writer.add_tensor(theirs, raw, raw_dtype=quant)
        held[name] = torch.from_numpy(gguf.dequantize(raw, quant).astype(np.float32).reshape(shape).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held
