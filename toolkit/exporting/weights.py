"""Weights as one safetensors file: written in a stream that is hashed on the way, mapped when loaded."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from toolkit.models.layers import assign
from toolkit.weights.safetensors_files import DTYPES, SafetensorsFile

CHUNK_BYTES = 64 << 20
ALIGNED = 64  # bytes: where every tensor whose size is a multiple of it begins, for wide loads of mapped weights
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Step = Callable[[int, str], None]  # so many bytes more, of the tensor called so


def size_of(model: nn.Module) -> int:
    """Bytes of the file that `write` makes."""
    header, tensors = _header(model)
    return len(header) + sum(tensor.nbytes for _, tensor in tensors)


def hash_of(model: nn.Module, step: Step) -> str:
    """SHA-256 of the file that `write` would make."""
    return _stream(model, lambda data: None, step)


def write(model: nn.Module, path: Path, step: Step) -> str:
    """Write a model's parameters, each once, from whatever device they are on; the file's SHA-256. OSError on a full disk."""
    with open(path, "wb") as file:
        sha256 = _stream(model, file.write, step)
        file.flush()
        os.fsync(file.fileno())
    return sha256


def assign_from(path: Path, model: nn.Module, device: torch.device, step: Step) -> None:
    """Give a model on "meta" the weights of a file: on the CPU as views of the mapped file, elsewhere a copy on the device."""
    file = SafetensorsFile(path)
    for name, parameter in list(model.named_parameters()):
        stored = file.read(name)
        if device.type != "cpu":
            held = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            held.copy_(stored)
            stored = held
        assign(model, name, stored)
        step(stored.nbytes, name)


def shapes_in(path: Path) -> dict[str, list[Any]]:
    """[dtype, shape] of every tensor in a file."""
    return {name: [str(s.dtype).removeprefix("torch."), list(s.shape)] for name, s in SafetensorsFile(path).stored.items()}


def _stream(model: nn.Module, write: Callable[[Any], object], step: Step) -> str:
    header, tensors = _header(model)
    digest = hashlib.sha256(header)
    write(header)
    for name, tensor in tensors:
        for chunk in _chunks(tensor):
            data = chunk.cpu().numpy().data
            digest.update(data)
            write(data)
            step(len(data), name)
    return digest.hexdigest()


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    yield from flat.split(CHUNK_BYTES) if len(flat) else ()


def _header(model: nn.Module) -> tuple[bytes, list[tuple[str, torch.Tensor]]]:
    """The file's beginning, and its tensors in order: what is a multiple of `ALIGNED` first, so that all those are aligned."""
    tensors = sorted(model.named_parameters(), key=lambda item: (item[1].nbytes % ALIGNED != 0, -item[1].itemsize, item[0]))
    entries, start = {}, 0
    for name, tensor in tensors:
        stop = start + tensor.nbytes
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    return len(text).to_bytes(8, "little") + text, list(tensors)
