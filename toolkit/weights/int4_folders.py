"""Read Hugging Face folders of quantized weights: GPTQ, AWQ and HQQ as safetensors.

A matrix stored as several tensors ("q_proj.qweight", "q_proj.qzeros", ...) appears as one ("q_proj.weight", [out, in]).
`raw` returns its codes, scales and zeros, unpacked for the given rows: value = (code - zero) * scale. The layouts are those
of QuantLinear in AutoGPTQ and GPTQModel, WQLinear_GEMM in AutoAWQ, and BitPack and HQQLinear in hqq.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.core.errors import FormatError, kind_of
from toolkit.weights.safetensors_files import open_safetensors, read_json
from toolkit.weights.stored import Stored, Weights

PLAIN_DO = "Get the model as GGUF, as GPTQ, AWQ or HQQ safetensors, or unquantized (scheme= quantizes it while loading)"
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # output j of eight is in nibble _AWQ_ORDER[j] of its 32-bit word
_OTHER_FORMAT = "Get it in the usual format, or load the unquantized model with scheme="


class Coded(ABC):
    """One matrix [out, in] stored as several tensors, whose names are `parts`. `stored` describes it as a single tensor."""

    kind: str
    leaves: tuple[str, ...]  # suffixes of the parts' names, after the name of the matrix
    stored: Stored

    def __init__(self, weights: Weights, prefix: str) -> None:
        self.weights, self.prefix = weights, prefix
        self.parts = tuple(name for leaf in self.leaves if (name := prefix + leaf) in weights.stored)
        self.bits, self.group = 0, 0

    @abstractmethod
    def raw(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return copies of rows `start` to `stop`: codes (uint8 [rows, in]), scales and zeros (both [rows, groups])."""

    def shown(self, shape: tuple[int, int], centred: bool = False) -> Stored:
        """Return the entry that describes all parts as one tensor."""
        first = self.weights.stored[self.parts[0]]
        nbytes = sum(self.weights.stored[name].nbytes for name in self.parts)
        name = self.prefix + "weight"
        return Stored(name, shape, self.kind, None, first.start, nbytes, first.path, self.bits, self.group, centred)

    def part(self, leaf: str, *dtypes: torch.dtype, dimensions: int = 2) -> Stored:
        """Return the entry of part `leaf`. Raises FormatError if it is missing or has another dtype or rank."""
        found = self.weights.stored.get(self.prefix + leaf)
        if found is None:
            raise self.wrong(f"{leaf} is missing")
        if len(found.shape) != dimensions or found.dtype not in dtypes or 0 in found.shape:
            raise self.wrong(f"{leaf} is {found.kind} of shape {list(found.shape)}")
        return found

    def values(self, leaf: str) -> Tensor:
        """Return the values of part `leaf`, a view of the file."""
        return self.weights.read(self.prefix + leaf)

    def wrong(self, found: str, do: str = "Check that the files are complete and from one checkpoint") -> FormatError:
        """Return a FormatError about this matrix."""
        return FormatError(f"{self.kind} matrix {self.prefix.rstrip('.')!r}", found, do, tensor=self.prefix + "weight")


_INT32, _FLOATS = (torch.int32,), (torch.float16, torch.bfloat16, torch.float32)


class _Gptq(Coded):
    """qweight int32 [in * bits / 32, out], qzeros int32 [groups, out * bits / 32], scales [groups, out], g_idx [in].

    Codes fill each word from the lowest bits up. The first version of the format stores zeros minus one.
    """

    kind, leaves = "GPTQ", ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, weights: Weights, prefix: str, options: Mapping[str, Any]) -> None:
        super().__init__(weights, prefix)
        self.less_one = str(options.get(_said(options, "checkpoint_format"), "gptq")).lower() != "gptq_v2"
        packed, zeros, scales = self.part("qweight", *_INT32), self.part("qzeros", *_INT32), self.part("scales", *_FLOATS)
        groups, out = scales.shape
        self.bits = 32 * zeros.shape[1] // out
        if self.bits not in (2, 4, 8) or zeros.shape != (groups, out * self.bits // 32) or packed.shape[1] != out:
            shapes = ", ".join(f"{leaf} {list(weights.stored[prefix + leaf].shape)}" for leaf in self.leaves[:3])
            raise self.wrong(f"its parts don't fit together: {shapes}")
        columns = packed.shape[0] * 32 // self.bits
        self.group = columns // groups
        if columns % groups:
            raise self.wrong(f"{columns:,} columns in {groups:,} groups", "Groups must divide the columns: " + _OTHER_FORMAT)
        _agree(self, options, columns)
        self._check_order(columns, bool(options.get("desc_act")))
        centred = self.bits == 8 and bool((self._zeros(0, out) == 128).all())
        self.stored = self.shown((out, columns), centred)

    def _check_order(self, columns: int, ordered: bool) -> None:
        """Raise FormatError unless groups consist of adjacent columns, which the packed layout requires."""
        if self.prefix + "g_idx" in self.weights.stored:
            if self.part("g_idx", torch.int32, torch.int64, dimensions=1).shape != (columns,):
                raise self.wrong(f"g_idx has {self.values('g_idx').shape[0]:,} entries for {columns:,} columns")
            ordered = not torch.equal(self.values("g_idx").long(), torch.arange(columns, device="cpu") // self.group)
        if ordered:
            found = "its columns are grouped out of order (desc_act, act-order), which the packed layout can't represent"
            raise self.wrong(found, "Get a checkpoint quantized with desc_act=False, or the unquantized model")

    def raw(self, start: int, stop: int) -> dict[str, Tensor]:
        words = _turned(self.values("qweight")[:, start:stop])  # [rows, words]
        scales = _turned(self.values("scales")[:, start:stop])
        return {"codes": _unpack(words, self.bits), "scales": scales, "zeros": self._zeros(start, stop).t().to(scales.dtype)}

    def _zeros(self, start: int, stop: int) -> Tensor:
        """Return the zeros [groups, rows] as integers."""
        per = 32 // self.bits
        words = _rows(self.values("qzeros")[:, start // per : -(-stop // per)])
        zeros = _unpack(words, self.bits)[:, start % per : start % per + stop - start]
        return (zeros + 1) & ((1 << self.bits) - 1) if self.less_one else zeros


class _Awq(Coded):
    """qweight int32 [in, out / 8], qzeros int32 [groups, out / 8], scales [groups, out]: 4 bits, eight outputs per word."""

    kind, leaves = "AWQ", ("qweight", "qzeros", "scales")

    def __init__(self, weights: Weights, prefix: str, options: Mapping[str, Any]) -> None:
        super().__init__(weights, prefix)
        packed, zeros, scales = self.part("qweight", *_INT32), self.part("qzeros", *_INT32), self.part("scales", *_FLOATS)
        (columns, words), (groups, out) = packed.shape, scales.shape
        if out != words * 8 or zeros.shape != (groups, words) or columns % groups:
            shapes = ", ".join(f"{leaf} {list(weights.stored[prefix + leaf].shape)}" for leaf in self.leaves)
            raise self.wrong(f"its parts don't fit together: {shapes}")
        self.bits, self.group = 4, columns // groups
        _agree(self, options, columns)
        self.stored = self.shown((out, columns))

    def raw(self, start: int, stop: int) -> dict[str, Tensor]:
        scales = _turned(self.values("scales")[:, start:stop])
        zeros = self._codes("qzeros", start, stop).to(scales.dtype)
        return {"codes": self._codes("qweight", start, stop), "scales": scales, "zeros": zeros}

    def _codes(self, leaf: str, start: int, stop: int) -> Tensor:
        """Return the codes [rows, n] of outputs `start` to `stop` of part `leaf` [n, out / 8]."""
        words = _turned(self.values(leaf)[:, start // 8 : -(-stop // 8)])  # [rows / 8, n]
        packed = words.view(torch.uint8).view(*words.shape, 4)
        codes = torch.empty(words.shape[0], 8, words.shape[1], dtype=torch.uint8, device="cpu")
        for output, nibble in enumerate(_AWQ_ORDER):
            torch.bitwise_and(packed[..., nibble // 2] >> (nibble % 2 * 4), 15, out=codes[:, output])
        return codes.flatten(0, 1)[start % 8 : start % 8 + stop - start]


class _Hqq(Coded):
    """W_q holds codes [out * groups, group] as `per` blocks of rows, the first block in the highest bits of each byte.

    scale and zero are [out * groups, 1]. hqq stores all other properties of a matrix as small tensors with the same prefix.
    """

    kind = "HQQ"
    leaves = (
        "W_q", "scale", "zero", "shape", "nbits", "group_size", "axis", "packing", "quant_scale", "quant_zero",
        "channel_wise", "compute_dtype", "encoded_state_dict", "offload_meta", "optimize", "round_zero",
        "stores_quant_config", "unpack_view_dtype", "view_as_float",
    )  # fmt: skip

    def __init__(self, weights: Weights, prefix: str, options: Mapping[str, Any]) -> None:
        super().__init__(weights, prefix)
        self.bits, axis, packing = self._number("nbits"), self._number("axis"), self._text("packing")
        if axis != 1:
            raise self.wrong(f"axis {axis}: its groups run down columns", "Use a checkpoint quantized with axis=1")
        if self.bits not in (2, 4, 8) or packing != f"{self.bits}bit_u8":
            raise self.wrong(f"{self.bits} bits packed as {packing!r:.40}", "Use a checkpoint with 4bit_u8, 8bit_u8 or 2bit_u8")
        if any(self._number(flag, 0) for flag in ("quant_scale", "quant_zero")):
            raise self.wrong("its scales or zeros are quantized themselves", "Quantize with quant_scale=quant_zero=False")
        sizes = self.values("shape") if self.part("shape", torch.int64, torch.int32, dimensions=1).shape == (2,) else None
        if sizes is None:
            raise self.wrong("its shape isn't two numbers")
        out, columns = (int(size) for size in sizes)
        scale, zero = (self.weights.stored.get(prefix + leaf) for leaf in ("scale", "zero"))
        rows = 0 if scale is None else scale.rows * scale.columns
        fits = scale is not None and zero is not None and zero.shape == scale.shape and {scale.dtype, zero.dtype} <= {*_FLOATS}
        if not fits or out < 1 or columns < 1 or rows % out or not rows or columns * out % rows:
            raise self.wrong(f"scale and zero don't fit its shape [{out:,}, {columns:,}]")
        self.groups = rows // out
        self.group = columns // self.groups
        said = self._number("group_size", self.group)
        self.per = 8 // self.bits
        packed = weights.stored[prefix + "W_q"]
        if said != self.group or rows % self.per or packed.nbytes * self.per != out * columns or packed.dtype is None:
            raise self.wrong(f"W_q has {packed.nbytes:,} bytes, but {rows:,} groups of {said:,} were promised")
        self.stored = self.shown((out, columns))

    def raw(self, start: int, stop: int) -> dict[str, Tensor]:
        first, last = start * self.groups, stop * self.groups
        whole = self.values("W_q").reshape(-1).view(torch.uint8).view(-1, self.group)
        step, pieces = len(whole), []
        for block in range(self.per):
            low, high = max(first, block * step), min(last, (block + 1) * step)
            if low < high:
                rows = whole[low - block * step : high - block * step]
                pieces.append(rows >> (8 - self.bits * (block + 1)) & ((1 << self.bits) - 1))
        codes = torch.cat(pieces) if pieces else whole[:0]
        scales, zeros = (self.values(leaf).reshape(-1, self.groups)[start:stop].clone() for leaf in ("scale", "zero"))
        return {"codes": codes.view(stop - start, self.stored.columns), "scales": scales, "zeros": zeros}

    def _number(self, leaf: str, default: int | None = None) -> int:
        found = self.weights.stored.get(self.prefix + leaf)
        if found is None and default is not None:
            return default
        whole = found is not None and found.dtype is not None and not found.dtype.is_floating_point
        if found is None or not whole or found.rows * found.columns != 1:
            raise self.wrong(f"{leaf} is missing or isn't one whole number")
        return int(self.values(leaf).reshape(()).item())

    def _text(self, leaf: str) -> str:
        found = self.part(leaf, torch.uint8, dimensions=1)
        return bytes(self.values(leaf)[:64].tolist()).decode("latin-1") if found.columns <= 64 else "..."


def _rows(part: Tensor) -> Tensor:
    """Return a row-major copy of `part` (`contiguous` would return empty tensors with their old strides)."""
    return part.clone(memory_format=torch.contiguous_format)


def _turned(part: Tensor) -> Tensor:
    """Return a row-major copy of the transpose of `part`."""
    return _rows(part.t())


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 words [..., n] into codes uint8 [..., n * 32 / bits], lowest bits first."""
    packed = words.view(torch.uint8)
    if bits == 8:
        return packed
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device="cpu")
    return (packed[..., None] >> shifts & ((1 << bits) - 1)).flatten(-2)


def _agree(matrix: Coded, options: Mapping[str, Any], columns: int) -> None:
    """Raise FormatError if the config contradicts the bits or group size of the tensors and lists no exceptions."""
    group = options.get("group_size", matrix.group)
    said = (options.get("bits", matrix.bits), columns if group == -1 else group)
    if said != (matrix.bits, matrix.group) and not options.get("dynamic"):
        found = f"it has {matrix.bits} bits in groups of {matrix.group:,}, the config says {said[0]!r:.20} and {said[1]!r:.20}"
        raise matrix.wrong(found)


class Quantised(Weights):
    """A checkpoint that stores some matrices as codes, scales and zeros, and all other tensors as plain numbers."""

    def __init__(self, weights: Weights, make: Callable[[Weights, str], Coded], leaf: str) -> None:
        """Find one quantized matrix per tensor named PREFIX + `leaf`, and read it with `make(weights, PREFIX)`."""
        self._inner = weights
        coded = [make(weights, name.removesuffix(leaf)) for name in weights.stored if name.endswith("." + leaf)]
        self._coded = {matrix.stored.name: matrix for matrix in coded}
        hidden = {name for matrix in coded for name in matrix.parts}
        plain = {name: stored for name, stored in weights.stored.items() if name not in hidden}
        both = next((name for name in self._coded if name in plain), None)
        if both is not None:
            raise FormatError(f"tensor {both!r}", "it is stored both plain and quantized", "Use a checkpoint with only one")
        self.stored = plain | {name: matrix.stored for name, matrix in self._coded.items()}

    def raw(self, name: str, start_row: int = 0, stop_row: int | None = None) -> dict[str, Tensor]:
        stored, start, stop = self.span(name, start_row, stop_row)
        matrix = self._coded.get(stored.name)
        return self._inner.raw(name, start, stop) if matrix is None else matrix.raw(start, stop)


def described_by_values(weights: Weights) -> bool:
    """Return whether some matrices are stored as GPTQ, AWQ or HQQ, whose values must be read to describe them."""
    return any(name.endswith((".qweight", ".W_q")) for name in weights.stored)


def open_folder(folder: Path, config: Mapping[str, Any]) -> Weights:
    """Open the weights of a Hugging Face folder; `config`, its config.json, says how they are quantized.

    Raises FormatError for an unsupported quantization method or option, and for damaged or incomplete files.
    """
    weights = open_safetensors(folder)
    asked, options = f"weights in {folder}", _options(folder, config, weights)
    method = str(options.get("quant_method", "")).lower()
    if not method and not any(name.endswith(".W_q") for name in weights.stored):
        return weights
    for field, wanted in (("bits", int), ("group_size", int), ("desc_act", bool)):
        value = options.get(field)
        if value is not None and type(value) is not wanted:
            found = f"quantization_config field {field!r} is {value!r:.60}"
            raise FormatError(asked, found, f"It must be a {wanted.__name__}", field=field)
    options = {field: value for field, value in options.items() if value is not None}
    if method == "gptq":
        _only(asked, options, _said(options, "checkpoint_format"), "gptq", "gptq_v2")
        return Quantised(weights, lambda inner, prefix: _Gptq(inner, prefix, options), "qweight")
    if method == "awq":
        _only(asked, options, _said(options, "version"), "gemm")
        return Quantised(weights, lambda inner, prefix: _Awq(inner, prefix, options), "qweight")
    if method in ("hqq", ""):
        return Quantised(weights, lambda inner, prefix: _Hqq(inner, prefix, options), "W_q")
    raise FormatError(asked, f"they are quantized by {method!r:.60}, which isn't supported", PLAIN_DO, method=method)


def _options(folder: Path, config: Mapping[str, Any], weights: Weights) -> dict[str, Any]:
    """Return the quantization settings from config.json, or from the separate file that older tools wrote."""
    inner = config.get("text_config")
    for holder in (config, inner if isinstance(inner, Mapping) else {}):
        for field in ("quantization_config", "compression_config"):
            options = holder.get(field)
            if options is not None:
                if not isinstance(options, Mapping):
                    found = f"its {field} is {kind_of(options)}, not an object"
                    raise FormatError(f"config of {folder}", found, "Get it from the checkpoint's source again")
                unnamed = "bitsandbytes" if "load_in_4bit" in options or "load_in_8bit" in options else "an unnamed method"
                method = "compressed-tensors" if field == "compression_config" else unnamed
                return {"quant_method": method} | dict(options)
    if any(name.endswith(".qweight") for name in weights.stored):
        if (folder / "quantize_config.json").exists():
            return {"quant_method": "gptq"} | read_json(folder / "quantize_config.json", "config")
        if (folder / "quant_config.json").exists():
            old = read_json(folder / "quant_config.json", "config")
            return {"quant_method": "awq", "bits": old.get("w_bit"), "group_size": old.get("q_group_size")} | old
        found = "they are quantized, but config.json doesn't say how"
        raise FormatError(f"weights in {folder}", found, "Get the config.json of the same checkpoint")
    return {}


def _said(options: Mapping[str, Any], field: str) -> str:
    """Return the name of the field that states the format: `field`, or else "format", as newer tools call it."""
    return field if field in options else "format"


def _only(asked: str, options: Mapping[str, Any], field: str, *known: str) -> None:
    """Raise FormatError unless `field` is one of `known` (its default is the first)."""
    value = str(options.get(field, known[0])).lower()
    if value not in known:
        raise FormatError(asked, f"quantization_config field {field!r} is {value!r:.60}", f"Use one of {', '.join(known)}")
