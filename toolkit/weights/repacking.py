"""Repack the quantized weights of a checkpoint (GGUF blocks; GPTQ, AWQ and HQQ codes) into the packed layout.

`scheme_of` names the scheme that represents a stored kind exactly, `from_stored` converts the values. The conversion runs
on the device of its inputs without synchronizing, and needs about six bytes of scratch memory per weight, so loaders pass
a bounded number of rows. The block layouts are ggml's `block_q4_0` ... `block_q6_K` (ggml-common.h).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.core.errors import ModelError
from toolkit.weights.packed import pack_codes, pack_scales
from toolkit.weights.schemes import SCHEMES, Scheme
from toolkit.weights.stored import Stored

CODED = ("GPTQ", "AWQ", "HQQ")  # formats of integer codes with scales and zeros, converted by `pack`


def scheme_of(kind: str, bits: int = 4, group: int = 0, columns: int = 0, centred: bool = False) -> Scheme | None:
    """Return the scheme that represents weights stored as `kind` without changing a value, or None if there is none.

    GGUF kinds ("Q4_K", ...) need no other argument. For "GPTQ", "AWQ" and "HQQ", `bits` is the size of a code, `group` the
    number of weights per scale (0 or -1: the whole row of `columns`), and `centred` says that every zero is 2^(bits - 1).
    Codes of 2 to 4 bits map to int4 schemes, centred 8-bit codes to int8. Larger groups repeat their scale.
    """
    if kind in GGUF_KINDS:
        return SCHEMES[GGUF_KINDS[kind].scheme]
    if kind not in CODED or not (bits in (2, 3, 4) or (bits == 8 and centred)):
        return None
    shared = group if group > 0 else columns
    sizes = (128, 64, 32) if bits <= 4 else (128, 32)
    fits = next((size for size in sizes if shared and shared % size == 0 and columns % size == 0), None)
    return None if fits is None else SCHEMES[f"int{4 if bits <= 4 else 8}-g{fits}"]


def from_stored(kind: str, raw: Mapping[str, Tensor], columns: int, scheme: Scheme | None = None) -> dict[str, Tensor]:
    """Convert stored quantized weights to packed parts [rows, ...] on the same device.

    `raw` holds "blocks" (uint8 [rows, bytes per row]) for GGUF kinds, else "codes" [rows, columns] with "scales" and "zeros"
    [rows, groups]. `columns` is the row length; `scheme` is the result of `scheme_of`, required unless codes have 4 bits.
    Dequantized in fp32, GGUF parts equal the values of the gguf package bit for bit, and codes with fp16 scales and zeros
    equal (code - zero) * scale; other dtypes are rounded to fp16. Raises ModelError for an unknown kind or row size.
    """
    if kind in CODED:
        scheme = scheme or scheme_of(kind, 4, columns // raw["scales"].shape[-1], columns)
        if scheme is not None:
            return pack(scheme, raw["codes"], raw["scales"], raw.get("zeros"))
    if kind not in GGUF_KINDS:
        known = ", ".join((*GGUF_KINDS, *CODED))
        raise ModelError(f"weights stored as {kind}", f"rows of {columns:,} have no packed form", f"Use one of {known}")
    layout, rows = GGUF_KINDS[kind], raw["blocks"]
    if columns % layout.weights or rows.shape[-1] != columns // layout.weights * layout.nbytes:
        found = f"{rows.shape[-1]:,} bytes for {columns:,} weights per row; {layout.weights} weights take {layout.nbytes} bytes"
        raise ModelError(f"weights stored as {kind}", found, "Check that the file is complete")
    blocks = rows.unflatten(-1, (-1, layout.nbytes))  # [rows, blocks, bytes]
    codes, fine = layout.read(blocks)
    parts = pack_codes(SCHEMES[layout.scheme], codes.flatten(1))
    return parts | {name: part.flatten(1) for name, part in fine.items()}


def block_of(stored: Stored) -> int:
    """Return how many neighboring weights of a row can't be separated: those of a GGUF block or of a group of codes."""
    if stored.dtype is not None:
        return 1
    if stored.kind in GGUF_KINDS:
        return GGUF_KINDS[stored.kind].weights
    return stored.group if stored.group > 0 else stored.columns


def columns_of(stored: Stored, raw: Mapping[str, Tensor], columns: range) -> dict[str, Tensor]:
    """Return some columns of raw rows of a stored tensor (see `Weights.raw`). They begin and end with a block."""
    if len(columns) == stored.columns:
        return dict(raw)
    widths = {name: part.shape[-1] for name, part in raw.items()}  # elements that hold all columns
    first = {name: columns.start * width // stored.columns for name, width in widths.items()}
    last = {name: columns.stop * width // stored.columns for name, width in widths.items()}
    return {name: part[:, first[name] : last[name]].contiguous() for name, part in raw.items()}


def pack(scheme: Scheme, codes: Tensor, scales: Tensor, offsets: Tensor | None = None) -> dict[str, Tensor]:
    """Pack integer `codes` [rows, in] into the parts of `scheme`, where value = (code - zero) * scale.

    `scales` and zeros (`offsets`) are [rows, in / group], where group is a multiple of the scheme's group: they are rounded
    to fp16 and repeated. Codes are 0 to 2^bits - 1; for int8 schemes 0 to 255, centred at 128, without `offsets`. For schemes
    with minima (value = code * scale - minimum), `offsets` are the minima. Raises ModelError if the groups don't fit.
    """
    columns = codes.shape[-1]
    groups, given = columns // scheme.group, scales.shape[-1]
    if scheme.steps or columns % scheme.multiple or not given or groups % given:
        found = f"{given:,} scales for rows of {columns:,} weights"
        raise ModelError(f"codes packed as {scheme.name}", found, "Choose a scheme whose group divides theirs")
    if scheme.bits == 8:
        codes = (codes.to(torch.int16) - 128).to(torch.int8)

    def fine(values: Tensor) -> Tensor:
        return values.to(torch.float16).repeat_interleave(groups // given, -1, output_size=groups)

    parts = pack_codes(scheme, codes) | {"scales": fine(scales)}
    if offsets is not None and scheme.offset != "centre":
        parts["zeros" if scheme.offset == "zero" else "minima"] = fine(offsets)
    return parts


@dataclass(frozen=True)
class _Layout:
    """A GGUF block type: weights and bytes per block, the scheme that represents it, and the function that reads it."""

    weights: int
    nbytes: int
    scheme: str
    read: Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]  # [rows, blocks, bytes] -> codes and fine parts per block


def _q8_0(blocks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """d | 32 int8: w = d * q."""
    return _int8(blocks[..., 2:]), {"scales": _half(blocks, 0)}


def _q4_0(blocks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """d | 16 bytes: w = d * (q - 8), low nibbles first."""
    return _halves(blocks[..., 2:]), {"scales": _half(blocks, 0)}


def _q4_1(blocks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """d | m | 16 bytes: w = d * q + m."""
    return _halves(blocks[..., 4:]), {"scales": _half(blocks, 0), "minima": -_half(blocks, 2)}


def _q5_0(blocks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """d | 32 fifth bits | 16 bytes: w = d * (q - 16)."""
    return _halves(blocks[..., 6:]) | (_single_bits(blocks[..., 2:6]) << 4), {"scales": _half(blocks, 0)}


def _q5_1(blocks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """d | m | 32 fifth bits | 16 bytes: w = d * q + m."""
    codes = _halves(blocks[..., 8:]) | (_single_bits(blocks[..., 4:8]) << 4)
    return codes, {"scales": _half(blocks, 0), "minima": -_half(blocks, 2)}


def _q4_k(blocks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """d | dmin | 12 bytes of 6-bit scales and minima | 128 bytes: w = (d * scale) * q - (dmin * minimum)."""
    return _halves(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-2), _k_scales(blocks)


def _q5_k(blocks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Like Q4_K, with 32 bytes of fifth bits before the nibbles: bit g of byte j belongs to weight 32 g + j."""
    low = _halves(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)  # [.., 8, 32]
    fifth = blocks[..., None, 16:48] >> _shifts(blocks, 8, 1)[:, None] & 1
    return (low | (fifth << 4)).flatten(-2), _k_scales(blocks)


def _q6_k(blocks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """128 bytes of low nibbles | 64 of high pairs | 16 int8 scales | d: w = (d * scale) * (q - 32), in two halves of 128."""
    low = _halves(blocks[..., :128].unflatten(-1, (2, 64)))  # [.., 2, 128]
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> _shifts(blocks, 4, 2)[:, None] & 3  # [.., 2, 4, 32]
    codes = (low | (high.flatten(-2) << 4)).flatten(-2)
    return codes, {"scales": _int8(blocks[..., 192:208]), "scale_steps": _half(blocks, 208)}


def _k_scales(blocks: Tensor) -> dict[str, Tensor]:
    """Repack the 8 scales and 8 minima (6 bits each) of a K block: the first four are contiguous, the others split."""
    low, middle, high = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 6) << 4)), -1)
    minima = torch.cat((middle & 63, (high >> 4) | ((middle >> 6) << 4)), -1)
    return {"scales": pack_scales(scales, minima, _half(blocks, 0), _half(blocks, 2))}


def _halves(packed: Tensor) -> Tensor:
    """Unpack bytes [..., n] into codes [..., 2 n]: all low nibbles, then all high nibbles."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _single_bits(packed: Tensor) -> Tensor:
    """Unpack bytes [..., n] into bits [..., 8 n], lowest bit first."""
    return (packed[..., None] >> _shifts(packed, 8, 1) & 1).flatten(-2)


def _shifts(like: Tensor, count: int, width: int) -> Tensor:
    """Return `count` shifts 0, width, 2 width, ... as uint8, on the device of `like`."""
    return torch.arange(0, count * width, width, dtype=torch.uint8, device=like.device)


def _half(blocks: Tensor, start: int) -> Tensor:
    """Return the fp16 number at byte `start` of each block: [..., 1]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16)


def _int8(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int8)


GGUF_KINDS = {
    "Q8_0": _Layout(32, 34, "int8-g32", _q8_0),
    "Q4_0": _Layout(32, 18, "q4_0", _q4_0),
    "Q4_1": _Layout(32, 20, "q4_1", _q4_1),
    "Q5_0": _Layout(32, 22, "q5_0", _q5_0),
    "Q5_1": _Layout(32, 24, "q5_1", _q5_1),
    "Q4_K": _Layout(256, 144, "q4_k", _q4_k),
    "Q5_K": _Layout(256, 176, "q5_k", _q5_k),
    "Q6_K": _Layout(256, 210, "q6_k", _q6_k),
}
