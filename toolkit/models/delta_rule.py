"""The gated delta rule: a memory of fixed size that forgets, corrects itself, and is read, token by token.

For each head, a state S [Dk, Dv] and at each token t

    S <- exp(g) S;   S <- S + k (beta (v - k S));   out = q S

One operation, which takes the recurrent step for a single token and the chunked form for more. Plain PyTorch in fp32, in
transformers' order of sums: where heads forget much, logarithms summed over a chunk lose digits, and the chunked form
differs from the steps, as theirs does. It has gradients. It knows no model and no cache.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CHUNK = 64  # tokens solved at once: one triangular system of this size, and a scan over chunks


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None) -> Tensor:
    """The outputs [B, T, M, N, Dv] of all value heads, which form a table [M, N].

    q, k: [B, T, M or 1, N or 1, Dk], normalised (and q scaled) already; an axis of 1 is a key head that all value heads
    along it share. v: [B, T, M, N, Dv]. g (log of what is kept, at most 0) and beta: [B, T, M, N]. All fp32.
    `state` [M, N, Dk, Dv], written in place, is what the tokens before left (B is 1 then); None begins from nothing.
    """
    if q.shape[1] == 1 and state is not None:
        return _step(q[0, 0], k[0, 0], v[0, 0], g[0, 0], beta[0, 0], state)[None, None]
    return _chunked(q, k, v, g, beta, state)


def _step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """One token: q, k [M, N, Dk], v [M, N, Dv] -> [M, N, Dv]. The state is changed by two kernels that write in place."""
    state.mul_(g.exp()[..., None, None])
    known = _read(k, state)
    state.addcmul_(k[..., None], ((v - known) * beta[..., None])[..., None, :])
    return _read(q, state)


def _read(key: Tensor, state: Tensor) -> Tensor:
    """What `key` [M or 1, N or 1, Dk] finds in `state` [M, N, Dk, Dv]: [M, N, Dv]."""
    m, n, dk, dv = state.shape
    rows = key.expand(m, n, dk).reshape(m * n, 1, dk)
    return torch.bmm(rows, state.view(m * n, dk, dv)).view(m, n, dv)


def _chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None) -> Tensor:
    """Any number of tokens, `CHUNK` at a time (the "UT transform" of Yang et al., arXiv 2406.06484, with the gates of
    arXiv 2412.06464): within a chunk, what every token writes follows from one triangular system.
    """
    length = v.shape[1]
    size = min(CHUNK, length)
    q, k, v = (_chunks(x, size) for x in (q, k, v))  # [B, M, N, chunks, size, D]
    g, beta = (_chunks(x[..., None], size)[..., 0] for x in (g, beta))  # [B, M, N, chunks, size]
    kept = g.cumsum(-1)  # log of what is left at each token of what stood before the chunk
    later = torch.ones(size, size, dtype=torch.bool, device=v.device).triu(1)
    between = (kept[..., :, None] - kept[..., None, :]).masked_fill(later, -math.inf).exp()  # from column to row
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
    """[B, T, M, N, D] -> [B, M, N, chunks, size, D], zeros after the last token (which write nothing and keep all)."""
    x = x.permute(0, 2, 3, 1, 4)
    short = -x.shape[3] % size
    if short:
        x = torch.nn.functional.pad(x, (0, 0, 0, short))
    return x.unflatten(3, (-1, size))
