"""Sampling: greedy, or random with temperature, top-k and top-p, with the same code on the host and on the device.

Random numbers are a function of (seed, step, token id) in exact integer arithmetic, so a seed gives the same draws on every
device. Sampling makes no copies between host and device: constants are kernel arguments, and the step is counted on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.core.errors import ModelError
from toolkit.kernels.noise import INDEX, gumbel_of, mixed_seed, signed


@dataclass(frozen=True)
class Sampling:
    """Sampling options. With `temperature` 0, sampling is greedy: the highest logit, and the lowest id among equals.

    Otherwise the logits are divided by the temperature, and the token is drawn from the `top_k` most probable tokens (including
    all that tie for the last place). Of these, `top_p` keeps the smallest set whose probabilities add up to at least `top_p`.
    Raises ModelError for values out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        def refuse(name: str, needed: str) -> ModelError:
            return ModelError(f"sampling with {name}={getattr(self, name)!r}", "out of range", f"Give {needed}")

        if not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise refuse("temperature", "0 for greedy, or a number above 0")
        if 0 < self.temperature < 1e-6:
            raise refuse("temperature", "0 for greedy, or at least 1e-6")
        if self.top_k is not None and (not isinstance(self.top_k, int) or isinstance(self.top_k, bool) or self.top_k < 1):
            raise refuse("top_k", "a whole number from 1 on, or None")
        if self.top_p is not None and (not _is_number(self.top_p) or not 0 < self.top_p <= 1):
            raise refuse("top_p", "a number above 0 and at most 1, or None")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise refuse("seed", "a whole number")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


class Sampler:
    """Samples one token after the other from logits [vocab] on `device`."""

    def __init__(self, sampling: Sampling, vocab_size: int, device: torch.device) -> None:
        self.sampling = sampling
        if not sampling.greedy:
            self._step = torch.zeros(1, dtype=torch.int64, device=device)
            ids = torch.arange(vocab_size, device=device)
            self._base = ids.mul_(signed(INDEX)).add_(mixed_seed(sampling.seed))

    def choose(self, logits: Tensor, out: Tensor) -> Tensor:
        """Write the next token for fp32 `logits` [vocab] into `out` [1] int64 on the same device, and return `out`."""
        if self.sampling.greedy:
            return torch.argmax(logits, -1, keepdim=True, out=out)
        scores = _keep(logits, self.sampling).double().mul_(1 / self.sampling.temperature)
        noise = gumbel_of(self._base, self._step)
        self._step.add_(1)
        return torch.argmax(scores.add_(noise), -1, keepdim=True, out=out)


def _keep(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return `logits` with the tokens that top-k and top-p exclude set to -inf. On CUDA the sort for top-p makes D2D copies."""
    if sampling.top_k is not None and sampling.top_k < logits.shape[0]:
        lowest = logits.topk(sampling.top_k, sorted=False).values.min()
        logits = logits.masked_fill(logits < lowest, -math.inf)
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered = logits.sort(descending=True).values
        share = ordered.double().mul_(1 / sampling.temperature).softmax(-1)
        enough = share.cumsum(-1).sub_(share) >= sampling.top_p  # more probable tokens already reach top_p
        lowest = ordered.masked_fill_(enough, math.inf).min()
        logits = logits.masked_fill(logits < lowest, -math.inf)
    return logits


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
