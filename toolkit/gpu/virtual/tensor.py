# mypy: allow-untyped-calls, no-warn-return-any, no-warn-unused-ignores
# (PyTorch's extension points carry no types.)
"""The tensor of the virtual GPU: its device is `vgpu:0`, and a host tensor, `_host`, holds its values.

Views of a device tensor share the storage of its host tensor. A block of device memory is allocated exactly as long as that
storage exists (see `lifetimes`). `dispatch` runs the operations.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from toolkit.core.signals import signals_deferred
from toolkit.gpu.virtual.allocator.blocks import Block as MemoryBlock
from toolkit.gpu.virtual.lifetimes import Tie, lock, queue, settle
from toolkit.gpu.virtual.threads import finish

if TYPE_CHECKING:
    from toolkit.gpu.virtual.machine import Machine, Taken

_make = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
_data: Any = torch.Tensor.data
_setitem = torch.Tensor.__setitem__
OWN = ("_host", "_made_by")  # attributes that are not the user's
_device: torch.device | None = None  # torch.device("vgpu", 0), once `register` has run


class VirtualTensor(torch.Tensor):
    """A tensor on the virtual GPU. PyTorch operations on `torch.device("vgpu")` create them; user code never does."""

    _host: torch.Tensor
    _made_by: int  # the autograd node whose backward pass made it, by its sequence number
    run: Callable[..., Any]  # `dispatch` sets it to `dispatch.run`

    # Functions of torch treat it as an ordinary tensor: no Python runs between the call and the dispatcher.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        for other in types:  # a wrapper class of the user handles the operation; nested tensors are refused
            if not issubclass(other, VirtualTensor) and other.__name__ != "NestedTensor":
                return NotImplemented
        try:
            return VirtualTensor.run(func, args, kwargs or {})
        except torch.OutOfMemoryError as error:
            finish(error)
            raise

    def __setitem__(self, key: Any, value: Any) -> None:
        """Assign; like CUDA, copy a number from a one-element tensor on the host."""
        if isinstance(value, bool | int | float | complex | np.generic):
            value = torch.tensor(value, dtype=self.dtype, device="cpu")
        _setitem(self, key, value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Print like a CUDA tensor, with the copies that printing one causes."""
        if self._host.is_meta:
            return f"tensor(..., device='{self.device}', size={tuple(self.shape)}, dtype={self.dtype}, sizes only)"
        torch._tensor_str._str(self)  # type: ignore[attr-defined]  # copies each number that it reads
        text = torch._tensor_str._str(self._host.detach())[:-1]  # type: ignore[attr-defined]
        text += f", device='{self.device}'"
        if self.grad_fn is not None:
            text += f", grad_fn=<{type(self.grad_fn).__name__}>"
        elif self.requires_grad:
            text += ", requires_grad=True"
        return f"{text})"

    def __format__(self, spec: str) -> str:
        if self.dim() == 0:
            return format(self.detach().item(), spec)
        return object.__format__(self, spec)

    def __getstate__(self) -> dict[str, Any] | None:
        """Return the attributes that the user set, which are pickled with the values."""
        return {name: value for name, value in self.__dict__.items() if name not in OWN} or None

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
        """Do nothing: memory is not reused by another stream while the host tensor exists."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.numpy()

    def __coerce_same_metadata_as_tangent__(self, meta: Any, expected_type: Any = None) -> VirtualTensor:
        """Return the tensor as a gradient for a backward pass of AOTAutograd, which has traced it as an ordinary tensor."""
        return self

    def __dlpack_device__(self) -> Any:  # type: ignore[override]
        raise BufferError(
            f"only PyTorch can read the memory of the virtual GPU, {self.device}. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __dlpack__(self, **options: Any) -> Any:
        return self.__dlpack_device__()

    def __copy__(self) -> torch.Tensor:
        """Return a tensor that shares the storage, as `copy.copy` does for any tensor."""
        return torch.Tensor._make_subclass(type(self), self, self.requires_grad)

    def __deepcopy__(self, memo: dict[Any, Any]) -> torch.Tensor:
        """Copy the storage once for all tensors that share it, as `copy.deepcopy` does for any tensor."""
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol")
        with torch.no_grad():
            copied = (self.clone() if self._host.is_meta else self._in_copied_storage(memo)).requires_grad_(self.requires_grad)
            if self.grad is not None:
                copied.grad = self.grad.__deepcopy__(memo)  # type: ignore[attr-defined]
        for name, value in self.__dict__.items():
            if name not in OWN:
                setattr(copied, name, copy.deepcopy(value, memo))
        memo[id(self)] = copied
        return copied

    def _in_copied_storage(self, memo: dict[Any, Any]) -> torch.Tensor:
        """Return a tensor like this one in a copy of its storage, which `memo` keeps for other tensors."""
        storage = self.untyped_storage()
        storages = memo.setdefault("vgpu", {})
        if storage._cdata not in storages:
            storages[storage._cdata] = wrap(torch.empty(0, dtype=torch.uint8).set_(storage)).clone()
        made = self.new_empty([])
        return made.set_(storages[storage._cdata].untyped_storage(), self.storage_offset(), self.size(), self.stride())


class _Block(Tie):
    """A tie to a host storage, with the block of device memory that is freed with it."""

    __slots__ = ("key", "machine", "taken")
    key: int
    machine: Machine
    taken: Taken | None  # None if the storage was resized to 0 bytes, or made by the replay of a graph

    def end(self) -> None:
        del _live[self.key]
        if self.taken is not None:
            self.machine.free(self.taken)


_live: dict[int, _Block] = {}  # by the address of the host storage


def register(device: torch.device) -> None:
    """Set the device of all virtual tensors, once its name is known to PyTorch."""
    global _device
    _device = device


def wrap(host: torch.Tensor) -> VirtualTensor:
    """Return a device tensor over `host`, with the same shape, strides and storage."""
    tensor = _make(VirtualTensor, host.size(), host.stride(), host.storage_offset(), None, host.dtype, host.layout, _device)
    tensor._host = host
    return tensor


def hold(host: torch.Tensor, machine: Machine) -> None:
    """Allocate device memory for the storage of `host`, unless it has some.

    Raises torch.OutOfMemoryError if there is not enough, and RuntimeError if the tensor is sparse.
    """
    if host.layout is not torch.strided:
        raise RuntimeError("the virtual GPU does not support this operation, whose result is a sparse tensor")
    storage = host.untyped_storage()
    with signals_deferred, lock:
        settle()  # a storage that is gone may have had the same address
        if storage._cdata not in _live and (size := storage.nbytes()):
            taken = machine.allocate(size)
            block = _live[storage._cdata] = _Block(storage, queue)
            block.key, block.machine, block.taken = storage._cdata, machine, taken


def take_over(host: torch.Tensor, old: torch.Tensor, machine: Machine) -> None:
    """Give the device memory of `old` to `host`, which CUDA would write in place of it. Both have the same size.

    The host keeps two tensors. If `old` should be used again after all, its values are right.
    """
    storage = host.untyped_storage()
    with signals_deferred, lock:
        settle()
        block = _live.get(old.untyped_storage()._cdata)
        if block is None or block.taken is None or storage._cdata in _live or storage.nbytes() != block.taken[0].requested:
            return
        new = _live[storage._cdata] = _Block(storage, queue)
        new.key, new.machine, new.taken, block.taken = storage._cdata, machine, block.taken, None


def rehold(host: torch.Tensor, machine: Machine) -> None:
    """Like `hold`, for a storage that an operation may have resized in place."""
    storage = host.untyped_storage()
    with signals_deferred, lock:
        settle()
        block = _live.get(storage._cdata)
        if block is None:
            hold(host, machine)
        elif (size := storage.nbytes()) != (0 if block.taken is None else block.taken[0].requested):
            taken = machine.allocate(size) if size else None
            if block.taken is not None:
                machine.free(block.taken)
            block.taken = taken


def follow(tensor: VirtualTensor) -> None:
    """Give the tensor the shape of its host tensor, after an operation that may have changed it in place."""
    host = tensor._host
    if (tensor.shape, tensor.stride(), tensor.storage_offset()) != (host.shape, host.stride(), host.storage_offset()):
        _data.__set__(tensor, wrap(host.detach()))


def live() -> tuple[int, int]:
    """Return the number of allocated blocks of device memory, and their bytes."""
    settle()
    blocks = list(_live.values())
    return len(blocks), sum(block.taken[0].size for block in blocks if block.taken is not None)


def held() -> list[tuple[MemoryBlock, str | None]]:
    """Return the allocated blocks, each with the line that allocated it, or None if it was not recorded."""
    settle()
    return [block.taken for block in list(_live.values()) if block.taken is not None]


def address_of(tensor: torch.Tensor) -> int | None:
    """Return the device address of a tensor's storage; None if it has no device memory."""
    block = block_of(tensor)
    return None if block is None else block.address


def block_of(tensor: torch.Tensor) -> MemoryBlock | None:
    """Return the block of device memory that holds a tensor's storage; None if it has no device memory."""
    settle()
    host = getattr(tensor, "_host", None)
    block = _live.get(host.untyped_storage()._cdata) if host is not None and host.layout is torch.strided else None
    return block.taken[0] if block is not None and block.taken is not None else None
