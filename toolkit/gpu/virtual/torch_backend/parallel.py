# mypy: allow-untyped-calls, no-warn-return-any, no-warn-unused-ignores
# (PyTorch's extension points carry no types.)
"""The functions of C++ behind nn.DataParallel and torch.nn.parallel.comm, for the only virtual GPU (torch/csrc/cuda/comm.cpp).

PyTorch for the CPU lacks them. In PyTorch for CUDA, they act as before on tensors of other devices if CUDA is available.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from toolkit.gpu.virtual.operands import tensors_in
from toolkit.gpu.virtual.tensor import VirtualTensor
from toolkit.gpu.virtual.torch_backend.module import stream

Tensor = torch.Tensor


def _broadcast(tensor: Tensor, devices: Sequence[int]) -> list[Tensor]:
    device = _only(devices)
    return [tensor if isinstance(tensor, VirtualTensor) else tensor.to(device, non_blocking=True)]


def _broadcast_coalesced(tensors: Sequence[Tensor], devices: Sequence[int], buffer_size: int) -> list[list[Tensor]]:
    if any(x.device != _only(devices) for x in tensors):
        raise RuntimeError("all tensors must be on devices[0]")
    return [list(tensors)]


def _broadcast_out(tensor: Tensor, out: Sequence[Tensor]) -> Sequence[Tensor]:
    for x in out:
        x.copy_(tensor, non_blocking=True)
    return out


def _scatter(tensor: Tensor, devices: Sequence[int], sizes: Sequence[int] | None, dim: int, streams: Any) -> list[Tensor]:
    device = _only(devices)
    if sizes is not None and list(sizes) != [tensor.size(dim)]:
        raise RuntimeError(f"given chunk sizes {list(sizes)} don't sum up to the tensor's size {tensor.size(dim)}")
    with stream(streams[0] if streams else None):
        return [tensor.to(device, non_blocking=True)]


def _scatter_out(tensor: Tensor, out: Sequence[Tensor], dim: int, streams: Any) -> Sequence[Tensor]:
    for i, (x, part) in enumerate(zip(out, tensor.split([x.size(dim) for x in out], dim), strict=True)):
        with stream(streams[i] if streams else None):
            x.copy_(part, non_blocking=True)
    return out


def _gather(tensors: Sequence[Tensor], dim: int, destination: int | None) -> Tensor:
    size = list(tensors[0].shape)
    size[dim] = sum(x.size(dim) for x in tensors)
    device = torch.device("cpu") if destination == -1 else _only([destination or 0])
    channels_last = all(x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) for x in tensors)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return _gather_out(tensors, torch.empty(size, dtype=tensors[0].dtype, device=device, memory_format=layout), dim)


def _gather_out(tensors: Sequence[Tensor], out: Tensor, dim: int) -> Tensor:
    for x, part in zip(tensors, out.split([x.size(dim) for x in tensors], dim), strict=True):
        part.copy_(x, non_blocking=True)
    return out


def _only(devices: Sequence[int]) -> torch.device:
    if list(devices) != [0]:
        raise RuntimeError(
            f"invalid device ordinal: devices {list(devices)} were requested, and the only virtual GPU is vgpu:0"
        )
    return torch.device("vgpu", 0)


def _for_any_device(virtual: Callable[..., Any], original: Callable[..., Any] | None) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        of_cuda = original is not None and torch.cuda.is_available()
        return original(*args) if of_cuda and not _has_virtual(args) else virtual(*args)  # type: ignore[misc]

    return call


def _has_virtual(args: Any) -> bool:
    return any(isinstance(x, VirtualTensor) for x in tensors_in(args))


def install() -> None:
    """Replace or add the functions in this process."""
    for function in (_broadcast, _broadcast_coalesced, _broadcast_out, _scatter, _scatter_out, _gather, _gather_out):
        name = function.__name__
        setattr(torch._C, name, _for_any_device(function, getattr(torch._C, name, None)))
