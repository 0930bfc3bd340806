"""Look up the effects of an operation on a CUDA device, and whether CUDA has a kernel for it.

The virtual GPU calls `effects` for every operation. By default an operation is one kernel that reads its operands and writes
its results; views and allocations have no effects. The modules that are imported below register rules for all others. Effects
depend on shapes, strides and dtypes, and on values only if CUDA's choice depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import toolkit.gpu.virtual.effects.attention
import toolkit.gpu.virtual.effects.data_dependent
import toolkit.gpu.virtual.effects.decompositions
import toolkit.gpu.virtual.effects.recurrent
import toolkit.gpu.virtual.effects.sparse  # noqa: F401  all five register their rules
from toolkit.gpu.virtual.effects.effect import Effect, first, kernel
from toolkit.gpu.virtual.effects.operations import KERNELS, RULES

_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
_exists = torch._C._dispatch_has_kernel
_KEYS = torch._C.DispatchKey

# CUDA has a kernel for these, which a CPU build of PyTorch does not show (native_functions.yaml of torch 2.11 to 2.13:
# operations with both a CUDA and a composite entry). Most of them are `_foreach_*`, see `decomposes`.
_OWN_KERNEL = {
    "_fused_rms_norm", "mish_backward", "convolution", "addr", "convolution_backward", "_chunk_cat", "_grouped_mm",
    "linalg__powsum", "split_with_sizes_copy",
}  # fmt: skip
# The CPU has a kernel for these, CUDA has none.
_NO_KERNEL = {"_stack"}
# These take no tensor on the host, not even one without dimensions (native_functions.yaml: no `device_check: NoCheck`).
SAME_DEVICE = {
    "index_select", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "take",
    "index_add", "index_add_", "index_copy", "index_copy_", "nll_loss_forward", "nll_loss2d_forward", "searchsorted",
    "bucketize",
}  # fmt: skip
# These run nothing on the device.
_NOTHING = {
    "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted", "resize_", "resize_as_", "set_",
    "_resize_output_", "is_pinned", "_pin_memory", "record_stream", "_has_compatible_shallow_copy_type", "is_same_size",
    "_fused_sdp_choice", "_nested_tensor_size", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "detach_",
}  # fmt: skip
# Minimum times of kernels that take longer than an elementwise one, as multiples of `kernel_floor_ns` (measured on an H200).
_FLOORS = {
    "sum": 2.0, "mean": 2.0, "max": 2.0, "min": 2.0, "amax": 2.0, "amin": 2.0, "argmax": 3.0, "argmin": 3.0, "prod": 2.0,
    "std": 2.5, "var": 2.5, "norm": 2.0, "linalg_vector_norm": 2.0, "_softmax": 1.5, "_log_softmax": 1.5,
    "native_layer_norm": 2.8, "_fused_rms_norm": 2.8, "index_select": 1.3, "gather": 1.3, "index_copy_": 1.3,
    "logcumsumexp": 2.8, "_cummax_helper": 2.8, "kthvalue": 5.0, "mode": 5.0, "searchsorted": 1.5,
}  # fmt: skip
# These read no more of their first operand than they write: rows of a table, or a range of a cache.
_PICKS = {"index_select", "gather", "take", "index_copy_", "index_add_", "index_fill_", "scatter_", "scatter_add_", "put_"}
# These write their first operand without reading it.
_OVERWRITES = {
    "zero_", "_foreach_zero_", "uniform_", "normal_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_",
    "log_normal_",
}  # fmt: skip

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Sequence[Effect]]
_rules: dict[Any, Rule] = {}


def decomposes(func: Any) -> Any:
    """Return the dispatch key of the composite that CUDA runs for `func`; None if CUDA has a kernel for it.

    `CompositeImplicitAutograd` operations arrive undecomposed in inference mode, and from inside other composites.
    """
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    full = func.name()
    if name.startswith("_foreach_") or name in _OWN_KERNEL:
        return None
    if _has_kernel(full, "CompositeImplicitAutograd") and not _has_kernel(full, "CPU"):
        return _KEYS.CompositeImplicitAutograd  # also if another overload has a rule: repeat_interleave by one number
    if name in RULES:
        return None
    if name in _NO_KERNEL:
        return _KEYS.CompositeExplicitAutograd
    whole = name in _NOTHING or is_view(schema) or schema.is_mutable
    if not whole and not _has_kernel(full, "CPU") and _has_kernel(full, "CompositeExplicitAutogradNonFunctional"):
        return _KEYS.CompositeExplicitAutogradNonFunctional
    if is_view(schema) or not _has_kernel(full, "CompositeExplicitAutograd") or _has_kernel(full, "CPU"):
        return None
    with_tensor = schema.name + ".Tensor"  # `x % 2` wraps the number and calls `x % tensor`: one kernel
    if "Scalar" in schema.overload_name and _exists(with_tensor) and _has_kernel(with_tensor, "CPU"):
        return None
    return _KEYS.CompositeExplicitAutograd


def is_view(schema: Any) -> bool:
    """Return whether all results share memory with an operand that is not written."""
    if schema.name == "aten::_unsafe_view":
        return True
    aliased = [r.alias_info for r in schema.returns]
    return bool(aliased) and all(a is not None and not a.is_write for a in aliased)


def effects(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[Effect]:
    """Return the effects on a CUDA device of `func(*args, **kwargs)`, which returned `out`, in order.

    Tensors whose `is_cpu` is False are on the device. Waits are for the current stream.
    """
    rule = _rules.get(func)
    if rule is None:
        rule = _rules[func] = _classify(func)
    return rule(func, args, kwargs, out)


def _classify(func: Any) -> Rule:
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    special = RULES.get(name)
    if special is not None:
        return lambda func, args, kwargs, out: first(special(args, kwargs, out))
    if name in _NOTHING or is_view(schema) or (not schema.returns and not schema.is_mutable):
        return lambda func, args, kwargs, out: ()
    return _kernels(name, KERNELS.get(name, 1), _FLOORS.get(name, 1.0), schema.is_mutable)


def _kernels(name: str, count: int, floor: float, mutable: bool) -> Rule:
    """Return the rule of `count` kernels that read the operands and write the results; no kernels for empty results."""
    inner = (kernel(name, 0, floor),) * (count - 1)
    picks, overwrites = name in _PICKS, name in _OVERWRITES

    def rule(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sequence[Effect]:
        written = out.nbytes if isinstance(out, torch.Tensor) else _bytes(out)
        if not written and mutable and args:
            written = _bytes(args[0])
        if not written:
            return ()
        sizes = [a.nbytes if isinstance(a, torch.Tensor) else _bytes(a) for a in args]
        moved = written + sum(sizes[1:] if overwrites else sizes)
        if picks:
            moved = 2 * (min(filter(None, sizes), default=written) if mutable else written)
        return (Effect("kernel", 0, name, -1, 0.0, moved, "fp32_flops", floor), *inner)

    return rule


def _bytes(x: Any) -> int:
    """Return the bytes of a tensor, or of all tensors in a tuple or list."""
    if isinstance(x, torch.Tensor):
        return x.nbytes
    if isinstance(x, tuple | list):
        return sum(_bytes(y) for y in x)
    return 0
