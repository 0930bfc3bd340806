"""Packed matrices: the layout of quantized weights in memory, and the reference arithmetic on it in plain PyTorch.

A `PackedMatrix` holds a weight as a few plain tensors. Their layout is made for kernels that multiply four 8-bit integers at
once and load each packed byte a single time. The functions here pack and unpack codes, dequantize, and multiply; they give
the same bits on every device and are the reference for those kernels.
"""

from __future__ import annotations

from operator import is_
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.core.errors import ModelError
from toolkit.weights.schemes import Scheme

ACTIVATIONS_PER_SCALE = 32  # when the input of a product is quantized
CHUNK_WEIGHTS = 1 << 26  # weights dequantized at a time: bounds the scratch memory of a product to about 0.5 GiB


class Parts(list[Tensor]):
    """The tensors of a packed matrix, in order."""

    known: tuple[list[int], int] | None = None  # what `toolkit.ops.plans` knows: the pointers, and a number for the rest


class PackedMatrix(nn.Module):
    """A quantized weight [..., out, in]: parameters "codes", "scales", ... (see `Scheme.parts`) without gradients.

    Layout of a row's codes, for 4 bits: byte b (0 to 3) of 32-bit word w holds weight 8w + b in its low nibble and
    8w + 4 + b in its high one, so that masking a word gives four neighboring weights, one per byte. Bits above the fourth
    are in "high": field f of byte b of word w belongs to weight 16w + 4f + b (6-bit codes, fields of 2 bits) or 32w + 4f + b
    (5-bit codes, fields of 1 bit). 8-bit codes are plain int8.

    Scales and minima of 6 bits are stored together (`pack_scales`), so that a kernel loads those of 256 weights at once, in
    the 4.5 or 5.5 bits per weight that they take in a GGUF file.
    """

    _operand: Parts | None = None

    def __init__(self, scheme: Scheme, shape: tuple[int, ...], device: torch.device | str = "meta") -> None:
        """Allocate the parts on `device`, uninitialized. Raises ModelError if a row does not divide into groups."""
        super().__init__()
        self.scheme, self.shape = scheme, tuple(shape)
        if len(shape) < 2 or shape[-1] % scheme.multiple:
            found = f"rows of {shape[-1]:,} don't divide by {scheme.multiple}"
            raise ModelError(f"{scheme.name} for a matrix {list(shape)}", found, "Choose a scheme with smaller groups")
        for name, (dtype, per) in scheme.parts().items():
            part = torch.empty(*shape[:-1], shape[-1] // per, dtype=dtype, device=device)
            setattr(self, name, nn.Parameter(part, requires_grad=False))

    def parts(self) -> dict[str, Tensor]:
        """Return the tensors of the matrix by name: [..., out, in / (weights per element)]."""
        return {name: part for name, part in self._parameters.items() if part is not None}

    def operand(self) -> Parts:
        """Return the tensors of the matrix as operations take them: the same list until one of them is replaced."""
        held, now = self._operand, self._parameters.values()
        if held is None or len(held) != len(now) or not all(map(is_, held, now)):
            self._operand = held = Parts(self.parts().values())
        return held

    def _apply(self, *args: Any, **kwargs: Any) -> PackedMatrix:
        super()._apply(*args, **kwargs)  # may change tensors in place
        self._operand = None
        return self

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        self._operand = None  # frees the memory of a part that is replaced
        super().register_parameter(name, param)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_operand"}

    @property
    def nbytes(self) -> int:
        """Size of all parts in bytes."""
        return sum(part.nbytes for part in self.parameters())

    def numel(self) -> int:
        """Return the number of weights."""
        return torch.Size(self.shape).numel()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values [..., out, in], computed in fp32 and rounded to `dtype`."""
        return dequantize(self.scheme, self.parts(), dtype)

    dequantise = dequantize  # the name until version 0.2

    def select(self, experts: Tensor | slice, dtype: torch.dtype) -> Tensor:
        """Return the values of the chosen matrices of a stack [experts, out, in]: [n, out, in]."""
        parts = self.parts().items()
        found = {n: part[experts] if isinstance(experts, slice) else part.index_select(0, experts) for n, part in parts}
        return dequantize(self.scheme, found, dtype)

    def extra_repr(self) -> str:
        return f"{list(self.shape)}, {self.scheme.name}"


def dequantize(scheme: Scheme, parts: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values [..., out, in] of packed `parts` [..., out, in / (weights per element)] as `dtype`."""
    values = unpack_codes(scheme, parts).float()
    if scheme.centre:
        values.sub_(scheme.centre)
    grouped = values.view(*values.shape[:-1], -1, scheme.group)  # in place from here, so that scratch is one fp32 copy
    if scheme.offset == "zero":
        grouped.sub_(parts["zeros"].float()[..., None])
    scales, minima = unpack_scales(parts["scales"]) if scheme.joint else (_scales(parts), parts.get("minima"))
    grouped.mul_(scales[..., None])
    if minima is not None:
        grouped.sub_(minima.float()[..., None])
    return values.to(dtype)


def _scales(parts: dict[str, Tensor]) -> Tensor:
    """Return the scales in fp32, multiplied by their steps if there are steps."""
    scales, steps = parts["scales"].float(), parts.get("scale_steps")
    return scales if steps is None else (steps.float()[..., None] * scales.unflatten(-1, (steps.shape[-1], -1))).flatten(-2)


def pack_scales(scales: Tensor, minima: Tensor, scale_steps: Tensor, minimum_steps: Tensor) -> Tensor:
    """Return the part "scales" int16 [..., 8 n], given scales and minima [..., 8 n] from 0 to 63 and fp16 steps [..., n].

    Eight groups, 256 weights, take 128 bits, the lowest first: the step of the scales, that of the minima, eight scales of 6
    bits, eight minima of 6 bits.
    """
    steps = torch.stack((scale_steps, minimum_steps), -1).view(torch.int32)[..., 0].long() & 0xFFFFFFFF
    shifts = torch.arange(0, 48, 6, device=scales.device)
    scale, minimum = ((values.long().unflatten(-1, (-1, 8)) << shifts).sum(-1) for values in (scales, minima))  # 48 bits each
    return torch.stack((steps | (scale << 32), (scale >> 32) | (minimum << 16)), -1).view(torch.int16).flatten(-2)


def unpack_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and minima [..., 8 n] in fp32, multiplied by their steps, of the part "scales" [..., 8 n]."""
    low, high = packed.view(torch.int64).unflatten(-1, (-1, 2)).split(1, -1)  # [..., n, 1]
    steps = low.contiguous().view(torch.float16)[..., :2].float()
    shifts = torch.arange(0, 48, 6, device=packed.device)
    scale = ((((low >> 32) & 0xFFFFFFFF) | (high << 32)) >> shifts) & 63
    minimum = (high >> (shifts + 16)) & 63
    return (steps[..., :1] * scale.float()).flatten(-2), (steps[..., 1:] * minimum.float()).flatten(-2)


def unpack_codes(scheme: Scheme, parts: dict[str, Tensor]) -> Tensor:
    """Return the codes [..., in] of a packed matrix as uint8 (int8 for 8-bit schemes)."""
    packed = parts["codes"]
    if scheme.bits == 8:
        return packed
    words = packed.unflatten(-1, (-1, 1, 4))
    codes = torch.cat((words & 15, words >> 4), -2).flatten(-3)  # a new tensor, since cat copies
    if "high" in parts:
        width = scheme.bits - 4
        high = parts["high"].unflatten(-1, (-1, 1, 4))
        shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)[:, None]
        fields = (high >> shifts).bitwise_and_((1 << width) - 1).bitwise_left_shift_(4)
        codes.bitwise_or_(fields.flatten(-3))
    return codes


def pack_codes(scheme: Scheme, codes: Tensor) -> dict[str, Tensor]:
    """Return the parts "codes" and "high" of integer `codes` [..., in] in the range of the scheme: inverts `unpack_codes`."""
    if scheme.bits == 8:
        return {"codes": codes.to(torch.int8)}
    codes = codes.to(torch.uint8)
    low = (codes & 15).unflatten(-1, (-1, 2, 4))
    found = {"codes": (low[..., 0, :] | (low[..., 1, :] << 4)).flatten(-2)}
    if scheme.bits > 4:
        width = scheme.bits - 4
        fields = (codes >> 4).unflatten(-1, (-1, 8 // width, 4))
        high = fields[..., 0, :]
        for f in range(1, 8 // width):
            high = high | (fields[..., f, :] << (f * width))
        found["high"] = high.flatten(-2)
    return found


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [..., k] in 8 bits, one scale per 32 numbers, as the kernels quantize the input of a product.

    These are int8 codes [..., k], fp32 scales [..., k / 32], and in the same shape the sums of the codes times their scale.
    """
    groups = x.float().unflatten(-1, (-1, ACTIVATIONS_PER_SCALE))
    top = groups.abs().amax(-1)
    inverse = torch.full_like(top, 127) / top.clamp_min(1e-30)  # not `127 / top`, which PyTorch computes as a reciprocal * 127
    inverse = inverse.where(top > 1e-30, 0.0)
    codes = (groups.double() * inverse.double()[..., None]).round()
    scales = top / 127
    return codes.to(torch.int8).flatten(-2), scales, codes.float().sum(-1) * scales


def empty_quantized(x: Tensor) -> list[Tensor]:
    """Return tensors like the results of `quantize_activations(x)`, uninitialized."""
    groups = (*x.shape[:-1], x.shape[-1] // ACTIVATIONS_PER_SCALE)
    return [torch.empty_like(x, dtype=torch.int8), *(x.new_empty(groups, dtype=torch.float32) for _ in range(2))]


def packed_matmul(x: Tensor, scheme: Scheme, parts: dict[str, Tensor]) -> Tensor:
    """Return x [..., in] times the transpose of a packed matrix [out, in]: [..., out] in the dtype of `x`.

    This is the reference for the kernels. It dequantizes a bounded number of rows at a time.
    """
    out = parts["codes"].shape[0]
    step = max(1, CHUNK_WEIGHTS // x.shape[-1])
    if out <= step:
        return F.linear(x, dequantize(scheme, parts, x.dtype))
    chunks = [{name: part[i : i + step] for name, part in parts.items()} for i in range(0, out, step)]
    return torch.cat([F.linear(x, dequantize(scheme, chunk, x.dtype)) for chunk in chunks], -1)


def experts_matmul(x: Tensor, weight: Tensor | PackedMatrix, experts: Tensor | slice) -> Tensor:
    """Return x [n, T, in] times the transposes of n matrices of a stack [E, out, in]: [n, T, out].

    `experts` chooses them: indices on the device, or a slice. A bounded number of matrices is dequantized at a time.
    """
    if isinstance(weight, Tensor) and isinstance(experts, slice):
        return torch.bmm(x, weight[experts].transpose(1, 2))
    step = max(1, CHUNK_WEIGHTS // (weight.shape[-2] * weight.shape[-1]))
    if x.shape[0] <= step:
        return torch.bmm(x, _some(weight, experts, x.dtype).transpose(1, 2))
    numbers = experts if isinstance(experts, Tensor) else range(*experts.indices(weight.shape[0]))
    runs = [numbers[i : i + step] for i in range(0, x.shape[0], step)]
    chosen = [slice(run.start, run.stop) if isinstance(run, range) else run for run in runs]
    each = [torch.bmm(x[i * step : (i + 1) * step], _some(weight, c, x.dtype).transpose(1, 2)) for i, c in enumerate(chosen)]
    return torch.cat(each)


def _some(weight: Tensor | PackedMatrix, experts: Tensor | slice, dtype: torch.dtype) -> Tensor:
    """Return the values of the chosen matrices of a stack: [n, out, in]."""
    if isinstance(weight, PackedMatrix):
        return weight.select(experts, dtype)
    return weight[experts] if isinstance(experts, slice) else weight.index_select(0, experts)
