# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005  # Triton does not compile (*a, b)
"""One token of the gated delta net, from the outputs of its input matrices to the input of its output matrix, in one launch.

It is the step of the gated delta rule (Yang et al., arXiv 2412.06464) with everything around it: the update of the causal
convolution and SiLU, the norms of query and key, the gates, and the gated norm of the result. Reading and writing the memory
once bounds the kernel: one pass over the old memory S computes both k S and q S, and the query's result on the new memory
follows as q (e S + k d) = e (q S) + (q k) d.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from toolkit.core.errors import ModelError
from toolkit.kernels.base import Config, Cost, Kernel, Launch, Shape, Tensors, arrivals, config_grid
from toolkit.kernels.checks import check_tensor
from toolkit.kernels.early import take_turn
from toolkit.kernels.packed import quantise_groups
from toolkit.weights.packed import quantize_activations

KEY_EPS = 1e-6  # of the norm of queries and keys
INTEGERS = (torch.int32, torch.int64)
GROUP = 32  # results in 8 bits that share a scale


@dataclass(frozen=True)
class DeltaShape(Shape):
    """Head counts and sizes. With `tiled`, value head j reads key head j modulo `key_heads`; else neighbors share a key head.

    `eps` of the gated norm is a number written as text.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4
    tiled: bool = False
    dtype: str = "bfloat16"
    eps: str = "1e-06"

    @property
    def each(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads

    @property
    def channels(self) -> int:
        """Channels of the convolution: all queries, all keys, all values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def check(self) -> str:
        """Return the name of this shape in error messages. Raises ModelError for invalid sizes."""
        asked = f"a delta net of {self.key_heads} key heads x {self.key_dim}, {self.value_heads} value heads x {self.value_dim}"
        if min(self.key_heads, self.value_heads, self.key_dim, self.value_dim, self.taps) < 1:
            raise ModelError(asked, f"and {self.taps} taps: a size is below 1", "Give sizes of 1 or more")
        if self.value_heads % self.key_heads:
            raise ModelError(asked, "heads can't be shared out evenly", "Key heads must divide value heads")
        if self.key_dim > 256 or self.value_dim > 256:
            raise ModelError(asked, "a head's memory is held in registers whole", "Give heads of at most 256")
        return asked


@dataclass(frozen=True)
class DeltaStepShape(DeltaShape):
    """The shape of a step of one token. With `quantised`, its result is returned in 8 bits, too."""

    quantised: bool = False

    def check(self) -> str:
        asked = super().check()
        if self.quantised and self.value_dim % GROUP:
            found = f"heads of {self.value_dim} don't divide by {GROUP}"
            raise ModelError(f"{asked}, in 8 bits", found, "Leave out quantised=True")
        return asked


KNOWN = {
    "qwen3.5-35b-a3b delta net": DeltaStepShape(16, 32, 128, 128, quantised=True),
    "qwen3.5-35b-a3b delta net, gguf": DeltaStepShape(16, 32, 128, 128, tiled=True, quantised=True),
    "qwen3.5-27b delta net": DeltaStepShape(16, 48, 128, 128, quantised=True),
    "qwen3.5-122b-a10b delta net": DeltaStepShape(16, 64, 128, 128, quantised=True),
}


class DeltaStep(Kernel):
    """One token -> output [value heads * Dv]; ring [taps, channels] and memory [value heads, Dk, Dv] are updated in place.

    Inputs: "qkv" [channels], "z" [value heads * Dv], "b" and "a" [value heads] in the model's dtype, as the input matrices
    return them; "conv" [channels, taps], "decay" (-exp(A_log)), "dt_bias" [value heads] and "norm" [Dv] in fp32; "positions"
    [1] (int32 or int64, on the device), that of the token; "ring" in the model's dtype, where slot p modulo taps holds the
    input at position p; "memory" in fp32. With `quantised` in the shape there are three more results: the output as int8
    "codes" [value heads * Dv], and fp32 "scales" and "sums" [value heads * Dv / 32] (see `quantize_activations`).

    On CUDA, "ring", "memory" and "positions" are read before the launch in front of this one has ended. So it must not write
    them: another launch belongs between two steps on the same memory. In a model, it is the product that makes "qkv".
    """

    name = "delta_step"
    shape_type = DeltaStepShape
    lengths = ("key_heads", "value_heads", "quantised")
    known = KNOWN

    def space(self, shape: Shape) -> Sequence[Config]:
        assert isinstance(shape, DeltaShape)
        whole = triton.next_power_of_2(shape.value_dim)
        blocks = [n for n in (32, 16, 64, 128) if n <= whole] or [whole]
        found = config_grid(Config(block_v=blocks[0], warps=4), block_v=blocks, warps=(1, 2, 4, 8, 16, 32))
        each = triton.next_power_of_2(shape.key_dim)  # numbers of the memory per thread: neither too many nor none
        return [c for i, c in enumerate(found) if not i or 4 <= c["block_v"] * each // (32 * c.warps) <= 64]

    def inputs(self, shape: Shape, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
        """Return inputs like those of trained nets: memories of 1 to 100 tokens, a convolution that keeps the scale."""
        assert isinstance(shape, DeltaShape)
        return {**random_net(shape, 1, device, seed), "positions": torch.full((1,), 1001, device=device)}

    def reference(self, shape: Shape, inputs: Tensors) -> tuple[Tensor, ...]:
        assert isinstance(shape, DeltaStepShape)
        ring, slot = inputs["ring"].clone(), inputs["positions"] % shape.taps
        ring.index_copy_(0, slot.long(), inputs["qkv"][None])
        order = (slot + 1 + torch.arange(shape.taps, device=ring.device)) % shape.taps
        mixed = F.silu((ring[order] * inputs["conv"].t()).sum(0, dtype=torch.float32))
        query, key, value, gate, beta = split_heads(shape, mixed[None], inputs)
        memory = inputs["memory"] * gate[0].exp()[:, None, None]
        known = torch.einsum("hk,hkv->hv", key[0], memory)
        memory = memory + key[0][..., None] * ((value[0] - known) * beta[0][:, None])[:, None]
        found = torch.einsum("hk,hkv->hv", query[0], memory)
        out = gated_norm(shape, found[None], inputs)[0]
        return out, ring, memory, *(quantize_activations(out) if shape.quantised else ())

    def outputs(self, shape: Shape, inputs: Tensors) -> dict[str, Tensor]:
        """Return the results (two are inputs, written in place), the reads of each part of a head, and zeroed arrivals."""
        assert isinstance(shape, DeltaStepShape)
        device, heads, size = inputs["qkv"].device, shape.value_heads, shape.value_heads * shape.value_dim
        found = {
            "output": torch.empty(size, dtype=shape.torch_dtype, device=device),
            "ring": inputs["ring"],
            "memory": inputs["memory"],
        }
        if shape.quantised:
            found["codes"] = torch.empty(size, dtype=torch.int8, device=device)
            found["scales"] = torch.empty(size // GROUP, device=device)
            found["sums"] = torch.empty(size // GROUP, device=device)
        return found | {"found": torch.empty(size, device=device), "arrivals": arrivals(inputs, heads, device)}

    def launches(self, shape: Shape, config: Config, inputs: Tensors, outputs: Tensors) -> Sequence[Launch]:
        assert isinstance(shape, DeltaStepShape)
        check_inputs(shape, inputs, wanted_tensors(shape, ()) | {"positions": ((1,), INTEGERS)})
        block = min(config["block_v"], triton.next_power_of_2(shape.value_dim))
        constants = {**head_constants(shape), "TAPS": shape.taps, "BLOCK_V": block, "EPS": float(shape.eps)}
        constants |= {} if shape.quantised else dict.fromkeys(QUANTISED)
        grid = (triton.cdiv(shape.value_dim, block), shape.value_heads)
        return [Launch(_step, grid, {**inputs, **outputs}, constants, config.warps, config.stages, early=True)]

    def cost(self, shape: Shape) -> Cost:
        """Count the memory read and written, the ring, and the vectors; 7 operations per number of the memory."""
        assert isinstance(shape, DeltaStepShape)
        heads, size = shape.value_heads, shape.torch_dtype.itemsize
        memory, values = heads * shape.key_dim * shape.value_dim, heads * shape.value_dim
        vectors = size * (2 * shape.channels + 2 * values + 2 * heads) + 4 * (2 * heads + shape.value_dim)
        vectors += shape.quantised * (values + values // GROUP * 8)
        conv = shape.taps * shape.channels * (4 + size) - shape.channels * size
        return Cost(8 * memory + conv + vectors, 7.0 * memory)

    def run(self, shape: Shape, config: Config, inputs: Tensors) -> tuple[Tensor, ...]:
        """Run on copies of the ring and the memory, so that the inputs can be used again."""
        return super().run(shape, config, {**inputs, **{name: inputs[name].clone() for name in ("ring", "memory")}})

    def results(self, shape: Shape) -> int:
        assert isinstance(shape, DeltaStepShape)
        return 3 + shape.quantised * len(QUANTISED)


ROWS = ("qkv", "z", "b", "a")  # what the input matrices return for each token
QUANTISED = ("codes", "scales", "sums")  # the output in 8 bits
Wanted = dict[str, tuple[Sequence[int], torch.dtype | tuple[torch.dtype, ...]]]


def check_inputs(shape: DeltaShape, inputs: Tensors, wanted: Wanted) -> None:
    """Raise ModelError for an invalid shape, or inputs that differ from `wanted`."""
    asked = shape.check()
    for name, (size, dtypes) in wanted.items():
        alignment = 16 if name in ("conv", "ring", "memory") else 4  # the others are parts of what one matrix returns
        check_tensor(asked, name, inputs[name], size, dtypes, inputs["memory"], alignment, name in ROWS and len(size) == 2)


def wanted_tensors(shape: DeltaShape, length: tuple[int, ...]) -> Wanted:
    """Return name -> (shape, dtypes) of the inputs of one step (`length` empty) or of several tokens."""
    heads, values, dtype, fp32 = shape.value_heads, shape.value_heads * shape.value_dim, shape.torch_dtype, torch.float32
    return {
        "qkv": ((*length, shape.channels), dtype),
        "z": ((*length, values), dtype),
        "b": ((*length, heads), dtype),
        "a": ((*length, heads), dtype),
        "conv": ((shape.channels, shape.taps), fp32),
        "decay": ((heads,), fp32),
        "dt_bias": ((heads,), fp32),
        "norm": ((shape.value_dim,), fp32),
        "ring": ((shape.taps, shape.channels), dtype),
        "memory": ((heads, shape.key_dim, shape.value_dim), fp32),
    }


def random_net(shape: DeltaShape, tokens: int, device: torch.device | str, seed: int) -> dict[str, Tensor]:
    """Return random tensors for `wanted_tensors` from `seed`; for one token without a token axis."""
    wanted = wanted_tensors(shape, () if tokens == 1 else (tokens,))
    made = {name: torch.empty(size, dtype=dtype, device=device) for name, (size, dtype) in wanted.items()}  # type: ignore[arg-type]
    if torch.device(device).type == "meta":
        return made
    random = torch.Generator(device).manual_seed(seed)
    for tensor in made.values():
        tensor.normal_(generator=random)
    made["conv"].uniform_(-1, 1, generator=random).mul_(shape.taps**-0.5)
    made["decay"].uniform_(-16, -0.01, generator=random)
    made["dt_bias"].uniform_(-6, 1, generator=random)
    made["norm"].uniform_(0.5, 1.5, generator=random)
    return made


def split_heads(shape: DeltaShape, mixed: Tensor, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Split the output of the convolution, [T, channels], into heads.

    Returns query and key [T, value heads, Dk], value [T, value heads, Dv], and the log of the decay and beta [T, value heads].
    """
    keys, value = mixed.split((2 * shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim), -1)
    keys = keys.reshape(len(mixed), 2, shape.key_heads, shape.key_dim)
    keys = keys * (keys.square().sum(-1, keepdim=True) + KEY_EPS).rsqrt()
    keys = keys.repeat(1, 1, shape.each, 1) if shape.tiled else keys.repeat_interleave(shape.each, 2)
    gate = inputs["decay"] * F.softplus(inputs["a"].float() + inputs["dt_bias"])
    rows = (len(mixed), shape.value_heads)
    beta = inputs["b"].float().sigmoid().view(rows)
    return keys[:, 0] * shape.key_dim**-0.5, keys[:, 1], value.view(*rows, -1), gate.view(rows), beta


def gated_norm(shape: DeltaShape, found: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """found [T, value heads, Dv], normalized and times SiLU of z: [T, value heads * Dv] in the model's dtype."""
    normed = F.rms_norm(found, found.shape[-1:], inputs["norm"], float(shape.eps))
    return (normed * F.silu(inputs["z"].float().view(found.shape))).flatten(1).to(shape.torch_dtype)


def head_constants(shape: DeltaShape) -> dict[str, int | bool]:
    return {
        "KEY_HEADS": shape.key_heads,
        "VALUE_HEADS": shape.value_heads,
        "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim,
        "TILED": shape.tiled,
    }


DELTA_STEP = DeltaStep()
"""The one instance."""


@triton.jit(do_not_specialize_on_alignment=["positions"])  # a part of a longer tensor: it may begin anywhere
def _step(
    qkv, z, b, a, conv, decay, dt_bias, norm, positions, ring, memory, output, codes, scales, sums, found, arrivals,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILED: tl.constexpr,
    TAPS: tl.constexpr, BLOCK_V: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Some columns of a value head's memory. The last block of a head to finish normalizes the results of all of them.

    What earlier tokens left, and the weights, are loaded before the turn (see early.py).
    """
    part, head = tl.program_id(0), tl.program_id(1)
    EACH: tl.constexpr = VALUE_HEADS // KEY_HEADS
    PARTS: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    key_head = head % KEY_HEADS if TILED else head // EACH
    first = head < KEY_HEADS if TILED else head % EACH == 0
    rows, columns = tl.arange(0, triton.next_power_of_2(KEY_DIM)), part * BLOCK_V + tl.arange(0, BLOCK_V)
    real, there = rows < KEY_DIM, columns < VALUE_DIM
    tile = (head * KEY_DIM + rows[:, None]) * VALUE_DIM + columns[None, :]
    # All loads are issued before anything is computed or written, so there are two waits instead of several.
    old = tl.load(memory + tile, mask=real[:, None] & there[None, :], other=0)
    position = tl.load(positions)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    queries_at = key_head * KEY_DIM + rows
    keys_at = queries_at + KEY_HEADS * KEY_DIM
    values_at = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + columns
    query_taps = _load_taps(ring, conv, queries_at, real, CHANNELS, TAPS)
    key_taps = _load_taps(ring, conv, keys_at, real, CHANNELS, TAPS)
    value_taps = _load_taps(ring, conv, values_at, there, CHANNELS, TAPS)
    rate, bias = tl.load(decay + head), tl.load(dt_bias + head)
    all_columns = tl.arange(0, triton.next_power_of_2(VALUE_DIM))
    scale = tl.load(norm + all_columns, mask=all_columns < VALUE_DIM, other=0)
    take_turn()
    new_query = tl.load(qkv + queries_at, mask=real, other=0)
    new_key = tl.load(qkv + keys_at, mask=real, other=0)
    new_value = tl.load(qkv + values_at, mask=there, other=0)
    log_kept, beta = gates(a, b, rate, bias, head)
    weight = output_weights(z, scale, head * VALUE_DIM, all_columns, VALUE_DIM)

    slot = (position % TAPS).to(tl.int32)
    query = _convolve(new_query, query_taps, slot, TAPS)
    key = _convolve(new_key, key_taps, slot, TAPS)
    value = _convolve(new_value, value_taps, slot, TAPS)
    # The norms of query and key are factors of all reads with them, so no sum waits for another.
    queries, keys, both = tl.reduce((query * query, key * key, query * key), 0, _add3)
    query_scale, key_scale = tl.rsqrt(queries + 1e-6) * tl.rsqrt(KEY_DIM * 1.0), tl.rsqrt(keys + 1e-6)
    kept = tl.exp(log_kept)
    known, read = tl.reduce((key[:, None] * old, query[:, None] * old), 0, _add2)
    written = (value - known * (kept * key_scale)) * (beta * key_scale)
    tl.store(memory + tile, old * kept + key[:, None] * written[None, :], mask=real[:, None] & there[None, :])
    read = (read * kept + both * written) * query_scale

    remembered = ring + slot * CHANNELS
    shared = rows < tl.where(first & (part == 0), KEY_DIM, 0)  # one of the blocks that share a key head stores its inputs
    tl.store(remembered + queries_at, new_query, mask=shared)
    tl.store(remembered + keys_at, new_key, mask=shared)
    tl.store(remembered + values_at, new_value, mask=there)
    at = head * VALUE_DIM + all_columns
    if PARTS == 1:
        out = normed(read, VALUE_DIM, EPS, weight).to(output.dtype.element_ty)
        tl.store(output + at, out, mask=there)
        if codes is not None:
            _store_quantised(out, codes, scales, sums, head, VALUE_DIM)
    else:
        tl.store(found + head * VALUE_DIM + columns, read, mask=there)
        tl.debug_barrier()  # all threads have written their results before this block signals
        if tl.atomic_add(arrivals + head, 1, sem="acq_rel") == PARTS - 1:
            whole = tl.load(found + at, mask=all_columns < VALUE_DIM, other=0, cache_modifier=".cg")
            out = normed(whole, VALUE_DIM, EPS, weight).to(output.dtype.element_ty)
            tl.store(output + at, out, mask=all_columns < VALUE_DIM)
            if codes is not None:
                _store_quantised(out, codes, scales, sums, head, VALUE_DIM)
            tl.store(arrivals + head, 0)  # reset for the next launch


@triton.jit
def _store_quantised(out, codes, scales, sums, head, VALUE_DIM: tl.constexpr):
    """Store the results of a head in 8 bits."""
    GROUPS: tl.constexpr = VALUE_DIM // 32
    ROOM: tl.constexpr = out.shape[0] // 32
    found, scale, total = quantise_groups(tl.reshape(out.to(tl.float32), (ROOM, 32)))
    group = tl.arange(0, ROOM)
    at = head * GROUPS + group
    tl.store(codes + at[:, None] * 32 + tl.arange(0, 32)[None, :], found, mask=group[:, None] < GROUPS)
    tl.store(scales + at, scale, mask=group < GROUPS)
    tl.store(sums + at, total, mask=group < GROUPS)


@triton.jit
def _add2(a, b, c, d):
    return a + c, b + d


@triton.jit
def _add3(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _load_taps(ring, conv, channels, real, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    """Load the slots of the ring of some channels, and the weights of the convolution, the newest last."""
    past, weights = (), ()
    for tap in tl.static_range(TAPS):
        past = past + (tl.load(ring + tap * CHANNELS + channels, mask=real, other=0).to(tl.float32),)
        weights = weights + (tl.load(conv + channels * TAPS + tap, mask=real, other=0),)
    return past, weights


@triton.jit
def _convolve(new, taps, slot, TAPS: tl.constexpr):
    """SiLU of the convolution of the new input of some channels; `taps` is what `_load_taps` returned for them.

    `slot` is where the new input belongs in the ring. No load waits for it: the input of each age is selected among all slots.
    """
    past, weights = taps
    total = new.to(tl.float32) * weights[TAPS - 1]
    for age in tl.static_range(TAPS - 1):
        chosen = past[0]
        for tap in tl.static_range(1, TAPS):
            chosen = tl.where((slot + 1 + age) % TAPS == tap, past[tap], chosen)
        total += chosen * weights[age]
    return total * tl.sigmoid(total)


@triton.jit
def gates(a, b, rate, bias, at):
    """Return (log of the decay, beta) of value heads, given their `decay` and `dt_bias`. `at` is the place of their a and b."""
    x = tl.load(a + at).to(tl.float32) + bias
    softplus = tl.where(x > 20, x, tl.log(1 + tl.exp(tl.minimum(x, 20))))
    return rate * softplus, tl.sigmoid(tl.load(b + at).to(tl.float32))


@triton.jit
def output_weights(z, scale, first, columns, VALUE_DIM: tl.constexpr):
    """Return the factor of the normalized reads of a value head: the norm's weight `scale` times SiLU of z, from `first` on."""
    gate = tl.load(z + first + columns, mask=columns < VALUE_DIM, other=0).to(tl.float32)
    return scale * gate * tl.sigmoid(gate)


@triton.jit
def normed(read, VALUE_DIM: tl.constexpr, EPS: tl.constexpr, weight):
    """RMS norm of the reads of a value head (zeros beyond VALUE_DIM), times `weight`."""
    return read * tl.rsqrt(tl.sum(read * read) / VALUE_DIM + EPS) * weight
