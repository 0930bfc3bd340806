"""Tests of the row-sum kernel that measures bandwidth: interpreted, or compiled if there is a GPU."""

from __future__ import annotations

import pytest
import torch

from toolkit.kernels.read import READ, ReadShape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    "shape", [ReadShape(1, 1), ReadShape(3, 5001), ReadShape(2, 4096), ReadShape(0, 8)], ids=lambda s: s.key
)
def test_sums_of_rows_wrap_around_as_the_reference(shape):
    inputs = READ.inputs(shape, DEVICE, seed=1)
    for config in READ.space(shape)[:3]:
        assert torch.equal(READ.run(shape, config, inputs)[0], READ.reference(shape, inputs)[0])


def test_a_kernel_says_its_name():
    assert repr(READ) == "Kernel('read', 1 known shape)"
