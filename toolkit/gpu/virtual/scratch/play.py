# mypy: allow-untyped-calls, no-warn-return-any, no-warn-unused-ignores
# (PyTorch's extension points carry no types.)
"""Takes and gives back an operation's temporaries, as its script in `rules_scratch` says. Knows no operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import toolkit.gpu.virtual.scratch.indexing
import toolkit.gpu.virtual.scratch.layers
import toolkit.gpu.virtual.scratch.operations  # noqa: F401  all register their rules
from toolkit.gpu.virtual.machine import Machine
from toolkit.gpu.virtual.scratch.libraries import OUT, RESULT
from toolkit.gpu.virtual.tensor import hold


def play(script: Sequence[int], out: Any, card: Machine) -> None:
    """Let the temporaries of `script` live and die on `card`, and the results in `out` be made in between.

    Whatever happens, none is left behind. Raises torch.OutOfMemoryError where one doesn't fit.
    """
    held: list[tuple[int, Any]] = []
    if OUT not in script and not any(step in RESULT for step in script):
        _hold(out, card)
    try:
        for step in script:
            if step < 0:
                at = next(i for i in range(len(held) - 1, -1, -1) if held[i][0] == -step)
                card.free(held.pop(at)[1])
            elif step == OUT:
                _hold(out, card)
            elif step < RESULT[0]:
                held.append((step, card.allocate(step)))
            elif isinstance(out, tuple) and step - RESULT[0] < len(out):
                _hold(out[step - RESULT[0]], card)
    finally:
        for _, taken in reversed(held):
            card.free(taken)


def _hold(out: Any, card: Machine) -> None:
    """Device memory for results that have none yet."""
    if isinstance(out, torch.Tensor):
        hold(out, card)
    elif isinstance(out, list | tuple):
        for part in out:
            _hold(part, card)
