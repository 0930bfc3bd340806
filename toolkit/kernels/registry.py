"""The package's kernels by name: every instance of Kernel that a file of this folder defines. Importing them needs Triton."""

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
    """All of them, by name. Raises DeviceError where there is no Triton."""
    found: dict[str, Kernel] = {}
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.ispkg:  # the tuner
            continue
        try:
            values = vars(importlib.import_module(f"{__package__}.{module.name}")).values()
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            raise DeviceError("the kernels", "Triton isn't installed", "On Linux: pip install triton") from error
        found |= {value.name: value for value in values if isinstance(value, Kernel)}
    return MappingProxyType(found)


def find_kernel(kernel: Kernel | str) -> Kernel:
    """A kernel by its name, or as it is. Raises UnknownNameError (naming the nearest)."""
    if isinstance(kernel, Kernel):
        return kernel
    if kernel not in kernels():
        raise unknown_name("kernel", kernel, kernels())
    return kernels()[kernel]


def find_shape(kernel: Kernel, shape: Shape | str | None) -> Shape:
    """A problem of `kernel`: a Shape, a known one's name, a key ("n=4096 k=4096"); None is the first known one."""
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
