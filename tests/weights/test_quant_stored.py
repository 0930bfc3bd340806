"""Tests of repacking GGUF blocks and integer codes into the packed layout, bit for bit against the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

import toolkit as tk
from toolkit.core.errors import ModelError
from toolkit.weights.packed import PackedMatrix, dequantize, pack_codes, pack_scales, unpack_codes, unpack_scales
from toolkit.weights.repacking import GGUF_KINDS, from_stored, pack, scheme_of
from toolkit.weights.schemes import SCHEMES

KINDS = list(GGUF_KINDS)


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Return random blocks [rows, bytes per row] with every code and scale; the fp16 fields are finite."""
    layout = GGUF_KINDS[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, columns // layout.weights, layout.nbytes), dtype=np.uint8)
    starts = {"Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,)}.get(kind, (0, 2))
    for start in starts:
        d = (rng.standard_normal(blocks.shape[:2]) * 10.0 ** rng.integers(-6, 3, blocks.shape[:2])).astype(np.float16)
        blocks[..., start : start + 2] = d[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


@pytest.mark.parametrize("columns", [256, 1280])
@pytest.mark.parametrize("kind", KINDS)
def test_dequantises_as_the_gguf_package_bit_for_bit(kind: str, columns: int) -> None:
    raw = random_blocks(kind, 7, columns)
    scheme = scheme_of(kind)
    assert scheme is not None
    parts = from_stored(kind, {"blocks": torch.from_numpy(raw)}, columns)
    assert {n: (p.dtype, p.shape) for n, p in parts.items()} == {
        n: (dtype, (7, columns // per)) for n, (dtype, per) in scheme.parts().items()
    }
    ours = dequantize(scheme, parts).numpy()
    theirs = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]).reshape(7, columns)
    assert np.array_equal(bits(ours), bits(theirs))


def test_values_at_the_ends_of_what_a_block_holds() -> None:
    """Scales that are zero, negative, subnormal or infinite give the same bits, including signed zeros and NaN."""
    blocks = random_blocks("Q4_K", 6, 256)
    for row, (d, dmin) in enumerate([(0, 0), (-0.0, 1), (-1, -2), (6e-8, 6e-8), (np.inf, 1), (65504, 65504)]):
        blocks[row, :4] = np.array([d, dmin], np.float16).view(np.uint8)
    with np.errstate(invalid="ignore"):
        theirs = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q4_K)
    ours = dequantize(SCHEMES["q4_k"], from_stored("Q4_K", {"blocks": torch.from_numpy(blocks)}, 256)).numpy()
    numbers = ~np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), ~numbers)
    assert np.array_equal(bits(ours)[numbers], bits(theirs)[numbers])


@pytest.mark.parametrize("kind", KINDS)
def test_on_the_virtual_gpu_without_a_copy_and_by_sizes_alone(kind: str) -> None:
    gpu = tk.device("virtual:h200")
    raw = torch.from_numpy(random_blocks(kind, 5, 512))
    here, there = from_stored(kind, {"blocks": raw}, 512), raw.to(gpu.torch)
    with tk.copy_budget(h2d=0, d2h=0, d2d=0, device=gpu):
        parts = from_stored(kind, {"blocks": there}, 512)
    assert all(torch.equal(part, parts[name].cpu()) for name, part in here.items())
    with gpu.sizes_only():
        empty = from_stored(kind, {"blocks": torch.empty(5000, raw.shape[1], dtype=torch.uint8, device=gpu.torch)}, 512)
    assert {n: (p.shape[1:], p.dtype) for n, p in empty.items()} == {n: (p.shape[1:], p.dtype) for n, p in here.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_not_whole_blocks_are_refused(kind: str) -> None:
    raw = torch.from_numpy(random_blocks(kind, 3, 512))
    for blocks, columns in ((raw[:, :-1], 512), (raw, 256), (raw, 500), (raw[:, :0], 512)):
        with pytest.raises(ModelError, match="bytes for"):
            from_stored(kind, {"blocks": blocks}, columns)


def test_a_kind_that_is_not_known_is_refused() -> None:
    with pytest.raises(ModelError, match="Q4_0"):
        from_stored("IQ2_XS", {"blocks": torch.zeros(1, 66, dtype=torch.uint8)}, 256)
    assert scheme_of("IQ2_XS") is None
    assert scheme_of("BF16") is None


@pytest.mark.parametrize(
    ("bits_", "group", "columns", "centred", "scheme"),
    [
        (4, 128, 512, False, "int4-g128"), (4, 64, 512, True, "int4-g64"), (4, 32, 96, False, "int4-g32"),
        (4, 256, 512, False, "int4-g128"), (4, -1, 512, False, "int4-g128"), (4, 0, 192, False, "int4-g64"),
        (4, 96, 192, False, "int4-g32"), (3, 128, 512, False, "int4-g128"), (2, 64, 512, False, "int4-g64"),
        (8, 128, 512, True, "int8-g128"), (8, 64, 512, True, "int8-g32"), (8, 128, 512, False, None),
        (4, 16, 512, False, None), (4, -1, 40, False, None), (5, 128, 512, True, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["GPTQ", "AWQ", "HQQ"])
def test_which_scheme_holds_integer_codes(
    kind: str, bits_: int, group: int, columns: int, centred: bool, scheme: str | None
) -> None:
    found = scheme_of(kind, bits_, group, columns, centred)
    assert (found and found.name) == scheme


@pytest.mark.parametrize(
    ("bits_", "group", "columns"), [(4, 128, 512), (4, 512, 512), (4, 96, 192), (3, 256, 512), (2, 32, 96)]
)
@pytest.mark.parametrize("whole", [True, False], ids=["whole zeros", "fractional zeros"])
def test_integer_codes_are_packed_exactly(bits_: int, group: int, columns: int, whole: bool) -> None:
    rng = np.random.default_rng(0)
    codes = torch.from_numpy(rng.integers(0, 1 << bits_, (9, columns), dtype=np.uint8))
    scales = torch.from_numpy(rng.random((9, columns // group)).astype(np.float16))
    zeros = torch.from_numpy(rng.random((9, columns // group)).astype(np.float16) * 2**bits_)
    zeros = zeros.round() if whole else zeros
    scheme = scheme_of("HQQ", bits_, group, columns)
    assert scheme is not None
    exact = ((codes.float().unflatten(-1, (-1, group)) - zeros.float()[..., None]) * scales.float()[..., None]).flatten(-2)
    raw = {"codes": codes, "scales": scales, "zeros": zeros}
    assert torch.equal(dequantize(scheme, from_stored("HQQ", raw, columns, scheme)), exact)
    assert torch.equal(dequantize(scheme, from_stored("HQQ", raw, columns)), exact)


def test_eight_bit_codes_around_128_are_packed_exactly() -> None:
    rng = np.random.default_rng(0)
    codes = torch.from_numpy(rng.integers(0, 256, (9, 512), dtype=np.uint8))
    scales = torch.from_numpy(rng.random((9, 2)).astype(np.float16))
    scheme = scheme_of("GPTQ", 8, 256, 512, centred=True)
    assert scheme is SCHEMES["int8-g128"]
    raw = {"codes": codes, "scales": scales, "zeros": torch.full_like(scales, 128)}
    exact = ((codes.float() - 128).unflatten(-1, (2, 256)) * scales.float()[..., None]).flatten(-2)
    assert torch.equal(dequantize(scheme, from_stored("GPTQ", raw, 512, scheme)), exact)


def test_packing_with_minima() -> None:
    codes, scales, minima = torch.arange(64)[None] % 16, torch.tensor([[0.5, 2.0]]), torch.tensor([[1.0, -3.0]])
    parts = pack(SCHEMES["q4_1"], codes, scales, minima)
    exact = torch.cat([codes[:, :32] * 0.5 - 1, codes[:, 32:] * 2.0 + 3], -1)
    assert torch.equal(dequantize(SCHEMES["q4_1"], parts), exact)


@pytest.mark.parametrize(("scheme", "columns", "groups"), [("int4-g128", 512, 8), ("int4-g32", 40, 1), ("q4_k", 256, 8)])
def test_groups_that_do_not_fit_are_refused(scheme: str, columns: int, groups: int) -> None:
    with pytest.raises(ModelError, match=f"{groups} scales"):
        pack(SCHEMES[scheme], torch.zeros(1, columns), torch.ones(1, groups), torch.ones(1, groups))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_layout_is_the_documented_one(scheme: str) -> None:
    """The packed bytes follow the layout that `PackedMatrix` documents, and unpacking returns the codes."""
    held = SCHEMES[scheme]
    codes = torch.from_numpy(np.random.default_rng(0).integers(0, 1 << held.bits, (3, 512)))
    codes = codes - 128 if held.bits == 8 else codes
    parts = pack_codes(held, codes)
    assert torch.equal(unpack_codes(held, parts).long(), codes)
    assert sum(8 * part.nbytes for part in parts.values()) == held.bits * codes.numel()
    if held.bits < 8:
        w, b, f = 11, 3, 1
        assert int(parts["codes"][2, 4 * w + b]) == int(codes[2, 8 * w + b] & 15 | (codes[2, 8 * w + 4 + b] & 15) << 4)
        width = held.bits - 4
        if width:
            high = int(parts["high"][2, 4 * w + b]) >> (f * width) & ((1 << width) - 1)
            assert high == int(codes[2, (32 // width) * w + 4 * f + b] >> 4)


def test_scales_and_minima_are_stored_in_the_documented_bits() -> None:
    draw = np.random.default_rng(0)
    scales, minima = (torch.from_numpy(draw.integers(0, 64, (3, 16), dtype=np.uint8)) for _ in range(2))
    steps = torch.from_numpy(draw.normal(size=(2, 3, 2))).half()
    packed = pack_scales(scales, minima, *steps)
    for row, block in np.ndindex(3, 2):
        bits = int.from_bytes(packed[row, 8 * block : 8 * block + 8].numpy().tobytes(), "little")
        assert (
            np.array([bits & 0xFFFF, bits >> 16 & 0xFFFF], np.uint16).view(np.float16).tolist() == steps[:, row, block].tolist()
        )
        groups = range(8 * block, 8 * block + 8)
        assert [bits >> (32 + 6 * g) & 63 for g in range(8)] == [int(scales[row, g]) for g in groups]
        assert [bits >> (80 + 6 * g) & 63 for g in range(8)] == [int(minima[row, g]) for g in groups]
    found = unpack_scales(packed)
    expected = (
        (steps[i].float()[..., None] * whole.view(3, 2, 8).float()).flatten(1) for i, whole in enumerate((scales, minima))
    )
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", ["q4_0", "q4_k", "q5_k", "q6_k", "int8-g32", "int4-g32"])
def test_bits_per_weight_are_what_is_held(name: str) -> None:
    matrix = PackedMatrix(SCHEMES[name], (5, 768))
    expected = {"q4_0": 4.5, "q4_k": 4.5, "q5_k": 5.5, "q6_k": 6.5625, "int8-g32": 8.5, "int4-g32": 5.0}
    assert 8 * matrix.nbytes / matrix.numel() == matrix.scheme.bits_per_weight == expected[name]
