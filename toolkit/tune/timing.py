"""Time a config on this GPU by replaying a CUDA graph with a cold L2 cache.

One graph has many runs of the operation, each with its own copy of the inputs. Together the copies are larger than the L2, so
that each run finds its inputs evicted, as in a model, where other layers run in between. If that needs too many copies (inputs
of a few kilobytes, which the previous kernel of a model has just written), the L2 stays warm, and the timing says so. Runs
follow each other like the operations of a decode step, so that launches may overlap (early.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from toolkit.kernels.base import Config, Kernel, Launch, Shape, Tensors

REPLAYS = 9
MOST_COPIES = 64  # of the inputs
MEMORY_SHARE = 0.5  # of the free memory, for copies
MOST_BYTES = 8_000_000_000  # of copies
GRAPH_NS = 4_000_000  # length of a replay, long enough to make the cost of its events negligible
MOST_RUNS = 256
LAUNCHING_NS = 500_000  # a first run that is shorter may be launch overhead only
HOPELESS = 3.0  # a config that is this many times slower than the best one is timed once only


@dataclass(frozen=True)
class Timing:
    """The median time of a run and its interquartile range in ns, whether the L2 was cold, and whether timing was cut short."""

    ns: float
    spread_ns: float
    cold: bool
    stopped: bool = False


class Clock(Protocol):
    """The interface of a function that times a config. Tests use their own."""

    def __call__(self, kernel: Kernel, shape: Shape, config: Config, inputs: Tensors, best_ns: float) -> Timing: ...


class CudaClock:
    """Times configs on the current CUDA GPU. The copies of a problem's inputs are shared by its configs."""

    def __init__(self) -> None:
        self._of: Tensors | None = None
        self._sets: list[Tensors] = []
        self._cold = False

    def __call__(self, kernel: Kernel, shape: Shape, config: Config, inputs: Tensors, best_ns: float) -> Timing:
        """Time `config`; `best_ns` is the best time so far (at first infinity). Exceptions of the launch are passed on."""
        if self._of is not inputs:
            self.release()
            self._of, (self._sets, self._cold) = inputs, rotation(inputs, kernel.cost(shape).bytes)
        outputs = [kernel.outputs(shape, one) for one in self._sets]
        runs = [list(kernel.launches(shape, config, one, out)) for one, out in zip(self._sets, outputs, strict=True)]
        once = first_ns(lambda: run_all(runs[:1]))
        if once > max(2 * HOPELESS * best_ns, LAUNCHING_NS):
            return Timing(once, 0.0, self._cold, stopped=True)
        count = min(max(round(GRAPH_NS / once), len(runs)), max(MOST_RUNS, len(runs)))
        repeats = -(-count // len(runs))
        return replay(lambda: run_all(runs * repeats), repeats * len(runs), best_ns, self._cold)

    def release(self) -> None:
        """Free the copies."""
        self._of, self._sets = None, []


def rotation(inputs: Tensors, moved: int) -> tuple[list[Tensors], bool]:
    """Return copies of the inputs, and whether one run per copy, each reading `moved` bytes, reads more than twice the L2.

    Copies are limited by free memory and `MOST_COPIES`. The original inputs are not used, since a run may write in place.
    """
    device = next(iter(inputs.values())).device
    size = max(sum(tensor.nbytes for tensor in inputs.values()), 1)
    wanted = 2 + 2 * torch.cuda.get_device_properties(device).L2_cache_size // max(1, min(moved, size))
    room = int(min(MOST_BYTES, MEMORY_SHARE * torch.cuda.mem_get_info(device)[0])) // size
    count = wanted if wanted <= min(MOST_COPIES, room) else max(1, min(2, room))
    return [{name: _copy(tensor) for name, tensor in inputs.items()} for _ in range(count)], count == wanted


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def run_all(runs: Sequence[Sequence[Launch]]) -> None:
    """Launch everything, in order."""
    for launches in runs:
        for launch in launches:
            launch.run()


def first_ns(run: Callable[[], None]) -> float:
    """Return the time of a second run in ns, after a first one that compiles and warms up."""
    run()
    torch.cuda.synchronize()
    return _timed(run)


def replay(run: Callable[[], None], count: int, best_ns: float, cold: bool) -> Timing:
    """Capture `run`, which runs the operation `count` times, replay the graph, and return the time of one operation."""
    graph = captured(run)
    graph.replay()
    torch.cuda.synchronize()
    times = [_timed(graph.replay) / count]
    if times[0] > HOPELESS * best_ns:
        return Timing(times[0], 0.0, cold, stopped=True)
    times += [_timed(graph.replay) / count for _ in range(REPLAYS - 1)]
    low, _, high = statistics.quantiles(times, n=4)
    return Timing(statistics.median(times), high - low, cold)


def captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture the launches of `run`. `torch.cuda.graph` is not used: it empties the allocator's cache, which takes too long."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            run()
        finally:
            graph.capture_end()
    return graph


def _timed(run: Callable[[], None]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e6
