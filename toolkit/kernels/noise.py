"""Random numbers as a function of (seed, step, token id), in exact integer arithmetic.

A seed gives the same draws on the host, on a device and in a kernel. This is SplitMix64's finalizer (Steele, Lea, Flood 2014),
applied to ids and steps that are far apart, in plain PyTorch; unsigned 64-bit integers are held in int64.
"""

from __future__ import annotations

import torch
from torch import Tensor

INDEX = 0x9E3779B97F4A7C15  # odd 64-bit constants: the distance of two token ids, and of two steps, in the input of the hash
STEP = 0xD1B54A32D192ED03
MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # constants of the finalizer
_WORD = (1 << 64) - 1


def mixed_seed(seed: int) -> int:
    """Return the constant that `seed` adds to the input of the hash, as an int64."""
    z = seed & _WORD
    z = (z ^ z >> 30) * MIX[0] & _WORD
    z = (z ^ z >> 27) * MIX[1] & _WORD
    return signed(z ^ z >> 31)


def gumbel(key: Tensor, step: Tensor, vocab: int) -> Tensor:
    """Return Gumbel noise fp64 [vocab] of a step [1] with a key [1] (see `mixed_seed`), on their device.

    The highest logit + noise is a draw from softmax(logits). In fp64, the last bits of logarithms, which differ between
    libraries, decide nothing.
    """
    bits = mix(torch.arange(vocab, device=key.device).mul_(signed(INDEX)).add_(key + step * signed(STEP)))
    uniform = shifted(bits, 12).double().add_(0.5).mul_(2.0**-52)  # in (0, 1), exact
    return uniform.log_().neg_().log_().neg_()


def mix(z: Tensor) -> Tensor:
    """Apply the finalizer in place: every input bit affects every output bit."""
    z.bitwise_xor_(shifted(z, 30)).mul_(signed(MIX[0]))
    z.bitwise_xor_(shifted(z, 27)).mul_(signed(MIX[1]))
    return z.bitwise_xor_(shifted(z, 31))


def shifted(z: Tensor, n: int) -> Tensor:
    """Return z >> n for unsigned 64-bit integers held in int64, whose own shift extends the sign."""
    return (z >> n).bitwise_and_((1 << (64 - n)) - 1)


def signed(z: int) -> int:
    """Return the int64 with the same bits."""
    return z - (1 << 64) if z >> 63 else z
