# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention of one new token on a static cache: split-KV decode ("Flash-Decoding", Dao et al. 2023).

The kernel is bound by reading keys and values once. The query heads that share a KV head are the rows of one tile, so nothing
is read twice. The cache is divided into enough splits to keep every multiprocessor busy, and a second launch combines their
results in a fixed order. If the next matrix wants its operand in 8 bits, that launch quantizes the result, too. The number of
splits follows from the size of the buffer and their length from the sequence length, which is read on the device: the same
launches (and the same CUDA graph) serve every length and read no more than that length. The first keys and values are loaded
while the launches before this one finish.

Slots are the rows of a tile, and heads its columns, of which a product needs only eight. In a decode step, the next matrix is
loaded into registers at the same time, so few registers and blocks may matter more than the kernel's own time.

If keys equal values except in the numbers that the rotary embedding turns, the cache holds only those of each key (see
`toolkit.kernels.shared_keys`). A tile of values then serves both products.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.core.errors import ModelError
from toolkit.core.units import KiB
from toolkit.kernels.base import Config, Cost, Kernel, Launch, Shape, Tensors, config_grid
from toolkit.kernels.checks import check_tensor
from toolkit.kernels.early import INTERPRETED, after_previous, await_previous, let_next_begin
from toolkit.kernels.packed import quantise_groups
from toolkit.kernels.shared_keys import whole_keys
from toolkit.weights.packed import ACTIVATIONS_PER_SCALE

LOG2_E = 1.4426950408889634
COMBINE_TILE = 4096  # partial sums that a block of the second launch holds
# Blocks per launch: from a few, which leave room for the next matrix, to two for each of a GPU's multiprocessors.
BLOCK_TARGETS = (32, 64, 108, 132, 264)


@dataclass(frozen=True)
class AttentionShape(Shape):
    """One token on a cache of `slots`. `window` is 0 for all positions. A cache with slots <= window is a ring.

    With `scaled`, scores are multiplied by 1 / sqrt(head_dim), as in nearly all models except Gemma 4. With a `key_dim`, the
    cache holds so many numbers of each key, and the others equal the value's. 0 means whole keys.
    """

    heads: int
    kv_heads: int
    head_dim: int
    slots: int
    window: int = 0
    dtype: str = "bfloat16"
    scaled: bool = True
    key_dim: int = 0

    @property
    def stored(self) -> int:
        """How many numbers of a key the cache holds."""
        return self.key_dim or self.head_dim

    @property
    def scale(self) -> float:
        """The factor for the scores."""
        return self.head_dim**-0.5 if self.scaled else 1.0

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def seen(self) -> int:
        """The largest number of slots that a token sees."""
        return min(self.slots, self.window) if self.window else self.slots

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found


@dataclass(frozen=True)
class DecodeShape(AttentionShape):
    """With `quantised`, the result is returned in 8 bits, too (see `toolkit.weights.packed.quantize_activations`)."""

    quantised: bool = False


class AttentionDecode(Kernel):
    """query [1, 1, H, D] on keys and values [1, KV heads, slots, D] -> [1, 1, H * D], softmax in fp32.

    `positions` [1] (int32 or int64, on the device) is that of the token, whose key and value are written already; -1 stands for
    an empty cache and gives zeros. If this launch may start before the two before it end, these may write neither the position
    nor anything in the cache but the token's key and value: all else is read before they end.
    If the shape has a `key_dim`, keys are [1, KV heads, slots, key_dim]: the first key_dim / 2 numbers of each half of a head.
    Slots that the token doesn't see may hold anything, including NaN. Keys and values may be views of the first slots of longer
    buffers. A quantised result has codes int8 [1, 1, H * D], and scales and sums fp32 [1, 1, H * D / 32].
    """

    name = "attention_decode"
    shape_type = DecodeShape
    lengths = ("slots", "quantised")
    carveouts = (50, 0)
    known: ClassVar[Mapping[str, AttentionShape]] = {
        "gemma4-31b full 32k": DecodeShape(32, 4, 512, 32768, scaled=False, key_dim=128, quantised=True),
        "gemma4-31b full 256": DecodeShape(32, 4, 512, 256, scaled=False, key_dim=128, quantised=True),
        "gemma4-31b sliding": DecodeShape(32, 16, 256, 1024, scaled=False, quantised=True),
        "gemma4-31b sliding 256": DecodeShape(32, 16, 256, 256, scaled=False, quantised=True),
        "qwen3-8b 8k": DecodeShape(32, 8, 128, 8192, quantised=True),
        "qwen3-8b 256": DecodeShape(32, 8, 128, 256, quantised=True),
        "qwen3.5-35b-a3b 32k": DecodeShape(16, 2, 256, 32768),
        "qwen3.5-35b-a3b 256": DecodeShape(16, 2, 256, 256),
    }

    def space(self, shape: Shape) -> Sequence[Config]:
        """Return configs that load enough ahead of a block's products, or all of a split: otherwise the memory is idle."""
        assert isinstance(shape, AttentionShape)
        row = (shape.stored + shape.head_dim) * shape.torch_dtype.itemsize  # bytes of a slot's key and value
        blocks = [n for n in (16, 32, 64, 128) if 16 * KiB <= n * row <= 128 * KiB] or [16]
        default = Config(block_n=blocks[0], splits=splits_for(shape, 132), warps=4, stages=2)
        found = [default]
        for config in config_grid(default, stages=(2, 3, 4), block_n=blocks, splits=sorted(splits_of(shape))):
            block, most = config["block_n"], config.stages - 1
            slots = triton.cdiv(shape.seen, config["splits"])
            if min(32 * KiB, slots * row) <= most * block * row <= 192 * KiB and (most - 1) * block < slots:
                found.append(config)
        return list(dict.fromkeys(found))

    def inputs(self, shape: Shape, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
        """Return values and scores of unit variance; for caches of positions, a few slots of 1,000 lie beyond the length."""
        assert isinstance(shape, AttentionShape)
        sizes = {"query": (1, 1, shape.heads, shape.head_dim), **cached_sizes(shape)}
        if torch.device(device).type == "meta":
            made = {name: torch.empty(size, dtype=shape.torch_dtype, device=device) for name, size in sizes.items()}
            return {**made, "positions": torch.empty(1, dtype=torch.int64, device=device)}
        random = torch.Generator(device).manual_seed(seed)
        tail = min(3, shape.slots - 1) if not shape.window or shape.slots > shape.window else 0
        position = shape.slots - 1 - tail if tail else shape.slots + shape.slots // 3
        query, keys, values = (
            torch.randn(size, generator=random, device=device).to(shape.torch_dtype) for size in sizes.values()
        )
        query = query if shape.scaled else query * shape.head_dim**-0.5
        if tail:
            keys[:, :, -tail:], values[:, :, -tail:] = 1000, 1000
        return {"query": query, "keys": keys, "values": values, "positions": torch.tensor([position], device=device)}

    def reference(self, shape: Shape, inputs: Tensors) -> tuple[Tensor, ...]:
        assert isinstance(shape, AttentionShape)
        return (attend(shape, inputs["query"], inputs["keys"], inputs["values"], inputs["positions"]),)

    def outputs(self, shape: Shape, inputs: Tensors) -> dict[str, Tensor]:
        """Return the result, then its quantization if asked for, which follows from it to the bit, and then scratch: partial
        sums and weights for the largest number of splits of any config.
        """
        assert isinstance(shape, DecodeShape)
        device, splits, width = inputs["query"].device, splits_for(shape, max(BLOCK_TARGETS)), shape.heads * shape.head_dim
        found = {"output": torch.empty(1, 1, width, dtype=shape.torch_dtype, device=device)}
        if shape.quantised:
            found["codes"] = torch.empty(1, 1, width, dtype=torch.int8, device=device)
            for name in ("scales", "sums"):
                found[name] = torch.empty(1, 1, width // ACTIVATIONS_PER_SCALE, device=device)
        found["partial"] = torch.empty(shape.kv_heads, splits, shape.group, shape.head_dim, device=device)
        return {**found, "weights": torch.empty(shape.kv_heads, splits, shape.group, device=device)}

    def launches(self, shape: Shape, config: Config, inputs: Tensors, outputs: Tensors) -> Sequence[Launch]:
        assert isinstance(shape, DecodeShape)
        check_tensors(shape, inputs, tokens=1)
        strides = {"key_stride": inputs["keys"].stride(1), "value_stride": inputs["values"].stride(1)}
        constants = {"KEY_DIM": shape.stored, "QUANTISED": shape.quantised}
        found = split_launches(shape, config, outputs, _decode, {**inputs, **strides, **results(outputs)}, constants)
        return found[:1] if config["splits"] == 1 else found

    def cost(self, shape: Shape) -> Cost:
        assert isinstance(shape, AttentionShape)
        size = shape.torch_dtype.itemsize
        once = 2 * shape.heads * shape.head_dim * size
        cached = shape.kv_heads * shape.seen * (shape.stored + shape.head_dim) * size
        peak = "bf16_flops" if size == 2 else "fp32_flops"
        return Cost(once + cached, 4.0 * shape.heads * shape.seen * shape.head_dim, peak)


def cached_sizes(shape: AttentionShape) -> dict[str, tuple[int, ...]]:
    """Return the sizes of the cache's keys and values."""
    slots = (1, shape.kv_heads, shape.slots)
    return {"keys": (*slots, shape.stored), "values": (*slots, shape.head_dim)}


def attend(shape: AttentionShape, query: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """The reference: computes in fp32 and returns [1, 1, H * D] in the dtype of the shape."""
    slots = torch.arange(shape.slots, device=query.device)
    seen = slots <= positions
    if shape.window and shape.slots > shape.window:
        seen &= slots > positions - shape.window
    rows = query.float().view(shape.kv_heads, shape.group, shape.head_dim)
    keys = whole_keys(keys, values)
    scores = torch.bmm(rows, keys[0].float().transpose(1, 2)) * shape.scale
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1).masked_fill(~seen, 0)  # if all are hidden, NaN becomes zero
    out = torch.bmm(weights, values[0].float().masked_fill(~seen[:, None], 0))
    return out.view(1, 1, -1).to(shape.torch_dtype)


def split_launches(
    shape: DecodeShape,
    config: Config,
    outputs: Tensors,
    function: Any,
    arguments: Mapping[str, Any],
    constants: Mapping[str, int] = MappingProxyType({}),
) -> list[Launch]:
    """Launch `function` for every split of every KV head, and a second launch that combines the splits.

    `arguments` and `constants` are passed in addition to those that all split-KV decoders need.
    """
    splits, block = config["splits"], config["block_n"]
    if splits > outputs["partial"].shape[1]:
        found = f"scratch for {outputs['partial'].shape[1]}"
        raise ModelError(f"{splits} splits of {shape.slots} slots", found, "Choose a config of this shape's space")
    if shape.quantised and shape.head_dim % ACTIVATIONS_PER_SCALE:
        raise ModelError(f"8 bits with head_dim {shape.head_dim}", "heads share a scale", "Leave out quantised=True")
    # The number of slots is an argument, not a constant, so caches of any length share a program. A ring is seen whole.
    shared = {"positions": arguments["positions"], "capacity": shape.slots}
    shared |= {name: outputs[name] for name in ("partial", "weights")}
    sizes = {"WINDOW": shape.window if shape.slots > shape.window else 0, "SPLITS": splits, "BLOCK_N": block}
    sizes |= {"GROUP": shape.group, "HEAD_DIM": shape.head_dim}
    own = {"BLOCK_M": max(8, triton.next_power_of_2(shape.group)), **constants}
    numbers = {**arguments, **shared, "scale": shape.scale * LOG2_E}
    grid, few = (shape.kv_heads, splits), min(config.carveout, 0)  # blocks of the second launch need little shared memory
    first = Launch(
        function, grid, numbers, {**sizes, **own}, config.warps, config.stages, early=True, carveout=config.carveout
    )  # fmt: skip
    columns = min(shape.head_dim, max(ACTIVATIONS_PER_SCALE, COMBINE_TILE // triton.next_power_of_2(splits)))
    sizes |= {"COLUMNS": columns, "QUANTISED": shape.quantised}
    grid = (shape.kv_heads, shape.group * shape.head_dim // columns)
    return [first, Launch(_combine, grid, {**shared, **results(outputs)}, sizes, early=True, carveout=few)]


def results(outputs: Tensors) -> dict[str, Tensor]:
    """Return the tensors of the result. Without a quantization, the output stands for its tensors."""
    return {name: outputs.get(name, outputs["output"]) for name in ("output", "codes", "scales", "sums")}


def splits_of(shape: AttentionShape) -> set[int]:
    """Return the numbers of splits that configs may have."""
    return {splits_for(shape, target) for target in BLOCK_TARGETS}


def splits_for(shape: AttentionShape, blocks: int) -> int:
    """Return the number of splits that gives about `blocks` blocks, with at least some 16 slots each.

    For few slots it is a power of two, so that few lengths need a program of their own.
    """
    return max(1, min(blocks // shape.kv_heads, triton.next_power_of_2(triton.cdiv(shape.seen, 16))))


def check_tensors(shape: AttentionShape, inputs: Tensors, tokens: int) -> None:
    """Raise ModelError if the kernels can't read `inputs`: sizes, dtypes, devices, strides."""
    check_query(shape, inputs, tokens)
    for name, size in cached_sizes(shape).items():
        check_cached(name, inputs[name], size, shape.torch_dtype, inputs["query"])


def check_query(shape: AttentionShape, inputs: Tensors, tokens: int) -> None:
    """Raise ModelError if the kernels don't support the shape, the query or the positions."""
    dim, asked = shape.head_dim, f"attention of {shape.heads} heads on {shape.kv_heads}, head_dim {shape.head_dim}"
    if shape.kv_heads < 1 or shape.heads < 1 or shape.heads % shape.kv_heads:
        raise ModelError(asked, "the heads don't divide by the KV heads", "Give a whole number of heads for each KV head")
    if dim not in (16, 32, 64, 128, 256, 512):
        raise ModelError(asked, f"head_dim is {dim}", "Give a power of two from 16 to 512")
    if shape.key_dim not in (0, 16, 32, 64, 128, 256) or shape.key_dim >= dim:
        raise ModelError(asked, f"key_dim is {shape.key_dim}", "Give 0, or a power of two from 16 to half of head_dim")
    if shape.slots < 1:
        raise ModelError(asked, f"the cache has {shape.slots} slots", "Give at least one")
    query = inputs["query"]
    check_tensor("attention", "query", query, (1, tokens, shape.heads, dim), shape.torch_dtype, query)
    positions = inputs["positions"]  # the position of a step may be one element of a longer array
    check_tensor("attention", "positions", positions, (tokens,), (torch.int32, torch.int64), query, positions.element_size())


def check_cached(name: str, cached: Tensor, shape: Sequence[int], dtype: torch.dtype, like: Tensor) -> None:
    """Raise ModelError unless each head of `cached` is contiguous with this shape and dtype, as in views of slots."""
    if tuple(cached.shape) != tuple(shape):
        found = f"shape {list(cached.shape)} where {list(shape)} is needed"
        raise ModelError(f"attention, {name}", found, "Give it in that shape")
    check_tensor("attention", name, cached[:, :1], (1, 1, *shape[2:]), dtype, like)


ATTENTION_DECODE = AttentionDecode()
"""The one instance."""


@triton.jit
def dot(a, b, total):
    """Return total + a @ b. fp32 operands are not rounded to tf32. The interpreter can't multiply bf16."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def seen_slots(positions, capacity, WINDOW: tl.constexpr):
    """Return (first, end) of the slots that the token sees. A ring is seen from its first slot to the last one written."""
    end = tl.load(positions).to(tl.int32) + 1
    first = tl.maximum(end - WINDOW, 0) if WINDOW > 0 else 0
    return first, tl.minimum(end, capacity)


@triton.jit
def split_length(first, end, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the slots per split, and the number of splits that have work (at least one)."""
    length = tl.maximum(end - first, 0)
    each = tl.maximum(tl.cdiv(length, SPLITS), BLOCK_N)
    return each, tl.maximum(tl.cdiv(length, each), 1)


@triton.jit
def key_numbers(HEAD_DIM: tl.constexpr, KEY_DIM: tl.constexpr):
    """Return which numbers of a head the stored KEY_DIM numbers of a key are."""
    numbers = tl.arange(0, KEY_DIM)
    if KEY_DIM < HEAD_DIM:
        numbers = tl.where(numbers < KEY_DIM // 2, numbers, numbers + (HEAD_DIM - KEY_DIM) // 2)
    return numbers


@triton.jit
def shared_numbers(HEAD_DIM: tl.constexpr, KEY_DIM: tl.constexpr):
    """Return which numbers of a head are not stored for keys, as [HEAD_DIM] booleans."""
    return tl.arange(0, HEAD_DIM) % (HEAD_DIM // 2) >= KEY_DIM // 2


@triton.jit(do_not_specialize_on_alignment=["positions"])  # a part of a longer tensor: it may begin anywhere
def _decode(
    query, keys, values, positions, partial, weights, output, codes, scales, sums, key_stride, value_stride, scale, capacity,
    WINDOW: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, KEY_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, QUANTISED: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One split of one KV head: the weighted mean of its values for each query head, and the log of their weight.

    Keys and values of earlier tokens may be loaded before the turn, so the new token's are taken in when it has come. A single
    split is the result.
    """
    let_next_begin()
    head, split = tl.program_id(0), tl.program_id(1)
    keys += head.to(tl.int64) * key_stride
    values += head.to(tl.int64) * value_stride
    first, end = seen_slots(positions, capacity, WINDOW)
    each, active = split_length(first, end, SPLITS, BLOCK_N)
    start = first + split * each
    stop = tl.minimum(start + each, end)
    heads, dims, key_dims = tl.arange(0, BLOCK_M), tl.arange(0, HEAD_DIM), tl.arange(0, KEY_DIM)
    tile = heads[None, :] * HEAD_DIM + dims[:, None]
    key_tile = heads[None, :] * HEAD_DIM + key_numbers(HEAD_DIM, KEY_DIM)[:, None]
    real = heads < GROUP
    new = tl.load(positions).to(tl.int32) % capacity
    q = tl.zeros((KEY_DIM, BLOCK_M), query.dtype.element_ty)
    q_shared = tl.zeros((HEAD_DIM, BLOCK_M), query.dtype.element_ty)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    mean = tl.zeros((HEAD_DIM, BLOCK_M), tl.float32)
    for slot in range(start, stop, BLOCK_N):
        slots = slot + tl.arange(0, BLOCK_N)
        old = (slots < stop) & (slots != new)
        # Slots beyond the length are not loaded: they may hold NaN, which a weight of zero would not hide.
        k = tl.load(keys + slots[:, None] * KEY_DIM + key_dims[None, :], mask=old[:, None], other=0)
        v = tl.load(values + slots[None, :] * HEAD_DIM + dims[:, None], mask=old[None, :], other=0)
        if after_previous(slot) == start:  # the first blocks were loaded before: the compiler does so ahead of the loop
            q = tl.load(query + head * GROUP * HEAD_DIM + key_tile, mask=real[None, :], other=0)
            if KEY_DIM < HEAD_DIM:
                shared = shared_numbers(HEAD_DIM, KEY_DIM)[:, None] & real[None, :]
                q_shared = tl.load(query + head * GROUP * HEAD_DIM + tile, mask=shared, other=0)
            if (new >= start) & (new < stop):
                own = tl.load(keys + new * KEY_DIM + key_dims).to(tl.float32)
                own_value = tl.load(values + new * HEAD_DIM + dims).to(tl.float32)
                peak = tl.sum(q.to(tl.float32) * own[:, None], 0)
                if KEY_DIM < HEAD_DIM:
                    peak += tl.sum(q_shared.to(tl.float32) * own_value[:, None], 0)
                peak *= scale
                total += 1
                mean += own_value[:, None]
        scores = dot(k, q, tl.zeros((BLOCK_N, BLOCK_M), tl.float32))
        if KEY_DIM < HEAD_DIM:
            scores = dot(tl.trans(v), q_shared, scores)
        scores = tl.where(old[:, None], scores * scale, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 0))
        shrink, p = tl.exp2(peak - new_peak), tl.exp2(scores - new_peak[None, :])
        total = total * shrink + tl.sum(p, 0)
        mean = dot(v, p.to(v.dtype), mean * shrink[None, :])
        peak = new_peak
    await_previous()
    total = tl.where(total > 0, total, 1)  # nothing seen: zeros with no weight, since the peak is -inf
    mean = mean / total[None, :]
    if SPLITS == 1:
        first = head * GROUP * HEAD_DIM
        _store(tl.trans(mean), first, output, codes, scales, sums, GROUP * HEAD_DIM, BLOCK_M * HEAD_DIM, QUANTISED)
    elif split < active:
        at = (head * SPLITS + split) * GROUP
        tl.store(partial + at * HEAD_DIM + tile, mean, mask=real[None, :])
        tl.store(weights + at + heads, peak + tl.log2(total), mask=real)


@triton.jit
def _store(
    found, first, output, codes, scales, sums, COUNT: tl.constexpr, SIZE: tl.constexpr, QUANTISED: tl.constexpr
):  # fmt: skip
    """Store the first COUNT of SIZE numbers, and their quantization, from position `first` on."""
    WIDTH: tl.constexpr = 32 if QUANTISED else 16
    group = tl.arange(0, SIZE // WIDTH)
    there = group < COUNT // WIDTH
    at = first + group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    found = tl.reshape(found.to(output.dtype.element_ty), (SIZE // WIDTH, WIDTH))
    tl.store(output + at, found, mask=there[:, None])
    if QUANTISED:
        number, scale, sum = quantise_groups(found.to(tl.float32))
        tl.store(codes + at, number, mask=there[:, None])
        tl.store(scales + first // 32 + group, scale, mask=there)
        tl.store(sums + first // 32 + group, sum, mask=there)


@triton.jit(do_not_specialize_on_alignment=["positions"])  # a part of a longer tensor: it may begin anywhere
def _combine(
    partial, weights, positions, output, codes, scales, sums, capacity,
    WINDOW: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr, QUANTISED: tl.constexpr,
):  # fmt: skip
    """Average the splits by their weight, for COLUMNS of the GROUP x HEAD_DIM columns, which belong to a single row."""
    let_next_begin()
    head, column = tl.program_id(0), tl.program_id(1) * COLUMNS
    first, end = seen_slots(positions, capacity, WINDOW)
    _, active = split_length(first, end, SPLITS, BLOCK_N)
    splits = tl.arange(0, triton.next_power_of_2(SPLITS))
    there = splits < active
    columns = column + tl.arange(0, COLUMNS)
    row = (head * SPLITS + splits) * GROUP
    await_previous()
    weight = tl.load(weights + row + column // HEAD_DIM, mask=there, other=float("-inf"))
    mean = tl.load(partial + row[:, None] * HEAD_DIM + columns[None, :], mask=there[:, None], other=0)
    peak = tl.max(weight, 0)
    share = tl.exp2(weight - tl.where(peak > float("-inf"), peak, 0))  # nothing seen: all weights are -inf
    total = tl.sum(share, 0)
    found = tl.sum(mean * share[:, None], 0) / tl.where(total > 0, total, 1)
    first = head * GROUP * HEAD_DIM + column
    _store(found, first, output, codes, scales, sums, COLUMNS, COLUMNS, QUANTISED)
