"""Tests of Qwen3.5 GGUF files: convert a model with llama.cpp's rules, written here in numpy, and compare with transformers.

Names come from the gguf package's map. The rules for values are those of convert_hf_to_gguf.py: norms (except the delta net's)
are stored plus one, A_log as -exp(A_log), the convolution without its middle axis, fused experts separately, and value heads
in tiled order along every axis that has them.
"""

from __future__ import annotations

import dataclasses
import re

import gguf
import numpy as np
import pytest
import torch

from tests.models.cases_qwen3 import CASES as CASES_QWEN3
from tests.models.cases_qwen3_5 import CASES
from tests.models.parity import CPU, TOLERANCE, Case, filled, in_double, prefill
from toolkit.core.errors import ModelError
from toolkit.models import ARCHITECTURES

BY_NAME = {case.name: case for case in CASES}
ARCHS = {
    "qwen3": gguf.MODEL_ARCH.QWEN3, "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35, "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
}  # fmt: skip
HEADS_DIFFER = ("dense_usual", "dense_three_values_a_key", "moe_usual", "moe_four_values_a_key", "moe_conv_of_seven")
SAME = ("dense_one_value_a_key", "dense_tied", "dense_biased", "dense_yarn", "moe_many_experts", "moe_one_head")


def tiled(values: np.ndarray, axis: int, keys: int, each: int) -> np.ndarray:
    """Reorder value heads along an axis of keys * each * size, from k0v0 k0v1 ... k1v0 ... to k0v0 k1v0 ... k0v1 ..."""
    size = values.shape[axis] // (keys * each)
    order = [(k * each + v) * size + i for v in range(each) for k in range(keys) for i in range(size)]
    return np.take(values, order, axis)


def converted(name: str, value: np.ndarray, c) -> list[tuple[str, np.ndarray]]:
    """Return what one tensor of a Hugging Face checkpoint is converted to: [(name to look up in the map, value)]."""
    keys, values = getattr(c, "linear_num_key_heads", 1), getattr(c, "linear_num_value_heads", 1)
    each = values // keys
    if "linear_attn." in name:
        rows = 2 * keys * c.linear_key_head_dim
        if "in_proj_qkv" in name or "conv1d" in name:
            value = value.reshape(len(value), -1)
            value = np.concatenate((value[:rows], tiled(value[rows:], 0, keys, each)))
        elif "out_proj" in name:
            value = tiled(value, 1, keys, each)
        elif not name.endswith("norm.weight"):  # z, b, a, A_log, dt_bias
            value = tiled(value, 0, keys, each)
    if name.endswith("A_log"):
        return [(name, -np.exp(value))]
    if name.endswith("dt_bias"):
        return [(name.replace("dt_bias", "dt_proj.bias"), value)]
    if c.model_type.startswith("qwen3_5") and re.search(r"norm\.weight$", name) and "linear_attn" not in name:
        return [(name, value + 1)]
    if name.endswith("gate_up_proj"):
        half = value.shape[1] // 2
        return [
            (name.replace("gate_up", part) + ".weight", x) for part, x in (("gate", value[:, :half]), ("up", value[:, half:]))
        ]
    if name.endswith("down_proj"):
        return [(name + ".weight", value)]
    return [(name, value)]


def as_gguf(theirs) -> dict[str, torch.Tensor]:
    c = theirs.config
    names = gguf.get_tensor_name_map(ARCHS[c.model_type], c.num_hidden_layers)
    found = {}
    for name, value in theirs.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        for mapped, array in converted(name, value.numpy(), c):
            stored = names.get_name(mapped, try_suffixes=(".weight", ".bias"))
            assert stored is not None, mapped
            found[stored] = torch.from_numpy(np.ascontiguousarray(array))
    return found


def metadata(c) -> dict[str, object]:
    arch = gguf.MODEL_ARCH_NAMES[ARCHS[c.model_type]]
    rope = c.rope_parameters
    found = {
        "context_length": c.max_position_embeddings, "embedding_length": c.hidden_size, "block_count": c.num_hidden_layers,
        "attention.head_count": c.num_attention_heads, "attention.head_count_kv": c.num_key_value_heads,
        "attention.key_length": c.head_dim, "attention.value_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps, "rope.freq_base": rope["rope_theta"],
        "feed_forward_length": getattr(c, "intermediate_size", 1), "vocab_size": c.vocab_size,
    }  # fmt: skip
    if "linear_conv_kernel_dim" in c:
        found |= {
            "ssm.conv_kernel": c.linear_conv_kernel_dim, "ssm.state_size": c.linear_key_head_dim,
            "ssm.group_count": c.linear_num_key_heads, "ssm.time_step_rank": c.linear_num_value_heads,
            "ssm.inner_size": c.linear_num_value_heads * c.linear_value_head_dim, "full_attention_interval": 4,
            "rope.dimension_count": int(c.head_dim * rope["partial_rotary_factor"]),
            "rope.dimension_sections": [11, 11, 10, 0],
        }  # fmt: skip
    if "moe_intermediate_size" in c:
        found |= {
            "expert_count": c.num_experts, "expert_used_count": c.num_experts_per_tok,
            "expert_feed_forward_length": c.moe_intermediate_size,
            "expert_shared_feed_forward_length": getattr(c, "shared_expert_intermediate_size", 1),
        }  # fmt: skip
    if rope["rope_type"] != "default":
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
        found["rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings", 0)
    return {"general.architecture": arch} | {f"{arch}.{name}": value for name, value in found.items()}


def read(theirs, weights, **more):
    facts = metadata(theirs.config) | more
    architecture = ARCHITECTURES[facts["general.architecture"]]
    config = architecture.Config.from_gguf(facts, {name: tuple(value.shape) for name, value in weights.items()})
    return architecture.Model(config, CPU, torch.float32), architecture


@pytest.mark.parametrize("name", [*HEADS_DIFFER, *SAME])
@torch.no_grad()
@in_double()
def test_a_converted_model_computes_the_same(name):
    theirs = BY_NAME[name].theirs()
    weights = as_gguf(theirs)
    model, architecture = read(theirs, weights)
    filled(model, architecture.names_gguf, weights)
    taken = {n for source in architecture.names_gguf(model.config, weights).values() for n in source.names}
    assert taken == set(weights)
    ids = torch.randint(model.config.vocab_size, (1, 30), generator=torch.Generator().manual_seed(3))
    expected = theirs(ids).logits[0]
    assert (model(ids)[0] - expected).abs().max() <= TOLERANCE
    assert (prefill(model, ids, 1, 30)[1] - expected[-1]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", ["dense_usual", "moe_usual", "moe_odd_heads"])
@torch.no_grad()
@in_double()
def test_qwen3_converted(name):
    theirs = next(case for case in CASES_QWEN3 if case.name == name).theirs()
    weights = as_gguf(theirs)
    model, architecture = read(theirs, weights)
    filled(model, architecture.names_gguf, weights)
    ids = torch.arange(30)[None]
    assert (model(ids) - theirs(ids).logits).abs().max() <= TOLERANCE


@torch.no_grad()
@in_double()
def test_tiled_order_matters_where_a_key_head_has_several_values():
    """Check that the other tests can fail: without the flag, the same weights give different logits."""
    theirs = BY_NAME["moe_usual"].theirs()
    weights = as_gguf(theirs)
    model, architecture = read(theirs, weights)
    grouped = architecture.Model(dataclasses.replace(model.config, tiled=False), CPU, torch.float32)
    filled(grouped, architecture.names_gguf, weights)
    ids = torch.arange(20)[None]
    assert (grouped(ids) - theirs(ids).logits).abs().max() > 0.01


@torch.no_grad()
@in_double()
def test_gates_and_ups_in_one_stack():
    theirs = BY_NAME["moe_usual"].theirs()
    weights = as_gguf(theirs)
    for i in range(theirs.config.num_hidden_layers):
        parts = [weights.pop(f"blk.{i}.ffn_{part}_exps.weight") for part in ("gate", "up")]
        weights[f"blk.{i}.ffn_gate_up_exps.weight"] = torch.cat(parts, 1)
    model, architecture = read(theirs, weights)
    filled(model, architecture.names_gguf, weights)
    ids = torch.arange(20)[None]
    assert (model(ids) - theirs(ids).logits).abs().max() <= TOLERANCE


def test_drafting_layers_are_left_out():
    theirs = BY_NAME["moe_usual"].theirs()
    weights = as_gguf(theirs)
    facts = metadata(theirs.config) | {"qwen35moe.block_count": 5, "qwen35moe.nextn_predict_layers": 1}
    architecture = ARCHITECTURES["qwen35moe"]
    config = architecture.Config.from_gguf(facts, {name: tuple(value.shape) for name, value in weights.items()})
    assert config.num_hidden_layers == 4
    patterns = (*architecture.SKIPPED, *config.skipped)
    for name in ("blk.4.nextn.eh_proj.weight", "blk.4.attn_q.weight", "blk.4.ffn_down_exps.weight"):
        assert any(re.match(p, name) for p in patterns)
    assert not any(re.match(p, name) for p in patterns for name in weights)


def test_layer_kinds_follow_the_tensors_or_the_interval():
    case = Case("odd", "Qwen3_5ForCausalLM", "Qwen3_5TextConfig", BY_NAME["dense_usual"].values | {
        "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    })  # fmt: skip
    theirs = case.theirs()
    weights = as_gguf(theirs)
    model, _ = read(theirs, weights)
    assert model.config.layer_types == ("full", "linear", "linear", "full")
    assert ARCHITECTURES["qwen35"].Config.from_gguf(metadata(theirs.config)).layer_types == ("linear",) * 3 + ("full",)


FACTS = metadata(BY_NAME["moe_usual"].theirs().config)


@pytest.mark.parametrize("field", [name for name in FACTS if not name.endswith(("sections", "block_count"))])
@pytest.mark.parametrize("lie", ["x", -1, float("nan"), 2**62, None, [1]], ids=str)
def test_metadata_that_lies_is_refused_or_makes_a_config(field, lie):
    try:
        config = ARCHITECTURES["qwen35moe"].Config.from_gguf(FACTS | {field: lie})
    except ModelError as refused:
        said = str(refused)
    else:
        said = f"Qwen3.5 of {config.num_hidden_layers} layers"
    assert field.split(".")[-1] in said or "Qwen3.5" in said


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention.causal", False),
        ("attention.sliding_window", 8),
        ("expert_weights_scale", 2.5),
        ("expert_weights_norm", False),
        ("expert_gating_func", 2),
        ("expert_group_count", 2),
        ("rope.scaling.attn_factor", 0.5),
    ],
    ids=lambda v: repr(v)[:30],
)
def test_metadata_that_would_change_results_is_refused_by_name(field, value):
    with pytest.raises(ModelError, match=field):
        ARCHITECTURES["qwen35moe"].Config.from_gguf(FACTS | {f"qwen35moe.{field}": value})


def test_missing_metadata_is_named():
    for field in ("ssm.state_size", "ssm.conv_kernel", "expert_count", "block_count", "context_length"):
        with pytest.raises(ModelError, match=field.replace(".", r"\.")):
            ARCHITECTURES["qwen35moe"].Config.from_gguf({n: v for n, v in FACTS.items() if not n.endswith(field)})
