"""Sampling: greedy ties, processors and filters against plain implementations, and draws that depend on (seed, step) only."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from small_models import make
from torch import Tensor

import toolkit as tk
from toolkit.core.errors import ModelError
from toolkit.decode.sampling import Sampler, Sampling
from toolkit.gpu.opening import open_device
from toolkit.kernels.filters import Rules, adjusted, kept
from toolkit.kernels.noise import INDEX, MIX, STEP, mix, mixed_seed, shifted, signed

CPU = torch.device("cpu")
WORD = 1 << 64


def draws(sampling: Sampling, logits: Tensor, n: int, prompt: tuple[int, ...] = ()) -> list[int]:
    sampler, out = Sampler(sampling, logits.shape[0], logits.device), torch.empty(1, dtype=torch.int64, device=logits.device)
    sampler.begin(torch.tensor(prompt, dtype=torch.int64).to(logits.device))
    return [int(sampler.choose(logits, out)) for _ in range(n)]


def rules_of(sampling: Sampling, vocab_size: int, prompt: tuple[int, ...] = ()) -> Rules:
    sampler = Sampler(sampling, vocab_size, CPU)
    sampler.begin(torch.tensor(prompt, dtype=torch.int64))
    return sampler._rules


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
    with pytest.raises(ModelError, match="out of range"):
        Sampling(1.0, seed=WORD)


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_draws_follow_softmax(seed):
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -8.0])
    n, temperature = 4000, 0.7
    counts = torch.bincount(torch.tensor(draws(Sampling(temperature, seed=seed), logits, n)), minlength=5)
    expected = (logits / temperature).softmax(-1) * n
    chi2 = ((counts - expected) ** 2 / expected)[:4].sum()
    assert chi2 < 16.3  # 3 degrees of freedom: exceeded once in a thousand
    assert counts[4] <= 2


def plain_filter(logits: Tensor, sampling: Sampling) -> set[int]:
    """Return the ids that stay: the k highest, the fewest of them that hold p, and of these those with the least share.

    Ids that tie with the last one stay.
    """
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
    if sampling.min_p is not None:
        kept = {i for i in kept if math.exp((values[i] - max(values)) / sampling.temperature) >= sampling.min_p}
    return kept


@pytest.mark.parametrize("top_k", [None, 1, 3, 50, 96, 1000], ids="k={}".format)
@pytest.mark.parametrize("top_p", [None, 1e-9, 0.3, 0.9, 0.999, 1.0], ids="p={}".format)
@pytest.mark.parametrize("min_p", [None, 0.0, 0.05, 1.0], ids="min={}".format)
def test_filters_keep_what_they_say(top_k, top_p, min_p):
    for seed in range(5):
        logits = torch.randn(97, generator=torch.Generator().manual_seed(seed)) * 2
        logits[10:14] = logits.max() - 0.5  # four equals
        before, sampling = logits.clone(), Sampling(0.8, top_k, top_p, seed, min_p)
        keep = kept(logits, rules_of(sampling, 97))
        found = set(range(97)) if keep is None else set(keep.nonzero().flatten().tolist())
        assert found == plain_filter(logits, sampling)
        assert set(draws(sampling, logits, 20)) <= found
        assert torch.equal(logits, before), "the caller's logits were written"


@pytest.mark.parametrize("options", [{"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 6, "top_p": 0.9, "min_p": 0.05}], ids=str)
def test_draws_follow_the_filtered_softmax(options):
    logits = torch.linspace(2.0, -3.0, 12)[torch.randperm(12, generator=torch.Generator().manual_seed(0))]
    n, sampling = 4000, Sampling(0.9, seed=7, **options)
    stay = sorted(plain_filter(logits, sampling))
    counts = torch.bincount(torch.tensor(draws(sampling, logits, n)), minlength=12)
    assert counts.sum() == counts[stay].sum() == n
    expected = (logits[stay] / 0.9).softmax(-1) * n
    chi2 = ((counts[stay] - expected) ** 2 / expected).sum()
    assert 3 <= len(stay) <= 8
    assert chi2 < 26  # 7 degrees of freedom or less: exceeded less than once in a thousand


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 5.0])
@pytest.mark.parametrize("bias", [{}, {3: 2.5, 90: -math.inf, 0: -1.0}], ids=["no bias", "bias"])
def test_processors_are_those_of_transformers(penalty, bias):
    transformers = pytest.importorskip("transformers")
    prompt = (5, 3, 3, 61, 96)
    logits = torch.randn(97, generator=torch.Generator().manual_seed(2)) * 4
    logits[5] = 0.0
    processors = [transformers.RepetitionPenaltyLogitsProcessor(penalty=penalty)]
    if bias:
        processors.append(transformers.SequenceBiasLogitsProcessor({(i,): x for i, x in bias.items()}))
    wanted = logits[None].clone()
    for processor in processors:
        wanted = processor(torch.tensor([prompt]), wanted)
    found = adjusted(logits, rules_of(Sampling(repetition_penalty=penalty, logit_bias=bias), 97, prompt))
    assert torch.equal(found, wanted[0])


@pytest.mark.parametrize(
    "options", [{"top_k": 9}, {"top_p": 0.85}, {"min_p": 0.07}, {"top_k": 30, "top_p": 0.9, "min_p": 0.02}]
)
def test_filters_are_those_of_transformers(options):
    transformers = pytest.importorskip("transformers")
    kinds = {
        "top_k": transformers.TopKLogitsWarper, "top_p": transformers.TopPLogitsWarper, "min_p": transformers.MinPLogitsWarper
    }  # fmt: skip
    for seed in range(10):
        logits = torch.randn(97, generator=torch.Generator().manual_seed(seed)) * 3
        wanted = logits[None] / 0.8
        for name, value in options.items():
            wanted = kinds[name](value)(None, wanted)
        keep = kept(logits, rules_of(Sampling(0.8, **options), 97))
        assert torch.equal(keep, wanted[0].isfinite())


def test_text_so_far_is_penalised():
    """Greedy sampling with a strong penalty goes through the tokens that were not seen, in the order of their logits."""
    logits = torch.tensor([4.0, 3.0, 2.0, 5.0, -1.0])
    assert draws(Sampling(repetition_penalty=100), logits, 4, prompt=(1,)) == [3, 0, 2, 3]
    assert draws(Sampling(repetition_penalty=100), logits, 2, prompt=()) == [3, 0]


def test_a_new_text_begins_with_step_zero_and_its_own_prompt():
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    sampler, out = Sampler(Sampling(1.0, seed=3, repetition_penalty=1.5), 50, CPU), torch.empty(1, dtype=torch.int64)
    texts = []
    for prompt in ([1, 2], [1, 2], [9]):
        sampler.begin(torch.tensor(prompt))
        texts.append([int(sampler.choose(logits, out)) for _ in range(10)])
    assert texts[0] == texts[1]
    assert sampler._rules.seen is not None
    assert set(sampler._rules.seen.nonzero().flatten().tolist()) == {9, *texts[2]}


EVERYTHING = {
    "greedy": {}, "drawn": {"temperature": 0.9}, "top-k": {"temperature": 0.9, "top_k": 40},
    "top-p": {"temperature": 1.1, "top_p": 0.8}, "min-p": {"temperature": 1.5, "min_p": 0.05},
    "penalty": {"repetition_penalty": 1.4}, "bias": {"logit_bias": {7: 9.5, 8: -math.inf}},
    "all": {
        "temperature": 1.2, "top_k": 100, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2, "logit_bias": {7: 3.0}
    },
}  # fmt: skip


@pytest.mark.parametrize("name", EVERYTHING)
def test_the_device_chooses_the_tokens_of_the_host_without_copies(name):
    device, sampling = open_device("virtual:h200"), Sampling(seed=11, **EVERYTHING[name])
    prompt, logits = torch.arange(5), list(torch.randn(20, 900, generator=torch.Generator().manual_seed(4)) * 3)
    host, out = Sampler(sampling, 900, CPU), torch.empty(1, dtype=torch.int64)
    host.begin(prompt)
    wanted = [int(host.choose(x, out)) for x in logits]
    sampler, slots = Sampler(sampling, 900, device.torch), torch.empty(20, 1, dtype=torch.int64, device=device.torch)
    sampler.begin(prompt.to(device.torch))
    given = [x.to(device.torch) for x in logits]
    with device.record() as trace:
        for x, slot in zip(given, slots, strict=True):
            sampler.choose(x, slot)
    assert slots.flatten().tolist() == wanted
    filters = {"top-k": 3, "top-p": 4, "min-p": 1, "all": 6}.get(name, 0)
    kinds = [trace.select(trace.is_kind(kind)) for kind in ("kernel", "h2d", "d2h", "d2d", "memset", "sync")]
    assert [len(events) for events in kinds] == [20 * (1 + filters), 0, 0, 0, 0, 0]


@pytest.mark.parametrize("name", EVERYTHING)
def test_a_captured_choice_replays_the_eager_one(name):
    """A replay counts its own steps and marks its own tokens: nothing of it depends on the host."""
    device, sampling = open_device("virtual:h200"), Sampling(seed=11, **EVERYTHING[name])
    prompt = torch.arange(5, device=device.torch)
    logits = (torch.randn(900, generator=torch.Generator().manual_seed(4)) * 3).to(device.torch)
    sampler, out = Sampler(sampling, 900, device.torch), torch.zeros(1, dtype=torch.int64, device=device.torch)
    sampler.begin(prompt)
    eager = [int(sampler.choose(logits, out)) for _ in range(8)]
    sampler.begin(prompt)
    graph = device.capture(lambda: sampler.choose(logits, out))
    replayed = []
    for _ in range(8):
        graph.replay()
        replayed.append(int(out))
    graph.free()
    assert replayed == eager


def test_cold_sampling_is_greedy():
    logits = torch.randn(97, generator=torch.Generator().manual_seed(1))
    assert set(draws(Sampling(1e-6, seed=5), logits, 10)) == {int(logits.argmax())}


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1}, {"temperature": math.nan}, {"temperature": math.inf}, {"temperature": "hot"},
        {"temperature": 1e-9}, {"temperature": True}, {"top_k": 0}, {"top_k": 2.5}, {"top_k": True}, {"top_p": 0},
        {"top_p": 1.5}, {"top_p": math.nan}, {"seed": 1.5}, {"seed": None}, {"min_p": -0.1}, {"min_p": 1.1},
        {"min_p": math.nan}, {"min_p": "low"}, {"repetition_penalty": 0}, {"repetition_penalty": -1.0},
        {"repetition_penalty": math.inf}, {"repetition_penalty": None}, {"logit_bias": [1, 2]}, {"logit_bias": {"a": 1.0}},
        {"temperature": 10**400}, {"repetition_penalty": 10**400}, {"logit_bias": {1: 10**400}}, {"top_k": "2"},
        {"logit_bias": {1.0: 1.0}}, {"logit_bias": {1: math.nan}}, {"logit_bias": {1: math.inf}}, {"logit_bias": {1: None}},
    ],
    ids=str,
)  # fmt: skip
def test_options_out_of_range_are_refused_by_name(options):
    with pytest.raises(ModelError, match=next(iter(options))):
        Sampling(**options)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"temperature": None}, "of a wrong type"),
        ({"temperature": True}, "of a wrong type"),
        ({"temperature": torch.tensor(0.5)}, "of a wrong type"),
        ({"temperature": float("nan")}, "out of range"),
        ({"temperature": -1}, "out of range"),
        ({"top_k": 2.0}, "of a wrong type"),
        ({"top_k": 0}, "out of range"),
        ({"seed": None}, "of a wrong type"),
        ({"seed": 1 << 64}, "out of range"),
        ({"min_p": "0.5"}, "of a wrong type"),
        ({"logit_bias": [1]}, "of a wrong type"),
        ({"logit_bias": {1: math.inf}}, "the entry 1: inf is out of range"),
        ({"logit_bias": {2: 0.5, "5": 1}}, "the entry '5': 1 is of a wrong type"),
        ({"logit_bias": {2: "0.5"}}, "the entry 2: '0.5' is of a wrong type"),
    ],
    ids=str,
)
def test_options_of_a_wrong_type_are_told_from_those_out_of_range(options, found):
    with pytest.raises(ModelError, match=f": {found}\\. Give "):
        Sampling(**options)


@pytest.mark.parametrize("wrong", [-1, 50, 10**30])
def test_a_bias_for_a_token_outside_of_the_vocabulary_is_refused(wrong):
    with pytest.raises(ModelError, match=f"logit_bias has the id {wrong}"):
        Sampler(Sampling(logit_bias={3: 1.0, wrong: 2.0}), 50, CPU)


def test_options_are_a_key_and_stay_as_they_were_given():
    """Captured graphs are kept by their options."""
    bias = {3: 1.0}
    sampling = Sampling(0.5, logit_bias=bias)
    bias[4] = 2.0
    assert sampling.logit_bias == {3: 1.0}
    assert sampling == Sampling(0.5, logit_bias={3: 1.0})
    assert hash(sampling) == hash(Sampling(0.5, logit_bias={3: 1.0}))
    assert sampling != Sampling(0.5, logit_bias={3: 1.5})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"top_p": 0.9}, "top_p=0.9 has no effect with temperature=0"),
        ({"top_k": np.int64(5), "min_p": 0.1, "temperature": 0}, "top_k=5 and min_p=0.1 have no effect with temperature=0"),
    ],
    ids=str,
)
def test_filters_that_temperature_0_ignores_are_named_at_the_users_line(options, said):
    """Once per call, also if it generates several times."""
    model = make(tk.device("cpu"))
    for call in (tk.generate, partial(tk.compare, decode=["roundtrip", "double-buffered"])):
        with pytest.warns(UserWarning, match=said) as found:
            call(model, [1, 2, 3], max_new_tokens=2, **options)
        assert [each.filename for each in found] == [__file__]


@pytest.mark.filterwarnings("error")
def test_filters_that_have_an_effect_or_are_off_need_no_warning():
    model = make(tk.device("cpu"))
    for options in ({"temperature": 0.5, "top_p": 0.9}, {"top_k": None, "top_p": 1.0, "min_p": 0}, {"logit_bias": None}):
        tk.generate(model, [1, 2, 3], max_new_tokens=2, **options)


def test_options_that_temperature_0_ignores_are_checked():
    model = make(tk.device("cpu"))
    for call in (tk.generate, tk.compare):
        with pytest.raises(ModelError, match="top_p=2"):
            call(model, [1, 2, 3], top_p=2)
