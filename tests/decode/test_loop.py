"""The loop: equal tokens for all strategies, ends of text, invalid input, cancel, callbacks that raise.

Strategies that capture graphs run on the virtual GPU, the others on the CPU.
"""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from functools import cache

import numpy as np
import pytest
import torch
from small_models import ODD, SMALL, ByteTokenizer, make

import toolkit as tk
from toolkit.core.errors import ModelError, RecorderError, ToolkitError, brief
from toolkit.decode.run import tokens_per_s
from toolkit.decode.strategies import STRATEGIES
from toolkit.models.cache import Cache

PROMPT = list(range(19))
SAMPLED = {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "seed": 11}


@pytest.fixture(scope="module")
def model():
    return make(tk.device("cpu"))


@cache
def on_virtual_gpu(config, dtype):
    return make(tk.device("virtual:h200"), config, dtype=dtype)


@pytest.fixture(autouse=True, scope="module")
def nothing_left_on_the_virtual_gpu():
    """Free the models of `on_virtual_gpu` at the end: tests of other modules open another GPU, and count what is allocated."""
    yield
    on_virtual_gpu.cache_clear()
    gc.collect()


def suited(model, strategy):
    """Return `model`, or the same one on the virtual GPU if the strategy captures graphs."""
    return on_virtual_gpu(model.config, model.dtype) if STRATEGIES[strategy].capture != "none" else model


def generate(model, strategy="double-buffered", prompt=PROMPT, **options):
    return tk.generate(suited(model, strategy), prompt, strategy, **{"max_new_tokens": 24, "eos": (), **options})


@torch.no_grad()
def greedy_by_hand(model, ids, n):
    """Generate without a cache: the whole sequence is processed again for each token."""
    ids = list(ids)
    for _ in range(n):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return tuple(ids[-n:])


@pytest.mark.parametrize("config", [SMALL, ODD], ids=["small", "odd_tied"])
@pytest.mark.parametrize("length", [1, 2, 19, 33], ids="prompt={}".format)
def test_greedy_is_greedy_under_every_strategy(config, length):
    model = make(tk.device("cpu"), config)
    prompt = [7 * i % config.vocab_size for i in range(length)]
    expected = greedy_by_hand(model, prompt, 12)
    assert len(set(expected)) > 3
    for name in STRATEGIES:
        run = generate(model, name, prompt, max_new_tokens=12)
        assert run.tokens == expected, name
        assert run.stop_reason == "length"
        assert run.prompt_tokens == tuple(prompt)
        assert run.strategy == name


@pytest.mark.parametrize("options", [{}, SAMPLED, {"temperature": 1.3, "seed": -4}], ids=["greedy", "top_k_p", "hot"])
@pytest.mark.parametrize("chunk", [1, 7, 512], ids="chunk={}".format)
def test_same_tokens_across_strategies_and_chunks(model, options, chunk):
    expected = generate(model, "roundtrip", **options).tokens
    for name in STRATEGIES:
        assert generate(model, name, prefill_chunk=chunk, **options).tokens == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_same_tokens_in_half_precision(dtype):
    model = make(tk.device("cpu"), dtype=dtype)
    assert len({generate(model, name, **SAMPLED).tokens for name in STRATEGIES}) == 1


def test_seeds_differ_and_repeat(model):
    runs = [generate(model, temperature=1.0, seed=seed).tokens for seed in (1, 2, 1)]
    assert runs[0] == runs[2] != runs[1]


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("at", [0, 1, 2, 7], ids="eos_at={}".format)
def test_stops_at_eos_and_drops_what_overshot(model, name, at):
    tokens = generate(model, name).tokens
    end = tokens[at]
    first = tokens.index(end)
    seen: list[int] = []
    run = generate(model, name, eos=[end], on_token=lambda token, text: seen.append(token))
    assert run.tokens == tokens[: first + 1]
    assert tuple(seen) == run.tokens
    assert run.stop_reason == "eos"


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("n", [1, 2, 3], ids="n={}".format)
def test_short_generations(model, name, n):
    run = generate(model, name, max_new_tokens=n)
    assert run.tokens == greedy_by_hand(model, PROMPT, n)
    assert (run.tok_per_s is None) == (n == 1)


@pytest.mark.parametrize("n", [3, 4, 24], ids="n={}".format)
def test_a_token_read_late_changes_no_rate(n):
    step_ns = 1000
    in_time = [i * step_ns for i in range(n)]
    late = [0, *in_time[2:], in_time[-1] + 10]  # the first token is waited for before the second step is launched
    assert tokens_per_s(in_time, late=False) == pytest.approx(1e9 / step_ns)
    assert tokens_per_s(late, late=True) == pytest.approx(1e9 / step_ns, rel=0.01)


@pytest.mark.parametrize(("n", "slow"), [(4, 1), (8, 1), (9, 4), (100, 4)])
def test_rates_leave_out_the_slow_first_steps(n, slow):
    times = [0]
    for i in range(n - 1):
        times.append(times[-1] + (50_000 if i < slow else 1000))
    assert tokens_per_s(times, late=False) == pytest.approx(1e6)
    assert tokens_per_s([*times[:-1], times[-2] + 10], late=True) == pytest.approx(1e6)


def test_the_ends_of_the_tokenizer_count_else_those_of_the_config(model):
    tokens = generate(model).tokens
    ended = make(tk.device("cpu"), dataclasses.replace(SMALL, eos_token_ids=(tokens[3],)))
    assert tk.generate(ended, PROMPT).tokens == tokens[: tokens.index(tokens[3]) + 1]
    for end in (tokens[1], tokens[5]):
        ended.tokenizer = ByteTokenizer(eos_ids=(end,))
        assert tk.generate(ended, PROMPT).tokens == tokens[: tokens.index(end) + 1]


def test_text_streams_and_leaves_the_end_out():
    model = make(tk.device("cpu"))
    model.tokenizer = ByteTokenizer()
    whole = tk.generate(model, "ABC", max_new_tokens=10)
    assert whole.prompt_tokens == (65, 66, 67)
    assert whole.text == bytes(whole.tokens).decode()
    pieces: list[str] = []
    tk.generate(model, "ABC", max_new_tokens=10, on_token=lambda token, text: pieces.append(text))
    assert "".join(pieces) == whole.text
    end = whole.tokens[4]
    ended = tk.generate(model, "ABC", max_new_tokens=10, eos=[end])
    assert ended.text == bytes(ended.tokens[:-1]).decode()


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("after", [1, 2, 9], ids="after={}".format)
def test_cancel_keeps_what_was_decoded(model, name, after):
    cancel, seen = threading.Event(), []

    def on_token(token, text):
        seen.append(token)
        if len(seen) == after:
            cancel.set()

    run = generate(model, name, cancel=cancel, on_token=on_token)
    assert run.stop_reason == "cancelled"
    assert run.tokens == tuple(seen) == generate(model, name).tokens[: len(seen)]
    assert after <= len(seen) <= after + 1  # double buffering knows one more than it had told


@pytest.mark.parametrize("name", STRATEGIES)
def test_cancelled_before_it_began(model, name):
    cancel = threading.Event()
    cancel.set()
    run = generate(model, name, cancel=cancel)
    assert run.tokens == ()
    assert run.text == ""
    assert run.stop_reason == "cancelled"
    assert run.tok_per_s is None


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_callback_that_raises_frees_the_cache_and_leaves_all_usable(model, name, monkeypatch):
    caches = []
    init = Cache.__init__

    def remember(self, *args):
        init(self, *args)
        caches.append(weakref.ref(self.slots))

    monkeypatch.setattr(Cache, "__init__", remember)

    def on_token(token, text):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as raised:
        generate(model, name, on_token=on_token)
    assert raised.tb is not None  # the traceback still holds the frames, and the cache is free all the same
    gc.collect()
    assert caches[0]() is None
    assert model.device.recording is None
    assert generate(model, name).tokens == generate(model, "roundtrip").tokens


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(("value", "options"), [(torch.nan, {}), (torch.inf, SAMPLED)], ids=["nan, greedy", "inf, sampled"])
@pytest.mark.parametrize("on", ["cpu", "virtual:h200"])
def test_a_token_that_logits_cannot_choose_is_an_error(on, name, value, options):
    """The tokens before it are delivered. A step that was launched with the token before the host knew is harmless."""
    if on == "cpu" and STRATEGIES[name].capture != "none":
        return
    model = make(tk.device(on))
    options = {"max_new_tokens": 24, "eos": (), **options}
    seen = []

    def break_the_model(token, _):
        seen.append(token)
        if len(seen) == 2:
            model.head.weight.data[5].fill_(value)

    with pytest.raises(ModelError, match="choosing token 0 of the text: the highest logit is NaN or infinite"):
        tk.generate(model, PROMPT, name, logit_bias=dict.fromkeys(range(model.config.vocab_size), -torch.inf), **options)
    if name == "whole-loop":
        return  # the device has computed all tokens by then
    with pytest.raises(ModelError, match=r"choosing token \d of the text: the highest logit is NaN or infinite"):
        tk.generate(model, PROMPT, name, on_token=break_the_model, **options)
    assert 2 <= len(seen) <= 4
    assert all(0 <= token < model.config.vocab_size for token in seen)


def test_gradients_stay_on_outside_and_none_are_recorded_inside():
    model = make(tk.device("cpu"))
    model.requires_grad_(True)
    generate(model)
    assert torch.is_grad_enabled()
    assert all(p.grad is None for p in model.parameters())


def test_context(model):
    full = generate(model)
    assert generate(model, context=640).tokens == full.tokens
    tight = generate(model, context=22)  # 19 of the prompt, 3 more fed, and one that needs no place
    assert tight.tokens == full.tokens[:4]
    assert (tight.stop_reason, tight.context_full, full.context_full) == ("length", True, False)
    assert "4 tokens, stopped by length (the context is full), " in repr(tight)
    assert "the context is full" not in repr(generate(model, context=22, max_new_tokens=4))
    exact = generate(model, context=19)
    assert exact.tokens == full.tokens[:1]
    most = model.config.max_position_embeddings
    end = generate(model, prompt=[1] * (most - 2), max_new_tokens=50)
    assert len(end.tokens) == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"context": 18}, "a prompt of 19 tokens: the context holds 18.*context=19"),
        ({"prompt": [1] * 641}, "641 tokens.*640"),
        ({"context": 641}, "640"),
        ({"context": 0}, "context of 0"),
        ({"context": 3.5}, "context of 3.5"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": -3}, "max_new_tokens=-3"),
        ({"max_new_tokens": 2.0}, "max_new_tokens=2.0"),
        ({"max_new_tokens": None}, "max_new_tokens=None"),
        ({"max_new_tokens": -(10**5000)}, "max_new_tokens=-0x"),
        ({"prefill_chunk": 0}, "prefill_chunk=0"),
        ({"prefill_chunk": 1 << 63}, "prefill_chunk=9223372036854775808"),
        ({"context": 10**5000}, "context of 0x.*640"),
        ({"seed": 1 << 64}, "seed=18446744073709551616"),
        ({"logit_bias": {1: 10**39}}, "logit_bias="),
        ({"logit_bias": {10**5000: 1.0}}, "logit_bias has the id 0x"),
        ({"prompt": [10**5000]}, "0x.* is among them"),
        ({"eos": 5}, "eos=5"),
        ({"eos": [10**30]}, r"eos=\[10{30}\]\. Give a collection of ids from 0 to"),
        ({"eos": [-1]}, r"eos=\[-1\]"),
        ({"eos": [10**5000]}, "eos=a list with a number"),
        ({"eos": ["</s>"]}, "eos="),
        ({"eos": b"ab"}, "eos=b'ab'"),
        ({"eos": np.array(3)}, r"eos=array\(3\)"),
        ({"eos": torch.tensor(3)}, r"eos=tensor\(3\)"),
        ({"prefix": 5}, "prefix=5"),
        ({"prompt": torch.ones(3, dtype=torch.long, device="meta")}, "without values"),
        ({"prompt": torch.ones(3, dtype=torch.long).to_sparse()}, "torch.sparse_coo"),
        ({"on_token": 5}, "on_token=5"),
        ({"prompt": [np.True_, 2]}, "is among them"),
        ({"prompt": b"ab"}, "a bytes"),
        ({"cancel": True}, "threading.Event"),
        ({"cancel": threading.Event}, "threading.Event"),
        ({"prompt": "text"}, "token ids"),
        ({"prompt": [[1], [2]]}, "batch"),
        ({"prompt": []}, "no tokens"),
        ({"temperature": -1}, "temperature"),
    ],
    ids=lambda value: brief(value, 40),
)
def test_bad_input_is_refused_before_anything_runs(model, options, said):
    with pytest.raises(ModelError, match=said):
        generate(model, **options)
    assert model.device.recording is None


@pytest.mark.parametrize("wrong", [None, "demo/qwen3", torch.nn.Linear(2, 2)], ids=type)
def test_what_is_no_model_is_refused(wrong):
    for call in (tk.generate, tk.compare):
        with pytest.raises(ModelError, match=f"a {type(wrong).__name__}. Give one that tk.load"):
            call(wrong, [1, 2])


def test_numbers_may_be_numpys(model):
    def run(whole, real):
        return generate(
            model, prompt=[whole(i) for i in range(5)], max_new_tokens=whole(3), eos=[whole(1)], context=whole(30),
            seed=whole(3), prefill_chunk=whole(2), temperature=real(1.5), top_k=whole(9), logit_bias={whole(1): real(0.5)},
        )  # fmt: skip

    found = run(np.int64, np.float32)
    assert found.tokens == run(int, float).tokens
    assert {type(i) for i in (*found.tokens, *found.prompt_tokens, found.prefill_chunk)} == {int}


def test_run_as_text_and_record(model):
    run = generate(model, max_new_tokens=3)
    assert "double-buffered on cpu, 3 tokens, stopped by length" in repr(run)
    assert "measured" in run._repr_html_()
    assert run.clock == "measured"
    assert [mark.name for mark in run.trace.marks()] == ["prefill", "decode", "decode", "drain"]
    assert [mark.step for mark in run.trace.marks()] == [0, 1, 2, 3]
    assert list(run.copies()["step"]) == [0, 1, 2, 3]
    quiet = generate(model, max_new_tokens=3, record=False)
    assert quiet.tokens == run.tokens
    with pytest.raises(RecorderError, match="record=True"):
        quiet.copies()


def test_inside_a_recording_the_run_joins_it(model):
    with tk.record("cpu") as trace:
        run = generate(model, "roundtrip", max_new_tokens=3)
        with pytest.raises(RecorderError):
            run.copies()
    assert run.trace is trace
    assert [mark.name for mark in run.trace.marks()] == ["prefill", "decode", "decode"]


def in_thread(work):
    """Run `work` in another thread, and return its result or its error."""
    found = []

    def run():
        try:
            found.append(work())
        except ToolkitError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("where", ["cpu", "virtual:h200"])
def test_another_thread_does_not_join_the_recording_of_a_run(model, where):
    model, found = model if where == "cpu" else on_virtual_gpu(model.config, model.dtype), []
    exact = tk.generate(model, PROMPT, "roundtrip", max_new_tokens=2).copies()

    def on_token(token, text):
        if not found:
            found.append(in_thread(lambda: tk.generate(model, PROMPT, max_new_tokens=2)))
            found.append(in_thread(lambda: tk.generate(model, PROMPT, max_new_tokens=2, record=False)))
            found.append(in_thread(lambda: tk.record(where).__enter__()))
            tk.generate(model, PROMPT, max_new_tokens=1)  # this thread may

    run = tk.generate(model, PROMPT, "roundtrip", max_new_tokens=2, on_token=on_token)
    assert len(found) == 3
    assert all("one thread records a run of its own while another one generates" in str(error) for error in found), found
    assert run.copies()["step"].tolist()[-2:] == exact["step"].tolist()[-2:]
    assert model.device.recording is None


def test_a_run_is_not_recorded_while_another_thread_generates(model):
    found = []

    def on_token(token, text):
        if not found:
            found.append(in_thread(lambda: tk.generate(model, PROMPT, max_new_tokens=2)))
            found.append(in_thread(lambda: tk.generate(model, PROMPT, max_new_tokens=2, record=False)))

    run = tk.generate(model, PROMPT, max_new_tokens=2, on_token=on_token, record=False)
    assert "record=False in all threads" in str(found[0])
    assert found[1].tokens == run.tokens
    assert tk.generate(model, PROMPT, max_new_tokens=2).tokens == run.tokens  # afterwards


def test_threads_join_the_recording_around_them(model):
    model = on_virtual_gpu(model.config, model.dtype)
    with tk.record(model.device) as trace:
        run = in_thread(lambda: tk.generate(model, PROMPT, "roundtrip", max_new_tokens=3))
    assert run.trace is trace
    assert [mark.name for mark in trace.marks()] == ["prefill", "decode", "decode"]


def test_a_run_that_outlives_the_recording_around_it_is_an_error(model):
    began, ended, found = threading.Event(), threading.Event(), []
    options = {"max_new_tokens": 1, "on_token": lambda token, text: (began.set(), ended.wait(60))}
    with tk.record("cpu"):
        thread = threading.Thread(target=lambda: found.append(in_thread(lambda: tk.generate(model, PROMPT, **options))))
        thread.start()
        assert began.wait(60)
    ended.set()
    thread.join()
    assert "the recording that it joined ended before it" in str(found[0])


@pytest.mark.parametrize("name", ["roundtrip", "double-buffered", "cuda-graph"])
def test_the_first_token_arrives_before_the_next_step_is_launched(name, monkeypatch):
    model, fed = on_virtual_gpu(SMALL, torch.float32), []
    advance, cancel = type(model).advance, threading.Event()
    monkeypatch.setattr(type(model), "advance", lambda self, x, *rest: fed.append(x.shape[1]) or advance(self, x, *rest))
    known: list[list[int]] = []
    run = generate(model, name, on_token=lambda token, text: known.append(list(fed)))
    assert known[0] == [len(PROMPT)]
    fed.clear()
    stopped = generate(model, name, on_token=lambda token, text: cancel.set(), cancel=cancel)
    assert stopped.tokens == run.tokens[:1]
    assert fed == [len(PROMPT)]


def test_many_threads_at_once(model):
    expected = generate(model).tokens
    results: dict[int, tuple[int, ...]] = {}

    def work(i):
        results[i] = generate(model, list(STRATEGIES)[i % 6], record=False).tokens

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(results.values()) == {expected}
    assert len(results) == 8


def test_small_models_of_a_virtual_gpu_run_in_one_thread(model):
    seen = []
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for where in (model, on_virtual_gpu(model.config, model.dtype)):
            tk.generate(where, PROMPT, max_new_tokens=1, on_token=lambda token, text: seen.append(torch.get_num_threads()))
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == [2, 1]


def test_runs_at_once_leave_the_number_of_threads_as_it_was(model):
    """The second run begins in another thread during the first, and ends after it."""
    model, seen, began, ended = on_virtual_gpu(model.config, model.dtype), [], threading.Event(), threading.Event()
    options = {"max_new_tokens": 1, "record": False}

    def second():
        tk.generate(model, PROMPT, on_token=lambda token, text: (began.set(), ended.wait(60)), **options)
        seen.append(torch.get_num_threads())

    threads = [threading.Thread(target=second), threading.Thread(target=lambda: seen.append(torch.get_num_threads()))]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        tk.generate(model, PROMPT, on_token=lambda token, text: (threads[0].start(), began.wait(60)), **options)
        seen.append(torch.get_num_threads())
        ended.set()
        threads[0].join()
        threads[1].start()  # a new thread, which has the number of the process
        threads[1].join()
    finally:
        torch.set_num_threads(before)
    assert seen == [2, 2, 2]
