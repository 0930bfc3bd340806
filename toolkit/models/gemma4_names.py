"""The names of Gemma 4's weights in Hugging Face checkpoints, text-only or multimodal, and in GGUF files."""

from __future__ import annotations

from collections.abc import Collection

from toolkit.models.gemma4_config import FULL, Config
from toolkit.models.places import Source

SKIPPED = (  # parts of multimodal checkpoints, and tensors other than weights in some text checkpoints
    r"(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio|vision_embedder|multi_modal_projector)\.",
    r"(.*\.)?rotary_emb\..*inv_freq$",
)

_ENDS = {  # ours: (Hugging Face, GGUF)
    "embed": ("embed_tokens", "token_embd"),
    "embed.per_layer": ("embed_tokens_per_layer", "per_layer_token_embd"),
    "layer_inputs.proj": ("per_layer_model_projection", "per_layer_model_proj"),
    "layer_inputs.norm": ("per_layer_projection_norm", "per_layer_proj_norm"),
    "norm": ("norm", "output_norm"),
}
_LAYER = {
    "attention_norm": ("input_layernorm", "attn_norm"), "attention.qkv.q": ("self_attn.q_proj", "attn_q"),
    "attention.qkv.k": ("self_attn.k_proj", "attn_k"), "attention.qkv.v": ("self_attn.v_proj", "attn_v"),
    "attention.o": ("self_attn.o_proj", "attn_output"), "attention.q_norm": ("self_attn.q_norm", "attn_q_norm"),
    "attention.k_norm": ("self_attn.k_norm", "attn_k_norm"),
    "attention_post_norm": ("post_attention_layernorm", "post_attention_norm"),
    "mlp_norm": ("pre_feedforward_layernorm", "ffn_norm"), "mlp.gate_up.gate": ("mlp.gate_proj", "ffn_gate"),
    "mlp.gate_up.up": ("mlp.up_proj", "ffn_up"), "mlp.down": ("mlp.down_proj", "ffn_down"),
    "mlp_post_norm": ("post_feedforward_layernorm", "post_ffw_norm"),
    "dense_post_norm": ("post_feedforward_layernorm_1", "post_ffw_norm_1"),
    "routed.norm": ("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
    "routed.post_norm": ("post_feedforward_layernorm_2", "post_ffw_norm_2"),
    "routed.router.proj": ("router.proj", "ffn_gate_inp"), "layer_input.gate": ("per_layer_input_gate", "inp_gate"),
    "layer_input.up": ("per_layer_projection", "proj"), "layer_input.norm": ("post_per_layer_input_norm", "post_norm"),
}  # fmt: skip
_BIASED = ("attention.qkv.q", "attention.qkv.k", "attention.qkv.v", "attention.o")
_BARE = {  # weights whose stored names don't follow from the module's
    "scalar": ("layer_scalar", "layer_output_scale.weight"),
    "routed.router.scale": ("router.scale", "ffn_gate_inp.scale"),
    "routed.router.per_expert_scale": ("router.per_expert_scale", "ffn_down_exps.scale"),
    "routed.experts.down.weight": ("experts.down_proj", "ffn_down_exps.weight"),
}


def names_hf(config: Config, stored: Collection[str] = ()) -> dict[str, Source]:
    """Map our parameters to the tensors of a Hugging Face checkpoint; `stored` are its tensor names."""
    prefixes = ("model.", "model.language_model.", "language_model.model.", "language_model.", "")
    prefix = next((one for one in prefixes if f"{one}embed_tokens.weight" in stored), "model.")
    head = next((name for name in ("lm_head.weight", "language_model.lm_head.weight") if name in stored), "lm_head.weight")
    return _names(config, 0, prefix, f"{prefix}layers", head, stored)


def names_gguf(config: Config, stored: Collection[str] = ()) -> dict[str, Source]:
    """Map our parameters to the tensors of a GGUF file; `stored` are its tensor names."""
    return _names(config, 1, "", "blk", "output.weight", stored)


def _names(config: Config, column: int, prefix: str, layers: str, head: str, stored: Collection[str]) -> dict[str, Source]:
    """Map every parameter of a model with this config to its tensor; `layers` is the prefix of the layer numbers."""
    names = {f"{ours}.weight": Source((f"{prefix}{both[column]}.weight",)) for ours, both in _ENDS.items()}
    if not config.hidden_size_per_layer_input:
        names = {ours: source for ours, source in names.items() if "layer" not in ours}
    if not config.tie_word_embeddings:
        names["head.weight"] = Source((head,))
    if config.rope_freqs_stored:
        names["rope_freqs"] = Source(("rope_freqs.weight",))
    for i in range(config.num_hidden_layers):
        absent = _absent(config, i)
        for ours, both in _LAYER.items():
            if not ours.startswith(absent):
                for leaf in ("weight", "bias") if config.attention_bias and ours in _BIASED else ("weight",):
                    names[f"layers.{i}.{ours}.{leaf}"] = Source((f"{layers}.{i}.{both[column]}.{leaf}",))
        for ours, both in _BARE.items():
            if not ours.startswith(absent):
                names[f"layers.{i}.{ours}"] = Source((f"{layers}.{i}.{both[column]}",))
        if config.num_experts:
            for half in ("gate", "up"):
                name = f"layers.{i}.routed.experts.gate_up.{half}.weight"
                names[name] = _expert_half(config, f"{layers}.{i}.", column, half, stored)
    return names


def _absent(config: Config, layer: int) -> tuple[str, ...]:
    """Return the prefixes of parameters that layer number `layer` doesn't have."""
    absent: list[str] = []
    if layer >= config.first_shared_layer:
        absent += ["attention.qkv.k", "attention.qkv.v", "attention.k_norm"]
    elif config.attention_k_eq_v and config.layer_types[layer] == FULL:
        absent += ["attention.qkv.v"]
    if not config.num_experts:
        absent += ["routed.", "dense_post_norm"]
    if not config.hidden_size_per_layer_input:
        absent += ["layer_input."]
    return tuple(absent)


def _expert_half(config: Config, layer: str, column: int, half: str, stored: Collection[str]) -> Source:
    """Return the source of gate or up of all experts: half of the rows of one tensor, or a GGUF tensor of its own."""
    alone = f"{layer}ffn_{half}_exps.weight"
    if column == 1 and alone in stored:
        return Source((alone,))
    width = config.moe_intermediate_size
    both = f"{layer}{('experts.gate_up_proj', 'ffn_gate_up_exps.weight')[column]}"
    return Source((both,), rows=slice(0, width) if half == "gate" else slice(width, 2 * width))
