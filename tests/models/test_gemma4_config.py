"""Tests of Gemma 4 configs: reading supported ones, errors that name unsupported fields, and the names of weights."""

from __future__ import annotations

import copy
import re

import pytest
import torch

from tests.models.cases_gemma4 import BASE, CASES, K_EQ_V, MOE, PER_LAYER, SHARED
from tests.models.parity import CPU
from toolkit.core.errors import ModelError
from toolkit.models import ARCHITECTURES, gemma4
from toolkit.models.gemma4 import Config, Model, names_gguf, names_hf

transformers = pytest.importorskip("transformers")

TEXT = BASE | {"model_type": "gemma4_text"}
SLIDING, FULL = "sliding_attention", "full_attention"
ROPES = {SLIDING: {"rope_type": "default", "rope_theta": 1e4}, FULL: {"rope_type": "proportional", "rope_theta": 1e6}}


def test_absent_fields_have_the_defaults_of_transformers():
    absent, theirs = Config.from_hf({"model_type": "gemma4_text"}), transformers.Gemma4TextConfig()
    for field in (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "sliding_window", "max_position_embeddings",
        "rms_norm_eps", "tie_word_embeddings", "hidden_size_per_layer_input",
        "vocab_size_per_layer_input", "num_kv_shared_layers",
    ):  # fmt: skip
        assert getattr(absent, field) == getattr(theirs, field), field
    assert list(absent.layer_types) == theirs.layer_types
    assert absent.intermediate_sizes == (theirs.intermediate_size,) * 30
    assert (absent.sliding.kv_heads, absent.sliding.head_dim, absent.sliding.turning) == (4, 256, 128)
    assert (absent.full.kv_heads, absent.full.head_dim, absent.full.turning) == (4, 512, 64)
    assert absent.eos_token_ids == (1,)
    assert Config.from_hf(theirs.to_dict()) == absent
    unified = Config.from_hf({"model_type": "gemma4_unified_text"})
    assert unified == Config.from_hf(transformers.Gemma4UnifiedTextConfig().to_dict())
    assert (unified.sliding_window, unified.hidden_size_per_layer_input) == (1024, 0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_transformers_saves_is_read_as_what_it_was_given(case):
    saved = transformers.Gemma4TextConfig(**case.values).to_dict()
    assert Config.from_hf(saved) == Config.from_hf({"model_type": "gemma4_text"} | case.values)


def test_both_spellings_of_what_differs_between_layers():
    old = Config.from_hf(TEXT | K_EQ_V)
    override = {"3": {"head_dim": 16, "num_key_value_heads": 1}}
    new = {k: v for k, v in TEXT.items() if k != "global_head_dim"} | {"attention_k_eq_v": True, "per_layer_config": override}
    assert Config.from_hf(new) == old
    assert Config.from_hf(TEXT | {"per_layer_config": {"03": {"head_dim": 16, "skip": []}}}) == Config.from_hf(TEXT)
    assert Config.from_hf(TEXT | {"per_layer_config": {}}).full.head_dim == 8
    own_heads = Config.from_hf(TEXT | {"num_global_key_value_heads": 1})
    assert own_heads.full.kv_heads == 2  # counts only where K = V


@pytest.mark.parametrize("outside", [0, 0.5, 1.0, None])
@pytest.mark.parametrize("inside", [{}, {"partial_rotary_factor": 0.25}], ids=["", "inside"])
def test_the_rotating_share_of_heads_may_be_stated_for_all_layers(inside, outside):
    ropes = {SLIDING: ROPES[SLIDING], FULL: {"rope_type": "proportional", "rope_theta": 1e4} | inside}
    values = TEXT | {"rope_parameters": ropes, "partial_rotary_factor": outside}
    theirs = transformers.models.gemma4.modeling_gemma4.Gemma4TextRotaryEmbedding(
        transformers.Gemma4TextConfig(**copy.deepcopy(values))
    )
    found = gemma4.frequencies_of(Config.from_hf(values).full, CPU.torch)
    assert torch.allclose(found, theirs.full_attention_inv_freq)


def test_the_last_layer_is_always_full():
    assert Config.from_hf(TEXT | {"layer_types": [SLIDING] * 4}).layer_types == (SLIDING, SLIDING, SLIDING, FULL)
    assert Config.from_hf(TEXT | {"layer_types": None}).layer_types == (SLIDING, SLIDING, SLIDING, FULL)
    assert Config.from_hf(TEXT | {"layer_types": [FULL] * 4}).sliding is None


def test_double_wide_layers_are_the_shared_ones():
    config = Config.from_hf(TEXT | SHARED | {"use_double_wide_mlp": True})
    assert config.intermediate_sizes == (40, 40, 40, 80, 80, 80, 80)
    assert Config.from_hf(TEXT | {"use_double_wide_mlp": True}).intermediate_sizes == (40,) * 4


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
def test_the_text_part_of_a_multimodal_config(kind):
    text = TEXT | {"model_type": f"{kind}_text", "tie_word_embeddings": False}
    whole = {"model_type": kind, "text_config": text, "vision_config": {"hidden_size": 1}, "eos_token_id": [1, 106]}
    config = Config.from_hf(whole)
    assert config.hidden_size == 24
    assert config.eos_token_ids == (1, 106)
    assert config.tie_word_embeddings  # the whole model's field counts, as in transformers
    assert not Config.from_hf(whole | {"tie_word_embeddings": False}).tie_word_embeddings
    assert ARCHITECTURES[kind] is ARCHITECTURES[f"{kind}_text"] is gemma4
    with pytest.raises(ModelError, match="text_config"):
        Config.from_hf({"model_type": kind})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "gemma3_text"),
        ("hidden_activation", "gelu_new"),
        ("use_bidirectional_attention", "all"),
        ("is_causal", False),
        ("rope_scaling", {"rope_type": "linear", "factor": 8.0}),
        ("layer_types", [SLIDING, FULL]),
        ("layer_types", [SLIDING, SLIDING, "chunked_attention", FULL]),
        ("layer_types", "full_attention"),
        ("sliding_window", None),
        ("sliding_window", 0),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4}),
        ("rope_parameters", {FULL: ROPES[FULL]}),
        ("rope_parameters", ROPES | {FULL: {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}}),
        ("rope_parameters", ROPES | {SLIDING: {"rope_type": "default", "rope_theta": "big"}}),
        ("rope_parameters", ROPES | {FULL: ROPES[FULL] | {"partial_rotary_factor": 1.5}}),
        ("rope_parameters", [1]),
        ("per_layer_config", {"3": {"intermediate_size": 7}}),
        ("per_layer_config", {"3": {"skip": ["mlp"]}}),
        ("per_layer_config", {"4": {"head_dim": 16}}),
        ("per_layer_config", {"0": {"head_dim": 16}}),
        ("per_layer_config", {"x": {}}),
        ("per_layer_config", {"9" * 5000: {}}),
        ("per_layer_config", {"3": 7}),
        ("per_layer_config", [7]),
        ("num_kv_shared_layers", 1),
        ("num_kv_shared_layers", 4),
        ("num_kv_shared_layers", 9),
        ("num_kv_shared_layers", -1),
        ("num_key_value_heads", 4),
        ("num_attention_heads", 13),
        ("head_dim", 7),
        ("global_head_dim", 15),
        ("hidden_size_per_layer_input", "x"),
        ("final_logit_softcapping", -30.0),
        ("final_logit_softcapping", 0),
        ("final_logit_softcapping", 10**400),
        ("attention_k_eq_v", "yes"),
        ("tie_word_embeddings", 1),
        ("num_hidden_layers", 1 << 30),
        ("num_hidden_layers", 0),
        ("hidden_size", "24"),
        ("rms_norm_eps", 0),
        ("eos_token_id", "</s>"),
        ("attn_logit_softcapping", 50.0),
    ],
    ids=lambda v: repr(v)[:40],
)
def test_what_is_not_supported_is_refused_by_name(field, value):
    with pytest.raises(ModelError) as refused:
        Config.from_hf(TEXT | {field: value})
    named = {"global_head_dim": "head_dim", "num_attention_heads": "num_key_value_heads"}.get(field, field)
    assert named in str(refused.value)


@pytest.mark.parametrize("field", ["num_experts", "top_k_experts", "moe_intermediate_size"])
def test_experts_need_their_sizes(field):
    with pytest.raises(ModelError, match=field):
        Config.from_hf(TEXT | MOE | {field: None})
    with pytest.raises(ModelError, match="top_k_experts"):
        Config.from_hf(TEXT | MOE | {"top_k_experts": 6})


def test_every_token_needs_per_layer_inputs():
    with pytest.raises(ModelError, match="vocab_size_per_layer_input"):
        Config.from_hf(TEXT | PER_LAYER | {"vocab_size_per_layer_input": 96})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("names", [names_hf, names_gguf], ids=["hf", "gguf"])
def test_names_cover_every_parameter_once(case, names):
    config = Config.from_hf({"model_type": "gemma4_text"} | case.values)
    sources = names(config)
    assert set(sources) == {name for name, _ in Model(config, CPU).named_parameters()}
    taken = [(source.names, str(source.rows)) for source in sources.values()]
    assert len(set(taken)) == len(taken)


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model.", "language_model.", ""])
def test_text_weights_of_multimodal_checkpoints(prefix):
    config = Config.from_hf(TEXT | {"tie_word_embeddings": False})
    head = "language_model.lm_head.weight" if prefix == "language_model.model." else "lm_head.weight"
    names = names_hf(config, {f"{prefix}embed_tokens.weight", head})
    assert names["embed.weight"].names == (f"{prefix}embed_tokens.weight",)
    assert names["layers.2.attention.o.weight"].names == (f"{prefix}layers.2.self_attn.o_proj.weight",)
    assert names["layers.2.scalar"].names == (f"{prefix}layers.2.layer_scalar",)
    assert names["head.weight"].names == (head,)


def test_other_parts_of_a_multimodal_checkpoint_are_left_out():
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8}
    whole = transformers.Gemma4Config(text_config=BASE | SHARED, vision_config=vision, audio_config=None, eos_token_id=[1, 106])
    stored = set(transformers.Gemma4ForConditionalGeneration(whole).state_dict())
    names = names_hf(Config.from_hf(whole.to_dict()), stored)
    used = {name for source in names.values() for name in source.names}
    assert used <= stored
    left = stored - used - {"lm_head.weight"}
    assert left
    assert all(any(re.match(pattern, name) for pattern in gemma4.SKIPPED) for name in left)
    assert not any(re.match(pattern, name) for pattern in gemma4.SKIPPED for name in used)


def test_keys_and_values_of_layers_that_share_are_left_out():
    config = Config.from_hf(TEXT | SHARED)

    def left_out(name):
        return any(re.match(pattern, name) for pattern in config.skipped)

    assert left_out("model.language_model.layers.5.self_attn.k_proj.weight")
    assert left_out("layers.3.self_attn.k_norm.weight")
    assert left_out("blk.6.attn_v.weight")
    assert not left_out("model.layers.2.self_attn.v_proj.weight")
    assert not left_out("model.layers.5.self_attn.q_proj.weight")
    assert not left_out("blk.36.attn_v.weight")
    assert Config.from_hf(TEXT).skipped == ()
