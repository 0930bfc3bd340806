"""Compare norms (with residuals and 8-bit outputs) and RoPE with cache writes with plain PyTorch and the models."""

from __future__ import annotations

import pytest
import torch

from toolkit.core.errors import ModelError
from toolkit.kernels.base import Config, Kernel, Shape
from toolkit.kernels.int4_matmul import INT4_MATMUL, MatmulShape
from toolkit.kernels.norms_rope import QK_NORM_ROPE, RMS_NORM, HeadsShape, NormShape
from toolkit.models.layers import RMSNorm
from toolkit.ops.reference.attention import rope_of, rotate
from toolkit.weights.packed import quantize_activations

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Another order of summation can move a result across a rounding boundary: one step of the dtype, two for rotated pairs.
CLOSE = {"bfloat16": {"rtol": 2**-6, "atol": 2**-6}, "float32": {"rtol": 1e-5, "atol": 1e-5}}


def run(kernel: Kernel, shape: Shape, inputs: dict[str, torch.Tensor], **choices: int) -> tuple[torch.Tensor, ...]:
    """Launch on poisoned outputs; what is left of the poison shows up as NaN, 99 or a wrong cache."""
    outputs = kernel.outputs(shape, inputs)
    given = {tensor.data_ptr() for tensor in inputs.values()}
    for tensor in outputs.values():
        if tensor.data_ptr() not in given:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 99)
    for launch in kernel.launches(shape, Config(**choices), inputs, outputs):
        launch.run()
    return tuple(outputs.values())[: kernel.results(shape)]


FORMS = [
    NormShape(3, 96, "norm", quantised=True),
    NormShape(2, 96, "add_norm", quantised=True),
    NormShape(2, 50, "add_norm", dtype="float32"),
    NormShape(1, 37, "norm_add"),
    NormShape(2, 64, "norm_add", scaled=True, dtype="float32"),
    NormShape(2, 160, "norm_add_norm", scaled=True, quantised=True),
    NormShape(1, 1, "norm", dtype="float32", eps="0.01"),
    NormShape(0, 32, "norm", quantised=True),
]


@pytest.mark.parametrize("shape", FORMS, ids=lambda shape: shape.key)
def test_norm_is_the_reference(shape: NormShape) -> None:
    inputs = RMS_NORM.inputs(shape, DEVICE)
    kept = {name: tensor.clone() for name, tensor in inputs.items()}
    got, wanted = run(RMS_NORM, shape, inputs), RMS_NORM.reference(shape, inputs)
    assert len(got) == len(wanted) == RMS_NORM.results(shape)
    plain = len(got) - 3 * shape.quantised
    for one, other in zip(got[:plain], wanted[:plain], strict=True):
        torch.testing.assert_close(one, other, **CLOSE[shape.dtype])
    if shape.quantised:  # of the result itself, these are exact
        assert all(map(torch.equal, got[plain:], quantize_activations(got[0])))
    assert all(torch.equal(inputs[name], kept[name]) for name in inputs)


def test_codes_are_those_of_the_result_itself() -> None:
    """Codes, scales and sums are exact for groups of zeros and for a group with a single large value."""
    shape = NormShape(2, 128, quantised=True)
    inputs = RMS_NORM.inputs(shape, DEVICE)
    inputs["x"][0, 32:64] = 0
    inputs["x"][1, 64:96] = 0
    inputs["x"][1, 70] = 1000
    out, *eight_bit = run(RMS_NORM, shape, inputs)
    for got, wanted in zip(eight_bit, quantize_activations(out), strict=True):
        assert torch.equal(got, wanted)
    assert eight_bit[1][0, 1] == 0
    assert eight_bit[0][1, 70] == 127


@pytest.mark.parametrize("hidden", [32, 544, 768, 5376])
def test_codes_are_those_that_a_product_would_compute(hidden: int) -> None:
    shape = NormShape(2, hidden, "add_norm", quantised=True)
    out, _, *quantized = run(RMS_NORM, shape, RMS_NORM.inputs(shape, DEVICE))
    product = MatmulShape(n=32, k=hidden, m=2, scheme="q4_0")
    inputs = INT4_MATMUL.inputs(product, DEVICE) | {"x": out}
    outputs = INT4_MATMUL.outputs(product, inputs)
    INT4_MATMUL.launches(product, INT4_MATMUL.space(product)[0], inputs, outputs)[0].run()
    for name, own in zip(("x_codes", "x_scales", "x_sums"), quantized, strict=True):
        assert torch.equal(own, outputs[name].view_as(own)), name


def test_norm_after_is_what_a_gemma_layer_does() -> None:
    shape = NormShape(2, 96, "norm_add_norm", scaled=True, dtype="float32")
    inputs = RMS_NORM.inputs(shape, DEVICE)
    post, norm = (RMSNorm(96, 1e-6).to(DEVICE) for _ in range(2))
    post.weight.data, norm.weight.data = inputs["post_weight"], inputs["weight"]
    x = (inputs["residual"] + post(inputs["x"])) * inputs["scalar"]
    out, residual = run(RMS_NORM, shape, inputs)
    torch.testing.assert_close(residual, x, **CLOSE["float32"])
    torch.testing.assert_close(out, norm(x), **CLOSE["float32"])


HEADS = [
    HeadsShape(1, 4, 2, 16, 16, 8, 40, value_norm=True, cache="ring"),
    HeadsShape(5, 4, 2, 16, 16, 8, 40, value_norm=True, cache="ring", dtype="float32"),
    HeadsShape(11, 2, 1, 16, 16, 4, 40, cache="ring", dtype="float32"),  # more tokens than slots
    HeadsShape(2, 4, 1, 32, 32, 12, 12, values="keys", value_norm=True),
    HeadsShape(2, 4, 1, 32, 32, 12, 12, values="keys", value_norm=True, key_dim=8),  # a part of each key
    HeadsShape(3, 3, 2, 32, 32, 12, 20, values="keys", value_norm=True, dtype="float32", key_dim=16),
    HeadsShape(2, 4, 2, 32, 32, 12, 12, apart=True, value_norm=True),
    HeadsShape(3, 2, 1, 16, 8, 3, 12, gated=True, apart=True, cache="none"),
    HeadsShape(3, 3, 1, 24, 8, 12, 20, gated=True),  # part of a head turns; sizes that are no powers of two
    HeadsShape(3, 5, 3, 16, 16, 12, 12, dtype="float32"),
    HeadsShape(3, 4, 2, 16, 0, 12, 12, cache="none"),
    HeadsShape(2, 4, 0, 16, 16, 0, 12, cache="none"),  # layers that share the keys and values of another layer
]


@pytest.mark.parametrize("block_h", [1, 4])
@pytest.mark.parametrize("shape", HEADS, ids=lambda shape: shape.key)
def test_heads_are_the_reference(shape: HeadsShape, block_h: int) -> None:
    inputs = QK_NORM_ROPE.inputs(shape, DEVICE)
    if shape.cache != "none":
        inputs["keys"].fill_(1000)
    wanted = QK_NORM_ROPE.reference(shape, inputs)
    got = run(QK_NORM_ROPE, shape, inputs, block_h=block_h)
    assert len(got) == len(wanted) == QK_NORM_ROPE.results(shape)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, **CLOSE[shape.dtype])


def test_a_position_beyond_the_cache_is_not_written() -> None:
    shape = HeadsShape(2, 2, 1, 16, 16, 4, 8, dtype="float32")
    inputs = QK_NORM_ROPE.inputs(shape, DEVICE)
    inputs["at"] = torch.tensor([3, 4], device=DEVICE)
    kept = inputs["keys"].clone()
    _, keys, _ = run(QK_NORM_ROPE, shape, inputs, block_h=1)
    assert torch.equal(keys[:, :, :3], kept[:, :, :3])
    assert not torch.equal(keys[:, :, 3], kept[:, :, 3])


def test_rotation_is_the_models() -> None:
    """Gemma 4's proportional RoPE: pairs with frequency zero stay unrotated, with a table as wide as the head."""
    shape = HeadsShape(3, 2, 1, 16, 16, 9, 9, cache="none", dtype="float32")
    inputs = QK_NORM_ROPE.inputs(shape, DEVICE)
    frequencies = torch.tensor([1.0, 0.3, 0, 0, 0, 0, 0, 0], device=DEVICE)
    inputs["rope"] = rope_of(torch.arange(9, device=DEVICE), frequencies, torch.float32)
    inputs["at"] = torch.arange(4, 7, device=DEVICE)
    norm = RMSNorm(16, 1e-6).to(DEVICE)
    norm.weight.data = inputs["q_weight"]
    query = rotate(norm(inputs["qkv"][:, :32].view(1, 3, 2, 16)), inputs["rope"][4:7])
    torch.testing.assert_close(run(QK_NORM_ROPE, shape, inputs, block_h=2)[0], query[0], **CLOSE["float32"])


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("x", lambda x: x.float(), "float32 where bfloat16"),
        ("x", lambda x: x[:, :64], "shape"),
        ("x", lambda x: x.t().contiguous().t(), "not contiguous"),
        ("x", lambda x: torch.cat((x.flatten(), x[0, :1]))[1:].view(x.shape), "multiple of 16"),
        ("weight", lambda w: w.to("meta"), "on meta"),
        ("weight", lambda w: w.bfloat16(), "bfloat16 where float32"),
    ],
)
def test_wrong_tensors_are_told_by_name(name: str, change, says: str) -> None:  # type: ignore[no-untyped-def]
    shape = NormShape(3, 96)
    inputs = RMS_NORM.inputs(shape, DEVICE)
    outputs = RMS_NORM.outputs(shape, inputs)
    inputs[name] = change(inputs[name])
    with pytest.raises(ModelError, match=f"rms_norm, {name}.*{says}"):
        RMS_NORM.launches(shape, Config(), inputs, outputs)


@pytest.mark.parametrize(
    "make",
    [
        lambda: NormShape(1, 32, "post"),
        lambda: NormShape(1, 32, "norm", scaled=True),
        lambda: NormShape(1, 33, quantised=True),
        lambda: NormShape(1, 0),
        lambda: NormShape(1, 32, dtype="int8"),
        lambda: HeadsShape(1, 2, 1, 16, 3, 4, 4),
        lambda: HeadsShape(1, 2, 1, 16, 32, 4, 4),
        lambda: HeadsShape(1, 2, 1, 16, 16, 4, 4, cache="paged"),
        lambda: HeadsShape(1, 2, 1, 16, 16, 4, 4, key_dim=16),
        lambda: HeadsShape(1, 2, 1, 16, 16, 4, 4, key_dim=8, cache="ring"),
    ],
)
def test_impossible_shapes_are_refused(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ModelError):
        make()


@pytest.mark.parametrize("kernel", [RMS_NORM, QK_NORM_ROPE], ids=lambda kernel: kernel.name)
def test_known_shapes_launch_without_values(kernel: Kernel) -> None:
    for shape in kernel.known.values():
        assert type(shape).from_key(shape.key) == shape
        inputs = kernel.inputs(shape, "meta")
        outputs = kernel.outputs(shape, inputs)
        for config in kernel.space(shape):
            assert kernel.launches(shape, config, inputs, outputs)
        assert kernel.cost(shape).bytes > 0
        assert kernel.results(shape) <= len(outputs)
