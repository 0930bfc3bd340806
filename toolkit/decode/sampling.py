"""Sampling: greedy, or random with temperature, top-k, top-p and min-p, with the same results on the host and on the device.

Random numbers are a function of (seed, step, token id), and filters add up integers (see `toolkit.kernels.filters`), so a seed
gives the same text on every device. Options are uploaded once; choosing a token makes no copies between host and device.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from toolkit import ops
from toolkit.core.callers import warn
from toolkit.core.errors import ModelError, brief
from toolkit.core.flags import flag
from toolkit.core.numbers import integer, real, seed_of
from toolkit.kernels.filters import MOST_TOKENS, WORK, Rules, numbers_of
from toolkit.kernels.noise import mixed_seed

FLAGS = ("fallback", "record", "lines")  # options of `tk.generate` that are True or False


@dataclass(frozen=True)
class Sampling:
    """Sampling options, which are applied in the order of transformers.

    1. `repetition_penalty` divides positive logits of the tokens of the prompt and of the text so far, and multiplies negative
       ones (CTRL, arXiv 1909.05858). 1 changes nothing; values above 1 make repetitions less likely.
    2. `logit_bias` maps token ids to numbers that are added to their logits; -inf excludes a token.
    3. With `temperature` 0, sampling is greedy: the highest logit, and the lowest id among equals. The options below then have
       no effect. Otherwise the logits are divided by the temperature.
    4. `top_k` keeps the k most probable tokens.
    5. `top_p` keeps the smallest set of most probable tokens whose probabilities add up to at least `top_p` of what top-k kept
       (nucleus sampling, arXiv 1904.09751).
    6. `min_p` keeps tokens that are at least `min_p` times as probable as the most probable one (arXiv 2407.01082).

    All tokens that tie for the last place are kept. Raises ModelError for values out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        def refuse(name: str, needed: str, entry: tuple[Any, Any] | None = None) -> ModelError:
            value = getattr(self, name) if entry is None else entry[1]
            whole, number = integer(value) is not None, isinstance(value, numbers.Real) and not isinstance(value, bool)
            fits = whole if name in ("top_k", "seed") else number and (entry is None or integer(entry[0]) is not None)
            found = "" if entry is None else f"the entry {brief(entry[0])}: {brief(entry[1])} is "
            found += "out of range" if fits else "of a wrong type"
            return ModelError(f"sampling with {name}={brief(getattr(self, name))}", found, f"Give {needed}")

        temperature, penalty, seed = real(self.temperature), real(self.repetition_penalty), seed_of(self.seed)
        top_k = None if self.top_k is None else integer(self.top_k, least=1)
        top_p, min_p = (None if given is None else real(given) for given in (self.top_p, self.min_p))
        if temperature is None or not 0 <= temperature < math.inf:
            raise refuse("temperature", "0 for greedy, or a number above 0")
        if 0 < temperature < 1e-6:
            raise refuse("temperature", "0 for greedy, or at least 1e-6")
        if self.top_k is not None and top_k is None:
            raise refuse("top_k", "a whole number of at least 1, or None")
        if self.top_p is not None and (top_p is None or not 0 < top_p <= 1):
            raise refuse("top_p", "a number above 0 and at most 1, or None")
        if seed is None:
            raise refuse("seed", "a whole number from -2**63 to 2**64 - 1")
        if self.min_p is not None and (min_p is None or not 0 <= min_p <= 1):
            raise refuse("min_p", "a number from 0 to 1, or None")
        if penalty is None or not 1e-6 <= penalty <= 1e6:
            raise refuse("repetition_penalty", "a number from 1e-6 to 1e6; 1 is off")
        biases, bias = "a mapping from token ids to numbers that fp32 can hold, or -inf", dict[int, float]()
        if not isinstance(self.logit_bias, Mapping):
            raise refuse("logit_bias", biases)
        for entry in self.logit_bias.items():
            token, add = integer(entry[0]), real(entry[1])
            if token is None or add is None or not add <= torch.finfo(torch.float32).max:
                raise refuse("logit_bias", biases, entry)
            bias[token] = add
        found = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "min_p": min_p}
        for name, value in {**found, "repetition_penalty": penalty, "logit_bias": bias}.items():
            object.__setattr__(self, name, value)  # Python's numbers; later changes by the caller have no effect

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def unused(self) -> list[str]:
        """The names of filters that were given, but have no effect because sampling is greedy."""
        given = {"top_k": self.top_k is not None, "top_p": self.top_p not in (None, 1), "min_p": self.min_p not in (None, 0)}
        return [name for name, is_given in given.items() if is_given and self.greedy]


def checked(options: Mapping[str, Any]) -> tuple[Sampling, dict[str, Any]]:
    """Return the `Sampling` of options of `tk.generate`, and the options with None for filters that have no effect.

    Warns about these filters, and only here: whatever passes the returned options on is not warned about them again. Raises
    ModelError for values out of range, and for `FLAGS` that are neither True nor False.
    """
    options = {name: flag(name, value, ModelError) if name in FLAGS else value for name, value in options.items()}
    names = {each.name for each in fields(Sampling)} & options.keys()
    given = {name: options[name] for name in names if name != "logit_bias" or options[name] is not None}
    sampling = Sampling(**given)
    if sampling.unused:
        said = " and ".join(f"{name}={brief(getattr(sampling, name))}" for name in sampling.unused)
        have = "has" if len(sampling.unused) == 1 else "have"
        warn(
            f"{said} {have} no effect with temperature=0, the default, which always chooses the most probable token. "
            f"Leave out {' and '.join(sampling.unused)}, or give a temperature above 0 to draw tokens."
        )
    return sampling, {**options, **dict.fromkeys(sampling.unused)}


class Sampler:
    """Samples one token after the other from logits [vocab] on `device`. All its tensors keep their addresses.

    Raises ModelError if `logit_bias` names a token outside of the vocabulary, or if the vocabulary is too large.
    """

    def __init__(self, sampling: Sampling, vocab_size: int, device: torch.device) -> None:
        _check_vocab(sampling, vocab_size)
        self.sampling = sampling
        draw = not sampling.greedy
        top_k = sampling.top_k if draw and sampling.top_k is not None and sampling.top_k < vocab_size else 0
        top_p = sampling.top_p if draw and sampling.top_p is not None else 1.0
        min_p = sampling.min_p if draw and sampling.min_p is not None else 0.0
        numbers = numbers_of(sampling.temperature, sampling.repetition_penalty, top_k, top_p, min_p)
        self._rules = Rules(
            numbers=_constants(numbers, torch.float64, device),
            state=_constants((mixed_seed(sampling.seed), 0), torch.int64, device),
            work=torch.zeros(WORK, dtype=torch.int64, device=device),
            seen=None if sampling.repetition_penalty == 1 else torch.zeros(vocab_size, dtype=torch.bool, device=device),
            bias=_bias(sampling.logit_bias, vocab_size).to(device) if sampling.logit_bias else None,
            draw=draw, top_k=top_k, top_p=top_p < 1, min_p=min_p > 0,
        )  # fmt: skip

    def begin(self, prompt_ids: Tensor) -> None:
        """Begin a new text after the prompt `prompt_ids` [T] int64: its first step is step 0.

        The ids are copied to the sampler's device, but only for a repetition penalty.
        """
        self._rules.state[1:].zero_()
        if self._rules.seen is not None:
            self._rules.seen.zero_().index_fill_(0, prompt_ids.to(self._rules.seen.device), True)

    def choose(self, logits: Tensor, out: Tensor, told: Tensor | None = None) -> Tensor:
        """Write the next token for `logits` [vocab] into `out` [1] int64 on the same device, and return `out`.

        `told` [1] int64 is for the host: the token, or NO_TOKEN if its logit is NaN or infinite.
        """
        return ops.sample(logits, self._rules, out, torch.empty_like(out) if told is None else told)


def _check_vocab(sampling: Sampling, vocab_size: int) -> None:
    asked = f"sampling from {vocab_size:,} tokens"
    if vocab_size > MOST_TOKENS:
        raise ModelError(asked, f"at most {MOST_TOKENS:,} are supported", "Use a model with a smaller vocabulary")
    for i in sampling.logit_bias:
        if not 0 <= i < vocab_size:
            raise ModelError(asked, f"logit_bias has the id {brief(i)}", f"Give ids from 0 to {vocab_size - 1:,}")


def _constants(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of `values`, filled on the device: uploading them would be a copy that strategies don't list."""
    found = torch.empty(len(values), dtype=dtype, device=device)
    for i, value in enumerate(values):
        found[i : i + 1].fill_(value)
    return found


def _bias(numbers: Mapping[int, float], vocab_size: int) -> Tensor:
    found = torch.zeros(vocab_size, dtype=torch.float32, device="cpu")
    found[list(numbers)] = torch.tensor(list(numbers.values()), dtype=torch.float32, device="cpu")
    return found
