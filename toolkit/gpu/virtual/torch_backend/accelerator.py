# mypy: allow-untyped-calls, no-warn-return-any, no-warn-unused-ignores
# (PyTorch's extension points carry no types.)
"""Classes and functions of PyTorch that serve any device, for the virtual GPU: torch.Stream, torch.Event, torch.Generator and
torch.accelerator.

PyTorch has no hooks in Python for them. Without a replacement, `torch.Stream("vgpu")` would be the default stream, and an event
would record nothing. Other devices still get PyTorch's own objects.
"""

from __future__ import annotations

import functools
import types
import weakref
from typing import Any, ClassVar

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

from toolkit.gpu.virtual.host_kernels import generators
from toolkit.gpu.virtual.torch_backend import module as vgpu_module
from toolkit.gpu.virtual.torch_backend.memory import index_of

_Stream, _Event = torch.Stream, torch.Event
_Generator = torch.Generator
_FUNCTIONS = (
    "synchronize", "current_stream", "set_stream", "memory_allocated", "max_memory_allocated", "memory_reserved",
    "max_memory_reserved", "memory_stats", "reset_peak_memory_stats", "reset_accumulated_memory_stats", "empty_cache",
    "get_memory_info",
)  # fmt: skip


class _Meta(type):
    """Makes a class stand for PyTorch's own and that of torch.vgpu: calling it returns an object of one of them.

    A subclass of it is a subclass of PyTorch's own.
    """

    both: ClassVar[tuple[type, type]]

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> Any:
        originals = tuple(base.both[0] if isinstance(base, _Meta) else base for base in bases)
        if originals == bases:
            return super().__new__(mcs, name, bases, namespace, **options)
        return types.new_class(name, originals, options, lambda body: body.update(namespace))

    def __call__(cls, device: Any = None, **options: Any) -> Any:
        original, virtual = cls.both
        wanted = torch.accelerator.current_accelerator() if device is None else torch.device(device)
        if wanted is not None and wanted.type == "vgpu" and "stream_id" not in options:
            return virtual(**options) if device is None else virtual(device=device, **options)
        return original(**options) if device is None else original(device, **options)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.both)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.both)


class Stream(metaclass=_Meta):
    """torch.Stream, which for the virtual GPU is torch.vgpu.Stream."""

    both = (_Stream, vgpu_module.Stream)


class Event(metaclass=_Meta):
    """torch.Event, which for the virtual GPU is torch.vgpu.Event."""

    both = (_Event, vgpu_module.Event)


class _GeneratorMeta(type(_Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Generator)


class Generator(_Generator, metaclass=_GeneratorMeta):
    """torch.Generator, which also accepts `device="vgpu"`. Its numbers are those of a CPU generator."""

    def __new__(cls, device: Any = "cpu") -> Any:
        if torch.device(device).type != "vgpu":
            return _Generator(device)
        index_of(device)
        self = super().__new__(cls, "cpu")  # type: ignore[call-arg]
        address = self._cdata  # type: ignore[attr-defined]
        # As in `pinned`, the callback consists of C functions only.
        generators[address] = weakref.ref(self, functools.partial(generators.pop, address))
        return self

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("vgpu", 0)

    def clone_state(self) -> Generator:
        """Return another generator with the same state."""
        return Generator("vgpu").set_state(self.get_state())

    def __reduce__(self) -> Any:
        return Generator, ("vgpu",), super().__reduce__()[2]  # type: ignore[index]


def install() -> None:
    """Replace the classes and functions of torch, in all threads of this process."""
    torch.Stream, torch.Event, torch.Generator = Stream, Event, Generator  # type: ignore[misc, assignment]
    # Compiled code for the CPU calls some of these functions, and torch.compile must not compile them in turn. As
    # torch.compiler.disable, which would import the compiler.
    never = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for module in (torch.accelerator, torch.accelerator.memory):
        for name in _FUNCTIONS:
            if hasattr(module, name):
                setattr(module, name, getattr(vgpu_module, name))
                set_code_exec_strategy(getattr(vgpu_module, name).__code__, never)
