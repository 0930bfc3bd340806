# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention of several new tokens on a static cache: causal, windowed, tiles of queries (FlashAttention-2, Dao 2023).

Arithmetic bounds the kernel for a long prompt; reading the cache bounds it for a few tokens on a long one. The rows of a tile
are consecutive tokens with all query heads of one KV head, so that keys and values serve the whole group. The positions are
read on the device: one launch serves every offset, and each tile reads only the slots that some row of it sees.
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
from toolkit.core.units import KiB
from toolkit.kernels.attention import (
    LOG2_E,
    AttentionShape,
    cached_sizes,
    check_tensors,
    dot,
    key_numbers,
    shared_numbers,
)
from toolkit.kernels.base import Config, Cost, Kernel, Launch, Shape, Tensors, config_grid
from toolkit.kernels.shared_keys import whole_keys


@dataclass(frozen=True)
class PrefillShape(AttentionShape):
    """`tokens` new tokens. With `ring`, the cache is a ring without the new keys and values, which are passed separately."""

    tokens: int = 512
    ring: bool = False


class AttentionPrefill(Kernel):
    """query [1, T, H, D] on keys and values [1, KV heads, slots, D] -> [1, T, H * D], softmax in fp32.

    `positions` [T] (int32 or int64, on the device) ascend by one. A token sees its own position and those before it, limited to
    the last `window` if that isn't 0. Without `ring`, the slot index equals the position, and the keys and values of the new
    tokens are written already. With `ring`, slot s holds the last position before the new tokens that is congruent to s modulo
    the number of slots, and "new_keys" and "new_values" [1, KV heads, T, D] (or views of [1, T, KV heads, D]) are those of the
    new tokens. A cache without `ring` may hold `key_dim` numbers of each key, as in `AttentionDecode`. Rows that see nothing
    (a negative position) give zeros. Slots that were never written may hold anything, including NaN; those before the window,
    which a tile may load with the first ones in it, must hold numbers.
    """

    name = "attention_prefill"
    shape_type = PrefillShape
    lengths = ("slots", "tokens")
    known: ClassVar[Mapping[str, PrefillShape]] = {
        "gemma4-31b full 512": PrefillShape(32, 4, 512, 4096, scaled=False, key_dim=128, tokens=512),
        "gemma4-31b full 512, whole keys": PrefillShape(32, 4, 512, 4096, scaled=False, tokens=512),  # quantized caches
        "gemma4-31b sliding 2048": PrefillShape(32, 16, 256, 1024, 1024, scaled=False, tokens=2048, ring=True),
        "qwen3-8b 2048": PrefillShape(32, 8, 128, 4096, tokens=2048),
        "qwen3.5-35b-a3b 2048": PrefillShape(16, 2, 256, 4096, tokens=2048),
    }

    def space(self, shape: Shape) -> Sequence[Config]:
        assert isinstance(shape, PrefillShape)
        row = shape.head_dim * shape.torch_dtype.itemsize
        narrow = shape.torch_dtype.itemsize == 2
        widest, fewest = (64, 32) if narrow else (32, 16)  # fp32 products take more registers, and tiles more shared memory
        default = Config(block_m=max(16, min(widest, 16384 // row)), block_n=max(fewest, 16384 // row), warps=4, stages=2)
        found = config_grid(default, warps=(4, 8), stages=(2, 3), block_m=(16, 64, 128), block_n=(32, 64, 128))
        # The running means are held in registers, at most 4096 fp32 numbers per warp; more warps than needed are not faster.
        return [
            c
            for c in found
            if c == default
            or (
                c.warps == max(4, c["block_m"] * shape.head_dim // 4096)
                and 8 * KiB <= c["block_n"] * row <= 64 * KiB // (c.stages - 1)
            )
        ]

    def inputs(self, shape: Shape, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
        """Return values and scores of unit variance; the last new token fills the cache, and a ring has wrapped around once."""
        assert isinstance(shape, PrefillShape)
        new = (1, shape.kv_heads, shape.tokens, shape.head_dim)
        sizes = {"query": (1, shape.tokens, shape.heads, shape.head_dim), **cached_sizes(shape)}
        sizes |= {"new_keys": new, "new_values": new} if shape.ring else {}
        if torch.device(device).type == "meta":
            made = {name: torch.empty(size, dtype=shape.torch_dtype, device=device) for name, size in sizes.items()}
            return {**made, "positions": torch.empty(shape.tokens, dtype=torch.int64, device=device)}
        random = torch.Generator(device).manual_seed(seed)
        start = shape.slots + shape.slots // 3 if shape.ring else max(0, shape.slots - shape.tokens)
        made = {name: torch.randn(size, generator=random, device=device).to(shape.torch_dtype) for name, size in sizes.items()}
        made["query"] *= 1 if shape.scaled else shape.head_dim**-0.5
        return {**made, "positions": torch.arange(start, start + shape.tokens, device=device)}

    def reference(self, shape: Shape, inputs: Tensors) -> tuple[Tensor, ...]:
        assert isinstance(shape, PrefillShape)
        keys, values, positions = whole_keys(inputs["keys"], inputs["values"])[0], inputs["values"][0], inputs["positions"]
        held = torch.arange(shape.slots, device=keys.device)
        if shape.ring:
            last = positions[:1] - 1
            held = torch.cat((last - (last - held) % shape.slots, positions))
            keys, values = torch.cat((keys, inputs["new_keys"][0]), 1), torch.cat((values, inputs["new_values"][0]), 1)
        seen = (held <= positions[:, None]) & (held >= 0)
        if shape.window:
            seen &= held > positions[:, None] - shape.window
        out = torch.empty(shape.tokens, shape.heads, shape.head_dim, device=keys.device)
        for head in range(shape.heads):  # one at a time, because the scores of all heads may not fit
            mine = values[head // shape.group].float().masked_fill(~seen.any(0)[:, None], 0)
            scores = inputs["query"][0, :, head].float() @ keys[head // shape.group].float().T * shape.scale
            out[:, head] = scores.masked_fill(~seen, -math.inf).softmax(-1).masked_fill(~seen, 0) @ mine
        return (out.view(1, shape.tokens, -1).to(shape.torch_dtype),)

    def outputs(self, shape: Shape, inputs: Tensors) -> dict[str, Tensor]:
        assert isinstance(shape, PrefillShape)
        size = (1, shape.tokens, shape.heads * shape.head_dim)
        return {"output": torch.empty(size, dtype=shape.torch_dtype, device=inputs["query"].device)}

    def launches(self, shape: Shape, config: Config, inputs: Tensors, outputs: Tensors) -> Sequence[Launch]:
        assert isinstance(shape, PrefillShape)
        check_tensors(shape, inputs, shape.tokens)
        check_ring(shape, inputs)
        keys, values = inputs["keys"], inputs["values"]
        new_keys, new_values = (inputs["new_keys"], inputs["new_values"]) if shape.ring else (keys, values)
        arguments = {name: inputs[name] for name in ("query", "keys", "values", "positions")}
        arguments |= {"new_keys": new_keys, "new_values": new_values, "output": outputs["output"]}
        strides = {"key_stride": keys.stride(1), "value_stride": values.stride(1)}
        strides |= {"new_key_head": new_keys.stride(1), "new_key_token": new_keys.stride(2)}
        strides |= {"new_value_head": new_values.stride(1), "new_value_token": new_values.stride(2)}
        numbers = {**strides, "tokens": shape.tokens, "scale": shape.scale * LOG2_E, "capacity": shape.slots}
        constants = {
            "SLOTS": shape.slots if shape.ring and shape.slots == shape.window else 0,
            "WINDOW": shape.window,
            "RING": shape.ring,
            "KV_HEADS": shape.kv_heads,
        }
        constants |= {"GROUP": shape.group, "HEAD_DIM": shape.head_dim, "KEY_DIM": shape.stored}
        constants |= {"BLOCK_M": config["block_m"], "BLOCK_N": config["block_n"]}
        grid = (triton.cdiv(shape.tokens * shape.group, config["block_m"]), shape.kv_heads)
        return [Launch(_prefill, grid, {**arguments, **numbers}, constants, config.warps, config.stages)]

    def cost(self, shape: Shape) -> Cost:
        """Count the bytes of queries, results and each visible slot once, and the products that causality and window leave."""
        assert isinstance(shape, PrefillShape)
        size = shape.torch_dtype.itemsize
        start = shape.slots if shape.ring else max(0, shape.slots - shape.tokens)
        held = min(start, shape.window) if shape.window else start
        ends = torch.arange(start + 1, start + shape.tokens + 1, device="cpu")
        pairs = int((ends.clamp_max(shape.window) if shape.window else ends).sum())
        slots = (held + shape.tokens) * shape.kv_heads
        moved = size * (2 * shape.head_dim * shape.tokens * shape.heads + (shape.stored + shape.head_dim) * slots)
        return Cost(moved, 4.0 * pairs * shape.heads * shape.head_dim, "bf16_flops" if size == 2 else "fp32_flops")


def check_ring(shape: PrefillShape, inputs: Tensors) -> None:
    """Raise ModelError if the kernel can't read the ring, or the new keys and values."""
    if not shape.ring:
        return
    if shape.key_dim:
        raise ModelError(f"attention on a ring, key_dim {shape.key_dim}", "rings hold whole keys", "Give a key_dim of 0")
    asked, size = f"attention on a ring of {shape.slots}", (1, shape.kv_heads, shape.tokens, shape.head_dim)
    if not shape.window or shape.slots > shape.window:
        raise ModelError(asked, f"its window is {shape.window}", "Give a window of at least as many positions")
    for name in ("new_keys", "new_values"):
        found = inputs.get(name)
        if found is None or tuple(found.shape) != size or found.dtype != shape.torch_dtype or found.stride(3) != 1:
            what = "missing" if found is None else f"{found.dtype} {list(found.shape)}, strides {list(found.stride())}"
            raise ModelError(asked, f"{name} is {what}", f"Give {shape.dtype} {list(size)}, its last dimension contiguous")


ATTENTION_PREFILL = AttentionPrefill()
"""The one instance."""


@triton.jit(do_not_specialize_on_alignment=["positions"])  # a part of a longer tensor: it may begin anywhere
def _prefill(
    query, keys, values, new_keys, new_values, positions, output, key_stride, value_stride,
    new_key_head, new_key_token, new_value_head, new_value_token, tokens, scale, capacity,
    SLOTS: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, KEY_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One tile of rows: token = row // GROUP, query head = row % GROUP of those of one KV head.

    A ring that is shorter than the window has `capacity` slots instead of SLOTS, so that each length doesn't need a program.
    """
    # The last tiles see the most slots and are started first, so that the launch doesn't wait for them.
    first_row, head = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M, tl.program_id(1)
    rows, dims = first_row + tl.arange(0, BLOCK_M), tl.arange(0, HEAD_DIM)
    start = tl.load(positions).to(tl.int32)
    row = ((rows // GROUP).to(tl.int64) * KV_HEADS * GROUP + head * GROUP + rows % GROUP)[:, None] * HEAD_DIM
    at = row + dims[None, :]
    real = rows < tokens * GROUP
    key_dims = tl.arange(0, KEY_DIM)
    q = tl.load(query + row + key_numbers(HEAD_DIM, KEY_DIM)[None, :], mask=real[:, None], other=0)
    q_shared = q
    if KEY_DIM < HEAD_DIM:
        q_shared = tl.load(query + at, mask=real[:, None] & shared_numbers(HEAD_DIM, KEY_DIM)[None, :], other=0)
    row_positions = start + rows // GROUP
    lowest = start + first_row // GROUP
    highest = start + tl.minimum((first_row + BLOCK_M - 1) // GROUP, tokens - 1)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    mean = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    key_rows = keys + head.to(tl.int64) * key_stride + key_dims[None, :]
    value_rows = values + head.to(tl.int64) * value_stride + dims[None, :]
    if RING:
        # The oldest position before the new ones that the first row sees and the ring still holds.
        ring_slots = SLOTS if SLOTS > 0 else capacity
        oldest = tl.maximum(tl.maximum(lowest - WINDOW + 1, start - ring_slots), 0)
        for position in range(oldest, start, BLOCK_N):
            held = position + tl.arange(0, BLOCK_N)
            slots = (held % ring_slots)[:, None] * HEAD_DIM
            peak, total, mean = _attend(
                q, q_shared, key_rows + slots, value_rows + slots, held < start,
                row_positions, held, peak, total, mean, scale, WINDOW, KEY_DIM < HEAD_DIM, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        new_key_rows = new_keys + head.to(tl.int64) * new_key_head + dims[None, :]
        new_value_rows = new_values + head.to(tl.int64) * new_value_head + dims[None, :]
        first = tl.maximum(tl.maximum(lowest - WINDOW + 1 - start, 0), -start) // BLOCK_N * BLOCK_N
        for token in range(first, highest - start + 1, BLOCK_N):
            new = token + tl.arange(0, BLOCK_N)
            wide = new.to(tl.int64)[:, None]
            peak, total, mean = _attend(
                q, q_shared, new_key_rows + wide * new_key_token, new_value_rows + wide * new_value_token,
                (new <= highest - start) & (new + start >= 0),
                row_positions, start + new, peak, total, mean, scale, WINDOW, KEY_DIM < HEAD_DIM, BLOCK_M, BLOCK_N,
            )  # fmt: skip
    else:
        first = tl.maximum(lowest - WINDOW + 1, 0) // BLOCK_N * BLOCK_N if WINDOW > 0 else 0
        end = tl.minimum(highest + 1, capacity)
        for slot in range(first, end, BLOCK_N):
            slots = slot + tl.arange(0, BLOCK_N)
            peak, total, mean = _attend(
                q, q_shared, key_rows + slots[:, None] * KEY_DIM, value_rows + slots[:, None] * HEAD_DIM, slots < end,
                row_positions, slots, peak, total, mean, scale, WINDOW, KEY_DIM < HEAD_DIM, BLOCK_M, BLOCK_N,
            )  # fmt: skip
    mean /= tl.where(total > 0, total, 1)[:, None]
    tl.store(output + at, mean.to(output.dtype.element_ty), mask=real[:, None])


@triton.jit
def _attend(
    q, q_shared, keys, values, there, row_positions, slot_positions, peak, total, mean, scale,
    WINDOW: tl.constexpr, SHARED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Update the running peak, total weight and weighted values of each row with one block of slots.

    With SHARED, keys hold only a part of their numbers. The others are the values', by which `q_shared` is multiplied.
    """
    k = tl.load(keys, mask=there[:, None], other=0)
    scores = dot(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
    # Empty slots are not loaded: they may hold NaN, which a weight of zero would not hide.
    if SHARED:
        v = tl.load(values, mask=there[:, None], other=0)
        scores = dot(q_shared, tl.trans(v), scores)
    scores *= scale
    seen = (slot_positions[None, :] <= row_positions[:, None]) & there[None, :]
    if WINDOW > 0:
        seen &= slot_positions[None, :] > row_positions[:, None] - WINDOW
    scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(new_peak > float("-inf"), new_peak, 0)  # a row that has seen nothing yet
    shrink, p = tl.exp2(peak - base), tl.exp2(scores - base[:, None])
    if not SHARED:
        v = tl.load(values, mask=there[:, None], other=0)
    mean = dot(p.to(v.dtype), v, mean * shrink[:, None])
    return new_peak, total * shrink + tl.sum(p, 1), mean
