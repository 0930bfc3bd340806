"""Tests of Qwen3.5 against transformers: prefill, chunks and decode steps, its states, and unsupported configs.

Comparisons run in fp64, so that they hold on every processor: see tests/models/parity.py.
"""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

import toolkit as tk
from tests.models.cases_qwen3_5 import BASE, CASES, DENSE, MOE
from tests.models.parity import CPU, MARGIN, STEPS, TOLERANCE, Case, compare, filled, in_double, last, ours, prefill, value_of
from toolkit.core.errors import ModelError
from toolkit.models import ARCHITECTURES
from toolkit.models.qwen3_5_moe import SKIPPED, Config, Model, names_gguf, names_hf

transformers = pytest.importorskip("transformers")

CASE = {case.name: case for case in CASES}
LONG = (
    "dense_usual", "dense_tied", "dense_no_linear_layer", "dense_three_values_a_key", "dense_prompt_of_one",
    "moe_usual", "moe_all_chosen", "moe_many_experts", "moe_four_values_a_key", "moe_conv_of_one",
)  # fmt: skip
MOE_TYPE, DENSE_TYPE = {"model_type": "qwen3_5_moe_text"}, {"model_type": "qwen3_5_text"}


def random_ids(length, batch=1, seed=1):
    return torch.randint(97, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_transformers(case):
    steps = STEPS if case.name in LONG else 10
    found = compare(case, steps)
    assert found.worst <= TOLERANCE
    assert found.same_tokens == steps
    assert found.error <= MARGIN


@torch.no_grad()
@in_double()
def test_no_full_layer():
    """Transformers can't decode such a model, so the reference is its result for the whole sequence."""
    values = DENSE | {"layer_types": ["linear_attention"] * 3, "num_hidden_layers": 3}
    theirs = Case("", "Qwen3_5ForCausalLM", "Qwen3_5TextConfig", values).theirs()
    model, ids = ours(theirs), random_ids(40)
    expected = theirs(ids, use_cache=False).logits
    assert (model(ids) - expected).abs().max() <= TOLERANCE
    cache, logits = prefill(model, ids[:, :30], 7, 40)
    for i in range(30, 40):
        logits = last(model, model.embed(ids[:, i : i + 1]), torch.tensor([i]), cache, i + 1)
        assert (logits - expected[0, i]).abs().max() <= TOLERANCE


@torch.no_grad()
@in_double()
@pytest.mark.parametrize("name", ["dense_usual", "moe_conv_of_seven"])
def test_a_batch_equals_transformers(name):
    theirs, ids = CASE[name].theirs(), random_ids(33, batch=3)
    assert (ours(theirs)(ids) - theirs(ids).logits).abs().max() <= TOLERANCE


@torch.no_grad()
@in_double()
@pytest.mark.parametrize("name", ["moe_usual", "moe_conv_of_seven", "moe_conv_of_one"])
def test_prefill_in_chunks_of_any_size_leaves_what_token_by_token_leaves(name):
    model, ids = ours(CASE[name].theirs()), random_ids(90)
    cache, logits = prefill(model, ids, 1, 100)
    for chunk in (2, 3, 7, 64, 65, 90):
        other, found = prefill(model, ids, chunk, 100)
        assert (found - logits).abs().max() <= TOLERANCE, chunk
        for mine, theirs in zip(cache.states, other.states, strict=True):
            for a, b in zip(mine.tensors(), theirs.tensors(), strict=True):
                assert (a - b).abs().max() <= TOLERANCE * max(1, float(a.abs().max())), chunk


@pytest.mark.parametrize("name", ["dense_usual", "moe_usual"])
@in_double()
def test_gradients_equal_transformers(name):
    theirs = CASE[name].theirs()
    model, ids = ours(theirs), random_ids(70, batch=2)
    model.requires_grad_(True)
    for m, logits in ((model, model(ids)), (theirs, theirs(ids).logits)):
        m.zero_grad()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    for mine, source in names_hf(model.config).items():
        found = model.get_parameter(mine).grad
        if mine.endswith("decay"):  # -exp(A_log): by the chain rule
            found = found * model.get_parameter(mine)
        expected = value_of(dataclasses.replace(source, change=None), grads)
        assert (found - expected).abs().max() <= TOLERANCE * max(1, float(expected.abs().max())), mine


@torch.no_grad()
def test_a_checkpoint_brings_recurrent_states_back():
    model, ids = ours(CASE["moe_usual"].theirs()), random_ids(30)
    cache, _ = prefill(model, ids[:, :20], 6, 64)
    position = cache.checkpoint()
    first = last(model, model.embed(ids[:, 20:]), cache.slots[20:30], cache, 30)
    with pytest.raises(ModelError, match=r"recurrent states.*checkpoints: 20"):
        cache.rollback(25)
    cache.rollback(position)
    assert torch.equal(last(model, model.embed(ids[:, 20:]), cache.slots[20:30], cache, 30), first)
    cache.rollback(0)
    _, fresh = prefill(model, ids, 30, 64)
    assert torch.equal(last(model, model.embed(ids), cache.slots[:30], cache, 30), fresh)


@torch.no_grad()
@in_double()
def test_long_sequences_stay_finite():
    model, ids = ours(CASE["dense_usual"].theirs()), random_ids(1500)
    cache, logits = prefill(model, ids, 512, 1600)
    whole = model(ids)
    assert whole.isfinite().all()
    assert (logits - whole[0, -1]).abs().max() <= TOLERANCE
    for i in range(20):
        logits = last(model, model.embed(logits.argmax().view(1, 1)), torch.tensor([1500 + i]), cache, 1501 + i)
    assert logits.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("name", ["dense_usual", "moe_usual"])
def test_bfloat16_is_as_near_to_fp32_as_transformers(name):
    """Averaged over seeds, because random weights amplify rounding by chance in both implementations."""
    mine = half = 0.0
    for seed in range(3):
        theirs, ids = CASE[name].theirs(seed), random_ids(40, batch=4, seed=seed)
        exact, model = theirs(ids).logits, ours(theirs, torch.bfloat16)
        mine += float((model(ids) - exact).square().mean())
        half += float((CASE[name].theirs(seed, torch.bfloat16)(ids).logits.float() - exact).square().mean())
    assert mine <= 1.3 * half
    cache, logits = prefill(model, ids[:1], 9, 64)
    assert (logits - exact[0, -1]).abs().max() <= 0.5 * exact[0, -1].abs().max()
    assert model.get_parameter("layers.0.delta.decay").dtype is torch.float32
    assert cache.states[0].states["conv"].dtype is torch.bfloat16
    assert cache.states[0].states["memory"].dtype is torch.float32


@pytest.mark.parametrize("name", ["dense_usual", "moe_usual", "moe_conv_of_one", "moe_one_expert"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_decode_step_copies_nothing_and_no_prefill_is_read_back(name, dtype):
    gpu = tk.device("virtual:h200")
    config = Config.from_hf(CASE[name].values | (MOE_TYPE if "moe" in name else DENSE_TYPE))
    for tiled in (False, True):
        model = Model(dataclasses.replace(config, tiled=tiled), gpu, dtype).init_weights().requires_grad_(False)
        ids, position = torch.arange(9, device=gpu.torch)[None], torch.full((1,), 8, device=gpu.torch)
        with torch.no_grad():
            x, cache = model.embed(ids), model.new_cache(300)
            with tk.copy_budget(h2d=0, d2h=0, device=gpu):
                model.advance(x[:, :8], cache.slots[:8], cache, 8)
            with tk.copy_budget(h2d=0, d2h=0, d2d=0, device=gpu):
                model.logits(model.advance(x[:, 8:], position, cache, 9))


@torch.no_grad()
@in_double()
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["Qwen3_5Moe", "Qwen3_5"])
def test_the_text_part_of_a_multimodal_checkpoint(kind, tied):
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 24, "patch_size": 4}
    text = MOE if kind.endswith("Moe") else DENSE
    tokens = {f"{name}_token_id": 90 + i for i, name in enumerate(("image", "video", "vision_start", "vision_end"))}
    whole = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, tie_word_embeddings=tied, **tokens)
    theirs = getattr(transformers, f"{kind}ForConditionalGeneration")(whole).eval()
    theirs.set_experts_implementation("eager")  # their grouped product takes no fp64
    values, weights = whole.to_dict(), theirs.state_dict() | {"mtp.fc.weight": torch.zeros(1)}
    architecture = ARCHITECTURES[values["model_type"]]
    config = architecture.Config.from_hf(values)
    assert config.tie_word_embeddings == tied
    model = filled(architecture.Model(config, CPU, torch.float32), names_hf, weights)
    taken = {name for source in names_hf(config, weights).values() for name in source.names}
    left = {name for name in set(weights) - taken if not any(re.match(pattern, name) for pattern in SKIPPED)}
    assert left == ({"lm_head.weight"} if tied else set())
    ids = random_ids(20) % 90
    assert (model(ids) - theirs(input_ids=ids).logits).abs().max() <= TOLERANCE


@torch.no_grad()
@in_double()
def test_experts_stored_one_by_one():
    theirs = CASE["moe_usual"].theirs()
    weights = theirs.state_dict()
    for name in [name for name in weights if name.endswith("gate_up_proj")]:
        both, down, prefix = weights.pop(name), weights.pop(name.replace("gate_up", "down")), name.removesuffix("gate_up_proj")
        for e, (matrix, back) in enumerate(zip(both, down, strict=True)):
            gate, up = matrix.chunk(2)
            for part, value in (("gate", gate), ("up", up), ("down", back)):
                weights[f"{prefix}{e}.{part}_proj.weight"] = value
    model = filled(Model(Config.from_hf(theirs.config.to_dict()), CPU, torch.float32), names_hf, weights)
    assert (model(random_ids(9)) - theirs(random_ids(9)).logits).abs().max() <= TOLERANCE


def test_names_cover_every_parameter_once():
    for values in (
        DENSE | DENSE_TYPE,
        MOE | MOE_TYPE,
        DENSE | DENSE_TYPE | {"attention_bias": True, "tie_word_embeddings": True},
    ):
        config = Config.from_hf(values)
        parameters = {name for name, _ in Model(config, CPU).named_parameters()}
        for names in (names_hf(config), names_gguf(config)):
            assert set(names) == parameters
            assert len({(source.names, str(source.rows)) for source in names.values()}) == len(names)


def test_init_weights_is_reproducible_and_the_model_can_learn():
    config = Config.from_hf(MOE | MOE_TYPE)
    model, again = Model(config, CPU).init_weights(3), Model(config, CPU).init_weights(3)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))
    assert all((layer.delta.decay < 0).all() for layer in model.layers if hasattr(layer, "delta"))
    optimizer, ids, losses = torch.optim.Adam(model.parameters(), lr=3e-3), random_ids(40, batch=2), []
    for _ in range(12):
        losses.append(torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("name", ["dense_usual", "moe_usual", "dense_no_linear_layer", "dense_tied"])
def test_costs_add_up_to_the_model(name):
    config = Config.from_hf(CASE[name].values | (MOE_TYPE if "moe" in name else DENSE_TYPE))
    model = Model(config, CPU, torch.bfloat16)
    found = model.costs(100)
    costs = {(cost.part, cost.kind): cost for cost in found}
    assert sum(cost.parameters for cost in found) == sum(p.numel() for p in model.parameters())
    assert sum(cost.weight_bytes for cost in found) == sum(p.nbytes for p in model.parameters())
    cache = model.new_cache(100)
    held = sum(tensor.nbytes for state in cache.states for tensor in state.tensors())
    assert sum(cost.state_held_bytes for cost in found) == held
    if config.num_experts:
        experts = costs["experts", ""]
        assert experts.read_bytes == experts.weight_bytes * config.num_experts_per_tok / config.num_experts
    if "linear" in config.layer_types:
        delta = costs["delta net", ""]
        memory = 4 * config.value_size * config.linear_key_head_dim * len(delta.layers)
        assert delta.state_bytes - delta.state_held_bytes == memory  # read and written
        assert delta.state_per_token_bytes == 0


@pytest.mark.parametrize(("kind", "moe"), [("Qwen3_5Moe", True), ("Qwen3_5", False)])
def test_defaults_are_those_of_transformers(kind, moe):
    theirs = getattr(transformers, f"{kind}TextConfig")()
    absent, stated = Config.from_hf({"model_type": theirs.model_type}), Config.from_hf(theirs.to_dict())
    assert absent == stated
    fields = ["vocab_size", "hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim", "linear_num_value_heads"]
    for field in fields + (["num_experts", "moe_intermediate_size"] if moe else ["intermediate_size"]):
        assert getattr(absent, field) == getattr(theirs, field), field
    assert (absent.rope.dims, absent.rope.theta) == (64, 10_000.0)
    assert absent.layer_types[:4] == ("linear", "linear", "linear", "full")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "qwen3_next"),
        ("text_config", 7),
        ("hidden_act", "gelu"),
        ("is_causal", False),
        ("per_layer_config", {"1": {"rms_norm_eps": 0.5}}),
        ("attn_output_gate", False),
        ("mlp_only_layers", [1]),
        ("norm_topk_prob", False),
        ("decoder_sparse_step", 2),
        ("mamba_ssm_dtype", "bfloat16"),
        ("use_sliding_window", True),
        ("layer_types", ["linear_attention", "sliding_attention", "full_attention", "full_attention"]),
        ("layer_types", ["full_attention"] * 3),
        ("layer_types", [["full_attention"]] * 4),
        ("num_hidden_layers", 1 << 40),
        ("full_attention_interval", 0),
        ("linear_num_value_heads", 3),
        ("linear_conv_kernel_dim", 0),
        ("linear_key_head_dim", "128"),
        ("num_experts", 0),
        ("num_experts", 1 << 30),
        ("num_experts_per_tok", 6),
        ("shared_expert_intermediate_size", None),
        ("rope_parameters", {"rope_type": "dynamic", "factor": 2.0}),
        ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 1.5}),
        ("rope_parameters", "default"),
        ("partial_rotary_factor", -0.25),
        ("head_dim", True),
        ("rms_norm_eps", 0),
        ("attention_bias", "yes"),
        ("eos_token_id", [1.5]),
    ],
    ids=lambda v: repr(v)[:30],
)
def test_what_is_not_supported_is_refused_by_name(field, value):
    with pytest.raises(ModelError, match=field):
        Config.from_hf(MOE | MOE_TYPE | {field: value})


def test_rotary_embeddings_of_the_config():
    outer = Config.from_hf(BASE | DENSE_TYPE | {"rope_theta": 1e6, "partial_rotary_factor": 0.5})
    inner = Config.from_hf(BASE | DENSE_TYPE | {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}})
    sections = {"mrope_section": [11, 11, 10], "mrope_interleaved": True, "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    assert outer == inner == Config.from_hf(BASE | DENSE_TYPE | {"rope_parameters": sections | {"type": "default"}})
    assert (outer.rope.dims, outer.rope.theta) == (4, 1e6)
    with pytest.raises(ModelError, match="rotary"):
        Config.from_hf(BASE | DENSE_TYPE | {"head_dim": 7, "partial_rotary_factor": 1.0})
