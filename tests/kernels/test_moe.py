"""Compare mixture-of-experts decoding (routing, both matmuls, the sum) with the reference and the model's code."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.core.errors import ModelError
from toolkit.kernels.base import Config
from toolkit.kernels.int4_matmul import quantise_activations
from toolkit.kernels.moe import MOE_STEP, MoeShape, choose_experts, scored
from toolkit.kernels.routing import keys_of, nth_expert, route
from toolkit.models.layers import Experts
from toolkit.models.places import set_scheme
from toolkit.weights.schemes import find_scheme

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The reference uses the same integers. Results differ in the order of summation, and occasionally an activation halfway
# between two integers rounds to the other one. The SNR is at least 60 dB.
ERROR = 1e-3
CONFIG = Config(each=4, rows=4, down_warps=8, warps=8)
OTHER = Config(each=4, rows=2, down_warps=2, warps=1)


@triton.jit
def routes(scores, numbers, shares, EXPERTS: tl.constexpr, TOP_K: tl.constexpr):
    """Store the experts that `route` and `nth_expert` choose, and their weights."""
    keys = keys_of(scores, EXPERTS, ".cg")
    found, weights = route(keys, scores, EXPERTS, TOP_K)
    for i in tl.static_range(TOP_K):
        tl.store(numbers + i, found[i])
        tl.store(shares + i, weights[i])
    n = tl.program_id(0)
    tl.store(numbers + TOP_K + n, nth_expert(keys, n, EXPERTS))


def error(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).norm() / wanted.norm())


def small(scheme: str, down: str = "", hidden: int = 64, width: int = 32, experts: int = 5, **more: object) -> MoeShape:
    whole = {name: max(32, find_scheme(name).multiple) for name in (scheme, down or scheme)}
    sizes = (max(hidden, whole[scheme]), max(width, whole[down or scheme]))
    return MoeShape(*sizes, experts, 2, scheme=scheme, down=down or scheme, dtype="float32", **more)


@pytest.mark.parametrize(
    "shape",
    [
        small("int4-g32", hidden=96, width=96, shared=False),  # neither is a power of two
        small("int8-g32", "q5_0"),
        small("q4_k", "q6_k"),
        small("q5_1", "int4-g64", activation="gelu_tanh"),
    ],
    ids=lambda shape: f"{shape.scheme} {shape.down} {shape.hidden}",
)
def test_as_the_reference(shape: MoeShape) -> None:
    inputs = MOE_STEP.inputs(shape, DEVICE, seed=1)
    assert error(MOE_STEP.run(shape, CONFIG, inputs)[0], MOE_STEP.reference(shape, inputs)[0]) < ERROR


def test_rows_longer_than_a_warp() -> None:
    """33 blocks per row on 32 lanes: the last tile overlaps the previous one, and the norm's tile is larger than the row."""
    shape = MoeShape(1056, 32, 3, 1, scheme="int4-g32", down="int4-g32", dtype="float32")
    inputs = MOE_STEP.inputs(shape, DEVICE, seed=9)
    assert error(MOE_STEP.run(shape, CONFIG, inputs)[0], MOE_STEP.reference(shape, inputs)[0]) < ERROR


def test_configs_agree() -> None:
    shape = small("int4-g32")
    inputs = MOE_STEP.inputs(shape, DEVICE, seed=6)
    assert error(MOE_STEP.run(shape, OTHER, inputs)[0], MOE_STEP.run(shape, CONFIG, inputs)[0]) < 1e-6


def test_as_the_models_experts() -> None:
    """With the model's packed weights and x in 8 bits, only the 8-bit inner activations cause a difference."""
    shape = small("int4-g32", shared=False)
    inputs = MOE_STEP.inputs(shape, DEVICE, seed=2)
    experts = Experts(shape.experts, shape.hidden, shape.width).requires_grad_(False)
    for name in ("gate_up.gate.weight", "gate_up.up.weight", "down.weight"):
        set_scheme(experts, name, find_scheme("int4-g32"))
    experts.gate_up.join()
    for linear, prefix in ((experts.gate_up.gate_up, "up"), (experts.down, "down")):
        for name in linear.weight.parts():
            setattr(linear.weight, name, torch.nn.Parameter(inputs[f"{prefix}_{name}"], requires_grad=False))
    residual, normed, scores = scored(shape, inputs)
    chosen, shares = choose_experts(shape, scores)
    wanted = experts(quantise_activations(normed)[None], chosen[None], shares[None])[0]
    found, total = MOE_STEP.run(shape, CONFIG, inputs)
    assert error(found, wanted) < 1e-2  # 40 dB
    assert torch.equal(total, residual)


@pytest.mark.parametrize("experts", [70, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_routing(dtype: torch.dtype, experts: int) -> None:
    """Ties go to the lowest index and 0.0 equals -0.0; the experts span several pieces, the last one partial."""
    shape = MoeShape(32, 32, experts, 4, False, "int4-g32", "int4-g32")
    random = torch.randn(experts, generator=torch.Generator().manual_seed(3)).tolist()
    ties = {experts - 1: 3.0, 40: 3.0, 3: 3.0, 7: 3.0, 5: 3.0}
    zeros = {66: 0.0, 2: -0.0, 33: 0.0, 4: -1.0}
    room = -(-experts // 4) * 4
    for rest, some in ((random, {}), ([0.5] * experts, {}), ([-2.0] * experts, ties), ([-2.0] * experts, zeros)):
        scores = torch.full((room,), torch.inf, dtype=dtype, device=DEVICE)  # what follows the experts is ignored
        scores[:experts] = torch.tensor([some.get(i, score) for i, score in enumerate(rest)], dtype=dtype)
        numbers = torch.full((8,), -1, dtype=torch.int32, device=DEVICE)
        shares = torch.full((4,), torch.nan, device=DEVICE)
        routes[(4,)](scores, numbers, shares, EXPERTS=experts, TOP_K=4)
        wanted, weights = choose_experts(shape, scores[:experts])
        assert numbers.tolist() == wanted.tolist() * 2
        torch.testing.assert_close(shares, weights)


def test_nothing_left_over_is_read() -> None:
    shape = small("int4-g32", hidden=96)
    inputs = MOE_STEP.inputs(shape, DEVICE, seed=4)
    outputs, wanted = MOE_STEP.outputs(shape, inputs), MOE_STEP.reference(shape, inputs)[0]
    for poison in (torch.nan, 1000.0):
        for tensor in outputs.values():
            tensor.fill_(poison if tensor.dtype.is_floating_point else 100)
        for launch in MOE_STEP.launches(shape, CONFIG, inputs, outputs):
            launch.run()
        assert error(outputs["output"], wanted) < ERROR


def test_what_is_not_a_number_shows() -> None:
    shape = small("int4-g32")
    inputs = MOE_STEP.inputs(shape, DEVICE, seed=5)
    inputs["x"][3] = torch.nan
    assert MOE_STEP.run(shape, CONFIG, inputs)[0].isnan().all()


def wrong(**changed: Tensor) -> str:
    shape = small("int4-g32")
    inputs = MOE_STEP.inputs(shape, "meta") | changed
    with pytest.raises(ModelError) as caught:
        MOE_STEP.launches(shape, CONFIG, inputs, MOE_STEP.outputs(shape, inputs))
    return str(caught.value)


def test_errors_name_the_tensor() -> None:
    assert "up_codes" in wrong(up_codes=torch.empty(5, 64, 16, dtype=torch.uint8, device="meta"))
    assert "down_scales" in wrong(down_scales=torch.empty(5, 64, 1, device="meta"))
    assert "router" in wrong(router=torch.empty(5, 64, device="meta"))  # without the shared expert's row
    assert "residual" in wrong(residual=torch.empty(64, dtype=torch.bfloat16, device="meta"))
    assert "norm" in wrong(norm=torch.empty(32, device="meta"))
    with pytest.raises(ModelError, match="don't divide by 256"):
        MoeShape(64, 256, 4, 2).check()
    with pytest.raises(ModelError, match="top_k"):
        MoeShape(256, 256, 4, 5).check()
    with pytest.raises(ModelError, match="columns"):
        MoeShape(0, 256, 4, 2).check()
    with pytest.raises(ModelError, match=r"activation='relu'.*silu, gelu_tanh"):  # not computed as gelu_tanh
        MoeShape(256, 256, 4, 2, activation="relu").check()


def test_cost_is_the_bytes_of_the_experts_used() -> None:
    shape = MOE_STEP.known["qwen3.5-35b-a3b experts, q6_k down"]
    assert isinstance(shape, MoeShape)
    matrix = 512 * 2048 / 8
    expected = 9 * (2 * find_scheme("q4_k").bits_per_weight + find_scheme("q6_k").bits_per_weight) * matrix
    router = 2 * 257 * 2048
    assert 0 <= MOE_STEP.cost(shape).bytes - expected - router < 32768
