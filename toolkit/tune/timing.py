"""How long does a config take on this GPU: CUDA-graph replays with a cold L2, median and spread.

One graph holds many runs of the operation, each on inputs of its own, which together are larger than the L2: what a run
reads, the runs before it have evicted, as in a model whose other layers come between. Where that takes too many copies (an
operation on a few kilobytes, whose inputs the model's last kernel has just written) the L2 stays warm, and the
timing says so. Runs follow each other as the operations of a decode step do, so that where launches overlap (early.py) a run
begins while the one before it ends. A config that is hopeless after its first replay isn't repeated.
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
GRAPH_NS = 4_000_000  # a replay is about this long, so that the events around it don't count
MOST_RUNS = 256
LAUNCHING_NS = 500_000  # a first run that takes less may be all launch, and says nothing
HOPELESS = 3.0  # times as slow as the best so far


@dataclass(frozen=True)
class Timing:
    """A run's median in ns, the spread between its quartiles, whether the L2 was cold, whether repeating was given up."""

    ns: float
    spread_ns: float
    cold: bool
    stopped: bool = False


class Clock(Protocol):
    """What times a config; tests give their own."""

    def __call__(self, kernel: Kernel, shape: Shape, config: Config, inputs: Tensors, best_ns: float) -> Timing: ...


class CudaClock:
    """Times on the current CUDA GPU. Keeps the copies of the last problem's inputs between its configs."""

    def __init__(self) -> None:
        self._of: Tensors | None = None
        self._sets: list[Tensors] = []
        self._cold = False

    def __call__(self, kernel: Kernel, shape: Shape, config: Config, inputs: Tensors, best_ns: float) -> Timing:
        """Time `config`; `best_ns` is the best so far (infinity at first). Raises what the launch raises."""
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
        """Let go of the copies."""
        self._of, self._sets = None, []


def rotation(inputs: Tensors, moved: int) -> tuple[list[Tensors], bool]:
    """As many copies of the inputs as it takes for runs, which read `moved` bytes of theirs, to exceed twice the L2.

    And whether that many could be made. The inputs themselves aren't among them: a run may write in place.
    """
    device = next(iter(inputs.values())).device
    size = max(sum(tensor.nbytes for tensor in inputs.values()), 1)
    wanted = 2 + 2 * torch.cuda.get_device_properties(device).L2_cache_size // max(1, min(moved, size))
    room = int(min(MOST_BYTES, MEMORY_SHARE * torch.cuda.mem_get_info(device)[0])) // size
    count = wanted if wanted <= min(MOST_COPIES, room) else max(1, min(2, room))
    return [{name: _copy(tensor) for name, tensor in inputs.items()} for _ in range(count)], count == wanted


def _copy(tensor: Tensor) -> Tensor:
    """A copy with the same strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def run_all(runs: Sequence[Sequence[Launch]]) -> None:
    """Launch everything, in order."""
    for launches in runs:
        for launch in launches:
            launch.run()


def first_ns(run: Callable[[], None]) -> float:
    """One run after one that compiles and warms up, in ns."""
    run()
    torch.cuda.synchronize()
    return _timed(run)


def replay(run: Callable[[], None], count: int, best_ns: float, cold: bool) -> Timing:
    """Capture `run`, which does `count` runs, and replay the graph: median and quartiles of a run."""
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
    """A graph of what `run` launches. By hand: `torch.cuda.graph` empties the allocator's cache each time, which takes longer
    than a config's timing does."""
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
