# mypy: allow-untyped-calls, no-warn-return-any, no-warn-unused-ignores
# (PyTorch's extension points carry no types.)
"""Checks for operations with large results: does the virtual GPU have room for them, and does the host?

A result that does not fit on the virtual GPU raises torch.OutOfMemoryError before the host computes it.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from toolkit.core.errors import DeviceError
from toolkit.core.units import bytes_text
from toolkit.gpu.virtual import sizes_only as sizes
from toolkit.gpu.virtual.allocator.memory import Memory
from toolkit.gpu.virtual.machine import Machine

LARGE = 1 << 28  # elements; smaller results are only checked after the host has computed them
_MATRIX_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}
_NO_MEMORY = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")


def could_be_large(name: str, hosts: list[Any]) -> bool:
    """Return whether results of the operation `name` could exceed LARGE elements.

    They rarely exceed the product of the elements of the two largest operands. The size of a matrix product is known: asking a
    meta kernel for it would import PyTorch's compiler, which takes about a second.
    """
    largest = second = 1
    for x in hosts:
        if type(x) is torch.Tensor:
            n = x.numel()
            if n > largest:
                largest, second = n, largest
            elif n > second:
                second = n
    if largest * second <= LARGE:
        return False
    if name in _MATRIX_PRODUCTS:
        first, last = [x for x in hosts if type(x) is torch.Tensor][-2:]  # [..., m, k] and [..., k, n]
        return first.numel() // max(1, first.shape[-1]) * last.shape[-1] > LARGE
    return True


def check_room(card: Machine, func: Any, hosts: list[Any], named: dict[str, Any]) -> None:
    """Raise torch.OutOfMemoryError if the virtual GPU has no room for the results of `func`.

    Without values nothing is computed, and allocating the results raises the same error.
    """
    if sizes.seen and sizes.absent(hosts, named):
        return
    try:
        out = sizes.on_meta(func._op, hosts, named)
    except (RuntimeError, NotImplementedError):  # the shape depends on values, or there is no meta kernel
        return
    results = out if isinstance(out, list | tuple) else (out,)
    card.check(sum(x.nbytes for x in results if isinstance(x, torch.Tensor)))


def raise_if_full(memory: Memory | None, error: RuntimeError) -> None:
    """Translate the host's out-of-memory `error`: torch.OutOfMemoryError if the virtual GPU is full too, else DeviceError."""
    found = _NO_MEMORY.search(str(error))
    if found is None:
        return
    n_bytes = int(found[1])
    if memory is not None:
        try:
            memory.check(n_bytes)
        except torch.OutOfMemoryError as full:
            raise full from None
    raise DeviceError(
        f"a tensor of {bytes_text(n_bytes)} on the virtual GPU", "this machine has too little memory for its values",
        "Use `with gpu.sizes_only():`, which computes shapes, bytes and times without values",
    ) from error  # fmt: skip
