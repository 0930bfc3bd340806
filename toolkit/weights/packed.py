"""Packed matrices: the layout of quantized weights in memory, and the reference arithmetic on it in plain PyTorch.

A `PackedMatrix` holds a weight as a few plain tensors. Their layout is made for kernels that multiply four 8-bit integers at
once and load each packed byte a single time. The functions here pack and unpack codes, dequantize, and multiply; they give
the same bits on every device and are the reference for those kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.core.errors import ModelError
from toolkit.weights.schemes import Scheme

CHUNK_WEIGHTS = 1 << 26  # weights dequantized at a time: bounds the scratch memory of a product to about 0.5 GiB


class PackedMatrix(nn.Module):
    """A weight [..., out, in] held as `scheme` says: parameters "codes", "scales", ... (see `Scheme.parts`), no gradients.

    Layout of a row's codes, for 4 bits: byte b (0 to 3) of 32-bit word w holds weight 8w + b in its low nibble and
    8w + 4 + b in its high one, so that masking a word gives four neighbouring weights, one a byte. Bits above the fourth are
    in "high": field f of byte b of word w is of weight 16w + 4f + b (6-bit codes, fields of 2 bits) or 32w + 4f + b
    (5-bit codes, fields of 1 bit). 8-bit codes are plain int8.
    """

    def __init__(self, scheme: Scheme, shape: tuple[int, ...], device: torch.device | str = "meta") -> None:
        """Made without values on `device`. Raises ModelError where a row doesn't divide into the scheme's groups."""
        super().__init__()
        self.scheme, self.shape = scheme, tuple(shape)
        if len(shape) < 2 or shape[-1] % scheme.multiple:
            found = f"rows of {shape[-1]:,} don't divide by {scheme.multiple}"
            raise ModelError(f"{scheme.name} for a matrix {list(shape)}", found, "Choose a scheme with smaller groups")
        for name, (dtype, per) in scheme.parts().items():
            part = torch.empty(*shape[:-1], shape[-1] // per, dtype=dtype, device=device)
            setattr(self, name, nn.Parameter(part, requires_grad=False))

    def parts(self) -> dict[str, Tensor]:
        """The tensors that hold it, by name: [..., out, in / (weights an element)]."""
        return dict(self.named_parameters())

    @property
    def nbytes(self) -> int:
        """Bytes it is held in."""
        return sum(part.nbytes for part in self.parameters())

    def numel(self) -> int:
        """How many weights it holds."""
        return torch.Size(self.shape).numel()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Its values [..., out, in]: computed in fp32, rounded to `dtype`."""
        return dequantize(self.scheme, self.parts(), dtype)

    dequantise = dequantize  # the name until version 0.2

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """The values of rows `ids` (any shape, on the same device) of a matrix [out, in]: [*ids.shape, in]."""
        found = {name: F.embedding(ids, part) for name, part in self.parts().items()}
        return dequantize(self.scheme, found, dtype)

    def select(self, experts: Tensor | slice, dtype: torch.dtype) -> Tensor:
        """The values of some of the matrices of a stack [experts, out, in]: [n, out, in]."""
        parts = self.parts().items()
        found = {n: part[experts] if isinstance(experts, slice) else part.index_select(0, experts) for n, part in parts}
        return dequantize(self.scheme, found, dtype)

    def extra_repr(self) -> str:
        return f"{list(self.shape)}, {self.scheme.name}"


def dequantize(scheme: Scheme, parts: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of packed `parts` [..., out, in / (weights an element)] -> [..., out, in], in fp32, then `dtype`."""
    values = unpack_codes(scheme, parts).float()
    if scheme.centre:
        values.sub_(scheme.centre)
    grouped = values.view(*values.shape[:-1], -1, scheme.group)  # in place from here: one fp32 copy is all the scratch
    if scheme.offset == "zero":
        grouped.sub_(parts["zeros"].float()[..., None])
    grouped.mul_(_fine(parts["scales"], parts.get("scale_steps"))[..., None])
    if scheme.offset == "minimum":
        grouped.sub_(_fine(parts["minima"], parts.get("minimum_steps"))[..., None])
    return values.to(dtype)


def _fine(scales: Tensor, steps: Tensor | None) -> Tensor:
    """Scales or minima in fp32, multiplied by their steps where they have some."""
    if steps is None:
        return scales.float()
    return (steps.float()[..., None] * scales.float().unflatten(-1, (steps.shape[-1], -1))).flatten(-2)


def unpack_codes(scheme: Scheme, parts: dict[str, Tensor]) -> Tensor:
    """The codes [..., in] of a packed matrix, as uint8 (int8 for 8-bit schemes)."""
    packed = parts["codes"]
    if scheme.bits == 8:
        return packed
    words = packed.unflatten(-1, (-1, 1, 4))
    codes = torch.cat((words & 15, words >> 4), -2).flatten(-3)  # of its own: cat copies
    if "high" in parts:
        width = scheme.bits - 4
        high = parts["high"].unflatten(-1, (-1, 1, 4))
        shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)[:, None]
        fields = (high >> shifts).bitwise_and_((1 << width) - 1).bitwise_left_shift_(4)
        codes.bitwise_or_(fields.flatten(-3))
    return codes


def pack_codes(scheme: Scheme, codes: Tensor) -> dict[str, Tensor]:
    """ "codes" (and "high") of integer `codes` [..., in] in the range of the scheme; the inverse of `unpack_codes`."""
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


def packed_matmul(x: Tensor, scheme: Scheme, parts: dict[str, Tensor]) -> Tensor:
    """x [..., in] times a matrix [out, in] packed in `parts`, transposed: [..., out] in the dtype of `x`.

    The reference of kernels: dequantises a bounded number of rows at a time and multiplies.
    """
    out = parts["codes"].shape[0]
    step = max(1, CHUNK_WEIGHTS // x.shape[-1])
    if out <= step:
        return F.linear(x, dequantize(scheme, parts, x.dtype))
    chunks = [{name: part[i : i + step] for name, part in parts.items()} for i in range(0, out, step)]
    return torch.cat([F.linear(x, dequantize(scheme, chunk, x.dtype)) for chunk in chunks], -1)


def experts_matmul(x: Tensor, weight: Tensor | PackedMatrix, experts: Tensor | slice) -> Tensor:
    """x [n, T, in] times n matrices (`experts`: numbers on the device, or a slice) of a stack [E, out, in] -> [n, T, out].

    A bounded number of matrices is gathered, or dequantised, at a time.
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
    """Some matrices of a stack, plain: [n, out, in]."""
    if isinstance(weight, PackedMatrix):
        return weight.select(experts, dtype)
    return weight[experts] if isinstance(experts, slice) else weight.index_select(0, experts)
