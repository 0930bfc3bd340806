"""Random numbers as a function of (seed, step, token id): integer arithmetic that is exact everywhere.

So that a seed gives the same draws wherever the logits are: on the host, on a device, in a kernel. SplitMix64's finaliser
(Steele, Lea, Flood 2014) on ids and steps that lie far apart. Plain PyTorch; unsigned
integers of 64 bits are held in int64.
"""

from __future__ import annotations

import torch
from torch import Tensor

INDEX = 0x9E3779B97F4A7C15  # odd 64-bit constants: how far apart two token ids, and two steps, lie in the hash's input
STEP = 0xD1B54A32D192ED03
MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # the finaliser's
_WORD = (1 << 64) - 1


def mixed_seed(seed: int) -> int:
    """What every draw of `seed` adds to its hash's input, as an int64."""
    z = seed & _WORD
    z = (z ^ z >> 30) * MIX[0] & _WORD
    z = (z ^ z >> 27) * MIX[1] & _WORD
    return signed(z ^ z >> 31)


def gumbel(key: Tensor, step: Tensor, vocab: int) -> Tensor:
    """The noise fp64 [vocab] of a step [1] with a key [1] (`mixed_seed`), on their device: see `gumbel_of`."""
    return gumbel_of(torch.arange(vocab, device=key.device) * signed(INDEX) + key, step)


def gumbel_of(base: Tensor, step: Tensor) -> Tensor:
    """Gumbel noise fp64 [vocab] of a step [1]: the highest of logit + noise is a draw from softmax(logits).

    `base` [vocab]: ids times INDEX, plus the key. In fp64: two libraries' logarithms differ in the last bit, which then
    decides nothing.
    """
    bits = mix(base + step * signed(STEP))
    uniform = shifted(bits, 12).double().add_(0.5).mul_(2.0**-52)  # in (0, 1), exact
    return uniform.log_().neg_().log_().neg_()


def mix(z: Tensor) -> Tensor:
    """The finaliser, in place: every input bit decides about every output bit."""
    z.bitwise_xor_(shifted(z, 30)).mul_(signed(MIX[0]))
    z.bitwise_xor_(shifted(z, 27)).mul_(signed(MIX[1]))
    return z.bitwise_xor_(shifted(z, 31))


def shifted(z: Tensor, n: int) -> Tensor:
    """z >> n of unsigned 64-bit integers held in int64, whose own shift carries the sign along."""
    return (z >> n).bitwise_and_((1 << (64 - n)) - 1)


def signed(z: int) -> int:
    """The int64 with the same bits."""
    return z - (1 << 64) if z >> 63 else z
