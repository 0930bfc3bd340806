"""Note which variables hold memory and autograd graphs while a test runs: when it has ended, they are gone.

A `Watch` looks when a block holds more memory than its limit. `KeptGraphs` looks after steps of an optimizer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from toolkit.core.callers import is_installed
from toolkit.vram import owners
from toolkit.vram.frames import locals_of


@dataclass(frozen=True)
class Frame:
    """A function of the user's that was running: file, line, its first line, and whether it is a method of a module."""

    file: Path
    line: int
    first: int
    of_module: bool


Variables = list[tuple[str, Any]]  # "index of a frame:name", or "-1:name" for a global; and the value


def _frame(frame: FrameType) -> Frame:
    of_module = isinstance(locals_of(frame).get("self"), nn.Module)
    return Frame(Path(frame.f_code.co_filename), frame.f_lineno, frame.f_code.co_firstlineno, of_module)


def _running() -> list[FrameType]:
    """Return the frames of the user's functions that are running, the outermost first."""
    running: list[FrameType] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if not is_installed(frame.f_code.co_filename):
            running.insert(0, frame)
        frame = frame.f_back
    return running


def _variables(running: list[FrameType]) -> Variables:
    found: Variables = []
    for index, frame in enumerate(running):
        if frame.f_code.co_name != "<module>":
            found += [(f"{index}:{name}", value) for name, value in locals_of(frame).items()]
    for frame in running:
        found += [(f"-1:{name}", value) for name, value in frame.f_globals.items() if not name.startswith("__")]
    return found


@dataclass
class Watch:
    """Notes who holds the memory whenever a block holds more than `limit_bytes`, and again when the excess has doubled.

    It is called after each allocation. `ran` has the line that ran the backward pass of each autograd node, by the number of
    the node: memory that such a node still holds belongs to a graph that was retained.
    """

    limit_bytes: int
    allocated: Callable[[], int]
    next_bytes: int = 0
    frames: list[Frame] = field(default_factory=list)  # the outermost first
    held: dict[int, owners.Holder] = field(default_factory=dict)  # by address; the owner's path begins as in `Variables`
    ran: dict[int, Frame] = field(default_factory=dict)

    def __call__(self) -> None:
        if torch._C._current_graph_task_id() != -1:
            self._note_backward()
        excess = self.allocated() - self.limit_bytes
        if excess <= self.next_bytes:
            return
        self.next_bytes = 2 * excess
        running = _running()
        self.frames = [_frame(frame) for frame in running]
        self.held = {address: holder for (_, address), holder in owners.walk(_variables(running)).items()}

    def _note_backward(self) -> None:
        node = torch._C._current_autograd_node()
        if node is not None and node._sequence_nr() not in self.ran:
            running = _running()
            if running:
                self.ran[node._sequence_nr()] = _frame(running[-1])


class KeptGraphs:
    """Counts the autograd nodes of earlier steps that variables still reach: `with KeptGraphs() as graphs:`.

    It looks after the second, third, fifth, ninth, ... step of each optimizer. A node is of an earlier step if it is older than
    the step before. Such nodes often hold no memory of the GPU, because the backward pass has freed it. Their number grows with
    every step all the same, as does the host's memory, if a loop adds up losses with their graphs.
    """

    def __init__(self) -> None:
        self.nodes = 0
        self.most = 0  # of these nodes, those that `owner` keeps
        self.owner = ""  # a path that begins as in `Variables`
        self.frames: list[Frame] = []
        self._steps: WeakKeyDictionary[Optimizer, tuple[int, int]] = WeakKeyDictionary()  # their number, the next node's number

    def __enter__(self) -> KeptGraphs:
        self._handle = register_optimizer_step_post_hook(self._stepped)
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.remove()

    def _stepped(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        steps, oldest = self._steps.get(optimizer, (0, 0))
        self._steps[optimizer] = steps + 1, torch._C._autograd._get_sequence_nr()
        if steps and not steps & (steps - 1):
            self._look(oldest)

    def _look(self, oldest: int) -> None:
        running, seen = _running(), set[Any]()
        kept = {
            path: sum(node._sequence_nr() < oldest for node in owners.nodes_of(tensor, seen))
            for path, tensor, _ in owners.tensors(_variables(running))
            if tensor.grad_fn is not None
        }
        if sum(kept.values()) > self.nodes:
            self.nodes, self.owner = sum(kept.values()), max(kept, key=kept.__getitem__)
            self.most, self.frames = kept[self.owner], [_frame(frame) for frame in running]
