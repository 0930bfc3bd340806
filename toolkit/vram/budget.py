"""A memory budget as a guard: `tk.budget("8 GiB")` lets the allocator take so much and no more.

What doesn't fit fails as it would on a card of that size, with PyTorch's own torch.OutOfMemoryError; the error says who held
what, and what would have made it fit (`shortage.py`).
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

import torch

from toolkit.core.callers import ipython_shell
from toolkit.core.errors import BudgetError, DeviceError
from toolkit.core.units import bytes_text, parse_bytes
from toolkit.gpu import allocation_scopes
from toolkit.gpu.device import Device
from toolkit.gpu.opening import open_device
from toolkit.vram.measure import Scope, explained, variables_of, why_out_of_memory

_LEAST = 2 << 20  # CUDA's allocator takes no less from the driver


_holding: list[Budget] = []  # the latest last


class Budget:
    """A cap on a device's allocator. It holds until `lift`, or until the end of its `with` block.

    `bytes` is the cap, `device` the device. In a `with` block the budget that held before comes back afterwards.
    """

    def __init__(self, device: Device, n_bytes: int) -> None:
        self.device, self.bytes = device, n_bytes
        self._scope: Scope | None = None

    def __repr__(self) -> str:
        held = self.device.memory().allocated_bytes
        return f"Budget({bytes_text(self.bytes)} on {self.device.name}, {bytes_text(held)} allocated)"

    def lift(self) -> None:
        """End this budget: the one before it that still holds comes back, else the card's memory is the limit."""
        if self in _holding:
            _holding.remove(self)
        left = [budget.bytes for budget in _holding if budget.device is self.device]
        self.device.limit(left[-1] if left else None)
        _explain_errors(bool(_holding))

    def __enter__(self) -> Budget:
        self._scope = Scope(self.device)
        self._scope.__enter__()
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        try:
            if self._scope is not None:
                self._scope.end(variables_of(sys._getframe(1)), error)
        finally:
            self.lift()


def budget(size: int | float | str | None, device: Device | str | None = None) -> Budget | None:
    """Cap the memory that a device's allocator may take: "8 GiB", "8GiB", "8 gb", 8e9; None lifts the cap.

    Without `device`, it is the device in use: the open virtual GPU, else the first CUDA GPU. What the allocator has cached is
    given back first. Returns a Budget, whose `with` block ends it. Raises BudgetError where more is allocated already, or where
    the budget is above what the card has; DeviceError where there is no GPU, real or virtual; ToolkitError for no size.
    """
    gpu = _device(device)
    if size is None:
        for held in [held for held in _holding if held.device is gpu]:
            held.lift()
        gpu.limit(None)
        return None
    n_bytes = parse_bytes(size)
    asked = f"a budget of {bytes_text(n_bytes)} on {gpu.name}"
    _empty_cache(gpu)
    memory = gpu.memory()
    if 0 < memory.total_bytes < n_bytes:
        raise BudgetError(asked, f"the card has {bytes_text(memory.total_bytes)}", "Name no more than that", bytes=n_bytes)
    if memory.total_bytes and (n_bytes < memory.allocated_bytes or n_bytes < _LEAST):
        found = f"{bytes_text(memory.allocated_bytes)} are allocated already"
        if n_bytes < _LEAST:
            found = f"CUDA's allocator takes no less than {bytes_text(_LEAST)} at a time"
        do = f"Budget at least {bytes_text(max(memory.reserved_bytes, _LEAST))}, or let go of something first: {_largest(gpu)}"
        raise BudgetError(asked, found, do, bytes=n_bytes, allocated_bytes=memory.allocated_bytes)
    gpu.limit(n_bytes)
    _explain_errors(True)
    _holding.append(Budget(gpu, n_bytes))
    return _holding[-1]


def _device(device: Device | str | None) -> Device:
    gpu = open_device(device) if device is not None else allocation_scopes.in_use()
    if gpu is None:
        raise DeviceError("a memory budget", "no GPU is in use", 'Open one that needs none: tk.device("virtual:8GiB")')
    return gpu


def _empty_cache(gpu: Device) -> None:
    module: Any = torch.cuda if gpu.torch.type == "cuda" else getattr(torch, gpu.torch.type)
    if hasattr(module, "empty_cache"):
        module.empty_cache()


def _largest(gpu: Device) -> str:
    """The variables that hold the most on a device, in words."""
    from toolkit.vram import owners

    shell = ipython_shell()
    names = shell.user_ns if shell is not None else vars(sys.modules["__main__"])
    kind = gpu.torch.type
    held = sorted(((h.bytes, h.owner) for (on, _), h in owners.find(names).items() if on == kind), reverse=True)[:3]
    return ", ".join(f"{owner} ({bytes_text(size)})" for size, owner in held) or "nothing that a variable holds"


# ---- errors that no `with` block sees

_hooks: dict[str, Any] = {}  # what was there before ours: the interpreter's hook; or ours, in a notebook


def _explain_errors(wanted: bool) -> None:
    """Let an out-of-memory error that nobody catches say who held what, in a script or in a notebook's cell."""
    if wanted == bool(_hooks):
        return
    shell = ipython_shell()
    if wanted:
        allocation_scopes.keep()
        _hooks["script"] = sys.excepthook
        sys.excepthook = _on_uncaught
        if shell is not None:
            _hooks["cell"] = _on_cell
            shell.events.register("post_run_cell", _on_cell)
        return
    allocation_scopes.release()
    if sys.excepthook is _on_uncaught:
        sys.excepthook = _hooks["script"]
    if shell is not None and "cell" in _hooks:
        shell.events.unregister("post_run_cell", _on_cell)
    _hooks.clear()


def _on_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, torch.OutOfMemoryError) and not explained(error):
        why_out_of_memory(error, vars(sys.modules["__main__"]))
    _hooks.get("script", sys.__excepthook__)(kind, error, trace)


def _on_cell(result: Any) -> None:
    error, shell = result.error_in_exec, ipython_shell()
    if allocation_scopes.measuring():  # the scope around the cell knows the moment itself
        return
    if isinstance(error, torch.OutOfMemoryError) and not explained(error) and shell is not None:
        print(why_out_of_memory(error, shell.user_ns))
