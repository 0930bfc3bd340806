"""Qwen3 against transformers on the CPU in fp32, in all the ways a decode loop feeds it; configs read and refused."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from toolkit.errors import ModelError
from toolkit.models import ARCHITECTURES
from toolkit.models.layers import assign
from toolkit.models.qwen3 import Config, Model, names_gguf, names_hf

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-4  # fp32 on both sides; what differs is the order of sums
CPU = SimpleNamespace(torch=torch.device("cpu"), name="cpu")  # all that a model asks of a Device

CONFIGS = {
    "gqa": {},
    "tied": {"tie_word_embeddings": True},
    "one_head": {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2},
    "multi_query": {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 6},
    "no_gqa": {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 10},
    "odd_sizes": {"vocab_size": 61, "hidden_size": 37, "intermediate_size": 51, "num_attention_heads": 10},
    "biased": {"attention_bias": True, "tie_word_embeddings": True},
    "theta_eps": {"rms_norm_eps": 1e-3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
}


def hf_model(**changes):
    base = {
        "vocab_size": 97, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 640,
    }  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**(base | changes))).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, which start as ones and zeros
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def ours(theirs) -> Model:
    config = Config.from_hf(theirs.config.to_dict())
    model, weights = Model(config, CPU), theirs.state_dict()
    for name, source in names_hf(config).items():
        checkpoint_name = source.names[0]
        assert model.get_parameter(name).shape == weights[checkpoint_name].shape
        assign(model, name, weights[checkpoint_name])
    assert not any(p.is_meta for p in model.parameters())
    return model


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def pair(request):
    theirs = hf_model(**request.param)
    return ours(theirs), theirs


def last(model, x, positions, cache, length):
    return model.logits(model.advance(x, positions, cache, length)[:, -1:]).view(-1)


@torch.no_grad()
def prefill(model, ids, chunk, context=640):
    cache = model.new_cache(context)
    logits = []
    for start in range(0, ids.shape[1], chunk):
        stop = min(start + chunk, ids.shape[1])
        logits.append(last(model, model.embed(ids[:, start:stop]), cache.slots[start:stop], cache, stop))
    return cache, logits


@torch.no_grad()
def test_whole_sequence_equals_transformers(pair):
    model, theirs = pair
    ids = torch.randint(model.config.vocab_size, (2, 23), generator=torch.Generator().manual_seed(1))
    assert (model(ids) - theirs(ids).logits).abs().max() <= TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("chunk", [1, 5, 19], ids="chunk={}".format)
def test_prefill_in_chunks_then_decode_equals_transformers(pair, chunk):
    model, theirs = pair
    ids = torch.randint(model.config.vocab_size, (1, 19), generator=torch.Generator().manual_seed(2))
    cache, logits = prefill(model, ids, chunk)
    expected = theirs(ids, use_cache=True)
    assert (logits[-1] - expected.logits[0, -1]).abs().max() <= TOLERANCE
    past, position, mine = expected.past_key_values, torch.tensor([19]), logits[-1]
    for _ in range(40):
        token = mine.argmax().view(1, 1)
        mine = last(model, model.embed(token), position, cache, int(position) + 1)
        expected = theirs(token, past_key_values=past, use_cache=True)
        assert (mine - expected.logits[0, -1]).abs().max() <= TOLERANCE
        position += 1


@torch.no_grad()
def test_past_one_bound_of_the_cache():
    theirs = hf_model(num_hidden_layers=1)
    model = ours(theirs)
    ids = torch.randint(97, (1, 531), generator=torch.Generator().manual_seed(3))
    _, logits = prefill(model, ids, 200)
    assert (logits[-1] - theirs(ids).logits[0, -1]).abs().max() <= TOLERANCE


@torch.no_grad()
def test_a_longer_bound_than_needed_changes_nothing():
    model = Model(Config(50, 16, 24, 2, 4, 2, 4), CPU).init_weights()
    ids = torch.arange(7)[None]
    cache, logits = prefill(model, ids, 7)
    wide = model.new_cache(640)
    assert (last(model, model.embed(ids), wide.slots[:7], wide, 600) - logits[-1]).abs().max() <= 1e-5
    assert cache.bound(7) == 256
    assert cache.bound(600) == 640


def test_gradients_equal_transformers():
    theirs = hf_model()
    model = ours(theirs)
    ids = torch.randint(97, (2, 11), generator=torch.Generator().manual_seed(4))
    target = torch.randint(97, (22,), generator=torch.Generator().manual_seed(5))
    for m, logits in ((model, model(ids)), (theirs, theirs(ids).logits)):
        m.zero_grad()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), target).backward()
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    for name, source in names_hf(model.config).items():
        checkpoint_name = source.names[0]
        assert torch.allclose(model.get_parameter(name).grad, grads[checkpoint_name], atol=1e-4), name


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_stays_near_fp32(dtype):
    config = Config(50, 32, 48, 2, 4, 2, 8)
    ids = torch.arange(9)[None]
    exact = Model(config, CPU).init_weights()(ids)
    model = Model(config, CPU, dtype).init_weights()
    cache, logits = prefill(model, ids, 4)
    assert cache.states[0].keys.dtype is dtype
    assert logits[-1].dtype is torch.float32
    assert (logits[-1] - exact[0, -1]).abs().max() < 0.02 * exact.abs().max().clamp(min=1)


def test_names_cover_every_parameter_once():
    for tied in (False, True):
        config = Config(50, 16, 24, 2, 4, 2, 4, tie_word_embeddings=tied, attention_bias=True)
        ours = {name for name, _ in Model(config, CPU).named_parameters()}
        for names in (names_hf(config), names_gguf(config)):
            assert set(names) == ours
            assert len({source.names for source in names.values()}) == len(names)


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
    assert Config.from_hf(old).rope_theta == Config.from_hf(new).rope_theta == 1e6
    assert Config.from_hf(old).eos_token_ids == (151645,)
    assert Config.from_hf(new).eos_token_ids == (1, 2)
    absent, theirs = Config.from_hf({"model_type": "qwen3"}), transformers.Qwen3Config()
    for field in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads", "head_dim"):
        assert getattr(absent, field) == getattr(theirs, field), field
    assert absent.rope_theta == 10_000.0
    windowless = {"model_type": "qwen3", "use_sliding_window": False, "sliding_window": 4096}
    assert Config.from_hf(windowless) == absent


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "llama"),
        ("hidden_act", "gelu"),
        ("rope_scaling", {"type": "yarn", "factor": 4.0}),
        ("rope_parameters", {"rope_type": "dynamic", "rope_theta": 1e6}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": "big"}),
        ("rope_parameters", [1]),
        ("quantization_config", {"bits": 4}),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("layer_types", 7),
        ("hidden_size", 0),
        ("hidden_size", "4096"),
        ("vocab_size", -5),
        ("num_hidden_layers", 2.5),
        ("num_hidden_layers", 1 << 62),
        ("num_key_value_heads", True),
        ("head_dim", 7),
        ("num_attention_heads", 13),
        ("rms_norm_eps", float("nan")),
        ("tie_word_embeddings", "no"),
        ("eos_token_id", "</s>"),
    ],
    ids=lambda v: repr(v)[:30],
)
def test_what_is_not_supported_is_refused_by_name(field, value):
    with pytest.raises(ModelError) as refused:
        Config.from_hf({"model_type": "qwen3", field: value})
    said = str(refused.value)
    assert any(part in said for part in (field, "rope_theta", "rope_parameters", "head_dim", "num_key_value_heads"))


def test_sliding_windows_are_refused():
    with pytest.raises(ModelError, match="use_sliding_window"):
        Config.from_hf({"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 512})


GGUF = {
    "general.architecture": "qwen3", "qwen3.block_count": 2, "qwen3.embedding_length": 32, "qwen3.feed_forward_length": 48,
    "qwen3.attention.head_count": 4, "qwen3.attention.head_count_kv": 2, "qwen3.attention.key_length": 16,
    "qwen3.attention.value_length": 16, "qwen3.context_length": 512, "qwen3.rope.freq_base": 1e6,
    "qwen3.attention.layer_norm_rms_epsilon": 1e-6, "tokenizer.ggml.tokens": ["a"] * 77, "tokenizer.ggml.eos_token_id": 3,
}  # fmt: skip


def test_config_from_gguf():
    config = Config.from_gguf(GGUF)
    assert config == Config(77, 32, 48, 2, 4, 2, 16, 512, 1e6, 1e-6, eos_token_ids=(3,))
    shapes = {"token_embd.weight": (80, 32), "output.weight": (80, 32)}
    assert Config.from_gguf(GGUF, shapes) == dataclasses.replace(config, vocab_size=80)
    del shapes["output.weight"]
    assert Config.from_gguf(GGUF, shapes).tie_word_embeddings


@pytest.mark.parametrize("field", [name for name in GGUF if name.startswith("qwen3.")])
def test_gguf_metadata_that_lies_is_refused(field):
    with pytest.raises(ModelError):
        Config.from_gguf(GGUF | {field: "x"})


def test_gguf_without_a_needed_field_names_it():
    for field in ("qwen3.block_count", "qwen3.context_length", "qwen3.attention.layer_norm_rms_epsilon"):
        with pytest.raises(ModelError, match=field):
            Config.from_gguf({k: v for k, v in GGUF.items() if k != field})
    with pytest.raises(ModelError, match="vocab_size"):
        Config.from_gguf({k: v for k, v in GGUF.items() if k != "tokenizer.ggml.tokens"})
    with pytest.raises(ModelError, match="yarn"):
        Config.from_gguf(GGUF | {"qwen3.rope.scaling.type": "yarn"})


def test_the_cache_says_when_it_is_full():
    model = Model(Config(50, 16, 24, 1, 2, 1, 8), CPU).init_weights()
    with pytest.raises(ModelError, match=r"9 tokens.*room for 8"):
        model.new_cache(8).bound(9)


def test_registry():
    assert ARCHITECTURES["qwen3"].Config is Config
