"""Tests of the correctness gate: missing outputs, accumulation into old outputs, large errors, nondeterminism."""

from __future__ import annotations

import pytest
import torch
from toy import ADDS, LEAVES_OUT, ODD, OVERSIZED, SMALL, TOY, ToyMatmul, toy_config

from toolkit.kernels.base import Config, Launch, Shape, Tensors
from toolkit.tune.gate import Gate, compare


@pytest.fixture(scope="module")
def gate() -> Gate:
    return Gate(TOY, ODD, "cuda" if torch.cuda.is_available() else "cpu", seed=7)


@pytest.mark.parametrize("config", [SMALL, toy_config(32, block_k=32), OVERSIZED], ids=repr)
def test_right_configs_pass(gate: Gate, config: Config) -> None:
    check = gate.check(config)
    assert check.right
    assert check.cosine > 0.9999
    assert check.max_error < 5e-3  # units in the last place of the largest value


def test_what_is_left_out_shows(gate: Gate) -> None:
    check = gate.check(toy_config(fault=LEAVES_OUT))
    assert check.reason == f"{ODD.n} of {ODD.m * ODD.n} values are NaN or infinite"  # type: ignore[attr-defined]


def test_what_is_added_to_what_was_there_shows(gate: Gate) -> None:
    assert "NaN" in gate.check(toy_config(fault=ADDS)).reason


class Faulty(ToyMatmul):
    """The toy kernel in plain PyTorch, with errors that only some launches show."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def outputs(self, shape: Shape, inputs: Tensors) -> dict[str, torch.Tensor]:
        made = super().outputs(shape, inputs)
        return {**made, "sum": made["out"].new_empty(made["out"].shape), "count": torch.zeros(1, dtype=torch.int32)}

    def launches(self, shape: Shape, config: Config, inputs: Tensors, outputs: Tensors) -> list[Launch]:
        class Function:
            def __getitem__(self, grid: object) -> object:
                return lambda **_: run(self_fault, inputs, outputs)

        self_fault = self.fault
        return [Launch(Function(), (1,), {})]


def run(fault: str, inputs: Tensors, outputs: Tensors) -> None:
    result = ((inputs["a"].float() @ inputs["b"].float()) * 0.5).half()
    if fault == "scaled":
        result *= 1.25
    if fault == "one off":
        result[3, 3] += 0.5 * result.abs().max()
    if fault == "never reset":
        result += outputs["count"].to(result.dtype)
        outputs["count"] += 1
    if fault == "reads scratch":
        result += outputs["sum"]
    if fault == "writes once":
        if outputs["count"]:
            return
        result.zero_()
        outputs["count"] += 1
    if fault == "writes its input":
        inputs["a"].zero_()
    if fault == "another order":
        result[0, 0] += 0.001 * result.abs().max() * outputs["count"].item()
        outputs["count"] += 1
    outputs["out"].copy_(result)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("none", ""),
        ("scaled", "largest error is 0.25 of the largest value, above the allowed 0.01"),  # its cosine is 1
        ("one off", "largest error is 0."),
        ("never reset", "the second run is wrong"),
        ("reads scratch", "NaN"),
        ("writes its input", ""),  # allowed: every run gets its own
        ("another order", "two runs differ in some bits"),
    ],
)
def test_faults_are_named(fault: str, said: str) -> None:
    check = Gate(Faulty(fault), ODD, "cpu", seed=3).check(SMALL)
    assert said in check.reason
    assert check.right == (said == "")


def test_a_second_run_that_writes_nothing_shows_beside_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyMatmul, "reference", lambda kernel, shape, inputs: (torch.zeros(ODD.m, ODD.n).half(),))  # type: ignore[attr-defined]
    assert (
        "the second run is wrong: 561 of 561 values are NaN" in Gate(Faulty("writes once"), ODD, "cpu", 3).check(SMALL).reason
    )


def test_a_kernel_whose_results_are_not_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Faulty, "results", lambda kernel, shape: 2, raising=False)
    assert Gate(Faulty("none"), ODD, "cpu", seed=3).check(SMALL).reason == "2 results, but the reference returns 1 result"


def test_comparing() -> None:
    x = torch.randn(100)
    assert compare(x, x, 0.999, 1e-2).right
    assert compare(x, x.double(), 0.999, 1e-2).reason == "the result is (100,) float32, the reference is (100,) float64"
    assert "cosine -1.0000 is below the required 0.999" in compare(-x, x, 0.999, 1e-2).reason
    noise = compare(x + 1e-3 * torch.randn(100), x, 0.999, 1e-2)
    assert noise.right
    assert 0 < noise.max_error < 5e-3
    assert compare(torch.zeros(0), torch.zeros(0), 0.999, 1e-2).right
    assert compare(torch.zeros(4), torch.zeros(4), 0.999, 1e-2).right
    assert not compare(torch.ones(4), torch.zeros(4), 0.999, 1e-2).right


def test_tokens_are_compared_exactly() -> None:
    wanted = torch.tensor([5, 262_143])
    assert compare(wanted, wanted, 0.999, 1e-2).right
    assert compare(torch.tensor([5, 262_142]), wanted, 0.999, 1e-2).reason == "1 of 2 values differ"


def test_infinite_values_of_the_reference_must_be_there() -> None:
    wanted = torch.tensor([1.0, float("-inf"), 2.0])
    assert compare(wanted.clone(), wanted, 0.999, 1e-2).right
    assert "infinite" in compare(torch.tensor([1.0, -1e30, 2.0]), wanted, 0.999, 1e-2).reason


def test_a_result_is_nan_where_the_reference_is() -> None:
    wanted = torch.tensor([1.0, torch.nan, 2.0, -torch.inf])
    assert compare(wanted.clone(), wanted, 0.99, 0.1).right
    found = compare(torch.tensor([1.0, 3.0, 2.0, -torch.inf]), wanted, 0.99, 0.1)
    assert found.reason == "the result differs where the reference is NaN or infinite"


def test_nothing_agrees_with_a_reference_that_is_nan() -> None:
    wanted = torch.full((3,), torch.nan)
    for result in (torch.ones(3), wanted):
        assert compare(result, wanted, 0.999, 1e-2).reason == "all values of the reference are NaN"
