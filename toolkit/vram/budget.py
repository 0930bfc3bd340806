"""Limit the memory of a device: `tk.budget("8 GiB")`.

An allocation beyond the budget fails as on a GPU of that size, with PyTorch's own torch.OutOfMemoryError. A note on the error
lists the owners of the memory and what would have made the allocation fit (`advice.py`).
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

import torch

from toolkit.core.callers import ipython_shell, warn
from toolkit.core.errors import BudgetError, DeviceError
from toolkit.core.units import bytes_text, parse_bytes, unit_hint
from toolkit.gpu import allocation_scopes, unheld
from toolkit.gpu.device import Device, Memory
from toolkit.gpu.opening import open_device
from toolkit.vram import owners
from toolkit.vram.hidden import user_variables
from toolkit.vram.measure import Scope, explained, out_of_memory, variables_of, why_out_of_memory

_LEAST = 2 << 20  # the smallest segment that CUDA's allocator takes from the driver


_active: list[Budget] = []  # the latest one is last


class Budget:
    """A limit of `bytes` on the allocator of `device`. It is in force until `lift`, or until the end of its `with` block.

    `note` says which allocations beyond it don't fail, if any. Only the latest budget is in force, even if it is larger than
    the one around it. After a `with` block the previous one is in force again. Another `with` block sets the limit again.
    """

    def __init__(self, device: Device, n_bytes: int) -> None:
        self.device, self.bytes, self.note = device, n_bytes, ""
        self._scope = Scope(device)

    def __repr__(self) -> str:
        held = self.device.memory().allocated_bytes
        return f"Budget({bytes_text(self.bytes)} on {self.device.name}, {bytes_text(held)} allocated)"

    def _set(self) -> None:
        """Put this budget in force. Raises BudgetError if more is already allocated or if the GPU has less memory."""
        gpu, n_bytes = self.device, self.bytes
        asked = f"a budget of {bytes_text(n_bytes)} on {gpu.name}"
        empty_cache(gpu)
        memory = gpu.memory()
        if 0 < memory.total_bytes < n_bytes:
            raise BudgetError(
                asked, f"the GPU has {bytes_text(memory.total_bytes)}", "Set a budget of at most this size", bytes=n_bytes
            )
        if memory.total_bytes and (n_bytes < memory.allocated_bytes or n_bytes < _LEAST):
            found = f"{bytes_text(memory.allocated_bytes)} are already allocated"
            least = bytes_text(max(memory.reserved_bytes, _LEAST))
            do = f"Set a budget of at least {least}, or free memory first{_owned(gpu)}{unheld.sentence()}"
            if n_bytes < _LEAST:
                found = f"CUDA's allocator reserves at least {bytes_text(_LEAST)} at a time"
                do = f"Set a budget of at least {least}{unit_hint(n_bytes)}"
            raise BudgetError(asked, found, do, bytes=n_bytes, allocated_bytes=memory.allocated_bytes)
        gpu.limit(n_bytes)
        self.note = _loose(memory, n_bytes)
        if self.note:
            warn(f"{asked}: {self.note}")
        _explain_errors(True)
        _active.append(self)

    def lift(self) -> None:
        """End this budget. The previous active budget is in force again; without one, the GPU's memory is the limit."""
        if self in _active:
            _active.remove(self)
        left = [budget.bytes for budget in _active if budget.device is self.device]
        if left:
            empty_cache(self.device)  # no limit keeps allocations from free memory that was reserved under a larger budget
        self.device.limit(left[-1] if left else None)
        _explain_errors(bool(_active))

    def __enter__(self) -> Budget:
        in_force = bool(_active) and _active[-1] is self
        if not in_force:
            self._set()
            if _active.count(self) > 1:  # another budget was set since this one
                _active.remove(self)
        try:
            self._scope.__enter__()
        except BaseException:
            if not in_force:
                self.lift()
            raise
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        try:
            self._scope.end(variables_of(sys._getframe(1)), error)
        finally:
            self.lift()


def budget(size: int | float | str | None, device: Device | str | None = None) -> Budget | None:
    """Limit the memory that a device's allocator may take.

    `size` is a number of bytes or a text such as "8 GiB", "8GiB" or "8 gb"; None removes the limit. By default `device` is the
    device in use: the open virtual GPU, otherwise the first CUDA GPU. The allocator's cache is emptied first. Returns a Budget,
    which can be used as a context manager. Warns if tensors keep the allocator from returning memory beyond the budget.

    Raises BudgetError if more is already allocated or if the GPU has less memory, DeviceError if no GPU (real or virtual) is
    in use, and ToolkitError if `size` is not a size.
    """
    gpu = _device(device)
    if size is None:
        for held in [held for held in _active if held.device is gpu]:
            held.lift()
        gpu.limit(None)
        return None
    found = Budget(gpu, parse_bytes(size))
    found._set()
    return found


def _device(device: Device | str | None) -> Device:
    gpu = open_device(device) if device is not None else allocation_scopes.in_use()
    if gpu is None:
        raise DeviceError("a memory budget", "no GPU is in use", 'Open a virtual one: tk.device("virtual:8GiB")')
    return gpu


def empty_cache(gpu: Device) -> None:
    """Return the free memory of a device's allocator to the driver."""
    module: Any = torch.cuda if gpu.torch.type == "cuda" else getattr(torch, gpu.torch.type)
    if hasattr(module, "empty_cache"):
        module.empty_cache()


def _loose(memory: Memory, n_bytes: int) -> str:
    """Return what a budget of `n_bytes` can't limit in this state of the allocator, as text; "" for nothing."""
    if memory.reserved_bytes <= n_bytes:
        return ""
    held, used = bytes_text(memory.reserved_bytes), bytes_text(memory.allocated_bytes)
    return (
        f"the allocator holds {held}: tensors use {used}, and it can't return the free parts between them. "
        "Allocations that fit into these parts don't fail. Set the budget before the tensors are created"
    )


def _owned(gpu: Device) -> str:
    """Return a sentence on the variables that own the most memory on a device; "" if the program has none, as on a rank."""
    shell = ipython_shell()
    names = user_variables(shell) if shell is not None else vars(sys.modules["__main__"])
    kind = gpu.torch.type
    held = sorted(((h.bytes, h.owner) for (on, _), h in owners.find(names).items() if on == kind), reverse=True)[:3]
    return f". Largest owners: {', '.join(f'{owner} ({bytes_text(size)})' for size, owner in held)}" if held else ""


# ---- out-of-memory errors outside of every `with` block

_hooks: dict[str, Any] = {}  # "script": the previous sys.excepthook; "cell": our callback in a notebook


def _explain_errors(wanted: bool) -> None:
    """Install or remove the hooks that explain uncaught out-of-memory errors, in scripts and in notebook cells."""
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
    full = out_of_memory(error)
    if full is not None and not explained(full):
        why_out_of_memory(full, vars(sys.modules["__main__"]))
    _hooks.get("script", sys.__excepthook__)(kind, error, trace)


def _on_cell(result: Any) -> None:
    error, shell = result.error_in_exec, ipython_shell()
    if allocation_scopes.measuring():  # the scope around the cell explains the error itself
        return
    full = out_of_memory(error)
    if full is not None and not explained(full) and shell is not None:
        print(why_out_of_memory(full, user_variables(shell)))
