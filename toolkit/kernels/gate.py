# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The output of attention times the sigmoid of its gate, in one launch, which on request also quantizes the product.

A few kilobytes at batch 1: the launch time bounds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.core.errors import ModelError
from toolkit.kernels import draws
from toolkit.kernels.base import DTYPES, Config, Cost, Kernel, Launch, Shape, Tensors, config_grid
from toolkit.kernels.checks import check_tensor
from toolkit.kernels.early import take_turn
from toolkit.kernels.packed import to_codes
from toolkit.weights.packed import quantize_activations

GROUP = 32  # activations that share a scale


@dataclass(frozen=True)
class GateShape(Shape):
    """The heads of `tokens` rows. A row of the projection has `width` numbers; each query head is followed by its gate.

    With `quantised`, the result is returned in 8 bits, too.
    """

    tokens: int
    heads: int
    head_dim: int
    width: int
    quantised: bool = False
    dtype: str = "bfloat16"

    @property
    def size(self) -> int:
        """Numbers in a row of the result."""
        return self.heads * self.head_dim

    def check(self) -> str:
        """Return the name of this shape in error messages. Raises ModelError for sizes that the kernel doesn't support."""
        asked = f"gates of {self.heads} heads of {self.head_dim} in rows of {self.width}"
        if self.dtype not in DTYPES:
            raise ModelError(asked, f"dtype {self.dtype!r}", f"Give one of {', '.join(DTYPES)}")
        if self.size < 1 or 2 * self.size > self.width:
            raise ModelError(asked, "a row has no room for them", "Give rows that begin with each head and its gate")
        if self.quantised and self.size % GROUP:
            raise ModelError(asked, f"{self.size} numbers don't divide by {GROUP}", "Leave out quantised=True")
        return asked


class GateHeads(Kernel):
    """x [T, heads * D] times the sigmoid of the gates in row [T, width].

    Results: out [T, heads * D], and if asked for, codes int8 [T, heads * D], scales and sums fp32 [T, heads * D / 32], where
    sums are scales times the sums of their codes. The sigmoid and the product are rounded to the dtype of x.
    """

    name: ClassVar[str] = "gate_heads"
    shape_type: ClassVar[type[Shape]] = GateShape
    lengths = ("tokens",)
    known: ClassVar[Mapping[str, Shape]] = {
        "qwen3.5-35b-a3b": GateShape(1, 16, 256, 9216, quantised=True),
        "qwen3.5-35b-a3b prompt of 2048": GateShape(2048, 16, 256, 9216),
    }

    def space(self, shape: Shape) -> Sequence[Config]:
        """Return configs: `groups` of 32 numbers per program."""
        return config_grid(Config(groups=16, warps=2), warps=(1, 2, 4), groups=(8, 16, 32))

    def inputs(self, shape: Shape, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
        assert isinstance(shape, GateShape)
        meta = torch.device(device).type == "meta"
        generator = None if meta else torch.Generator(device).manual_seed(seed)
        dtype, widths = DTYPES[shape.dtype], {"x": shape.size, "row": shape.width}
        return {name: draws.normal((shape.tokens, width), generator, device, dtype) for name, width in widths.items()}

    def reference(self, shape: Shape, inputs: Tensors) -> tuple[Tensor, ...]:
        assert isinstance(shape, GateShape)
        gate = inputs["row"][:, : 2 * shape.size].view(shape.tokens, shape.heads, 2, shape.head_dim)[:, :, 1]
        out = inputs["x"] * gate.sigmoid().flatten(1)
        return (out, *quantize_activations(out)) if shape.quantised else (out,)

    def outputs(self, shape: Shape, inputs: Tensors) -> dict[str, Tensor]:
        assert isinstance(shape, GateShape)
        x = inputs["x"]
        found = {"out": x.new_empty(x.shape)}
        if shape.quantised:
            groups = (shape.tokens, shape.size // GROUP)
            found["codes"] = torch.empty(x.shape, dtype=torch.int8, device=x.device)
            found["scales"] = torch.empty(groups, dtype=torch.float32, device=x.device)
            found["sums"] = torch.empty(groups, dtype=torch.float32, device=x.device)
        return found

    def results(self, shape: Shape) -> int:
        assert isinstance(shape, GateShape)
        return 1 + 3 * shape.quantised

    def launches(self, shape: Shape, config: Config, inputs: Tensors, outputs: Tensors) -> Sequence[Launch]:
        assert isinstance(shape, GateShape)
        asked, x, dtype = shape.check(), inputs["x"], DTYPES[shape.dtype]
        for name, width in (("x", shape.size), ("row", shape.width)):
            check_tensor(asked, name, inputs[name], (shape.tokens, width), dtype, x)
        arguments = {"x_ptr": x, "row_ptr": inputs["row"], "out_ptr": outputs["out"]}
        arguments |= {f"{name}_ptr": outputs.get(name, x) for name in ("codes", "scales", "sums")}
        constants = {
            "SIZE": shape.size, "D": shape.head_dim, "WIDTH": shape.width, "GROUPS": config["groups"],
            "QUANTISED": shape.quantised, "PTX": x.device.type != "cpu",
        }  # fmt: skip
        grid = (shape.tokens, triton.cdiv(shape.size, GROUP * config["groups"]))
        return [Launch(_gate, grid, arguments, constants, config.warps, config.stages, early=True)]

    def cost(self, shape: Shape) -> Cost:
        assert isinstance(shape, GateShape)
        size = 3 * DTYPES[shape.dtype].itemsize + shape.quantised * (1 + 8 / GROUP)
        return Cost(int(shape.tokens * shape.size * size), 6.0 * shape.tokens * shape.size)


@triton.jit
def _gate(
    x_ptr, row_ptr, out_ptr, codes_ptr, scales_ptr, sums_ptr, SIZE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    GROUPS: tl.constexpr, QUANTISED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """GROUPS groups of 32 numbers of one row per program."""
    take_turn()
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = at < SIZE
    gate = tl.load(row_ptr + token * WIDTH + (at // D * 2 + 1) * D + at % D, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + token * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    x = (x * tl.sigmoid(gate).to(DTYPE).to(tl.float32)).to(DTYPE)
    tl.store(out_ptr + token * SIZE + at, x, mask=inside)
    if QUANTISED:
        codes, scale, total = to_codes(x.to(tl.float32), PTX)
        there = group < SIZE // 32
        tl.store(codes_ptr + token * SIZE + at, codes, mask=inside)
        tl.store(scales_ptr + token * (SIZE // 32) + group, scale, mask=there)
        tl.store(sums_ptr + token * (SIZE // 32) + group, total * scale, mask=there)


GATE_HEADS = GateHeads()
"""The one instance."""
