"""A few interrupts at random moments. `python -m tests.fuzz.interrupts` sends more."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import toolkit as tk
from tests.fuzz.interrupts import run, works
from toolkit.core.signals import whole

pytestmark = pytest.mark.usefixtures("python_handles_interrupts")


@pytest.mark.parametrize("kind", ["generate", "load", "training"])
def test_interrupts_arrive_and_leave_nothing_behind(kind: str) -> None:
    tally = run(kind, works([kind])[kind], 5)
    assert not tally.faults
    assert tally.arrived == tally.sent == 5


def test_a_signal_inside_a_whole_block_is_handled_at_its_end() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), whole:  # noqa: PT012
        with whole:
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
    translated, calls = dispatch._translated, []

    def fail(*args: object) -> object:
        calls.append(args)
        if len(calls) == 6:
            raise error("x")
        return translated(*args)

    monkeypatch.setattr(dispatch, "_translated", fail)
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


@pytest.mark.parametrize("run", [_checkpointed, _hooked, _hooked_leaf, _hooked_module])
def test_an_error_in_a_hook_of_a_backward_pass_is_raised(run: Callable[..., torch.Tensor]) -> None:
    """It must not end the process."""

    def fail(*_: object) -> None:
        raise KeyError("mine")

    tk.device("virtual:h200")
    net, x = torch.nn.Linear(4, 4).to("vgpu"), torch.ones(2, 4, device="vgpu", requires_grad=True)
    with pytest.raises(KeyError, match="mine"):
        run(net, x, fail).sum().backward()
    torch.nn.Linear(4, 4).to("vgpu")(x).sum().backward()
    assert x.grad is not None


def test_sparse_gradients_are_refused() -> None:
    tk.device("virtual:h200")
    bags = torch.nn.EmbeddingBag(4, 4, mode="sum", sparse=True).to("vgpu")
    loss = bags(torch.zeros(2, 2, dtype=torch.long, device="vgpu")).sum()
    with pytest.raises(RuntimeError, match="only supports strided tensors"):
        loss.backward()
