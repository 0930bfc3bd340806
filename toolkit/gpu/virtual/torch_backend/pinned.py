# mypy: allow-untyped-calls, no-warn-return-any, no-warn-unused-ignores
# (PyTorch's extension points carry no types.)
"""Pinned host memory for the virtual GPU, for which PyTorch has no hooks in Python.

Pinned memory is ordinary host memory whose storage is remembered, so that copies to and from it are modelled as pinned. The
first virtual GPU that opens replaces functions of torch for the whole process; with CUDA they still pin memory for CUDA.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from toolkit.gpu.virtual import sizes_only as sizes
from toolkit.gpu.virtual.dispatch import SPECIAL, machine
from toolkit.gpu.virtual.tensor import VirtualTensor
from toolkit.gpu.virtual.threads import finish

_pin_memory, _is_pinned = torch.Tensor.pin_memory, torch.Tensor.is_pinned
_FACTORIES: dict[Any, tuple[str, ...]] = {  # all functions that accept pin_memory=True
    torch: (
        "arange", "bartlett_window", "blackman_window", "empty", "empty_like", "empty_permuted", "empty_quantized",
        "empty_strided", "eye", "full", "full_like", "hamming_window", "hann_window", "kaiser_window", "linspace", "logspace",
        "normal", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm",
        "range", "scalar_tensor", "sparse_bsc_tensor", "sparse_bsr_tensor", "sparse_compressed_tensor", "sparse_coo_tensor",
        "sparse_csc_tensor", "sparse_csr_tensor", "tensor", "tril_indices", "triu_indices", "zeros", "zeros_like",
    ),
    torch.Tensor: ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"),
    torch.fft: ("fftfreq", "rfftfreq"),
}  # fmt: skip
_BY_ROWS, _BY_COLUMNS = (torch.sparse_csr, torch.sparse_bsr), (torch.sparse_csc, torch.sparse_bsc)

_pinned: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # by address of the storage object


def _mark(host: torch.Tensor) -> torch.Tensor:
    storage = host.untyped_storage()
    # The callback consists of C functions only: Python would drop a KeyboardInterrupt that arrives in Python code.
    _pinned[storage._cdata] = weakref.ref(storage, functools.partial(_pinned.pop, storage._cdata))
    return host


def is_pinned(self: torch.Tensor, device: Any = None) -> bool:
    """Return whether a host tensor is in pinned memory; False for a tensor on a device, as torch.Tensor.is_pinned."""
    if self.layout is not torch.strided:
        parts = _parts(self)
        return bool(parts) and is_pinned(parts[-1])
    if self.device.type != "cpu":
        return False
    return self.untyped_storage()._cdata in _pinned or (torch.cuda.is_available() and _is_pinned_for_cuda(self))


def _parts(sparse: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the indices and the values of a sparse tensor; nothing if it has another layout."""
    if sparse.layout is torch.sparse_coo:
        return sparse._indices(), sparse._values()
    if sparse.layout in _BY_ROWS:
        return sparse.crow_indices(), sparse.col_indices(), sparse.values()
    return (sparse.ccol_indices(), sparse.row_indices(), sparse.values()) if sparse.layout in _BY_COLUMNS else ()


def _is_pinned_for_cuda(host: torch.Tensor) -> bool:
    with warnings.catch_warnings():  # `device` is deprecated, but its default is the virtual GPU once that is registered
        warnings.simplefilter("ignore", DeprecationWarning)
        return _is_pinned(host, "cuda")


def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    """Return a copy in pinned memory, or the tensor itself if it is pinned. Raises RuntimeError for a device tensor."""
    if self.device.type != "cpu":
        raise RuntimeError(f"cannot pin a tensor on {self.device}: only CPU tensors can be pinned")
    if is_pinned(self):
        return self
    if parts := [pin_memory(part) for part in _parts(self)]:
        options = {"is_coalesced": self.is_coalesced()} if self.layout is torch.sparse_coo else {"layout": self.layout}
        make: Any = torch.sparse_coo_tensor if self.layout is torch.sparse_coo else torch.sparse_compressed_tensor
        return make(*parts, self.size(), **options)
    if not torch.cuda.is_available():
        return _mark(self.clone())
    with warnings.catch_warnings():  # as above
        warnings.simplefilter("ignore", DeprecationWarning)
        return _mark(_pin_memory(self, "cuda"))


def _pinning(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return `factory` with support for `pin_memory=True`."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if not kwargs.get("pin_memory"):
            try:
                return factory(*args, **kwargs)
            except torch.OutOfMemoryError as error:
                finish(error)
                raise
        kwargs["pin_memory"] = False
        made = factory(*args, **kwargs)
        if made.device.type != "cpu":
            raise RuntimeError("Only dense CPU tensors can be pinned")
        return pin_memory(made)

    return make


def _to_copy(func: Any) -> Callable[..., Any]:
    """Return the handler of _to_copy. As on CUDA, `x.to("cpu", non_blocking=True)` copies to pinned memory without a wait."""

    def to_copy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source, device = args[0], kwargs.get("device")
        onto_host = device is not None and device.type == "cpu" and isinstance(source, VirtualTensor)
        if not (onto_host and kwargs.get("non_blocking")):
            composite = functools.partial(func._op_dk, torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
            absent = isinstance(source, VirtualTensor) and source._host.is_meta and not onto_host
            return _without_values(composite, sizes.unpacked(source._host)) if absent else composite()
        layout = kwargs.get("memory_format") or torch.preserve_format
        out = torch.empty_like(source._host, dtype=kwargs.get("dtype"), device="cpu", memory_format=layout)
        return torch.ops.aten.copy_.default(_mark(out), source, True)

    return to_copy


def _without_values(make: Callable[[], Any], from_packed: bool) -> Any:
    """Call `make` in sizes-only mode, because its source has no values and this machine may lack memory for the result."""
    card = machine()
    outer, card.from_packed = card.from_packed, from_packed
    try:
        with card.without_values():
            return make()
    finally:
        card.from_packed = outer


def install() -> None:
    """Replace the functions of torch, in all threads of this process."""
    from torch.jit import _builtins
    from torch.utils import _device

    _device._device_constructors()  # caches the original factories, to which a default device applies
    for owner, names in _FACTORIES.items():
        for name in names:
            original = getattr(owner, name)
            replacement = _pinning(original)
            scripted = _builtins._find_builtin(original)
            if scripted is not None:
                _builtins._register_builtin(replacement, scripted)
            setattr(owner, name, replacement)
    SPECIAL["_to_copy"] = _to_copy
    torch.Tensor.pin_memory, torch.Tensor.is_pinned = pin_memory, is_pinned  # type: ignore[method-assign, assignment]
