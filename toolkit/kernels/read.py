# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
"""Sums of long rows: a kernel that only reads, so its rate is an upper bound for every other kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.kernels.base import Config, Cost, Kernel, Launch, Shape, Tensors, config_grid


@dataclass(frozen=True)
class ReadShape(Shape):
    """int32 [rows, columns]."""

    rows: int
    columns: int


class Read(Kernel):
    """The sum of each row of "x" (int32 [rows, columns], wrapping around): out int32 [rows]."""

    name: ClassVar[str] = "read"
    shape_type: ClassVar[type[Shape]] = ReadShape
    lengths = ("rows",)
    known: ClassVar[Mapping[str, Shape]] = {"1 GiB": ReadShape(4096, 65536)}

    def space(self, shape: Shape) -> Sequence[Config]:
        return config_grid(Config(block=4096, warps=8), warps=(4, 8, 16), block=(2048, 4096, 8192))

    def inputs(self, shape: Shape, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
        assert isinstance(shape, ReadShape)
        x = torch.empty(shape.rows, shape.columns, dtype=torch.int32, device=device)
        return {"x": x if x.is_meta else x.random_(generator=torch.Generator(x.device).manual_seed(seed))}

    def reference(self, shape: Shape, inputs: Tensors) -> tuple[Tensor, ...]:
        return (inputs["x"].sum(1, dtype=torch.int64).to(torch.int32),)

    def outputs(self, shape: Shape, inputs: Tensors) -> dict[str, Tensor]:
        return {"out": inputs["x"].new_empty(len(inputs["x"]))}

    def launches(self, shape: Shape, config: Config, inputs: Tensors, outputs: Tensors) -> Sequence[Launch]:
        assert isinstance(shape, ReadShape)
        arguments = {"x_ptr": inputs["x"], "out_ptr": outputs["out"]}
        constants = {"COLUMNS": shape.columns, "BLOCK": config["block"]}
        return [Launch(_read, (shape.rows,), arguments, constants, config.warps, config.stages)]

    def cost(self, shape: Shape) -> Cost:
        assert isinstance(shape, ReadShape)
        return Cost(4 * shape.rows * (shape.columns + 1), float(shape.rows * shape.columns))


@triton.jit
def _read(x_ptr, out_ptr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, COLUMNS, BLOCK):
        column = first + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row * COLUMNS + column, mask=column < COLUMNS, other=0)
    tl.store(out_ptr + row, tl.sum(total))


READ = Read()
