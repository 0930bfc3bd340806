"""The config of Qwen3, dense and with experts, from config.json or GGUF metadata, and the names of its stored weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolkit.core.errors import ModelError
from toolkit.models.fields import MOST_EXPERTS, MOST_LAYERS, Fields, check_gguf_routing, check_gguf_window, vocab_from_gguf
from toolkit.models.names import ends_hf, experts_gguf, experts_hf
from toolkit.models.places import Source
from toolkit.models.rotary import Rope, rope_from_gguf, rope_from_hf

HF_TYPES = ("qwen3", "qwen3_moe")
ATTENDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Config:
    """The config of a Qwen3. Field names follow config.json where it has them.

    `windowed` are the layers that attend only to the last `sliding_window` positions. `sparse` are the layers with experts
    instead of an MLP of width `intermediate_size`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 32768
    rope: Rope = field(default=None)  # type: ignore[assignment]  # default: the whole head rotates, theta 10,000
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    sliding_window: int | None = None
    windowed: tuple[int, ...] = ()
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    sparse: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.rope is None:
            object.__setattr__(self, "rope", Rope(self.head_dim))
        asked = f"a Qwen3 of {self.num_attention_heads} heads, {self.num_key_value_heads} KV heads, head_dim {self.head_dim}"
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                asked,
                "the heads can't be divided evenly among the KV heads",
                "num_key_value_heads must divide num_attention_heads",
            )
        if self.head_dim % 2:
            raise ModelError(asked, "rotary embeddings rotate pairs, and head_dim is odd", "Use an even head_dim")
        if self.num_experts_per_tok > self.num_experts:
            asked = f"a Qwen3 of {self.num_experts} experts, num_experts_per_tok {self.num_experts_per_tok}"
            do = f"Use num_experts_per_tok of at most {self.num_experts}"
            raise ModelError(asked, "a token can't use more experts than there are", do)

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> Config:
        """Read a config.json of transformers 4 or 5. Absent fields have the defaults of Qwen3Config or Qwen3MoeConfig.

        Raises ModelError, naming the field, if one is missing, malformed, or has an unsupported value that changes results.
        """
        fields = Fields("config.json", values)
        fields.only("model_type", *HF_TYPES)
        fields.only("hidden_act", "silu")
        fields.only("is_causal", True)  # false makes transformers attend to later tokens, too
        fields.only("per_layer_config", None, {})
        moe = values.get("model_type") == "qwen3_moe"
        heads, hidden = fields.size("num_attention_heads", 32), fields.size("hidden_size", 2048 if moe else 4096)
        head_dim = fields.size("head_dim", None if moe else 128, null=max(1, hidden // heads))
        layers = fields.size("num_hidden_layers", 24 if moe else 32, most=MOST_LAYERS)
        window, windowed = _windows(fields, layers, moe)
        return cls(
            vocab_size=fields.size("vocab_size", 151936),
            hidden_size=hidden,
            intermediate_size=fields.size("intermediate_size", 6144 if moe else 22016),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=fields.size("num_key_value_heads", 4 if moe else 32, null=heads),
            head_dim=head_dim,
            max_position_embeddings=fields.size("max_position_embeddings", 32768),
            rope=rope_from_hf(fields, head_dim),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            attention_bias=fields.flag("attention_bias", False),
            eos_token_ids=fields.ids("eos_token_id"),
            sliding_window=window,
            windowed=windowed,
            **(_experts(fields, layers) if moe else {}),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tensors: Mapping[str, Sequence[int]] | None = None) -> Config:
        """Read GGUF metadata ("qwen3.*" or "qwen3moe.*" keys), with the shapes of the file's tensors by name.

        GGUF states neither tied embeddings nor biases: they follow from the tensors. Without `tensors`, the
        embeddings count as untied, and there are no biases. Raises ModelError, naming the unusable field.
        """
        fields, tensors = Fields("GGUF metadata", metadata), tensors or {}
        fields.only("general.architecture", "qwen3", "qwen3moe")
        moe = metadata.get("general.architecture") == "qwen3moe"
        own = Fields(fields.source, metadata, prefix="qwen3moe." if moe else "qwen3.")
        own.only("attention.causal", True)
        check_gguf_window(own)
        heads, hidden = own.size("attention.head_count"), own.size("embedding_length")
        head_dim = own.size("attention.key_length", max(1, hidden // heads))
        own.only("attention.value_length", head_dim)
        own.only("rope.dimension_count", head_dim)
        layers = own.size("block_count", most=MOST_LAYERS)
        return cls(
            vocab_size=vocab_from_gguf(fields, own, tensors),
            hidden_size=hidden,
            intermediate_size=own.size("feed_forward_length"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=own.size("attention.head_count_kv", heads),
            head_dim=head_dim,
            max_position_embeddings=own.size("context_length"),
            rope=rope_from_gguf(own, head_dim),
            rms_norm_eps=own.number("attention.layer_norm_rms_epsilon"),
            tie_word_embeddings="token_embd.weight" in tensors and "output.weight" not in tensors,
            attention_bias="blk.0.attn_q.bias" in tensors,
            eos_token_ids=fields.ids("tokenizer.ggml.eos_token_id"),
            **(_gguf_experts(own, layers, tensors) if moe else {}),
        )


def _windows(fields: Fields, layers: int, moe: bool) -> tuple[int | None, tuple[int, ...]]:
    """Return (window, layers that have it). With experts: all or none; else by `layer_types` or `max_window_layers`."""
    used = fields.flag("use_sliding_window", False) and fields.values.get("sliding_window", 4096) is not None
    window = fields.size("sliding_window", 4096) if used else None
    kinds = fields.values.get("layer_types")
    if window is None:
        windowed: tuple[int, ...] = ()
    elif moe:
        windowed = tuple(range(layers))
    else:
        windowed = tuple(range(fields.count("max_window_layers", 28), layers))
    if kinds is None:
        return window if windowed else None, windowed
    if not isinstance(kinds, list | tuple) or len(kinds) != layers or not all(kind in ATTENDS for kind in kinds):
        raise fields.wrong("layer_types", kinds, f"{' or '.join(ATTENDS)} for each of {layers} layers")
    stated = tuple(i for i, kind in enumerate(kinds) if kind != "full_attention")
    if (moe and stated != windowed) or (stated and window is None):
        raise fields.wrong("layer_types", kinds, "layers that agree with use_sliding_window and sliding_window")
    return window if stated else None, stated


def _experts(fields: Fields, layers: int) -> dict[str, Any]:
    """Return the fields of a Qwen3 with experts. 0 experts, under the current or the older name, make all layers dense."""
    name = "num_local_experts" if "num_local_experts" in fields.values else "num_experts"
    if fields.count(name, 128) == 0:
        return {}
    step, dense = fields.size("decoder_sparse_step", 1), fields.values.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple) or not all(isinstance(i, int) and not isinstance(i, bool) for i in dense):
        raise fields.wrong("mlp_only_layers", dense, "a list of layer numbers")
    return {
        "num_experts": fields.size(name, 128, most=MOST_EXPERTS),
        "num_experts_per_tok": fields.size("num_experts_per_tok", 8),
        "moe_intermediate_size": fields.size("moe_intermediate_size", 768),
        "norm_topk_prob": fields.flag("norm_topk_prob", False),
        "sparse": tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0),
    }


def _gguf_experts(own: Fields, layers: int, tensors: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return the expert fields from GGUF, where chosen weights always sum to one. Layers without a router are dense."""
    check_gguf_routing(own)
    return {
        "num_experts": own.size("expert_count", most=MOST_EXPERTS),
        "num_experts_per_tok": own.size("expert_used_count"),
        "moe_intermediate_size": own.size("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "sparse": tuple(i for i in range(layers) if not tensors or f"blk.{i}.ffn_gate_inp.weight" in tensors),
    }


_ATTENTION = {  # ours: (Hugging Face, GGUF)
    "attention.qkv.q": ("self_attn.q_proj", "attn_q"),
    "attention.qkv.k": ("self_attn.k_proj", "attn_k"),
    "attention.qkv.v": ("self_attn.v_proj", "attn_v"),
    "attention.o": ("self_attn.o_proj", "attn_output"),
}
_NORMS = {
    "attention_norm": ("input_layernorm", "attn_norm"),
    "attention.q_norm": ("self_attn.q_norm", "attn_q_norm"),
    "attention.k_norm": ("self_attn.k_norm", "attn_k_norm"),
    "mlp_norm": ("post_attention_layernorm", "ffn_norm"),
}
_MLP = {
    "mlp.gate_up.gate": ("mlp.gate_proj", "ffn_gate"),
    "mlp.gate_up.up": ("mlp.up_proj", "ffn_up"),
    "mlp.down": ("mlp.down_proj", "ffn_down"),
}
_ROUTER = {"moe.router": ("mlp.gate", "ffn_gate_inp")}


def names_hf(config: Config, stored: Collection[str] = ()) -> dict[str, Source]:
    """Map our parameters to the tensors of a Hugging Face checkpoint; `stored` are its tensor names."""
    prefix, head = ends_hf(stored)
    ends = {"embed": f"{prefix}embed_tokens.weight", "norm": f"{prefix}norm.weight", "head": head}
    names = _names(config, 0, f"{prefix}layers", ends)
    for i in config.sparse:
        places = f"layers.{i}.moe.experts", f"{prefix}layers.{i}.mlp.experts"
        names |= dict(experts_hf(*places, config.num_experts, config.moe_intermediate_size, stored))
    return names


def names_gguf(config: Config, stored: Collection[str] = ()) -> dict[str, Source]:
    """Map our parameters to the tensors of a GGUF file, which stores matrices as [out, in] and rotary halves in our order."""
    ends = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
    names = _names(config, 1, "blk", ends)
    for i in config.sparse:
        names |= dict(experts_gguf(f"layers.{i}.moe.experts", f"blk.{i}", config.moe_intermediate_size, stored))
    return names


def _names(config: Config, column: int, prefix: str, ends: dict[str, str]) -> dict[str, Source]:
    names = {f"{ours}.weight": Source((theirs,)) for ours, theirs in ends.items()}
    if config.tie_word_embeddings:
        del names["head.weight"]
    for i in range(config.num_hidden_layers):
        for ours, both in (_ATTENTION | _NORMS | (_ROUTER if i in config.sparse else _MLP)).items():
            for leaf in ("weight", "bias") if config.attention_bias and ours in _ATTENTION else ("weight",):
                names[f"layers.{i}.{ours}.{leaf}"] = Source((f"{prefix}.{i}.{both[column]}.{leaf}",))
    return names
