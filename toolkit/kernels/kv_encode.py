# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Quantizes new keys and values (`kv_codes`) and writes them to a cache: one launch for both.

Latency bounds the kernel for one token. A program has one vector then, rotates it by sums and differences, and tries all scales
at once, so that only few reductions follow each other. It starts and loads all but the vector while the vector is still being
computed (early.py). For a prompt, a program has some tokens of one KV head.
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
from toolkit.kernels import draws, kv_codes
from toolkit.kernels.attention import check_cached
from toolkit.kernels.attention_codes import FIFTH, FIRST, LEVEL_UNIT
from toolkit.kernels.base import Config, Cost, Kernel, Launch, Shape, Tensors, config_grid
from toolkit.kernels.checks import check_tensor
from toolkit.kernels.early import await_previous, let_next_begin
from toolkit.kernels.kv_codes import CodeScheme, encode, find_kv_scheme, levels, random_signs

CACHES = ("keys", "key_scales", "values", "value_scales")


@dataclass(frozen=True)
class EncodeShape(Shape):
    """`tokens` new keys and values for a cache of `slots`: slot = position, or with `ring` position modulo `slots`."""

    tokens: int
    kv_heads: int
    head_dim: int
    slots: int
    ring: bool = False
    codes: str = "int8"
    dtype: str = "bfloat16"

    @property
    def scheme(self) -> CodeScheme:
        return find_kv_scheme(self.codes)

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def cache(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the shape and dtype of one of `CACHES`."""
        size = (1, self.kv_heads, self.slots)
        if name.endswith("scales"):
            return size, torch.float16
        bits = self.scheme.key_bits if name == "keys" else self.scheme.value_bits
        return (*size, self.head_dim * bits // 16), torch.int16


class KvEncode(Kernel):
    """Writes new keys and values as codes to "keys", "values" and their scales, in place.

    "key" and "value" are [1, KV heads, T, D], or views of projections [1, T, KV heads, D]. "positions" [T] (int32 or int64, on
    the device) ascend by one; "signs" is fp32 [D]. Positions that are negative or have no slot in a linear cache are not
    written; of more tokens than a ring has slots, the last ones are. A number on the border of two codes may get either, so
    codes equal those of the reference except for a few in a million. If this launch may start before the one before it ends,
    that one may not write "positions" or "signs".
    """

    name = "kv_encode"
    shape_type = EncodeShape
    lengths = ("tokens", "slots")
    max_abs = 1.0  # a neighboring code in the highest bits changes a word beyond any tolerance; the cosine checks instead
    known: ClassVar[Mapping[str, EncodeShape]] = {
        "gemma4-31b full int4": EncodeShape(1, 4, 512, 32768, codes="int4"),
        "gemma4-31b full k4v8, prompt of 2048": EncodeShape(2048, 4, 512, 32768, codes="k4v8"),
        "qwen3-8b int8": EncodeShape(1, 8, 128, 32768),
    }

    def space(self, shape: Shape) -> Sequence[Config]:
        assert isinstance(shape, EncodeShape)
        words, rows = shape.head_dim * min(shape.scheme.key_bits, shape.scheme.value_bits) // 16, 1 if shape.tokens == 1 else 4
        default = Config(block_m=rows, warps=min(8, max(1, rows * words // 32)))
        every = config_grid(default, warps=(1, 2, 4, 8), block_m=(1, 2, 4, 8) if shape.tokens > 1 else (1,))
        return [c for c in every if c == default or 1 <= c["block_m"] * words / (32 * c.warps) <= 4]  # words per thread

    def inputs(self, shape: Shape, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
        """Return keys and values of unit variance for the end of the cache, and a cache of zeros."""
        assert isinstance(shape, EncodeShape)
        meta = torch.device(device).type == "meta"
        random = None if meta else torch.Generator(device).manual_seed(seed)
        size, last = (1, shape.kv_heads, shape.tokens, shape.head_dim), shape.slots + shape.ring * shape.slots // 3
        made = {name: draws.normal(size, random, device, shape.torch_dtype) for name in ("key", "value")}
        made["positions"] = draws.positions(last - shape.tokens, last, device)
        made["signs"] = random_signs(shape.head_dim, seed, device)
        for name in CACHES:
            of, dtype = shape.cache(name)
            made[name] = torch.zeros(of, dtype=dtype, device=device)
        return made

    def reference(self, shape: Shape, inputs: Tensors) -> tuple[Tensor, ...]:
        assert isinstance(shape, EncodeShape)
        at, found = inputs["positions"], {name: inputs[name].clone() for name in CACHES}
        written = (at >= 0) & ((at > at[-1] - shape.slots) if shape.ring else (at < shape.slots))
        slots = (at % shape.slots)[written].long()
        for name, bits in (("key", shape.scheme.key_bits), ("value", shape.scheme.value_bits)):
            codes, scales = encode(inputs[name][:, :, written], bits, inputs["signs"])
            found[f"{name}s"].index_copy_(2, slots, codes)
            found[f"{name}_scales"].index_copy_(2, slots, scales)
        return tuple(found.values())

    def outputs(self, shape: Shape, inputs: Tensors) -> dict[str, Tensor]:
        return {name: inputs[name] for name in CACHES}

    def results(self, shape: Shape) -> int:
        return len(CACHES)

    def launches(self, shape: Shape, config: Config, inputs: Tensors, outputs: Tensors) -> Sequence[Launch]:
        assert isinstance(shape, EncodeShape)
        self._check(shape, inputs, outputs)
        arguments = {name: inputs[name] for name in ("key", "value", "positions", "signs")}
        strides = {f"{n}_head": inputs[n].stride(1) for n in ("key", "value")}
        strides |= {f"{n}_token": inputs[n].stride(2) for n in ("key", "value")}
        strides |= {f"{name}_stride": outputs[name].stride(1) for name in CACHES}
        constants = {"RING": shape.ring, "HEAD_DIM": shape.head_dim, "BLOCK_M": config["block_m"]}
        constants |= {"KEY_BITS": shape.scheme.key_bits, "VALUE_BITS": shape.scheme.value_bits}
        grid = (triton.cdiv(shape.tokens, config["block_m"]), shape.kv_heads, 2)
        arguments |= {name: outputs[name] for name in CACHES}
        numbers = {**strides, "tokens": shape.tokens, "capacity": shape.slots}
        return [Launch(_encode, grid, {**arguments, **numbers}, constants, config.warps, config.stages, early=True)]

    def _check(self, shape: EncodeShape, inputs: Tensors, outputs: Tensors) -> None:
        least, key = 256 // min(shape.scheme.key_bits, shape.scheme.value_bits), inputs["key"]
        if shape.head_dim not in (32, 64, 128, 256, 512) or shape.head_dim < least:
            said = f"head_dim is {shape.head_dim}"
            raise ModelError(f"{shape.codes} codes", said, f"Give a power of two from {least} to 512")
        size = (1, shape.kv_heads, shape.tokens, shape.head_dim)
        for name in ("key", "value"):
            found = inputs[name]
            if tuple(found.shape) != size or found.dtype != shape.torch_dtype or found.stride(3) != 1:
                said = f"{found.dtype} {list(found.shape)}, strides {list(found.stride())}"
                raise ModelError(f"{self.name}, {name}", said, f"Give {shape.dtype} {list(size)}, rows contiguous")
        positions = inputs["positions"]
        integers = (torch.int32, torch.int64)
        check_tensor(self.name, "positions", positions, (shape.tokens,), integers, key, positions.element_size())
        check_tensor(self.name, "signs", inputs["signs"], (shape.head_dim,), torch.float32, key)
        for name in CACHES:
            check_cached(name, outputs[name], *shape.cache(name), key)

    def cost(self, shape: Shape) -> Cost:
        assert isinstance(shape, EncodeShape)
        rows = shape.tokens * shape.kv_heads
        read = 2 * shape.head_dim * shape.torch_dtype.itemsize
        turned = sum(bits == 4 for bits in (shape.scheme.key_bits, shape.scheme.value_bits))
        flops = rows * turned * shape.head_dim * math.log2(shape.head_dim)
        return Cost(rows * (read + shape.scheme.bytes_per_token(shape.head_dim)), flops)


KV_ENCODE = KvEncode()
"""The one instance."""

_LEVELS = levels()[8:]  # the positive ones
BORDERS = tl.constexpr(tuple(((_LEVELS[1:] + _LEVELS[:-1]) / 2).tolist()))
TRIALS, TRIALS_PADDED = tl.constexpr(len(kv_codes.TRIALS)), tl.constexpr(triton.next_power_of_2(len(kv_codes.TRIALS)))
SMALLEST, STEP = tl.constexpr(kv_codes.TRIALS[0]), tl.constexpr(kv_codes.TRIALS[1] - kv_codes.TRIALS[0])
TINY = tl.constexpr(kv_codes.LEAST_STEP)  # the divisor for zeros


# One program serves caches of any size. The positions are a part of a longer tensor, which may begin anywhere.
@triton.jit(
    do_not_specialize=["key_scales_stride", "value_scales_stride", "tokens", "capacity"],
    do_not_specialize_on_alignment=["positions"],
)
def _encode(
    key, value, positions, signs, keys, key_scales, values, value_scales,
    key_head, value_head, key_token, value_token,
    keys_stride, key_scales_stride, values_stride, value_scales_stride, tokens, capacity,
    RING: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
):  # fmt: skip
    """Some tokens of one KV head: their keys, or their values."""
    let_next_begin()
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at = tl.load(positions + rows, mask=rows < tokens, other=-1).to(tl.int32)
    if RING:
        written = (at >= 0) & (rows >= tokens - capacity)
        slots = at % capacity
    else:
        written = (at >= 0) & (at < capacity)
        slots = at
    vectors, stride = key + head * key_head, key_token
    words, scales = keys + head * keys_stride, key_scales + head * key_scales_stride
    if tl.program_id(2) == 1:
        vectors, stride = value + head * value_head, value_token
        words, scales = values + head * values_stride, value_scales + head * value_scales_stride
    vectors += rows.to(tl.int64)[:, None] * stride
    if KEY_BITS == VALUE_BITS:  # noqa: SIM114  (decided when compiled: one copy of the code)
        _encode_rows(vectors, signs, words, scales, slots, written, KEY_BITS, HEAD_DIM, BLOCK_M)
    elif tl.program_id(2) == 0:
        _encode_rows(vectors, signs, words, scales, slots, written, KEY_BITS, HEAD_DIM, BLOCK_M)
    else:
        _encode_rows(vectors, signs, words, scales, slots, written, VALUE_BITS, HEAD_DIM, BLOCK_M)


@triton.jit
def _encode_rows(
    vectors, signs, words, scales, slots, written, BITS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """Quantize vectors [BLOCK_M, HEAD_DIM], in as many parts as a word has fields, to words and scales."""
    FIELDS: tl.constexpr = 16 // BITS
    WORDS: tl.constexpr = HEAD_DIM // FIELDS
    part, there = tl.arange(0, WORDS)[None, :], written[:, None]
    found = vectors + part
    if BITS == 4:
        sign = _fields(tl.load(signs + part), signs + part, True, WORDS, FIELDS)
    await_previous()
    x = _fields(tl.load(found, mask=there, other=0), found, there, WORDS, FIELDS).to(tl.float32)
    if BITS == 8:
        scale = (tl.max(tl.abs(x), 1) / 127).to(tl.float16)
        step = tl.maximum(scale.to(tl.float32), TINY)[:, None]
        code = tl.minimum(tl.maximum(_whole(x / step), -127.0), 127.0).to(tl.int32) & 255
    else:
        rms = tl.sqrt(tl.sum(x * x, 1) / HEAD_DIM)  # which the rotation preserves
        x = _turned(x * sign, BLOCK_M, HEAD_DIM)
        trial = tl.arange(0, TRIALS_PADDED)[None, :]
        tried = (rms[:, None] * (SMALLEST + trial * STEP)).to(tl.float16).to(tl.float32)
        steps = tl.maximum(tried, TINY)[:, None, :]
        sizes = tl.abs(x)[:, :, None]
        error = _level(_nearest(sizes * (1 / steps))) * steps - sizes
        lost = tl.where(trial < TRIALS, tl.sum(error * error, 1), float("inf"))
        best = tl.argmin(lost, 1)[:, None]  # the first of the best
        scale = tl.sum(tl.where((trial == best) & (lost < float("inf")), tried, 0.0), 1)
        inverse = (1 / tl.maximum(scale, TINY))[:, None]
        nearest = _nearest(tl.abs(x) * inverse)
        code = ((15 + tl.where(x > 0, nearest, -nearest)) * 0.5).to(tl.int32)
        scale = scale.to(tl.float16)
    code = tl.reshape(code, (BLOCK_M, WORDS, FIELDS)) << (BITS * tl.arange(0, FIELDS))[None, None, :]
    tl.store(words + slots.to(tl.int64)[:, None] * WORDS + part, tl.sum(code, 2).to(tl.int16), mask=there)
    tl.store(scales + slots, scale, mask=written)


@triton.jit
def _fields(first, at, there, WORDS: tl.constexpr, FIELDS: tl.constexpr):
    """Return [M, WORDS * FIELDS] numbers, those of a word next to each other: `first` [M, WORDS], and the parts after it."""
    if FIELDS == 2:
        both = tl.join(first, tl.load(at + WORDS, mask=there, other=0))
    else:
        second, third = tl.load(at + WORDS, mask=there, other=0), tl.load(at + 2 * WORDS, mask=there, other=0)
        fourth = tl.load(at + 3 * WORDS, mask=there, other=0)
        both = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.reshape(both, (first.shape[0], WORDS * FIELDS))


@triton.jit
def _turned(x, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """The orthogonal Hadamard transform of rows [ROWS, SIZE], in any order of the bits of the column."""
    for bit in tl.static_range(SIZE.bit_length() - 1):
        pairs = tl.reshape(x, (ROWS * SIZE // (2 << bit), 2, 1 << bit))
        second = (tl.arange(0, 2) == 1)[None, :, None]
        x = tl.reshape(tl.sum(pairs, 1, keep_dims=True) - tl.where(second, 2 * pairs, 0.0), (ROWS, SIZE))
    return x * (1 / tl.sqrt(float(SIZE)))


@triton.jit
def _whole(x):
    """Return x rounded to even: adding 1.5 x 2^23 leaves no fraction digits in an fp32 number."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _nearest(x):
    """Return 1, 3, ... 15 for the positive level nearest to x."""
    upper = x > BORDERS[3]
    border = tl.where(upper, BORDERS[5], BORDERS[1])
    third = x > border
    border = tl.where(upper, tl.where(third, BORDERS[6], BORDERS[4]), tl.where(third, BORDERS[2], BORDERS[0]))
    return tl.where(upper, 9.0, 1.0) + tl.where(third, 4.0, 0.0) + tl.where(x > border, 2.0, 0.0)


@triton.jit
def _level(v):
    """Return the level of 2 code - 15 = v."""
    return _whole(v * (FIRST + FIFTH * (v * v) * (v * v))) * LEVEL_UNIT
