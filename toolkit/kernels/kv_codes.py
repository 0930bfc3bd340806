"""The format of keys and values in 8 or 4 bits: quantization and dequantization in plain PyTorch.

8 bits: integers from -127 to 127 with one fp16 scale per head and token. 4 bits: TurboQuant (Zandieh et al. 2025, arXiv
2504.19874) without its QJL part. A vector is divided by its root mean square and rotated at random, after which every
coordinate is close to a standard normal variable; each is replaced by the nearest of the 16 levels that are optimal for that
distribution (Lloyd-Max). The rotation consists of random signs and a Hadamard transform. It needs no matrix, and because it
preserves scalar products, attention rotates the query and its result instead of every key and value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.core.errors import ModelError, unknown_name

# Lloyd-Max levels of a normal variable: v (FIRST + FIFTH v^4), with v = 2 code - 15, rounded to an integer, times UNIT. The
# integers are small enough for a matrix product of bytes. The mean square error is 0.2 % above the optimum.
FIRST, FIFTH, UNIT = 2.96, 2.133e-5, 23 / 512
# Scales tried for a vector, relative to its root mean square: the best one has 5 % less error at 512 coordinates, 17 % less at
# 64.
TRIALS = (0.9, 0.95, 1.0, 1.05, 1.1)
LEAST_STEP = 2.0**-24  # the smallest scale above zero: fp16 numbers below 2^-14 have fewer digits, but they are numbers


@dataclass(frozen=True)
class CodeScheme:
    """The number of bits per coordinate of keys and of values."""

    name: str
    key_bits: int
    value_bits: int

    def bytes_per_token(self, head_dim: int) -> int:
        """Return the bytes of a token's key and value in one KV head."""
        return sum(head_dim * bits // 8 + torch.float16.itemsize for bits in (self.key_bits, self.value_bits))


# Values are more sensitive than keys: K 4-bit / V 8-bit lies between the other two.
KV_SCHEMES: Mapping[str, CodeScheme] = {
    scheme.name: scheme for scheme in (CodeScheme("int8", 8, 8), CodeScheme("k4v8", 4, 8), CodeScheme("int4", 4, 4))
}


def find_kv_scheme(name: str) -> CodeScheme:
    """Return the scheme called `name`. Raises UnknownNameError if there is none."""
    if name not in KV_SCHEMES:
        raise unknown_name("KV scheme", name, KV_SCHEMES)
    return KV_SCHEMES[name]


def levels(device: torch.device | str = "cpu") -> Tensor:
    """Return the 16 levels of 4-bit codes, ascending, fp32 [16] (each is an fp16 number)."""
    v = torch.arange(-15, 16, 2, dtype=torch.float32, device=device)
    return (v * (FIRST + FIFTH * v**4)).round() * UNIT


def random_signs(head_dim: int, seed: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Return the signs of the rotation: fp32 [head_dim], the same on every device."""
    bits = torch.randint(0, 2, (head_dim,), generator=torch.Generator().manual_seed(seed), device="cpu")
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
    """Quantize `x` [..., D] to int16 words [..., D * bits / 16] (see `pack_words`) and fp16 scales [...].

    A 4-bit scale is the best of five values around the root mean square. Zeros have the scale zero.
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
    """Return the values [..., D] of codes in fp32; 4-bit codes are rotated back."""
    codes = unpack_words(words, bits)
    if bits == 8:
        return codes * scales.float()[..., None]
    return hadamard(levels(words.device)[codes] * scales.float()[..., None]) * signs


def _steps(scales: Tensor) -> Tensor:
    """Return the divisors: the scales in fp32 [..., 1], with zeros replaced."""
    return scales.float().clamp_min(LEAST_STEP)[..., None]


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [..., D] into int16 words [..., D * bits / 16]: field j of word w, from the low bits, is coordinate j W + w.

    W is the number of words. A kernel that extracts one field of neighboring words gets neighboring coordinates, each in the 16
    bits of the fp16 number that it becomes, in the registers from which a matrix product reads.
    """
    fields = codes.to(torch.int32).bitwise_and((1 << bits) - 1).unflatten(-1, (16 // bits, -1))
    return (fields << _shifts(bits, codes.device)).sum(-2).to(torch.int16)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_words`, int32: 8-bit codes signed, 4-bit ones 0 to 15."""
    fields = (words.to(torch.int32)[..., None, :] >> _shifts(bits, words.device)) & ((1 << bits) - 1)
    return (fields.flatten(-2) ^ 128) - 128 if bits == 8 else fields.flatten(-2)


def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, 16, bits, device=device, dtype=torch.int32)[:, None]
