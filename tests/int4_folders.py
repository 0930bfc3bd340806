"""Quantised Hugging Face folders for tests: the matrices of the layers as GPTQ, AWQ or HQQ store them, and their values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.checkpoints import random_tensors, write_folder

GROUP = 64
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs stands in each nibble, from the lowest on


def write_int4_folder(folder: Path, method: str, config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """A folder whose layers are stored as `method` ("gptq", "awq", "hqq"). Returns its weights by name, in fp32."""
    generator = torch.Generator().manual_seed(seed)
    stored, held = {}, {}
    for name, tensor in random_tensors(config).items():
        if tensor.ndim == 1 or ".layers." not in name:
            stored[name] = tensor.half()
            held[name] = stored[name].float()
            continue
        codes = torch.randint(0, 16, tensor.shape, generator=generator)
        groups = (tensor.shape[0], tensor.shape[1] // GROUP)
        zeros = torch.randint(4, 12, groups, generator=generator)
        scales = (torch.rand(groups, generator=generator) * 0.01 + 0.002).half()
        spread = [part.repeat_interleave(GROUP, 1) for part in (zeros, scales.float())]
        held[name] = (codes - spread[0]) * spread[1]
        parts = {"gptq": _gptq, "awq": _awq, "hqq": _hqq}[method](codes, zeros, scales)
        stored |= {name.removesuffix("weight") + leaf: part.contiguous() for leaf, part in parts.items()}
    options = {"quant_method": method} | ({} if method == "hqq" else {"bits": 4, "group_size": GROUP})
    write_folder(folder, config | {"quantization_config": options, "torch_dtype": "float16"}, stored)
    return held


def _words(codes: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """int32 [n / 8, m] of codes [n, m]: eight neighbours of the first dimension a word, the first of `order` lowest."""
    nibbles = codes.unflatten(0, (-1, 8))[:, list(order)].long()
    words = (nibbles << (4 * torch.arange(8))[:, None]).sum(1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _gptq(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> dict[str, torch.Tensor]:
    columns = torch.arange(codes.shape[1], dtype=torch.int32)
    return {"qweight": _words(codes.t()), "qzeros": _words(zeros - 1).t(), "scales": scales.t(), "g_idx": columns // GROUP}


def _awq(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"qweight": _words(codes, _AWQ_ORDER).t(), "qzeros": _words(zeros, _AWQ_ORDER).t(), "scales": scales.t()}


def _hqq(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> dict[str, torch.Tensor]:
    high, low = codes.reshape(-1, GROUP).to(torch.uint8).chunk(2)
    numbers = {"nbits": 4, "group_size": GROUP, "axis": 1}
    return {
        "W_q": high << 4 | low,
        "scale": scales.reshape(-1, 1),
        "zero": zeros.half().reshape(-1, 1),
        "shape": torch.tensor(codes.shape),
        "packing": torch.tensor(list(b"4bit_u8"), dtype=torch.uint8),
    } | {name: torch.tensor(number) for name, number in numbers.items()}
