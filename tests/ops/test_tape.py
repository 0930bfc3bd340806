"""Tapes: a decode step launches the kernels of an earlier one again, unless it can't or somebody observes it.

Without a GPU, the stand-ins of `test_plans` take the place of compiled kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops import test_plans
from tests.ops.test_ops import DEVICE, GEMMA4, QWEN3, QWEN3_5_MOE, small
from toolkit.core.distributed import Shard
from toolkit.decode import loop
from toolkit.decode.loop import generate
from toolkit.decode.sampling import Sampling
from toolkit.decode.step import Fallback, Step
from toolkit.decode.strategies import STRATEGIES
from toolkit.gpu.opening import open_device
from toolkit.kernels import exchange as exchange_kernels
from toolkit.models import gemma4, qwen3, qwen3_5_moe
from toolkit.ops import collectives, define, exchange, plans, zeros
from toolkit.ops.tape import Tape, recording

started = test_plans.started
PROMPT = [5, 6, 7]


def tiny() -> Any:
    """Return a model of one layer."""
    return small(qwen3, QWEN3 | {"num_hidden_layers": 1}, "int4-g32", torch.bfloat16, DEVICE)


def tokens(model: Any, strategy: str, **options: Any) -> tuple[int, ...]:
    given: dict[str, Any] = {"eos": (), "record": False, "temperature": 0.9, "seed": 3}
    return generate(model, PROMPT, strategy, **given | options).tokens


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How each step ran, in order: "played", or "launched" by the model's code."""
    found: list[str] = []
    play, launch = Tape.play, Step.launch

    def noted(self: Tape) -> bool:
        played = play(self)
        found.extend(["played"] * played)
        return played

    monkeypatch.setattr(Tape, "play", noted)
    monkeypatch.setattr(Step, "launch", lambda self, turn: (found.append("launched"), launch(self, turn))[1])
    return found


@pytest.mark.parametrize(
    ("architecture", "config", "scheme", "name"),
    [
        (qwen3, QWEN3, None, "host-sampling"),
        (qwen3, QWEN3, None, "double-buffered"),
        (gemma4, GEMMA4, "int4-g32", "position-on-device"),
        (qwen3_5_moe, QWEN3_5_MOE, "int4-g32", "token-on-device"),
    ],
    ids=["host-sampling", "double-buffered", "gemma4", "qwen3.5"],
)
def test_played_steps_give_the_same_tokens(
    architecture: Any, config: dict[str, Any], scheme: str | None, name: str, started: list[Any], ran: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model = small(architecture, config, scheme, torch.bfloat16, DEVICE)
    turns = 2 if name == "double-buffered" else 1
    count = 2 * turns + 2
    with monkeypatch.context() as patched:
        patched.setattr(Step, "_launch_again", lambda self, turn, number: self.launch(turn))
        wanted = tokens(model, name, max_new_tokens=count)
    ran.clear()
    assert tokens(model, name, max_new_tokens=count) == wanted
    assert ran == ["launched"] * 2 * turns + ["played"]
    assert len(set(wanted)) > 2
    assert not plans.refused()


@pytest.mark.parametrize("scheme", [None, "int4-g32"])
def test_played_steps_give_the_same_tokens_in_inference_mode(scheme: str | None, started: list[Any], ran: list[str]) -> None:
    model = small(qwen3, QWEN3 | {"num_hidden_layers": 1}, scheme, torch.bfloat16, DEVICE)
    wanted = tokens(model, "host-sampling", max_new_tokens=6)
    ran.clear()
    with torch.inference_mode():
        assert tokens(model, "host-sampling", max_new_tokens=6) == wanted
    assert ran == ["launched"] * 2 + ["played"] * 3
    assert len(set(wanted)) > 2


class Steps:
    """Decode steps of `roundtrip`, one at a time."""

    def __init__(self, model: Any, strategy: str = "roundtrip") -> None:
        self.cache = model.new_cache(64)
        self.step = Step(model, STRATEGIES[strategy], Sampling(), self.cache, PROMPT, 40, Fallback(False))
        first = self.step.prefill(512, threading.Event())
        assert first is not None
        self.known, self.number = int(first.item()), 0

    def run(self, count: int) -> list[int]:
        found = []
        for _ in range(count):
            self.number += 1
            self.known = int(self.step.run(self.number, self.known).item())
            found.append(self.known)
        return found


@cache
def tokens_of_tiny() -> list[int]:
    """Return the tokens of nine steps. The first call needs the fixture `started`."""
    return Steps(tiny()).run(9)


def test_a_played_step_starts_the_kernels_of_a_launched_one(started: list[Any], ran: list[str]) -> None:
    steps = Steps(tiny())
    steps.run(1)
    started.clear()
    steps.run(1)
    launched = [(start[0], start[1], len(start)) for start in started]
    started.clear()
    steps.run(1)
    assert ran == ["launched", "launched", "played"]
    assert [(start[0], start[1], len(start)) for start in started] == launched
    assert (DEVICE != "cpu") or launched


def test_memory_that_moved_is_read_where_it_is(started: list[Any], ran: list[str]) -> None:
    model, expected = tiny(), tokens_of_tiny()[:5]
    for move in (_move_a_weight, _move_keys):
        steps = Steps(model)
        found = steps.run(3)
        ran.clear()
        move(model, steps.cache)
        found += steps.run(2)
        assert ran == ["launched", "played"]
        assert found == expected


def test_steps_of_a_rank_are_played(started: list[Any], ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the exchanges of CUDA, whose launches return the tensor of this rank."""

    def launch(work: Callable[[], Any]) -> Any:
        return SimpleNamespace(run=work)

    def joined(inbox: Any, x: Tensor, sizes: list[int], out: Tensor) -> Any:
        return launch(lambda: out.copy_(torch.cat([x] * len(sizes), -1)))

    monkeypatch.setattr(collectives, "_launches_directly", lambda x: define.direct(x) or recording() is not None)
    monkeypatch.setattr(exchange, "links", lambda device: SimpleNamespace(inbox=SimpleNamespace(rank=0)))
    monkeypatch.setattr(exchange, "_run", lambda launch, note, key: launch.run())
    monkeypatch.setattr(exchange_kernels, "all_reduce", lambda inbox, x, out: launch(lambda: out.copy_(x)))
    monkeypatch.setattr(exchange_kernels, "all_gather", joined)
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(loop, "_check_ranks", lambda *given, **facts: None)
    config = qwen3.Config.from_hf(QWEN3 | {"num_hidden_layers": 1})
    model = qwen3.Model(config, open_device(DEVICE), torch.bfloat16, Shard(0, 2)).init_weights(3).requires_grad_(False)
    tokens(model, "double-buffered", max_new_tokens=9, prefill_chunk=64)  # ranks would agree on another
    assert ran == ["launched"] * 4 + ["played"] * 4


def test_a_tape_that_a_traceback_keeps_holds_no_memory(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Tape] = []

    def interrupted(self: Tape) -> bool:
        held.append(self)
        assert self._given
        assert self._held
        raise KeyboardInterrupt

    monkeypatch.setattr(Tape, "play", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokens(tiny(), "token-on-device", max_new_tokens=6)
    assert [(tape._starts, tape._held, tape._given, tape._scratch) for tape in held] == [([], {}, {}, {})]


def _move_a_weight(model: Any, cache: Any) -> None:
    part = model.layers[0].mlp.down.weight.codes
    old, part.data = part.data, part.data.clone()
    old.zero_()


def _move_keys(model: Any, cache: Any) -> None:
    keys = cache.states[0].keys
    old = keys.data
    keys.data = keys.data.clone()
    old.zero_()


def test_a_step_that_somebody_observes_is_launched(started: list[Any], ran: list[str]) -> None:
    expected, steps = tokens_of_tiny(), Steps(tiny())
    found = steps.run(3)
    ran.clear()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **kwargs or {})

    own = torch.zeros(zeros.COUNTERS, dtype=torch.int32, device=DEVICE)
    observers: list[Callable[[], Any]] = [Watch, torch.profiler.profile, define.record_problems]
    for observer in observers:
        with observer():
            found += steps.run(1)
    with zeros.own_counters(own):
        found += steps.run(1)
    assert ran == ["launched"] * 4
    found += steps.run(2)
    assert ran[4:] == ["launched", "played"]  # with `own_counters`, another tape was recorded
    assert found == expected


def test_models_that_run_code_of_others_have_no_tape(started: list[Any], ran: list[str]) -> None:
    model = tiny()
    seen: list[Any] = []
    hook = model.layers[0].mlp.register_forward_hook(lambda module, given, out: seen.append(out))
    Steps(model).run(3)
    assert ran == ["launched"] * 3
    assert len(seen) == 4
    hook.remove()
    advance = model.advance
    model.advance = lambda *given: seen.append(given) or advance(*given)
    Steps(model).run(3)
    assert ran == ["launched"] * 6
    assert len(seen) == 8
    del model.advance
    adapted = model.layers[0].mlp

    class Adapter(type(adapted)):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            seen.append(x)
            return super().forward(x)

    adapted.__class__ = Adapter
    Steps(model).run(3)
    assert ran == ["launched"] * 9
    assert len(seen) == 12


def test_why_a_tape_can_not_be_played(started: list[Any]) -> None:
    x, weight = test_plans.row(2, 64), test_plans.row(64)

    def taped(work: Callable[[], Any]) -> Tape:
        with Tape(x.device) as tape:
            work()
        return tape

    def norm() -> Tensor:
        found: list[Tensor] = define.call("rms_norm", x, weight, 1e-6, None, None, None, True, False)
        return found[0]

    assert Tape(x.device).why_not == "nothing was recorded"
    assert taped(norm).why_not == "rms_norm has no plan"
    norm()
    kept: list[Tensor] = []
    good = taped(lambda: kept.append(norm().view(64, 2).t() * 2.5 + 1))
    assert good.why_not is None
    wanted = kept[0].clone()
    kept[0].zero_()
    assert good.play()
    assert torch.equal(kept[0], wanted)
    x.mul_(-3)
    assert good.play()
    assert torch.equal(kept[0], norm().view(64, 2).t() * 2.5 + 1)
    assert not torch.equal(kept[0], wanted)
    with torch.inference_mode():
        own, kept = torch.ones(2, 3, device=x.device), []
        copies = taped(lambda: kept.extend((own.t().reshape(-1), own.to(torch.int64), own.t().contiguous(), own.flatten())))
        own.fill_(7)
        assert copies.play()
        assert all(bool((one == 7).all()) for one in kept)
    ids, kept = torch.arange(4, device=x.device), []
    with torch.no_grad():  # as the embedding of a rank
        own = ids.clone()
        near = taped(lambda: kept.append((ids - 1).clamp(0, 1).masked_fill_(ids != own, 9)))
    ids += 1
    assert near.play()
    assert kept[0].tolist() == [9] * 4
    assert taped(lambda: x.sum()).why_not == "aten.sum.default isn't known"
    with pytest.raises(ZeroDivisionError), Tape(x.device) as failed:
        1 / 0  # noqa: B018
    assert failed.why_not == "the work raised an error"
    assert not failed.play()
