"""The config of Qwen3.5, dense and with experts, from config.json or GGUF metadata, and the names of its stored weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from toolkit.core.errors import ModelError
from toolkit.models.fields import MOST_EXPERTS, MOST_LAYERS, Fields, check_gguf_routing, check_gguf_window, vocab_from_gguf
from toolkit.models.names import ends_hf, experts_gguf, experts_hf
from toolkit.models.places import Source
from toolkit.models.rotary import Rope, rope_from_gguf, rope_from_hf

HF_TYPES = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_5_moe", "qwen3_5")
ONLY: tuple[tuple[Any, ...], ...] = (  # fields with one supported value: transformers supports no other or ignores them
    ("hidden_act", "silu"), ("attn_output_gate", True), ("output_gate_type", "swish", None), ("mlp_only_layers", None, [], ()),
    ("decoder_sparse_step", 1), ("norm_topk_prob", True), ("use_sliding_window", False, None),
    ("mamba_ssm_dtype", "float32", None), ("is_causal", True), ("per_layer_config", None, {}),
)  # fmt: skip
GGUF_EXPERTS = (
    ("num_experts", "expert_count", MOST_EXPERTS),
    ("num_experts_per_tok", "expert_used_count", MOST_EXPERTS),
    ("moe_intermediate_size", "expert_feed_forward_length", 1 << 31),
    ("shared_expert_intermediate_size", "expert_shared_feed_forward_length", 1 << 31),
)
KINDS = {"linear_attention": "linear", "mamba": "linear", "conv": "linear", "full_attention": "full", "attention": "full"}


@dataclass(frozen=True)
class Config:
    """The config of a Qwen3.5. Field names follow config.json where it has them.

    `layer_types` is "linear" or "full" for each layer. `num_experts` 0 means a dense MLP of width `intermediate_size`. With
    `tiled`, value head j of the delta net reads key head j % (number of key heads), as in GGUF files; without it,
    neighboring value heads share a key head.
    """

    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope: Rope
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int = 4
    intermediate_size: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    tiled: bool = False
    drafting_layers: int = 0  # multi-token prediction layers at the end of GGUF files, which are skipped

    def __post_init__(self) -> None:
        shares = (("num_attention_heads", "num_key_value_heads"), ("linear_num_value_heads", "linear_num_key_heads"))
        for many, few in shares:
            if getattr(self, many) % getattr(self, few):
                asked = f"a Qwen3.5 of {getattr(self, many)} {many}, {getattr(self, few)} {few}"
                raise ModelError(asked, "the first number is not a multiple of the second", f"{few} must divide {many}")
        if self.rope.width > self.head_dim:
            asked = f"a Qwen3.5 of head_dim {self.head_dim}"
            do = "Use an even head_dim, or a smaller partial_rotary_factor"
            raise ModelError(asked, f"the rotary embedding needs {self.rope.width} dimensions", do)
        if self.num_experts_per_tok > self.num_experts:
            asked = f"a Qwen3.5 of {self.num_experts} experts, num_experts_per_tok {self.num_experts_per_tok}"
            do = f"Use num_experts_per_tok of at most {self.num_experts}"
            raise ModelError(asked, "a token can't use more experts than there are", do)

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    @property
    def skipped(self) -> tuple[str, ...]:
        """Patterns of the stored tensors that belong to the multi-token prediction layers."""
        layers = self.num_hidden_layers
        return tuple(rf"blk\.{i}\." for i in range(layers, layers + self.drafting_layers))

    @property
    def key_size(self) -> int:
        """The width of the delta net's queries, and of its keys."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_size(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> Config:
        """Read a config.json of transformers 5, or its text_config. Absent fields have the defaults of transformers.

        Raises ModelError, naming the field, if one is missing, malformed, or has an unsupported value that changes results.
        """
        outer, nested = Fields("config.json", values), values.get("text_config")
        outer.only("model_type", *HF_TYPES)
        fields = outer
        if nested is not None:
            inner = Fields("config.json text_config", nested).values
            outside = {name: values[name] for name in ("model_type", "eos_token_id") if name in values}
            ties = {"tie_word_embeddings": values["tie_word_embeddings"]} if "tie_word_embeddings" in values else {}
            fields = Fields("config.json text_config", {**outside, **inner, **ties})
            fields.only("model_type", *HF_TYPES)
        for name, *supported in ONLY:
            fields.only(name, *supported)
        moe = "moe" in fields.values.get("model_type", "qwen3_5_moe_text")
        return cls(**_hf_layers(fields, moe), **(_hf_experts(fields) if moe else {}))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tensors: Mapping[str, Sequence[int]] | None = None) -> Config:
        """Read GGUF metadata ("qwen35moe.*" or "qwen35.*" keys), with the shapes of the file's tensors by name.

        The kinds of layers, tied embeddings and biases follow from the tensors. Without `tensors`, the kinds follow from the
        interval, embeddings count as untied, and there are no biases. Raises ModelError, naming the field.
        """
        fields = Fields("GGUF metadata", metadata)
        fields.only("general.architecture", "qwen35moe", "qwen35")
        moe = metadata.get("general.architecture", "qwen35moe") == "qwen35moe"
        own = Fields(fields.source, metadata, prefix="qwen35moe." if moe else "qwen35.")
        own.only("attention.causal", True)
        check_gguf_routing(own)
        check_gguf_window(own)
        experts: dict[str, Any] = {ours: own.size(theirs, most=most) for ours, theirs, most in GGUF_EXPERTS} if moe else {}
        return cls(
            **_gguf_layers(fields, own, tensors or {}),
            **experts,
            intermediate_size=0 if moe else own.size("feed_forward_length"),
            tiled=True,
        )


def _hf_layers(fields: Fields, moe: bool) -> dict[str, Any]:
    """Return all fields except those of the experts, from config.json."""
    head_dim = fields.size("head_dim", 256)
    return {
        "vocab_size": fields.size("vocab_size", 248320),
        "hidden_size": fields.size("hidden_size", 2048 if moe else 4096),
        "layer_types": _layer_types(fields, 40 if moe else 32),
        "num_attention_heads": fields.size("num_attention_heads", 16),
        "num_key_value_heads": fields.size("num_key_value_heads", 2 if moe else 4),
        "head_dim": head_dim,
        "rope": rope_from_hf(fields, head_dim, share=0.25),
        "linear_num_key_heads": fields.size("linear_num_key_heads", 16),
        "linear_num_value_heads": fields.size("linear_num_value_heads", 32),
        "linear_key_head_dim": fields.size("linear_key_head_dim", 128),
        "linear_value_head_dim": fields.size("linear_value_head_dim", 128),
        "linear_conv_kernel_dim": fields.size("linear_conv_kernel_dim", 4),
        "intermediate_size": 0 if moe else fields.size("intermediate_size", 12288),
        "max_position_embeddings": fields.size("max_position_embeddings", 32768),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        "attention_bias": fields.flag("attention_bias", False),
        "eos_token_ids": fields.ids("eos_token_id"),
    }


def _hf_experts(fields: Fields) -> dict[str, Any]:
    return {
        "num_experts": fields.size("num_experts", 256, most=MOST_EXPERTS),
        "num_experts_per_tok": fields.size("num_experts_per_tok", 8),
        "moe_intermediate_size": fields.size("moe_intermediate_size", 512),
        "shared_expert_intermediate_size": fields.size("shared_expert_intermediate_size", 512),
    }


def _gguf_layers(fields: Fields, own: Fields, tensors: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return all fields except those of the MLP, from GGUF metadata; `own` has the prefix of the architecture."""
    heads, hidden, values = own.size("attention.head_count"), own.size("embedding_length"), own.size("ssm.time_step_rank")
    head_dim, inner = own.size("attention.key_length", max(1, hidden // heads)), own.size("ssm.inner_size")
    own.only("attention.value_length", head_dim)
    if inner % values:
        raise own.wrong("ssm.inner_size", inner, f"a multiple of ssm.time_step_rank, {values}")
    return {
        "vocab_size": vocab_from_gguf(fields, own, tensors),
        "hidden_size": hidden,
        "layer_types": _gguf_layer_types(own, tensors),
        "drafting_layers": own.count("nextn_predict_layers", 0),
        "num_attention_heads": heads,
        "num_key_value_heads": own.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rope": rope_from_gguf(own, own.size("rope.dimension_count", head_dim)),
        "linear_num_key_heads": own.size("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": own.size("ssm.state_size"),
        "linear_value_head_dim": inner // values,
        "linear_conv_kernel_dim": own.size("ssm.conv_kernel"),
        "max_position_embeddings": own.size("context_length"),
        "rms_norm_eps": own.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "token_embd.weight" in tensors and "output.weight" not in tensors,
        "attention_bias": any(name.endswith("attn_q.bias") for name in tensors),
        "eos_token_ids": fields.ids("tokenizer.ggml.eos_token_id"),
    }


def _layer_types(fields: Fields, layers: int) -> tuple[str, ...]:
    """Return `layer_types`, or by default every `full_attention_interval`th layer full."""
    count, stated = fields.size("num_hidden_layers", layers, most=MOST_LAYERS), fields.values.get("layer_types")
    if stated is None:
        return _every(count, fields.size("full_attention_interval", 4))
    if not isinstance(stated, list | tuple) or not all(isinstance(kind, str) and kind in KINDS for kind in stated):
        raise fields.wrong("layer_types", stated, "'linear_attention' or 'full_attention' for each layer")
    if len(stated) != count:
        raise fields.wrong("layer_types", f"{len(stated)} of them", f"as many as num_hidden_layers, {count}")
    return tuple(KINDS[kind] for kind in stated)


def _gguf_layer_types(own: Fields, tensors: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
    """Return the kind of each layer, without the multi-token prediction layers at the end.

    Layers with a tensor "ssm_a" are linear; without tensors, the interval decides.
    """
    count, drafting = own.size("block_count", most=MOST_LAYERS), own.count("nextn_predict_layers", 0)
    if drafting >= count:
        raise own.wrong("nextn_predict_layers", drafting, f"a whole number below block_count, {count}")
    kinds = _every(count - drafting, own.size("full_attention_interval", 4))
    if not tensors:
        return kinds
    return tuple("linear" if f"blk.{i}.ssm_a" in tensors else "full" for i in range(len(kinds)))


def _every(count: int, interval: int) -> tuple[str, ...]:
    return tuple("linear" if (i + 1) % interval else "full" for i in range(count))


_NORMS = {"mixer_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_ATTENTION = {
    "attention.qkv.q": ("self_attn.q_proj", "attn_q"),
    "attention.qkv.k": ("self_attn.k_proj", "attn_k"),
    "attention.qkv.v": ("self_attn.v_proj", "attn_v"),
    "attention.o": ("self_attn.o_proj", "attn_output"),
}
_DELTA = {
    "delta.inputs.qkv": ("linear_attn.in_proj_qkv", "attn_qkv"),
    "delta.inputs.z": ("linear_attn.in_proj_z", "attn_gate"),
    "delta.inputs.b": ("linear_attn.in_proj_b", "ssm_beta"),
    "delta.inputs.a": ("linear_attn.in_proj_a", "ssm_alpha"),
    "delta.out": ("linear_attn.out_proj", "ssm_out"),
}
_MLP = {
    "mlp.gate_up.gate": ("mlp.gate_proj", "ffn_gate"),
    "mlp.gate_up.up": ("mlp.up_proj", "ffn_up"),
    "mlp.down": ("mlp.down_proj", "ffn_down"),
}
_SHARED = {
    "moe.shared.gate_up.gate": ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    "moe.shared.gate_up.up": ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    "moe.shared.down": ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
}


def names_hf(config: Config, stored: Collection[str] = ()) -> dict[str, Source]:
    """Map our parameters to the tensors of a Hugging Face checkpoint; `stored` are its tensor names.

    The prefix and whether experts are fused follow from `stored`. Norms are stored minus one, except those of the delta net.
    """
    prefix, head = ends_hf(stored)
    names = {"embed.weight": Source((f"{prefix}embed_tokens.weight",)), "norm.weight": _norm(f"{prefix}norm")}
    if not config.tie_word_embeddings:
        names["head.weight"] = Source((head,))
    for i, kind in enumerate(config.layer_types):
        ours, theirs = f"layers.{i}", f"{prefix}layers.{i}"
        for leaf, name in _NORMS.items():
            names[f"{ours}.{leaf}.weight"] = _norm(f"{theirs}.{name}")
        names |= _plain(config, kind, 0, ours, theirs)
        if kind == "full":
            for leaf in ("q_norm", "k_norm"):
                names[f"{ours}.attention.{leaf}.weight"] = _norm(f"{theirs}.self_attn.{leaf}")
        else:
            delta = f"{theirs}.linear_attn"
            names[f"{ours}.delta.conv"] = Source((f"{delta}.conv1d.weight",), shape=_conv_shape(config))
            names[f"{ours}.delta.decay"] = Source((f"{delta}.A_log",), change=_negative_exp)
            names[f"{ours}.delta.dt_bias"] = Source((f"{delta}.dt_bias",))
            names[f"{ours}.delta.norm.weight"] = Source((f"{delta}.norm.weight",))
        if config.num_experts:
            names[f"{ours}.moe.gates.router.weight"] = Source((f"{theirs}.mlp.gate.weight",))
            names[f"{ours}.moe.gates.shared.weight"] = Source((f"{theirs}.mlp.shared_expert_gate.weight",))
            experts = f"{ours}.moe.experts", f"{theirs}.mlp.experts"
            names |= dict(experts_hf(*experts, config.num_experts, config.moe_intermediate_size, stored))
    return names


def names_gguf(config: Config, stored: Collection[str] = ()) -> dict[str, Source]:
    """Map our parameters to the tensors of a GGUF file, with norms and `ssm_a` ready to use, and tiled value heads."""
    names = {"embed.weight": Source(("token_embd.weight",)), "norm.weight": Source(("output_norm.weight",))}
    if not config.tie_word_embeddings:
        names["head.weight"] = Source(("output.weight",))
    for i, kind in enumerate(config.layer_types):
        ours, theirs = f"layers.{i}", f"blk.{i}"
        names |= _plain(config, kind, 1, ours, theirs)
        names[f"{ours}.mixer_norm.weight"] = Source((f"{theirs}.attn_norm.weight",))
        names[f"{ours}.mlp_norm.weight"] = Source((f"{theirs}.post_attention_norm.weight",))
        if kind == "full":
            for leaf in ("q_norm", "k_norm"):
                names[f"{ours}.attention.{leaf}.weight"] = Source((f"{theirs}.attn_{leaf}.weight",))
        else:
            names[f"{ours}.delta.conv"] = Source((f"{theirs}.ssm_conv1d.weight",), shape=_conv_shape(config))
            names[f"{ours}.delta.decay"] = Source((f"{theirs}.ssm_a",))
            names[f"{ours}.delta.dt_bias"] = Source((f"{theirs}.ssm_dt.bias",))
            names[f"{ours}.delta.norm.weight"] = Source((f"{theirs}.ssm_norm.weight",))
        if config.num_experts:
            names[f"{ours}.moe.gates.router.weight"] = Source((f"{theirs}.ffn_gate_inp.weight",))
            shared = Source((f"{theirs}.ffn_gate_inp_shexp.weight",), shape=(1, config.hidden_size))  # stored as [hidden]
            names[f"{ours}.moe.gates.shared.weight"] = shared
            names |= dict(experts_gguf(f"{ours}.moe.experts", theirs, config.moe_intermediate_size, stored))
    return names


def _plain(config: Config, kind: str, column: int, ours: str, theirs: str) -> dict[str, Source]:
    """Return the sources of matrices that are stored as they are used, with biases if there are any."""
    mlp = _SHARED if config.num_experts else _MLP
    found = {}
    for leaf, names in ((_ATTENTION if kind == "full" else _DELTA) | mlp).items():
        biased = config.attention_bias and leaf in _ATTENTION
        for end in ("weight", "bias") if biased else ("weight",):
            found[f"{ours}.{leaf}.{end}"] = Source((f"{theirs}.{names[column]}.{end}",))
    return found


def _conv_shape(config: Config) -> tuple[int, int]:
    return 2 * config.key_size + config.value_size, config.linear_conv_kernel_dim


def _norm(name: str) -> Source:
    return Source((f"{name}.weight",), change=_one_more)


def _one_more(weight: Tensor) -> Tensor:
    return weight + 1


def _negative_exp(logarithm: Tensor) -> Tensor:
    return -logarithm.exp()
