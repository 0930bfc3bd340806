"""Compare decode matmuls on packed weights with plain PyTorch: every scheme and variant, and shapes with partial tiles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from toolkit.core.errors import ModelError
from toolkit.kernels.base import Config
from toolkit.kernels.int4_matmul import INT4_MATMUL, LIMITS, MatmulShape, quantise_activations
from toolkit.weights.packed import PackedMatrix
from toolkit.weights.schemes import SCHEMES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# SNR in dB with fp32 outputs. The integer products of "int8" are exact, only the fp32 sums round (about 130 dB). "bf16" rounds
# activations to 1 / 32,512 of their block's largest (about 90 dB). Both must reach 80 dB.
LEAST_DB = {"int8": 110.0, "bf16": 84.0}
SMALL = Config(block_k=256, rows=1, tokens=1, ahead=2, warps=1)  # 4 rows of 8 blocks at a time


def decibels(got: Tensor, want: Tensor) -> float:
    error = (got.double() - want.double()).square().sum()
    return float(10 * torch.log10(want.double().square().sum() / error))


def run(shape: MatmulShape, config: Config, inputs: dict[str, Tensor]) -> Tensor:
    """Return the result of a launch whose output memory is poisoned beforehand."""
    outputs = INT4_MATMUL.outputs(shape, inputs)
    for out in outputs.values():  # previous contents must not be read
        out.fill_(torch.nan if out.is_floating_point() else 101)
    for launch in INT4_MATMUL.launches(shape, config, inputs, outputs):
        launch.run()
    return outputs["out"]


def row_of(scheme: str, blocks: int = 7) -> int:
    """Return a row length of about this many blocks of 32."""
    multiple = SCHEMES[scheme].multiple
    return -(-32 * blocks // multiple) * multiple


@pytest.mark.parametrize("activations", ["int8", "bf16"])
@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_every_scheme(scheme: str, activations: str) -> None:
    shape = MatmulShape(n=4, k=row_of(scheme), scheme=scheme, activations=activations, out="fp32")
    inputs = INT4_MATMUL.inputs(shape, DEVICE, seed=3)
    assert decibels(run(shape, SMALL, inputs), INT4_MATMUL.reference(shape, inputs)[0]) > LEAST_DB[activations]


@pytest.mark.parametrize(("scheme", "activation"), [("q4_k", "gelu_tanh"), ("q6_k", "silu"), ("int4-g64", "silu")])
def test_gate_and_up_in_one(scheme: str, activation: str) -> None:
    shape = MatmulShape(n=10, k=row_of(scheme), scheme=scheme, activation=activation, out="fp32")
    inputs = INT4_MATMUL.inputs(shape, DEVICE, seed=4)
    inputs["x"] *= 30  # gates on both sides of 0, some far out
    got = run(shape, SMALL, inputs)
    assert got.shape == (1, 5)
    assert decibels(got, INT4_MATMUL.reference(shape, inputs)[0]) > LEAST_DB["int8"]


@pytest.mark.parametrize(("m", "tokens"), [(2, 2), (3, 2), (5, 4), (8, 8)])
def test_several_tokens(m: int, tokens: int) -> None:
    """With 3 and 5 tokens the last block of tokens is partial."""
    shape = MatmulShape(n=2, k=224, m=m, scheme="q4_1", out="fp32")
    inputs = INT4_MATMUL.inputs(shape, DEVICE, seed=m)
    config = Config(block_k=512, rows=1, tokens=tokens, ahead=2, warps=1)
    assert decibels(run(shape, config, inputs), INT4_MATMUL.reference(shape, inputs)[0]) > LEAST_DB["int8"]


@pytest.mark.parametrize(
    ("scheme", "rows", "k", "config"),
    [
        ("q4_k", 7, 512, Config(block_k=1024, rows=1, tokens=1, ahead=2, warps=1)),  # one tile, half beyond the row
        ("q4_k", 2, 512, Config(block_k=256, rows=2, tokens=1, ahead=2, warps=1)),  # more rows per program than exist
        ("q6_k", 7, 768, Config(block_k=512, rows=2, tokens=1, ahead=2, warps=2)),  # a last tile that begins in the one before
        ("int4-g128", 7, 640, Config(block_k=256, rows=1, tokens=1, ahead=2, warps=1)),
        ("int4-g64", 7, 320, Config(block_k=256, rows=4, tokens=1, ahead=2, warps=1)),
    ],
)
def test_configs_agree(scheme: str, rows: int, k: int, config: Config) -> None:
    shape = MatmulShape(n=rows, k=k, scheme=scheme, out="fp32")
    inputs = INT4_MATMUL.inputs(shape, DEVICE, seed=5)
    got = run(shape, config, inputs)
    assert decibels(got, INT4_MATMUL.reference(shape, inputs)[0]) > LEAST_DB["int8"]


def test_results_repeat() -> None:
    shape = MatmulShape(n=8, k=256, activation="silu")
    inputs = INT4_MATMUL.inputs(shape, DEVICE, seed=5)
    assert torch.equal(run(shape, SMALL, inputs), run(shape, SMALL, inputs))


def test_a_real_matrix_in_bf16_against_plain_products() -> None:
    """Compare with the product of dequantized weights in PyTorch instead of the module's own reference."""
    shape = MatmulShape(n=3, k=256, scheme="q6_k")
    inputs = INT4_MATMUL.inputs(shape, DEVICE, seed=6)
    matrix = PackedMatrix(SCHEMES["q6_k"], (3, 256), DEVICE)
    for name, part in matrix.parts().items():
        part.data.copy_(inputs[name])
    want = inputs["x"].float() @ matrix.dequantize().T
    got = run(shape, SMALL, inputs)
    assert got.dtype == torch.bfloat16
    assert decibels(got, want) > 30  # 8-bit activations: about 40
    fine = MatmulShape(n=3, k=256, scheme="q6_k", activations="bf16", out="fp32")
    assert decibels(run(fine, SMALL, inputs), want) > LEAST_DB["bf16"]


def test_activations_at_the_edges() -> None:
    shape = MatmulShape(n=4, k=64, m=4, scheme="q4_0", activations="bf16", out="fp32")
    inputs = INT4_MATMUL.inputs(shape, DEVICE, seed=7)
    x = inputs["x"]
    x[0] = 0.0
    x[1, 5] = 1000.0  # one large activation in its block
    x[2] *= 1e-36  # the inverse of this scale would overflow
    x[3, 40] = torch.nan
    got, want = run(shape, SMALL, inputs), INT4_MATMUL.reference(shape, inputs)[0]
    assert torch.equal(got[0], torch.zeros_like(got[0]))
    assert decibels(got[1], want[1]) > 80
    assert bool((got[2].abs() < 1e-30).all())
    assert bool(got[3].isnan().all())


@pytest.mark.parametrize(("scheme", "bad"), [("int8-g32", torch.nan), ("q4_1", -torch.inf), ("q6_k", torch.inf)])
def test_what_is_no_number_stays_none(scheme: str, bad: float) -> None:
    shape = MatmulShape(n=4, k=256, scheme=scheme, out="fp32")
    inputs = INT4_MATMUL.inputs(shape, DEVICE, seed=8)
    inputs["x"][0, 77] = bad
    assert not run(shape, SMALL, inputs).isfinite().any()


@pytest.mark.parametrize("limit", LIMITS.values())
def test_quantised_activations_are_near(limit: int) -> None:
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(9))
    error = (quantise_activations(x, limit) - x).abs().unflatten(-1, (-1, 32)).amax(-1)
    step = x.unflatten(-1, (-1, 32)).abs().amax(-1) / limit
    assert bool((error <= 0.5001 * step).all())


def test_matrix_counted_as_it_is_held() -> None:
    shape = MatmulShape(n=64, k=512)
    matrix = PackedMatrix(SCHEMES["q4_k"], (64, 512))
    assert INT4_MATMUL.cost(shape).bytes == matrix.nbytes + 2 * 512 + 2 * 64


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("x", lambda x: x.to(torch.int32)),
        ("x", lambda x: x[:, :-32]),
        ("x", lambda x: torch.cat((x, x), 1)[:, ::2]),
        ("x", lambda x: torch.cat((x.flatten(), x.flatten()))[1 : 1 + x.numel()].view(x.shape)),
        ("x", lambda x: x.to("meta")),
        ("codes", lambda codes: codes[:-1]),
        ("codes", lambda codes: codes.view(torch.int8)),
        ("scales", lambda scales: scales.T.contiguous().T),
    ],
)
def test_wrong_tensors_are_named(name: str, change) -> None:
    shape = MatmulShape(n=8, k=256)
    inputs = INT4_MATMUL.inputs(shape, DEVICE)
    inputs[name] = change(inputs[name])
    with pytest.raises(ModelError, match=f"int4_matmul, {name}: "):
        INT4_MATMUL.run(shape, SMALL, inputs)


@pytest.mark.parametrize("wrong", [{"k": 0}, {"k": 128}, {"m": 9}, {"m": 0}, {"n": 7, "activation": "silu"}])
def test_wrong_sizes_are_named(wrong: dict[str, int]) -> None:
    shape = MatmulShape(**{"n": 8, "k": 256, **wrong})
    with pytest.raises(ModelError, match="k a multiple of 256"):
        INT4_MATMUL.run(shape, SMALL, INT4_MATMUL.inputs(shape, DEVICE))


@pytest.mark.parametrize("wrong", [{"activation": "relu"}, {"activation": "gelu"}, {"activations": "fp16"}, {"out": "fp16"}])
def test_words_that_mean_nothing_are_refused(wrong: dict[str, str]) -> None:
    """An unknown activation would be computed as gelu_tanh."""
    name, value = next(iter(wrong.items()))
    with pytest.raises(ModelError, match=f"int4_matmul: {name}='{value}'"):
        MatmulShape(n=8, k=256, **wrong)
