"""Compare the delta rule kernels (single step and chunks) with their references and the model's code, on small odd shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from toolkit.core.errors import ModelError
from toolkit.kernels.base import Config
from toolkit.kernels.delta_rule import DELTA_STEP, DeltaStepShape
from toolkit.kernels.delta_rule_chunks import DELTA_CHUNKS, DeltaChunksShape
from toolkit.ops.reference.delta_rule import DeltaNetLayer, delta_net
from toolkit.weights.packed import quantize_activations

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEP_ERROR = 1e-5  # fp32 sums of a few hundred terms in another order; flash-linear-attention's own tests allow 2e-3
CHUNK_ERROR = 5e-3  # flash-linear-attention's own for chunks: tensor cores round their factors to 10 bits
BF16_ERROR = 1e-2  # one rounding of the result, which Triton's interpreter truncates
SHAPES = [
    DeltaStepShape(2, 4, 16, 16, dtype="float32"),
    DeltaStepShape(2, 4, 12, 20, taps=3, tiled=True, dtype="float32"),
    DeltaStepShape(1, 3, 5, 40, taps=2, dtype="float32"),
    DeltaStepShape(3, 3, 8, 8, tiled=True),
]


def error(found: Tensor, wanted: Tensor) -> float:
    """Return the RMS of the difference relative to the RMS of the expected values, as in flash-linear-attention's tests."""
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).norm() / wanted.norm())


def model_result(shape: DeltaStepShape, inputs: dict[str, Tensor], positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (output [T, values], ring, memory) computed by the model's code."""
    ring, memory = inputs["ring"].clone(), inputs["memory"].clone()
    rows = (inputs[name].view(len(positions), -1) for name in ("qkv", "z", "b", "a"))
    weights = (inputs[name] for name in ("conv", "decay", "dt_bias", "norm"))
    layer = DeltaNetLayer(*weights, shape.key_heads, shape.key_dim, shape.tiled, float(shape.eps))
    return delta_net(*rows, positions, ring, memory, layer), ring, memory


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.key)
def test_step(shape: DeltaStepShape) -> None:
    inputs = DELTA_STEP.inputs(shape, DEVICE, seed=1)
    wanted = DELTA_STEP.reference(shape, inputs)
    configs = DELTA_STEP.space(shape)
    for config in (configs[0], configs[-1]):
        found = DELTA_STEP.run(shape, config, inputs)
        assert error(found[0], wanted[0]) < (STEP_ERROR if shape.dtype == "float32" else BF16_ERROR), config
        assert torch.equal(found[1], wanted[1])
        assert error(found[2], wanted[2]) < STEP_ERROR, config


@pytest.mark.parametrize("shape", [DeltaStepShape(2, 4, 16, 32, quantised=True), DeltaStepShape(1, 3, 8, 96, quantised=True)])
def test_a_result_in_8_bits_is_that_of_the_next_product(shape: DeltaStepShape) -> None:
    inputs = DELTA_STEP.inputs(shape, DEVICE, seed=6)
    for config in (Config(block_v=16, warps=1), Config(block_v=128, warps=4)):  # several blocks per head, and one
        output, _, _, *found = DELTA_STEP.run(shape, config, inputs)
        assert len(found) == len(DELTA_STEP.reference(shape, inputs)) - 3 == 3
        for ours, wanted in zip(found, quantize_activations(output), strict=True):
            assert torch.equal(ours, wanted), config


@pytest.mark.parametrize("shape", SHAPES[:2], ids=lambda shape: shape.key)
def test_steps_in_a_row_are_the_models(shape: DeltaStepShape) -> None:
    config, state = Config(block_v=16, warps=2), {}
    for step in range(shape.taps + 2):
        inputs = DELTA_STEP.inputs(shape, DEVICE, seed=3) | state
        inputs["qkv"] = inputs["qkv"] + step
        inputs["positions"] = torch.tensor([step], device=DEVICE)
        found = DELTA_STEP.run(shape, config, inputs)
        for ours, theirs in zip(found, model_result(shape, inputs, inputs["positions"]), strict=True):
            assert error(ours, theirs.view(ours.shape)) < STEP_ERROR
        state = {"ring": found[1], "memory": found[2]}


def test_nothing_left_over_is_read() -> None:
    """Old contents of scratch, output and the ring's slot for the new input aren't read, and arrivals are reset to zero."""
    shape = SHAPES[2]
    inputs = DELTA_STEP.inputs(shape, DEVICE, seed=2)
    inputs["ring"][1001 % shape.taps] = torch.nan
    wanted = DELTA_STEP.reference(shape, inputs)
    for config in (Config(block_v=64, warps=1), Config(block_v=16, warps=1)):
        outputs = DELTA_STEP.outputs(shape, inputs)
        outputs["output"].fill_(torch.nan), outputs["found"].fill_(1000)
        held = {**inputs, "ring": inputs["ring"].clone(), "memory": inputs["memory"].clone()}
        for launch in DELTA_STEP.launches(shape, config, held, outputs | {name: held[name] for name in ("ring", "memory")}):
            launch.run()
        assert error(outputs["output"], wanted[0]) < STEP_ERROR
        assert not outputs["arrivals"].any()


def test_gates_at_their_ends() -> None:
    """Decay 0, decay 1, no update, a zero key: the results are finite and equal the reference."""
    shape = DeltaStepShape(2, 4, 16, 16, dtype="float32")
    inputs = DELTA_STEP.inputs(shape, DEVICE, seed=4)
    inputs["a"] = torch.tensor([80.0, -80.0, 0.0, 30.0], device=DEVICE)
    inputs["b"] = torch.tensor([-100.0, 100.0, 0.0, 30.0], device=DEVICE)
    inputs["conv"][: shape.key_dim] = 0
    results = DELTA_STEP.run(shape, Config(block_v=16), inputs)
    for found, wanted in zip(results, DELTA_STEP.reference(shape, inputs), strict=True):
        assert error(found, wanted) < STEP_ERROR


def wrong(**changed: Tensor) -> str:
    shape = SHAPES[0]
    inputs = DELTA_STEP.inputs(shape, "meta") | changed
    with pytest.raises(ModelError) as caught:
        DELTA_STEP.launches(shape, Config(block_v=16), inputs, DELTA_STEP.outputs(shape, inputs))
    return str(caught.value)


def test_errors_name_the_tensor() -> None:
    assert "memory" in wrong(memory=torch.empty(4, 16, 16, dtype=torch.bfloat16, device="meta"))
    assert "conv" in wrong(conv=torch.empty(4, 96, device="meta").t()[:, :4])
    assert "ring" in wrong(ring=torch.empty(96, 4, device="meta").t())
    assert "positions" in wrong(positions=torch.empty(2, dtype=torch.int64, device="meta"))
    assert "on cpu" in wrong(z=torch.empty(64))
    for sizes in ((3, 4, 16, 16), (2, 4, 0, 16), (2, 4, 16, 512)):
        with pytest.raises(ModelError, match="delta net of"):
            DeltaStepShape(*sizes).check()
    with pytest.raises(ModelError, match="don't divide by 32"):
        DeltaStepShape(2, 4, 16, 16, quantised=True).check()


def test_costs_are_mostly_the_memory() -> None:
    shape = DELTA_STEP.known["qwen3.5-35b-a3b delta net"]
    memory = 2 * 4 * shape.value_heads * 128 * 128
    assert memory < DELTA_STEP.cost(shape).bytes < 1.15 * memory


CHUNK_SHAPES = [
    DeltaChunksShape(2, 4, 16, 16, dtype="float32", tokens=70),
    DeltaChunksShape(2, 4, 12, 20, taps=3, tiled=True, dtype="float32", tokens=2),
    DeltaChunksShape(1, 1, 16, 40, taps=2, dtype="float32", tokens=128),
    DeltaChunksShape(1, 2, 16, 16, tokens=1),
]


@pytest.mark.parametrize("shape", CHUNK_SHAPES, ids=lambda shape: shape.key)
def test_chunks(shape: DeltaChunksShape) -> None:
    """Whole and partial chunks, fewer tokens than convolution taps, one token; all with earlier state and inputs."""
    inputs = DELTA_CHUNKS.inputs(shape, DEVICE, seed=1)
    wanted = DELTA_CHUNKS.reference(shape, inputs)
    found = DELTA_CHUNKS.run(shape, DELTA_CHUNKS.space(shape)[0], inputs)
    assert error(found[0], wanted[0]) < (CHUNK_ERROR if shape.dtype == "float32" else BF16_ERROR)
    assert torch.equal(found[1], wanted[1])
    assert error(found[2], wanted[2]) < CHUNK_ERROR


def test_rows_may_lie_apart() -> None:
    """As parts of the one matrix product that makes them. The results are equal to the bit."""
    shape, names = CHUNK_SHAPES[0], ("qkv", "z", "b", "a")
    inputs = DELTA_CHUNKS.inputs(shape, DEVICE, seed=9)
    joined = torch.cat([inputs[name] for name in names], 1).split([inputs[name].shape[1] for name in names], 1)
    config = DELTA_CHUNKS.space(shape)[0]
    parts = inputs | dict(zip(names, joined, strict=True))
    assert not parts["z"].is_contiguous()
    for found, wanted in zip(DELTA_CHUNKS.run(shape, config, parts), DELTA_CHUNKS.run(shape, config, inputs), strict=True):
        assert torch.equal(found, wanted)
    with pytest.raises(ModelError, match="qkv"):
        DELTA_CHUNKS.run(shape, config, inputs | {"qkv": inputs["qkv"].t().contiguous().t()})


def test_chunks_are_the_models_and_go_on_where_a_step_ended() -> None:
    """Run a step at position 0, then chunks from position 1, while the other slots of the ring are still zero."""
    shape = DeltaChunksShape(1, 2, 16, 16, dtype="float32", tokens=66)
    step = DeltaStepShape(1, 2, 16, 16, dtype="float32")
    one = DELTA_STEP.inputs(step, DEVICE, seed=5) | {"positions": torch.tensor([0], device=DEVICE)}
    one["ring"].zero_(), one["memory"].zero_()
    _, ring, memory = DELTA_STEP.run(step, Config(block_v=16), one)
    inputs = DELTA_CHUNKS.inputs(shape, DEVICE, seed=6) | {"ring": ring, "memory": memory}
    inputs["positions"] = torch.arange(1, 67, device=DEVICE)
    found = DELTA_CHUNKS.run(shape, DELTA_CHUNKS.space(shape)[0], inputs)
    for ours, theirs in zip(found, model_result(shape, inputs, inputs["positions"]), strict=True):
        assert error(ours, theirs.view(ours.shape)) < CHUNK_ERROR


def test_chunks_of_equal_keys() -> None:
    """The worst-conditioned system: every token overwrites the previous one, without decay."""
    shape = DeltaChunksShape(1, 1, 16, 16, taps=1, dtype="float32", tokens=64)
    inputs = DELTA_CHUNKS.inputs(shape, DEVICE, seed=7)
    inputs["qkv"][:, :32] = 1
    inputs["a"].fill_(-100)
    inputs["b"].fill_(100)
    found = DELTA_CHUNKS.run(shape, DELTA_CHUNKS.space(shape)[0], inputs)
    for ours, wanted in zip(found, DELTA_CHUNKS.reference(shape, inputs), strict=True):
        assert error(ours, wanted) < CHUNK_ERROR


def test_chunks_read_nothing_left_over() -> None:
    shape = CHUNK_SHAPES[1]
    inputs = DELTA_CHUNKS.inputs(shape, DEVICE, seed=8)
    wanted = DELTA_CHUNKS.reference(shape, inputs)
    held = {**inputs, "ring": inputs["ring"].clone(), "memory": inputs["memory"].clone()}
    outputs = DELTA_CHUNKS.outputs(shape, held)
    for name in set(outputs) - {"ring", "memory"}:
        outputs[name].fill_(torch.nan)
    for launch in DELTA_CHUNKS.launches(shape, DELTA_CHUNKS.space(shape)[0], held, outputs):
        launch.run()
    assert error(outputs["output"], wanted[0]) < CHUNK_ERROR
