"""Compare gates on the output of attention with the reference."""

from __future__ import annotations

import pytest
import torch

from toolkit.core.errors import ModelError
from toolkit.kernels.base import Config
from toolkit.kernels.gate import GATE_HEADS, GateShape
from toolkit.weights.packed import quantize_activations

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOSE = {"bfloat16": {"rtol": 2**-6, "atol": 2**-6}, "float32": {"rtol": 1e-5, "atol": 1e-5}}  # a step of either rounding


@pytest.mark.parametrize(
    "shape",
    [
        GateShape(1, 2, 64, 320, quantised=True),
        GateShape(3, 3, 32, 200, quantised=True),  # not a power of two, and numbers after the gates
        GateShape(2, 3, 24, 144),  # 72 numbers: two groups and a part
        GateShape(2, 2, 16, 64, dtype="float32", quantised=True),
    ],
    ids=lambda shape: shape.key,
)
@pytest.mark.parametrize("config", [Config(groups=1, warps=1), Config(groups=4, warps=2)], ids=repr)
def test_as_the_reference(shape: GateShape, config: Config) -> None:
    """Codes, scales and sums are exact: those of the result itself."""
    inputs = GATE_HEADS.inputs(shape, DEVICE, seed=1)
    found, wanted = GATE_HEADS.run(shape, config, inputs), GATE_HEADS.reference(shape, inputs)
    assert len(found) == len(wanted) == GATE_HEADS.results(shape)
    torch.testing.assert_close(found[0], wanted[0], **CLOSE[shape.dtype])
    if shape.quantised:
        assert all(map(torch.equal, found[1:], quantize_activations(found[0])))


def test_what_is_not_a_number_shows() -> None:
    shape = GateShape(1, 1, 64, 128, quantised=True)
    inputs = GATE_HEADS.inputs(shape, DEVICE)
    inputs["row"][0, 64 + 40] = torch.nan
    out, _, scales, sums = GATE_HEADS.run(shape, Config(groups=2, warps=1), inputs)
    assert out.isnan().sum() == 1
    assert scales[0].isnan().tolist() == sums[0].isnan().tolist() == [False, True]


def test_errors_name_the_tensor_or_the_size() -> None:
    shape = GateShape(1, 2, 32, 128)
    inputs = GATE_HEADS.inputs(shape, "meta")
    config, outputs = GATE_HEADS.space(shape)[0], GATE_HEADS.outputs(shape, inputs)
    with pytest.raises(ModelError, match="row: shape"):
        GATE_HEADS.launches(shape, config, inputs | {"row": torch.empty(1, 64, device="meta")}, outputs)
    with pytest.raises(ModelError, match="no room"):
        GateShape(1, 2, 32, 127).check()
    with pytest.raises(ModelError, match="don't divide by 32"):
        GateShape(1, 1, 16, 32, quantised=True).check()
    with pytest.raises(ModelError, match="int8"):
        GateShape(1, 1, 32, 64, dtype="int8").check()
