"""What there is to tune in a model: the problems that its operations give to kernels."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import torch

from toolkit.core.errors import DeviceError, ModelError
from toolkit.ops.define import GPUS, record_problems
from toolkit.ops.sampling import sample_embed

if TYPE_CHECKING:
    from toolkit.kernels.base import Kernel, Shape


class Tunable:
    """Mixed into a model (before nn.Module): it says which kernels it runs, and on what shapes."""

    def kernel_shapes(self: Any, context: int = 4096, prompt: int = 512, kv: str | None = None) -> list[tuple[Kernel, Shape]]:
        """(kernel, shape) of every operation of a prompt of `prompt` tokens and of a decode step, in a cache for `context`
        (with `kv` in codes).

        Found by running both once, on token 0, on the model's device: a GPU, real or virtual. ModelError on the CPU,
        where references run; DeviceError where there is no Triton; torch.OutOfMemoryError where the cache doesn't fit.
        """
        device = self.device.torch
        if device.type not in GPUS:
            said = f"it is on {self.device.name!r}, where references run"
            raise ModelError(
                "the kernels of a model", said, 'Load it with device="cuda", or "virtual:h200" for what a GPU would run'
            )
        if importlib.util.find_spec("triton") is None:
            raise DeviceError("the kernels of a model", "Triton isn't installed", "On Linux: pip install triton")
        prompt = min(prompt, context - 1)
        with torch.no_grad(), record_problems() as found:
            cache = self.new_cache(context, kv)
            for first, tokens in ((0, prompt), (prompt, 1)):
                ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
                positions = torch.arange(first, first + tokens, device=device)
                hidden = self.advance(self.embed(ids), positions, cache, first + tokens)
                logits = self.logits(hidden[:, -1:]).view(-1)
            if self.embed.alone:
                token = torch.zeros(1, dtype=torch.int64, device=device)
                sample_embed(logits, self.embed.weight, self.embed.dtype, self.embed.scale, token)
        return list(dict.fromkeys(found))
