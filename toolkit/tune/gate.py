"""Is a config right? Its results against the reference, on random inputs that it hasn't seen, before anything is timed.

Results and scratch are poisoned first (NaN; a large number where there is no NaN), so that what a kernel leaves unwritten,
or adds to what it finds, shows. Each config runs twice on the same buffers: scratch that doesn't reset itself, or an order of
adding that differs between runs, shows as results that differ. Works wherever the kernel runs: on CUDA, or on the
CPU under Triton's interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.kernels.base import Config, Kernel, Shape, Tensors

EXACT = (torch.int32, torch.int64, torch.bool)  # indices, tokens and flags: a neighbour is as wrong as any other
POISON = 107  # where there is no NaN: no all-zeros or all-ones pattern that a kernel might leave by itself


@dataclass(frozen=True)
class Check:
    """What came of comparing: `reason` in words where it is wrong, "" where it is right; the figures of the worst result."""

    cosine: float
    max_error: float  # largest difference, relative to the reference's largest value
    reason: str = ""

    @property
    def right(self) -> bool:
        return not self.reason


class Gate:
    """A problem with its inputs and reference results, which each of its configs is held against."""

    def __init__(self, kernel: Kernel, shape: Shape, device: torch.device | str, seed: int) -> None:
        self.kernel, self.shape, self.seed = kernel, shape, seed
        self.inputs = kernel.inputs(shape, device, seed)
        self.wanted = kernel.reference(shape, self.inputs)

    def check(self, config: Config) -> Check:
        """Run `config` and compare. Raises what the launch raises."""
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
            reason = f"a second run differs: {again.reason}" if again.reason else "two runs differ in some bits"
            return Check(again.cosine, again.max_error, reason)
        return worst

    def _run(self, config: Config, inputs: Tensors, outputs: dict[str, Tensor], scratch: bool) -> list[Tensor]:
        """The results of one run, copied. `scratch`: poison that too; in a second run it stays as the first one left it."""
        results = self.kernel.results(self.shape)
        shared = {tensor.untyped_storage().data_ptr() for tensor in inputs.values() if tensor.numel()}
        for n, tensor in enumerate(outputs.values()):
            if tensor.numel() and tensor.untyped_storage().data_ptr() not in shared:  # an input written in place isn't ours
                poison(tensor, whole=n < results, scratch=scratch)
        for launch in self.kernel.launches(self.shape, config, inputs, outputs):
            launch.run()
        return [tensor.clone() for tensor in list(outputs.values())[:results]]

    def _compare(self, found: Sequence[Tensor]) -> Check:
        worst = Check(1.0, 0.0)
        for n, (result, wanted) in enumerate(zip(found, self.wanted, strict=True)):
            check = compare(result, wanted, self.kernel.cosine, self.kernel.max_abs)
            which = f"result {n}: " if len(self.wanted) > 1 and check.reason else ""
            reason = worst.reason or which + check.reason
            worst = Check(min(worst.cosine, check.cosine), max(worst.max_error, check.max_error), reason)
        return worst


def poison(tensor: Tensor, whole: bool, scratch: bool) -> None:
    """Overwrite a result (`whole`), or the floating-point part of scratch: integer scratch counts from what `outputs()` set."""
    if tensor.dtype.is_floating_point and (whole or scratch):
        tensor.fill_(math.nan)
    elif whole:
        tensor.fill_(POISON if tensor.dtype != torch.bool else True)


def compare(result: Tensor, wanted: Tensor, cosine: float, max_abs: float) -> Check:
    """How far `result` is from `wanted`: shape and dtype first, then NaN, cosine and largest error."""
    if result.shape != wanted.shape or result.dtype != wanted.dtype:
        said = f"{tuple(result.shape)} {result.dtype}, the reference {tuple(wanted.shape)} {wanted.dtype}"
        return Check(0.0, 1.0, f"gives {said}".replace("torch.", ""))
    if not wanted.numel():
        return Check(1.0, 0.0)
    if wanted.dtype in EXACT:
        wrong = int((result != wanted).sum())
        reason = f"{wrong:,} of {wanted.numel():,} values differ" if wrong else ""
        return Check(1.0 - wrong / wanted.numel(), float(bool(wrong)), reason)
    a, b = result.double().flatten(), wanted.double().flatten()
    finite = torch.isfinite(b)
    if strays := int((~torch.isfinite(a) & finite).sum()):
        return Check(0.0, 1.0, f"{strays:,} of {b.numel():,} values are NaN or infinite")
    if not torch.equal(a[~finite], b[~finite]) and not bool(torch.isnan(b[~finite]).any()):
        return Check(0.0, 1.0, "infinite values of the reference are missing")
    a, b = a[finite], b[finite]
    found, error = cosine_of(a, b), float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) if b.numel() else 0.0
    reasons: list[str] = []
    if found < cosine:
        reasons.append(f"cosine {found:.4f}, at least {cosine} is asked")
    if error > max_abs:
        reasons.append(f"largest error {error:.2g} of the largest value, at most {max_abs:g} is allowed")
    return Check(found, error, "; ".join(reasons))


def cosine_of(a: Tensor, b: Tensor) -> float:
    """The cosine of the angle between two vectors; 1 for two that are zero."""
    lengths = float(a.norm() * b.norm())
    return float(a @ b) / lengths if lengths else float(not bool(a.any()) and not bool(b.any()))


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num() if a.dtype.is_floating_point else a, b.nan_to_num() if b.dtype.is_floating_point else b)
