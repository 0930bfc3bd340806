"""The kernels of this package by name, and shapes and configs of a kernel. Importing the kernels needs Triton."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from toolkit.core.errors import DeviceError, ToolkitError, brief, unknown_name
from toolkit.kernels.base import Config, Kernel, Shape


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
    if not isinstance(kernel, str) or kernel not in kernels():
        raise unknown_name("kernel", kernel, kernels())
    return kernels()[kernel]


def find_shape(kernel: Kernel, shape: Shape | str | None) -> Shape:
    """Return a shape of `kernel` from a Shape, a known name, or a key ("n=4096 k=4096"); None gives the first known one.

    Raises UnknownNameError for an unknown name, and ToolkitError for a key whose sizes or dtype the kernel doesn't support.
    """
    if isinstance(shape, kernel.shape_type):
        return shape
    if shape is None and kernel.known:
        return next(iter(kernel.known.values()))
    if isinstance(shape, str):
        if shape in kernel.known:
            return kernel.known[shape]
        with suppress(ValueError):
            return _supported(kernel, kernel.shape_type.from_key(shape))
    raise unknown_name(f"shape of {kernel.name}", shape if isinstance(shape, str) else repr(shape), kernel.known)


def _supported(kernel: Kernel, shape: Shape) -> Shape:
    """Return a shape that was typed in. Raises ToolkitError if its cost or its configs can't be computed."""
    try:
        kernel.cost(shape)
        configs_of(kernel, shape)
    except ToolkitError:
        raise
    except Exception as error:
        found, do = f"not supported ({type(error).__name__}: {error})", "Give sizes and a dtype like those of its known shapes"
        raise ToolkitError(f"{kernel.name} with {shape.key!r:.300}", found, do) from error
    return shape


def configs_of(kernel: Kernel, shape: Shape, configs: Any = None) -> list[Config]:
    """Return each of `configs` once, by default the kernel's whole space.

    A config of the space with its numbers in another order is returned as it is in the space, because stored timings have its
    text. Raises ToolkitError for anything but configs, and if the space is empty.
    """
    space = space_of(kernel, shape)
    if configs is None and not space:
        raise ToolkitError(f"configs of {kernel.name}", f"space() has none for {shape.key}", "Return at least one from space()")
    same = {frozenset(one.to_dict().items()): one for one in space}
    asked = space if configs is None else _only_configs(kernel, configs)
    return list(dict.fromkeys(same.get(frozenset(one.to_dict().items()), one) for one in asked))


def space_of(kernel: Kernel, shape: Shape) -> list[Config]:
    """Return the kernel's space for a shape. Raises ToolkitError if it holds anything but configs."""
    return _only_configs(kernel, kernel.space(shape))


def _only_configs(kernel: Kernel, configs: Any) -> list[Config]:
    found = list(configs) if isinstance(configs, Iterable) else [configs]
    for one in found:
        if not isinstance(one, Config):
            raise ToolkitError(f"configs of {kernel.name}", f"{brief(one)} is not a Config", "Give a list of Config(...)")
    return found
