# mypy: allow-untyped-calls, no-warn-return-any, no-warn-unused-ignores
# (PyTorch's extension points carry no types.)
"""The virtual GPU's tensor: says it lives on `vgpu:0`, and keeps its values in a host tensor, `_host`.

Views of a device tensor share the storage of its host tensor. A block of device memory lives exactly as long as such a
storage: a weak reference to it tells when it is gone. This file knows shapes and storages; what an operation does is
`virtual_dispatch`'s business.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from toolkit.gpu.virtual.allocator.blocks import Block as MemoryBlock

if TYPE_CHECKING:
    from toolkit.gpu.virtual.machine import Machine

_make = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
_data: Any = torch.Tensor.data
_setitem = torch.Tensor.__setitem__
_device: list[torch.device] = []  # torch.device("vgpu", 0), once the name is registered


class VirtualTensor(torch.Tensor):
    """A tensor on the virtual GPU. Made by PyTorch operations on `torch.device("vgpu")`, never by hand."""

    _host: torch.Tensor
    run: Callable[..., Any]  # the operation itself; virtual_dispatch sets it

    # Functions of torch see an ordinary tensor: no Python between the call and the dispatcher.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return VirtualTensor.run(func, args, kwargs or {})

    def __setitem__(self, key: Any, value: Any) -> None:
        """A number is written as CUDA writes it: from a one-element tensor on the host."""
        if isinstance(value, bool | int | float | complex | np.generic):
            value = torch.tensor(value, dtype=self.dtype)
        _setitem(self, key, value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """As a CUDA tensor prints, with the copies that printing one makes."""
        if self._host.is_meta:
            return f"tensor(..., device='{self.device}', size={tuple(self.shape)}, dtype={self.dtype}, sizes only)"
        torch._tensor_str._str(self)  # type: ignore[attr-defined]  # reads back each number it looks at
        text = torch._tensor_str._str(self._host.detach())[:-1]  # type: ignore[attr-defined]
        text += f", device='{self.device}'"
        if self.grad_fn is not None:
            text += f", grad_fn=<{type(self.grad_fn).__name__}>"
        elif self.requires_grad:
            text += ", requires_grad=True"
        return f"Parameter containing:\n{text})" if isinstance(self, torch.nn.Parameter) else f"{text})"

    def __format__(self, spec: str) -> str:
        if self.dim() == 0:
            return format(self.detach().item(), spec)
        return object.__format__(self, spec)

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().resolve_conj().resolve_neg().numpy()
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def data_ptr(self) -> int:
        return self._host.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._host.untyped_storage()

    def record_stream(self, stream: Any) -> None:
        """Nothing to do: memory is never handed to another stream before the host tensor is gone."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.numpy()

    def __copy__(self) -> torch.Tensor:
        """Shares the storage, as a copy of any tensor does."""
        copy = self.detach().requires_grad_(self.requires_grad)
        return torch.nn.Parameter(copy, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copy

    def __deepcopy__(self, memo: dict[int, Any]) -> VirtualTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol")
        with torch.no_grad():
            copy = self.clone().requires_grad_(self.requires_grad)
            if self.grad is not None:
                copy.grad = self.grad.__deepcopy__(memo)  # type: ignore[attr-defined]
        for name in ("_is_param", "_is_buffer", "persistent"):
            if name in self.__dict__:
                setattr(copy, name, self.__dict__[name])
        memo[id(self)] = copy
        return copy  # type: ignore[return-value]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled and saved through the host; `torch.load` and its `map_location` find the device again."""
        if self._host.is_meta:
            raise RuntimeError("a sizes-only tensor has no values to save")
        self.detach().cpu()  # the copy that saving makes; the host tensor itself keeps storages shared
        rebuild, parts = torch._utils._rebuild_device_tensor_from_cpu_tensor, (self._host, self.dtype, str(self.device))  # type: ignore[attr-defined]
        if not isinstance(self, torch.nn.Parameter):
            return rebuild, (*parts, self.requires_grad)
        data = self.detach()
        return torch._utils._rebuild_parameter, (data, self.requires_grad, OrderedDict())  # type: ignore[attr-defined]


class _Block(weakref.ref):  # type: ignore[type-arg]
    """A block of device memory, kept until the storage it stands for is gone."""

    __slots__ = ("key", "machine", "taken")
    key: int
    machine: Machine
    taken: tuple[MemoryBlock, str | None] | None  # nothing, where the storage was resized to nothing


_live: dict[int, _Block] = {}  # by the address of the host storage


def _freed(block: _Block) -> None:
    if _live.get(block.key) is block:
        del _live[block.key]
    if block.taken is not None:
        block.machine.free(block.taken)


def wrap(host: torch.Tensor) -> VirtualTensor:
    """A device tensor over `host`, with the same shape, strides and storage."""
    tensor = _make(
        VirtualTensor, host.size(), host.stride(), host.storage_offset(), None, host.dtype, host.layout, _device[0]
    )  # fmt: skip
    tensor._host = host
    return tensor


def hold(host: torch.Tensor, machine: Machine) -> None:
    """Take device memory for the storage of `host`, unless it has some. Raises torch.OutOfMemoryError."""
    if host.layout is not torch.strided:
        raise RuntimeError(f"the virtual GPU has no {host.layout} tensors, only strided ones")
    storage = host.untyped_storage()
    key = storage._cdata
    if key not in _live:
        size = storage.nbytes()
        if not size:
            return
        taken = machine.allocate(size)
        block = _live[key] = _Block(storage, _freed)
        block.key, block.machine, block.taken = key, machine, taken


def rehold(host: torch.Tensor, machine: Machine) -> None:
    """As `hold`, after an operation that may have resized the storage in place."""
    storage = host.untyped_storage()
    block = _live.get(storage._cdata)
    if block is None:
        hold(host, machine)
    elif (size := storage.nbytes()) != (0 if block.taken is None else block.taken[0].requested):
        taken = machine.allocate(size) if size else None
        if block.taken is not None:
            machine.free(block.taken)
        block.taken = taken


def follow(tensor: VirtualTensor) -> None:
    """After an operation that may resize or restride in place: give the tensor the shape of its host tensor."""
    host = tensor._host
    if (tensor.shape, tensor.stride(), tensor.storage_offset()) != (host.shape, host.stride(), host.storage_offset()):
        _data.__set__(tensor, wrap(host.detach()))


def live() -> tuple[int, int]:
    """How many blocks of device memory are held, and their bytes."""
    blocks = list(_live.values())
    return len(blocks), sum(block.taken[0].size for block in blocks if block.taken is not None)


def held() -> list[tuple[MemoryBlock, str | None]]:
    """The blocks that tensors hold now, each with the line that allocated it, where it was noted."""
    return [block.taken for block in list(_live.values()) if block.taken is not None]


def address_of(tensor: torch.Tensor) -> int | None:
    """Where in the card's memory a device tensor's storage lies; None where it has none."""
    host = getattr(tensor, "_host", None)
    block = _live.get(host.untyped_storage()._cdata) if host is not None and host.layout is torch.strided else None
    return block.taken[0].address if block is not None and block.taken is not None else None
