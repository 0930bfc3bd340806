"""Run code inside a kernel as if it were called from outside of it.

PyTorch's dispatcher switches off autograd and the tracking of views before it calls a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Including:
    """A context in which the dispatcher uses the keys called `names` again, on this thread."""

    __slots__ = ("_excluded", "_keys")

    def __init__(self, *names: str) -> None:
        self._keys = [getattr(torch._C.DispatchKey, name) for name in names]

    def __enter__(self) -> None:
        self._excluded = [torch._C._dispatch_tls_is_dispatch_key_excluded(key) for key in self._keys]
        for key in self._keys:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)

    def __exit__(self, *_: object) -> None:
        for key, excluded in zip(self._keys, self._excluded, strict=True):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, excluded)


def parts_of(func: Any, key: Any) -> Callable[[Any, Any], Any]:
    """Return a function (operands, named operands) that runs the composite of `func` for a dispatch key, part by part.

    In inference mode, the parts are views of ordinary tensors, as on CUDA: `linear` decides by them how it multiplies.
    """

    def run(args: Any, kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return func._op_dk(key, *args, **kwargs)
        with Including("ADInplaceOrView"):
            return func._op_dk(key, *args, **kwargs)

    return run
