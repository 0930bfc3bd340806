# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
"""Rows of an embedding table, plain or packed, times a scale: one launch for a token or for a prompt.

A program writes one block of one row. The launch itself bounds the kernel for a token, writing the rows bounds it for a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.core.errors import ModelError
from toolkit.kernels.base import DTYPES, Config, Cost, Kernel, Launch, Shape, Tensors, config_grid
from toolkit.kernels.checks import check_tensor
from toolkit.kernels.early import take_turn
from toolkit.kernels.exchange import send, sending, targets_of
from toolkit.kernels.packed import randomize, unpack_scales
from toolkit.weights.packed import dequantize
from toolkit.weights.schemes import SCHEMES, Scheme, find_scheme


@dataclass(frozen=True)
class EmbedShape(Shape):
    """`tokens` rows of a table [vocab, hidden], in `dtype`.

    `table` is the dtype of a plain table, which must be `dtype`, or the name of a scheme. `scale` multiplies the rows after
    they are rounded to `dtype`. It is text because a shape holds no floats.
    """

    tokens: int
    vocab: int
    hidden: int
    table: str = "bfloat16"
    scale: str = "1.0"
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        asked = f"rows of {self.hidden:,} in {self.dtype} from a table in {self.table}"
        if self.dtype not in DTYPES:
            raise ModelError(asked, f"dtype={self.dtype!r}", f"Give one of {', '.join(DTYPES)}")
        if self.table in DTYPES and self.table != self.dtype:
            raise ModelError(asked, "the dtypes differ", "Give both the same dtype")
        if self.table not in DTYPES and self.hidden % find_scheme(self.table).multiple:
            found = f"{self.hidden:,} doesn't divide by {find_scheme(self.table).multiple}"
            raise ModelError(asked, found, "Choose another scheme")

    @property
    def scheme(self) -> Scheme | None:
        """The scheme of a packed table; None for a plain one."""
        return SCHEMES.get(self.table)

    def parts(self) -> dict[str, tuple[tuple[int, int], torch.dtype]]:
        """Return the shape and dtype of each tensor that holds the table."""
        if self.scheme is None:
            return {"table": ((self.vocab, self.hidden), DTYPES[self.table])}
        return {name: ((self.vocab, self.hidden // per), dtype) for name, (dtype, per) in self.scheme.parts().items()}


class EmbedRows(Kernel):
    """Row ids[t] of a table, for every t.

    Inputs: ids int64 [tokens], and the table [vocab, hidden] or its parts (see `PackedMatrix`). Ids are those of its rows,
    which isn't checked. Result: out [tokens, hidden].

    If the table is a part of a longer one, the input "before" is an empty tensor [n, 0], where n rows come before the part. Ids
    are those of the longer table then, and the rows that the part doesn't hold are zeros. With inputs "targets" and "counts"
    (see `toolkit.kernels.exchange.Sent`), the result is sent to all ranks instead of written.

    Raises ModelError for tensors with another shape, dtype or device, or that are not contiguous and aligned.
    """

    name: ClassVar[str] = "embed_rows"
    shape_type: ClassVar[type[Shape]] = EmbedShape
    lengths = ("tokens", "vocab")
    known: ClassVar[Mapping[str, Shape]] = {
        "gemma4-31b": EmbedShape(1, 262144, 5376, "q6_k", scale="73.5"),
        "gemma4-31b, 512 tokens": EmbedShape(512, 262144, 5376, "q6_k", scale="73.5"),
        "qwen3-8b": EmbedShape(1, 151936, 4096, "q4_k"),
        "qwen3-8b, 512 tokens": EmbedShape(512, 151936, 4096, "q4_k"),
        "qwen3.5-35b-a3b": EmbedShape(1, 248320, 2048, "q4_k"),
    }

    def space(self, shape: Shape) -> Sequence[Config]:
        return config_grid(Config(block=256), warps=(2, 4, 8), block=(256, 512, 1024, 2048))

    def inputs(self, shape: Shape, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
        assert isinstance(shape, EmbedShape)
        device = torch.device(device)
        generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
        found = {"ids": torch.randint(0, shape.vocab, (shape.tokens,), generator=generator, device=device)}
        for name, (size, dtype) in shape.parts().items():
            found[name] = torch.empty(size, dtype=dtype, device=device)
            if shape.scheme is not None and generator is not None:
                randomize(found[name], name, shape.scheme, generator)
            elif generator is not None:
                found[name].normal_(generator=generator)
        return found

    def reference(self, shape: Shape, inputs: Tensors) -> tuple[Tensor, ...]:
        assert isinstance(shape, EmbedShape)
        own = inputs["ids"] - (len(inputs["before"]) if "before" in inputs else 0)
        held = own.clamp(0, shape.vocab - 1)
        parts = {name: inputs[name].index_select(0, held) for name in shape.parts()}
        rows = dequantize(shape.scheme, parts, DTYPES[shape.dtype]) if shape.scheme else parts["table"]
        rows = rows if float(shape.scale) == 1.0 else rows * float(shape.scale)
        return (rows.masked_fill((own != held)[:, None], 0),)

    def outputs(self, shape: Shape, inputs: Tensors) -> dict[str, Tensor]:
        assert isinstance(shape, EmbedShape)
        return {"out": torch.empty(shape.tokens, shape.hidden, dtype=DTYPES[shape.dtype], device=inputs["ids"].device)}

    def launches(self, shape: Shape, config: Config, inputs: Tensors, outputs: Tensors) -> Sequence[Launch]:
        assert isinstance(shape, EmbedShape)
        ids = inputs["ids"]
        check_tensor(self.name, "ids", ids, (shape.tokens,), torch.int64, ids, alignment=8)
        for name, (size, dtype) in shape.parts().items():
            check_tensor(self.name, name, inputs[name], size, dtype, ids)
        check_tensor(self.name, "out", outputs["out"], (shape.tokens, shape.hidden), DTYPES[shape.dtype], ids)
        arguments = {"ids_ptr": ids, "out_ptr": outputs["out"], **_pointers(shape, inputs), "scale": float(shape.scale)}
        to, ranks = sending(inputs)
        arguments |= {"first": len(inputs["before"]) if "before" in inputs else None, **to}  # type: ignore[dict-item]
        constants = {
            "HIDDEN": shape.hidden, "SCALED": float(shape.scale) != 1.0, "BLOCK": config["block"], **_constants(shape.scheme),
            "VOCAB": shape.vocab if "before" in inputs else 0, **ranks,
        }  # fmt: skip
        grid = (shape.tokens, triton.cdiv(shape.hidden, config["block"]))
        return [Launch(_embed_kernel, grid, arguments, constants, config.warps, config.stages, early=True)]

    def cost(self, shape: Shape) -> Cost:
        assert isinstance(shape, EmbedShape)
        out = DTYPES[shape.dtype].itemsize
        row = shape.hidden * (shape.scheme.bits_per_weight / 8 if shape.scheme else out)
        return Cost(shape.tokens * (math.ceil(row) + shape.hidden * out + 8), 4.0 * shape.tokens * shape.hidden)


_PARTS = ("codes", "high", "scales", "offsets", "steps")


def _pointers(shape: EmbedShape, inputs: Tensors) -> dict[str, Tensor]:
    """Return the tensors of the table by the kernel's argument; arguments that the scheme doesn't use get any tensor."""
    if shape.scheme is None:
        return {f"{name}_ptr": inputs["table"] for name in _PARTS}
    scales = inputs["scales"]
    found = {name: inputs.get(name, scales) for name in _PARTS}
    found["offsets"] = inputs.get("zeros", inputs.get("minima", scales))
    found["steps"] = inputs.get("scale_steps", scales)
    if shape.scheme.joint:
        found["scales"] = scales.view(torch.int64)
    return {f"{name}_ptr": tensor for name, tensor in found.items()}


def _constants(scheme: Scheme | None) -> dict[str, int | str]:
    if scheme is None:
        return {"BITS": 0, "GROUP": 1, "STEPS": 0, "OFFSET": "none", "CENTRE": 0}
    held: dict[str, int | str] = {"BITS": scheme.bits, "GROUP": scheme.group, "STEPS": scheme.steps}
    return held | {"OFFSET": scheme.offset, "CENTRE": scheme.centre}


@triton.jit
def _field(ptr, start, k, WIDTH: tl.constexpr):
    """Return the fields of WIDTH bits of weights k, from bytes beginning at `start` (layout: see `PackedMatrix`)."""
    PER: tl.constexpr = 32 // WIDTH
    byte = tl.load(ptr + start + k // PER * 4 + k % 4).to(tl.int32)
    return (byte >> (k % PER // 4 * WIDTH)) & ((1 << WIDTH) - 1)


@triton.jit
def _fine(ptr, steps_ptr, token, k, HIDDEN: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr):
    found = tl.load(ptr + token * (HIDDEN // GROUP) + k // GROUP).to(tl.float32)
    if STEPS:
        found *= tl.load(steps_ptr + token * (HIDDEN // STEPS) + k // STEPS).to(tl.float32)
    return found


@triton.jit
def _joint(ptr, token, k, HIDDEN: tl.constexpr):
    """Return scales and minima in fp32 from the two numbers of eight groups (see `weights.packed.pack_scales`)."""
    words = ptr + token * (HIDDEN // 128) + k // 256 * 2
    scale, minimum, step, minimum_step = unpack_scales(tl.load(words), tl.load(words + 1), k // 32)
    return scale.to(tl.float32) * step, minimum.to(tl.float32) * minimum_step


@triton.jit
def _weights(
    codes_ptr, high_ptr, scales_ptr, offsets_ptr, steps_ptr, token, k,
    HIDDEN: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, OFFSET: tl.constexpr,
    CENTRE: tl.constexpr,
):  # fmt: skip
    """Return the fp32 values at columns `k` of row `token`, rounded where `packed.dequantize` rounds; plain if BITS is 0."""
    if BITS == 0:
        return tl.load(codes_ptr + token * HIDDEN + k).to(tl.float32)
    if BITS == 8:
        values = tl.load(codes_ptr + token * HIDDEN + k).to(tl.float32)
    else:
        codes = _field(codes_ptr, token * (HIDDEN // 2), k, 4)
        if BITS > 4:
            codes |= _field(high_ptr, token * (HIDDEN * (BITS - 4) // 8), k, BITS - 4) << 4
        values = (codes - CENTRE).to(tl.float32)
    if OFFSET == "zero":
        values -= _fine(offsets_ptr, offsets_ptr, token, k, HIDDEN, GROUP, 0)
    if STEPS and OFFSET == "minimum":
        scales, minima = _joint(scales_ptr, token, k, HIDDEN)
    else:
        scales = _fine(scales_ptr, steps_ptr, token, k, HIDDEN, GROUP, STEPS)
        minima = _fine(offsets_ptr, offsets_ptr, token, k, HIDDEN, GROUP, 0) if OFFSET == "minimum" else scales
    if OFFSET != "minimum":
        return values * scales
    product = (values.to(tl.float64) * scales.to(tl.float64)).to(tl.float32)  # prevents a fusion with the subtraction
    return product - minima


@triton.jit(do_not_specialize_on_alignment=["ids_ptr"])  # a part of a longer tensor: it may begin anywhere
def _embed_kernel(
    ids_ptr, out_ptr, codes_ptr, high_ptr, scales_ptr, offsets_ptr, steps_ptr, scale, first,
    targets_ptr, counts_ptr,
    HIDDEN: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    STEPS: tl.constexpr, OFFSET: tl.constexpr, CENTRE: tl.constexpr, VOCAB: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one row per program. If VOCAB is not 0, the table holds only so many rows, from `first` on."""
    take_turn()
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row * HIDDEN + k
    targets = ()
    if RANKS > 1:
        targets = targets_of(targets_ptr, counts_ptr, at, out_ptr.dtype.element_ty, RANKS)
    token = tl.load(ids_ptr + row)
    held = token
    if VOCAB > 0:
        token -= first
        held = tl.minimum(tl.maximum(token, 0), VOCAB - 1)
    values = _weights(
        codes_ptr, high_ptr, scales_ptr, offsets_ptr, steps_ptr, held,
        tl.minimum(k, HIDDEN - 1), HIDDEN, BITS, GROUP, STEPS, OFFSET, CENTRE,
    ).to(out_ptr.dtype.element_ty)  # fmt: skip
    if SCALED:
        values = (values.to(tl.float32) * scale).to(out_ptr.dtype.element_ty)
    if VOCAB > 0:
        values = tl.where(token == held, values, 0.0).to(out_ptr.dtype.element_ty)
    if RANKS > 1:
        send(values, targets, k < HIDDEN)
    else:
        tl.store(out_ptr + at, values, mask=k < HIDDEN)


EMBED_ROWS = EmbedRows()
