"""Check a config before it is timed: compare its results with the kernel's reference on random inputs.

Results and scratch are first filled with NaN (integers with a constant), so that elements that the kernel does not write, or
adds to, are noticed. Each config runs twice on the same buffers, so that scratch that is not reset, or an order of summation
that differs between runs, is noticed too. Runs on CUDA, and on the CPU with Triton's interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.core.units import plural
from toolkit.kernels.base import Config, Kernel, Shape, Tensors

EXACT = (torch.int32, torch.int64, torch.bool)  # indices, tokens and flags must be equal
POISON = 107  # for integers: neither 0 nor -1, which a kernel may write by mistake


@dataclass(frozen=True)
class Check:
    """The outcome of a comparison: why a config is wrong ("" if it is right), and the figures of its worst result."""

    cosine: float
    max_error: float  # largest difference, relative to the reference's largest value
    reason: str = ""

    @property
    def right(self) -> bool:
        return not self.reason


class Gate:
    """A problem with its inputs and reference results, with which the results of each config are compared."""

    def __init__(self, kernel: Kernel, shape: Shape, device: torch.device | str, seed: int) -> None:
        self.kernel, self.shape, self.seed = kernel, shape, seed
        self.inputs = kernel.inputs(shape, device, seed)
        self.wanted = kernel.reference(shape, self.inputs)

    def check(self, config: Config) -> Check:
        """Run `config` twice and compare its results. Exceptions of the launch are passed on."""
        inputs = {name: tensor.clone() for name, tensor in self.inputs.items()}
        outputs = self.kernel.outputs(self.shape, inputs)
        first = self._run(config, inputs, outputs, scratch=True)
        worst = self._compare(first)
        if not worst.right:
            return worst
        for name, tensor in inputs.items():
            tensor.copy_(self.inputs[name])
        second = self._run(config, inputs, outputs, scratch=False)
        if any(not _same(a, b) for a, b in zip(first, second, strict=True)):
            again = self._compare(second)
            reason = f"the second run is wrong: {again.reason}" if again.reason else "two runs differ in some bits"
            return Check(again.cosine, again.max_error, reason)
        return worst

    def _run(self, config: Config, inputs: Tensors, outputs: dict[str, Tensor], scratch: bool) -> list[Tensor]:
        """Return copies of the results of one run. `scratch` also poisons scratch; the second run gets the first one's."""
        results = self.kernel.results(self.shape)
        shared = {tensor.untyped_storage().data_ptr() for tensor in inputs.values() if tensor.numel()}
        for n, tensor in enumerate(outputs.values()):
            if tensor.numel() and tensor.untyped_storage().data_ptr() not in shared:  # not an input that is updated in place
                poison(tensor, whole=n < results, scratch=scratch)
        for launch in self.kernel.launches(self.shape, config, inputs, outputs):
            launch.run()
        return [tensor.clone() for tensor in list(outputs.values())[:results]]

    def _compare(self, found: Sequence[Tensor]) -> Check:
        if len(found) != len(self.wanted):
            returned = f"the reference returns {plural(len(self.wanted), 'result')}"
            return Check(0.0, 1.0, f"{plural(len(found), 'result')}, but {returned}")
        worst = Check(1.0, 0.0)
        for n, (result, wanted) in enumerate(zip(found, self.wanted, strict=True)):
            check = compare(result, wanted, self.kernel.cosine, self.kernel.max_abs)
            which = f"result {n}: " if len(self.wanted) > 1 and check.reason else ""
            reason = worst.reason or which + check.reason
            worst = Check(min(worst.cosine, check.cosine), max(worst.max_error, check.max_error), reason)
        return worst


def poison(tensor: Tensor, whole: bool, scratch: bool) -> None:
    """Overwrite a result (`whole`) or floating-point scratch. Integer scratch is kept: kernels count on from its value."""
    if tensor.dtype.is_floating_point and (whole or scratch):
        tensor.fill_(math.nan)
    elif whole:
        tensor.fill_(POISON if tensor.dtype != torch.bool else True)


def compare(result: Tensor, wanted: Tensor, cosine: float, max_abs: float) -> Check:
    """Compare `result` with `wanted`: shape and dtype first, then NaN, cosine and largest error."""
    if result.shape != wanted.shape or result.dtype != wanted.dtype:
        shapes = f"{tuple(result.shape)} {result.dtype}, the reference is {tuple(wanted.shape)} {wanted.dtype}"
        return Check(0.0, 1.0, f"the result is {shapes}".replace("torch.", ""))
    if not wanted.numel():
        return Check(1.0, 0.0)
    if wanted.dtype in EXACT:
        wrong = int((result != wanted).sum())
        reason = f"{wrong:,} of {wanted.numel():,} values differ" if wrong else ""
        return Check(1.0 - wrong / wanted.numel(), float(bool(wrong)), reason)
    a, b = result.double().flatten(), wanted.double().flatten()
    finite = torch.isfinite(b)
    if bool(b.isnan().all()):
        return Check(0.0, 1.0, "all values of the reference are NaN")
    if strays := int((~torch.isfinite(a) & finite).sum()):
        return Check(0.0, 1.0, f"{strays:,} of {b.numel():,} values are NaN or infinite")
    if not _same(a[~finite], b[~finite]):
        return Check(0.0, 1.0, "the result differs where the reference is NaN or infinite")
    a, b = a[finite], b[finite]
    found, error = cosine_of(a, b), float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) if b.numel() else 0.0
    reasons: list[str] = []
    if found < cosine:
        reasons.append(f"cosine {found:.4f} is below the required {cosine}")
    if error > max_abs:
        reasons.append(f"largest error is {error:.2g} of the largest value, above the allowed {max_abs:g}")
    return Check(found, error, "; ".join(reasons))


def cosine_of(a: Tensor, b: Tensor) -> float:
    """Return the cosine of the angle between two vectors; 1 if both are zero."""
    lengths = float(a.norm() * b.norm())
    return float(a @ b) / lengths if lengths else float(not bool(a.any()) and not bool(b.any()))


def _same(a: Tensor, b: Tensor) -> bool:
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(a[~nan], b[~nan])
