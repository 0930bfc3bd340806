"""How weights are held in fewer bits: schemes as data, the packed layout, and the arithmetic that gives values back.

A packed matrix is a few plain tensors. Their layout is made for kernels that multiply four 8-bit integers at once and
load each packed byte a single time; what is here is its reference in plain PyTorch, the same on every device. It knows
no file and no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.core.errors import ModelError, unknown_name

CHUNK_WEIGHTS = 1 << 26  # dequantised at a time: bounds the scratch of a product to about 0.5 GiB


@dataclass(frozen=True)
class Scheme:
    """How a weight is stored: integer codes along each row, in groups that share a scale.

    `offset` says what makes codes signed: "centre" (value = (code - centre) * scale, the centre a constant of the scheme),
    "zero" (value = (code - zero) * scale, one fp16 zero a group), "minimum" (value = code * scale - minimum).
    `steps`: how many weights share an fp16 step of which scales and minima are 8-bit multiples (the K formats of GGUF);
    0 where scales and minima are fp16 themselves.
    """

    name: str
    bits: int  # of a code: 4, 5, 6 or 8
    group: int  # weights of a row that share a scale
    offset: str = "zero"
    steps: int = 0

    @property
    def centre(self) -> int:
        """What a code of 0 stands below; 8-bit codes are signed themselves."""
        return 1 << (self.bits - 1) if self.offset == "centre" and self.bits < 8 else 0

    @property
    def multiple(self) -> int:
        """A row must be a whole number of this many weights."""
        return max(self.group, self.steps, {4: 8, 5: 32, 6: 16, 8: 1}[self.bits])

    @property
    def bits_per_weight(self) -> float:
        """Stored bits a weight, scales and offsets included."""
        return sum(8.0 * dtype.itemsize / per for dtype, per in self.parts().values())

    def parts(self) -> dict[str, tuple[torch.dtype, int]]:
        """The tensors that hold a matrix: name -> (dtype, how many weights of a row share an element)."""
        fine = torch.int8 if self.steps else torch.float16
        found = {"codes": (torch.int8, 1) if self.bits == 8 else (torch.uint8, 2)}
        if self.bits in (5, 6):
            found["high"] = (torch.uint8, 8 // (self.bits - 4))
        found["scales"] = (fine, self.group)
        if self.offset == "zero":
            found["zeros"] = (torch.float16, self.group)
        if self.offset == "minimum":
            found["minima"] = (fine, self.group)
        if self.steps:
            found["scale_steps"] = (torch.float16, self.steps)
            if self.offset == "minimum":
                found["minimum_steps"] = (torch.float16, self.steps)
        return found


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("int4-g32", 4, 32),
        Scheme("int4-g64", 4, 64),
        Scheme("int4-g128", 4, 128),
        Scheme("int8-g32", 8, 32, "centre"),
        Scheme("int8-g128", 8, 128, "centre"),
        Scheme("q4_0", 4, 32, "centre"),
        Scheme("q4_1", 4, 32, "minimum"),
        Scheme("q5_0", 5, 32, "centre"),
        Scheme("q5_1", 5, 32, "minimum"),
        Scheme("q4_k", 4, 32, "minimum", steps=256),
        Scheme("q5_k", 5, 32, "minimum", steps=256),
        Scheme("q6_k", 6, 16, "centre", steps=256),
    )
}


def find_scheme(name: str | Scheme) -> Scheme:
    """The scheme called `name`; UnknownNameError, naming the nearest, where there is none."""
    if isinstance(name, Scheme):
        return name
    if name not in SCHEMES:
        raise unknown_name("scheme", name, SCHEMES)
    return SCHEMES[name]


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

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Its values [..., out, in]: computed in fp32, rounded to `dtype`."""
        return dequantise(self.scheme, self.parts(), dtype)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """The values of rows `ids` (any shape, on the same device) of a matrix [out, in]: [*ids.shape, in]."""
        found = {name: F.embedding(ids, part) for name, part in self.parts().items()}
        return dequantise(self.scheme, found, dtype)

    def select(self, experts: Tensor | slice, dtype: torch.dtype) -> Tensor:
        """The values of some of the matrices of a stack [experts, out, in]: [n, out, in]."""
        parts = self.parts().items()
        found = {n: part[experts] if isinstance(experts, slice) else part.index_select(0, experts) for n, part in parts}
        return dequantise(self.scheme, found, dtype)

    def extra_repr(self) -> str:
        return f"{list(self.shape)}, {self.scheme.name}"


def dequantise(scheme: Scheme, parts: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
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
        return F.linear(x, dequantise(scheme, parts, x.dtype))
    chunks = [{name: part[i : i + step] for name, part in parts.items()} for i in range(0, out, step)]
    return torch.cat([F.linear(x, dequantise(scheme, chunk, x.dtype)) for chunk in chunks], -1)


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
