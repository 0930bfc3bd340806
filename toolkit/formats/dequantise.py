"""Block formats of GGUF to fp32, vectorised: the same products in the same order as the format's reference, bit for bit.

Blocks are rows of bytes. Layouts after ggml's `block_q8_0`, `block_q4_K` and `block_q6_K`.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCKS = {  # elements, bytes of a block
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip


def dequantise(kind: str, blocks: Tensor) -> Tensor:
    """fp32 values [n, elements] of `blocks` [n, bytes] (uint8) of the format `kind`."""
    return _KINDS[kind](blocks)


def _q8_0(blocks: Tensor) -> Tensor:
    """Scale (fp16), 32 int8: w = d * q."""
    return _half(blocks[:, :2]) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _q4_k(blocks: Tensor) -> Tensor:
    """d, dmin (fp16), 8 six-bit scales and minima in 12 bytes, 256 nibbles: w = (d * scale) * q - (dmin * minimum)."""
    n = blocks.shape[0]
    d, dmin = _half(blocks[:, 0:2]), _half(blocks[:, 2:4])
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = torch.cat((low & 63, (high & 15) | ((low >> 6) << 4)), 1)  # [n, 8]
    minimum = torch.cat((middle & 63, (high >> 4) | ((middle >> 6) << 4)), 1)
    quants = blocks[:, 16:].reshape(n, 4, 32)  # each 32 bytes: low nibbles are one group, high ones the next
    q = torch.empty(n, 4, 2, 32, device=blocks.device)
    q[:, :, 0], q[:, :, 1] = quants & 15, quants >> 4
    return q.view(n, 8, 32).mul_((d * scale)[..., None]).sub_((dmin * minimum)[..., None]).view(n, 256)


def _q6_k(blocks: Tensor) -> Tensor:
    """256 low nibbles, 256 pairs of high bits, 16 int8 scales, d (fp16): w = (d * scale) * (q - 32)."""
    n = blocks.shape[0]
    nibbles = blocks[:, :128].reshape(n, 2, 1, 64)
    low = torch.cat((nibbles & 15, nibbles >> 4), 2).view(n, 8, 32)
    pairs = blocks[:, 128:192].reshape(n, 2, 1, 32)
    high = torch.cat([(pairs >> shift) & 3 for shift in (0, 2, 4, 6)], 2).view(n, 8, 32)
    q = (low | (high << 4)).view(torch.int8) - 32
    scale = blocks[:, 192:208].contiguous().view(torch.int8)  # [n, 16]
    return ((_half(blocks[:, 208:210]) * scale)[..., None] * q.view(n, 16, 16)).view(n, 256)


def _half(pairs: Tensor) -> Tensor:
    """fp16 [n, 1] from two bytes each, as fp32."""
    return pairs.contiguous().view(torch.float16).float()


_KINDS = {"Q8_0": _q8_0, "Q4_K": _q4_k, "Q6_K": _q6_k}
