# mypy: allow-untyped-calls, no-warn-return-any, no-warn-unused-ignores
# (PyTorch's extension points carry no types.)
"""Compute operations on host tensors, including those for which the CPU has no kernel.

The CPU lacks fused kernels (attention, recurrent cells) and some dtypes (a histogram of integers). `HOSTS` holds replacements
by operation name. If a dtype is missing, the operation runs in a wider one. Integers have that only where CUDA supports them;
for matrix products of integers, which only the CPU supports, CUDA's error is raised.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from toolkit.gpu.virtual import sizes_only as sizes
from toolkit.gpu.virtual.operands import mapped, tensors_in

Tensor = torch.Tensor


def _lstm_cell(
    x: Tensor, h: Tensor, cell: Tensor, x_bias: Tensor | None = None, h_bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Map gates [B, 4H] of input and state, and cell [B, H], to state, cell, and activated gates for the gradient."""
    i, f, g, o = _sum(x, h, x_bias, h_bias).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new = f * cell + i * g
    return o * new.tanh(), new, torch.cat([i, f, g, o], 1)


def _lstm_cell_backward(
    grad_h: Tensor | None, grad_c: Tensor | None, cell: Tensor, new: Tensor, gates: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    i, f, g, o = gates.chunk(4, 1)
    squashed = new.tanh()
    grad_h = torch.zeros_like(new) if grad_h is None else grad_h
    grad = grad_h * o * (1 - squashed**2) + (0 if grad_c is None else grad_c)
    parts = (grad * g * i * (1 - i), grad * cell * f * (1 - f), grad * i * (1 - g**2), grad_h * squashed * o * (1 - o))
    grads = torch.cat(parts, 1)
    return grads, grad * f, grads.sum(0) if has_bias else None


def _gru_cell(
    x: Tensor, h: Tensor, state: Tensor, x_bias: Tensor | None = None, h_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Map gates [B, 3H] of input and state, and state [B, H], to the new state and a workspace [B, 5H] for the gradient."""
    (xr, xz, xn), (hr, hz, hn) = _sum(x, x_bias).chunk(3, 1), _sum(h, h_bias).chunk(3, 1)
    r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
    n = (xn + r * hn).tanh()
    return n + z * (state - n), torch.cat([r, z, n, state, hn], 1)


def _gru_cell_backward(grad: Tensor, saved: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    r, z, n, state, hn = saved.chunk(5, 1)
    grad_z, grad_n = grad * (state - n) * z * (1 - z), grad * (1 - z) * (1 - n**2)
    grad_r = grad_n * hn * r * (1 - r)
    grad_x, grad_h = torch.cat([grad_r, grad_z, grad_n], 1), torch.cat([grad_r, grad_z, grad_n * r], 1)
    biases = (grad_x.sum(0), grad_h.sum(0)) if has_bias else (None, None)
    return grad_x, grad_h, grad * z, *biases


def _sum(*tensors: Tensor | None) -> Tensor:
    return torch.stack(torch.broadcast_tensors(*[x for x in tensors if x is not None])).sum(0)


def _roomy(kernel: Any) -> Callable[..., Any]:
    """Return a unique kernel whose results keep storage for all elements, as on CUDA, where they are sliced to size."""

    def unique(source: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = kernel(source, *args, **kwargs)
        for part, size in ((found[0], source.element_size()), *((x, 8) for x in found[2:])):
            if part.numel() and source.dtype != torch.bool and not part.is_meta:
                part.untyped_storage().resize_(size * source.numel())
        return found

    return unique


def _embedding_bag(kernel: Any) -> Callable[..., Any]:
    """Return an embedding bag that, as on CUDA, gives the bag of each index, and the indices of maxima only for maxima."""

    def bags(
        weight: Tensor, indices: Tensor, offsets: Tensor, scale_grad_by_freq: bool = False, mode: int = 0,
        sparse: bool = False, per_sample_weights: Tensor | None = None, include_last_offset: bool = False,
        padding_idx: int = -1,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        out, _, sizes, maxima = kernel(
            weight, indices, offsets, scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset, padding_idx
        )
        bag_of = indices.new_empty(indices.shape)
        if not indices.is_meta:
            starts = offsets[:-1] if include_last_offset else offsets
            lengths = torch.diff(starts, append=starts.new_tensor([len(indices)]))
            bag_of.copy_(torch.arange(len(starts)).repeat_interleave(lengths))
        return out, bag_of, sizes, maxima if mode == 2 else maxima.new_empty(0)

    return bags


HOSTS: dict[str, Callable[..., Any]] = {  # replacements by operation name, with the operation's parameters
    # Below the dispatcher PyTorch no longer resolves lazily conjugated, negated and zero tensors: compute them at once.
    "_conj": torch.conj_physical,
    "_unique2": _roomy(torch.ops.aten._unique2.default),
    "unique_consecutive": _roomy(torch.ops.aten.unique_consecutive.default),
    "_embedding_bag": _embedding_bag(torch.ops.aten._embedding_bag.default),
    "_embedding_bag_forward_only": _embedding_bag(torch.ops.aten._embedding_bag_forward_only.default),
    "_neg_view": torch.neg,
    "_efficientzerotensor": torch.zeros,
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
}

# The CPU has kernels for these, and CUDA has none (native_functions.yaml of torch 2.11 to 2.15).
_CPU_ONLY = {
    "histogram", "_histogramdd_bin_edges", "_histogramdd_from_bin_cts", "_histogramdd_from_bin_tensors",
    "_upsample_lanczos2d_aa",
}  # fmt: skip
_OF_INTEGERS = {"histc", "median", "nanmedian"}  # operations that take integers or booleans on CUDA, and not on the CPU
# Operations that take integers on the CPU, and not on CUDA, with the names of their kernels there (cuda/Blas.cpp).
_NOT_OF_INTEGERS = {
    "mm": "addmm_cuda", "addmm": "addmm_cuda", "addmm_": "addmm_cuda", "bmm": "baddbmm_cuda", "baddbmm": "baddbmm_cuda",
    "baddbmm_": "baddbmm_cuda", "mv": "addmv_impl_cuda", "addmv": "addmv_impl_cuda", "addmv_": "addmv_impl_cuda", "dot": "dot",
    "vdot": "dot",
}  # fmt: skip
_NAMES = {
    torch.bool: "Bool", torch.uint8: "Byte", torch.int8: "Char", torch.int16: "Short", torch.int32: "Int", torch.int64: "Long",
}  # fmt: skip
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}


def call_of(func: Any) -> Callable[..., Any]:
    """Return the function that computes `func` on host tensors. Raises NotImplementedError if CUDA has no kernel for it."""
    name = func._schema.name.removeprefix("aten::")
    if name in _CPU_ONLY:
        raise NotImplementedError(
            f"Could not run '{func.name()}' with arguments from the 'vgpu' backend: CUDA has no kernel for it"
        )
    stand_in = HOSTS.get(name) if not func._overloadname.endswith("out") else None
    kernel = stand_in or (func._op if name not in _NOT_OF_INTEGERS else _product(func._op, _NOT_OF_INTEGERS[name]))
    if name.startswith("special_"):  # in place of a tensor, PyTorch passes the number that the caller gave
        kernel = func.overloadpacket

    def call(*args: Any, **kwargs: Any) -> Any:
        if sizes.seen and sizes.absent(args, kwargs):
            return sizes.run(func, kernel, args, kwargs)
        try:
            return kernel(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            # The CPU has no kernel for this dtype. Any other error is the caller's.
            if "not implemented for" not in str(error) or func._schema.is_mutable:
                raise
            narrow = next(tensors_in(args)).dtype
            if narrow in _NAMES and name not in _OF_INTEGERS:
                raise
            return _in_wider_type(kernel, narrow, args, kwargs)

    return call


def _product(kernel: Callable[..., Any], cuda: str) -> Callable[..., Any]:
    """Return a matrix product that refuses integers, as CUDA's kernel `cuda` does. Those without elements run no kernel."""

    def product(*args: Any, **kwargs: Any) -> Any:
        dtype = args[1].dtype
        if dtype in _NAMES and all(x.numel() for x in tensors_in(args)):
            raise NotImplementedError(f"\"{cuda}\" not implemented for '{_NAMES[dtype]}'")
        return kernel(*args, **kwargs)

    return product


def _in_wider_type(kernel: Callable[..., Any], narrow: torch.dtype, args: Any, kwargs: Any) -> Any:
    """Run in the next wider floating-point dtype than `narrow`, and cast results of that dtype back."""
    wide = _WIDER.get(narrow, torch.float32 if narrow.is_floating_point else torch.float64)

    def cast(x: Any, source: torch.dtype, target: torch.dtype) -> Any:
        return x.to(target) if isinstance(x, torch.Tensor) and x.dtype == source else x

    args, kwargs = mapped(lambda x: cast(x, narrow, wide), (args, kwargs))
    return mapped(lambda x: cast(x, wide, narrow), kernel(*args, **kwargs))


_Generator = torch.Generator  # `accelerator` replaces it; PyTorch passes objects of this class to operations
generators: dict[int, weakref.ref[Any]] = {}  # those of the virtual GPU, by the address of the C++ object


def check_generator(x: Any) -> None:
    """Raise RuntimeError, as CUDA does, if an operand is a generator that is not of the virtual GPU."""
    if type(x) is _Generator and x._cdata not in generators:  # type: ignore[attr-defined]
        raise RuntimeError(f"Expected a 'vgpu' device type for generator but found '{x.device.type}'")
