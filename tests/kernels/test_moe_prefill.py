"""Compare mixture-of-experts prefill with the reference and the model's code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from toolkit.core.errors import ModelError
from toolkit.kernels.base import Config
from toolkit.kernels.moe_prefill import MOE_PREFILL, ExpertsShape
from toolkit.models.layers import Experts
from toolkit.models.places import set_scheme
from toolkit.weights.schemes import find_scheme

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Large tiles, so that the interpreter runs few programs. Where a GPU rounds weights, intermediate values and rows to bf16, the
# interpreter truncates them, always in the same direction.
WIDE = Config(block_n=128, block_m=16, block_k=64)
CLOSE = 2**-7 if DEVICE == "cuda" else 2**-5


def run(shape: ExpertsShape, inputs: dict[str, Tensor], config: Config = WIDE) -> Tensor:
    """Launch with poisoned output and scratch."""
    outputs = MOE_PREFILL.outputs(shape, inputs)
    for tensor in outputs.values():
        tensor.fill_(torch.nan if tensor.dtype.is_floating_point else 1 << 30)
    for launch in MOE_PREFILL.launches(shape, config, inputs, outputs):
        launch.run()
    return outputs["out"]


def assert_close(got: Tensor, wanted: Tensor) -> None:
    assert got.shape == wanted.shape
    assert got.dtype == wanted.dtype
    error = got.float() - wanted.float()
    assert error.abs().max() <= CLOSE * wanted.float().abs().max()
    assert error.norm() <= CLOSE * wanted.float().norm()


@pytest.mark.parametrize(
    ("shape", "config"),
    [
        (ExpertsShape(7, 96, 32, 5, 2, "int4-g32", "q5_1", "gelu_tanh"), WIDE),  # an odd number of experts, columns and tokens
        (ExpertsShape(18, 64, 160, 3, 1, "q5_0", "int8-g32"), Config(block_n=128, block_m=16, block_k=32)),  # more than a tile
        (ExpertsShape(1, 128, 32, 4, 4, "int4-g128", "q4_0"), WIDE),
        (ExpertsShape(3, 256, 256, 2, 1, "q4_k", "q6_k"), Config(block_n=256, block_m=32, block_k=128)),
        (ExpertsShape(2, 64, 256, 2, 2, "q4_1", "q5_k"), Config(block_n=256, block_m=16, block_k=128)),
    ],
    ids=lambda of: of.key if isinstance(of, ExpertsShape) else "",
)
def test_as_the_reference(shape: ExpertsShape, config: Config) -> None:
    inputs = MOE_PREFILL.inputs(shape, DEVICE, seed=1)
    assert_close(run(shape, inputs, config), MOE_PREFILL.reference(shape, inputs)[0])


@pytest.mark.parametrize("tokens", [16, 37])
def test_all_choose_one_and_nobody_the_others(tokens: int) -> None:
    """All tokens choose the same two experts, which fill one or several tiles; the other experts get no tile."""
    shape = ExpertsShape(tokens, 64, 32, 40, 2, "q4_0", "q4_0")
    inputs = MOE_PREFILL.inputs(shape, DEVICE, seed=2)
    inputs["chosen"] = torch.tensor([[39, 3]], device=DEVICE).repeat(tokens, 1)  # int64, as topk gives them
    got = run(shape, inputs, Config(block_n=64, block_m=32, block_k=64))
    assert_close(got, MOE_PREFILL.reference(shape, inputs)[0])


def test_pairs_are_sorted_by_expert_and_then_by_token() -> None:
    shape = ExpertsShape(2500, 32, 32, 7, 2, "q4_0", "q4_0")  # more pairs than are sorted at once
    inputs = MOE_PREFILL.inputs(shape, DEVICE, seed=3)
    inputs["chosen"] = inputs["chosen"] % 5  # no token chooses the last two
    outputs = MOE_PREFILL.outputs(shape, inputs)
    MOE_PREFILL.launches(shape, WIDE, inputs, outputs)[0].run()
    numbers, order = inputs["chosen"].flatten().sort(stable=True)
    assert torch.equal(outputs["order"].long(), order)
    assert outputs["starts"].tolist() == [int((numbers < expert).sum()) for expert in range(8)]


def test_as_the_models_experts() -> None:
    shape = ExpertsShape(6, 64, 32, 4, 2, "int4-g32", "int4-g32")
    inputs = MOE_PREFILL.inputs(shape, DEVICE, seed=4)
    experts = Experts(shape.experts, shape.hidden, shape.width).requires_grad_(False)
    for name in ("gate_up.gate.weight", "gate_up.up.weight", "down.weight"):
        set_scheme(experts, name, find_scheme("int4-g32"))
    experts.gate_up.join()
    for linear, prefix in ((experts.gate_up.gate_up, "up"), (experts.down, "down")):
        for name in linear.weight.parts():
            setattr(linear.weight, name, torch.nn.Parameter(inputs[f"{prefix}_{name}"], requires_grad=False))
    wanted = experts(inputs["x"].float(), inputs["chosen"].long(), inputs["shares"])
    assert_close(MOE_PREFILL.reference(shape, inputs)[0], wanted.to(torch.bfloat16))
    assert_close(run(shape, inputs), wanted.to(torch.bfloat16))


def test_what_is_not_a_number_stays_with_its_token_and_all_is_the_same_again() -> None:
    shape = ExpertsShape(5, 64, 32, 3, 2, "q4_1", "q4_1")
    inputs = MOE_PREFILL.inputs(shape, DEVICE, seed=5)
    first = run(shape, inputs)
    inputs["x"][3, 7] = torch.nan
    got = run(shape, inputs)
    assert got[3].isnan().all()
    others = [0, 1, 2, 4]
    assert torch.equal(got[others], first[others])


def test_no_tokens_give_nothing() -> None:
    shape = ExpertsShape(0, 64, 32, 4, 2, "q4_0", "q4_0")
    assert run(shape, MOE_PREFILL.inputs(shape, DEVICE)).shape == (0, 64)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("x", lambda x: x.float(), "float32 where bfloat16"),
        ("chosen", lambda c: c.short(), "int16 where int32 or int64"),
        ("shares", lambda s: s[:, :1], "shape"),
        ("up_codes", lambda c: c.transpose(0, 1).contiguous().transpose(0, 1), "not contiguous"),
        ("down_scales", lambda s: s[1:], "shape"),
        ("down_codes", lambda c: c.to("meta"), "on meta"),
    ],
)
def test_wrong_tensors_are_told_by_name(name: str, change, says: str) -> None:  # type: ignore[no-untyped-def]
    shape = ExpertsShape(3, 64, 32, 4, 2, "q4_0", "q4_0")
    inputs = MOE_PREFILL.inputs(shape, DEVICE)
    outputs = MOE_PREFILL.outputs(shape, inputs)
    inputs[name] = change(inputs[name])
    with pytest.raises(ModelError, match=f"moe_prefill, {name}.*{says}"):
        MOE_PREFILL.launches(shape, WIDE, inputs, outputs)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((3, 64, 256, 4, 2), "don't divide by 256"),
        ((3, 256, 0, 4, 2), "0 columns"),
        ((3, 256, 256, 4, 5), "top_k"),
        ((3, 256, 256, 4, 2, "q4_k", "q4_k", "relu"), "relu"),
    ],
)
def test_impossible_shapes_are_refused(sizes: tuple[int, ...], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        ExpertsShape(*sizes)


def test_there_are_tiles_enough_however_tokens_choose() -> None:
    generator = torch.Generator().manual_seed(6)
    for pairs, experts, block_m in ((1, 8, 16), (5, 8, 16), (40, 8, 16), (33, 2, 32), (256, 3, 128), (0, 3, 16)):
        shape = ExpertsShape(pairs, 32, 32, experts, 1, "q4_0", "q4_0")
        for spread in range(1, experts + 1):
            counts = torch.randint(0, spread, (pairs,), generator=generator).bincount(minlength=experts)
            assert int(((counts + block_m - 1) // block_m).sum()) <= shape.tiles(block_m)
        assert shape.tiles(block_m) <= min(experts, pairs) + pairs // block_m


def test_known_shapes_launch_without_values() -> None:
    for shape in MOE_PREFILL.known.values():
        assert isinstance(shape, ExpertsShape)
        assert ExpertsShape.from_key(shape.key) == shape
        inputs = MOE_PREFILL.inputs(shape, "meta")
        outputs = MOE_PREFILL.outputs(shape, inputs)
        assert 7 <= len(MOE_PREFILL.space(shape)) <= 12
        for config in MOE_PREFILL.space(shape):
            assert len(MOE_PREFILL.launches(shape, config, inputs, outputs)) == 4


def test_cost_is_the_bytes_of_all_experts_and_the_flops_of_those_chosen() -> None:
    shape = MOE_PREFILL.known["qwen3.5-35b-a3b experts, q6_k down, 512 tokens"]
    cost = MOE_PREFILL.cost(shape)
    matrix = 512 * 2048
    bits = 2 * find_scheme("q4_k").bits_per_weight + find_scheme("q6_k").bits_per_weight
    assert cost.bytes == 256 * matrix * bits / 8 + 512 * 2048 * 4
    assert cost.flops == 512 * 8 * 3 * 2 * matrix
    assert cost.peak == "bf16_flops"
