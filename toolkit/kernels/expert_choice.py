# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Choose the experts of many tokens by the router's scores, and weight them, in one launch.

As operations of PyTorch (topk, softmax and sigmoid), this takes the host longer than the GPU: some 110 µs per layer on an H200.
One token in a decode step has the choice in the launches of its experts instead (see `toolkit.kernels.routing`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.core.errors import ModelError
from toolkit.kernels import draws
from toolkit.kernels.base import DTYPES, Config, Cost, Kernel, Launch, Shape, Tensors, config_grid
from toolkit.kernels.checks import check_tensor
from toolkit.kernels.routing import _largest, _number, _score

MOST = 4096  # experts: the scores of a token are in the registers of one program


@dataclass(frozen=True)
class ChoiceShape(Shape):
    """`tokens`, each of which chooses `top_k` of `experts`.

    With `gated`, a row of scores ends with the one of a shared expert. The weights are the softmax over the chosen scores, or
    with `over_all` over all of them.
    """

    tokens: int
    experts: int
    top_k: int
    gated: bool = False
    over_all: bool = False
    dtype: str = "bfloat16"

    @property
    def width(self) -> int:
        """Scores of a token."""
        return self.experts + self.gated

    def check(self) -> str:
        """Return the name of this shape in error messages. Raises ModelError for sizes that the kernel doesn't support."""
        asked = f"the choice of {self.top_k} of {self.experts} experts"
        if self.dtype not in DTYPES:
            raise ModelError(asked, f"dtype {self.dtype!r}", f"Give one of {', '.join(DTYPES)}")
        if not 1 <= self.top_k <= self.experts <= MOST:
            raise ModelError(asked, "sizes that don't fit", f"Give top_k from 1 to experts, and experts up to {MOST:,}")
        return asked


class ExpertChoice(Kernel):
    """Choose among scores [T, experts], or with a shared expert [T, experts + 1].

    Results: chosen int64 [T, top_k], the numbers of the experts with the highest scores, in descending order; weights fp32
    [T, top_k]; and with `gated`, gate [T, 1] in the dtype of the scores, the sigmoid of the last score. Among equal scores, the
    expert with the lowest number comes first.
    """

    name: ClassVar[str] = "expert_choice"
    shape_type: ClassVar[type[Shape]] = ChoiceShape
    lengths = ("tokens",)
    known: ClassVar[Mapping[str, Shape]] = {
        "qwen3.5-35b-a3b, 64 tokens": ChoiceShape(64, 256, 8, gated=True),
        "qwen3.5-35b-a3b, 2048 tokens": ChoiceShape(2048, 256, 8, gated=True),
        "qwen3-30b-a3b, 512 tokens": ChoiceShape(512, 128, 8),
    }

    def space(self, shape: Shape) -> Sequence[Config]:
        """Return configs with one to four warps per token."""
        return config_grid(Config(warps=1), warps=(1, 2, 4))

    def inputs(self, shape: Shape, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
        assert isinstance(shape, ChoiceShape)
        generator = None if torch.device(device).type == "meta" else torch.Generator(device).manual_seed(seed)
        return {"scores": draws.normal((shape.tokens, shape.width), generator, device, DTYPES[shape.dtype])}

    def reference(self, shape: Shape, inputs: Tensors) -> tuple[Tensor, ...]:
        """Sort the scores, so that equal ones stay in the order of their numbers; `topk` doesn't promise any order."""
        assert isinstance(shape, ChoiceShape)
        scores = inputs["scores"][:, : shape.experts]
        sorted_scores, order = scores.sort(stable=True, dim=-1, descending=True)
        highest, chosen = sorted_scores[:, : shape.top_k].float(), order[:, : shape.top_k]
        every = sorted_scores.float() if shape.over_all else highest
        weights = (highest - every[:, :1]).exp() / (every - every[:, :1]).exp().sum(-1, keepdim=True)
        return (chosen, weights, *([inputs["scores"][:, shape.experts :].sigmoid()] if shape.gated else []))

    def outputs(self, shape: Shape, inputs: Tensors) -> dict[str, Tensor]:
        assert isinstance(shape, ChoiceShape)
        scores, size = inputs["scores"], (shape.tokens, shape.top_k)
        found = {"chosen": torch.empty(size, dtype=torch.int64, device=scores.device)}
        found["weights"] = torch.empty(size, dtype=torch.float32, device=scores.device)
        if shape.gated:
            found["gate"] = scores.new_empty(shape.tokens, 1)
        return found

    def results(self, shape: Shape) -> int:
        assert isinstance(shape, ChoiceShape)
        return 2 + shape.gated

    def launches(self, shape: Shape, config: Config, inputs: Tensors, outputs: Tensors) -> Sequence[Launch]:
        assert isinstance(shape, ChoiceShape)
        asked, scores = shape.check(), inputs["scores"]
        check_tensor(asked, "scores", scores, (shape.tokens, shape.width), DTYPES[shape.dtype], scores)
        arguments = {"scores": scores, "chosen": outputs["chosen"], "weights": outputs["weights"]}
        arguments["gate"] = outputs.get("gate", scores)
        constants = {"EXPERTS": shape.experts, "TOP_K": shape.top_k, "GATED": shape.gated, "OVER_ALL": shape.over_all}
        return [Launch(_choose, (shape.tokens,), arguments, constants, config.warps, config.stages)]

    def cost(self, shape: Shape) -> Cost:
        assert isinstance(shape, ChoiceShape)
        size = DTYPES[shape.dtype].itemsize
        moved = shape.width * size + 12 * shape.top_k + shape.gated * size
        return Cost(shape.tokens * moved, 2.0 * shape.tokens * shape.top_k * shape.experts)


@triton.jit
def _sortable(value, number, EXPERTS: tl.constexpr):
    """Return the scores as integers that sort in the same order; among equal ones, the lowest number is largest.

    These are the keys of `toolkit.kernels.routing`. What is not a number is larger than any number.
    """
    if value.dtype.primitive_bitwidth == 16:
        key = value.to(tl.int16, bitcast=True).to(tl.int32)
        key = tl.where(key == -32768, 0, key)  # -0 equals 0
        key = ((key ^ ((key >> 31) & 0x7FFF)) << 16) | (0xFFFF - number)
        least = -2147483648
    else:
        key = value.to(tl.int32, bitcast=True)
        key = tl.where(key == -2147483648, 0, key)
        key = ((key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (0xFFFF - number)
        least = -9223372036854775808
    return tl.where(number < EXPERTS, key, least)


@triton.jit
def _choose(
    scores, chosen, weights, gate, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr, OVER_ALL: tl.constexpr
):  # fmt: skip
    """The choice of one token: the largest score, the largest of those below it, and so on."""
    WIDTH: tl.constexpr = EXPERTS + (1 if GATED else 0)
    ROOM: tl.constexpr = triton.next_power_of_2(TOP_K)
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, triton.next_power_of_2(EXPERTS))
    value = tl.load(scores + token * WIDTH + at, mask=at < EXPERTS, other=float("-inf"))
    keys = (_sortable(value, at, EXPERTS),)
    top = _largest(keys, False, 0)
    first = _score(top, scores)
    slot = tl.arange(0, ROOM)
    numbers = tl.zeros((ROOM,), tl.int32)
    parts = tl.zeros((ROOM,), tl.float32)
    for i in tl.static_range(TOP_K):
        if i > 0:
            top = _largest(keys, True, top)
        numbers = tl.where(slot == i, tl.minimum(_number(top), EXPERTS - 1), numbers)
        parts = tl.where(slot == i, tl.exp(_score(top, scores) - first), parts)
    total = tl.sum(tl.exp(value.to(tl.float32) - first), 0) if OVER_ALL else tl.sum(parts, 0)
    tl.store(chosen + token * TOP_K + slot, numbers.to(tl.int64), mask=slot < TOP_K)
    tl.store(weights + token * TOP_K + slot, parts / total, mask=slot < TOP_K)
    if GATED:
        last = tl.load(scores + token * WIDTH + EXPERTS)
        tl.store(gate + token, tl.sigmoid(last.to(tl.float32)).to(last.dtype))


EXPERT_CHOICE = ExpertChoice()
"""The one instance."""
