# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
"""The parts of a decoder layer between its matrices, in two launches: norms with additions, and heads.

`RMS_NORM` is the norm of rows (Zhang and Sennrich, arXiv 1910.07467) with the residual added before it, after it, or both, so
that the norm at the end of one half of a layer and the norm at the start of the next are one launch. On request it also returns
the result as 8-bit integers for the next matrix. `QK_NORM_ROPE` computes the norms of query and key heads and the rotary
embedding (Su et al., arXiv 2104.09864), and writes keys and values to a cache.

At batch 1 both move kilobytes, so the launch time bounds them, which is why there are so few launches. For a prompt, the bytes
of the rows bound them. Results are rounded wherever the operations of the models round, so that both give the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from toolkit.core.errors import ModelError
from toolkit.kernels import draws
from toolkit.kernels.ahead import LINES, RUN, Asked, ask_ahead, asked_of
from toolkit.kernels.base import DTYPES, Config, Cost, Kernel, Launch, Shape, Tensors, config_grid
from toolkit.kernels.checks import ALIGNMENT, check_tensor, check_word
from toolkit.kernels.early import await_previous, let_next_begin
from toolkit.kernels.exchange import count_received, empty, most_warps, named, place_of, received_row, receiving
from toolkit.kernels.packed import quantise_groups
from toolkit.kernels.shared_keys import shared_weight, stored_numbers
from toolkit.weights.packed import quantize_activations

GROUP = 32  # activations that share a scale
FORMS = ("norm", "add_norm", "norm_add", "norm_add_norm")
CACHES = ("linear", "ring", "none")


@dataclass(frozen=True)
class NormShape(Shape):
    """A norm of `tokens` rows of `hidden` numbers.

    `form`, with r the residual: "norm": out = norm(x). "add_norm": r' = r + x, out = norm(r'). "norm_add": r' = r + norm(x).
    "norm_add_norm": r' = r + post_norm(x), out = norm(r'). With `scaled`, r' is multiplied by a scalar (after a norm only).
    With `quantised`, out is returned in 8 bits, too. `eps` is a number written as text.
    """

    tokens: int
    hidden: int
    form: str = "norm"
    scaled: bool = False
    quantised: bool = False
    dtype: str = "bfloat16"
    eps: str = "1e-06"

    def __post_init__(self) -> None:
        check_word("a norm", "form", self.form, FORMS)
        check_word("a norm", "dtype", self.dtype, DTYPES)
        if self.scaled and not self.form.startswith("norm_add"):
            raise ModelError(f"form {self.form!r} with a scalar", "it has no norm before the residual", "Leave out scaled=True")
        if self.quantised and (self.form == "norm_add" or self.hidden % GROUP):
            why = "it has no result but the residual" if self.form == "norm_add" else f"{self.hidden} don't divide by {GROUP}"
            raise ModelError(f"form {self.form!r} in 8 bits", why, "Leave out quantised=True")
        if self.hidden < 1:
            raise ModelError("a norm", f"rows of {self.hidden} numbers", "Give rows of one or more")


class RmsNorm(Kernel):
    """x / rms(x) * weight over rows in fp32, with residual, scalar and 8-bit codes as the shape says.

    Inputs: x [T, hidden], weight [hidden] fp32, and for some forms residual [T, hidden], post_weight [hidden] fp32 and scalar
    [1]. Results, if the form has them: out and residual [T, hidden]; codes int8 [T, hidden] (four per 32-bit word), scales and
    sums fp32 [T, hidden / 32], where sums are scales times the sums of their codes. An input "ahead", of any shape and dtype,
    is what the next launch reads: this one asks for a part of it (see `toolkit.kernels.ahead`). With inputs "words" and
    "counts" (see `toolkit.kernels.exchange.Sent`), the row is received: x is only its shape and dtype. This needs a residual,
    and a single row. Raises ModelError for tensors with another shape, dtype or device, or that are not contiguous and aligned.
    """

    name: ClassVar[str] = "rms_norm"
    shape_type: ClassVar[type[Shape]] = NormShape
    lengths = ("tokens",)
    known: ClassVar[Mapping[str, Shape]] = {
        "gemma4-31b attention norm": NormShape(1, 5376, "norm", quantised=True),
        "gemma4-31b after attention, before mlp": NormShape(1, 5376, "norm_add_norm", quantised=True),
        "gemma4-31b after mlp, before attention": NormShape(1, 5376, "norm_add_norm", scaled=True, quantised=True),
        "gemma4-31b prompt of 2048": NormShape(2048, 5376, "norm_add_norm"),
        "qwen3-8b add and norm": NormShape(1, 4096, "add_norm", quantised=True),
        "qwen3-8b prompt of 2048": NormShape(2048, 4096, "add_norm"),
        "qwen3.5-35b-a3b add and norm": NormShape(1, 2048, "add_norm", quantised=True),
    }

    def space(self, shape: Shape) -> Sequence[Config]:
        return config_grid(Config(warps=16), warps=(4, 8, 16, 32))

    def inputs(self, shape: Shape, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
        assert isinstance(shape, NormShape)
        make = _Maker(device, seed)
        dtype, rows = DTYPES[shape.dtype], (shape.tokens, shape.hidden)
        found = {"x": make.normal(rows, dtype, 3.0), "weight": make.normal((shape.hidden,), torch.float32, 0.3, 1.0)}
        if shape.form != "norm":
            found["residual"] = make.normal(rows, dtype, 2.0)
        if shape.form == "norm_add_norm":
            found["post_weight"] = make.normal((shape.hidden,), torch.float32, 0.3, 1.0)
        if shape.scaled:
            found["scalar"] = make.normal((1,), dtype, 0.0, 0.75)
        return found

    def reference(self, shape: Shape, inputs: Tensors) -> tuple[Tensor, ...]:
        assert isinstance(shape, NormShape)
        x, weight, eps = inputs["x"], inputs["weight"], float(shape.eps)
        results: list[Tensor] = []
        if shape.form == "add_norm":
            x = inputs["residual"] + x
        elif shape.form != "norm":
            x = inputs["residual"] + _normed(x, inputs.get("post_weight", weight), eps)
            x = x * inputs["scalar"] if shape.scaled else x
        if shape.form != "norm_add":
            results.append(_normed(x, weight, eps))
        if shape.form != "norm":
            results.append(x)
        return (*results, *quantize_activations(results[0])) if shape.quantised else tuple(results)

    def outputs(self, shape: Shape, inputs: Tensors) -> dict[str, Tensor]:
        assert isinstance(shape, NormShape)
        x = inputs["x"]
        found = {"out": x.new_empty(x.shape)} if shape.form != "norm_add" else {}
        if shape.form != "norm":
            found["residual"] = x.new_empty(x.shape)
        if shape.quantised:
            groups = (shape.tokens, shape.hidden // GROUP)
            found["codes"] = torch.empty(x.shape, dtype=torch.int8, device=x.device)
            found["scales"] = torch.empty(groups, dtype=torch.float32, device=x.device)
            found["sums"] = torch.empty(groups, dtype=torch.float32, device=x.device)
        return found

    def results(self, shape: Shape) -> int:
        assert isinstance(shape, NormShape)
        return 1 + (shape.form in ("add_norm", "norm_add_norm")) + 3 * shape.quantised

    def launches(self, shape: Shape, config: Config, inputs: Tensors, outputs: Tensors) -> Sequence[Launch]:
        assert isinstance(shape, NormShape)
        self._check(shape, inputs, outputs)
        x, weight, ahead = inputs["x"], inputs["weight"], inputs.get("ahead")
        asked = Asked(0, 0, 0) if ahead is None else asked_of(ahead)
        arrived, ranks = receiving(inputs)
        if arrived and (shape.tokens > 1 or shape.form == "norm"):
            found = f"{shape.tokens} rows with form {shape.form!r} can't be received"
            raise ModelError("a norm", found, "Give one row, with a residual, or sum the rows first")
        arguments = {
            "x_ptr": x, "weight_ptr": weight, "post_weight_ptr": inputs.get("post_weight", weight),
            "residual_ptr": inputs.get("residual", x), "scalar_ptr": inputs.get("scalar", x),
            "out_ptr": outputs.get("out", x), "new_residual_ptr": outputs.get("residual", x),
            "codes_ptr": outputs.get("codes", x), "scales_ptr": outputs.get("scales", x), "sums_ptr": outputs.get("sums", x),
            "eps": float(shape.eps), "rows": shape.tokens,
            "ahead_ptr": ahead, "lines": asked.lines, "stride": asked.stride, **arrived,
        }  # fmt: skip
        constants = {
            "HIDDEN": shape.hidden, "BLOCK": max(GROUP, triton.next_power_of_2(shape.hidden)),
            "ADD_FIRST": shape.form == "add_norm", "NORM_ADD": shape.form.startswith("norm_add"),
            "NORM": shape.form != "norm_add", "SCALED": shape.scaled, "QUANTISED": shape.quantised,
            "RUN": RUN, "LINES": LINES, **ranks,
        }  # fmt: skip
        grid = (shape.tokens + asked.blocks,)
        warps = min(config.warps, most_warps(constants["BLOCK"])) if arrived else config.warps
        return [Launch(_norm_kernel, grid, arguments, constants, warps, config.stages, early=True)]

    def _check(self, shape: NormShape, inputs: Tensors, outputs: Tensors) -> None:
        dtype, rows = DTYPES[shape.dtype], (shape.tokens, shape.hidden)
        shapes = {"x": (rows, dtype), "residual": (rows, dtype), "scalar": ((1,), dtype), "out": (rows, dtype)}
        shapes |= dict.fromkeys(("weight", "post_weight"), ((shape.hidden,), torch.float32))
        shapes |= dict.fromkeys(("scales", "sums"), ((shape.tokens, shape.hidden // GROUP), torch.float32))
        shapes["codes"] = (rows, torch.int8)
        given = {name: tensor for name, tensor in inputs.items() if name not in ("ahead", "words", "counts")}
        for name, tensor in (*given.items(), *outputs.items()):
            check_tensor(self.name, name, tensor, *shapes[name], like=inputs["x"])

    def cost(self, shape: Shape) -> Cost:
        assert isinstance(shape, NormShape)
        size = DTYPES[shape.dtype].itemsize
        rows = {"norm": 2, "add_norm": 4, "norm_add": 3, "norm_add_norm": 4}[shape.form] * size
        per_token = shape.hidden * rows + shape.quantised * (shape.hidden + shape.hidden // GROUP * 8)
        weights = 4 * shape.hidden * (1 + (shape.form == "norm_add_norm")) + size * shape.scaled
        return Cost(shape.tokens * per_token + weights, 8.0 * shape.tokens * shape.hidden)


@dataclass(frozen=True)
class HeadsShape(Shape):
    """The heads of `tokens` rows between a matrix and attention.

    `rotary` is how many numbers of a head rotate, from the first on (even). `context` is the number of slots of the cache. With
    `gated`, each query head is followed by its gate, which is left in place. `values` is "own", or "keys" if keys and values
    are one projection. With `apart`, own values are not in the rows but in a tensor of their own. With `value_norm`, values are
    normalized without a weight. `cache` is "linear" (slot = position), "ring" (position modulo `context`), or "none": keys and
    values are returned row by row. `kv_heads` 0 means queries only. `positions` is the number of rows of the rotary table.
    With `key_dim`, a linear cache holds only so many numbers of each key, and queries are multiplied by the keys' weight for
    the others, which equal the value's (see `toolkit.kernels.shared_keys`).
    """

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary: int
    context: int
    positions: int
    gated: bool = False
    values: str = "own"
    value_norm: bool = False
    cache: str = "linear"
    dtype: str = "bfloat16"
    eps: str = "1e-06"
    apart: bool = False
    key_dim: int = 0

    def __post_init__(self) -> None:
        check_word("heads", "cache", self.cache, CACHES)
        check_word("heads", "values", self.values, ("own", "keys"))
        check_word("heads", "dtype", self.dtype, DTYPES)
        if self.rotary % 2 or not 0 <= self.rotary <= self.head_dim:
            found = f"{self.rotary} numbers of a head of {self.head_dim} turn"
            raise ModelError("heads", found, "Give an even number up to the head's size")
        if self.key_dim:
            alike = self.values == "keys" and self.value_norm and self.rotary == self.head_dim and self.cache == "linear"
            if not alike or self.key_dim % 2 or not 0 < self.key_dim < self.head_dim:
                found = f"{self.key_dim} numbers of each key of {self.head_dim} are stored"
                do = "Give an even number below the head's size, and normalized values that are keys, in a linear cache"
                raise ModelError("heads", found, do)

    @property
    def width(self) -> int:
        """Numbers in a row of the projection: queries (and gates), keys, and values of its own."""
        kinds = 2 if self.values == "own" and not self.apart else 1
        return (self.heads * (1 + self.gated) + self.kv_heads * kinds) * self.head_dim

    @property
    def stored(self) -> int:
        """How many numbers of a key the cache holds."""
        return self.key_dim or self.head_dim

    @property
    def value_width(self) -> int:
        """Numbers in a row of values that are apart."""
        return self.kv_heads * self.head_dim if self.apart else 0


class QkNormRope(Kernel):
    """Normalizes and rotates query and key heads, normalizes values if asked, and writes keys and values to the cache.

    Inputs: qkv [T, width], value [T, KV heads * D] if values are apart, q_weight and k_weight [D] fp32, rope [positions, 2,
    rotary] (cosines, signed sines: `rope_of`), at int64 [T] (the positions of the rows, on the device, ascending by one), keys
    [1, KV heads, context, key_dim or D] and values [1, KV heads, context, D] unless cache is "none". Results: query [T, H, D],
    keys and values: the caches, written in place, or new ones [1, KV heads, T, D]. A position beyond a linear cache is not
    written; of more tokens than a ring has slots, the last ones are. If this launch may start before the one before it ends,
    that one may not write `at`. Raises ModelError for tensors with another shape, dtype or device, or that are not contiguous
    and aligned.
    """

    name: ClassVar[str] = "qk_norm_rope"
    shape_type: ClassVar[type[Shape]] = HeadsShape
    lengths = ("tokens", "context", "positions", "apart")
    known: ClassVar[Mapping[str, Shape]] = {
        "gemma4-31b sliding": HeadsShape(1, 32, 16, 256, 256, 1024, 32768, value_norm=True, cache="ring"),
        "gemma4-31b full": HeadsShape(1, 32, 4, 512, 512, 32768, 32768, values="keys", value_norm=True, key_dim=128),
        "gemma4-31b full, prompt of 2048": HeadsShape(
            2048, 32, 4, 512, 512, 32768, 32768, values="keys", value_norm=True, key_dim=128
        ),
        "qwen3-8b": HeadsShape(1, 32, 8, 128, 128, 32768, 32768),
        "qwen3-8b prompt of 2048": HeadsShape(2048, 32, 8, 128, 128, 32768, 32768),
        "qwen3.5-35b-a3b": HeadsShape(1, 16, 2, 256, 64, 32768, 32768, gated=True),
    }

    def space(self, shape: Shape) -> Sequence[Config]:
        return config_grid(Config(block_h=1, warps=2), warps=(1, 2, 4, 8), block_h=(1, 2, 4, 8))

    def inputs(self, shape: Shape, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
        assert isinstance(shape, HeadsShape)
        make = _Maker(device, seed)
        dtype = DTYPES[shape.dtype]
        last = min(shape.context, shape.positions) if shape.cache == "linear" else shape.positions
        found = {
            "qkv": make.normal((shape.tokens, shape.width), dtype, 2.0),
            "q_weight": make.normal((shape.head_dim,), torch.float32, 0.3, 1.0),
            "k_weight": make.normal((shape.head_dim,), torch.float32, 0.3, 1.0),
            "rope": make.normal((shape.positions, 2, shape.rotary), dtype, 0.7),
            "at": draws.positions(last - shape.tokens, last, device),
        }
        if shape.apart:
            found["value"] = make.normal((shape.tokens, shape.value_width), dtype, 2.0)
        if shape.cache != "none":
            slots = (1, shape.kv_heads, shape.context)
            found["keys"] = make.normal((*slots, shape.stored), dtype, 1.0)
            found["values"] = make.normal((*slots, shape.head_dim), dtype, 1.0)
        return found

    def reference(self, shape: Shape, inputs: Tensors) -> tuple[Tensor, ...]:
        assert isinstance(shape, HeadsShape)
        eps, at, own = float(shape.eps), inputs["at"], shape.values == "own" and not shape.apart
        parts = [shape.heads * (1 + shape.gated), shape.kv_heads, shape.kv_heads * own]
        heads = inputs["qkv"].view(shape.tokens, -1, shape.head_dim).split(parts, 1)
        query, key, value = heads[0], heads[1], heads[2] if own else heads[1]
        value = inputs["value"].view(key.shape) if shape.apart else value
        rope = inputs["rope"].index_select(0, at)
        query = query.unflatten(1, (-1, 2))[:, :, 0] if shape.gated else query
        q_weight = inputs["q_weight"]
        q_weight = q_weight * shared_weight(inputs["k_weight"], shape.key_dim) if shape.key_dim else q_weight
        query = _turned(_normed(query, q_weight, eps), rope)
        if not shape.kv_heads:
            return (query,)
        key = _turned(_normed(key, inputs["k_weight"], eps), rope).transpose(0, 1)[None]
        value = (_normed(value, None, eps) if shape.value_norm else value).transpose(0, 1)[None]
        if shape.cache == "none":
            return query, key, value
        written = slice(max(0, shape.tokens - shape.context), None) if shape.cache == "ring" else at < shape.context
        slots = (at % shape.context if shape.cache == "ring" else at)[written]
        caches = inputs["keys"].clone(), inputs["values"].clone()
        for cache, new in zip(caches, (stored_numbers(key, shape.stored), value), strict=True):
            cache.index_copy_(2, slots, new[:, :, written])
        return query, *caches

    def outputs(self, shape: Shape, inputs: Tensors) -> dict[str, Tensor]:
        assert isinstance(shape, HeadsShape)
        qkv = inputs["qkv"]
        found = {"query": qkv.new_empty(shape.tokens, shape.heads, shape.head_dim)}
        if shape.cache != "none":
            return found | {"keys": inputs["keys"], "values": inputs["values"]}
        new = (1, shape.kv_heads, shape.tokens, shape.head_dim)
        return found | {"keys": qkv.new_empty(new), "values": qkv.new_empty(new)}

    def results(self, shape: Shape) -> int:
        assert isinstance(shape, HeadsShape)
        return 3 if shape.kv_heads else 1

    def launches(self, shape: Shape, config: Config, inputs: Tensors, outputs: Tensors) -> Sequence[Launch]:
        assert isinstance(shape, HeadsShape)
        self._check(shape, inputs, outputs)
        block = config["block_h"]
        blocks = triton.cdiv(shape.heads, block) + 2 * triton.cdiv(shape.kv_heads, block)
        arguments = {
            "qkv_ptr": inputs["qkv"], "value_ptr": inputs.get("value", inputs["qkv"]),
            "q_weight_ptr": inputs["q_weight"], "k_weight_ptr": inputs["k_weight"],
            "rope_ptr": inputs["rope"], "at_ptr": inputs["at"], "query_ptr": outputs["query"],
            "keys_ptr": outputs["keys"], "values_ptr": outputs["values"], "T": shape.tokens,
            "S": shape.tokens if shape.cache == "none" else shape.context, "eps": float(shape.eps),
        }  # fmt: skip
        constants = {
            "H": shape.heads, "KV": shape.kv_heads, "D": shape.head_dim, "KEY_DIM": shape.stored, "R": shape.rotary,
            "GATED": shape.gated,
            "OWN_VALUES": shape.values == "own" and not shape.apart, "APART": shape.apart, "VALUE_NORM": shape.value_norm,
            "CACHE": shape.cache, "BLOCK_H": block, "BLOCK_D": triton.next_power_of_2(shape.head_dim),
        }  # fmt: skip
        return [Launch(_heads_kernel, (shape.tokens, blocks), arguments, constants, config.warps, config.stages, early=True)]

    def _check(self, shape: HeadsShape, inputs: Tensors, outputs: Tensors) -> None:
        dtype, weight = DTYPES[shape.dtype], ((shape.head_dim,), torch.float32)
        slots = (1, shape.kv_heads, shape.tokens if shape.cache == "none" else shape.context)
        shapes = {
            "qkv": ((shape.tokens, shape.width), dtype), "q_weight": weight, "k_weight": weight,
            "value": ((shape.tokens, shape.value_width), dtype),
            "rope": ((shape.positions, 2, shape.rotary), dtype), "at": ((shape.tokens,), torch.int64),
            "query": ((shape.tokens, shape.heads, shape.head_dim), dtype),
            "keys": ((*slots, shape.stored), dtype), "values": ((*slots, shape.head_dim), dtype),
        }  # fmt: skip
        for name, tensor in (*inputs.items(), *outputs.items()):
            found_shape, found_dtype = shapes[name]
            aligned = 8 if name == "at" else ALIGNMENT  # the position of a step may be one element of a longer array
            check_tensor(self.name, name, tensor, found_shape, found_dtype, inputs["qkv"], aligned)

    def cost(self, shape: Shape) -> Cost:
        assert isinstance(shape, HeadsShape)
        size = DTYPES[shape.dtype].itemsize
        read = shape.width + shape.value_width - shape.gated * shape.heads * shape.head_dim
        written = (shape.heads + shape.kv_heads) * shape.head_dim + shape.kv_heads * shape.stored
        row = (read + written + 2 * shape.rotary) * size + 8
        return Cost(shape.tokens * row + 8 * shape.head_dim, 10.0 * shape.tokens * written)


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)


def _turned(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate the first numbers of x [T, heads, D] by rope [T, 2, rotary], pairing halves."""
    cos, sin = rope[:, 0, None], rope[:, 1, None]
    part = x[..., : rope.shape[-1]]
    turned = torch.addcmul(part * cos, part.roll(rope.shape[-1] // 2, -1), sin)
    return torch.cat((turned, x[..., rope.shape[-1] :]), -1)


class _Maker:
    """Makes random inputs from one seed; without values on "meta"."""

    def __init__(self, device: torch.device | str, seed: int) -> None:
        self.device = torch.device(device)
        self.generator = None if self.device.type == "meta" else torch.Generator(self.device).manual_seed(seed)

    def normal(self, shape: Sequence[int], dtype: torch.dtype, size: float, mean: float = 0.0) -> Tensor:
        return draws.normal(shape, self.generator, self.device, dtype, size, mean)


@triton.jit(repr=named("_norm_kernel"))
def _norm_kernel(
    x_ptr, weight_ptr, post_weight_ptr, residual_ptr, scalar_ptr, out_ptr, new_residual_ptr, codes_ptr, scales_ptr, sums_ptr,
    eps, rows, ahead_ptr, lines, stride, words_ptr, counts_ptr,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, ADD_FIRST: tl.constexpr, NORM_ADD: tl.constexpr, NORM: tl.constexpr,
    SCALED: tl.constexpr, QUANTISED: tl.constexpr, RUN: tl.constexpr, LINES: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """One row per program. Further programs ask for what is at `ahead_ptr`. With several RANKS, x is received, a single row.

    All but the sums of squares is rounded to the rows' dtype, as in the models.

    Weights, which no kernel writes, are loaded before the row is there.
    """
    let_next_begin()
    if ahead_ptr is not None:  # noqa: SIM102  # known when the kernel is compiled, unlike the next one
        if tl.program_id(0) >= rows:
            ask_ahead(ahead_ptr, lines, stride, tl.program_id(0) - rows, RUN, LINES)
            return
    GROUPS: tl.constexpr = BLOCK // 32
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    column = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = column < HIDDEN
    at = row * HIDDEN + column
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    post_weight = tl.load(post_weight_ptr + column, mask=inside, other=0.0) if NORM_ADD and NORM else weight
    scalar = tl.load(scalar_ptr).to(tl.float32) if SCALED else 1.0
    number = tl.load(counts_ptr, volatile=True) if RANKS > 1 else 0
    await_previous()
    if RANKS > 1:
        residual = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        place = place_of(words_ptr, number, at, DTYPE, RANKS)
        x, squares = received_row(place, inside, residual, DTYPE, ADD_FIRST, RANKS)
        empty(place, inside, RANKS)
        count_received(counts_ptr, number)
    else:
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        residual = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32) if ADD_FIRST or NORM_ADD else x
        if ADD_FIRST:
            x += residual
            x = x.to(DTYPE).to(tl.float32)
    if ADD_FIRST:
        tl.store(new_residual_ptr + at, x.to(DTYPE), mask=inside)
    if RANKS == 1:
        squares = tl.sum(x * x)
    if NORM_ADD:
        x = x * tl.rsqrt(squares / HIDDEN + eps) * post_weight
        x = (x.to(DTYPE).to(tl.float32) + residual).to(DTYPE).to(tl.float32)
        if SCALED:
            x = (x * scalar).to(DTYPE).to(tl.float32)
        tl.store(new_residual_ptr + at, x.to(DTYPE), mask=inside)
        if NORM:
            squares = tl.sum(x * x)
    if NORM:
        x = (x * tl.rsqrt(squares / HIDDEN + eps) * weight).to(DTYPE)
        tl.store(out_ptr + at, x, mask=inside)
    if QUANTISED:
        codes, scales, sums = quantise_groups(x.to(tl.float32))
        at_group = row * (HIDDEN // 32) + group
        tl.store(codes_ptr + at, codes, mask=inside)
        tl.store(scales_ptr + at_group, scales, mask=group < HIDDEN // 32)
        tl.store(sums_ptr + at_group, sums, mask=group < HIDDEN // 32)


@triton.jit(do_not_specialize_on_alignment=["at_ptr"])  # a part of a longer tensor: it may begin anywhere
def _heads_kernel(
    qkv_ptr, value_ptr, q_weight_ptr, k_weight_ptr, rope_ptr, at_ptr, query_ptr, keys_ptr, values_ptr, T, S, eps,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, KEY_DIM: tl.constexpr, R: tl.constexpr, GATED: tl.constexpr,
    OWN_VALUES: tl.constexpr, APART: tl.constexpr, VALUE_NORM: tl.constexpr, CACHE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_H heads of one row per program: of queries, then of keys, then of values.

    The other half of a rotated pair is loaded a second time, from L1, rather than moved between threads. All but the row
    is loaded before the row is there.
    """
    let_next_begin()
    Q_BLOCKS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    K_BLOCKS: tl.constexpr = (KV + BLOCK_H - 1) // BLOCK_H
    Q_STEP: tl.constexpr = D * (2 if GATED else 1)
    WIDTH: tl.constexpr = H * Q_STEP + KV * D * (2 if OWN_VALUES else 1)
    DTYPE: tl.constexpr = qkv_ptr.dtype.element_ty
    t = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    position = tl.load(at_ptr + t)
    is_query = block < Q_BLOCKS
    is_value = block >= Q_BLOCKS + K_BLOCKS
    first = tl.where(is_query, block, tl.where(is_value, block - Q_BLOCKS - K_BLOCKS, block - Q_BLOCKS)) * BLOCK_H
    head = first + tl.arange(0, BLOCK_H)
    inside = (head < tl.where(is_query, H, KV))[:, None] & (d < D)[None, :]
    start = tl.where(is_query, 0, H * Q_STEP + tl.where(is_value & OWN_VALUES, KV * D, 0))
    source = qkv_ptr + t * WIDTH + start
    if APART:
        source = tl.where(is_value, value_ptr + t * (KV * D), source)
    source += head[:, None] * tl.where(is_query, Q_STEP, D)
    weight_ptr = tl.where(is_query, q_weight_ptr, k_weight_ptr)
    weight = tl.load(weight_ptr + d, mask=d < D, other=0.0)[None, :]
    turns = (d < R) & (not is_value)
    pair = tl.where(d < R // 2, d + R // 2, d - R // 2)
    if R > 0:
        pair_weight = tl.load(weight_ptr + pair, mask=turns, other=0.0)[None, :]
    if KEY_DIM < D:  # the queries take over the keys' weight
        taken = (d % (D // 2) >= KEY_DIM // 2) & (d < tl.where(is_query, D, 0))
        weight *= tl.load(k_weight_ptr + d, mask=taken, other=1.0)[None, :]
        pair_weight *= tl.load(k_weight_ptr + pair, mask=taken & turns, other=1.0)[None, :]
    if R > 0:
        cos = tl.load(rope_ptr + position * 2 * R + d, mask=turns, other=1.0).to(tl.float32)[None, :]
        sin = tl.load(rope_ptr + position * 2 * R + R + d, mask=turns, other=0.0).to(tl.float32)[None, :]
    await_previous()
    x = tl.load(source + d[None, :], mask=inside, other=0.0).to(tl.float32)
    if R > 0:
        other = tl.load(source + pair[None, :], mask=inside & turns[None, :], other=0.0).to(tl.float32)
    rms = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]

    slot = t if CACHE == "none" else position
    writable = slot < S
    if CACHE == "ring":
        slot = position % S
        writable = t >= T - S
    written = (head < tl.where(writable, KV, 0))[:, None] & (d < D)[None, :]
    row = head[:, None] * S + slot
    if is_value:
        value = (x * rms if VALUE_NORM else x).to(DTYPE)
        tl.store(values_ptr + row * D + d[None, :], value, mask=written)
    else:
        turned = (x * rms * weight).to(DTYPE)
        if R > 0:
            other = (other * rms * pair_weight).to(DTYPE).to(tl.float32)
            turned = ((turned.to(tl.float32) * cos).to(DTYPE).to(tl.float32) + other * sin).to(DTYPE)
        if is_query:
            tl.store(query_ptr + (t * H + head[:, None]) * D + d[None, :], turned, mask=inside)
        else:
            number = d
            if KEY_DIM < D:
                number = tl.where(d < D // 2, d, d - (D - KEY_DIM) // 2)
                written &= (d % (D // 2) < KEY_DIM // 2)[None, :]
            tl.store(keys_ptr + row * KEY_DIM + number[None, :], turned, mask=written)


RMS_NORM = RmsNorm()
QK_NORM_ROPE = QkNormRope()
