"""Captured graphs of the virtual GPU: a step that is launched as a whole, and one that the device repeats.

PyTorch records no graph on a device that it does not know. A replay therefore runs the Python code of the work again, so that
values are right, but the modelled times, events and memory are those of a graph: one launch on the host, nodes that follow
each other on the stream (see `graph_modes.Replay`), no allocations. The work must do the same on every run: unlike CUDA, the
virtual GPU would notice a change of Python state between two replays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager

import torch

from toolkit.core.errors import DeviceError
from toolkit.core.signals import signals_deferred
from toolkit.gpu.device import Graph, Loop, check_token_tensor
from toolkit.gpu.virtual.allocator.memory import Memory
from toolkit.gpu.virtual.effects.effect import kernel
from toolkit.gpu.virtual.graph_modes import Capture, Replay
from toolkit.gpu.virtual.lifetimes import Tie, queue
from toolkit.gpu.virtual.machine import Machine

PUBLISH = kernel("publish_once", 16)  # writes a token to mapped memory
TURN = kernel("publish_token", 16)  # the loop's own kernel: also sets the loop's condition


class _Pool(Tie):
    """A tie to captured work, with its memory pool."""

    __slots__ = ("memory", "number")
    memory: Memory
    number: int

    def end(self) -> None:
        """End the pool. Later calls do nothing."""
        with signals_deferred:
            if _pools.pop(id(self), None) is not None:
                self.memory.drop_pool(self.number)


_pools: dict[int, _Pool] = {}  # those that have not ended, by id


class Captured:
    """Work that was captured once: the number of its nodes, its memory pool, and a way to run it again.

    The memory of intermediate results stays reserved until `free`, or until this object is garbage.
    Raises DeviceError if the work can't be captured, and torch.OutOfMemoryError if there is no memory for it.
    """

    def __init__(self, card: Machine, work: Callable[[], None]) -> None:
        self.card, self._work = card, work
        self._grad = torch.is_grad_enabled()
        with signals_deferred:
            capture = Capture(card)
            self._pool = _Pool(self, queue)
            self._pool.memory, self._pool.number = card.memory, capture.pool
            _pools[id(self._pool)] = self._pool
        try:
            capture.run(work)
        except BaseException:
            self._pool.end()
            raise
        finally:
            capture.undo()
        self.nodes = capture.nodes

    def run(self, replay: Replay) -> None:
        """Run the work as part of `replay`."""
        with torch.set_grad_enabled(self._grad):
            replay.run(self._work)

    def check(self, asked: str) -> None:
        """Raise DeviceError if the memory has been freed."""
        if id(self._pool) not in _pools:
            raise DeviceError(asked, "its memory was freed", "Capture the work again")

    def free(self) -> None:
        """Free the memory. Later calls do nothing."""
        self._pool.end()
        self._work = _nothing


class VirtualGraph(Graph):
    """A captured step. Get one from `VirtualGpu.capture`."""

    def __init__(self, card: Machine, work: Callable[[], None]) -> None:
        self._captured = Captured(card, work)
        self.nodes = self._captured.nodes

    def replay(self) -> None:
        """Launch the work on the current stream. Raises DeviceError after `free`."""
        self._captured.check("replaying a graph")
        card = self._captured.card
        self._captured.run(Replay(card, card.launch_graph()))

    def free(self) -> None:
        """Free the memory of the graph. As on CUDA, it stays reserved until other work needs it, or `empty_cache`."""
        self._captured.free()


class VirtualLoop(Loop):
    """A captured step that the device repeats. Get one from `VirtualGpu.capture_loop`."""

    def __init__(
        self, card: Machine, step: Callable[[], None], token: torch.Tensor,
        mark: Callable[[int, str], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        check_token_tensor("a loop with this token", token, torch.device("vgpu"))
        self._captured, self._mark = Captured(card, step), mark
        self._host: torch.Tensor = token._host  # type: ignore[attr-defined]
        self.nodes = self._captured.nodes + 1
        self._running = False

    def run(
        self, limit: int, ends: Collection[int], stop: Callable[[], bool], ahead: int | None = None, first: int = 1
    ) -> Iterator[tuple[int, int]]:
        """Launch the loop and yield (token, time in ns); see `Loop.run`.

        The launch happens when the first token is requested. A cancelled loop computes one more token in vain, because the
        device starts the next iteration before the host can have seen the token.
        Raises DeviceError after `free`, and while the loop is running.
        """
        self._captured.check("running a loop")
        if self._running:
            raise DeviceError("running a loop", "it is running already", "Read its tokens to the end, or close its generator")
        if limit < 1 or (ahead is not None and ahead < 1):
            raise DeviceError("running a loop", f"limit={limit}, ahead={ahead}", "Give numbers of at least 1")
        self._running = True
        try:
            yield from self._tokens(limit, ends, stop, ahead, first)
        finally:
            self._running = False

    def _tokens(
        self, limit: int, ends: Collection[int], stop: Callable[[], bool], ahead: int | None, first: int
    ) -> Iterator[tuple[int, int]]:
        card = self._captured.card
        replay = Replay(card, card.launch_graph())
        replay.run(lambda: card.execute(TURN))
        at_ns = card.poll(replay.end_ns)
        read_ns: deque[int] = deque(maxlen=ahead or 1)  # when the host read the latest tokens
        goes_on = False  # whether the device computes the next token, unless it is cancelled
        try:
            for i in range(limit):
                if i:
                    goes_on = False
                    at_ns = self._iterate(replay, first + i - 1)
                token = int(self._host)
                goes_on = i + 1 < limit and token not in ends
                read_ns.append(at_ns)
                if ahead is not None and len(read_ns) == ahead:
                    replay.hold(read_ns[0])
                yield token, at_ns
                if not goes_on or stop():
                    return
        finally:
            if goes_on:
                self._iterate(replay, first + i)

    def _iterate(self, replay: Replay, number: int) -> int:
        """Run decode step `number`, and the loop's own kernel. Return when the host sees its end."""
        card = self._captured.card
        with self._mark(number, "decode"):
            self._captured.run(replay)
            replay.run(lambda: card.execute(TURN))
            return card.poll(replay.end_ns)

    def free(self) -> None:
        """Free the memory of the loop, as `VirtualGraph.free`. Raises DeviceError while the loop is running."""
        if self._running:
            raise DeviceError("freeing a loop", "it is running", "Read its tokens to the end, or close its generator")
        self._captured.free()


def _nothing() -> None:
    """Do nothing, in place of work that has been freed."""
