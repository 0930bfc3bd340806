"""Sampling: greedy ties, the filters against a plain implementation, and draws that are a function of (seed, step)."""

from __future__ import annotations

import math

import pytest
import torch

from toolkit.core.errors import ModelError
from toolkit.decode.sampling import Sampler, Sampling, _keep
from toolkit.kernels.noise import INDEX, MIX, STEP, mix, mixed_seed, shifted, signed

CPU = torch.device("cpu")
WORD = 1 << 64


def draws(sampling: Sampling, logits: torch.Tensor, n: int) -> list[int]:
    sampler, out = Sampler(sampling, logits.shape[0], CPU), torch.empty(1, dtype=torch.int64)
    return [int(sampler.choose(logits, out)) for _ in range(n)]


def test_greedy_takes_the_lowest_id_of_equals():
    logits = torch.zeros(1000)
    logits[[7, 400, 999]] = 3.0
    assert draws(Sampling(), logits, 2) == [7, 7]
    assert draws(Sampling(), torch.zeros(5), 1) == [0]


def test_the_hash_equals_integers_of_python():
    values = [0, 1, 2**63, 2**64 - 1, 0x0123456789ABCDEF, INDEX, STEP]
    hashed = mix(torch.tensor([signed(v) for v in values])).tolist()
    assert [h % WORD for h in hashed] == [mixed_seed(v) % WORD for v in values]


def test_splitmix64_as_published():
    state, published = 1234567, [6457827717110365317, 3203168211198807973, 9817491932198370423]
    for value in published:  # the sequence that the reference implementation gives for this seed
        state = (state + INDEX) % WORD
        assert mixed_seed(state) % WORD == value
    assert MIX[0] % 2 == MIX[1] % 2 == 1


@pytest.mark.parametrize("n", [12, 27, 30, 31])
def test_shift_is_unsigned(n):
    values = [signed(v) for v in (0, 1, 2**63, 2**64 - 1, 2**63 - 1)]
    assert [v % WORD for v in shifted(torch.tensor(values), n).tolist()] == [(v % WORD) >> n for v in values]


def test_inputs_of_the_hash_do_not_meet():
    """No two (step, id) pairs of a million steps and a million ids share an input: k * STEP stays far from ids * INDEX."""
    inverse = pow(INDEX, -1, WORD)
    ratio = STEP * inverse % WORD  # steps apart, as ids apart
    k = torch.arange(1, 1_000_000)
    apart = k * signed(ratio)
    assert int(apart.abs().min()) > 1_000_000


def test_draws_depend_on_seed_and_step_only():
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    first = draws(Sampling(1.0, seed=3), logits, 40)
    torch.manual_seed(99)
    assert draws(Sampling(1.0, seed=3), logits, 40) == first
    assert draws(Sampling(1.0, seed=4), logits, 40) != first
    assert len(set(first)) > 5
    assert draws(Sampling(1.0, seed=-1), logits, 40) == draws(Sampling(1.0, seed=WORD - 1), logits, 40)
    assert draws(Sampling(1.0, seed=1 << 200), logits, 3) == draws(Sampling(1.0, seed=0), logits, 3)


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_draws_follow_softmax(seed):
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -8.0])
    n, temperature = 4000, 0.7
    counts = torch.bincount(torch.tensor(draws(Sampling(temperature, seed=seed), logits, n)), minlength=5)
    expected = (logits / temperature).softmax(-1) * n
    chi2 = ((counts - expected) ** 2 / expected)[:4].sum()
    assert chi2 < 16.3  # 3 degrees of freedom: exceeded once in a thousand
    assert counts[4] <= 2


def plain_filter(logits: torch.Tensor, sampling: Sampling) -> set[int]:
    """Return the ids that stay: the k highest, then the fewest of them that hold p; ids that tie with the last one stay."""
    kept = set(range(len(logits)))
    values = logits.tolist()
    if sampling.top_k is not None:
        last = sorted(values, reverse=True)[: sampling.top_k][-1]
        kept = {i for i in kept if values[i] >= last}
    if sampling.top_p is not None and sampling.top_p < 1:
        weight = {i: math.exp((values[i] - max(values)) / sampling.temperature) for i in kept}
        total, held, last = sum(weight.values()), 0.0, 0.0
        for i in sorted(kept, key=lambda i: -values[i]):
            last = values[i]
            held += weight[i] / total
            if held >= sampling.top_p:
                break
        kept = {i for i in kept if values[i] >= last}
    return kept


@pytest.mark.parametrize("top_k", [None, 1, 3, 50, 96, 1000], ids="k={}".format)
@pytest.mark.parametrize("top_p", [None, 1e-9, 0.3, 0.9, 0.999, 1.0], ids="p={}".format)
def test_filters_keep_what_they_say(top_k, top_p):
    for seed in range(5):
        logits = torch.randn(97, generator=torch.Generator().manual_seed(seed)) * 2
        logits[10:14] = logits.max() - 0.5  # four equals
        before, sampling = logits.clone(), Sampling(0.8, top_k, top_p)
        kept = set(_keep(logits, sampling).isfinite().nonzero().flatten().tolist())
        assert kept == plain_filter(logits, sampling)
        assert torch.equal(logits, before), "the caller's logits were written"
        assert set(draws(Sampling(0.8, top_k, top_p, seed), logits, 20)) <= kept


def test_cold_sampling_is_greedy():
    logits = torch.randn(97, generator=torch.Generator().manual_seed(1))
    assert set(draws(Sampling(1e-6, seed=5), logits, 10)) == {int(logits.argmax())}


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1}, {"temperature": math.nan}, {"temperature": math.inf}, {"temperature": "hot"},
        {"temperature": 1e-9}, {"temperature": True}, {"top_k": 0}, {"top_k": 2.5}, {"top_k": True}, {"top_p": 0},
        {"top_p": 1.5}, {"top_p": math.nan}, {"seed": 1.5}, {"seed": None},
    ],
    ids=str,
)  # fmt: skip
def test_options_out_of_range_are_refused_by_name(options):
    with pytest.raises(ModelError, match=next(iter(options))):
        Sampling(**options)
