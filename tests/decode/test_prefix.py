"""Runs that start from a prefix: the same tokens and copies under every strategy, as often as one likes."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from small_models import SMALL, make

import toolkit as tk
from toolkit.core.errors import ModelError
from toolkit.decode.compare import decode_steps
from toolkit.decode.parts import ReadOneBehind
from toolkit.decode.prefix import Prefix
from toolkit.decode.step import Step
from toolkit.decode.strategies import STRATEGIES
from toolkit.models.cache import Cache

DEMOS = ["demo/qwen3", "demo/gemma4", "demo/qwen3.5-moe"]  # keys and values; sliding windows; recurrent states
IDS = [7 * i % 97 for i in range(60)]


def generate(model, name, ids=IDS, n=9, **options):
    return tk.generate(model, ids, name, max_new_tokens=n, eos=(), **options)


@pytest.mark.parametrize("name", DEMOS)
def test_every_strategy_goes_on_from_a_prefix(name):
    model = tk.load(name, "virtual:h200", progress=False)
    exact = generate(model, "roundtrip").tokens
    for options, why in (
        ({"ids": [10**30]}, "is among them"),
        ({"context": 1 << 31}, "positions for 1 to"),
        ({"chunk": 0}, "chunk=0"),
    ):
        with pytest.raises(ModelError, match=why):
            Prefix(model, **{"ids": IDS[:20], "context": 64, **options})
    gc.collect()
    before = model.device.memory().allocated_bytes
    prefix = Prefix(model, IDS[:-1], len(IDS) + 8, chunk=16)
    assert prefix.kept_bytes is None
    assert generate(model, "roundtrip", prefix=prefix).tokens == exact
    assert (prefix.kept_bytes > 0) == (name != "demo/qwen3")
    held = model.device.memory().allocated_bytes
    for strategy in [*STRATEGIES, *STRATEGIES]:
        run = generate(model, strategy, prefix=prefix)
        assert run.tokens == exact, strategy
        assert model.device.memory().allocated_bytes == held
    runs = [generate(model, "double-buffered", prefix=each) for each in (None, prefix)]
    whole, rest = (decode_steps(run.trace).drop(columns="host_wait_us").to_numpy().tolist() for run in runs)
    assert whole == rest
    prefix.free()
    assert model.device.memory().allocated_bytes == before


@pytest.fixture(scope="module")
def model():
    yield make(tk.device("virtual:h200"), SMALL)
    gc.collect()


def test_a_run_that_ends_early_leaves_the_prefix_as_it_was(model):
    prefix = Prefix(model, IDS[:20], 64)
    exact = generate(model, "roundtrip", IDS[:25], prefix=prefix).tokens
    for name in STRATEGIES:
        with pytest.raises(ZeroDivisionError):
            generate(model, name, IDS[:21], prefix=prefix, on_token=lambda token, text: 1 / 0)
        cancel = threading.Event()
        cancel.set()
        generate(model, name, IDS[:21], prefix=prefix, cancel=cancel)
        assert prefix.cache.length == 20
        assert generate(model, name, IDS[:25], prefix=prefix).tokens == exact


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"ids": IDS[:20]}, "doesn't continue"), ({"ids": [1, *IDS]}, "doesn't continue"), ({"context": 64}, "context=64"),
        ({"kv": "int8"}, "kv='int8'"), ({"ids": [i % 97 for i in IDS * 2]}, "holds 64.* the prefix with context=120"),
    ],
)  # fmt: skip
def test_runs_that_do_not_fit_are_refused(model, options, why):
    prefix = Prefix(model, IDS[:20], 64)
    with pytest.raises(ModelError, match=why):
        generate(model, "roundtrip", **{"ids": IDS[:21], "prefix": prefix, **options})


@pytest.mark.parametrize("device", ["cpu", "virtual:h200"])
@pytest.mark.parametrize("name", DEMOS)
def test_a_prefix_made_in_inference_mode_serves_runs_outside_of_it(name, device):
    model = tk.load(name, device, progress=False)
    exact = generate(model, "roundtrip", record=False).tokens
    with torch.inference_mode():
        prefix = Prefix(model, IDS[:-1], len(IDS) + 8)
    for inside in (False, True, False):
        with torch.inference_mode(inside):
            assert generate(model, "roundtrip", prefix=prefix, record=False).tokens == exact
    prefix.free()


def test_prefixes_that_cannot_be(model):
    other = make(model.device, SMALL)
    with pytest.raises(ModelError, match="another model fed it"):
        generate(other, "roundtrip", prefix=Prefix(model, IDS[:20], 64))
    with pytest.raises(ModelError, match="it has no tokens"):
        Prefix(model, [], 64)
    with pytest.raises(ModelError, match="a model: a type"):
        Prefix(type(model), IDS, 64)
    with pytest.raises(ModelError, match="a model: a str"):
        Prefix("demo/qwen3", IDS, 64)
    freed = Prefix(model, IDS[:20], 64)
    freed.free()
    for _ in range(2):
        with pytest.raises(ModelError, match="it was freed"):
            generate(model, "roundtrip", prefix=freed)
    gc.collect()
    before = model.device.memory().allocated_bytes
    with pytest.raises(ModelError, match="room for 8"):
        Prefix(model, IDS, 8)
    assert model.device.memory().allocated_bytes == before


@pytest.mark.parametrize(("where", "name"), [(ReadOneBehind, "close"), (Cache, "rollback"), (Step, "free")])
def test_an_interrupt_while_a_run_is_freed_leaves_the_prefix_usable(model, monkeypatch, where, name):
    def interrupted(*_):
        raise KeyboardInterrupt

    prefix, exact = Prefix(model, IDS[:20], 80), generate(model, "double-buffered").tokens
    for _ in range(2):
        assert generate(model, "double-buffered", prefix=prefix).tokens == exact
        with monkeypatch.context() as patch:
            patch.setattr(where, name, interrupted)
            with pytest.raises(KeyboardInterrupt) as kept:
                generate(model, "double-buffered", prefix=prefix)
    assert kept.traceback  # as the one that a notebook keeps
    assert generate(model, "double-buffered", prefix=prefix).tokens == exact


def test_one_run_at_a_time(model):
    prefix = Prefix(model, IDS[:20], 64)
    with prefix.in_use(), pytest.raises(ModelError, match="another run uses it"):
        generate(model, "roundtrip", IDS[:21], prefix=prefix)
    assert generate(model, "roundtrip", IDS[:21], prefix=prefix).tokens


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_prefix_is_not_freed_while_a_run_uses_it(model, name):
    exact, prefix = generate(model, name).tokens, Prefix(model, IDS[:20], 80)
    with pytest.raises(ModelError, match=r"^freeing a prefix: another run uses it now"):
        generate(model, name, prefix=prefix, on_token=lambda token, text: prefix.free())
    assert generate(model, name, prefix=prefix).tokens == exact
    prefix.free()


def test_a_prefix_says_what_it_holds():
    prefix = Prefix(make(tk.device("cpu")), IDS, 64)
    assert repr(prefix) == f"Prefix(60 tokens in {prefix.cache!r})"
    prefix.free()
    assert repr(prefix) == "Prefix(60 tokens in Cache(freed))"
