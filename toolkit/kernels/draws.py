"""Inputs of kernels. Those on "meta" have no values: PyTorch would import its compiler to compute them, which takes seconds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def normal(
    size: Sequence[int], generator: torch.Generator | None, device: torch.device | str, dtype: torch.dtype = torch.float32,
    spread: float = 1.0, mean: float = 0.0,
) -> Tensor:  # fmt: skip
    """Return normally distributed numbers, drawn in fp32; uninitialized ones without a generator."""
    if generator is None:
        return torch.empty(tuple(size), dtype=dtype, device=device)
    drawn = torch.empty(tuple(size), dtype=torch.float32, device=device).normal_(generator=generator)
    return (drawn * spread + mean).to(dtype)


def positions(start: int, stop: int, device: torch.device | str) -> Tensor:
    """Return the int64 numbers from `start` to `stop` - 1."""
    if torch.device(device).type == "meta":
        return torch.empty(stop - start, dtype=torch.int64, device=device)
    return torch.arange(start, stop, device=device)
