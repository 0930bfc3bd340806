"""The effects of a copy between two tensors: memcpy or kernel, direction, temporaries, and a wait.

The rules follow PyTorch's CUDA `copy_` (ATen/native/cuda/Copy.cu) and the golden programs copy_*, to_*, set_* and clone_*. A
copy is a memcpy if both tensors have the same dtype and, after their dimensions are reordered and merged, are contiguous;
otherwise it is a kernel. Other copies between host and device go through temporaries: a blocking copy casts on the host, a
non-blocking one on the device.
"""

from __future__ import annotations

import torch

from toolkit.gpu.virtual.effects.effect import WAIT, Effect, d2d, d2h, h2d, kernel, nbytes


def one_run(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Return whether TensorIterator would merge both tensors to one contiguous dimension (`iter.is_contiguous()`).

    `source` is broadcast to the shape of `target`.
    """
    shape = target.shape
    if shape == source.shape and target.is_contiguous() and source.is_contiguous():
        return True
    if target.numel() == 1:
        return True
    lead = len(shape) - source.dim()
    theirs, their_shape = source.stride(), source.shape
    dims = []
    for i, (size, stride) in enumerate(zip(shape, target.stride(), strict=True)):
        if size != 1:
            broadcast = i < lead or their_shape[i - lead] == 1
            dims.append((stride, 0 if broadcast else theirs[i - lead], size))
    expected = 1
    for mine, their, size in sorted(dims):
        if mine != expected or their != expected:
            return False
        expected *= size
    return True


def same_bits(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Return whether both have the same dtype, and are both, or neither, lazily negated or conjugated views."""
    if target.dtype != source.dtype:
        return False
    a, b = (
        getattr(target, "_host", target),
        getattr(source, "_host", source),
    )  # for a device tensor, its host tensor has these flags
    return a.is_neg() == b.is_neg() and a.is_conj() == b.is_conj()


def on_device(target: torch.Tensor, source: torch.Tensor, name: str = "copy_") -> list[Effect]:
    """Return the effects of a copy between tensors on the device: a D2D memcpy, or a kernel."""
    size = nbytes(target)
    if size == 0 or target is source:
        return []
    if same_bits(target, source) and one_run(target, source):
        where = target.data_ptr()  # 0 without memory
        return [] if where and where == source.data_ptr() else [d2d(size)]
    return [kernel(name, size + nbytes(source))]


def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> list[Effect]:
    """Return the effects of `target.copy_(source)`; at least one of them is on the device."""
    if target.numel() == 0:
        return []
    to_host, from_host = target.is_cpu, source.is_cpu
    if not to_host and not from_host:
        return on_device(target, source)
    one_dtype = target.dtype == source.dtype
    if one_dtype and one_run(target, source):
        return _cross(target, source, nbytes(target), to_host, non_blocking)
    casts_here = from_host != non_blocking  # the source's side casts: the host if the copy blocks, else the device
    crossing = target.numel() * (target if casts_here else source).element_size()
    cast_first = casts_here and not one_dtype
    in_order = source.is_contiguous() and source.shape == target.shape
    effects = []
    if not from_host:  # the device casts and makes contiguous before it sends
        effects += [kernel("copy_", nbytes(source) + crossing)] * (cast_first + (not in_order))
    direct = target.is_contiguous() and (one_dtype or casts_here)
    whole = in_order and not cast_first
    effects += _cross(target if direct else None, source if whole else None, crossing, to_host, non_blocking)
    if not direct and not to_host:  # the device unpacks and casts the received bytes
        effects.append(kernel("copy_", crossing + nbytes(target)))
    return effects


def _cross(
    target: torch.Tensor | None, source: torch.Tensor | None, size: int, to_host: bool, non_blocking: bool
) -> list[Effect]:
    """Return the memcpy between host and device, and its wait. None stands for a temporary, which is pageable."""
    host = target if to_host else source
    pinned = host is not None and host.is_pinned()
    effect = d2h(size, pinned) if to_host else h2d(size, pinned)
    return [effect._replace(staged=not pinned)] if non_blocking else [effect, WAIT]
