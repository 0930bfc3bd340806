"""Scripts of temporaries: the device memory that an operation allocates for itself while it runs.

A rule, registered with `scratch`, returns the script of one call: a sequence of `Take`, `Free` and `Make` steps in the order in
which ATen's CUDA code allocates. `play` executes a script on a virtual GPU, so that the peak of allocated memory is the one
that the operation reaches on a real GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.core.signals import signals_deferred
from toolkit.gpu.virtual.machine import Machine
from toolkit.gpu.virtual.operands import tensors_in
from toolkit.gpu.virtual.tensor import hold


class Step:
    """A step of a script."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Take(Step):
    """Allocate a temporary (nothing if `n_bytes` is 0). It is freed when the script ends, unless `Free` frees it before."""

    n_bytes: int


@dataclass(frozen=True, slots=True)
class Free(Step):
    """Free the latest temporary that an equal `Take` allocated."""

    taken: Take


@dataclass(frozen=True, slots=True)
class Make(Step):
    """Allocate result number `index` of the operation, or, if `index` is None, all results that have no memory yet."""

    index: int | None = None


Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Script = Sequence[Step]
Rule = Callable[[Args, Kwargs, Any], Script]  # operands, and the results as host tensors (None if the operation is in place)

MAKE_RESULTS = Make()
SCRATCH: dict[str, Rule] = {}  # by operation name, without "aten::" and overload


def scratch(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for the operations called `names`."""

    def register(function: Rule) -> Rule:
        SCRATCH.update(dict.fromkeys(names, function))
        return function

    return register


def brief(n_bytes: int) -> tuple[Take, Free]:
    """Return the steps of a temporary that is freed before the next step."""
    taken = Take(n_bytes)
    return taken, Free(taken)


def play(script: Script, out: Any, card: Machine) -> None:
    """Execute `script` on `card`; `out` holds the operation's results. A script without `Make` allocates the results first.

    Frees every temporary, also after an error. Raises torch.OutOfMemoryError if one does not fit.
    """
    with signals_deferred:  # a temporary that was allocated is in `held`
        _play(script, out, card)


def _play(script: Script, out: Any, card: Machine) -> None:
    held: list[tuple[Take, Any]] = []
    if not any(type(step) is Make for step in script):
        script = (MAKE_RESULTS, *script)
    try:
        for step in script:
            if isinstance(step, Take):
                if step.n_bytes:
                    held.append((step, card.allocate(step.n_bytes)))
            elif isinstance(step, Free):
                if step.taken.n_bytes:
                    at = next(i for i in reversed(range(len(held))) if held[i][0] == step.taken)
                    card.free(held.pop(at)[1])
            elif isinstance(step, Make):
                for result in tensors_in(out if step.index is None else out[step.index : step.index + 1]):
                    hold(result, card)
    finally:
        for _, block in reversed(held):
            card.free(block)
