# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
"""From logits to the next token to its embedding row in one launch, so that decode steps follow each other on the device.

Sampling is greedy (the lowest id among equals), or takes the highest logit / temperature + Gumbel noise (Maddison et al., arXiv
1411.0030); the noise is a function of seed, step and token id. The draws equal those of `toolkit.decode.sampling`, which also
computes in fp64. Every program finds the best token of its part of the vocabulary. The last program to finish, according to a
counter that it resets, finds the best of those, increments the step and dequantizes the row. The launch and one pass over the
logits bound the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.core.errors import ModelError
from toolkit.kernels import noise
from toolkit.kernels.base import Config, Cost, Kernel, Launch, Shape, Tensors, config_grid
from toolkit.kernels.checks import check_tensor
from toolkit.kernels.early import take_turn
from toolkit.weights.packed import dequantize
from toolkit.weights.schemes import SCHEMES, Scheme, find_scheme

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
INDEX, STEP = tl.constexpr(noise.INDEX), tl.constexpr(noise.STEP)
MIX_1, MIX_2 = tl.constexpr(noise.MIX[0]), tl.constexpr(noise.MIX[1])


@dataclass(frozen=True)
class SampleShape(Shape):
    """The next token of `vocab` logits, and its row of `hidden` numbers of a table.

    `table` is the dtype of a plain table or the name of a scheme. `draw` selects sampling by temperature instead of greedy.
    `cap` replaces logits by tanh(logit / cap) * cap; "none" leaves them. `scale` multiplies the row after rounding to `dtype`
    (a plain table has that dtype). Numbers that aren't whole are written as text.
    """

    vocab: int
    hidden: int
    table: str = "bfloat16"
    draw: bool = False
    cap: str = "none"
    scale: str = "1.0"
    logits: str = "float32"
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        asked = f"the next of {self.vocab:,} tokens"
        for name, value, known in (("logits", self.logits, DTYPES), ("dtype", self.dtype, DTYPES)):
            if value not in known:
                raise ModelError(asked, f"{name}={value!r}", f"Give one of {', '.join(known)}")
        if self.vocab < 1:
            raise ModelError(asked, "there is none to choose", "Give a logit or more")
        if self.table in DTYPES and self.table != self.dtype:
            raise ModelError(asked, f"a table in {self.table} for rows in {self.dtype}", "Give both the same dtype")
        if self.table not in DTYPES and self.hidden % find_scheme(self.table).multiple:
            multiple = find_scheme(self.table).multiple
            raise ModelError(asked, f"{self.table} rows of {self.hidden:,} don't divide by {multiple}", "Choose another scheme")
        if self.cap != "none" and not 0 < float(self.cap) < math.inf:
            raise ModelError(asked, f"cap={self.cap!r}", 'Give a number above 0, or "none"')

    @property
    def scheme(self) -> Scheme | None:
        """The scheme of a packed table; None for a plain one."""
        return SCHEMES.get(self.table)


class SampleEmbed(Kernel):
    """The next token and its embedding.

    Inputs: logits [vocab]; table [vocab, hidden], or its parts (see `PackedMatrix`); counter int32 [1], which is zero before
    and after; for `draw` also temperature fp64 [1] (0 is greedy), key int64 [1] (`mixed_seed`) and step int64 [1], which the
    launch increments; optionally token int64 [1], to write the result to. Results: token int64 [1], row [1, hidden], and step
    for `draw`. A NaN logit counts as infinite. Raises ModelError for tensors with another shape, dtype or device, or that are
    not contiguous and aligned.
    """

    name: ClassVar[str] = "sample_embed"
    shape_type: ClassVar[type[Shape]] = SampleShape
    lengths = ("vocab",)
    known: ClassVar[Mapping[str, Shape]] = {
        "gemma4-31b greedy": SampleShape(262144, 5376, "q6_k", cap="30.0", scale="73.5"),
        "gemma4-31b drawn": SampleShape(262144, 5376, "q6_k", draw=True, cap="30.0", scale="73.5"),
        "qwen3-8b greedy": SampleShape(151936, 4096, "q4_k"),
        "qwen3-8b drawn": SampleShape(151936, 4096, "q4_k", draw=True),
        "qwen3.5-35b-a3b greedy": SampleShape(248320, 2048, "q4_k"),
        "qwen3-8b bf16 greedy": SampleShape(151936, 4096, logits="bfloat16"),
    }

    def space(self, shape: Shape) -> Sequence[Config]:
        return config_grid(Config(block=2048, warps=8), warps=(4, 8), block=(1024, 2048, 4096, 8192))

    def inputs(self, shape: Shape, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
        assert isinstance(shape, SampleShape)
        device = torch.device(device)
        generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
        drawn = torch.randn(shape.vocab, generator=generator, device=device) * 8
        found = {"logits": drawn.to(DTYPES[shape.logits]), "counter": torch.zeros(1, dtype=torch.int32, device=device)}
        for name, (size, dtype) in _table_parts(shape).items():
            if dtype.is_floating_point:
                found[name] = torch.randn(size, generator=generator, device=device, dtype=torch.float32).to(dtype)
            else:
                low = 0 if dtype == torch.uint8 else -128
                found[name] = torch.randint(low, low + 256, size, generator=generator, device=device, dtype=dtype)
        if shape.draw:
            found["temperature"] = torch.full((1,), 0.8, dtype=torch.float64, device=device)
            found["key"] = torch.full((1,), noise.mixed_seed(seed), device=device)
            found["step"] = torch.full((1,), 7, device=device)
        return found

    def reference(self, shape: Shape, inputs: Tensors) -> tuple[Tensor, ...]:
        assert isinstance(shape, SampleShape)
        scores = inputs["logits"].float()
        if shape.cap != "none":
            scores = torch.tanh(scores / float(shape.cap)) * float(shape.cap)
        if shape.draw:
            temperature = inputs["temperature"]
            drawn = noise.gumbel(inputs["key"], inputs["step"], shape.vocab)
            scores = torch.where(temperature > 0, scores.double() * (1 / temperature) + drawn, scores.double())
        token = scores.nan_to_num(math.inf, math.inf, -math.inf).argmax(-1, keepdim=True)
        parts = {name: inputs[name].index_select(0, token) for name in _table_parts(shape)}
        row = dequantize(shape.scheme, parts, DTYPES[shape.dtype]) if shape.scheme else parts["table"]
        row = row if float(shape.scale) == 1.0 else row * float(shape.scale)
        return (token, row, inputs["step"] + 1) if shape.draw else (token, row)

    def outputs(self, shape: Shape, inputs: Tensors) -> dict[str, Tensor]:
        assert isinstance(shape, SampleShape)
        device = inputs["logits"].device
        most = triton.cdiv(shape.vocab, min(config["block"] for config in self.space(shape)))
        found = {
            "token": inputs["token"] if "token" in inputs else torch.empty(1, dtype=torch.int64, device=device),
            "row": torch.empty(1, shape.hidden, dtype=DTYPES[shape.dtype], device=device),
        }
        found |= {"step": inputs["step"]} if shape.draw else {}
        scratch = {"best": torch.float64, "best_id": torch.int32}
        return found | {name: torch.empty(most, dtype=dtype, device=device) for name, dtype in scratch.items()}

    def results(self, shape: Shape) -> int:
        assert isinstance(shape, SampleShape)
        return 3 if shape.draw else 2

    def launches(self, shape: Shape, config: Config, inputs: Tensors, outputs: Tensors) -> Sequence[Launch]:
        assert isinstance(shape, SampleShape)
        blocks = triton.cdiv(shape.vocab, config["block"])
        self._check(shape, inputs, outputs, blocks)
        logits = inputs["logits"]
        arguments: dict[str, Any] = {
            "logits_ptr": logits, "counter_ptr": inputs["counter"], "temperature_ptr": inputs.get("temperature", logits),
            "key_ptr": inputs.get("key", logits), "step_ptr": inputs.get("step", logits), "best_ptr": outputs["best"],
            "best_id_ptr": outputs["best_id"], "token_ptr": outputs["token"], "row_ptr": outputs["row"],
            **_table_arguments(shape, inputs), "cap": 0.0 if shape.cap == "none" else float(shape.cap),
            "scale": float(shape.scale),
        }  # fmt: skip
        constants = {
            "VOCAB": shape.vocab, "HIDDEN": shape.hidden, "DRAW": shape.draw, "CAPPED": shape.cap != "none",
            "SCALED": float(shape.scale) != 1.0, "BLOCK": config["block"], "BLOCKS": triton.next_power_of_2(blocks),
            **_table_constants(shape.scheme),
        }  # fmt: skip
        return [Launch(_sample_kernel, (blocks,), arguments, constants, config.warps, config.stages, early=True)]

    def _check(self, shape: SampleShape, inputs: Tensors, outputs: Tensors, blocks: int) -> None:
        logits = inputs["logits"]
        check_tensor(self.name, "logits", logits, (shape.vocab,), DTYPES[shape.logits], logits)
        for name, (size, dtype) in _table_parts(shape).items():
            check_tensor(self.name, name, inputs[name], size, dtype, logits)
        ones = {"counter": torch.int32, "temperature": torch.float64, "key": torch.int64, "step": torch.int64}
        for name in ("counter", "temperature", "key", "step") if shape.draw else ("counter",):
            check_tensor(self.name, name, inputs[name], (1,), ones[name], logits, ones[name].itemsize)
        check_tensor(self.name, "token", outputs["token"], (1,), torch.int64, logits, 8)
        check_tensor(self.name, "row", outputs["row"], (1, shape.hidden), DTYPES[shape.dtype], logits)
        if len(outputs["best"]) < blocks:
            found = f"scratch for {len(outputs['best'])} programs where {blocks} run"
            raise ModelError(self.name, found, "Choose a config of the kernel's space, or larger blocks")

    def cost(self, shape: Shape) -> Cost:
        assert isinstance(shape, SampleShape)
        out = DTYPES[shape.dtype].itemsize
        row = shape.hidden * (shape.scheme.bits_per_weight / 8 if shape.scheme else out)
        each = 120.0 if shape.draw else 1.0  # of a hash and two logarithms in fp64
        return Cost(shape.vocab * DTYPES[shape.logits].itemsize + math.ceil(row) + shape.hidden * out + 8, each * shape.vocab)


def _table_parts(shape: SampleShape) -> dict[str, tuple[tuple[int, int], torch.dtype]]:
    """Return the shape and dtype of the tensors that hold the table."""
    if shape.scheme is None:
        return {"table": ((shape.vocab, shape.hidden), DTYPES[shape.table])}
    return {name: ((shape.vocab, shape.hidden // per), dtype) for name, (dtype, per) in shape.scheme.parts().items()}


def _table_arguments(shape: SampleShape, inputs: Tensors) -> dict[str, Tensor]:
    if shape.scheme is None:
        return dict.fromkeys((f"{name}_ptr" for name in _POINTERS), inputs["table"])
    scales = inputs["scales"]
    found = {name: inputs.get(name, scales) for name in _POINTERS}
    found["offsets"] = inputs.get("zeros", inputs.get("minima", scales))
    found["offset_steps"] = inputs.get("minimum_steps", scales)
    return {f"{name}_ptr": tensor for name, tensor in found.items()}


def _table_constants(scheme: Scheme | None) -> dict[str, int | str]:
    if scheme is None:
        return {"BITS": 0, "GROUP": 1, "STEPS": 0, "OFFSET": "none", "CENTRE": 0}
    held: dict[str, int | str] = {"BITS": scheme.bits, "GROUP": scheme.group, "STEPS": scheme.steps}
    return held | {"OFFSET": scheme.offset, "CENTRE": scheme.centre}


_POINTERS = ("codes", "high", "scales", "offsets", "scale_steps", "offset_steps")


@triton.jit
def _noise(ids, key_ptr, step_ptr):
    """Return the Gumbel noise of token `ids` in fp64."""
    key = tl.load(key_ptr).to(tl.uint64, bitcast=True)
    step = tl.load(step_ptr).to(tl.uint64, bitcast=True)
    z = ids.to(tl.uint64) * INDEX + (key + step * STEP)
    z = (z ^ (z >> 30)) * MIX_1
    z = (z ^ (z >> 27)) * MIX_2
    z = (z ^ (z >> 31)) >> 12
    uniform = (z.to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52: in (0, 1), exact
    return -tl.log(-tl.log(uniform))


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
def _weights(
    codes_ptr, high_ptr, scales_ptr, offsets_ptr, scale_steps_ptr, offset_steps_ptr, token, k,
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
        values -= _fine(offsets_ptr, offset_steps_ptr, token, k, HIDDEN, GROUP, 0)
    scales = _fine(scales_ptr, scale_steps_ptr, token, k, HIDDEN, GROUP, STEPS)
    if OFFSET != "minimum":
        return values * scales
    product = (values.to(tl.float64) * scales.to(tl.float64)).to(tl.float32)  # prevents a fusion with the subtraction
    return product - _fine(offsets_ptr, offset_steps_ptr, token, k, HIDDEN, GROUP, STEPS)


@triton.jit
def _sample_kernel(
    logits_ptr, counter_ptr, temperature_ptr, key_ptr, step_ptr, best_ptr, best_id_ptr, token_ptr, row_ptr,
    codes_ptr, high_ptr, scales_ptr, offsets_ptr, scale_steps_ptr, offset_steps_ptr, cap, scale,
    VOCAB: tl.constexpr, HIDDEN: tl.constexpr, DRAW: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr,
    OFFSET: tl.constexpr, CENTRE: tl.constexpr,
):  # fmt: skip
    """BLOCK logits per program; the last program to arrive does the rest."""
    take_turn()
    NONE: tl.constexpr = 2147483647
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(logits_ptr + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    if CAPPED:
        ratio = tl.div_rn(scores, tl.zeros((BLOCK,), tl.float32) + cap).to(tl.float64)
        shrunk = tl.exp(-2.0 * tl.abs(ratio))  # tanh in fp64: rounded to fp32, the nearest there is
        tanh = (1.0 - shrunk) / (1.0 + shrunk)
        scores = tl.where(ratio < 0, -tanh, tanh).to(tl.float32) * cap
    scores = tl.where(scores != scores, float("inf"), scores).to(tl.float64)
    if DRAW:
        temperature = tl.load(temperature_ptr)
        warm = temperature > 0
        inverse = 1.0 / tl.where(warm, temperature, 1.0)
        scores = scores * inverse + tl.where(warm, _noise(ids, key_ptr, step_ptr), 0.0)
    scores = tl.where(ids < VOCAB, scores, float("-inf"))
    best = tl.max(scores)
    tl.store(best_ptr + tl.program_id(0), best)
    tl.store(best_id_ptr + tl.program_id(0), tl.min(tl.where((scores == best) & (ids < VOCAB), ids, NONE)))
    tl.debug_barrier()  # both are stored before this program is counted
    if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        part = tl.arange(0, BLOCKS)
        there = part < tl.num_programs(0)
        scores_of = tl.load(best_ptr + part, mask=there, other=float("-inf"), cache_modifier=".cg")
        ids_of = tl.load(best_id_ptr + part, mask=there, other=NONE, cache_modifier=".cg")
        token = tl.min(tl.where(scores_of == tl.max(scores_of), ids_of, NONE)).to(tl.int64)
        tl.store(token_ptr, token)
        tl.store(counter_ptr, 0)
        if DRAW:
            tl.store(step_ptr, tl.load(step_ptr) + 1)
        for start in range(0, HIDDEN, BLOCK):
            k = start + tl.arange(0, BLOCK)
            values = _weights(
                codes_ptr, high_ptr, scales_ptr, offsets_ptr, scale_steps_ptr, offset_steps_ptr, token,
                tl.minimum(k, HIDDEN - 1), HIDDEN, BITS, GROUP, STEPS, OFFSET, CENTRE,
            ).to(row_ptr.dtype.element_ty)  # fmt: skip
            if SCALED:
                values = (values.to(tl.float32) * scale).to(row_ptr.dtype.element_ty)
            tl.store(row_ptr + k, values, mask=k < HIDDEN)


SAMPLE_EMBED = SampleEmbed()
