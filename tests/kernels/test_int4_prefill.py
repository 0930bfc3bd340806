"""Compare the tiled matmul on packed weights with dequantizing the matrix and multiplying."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from toolkit.core.errors import ModelError, ToolkitError
from toolkit.kernels.base import Config
from toolkit.kernels.int4_prefill import INT4_PREFILL, PrefillShape
from toolkit.ops import matmul
from toolkit.weights.packed import PackedMatrix
from toolkit.weights.schemes import SCHEMES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Config(block_n=16, block_m=16, block_k=64, split=1)
# Relative to the largest result. Where a GPU rounds weights and results to bf16, Triton's interpreter truncates them (up to
# 2^-7 each, always in the same direction, and twice for gate times up).
CLOSE = 2**-7 if DEVICE == "cuda" else 2**-5


def run(shape: PrefillShape, inputs: dict[str, torch.Tensor], config: Config = SMALL) -> torch.Tensor:
    """Launch with NaN in output and scratch; assert that the counters are unchanged afterwards."""
    outputs = INT4_PREFILL.outputs(shape, inputs)
    outputs["partial"] = torch.empty(1 << 16, device=DEVICE)
    for tensor in outputs.values():
        tensor.fill_(torch.nan)
    for launch in INT4_PREFILL.launches(shape, config, inputs, outputs):
        launch.run()
    assert not inputs["counter"].any()
    return outputs["out"]


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.shape == wanted.shape
    assert got.dtype == wanted.dtype
    error = got.float() - wanted.float()
    assert error.abs().max() <= CLOSE * wanted.float().abs().max()
    assert error.norm() <= CLOSE / 2 * wanted.float().norm()


def columns(scheme: str, blocks: int) -> int:
    """Return `blocks` times the smallest tile width of the scheme; with an odd number, the last tile of 64 is partial."""
    return blocks * max(32, SCHEMES[scheme].multiple)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme(scheme: str) -> None:
    shape = PrefillShape(18, columns(scheme, 1 if SCHEMES[scheme].steps else 3), 17, scheme)
    inputs = INT4_PREFILL.inputs(shape, DEVICE)
    assert_close(run(shape, inputs), INT4_PREFILL.reference(shape, inputs)[0])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("scheme", ["int4-g32", "q4_k", "q5_0", "q6_k", "int8-g32"])
def test_gate_and_up(scheme: str, activation: str) -> None:
    shape = PrefillShape(22, columns(scheme, 1), 17, scheme, activation)
    inputs = INT4_PREFILL.inputs(shape, DEVICE)
    assert_close(run(shape, inputs), INT4_PREFILL.reference(shape, inputs)[0])


@pytest.mark.parametrize(
    ("n", "m", "k", "config"),
    [
        (16, 16, 64, SMALL),  # whole tiles
        (1, 1, 32, SMALL),
        (33, 9, 96, Config(block_n=32, block_m=16, block_k=32, split=1)),
        (70, 40, 160, Config(block_n=64, block_m=32, block_k=128, split=1)),
        (5, 300, 64, Config(block_n=16, block_m=128, block_k=64, split=1)),
    ],
)
def test_sizes_and_tiles(n: int, m: int, k: int, config: Config) -> None:
    shape = PrefillShape(n, k, m, "q4_0")
    inputs = INT4_PREFILL.inputs(shape, DEVICE)
    assert_close(run(shape, inputs, config), INT4_PREFILL.reference(shape, inputs)[0])


def test_prompts_of_different_lengths_share_programs() -> None:
    """Otherwise, the kernels of a model would be compiled again for most new lengths of a prompt."""

    def constants(m: int) -> dict[str, object]:
        shape = PrefillShape(64, 64, m, "q4_0")
        inputs = INT4_PREFILL.inputs(shape, "meta")
        (launch,) = INT4_PREFILL.launches(shape, SMALL, inputs, INT4_PREFILL.outputs(shape, inputs))
        return dict(launch.constants)

    assert constants(16) == constants(17) == constants(4096) != constants(15)


@pytest.mark.parametrize(("split", "k", "activation"), [(2, 160, "none"), (3, 192, "silu"), (4, 64, "none")])
def test_split_sums_are_added_in_order(split: int, k: int, activation: str) -> None:
    """Partial sums over k, the last of them shorter or empty, are all added, in the same order in every run."""
    shape = PrefillShape(20 if activation == "silu" else 10, k, 18, "q4_1", activation)
    inputs = INT4_PREFILL.inputs(shape, DEVICE)
    config = Config(block_n=16, block_m=16, block_k=32, split=split)
    got = run(shape, inputs, config)
    assert_close(got, INT4_PREFILL.reference(shape, inputs)[0])
    assert torch.equal(got, run(shape, inputs, config))


def test_too_little_scratch_is_told() -> None:
    shape = PrefillShape(64, 64, 64, "q4_1")
    inputs = INT4_PREFILL.inputs(shape, DEVICE)
    outputs = {**INT4_PREFILL.outputs(shape, inputs), "partial": torch.empty(7, device=DEVICE)}
    with pytest.raises(ModelError, match="1024 counters and scratch for 7 sums where 16 and 8,192 are needed"):
        INT4_PREFILL.launches(shape, Config(block_n=16, block_m=16, block_k=32, split=2), inputs, outputs)


@pytest.mark.parametrize("scheme", ["int4-g128", "int8-g128"])
def test_groups_wider_than_a_tile(scheme: str) -> None:
    shape = PrefillShape(20, 256, 18, scheme)
    inputs = INT4_PREFILL.inputs(shape, DEVICE)
    assert_close(run(shape, inputs), INT4_PREFILL.reference(shape, inputs)[0])


def test_the_models_product() -> None:
    """The reference and the kernel agree with the model's `matmul` on a packed matrix."""
    shape = PrefillShape(24, 256, 18, "q4_k", "silu")
    inputs = INT4_PREFILL.inputs(shape, DEVICE)
    weight = PackedMatrix(SCHEMES["q4_k"], (24, 256), DEVICE)
    for name in weight.parts():
        getattr(weight, name).data = inputs[name]
    gate, up = matmul(inputs["x"].float(), weight).chunk(2, -1)
    wanted = (F.silu(gate) * up).to(torch.bfloat16)
    assert_close(INT4_PREFILL.reference(shape, inputs)[0], wanted)
    assert_close(run(shape, inputs), wanted)


def test_rows_beyond_the_tokens_count_for_nothing() -> None:
    """Large values and NaN in memory after the last token don't affect the result."""
    shape = PrefillShape(20, 64, 17, "q4_1")
    inputs = INT4_PREFILL.inputs(shape, DEVICE)
    wanted = INT4_PREFILL.reference(shape, inputs)[0]
    whole = torch.full((40, 64), 1000.0, dtype=torch.bfloat16, device=DEVICE)
    whole[20:] = torch.nan
    whole[:17] = inputs["x"]
    inputs["x"] = whole[:17]
    assert_close(run(shape, inputs), wanted)


def test_no_columns_give_zeros_and_no_tokens_nothing() -> None:
    empty = PrefillShape(20, 0, 17, "q4_0")
    assert run(empty, INT4_PREFILL.inputs(empty, DEVICE)).eq(0).all()
    none = PrefillShape(20, 64, 0, "q4_0")
    assert run(none, INT4_PREFILL.inputs(none, DEVICE)).shape == (0, 20)


def test_the_same_every_time() -> None:
    shape = PrefillShape(40, 192, 20, "q5_1", "silu")
    inputs = INT4_PREFILL.inputs(shape, DEVICE)
    assert torch.equal(run(shape, inputs), run(shape, inputs))


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("x", lambda x: x.float(), "float32 where bfloat16"),
        ("x", lambda x: x[:5], "shape"),
        ("x", lambda x: x.t().contiguous().t(), "not contiguous"),
        ("x", lambda x: torch.cat((x.flatten(), x[0, :1]))[1:].view(x.shape), "multiple of 16"),
        ("codes", lambda c: c.view(torch.int8), "int8 where uint8"),
        ("scales", lambda s: s.to("meta"), "on meta"),
    ],
)
def test_wrong_tensors_are_told_by_name(name: str, change, says: str) -> None:  # type: ignore[no-untyped-def]
    shape = PrefillShape(16, 64, 16, "q4_0")
    inputs = INT4_PREFILL.inputs(shape, DEVICE)
    outputs = INT4_PREFILL.outputs(shape, inputs)
    inputs[name] = change(inputs[name])
    with pytest.raises(ModelError, match=f"int4_prefill, {name}.*{says}"):
        INT4_PREFILL.launches(shape, SMALL, inputs, outputs)


@pytest.mark.parametrize(
    "make",
    [
        lambda: PrefillShape(16, 48, 16, "q4_0"),
        lambda: PrefillShape(16, 64, 16, "q3_k"),
        lambda: PrefillShape(15, 64, 16, "q4_0", "silu"),
        lambda: PrefillShape(16, 64, 16, "q4_0", "relu"),
    ],
)
def test_impossible_shapes_are_refused(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ToolkitError):
        make()


def test_known_shapes_launch_without_values() -> None:
    for shape in INT4_PREFILL.known.values():
        assert PrefillShape.from_key(shape.key) == shape
        inputs = INT4_PREFILL.inputs(shape, "meta")
        outputs = INT4_PREFILL.outputs(shape, inputs)
        for config in INT4_PREFILL.space(shape):
            assert len(INT4_PREFILL.launches(shape, config, inputs, outputs)) == 1
        assert INT4_PREFILL.cost(shape).peak == "bf16_flops"
