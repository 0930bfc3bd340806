# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"
"""Several tokens of the gated delta net, from the outputs of its input matrices to the input of its output matrix.

This is the chunked form of the gated delta rule (Yang et al., arXiv 2406.06484 and 2412.06464): within 64 tokens, the update of
each token follows from one triangular system, solved for all chunks at once; then the chunks pass through the memory one after
the other with four small matrix products each. The triangular matrix is inverted by halves: if X inverts the blocks of s rows
on the diagonal, X - X L X inverts those of 2 s rows, where L is the part between them. This is as stable as substitution and
consists of matrix products only. The latency of the tensor cores in the chain of chunks bounds the kernel, then the scratch
between the launches.
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
from toolkit.kernels.base import Config, Cost, Kernel, Launch, Shape, Tensors, config_grid
from toolkit.kernels.delta_rule import (
    INTEGERS,
    ROWS,
    DeltaShape,
    check_inputs,
    gated_norm,
    gates,
    head_constants,
    normed,
    output_weights,
    random_net,
    split_heads,
    wanted_tensors,
)

CHUNK = 64  # tokens whose updates are solved together


@dataclass(frozen=True)
class DeltaChunksShape(DeltaShape):
    """A delta net, and the number of consecutive tokens."""

    tokens: int = 512

    def check(self) -> str:
        asked = f"{self.tokens} tokens of {super().check()}"
        if self.tokens < 1:
            raise ModelError(asked, "none to work on", "Give one or more")
        return asked


class DeltaChunks(Kernel):
    """Tokens [T] -> output [T, value heads * Dv]; ring [taps, channels] and memory [value heads, Dk, Dv] are updated in place.

    Inputs are those of `DeltaStep` with a token axis first: "qkv" [T, channels], "z", "b", "a", whose rows may lie apart;
    "positions" [T] ascend by one, and only the first is read.
    """

    name = "delta_chunks"
    shape_type = DeltaChunksShape
    lengths = ("tokens", "key_heads", "value_heads")
    known: ClassVar[Mapping[str, Shape]] = {
        "qwen3.5-35b-a3b delta net, 512 tokens": DeltaChunksShape(16, 32, 128, 128, tokens=512),
        "qwen3.5-35b-a3b delta net, 2048 tokens": DeltaChunksShape(16, 32, 128, 128, tokens=2048),
    }

    def space(self, shape: Shape) -> Sequence[Config]:
        assert isinstance(shape, DeltaChunksShape)
        blocks = [n for n in (32, 16, 64) if n <= max(16, shape.value_dim)]
        return config_grid(Config(block_v=blocks[0], warps=4), warps=(4, 8), block_v=blocks)

    def inputs(self, shape: Shape, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
        assert isinstance(shape, DeltaChunksShape)
        made = random_net(shape, shape.tokens, device, seed)
        made = {n: t.view(1, -1) if shape.tokens == 1 and n in ROWS else t for n, t in made.items()}
        return {**made, "positions": draws.positions(1001, 1001 + shape.tokens, device)}

    def reference(self, shape: Shape, inputs: Tensors) -> tuple[Tensor, ...]:
        """Compute token by token."""
        assert isinstance(shape, DeltaChunksShape)
        ring, taps, first = inputs["ring"].clone(), shape.taps, inputs["positions"][:1]
        order = (first + torch.arange(1, taps, device=ring.device)) % taps
        whole = torch.cat((ring[order], inputs["qkv"])).float()
        mixed = F.silu(F.conv1d(whole.t()[None], inputs["conv"][:, None], groups=shape.channels)[0].t())
        query, key, value, gate, beta = split_heads(shape, mixed, inputs)
        memory, found = inputs["memory"].clone(), torch.empty_like(value)
        for t in range(shape.tokens):
            memory *= gate[t].exp()[:, None, None]
            known = torch.einsum("hk,hkv->hv", key[t], memory)
            memory += key[t][..., None] * ((value[t] - known) * beta[t][:, None])[:, None]
            found[t] = torch.einsum("hk,hkv->hv", query[t], memory)
        ring.index_copy_(0, (inputs["positions"] % taps)[-taps:], inputs["qkv"][-taps:])
        return gated_norm(shape, found, inputs), ring, memory

    def outputs(self, shape: Shape, inputs: Tensors) -> dict[str, Tensor]:
        """Return the results (two are inputs, written in place), and fp32 scratch between the launches."""
        assert isinstance(shape, DeltaChunksShape)
        device, heads = inputs["qkv"].device, shape.value_heads
        rows = triton.cdiv(shape.tokens, CHUNK) * CHUNK
        sizes = dict.fromkeys(("recalled", "reads", "writes"), shape.key_dim) | {"wanted": shape.value_dim, "inner": CHUNK}
        scratch = {name: torch.empty(heads, rows, size, device=device) for name, size in sizes.items()}
        return {
            "output": torch.empty(shape.tokens, heads * shape.value_dim, dtype=shape.torch_dtype, device=device),
            "ring": inputs["ring"],
            "memory": inputs["memory"],
            **scratch,
            "left": torch.empty(heads, rows // CHUNK, device=device),
            "found": torch.empty(shape.tokens, heads * shape.value_dim, device=device),
        }

    def launches(self, shape: Shape, config: Config, inputs: Tensors, outputs: Tensors) -> Sequence[Launch]:
        assert isinstance(shape, DeltaChunksShape)
        check_inputs(shape, inputs, wanted_tensors(shape, (shape.tokens,)) | {"positions": ((shape.tokens,), INTEGERS)})
        heads, strides = shape.value_heads, {f"{name}_row": inputs[name].stride(0) for name in ROWS}
        given = {**inputs, **outputs, **strides, "tokens": shape.tokens}
        scratch = ("wanted", "recalled", "reads", "writes", "inner", "left")
        constants = {**head_constants(shape), "TAPS": shape.taps, "CHUNK": CHUNK}
        rows = ("qkv_row", "b_row", "a_row")
        prepared = ("qkv", "b", "a", "conv", "decay", "dt_bias", "positions", "ring", *scratch, *rows, "tokens")
        chained = ("qkv", "positions", "ring", "memory", "found", *scratch, "qkv_row", "tokens")
        parts, chunks = triton.cdiv(shape.value_dim, config["block_v"]), triton.cdiv(shape.tokens, CHUNK)
        normed_from = ("found", "z", "norm", "output", "z_row")
        norm_rows = {name: constants[name] for name in ("VALUE_HEADS", "VALUE_DIM")} | {"EPS": float(shape.eps)}
        return [
            Launch(_prepare, (chunks, heads), {name: given[name] for name in prepared}, constants, 8, 1),
            Launch(
                _chain,
                (parts, heads),
                {name: given[name] for name in chained},
                constants | {"BLOCK_V": config["block_v"]},
                config.warps,
                config.stages,
            ),
            Launch(_norm, (shape.tokens, heads), {name: given[name] for name in normed_from}, norm_rows, 1),
        ]

    def cost(self, shape: Shape) -> Cost:
        """Count inputs and results once, the memory read and written, and the products of the chunked form."""
        assert isinstance(shape, DeltaChunksShape)
        dk, dv, heads, size = shape.key_dim, shape.value_dim, shape.value_heads, shape.torch_dtype.itemsize
        vectors = shape.tokens * size * (shape.channels + 2 * heads * dv + 2 * heads)
        products = CHUNK * (3 * dk + 2 * dv + 10 * CHUNK / 4) + 3 * dk * dv
        return Cost(vectors + 8 * heads * dk * dv, 2.0 * shape.tokens * heads * products, "tf32_flops")

    def run(self, shape: Shape, config: Config, inputs: Tensors) -> tuple[Tensor, ...]:
        """Run on copies of the ring and the memory, so that the inputs can be used again."""
        return super().run(shape, config, {**inputs, **{name: inputs[name].clone() for name in ("ring", "memory")}})

    def results(self, shape: Shape) -> int:
        return 3


DELTA_CHUNKS = DeltaChunks()
"""The one instance."""


@triton.jit(do_not_specialize_on_alignment=["positions"])  # a part of a longer tensor: it may begin anywhere
def _prepare(
    qkv, b, a, conv, decay, dt_bias, positions, ring, wanted, recalled, reads, writes, inner, left,
    qkv_row, b_row, a_row, tokens,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILED: tl.constexpr,
    TAPS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One chunk of one value head: everything that doesn't depend on the memory."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    key_head = head % KEY_HEADS if TILED else head // (VALUE_HEADS // KEY_HEADS)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    rows, dims = tl.arange(0, CHUNK), tl.arange(0, max(16, triton.next_power_of_2(KEY_DIM)))
    columns = tl.arange(0, max(16, triton.next_power_of_2(VALUE_DIM)))
    t = chunk * CHUNK + rows
    slot = (tl.load(positions) % TAPS).to(tl.int32)
    row = tl.minimum(t, tokens - 1).to(tl.int64)
    log_kept, beta = gates(a + row * a_row, b + row * b_row, tl.load(decay + head), tl.load(dt_bias + head), head)
    log_kept = tl.where(t < tokens, log_kept, 0)  # tokens beyond the last leave the memory unchanged
    beta = tl.where(t < tokens, beta, 0)
    kept, whole = tl.cumsum(log_kept, 0), tl.sum(log_kept, 0)
    earlier = rows[:, None] >= rows[None, :]
    between = tl.where(earlier, tl.exp(tl.where(earlier, kept[:, None] - kept[None, :], 0)), 0)  # from column to row
    until = tl.exp(kept)[:, None]
    tile = (head * tl.num_programs(0) + chunk) * CHUNK + rows[:, None]
    by_key, real = tile * KEY_DIM + dims[None, :], dims[None, :] < KEY_DIM

    at = key_head * KEY_DIM + dims
    key = _convolve(qkv, qkv_row, ring, conv, at + KEY_HEADS * KEY_DIM, dims < KEY_DIM, t, tokens, slot, CHANNELS, TAPS)
    key *= tl.rsqrt(tl.sum(key * key, 1) + 1e-6)[:, None]
    query = _convolve(qkv, qkv_row, ring, conv, at, dims < KEY_DIM, t, tokens, slot, CHANNELS, TAPS)
    query *= (tl.rsqrt(tl.sum(query * query, 1) + 1e-6) * tl.rsqrt(KEY_DIM * 1.0))[:, None]
    tl.store(reads + by_key, query * until, mask=real)
    scores = tl.dot(query, tl.trans(key), input_precision="tf32") * between
    tl.store(inner + tile * CHUNK + rows[None, :], scores)
    tl.store(writes + by_key, key * tl.exp(whole - kept)[:, None], mask=real)
    tl.store(left + head * tl.num_programs(0) + chunk, tl.exp(whole))

    written = key * beta[:, None]
    solved = _inverse(tl.dot(written, tl.trans(key), input_precision="tf32") * between, rows)
    tl.store(recalled + by_key, tl.dot(solved, written * until, input_precision="tf32"), mask=real)
    at = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + columns
    value = _convolve(qkv, qkv_row, ring, conv, at, columns < VALUE_DIM, t, tokens, slot, CHANNELS, TAPS)
    new = tl.dot(solved, value * beta[:, None], input_precision="tf32")
    tl.store(wanted + tile * VALUE_DIM + columns[None, :], new, mask=columns[None, :] < VALUE_DIM)


@triton.jit
def _convolve(qkv, qkv_row, ring, conv, channels, real, t, tokens, slot, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    """SiLU of the convolution at tokens t [rows] for some channels: [rows, channels], zeros beyond the last token.

    `slot` is where the first token's input belongs in the ring; the input before it is one slot earlier.
    """
    total = tl.zeros((t.shape[0], channels.shape[0]), tl.float32)
    for tap in tl.static_range(TAPS):
        source = (t + (tap - TAPS + 1))[:, None]
        known = (t < tokens)[:, None] & real[None, :]
        given = tl.load(qkv + source.to(tl.int64) * qkv_row + channels[None, :], mask=known & (source >= 0), other=0)
        held = (slot + source + TAPS) % TAPS
        before = tl.load(ring + held * CHANNELS + channels[None, :], mask=known & (source < 0), other=0)
        weight = tl.load(conv + channels * TAPS + tap, mask=real, other=0)
        total += (given.to(tl.float32) + before.to(tl.float32)) * weight[None, :]
    return total * tl.sigmoid(total)


@triton.jit
def _inverse(system, rows):
    """Invert the identity plus the part of `system` [64, 64] below the diagonal, in blocks of 2, 4, ... 64 rows."""
    i, j = rows[:, None], rows[None, :]
    solved = tl.where(i == j, 1.0, 0.0) - tl.where((i // 2 == j // 2) & (i > j), system, 0.0)
    for level in tl.static_range(1, 6):  # 64 rows are 2 to the sixth
        between = tl.where((i >> (level + 1) == j >> (level + 1)) & (i >> level > j >> level), system, 0.0)
        inner = tl.dot(between, solved, input_precision="tf32x3")
        solved -= tl.dot(solved, inner, input_precision="tf32x3")
    return solved


@triton.jit(do_not_specialize_on_alignment=["positions"])  # a part of a longer tensor: it may begin anywhere
def _chain(
    qkv, positions, ring, memory, found, wanted, recalled, reads, writes, inner, left, qkv_row, tokens,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILED: tl.constexpr,
    TAPS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Pass some columns of a value head's memory through all chunks, and update the ring, which the first launch still read."""
    part, head = tl.program_id(0), tl.program_id(1)
    EACH: tl.constexpr = VALUE_HEADS // KEY_HEADS
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    chunks = tl.cdiv(tokens, CHUNK)
    rows, dims = tl.arange(0, CHUNK), tl.arange(0, max(16, triton.next_power_of_2(KEY_DIM)))
    columns = part * BLOCK_V + tl.arange(0, BLOCK_V)
    real, there = dims < KEY_DIM, columns < VALUE_DIM
    tile = (head * KEY_DIM + dims[:, None]) * VALUE_DIM + columns[None, :]
    now = tl.load(memory + tile, mask=real[:, None] & there[None, :], other=0)
    for chunk in range(chunks):
        at = (head * chunks + chunk) * CHUNK + rows[:, None]
        by_key = at * KEY_DIM + dims[None, :]
        recall = tl.load(recalled + by_key, mask=real[None, :], other=0)
        read = tl.load(reads + by_key, mask=real[None, :], other=0)
        write = tl.load(writes + by_key, mask=real[None, :], other=0)
        new = tl.load(wanted + at * VALUE_DIM + columns[None, :], mask=there[None, :], other=0)
        scores = tl.load(inner + at * CHUNK + rows[None, :])
        new -= tl.dot(recall, now, input_precision="tf32")
        out = tl.dot(read, now, input_precision="tf32") + tl.dot(scores, new, input_precision="tf32")
        now = now * tl.load(left + head * chunks + chunk) + tl.dot(tl.trans(write), new, input_precision="tf32")
        t = (chunk * CHUNK + rows).to(tl.int64)
        to = found + (t * VALUE_HEADS + head)[:, None] * VALUE_DIM + columns[None, :]
        tl.store(to, out, mask=(t < tokens)[:, None] & there[None, :])
    tl.store(memory + tile, now, mask=real[:, None] & there[None, :])

    key_head = head % KEY_HEADS if TILED else head // EACH
    first = head < KEY_HEADS if TILED else head % EACH == 0
    shared = dims < tl.where(first & (part == 0), KEY_DIM, 0)  # one of the blocks that share a key head stores its inputs
    slot = (tl.load(positions) % TAPS).to(tl.int32)
    for i in tl.static_range(TAPS):
        t = tokens - 1 - i
        if t >= 0:
            given, to = qkv + t.to(tl.int64) * qkv_row, ring + (slot + t) % TAPS * CHANNELS
            queries_at = key_head * KEY_DIM + dims
            tl.store(to + queries_at, tl.load(given + queries_at, mask=shared, other=0), mask=shared)
            keys_at = queries_at + KEY_HEADS * KEY_DIM
            tl.store(to + keys_at, tl.load(given + keys_at, mask=shared, other=0), mask=shared)
            values_at = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + columns
            tl.store(to + values_at, tl.load(given + values_at, mask=there, other=0), mask=there)


@triton.jit
def _norm(found, z, norm, output, z_row, VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, EPS: tl.constexpr):
    """The gated norm of one value head's result at one token."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = (token * VALUE_HEADS + head) * VALUE_DIM
    columns = tl.arange(0, triton.next_power_of_2(VALUE_DIM))
    scale = tl.load(norm + columns, mask=columns < VALUE_DIM, other=0)
    weight = output_weights(z + token * z_row, scale, head * VALUE_DIM, columns, VALUE_DIM)
    read = tl.load(found + first + columns, mask=columns < VALUE_DIM, other=0)
    out = normed(read, VALUE_DIM, EPS, weight).to(output.dtype.element_ty)
    tl.store(output + first + columns, out, mask=columns < VALUE_DIM)
