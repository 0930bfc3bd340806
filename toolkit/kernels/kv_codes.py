"""Keys and values in 8 or 4 bits: the codes, and the arithmetic that makes them and gives values back, in plain PyTorch.

8 bits: integers -127 to 127, one fp16 scale for each head and token. 4 bits: TurboQuant (Zandieh et al. 2025,
arXiv 2504.19874) without its QJL part. A vector is divided by its root mean square and rotated at random, after which
every coordinate is close to a standard normal variable, whatever the vector was; each is replaced by the nearest of the 16
levels that are best for that distribution (Lloyd-Max). The rotation is random signs and a Hadamard transform: it needs no
matrix, and as it keeps scalar products, attention rotates the query and its result instead of every key and value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.core.errors import ModelError, unknown_name

# Lloyd-Max levels of a normal variable, as an odd polynomial in v = (code - 7.5) / 8, in fp16 after each step: what a kernel
# computes in four instructions for two codes instead of looking it up. Its mean square error is 0.2 % above the optimum's.
POLYNOMIAL = (2.0859375, 0.154052734375, 0.87109375)  # of v, v^3, v^5; fp16 numbers
# Scales tried for a vector, in its root mean square: the best loses 5 % less at 512 coordinates, 17 % at 64.
TRIALS = (0.9, 0.95, 1.0, 1.05, 1.1)


@dataclass(frozen=True)
class CodeScheme:
    """How many bits a coordinate of a key takes, and of a value."""

    name: str
    key_bits: int
    value_bits: int

    def bytes_per_token(self, head_dim: int) -> int:
        """Bytes that a token's key and value take, in one KV head."""
        return sum(head_dim * bits // 8 + torch.float16.itemsize for bits in (self.key_bits, self.value_bits))


# Values are the sensitive ones: K 4-bit / V 8-bit lies between the other two.
KV_SCHEMES: Mapping[str, CodeScheme] = {
    scheme.name: scheme for scheme in (CodeScheme("int8", 8, 8), CodeScheme("k4v8", 4, 8), CodeScheme("int4", 4, 4))
}


def find_kv_scheme(name: str) -> CodeScheme:
    """The scheme called `name`; UnknownNameError, naming the nearest, where there is none."""
    if name not in KV_SCHEMES:
        raise unknown_name("KV scheme", name, KV_SCHEMES)
    return KV_SCHEMES[name]


def levels(device: torch.device | str = "cpu") -> Tensor:
    """The 16 levels of 4-bit codes, ascending, fp32 [16] (each is an fp16 number)."""
    first, third, fifth = POLYNOMIAL
    v = torch.arange(16, dtype=torch.float32, device=device) / 8 - 0.9375
    inner = (fifth * v * v + third).half().float()
    return (v * (inner * v * v + first).half().float()).half().float()


def random_signs(head_dim: int, seed: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """The signs of a rotation: fp32 [head_dim], the same on every device."""
    bits = torch.randint(0, 2, (head_dim,), generator=torch.Generator().manual_seed(seed))
    return (2.0 * bits - 1.0).to(device)


def hadamard(x: Tensor) -> Tensor:
    """The orthogonal Hadamard transform of the last dimension, a power of two; its own inverse. In fp32."""
    size, out = x.shape[-1], x.float()
    if size & (size - 1) or not size:
        raise ModelError(f"a Hadamard transform of {size}", "no power of two", "Give a head_dim that is one")
    step = 1
    while step < size:
        pairs = out.unflatten(-1, (-1, 2, step))
        out = torch.stack((pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]), -2).flatten(-3)
        step *= 2
    return out * size**-0.5


def encode(x: Tensor, bits: int, signs: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of `x` [..., D]: int16 words [..., D bits / 16] as `pack_words` makes them, and fp16 [...].

    A 4-bit scale is the best of five about the root mean square. Zeros give the scale zero.
    """
    if bits == 8:
        scales = (x.float().abs().amax(-1) / 127).half()
        return pack_words((x.float() / _steps(scales)).round().clamp(-127, 127), bits), scales
    turned = hadamard(x.float() * signs)
    rms, table = turned.square().mean(-1).sqrt(), levels(x.device)
    borders = (table[1:] + table[:-1]) / 2
    codes, scales = torch.zeros_like(turned, dtype=torch.int32), torch.zeros_like(rms, dtype=torch.float16)
    least = torch.full_like(rms, torch.inf)
    for trial in TRIALS:
        tried = (rms * trial).half()
        steps = _steps(tried)
        found = torch.bucketize(turned / steps, borders)
        lost = (table[found] * steps - turned).square().sum(-1)
        better = lost < least
        codes = torch.where(better[..., None], found.to(torch.int32), codes)
        scales, least = torch.where(better, tried, scales), torch.where(better, lost, least)
    return pack_words(codes, bits), scales


def decode(words: Tensor, scales: Tensor, bits: int, signs: Tensor) -> Tensor:
    """The values [..., D] in fp32 that codes stand for; 4-bit ones are rotated back."""
    codes = unpack_words(words, bits)
    if bits == 8:
        return codes * scales.float()[..., None]
    return hadamard(levels(words.device)[codes] * scales.float()[..., None]) * signs


def _steps(scales: Tensor) -> Tensor:
    """What to divide by: the scales in fp32 [..., 1], none of them zero."""
    return scales.float().clamp_min(torch.finfo(torch.float16).tiny)[..., None]


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., D] as int16 words [..., D bits / 16]: field j of word w, from the low bits, is coordinate j W + w of W words.

    A kernel that keeps one field of neighbouring words has neighbouring coordinates, each in the 16 bits that the fp16
    number it becomes needs: words go to the registers that a matrix product wants, and turn to numbers there.
    """
    fields = codes.to(torch.int32).bitwise_and((1 << bits) - 1).unflatten(-1, (16 // bits, -1))
    return (fields << _shifts(bits, codes.device)).sum(-2).to(torch.int16)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_words`, int32: 8-bit codes signed, 4-bit ones 0 to 15."""
    fields = (words.to(torch.int32)[..., None, :] >> _shifts(bits, words.device)) & ((1 << bits) - 1)
    return (fields.flatten(-2) ^ 128) - 128 if bits == 8 else fields.flatten(-2)


def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, 16, bits, device=device, dtype=torch.int32)[:, None]
