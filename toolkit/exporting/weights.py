"""Writes the weights of a model to one safetensors file, hashing them on the way, and maps such a file when it is loaded."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import torch
from torch import nn

from toolkit.models.places import assign
from toolkit.weights.safetensors_files import DTYPES, SafetensorsFile

CHUNK_BYTES = 64 << 20
ALIGNED = 64  # bytes: tensors whose size is a multiple of this start at a multiple of it, for wide loads of mapped weights
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Step = Callable[[int, str], None]  # called with the number of bytes processed and the tensor's name


def size_of(model: nn.Module) -> int:
    """Return the size in bytes of the file that `write` makes."""
    header, tensors = _header(model)
    return len(header) + sum(tensor.nbytes for _, tensor in tensors)


def hash_of(model: nn.Module, step: Step) -> str:
    """Return the SHA-256 of the file that `write` would make."""
    return _stream(model, lambda data: None, step)


def write(model: nn.Module, file: BinaryIO, step: Step) -> str:
    """Write a model's parameters, from any device, and return the file's SHA-256. Raises OSError if the disk is full."""
    sha256 = _stream(model, file.write, step)
    file.flush()
    os.fsync(file.fileno())
    return sha256


def assign_from(file: SafetensorsFile, model: nn.Module, device: torch.device, step: Step) -> None:
    """Assign a file's weights to a model on "meta": views of the mapped file on the CPU, copies on other devices."""
    for name, parameter in list(model.named_parameters()):
        stored = file.read(name)
        if device.type != "cpu":
            held = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            held.copy_(stored)
            stored = held
        assign(model, name, stored)
        step(stored.nbytes, name)


def shapes_in(file: SafetensorsFile) -> dict[str, list[Any]]:
    """Return [dtype, shape] of every tensor in a file, by name."""
    return {name: [str(s.dtype).removeprefix("torch."), list(s.shape)] for name, s in file.stored.items()}


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
    """Return the file's header and its tensors in order. Sizes that are multiples of `ALIGNED` come first."""
    tensors = sorted(model.named_parameters(), key=lambda item: (item[1].nbytes % ALIGNED != 0, -item[1].itemsize, item[0]))
    entries, start = {}, 0
    for name, tensor in tensors:
        stop = start + tensor.nbytes
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    return len(text).to_bytes(8, "little") + text, list(tensors)
