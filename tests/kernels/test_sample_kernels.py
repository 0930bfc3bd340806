"""Compare the sampling kernels with their reference in plain PyTorch, for every combination of options."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from toolkit.core.errors import ModelError
from toolkit.kernels.base import Config
from toolkit.kernels.filters import MOST_TOKENS, NO_TOKEN, NUMBERS, WHOLE, WORK, numbers_of, weights_of
from toolkit.kernels.noise import mixed_seed
from toolkit.kernels.sample import SAMPLE, SampleShape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Config(block=1024)
KEPT_IN_WORK = slice(2, 6)  # limits and targets, which are written before they are read


def run(shape: SampleShape, inputs: dict[str, torch.Tensor], config: Config = SMALL) -> tuple[torch.Tensor, ...]:
    """Launch with poisoned outputs, scratch and limits; assert that the rest of `work` is zero again afterwards."""
    outputs = SAMPLE.outputs(shape, inputs)
    for name, tensor in outputs.items():
        if name not in inputs:
            tensor.fill_(torch.nan if tensor.is_floating_point() else -99)
    inputs["work"][KEPT_IN_WORK] = -99
    for launch in SAMPLE.launches(shape, config, inputs, outputs):
        launch.run()
    work = inputs["work"].clone()
    work[KEPT_IN_WORK] = 0
    assert not work.any()
    return tuple(outputs.values())[: SAMPLE.results(shape)]


def set_numbers(inputs: dict[str, torch.Tensor], *values: float) -> None:
    inputs["numbers"].copy_(torch.tensor(numbers_of(*values), dtype=torch.float64))


FLAGS = [flags for flags in itertools.product((False, True), repeat=6) if flags[0] or not any(flags[3:])]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "".join("-x"[flag] for flag in flags))
def test_every_combination_equals_the_reference(flags: tuple[bool, ...]) -> None:
    """Results are equal for successive tokens, each of which changes the state, and the seen tokens if there is a penalty."""
    shape = SampleShape(2077, *flags)
    inputs = SAMPLE.inputs(shape, DEVICE, seed=5)
    drawn = []
    for step in range(4):
        wanted = SAMPLE.reference(shape, inputs)
        found = run(shape, inputs)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), step
        assert found[1].data_ptr() == inputs["state"].data_ptr()
        drawn.append(found[0].item())
    assert inputs["state"][1].item() == 7 + 4
    if shape.penalty:
        assert inputs["seen"][drawn].all()


@pytest.mark.parametrize("kind", ["spread", "ties", "both signs of zero", "one token", "flat"])
@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (7, 1.0), (0, 1e-9), (0, 0.5), (0, 1 - 1e-12), (300, 0.9)], ids=str)
def test_filters_drop_the_same_tokens(kind: str, top_k: int, top_p: float) -> None:
    """At a high temperature, noise decides, so that many draws reach every token that is kept."""
    shape = SampleShape(1500, draw=True, top_k=top_k > 0, top_p=top_p < 1)
    inputs = SAMPLE.inputs(shape, DEVICE, seed=len(kind))
    logits = inputs["logits"]
    if kind == "ties":
        logits.copy_(logits.round())
    elif kind == "both signs of zero":
        logits.copy_(torch.where(logits > 0, 0.0, -0.0))
    elif kind == "one token":
        logits.fill_(-math.inf)[1100] = 2.0
    elif kind == "flat":
        logits.fill_(-3.0)
    for temperature in (0.7, 30.0):
        set_numbers(inputs, temperature, 1.0, top_k, top_p)
        for _ in range(4):
            wanted = SAMPLE.reference(shape, inputs)[0]
            assert torch.equal(run(shape, inputs)[0], wanted)


@pytest.mark.parametrize("logits", ["float32", "bfloat16"])
@pytest.mark.parametrize("block", [1024, 4096])
def test_greedy_ties_go_to_the_lowest_id(logits: str, block: int) -> None:
    shape = SampleShape(3001, logits=logits)
    inputs = SAMPLE.inputs(shape, DEVICE)
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
    shape = SampleShape(1300)
    inputs = SAMPLE.inputs(shape, DEVICE)
    make(inputs["logits"])
    assert run(shape, inputs)[0].item() == wanted
    assert SAMPLE.reference(shape, inputs)[0].item() == wanted
    assert (run(shape, inputs)[-1].item() == NO_TOKEN) is (wanted != 0 or bool(inputs["logits"].isinf().all()))
    for shape in (SampleShape(1300, draw=True), SampleShape(1300, draw=True, top_k=True, top_p=True, min_p=True)):
        drawn, *_, told = SAMPLE.reference(shape, inputs)
        found = run(shape, inputs)
        assert torch.equal(found[0], drawn)
        assert torch.equal(found[-1], told)
        assert wanted == 0 or drawn.item() == wanted


def test_excluded_tokens_are_not_drawn() -> None:
    shape = SampleShape(1200, draw=True, bias=True)
    inputs = SAMPLE.inputs(shape, DEVICE)
    set_numbers(inputs, 50.0)
    kept = [3, 700, 1111]
    inputs["logits"][5] = math.inf
    inputs["bias"].fill_(-math.inf)
    inputs["bias"][kept] = 0.0
    assert {run(shape, inputs)[0].item() for _ in range(12)} == set(kept)


def test_draws_are_a_function_of_seed_and_step() -> None:
    shape = SampleShape(1777, draw=True)
    inputs = SAMPLE.inputs(shape, DEVICE)
    set_numbers(inputs, 2.0)
    drawn = {}
    for seed in (0, 12345, -1):
        inputs["state"].copy_(torch.tensor((mixed_seed(seed), 0)))
        drawn[seed] = [run(shape, inputs)[0].item() for _ in range(5)]
    inputs["state"].copy_(torch.tensor((mixed_seed(12345), 3)))
    assert run(shape, inputs)[0].item() == drawn[12345][3]
    assert len({tuple(tokens) for tokens in drawn.values()}) == 3


def test_weights_are_exponentials() -> None:
    """Weights are accurate to 26 bits of their value or to the last digit, and the highest logit has the weight 2^40."""
    values = torch.cat((torch.linspace(0, -30, 100_001), torch.tensor((-200.0, -1e30, -math.inf)))) + 3.0
    temperature = 0.9
    rate = torch.tensor(numbers_of(temperature), dtype=torch.float64)[NUMBERS.index("rate")]
    found = weights_of(values, values[:1], rate).double()
    wanted = 2.0**WHOLE * ((values.double() - values[0].double()) / temperature).exp()
    assert found[0] == 2.0**WHOLE
    assert ((found - wanted).abs() <= wanted * 2.0**-26 + 1).all()
    assert (found.diff() <= 0).all()


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("logits", lambda x: x[None], "shape"),
        ("logits", lambda x: x.double(), "float64 where float32"),
        ("logits", lambda x: torch.stack((x, x), 1)[:, 0], "not contiguous"),
        ("work", lambda x: x[:8], "shape"),
        ("numbers", lambda x: x.float(), "float32 where float64"),
        ("seen", lambda x: x.byte(), "uint8 where bool"),
        ("bias", lambda x: x.half(), "float16 where float32"),
        ("state", lambda x: x.to("meta"), "on meta"),
    ],
)
def test_wrong_tensors_are_told_by_name(name: str, change, says: str) -> None:  # type: ignore[no-untyped-def]
    shape = SampleShape(64, draw=True, penalty=True, bias=True)
    inputs = SAMPLE.inputs(shape, DEVICE)
    inputs[name] = change(inputs[name])
    with pytest.raises(ModelError, match=f"sample, {name}.*{says}"):
        SAMPLE.launches(shape, SMALL, inputs, SAMPLE.outputs(shape, inputs))


def test_too_little_scratch_is_told() -> None:
    shape = SampleShape(5000)
    inputs = SAMPLE.inputs(shape, DEVICE)
    with pytest.raises(ModelError, match="scratch for 5 programs where 157 run"):
        SAMPLE.run(shape, Config(block=32), inputs)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SampleShape(0),
        lambda: SampleShape(MOST_TOKENS + 1),
        lambda: SampleShape(9, logits="float64"),
        lambda: SampleShape(9, top_p=True),
    ],
)
def test_impossible_shapes_are_refused(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ModelError):
        make()


def launch_count(shape: SampleShape) -> int:
    expected = 1 + 3 * shape.top_k + 3 * shape.top_p
    return expected + ((shape.top_p or shape.min_p) and not shape.top_k)


def test_known_shapes_launch_without_values() -> None:
    for shape in SAMPLE.known.values():
        assert SampleShape.from_key(shape.key) == shape
        inputs = SAMPLE.inputs(shape, "meta")
        outputs = SAMPLE.outputs(shape, inputs)
        for config in SAMPLE.space(shape):
            assert len(SAMPLE.launches(shape, config, inputs, outputs)) == launch_count(shape)
        assert SAMPLE.cost(shape).bytes > 0
        assert inputs["work"].shape == (WORK,)


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "".join("-x"[flag] for flag in flags))
def test_number_of_launches(flags: tuple[bool, ...]) -> None:
    """Greedy sampling and a plain draw take one launch, also with a penalty and a bias."""
    shape = SampleShape(100, *flags)
    inputs = SAMPLE.inputs(shape, "meta")
    assert len(SAMPLE.launches(shape, SMALL, inputs, SAMPLE.outputs(shape, inputs))) == launch_count(shape)
    assert any(flags[3:]) or launch_count(shape) == 1
