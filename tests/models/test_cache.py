"""Tests of caches: the contents and masks of rings, and rollback, compared with results that were worked out by hand."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import toolkit as tk
from tests.models.cases_gemma4 import BASE, CASES
from tests.models.parity import CPU, TOLERANCE, in_double, last
from toolkit.core.errors import ModelError
from toolkit.models.cache import Cache, KeysValues, Recurrent, Ring
from toolkit.models.gemma4 import Config, Model

BY_NAME = {case.name: case for case in CASES}
F32, HERE = torch.float32, torch.device("cpu")


def numbered(positions):
    """Return keys whose value is their position plus one, since zero marks an empty slot."""
    return (positions + 1.0).view(1, 1, -1, 1)


def ring_of(window, context):
    return Cache(torch.arange(context), {}).fill([partial(Ring, 1, window, context, 1, F32, HERE)])


@pytest.mark.parametrize("chunks", [[1] * 25, [25], [3, 1, 9, 1, 1, 10], [8, 8, 8, 1], [1, 24], [24, 1]], ids=str)
@pytest.mark.parametrize(("window", "context"), [(8, 30), (1, 30), (25, 30), (24, 30), (100, 30), (8, 25), (40, 25)])
def test_a_ring_shows_each_token_its_window_and_nothing_else(window, context, chunks):
    cache = ring_of(window, context)
    ring, start = cache.states[0], 0
    for size in chunks:
        positions = torch.arange(start, start + size)
        reach = cache.ring_reach(positions, start + size, window)
        keys, values = ring.extend(numbered(positions), -numbered(positions), reach)
        assert torch.equal(keys, -values)
        for row, position in zip(reach.mask, positions, strict=True):
            seen = sorted(keys[0, 0, row == 0, 0].tolist())
            assert seen == [q + 1 for q in range(max(0, int(position) - window + 1), int(position) + 1)]
        assert set(reach.mask.unique().tolist()) <= {0.0, float("-inf")}
        start += size
    held = {int(slot): int(key) - 1 for slot, key in enumerate(ring.keys[0, 0, :, 0]) if key}
    size = min(window, context)
    assert held == {position % size: position for position in range(max(0, 25 - size), 25)}


@pytest.mark.parametrize("tokens", [-1, 0, True, 1.5, float("nan"), "8", None, 1 << 63], ids=repr)
@pytest.mark.parametrize("engine", ["toolkit", "hf"])
def test_a_cache_of_another_number_of_tokens_is_refused(tokens, engine):
    model = tk.load("demo/qwen3", device="cpu", engine=engine, progress=False)
    with pytest.raises(ModelError, match=r"^a cache for .* tokens: not a whole number of at least 1"):
        model.new_cache(tokens)


def test_a_ring_takes_no_more_than_its_window_or_the_context():
    assert ring_of(8, 30).states[0].keys.shape == (1, 1, 8, 1)
    assert ring_of(8, 5).states[0].keys.shape == (1, 1, 5, 1)


def test_a_wide_ring_is_read_only_as_far_as_it_is_full():
    cache = ring_of(1024, 2048)
    assert cache.ring_reach(torch.tensor([9]), 10, 1024).mask.shape == (1, 256)
    assert cache.ring_reach(torch.arange(250, 300), 300, 1024).mask.shape == (50, 512 + 50)
    assert cache.ring_reach(torch.tensor([1500]), 1501, 1024).mask.shape == (1, 1024)
    assert cache.reach(torch.tensor([9]), 10).mask.shape == (1, 256)


def test_layers_that_keep_everything_show_all_that_came_before():
    cache = Cache(torch.arange(9), {}).fill([partial(KeysValues, 1, 9, 1, F32, HERE)])
    for positions in (torch.arange(4), torch.tensor([4]), torch.arange(5, 9)):
        reach = cache.reach(positions, int(positions[-1]) + 1)
        keys, _ = cache.states[0].extend(numbered(positions), numbered(positions), reach)
        for row, position in zip(reach.mask, positions, strict=True):
            assert keys[0, 0, row == 0, 0].tolist() == [q + 1.0 for q in range(int(position) + 1)]


def feed(model, cache, ids, start, chunk=None):
    """Feed `ids` from position `start` on, and return the logits of the last one."""
    chunk = chunk or len(ids)
    for at in range(0, len(ids), chunk):
        some = torch.tensor([ids[at : at + chunk]])
        positions = torch.arange(start + at, start + at + some.shape[1])
        logits = last(model, model.embed(some), positions, cache, start + at + some.shape[1])
    return logits


def tiny(name="as_31b", **values):
    return Model(
        Config.from_hf({"model_type": "gemma4_text"} | BY_NAME[name].values | values), CPU, torch.float32
    ).init_weights()


CHAT, DETOUR, AFTER = list(range(3, 23)), list(range(60, 75)), [7, 8, 9, 1, 2]


@torch.no_grad()
@pytest.mark.parametrize("name", ["as_31b", "all_variants", "as_e2b"])
@pytest.mark.parametrize("chunk", [1, None], ids="chunk={}".format)
def test_back_at_a_checkpoint_all_is_as_though_nothing_had_followed(name, chunk):
    model = tiny(name)
    straight, cache = model.new_cache(64), model.new_cache(64)
    feed(model, straight, CHAT, 0)
    expected = feed(model, straight, AFTER, 20, chunk)
    feed(model, cache, CHAT, 0)
    assert cache.checkpoint() == 20
    for _ in range(2):  # a checkpoint serves as often as needed
        feed(model, cache, DETOUR, 20, chunk)
        cache.rollback(20)
        assert cache.length == 20
        assert torch.equal(feed(model, cache, AFTER, 20, chunk), expected)
        cache.rollback(20)


@torch.no_grad()
@pytest.mark.parametrize("fed", [DETOUR, CHAT + DETOUR], ids=["detour", "chat and detour"])
def test_a_ring_that_has_not_wrapped_can_be_rolled_back_to_any_position(fed):
    """The first 11 tokens are fed as one prompt both times, because PyTorch guarantees equal bits only for equal shapes."""
    model = tiny(sliding_window=64)
    straight, cache = model.new_cache(64), model.new_cache(64)
    for one in (straight, cache):
        feed(model, one, CHAT[:11], 0)
    expected = feed(model, straight, AFTER, 11)
    feed(model, cache, fed, 11)
    cache.rollback(11)
    assert torch.equal(feed(model, cache, AFTER, 11), expected)


@torch.no_grad()
@in_double()
def test_a_prompt_can_be_rolled_back_to_its_middle():
    model = tiny(sliding_window=40)
    straight, cache = model.new_cache(64), model.new_cache(64)
    feed(model, straight, CHAT[:11], 0)
    expected = feed(model, straight, AFTER, 11)
    feed(model, cache, CHAT + DETOUR, 0)
    cache.rollback(11)
    assert (feed(model, cache, AFTER, 11) - expected).abs().max() <= TOLERANCE


@torch.no_grad()
def test_keys_and_values_can_be_taken_back_anywhere():
    model = tiny(layer_types=["full_attention"] * 4)
    straight, cache = model.new_cache(64), model.new_cache(64)
    expected = feed(model, straight, AFTER, 0)
    feed(model, cache, CHAT + DETOUR, 0)
    cache.rollback(9)
    cache.rollback(0)
    assert torch.equal(feed(model, cache, AFTER, 0), expected)


@torch.no_grad()
def test_a_ring_that_has_come_round_is_refused_with_the_reason():
    model = tiny()
    cache = model.new_cache(64)
    feed(model, cache, CHAT[:5], 0)
    cache.checkpoint()
    feed(model, cache, CHAT[5:], 5)
    with pytest.raises(ModelError, match=r"3 layers hold sliding windows.*checkpoints: 5") as refused:
        cache.rollback(19)
    assert refused.value.facts["checkpoints"] == [5]
    assert cache.length == 20  # as before
    cache.rollback(20)
    cache.rollback(5)
    straight = model.new_cache(64)
    feed(model, straight, CHAT[:5], 0)
    assert torch.equal(feed(model, cache, AFTER, 5), feed(model, straight, AFTER, 5))


@torch.no_grad()
def test_from_the_beginning_again():
    model = tiny("all_variants")
    cache = model.new_cache(64)
    expected = feed(model, model.new_cache(64), AFTER, 0, 2)
    feed(model, cache, CHAT + DETOUR, 0)
    cache.rollback(0)
    assert cache.length == 0
    assert torch.equal(feed(model, cache, AFTER, 0, 2), expected)


def test_recurrent_states_come_back_from_checkpoints_only():
    cache = Cache(torch.arange(32), {}).fill([partial(Recurrent, {"state": ((2, 3), F32), "conv": ((4,), F32)}, HERE), None])
    (state, nothing) = cache.states
    assert nothing is None
    for step in range(1, 9):
        state.states["state"].add_(step)
        cache.bound(step)
        if step in (3, 6):
            cache.checkpoint()
    with pytest.raises(ModelError, match=r"1 layers hold recurrent states.*checkpoints: 3, 6"):
        cache.rollback(5)
    cache.rollback(6)
    assert state.states["state"].unique().tolist() == [21.0]
    cache.rollback(3)
    assert state.states["state"].unique().tolist() == [6.0]
    with pytest.raises(ModelError, match="3 tokens were fed"):
        cache.rollback(6)
    cache.rollback(0)
    assert not state.states["state"].any()


@pytest.mark.parametrize("position", [-1, 6, 99])
def test_only_what_was_fed_can_be_taken_back(position):
    cache = ring_of(8, 30)
    cache.bound(5)
    with pytest.raises(ModelError, match="5 tokens were fed"):
        cache.rollback(position)


def test_a_full_cache_says_so_before_anything_is_written():
    model = tiny()
    cache = model.new_cache(20)
    with torch.no_grad():
        feed(model, cache, CHAT, 0)
        before = [tensor.clone() for state in cache.states for tensor in state.tensors()]
        with pytest.raises(ModelError, match=r"21 tokens.*room for 20"):
            feed(model, cache, [1], 20)
    assert all(torch.equal(a, b) for a, b in zip(before, (t for s in cache.states for t in s.tensors()), strict=True))


@torch.no_grad()
def test_checkpoints_and_caches_give_their_memory_back():
    device = tk.device("virtual:h200")
    model = Model(Config.from_hf(BASE | {"model_type": "gemma4_text", "sliding_window": 64}), device).init_weights()
    empty = device.memory().allocated_bytes
    cache = model.new_cache(128)
    model.advance(model.embed(cache.slots[None, :9]), cache.slots[:9], cache, 9)
    held = device.memory().allocated_bytes
    cache.checkpoint()
    rings = 3 * 2 * (2 * 64 * 8 * 4)  # layers, keys and values, KV heads x window x head_dim x bytes
    assert device.memory().allocated_bytes - held == rings
    cache.forget(9)
    assert device.memory().allocated_bytes == held
    cache.checkpoint()
    cache.rollback(4)
    assert device.memory().allocated_bytes == held
    cache.checkpoint()
    cache.free()
    assert device.memory().allocated_bytes == empty


def test_a_cache_that_does_not_fit_leaves_nothing_behind():
    device = tk.device("virtual:h200")

    def too_much():
        raise torch.OutOfMemoryError

    empty = device.memory().allocated_bytes
    cache = Cache(torch.arange(8, device=device.torch), {})
    with pytest.raises(torch.OutOfMemoryError):
        cache.fill([partial(KeysValues, 2, 8, 16, F32, device.torch), too_much])
    assert device.memory().allocated_bytes == empty


def test_a_cache_says_what_it_holds():
    cache = tk.load("demo/qwen3", "cpu", progress=False).new_cache(64)
    assert repr(cache) == "Cache(3 layers, 0 of 64 positions filled, 192 KiB)"
    cache.bound(5)
    assert "5 of 64 positions" in repr(cache)
    cache.free()
    assert repr(cache) == "Cache(freed)"
