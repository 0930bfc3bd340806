"""A captured step that the GPU repeats, on CUDA: a graph with a WHILE node around it, launched once.

    publish_token -> WHILE { step -> publish_token }

`publish_token`, compiled by NVRTC, writes the token and the time to pinned host memory, which the GPU can address, and sets the
condition of the WHILE node: whether the limit is reached, an end token was found, or the host has cancelled. The host polls
that memory, so reading tokens takes neither copies nor waits. Per token, the kernel reads one number from the host (two if the
host limits how far it may run ahead), which takes about a microsecond.

`polled` returns a token outside of a loop, in the same way: `publish_once` writes it to mapped memory.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Collection, Iterator
from functools import cache
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from toolkit.core.errors import DeviceError
from toolkit.core.signals import signals_deferred
from toolkit.gpu.cuda.graphs import bindings, captured, checked, node_count
from toolkit.gpu.device import Loop, check_token_tensor

MOST_ENDS = 1024  # end tokens
POLL_S = 20e-6
PATIENCE_S = 0.5  # after that long without a token, check whether the GPU still works
# Entries of the memory that host and kernel share.
PUBLISHED, READ, CANCEL, LIMIT, AHEAD, RING, END_COUNT, ENDS, SHARED = range(9)
SOURCE = r"""
typedef unsigned long long cudaGraphConditionalHandle;
extern "C" __device__ __cudart_builtin__ void cudaGraphSetConditional(cudaGraphConditionalHandle handle, unsigned int value);

// The first launch of a run copies what stays constant to `own`, in device memory: count, limit, ahead, ring, end tokens.
extern "C" __global__ void publish_token(
    cudaGraphConditionalHandle handle, const long long *token, volatile long long *shared, long long *own, int first
) {
    if (first) {
        own[0] = 0;
        own[1] = shared[3];
        own[2] = shared[4];
        own[3] = shared[5];
        own[4] = shared[6];
        const volatile long long *ends = (const volatile long long *)shared[7];
        for (long long k = 0; k < own[4]; k++) own[5 + k] = ends[k];
    }
    long long done = own[0] + 1, found = *token, now;
    volatile long long *ring = (volatile long long *)own[3];
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    ring[2 * done - 2] = found;
    ring[2 * done - 1] = now;
    __threadfence_system();
    shared[0] = done;
    own[0] = done;
    bool more = done < own[1];
    for (long long k = 0; k < own[4]; k++) more = more && found != own[5 + k];
    if (more && own[2])
        while (done - shared[1] >= own[2] && !shared[2]) __nanosleep(2000);
    cudaGraphSetConditional(handle, more && !shared[2]);
}

extern "C" __global__ void publish_once(const long long *token, volatile long long *shared) {
    shared[1] = *token;
    __threadfence_system();
    shared[0] = 1;
}
"""


class CudaLoop(Loop):
    """A captured step that the GPU repeats. Get one from `CudaGpu.capture_loop`."""

    def __init__(
        self, device: torch.device, step: Callable[[], None], token: torch.Tensor, launched: Callable[[], None],
        ran: Callable[[int, NDArray[np.int64], int], None],
    ) -> None:  # fmt: skip
        """Capture `step`. `launched` is called right before each launch, and `ran` at its end.

        The arguments of `ran` are the time of the launch by `time.perf_counter_ns`, the times of the tokens by the GPU's own
        clock in ns, and the number of the first step.
        """
        check_token_tensor("a loop with this token", token, device)
        self._device, self._launched, self._ran = device, launched, ran
        self._token, self._running = token, False
        self._stream = torch.cuda.Stream(device)  # not the current one, so that callbacks can use the GPU meanwhile
        self._shared = torch.zeros(SHARED, dtype=torch.int64, device="cpu", pin_memory=True)
        self._own = torch.zeros(5 + MOST_ENDS, dtype=torch.int64, device=device)
        self._outer, self._body = None, captured(device, step)
        try:
            self.nodes = node_count(self._body.raw_cuda_graph()) + 1
            with torch.cuda.device(device):
                self._executable = self._build()
        except BaseException:  # such as a driver without WHILE nodes
            self._free_graphs()
            raise

    def run(
        self, limit: int, ends: Collection[int], stop: Callable[[], bool], ahead: int | None = None, first: int = 1
    ) -> Iterator[tuple[int, int]]:
        """Launch the loop and yield (token, time in ns); see `Loop.run`.

        A cancelled loop computes one or two more tokens in vain. Raises DeviceError after `free`, while the loop is running, if
        there are more than `MOST_ENDS` end tokens, and if the GPU stops without a token.
        """
        if self._executable is None:
            raise DeviceError("running a loop", "its memory was freed", "Capture the work again")
        if self._running:
            raise DeviceError("running a loop", "it is running already", "Read its tokens to the end, or close its generator")
        if limit < 1 or (ahead is not None and ahead < 1):
            raise DeviceError("running a loop", f"limit={limit}, ahead={ahead}", "Give numbers of at least 1")
        if len(ends) > MOST_ENDS:
            raise DeviceError("running a loop", f"{len(ends):,} end tokens", f"Give at most {MOST_ENDS:,}")
        self._running = True
        try:
            yield from self._tokens(limit, ends, stop, ahead, first)
        finally:
            self._running = False

    def _tokens(
        self, limit: int, ends: Collection[int], stop: Callable[[], bool], ahead: int | None, first: int
    ) -> Iterator[tuple[int, int]]:
        ring = torch.zeros(limit, 2, dtype=torch.int64, device="cpu", pin_memory=True)
        end_ids = torch.tensor([*ends] or [0], dtype=torch.int64, device="cpu").pin_memory()
        shared, found = self._shared.numpy(), ring.numpy()
        shared[:] = (0, 0, 0, limit, ahead or 0, ring.data_ptr(), len(ends), end_ids.data_ptr())
        runtime, finished, launched_ns = bindings("runtime"), torch.cuda.Event(), 0
        try:
            with torch.cuda.device(self._device), signals_deferred:
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
                self._launched()
                before_ns = perf_counter_ns()
                checked(runtime.cudaGraphLaunch(self._executable, self._stream.cuda_stream))
                finished.record(self._stream)
                launched_ns = before_ns
            for i in range(limit):
                _wait(shared, i, finished, "running a loop")
                token = int(found[i, 0])
                yield token, perf_counter_ns()
                shared[READ] = i + 1
                if token in ends or stop():
                    return
        finally:
            shared[CANCEL] = 1
            finished.synchronize()
            if launched_ns:
                self._ran(launched_ns, found[: shared[PUBLISHED], 1].copy(), first)

    def free(self) -> None:
        """Free the graph and its memory. Raises DeviceError while the loop is running."""
        if self._running:
            raise DeviceError("freeing a loop", "it is running", "Read its tokens to the end, or close its generator")
        if self._executable is not None:
            checked(bindings("runtime").cudaGraphExecDestroy(self._executable))
            self._executable = None
            self._free_graphs()

    def _free_graphs(self) -> None:
        if self._outer is not None:
            checked(bindings("runtime").cudaGraphDestroy(self._outer))
            self._outer = None
        self._body.reset()

    def _build(self) -> Any:
        """Return the executable graph: publish the first token, then repeat the step and publish its token."""
        runtime = bindings("runtime")
        self._outer = outer = checked(runtime.cudaGraphCreate(0))
        handle = checked(runtime.cudaGraphConditionalHandleCreate(outer, 0, 1))  # 1: starts each launch with the default, 0
        first = self._publish_node(outer, [], handle, first=True)
        parameters = runtime.cudaGraphNodeParams()
        parameters.type = runtime.cudaGraphNodeType.cudaGraphNodeTypeConditional
        parameters.conditional.handle = handle
        parameters.conditional.type = runtime.cudaGraphConditionalNodeType.cudaGraphCondTypeWhile
        parameters.conditional.size = 1
        try:
            checked(runtime.cudaGraphAddNode(outer, [first], None, 1, parameters))
        except TypeError:  # cuda-bindings 12 has no argument for the data of edges
            checked(runtime.cudaGraphAddNode(outer, [first], 1, parameters))
        body = parameters.conditional.phGraph_out[0]
        step = runtime.cudaGraph_t(self._body.raw_cuda_graph())
        computed = checked(runtime.cudaGraphAddChildGraphNode(body, None, 0, step))
        self._publish_node(body, [computed], handle, first=False)
        return checked(runtime.cudaGraphInstantiate(outer, 0))

    def _publish_node(self, graph: Any, after: list[Any], handle: Any, *, first: bool) -> Any:
        """Add a launch of `publish_token` to `graph` and return the node."""
        driver, runtime = bindings("driver"), bindings("runtime")
        node = driver.CUDA_KERNEL_NODE_PARAMS()
        node.func = loop_kernel(torch.cuda.current_device(), "publish_token")
        node.gridDimX = node.gridDimY = node.gridDimZ = node.blockDimX = node.blockDimY = node.blockDimZ = 1
        values = int(handle), self._token.data_ptr(), self._shared.data_ptr(), self._own.data_ptr(), int(first)
        kinds = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int
        node.kernelParams = values, kinds
        before = [driver.CUgraphNode(int(each)) for each in after]
        added = checked(driver.cuGraphAddKernelNode(driver.CUgraph(int(graph)), before, len(before), node))
        return runtime.cudaGraphNode_t(int(added))


def polled(token: torch.Tensor, kernel: Any) -> int:
    """Launch `kernel`, which is `publish_once`, on the current stream, and return the number in `token` [1] int64."""
    # As in a loop: how many are published; then the number.
    shared = torch.zeros(2, dtype=torch.int64, device="cpu", pin_memory=True)
    driver, finished, found = bindings("driver"), torch.cuda.Event(), shared.numpy()
    values, kinds = (token.data_ptr(), shared.data_ptr()), (ctypes.c_void_p, ctypes.c_void_p)
    try:
        with torch.cuda.device(token.device), signals_deferred:
            stream = torch.cuda.current_stream()
            checked(driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream.cuda_stream, (values, kinds), 0))
            finished.record(stream)
        _wait(found, 0, finished, "reading a token")
    except BaseException:
        finished.synchronize()  # the memory must last until the kernel has written to it
        raise
    return int(found[1])


def _wait(shared: NDArray[np.int64], i: int, finished: torch.cuda.Event, asked: str) -> None:
    """Wait until token `i` is published. Raises DeviceError if the GPU finished without it, and errors of the GPU."""
    since = time.monotonic()
    while shared[PUBLISHED] <= i:
        time.sleep(POLL_S)
        if time.monotonic() - since > PATIENCE_S:
            if finished.query() and shared[PUBLISHED] <= i:
                raise DeviceError(asked, f"the GPU stopped after {i:,} tokens", "Use a strategy without capture")
            since = time.monotonic()


@cache
def loop_kernel(index: int, name: str) -> Any:
    """Return the kernel `name` of `SOURCE` for GPU `index`. Raises DeviceError if cuda-bindings or the compiler fails."""
    try:
        return checked(bindings("driver").cuModuleGetFunction(_module(index), name.encode()))
    except RuntimeError as error:  # cuda-bindings doesn't find NVRTC, for example
        raise DeviceError("compiling the kernels of a loop", str(error), "Install the CUDA toolkit's NVRTC") from error


@cache
def _module(index: int) -> Any:
    """Return `SOURCE`, compiled by NVRTC for GPU `index` and loaded there."""
    nvrtc, driver = bindings("nvrtc"), bindings("driver")
    program = checked(nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"publish_token.cu", 0, [], []))
    major, minor = torch.cuda.get_device_capability(index)
    options = [f"--gpu-architecture=compute_{major}{minor}".encode()]
    checked(nvrtc.nvrtcCompileProgram(program, len(options), options))
    code = b" " * checked(nvrtc.nvrtcGetPTXSize(program))
    checked(nvrtc.nvrtcGetPTX(program, code))
    with torch.cuda.device(index):
        return checked(driver.cuModuleLoadData(code))
