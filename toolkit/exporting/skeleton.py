"""Converts a model without its weights to plain data and back: the description of the model in a package's manifest."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from torch import nn

from toolkit.core.distributed import WHOLE, Shard
from toolkit.core.errors import ModelError, ToolkitError, kind_of
from toolkit.core.units import dtype_name
from toolkit.gpu.device import Device
from toolkit.loading.checkpoint import find_dtype
from toolkit.models import ARCHITECTURES
from toolkit.models.layers import Joined
from toolkit.models.model import CausalLM
from toolkit.models.places import set_scheme
from toolkit.weights.packed import PackedMatrix
from toolkit.weights.schemes import find_scheme


def to_plain(model: CausalLM) -> dict[str, Any]:
    """Return the architecture, config, dtype, part and schemes of a model. Raises ModelError for other libraries' models."""
    name = architecture_of(model)
    joined = any(len(group) > 1 for module in model.modules() if isinstance(module, Joined) for group in module.groups)
    return {
        "architecture": name,
        "config": dataclasses.asdict(model.config),
        "dtype": dtype_name(model.dtype),
        "schemes": _schemes(model),
        "joined": joined,
        **({} if model.shard == WHOLE else {"shard": [model.shard.rank, model.shard.ranks], "block": model.shard.block}),
    }


def architecture_of(model: object) -> str:
    """Return the name of a model's architecture. Raises ModelError if it isn't one of the toolkit's own models."""
    names = [name for name, module in ARCHITECTURES.items() if module.Model is type(model)]
    if not names:
        found = "it isn't one of the toolkit's own models"
        raise ModelError(f"exporting {kind_of(model)}", found, 'Give a model of tk.load without engine="hf", or a name')
    return names[0]


def from_plain(plain: Mapping[str, Any], device: Device | None, layers: int | None = None) -> CausalLM:
    """Build the model that `to_plain` described, on "meta"; its weights will be loaded onto `device`.

    Raises ModelError if the data describes no valid model, or before building one with another number of `layers`.
    """
    try:
        architecture = ARCHITECTURES[plain["architecture"]]
        config = _dataclass(architecture.Config, plain["config"])
        if layers is not None and config.num_hidden_layers != layers:
            raise ValueError(f"its config has {config.num_hidden_layers:,} layers, and the package {layers:,}")
        dtype = find_dtype(plain["dtype"])
        model = architecture.Model(config, device, dtype, shard_of(plain))
        for name, scheme in plain["schemes"].items():
            set_scheme(model, name, find_scheme(scheme))
        if plain["joined"]:
            for module in list(model.modules()):
                if isinstance(module, Joined):
                    module.join()
    except ToolkitError:
        raise
    except (
        LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError, AssertionError, StopIteration,
    ) as error:  # fmt: skip
        found = f"it can't be built ({type(error).__name__}: {error!s:.160})"
        raise ModelError("the model in a package's manifest", found, "Export the model again with this version") from error
    return model.requires_grad_(False).eval()


def shard_of(plain: Mapping[str, Any]) -> Shard:
    """Return the part of the model that `to_plain` described."""
    rank, ranks = plain.get("shard", (0, 1))
    return Shard(rank, ranks, plain.get("block", 1))


def shapes_of(model: nn.Module) -> dict[str, list[Any]]:
    """Return [dtype, shape] of every parameter, by name."""
    return {n: [dtype_name(p.dtype), list(p.shape)] for n, p in model.named_parameters()}


def _schemes(model: nn.Module) -> dict[str, str]:
    """Return the scheme of every packed matrix, by its name before it was joined with others."""
    found: dict[str, str] = {}
    inside: dict[str, tuple[str, ...]] = {}
    for path, module in model.named_modules():
        if isinstance(module, Joined):
            for group in module.groups:
                inside[f"{path}.{'_'.join(group)}.weight"] = tuple(f"{path}.{name}.weight" for name in group)
        if isinstance(module, PackedMatrix):
            found |= dict.fromkeys(inside.get(path, (path,)), module.scheme.name)
    return found


def _dataclass(kind: type, values: Any) -> Any:
    """Build a frozen config of `kind` from plain data. Raises TypeError, KeyError or ValueError if the data doesn't fit."""
    hints = typing.get_type_hints(kind)
    names = {field.name for field in dataclasses.fields(kind)}
    if not isinstance(values, Mapping) or set(values) != names:
        raise ValueError(f"{kind.__module__}.{kind.__qualname__} does not have these fields")
    return kind(**{name: _value(hints[name], value) for name, value in values.items()})


def _value(hint: Any, value: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if value is None:
            return None
        hint = next(one for one in typing.get_args(hint) if one is not type(None))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _dataclass(hint, value)
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)[0]
        if not isinstance(value, list | tuple):
            raise TypeError(f"{value!r:.60} is not a list")
        return tuple(_value(inner, one) for one in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise TypeError(f"{value!r:.60} is not of type {getattr(hint, '__name__', hint)}")
    return value
