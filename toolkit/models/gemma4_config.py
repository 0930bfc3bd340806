"""The config of Gemma 4, read from config.json or GGUF metadata. Unsupported fields raise an error that names the field.

Only text is supported: for a multimodal config, the text part is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolkit.core.errors import ModelError
from toolkit.models.fields import Fields, check_gguf_routing

SLIDING, FULL = "sliding_attention", "full_attention"
ACTIVATIONS = ("gelu_pytorch_tanh", "gelu", "silu", "relu")
ONLY: tuple[tuple[Any, ...], ...] = (  # fields with few supported values
    ("use_bidirectional_attention", None, "vision"), ("is_causal", True), ("rope_scaling", None, {}),
    ("attention_logit_cap", None), ("attn_logit_softcapping", None),
)  # fmt: skip
HF_TYPES = ("gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified")
ROPE_DEFAULTS = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
}


@dataclass(frozen=True)
class Heads:
    """The KV heads of one kind of layer, and the rotary embedding of its queries and keys.

    The first `turning` of the head_dim / 2 pairs rotate, pair i by theta ** (-2 i / head_dim) / factor radians per position.
    """

    kv_heads: int
    head_dim: int
    theta: float
    turning: int
    factor: float = 1.0


@dataclass(frozen=True)
class Config:
    """The config of a Gemma 4. Field names follow config.json where it has them.

    `sliding` and `full` describe the heads of the two kinds of layers (None without sliding layers). `intermediate_sizes` has
    one width per layer. If `num_experts` or `hidden_size_per_layer_input` is 0, the model has no such part. With
    `rope_freqs_stored`, a weight divides the frequencies of the full layers, as in GGUF files.
    """

    vocab_size: int
    hidden_size: int
    intermediate_sizes: tuple[int, ...]
    num_attention_heads: int
    layer_types: tuple[str, ...]
    sliding: Heads | None
    full: Heads
    sliding_window: int = 512
    max_position_embeddings: int = 131_072
    rms_norm_eps: float = 1e-6
    hidden_activation: str = "gelu_pytorch_tanh"
    final_logit_softcapping: float | None = None
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    hidden_size_per_layer_input: int = 0
    vocab_size_per_layer_input: int = 0
    num_experts: int = 0
    top_k_experts: int = 0
    moe_intermediate_size: int = 0
    eos_token_ids: tuple[int, ...] = (1,)
    rope_freqs_stored: bool = False

    def __post_init__(self) -> None:
        self._check_heads()
        self._check_sharing()
        if self.top_k_experts > self.num_experts:
            asked = f"a Gemma 4 of {self.num_experts} experts, top_k_experts {self.top_k_experts}"
            raise ModelError(
                asked, "a token can't use more experts than there are", f"Use top_k_experts of at most {self.num_experts}"
            )
        if self.hidden_size_per_layer_input and self.vocab_size_per_layer_input < self.vocab_size:
            asked = f"a Gemma 4 of {self.vocab_size:,} tokens, vocab_size_per_layer_input {self.vocab_size_per_layer_input:,}"
            raise ModelError(asked, "some tokens have no per-layer input", f"Use at least {self.vocab_size:,} for both")

    def _check_heads(self) -> None:
        for kind in {SLIDING, FULL} & set(self.layer_types):
            heads = self.heads(kind)
            asked = (
                f"a Gemma 4 of {self.num_attention_heads} heads, {heads.kv_heads} KV heads, head_dim {heads.head_dim} ({kind})"
            )
            if self.num_attention_heads % heads.kv_heads:
                raise ModelError(
                    asked,
                    "the heads can't be divided evenly among the KV heads",
                    "num_key_value_heads must divide num_attention_heads",
                )
            if heads.head_dim % 2:
                raise ModelError(asked, "rotary embeddings rotate pairs, and head_dim is odd", "Use an even head_dim")

    def _check_sharing(self) -> None:
        own = self.layer_types[: self.first_shared_layer]
        if self.first_shared_layer < 0 or not set(self.layer_types) <= set(own):
            asked = f"a Gemma 4 of {len(self.layer_types)} layers, num_kv_shared_layers {self.num_kv_shared_layers}"
            found = "some of the last layers reuse keys and values, but no earlier layer of the same kind computes any"
            raise ModelError(asked, found, "Use a smaller num_kv_shared_layers")

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    @property
    def key_dim(self) -> int:
        """How many numbers of each key a full layer's cache holds if the others equal the value's, or 0 for whole keys.

        These are the numbers that rotate, or more: the kernels need a power of two of at least 16. Keys that other layers share
        are whole, because these layers don't have the weight that their queries would need.
        """
        found = max(16, 1 << (2 * self.full.turning - 1).bit_length())
        return found if self.attention_k_eq_v and not self.num_kv_shared_layers and found < self.full.head_dim else 0

    @property
    def first_shared_layer(self) -> int:
        """The first layer that attends to the keys and values of an earlier layer of its kind."""
        return len(self.layer_types) - self.num_kv_shared_layers

    def source(self, layer: int) -> int:
        """Return the layer whose keys and values a layer attends to: its own, or the last one that computes any of its kind."""
        if layer < self.first_shared_layer:
            return layer
        return max(i for i in range(self.first_shared_layer) if self.layer_types[i] == self.layer_types[layer])

    def lends(self, layer: int) -> bool:
        """Return whether later layers attend to the keys and values of a layer."""
        return any(self.source(i) == layer for i in range(self.first_shared_layer, self.num_hidden_layers))

    @property
    def skipped(self) -> tuple[str, ...]:
        """Patterns (for `re.match`) of unused stored tensors: keys and values of layers that use another layer's."""
        shared = "|".join(map(str, range(self.first_shared_layer, self.num_hidden_layers)))
        if not shared:
            return ()
        return (
            rf"(.*\.)?layers\.({shared})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.",
            rf"blk\.({shared})\.attn_(k|v|k_norm)\.",
        )

    def heads(self, kind: str) -> Heads:
        """Return the heads of layers of this kind."""
        found = self.full if kind == FULL else self.sliding
        assert found is not None
        return found

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> Config:
        """Read the config.json of a text model, or the text part of a multimodal one.

        Absent fields have the defaults of transformers. Raises ModelError, naming the field, if a field is missing, malformed,
        or has an unsupported value that would change the result.
        """
        outer = Fields("config.json", values)
        outer.only("model_type", *HF_TYPES)
        nested = "text_config" in values or values.get("model_type") in ("gemma4", "gemma4_unified")
        if nested and not isinstance(values.get("text_config"), Mapping):
            raise outer.wrong("text_config", values.get("text_config"), "a mapping with the config of the text model")
        text = Fields("config.json text_config", values["text_config"]) if nested else outer
        unified = str(values.get("model_type")).startswith("gemma4_unified")
        return _from_hf(cls, text, outer, unified)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tensors: Mapping[str, Sequence[int]] | None = None) -> Config:
        """Read GGUF metadata ("gemma4.*" keys), with the shapes of the file's tensors by name.

        GGUF states neither tied embeddings, nor K = V, nor experts: these follow from the tensors that exist. Without
        `tensors`, the embeddings count as untied, and V as separate from K. `metadata` may contain the values of the tensor
        "rope_freqs.weight", which tell how many numbers of a head rotate; without them, all may. Raises ModelError, naming the
        unusable field.
        """
        return _from_gguf(cls, metadata, tensors or {})


def _from_hf(cls: type[Config], text: Fields, outer: Fields, unified: bool) -> Config:
    values = text.values
    for name, *supported in ONLY:
        text.only(name, *supported)
    text.only("hidden_activation", *ACTIVATIONS)
    layers, k_eq_v = text.size("num_hidden_layers", 30), text.flag("attention_k_eq_v", False)
    kinds = _layer_types(text, layers)
    shared, width = _count(text, "num_kv_shared_layers"), text.size("intermediate_size", 9216)
    doubled = layers - shared if text.flag("use_double_wide_mlp", False) and 0 < shared < layers else layers
    sizes = _head_sizes(text, kinds, k_eq_v)
    moe = not unified and text.flag("enable_moe_block", False)
    per_layer = 0 if unified else _count(text, "hidden_size_per_layer_input", 256)
    cap = values.get("final_logit_softcapping")
    eos = outer if outer.values.get("eos_token_id") is not None else text
    return cls(
        vocab_size=text.size("vocab_size", 262_144),
        hidden_size=text.size("hidden_size", 2304),
        intermediate_sizes=tuple(width if i < doubled else 2 * width for i in range(layers)),
        num_attention_heads=text.size("num_attention_heads", 8),
        layer_types=kinds,
        sliding=_heads(text, SLIDING, *sizes[SLIDING]) if SLIDING in kinds else None,
        full=_heads(text, FULL, *sizes[FULL]),
        sliding_window=text.size("sliding_window", 1024 if unified else 512),
        max_position_embeddings=text.size("max_position_embeddings", 262_144 if unified else 131_072),
        rms_norm_eps=text.number("rms_norm_eps", 1e-6),
        hidden_activation=values.get("hidden_activation", ACTIVATIONS[0]),
        final_logit_softcapping=None if cap is None else text.number("final_logit_softcapping"),
        tie_word_embeddings=outer.flag("tie_word_embeddings", True),
        attention_bias=text.flag("attention_bias", False),
        attention_k_eq_v=k_eq_v,
        num_kv_shared_layers=shared,
        hidden_size_per_layer_input=per_layer,
        vocab_size_per_layer_input=text.size("vocab_size_per_layer_input", 262_144) if per_layer else 0,
        num_experts=text.size("num_experts") if moe else 0,
        top_k_experts=text.size("top_k_experts") if moe else 0,
        moe_intermediate_size=text.size("moe_intermediate_size") if moe else 0,
        eos_token_ids=eos.ids("eos_token_id") if "eos_token_id" in eos.values else (1,),
    )


def _count(fields: Fields, name: str, default: int = 0) -> int:
    """Return a whole number of at least 0; null is 0."""
    return 0 if fields.values.get(name, default) in (None, 0) else fields.size(name, default)


def _layer_types(text: Fields, layers: int) -> tuple[str, ...]:
    """Return the kind of each layer: by default every sixth layer is full. The last one always is."""
    stated = text.values.get("layer_types")
    if layers > 1 << 20:
        raise text.wrong("num_hidden_layers", layers, f"at most {1 << 20:,} layers")
    if stated is None:
        stated = [FULL if i % 6 == 5 else SLIDING for i in range(layers)]
    if not isinstance(stated, list | tuple) or len(stated) != layers or any(kind not in (SLIDING, FULL) for kind in stated):
        raise text.wrong("layer_types", stated, f"{SLIDING!r} or {FULL!r} for each of {layers} layers")
    return (*stated[:-1], FULL)


def _head_sizes(text: Fields, kinds: tuple[str, ...], k_eq_v: bool) -> dict[str, tuple[int, int]]:
    """Return (KV heads, head_dim) of each kind, from `per_layer_config` (transformers 5.17) or the `global_` fields."""
    usual = text.size("num_key_value_heads", 4), text.size("head_dim", 256)
    if "per_layer_config" in text.values:
        return _overridden(text, kinds, usual)
    kv_heads = text.values.get("num_global_key_value_heads") if k_eq_v else None
    own = usual[0] if kv_heads is None else text.size("num_global_key_value_heads")
    return {SLIDING: usual, FULL: (own, text.size("global_head_dim", 512))}


def _overridden(text: Fields, kinds: tuple[str, ...], usual: tuple[int, int]) -> dict[str, tuple[int, int]]:
    """Return (KV heads, head_dim) from `per_layer_config`. A kind's layers must agree, as they share a rotary table."""
    stated = text.values["per_layer_config"]
    stated = {} if stated is None else stated
    wanted = "a mapping of layer numbers to their num_key_value_heads and head_dim"

    def is_layer(key: str) -> bool:
        return key.isdecimal() and len(key) < 8 and int(key) < len(kinds)

    if not isinstance(stated, Mapping) or not all(is_layer(str(key)) for key in stated):
        raise text.wrong("per_layer_config", stated, wanted)
    found: dict[str, set[tuple[int, int]]] = {SLIDING: set(), FULL: set()}
    overrides = {int(key): value for key, value in stated.items()}
    for layer, kind in enumerate(kinds):
        own = Fields(f"{text.source} per_layer_config {layer}", overrides.get(layer, {}))
        for name, value in own.values.items():
            if name not in ("num_key_value_heads", "head_dim", "skip") and value != text.values.get(name):
                raise own.wrong(name, value, wanted, "not supported, because only these fields may differ between layers")
        own.only("skip", None, [])
        found[kind].add((own.size("num_key_value_heads", usual[0]), own.size("head_dim", usual[1])))
    if any(len(several) > 1 for several in found.values()):
        raise text.wrong("per_layer_config", stated, "the same values for all layers of a kind (sliding or full)")
    return {kind: next(iter(one), usual) for kind, one in found.items()}


def _heads(text: Fields, kind: str, kv_heads: int, head_dim: int) -> Heads:
    """Return the heads of one kind, with its entry of `rope_parameters`: "default" or "proportional"."""
    stated = text.values.get("rope_parameters")
    ropes = ROPE_DEFAULTS if stated is None else stated
    if not isinstance(ropes, Mapping) or not isinstance(ropes.get(kind), Mapping):
        raise text.wrong("rope_parameters", stated, f"an entry for {kind!r}")
    rope = Fields(f"{text.source} rope_parameters {kind}", ropes[kind])
    rope_type = rope.values.get("rope_type", rope.values.get("type", "default"))
    if rope_type not in ("default", "proportional"):
        raise rope.wrong("rope_type", rope_type, "'default' or 'proportional'", "not supported")
    theta = rope.number("rope_theta", text.values.get("rope_theta", 10_000.0))
    if rope_type == "default":  # whole heads rotate: transformers ignores partial_rotary_factor here
        return Heads(kv_heads, head_dim, theta, head_dim // 2)
    stated_outside = "partial_rotary_factor" not in rope.values and text.values.get("partial_rotary_factor") is not None
    part = text if stated_outside else rope
    share = 0.0 if part.values.get("partial_rotary_factor") == 0 else part.number("partial_rotary_factor", 1.0)
    if share > 1:
        raise part.wrong("partial_rotary_factor", share, "a number from 0 to 1")
    return Heads(kv_heads, head_dim, theta, int(share * head_dim // 2), rope.number("factor", 1.0))


def _from_gguf(cls: type[Config], metadata: Mapping[str, Any], tensors: Mapping[str, Sequence[int]]) -> Config:
    fields = Fields("GGUF metadata", metadata)
    fields.only("general.architecture", "gemma4")
    fields.only("gemma4.attention.causal", True)
    check_gguf_routing(Fields(fields.source, metadata, prefix="gemma4."))
    fields.only("gemma4.rope.scaling.type", None, "none")
    for name in ("rope.scaling.factor", "rope.scale_linear"):  # scale without a type, too; 0 means none
        fields.only(f"gemma4.{name}", None, 1.0, 0.0)
    fields.only("gemma4.rope.scaling.attn_factor", None, 1.0)
    layers, heads = fields.size("gemma4.block_count"), fields.size("gemma4.attention.head_count")
    windowed = _per_layer(fields, "gemma4.attention.sliding_window_pattern", layers, bool)
    kinds = tuple(SLIDING if one else FULL for one in windowed)
    if kinds[-1] != FULL:
        raise fields.wrong(
            "gemma4.attention.sliding_window_pattern", windowed, "false for the last layer, which must have full attention"
        )
    kv_heads = _per_layer(fields, "gemma4.attention.head_count_kv", layers, int, heads)
    shared = _count(fields, "gemma4.attention.shared_kv_layers")
    own_full = [i for i in range(layers - shared) if kinds[i] == FULL]
    tokens, per_layer = metadata.get("tokenizer.ggml.tokens"), _count(fields, "gemma4.embedding_length_per_layer_input")
    counted = next(iter(tensors.get("token_embd.weight", ())), len(tokens) if isinstance(tokens, list | tuple) else None)
    vocab = int(counted or fields.size("gemma4.vocab_size"))
    moe = "blk.0.ffn_gate_inp.weight" in tensors or (not tensors and _count(fields, "gemma4.expert_count") > 0)
    cap = metadata.get("gemma4.final_logit_softcapping")
    return cls(
        vocab_size=vocab,
        hidden_size=fields.size("gemma4.embedding_length"),
        intermediate_sizes=_per_layer(fields, "gemma4.feed_forward_length", layers, int),
        num_attention_heads=heads,
        layer_types=kinds,
        sliding=_gguf_heads(fields, "_swa", SLIDING, kinds, kv_heads) if SLIDING in kinds else None,
        full=_turning(_gguf_heads(fields, "", FULL, kinds, kv_heads), metadata.get("rope_freqs.weight")),
        sliding_window=fields.size("gemma4.attention.sliding_window"),
        max_position_embeddings=fields.size("gemma4.context_length"),
        rms_norm_eps=fields.number("gemma4.attention.layer_norm_rms_epsilon"),
        final_logit_softcapping=None if cap is None else fields.number("gemma4.final_logit_softcapping"),
        tie_word_embeddings="token_embd.weight" in tensors and "output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        attention_k_eq_v=bool(tensors) and not any(f"blk.{i}.attn_v.weight" in tensors for i in own_full),
        num_kv_shared_layers=shared,
        hidden_size_per_layer_input=per_layer,
        vocab_size_per_layer_input=next(iter(tensors.get("per_layer_token_embd.weight", ())), vocab) if per_layer else 0,
        num_experts=fields.size("gemma4.expert_count") if moe else 0,
        top_k_experts=fields.size("gemma4.expert_used_count") if moe else 0,
        moe_intermediate_size=fields.size("gemma4.expert_feed_forward_length") if moe else 0,
        eos_token_ids=fields.ids("tokenizer.ggml.eos_token_id"),
        rope_freqs_stored=True,
    )


def _per_layer(fields: Fields, name: str, layers: int, kind: type, default: int | None = None) -> tuple[Any, ...]:
    """Return one value per layer from a field that holds a single value or a list: booleans, or whole numbers of at least 1."""
    value = fields.values.get(name, default)
    several = list(value) if isinstance(value, list | tuple) else [value] * min(layers, 1 << 20)
    good = all(
        isinstance(v, bool) if kind is bool else not isinstance(v, bool) and isinstance(v, int) and v > 0 for v in several
    )
    if len(several) != layers or not good:
        raise fields.wrong(name, value, f"{'true or false' if kind is bool else 'a whole number'} for each of {layers} layers")
    return tuple(several)


def _gguf_heads(fields: Fields, suffix: str, kind: str, kinds: tuple[str, ...], kv_heads: Sequence[int]) -> Heads:
    """Return the heads of one kind, whose keys end in `suffix`. In full layers a stored weight divides the frequencies."""
    head_dim = fields.size(f"gemma4.attention.key_length{suffix}")
    fields.only(f"gemma4.attention.value_length{suffix}", head_dim)
    fields.only(f"gemma4.rope.dimension_count{suffix}", head_dim)
    theta = fields.number(f"gemma4.rope.freq_base{suffix}", 10_000.0)
    counts = {n for n, one in zip(kv_heads, kinds, strict=True) if one == kind}
    if len(counts) > 1:
        raise fields.wrong(
            "gemma4.attention.head_count_kv", list(kv_heads), "the same values for all layers of a kind (sliding or full)"
        )
    return Heads(counts.pop(), head_dim, theta, head_dim // 2)


def _turning(heads: Heads, divisors: Sequence[float] | None) -> Heads:
    """Return `heads` with the number of pairs that rotate. Converters give the others, which come last, a divisor of 1e30."""
    if divisors is None or len(divisors) != heads.turning:
        return heads
    still = [divisor >= 1e20 for divisor in divisors]
    turning = still.index(True) if True in still else heads.turning
    return replace(heads, turning=turning) if all(still[turning:]) else heads
