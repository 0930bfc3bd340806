"""A few interrupts at random moments. `python -m tests.fuzz.interrupts` sends more."""

from __future__ import annotations

import signal

import pytest
import torch

import toolkit as tk
from tests.fuzz.interrupts import run, works
from toolkit.core.signals import whole


@pytest.mark.parametrize("kind", ["generate", "load"])
def test_interrupts_arrive_and_leave_nothing_behind(kind: str) -> None:
    tally = run(kind, works([kind])[kind], 8)
    assert not tally.faults
    assert tally.arrived == tally.sent == 8


def test_a_signal_inside_a_whole_block_is_handled_at_its_end() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), whole:  # noqa: PT012
        with whole:
            signal.raise_signal(signal.SIGINT)
            reached.append("inner")
        reached.append("outer")
    assert reached == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


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
