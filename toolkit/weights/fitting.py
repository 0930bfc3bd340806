"""Quantize plain weights into packed ones: choose scales and offsets by min-max or by half-quadratic splitting (HQQ).

Rows are independent: they are quantized in chunks of bounded size, in fp32, on the device that holds them. The result is
deterministic: the same rows always give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from toolkit.core.errors import ModelError
from toolkit.weights.packed import pack_codes, pack_scales
from toolkit.weights.schemes import Scheme

CHUNK_WEIGHTS = 1 << 24  # weights per chunk; each needs about 24 bytes of scratch memory
LARGEST = 65504.0  # largest weight accepted: the maximum of fp16
_TINY = 2.0**-25  # half the smallest subnormal number of fp16
_NARROWER = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7)  # factors of the min-max scale that K formats try
# HQQ as published: p of the norm, weight of the quadratic term, growth of that weight per iteration, iterations
_NORM, _BETA, _GROWTH, _ITERATIONS = 0.7, 10.0, 1.01, 20

Fit = Callable[[Tensor, Scheme], tuple[Tensor, Tensor]]


def quantize_minmax(values: Tensor, scheme: Scheme, name: str = "weights") -> dict[str, Tensor]:
    """Quantize `values` [..., out, in] (any float dtype) with scales that cover each group's minimum and maximum.

    Return the parts of `scheme` by name. K formats also try narrower scales and keep the one with the least squared error
    in each group. Groups of zeros, and of values too small for fp16 scales (6e-8), become zeros. Raises ModelError, naming
    `name`, for NaN, infinity or values beyond 65,504, and for rows that don't divide into the scheme's groups.
    """
    return _in_chunks(values, scheme, name, _fit_least_squares if scheme.steps else _fit_minmax)


def quantize_hqq(values: Tensor, scheme: Scheme, name: str = "weights") -> dict[str, Tensor]:
    """Quantize like `quantize_minmax`, then refine the offsets (or scales without offsets) by half-quadratic splitting.

    Follows Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models" (Mobius Labs, 2023,
    mobiusml.github.io/hqq_blog): |error|^0.7 is split into a sparse and a quadratic term, solved alternately. Each group
    keeps the iterate with the least squared error, the min-max fit included, so the SNR never falls below that of the
    min-max fit. (K formats round the scales of a whole block after that choice, which may cost some of the gain.)
    """
    return _in_chunks(values, scheme, name, _fit_hqq)


def _in_chunks(values: Tensor, scheme: Scheme, name: str, fit: Fit) -> dict[str, Tensor]:
    size_in = values.shape[-1]
    if size_in % scheme.multiple:
        found = f"the row length {size_in:,} isn't a multiple of {scheme.multiple}"
        raise ModelError(f"{scheme.name} for {name}", found, "Choose a scheme with smaller groups")
    rows = values.detach().flatten(0, -2)
    parts = {
        part: torch.empty(len(rows), size_in // per, dtype=dtype, device=values.device)
        for part, (dtype, per) in scheme.parts().items()
    }
    step = max(1, CHUNK_WEIGHTS // size_in)
    bad = torch.zeros((), dtype=torch.bool, device=values.device)
    for start in range(0, len(rows), step):
        grouped = rows[start : start + step].float().unflatten(-1, (-1, scheme.group))  # [rows, groups, group]
        largest = grouped.abs().amax()
        bad |= (largest > LARGEST) | largest.isnan()
        fine, scale, offset = _settle(scheme, *fit(grouped, scheme))
        codes = _codes(grouped, scale, offset, scheme)
        stored = codes.flatten(-2).to(torch.uint8) if scheme.bits < 8 else (codes.flatten(-2) - 128).to(torch.int8)
        for part, tensor in (pack_codes(scheme, stored) | fine).items():
            parts[part][start : start + step] = tensor
    if bad:
        found = "the values include NaN, infinity or magnitudes beyond 65,504"
        raise ModelError(f"{scheme.name} for {name}", found, "Leave this matrix unquantized, or fix the checkpoint", name=name)
    return {part: tensor.view(*values.shape[:-1], -1) for part, tensor in parts.items()}


def _levels(scheme: Scheme) -> int:
    return (1 << scheme.bits) - 1


def _centre(scheme: Scheme) -> int:
    """Return the code that stands for zero, among the codes 0 to 2^bits - 1 (unlike `Scheme.centre`, for 8 bits too)."""
    return 1 << (scheme.bits - 1)


def _codes(grouped: Tensor, scale: Tensor, offset: Tensor, scheme: Scheme) -> Tensor:
    """Return the nearest codes as floats, where value = code * scale - offset; `scale` and `offset` are [rows, groups]."""
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
    lowest = 1.0 if scheme.bits == 8 else 0.0  # int8 is symmetric: -127 to 127
    codes = torch.add(grouped, offset[..., None]).mul_(inverse[..., None]).round_().clamp_(lowest, _levels(scheme))
    return codes.nan_to_num_(_centre(scheme))


def _fit_minmax(grouped: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Return scales and offsets [rows, groups] that cover the minimum and maximum of each group."""
    low, high = grouped.amin(-1), grouped.amax(-1)
    if scheme.offset == "centre":
        # Below 8 bits the codes reach one step further down than up: give the lowest code to the larger extreme.
        largest = torch.maximum(high, -low) if scheme.bits == 8 else torch.where(high > -low, high, low)
        scale = largest / (127 if scheme.bits == 8 else -_centre(scheme))
        return scale, scale * _centre(scheme)
    if scheme.steps:
        low, high = low.clamp_max(0), high.clamp_min(0)  # minima of K formats are not negative
    # In a group far from zero, a scale finer than the offset's fp16 precision would gain nothing.
    scale = torch.maximum((high - low) / _levels(scheme), torch.maximum(high.abs(), low.abs()) / 2048)
    return scale, -low


def _settle(scheme: Scheme, scale: Tensor, offset: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Round scales and offsets to their stored form. Return the stored parts, then both as fp32 values."""
    if scheme.steps:
        return _settle_steps(scheme, scale, offset)
    # Round subnormal fp16 scales away from zero, so that the codes still cover every weight.
    scales = torch.where(scale.abs() < 2.0**-14, scale + torch.sign(scale) * _TINY, scale).half()
    fine, scale = {"scales": scales}, scales.float()
    if scheme.offset == "centre":
        return fine, scale, scale * _centre(scheme)
    if scheme.offset == "minimum":
        fine["minima"] = offset.half()
        return fine, scale, fine["minima"].float()
    fine["zeros"] = torch.where(scale == 0, 0.0, offset / scale).half()
    return fine, scale, fine["zeros"].float() * scale


def _settle_steps(scheme: Scheme, scale: Tensor, offset: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Do the same for K formats, which store small integers times an fp16 step shared by a block of groups."""

    def coarse(values: Tensor, largest: int) -> tuple[Tensor, Tensor, Tensor]:
        blocks = values.unflatten(-1, (-1, scheme.steps // scheme.group))
        steps = (blocks.abs().amax(-1) / largest + _TINY).half()
        fine = torch.where(steps == 0, 0.0, 1.0 / steps.float())[..., None] * blocks
        fine = fine.round_().clamp_(0 if scheme.joint else -largest, largest)
        return steps, fine.flatten(-2).to(torch.int8), (steps.float()[..., None] * fine).flatten(-2)

    if scheme.offset == "centre":
        steps, scales, scale = coarse(scale, 127)
        return {"scales": scales, "scale_steps": steps}, scale, scale * _centre(scheme)
    steps, scales, scale = coarse(scale, 63)
    minimum_steps, minima, offset = coarse(offset, 63)
    return {"scales": pack_scales(scales, minima, steps, minimum_steps)}, scale, offset


def _fit_least_squares(grouped: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Try the factors in `_NARROWER`, refit scale and offset to the resulting codes, and keep the best in each group."""
    start = _fit_minmax(grouped, scheme)
    best = _Best(grouped, scheme, *start)
    for narrower in _NARROWER:
        codes = _codes(grouped, start[0] * narrower, start[1] * narrower, scheme)
        best.offer(*_regress(grouped, codes, scheme))
    return best.scale, best.offset


def _regress(grouped: Tensor, codes: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Return the scale and offset with the least squared error for the given codes."""
    if scheme.offset == "centre":
        codes = codes - _centre(scheme)
        scale = (codes * grouped).sum(-1) / codes.square().sum(-1)
        return scale, scale * _centre(scheme)
    size = grouped.shape[-1]
    sum_c, sum_v = codes.sum(-1), grouped.sum(-1)
    sum_cc, sum_cv = codes.square().sum(-1), (codes * grouped).sum(-1)
    scale = (size * sum_cv - sum_c * sum_v) / (size * sum_cc - sum_c.square())
    offset = (scale * sum_c - sum_v) / size
    whole = (offset >= 0) & (scale > 0) | (scheme.steps == 0)
    return torch.where(whole, scale, sum_cv / sum_cc), torch.where(whole, offset, 0.0)


class _Best:
    """Keeps, for each group, the scale and offset with the least squared error so far."""

    def __init__(self, grouped: Tensor, scheme: Scheme, scale: Tensor, offset: Tensor) -> None:
        self.grouped, self.scheme = grouped, scheme
        self.scale, self.offset = scale, offset
        self.error = self._error(scale, offset)

    def offer(self, scale: Tensor, offset: Tensor) -> None:
        error = self._error(scale, offset)
        better = error < self.error  # False where the error is NaN
        if self.scheme.joint:
            better &= (scale >= 0) & (offset >= 0)  # stored without a sign
        self.scale, self.offset = torch.where(better, scale, self.scale), torch.where(better, offset, self.offset)
        self.error = torch.where(better, error, self.error)

    def _error(self, scale: Tensor, offset: Tensor) -> Tensor:
        """Return the squared error [rows, groups] after rounding for storage (K formats round later, by block)."""
        if not self.scheme.steps:
            _, scale, offset = _settle(self.scheme, scale, offset)
        codes = _codes(self.grouped, scale, offset, self.scheme)
        return codes.mul_(scale[..., None]).sub_(offset[..., None]).sub_(self.grouped).square_().sum(-1)


def _fit_hqq(grouped: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Refine the min-max fit by half-quadratic splitting, in units of each group's scale to be independent of it."""
    scale, offset = _fit_minmax(grouped, scheme) if not scheme.steps else _fit_least_squares(grouped, scheme)
    best, beta = _Best(grouped, scheme, scale, offset), _BETA
    for _ in range(_ITERATIONS):
        codes = _codes(grouped, scale, offset, scheme)
        error = codes.mul(scale[..., None]).sub_(offset[..., None]).neg_().add_(grouped)
        unit = scale.abs()[..., None]
        shrunk = (error.abs() / unit).pow_(_NORM - 1).div_(beta).mul_(unit).neg_().add_(error.abs()).relu_()
        rest = shrunk.mul_(error.sign_()).neg_().add_(grouped)  # target of the quadratic term
        if scheme.offset == "centre":
            signed = codes.sub_(_centre(scheme))
            scale = signed.mul(rest).sum(-1) / signed.square_().sum(-1)
            offset = scale * _centre(scheme)
        else:
            offset = (codes.mul_(scale[..., None]) - rest).mean(-1)
        best.offer(scale, offset)
        beta *= _GROWTH
    return best.scale, best.offset
