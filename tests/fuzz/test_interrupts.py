"""A few interrupts at random moments. `python -m tests.fuzz.interrupts` sends more."""

from __future__ import annotations

import gc
import signal
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

import toolkit as tk
from tests.fuzz.interrupts import run, works
from toolkit.core.signals import signals_deferred

pytestmark = pytest.mark.usefixtures("python_handles_interrupts")


@pytest.mark.parametrize("kind", ["generate", "load", "training", "out of memory"])
def test_interrupts_arrive_and_leave_nothing_behind(kind: str) -> None:
    tally = run(kind, works([kind])[kind], 5)
    assert not tally.faults, "\n".join(tally.faults)
    assert tally.arrived == tally.sent == 5


def test_a_signal_inside_a_whole_block_is_handled_at_its_end() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), signals_deferred:  # noqa: PT012
        with signals_deferred:
            signal.raise_signal(signal.SIGINT)
            reached.append("inner")
        reached.append("outer")
    assert reached == ["inner", "outer"]


def test_a_signal_waits_while_pytorch_asks_for_the_type_of_the_device() -> None:
    """PyTorch runs the handlers of signals there, and an error would end the process."""
    from toolkit.gpu.virtual import device

    tk.device("virtual:h200")
    torch.ones(3, device="vgpu")  # handlers wait from the end of an operation on
    answer = device._GUARD.type_
    signal.raise_signal(signal.SIGINT)
    assert answer() == torch._C._autograd.DeviceType.PrivateUse1
    assert not device._asked
    with pytest.raises(KeyboardInterrupt):
        time.sleep(5)


@pytest.mark.parametrize("kind", [WeakIdKeyDictionary, weakref.WeakKeyDictionary])
def test_a_signal_waits_while_a_weak_dictionary_forgets_a_key(kind: type) -> None:
    """Python drops errors of callbacks of weak references; the callbacks of these dictionaries are functions in Python."""

    class Data(dict[object, int]):
        def __delitem__(self, key: object) -> None:
            signal.raise_signal(signal.SIGINT)
            super().__delitem__(key)
            forgotten.append(key)

    forgotten: list[object] = []
    tk.device("virtual:h200")
    with signals_deferred:
        pass  # from here on, handlers wait
    known, key = kind(), torch.nn.Module()
    known.data = Data(known.data)
    known[key] = 1
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        del key
        assert len(forgotten) == 1
        time.sleep(5)


def test_a_signal_waits_while_a_finalizer_runs() -> None:
    """Finalizers are callbacks of weak references, too."""

    def close() -> None:
        signal.raise_signal(signal.SIGINT)
        closed.append(True)

    closed: list[bool] = []
    tk.device("virtual:h200")
    with signals_deferred:
        pass  # from here on, handlers wait
    owner = torch.nn.Module()
    weakref.finalize(owner, close)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        del owner
        assert closed
        time.sleep(5)


def test_a_signal_waits_while_a_callback_of_the_garbage_collector_runs() -> None:
    """Python drops errors of these callbacks, such as the one that Hypothesis adds."""
    tk.device("virtual:h200")
    with signals_deferred:
        pass  # from here on, handlers wait
    phases = []

    def note(phase: str, _: object) -> None:
        signal.raise_signal(signal.SIGINT)
        phases.append(phase)

    gc.callbacks.append(note)
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            gc.collect()
            time.sleep(5)
    finally:
        gc.callbacks.remove(note)
    assert phases == ["start", "stop"]


@pytest.mark.parametrize("kind", ["callback of a weak reference", "destructor"])
def test_a_signal_whose_error_python_drops_is_raised_again(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody can list the callbacks of all libraries."""

    class Owner:
        def __del__(self) -> None:
            if kind == "destructor":
                interrupt()

    def interrupt(_: object = None) -> None:
        reached.append("before")
        signal.raise_signal(signal.SIGINT)
        reached.append("after")

    reached: list[str] = []
    tk.device("virtual:h200")
    with signals_deferred:
        pass  # from here on, handlers wait
    owner = Owner()
    noticed = weakref.ref(owner, interrupt) if kind != "destructor" else None
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        del owner
        time.sleep(5)
    assert reached == ["before"]
    assert noticed is None or noticed() is None
    assert "ignored" not in capsys.readouterr().err


def test_freeing_a_tensor_runs_no_python_code() -> None:
    """The callback of a weak reference must be a C function: Python drops an interrupt that arrives in Python code."""
    from toolkit.gpu.virtual import tensor

    gpu = tk.device("virtual:h200")
    held = torch.ones(4, device="vgpu")
    assert type(tensor._live[held._host.untyped_storage()._cdata].__callback__).__name__ == "builtin_function_or_method"
    before = gpu.memory().allocated_bytes
    del held
    assert gpu.memory().allocated_bytes == before - 512


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_an_error_in_a_backward_pass_is_raised(monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    """It must not end the process, and the memory of the graph is freed."""
    from toolkit.gpu.virtual import dispatch

    gpu = tk.device("virtual:h200")
    before = gpu.memory().allocated_bytes
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).to("vgpu")
    loss = net(torch.ones(2, 4, device="vgpu")).sum()
    execute, calls = dispatch._execute_effects, []

    def fail(*args: object) -> object:
        calls.append(args)
        if len(calls) == 6:
            raise error("x")
        return execute(*args)

    monkeypatch.setattr(dispatch, "_execute_effects", fail)
    with pytest.raises(error, match="x"):
        loss.backward()
    monkeypatch.undo()
    del net, loss
    calls.clear()
    assert gpu.memory().allocated_bytes == before


def _checkpointed(net: torch.nn.Module, x: torch.Tensor, fail: Callable[..., None]) -> torch.Tensor:
    calls: list[int] = []

    def twice(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:  # in the backward pass
            fail()
        return net(x)

    return checkpoint(twice, x, use_reentrant=False)


def _hooked(net: torch.nn.Module, x: torch.Tensor, fail: Callable[..., None]) -> torch.Tensor:
    y = net(x)
    y.register_hook(fail)
    return y


def _hooked_leaf(net: torch.nn.Module, x: torch.Tensor, fail: Callable[..., None]) -> torch.Tensor:
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(fail)
    return net(x)


def _hooked_module(net: torch.nn.Module, x: torch.Tensor, fail: Callable[..., None]) -> torch.Tensor:
    net.register_full_backward_hook(fail)
    return net(x)


def _hooked_node(net: torch.nn.Module, x: torch.Tensor, fail: Callable[..., None]) -> torch.Tensor:
    y = net(x)
    y.grad_fn.register_hook(fail)
    return y


def _before_node(net: torch.nn.Module, x: torch.Tensor, fail: Callable[..., None]) -> torch.Tensor:
    y = net(x)
    y.grad_fn.register_prehook(fail)
    return y


def _nested(net: torch.nn.Module, x: torch.Tensor, fail: Callable[..., None]) -> torch.Tensor:
    """The hook's own pass fails in a hook."""
    y = net(x)

    def inner(_: object) -> None:
        with torch.enable_grad():
            _hooked_node(net, x.detach(), fail).sum().backward()

    y.register_hook(inner)
    return y


class _Function(torch.autograd.Function):
    fail: Callable[..., None]

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, *_: torch.Tensor) -> None:
        _Function.fail()


def _custom(net: torch.nn.Module, x: torch.Tensor, fail: Callable[..., None]) -> torch.Tensor:
    _Function.fail = fail
    return _Function.apply(net(x))


HOOKS = [_checkpointed, _hooked, _hooked_leaf, _hooked_module, _hooked_node, _before_node, _nested, _custom]


@pytest.mark.parametrize("device", ["vgpu", "cpu"])
@pytest.mark.parametrize("run", HOOKS)
def test_an_error_in_a_hook_of_a_backward_pass_is_raised(run: Callable[..., torch.Tensor], device: str) -> None:
    """It must not end the process, it ends the pass, and it holds no memory."""

    def fail(*_: object) -> None:
        raise KeyError("mine")

    gpu = tk.device("virtual:h200")
    net, x = torch.nn.Linear(4, 4).to(device), torch.ones(2, 4, device=device, requires_grad=True)
    first, later = x * 1, []
    first.register_hook(later.append)
    before = gpu.memory().allocated_bytes
    with pytest.raises(KeyError, match="mine") as raised:
        run(net, first, fail).sum().backward()
    assert raised.traceback[-1].name == "fail"
    assert not later
    net.zero_grad()
    del raised
    gc.collect()  # the traceback
    assert gpu.memory().allocated_bytes == before
    torch.nn.Linear(4, 4).to(device)(x).sum().backward()
    assert x.grad is not None


def test_a_handler_that_returns_does_not_end_a_backward_pass() -> None:
    """Programs save their state after the step in which SIGTERM arrived. Python also returns their own handlers."""
    tk.device("virtual:h200")
    x = torch.ones(4, device="vgpu", requires_grad=True)
    y, arrived = x * 2, []

    def note(number: int, _: object) -> None:
        arrived.append(number)

    def hook(_: object) -> None:
        signal.raise_signal(signal.SIGTERM)
        arrived.append(0)

    y.register_hook(hook)
    old = signal.signal(signal.SIGTERM, note)
    try:
        y.sum().backward()
        assert x.grad is not None
        assert arrived == [0, signal.SIGTERM]  # before the next operation
        assert signal.getsignal(signal.SIGTERM) is note
    finally:
        assert signal.signal(signal.SIGTERM, old) is note


def test_a_handler_that_enters_a_block_loses_no_other_signal() -> None:
    seen = []

    def save(*_: object) -> None:
        with signals_deferred:
            seen.append("saved")

    before = [signal.signal(signal.SIGTERM, save), signal.signal(signal.SIGINT, lambda *_: seen.append("interrupted"))]
    try:
        with signals_deferred:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
    assert seen == ["saved", "interrupted"]


def test_a_handler_that_installs_another_one_inside_a_block_is_not_undone() -> None:
    def second(*_: object) -> None: ...

    def first(*_: object) -> None:
        signal.signal(signal.SIGINT, second)

    before = signal.signal(signal.SIGINT, first)
    try:
        with signals_deferred:
            signal.raise_signal(signal.SIGINT)
            signals_deferred.handle(1)
        assert signal.getsignal(signal.SIGINT) is second
    finally:
        signal.signal(signal.SIGINT, before)
