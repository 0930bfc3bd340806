"""How the host computes an operation: with its own kernel, or with a stand-in where the CPU has none.

A CPU lacks kernels that a GPU has: fused ones (attention, recurrent cells), and some types (a histogram of integers).
`HOSTS` holds stand-ins by operation; for a type that is missing, the operation runs in a wider one. Knows host tensors only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from toolkit.devices import virtual_sizes as sizes

HOSTS: dict[str, Callable[..., Any]] = {}  # stand-ins by operation name, with the operation's own parameters

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}


def call_of(func: Any) -> Callable[..., Any]:
    """What computes `func` on host tensors."""
    stand_in = HOSTS.get(func._schema.name.removeprefix("aten::")) if not func._overloadname.endswith("out") else None
    kernel = stand_in or func._op

    def call(*args: Any, **kwargs: Any) -> Any:
        if sizes.seen and sizes.absent(args, kwargs):
            return sizes.run(func, kernel, args, kwargs)
        try:
            return kernel(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if "not implemented for" not in str(error) or func._schema.is_mutable:
                raise
            return _in_wider_type(kernel, args, kwargs)

    return call


def _in_wider_type(kernel: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run in the next wider floating type, and give results of that type back in the operands' own."""
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    narrow = tensors[0].dtype
    wide = _WIDER.get(narrow, torch.float32 if narrow.is_floating_point else torch.float64)

    def cast(x: Any, source: torch.dtype, target: torch.dtype) -> Any:
        return x.to(target) if isinstance(x, torch.Tensor) and x.dtype == source else x

    args, kwargs = tree_map(lambda x: cast(x, narrow, wide), (args, kwargs))
    return tree_map(lambda x: cast(x, wide, narrow), kernel(*args, **kwargs))
