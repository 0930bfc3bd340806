"""Sampling from logits in plain PyTorch: adjusted logits, the filters top-k, top-p and min-p, and the choice of a token.

The result depends on no order of summation and on no library's exponential, so the host, a device and a kernel choose the same
token. Thresholds compare logits as they are. Probabilities are integers: a token has the weight
2^40 * exp((logit - highest logit) / temperature), which `weights_of` computes with integer operations, accurate to 26 bits.
Sums of integers are exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.kernels.noise import gumbel

NUMBERS = ("inverse_temperature", "penalty", "top_k", "top_p", "rate", "least_weight")  # the order in `Rules.numbers`
WHOLE = 40  # the weight of the most probable token is 2 ** WHOLE
NO_TOKEN = -1  # what the host is told if no logit can be chosen: the highest one is NaN or infinite, or all are -infinity
MOST_TOKENS = 1 << 22  # so that the sum of all weights fits an int64
DIGITS = ((20, 12), (10, 10), (0, 10))  # (lowest bit, bits): the parts of a logit's bits, in the order in which they are found
WORK = 8 + (1 << DIGITS[0][1])  # numbers of scratch memory that the kernel needs
# 2^-t for t in [0, 1), in powers of t: the polynomial of degree 6 through Chebyshev nodes, times 2^31. The first one is exact.
POWERS = (2147483648, -1488522224, 515881616, -119183791, 20609764, -2774097, 246920)
FURTHEST = 48.0 * 2**32  # weights of tokens below 2^-48 of the highest probability are zero


@dataclass(frozen=True)
class Rules:
    """The options of sampling, as tensors on the device of the logits, and as flags that select the work to do.

    Attributes:
        numbers: fp64 [6], see `NUMBERS`. "rate" is log2(e) / temperature * 2^32, "least_weight" is min_p * 2^40, rounded up.
        state: int64 [2]: the key of the noise (`mixed_seed`) and the step, which counts the chosen tokens.
        work: int64 [WORK], zero before the first token and then the kernel's own.
        seen: bool [vocab]: the tokens of the prompt and of the text so far, for the repetition penalty. None if there is none.
        bias: fp32 [vocab], added to the logits; None if there is none.
        draw: Whether to draw at random. Otherwise the highest logit wins, and the filters below have no effect.
        top_k: The number of most probable tokens to keep; 0 keeps all.
        top_p, min_p: Whether to apply these filters.
    """

    numbers: Tensor
    state: Tensor
    work: Tensor
    seen: Tensor | None = None
    bias: Tensor | None = None
    draw: bool = False
    top_k: int = 0
    top_p: bool = False
    min_p: bool = False

    def number(self, name: str) -> Tensor:
        """Return one of `NUMBERS` as fp64 [1]."""
        i = NUMBERS.index(name)
        return self.numbers[i : i + 1]


def numbers_of(
    temperature: float, penalty: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[float, ...]:
    """Return the values of `Rules.numbers`. The penalty is rounded to fp32, so that products with fp32 logits are exact."""
    inverse = 1 / temperature if temperature else 1.0
    rate = math.log2(math.e) * inverse * 2**32
    rounded = torch.tensor(penalty, dtype=torch.float32, device="cpu").item()
    return inverse, rounded, float(top_k), top_p, rate, float(math.ceil(min_p * 2**WHOLE))


def next_token(logits: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
    """Return the next token [1] int64 for `logits` [vocab], the lowest id among equals, and what to tell the host [1] int64.

    The host is told the token, or NO_TOKEN if its logit isn't finite. Changes none of its arguments.
    """
    scores = adjusted(logits, rules)
    if rules.draw:
        keep = kept(scores, rules)
        scores = scores.double() * rules.number("inverse_temperature") + gumbel(rules.state[:1], rules.state[1:], len(scores))
        scores = scores if keep is None else scores.masked_fill(~keep, -math.inf)
    token = scores.argmax(-1, keepdim=True)
    return token, torch.where(scores.index_select(0, token).isfinite(), token, NO_TOKEN)


def adjusted(logits: Tensor, rules: Rules) -> Tensor:
    """Return `logits` in fp32 after the repetition penalty and the bias. NaN becomes infinity; inf - inf becomes -infinity."""
    values = logits.float().nan_to_num(math.inf, math.inf, -math.inf)
    if rules.seen is not None:
        penalty, wide = rules.number("penalty"), values.double()
        values = torch.where(rules.seen, torch.where(values > 0, wide / penalty, wide * penalty).float(), values)
    if rules.bias is not None:
        values = (values + rules.bias).nan_to_num(-math.inf, math.inf, -math.inf)
    return values


def kept(values: Tensor, rules: Rules) -> Tensor | None:
    """Return which tokens the filters keep, bool [vocab], or None if they are off. Ties with the last kept token are kept."""
    keep: Tensor | None = None
    lowest = torch.full_like(values[:1], -math.inf)
    if rules.top_k:
        lowest = values.topk(rules.top_k, sorted=False).values.amin(0, keepdim=True)
        keep = values >= lowest
    if rules.top_p:
        ordered = values.sort(descending=True).values
        weights = weights_of(ordered, ordered[:1], rules.number("rate")) * (ordered >= lowest)
        sums = weights.cumsum(0)
        target = (sums[-1:].double() * rules.number("top_p")).ceil().long().minimum(sums[-1:])
        lowest = ordered.masked_fill(sums - weights >= target, math.inf).amin(0, keepdim=True)
        keep = values >= lowest
    if rules.min_p:
        enough = weights_of(values, values.amax(0, keepdim=True), rules.number("rate")) >= rules.number("least_weight")
        keep = enough if keep is None else keep & enough
    return keep


def weights_of(values: Tensor, highest: Tensor, rate: Tensor) -> Tensor:
    """Return the weights int64 of `values` fp32; `highest` [1] is the largest of them and `rate` [1] is that of `NUMBERS`."""
    below = torch.where(values == highest, 0.0, highest.double() - values.double())
    exponent = (below * rate).clamp_(max=FURTHEST).long()  # of 2, negated, in units of 2^-32
    fraction = (exponent & 0xFFFFFFFF) >> 1
    power = torch.full_like(fraction, POWERS[-1])
    for term in POWERS[-2::-1]:
        power.mul_(fraction).bitwise_right_shift_(31).add_(term)
    return (((power << (WHOLE - 30)) >> (exponent >> 32)) + 1) >> 1
