"""The allocation log: GPUs, virtual and CUDA, write to it, and `allocation_scopes` cuts memory scopes out of it.

The virtual GPU appends each allocation to `log.builder`. CUDA's allocator keeps its own history, so for a CUDA GPU the log only
collects decode steps. The log is a module of its own so that the GPUs need not import `allocation_scopes`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from toolkit.core.callers import NOTHING_RUNS, Running
from toolkit.gpu.device import Device
from toolkit.trace.events import TraceBuilder

if TYPE_CHECKING:
    from toolkit.gpu.cuda.allocation_history import CudaScope

Row = tuple[int, ...]


class StepRange(NamedTuple):
    """A decode step: start and end on the wall clock (`time.time_ns`), its number, and its name."""

    start_ns: int
    end_ns: int
    step: int
    name: str


@dataclass(eq=False)
class OpenScope:
    """A memory scope that has begun: the blocks that were allocated when it began, and the log row where its events start."""

    device: Device | None  # None stands for the device in use
    builder: TraceBuilder
    lines: bool = True
    within: Running = field(default_factory=dict)  # the functions that ran when it began
    start_ns: int = 0  # on the device's host clock
    since: int = 0  # first row of `builder`
    before: list[Row] = field(default_factory=list)  # segments and blocks that were allocated at the start
    cuda: CudaScope | None = None  # position in the history of CUDA's allocator, for a scope on CUDA
    asked: bool = False  # whether the user wrote it around some work, and so wants to see the memory of all of it


class AllocationLog:
    """The allocation log of this process, guarded by `lock`."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.builder: TraceBuilder | None = None  # events of the virtual GPU; None while no scope is open
        self.lines = False  # whether to record the Python line of each allocation
        self.within: Running = NOTHING_RUNS  # the functions that ran when the open scopes began
        self.watch: Callable[[], None] | None = None  # called after each allocation of the virtual GPU, while a scope is open
        self.keepers = 0  # callers of `allocation_scopes.keep`, who want lines recorded between scopes as well
        self.steps: list[StepRange] | None = None  # decode steps on CUDA; None while CUDA's history is off
        self.scopes: list[OpenScope] = []  # in the order in which they began

    def note_step(self, step: int, start_ns: int, end_ns: int, name: str) -> None:
        """Add a decode step that ran on a CUDA GPU from `start_ns` to `end_ns` of the wall clock."""
        if self.steps is not None:
            self.steps.append(StepRange(start_ns, end_ns, step, name))

    def restart(self) -> None:
        """Restart all open scopes, because another virtual GPU was opened: its clock is at 0 and nothing is allocated."""
        with self.lock:
            for scope in self.scopes:
                scope.before, scope.since, scope.start_ns = [], len(scope.builder), 0


log = AllocationLog()
