"""Tests of Gemma 4 GGUF files: every tensor and the logits equal those of the checkpoint that llama.cpp's rules converted."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.models.cases_gemma4 import CASES, PER_LAYER, _case
from tests.models.gemma4_gguf import write
from tests.models.parity import CPU, TOLERANCE, filled, in_double, ours, value_of
from toolkit.core.errors import ModelError, ToolkitError
from toolkit.loading import checkpoint
from toolkit.loading.checkpoint import open_checkpoint
from toolkit.models import ARCHITECTURES, gemma4
from toolkit.weights.gguf_files import GgufFile

pytest.importorskip("transformers")

HALF_TURNING = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
}
CONVERTIBLE = [case for case in CASES if case.name in {"as_31b", "untied", "as_26b_a4b", "as_e2b", "all_variants"}]
CONVERTIBLE.append(_case("half_turning", rope_parameters=HALF_TURNING, **PER_LAYER))


def opened(case, folder):
    """Return (transformers' model, config of the GGUF file, its tensors by name)."""
    theirs = case.theirs()
    file = GgufFile(write(folder / "model.gguf", case.values, theirs.state_dict()))
    weights = {name: file.read(name).float().clone() for name in file.stored}
    told = file.metadata | {"rope_freqs.weight": weights["rope_freqs.weight"].tolist()}
    return theirs, gemma4.Config.from_gguf(told, {name: tuple(t.shape) for name, t in weights.items()}), weights


@torch.no_grad()
@in_double()
@pytest.mark.parametrize("case", CONVERTIBLE, ids=lambda case: case.name)
def test_a_converted_file_equals_its_checkpoint(case, tmp_path):
    theirs, config, weights = opened(case, tmp_path)
    straight = ours(theirs)
    assert config.rms_norm_eps == pytest.approx(straight.config.rms_norm_eps)  # stored as fp32
    told = {"rope_freqs_stored": False, "rms_norm_eps": straight.config.rms_norm_eps}
    if not config.hidden_size_per_layer_input:
        told["vocab_size_per_layer_input"] = straight.config.vocab_size_per_layer_input
    assert dataclasses.replace(config, **told) == straight.config
    model = filled(gemma4.Model(config, CPU, torch.float32), gemma4.names_gguf, weights)
    for name, parameter in straight.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name
    assert set(dict(model.named_parameters())) - set(dict(straight.named_parameters())) == {"rope_freqs"}
    used = {name for source in gemma4.names_gguf(config, set(weights)).values() for name in source.names}
    assert used == set(weights)
    ids = torch.randint(config.vocab_size, (1, 33), generator=torch.Generator().manual_seed(3))
    assert (model(ids) - theirs(ids).logits).abs().max() <= TOLERANCE


@torch.no_grad()
def test_experts_with_gate_and_up_apart(tmp_path):
    case = next(case for case in CASES if case.name == "as_26b_a4b")
    theirs, config, weights = opened(case, tmp_path)
    whole = filled(gemma4.Model(config, CPU), gemma4.names_gguf, weights)
    for i in range(config.num_hidden_layers):
        gate, up = weights.pop(f"blk.{i}.ffn_gate_up_exps.weight").chunk(2, 1)
        weights |= {f"blk.{i}.ffn_gate_exps.weight": gate, f"blk.{i}.ffn_up_exps.weight": up}
    apart = filled(gemma4.Model(config, CPU), gemma4.names_gguf, weights)
    ids = torch.arange(9)[None]
    assert torch.equal(whole(ids), apart(ids))
    gate = gemma4.names_gguf(config, set(weights))["layers.0.routed.experts.gate_up.gate.weight"]
    assert torch.equal(value_of(gate, weights), theirs.state_dict()["model.layers.0.experts.gate_up_proj"][:, :12])


METADATA = {
    "general.architecture": "gemma4", "gemma4.block_count": 6, "gemma4.embedding_length": 32, "gemma4.feed_forward_length": 48,
    "gemma4.attention.head_count": 4, "gemma4.attention.head_count_kv": [2, 2, 2, 2, 2, 1], "gemma4.attention.key_length": 16,
    "gemma4.attention.value_length": 16, "gemma4.attention.key_length_swa": 8, "gemma4.attention.value_length_swa": 8,
    "gemma4.attention.layer_norm_rms_epsilon": 1e-6, "gemma4.rope.freq_base": 1e6, "gemma4.rope.freq_base_swa": 1e4,
    "gemma4.rope.dimension_count": 16, "gemma4.rope.dimension_count_swa": 8, "gemma4.attention.sliding_window": 12,
    "gemma4.attention.sliding_window_pattern": [True] * 5 + [False], "gemma4.context_length": 512,
    "gemma4.final_logit_softcapping": 30.0, "gemma4.attention.shared_kv_layers": 0,
    "gemma4.embedding_length_per_layer_input": 0, "tokenizer.ggml.tokens": ["a"] * 77, "tokenizer.ggml.eos_token_id": 3,
}  # fmt: skip


def test_config_as_random_weights_of_the_real_shape_are_written():
    config = gemma4.Config.from_gguf(METADATA, {"token_embd.weight": (80, 32), "blk.0.attn_v.weight": (16, 32)})
    assert (config.vocab_size, config.num_hidden_layers, config.eos_token_ids) == (80, 6, (3,))
    assert config.tie_word_embeddings
    assert config.attention_k_eq_v
    assert (config.sliding.kv_heads, config.sliding.head_dim, config.sliding.theta) == (2, 8, 1e4)
    assert (config.full.kv_heads, config.full.head_dim, config.full.theta) == (1, 16, 1e6)
    assert gemma4.Config.from_gguf(METADATA).vocab_size == 77
    assert ARCHITECTURES["gemma4"] is gemma4


@pytest.mark.parametrize("field", [name for name in METADATA if name.startswith("gemma4.")])
def test_metadata_that_lies_is_refused_by_name(field):
    for value in ("x", -1, [1], float("nan")):
        with pytest.raises(ModelError):
            gemma4.Config.from_gguf(METADATA | {field: value})


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("gemma4.attention.causal", False, "attention.causal"),
        ("gemma4.rope.scaling.type", "yarn", "rope.scaling.type"),
        ("gemma4.rope.scaling.factor", 8.0, "rope.scaling.factor"),
        ("gemma4.rope.scale_linear", 8.0, "rope.scale_linear"),
        ("gemma4.rope.scaling.attn_factor", 0.5, "rope.scaling.attn_factor"),
        ("gemma4.expert_weights_scale", 2.5, "expert_weights_scale"),
        ("gemma4.expert_weights_norm", False, "expert_weights_norm"),
        ("gemma4.expert_gating_func", 2, "expert_gating_func"),
        ("gemma4.expert_group_count", 2, "expert_group_count"),
        ("gemma4.rope.dimension_count_swa", 4, "dimension_count_swa"),
        ("gemma4.attention.value_length", 8, "value_length"),
        ("gemma4.attention.sliding_window_pattern", [True] * 6, "sliding_window_pattern"),
        ("gemma4.attention.head_count_kv", [2, 2, 2, 4, 2, 1], "head_count_kv"),
        ("gemma4.attention.head_count_kv", [2, 2], "head_count_kv"),
        ("gemma4.attention.shared_kv_layers", 6, "num_kv_shared_layers"),
        ("gemma4.feed_forward_length", [48] * 5, "feed_forward_length"),
        ("general.architecture", "gemma3", "general.architecture"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(field, value, named):
    with pytest.raises(ModelError, match=named):
        gemma4.Config.from_gguf(METADATA | {field: value})


def test_a_missing_field_is_named():
    for field in ("gemma4.block_count", "gemma4.attention.key_length_swa", "gemma4.attention.sliding_window"):
        with pytest.raises(ModelError, match=field):
            gemma4.Config.from_gguf({k: v for k, v in METADATA.items() if k != field})


def test_an_opened_file_says_how_many_numbers_rotate(tmp_path):
    """The cache then holds these numbers of each key, as with a folder."""
    case = next(case for case in CASES if case.name == "as_31b")
    theirs = case.theirs()
    path = write(tmp_path / "model.gguf", case.values, theirs.state_dict())
    config = open_checkpoint(path).config
    assert config.full == ours(theirs).config.full
    assert config.key_dim == ours(theirs).config.key_dim == 16
    file = GgufFile(path)
    for divisors in (None, [1.0] * 32, [1e30, *[1.0] * 31], [1.0, 1e30]):  # unknown, all rotate, no converter's, another size
        told = file.metadata | ({} if divisors is None else {"rope_freqs.weight": divisors})
        config = gemma4.Config.from_gguf(told, {name: t.shape for name, t in file.stored.items()})
        assert (config.full.turning, config.key_dim) == (32, 0)


def test_metadata_with_the_name_of_the_tensor_are_not_its_values(tmp_path, monkeypatch):
    case = next(case for case in CASES if case.name == "as_31b")
    path = write(tmp_path / "model.gguf", case.values, case.theirs().state_dict())
    file = GgufFile(path)
    file.metadata["rope_freqs.weight"] = 5
    del file.stored["rope_freqs.weight"]
    monkeypatch.setattr(checkpoint, "open_gguf", lambda path: file)
    with pytest.raises(ToolkitError, match="rope_freqs"):
        open_checkpoint(path)
