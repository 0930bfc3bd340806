"""Quantization schemes: how many bits a code has, how many weights share a scale, and what makes codes signed.

`SCHEMES` lists them by name and `find_scheme` looks one up. The memory layout of a matrix that is held in a scheme is in
`toolkit.weights.packed`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from toolkit.core.errors import unknown_name


@dataclass(frozen=True)
class Scheme:
    """How a weight is quantized: integer codes along each row, in groups that share a scale.

    `offset` says how codes become signed values: "centre" (value = (code - centre) * scale, with a constant centre),
    "zero" (value = (code - zero) * scale, one fp16 zero per group), "minimum" (value = code * scale - minimum).
    `steps`: in the K formats of GGUF, the number of weights that share an fp16 step; scales and minima are integer
    multiples of it, of 6 bits if there are minima, otherwise of 8 bits. 0 if scales and minima are fp16.
    """

    name: str
    bits: int  # of a code: 4, 5, 6 or 8
    group: int  # weights of a row that share a scale
    offset: str = "zero"
    steps: int = 0

    @property
    def centre(self) -> int:
        """The code that stands for zero; 0 for 8-bit codes, which are signed."""
        return 1 << (self.bits - 1) if self.offset == "centre" and self.bits < 8 else 0

    @property
    def multiple(self) -> int:
        """The number of weights of a row must be a multiple of this."""
        return max(self.group, self.steps, {4: 8, 5: 32, 6: 16, 8: 1}[self.bits])

    @property
    def joint(self) -> bool:
        """Whether the part "scales" also holds the minima and the steps of both (see `PackedMatrix`)."""
        return self.steps > 0 and self.offset == "minimum"

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight, including scales and offsets."""
        return sum(8.0 * dtype.itemsize / per for dtype, per in self.parts().values())

    def parts(self) -> dict[str, tuple[torch.dtype, int]]:
        """Return the tensors that hold a matrix: name -> (dtype, number of weights of a row per element)."""
        found = {"codes": (torch.int8, 1) if self.bits == 8 else (torch.uint8, 2)}
        if self.bits in (5, 6):
            found["high"] = (torch.uint8, 8 // (self.bits - 4))
        if self.joint:
            return found | {"scales": (torch.int16, self.steps // 8)}
        found["scales"] = (torch.int8 if self.steps else torch.float16, self.group)
        if self.offset == "zero":
            found["zeros"] = (torch.float16, self.group)
        if self.offset == "minimum":
            found["minima"] = (torch.float16, self.group)
        if self.steps:
            found["scale_steps"] = (torch.float16, self.steps)
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
    """Return the scheme called `name`. Raises UnknownNameError, which suggests the nearest name, if there is none."""
    if isinstance(name, Scheme):
        return name
    if name not in SCHEMES:
        raise unknown_name("scheme", name, SCHEMES)
    return SCHEMES[name]
