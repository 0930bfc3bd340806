"""Tests of the attention kernels against their references: odd sizes, rings, windows, unused slots, invalid tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

from toolkit.core.errors import ModelError
from toolkit.kernels.attention import ATTENTION_DECODE, DecodeShape
from toolkit.kernels.attention_prefill import ATTENTION_PREFILL, PrefillShape
from toolkit.kernels.base import Config
from toolkit.models.cache import Cache, Ring
from toolkit.ops.reference.attention import cached_attention
from toolkit.weights.packed import quantize_activations

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
F32, BF16 = torch.float32, torch.bfloat16
# The largest error allowed is 1e-2; rounding a result to bf16 alone costs up to 2^-8 of its value.
TOLERANCE = {BF16: {"atol": 1e-2, "rtol": 1e-2}, F32: {"atol": 2e-5, "rtol": 2e-5}}
SMALL = Config(block_n=16, splits=3)


def run(kernel, shape, config, inputs, times=1):
    """Return the result of the last of several launches on one scratch; scratch and outputs are poisoned beforehand."""
    outputs = kernel.outputs(shape, inputs)
    for tensor in outputs.values():
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
    for _ in range(times):
        for launch in kernel.launches(shape, config, inputs, outputs):
            launch.run()
    return outputs["output"]


def check(kernel, shape, config, inputs):
    (want,) = kernel.reference(shape, inputs)
    torch.testing.assert_close(run(kernel, shape, config, inputs), want, **TOLERANCE[want.dtype])
    return want


def at(inputs, position, poison=None):
    """Return the inputs with another position, and all slots beyond it replaced by `poison`."""
    inputs = {**inputs, "positions": torch.tensor([position], device=HERE)}
    for name in ("keys", "values") if poison is not None else ():
        inputs[name] = inputs[name].clone()
        inputs[name][:, :, position + 1 :] = poison
    return inputs


DECODE_SHAPES = [
    DecodeShape(8, 2, 64, 100),
    DecodeShape(3, 3, 32, 33),  # as many KV heads
    DecodeShape(6, 2, 16, 70),  # a group that is no power of two
    DecodeShape(34, 2, 16, 40),  # ... and larger than 16
    DecodeShape(4, 1, 128, 50, dtype="float32"),
    DecodeShape(2, 1, 512, 40),
    DecodeShape(4, 2, 64, 50, key_dim=16),  # the other numbers of a key are the value's
    DecodeShape(6, 2, 128, 70, scaled=False, dtype="float32", key_dim=32),
    DecodeShape(2, 1, 256, 1),
    DecodeShape(4, 2, 32, 64, 64),  # a ring
    DecodeShape(4, 2, 32, 50, 64, scaled=False),  # a ring whose context fits
    DecodeShape(4, 2, 32, 64, 20),  # a window on slots that are positions
]


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("shape", DECODE_SHAPES, ids=lambda shape: shape.key)
def test_decode_equals_the_reference(shape, splits):
    config = Config(block_n=32 if splits == 1 else 16, splits=min(splits, -(-shape.seen // 16)))
    check(ATTENTION_DECODE, shape, config, ATTENTION_DECODE.inputs(shape, HERE, seed=1))


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("shape", DECODE_SHAPES, ids=lambda shape: shape.key)
def test_the_new_token_is_seen_wherever_it_is_in_a_block(shape, block):
    """The keys and values of other tokens are loaded before its own are."""
    config, inputs = Config(block_n=block, splits=-(-shape.seen // block)), ATTENTION_DECODE.inputs(shape, HERE, seed=1)
    last = 3 * shape.slots if shape.seen < shape.slots or shape.window else shape.slots - 1
    for position in {-1, 0, shape.seen // 2, shape.slots - 1, last}:
        poison = torch.nan if position < shape.slots - 1 else None
        check(ATTENTION_DECODE, shape, config, at(inputs, position, poison))


@pytest.mark.parametrize("position", [0, 15, 16, 70, 99])
def test_what_lies_beyond_the_length_is_never_seen(position):
    shape = DecodeShape(4, 2, 32, 100)
    inputs = ATTENTION_DECODE.inputs(shape, HERE, seed=2)
    want = check(ATTENTION_DECODE, shape, SMALL, at(inputs, position, 1000.0))
    (clean,) = ATTENTION_DECODE.reference(shape, at(inputs, position, 0.0))
    assert torch.equal(want, clean)
    got = [run(ATTENTION_DECODE, shape, SMALL, at(inputs, position, poison)) for poison in (1000.0, torch.nan)]
    assert torch.equal(*got)


def test_the_first_blocks_are_loaded_before_the_turn():
    """The compiler moves loads ahead of a loop, but not around every instruction: as compiled for an H200."""
    code = """
from triton.runtime import driver
from toolkit.kernels.attention import ATTENTION_DECODE as kernel, DecodeShape
from toolkit.kernels.base import Config
from toolkit.tune.compile_worker import AbsentGpu

driver.set_active(AbsentGpu(90))
shape = DecodeShape(8, 2, 64, 1024)
inputs = kernel.inputs(shape, "meta")
launch = kernel.launches(shape, Config(block_n=64, splits=4, stages=3), inputs, kernel.outputs(shape, inputs))[0]
options = launch.options((9, 0))
print(launch.function.warmup(grid=launch.grid, **launch.arguments, **launch.constants, **options).asm["ptx"])
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    ptx = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    before, wait, after = ptx.partition("griddepcontrol.wait")
    loads = "cp.async.cg.shared.global"
    # Two blocks, each of 2 x 64 x 64 numbers of 2 bytes: 16 bytes for each of 128 threads at a time.
    assert wait
    assert before.count(loads) >= 2 * 8
    assert "ld.global" in after  # the query


def test_scratch_is_ready_for_the_next_launch():
    """Repeating the launches on the same scratch gives the same bits, for one split or all."""
    shape = DecodeShape(4, 2, 32, 100)
    inputs = ATTENTION_DECODE.inputs(shape, HERE)
    for position in (5, 90):
        once, thrice = (run(ATTENTION_DECODE, shape, SMALL, at(inputs, position), times) for times in (1, 3))
        assert torch.equal(once, thrice)


def test_a_window_hides_what_lies_before_it():
    shape = DecodeShape(4, 2, 32, 100, 40)
    inputs = at(ATTENTION_DECODE.inputs(shape, HERE), 60, torch.nan)
    inputs["keys"][:, :, :21], inputs["values"][:, :, :21] = torch.nan, torch.nan
    assert check(ATTENTION_DECODE, shape, SMALL, inputs).isfinite().all()


@pytest.mark.parametrize("splits", [1, 3])
def test_nothing_to_see_gives_zeros(splits):
    shape = DecodeShape(4, 2, 32, 100)
    inputs = at(ATTENTION_DECODE.inputs(shape, HERE), -1, torch.nan)
    assert not check(ATTENTION_DECODE, shape, Config(block_n=16, splits=splits), inputs).any()


def test_one_token_gives_its_value():
    shape = DecodeShape(4, 2, 32, 100)
    inputs = at(ATTENTION_DECODE.inputs(shape, HERE), 0)
    want = inputs["values"][0, :, 0].repeat_interleave(2, 0).reshape(1, 1, -1)
    assert torch.equal(run(ATTENTION_DECODE, shape, SMALL, inputs), want)


def test_large_scores_neither_overflow_nor_lose_the_sum():
    shape = DecodeShape(4, 2, 32, 100)
    inputs = ATTENTION_DECODE.inputs(shape, HERE)
    check(ATTENTION_DECODE, shape, SMALL, {**inputs, "query": inputs["query"] * 300})


@pytest.mark.parametrize("tile", [32, 256, 4096])
def test_splits_are_combined_in_tiles_of_any_size(monkeypatch, tile):
    monkeypatch.setattr("toolkit.kernels.attention.COMBINE_TILE", tile)
    shape = DecodeShape(8, 2, 64, 100)
    inputs = ATTENTION_DECODE.inputs(shape, HERE)
    for position in (-1, 0, 20, 96):
        check(ATTENTION_DECODE, shape, SMALL, at(inputs, position, torch.nan))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("heads", [(8, 2, 64), (6, 2, 32)])
def test_quantized_results_are_those_of_the_plain_result(heads, splits):
    shape = DecodeShape(*heads, 100, quantised=True)
    inputs = at(ATTENTION_DECODE.inputs(shape, HERE), 90)
    inputs["values"][:, 1] = 0  # groups of zeros
    outputs = ATTENTION_DECODE.outputs(shape, inputs)
    for launch in ATTENTION_DECODE.launches(shape, Config(block_n=16, splits=splits), inputs, outputs):
        launch.run()
    out, *quantized = list(outputs.values())[:4]
    assert torch.equal(out, ATTENTION_DECODE.run(replace(shape, quantised=False), Config(block_n=16, splits=splits), inputs)[0])
    for got, want in zip(quantized, quantize_activations(out), strict=True):
        torch.testing.assert_close(got, want, atol=0, rtol=1e-6)


@pytest.mark.parametrize(("carveout", "wanted"), [(-1, [-1, -1]), (50, [50, 0])])
def test_only_splits_prefer_the_shared_memory_of_a_config(carveout, wanted):
    shape, config = DecodeShape(4, 2, 32, 100), SMALL.prefer(carveout)
    inputs = ATTENTION_DECODE.inputs(shape, "meta")
    launches = ATTENTION_DECODE.launches(shape, config, inputs, ATTENTION_DECODE.outputs(shape, inputs))
    assert [launch.carveout for launch in launches] == wanted


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_may_be_int32_and_caches_views_of_longer_ones(dtype):
    long, shape = DecodeShape(4, 2, 32, 100), DecodeShape(4, 2, 32, 48)
    inputs = at(ATTENTION_DECODE.inputs(long, HERE), 40, torch.nan)
    inputs["positions"] = inputs["positions"].to(dtype)
    views = {**inputs, "keys": inputs["keys"][:, :, :48], "values": inputs["values"][:, :, :48]}
    assert not views["keys"].is_contiguous()
    want = check(ATTENTION_DECODE, long, SMALL, inputs)
    torch.testing.assert_close(run(ATTENTION_DECODE, shape, SMALL, views), want, **TOLERANCE[BF16])


@pytest.mark.parametrize("shape", list(ATTENTION_DECODE.known.values())[:2], ids=["full", "sliding"])
def test_launches_of_real_shapes_need_no_values_and_fit_their_scratch(shape):
    inputs = ATTENTION_DECODE.inputs(shape, "meta")
    outputs = ATTENTION_DECODE.outputs(shape, inputs)
    configs = ATTENTION_DECODE.space(shape)
    assert len(set(configs)) == len(configs)
    for config in configs:
        assert ATTENTION_DECODE.launches(shape, config, inputs, outputs)


PREFILL_SHAPES = [
    PrefillShape(8, 2, 64, 60, tokens=21),
    PrefillShape(3, 3, 16, 50, tokens=1),
    PrefillShape(6, 2, 16, 70, 30, tokens=21),  # a window, slots that are positions
    PrefillShape(4, 2, 16, 33, 33, tokens=40, ring=True),  # more new tokens than the ring holds
    PrefillShape(4, 2, 32, 32, 40, scaled=False, tokens=7, ring=True),  # a ring whose context fits
    PrefillShape(4, 1, 128, 40, dtype="float32", tokens=20),
    PrefillShape(2, 1, 512, 40, tokens=20),
    PrefillShape(4, 2, 64, 50, key_dim=16, tokens=21),
    PrefillShape(6, 2, 128, 40, scaled=False, dtype="float32", key_dim=32, tokens=20),
]
TILES = [Config(block_m=16, block_n=16), Config(block_m=64, block_n=32)]


@pytest.mark.parametrize("n", range(len(PREFILL_SHAPES)), ids=lambda n: PREFILL_SHAPES[n].key)
def test_prefill_equals_the_reference(n):
    shape = PREFILL_SHAPES[n]
    check(ATTENTION_PREFILL, shape, TILES[n % 2], ATTENTION_PREFILL.inputs(shape, HERE, seed=1))


@pytest.mark.parametrize("start", [-5, 0, 36])
@pytest.mark.parametrize("shape", [PREFILL_SHAPES[0], PREFILL_SHAPES[2], PREFILL_SHAPES[3]], ids=lambda shape: shape.key)
def test_prefill_stands_where_the_device_says_and_sees_no_garbage(shape, start):
    inputs = ATTENTION_PREFILL.inputs(shape, HERE, seed=2)
    inputs["positions"] = torch.arange(start, start + shape.tokens, device=HERE)
    first_free = max(0, start) if shape.ring else max(0, start + shape.tokens)
    for name in ("keys", "values"):
        inputs[name][:, :, first_free:] = torch.nan
    want = check(ATTENTION_PREFILL, shape, TILES[0], inputs)
    assert want.isfinite().all()
    assert not want[0, : max(0, -start)].any()


def test_prefill_of_a_view_of_projections_and_in_pieces_is_what_models_do():
    """A ring filled in chunks by `Cache`, compared with the models' attention on the same states."""
    window, heads, kv, dim, total = 24, 2, 1, 32, 52
    cache = Cache(torch.arange(96, device=HERE), {}).fill([partial(Ring, kv, window, 96, dim, F32, HERE)])
    (ring,) = cache.states
    assert isinstance(ring, Ring)
    random = torch.Generator(HERE).manual_seed(0)
    query, key, value = (
        torch.randn(1, total, n, dim, generator=random, device=HERE) for n in (heads, kv, kv)
    )  # as projections give them
    start = 0
    for size in (10, 1, 40, 1):
        mine = slice(start, start + size)
        positions = torch.arange(start, start + size, device=HERE)
        reach = cache.ring_reach(positions, start + size, window)
        new = {"new_keys": key[:, mine].transpose(1, 2), "new_values": value[:, mine].transpose(1, 2)}
        inputs = {"query": query[:, mine], "keys": ring.keys.clone(), "values": ring.values.clone(), "positions": positions}
        seen = ring.extend(new["new_keys"], new["new_values"], reach)
        want = cached_attention(query[:, mine], *seen, reach.mask, dim**-0.5)
        shape = PrefillShape(heads, kv, dim, window, window, "float32", tokens=size, ring=True)
        got = run(ATTENTION_PREFILL, shape, TILES[0], {**inputs, **new})
        torch.testing.assert_close(got, want, **TOLERANCE[F32])
        if size == 1:  # decode sees the ring after it was written
            held = {"query": query[:, mine], "keys": ring.keys, "values": ring.values, "positions": positions}
            one = DecodeShape(heads, kv, dim, window, window, "float32")
            got = run(ATTENTION_DECODE, one, Config(block_n=16, splits=2), held)
            torch.testing.assert_close(got, want, **TOLERANCE[F32])
        start += size


@pytest.mark.parametrize("shape", list(ATTENTION_PREFILL.known.values()), ids=list(ATTENTION_PREFILL.known))
def test_prefill_launches_of_real_shapes_need_no_values(shape):
    inputs = ATTENTION_PREFILL.inputs(shape, "meta")
    outputs = ATTENTION_PREFILL.outputs(shape, inputs)
    for config in ATTENTION_PREFILL.space(shape):
        assert ATTENTION_PREFILL.launches(shape, config, inputs, outputs)


def test_costs_count_each_visible_slot_once():
    full = DecodeShape(32, 4, 512, 32768)
    assert ATTENTION_DECODE.cost(full).bytes == 2 * 2 * 4 * 32768 * 512 + 2 * 2 * 32 * 512
    sliding = DecodeShape(32, 16, 256, 32768, 1024)
    assert ATTENTION_DECODE.cost(sliding).flops == 4 * 32 * 1024 * 256
    causal = PrefillShape(2, 1, 16, 8, tokens=4)  # 5 + 6 + 7 + 8 pairs
    assert ATTENTION_PREFILL.cost(causal).flops == 4 * 26 * 2 * 16
    assert ATTENTION_PREFILL.cost(PrefillShape(2, 1, 16, 8, 3, tokens=4)).flops == 4 * 12 * 2 * 16


WRONG = {
    "heads that don't divide": (DecodeShape(7, 2, 32, 64), {}, "divide"),
    "a head_dim that is no power of two": (DecodeShape(4, 2, 48, 64), {}, "48"),
    "heads that share a scale": (DecodeShape(4, 2, 16, 64, quantised=True), {}, "8 bits with head_dim 16"),
    "no slots": (DecodeShape(4, 2, 32, 0), {}, "slots"),
    "a key_dim that is no power of two": (DecodeShape(4, 2, 64, 64, key_dim=24), {}, "key_dim is 24"),
    "a key_dim as large as head_dim": (DecodeShape(4, 2, 64, 64, key_dim=64), {}, "key_dim is 64"),
    "keys of another dtype": (DecodeShape(4, 2, 32, 64), {"keys": lambda t: t.float()}, "keys.*float32"),
    "values of another size": (DecodeShape(4, 2, 32, 64), {"values": lambda t: t[:, :, :5]}, "values.*5"),
    "a transposed query": (DecodeShape(4, 2, 32, 64), {"query": lambda t: t.mT.contiguous().mT}, "contiguous"),
    "transposed keys": (DecodeShape(4, 2, 32, 64), {"keys": lambda t: t.transpose(2, 3).contiguous().mT}, "strides"),
    "positions in fp32": (DecodeShape(4, 2, 32, 64), {"positions": lambda t: t.float()}, "positions.*float32"),
    "positions of two tokens": (DecodeShape(4, 2, 32, 64), {"positions": lambda t: t.repeat(2)}, "positions.*\\[2\\]"),
    "values of fewer heads": (DecodeShape(4, 2, 32, 64), {"values": lambda t: t[:, :1]}, "values.*1, 1, 64"),
    "tensors on two devices": (DecodeShape(4, 2, 32, 64), {"keys": lambda t: t.to("meta")}, "meta"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tensors_are_told_by_name(name):
    shape, changes, told = WRONG[name]
    good = DecodeShape(4, 2, 32, 64) if changes else shape
    try:
        inputs = ATTENTION_DECODE.inputs(good, HERE)
    except RuntimeError:
        inputs = ATTENTION_DECODE.inputs(good, "meta")
    inputs |= {key: change(inputs[key]) for key, change in changes.items()}
    outputs = ATTENTION_DECODE.outputs(DecodeShape(4, 2, 32, 64), inputs)
    with pytest.raises(ModelError, match=told):
        ATTENTION_DECODE.launches(shape, Config(block_n=16, splits=1), inputs, outputs)


def test_more_splits_than_scratch_are_refused():
    shape = DecodeShape(4, 2, 32, 64)
    with pytest.raises(ModelError, match="scratch for 4"):
        ATTENTION_DECODE.run(shape, Config(block_n=16, splits=5), ATTENTION_DECODE.inputs(shape, HERE))


def test_short_contexts_of_different_lengths_share_a_program():
    """A ring is as short as the context, which would be a new program for each length of a prompt."""

    def constants(slots):
        shape = PrefillShape(4, 2, 32, slots, 64, tokens=8, ring=True)
        inputs = ATTENTION_PREFILL.inputs(shape, "meta")
        config = ATTENTION_PREFILL.space(shape)[0]
        (launch,) = ATTENTION_PREFILL.launches(shape, config, inputs, ATTENTION_PREFILL.outputs(shape, inputs))
        return launch.constants

    assert constants(20) == constants(63) != constants(64)


def test_a_ring_needs_a_window_and_the_new_keys():
    shape = PrefillShape(4, 2, 32, 64, 64, tokens=3, ring=True)
    inputs = ATTENTION_PREFILL.inputs(shape, HERE)
    outputs = ATTENTION_PREFILL.outputs(shape, inputs)
    plain = {name: tensor for name, tensor in inputs.items() if not name.startswith("new")}
    with pytest.raises(ModelError, match="new_keys is missing"):
        ATTENTION_PREFILL.launches(shape, TILES[0], plain, outputs)
    for window in (0, 63):
        wrong = PrefillShape(4, 2, 32, 64, window, tokens=3, ring=True)
        with pytest.raises(ModelError, match=f"window is {window}"):
            ATTENTION_PREFILL.launches(wrong, TILES[0], inputs, outputs)
