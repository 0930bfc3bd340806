"""Compare the choice of experts with PyTorch's."""

from __future__ import annotations

import pytest
import torch

from toolkit.core.errors import ModelError
from toolkit.kernels.base import Config
from toolkit.kernels.expert_choice import EXPERT_CHOICE, ChoiceShape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    "shape",
    [
        ChoiceShape(3, 256, 8, gated=True),
        ChoiceShape(5, 12, 3),  # not a power of two
        ChoiceShape(2, 7, 7, gated=True, over_all=True),  # all of them
        ChoiceShape(4, 40, 1, over_all=True, dtype="float32"),
        ChoiceShape(2, 33, 5, gated=True, dtype="float16"),
    ],
    ids=lambda shape: shape.key,
)
@pytest.mark.parametrize("config", EXPERT_CHOICE.space(ChoiceShape(1, 8, 2))[::2], ids=repr)
def test_as_the_reference(shape: ChoiceShape, config: Config) -> None:
    inputs = EXPERT_CHOICE.inputs(shape, DEVICE, seed=1)
    chosen, weights, *gate = EXPERT_CHOICE.run(shape, config, inputs)
    wanted = EXPERT_CHOICE.reference(shape, inputs)
    assert len(wanted) == EXPERT_CHOICE.results(shape) == 2 + len(gate)
    assert torch.equal(chosen, wanted[0])
    torch.testing.assert_close(weights, wanted[1], rtol=1e-5, atol=1e-6)
    if shape.gated:
        torch.testing.assert_close(gate[0], wanted[2])


def test_the_weights_are_a_softmax() -> None:
    """The reference of the kernel agrees with operations of PyTorch that compute nothing alike."""
    for over_all in (False, True):
        shape = ChoiceShape(6, 20, 4, over_all=over_all, dtype="float32")
        inputs = EXPERT_CHOICE.inputs(shape, "cpu", seed=2)
        chosen, weights = EXPERT_CHOICE.reference(shape, inputs)
        scores = inputs["scores"]
        highest, best = (scores.softmax(-1) if over_all else scores).topk(4, -1)
        assert torch.equal(chosen, best)
        torch.testing.assert_close(weights, highest if over_all else highest.softmax(-1))


def test_equal_scores_are_chosen_in_order() -> None:
    shape = ChoiceShape(2, 10, 4)
    scores = torch.tensor([[0, 1, 0, 1, 1, 0, 0, 0, 1, 1], [0.0, -0.0, 0.0, -0.0, -1, -1, -1, -1, -1, -1]])
    chosen, weights = EXPERT_CHOICE.run(shape, Config(warps=1), {"scores": scores.to(DEVICE, torch.bfloat16)})
    assert chosen.tolist() == [[1, 3, 4, 8], [0, 1, 2, 3]]  # -0 equals 0
    assert weights.tolist() == [[0.25] * 4] * 2


@pytest.mark.filterwarnings("ignore:invalid value")  # of NumPy, in Triton's interpreter
@pytest.mark.parametrize("over_all", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_a_number_shows(value: float, over_all: bool) -> None:
    """Numbers of experts stay valid, because products read the matrices of these experts."""
    shape = ChoiceShape(2, 9, 3, gated=True, over_all=over_all)
    inputs = EXPERT_CHOICE.inputs(shape, DEVICE)
    inputs["scores"][0] = value
    chosen, weights, gate = EXPERT_CHOICE.run(shape, Config(warps=1), inputs)
    assert 0 <= int(chosen.min()) <= int(chosen.max()) < 9
    assert weights[0].isnan().all()
    assert not weights[1].isnan().any()
    assert gate[0].isnan().item() == (value != torch.inf)


def test_errors_name_the_tensor_or_the_size() -> None:
    shape = ChoiceShape(2, 8, 2, gated=True)
    inputs = EXPERT_CHOICE.inputs(shape, "meta")
    config, outputs = EXPERT_CHOICE.space(shape)[0], EXPERT_CHOICE.outputs(shape, inputs)
    with pytest.raises(ModelError, match="scores: shape"):
        EXPERT_CHOICE.launches(shape, config, {"scores": torch.empty(2, 8, device="meta")}, outputs)
    for sizes in ((1, 8, 0), (1, 8, 9), (1, 5000, 2)):
        with pytest.raises(ModelError, match="top_k from 1 to experts, and experts up to"):
            ChoiceShape(*sizes).check()
    with pytest.raises(ModelError, match="int8"):
        ChoiceShape(1, 8, 2, dtype="int8").check()
