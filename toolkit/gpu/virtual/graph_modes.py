"""The effects, allocations and writes of work that the virtual GPU captures as a graph, or replays.

While a thread runs such work, `threads.here().graph` is a `Capture` or a `Replay`. `dispatch` shows it each operation, and
`machine` passes it each effect. CUDA can't capture work that waits for the device or copies from pageable host memory, so both
raise DeviceError for such an operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch

from toolkit.core.errors import DeviceError
from toolkit.gpu.virtual.effects.effect import Effect, host_ns
from toolkit.gpu.virtual.machine import Machine
from toolkit.gpu.virtual.sizes_only import written
from toolkit.gpu.virtual.tensor import block_of
from toolkit.gpu.virtual.threads import here

_SPOKEN = {"aten::_local_scalar_dense": "Tensor.item()"}  # operations that users know by another name

_NO_WAITS = "Keep values on the device; for copies, use pinned host memory and non_blocking=True"


class Mode:
    """What capturing and replaying a graph have in common."""

    doing: ClassVar[str]
    replays: ClassVar[bool]

    def __init__(self, card: Machine) -> None:
        self.card = card

    def run(self, work: Callable[[], None]) -> None:
        """Run `work` in this mode, on this thread. Raises DeviceError inside other work of a graph."""
        state = here()
        if state.graph is not None:
            raise state.graph.refusal(
                "its work captures or replays another graph", "Capture them one by one, and replay one after the other"
            )
        state.graph = self  # type: ignore[assignment]  # one of the two subclasses
        try:
            work()
        finally:
            state.graph = None

    def check(self, func: Any, effects: Iterable[Effect]) -> None:
        """Raise DeviceError, which names the operation `func`, if one of its effects can't be part of a graph."""
        for effect in effects:
            if effect.kind == "wait":
                raise self.refusal(f"{_name(func)} waits for the device")
            if effect.pinned == 0:
                way = "from" if effect.kind == "h2d" else "to"
                raise self.refusal(f"{_name(func)} copies {way} pageable host memory")

    def refusal(self, found: str, do: str = _NO_WAITS) -> DeviceError:
        """Return the error of work that can't be part of a graph."""
        return DeviceError(self.doing, found, do)


class Capture(Mode):
    """Counts the nodes of work, and takes back what it writes.

    A capture runs nothing on the device. Here the operations do run, because the sizes of their results are needed, but
    `undo` restores every tensor that existed before, and the random state. The host spends the time of eager launches.
    `nodes` counts kernels, copies and memsets. `pool` is the number of the memory pool that keeps the memory of intermediate
    results; the caller drops it.
    """

    doing, replays = "capturing a graph", False

    def __init__(self, card: Machine) -> None:
        super().__init__(card)
        self.nodes = 0
        self.pool = card.memory.new_pool()
        self._random = torch.default_generator.get_state()
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # storages, with copies

    def begin(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Save the tensors that the operation will write, unless the capture has created them."""
        if not func._schema.is_mutable:
            return
        for tensor in written(func._schema, args, kwargs):
            host, block = getattr(tensor, "_host", tensor), block_of(tensor)
            storage = host.untyped_storage()
            created_here = not storage.nbytes() or (block is not None and block.stream == self.pool)
            if not host.is_meta and not created_here and storage._cdata not in self._saved:
                self._saved[storage._cdata] = storage, storage.clone()

    def execute(self, effect: Effect) -> None:
        """Count a node. Its launch is recorded instead of executed, which takes the host as long."""
        self.nodes += 1
        self.card.spend(host_ns(effect, self.card.spec))

    def undo(self) -> None:
        """Restore all values that the work has written."""
        for storage, copy in self._saved.values():
            storage.copy_(copy)
        self._saved.clear()
        torch.default_generator.set_state(self._random)


class Replay(Mode):
    """Runs the nodes of one launch one after the other on the current stream, at no cost for the host.

    A node starts `gap` after the end of the previous one, and at least `graph_node_ns` after its start. The gap is the part
    of `graph_node_ns`, the measured time from one node of the shortest kernel to the next, that the kernel itself
    (`kernel_floor_ns`) does not take. Branches that could run concurrently run one after the other, too. `end_ns` is the end
    of the last node.
    """

    doing, replays = "replaying a graph", True
    pool = 0  # never used: a replay allocates nothing

    def __init__(self, card: Machine, launched_ns: int) -> None:
        super().__init__(card)
        self._ready_ns = self.end_ns = launched_ns
        self._node_ns = int(card.spec.graph_node_ns)
        self._gap_ns = max(0, self._node_ns - int(card.spec.kernel_floor_ns))

    def begin(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Do nothing: a replay writes its tensors."""

    def execute(self, effect: Effect) -> None:
        """Queue a node on the current stream."""
        start, self.end_ns = self.card.queue(effect, self._ready_ns)
        self._ready_ns = max(start + self._node_ns, self.end_ns + self._gap_ns)

    def hold(self, until_ns: int) -> None:
        """Start no further node before `until_ns`."""
        self._ready_ns = max(self._ready_ns, until_ns)


def _name(func: Any) -> str:
    name = func._schema.name
    return _SPOKEN.get(name, name)
