"""CUDA graphs: work that is captured once and launched as a whole.

PyTorch captures the work, in a memory pool of its own. `cuda.bindings` is needed only to count nodes here, and to build loops
(see `loops`); PyTorch's CUDA builds for Linux depend on it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from threading import RLock
from typing import Any

import torch

from toolkit.core.collector import no_collection
from toolkit.core.errors import DeviceError
from toolkit.gpu.device import Graph

BODY_NEEDS = "Keep values on the device, and copy from and to pinned memory only"

_capturing = RLock()  # captures share a stream


class CudaGraph(Graph):
    """A captured step. Get one from `CudaGpu.capture`."""

    def __init__(self, device: torch.device, work: Callable[[], None], launched: Callable[[], None]) -> None:
        """Capture `work`. `launched` is called right before each launch."""
        self._graph, self._launched = captured(device, work), launched
        self.nodes = node_count(self._graph.raw_cuda_graph())
        self._graph.instantiate()

    def replay(self) -> None:
        """Launch the work on the current stream."""
        self._launched()
        self._graph.replay()

    def free(self) -> None:
        """Free the graph. Its memory goes back to PyTorch's allocator."""
        self._graph.reset()


def captured(device: torch.device, work: Callable[[], None]) -> Any:
    """Return the launches of `work` as a `torch.cuda.CUDAGraph` that is not instantiated yet.

    Other threads may use the GPU meanwhile. Raises DeviceError if the work can't be captured. Other errors of `work` propagate,
    torch.OutOfMemoryError among them.
    """
    graph, stream = torch.cuda.CUDAGraph(keep_graph=True), _capture_stream(device)
    # Freeing unrelated objects may call CUDA functions that are not allowed during a capture.
    with _capturing, torch.cuda.device(device), no_collection():
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            _capture(graph, work, device)
    return graph


def _capture(graph: Any, work: Callable[[], None], device: torch.device) -> None:
    pool = torch.cuda.graph_pool_handle()  # not the graph's own, which can't be read after a capture that failed
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        work()
        graph.capture_end()
    except BaseException as error:
        _abandon(graph, pool, device)
        if isinstance(error, RuntimeError) and "captur" in str(error):
            raise DeviceError("capturing a graph", str(error).splitlines()[0], BODY_NEEDS) from error
        raise


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all captures on a GPU. For each stream that it ran on, cuBLAS keeps a workspace of some 32 MiB."""
    return torch.cuda.Stream(device)


def node_count(graph: int) -> int:
    """Return the number of nodes of a `cudaGraph_t`."""
    runtime = bindings("runtime")
    return int(checked(runtime.cudaGraphGetNodes(runtime.cudaGraph_t(graph)))[1])


def bindings(name: str) -> Any:
    """Return the module `cuda.bindings.NAME`. Raises DeviceError if it isn't installed."""
    import importlib

    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        do = f"Install it: pip install cuda-bindings=={(torch.version.cuda or '13.0').split('.')[0]}.*"
        raise DeviceError("capturing a graph", "the package cuda-bindings isn't installed", do) from error


def checked(result: tuple[Any, ...]) -> Any:
    """Return the values of a call of `cuda.bindings`: one value, or a tuple. Raises DeviceError if it failed."""
    error, *values = result
    if int(error):
        raise DeviceError("building a CUDA graph", f"CUDA says {getattr(error, 'name', error)}", "Update the GPU's driver")
    return values[0] if len(values) == 1 else tuple(values)


def _abandon(graph: Any, pool: tuple[int, int], device: torch.device) -> None:
    """End a capture that failed, and give its memory back.

    If ending it fails as well, PyTorch keeps allocating from its pool, and never frees cached memory again: private functions
    undo that.
    """
    try:
        graph.capture_end()
        graph.reset()
    except RuntimeError:
        index = torch.cuda.current_device() if device.index is None else device.index
        for undo in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
            with suppress(RuntimeError, AttributeError):
                undo(index, pool)
