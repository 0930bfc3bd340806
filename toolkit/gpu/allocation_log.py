"""The log of allocations, which both GPUs write while a memory scope is open.

The virtual GPU appends each allocation to `log.builder`. CUDA's allocator keeps a history of its own, so the log only collects
the decode steps that ran on it. `allocation_scopes` opens and closes scopes; this file imports neither GPU.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from toolkit.gpu.device import Device
from toolkit.trace.events import TraceBuilder

if TYPE_CHECKING:
    from toolkit.gpu.cuda.allocation_history import CudaScope

Row = tuple[int, ...]


class StepRange(NamedTuple):
    """A decode step on the wall clock (time.time_ns), in ns."""

    start_ns: int
    end_ns: int
    step: int
    name: str


@dataclass(eq=False)
class OpenScope:
    """A memory scope that has begun: the blocks that were alive then, and the row of the log where its events start."""

    device: Device | None  # None: the device in use
    builder: TraceBuilder
    lines: bool = True
    start_ns: int = 0  # on the device's host clock
    since: int = 0  # row of `builder`
    before: list[Row] = field(default_factory=list)  # segments and blocks that were alive at the start
    cuda: CudaScope | None = None  # position in CUDA's own history, for a scope on CUDA


class AllocationLog:
    """The log of this process. `lock` guards it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.builder: TraceBuilder | None = None  # receives the virtual GPU's allocations; None while no scope is open
        self.lines = False  # record the line of Python that allocates?
        self.steps: list[StepRange] | None = None  # decode steps on CUDA; None while CUDA's history is off
        self.scopes: list[OpenScope] = []

    def note_step(self, step: int, start_ns: int, end_ns: int, name: str) -> None:
        """Add a decode step that ran on a CUDA device from `start_ns` to `end_ns` of the wall clock."""
        if self.steps is not None:
            self.steps.append(StepRange(start_ns, end_ns, step, name))

    def restart(self) -> None:
        """Restart all open scopes: another virtual GPU was opened, with its own clock and with nothing allocated."""
        with self.lock:
            for scope in self.scopes:
                scope.before, scope.since, scope.start_ns = [], len(scope.builder), 0


log = AllocationLog()
