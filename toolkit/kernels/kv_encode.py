# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Quantizes new keys and values (`kv_codes`) and writes them to a cache: one launch for both.

The launch itself bounds the kernel for one token, writing bounds it for a prompt. A tile has some tokens of one KV head, at
least as many as a matrix product has rows, because the rotation is one.
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
from toolkit.kernels import kv_codes
from toolkit.kernels.attention import check_cached, dot
from toolkit.kernels.attention_codes import LEVEL_UNIT, level_of
from toolkit.kernels.base import Config, Cost, Kernel, Launch, Shape, Tensors, config_grid
from toolkit.kernels.checks import check_tensor
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
    codes equal those of the reference except for a few in a million.
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
        return config_grid(Config(block_m=16, warps=8), warps=(4, 8, 16), block_m=(16,))

    def inputs(self, shape: Shape, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
        """Return keys and values of unit variance for the end of the cache, and a cache of zeros."""
        assert isinstance(shape, EncodeShape)
        meta = torch.device(device).type == "meta"
        random = None if meta else torch.Generator(device).manual_seed(seed)
        size, last = (1, shape.kv_heads, shape.tokens, shape.head_dim), shape.slots + shape.ring * shape.slots // 3
        made = {name: torch.randn(size, generator=random, device=device).to(shape.torch_dtype) for name in ("key", "value")}
        made["positions"] = torch.arange(last - shape.tokens, last, device=device)
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
        constants = {"SLOTS": shape.slots, "RING": shape.ring, "HEAD_DIM": shape.head_dim, "BLOCK_M": config["block_m"]}
        constants |= {"KEY_BITS": shape.scheme.key_bits, "VALUE_BITS": shape.scheme.value_bits}
        grid = (triton.cdiv(shape.tokens, config["block_m"]), shape.kv_heads, 2)
        numbers = {**arguments, **{name: outputs[name] for name in CACHES}, **strides, "tokens": shape.tokens}
        return [Launch(_encode, grid, numbers, constants, config.warps, config.stages)]

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
        turned = 2.0 * shape.head_dim**2 / 4 * sum(b == 4 for b in (shape.scheme.key_bits, shape.scheme.value_bits))
        return Cost(rows * (read + shape.scheme.bytes_per_token(shape.head_dim)), rows * turned)


KV_ENCODE = KvEncode()
"""The one instance."""

_LEVELS = levels()[8:]  # the positive ones
BORDERS = tl.constexpr(tuple(((_LEVELS[1:] + _LEVELS[:-1]) / 2).tolist()))
TRIALS = tl.constexpr(len(kv_codes.TRIALS))
SMALLEST, STEP = tl.constexpr(kv_codes.TRIALS[0]), tl.constexpr(kv_codes.TRIALS[1] - kv_codes.TRIALS[0])
TINY = tl.constexpr(torch.finfo(torch.float16).tiny)  # the divisor for zeros


@triton.jit
def _encode(
    key, value, positions, signs, keys, key_scales, values, value_scales,
    key_head, value_head, key_token, value_token,
    keys_stride, key_scales_stride, values_stride, value_scales_stride, tokens,
    SLOTS: tl.constexpr, RING: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
):  # fmt: skip
    """Some tokens of one KV head: their keys, or their values."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at = tl.load(positions + rows, mask=rows < tokens, other=-1).to(tl.int32)
    if RING:
        written = (at >= 0) & (rows >= tokens - SLOTS)
        slots = at % SLOTS
    else:
        written = (at >= 0) & (at < SLOTS)
        slots = at
    vectors, stride = key + head * key_head, key_token
    words, scales = keys + head * keys_stride, key_scales + head * key_scales_stride
    if tl.program_id(2) == 1:
        vectors, stride = value + head * value_head, value_token
        words, scales = values + head * values_stride, value_scales + head * value_scales_stride
    if KEY_BITS == VALUE_BITS:  # noqa: SIM114  (decided when compiled: one copy of the code)
        _encode_rows(vectors, stride, signs, words, scales, rows, slots, written, KEY_BITS, HEAD_DIM, BLOCK_M)
    elif tl.program_id(2) == 0:
        _encode_rows(vectors, stride, signs, words, scales, rows, slots, written, KEY_BITS, HEAD_DIM, BLOCK_M)
    else:
        _encode_rows(vectors, stride, signs, words, scales, rows, slots, written, VALUE_BITS, HEAD_DIM, BLOCK_M)


@triton.jit
def _encode_rows(
    vectors, stride, signs, words, scales, rows, slots, written,
    BITS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Quantize vectors [BLOCK_M, HEAD_DIM], in as many parts as a word has fields, to words and scales."""
    WORDS: tl.constexpr = HEAD_DIM * BITS // 16
    part = tl.arange(0, WORDS)
    there = written[:, None]
    found = vectors + rows.to(tl.int64)[:, None] * stride + part[None, :]
    a = tl.load(found, mask=there, other=0).to(tl.float32)
    b = tl.load(found + WORDS, mask=there, other=0).to(tl.float32)
    if BITS == 8:
        peak = tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1))
        scale = (peak / 127).to(tl.float16)
        step = tl.maximum(scale.to(tl.float32), TINY)[:, None]
        code = (_byte(a, step) & 255) | (_byte(b, step) << 8)
    else:
        c = tl.load(found + 2 * WORDS, mask=there, other=0).to(tl.float32) * tl.load(signs + 2 * WORDS + part)
        d = tl.load(found + 3 * WORDS, mask=there, other=0).to(tl.float32) * tl.load(signs + 3 * WORDS + part)
        a, b, c, d = _turn(a * tl.load(signs + part), b * tl.load(signs + WORDS + part), c, d, BLOCK_M, WORDS)
        rms = tl.sqrt(tl.sum(a * a + b * b + c * c + d * d, 1) / HEAD_DIM)
        scale, least = tl.zeros((BLOCK_M,), tl.float16), tl.full((BLOCK_M,), float("inf"), tl.float32)
        code = tl.zeros((BLOCK_M, WORDS), tl.int32)
        for trial in range(TRIALS):
            tried = (rms * (SMALLEST + trial * STEP)).to(tl.float16)
            step = tl.maximum(tried.to(tl.float32), TINY)[:, None]
            w, x, y, z = _nearest(a / step), _nearest(b / step), _nearest(c / step), _nearest(d / step)
            lost = tl.sum(_square(w, step, a) + _square(x, step, b) + _square(y, step, c) + _square(z, step, d), 1)
            better = lost < least
            code = tl.where(better[:, None], w | (x << 4) | (y << 8) | (z << 12), code)
            scale, least = tl.where(better, tried, scale), tl.where(better, lost, least)
    tl.store(words + slots.to(tl.int64)[:, None] * WORDS + part[None, :], code.to(tl.int16), mask=there)
    tl.store(scales + slots, scale, mask=written)


@triton.jit
def _turn(a, b, c, d, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """The orthogonal Hadamard transform of rows of length 4 SIZE, passed and returned as quarters [ROWS, SIZE]."""
    parity = tl.arange(0, SIZE)[:, None] & tl.arange(0, SIZE)[None, :]
    parity ^= parity >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    matrix = (1 - 2 * (parity & 1)).to(tl.float16)
    zero = tl.zeros((ROWS, SIZE), tl.float32)
    a, b = dot(a.to(tl.float16), matrix, zero), dot(b.to(tl.float16), matrix, zero)
    c, d = dot(c.to(tl.float16), matrix, zero), dot(d.to(tl.float16), matrix, zero)
    a, b, c, d = a + b, a - b, c + d, c - d
    unit = 1 / tl.sqrt(4.0 * SIZE)
    return (a + c) * unit, (b + d) * unit, (a - c) * unit, (b - d) * unit


@triton.jit
def _byte(x, step):
    """Return x / step rounded to even: adding 1.5 x 2^23 leaves no fraction digits in an fp32 number."""
    whole = (x / step + 12582912.0) - 12582912.0
    return tl.minimum(tl.maximum(whole, -127.0), 127.0).to(tl.int32)


@triton.jit
def _nearest(x):
    """Return the code of the level nearest to x, using the symmetry of the levels."""
    above = tl.zeros_like(x).to(tl.int32)
    for border in tl.static_range(7):
        above += (tl.abs(x) > BORDERS[border]).to(tl.int32)
    return tl.where(x > 0, 8 + above, 7 - above)


@triton.jit
def _square(code, step, x):
    """Return the squared error of a code."""
    lost = level_of(code) * LEVEL_UNIT * step - x
    return lost * lost
