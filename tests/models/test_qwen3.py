"""Tests of Qwen3 against transformers: prefill, chunks and decode steps, and supported and unsupported configs.

Comparisons run in fp64, so that they hold on every processor: see tests/models/parity.py.
"""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

import toolkit as tk
from tests.models.cases_qwen3 import BASE, CASES
from tests.models.parity import CPU, MARGIN, STEPS, TOLERANCE, compare, filled, in_double, last, ours, prefill, value_of
from toolkit.core.errors import ModelError
from toolkit.models import ARCHITECTURES
from toolkit.models.qwen3 import Config, Model, names_gguf, names_hf
from toolkit.models.rotary import Rope

transformers = pytest.importorskip("transformers")

CASE = {case.name: case for case in CASES}
LONG = (
    "dense_usual", "dense_tied", "dense_multi_query", "dense_odd_sizes", "dense_yarn", "dense_windows_by_layer",
    "moe_usual", "moe_one_expert", "moe_every_other_layer", "moe_windows",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_transformers(case):
    steps = STEPS if case.name in LONG else 10
    found = compare(case, steps)
    assert found.worst <= TOLERANCE
    assert found.same_tokens == steps
    assert found.error <= MARGIN


@torch.no_grad()
@in_double()
def test_a_batch_equals_transformers():
    for name in ("dense_windows_by_layer", "moe_usual"):
        theirs = CASE[name].theirs()
        ids = torch.randint(97, (3, 23), generator=torch.Generator().manual_seed(1))
        assert (ours(theirs)(ids) - theirs(ids).logits).abs().max() <= TOLERANCE


@torch.no_grad()
@in_double()
def test_past_one_bound_of_the_cache():
    theirs = dataclasses.replace(CASE["dense_usual"], values=BASE | {"num_hidden_layers": 1}).theirs()
    model = ours(theirs)
    ids = torch.randint(97, (1, 531), generator=torch.Generator().manual_seed(3))
    _, logits = prefill(model, ids, 200, 640)
    assert (logits - theirs(ids).logits[0, -1]).abs().max() <= TOLERANCE


@torch.no_grad()
@in_double()
def test_a_longer_bound_than_needed_changes_nothing():
    model = Model(Config(50, 16, 24, 2, 4, 2, 4), CPU, torch.float32).init_weights()
    ids = torch.arange(7)[None]
    cache, logits = prefill(model, ids, 7, 640)
    wide = model.new_cache(640)
    assert (last(model, model.embed(ids), wide.slots[:7], wide, 600) - logits).abs().max() <= TOLERANCE
    assert cache.bound(7) == 256
    assert cache.bound(600) == 640


@torch.no_grad()
def test_rollback_with_windows_needs_a_checkpoint_and_then_gives_the_same():
    model = ours(CASE["dense_windows_by_layer"].theirs())
    ids = torch.randint(97, (1, 30), generator=torch.Generator().manual_seed(8))
    cache, _ = prefill(model, ids[:, :20], 7, 64)
    position = cache.checkpoint()
    first = last(model, model.embed(ids[:, 20:]), cache.slots[20:30], cache, 30)
    with pytest.raises(ModelError, match="sliding windows"):
        cache.rollback(19)
    cache.rollback(position)
    assert torch.equal(last(model, model.embed(ids[:, 20:]), cache.slots[20:30], cache, 30), first)


@pytest.mark.parametrize("name", ["dense_usual", "dense_windows_by_layer", "moe_usual"])
@in_double()
def test_gradients_equal_transformers(name):
    theirs = CASE[name].theirs()
    model = ours(theirs)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    ids = torch.randint(97, (2, 11), generator=torch.Generator().manual_seed(4))
    target = torch.randint(97, (22,), generator=torch.Generator().manual_seed(5))
    for m, logits in ((model, model(ids)), (theirs, theirs(ids).logits)):
        m.zero_grad()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), target).backward()
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    for ours_name, source in names_hf(model.config).items():
        assert torch.allclose(model.get_parameter(ours_name).grad, value_of(source, grads), TOLERANCE, TOLERANCE), ours_name


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_stays_near_fp32(dtype):
    config = Config(50, 32, 48, 2, 4, 2, 8)
    ids = torch.arange(9)[None]
    exact = Model(config, CPU).init_weights()(ids)
    model = Model(config, CPU, dtype).init_weights()
    cache, logits = prefill(model, ids, 4, 64)
    assert cache.states[0].keys.dtype is dtype
    assert logits.dtype is torch.float32
    assert (logits - exact[0, -1]).abs().max() < 0.02 * exact.abs().max().clamp(min=1)


def test_names_cover_every_parameter_once():
    sparse = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "sparse": (1,)}
    for tied, more in ((False, {}), (True, {}), (False, sparse)):
        config = Config(50, 16, 24, 2, 4, 2, 4, tie_word_embeddings=tied, attention_bias=True, **more)
        parameters = {name for name, _ in Model(config, CPU).named_parameters()}
        for names in (names_hf(config), names_gguf(config)):
            assert set(names) == parameters
            assert len({(source.names, str(source.rows)) for source in names.values()}) == len(names)


@torch.no_grad()
@in_double()
def test_experts_stored_one_by_one():
    theirs = CASE["moe_every_other_layer"].theirs()
    weights = theirs.state_dict()
    for name in [name for name in weights if name.endswith("gate_up_proj")]:
        both, down = weights.pop(name), weights.pop(name.replace("gate_up", "down"))
        prefix = name.removesuffix("gate_up_proj")
        for e, (matrix, back) in enumerate(zip(both, down, strict=True)):
            gate, up = matrix.chunk(2)
            weights |= {
                f"{prefix}{e}.gate_proj.weight": gate,
                f"{prefix}{e}.up_proj.weight": up,
                f"{prefix}{e}.down_proj.weight": back,
            }
    model = filled(Model(Config.from_hf(theirs.config.to_dict()), CPU, torch.float32), names_hf, weights)
    ids = torch.arange(9)[None]
    assert (model(ids) - theirs(ids).logits).abs().max() <= TOLERANCE


def test_init_weights_is_reproducible_and_the_model_starts_without_memory():
    config = Config(50, 16, 24, 1, 2, 1, 8)
    model = Model(config, CPU)
    assert all(p.is_meta for p in model.parameters())
    again = Model(config, CPU).init_weights(3)
    for name, p in model.init_weights(3).named_parameters():
        assert torch.equal(p, again.get_parameter(name))
    assert not torch.equal(model.embed.weight, Model(config, CPU).init_weights(4).embed.weight)


def test_config_of_transformers_4_and_5():
    old = {"model_type": "qwen3", "rope_theta": 1e6, "rope_scaling": None, "head_dim": 128, "eos_token_id": 151645}
    new = {"model_type": "qwen3", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "eos_token_id": [1, 2]}
    assert Config.from_hf(old).rope.theta == Config.from_hf(new).rope.theta == 1e6
    assert Config.from_hf(old).eos_token_ids == (151645,)
    assert Config.from_hf(new).eos_token_ids == (1, 2)
    absent, theirs = Config.from_hf({"model_type": "qwen3"}), transformers.Qwen3Config()
    for field in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads", "head_dim"):
        assert getattr(absent, field) == getattr(theirs, field), field
    assert absent.rope.theta == 10_000.0
    windowless = {"model_type": "qwen3", "use_sliding_window": False, "sliding_window": 4096}
    assert Config.from_hf(windowless) == absent


@pytest.mark.parametrize(
    "old",
    [
        {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "max_position_embeddings": 4096},
        {"rope_scaling": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}},
        {"use_sliding_window": True, "max_window_layers": 5, "rms_norm_eps": 0.5},
        {"use_sliding_window": True, "sliding_window": None},
        {"num_key_value_heads": None, "head_dim": 64},
    ],
    ids=lambda old: "-".join(old),
)
def test_configs_as_transformers_4_wrote_them_mean_what_5_makes_of_them(old):
    saved = transformers.Qwen3Config(**copy.deepcopy(old)).to_dict()
    assert Config.from_hf({"model_type": "qwen3"} | old) == Config.from_hf(saved)


@pytest.mark.parametrize(("fast", "slow"), [(1e308, 1e-320), (1e-320, 1e308), (1e308, 1e308), (1e-320, 1e-320)])
def test_frequencies_of_yarn_are_finite(fast, slow):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    hf = Config.from_hf({"model_type": "qwen3", "rope_scaling": scaling | {"beta_fast": fast, "beta_slow": slow}})
    named = {"type": "yarn", "factor": 4.0, "original_context_length": 256, "yarn_beta_fast": fast, "yarn_beta_slow": slow}
    gguf = Config.from_gguf(GGUF | {f"qwen3.rope.scaling.{name}": value for name, value in named.items()})
    for config in (hf, gguf):
        assert config.rope.frequencies(CPU.torch).isfinite().all()


WINDOWED = {"sliding_window": {"use_sliding_window": True}, "max_window_layers": {"use_sliding_window": True}}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "llama"),
        ("hidden_act", "gelu"),
        ("is_causal", False),
        ("per_layer_config", {"1": {"rms_norm_eps": 0.5}}),
        ("rope_scaling", {"type": "longrope", "factor": 4.0}),
        ("rope_scaling", {"type": "yarn", "factor": "4"}),
        ("rope_scaling", {"type": "yarn", "factor": 10**400}),
        ("rope_scaling", {"rope_type": "linear"}),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}),
        ("rope_parameters", {"full_attention": {"rope_type": "default"}}),
        ("rope_parameters", {"rope_type": "dynamic", "rope_theta": 1e6}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": "big"}),
        ("rope_parameters", [1]),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("layer_types", 7),
        ("layer_types", ["sliding_attention"] * 32),
        ("sliding_window", 0),
        ("max_window_layers", -1),
        ("hidden_size", 0),
        ("hidden_size", "4096"),
        ("vocab_size", -5),
        ("num_hidden_layers", 2.5),
        ("num_hidden_layers", 1 << 62),
        ("num_key_value_heads", True),
        ("head_dim", 7),
        ("num_attention_heads", 13),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", float("inf")),
        ("rms_norm_eps", 10**400),
        ("tie_word_embeddings", "no"),
        ("eos_token_id", "</s>"),
    ],
    ids=lambda v: repr(v)[:30],
)
def test_what_is_not_supported_is_refused_by_name(field, value):
    with pytest.raises(ModelError) as refused:
        Config.from_hf({"model_type": "qwen3"} | WINDOWED.get(field, {}) | {field: value})
    said = str(refused.value)
    assert any(part in said for part in (field, "rope_theta", "rope_parameters", "head_dim", "num_key_value_heads", "factor"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_experts", -1),
        ("num_experts", 1 << 20),
        ("num_local_experts", "8"),
        ("num_experts_per_tok", 129),
        ("decoder_sparse_step", 0),
        ("mlp_only_layers", 3),
        ("mlp_only_layers", [True]),
        ("norm_topk_prob", 1),
        ("moe_intermediate_size", 0),
        ("layer_types", ["sliding_attention"] * 24),
    ],
    ids=lambda v: repr(v)[:30],
)
def test_fields_of_experts_that_cannot_be_are_refused_by_name(field, value):
    with pytest.raises(ModelError, match=field):
        Config.from_hf({"model_type": "qwen3_moe", field: value})


def test_defaults_with_experts_are_those_of_transformers():
    absent, theirs = Config.from_hf({"model_type": "qwen3_moe"}), transformers.Qwen3MoeConfig()
    for field in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads",
                  "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"):  # fmt: skip
        assert getattr(absent, field) == getattr(theirs, field), field
    assert absent.num_experts == theirs.num_experts == 128
    assert absent.head_dim == 64
    assert absent.sparse == tuple(range(24))


GGUF = {
    "general.architecture": "qwen3", "qwen3.block_count": 2, "qwen3.embedding_length": 32, "qwen3.feed_forward_length": 48,
    "qwen3.attention.head_count": 4, "qwen3.attention.head_count_kv": 2, "qwen3.attention.key_length": 16,
    "qwen3.attention.value_length": 16, "qwen3.context_length": 512, "qwen3.rope.freq_base": 1e6,
    "qwen3.attention.layer_norm_rms_epsilon": 1e-6, "tokenizer.ggml.tokens": ["a"] * 77, "tokenizer.ggml.eos_token_id": 3,
}  # fmt: skip


def test_config_from_gguf():
    config = Config.from_gguf(GGUF)
    assert config == Config(77, 32, 48, 2, 4, 2, 16, 512, Rope(16, 1e6), 1e-6, eos_token_ids=(3,))
    shapes = {"token_embd.weight": (80, 32), "output.weight": (80, 32)}
    assert Config.from_gguf(GGUF, shapes) == dataclasses.replace(config, vocab_size=80)
    del shapes["output.weight"]
    assert Config.from_gguf(GGUF, shapes).tie_word_embeddings


@pytest.mark.parametrize("field", [name for name in GGUF if name.startswith("qwen3.")])
def test_gguf_metadata_that_lies_is_refused(field):
    with pytest.raises(ModelError):
        Config.from_gguf(GGUF | {field: "x"})


@pytest.mark.parametrize("window", [128, 511, -1, True, "128"], ids=repr)
def test_gguf_with_a_sliding_window_is_refused(window):
    with pytest.raises(ModelError, match=r"qwen3\.attention\.sliding_window.*context_length of 512"):
        Config.from_gguf(GGUF | {"qwen3.attention.sliding_window": window})


@pytest.mark.parametrize("window", [0, 512, 4096])
def test_gguf_with_a_window_that_hides_nothing_is_read(window):
    assert Config.from_gguf(GGUF | {"qwen3.attention.sliding_window": window}) == Config.from_gguf(GGUF)


def test_gguf_without_a_needed_field_names_it():
    for field in ("qwen3.block_count", "qwen3.context_length", "qwen3.attention.layer_norm_rms_epsilon"):
        with pytest.raises(ModelError, match=field):
            Config.from_gguf({k: v for k, v in GGUF.items() if k != field})
    with pytest.raises(ModelError, match="vocab_size"):
        Config.from_gguf({k: v for k, v in GGUF.items() if k != "tokenizer.ggml.tokens"})
    with pytest.raises(ModelError, match=r"scaling\.factor"):
        Config.from_gguf(GGUF | {"qwen3.rope.scaling.type": "yarn"})
    with pytest.raises(ModelError, match="longrope"):
        Config.from_gguf(GGUF | {"qwen3.rope.scaling.type": "longrope"})


@pytest.mark.parametrize(
    ("stated", "rope"),
    [
        ({"scaling.factor": 4.0}, Rope(16, 1e6, "linear", 4.0)),
        ({"scaling.type": "linear", "scaling.factor": 4.0}, Rope(16, 1e6, "linear", 4.0)),
        ({"scale_linear": 4.0}, Rope(16, 1e6, "linear", 4.0)),
        ({"scaling.factor": 2.0, "scale_linear": 4.0}, Rope(16, 1e6, "linear", 2.0)),
        ({"scaling.factor": 0.0}, Rope(16, 1e6)),
        ({"scaling.type": "none", "scaling.factor": 4.0}, Rope(16, 1e6)),
    ],
    ids=lambda v: ", ".join(v) if isinstance(v, dict) else "",
)
def test_a_factor_of_gguf_scales_as_in_llama_cpp(stated, rope):
    assert Config.from_gguf(GGUF | {f"qwen3.rope.{name}": value for name, value in stated.items()}).rope == rope


@pytest.mark.parametrize(
    ("field", "value"), [("attention.causal", False), ("rope.scaling.attn_factor", 0.5)], ids=lambda v: repr(v)[:30]
)
def test_gguf_metadata_that_would_change_results_is_refused_by_name(field, value):
    with pytest.raises(ModelError, match=field):
        Config.from_gguf(GGUF | {f"qwen3.{field}": value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("expert_group_count", 2),
        ("expert_weights_scale", 2.5),
        ("expert_weights_norm", False),
        ("expert_gating_func", 2),
    ],
    ids=lambda v: repr(v)[:30],
)
def test_gguf_metadata_of_other_experts_is_refused_by_name(field, value):
    sizes = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 8}
    facts = {name.replace("qwen3.", "qwen3moe."): fact for name, fact in GGUF.items()} | {"general.architecture": "qwen3moe"}
    facts |= {f"qwen3moe.{name}": size for name, size in sizes.items()}
    assert Config.from_gguf(facts).num_experts == 4
    with pytest.raises(ModelError, match=field):
        Config.from_gguf(facts | {f"qwen3moe.{field}": value})


@pytest.mark.parametrize("name", ["dense_windows_by_layer", "dense_yarn", "moe_every_other_layer", "moe_one_expert"])
def test_a_decode_step_copies_nothing_and_no_prefill_is_read_back(name):
    gpu = tk.device("virtual:h200")
    config = Config.from_hf(CASE[name].values | {"model_type": "qwen3_moe" if "moe" in name else "qwen3"})
    model = Model(config, gpu, torch.bfloat16).init_weights().requires_grad_(False)
    ids, position = torch.arange(9, device=gpu.torch)[None], torch.full((1,), 8, device=gpu.torch)
    with torch.no_grad():
        x, cache = model.embed(ids), model.new_cache(300)
        with tk.copy_budget(h2d=0, d2h=0, device=gpu):
            model.advance(x[:, :8], cache.slots[:8], cache, 8)
        with tk.copy_budget(h2d=0, d2h=0, d2d=0, device=gpu):
            model.logits(model.advance(x[:, 8:], position, cache, 9))


@pytest.mark.parametrize("name", ["dense_windows_by_layer", "dense_tied", "moe_every_other_layer"])
def test_costs_add_up_to_the_model(name):
    config = Config.from_hf(CASE[name].values | {"model_type": "qwen3_moe" if "moe" in name else "qwen3"})
    model = Model(config, CPU, torch.bfloat16)
    found = model.costs(100)
    costs = {(cost.part, cost.kind): cost for cost in found}
    assert sum(cost.parameters for cost in found) == sum(p.numel() for p in model.parameters())
    assert sum(cost.weight_bytes for cost in found) == sum(p.nbytes for p in model.parameters())
    held = sum(tensor.nbytes for state in model.new_cache(100).states for tensor in state.tensors())
    assert sum(cost.state_held_bytes for cost in found) == held
    if config.sparse:
        experts = costs["experts", ""]
        assert experts.layers == config.sparse
        assert experts.read_bytes * config.num_experts == experts.weight_bytes * config.num_experts_per_tok
    if config.windowed:
        assert costs["attention", "sliding"].layers == config.windowed
        assert costs["attention", "sliding"].state_per_token_bytes == 0


def test_the_cache_says_when_it_is_full():
    model = Model(Config(50, 16, 24, 1, 2, 1, 8), CPU).init_weights()
    with pytest.raises(ModelError, match=r"9 tokens.*room for 8"):
        model.new_cache(8).bound(9)


def test_registry():
    assert ARCHITECTURES["qwen3"].Config is Config
