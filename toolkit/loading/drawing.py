"""Draw random weights of a model's real shapes on the device, for measurements of speed, memory and copies.

Such measurements do not depend on the values. Matrices have a standard deviation of about STD in any scheme and norm weights
are one, so activations stay finite at any depth. The same seed gives the same weights on the same type of device and for the
same number of ranks. Weights of which each rank holds a part are drawn by each rank for itself, all others alike on all ranks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from toolkit.core.distributed import WHOLE, Shard
from toolkit.core.progress import Counter
from toolkit.gpu.device import Device
from toolkit.models.places import cuts_of
from toolkit.weights.packed import PackedMatrix, pack_scales
from toolkit.weights.schemes import Scheme

STD = 0.02
RANK_STEP = 0x9E3779B97F4A7C15  # between the seeds of two ranks, so that those of near seeds differ
FINE = (32, 64)  # range of 8-bit scales; those of 6 bits are all in the middle of it


def draw(model: nn.Module, device: Device, seed: int, counter: Counter, shard: Shard = WHOLE) -> None:
    """Fill every parameter of `model` in place, without temporaries and without host memory.

    A module with vectors that are neither norms nor biases declares their ranges: `INITIAL = {"decay": (-16.0, -0.01)}`.
    """
    alike, apart = _generators(device, seed, shard)
    counter.begin(sum(parameter.nbytes for parameter in model.parameters()))
    for path, module in model.named_modules():
        ranges = getattr(module, "INITIAL", {})
        for name, parameter in module.named_parameters(recurse=False):
            value = parameter.detach()
            generator = apart if _is_cut(model, path, module, name) else alike
            if isinstance(module, PackedMatrix):
                _draw_part(value, name, module.scheme, generator)
            elif name in ranges:
                value.uniform_(*ranges[name], generator=generator)
            elif value.ndim > 1:
                value.normal_(0.0, STD, generator=generator)
            else:
                value.fill_(0.0 if name == "bias" else 1.0)
            counter.step(parameter.nbytes, f"{path}.{name}")


def _generators(device: Device, seed: int, shard: Shard) -> tuple[torch.Generator | None, torch.Generator | None]:
    """Return the generators of the weights that all ranks hold and of those that are divided; one for both on a single rank."""
    if device.torch.type == "vgpu":
        return None, None
    alike = torch.Generator(device.torch).manual_seed(seed)
    if shard == WHOLE:
        return alike, alike
    return alike, torch.Generator(device.torch).manual_seed((seed + (shard.rank + 1) * RANK_STEP) % 2**64)


def _is_cut(model: nn.Module, path: str, module: nn.Module, name: str) -> bool:
    """Return whether the rank holds a part of parameter `name` of the module at `path` only."""
    if isinstance(module, PackedMatrix):
        path, _, name = path.rpartition(".")
        module = model.get_submodule(path)
    return any(cut.held < cut.size for cut in cuts_of(module, name))


def _draw_part(part: Tensor, name: str, scheme: Scheme, generator: torch.Generator | None) -> None:
    """Fill one tensor of a packed matrix: uniform codes, and scales such that the values have standard deviation STD."""
    levels = 1 << scheme.bits
    step = STD * math.sqrt(12 / (levels * levels - 1))  # the standard deviation of uniform codes is sqrt((levels^2 - 1) / 12)
    middle = (levels - 1) / 2
    fine = sum(FINE) / 2 if scheme.steps else 1.0
    if name in ("codes", "high"):
        if part.device.type == "cpu" and part.is_contiguous() and part.nbytes % 8 == 0:
            # the CPU draws sequentially: eight random bytes per draw are eight times as fast
            part.flatten().view(torch.int64).random_(torch.iinfo(torch.int64).min, None, generator=generator)
        else:
            signed = part.dtype == torch.int8
            part.random_(-128 if signed else 0, 128 if signed else 256, generator=generator)
    elif scheme.joint:
        same = torch.full((8,), int(fine), device="cpu")
        steps = torch.tensor([[step / fine], [step * middle / fine]], dtype=torch.float16, device="cpu")
        numbers = pack_scales(same, same, *steps).view(torch.int64).tolist()
        for number, words in zip(numbers, part.view(torch.int64).unflatten(-1, (-1, 2)).unbind(-1), strict=True):
            words.fill_(number)
    elif name == "scales" and scheme.steps:
        part.random_(*FINE, generator=generator)
    else:
        part.fill_({"zeros": middle, "minima": step * middle}.get(name, step / fine))
