"""Compare the sampling and embedding kernels with the decode sampler and with dequantized tables."""

from __future__ import annotations

import math

import pytest
import torch

from toolkit.core.errors import ModelError, ToolkitError
from toolkit.decode import sampling as sample
from toolkit.kernels.base import Config
from toolkit.kernels.noise import mixed_seed
from toolkit.kernels.sample_embed import SAMPLE_EMBED, SampleShape
from toolkit.models.layers import Embedding
from toolkit.weights.packed import PackedMatrix
from toolkit.weights.schemes import SCHEMES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Config(block=1024)


def run(shape: SampleShape, inputs: dict[str, torch.Tensor], config: Config = SMALL) -> tuple[torch.Tensor, ...]:
    """Launch with poisoned outputs and scratch; assert that the counter is unchanged afterwards."""
    outputs = SAMPLE_EMBED.outputs(shape, inputs)
    for name, tensor in outputs.items():
        if name not in inputs:
            tensor.fill_(torch.nan if tensor.is_floating_point() else -99)
    for launch in SAMPLE_EMBED.launches(shape, config, inputs, outputs):
        launch.run()
    assert inputs["counter"].item() == 0
    return tuple(outputs.values())[: SAMPLE_EMBED.results(shape)]


@pytest.mark.parametrize("table", ["float32", *SCHEMES])
def test_row_is_the_tables_own(table: str) -> None:
    """fp32 rows are bit-identical for every scheme of the table."""
    shape = SampleShape(2077, 256, table, dtype="float32", scale="1.7")
    inputs = SAMPLE_EMBED.inputs(shape, DEVICE)
    token, row = run(shape, inputs)
    assert token.item() == inputs["logits"].argmax().item()
    embedding = Embedding(*((1, 1) if shape.scheme else (2077, 256)), torch.float32, scale=1.7)
    if shape.scheme:
        del embedding.weight
        embedding.weight = PackedMatrix(shape.scheme, (2077, 256), DEVICE)
        for name in embedding.weight.parts():
            getattr(embedding.weight, name).data = inputs[name]
    else:
        embedding.weight.data = inputs["table"]
    assert torch.equal(row, embedding(token))
    assert torch.equal(row, SAMPLE_EMBED.reference(shape, inputs)[1])


def test_row_in_bfloat16_is_rounded_before_and_after_the_scale() -> None:
    shape = SampleShape(33, 64, "int8-g32", scale="73.5")
    inputs = SAMPLE_EMBED.inputs(shape, DEVICE)
    _, row = run(shape, inputs)
    # The interpreter truncates twice where a GPU rounds: allow two steps of bf16.
    torch.testing.assert_close(row, SAMPLE_EMBED.reference(shape, inputs)[1], rtol=2**-6, atol=0)


@pytest.mark.parametrize("logits", ["float32", "bfloat16"])
@pytest.mark.parametrize("block", [1024, 4096])
def test_greedy_ties_go_to_the_lowest_id(logits: str, block: int) -> None:
    shape = SampleShape(3001, 8, "float32", logits=logits, dtype="float32")
    inputs = SAMPLE_EMBED.inputs(shape, DEVICE)
    for tied in ([2999, 1500, 1501], [3000], [0, 3000], [1023, 1024]):
        inputs["logits"].fill_(-3.0)
        inputs["logits"][tied] = 5.0
        assert run(shape, inputs, Config(block=block))[0].item() == min(tied)


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda x: x.fill_(-math.inf), 0),
        (lambda x: x.fill_(0.0).index_fill_(0, torch.tensor([1200], device=x.device), -0.0), 0),
        (lambda x: x.index_fill_(0, torch.tensor([1100], device=x.device), math.inf), 1100),
        (lambda x: x.index_fill_(0, torch.tensor([1100], device=x.device), math.nan), 1100),
    ],
    ids=["all -inf", "zeros of both signs", "inf", "nan"],
)
def test_extreme_logits(make, wanted: int) -> None:  # type: ignore[no-untyped-def]
    shape = SampleShape(1300, 8, "float32", dtype="float32")
    inputs = SAMPLE_EMBED.inputs(shape, DEVICE)
    make(inputs["logits"])
    assert run(shape, inputs)[0].item() == wanted
    assert SAMPLE_EMBED.reference(shape, inputs)[0].item() == wanted


def test_a_cap_makes_ties_of_what_it_cannot_tell_apart() -> None:
    """Logits far above the cap become equal, as in the model, and the lowest index wins."""
    shape = SampleShape(1300, 8, "float32", dtype="float32", cap="30.0")
    inputs = SAMPLE_EMBED.inputs(shape, DEVICE)
    inputs["logits"][[40, 1200]] = torch.tensor([900.0, 1000.0], device=DEVICE)
    assert run(shape, inputs)[0].item() == 40
    inputs["logits"][[40, 1200]] = torch.tensor([90.0, 100.0], device=DEVICE)
    assert run(shape, inputs)[0].item() == 1200


@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("seed", [0, 12345, -1])
def test_draws_are_those_of_the_sampler(seed: int, temperature: float) -> None:
    """For the same seed and temperature, successive draws equal those of the sampler."""
    shape = SampleShape(1777, 8, "float32", draw=True, dtype="float32")
    inputs = SAMPLE_EMBED.inputs(shape, DEVICE)
    inputs["temperature"].fill_(temperature)
    inputs["key"].fill_(mixed_seed(seed))
    inputs["step"].zero_()
    sampler = sample.Sampler(sample.Sampling(temperature, seed=seed), shape.vocab, torch.device(DEVICE))
    out, drawn = torch.empty(1, dtype=torch.int64, device=DEVICE), []
    for step in range(6):
        wanted = sampler.choose(inputs["logits"], out).item()
        assert SAMPLE_EMBED.reference(shape, inputs)[0].item() == wanted
        token, row, counted = run(shape, inputs)
        assert token.item() == wanted
        assert torch.equal(row[0], inputs["table"][wanted])
        assert counted.item() == inputs["step"].item() == step + 1
        drawn.append(wanted)
    assert temperature < 1 or len(set(drawn)) > 1


def test_what_the_sampler_dropped_is_not_drawn() -> None:
    shape = SampleShape(1200, 8, "float32", draw=True, dtype="float32")
    inputs = SAMPLE_EMBED.inputs(shape, DEVICE)
    inputs["temperature"].fill_(50.0)
    kept = [3, 700, 1111]
    dropped = torch.ones(1200, dtype=torch.bool, device=DEVICE)
    dropped[kept] = False
    inputs["logits"][dropped] = -math.inf
    assert {run(shape, inputs)[0].item() for _ in range(12)} == set(kept)


def test_temperature_zero_is_greedy() -> None:
    shape = SampleShape(1200, 8, "float32", draw=True, dtype="float32")
    inputs = SAMPLE_EMBED.inputs(shape, DEVICE)
    inputs["temperature"].zero_()
    assert run(shape, inputs)[0].item() == inputs["logits"].argmax().item()
    assert SAMPLE_EMBED.reference(shape, inputs)[0].item() == inputs["logits"].argmax().item()


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("logits", lambda x: x[None], "shape"),
        ("logits", lambda x: x.double(), "float64 where float32"),
        ("table", lambda x: x.t().contiguous().t(), "not contiguous"),
        ("counter", lambda x: x.long(), "int64 where int32"),
        ("temperature", lambda x: x.float(), "float32 where float64"),
        ("step", lambda x: x.to("meta"), "on meta"),
    ],
)
def test_wrong_tensors_are_told_by_name(name: str, change, says: str) -> None:  # type: ignore[no-untyped-def]
    shape = SampleShape(64, 8, "float32", draw=True, dtype="float32")
    inputs = SAMPLE_EMBED.inputs(shape, DEVICE)
    outputs = SAMPLE_EMBED.outputs(shape, inputs)
    inputs[name] = change(inputs[name])
    with pytest.raises(ModelError, match=f"sample_embed, {name}.*{says}"):
        SAMPLE_EMBED.launches(shape, SMALL, inputs, outputs)


def test_too_little_scratch_is_told() -> None:
    shape = SampleShape(5000, 8, "float32", dtype="float32")
    inputs = SAMPLE_EMBED.inputs(shape, DEVICE)
    with pytest.raises(ModelError, match="scratch for 5 programs where 157 run"):
        SAMPLE_EMBED.run(shape, Config(block=32), inputs)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SampleShape(0, 8),
        lambda: SampleShape(9, 48, "q4_k"),
        lambda: SampleShape(9, 8, "float32"),
        lambda: SampleShape(9, 8, cap="0"),
        lambda: SampleShape(9, 8, logits="float64"),
        lambda: SampleShape(9, 8, "q3_k"),
    ],
)
def test_impossible_shapes_are_refused(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ToolkitError):
        make()


def test_known_shapes_launch_without_values() -> None:
    for shape in SAMPLE_EMBED.known.values():
        assert SampleShape.from_key(shape.key) == shape
        inputs = SAMPLE_EMBED.inputs(shape, "meta")
        outputs = SAMPLE_EMBED.outputs(shape, inputs)
        for config in SAMPLE_EMBED.space(shape):
            assert len(SAMPLE_EMBED.launches(shape, config, inputs, outputs)) == 1
        assert SAMPLE_EMBED.cost(shape).bytes > 0
