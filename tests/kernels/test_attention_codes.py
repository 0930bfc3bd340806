"""Tests of 8-bit and 4-bit KV caches: the accuracy of the codes, and attention on them against the reference."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels.ptx import run_ptx
from tests.kernels.test_attention import HERE, at, run
from toolkit.core.errors import ModelError, UnknownNameError
from toolkit.kernels import attention_codes
from toolkit.kernels.attention import AttentionDecode, DecodeShape
from toolkit.kernels.attention_codes import ATTENTION_CODES, CodesShape
from toolkit.kernels.base import Config
from toolkit.kernels.kv_codes import (
    KV_SCHEMES,
    UNIT,
    decode,
    encode,
    find_kv_scheme,
    hadamard,
    levels,
    pack_words,
    random_signs,
    unpack_words,
)

# Lloyd-Max for a standard normal variable, 16 levels: Max (1960), table I.
LLOYD_MAX = (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326)
OPTIMUM = 0.009501  # its mean squared error
SMALL = Config(block_n=16, splits=3, registers=0)
# Kernel and reference use the same codes. The kernel rounds weights to fp16; rounding a result to bf16 costs 2^-8 of its value.
TOLERANCE = {"atol": 1e-2, "rtol": 1e-2}


def error_of(codebook):
    """Return the mean squared error of rounding a standard normal variable to `codebook`, by numerical integration."""
    x = torch.linspace(-8, 8, 20_001, dtype=torch.float64)
    density = torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    nearest = (x[:, None] - codebook.double()).abs().amin(1)
    return float(torch.trapezoid(nearest.square() * density, x))


def test_levels_are_nearly_the_best_for_a_normal_variable():
    found = levels()
    assert torch.equal(found, -found.flip(0))
    assert torch.equal(found, found.half().float())
    # Levels are multiples of UNIT, so a level near zero may be off by a few percent; its density hardly counts in the error.
    torch.testing.assert_close(found[8:], torch.tensor(LLOYD_MAX), rtol=0, atol=0.02)
    assert OPTIMUM < error_of(found) < 1.003 * OPTIMUM


@pytest.mark.parametrize("size", [1, 16, 512])
def test_the_rotation_is_orthogonal_and_its_own_inverse(size):
    x = torch.randn(5, size, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(hadamard(hadamard(x)), x)
    torch.testing.assert_close(hadamard(x).norm(dim=-1), x.norm(dim=-1))
    assert set(random_signs(size).tolist()) <= {-1.0, 1.0}


def test_no_power_of_two_no_rotation():
    with pytest.raises(ModelError, match="48"):
        hadamard(torch.ones(48))


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("kind", ["normal", "outliers", "one coordinate"])
def test_four_bits_lose_a_hundredth_of_the_square_whatever_the_vector(head_dim, kind):
    x = torch.randn(200, head_dim, generator=torch.Generator().manual_seed(1))
    if kind == "outliers":
        x[:, 3] *= 100
    if kind == "one coordinate":
        x = (torch.arange(head_dim) == 5).float().expand(200, -1)
    x = x * torch.logspace(-4, 3, 200)[:, None]
    signs = random_signs(head_dim)
    codes, scales = encode(x, 4, signs)
    assert (codes.dtype, codes.shape, scales.dtype) == (torch.int16, (200, head_dim // 4), torch.float16)
    lost = (decode(codes, scales, 4, signs) - x).square().sum(-1) / x.square().sum(-1)
    assert lost.mean() < 0.0093
    assert lost.max() < 0.03


@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_eight_bits_are_off_by_half_a_step_and_zeros_stay_zeros(size):
    x = size * torch.randn(2, 3, 50, 64, generator=torch.Generator().manual_seed(2))
    x[0, 0, 0] = 0
    signs = random_signs(64)
    codes, scales = encode(x, 8, signs)
    assert codes.shape == (2, 3, 50, 32)
    found = decode(codes, scales, 8, signs)
    assert ((found - x).abs() <= 0.51 * scales.float()[..., None]).all()
    assert not found[0, 0, 0].any()
    codes, scales = encode(torch.zeros(2, 64), 4, signs)
    assert not decode(codes, scales, 4, signs).any()


@pytest.mark.parametrize("bits", [4, 8])
def test_words_hold_every_code(bits):
    least, most = (-128, 128) if bits == 8 else (0, 16)
    codes = torch.arange(least, most, dtype=torch.int32).repeat(2, 1)
    words = pack_words(codes, bits)
    assert (words.dtype, words.shape[-1]) == (torch.int16, codes.shape[-1] * bits // 16)
    assert torch.equal(unpack_words(words, bits), codes)
    assert torch.equal(unpack_words(words[:, :1], bits)[0], codes[0, :: codes.shape[-1] * bits // 16])


def test_schemes_are_found_by_name_and_say_what_they_hold():
    assert KV_SCHEMES["k4v8"].bytes_per_token(512) == 256 + 2 + 512 + 2
    with pytest.raises(UnknownNameError, match="k4v8"):
        find_kv_scheme("k4v9")


def bytes_in(register):
    """Return the four bytes of a 32-bit register as signed integers, the lowest first."""
    return [(register >> 8 * n & 255 ^ 128) - 128 for n in range(4)]


def halves_in(register):
    """Return the two fp16 numbers of a 32-bit register, the lower first."""
    return torch.tensor([register & 65535, register >> 16], dtype=torch.int32).to(torch.int16).view(torch.float16).tolist()


@pytest.mark.parametrize("first", range(16))
def test_the_instructions_for_4_bits_give_each_code_its_level(first):
    """Each code at each place in a word, beside others: the interpreter doesn't run the inline assembly."""
    integers = (levels() / UNIT).int().tolist()
    for step in (0, 1, 3, 5):
        codes = [(first + n * step) % 16 for n in range(8)]
        words = sum(code << 4 * n for n, code in enumerate(codes))
        lane = (first + 5 * step) % 32  # the instructions read the masks of the lanes before it and of its own
        masks = {"%lanemask_lt": (1 << lane) - 1, "%lanemask_eq": 1 << lane}
        found = run_ptx(attention_codes.LEVELS_PTX.value, {"$2": words, **masks})
        assert [byte + 64 for out in ("$0", "$1") for byte in bytes_in(found[out])] == [integers[code] for code in codes]
        for field in range(4):
            ptx = getattr(attention_codes, f"PTX_4{field}").value
            wanted = [integers[codes[field]] * 2.0**-24, integers[codes[field + 4]] * 2.0**-24]
            assert halves_in(run_ptx(ptx, {"$1": words})["$0"]) == wanted


def test_the_instructions_for_8_bits_give_each_code_its_number():
    for code in range(-128, 128):
        codes = [code, -1 - code, code ^ 85, 127 - abs(code)]
        words = sum((one & 255) << 8 * n for n, one in enumerate(codes))
        for field in range(2):
            ptx = getattr(attention_codes, f"PTX_8{field}").value
            assert halves_in(run_ptx(ptx, {"$1": words})["$0"]) == [codes[field] / 128, codes[field + 2] / 128]


SHAPES = [
    CodesShape(8, 2, 64, 70),
    CodesShape(3, 1, 128, 33, 33, "float32"),
    CodesShape(2, 1, 256, 50, 20, scaled=False),
    CodesShape(2, 2, 512, 20),
    CodesShape(12, 1, 64, 40),  # more than eight heads in a group
]


def coded(shape, codes):
    return CodesShape(**{**shape.__dict__, "codes": codes})


@pytest.mark.parametrize("codes", KV_SCHEMES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.key)
def test_attention_equals_the_reference_on_the_same_codes(shape, codes):
    shape = coded(shape, codes)
    config = Config(block_n=16, splits=min(3, -(-shape.seen // 16)), registers=0)
    inputs = ATTENTION_CODES.inputs(shape, HERE, seed=1)
    (want,) = ATTENTION_CODES.reference(shape, inputs)
    torch.testing.assert_close(run(ATTENTION_CODES, shape, config, inputs), want, **TOLERANCE)


@pytest.mark.parametrize("codes", KV_SCHEMES)
@pytest.mark.parametrize(("slots", "window"), [(1, 0), (9, 0), (9, 5), (16, 0), (17, 0)])
def test_a_tile_never_reads_beyond_the_buffer(codes, slots, window):
    """Buffers smaller than a tile of 16 slots, as large, and one slot larger: then the second tile begins in the first one."""
    shape = CodesShape(4, 2, 64, slots, window, codes=codes)
    inputs = ATTENTION_CODES.inputs(shape, HERE, seed=4)
    (want,) = ATTENTION_CODES.reference(shape, inputs)
    got = run(ATTENTION_CODES, shape, Config(block_n=16, splits=1, registers=0), inputs)
    torch.testing.assert_close(got, want, **TOLERANCE)


@pytest.mark.parametrize("codes", KV_SCHEMES)
def test_lengths_garbage_and_nothing_at_all(codes):
    shape = CodesShape(4, 2, 64, 70, codes=codes)
    inputs = ATTENTION_CODES.inputs(shape, HERE, seed=2)
    for position in (-1, 0, 30):
        told = at(inputs, position)
        for name in ("key_scales", "value_scales"):
            told[name] = told[name].clone()
            told[name][:, :, position + 1 :] = torch.nan
        (want,) = ATTENTION_CODES.reference(shape, told)
        got = run(ATTENTION_CODES, shape, SMALL, told)
        torch.testing.assert_close(got, want, **TOLERANCE)
        assert got.any() == (position >= 0)


def test_any_number_of_splits_gives_the_same():
    shape = CodesShape(4, 2, 64, 70, codes="int4")
    inputs = at(ATTENTION_CODES.inputs(shape, HERE), 20)
    want = run(ATTENTION_CODES, shape, SMALL, inputs)
    for splits in (1, 2):
        got = run(ATTENTION_CODES, shape, Config(block_n=16, splits=splits, registers=0), inputs)
        torch.testing.assert_close(got, want, **TOLERANCE)


@pytest.mark.parametrize(("codes", "least"), [("int8", 0.9999), ("k4v8", 0.995), ("int4", 0.99)])
def test_codes_keep_the_direction_of_the_result_at_32k(codes, least):
    shape = CodesShape(4, 1, 64, 32768, codes=codes)
    (plain,) = AttentionDecode().reference(shape, AttentionDecode().inputs(shape, HERE, seed=3))
    (got,) = ATTENTION_CODES.reference(shape, ATTENTION_CODES.inputs(shape, HERE, seed=3))
    assert torch.cosine_similarity(got.float(), plain.float(), -1) > least


def test_launches_of_real_shapes_need_no_values():
    shape = ATTENTION_CODES.known["gemma4-31b full 32k k4v8"]
    inputs = ATTENTION_CODES.inputs(shape, "meta")
    outputs = ATTENTION_CODES.outputs(shape, inputs)
    for config in ATTENTION_CODES.space(shape):
        assert ATTENTION_CODES.launches(shape, config, inputs, outputs)
        assert config["registers"] * 32 * config.warps <= 65536
    assert ATTENTION_CODES.cost(shape).bytes < 0.4 * AttentionDecode().cost(DecodeShape(32, 4, 512, 32768)).bytes


WRONG = {
    "plain keys": ({"keys": lambda t: t.float()}, "keys.*float32"),
    "values of another width": ({"values": lambda t: t[..., :8]}, "values.*32. is"),
    "scales in fp32": ({"key_scales": lambda t: t.float()}, "key_scales.*float32"),
    "signs of another size": ({"signs": lambda t: t[:3]}, "signs"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tensors_are_told_by_name(name):
    changes, told = WRONG[name]
    shape = CodesShape(4, 2, 64, 70, codes="k4v8")
    inputs = ATTENTION_CODES.inputs(shape, HERE)
    inputs |= {key: change(inputs[key]) for key, change in changes.items()}
    with pytest.raises(ModelError, match=told):
        ATTENTION_CODES.run(shape, SMALL, inputs)


def test_four_bits_want_wide_heads():
    shape = CodesShape(4, 2, 32, 70, codes="int4")
    with pytest.raises(ModelError, match="at least 64"):
        ATTENTION_CODES.run(shape, SMALL, ATTENTION_CODES.inputs(shape, HERE))
