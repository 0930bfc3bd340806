"""Tensors on "meta" describe kernels to the compiler of configs and to launch plans."""

from __future__ import annotations

import subprocess
import sys

import torch

from toolkit.kernels import draws

# Modules of PyTorch's compiler: importing them takes seconds.
SCRIPT = """
import sys
from toolkit.kernels.registry import kernels
for kernel in kernels().values():
    for shape in kernel.known.values():
        inputs = kernel.inputs(shape, "meta")
        kernel.launches(shape, kernel.space(shape)[0], inputs, kernel.outputs(shape, inputs))
print(*sorted({"torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules)))
"""


def test_describing_a_kernel_imports_no_compiler_of_pytorch() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_draws() -> None:
    drawn = draws.normal((1000, 10), torch.Generator().manual_seed(0), "cpu", torch.float64, spread=3.0, mean=5.0)
    assert drawn.dtype == torch.float64
    assert 2.9 < drawn.std() < 3.1
    assert 4.9 < drawn.mean() < 5.1
    assert draws.positions(3, 6, "cpu").tolist() == [3, 4, 5]
    for described in (draws.normal((2, 3), None, "meta", torch.float16), draws.positions(3, 6, "meta")):
        assert described.is_meta
    assert (described.shape, described.dtype) == ((3,), torch.int64)
