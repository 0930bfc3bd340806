# mypy: allow-untyped-calls, no-warn-return-any, no-warn-unused-ignores
# (PyTorch's extension points carry no types.)
"""Is there room on the card for what the host is about to compute, and what does it mean where the host has none?

A result that the card would refuse need not be computed first. Knows host tensors and the card's memory.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from toolkit.core.errors import DeviceError
from toolkit.core.units import bytes_text
from toolkit.gpu.virtual import sizes_only as sizes
from toolkit.gpu.virtual.allocator.memory import Memory

LARGE = 1 << 28  # elements; a smaller result that doesn't fit on the card is refused once the host has computed it
_NO_MEMORY = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")


def could_be_large(hosts: list[Any]) -> bool:
    """Could what comes of these operands have more than LARGE elements? Results are rarely larger than their product."""
    most = 1
    for x in hosts:
        if type(x) is torch.Tensor:
            most *= x.numel()
    return most > LARGE


def check_room(memory: Memory, func: Any, hosts: list[Any], named: dict[str, Any]) -> None:
    """Raises torch.OutOfMemoryError where the card has no room for the results, before the host computes them."""
    try:
        out = sizes.on_meta(func._op, hosts, named)
    except (RuntimeError, NotImplementedError):  # its shape depends on values, or PyTorch can't tell it
        return
    results = out if isinstance(out, list | tuple) else (out,)
    memory.check(sum(x.nbytes for x in results if isinstance(x, torch.Tensor)))


def refuse_if_full(memory: Memory | None, error: RuntimeError) -> None:
    """What it means that this machine has no memory: torch.OutOfMemoryError if the card has none either, else DeviceError."""
    found = _NO_MEMORY.search(str(error))
    if found is None:
        return
    n_bytes = int(found[1])
    if memory is not None:
        memory.check(n_bytes)
    raise DeviceError(
        f"a tensor of {bytes_text(n_bytes)} on the virtual GPU", "this machine has no memory for its values",
        "Use `with gpu.sizes_only():` for shapes, bytes and times without values",
    ) from error  # fmt: skip
