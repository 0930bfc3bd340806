"""The kernels of this package by name: the instances of Kernel in its files. Importing them needs Triton."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

from toolkit.core.errors import DeviceError, unknown_name
from toolkit.kernels.base import Kernel, Shape


@lru_cache(maxsize=1)
def kernels() -> Mapping[str, Kernel]:
    """Return all kernels by name. Raises DeviceError if Triton isn't installed."""
    found: dict[str, Kernel] = {}
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        try:
            values = vars(importlib.import_module(f"{__package__}.{module.name}")).values()
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            raise DeviceError("the kernels", "Triton isn't installed", "On Linux: pip install triton") from error
        found |= {value.name: value for value in values if isinstance(value, Kernel)}
    return MappingProxyType(found)


def find_kernel(kernel: Kernel | str) -> Kernel:
    """Return the kernel with this name; a kernel is returned unchanged. Raises UnknownNameError."""
    if isinstance(kernel, Kernel):
        return kernel
    if kernel not in kernels():
        raise unknown_name("kernel", kernel, kernels())
    return kernels()[kernel]


def find_shape(kernel: Kernel, shape: Shape | str | None) -> Shape:
    """Return a shape of `kernel` from a Shape, a known name, or a key ("n=4096 k=4096"); None gives the first known one."""
    if isinstance(shape, kernel.shape_type):
        return shape
    if shape is None:
        return next(iter(kernel.known.values()))
    if isinstance(shape, str):
        if shape in kernel.known:
            return kernel.known[shape]
        try:
            return kernel.shape_type.from_key(shape)
        except ValueError:
            pass
    raise unknown_name(f"shape of {kernel.name}", shape if isinstance(shape, str) else repr(shape), kernel.known)
