# mypy: allow-untyped-calls, no-warn-return-any, no-warn-unused-ignores
# (PyTorch's extension points carry no types.)
"""The fast path of nn.TransformerEncoder, which computes on nested tensors: rows of all sequences without their padding.

It computes on dense tensors if there is no padding, as the fast path of nn.MultiheadAttention does.

PyTorch's own nested tensors don't keep the Python object of their values, so that `Nested` stands for them here. It can only do
what the fast path does. The functions follow CUDA's (ATen/native/nested and ATen/native/transformers, with their cuda folders).
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F

from toolkit.gpu.virtual.dispatch import NESTED, SPECIAL, plain
from toolkit.gpu.virtual.host_kernels import HOSTS
from toolkit.gpu.virtual.torch_backend.attention import fused

aten, kernels = torch.ops.aten, torch.ops.vgpu
Tensor = torch.Tensor
_SCHEMAS = (
    "remove_padding_(Tensor(a!) self, Tensor padded, Tensor sizes, int[] lengths) -> Tensor(a!)",
    "add_padding_(Tensor(a!) self, Tensor rows, Tensor sizes, int[] lengths, float padding) -> Tensor(a!)",
    "attention_of_rows(Tensor query, Tensor key, Tensor value, Tensor starts, Tensor key_starts, int[] lengths) -> Tensor",
)


class Nested(torch.Tensor):
    """Sequences of several lengths: their rows [sum of lengths, E] on the virtual GPU. Its shape is that with padding."""

    rows: Tensor
    lengths: list[int]
    is_nested = True  # type: ignore[assignment]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is aten.to_padded_tensor.default:
            return _padded(*args, **(kwargs or {}))
        if func is aten._transformer_encoder_layer_fwd.default:
            return _layer(*args, **(kwargs or {}))
        raise RuntimeError(NESTED)


def _nested(rows: Tensor, lengths: list[int]) -> Nested:
    shape = (len(lengths), max(lengths, default=0), rows.size(-1))
    made = torch.Tensor._make_wrapper_subclass(Nested, shape, dtype=rows.dtype, device=rows.device)  # type: ignore[attr-defined]
    made.rows, made.lengths = rows, lengths
    return made


def _starts(lengths: list[int], width: int = 1) -> list[int]:
    """Return where each sequence begins, and the end of the last one, in rows of `width` elements."""
    return [width * n for n in itertools.accumulate(lengths, initial=0)]


def _from_mask(t: Tensor, mask: Tensor, mask_check: bool = True) -> Nested:
    """Return the rows of `t` [N, L, E] where `mask` [N, L] is true, which must come first (NestedTensorMath.cpp)."""
    n, length, width = t.shape
    end = torch.zeros(n, 1, dtype=mask.dtype, device=mask.device)
    nums = torch.cat([mask, end], 1).to(torch.int32).argmin(1)
    sums = mask.cumsum(1).select(1, length - 1)
    if mask_check and not torch.equal(sums, nums):
        raise RuntimeError("Mask must be left-aligned without gaps")
    sums = sums.reshape(n, 1)
    widths = torch.full_like(sums, width)
    sizes = torch.cat([sums, widths], 1).cpu()
    lengths = sizes[:, 0].tolist()
    if t._host.is_meta and not any(lengths):  # type: ignore[attr-defined]
        raise RuntimeError(
            "sizes only: the lengths of the sequences depend on values that were not computed. nn.TransformerEncoder needs "
            "enable_nested_tensor=False"
        )
    if t.dtype not in (torch.float32, torch.float16) or not all(lengths):
        raise RuntimeError(f"{NESTED} Found {t.dtype} and sequences of {lengths} tokens; it needs fp32 and no empty sequence")
    rows = t.new_empty(sum(lengths), width)
    described = torch.tensor([*sizes.flatten().tolist(), *t.shape, *_starts(lengths, width)])
    return _nested(kernels.remove_padding_(rows, t, described.to(t.device, torch.int32, True, True), lengths), lengths)


def _padded(self: Nested, padding: float, output_size: list[int] | None = None) -> Tensor:
    """Return [N, L, E] (NestedTensorTransformerFunctions.cpp). Without a size, the rows of a sequence are padded as one."""
    n, length, width = self.shape
    if output_size is not None:
        length = output_size[1]
        if (n, width) != (output_size[0], output_size[2]) or length < self.shape[1]:
            raise RuntimeError(f"to_padded_tensor: {tuple(self.shape)} can't be padded to {tuple(output_size)}")
    out = self.rows.new_empty(n, length, width)
    sizes = [(rows * width,) if output_size is None else (rows, width) for rows in self.lengths]
    described = torch.tensor([*_starts(self.lengths, width), *itertools.chain(*sizes)])
    return kernels.add_padding_(out, self.rows, described.to(out.device, torch.int32), self.lengths, padding)


def _layer(
    src: Any, embed_dim: int, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor, proj_bias: Tensor,
    use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Tensor, norm_bias_1: Tensor, norm_weight_2: Tensor,
    norm_bias_2: Tensor, ffn_weight_1: Tensor, ffn_bias_1: Tensor, ffn_weight_2: Tensor, ffn_bias_2: Tensor,
    mask: Tensor | None = None, mask_type: int | None = None,
) -> Any:  # fmt: skip
    """Run one layer of the encoder (transformers/transformer.cpp)."""
    if mask is not None:
        raise RuntimeError("NestedTensor with mask is not supported yet")

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), weight, bias, eps)

    projections = qkv_weight, qkv_bias, proj_weight, proj_bias
    rows = src.rows if isinstance(src, Nested) else src.view(-1, embed_dim)
    x = norm(rows, norm_weight_1, norm_bias_1) if norm_first else rows
    if isinstance(src, Nested):
        x = _attention(x, src.lengths, num_heads, *projections).add_(rows)
    else:
        x = _dense_attention(x.view(src.shape), num_heads, *projections).view(rows.shape).add_(rows)
    if not norm_first:
        x = norm(x, norm_weight_1, norm_bias_1)
    before = x
    if norm_first:
        x = norm(x, norm_weight_2, norm_bias_2)
    x = aten._addmm_activation(ffn_bias_1, x, ffn_weight_1.t(), use_gelu=use_gelu)
    x = torch.addmm(ffn_bias_2, x, ffn_weight_2.t()).add_(before)
    x = x if norm_first else norm(x, norm_weight_2, norm_bias_2)
    return _nested(x, src.lengths) if isinstance(src, Nested) else x.view(src.shape)


def _dense_attention(
    x: Tensor, heads: int, qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor, proj_bias: Tensor
) -> Tensor:  # fmt: skip
    """Attend within sequences [N, L, E] without a mask (native_multi_head_attention_cuda in attention.cu)."""
    projected = F.linear(x, qkv_weight, qkv_bias)
    query, key, value = (_heads(part, heads) for part in projected.chunk(3, -1))
    out = F.scaled_dot_product_attention(query, key, value)
    return F.linear(out.transpose(1, 2).reshape(x.shape), proj_weight, proj_bias)


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.view(x.size(0), -1, heads, x.size(-1) // heads).transpose(1, 2)


def _is_fused(x: Tensor, heads: int, mask: Tensor | None) -> bool:
    """Return whether CUDA attends to dense sequences `x` with one fused kernel."""
    width = x.size(-1) // heads
    if mask is not None or width % 8 or not x.is_contiguous():
        return False
    query = _heads(x, heads)
    return fused(query, query, query, None, 0.0, False, False)


def _dense_layer(func: Any) -> Any:
    """Return the handler of a layer of the encoder for dense sequences. Without a fused kernel, it is one operation."""
    other = plain(func)

    def layer(args: Any, kwargs: Any) -> Any:
        mask = args[18] if len(args) > 18 else None
        return _layer(*args) if _is_fused(args[0], args[2], mask) else other(args, kwargs)

    return layer


def _dense_heads(func: Any) -> Any:
    """Return the handler of the fast path of nn.MultiheadAttention, which is one operation without a fused kernel."""
    other = plain(func)

    def attend(args: Any, kwargs: Any) -> Any:
        x, mask, weights = args[0], args[9] if len(args) > 9 else None, args[10] if len(args) > 10 else True
        if x is args[1] is args[2] and not weights and _is_fused(x, args[4], mask):
            return _dense_attention(x, *args[4:9]), None
        return other(args, kwargs)

    return attend


def _attention(
    x: Tensor, lengths: list[int], heads: int, qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor, proj_bias: Tensor
) -> Tensor:  # fmt: skip
    """Attend within each sequence with the memory-efficient kernel (native_multi_head_attention_cuda in attention.cu)."""
    width = x.size(1) // heads
    if x.dtype != torch.float32 or width % 8 or not torch.backends.cuda.mem_efficient_sdp_enabled():
        raise RuntimeError(f"{NESTED} Found {x.dtype} and heads of {width}; it needs fp32 and heads of a multiple of 8")
    query, key, value = (part.view(-1, heads, width) for part in F.linear(x, qkv_weight, qkv_bias).chunk(3, -1))
    starts, key_starts = (torch.tensor(_starts(lengths), dtype=torch.int32).to(x.device) for _ in range(2))
    attended = kernels.attention_of_rows(query, key, value, starts, key_starts, lengths)
    del starts, key_starts
    return F.linear(attended.view(x.shape), proj_weight, proj_bias)


# ---- kernels on the host


def _remove_padding_(out: Tensor, padded: Tensor, sizes: Tensor, lengths: list[int]) -> Tensor:
    if not out.is_meta and not padded.is_meta:
        out.copy_(torch.cat([part[:n] for part, n in zip(padded, lengths, strict=True)]))
    return out


def _add_padding_(out: Tensor, rows: Tensor, sizes: Tensor, lengths: list[int], padding: float) -> Tensor:
    if not out.is_meta and not rows.is_meta:
        out.fill_(padding)
        for target, part in zip(out, rows.split(lengths), strict=True):
            target[: len(part)] = part
    return out


def _attention_of_rows(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, key_starts: Tensor, lengths: list[int]
) -> Tensor:  # fmt: skip
    if query.is_meta:
        return query.new_empty(query.shape)
    parts = zip(*(x.transpose(0, 1).split(lengths, 1) for x in (query, key, value)), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*part) for part in parts], 1).transpose(0, 1).contiguous()


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(NESTED)


def register() -> list[torch.library.Library]:
    """Register the operations of the fast path, and refuse others. The caller keeps the libraries alive."""
    library, everything = torch.library.Library("vgpu", "FRAGMENT"), torch.library.Library("_", "IMPL")
    everything.fallback(_refuse, "NestedTensorPrivateUse1")
    for schema in _SCHEMAS:
        library.define(schema)
    HOSTS["vgpu::remove_padding_"] = _remove_padding_
    HOSTS["vgpu::add_padding_"] = _add_padding_
    HOSTS["vgpu::attention_of_rows"] = _attention_of_rows
    on_cpu = torch._C.DispatchKey.CPU  # type: ignore[attr-defined]
    SPECIAL["_transformer_encoder_layer_fwd"], SPECIAL["_native_multi_head_attention"] = _dense_layer, _dense_heads
    SPECIAL["_nested_tensor_from_mask"] = lambda func: lambda args, kwargs: _from_mask(*args, **kwargs)
    SPECIAL["_nested_tensor_from_mask_left_aligned"] = lambda func: lambda args, kwargs: func._op_dk(on_cpu, *args, **kwargs)
    SPECIAL["_nested_view_from_jagged"] = lambda func: _refuse
    return [library, everything]
