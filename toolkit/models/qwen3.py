"""Qwen3 (dense): config, blocks, the names its weights have in checkpoints, and what a token costs.

Grouped-query attention with RMSNorm on each head of query and key before the rotary embedding, a SiLU-gated MLP,
pre-norms, no biases unless the config says so. It knows no file and no decode loop.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from toolkit.errors import ModelError
from toolkit.models.cache import Cache, KeysValues
from toolkit.models.costs import Cost, each, look_up, weigh
from toolkit.models.fields import Fields
from toolkit.models.layers import (
    Embedding,
    GatedMLP,
    Joined,
    Linear,
    RMSNorm,
    Source,
    cached_attention,
    causal_attention,
    hidden_slots,
    initialise,
    rope_table,
    rotate,
    to_dtype,
)
from toolkit.quant import matmul

if TYPE_CHECKING:
    from toolkit.devices.base import Device


@dataclass(frozen=True)
class Config:
    """The shape of a Qwen3. Names are those of config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 32768
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        asked = f"a Qwen3 of {self.num_attention_heads} heads, {self.num_key_value_heads} KV heads, head_dim {self.head_dim}"
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(asked, "heads can't be shared out evenly", "num_key_value_heads must divide num_attention_heads")
        if self.head_dim % 2:
            raise ModelError(asked, "an odd head_dim has no rotary pairs", "head_dim must be even")

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> Config:
        """From a config.json of transformers 4 or 5; absent fields have the defaults of its Qwen3Config.

        Raises ModelError, naming the field, for what is missing, malformed, or would change the result unsupported.
        """
        fields = Fields("config.json", values)
        fields.only("model_type", "qwen3")
        fields.only("hidden_act", "silu")
        fields.only("quantization_config", None)
        if values.get("use_sliding_window") and values.get("sliding_window") is not None:
            raise fields.wrong("use_sliding_window", values["use_sliding_window"], "False", "windows aren't supported")
        layer_types = values.get("layer_types")
        if layer_types is not None and not (
            isinstance(layer_types, list | tuple) and set(map(str, layer_types)) == {"full_attention"}
        ):
            raise fields.wrong("layer_types", layer_types, "'full_attention' in every layer", "windows aren't supported")
        heads, hidden = fields.size("num_attention_heads", 32), fields.size("hidden_size", 4096)
        return cls(
            vocab_size=fields.size("vocab_size", 151936),
            hidden_size=hidden,
            intermediate_size=fields.size("intermediate_size", 22016),
            num_hidden_layers=fields.size("num_hidden_layers", 32),
            num_attention_heads=heads,
            num_key_value_heads=fields.size("num_key_value_heads", 32, null=heads),
            head_dim=fields.size("head_dim", 128, null=max(1, hidden // heads)),
            max_position_embeddings=fields.size("max_position_embeddings", 32768),
            rope_theta=_rope_theta(fields),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            attention_bias=fields.flag("attention_bias", False),
            eos_token_ids=fields.ids("eos_token_id"),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tensors: Mapping[str, Sequence[int]] | None = None) -> Config:
        """From GGUF metadata ("qwen3.*" keys) and, where given, the shapes of the file's tensors by name.

        GGUF states neither tied embeddings nor biases: they follow from which tensors are there. Without `tensors` the
        model is taken as untied and free of biases. The vocabulary is counted from the metadata, or from the embedding
        (shape [vocab, hidden], as PyTorch writes it). Raises ModelError, naming the field.
        """
        fields = Fields("GGUF metadata", metadata)
        fields.only("general.architecture", "qwen3")
        fields.only("qwen3.rope.scaling.type", None, "none")
        tensors = tensors or {}
        heads, hidden = fields.size("qwen3.attention.head_count"), fields.size("qwen3.embedding_length")
        tokens = metadata.get("tokenizer.ggml.tokens")
        known = tensors.get("token_embd.weight", (len(tokens) if tokens is not None else None,))[0]
        head_dim = fields.size("qwen3.attention.key_length", hidden // heads)
        fields.only("qwen3.attention.value_length", head_dim)
        fields.only("qwen3.rope.dimension_count", head_dim)
        return cls(
            vocab_size=fields.size("qwen3.vocab_size") if known is None else int(known),
            hidden_size=hidden,
            intermediate_size=fields.size("qwen3.feed_forward_length"),
            num_hidden_layers=fields.size("qwen3.block_count"),
            num_attention_heads=heads,
            num_key_value_heads=fields.size("qwen3.attention.head_count_kv", heads),
            head_dim=head_dim,
            max_position_embeddings=fields.size("qwen3.context_length"),
            rope_theta=fields.number("qwen3.rope.freq_base", 10_000.0),
            rms_norm_eps=fields.number("qwen3.attention.layer_norm_rms_epsilon"),
            tie_word_embeddings="token_embd.weight" in tensors and "output.weight" not in tensors,
            attention_bias="blk.0.attn_q.bias" in tensors,
            eos_token_ids=fields.ids("tokenizer.ggml.eos_token_id"),
        )


def _rope_theta(fields: Fields) -> float:
    """theta from the top level (transformers 4) or from `rope_parameters` (5); any scaling of it is refused."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.values.get(name)
        if rope is None:
            continue
        inner = Fields(f"config.json {name}", rope)
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise fields.wrong(name, rope, "rope_type 'default', the whole head", "scaled rotary embeddings aren't supported")
        if "rope_theta" in rope:
            return inner.number("rope_theta")
    return fields.number("rope_theta", 10_000.0)


class Attention(nn.Module):
    """Grouped-query attention with normed query and key heads; on itself, or on a cache."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim, self.scale = layer, config.head_dim, config.head_dim**-0.5
        width, kv_width = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.qkv = Joined(config.hidden_size, {"q": width, "k": kv_width, "v": kv_width}, bias=config.attention_bias)
        self.o = Linear(width, config.hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, rope: Tensor, at: At | None) -> Tensor:
        heads = (*x.shape[:2], -1, self.head_dim)
        query, key, value = (part.view(heads) for part in self.qkv(x))
        query = rotate(self.q_norm(query), rope)  # [B, T, H, D]
        key = rotate(self.k_norm(key), rope)  # [B, T, KV, D]
        if at is None:
            mixed = causal_attention(query, key, value, self.scale)
        else:
            state = at.cache.states[self.layer]
            assert isinstance(state, KeysValues)
            state.write(key.transpose(1, 2), value.transpose(1, 2), at.positions)
            mixed = cached_attention(query, *state.read(at.bound), at.mask, self.scale)
        out: Tensor = self.o(mixed)
        return out


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, layer)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, rope: Tensor, at: At | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope, at)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


@dataclass(frozen=True)
class At:
    """Where in a cache a forward pass stands: positions [T] and mask [T, bound], both on the device."""

    cache: Cache
    positions: Tensor
    bound: int
    mask: Tensor


class Model(nn.Module):
    """A Qwen3 built on "meta": shapes without memory, until a loader (or `init_weights`) gives it weights.

    `model(ids)` maps token ids [B, T] on the device to fp32 logits [B, T, vocab], with gradients. Decoding goes through
    `new_cache`, `embed`, `advance` and `logits`. `model.config`, `model.device` (a toolkit Device), `model.dtype` and
    `model.tokenizer` (None until a loader finds one) are set.
    """

    def __init__(self, config: Config, device: Device, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config, self.device, self.dtype = config, device, dtype
        self.tokenizer: Any = None
        with torch.device("meta"):
            self.embed = Embedding(config.vocab_size, config.hidden_size, dtype)
            self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.head = None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size, bias=False)
        to_dtype(self, dtype)

    def init_weights(self, seed: int = 0) -> Model:
        """Random weights from `seed`, the same on every device. Returns the model."""
        initialise(self, self.device.torch, seed)
        return self

    def logits(self, x: Tensor) -> Tensor:
        """fp32 logits of hidden states [B, T, hidden]."""
        return matmul(self.norm(x), self.embed.weight if self.head is None else self.head.weight).float()

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, T] -> logits [B, T, vocab], fp32."""
        x = self.embed(ids)
        slots = torch.arange(ids.shape[1], device=ids.device)
        rope = rope_table(slots, self.config.head_dim, self.config.rope_theta, x.dtype)
        for layer in self.layers:
            x = layer(x, rope, None)
        return self.logits(x)

    def new_cache(self, context: int) -> Cache:
        """A cache for `context` tokens on the model's device, made there without a copy."""
        c = self.config
        slots = torch.arange(context, device=self.device.torch)
        rope = rope_table(slots, c.head_dim, c.rope_theta, self.dtype)
        make = partial(KeysValues, c.num_key_value_heads, context, c.head_dim, self.dtype, self.device.torch)
        return Cache(slots, {"full": rope}).fill([make] * c.num_hidden_layers)

    def advance(self, x: Tensor, positions: Tensor, cache: Cache, length: int) -> Tensor:
        """Feed embedded tokens `x` [1, T, hidden] at `positions` [T] (on the device); hidden states [1, T, hidden].

        `length` is how many tokens the cache then holds, at most: it bounds how much of the cache is read, and need not
        be exact. The exact position is read on the device only.
        """
        bound = cache.bound(length)
        at = At(cache, positions, bound, hidden_slots(cache.slots[:bound], positions))
        rope = cache.ropes["full"].index_select(0, positions)
        for layer in self.layers:
            x = layer(x, rope, at)
        return x

    def costs(self, length: int) -> tuple[Cost, ...]:
        """What each part holds, and what a token costs it after `length` tokens."""
        c = self.config
        kv_bytes = 2 * c.num_key_value_heads * c.head_dim * self.dtype.itemsize  # of a token, in a layer
        return (
            look_up("embedding", self.embed),
            weigh(
                "attention",
                each(self.layers, "attention"),
                flops=4 * c.num_attention_heads * c.head_dim * length,
                state_bytes=kv_bytes * length,
                state_per_token_bytes=kv_bytes,
            ),
            weigh("mlp", each(self.layers, "mlp")),
            weigh("norms", each(self.layers, "attention_norm", "mlp_norm")),
            weigh("norms", self.norm),
            weigh("head", self.embed, tied=True) if self.head is None else weigh("head", self.head),
        )


_LAYER_NAMES = {  # ours: (Hugging Face, GGUF)
    "attention_norm": ("input_layernorm", "attn_norm"),
    "attention.qkv.q": ("self_attn.q_proj", "attn_q"),
    "attention.qkv.k": ("self_attn.k_proj", "attn_k"),
    "attention.qkv.v": ("self_attn.v_proj", "attn_v"),
    "attention.o": ("self_attn.o_proj", "attn_output"),
    "attention.q_norm": ("self_attn.q_norm", "attn_q_norm"),
    "attention.k_norm": ("self_attn.k_norm", "attn_k_norm"),
    "mlp_norm": ("post_attention_layernorm", "ffn_norm"),
    "mlp.gate_up.gate": ("mlp.gate_proj", "ffn_gate"),
    "mlp.gate_up.up": ("mlp.up_proj", "ffn_up"),
    "mlp.down": ("mlp.down_proj", "ffn_down"),
}
_BIASED = ("attention.qkv.q", "attention.qkv.k", "attention.qkv.v", "attention.o")


def names_hf(config: Config, stored: Collection[str] = ()) -> dict[str, Source]:
    """Where our parameters are in a Hugging Face checkpoint that holds tensors called `stored`."""
    return _names(config, 0, "model.layers", {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"})


def names_gguf(config: Config, stored: Collection[str] = ()) -> dict[str, Source]:
    """Where our parameters are in a GGUF file. Matrices are stored as here: [out, in]; rotary halves need no reordering."""
    return _names(config, 1, "blk", {"embed": "token_embd", "norm": "output_norm", "head": "output"})


def _names(config: Config, column: int, prefix: str, ends: dict[str, str]) -> dict[str, Source]:
    names = {f"{ours}.weight": Source((f"{theirs}.weight",)) for ours, theirs in ends.items()}
    if config.tie_word_embeddings:
        del names["head.weight"]
    for i in range(config.num_hidden_layers):
        for ours, both in _LAYER_NAMES.items():
            for leaf in ("weight", "bias") if config.attention_bias and ours in _BIASED else ("weight",):
                names[f"layers.{i}.{ours}.{leaf}"] = Source((f"{prefix}.{i}.{both[column]}.{leaf}",))
    return names
