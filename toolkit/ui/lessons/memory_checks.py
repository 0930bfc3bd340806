"""Conditions of the exercises on memory: the learner's code is run, its memory is measured and compared with a limit.

Any code is right that returns the same result within the allowed bytes. `Lesson.task` shows the conditions.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from toolkit.core.callers import ipython_shell
from toolkit.core.units import bytes_text
from toolkit.gpu import allocation_scopes
from toolkit.gpu.device import Device
from toolkit.gpu.opening import open_device
from toolkit.vram import hidden, owners
from toolkit.vram.budget import empty_cache
from toolkit.vram.hidden import user_variables
from toolkit.vram.measure import memory


def within(
    allowed: Mapping[str, int], run: Callable[[], object], same_as: object, device: Device | str | None = None
) -> dict[str, bool]:
    """Call `run` once and compare its memory with `allowed`: bytes of "peak" and "kept", above the bytes held before.

    "kept" is measured while the result is still alive. The call must return a value equal to `same_as`: numbers, tensors, or
    lists of both, on any device. Returns the conditions of an exercise: lines, and whether they are met. Errors of `run`
    propagate. Afterwards the allocator's cache is empty, so that later measurements don't depend on what `run` allocated.
    """
    gpu = allocation_scopes.in_use() if device is None else open_device(device)
    if gpu is not None and gpu.torch.type == "cuda":
        run()  # the first matmul of a process allocates cuBLAS's workspace, which must not count
    gc.collect()  # otherwise reference cycles may be freed in the middle
    with memory(gpu) as use:
        result = run()
    found = {"peak": max(use.peak_bytes - use.baseline_bytes, 0), "kept": use.kept_bytes}
    conditions = dict(_at_most(name, found[name], most) for name, most in allowed.items())
    same = _same(result, same_as)
    del result
    if gpu is not None:
        empty_cache(gpu)
    return conditions | {f"the result is the same: {same}": same}


def held_within(allowed: int, device: Device, above: int = 0) -> dict[str, bool]:
    """Return the condition that at most `allowed` bytes are held on `device` now. The line counts bytes from `above` on."""
    n_bytes = held(device)
    line, _ = _at_most("held", n_bytes - above, allowed - above)
    return {line: n_bytes <= allowed}


def nothing_hidden() -> dict[str, bool]:
    """Return the condition that no GPU memory is held without a variable, as `%memory hidden` lists it."""
    shell = ipython_shell()
    found = hidden.listed({} if shell is None else user_variables(shell), shell)
    return dict([_at_most("held without a variable", sum(held.bytes for held in found if not held.stays), 0)])


def clear(device: Device) -> None:
    """Free what the notebook holds on `device`: variables, kept results, the last error, garbage, and the allocator's cache.

    A lesson that calls it first measures the same numbers each time it runs.
    """
    shell = ipython_shell()
    while shell is not None and (names := _holding(user_variables(shell))):  # each place is named by one variable of several
        for name in names:
            del shell.user_ns[name]
    hidden.release(shell)
    empty_cache(device)


def _holding(variables: Mapping[str, Any]) -> set[str]:
    """Return the variables that own memory on a GPU."""
    owned = (holder.owner for place, holder in owners.find(variables).items() if place[0] != "cpu")
    return {re.split(r"[.\[ ]", owner, maxsplit=1)[0] for owner in owned} & variables.keys()


def held(device: Device) -> int:
    """Return the bytes allocated on `device`, after garbage collection and without cuBLAS's workspaces, which reappear."""
    gc.collect()
    if device.torch.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
    return device.memory().allocated_bytes


def _at_most(name: str, found: int, allowed: int) -> tuple[str, bool]:
    """Return a condition: its line, and whether it is met."""
    return f"{name}: measured {bytes_text(found)}, wanted at most {bytes_text(allowed)}", found <= allowed


def _same(result: object, expected: object) -> bool:
    """Return whether two results are equal up to rounding, on whichever devices they are."""
    if isinstance(expected, Sequence):
        if not isinstance(result, Sequence) or len(result) != len(expected):
            return False
        return all(_same(one, other) for one, other in zip(result, expected, strict=True))
    mine, theirs = _on_host(result), _on_host(expected)
    if mine is None or theirs is None or mine.shape != theirs.shape:
        return False
    return bool(torch.allclose(mine, theirs, rtol=1e-2, atol=1e-5))


def _on_host(value: Any) -> torch.Tensor | None:
    """Return a number or a tensor as a float32 tensor on the host, or None for other types."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().float()
    return torch.tensor(float(value)) if isinstance(value, int | float) else None
