"""The gated delta rule: a recurrent state of fixed size that each token decays, corrects and reads.

For each head, with a state S [Dk, Dv], token t computes

    S <- exp(g) S;   S <- S + k (beta (v - k S));   out = q S

`gated_delta_rule` uses the recurrent form for one token and the chunked form for more. It is plain PyTorch in fp32,
differentiable, and sums in the same order as transformers. Where heads decay fast, cumulative sums of logarithms over a chunk
lose digits, so the chunked form differs from the recurrent one, as it does in transformers. `delta_net` adds the causal
convolution before it and the gated norm after it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NORM_EPS = 1e-6  # for queries and keys: a constant, unlike a model's rms_norm_eps
CHUNK = 64  # tokens per chunk: one triangular system of this size each, then a scan over chunks


class DeltaNetLayer(NamedTuple):
    """The weights of a gated delta net between its input and output matrices, all in fp32, and the layout of its heads.

    With `tiled`, value head j reads key head j modulo `key_heads`; without it, neighboring value heads share a key head.
    """

    conv: Tensor  # [channels, taps]
    decay: Tensor  # [value heads], negative
    dt_bias: Tensor  # [value heads]
    norm: Tensor  # [Dv]
    key_heads: int
    key_dim: int
    tiled: bool
    eps: float


def delta_net(
    qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, positions: Tensor, ring: Tensor, memory: Tensor, layer: DeltaNetLayer
) -> Tensor:
    """Run T tokens through convolution, delta rule and gated norm; `ops.delta_net` describes the arguments."""
    mixed = _convolve_after(qkv, layer.conv, ring, positions)
    return mix(mixed, z[None], b[None], a[None], layer, memory)[0].to(qkv.dtype)


def mix(mixed: Tensor, z: Tensor, b: Tensor, a: Tensor, layer: DeltaNetLayer, memory: Tensor | None = None) -> Tensor:
    """Apply the delta rule and the gated norm to the output of the convolution, `mixed` [B, T, channels] in fp32.

    Returns [B, T, value heads * Dv] in fp32. `memory` [value heads, Dk, Dv] is updated in place; None starts from zeros.
    """
    key_heads, key_dim, tiled = layer.key_heads, layer.key_dim, layer.tiled
    batch, length, channels = mixed.shape
    each, values = len(layer.decay) // key_heads, channels - 2 * key_heads * key_dim
    table = (each, key_heads) if tiled else (key_heads, each)
    keys, value = F.silu(mixed).split((channels - values, values), -1)
    keys = keys.reshape(batch, length, 2, -1, key_dim)
    query, key = (keys * (keys.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()).unsqueeze(3 if tiled else 4).unbind(2)
    heads = (batch, length, *table)
    gate = (layer.decay * F.softplus(a.float() + layer.dt_bias)).view(heads)
    state = None if memory is None else memory.view(*table, key_dim, -1)
    rows = value.reshape(*heads, -1)
    found = gated_delta_rule(query * key_dim**-0.5, key, rows, gate, b.float().sigmoid().view(heads), state)
    normed = F.rms_norm(found.float(), layer.norm.shape, layer.norm, layer.eps)
    return (normed * F.silu(z.float().reshape(found.shape))).flatten(2)


def convolve(x: Tensor, conv: Tensor) -> Tensor:
    """Convolve x [B, taps - 1 + T, channels] with conv [channels, taps]; returns [B, T, channels] in fp32."""
    return F.conv1d(x.float().transpose(1, 2), conv[:, None], groups=x.shape[-1]).transpose(1, 2)


def _convolve_after(x: Tensor, conv: Tensor, ring: Tensor, positions: Tensor) -> Tensor:
    """Convolve new inputs x [T, channels] after those in the ring, and update the ring. Returns [1, T, channels]."""
    taps = conv.shape[1]
    written = positions[-taps:] % taps
    order = (torch.arange(1, taps + 1, device=x.device) + positions[:1]) % taps  # from the oldest to the first new one
    if x.shape[0] == 1:
        ring.index_copy_(0, written, x)
        return (ring.index_select(0, order) * conv.t()).sum(0)[None, None]
    whole = torch.cat((ring.index_select(0, order[:-1]), x))[None]
    ring.index_copy_(0, written, x[-taps:])
    return convolve(whole, conv)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None) -> Tensor:
    """Return the outputs [B, T, M, N, Dv] of all value heads, which form a table [M, N].

    q and k are [B, T, M or 1, N or 1, Dk], normalized, with q scaled; an axis of size 1 is a key head that the value heads
    along it share. v is [B, T, M, N, Dv]. g (log of the decay, at most 0) and beta are [B, T, M, N]. All are fp32. `state` [M,
    N, Dk, Dv] is the state after the tokens before (B must be 1) and is updated in place; None starts from zeros.
    """
    if q.shape[1] == 1 and state is not None:
        return _step(q[0, 0], k[0, 0], v[0, 0], g[0, 0], beta[0, 0], state)[None, None]
    return _chunked(q, k, v, g, beta, state)


def _step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Process one token: q, k [M, N, Dk], v [M, N, Dv] -> [M, N, Dv]. Two kernels update the state in place."""
    state.mul_(g.exp()[..., None, None])
    known = _read(k, state)
    state.addcmul_(k[..., None], ((v - known) * beta[..., None])[..., None, :])
    return _read(q, state)


def _read(key: Tensor, state: Tensor) -> Tensor:
    """Return key times state, [M, N, Dv], for `key` [M or 1, N or 1, Dk] and `state` [M, N, Dk, Dv]."""
    m, n, dk, dv = state.shape
    rows = key.expand(m, n, dk).reshape(m * n, 1, dk)
    return torch.bmm(rows, state.view(m * n, dk, dv)).view(m, n, dv)


def _chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None) -> Tensor:
    """Process any number of tokens, `CHUNK` at a time.

    This is the "UT transform" of Yang et al. (arXiv 2406.06484) with the gates of arXiv 2412.06464: within a chunk, a
    triangular system gives the update of every token.
    """
    length = v.shape[1]
    size = length if isinstance(length, torch.SymInt) else min(CHUNK, length)  # a graph for any number of tokens has one chunk
    q, k, v = (_chunks(x, size) for x in (q, k, v))  # [B, M, N, chunks, size, D]
    g, beta = (_chunks(x[..., None], size)[..., 0] for x in (g, beta))  # [B, M, N, chunks, size]
    kept = g.cumsum(-1)  # log of the decay from the start of the chunk to each token
    later = torch.ones(size, size, dtype=torch.bool, device=v.device).triu(1)
    between = (kept[..., :, None] - kept[..., None, :]).masked_fill(later, -math.inf).exp()  # decay from column to row
    until, left = kept.exp()[..., None], kept[..., -1:].exp()[..., None]
    written = k * beta[..., None]
    whole = torch.cat((v * beta[..., None], written * until), -1)
    solved = torch.linalg.solve_triangular((written @ k.mT) * between, whole, upper=False, unitriangular=True)
    wanted, recalled = solved.split((v.shape[-1], k.shape[-1]), -1)
    inner = (q @ k.mT) * between
    reads, writes = q * until, k * (kept[..., -1:] - kept).exp()[..., None]
    now = v.new_zeros(*v.shape[:3], k.shape[-1], v.shape[-1]) if state is None else state[None]
    found: list[Tensor] = []
    for i in range(v.shape[3]):
        new = wanted[..., i, :, :] - recalled[..., i, :, :] @ now
        found.append(reads[..., i, :, :] @ now + inner[..., i, :, :] @ new)
        now = now * left[..., i, :, :] + writes[..., i, :, :].mT @ new
    if state is not None:
        state.copy_(now[0])
    out = torch.stack(found, 3).flatten(3, 4)[..., :length, :]  # [B, M, N, T, Dv]
    return out.permute(0, 3, 1, 2, 4)


def _chunks(x: Tensor, size: int) -> Tensor:
    """[B, T, M, N, D] -> [B, M, N, chunks, size, D], padded with zeros, which leave the state unchanged."""
    x = x.permute(0, 2, 3, 1, 4)
    if isinstance(size, torch.SymInt):
        return x.unsqueeze(3)
    short = -x.shape[3] % size
    if short:
        x = torch.nn.functional.pad(x, (0, 0, 0, short))
    return x.unflatten(3, (-1, size))
