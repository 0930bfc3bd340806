"""Zeros in device memory. Kernels count finished blocks in them, and set them back to zero at the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache

import torch
from torch import Tensor

COUNTERS = 4096  # number of int32 zeros
KINDS = ("cuda",)  # types of devices whose kernels run one after the other on a stream


class _Thread(threading.local):
    zeros: Tensor | None = None  # set by `own_counters`


_thread = _Thread()


@contextmanager
def own_counters(zeros: Tensor) -> Iterator[None]:
    """Let all kernels that this thread launches in the block, on the device of `zeros`, count in `zeros`: int32 [COUNTERS].

    Use it to capture a graph: without it, each captured operation that counts gets its own zeros, and the graph fills them each
    time it runs. Make `zeros` before the capture begins, so that the graph contains no fill, and keep it for as long as the
    graph. Two graphs may use the same zeros if they don't run at the same time.
    """
    before, _thread.zeros = _thread.zeros, zeros
    try:
        yield
    finally:
        _thread.zeros = before


def counters(like: Tensor, count: int) -> Tensor:
    """Return `count` int32 zeros on the device of `like`. Other operations on the current stream use the same memory.

    They may, because they run one after the other. Outside of `own_counters`, a graph that is being captured gets zeros of its
    own: the memory belongs to the graph, and the fill runs when the graph does.
    """
    device = like.device
    shared = None
    if count <= COUNTERS and device.type in KINDS:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            shared = shared_zeros(device, current_stream(device) or 0)
    return torch.zeros(count, dtype=torch.int32, device=device) if shared is None else shared[:count]


def shared_zeros(device: torch.device, stream: int) -> Tensor | None:
    """Return the zeros that operations on `stream`, the current one, share now.

    During a capture without `own_counters` there are none: the result is None.
    """
    own = _thread.zeros
    if own is not None and own.device == device:
        return own
    if device.type == "cuda" and torch._C._cuda_isCurrentStreamCapturing():
        return None
    return _zeros(device, stream)


def current_stream(device: torch.device) -> int | None:
    """Return the current stream of a GPU; None if another GPU is the current one. The CPU has one stream, 0."""
    if device.type != "cuda":
        return 0
    index = device.index
    return torch._C._cuda_getCurrentRawStream(index) if torch._C._cuda_getDevice() == index else None


@cache
def _zeros(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)
