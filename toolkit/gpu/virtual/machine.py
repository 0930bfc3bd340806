"""The simulated hardware of a virtual GPU: the host clock, streams, memory, and the recording.

The machine executes effects: kernels, copies, memsets and waits. Each launch advances the host clock by its cost on the host.
Work starts when it has been launched and its stream is idle, and a wait advances the host clock to the end of the stream. No
time depends on how fast Python runs, so a program has the same times on every run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from toolkit.core import distributed
from toolkit.core.callers import caller, chain, current_cell
from toolkit.core.current_layer import NO_LAYER, current_layer
from toolkit.core.signals import signals_deferred
from toolkit.gpu.allocation_log import log
from toolkit.gpu.catalogue import GpuSpec
from toolkit.gpu.device import not_recording
from toolkit.gpu.virtual import lifetimes
from toolkit.gpu.virtual import sizes_only as sizes
from toolkit.gpu.virtual.allocator.blocks import Block
from toolkit.gpu.virtual.allocator.memory import Memory
from toolkit.gpu.virtual.allocator.settings import Settings
from toolkit.gpu.virtual.effects.effect import Effect, duration_ns, host_ns, staged_ns
from toolkit.gpu.virtual.lifetimes import settle
from toolkit.gpu.virtual.threads import DEFAULT_STREAM, here
from toolkit.trace.events import Trace, TraceBuilder

Taken = tuple[Block, str | None]  # allocated memory: the block, and the line that allocated it if it was recorded
_CALLS = {"memset": "cudaMemsetAsync", **dict.fromkeys(("h2d", "d2h", "d2d"), "cudaMemcpyAsync")}
POOL_STREAMS, PRIORITIES = 32, 4  # c10/cuda/CUDAStream.cpp
NOTED_BYTES = 1 << 20  # allocations of at least this size always record their line, for the out-of-memory error


class Machine:
    """The state of one virtual GPU, shared by all threads."""

    def __init__(self, spec: GpuSpec) -> None:
        self.spec = spec
        self._memory = Memory(spec.memory_bytes, spec.name, Settings.of_environment())
        self._memory.listener = self._log_event
        self.host_ns = 0
        self.stream_ends: dict[int, int] = {DEFAULT_STREAM: 0}
        self._pools: dict[int, deque[int]] = {}  # of streams, by priority
        self.collectives = 0  # that have run
        self.sizes_only = 0  # blocks that make tensors without values, of all threads
        self.from_packed = False  # whether new tensors are made from integers without values
        self.lines = False
        self._shard, self._home = distributed.WHOLE, 0  # of the recording, and the thread that started it
        self._builder: TraceBuilder | None = None
        self._since_ns = 0
        self._marked = False  # whether a step has ended since the recording began
        self.lock = lifetimes.lock  # one lock, because frees happen in whatever work comes next

    # ---- time

    def execute(self, effect: Effect) -> None:
        """Execute `effect` on the current stream, or, for a wait, on the host."""
        if effect.kind == "wait":
            self.wait(here().stream, effect.name)
            return
        with self.lock:
            graph = here().graph
            if graph is not None:
                graph.execute(effect)
                return
            self.host_ns += int(self.spec.tape_host_ns) if here().from_tape else host_ns(effect, self.spec)
            launched = self.host_ns
            after = self.stream_ends[here().stream] + int(self.spec.kernel_gap_ns if effect.kind == "kernel" else 0)
            start = max(launched, after)
            if effect.staged:
                self.host_ns = staged_ns(effect, launched, start, self.spec)
            if effect.cost and self._builder is not None:
                self._launched(effect.cost, _CALLS.get(effect.kind, "cudaLaunchKernel"), self.host_ns - launched)
            self.queue(effect, start)

    def queue(self, effect: Effect, earliest_ns: int) -> tuple[int, int]:
        """Run `effect` on the current stream, from `earliest_ns` on. Return the times of its start and end in ns.

        A collective starts when this rank arrives. It ends on all ranks at the same time, which follows from the last arrival.
        """
        with self.lock:
            stream = here().stream
            start = max(earliest_ns, self.stream_ends[stream])
            more: dict[str, Any] = {}
            arrived = start
            if effect.kind == "collective":
                arrived, more = distributed.latest(start), self._communication(effect)
            end = arrived + duration_ns(effect, self.spec)
            self.stream_ends[stream] = end
            if self._builder is not None:
                self._row(effect.kind, start, end - start, effect.bytes, stream, effect.name, effect.pinned, **more)
            return start, end

    def _communication(self, effect: Effect) -> dict[str, Any]:
        """Count a collective, and return its columns of a trace."""
        self.collectives += 1
        return {
            "operation": effect.name, "algorithm": effect.algorithm, "group": distributed.GROUP, "group_size": effect.ranks,
            "seq": self.collectives - 1,
        }  # fmt: skip

    def wait(self, stream: int, name: str) -> None:
        """Block the host until `stream` has finished all queued work."""
        self.wait_until(self.stream_ends[stream], stream, name)

    def wait_all(self) -> None:
        """Block the host until all streams have finished their queued work."""
        self.wait_until(max(self.stream_ends.values()), -1, "cudaDeviceSynchronize")

    def wait_until(self, end_ns: int, stream: int, name: str) -> None:
        """Block the host until `end_ns`, in a wait for `stream` (-1: for all streams). Raises DeviceError inside a graph."""
        graph = here().graph
        if graph is not None:
            raise graph.refusal(f"{name} waits for the device")
        settle()
        with self.lock:
            start = self.host_ns
            self.host_ns = max(start + int(self.spec.wait_host_ns), end_ns)
            if self._builder is not None:
                self._row("sync", start, self.host_ns - start, 0, stream, name)

    def _launched(self, cost: str, name: str, more_ns: int = 0) -> None:
        """Record the launch that ends now. It took `more_ns` and `cost`, a figure of the `GpuSpec` without the interpreter."""
        if self._builder is not None:
            took = int(getattr(self.spec, cost)) + more_ns
            self._row("launch", self.host_ns - took, took, 0, here().stream, name, device=-1)

    def new_stream(self, priority: int = 0) -> int:
        """Return the number of the next stream of a pool. Each priority has one, whose streams are used in turn."""
        with self.lock:
            pool = self._pools.setdefault(min(max(-priority, 0), PRIORITIES - 1), deque())
            if len(pool) < POOL_STREAMS:
                pool.append(len(self.stream_ends))
                self.stream_ends[pool[-1]] = 0
            else:
                pool.rotate(-1)
            return pool[-1]

    def launch_nothing(self) -> None:
        """Advance the host clock by the cost of a view, an allocation or the recording of an event."""
        graph = here().graph
        if not here().from_tape and (graph is None or not graph.replays):
            self.spend(self.spec.view_host_ns)

    @contextmanager
    def from_tape(self) -> Iterator[None]:
        """Launch the work inside, on this thread, at the cost of a tape: the same for each launch, and none for the rest."""
        state = here()
        outer, state.from_tape = state.from_tape, True
        try:
            yield
        finally:
            state.from_tape = outer

    def launch_graph(self) -> int:
        """Advance the host clock by the cost of launching a graph, and return its time."""
        end = self.spend(self.spec.graph_launch_host_ns)
        self._launched("graph_launch_host_ns", "cudaGraphLaunch")
        return end

    def spend(self, cost_ns: float) -> int:
        """Advance the host clock by `cost_ns`, and return its time."""
        settle()
        with self.lock:
            self.host_ns += int(cost_ns)
            return self.host_ns

    def poll(self, until_ns: int) -> int:
        """Advance the host clock to `until_ns`, at which the host sees a value in mapped memory. Return its time."""
        with self.lock:
            self.host_ns = max(self.host_ns, until_ns)
            return self.host_ns

    def idle_ns(self) -> int:
        """Return the time at which the work queued on all streams will be finished; the current time if it already is."""
        return max(self.host_ns, *self.stream_ends.values())

    def delay(self, stream: int, until_ns: int) -> None:
        """Delay work queued on `stream` from now on until `until_ns` (an event, or the end of another stream)."""
        with self.lock:
            self.stream_ends[stream] = max(self.stream_ends[stream], until_ns)

    def done_ns(self, stream: int) -> int:
        """Return the time at which the work queued on `stream` will be finished; the current time if it already is."""
        return max(self.stream_ends[stream], self.host_ns)

    # ---- memory

    @property
    def memory(self) -> Memory:
        """The allocator. The memory of tensors that are gone has been freed."""
        settle()
        return self._memory

    def allocate(self, n_bytes: int) -> Taken | None:
        """Allocate memory for the current stream, and record it. Return the argument for `free`: the block and its line.

        Work that is captured gets the memory of the graph's pool. Return None for a replay, which allocates nothing: its
        tensors are in the memory that the pool has held since the capture.
        """
        graph = here().graph
        if graph is not None and graph.replays:
            return None
        stream = here().stream if graph is None else graph.pool
        if self._builder is None and not log.lines and log.builder is None and n_bytes < NOTED_BYTES:
            return self.memory.allocate(n_bytes, stream), None
        where = chain(log.within) if log.lines or self.lines or n_bytes >= NOTED_BYTES else None
        memory = self.memory
        with signals_deferred, self.lock:
            block = memory.allocate(n_bytes, stream, where)
            self._note("alloc", block, where)
        if log.watch is not None:
            log.watch()
        return block, where

    def check(self, n_bytes: int) -> None:
        """Raise torch.OutOfMemoryError if `n_bytes` more do not fit."""
        graph = here().graph
        if graph is None or not graph.replays:
            self.memory.check(n_bytes)

    def free(self, taken: Taken | None) -> None:
        """Free memory that `allocate` returned."""
        if taken is None:
            return
        if self._builder is None and log.builder is None:
            self._memory.free(*taken)
            return
        with signals_deferred, self.lock:
            self._note("free", taken[0], None)  # before the block is merged with its neighbors
            self._memory.free(*taken)

    def _note(self, kind: str, block: Block, where: str | None) -> None:
        """Add an event to the recording, with its line, and to the allocation log, with the chain of lines that led there.

        The log is that of a process, and has no ranks.
        """
        inner, rank = where and where.rpartition(" > ")[2], self._shard.rank
        recorded = (self._builder, self._since_ns, inner, rank, self._layer())
        for builder, since, place, of, layer in (recorded, (log.builder, 0, where, 0, NO_LAYER)):
            if builder is not None:
                builder.add(
                    kind, self.host_ns - since, bytes=block.size, stream=here().stream, step=here().step, where=place,
                    cell=current_cell(), clock="modelled", address=block.address, requested=block.requested, rank=of,
                    layer=layer,
                )  # fmt: skip

    def _log_event(self, kind: str, n_bytes: int, address: int) -> None:
        """Log segments that the allocator reserves and returns, and requests that fail."""
        if log.builder is not None:
            log.builder.add(
                kind, self.host_ns, bytes=n_bytes, address=address, stream=here().stream, step=here().step,
                cell=current_cell(), clock="modelled", where=chain(log.within) if kind == "oom" else None,
            )  # fmt: skip

    @contextmanager
    def without_values(self) -> Iterator[None]:
        """Make tensors without values inside the block, on all threads. Blocks of several threads may overlap."""
        entered = False
        try:
            with signals_deferred, self.lock:
                self.sizes_only += 1
                entered = True
            yield  # an interrupt may arrive before it
        finally:
            if entered:
                with signals_deferred, self.lock:
                    self.sizes_only -= 1

    # ---- recording

    def start(self, *, lines: bool) -> None:
        """Wait until the GPU is idle, as on CUDA, then start recording. Times in the trace count from then on."""
        settle()
        with self.lock:
            self.host_ns = self.idle_ns()
            self._builder, self.lines, self._since_ns = TraceBuilder(), lines, self.host_ns
            self._shard, self._home = distributed.current(), get_ident()
            sizes.used = self._marked = False

    def stop(self, meta: dict[str, object]) -> Trace:
        """Stop recording, and return the trace. Raises RecorderError if nothing is being recorded."""
        settle()
        with self.lock:
            builder, self._builder, self.lines = self._builder, None, False
            if builder is None:
                raise not_recording("stopping a recording of the virtual GPU")
            shard, steps_from = self._shard, "marks" if self._marked else None
            return builder.build(meta | distributed.described(shard) | {"sizes_only": sizes.used, "steps_from": steps_from})

    def _layer(self) -> int:
        return current_layer() if self.lines else NO_LAYER

    @property
    def recording(self) -> bool:
        return self._builder is not None

    @contextmanager
    def step(self, step: int, name: str) -> Iterator[None]:
        """Assign events caused inside to `step`, and mark it."""
        settle()
        state, start = here(), self.host_ns
        outer, state.step = state.step, step
        try:
            yield
        finally:
            settle()
            if self._builder is not None:
                self._marked = True
                self._row("mark", start, self.host_ns - start, 0, -1, name, where=None, device=-1)
            state.step = outer

    def _row(
        self, kind: str, start: int, duration: int, size: int, stream: int, name: str | None, pinned: int = -1, *,
        where: str | None = "", device: int = 0, **communication: Any,
    ) -> None:  # fmt: skip
        builder = self._builder
        if builder is None:  # the recording ended in another thread
            return
        builder.add(
            kind, start - self._since_ns, duration, bytes=size, stream=stream, device=device, step=here().step,
            cell=current_cell(), pinned=pinned, clock="modelled", name=name, rank=self._shard.rank,
            where=(caller(self._home) if self.lines else None) if where == "" else where,
            layer=self._layer(), **communication,
        )  # fmt: skip
