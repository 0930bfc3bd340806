"""Checked repairs for the lesson on memory: the learner's code is run, its memory is measured and compared with a limit.

Any code is right that returns the same result within the allowed bytes.
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
from toolkit.ui.lessons.checks import Verdict
from toolkit.vram import hidden, owners
from toolkit.vram.budget import empty_cache
from toolkit.vram.measure import memory
from toolkit.vram.sessions import user_variables


def check_memory(
    run: Callable[[], object],
    allowed: Mapping[str, int],
    same_as: object,
    device: Device | str | None = None,
    hint: str = "",
    why: str = "",
) -> Verdict:
    """Call `run` once and compare its memory with `allowed`: bytes of "peak" and "kept", above the bytes held before.

    "kept" is measured while the result is still alive. The call must return a value equal to `same_as`: numbers, tensors, or
    lists of both, on any device. The verdict shows `why` if everything is right, else `hint`. Errors of `run` propagate.
    """
    gpu = allocation_scopes.in_use() if device is None else open_device(device)
    if gpu is not None and gpu.torch.type == "cuda":
        run()  # the first matmul of a process allocates cuBLAS's workspace, which must not count
    gc.collect()  # otherwise reference cycles may be freed in the middle
    with memory(gpu) as use:
        result = run()
    found = {"peak": max(use.peak_bytes - use.baseline_bytes, 0), "kept": use.kept_bytes}
    lines, right = _within({name: found[name] for name in allowed}, allowed)
    if not _same(result, same_as):
        lines, right = [*lines, "wrong: the result - it differs from the result before"], False
    return _verdict(lines, right, hint, why)


def check_held(device: Device, allowed: int, hint: str = "", why: str = "") -> Verdict:
    """Compare the bytes held on `device` now with `allowed`. The verdict shows `why` if they are within it, else `hint`."""
    return _verdict(*_within({"held": held(device)}, {"held": allowed}), hint, why)


def check_hidden(hint: str = "", why: str = "") -> Verdict:
    """Check that no GPU memory is held without a variable, as `%memory hidden` lists it. Shows `why` if so, else `hint`."""
    shell = ipython_shell()
    name = "held without a variable"
    found = hidden.listed({} if shell is None else user_variables(shell), shell)
    n_bytes = sum(held.bytes for held in found if not held.runs)
    return _verdict(*_within({name: n_bytes}, {name: 0}), hint, why)


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


def _within(found: Mapping[str, int], allowed: Mapping[str, int]) -> tuple[list[str], bool]:
    """Return a line for each number, and whether all numbers are allowed."""
    lines = []
    for name, n_bytes in found.items():
        said = "right" if n_bytes <= allowed[name] else "wrong"
        lines.append(f"{said}: {name} - measured {bytes_text(n_bytes)}, allowed {bytes_text(allowed[name])}")
    return lines, all(n_bytes <= allowed[name] for name, n_bytes in found.items())


def _verdict(lines: list[str], right: bool, hint: str, why: str) -> Verdict:
    after = why if right else f"Hint: {hint}" if hint else ""
    return Verdict((*lines, *([after] if after else [])), right)


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
