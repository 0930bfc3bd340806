"""Tests of min-max and half-quadratic fits: accuracy, rejected inputs, and extreme values for fp16 scales."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from toolkit.core.errors import ModelError
from toolkit.weights.fitting import quantize_hqq, quantize_minmax
from toolkit.weights.packed import dequantize
from toolkit.weights.schemes import SCHEMES, Scheme

METHODS = {"min-max": quantize_minmax, "hqq": quantize_hqq}
IN = 512


def draw(kind: str, rows: int = 64) -> Tensor:
    rng = np.random.default_rng(0)
    values = {
        "normal": rng.standard_normal,
        "student t": lambda size: rng.standard_t(3, size),
        "laplace": lambda size: rng.laplace(size=size),
    }
    return torch.from_numpy(np.asarray(values[kind]((rows, IN)), np.float32)) * 0.02


def snr(values: Tensor, back: Tensor) -> float:
    return float(10 * torch.log10(values.double().square().sum() / (values - back).double().square().sum()))


def there_and_back(method: str, values: Tensor, scheme: Scheme) -> Tensor:
    return dequantize(scheme, METHODS[method](values, scheme))


# Measured SNR in dB on normal weights minus half a decibel: (min-max, HQQ). About 6 dB per bit.
EXPECTED = {
    "int4-g32": (21.6, 22.2), "int4-g64": (20.4, 20.8), "int4-g128": (19.5, 19.7), "int8-g32": (44.9, 45.2),
    "int8-g128": (43.2, 43.4), "q4_0": (20.8, 21.1), "q4_1": (21.6, 22.2), "q5_0": (26.9, 27.2), "q5_1": (27.9, 28.5),
    "q4_k": (22.1, 22.2), "q5_k": (28.0, 28.2), "q6_k": (34.2, 34.3),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMES)
def test_snr_on_normal_weights(name: str) -> None:
    values, scheme = draw("normal"), SCHEMES[name]
    assert snr(values, there_and_back("min-max", values, scheme)) > EXPECTED[name][0]
    assert snr(values, there_and_back("hqq", values, scheme)) > EXPECTED[name][1]


@pytest.mark.parametrize("kind", ["normal", "student t", "laplace"])
@pytest.mark.parametrize("name", SCHEMES)
def test_hqq_is_never_worse_than_min_max(name: str, kind: str) -> None:
    values, scheme = draw(kind), SCHEMES[name]
    assert snr(values, there_and_back("hqq", values, scheme)) >= snr(values, there_and_back("min-max", values, scheme))


@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if not scheme.steps])
def test_min_max_errs_by_at_most_half_a_step(name: str) -> None:
    """Half a quantization step, plus the fp16 rounding of scale and offset at the largest value (2^-11 of it each)."""
    values, scheme = draw("student t"), SCHEMES[name]
    grouped = values.unflatten(-1, (-1, scheme.group))
    low, high = grouped.amin(-1), grouped.amax(-1)
    largest = torch.maximum(high, -low)
    if scheme.offset == "centre":  # the smaller extreme can lie a whole step beyond the last code
        step = largest / (127 if scheme.bits == 8 else 1 << (scheme.bits - 1))
        bound = step / 2 if scheme.bits == 8 else step
    else:
        bound = (high - low) / (2**scheme.bits - 1) / 2
    error = (there_and_back("min-max", values, scheme) - values).abs().unflatten(-1, (-1, scheme.group)).amax(-1)
    assert bool((error <= bound + largest * 2.0**-10).all())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SCHEMES)
def test_zeros_stay_zeros(name: str, method: str) -> None:
    values = draw("normal")
    values[3], values[5, :256] = 0, 0
    back = there_and_back(method, values, SCHEMES[name])
    assert not back[3].any()
    assert not back[5, :256].any()
    assert bool(back.isfinite().all())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("constant", [1.0, -0.37, 3e-5, -60000.0])
@pytest.mark.parametrize("name", SCHEMES)
def test_constant_groups(name: str, constant: float, method: str) -> None:
    """As accurate as scales in fp16, or in steps of 1/63 of the block's largest, allow. fp16 steps below 6e-5 are 6e-8."""
    values = torch.full((2, IN), constant)
    back = there_and_back(method, values, SCHEMES[name])
    assert float((back - values).abs().max()) <= abs(constant) / (64 if SCHEMES[name].steps else 512) + 16 * 2.0**-24


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("scale", [3e6, 1e-3, 1e-7, 1e-30], ids=str)
def test_magnitudes_at_the_ends_of_fp16(name: str, scale: float, method: str) -> None:
    values = (draw("normal") * scale).clamp(-65504, 65504)
    back = there_and_back(method, values, SCHEMES[name])
    assert bool(back.isfinite().all())
    error = float((back - values).abs().max())
    assert error <= float(values.abs().max()) / 7 + 127 * 2.0**-24
    if scale >= 1e-3:
        assert snr(values, back) > EXPECTED[name][0] - 6


@pytest.mark.parametrize("far", [1.0, -100.0])
@pytest.mark.parametrize("name", ["int4-g32", "int4-g128", "q4_1", "q5_1"])
def test_groups_far_from_zero_keep_their_detail(name: str, far: float) -> None:
    """Offsets are fp16: the resolution is the larger of the quantization step and 2^-11 of the distance from zero."""
    values = draw("normal") + far
    error = (there_and_back("min-max", values, SCHEMES[name]) - values).abs().max()
    assert float(error) <= 0.2 / 15 / 2 + abs(far) * 2.0**-10


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 70000.0], ids=str)
def test_what_no_scale_holds_is_refused_by_name(bad: float, method: str) -> None:
    values = draw("normal")
    values[7, 300] = bad
    with pytest.raises(ModelError, match=r"int4-g32 for layers\.3\.mlp\.down\.weight: the values include NaN") as error:
        METHODS[method](values, SCHEMES["int4-g32"], "layers.3.mlp.down.weight")
    assert error.value.facts["name"] == "layers.3.mlp.down.weight"


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ModelError, match="the row length 48 isn't a multiple of 32"):
        quantize_minmax(torch.zeros(2, 48), SCHEMES["int4-g32"])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["int4-g32", "int8-g128", "q5_0", "q4_k", "q6_k"])
def test_rows_are_independent_and_dtypes_and_stacks_do_not_matter(
    name: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, scheme = draw("laplace", 24).bfloat16(), SCHEMES[name]
    whole = METHODS[method](values, scheme)
    stacked = METHODS[method](values.float().view(4, 6, IN), scheme)
    monkeypatch.setattr("toolkit.weights.fitting.CHUNK_WEIGHTS", 5 * IN)
    cut = METHODS[method](values, scheme)
    for part, tensor in whole.items():
        assert torch.equal(tensor, cut[part])
        assert torch.equal(tensor.view(4, 6, -1), stacked[part])
        dtype, per = scheme.parts()[part]
        assert (tensor.dtype, tensor.shape) == (dtype, (24, IN // per))


@pytest.mark.parametrize("name", SCHEMES)
def test_quantising_again_changes_little(name: str) -> None:
    """Quantizing values that a scheme holds exactly changes them by the rounding of scales only, or not at all if symmetric."""
    scheme = SCHEMES[name]
    once = there_and_back("min-max", draw("normal"), scheme)
    assert snr(once, there_and_back("min-max", once, scheme)) > 30
