"""Tests of 8-bit and 4-bit caches in whole models: error, same tokens on all devices, memory, and invalid arguments."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import toolkit as tk
from tests.models.cases_gemma4 import CASES
from tests.models.parity import CPU
from toolkit.core.errors import ModelError, UnknownNameError
from toolkit.decode.compare import decode_steps
from toolkit.decode.strategies import OwnLoop, strategies_of
from toolkit.kernels.kv_codes import KV_SCHEMES
from toolkit.models import gemma4
from toolkit.models.cache_codes import CodedKeysValues, check_kv, every_position

PLACES = ("cpu", "virtual:h200")
DEMOS = ("demo/qwen3", "demo/gemma4", "demo/qwen3.5-moe")
# KV heads, head_dim, and the plain numbers of a key in coded layers
CODED = {"demo/qwen3": (2, 64, 64), "demo/gemma4": (1, 128, 32), "demo/qwen3.5-moe": (1, 64, 64)}
TEXT = "The capital of France is Paris. The capital of Germany is Berlin. " * 5
# Of the logits, the distance over their norm, the largest of 80 positions. A coordinate in 8 bits is off by 0.3 steps, and a
# step is 1/40 of its vector's root mean square: 0.7 %. In 4 bits a vector loses 0.9 % of its square: 10 %. The largest found
# are 0.008, 0.125 and 0.133, all of demo/qwen3, whose four layers are all coded.
NEAR = {"int8": 0.02, "k4v8": 0.2, "int4": 0.2}


@pytest.fixture(scope="module")
def models():
    return {(name, place): tk.load(name, device=tk.device(place), progress=False) for name in DEMOS for place in PLACES}


@torch.no_grad()
def logits(model, ids, kv, ends):
    """Return the logits [T, vocab] of all positions of `ids`, fed in parts that end at the positions `ends`."""
    x, cache, found = torch.tensor([ids], device=model.device.torch), model.new_cache(len(ids), kv), []
    for start, stop in pairwise((0, *ends)):
        hidden = model.advance(model.embed(x[:, start:stop]), cache.slots[start:stop], cache, stop)
        found.append(model.logits(hidden).cpu())
    cache.free()
    return torch.cat(found, 1)[0]


def distance(found, wanted):
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


@pytest.mark.parametrize("name", DEMOS)
def test_logits_are_near_plain_ones_and_the_same_in_chunks_and_everywhere(models, name):
    """Chunks and devices sum in different orders, so logits differ by 1e-6. If that changes a code, they differ by more.

    The tolerance of 1e-3 allows for one changed code.
    """
    ids = models[name, "cpu"].tokenizer.encode(TEXT)[:80]
    plain, at_once = (len(ids),), {}
    for place in PLACES:
        wanted = logits(models[name, place], ids, None, plain)
        for kv, near in NEAR.items():
            found = at_once[kv, place] = logits(models[name, place], ids, kv, plain)
            assert 1e-4 < distance(found, wanted) < near, (place, kv)
            chunks = logits(models[name, place], ids, kv, (30, 31, 64, len(ids) - 1, len(ids)))
            assert distance(chunks, found) < 1e-3, (place, kv)
    for kv in NEAR:
        assert distance(*(at_once[kv, place] for place in PLACES)) < 1e-3, kv


@pytest.mark.parametrize(("name", "kv"), [*((name, "int4") for name in DEMOS), (DEMOS[0], "int8"), (DEMOS[0], "k4v8")])
def test_the_same_tokens_under_every_strategy(models, name, kv):
    options = {"max_new_tokens": 4, "eos": (), "kv": kv, "record": False}
    runs = {
        tk.generate(models[name, place], "The capital of France is", strategy, **options).tokens
        for place in PLACES
        for strategy in strategies_of(models[name, place])
    }
    assert len(runs) == 1
    (tokens,) = runs
    assert models[name, "cpu"].tokenizer.decode(tokens).startswith(" Paris")


def test_tokens_that_are_drawn_and_compared(models):
    table = tk.compare(
        models["demo/qwen3", "cpu"],
        "The capital",
        ["roundtrip", "double-buffered"],
        kv="k4v8",
        max_new_tokens=5,
        temperature=0.9,
    ).table
    assert table["same_tokens"].all()


@pytest.mark.parametrize("name", DEMOS)
def test_a_step_copies_as_much_as_a_plain_one_and_launches_one_kernel_more_a_layer(models, name):
    model = models[name, "virtual:h200"]
    coded = sum(isinstance(state, CodedKeysValues) for state in model.new_cache(8, "int4").states)
    runs = {kv: tk.generate(model, [5] * 9, kv=kv, max_new_tokens=4, eos=()) for kv in (None, *KV_SCHEMES)}
    tables = {kv: decode_steps(run.trace) for kv, run in runs.items()}
    for kv in KV_SCHEMES:
        for kind in ("h2d", "d2h", "d2d"):
            for what in (f"{kind}_count", f"{kind}_bytes"):
                assert list(tables[kv][what]) == list(tables[None][what]), (kv, what)
                assert list(runs[kv].copies()[what]) == list(runs[None].copies()[what]), "nor does the prompt's"
        assert list(tables[kv]["kernels"] - tables[None]["kernels"]) == [coded] * 3
        assert {"kv_encode", "attention_codes"} <= set(runs[kv].trace.text("name"))


@pytest.mark.parametrize("kv", KV_SCHEMES)
@pytest.mark.parametrize("name", DEMOS)
def test_bytes_are_as_computed_and_given_back(models, name, kv):
    model, context = models[name, "virtual:h200"], 512
    held = model.device.memory().allocated_bytes

    def taken(kv):
        cache = model.new_cache(context, kv)
        n = model.device.memory().allocated_bytes - held
        coded = (state.tensors() for state in cache.states if isinstance(state, CodedKeysValues))
        sizes = [sum(tensor.nbytes for tensor in tensors) for tensors in coded]
        cache.free()
        assert model.device.memory().allocated_bytes == held
        return n, sizes

    (plain, none), (coded, sizes) = taken(None), taken(kv)
    heads, dim, key_dim = CODED[name]
    each = heads * context * KV_SCHEMES[kv].bytes_per_token(dim)
    assert none == []
    assert sizes == [each] * len(sizes)
    assert sizes
    book = 4 * dim + (kv != "int8") * 4 * (dim * dim + 16)  # signs, rotation, levels: once a cache
    book += -4 * 16 % 512 if kv != "int8" else 0  # the allocator's smallest block
    book += -4 * dim % 512
    assert plain - coded == len(sizes) * (heads * context * (key_dim + dim) * 4 - each) - book


@torch.no_grad()
@pytest.mark.parametrize("name", DEMOS)
def test_back_at_a_checkpoint_all_is_as_though_nothing_had_followed(models, name):
    model = models[name, "cpu"]
    cache = model.new_cache(40, "int4")

    def feed(ids, start):
        x = model.embed(torch.tensor([ids]))
        stop = start + len(ids)
        return model.logits(model.advance(x, cache.slots[start:stop], cache, stop))

    feed(list(range(60, 80)), 0)
    cache.checkpoint()
    first = feed([7, 8, 9], 20)
    feed(list(range(90, 100)), 23)
    cache.rollback(20)
    assert torch.equal(feed([7, 8, 9], 20), first)
    cache.rollback(0)
    assert cache.length == 0


@torch.no_grad()
@pytest.mark.parametrize("kv", [None, *KV_SCHEMES])
def test_layers_that_share_keys_and_values_read_codes_too(kv):
    """As in Gemma 4 E2B. The prompt, whose parts overwrite rings, and the steps give the CPU's logits on the virtual GPU."""
    values = next(case for case in CASES if case.name == "as_e2b").values
    config = gemma4.Config.from_hf({"model_type": "gemma4_text"} | values | {"head_dim": 16, "global_head_dim": 64})
    assert config.first_shared_layer < config.num_hidden_layers
    found = []
    for device in (CPU, tk.device("virtual:h200")):
        model = gemma4.Model(config, device).init_weights()
        found.append(logits(model, list(range(3, 23)), kv, (9, 18, 19, 20)))
    assert distance(*found) < 1e-3
    if kv is None:
        return
    plain = logits(gemma4.Model(config, CPU).init_weights(), list(range(3, 23)), None, (20,))
    assert distance(found[0], plain) > 1e-3, "were they coded?"


def test_random_models_take_no_memory_for_codes():
    """The cache has sizes only, so a long context takes no memory of this machine."""
    model = tk.load("random/qwen3-0.6b", device="virtual:h200", progress=False)
    cache = model.new_cache(40_000, "int4")
    assert cache.states[0].keys._host.is_meta
    cache.free()
    shapes = model.kernel_shapes(context=600, prompt=40, kv="k4v8")
    names = {kernel.name for kernel, _ in shapes}
    assert {"kv_encode", "attention_codes", "attention_prefill"} <= names
    assert "attention_decode" not in names
    assert any("codes=k4v8" in shape.key for _, shape in shapes)


@pytest.mark.parametrize("kv", ["int5", "", "INT4", 4, ["int4"], True], ids=repr)
def test_unknown_names_are_refused_before_anything_runs(models, kv):
    model = models["demo/qwen3", "cpu"]
    with pytest.raises(UnknownNameError, match=r"KV scheme.*int4, int8, k4v8"):
        tk.generate(model, "A", kv=kv)
    with pytest.raises(UnknownNameError, match="KV scheme"):
        model.new_cache(8, kv)
    assert model.device.recording is None
    assert check_kv("int4").name == "int4"


def test_a_loop_with_a_cache_of_its_own_refuses_codes(models):
    theirs = OwnLoop("theirs", lambda *operands: iter(()))
    with pytest.raises(ModelError, match=r"theirs with kv='int4'.*its own cache"):
        tk.generate(models["demo/qwen3", "cpu"], "A", theirs, kv="int4")


@pytest.mark.parametrize(
    ("kv", "head_dim", "do"),
    [
        ("int4", 32, "kv='int8'"),
        ("k4v8", 32, "kv='int8'"),
        ("int8", 16, "Leave"),
        ("int4", 96, "Leave"),
        ("int8", 1024, "Leave"),
    ],
)
def test_heads_that_the_kernels_do_not_take(kv, head_dim, do):
    with pytest.raises(ModelError, match=f"head_dim is {head_dim}.*{do}") as refused:
        every_position(kv, 2, 8, head_dim, torch.float32, torch.device("cpu"))
    assert refused.value.facts["head_dim"] == head_dim
