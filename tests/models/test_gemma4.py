"""Tests of Gemma 4 against transformers: prefill, chunks and decode steps, in fp64 and bfloat16, and without copies.

Comparisons run in fp64, so that they hold on every processor: see tests/models/parity.py.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

import toolkit as tk
from tests.models import parity
from tests.models.cases_gemma4 import BASE, CASES, _case, draw
from tests.models.parity import CPU, FLOAT32, MARGIN, STEPS, TOLERANCE, compare, in_double, last, ours, prefill
from toolkit.models.gemma4 import Config, Model, names_hf
from toolkit.models.layers import Joined

pytest.importorskip("transformers")

BY_NAME = {case.name: case for case in CASES}
WIDE = ("as_31b", "window_of_two", "all_variants", "as_e2b")  # that differ in what a cache holds


def tokens(model, length, seed=1):
    return torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_transformers(case):
    steps = STEPS if case.name in WIDE else 10
    found = compare(case, steps)
    assert found.worst <= TOLERANCE
    assert found.same_tokens == steps
    assert found.error <= MARGIN


@pytest.mark.parametrize("seed", range(12), ids="random {}".format)
def test_configs_at_random_equal_transformers(seed):
    found = compare(draw(seed), steps=12, seed=seed)
    assert found.worst <= TOLERANCE
    assert found.same_tokens == 12
    assert found.error <= MARGIN


@pytest.mark.parametrize("seed", range(2), ids="random {}".format)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_one_rounded_norm_is_more_than_rounding_explains(monkeypatch, dtype, seed):
    def rounding(theirs):
        model = ours(theirs)
        norm = model.norm.operand
        model.norm.operand = lambda x, quantize: rounded(norm(x, quantize))
        return model

    def rounded(out):
        return dataclasses.replace(out, plain=out.plain.to(dtype).float()) if out.plain.dtype is FLOAT32 else out

    monkeypatch.setattr(parity, "ours", rounding)
    found = compare(draw(seed), steps=2, seed=seed)
    assert found.worst <= TOLERANCE
    assert found.error > 10 * MARGIN


@torch.no_grad()
@in_double()
@pytest.mark.parametrize("chunk", [1, 7, 9, 40], ids="chunk={}".format)
@pytest.mark.parametrize("name", WIDE)
def test_prefill_in_chunks_of_any_size_equals_the_whole(name, chunk):
    model = ours(BY_NAME[name].theirs())
    ids = tokens(model, 40)
    whole = model(ids)[0]
    cache = model.new_cache(40)
    for start in range(0, 40, chunk):
        stop = min(start + chunk, 40)
        x = model.embed(ids[:, start:stop])
        found = model.logits(model.advance(x, cache.slots[start:stop], cache, stop))[0]
        assert (found - whole[start:stop]).abs().max() <= TOLERANCE


@torch.no_grad()
@in_double()
@pytest.mark.parametrize("window", [1, 3, 256, 300, 700], ids="window={}".format)
def test_past_one_bound_of_the_cache(window):
    """Compare with transformers without a cache, because its cache for a window of one keeps every token."""
    theirs = _case("", sliding_window=window, layer_types=["sliding_attention", "full_attention"], num_hidden_layers=2).theirs()
    model = ours(theirs)
    ids = tokens(model, 540)
    expected = theirs(ids, use_cache=False).logits[0]
    cache, logits = prefill(model, ids[:, :531], 200, 600)
    assert (logits - expected[530]).abs().max() <= TOLERANCE
    for i in range(531, 540):
        logits = last(model, model.embed(ids[:, i : i + 1]), torch.tensor([i]), cache, i + 1)
        assert (logits - expected[i]).abs().max() <= TOLERANCE


@torch.no_grad()
@in_double()
def test_a_longer_bound_than_needed_changes_nothing():
    model = ours(BY_NAME["all_variants"].theirs())
    ids = tokens(model, 7)
    _, logits = prefill(model, ids, 7, 640)
    wide = model.new_cache(640)
    assert (last(model, model.embed(ids), wide.slots[:7], wide, 600) - logits).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", ["as_31b", "all_variants"])
@in_double()
def test_gradients_equal_transformers(name):
    theirs = BY_NAME[name].theirs()
    model = ours(theirs)
    ids = torch.randint(97, (2, 11), generator=torch.Generator().manual_seed(4))
    target = torch.randint(97, (22,), generator=torch.Generator().manual_seed(5))
    for logits in (model(ids), theirs(ids).logits):
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), target).backward()
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    for name, source in names_hf(model.config).items():
        if not name.endswith(".scalar"):  # a buffer there
            theirs_grad = grads[source.names[0]]
            expected = theirs_grad if source.rows is None else theirs_grad[..., source.rows, :]
            assert torch.allclose(model.get_parameter(name).grad, expected, TOLERANCE, TOLERANCE), name


@torch.no_grad()
@pytest.mark.parametrize("name", ["as_31b", "as_26b_a4b", "as_e2b"])
def test_bfloat16_is_as_near_to_fp32_as_transformers_is(name):
    """Embeddings are equal to the bit, as their scale is rounded in the same way.

    Logits are compared by angle, because rounding may select other experts.
    """
    case = dataclasses.replace(BY_NAME[name], noise=0.1)
    exact, theirs = case.theirs(), case.theirs(dtype=torch.bfloat16)
    model = ours(theirs, torch.bfloat16)
    ids = tokens(model, 25)
    x, hidden = model.embed(ids), model.config.hidden_size
    assert torch.equal(x[..., :hidden], theirs.model.embed_tokens(ids))
    if model.config.hidden_size_per_layer_input:
        assert torch.equal(x[..., hidden:], theirs.model.embed_tokens_per_layer(ids))
    mine, expected, best = model(ids), theirs(ids).logits.float(), exact(ids).logits
    apart = [1 - torch.cosine_similarity(a, b, dim=-1).median() for a, b in ((mine, expected), (mine, best), (expected, best))]
    assert apart[0] < 0.03
    assert apart[1] < 2 * apart[2]
    cache, logits = prefill(model, ids, 6, 40)
    assert cache.states[0].keys.dtype is torch.bfloat16
    assert logits.dtype is torch.float32
    assert torch.cosine_similarity(logits, mine[0, -1], dim=-1) > 0.97


def test_what_stays_fp32_and_what_does_not():
    model = Model(
        dataclasses.replace(ours(BY_NAME["all_variants"].theirs()).config, rope_freqs_stored=True), CPU, torch.bfloat16
    )
    kept = {name for name, p in model.named_parameters() if p.dtype is torch.float32}
    assert all("norm" in name or name == "rope_freqs" for name in kept)
    assert "rope_freqs" in kept
    assert all(p.is_meta for p in model.parameters())


@torch.no_grad()
def test_the_embedding_on_the_host_gives_the_same_rows():
    model = ours(BY_NAME["as_e2b"].theirs())
    ids = tokens(model, 5)
    host = model.embed.on_host()
    assert torch.equal(host(ids), model.embed(ids))
    assert host(ids).shape == (1, 5, 24 + 7 * 6)
    assert {p.device.type for p in host.parameters()} == {"cpu"}


def test_rows_from_the_host_decode_the_same_tokens():
    device = tk.device("virtual:h200")
    model = Model(Config.from_hf({"model_type": "gemma4_text"} | BY_NAME["as_e2b"].values), device).init_weights(2)
    model.requires_grad_(False)
    runs = [tk.generate(model, [5, 6, 7, 8], decode=name, max_new_tokens=16) for name in ("roundtrip", "host-embedding")]
    assert runs[0].tokens == runs[1].tokens
    assert set(runs[1].copies()["h2d_bytes"].iloc[2:]) == {
        (24 + 7 * 6) * 4 + 8
    }  # the row with its per-layer inputs, the position


@torch.no_grad()
@in_double()
def test_joined_matrices_change_nothing():
    model = ours(BY_NAME["all_variants"].theirs())
    ids = tokens(model, 13)
    before = model(ids)
    joined = [group for part in model.modules() if isinstance(part, Joined) for group in part.join()]
    assert set(joined) == {("q", "k", "v"), ("q", "k"), ("gate", "up")}
    assert (model(ids) - before).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", ["as_31b", "all_variants", "one_expert"])
def test_a_decode_step_launches_kernels_and_copies_nothing(name):
    device = tk.device("virtual:h200")
    model = Model(Config.from_hf(BASE | {"model_type": "gemma4_text"} | BY_NAME[name].values), device, torch.bfloat16)
    model.init_weights().requires_grad_(False)
    ids, position = torch.arange(11)[None].to(device.torch), torch.tensor([11]).to(device.torch)
    with torch.no_grad():
        cache, x = model.new_cache(40), model.embed(ids)
        with tk.copy_budget(h2d=0, d2h=0, device=device):
            model.advance(x, cache.slots[:11], cache, 11)
        with tk.copy_budget(h2d=0, d2h=0, d2d=0, device=device), tk.record(device) as trace:
            model.logits(model.advance(model.embed(ids[:, :1]), position, cache, 12))
    assert not set(trace.to_pandas()["kind"].astype(str)) & {"h2d", "d2h", "d2d", "sync"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_costs_count_every_weight_once(case):
    config = Config.from_hf({"model_type": "gemma4_text"} | case.values)
    model = Model(config, CPU, torch.bfloat16)
    costs = model.costs(30)
    assert sum(cost.parameters for cost in costs) == sum(p.numel() for p in model.parameters())
    assert sum(cost.weight_bytes for cost in costs) == sum(p.nbytes for p in model.parameters())


def test_costs_of_attention_are_what_a_step_reads():
    model = Model(Config.from_hf({"model_type": "gemma4_text"} | BY_NAME["all_variants"].values), CPU, torch.bfloat16)
    kinds = {cost.kind: cost for cost in model.costs(30) if cost.part == "attention"}
    assert {kind: cost.layers for kind, cost in kinds.items()} == {
        "sliding": (0, 2), "sliding, shared": (3, 5), "full": (1,), "full, shared": (4, 6),
    }  # fmt: skip
    assert kinds["sliding"].state_bytes == 2 * 8 * (2 * 2 * 8 * 2)  # layers, window, keys and values, KV heads, head_dim, bytes
    assert kinds["full"].state_bytes == 30 * (2 * 1 * 16 * 2)
    assert kinds["full, shared"].state_bytes == 2 * kinds["full"].state_bytes
    assert kinds["full, shared"].state_held_bytes == kinds["full, shared"].state_per_token_bytes == 0
    assert (kinds["sliding"].state_per_token_bytes, kinds["full"].state_per_token_bytes) == (0, 64)
    early = next(cost for cost in model.costs(5) if cost.kind == "sliding")
    assert early.state_bytes == 2 * 5 * early.state_per_token_bytes / 2
    experts = next(cost for cost in model.costs(30) if cost.part == "experts")
    assert experts.read_bytes == experts.weight_bytes * 2 // 5


def test_a_hook_on_a_norm_runs_with_keys_stored_in_part():
    model = ours(BY_NAME["as_31b"].theirs())
    full = model.layers[-1].attention
    ran = []
    for norm in (full.q_norm, full.k_norm):
        norm.register_forward_hook(lambda module, given, out: ran.append(module))
    cache, ids = model.new_cache(8), torch.arange(4)[None]
    model.advance(model.embed(ids), cache.slots[:4], cache, 4)
    assert cache.states[-1].keys.shape[3] == 16
    assert ran == [full.q_norm, full.k_norm]


@pytest.mark.parametrize(("turning", "key_dim"), [(0, 16), (8, 16), (9, 32), (16, 32), (17, 0), (32, 0)])
def test_how_much_of_a_key_is_stored(turning, key_dim):
    """The kernels need a power of two, and a part must be smaller than the whole."""
    config = ours(BY_NAME["as_31b"].theirs()).config
    assert dataclasses.replace(config, full=dataclasses.replace(config.full, turning=turning)).key_dim == key_dim
