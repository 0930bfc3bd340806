"""Rotary embeddings of the Qwen models: the rotating part of a head, its frequencies, and their scaling for long contexts.

They are read from config.json or GGUF metadata, and tables are computed on the device of the positions. Frequencies equal those
of transformers ("default", "linear", "yarn").
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from toolkit.models.fields import Fields
from toolkit.ops.reference.attention import rope_of, rotate

KINDS = ("default", "linear", "yarn")


@dataclass(frozen=True)
class Rope:
    """A rotary embedding of the first `dims` numbers of a head: number i is paired with number i + `width` / 2.

    `kind` is "default", "linear" (divides all frequencies by `factor`), or "yarn" (Peng et al., arXiv 2309.00071), which
    divides low frequencies by `factor`, keeps high ones, interpolates between them, and multiplies cosines and sines by
    `strength`.
    """

    dims: int
    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    strength: float = 1.0
    original_context: int = 0  # yarn: number of positions in training
    beta_fast: float = 32.0  # yarn: frequencies with at least this many turns over the original context are kept
    beta_slow: float = 1.0  # yarn: frequencies with at most this many turns are divided by the factor
    truncate: bool = True  # yarn: whether the interpolation begins and ends at whole pairs

    @property
    def width(self) -> int:
        """The size of the rotating part of a head: `dims`, rounded up to an even number."""
        return self.dims + self.dims % 2

    def frequencies(self, device: torch.device) -> Tensor:
        """Return the frequencies in radians per position, fp32 [width / 2]."""
        powers = torch.pow(self.theta, torch.arange(0, self.dims, 2, device=device, dtype=torch.float32) / self.dims)
        if self.kind == "default":
            return 1.0 / powers
        if self.kind == "linear":
            return 1.0 / powers / self.factor
        low, high = (self._pair_of(turns) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dims - 1)
        pairs = torch.arange(self.dims // 2, device=device, dtype=torch.float32)
        slowed = ((pairs - low) / ((high - low) or 0.001)).clamp(0, 1)
        return 1.0 / (self.factor * powers) * slowed + 1.0 / powers * (1 - slowed)

    def table(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the table [T, 2, width] of `positions` [T] for `turn`: cosines and signed sines, computed in fp32."""
        table = rope_of(positions, self.frequencies(positions.device), torch.float32)
        return (table if self.strength == 1.0 else table * self.strength).to(dtype)

    def turn(self, x: Tensor, table: Tensor) -> Tensor:
        """Rotate `x` [B, T, heads, head_dim] by `table` [T, 2, width]; the rest of each head is unchanged."""
        if self.width == x.shape[-1]:
            return rotate(x, table)
        return torch.cat((rotate(x[..., : self.width], table), x[..., self.width :]), -1)

    def _pair_of(self, turns: float) -> float:
        """Return the index, with a fraction, of the pair that makes `turns` turns over the original context."""
        logarithm = math.log(self.original_context) - math.log(2 * math.pi) - math.log(turns)  # finite for all numbers of turns
        return self.dims * logarithm / (2 * math.log(self.theta))


def rope_from_hf(fields: Fields, head_dim: int, share: float | None = None) -> Rope:
    """Read the rotary embedding from a config.json of transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`).

    `share` is the rotating fraction of a head if the config doesn't state it; None for models that always rotate whole heads.
    Raises ModelError, naming the field, for unsupported kinds.
    """
    name = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    stated = fields.values.get(name)
    rope: Mapping[str, Any] = {} if stated is None else stated
    if not isinstance(rope, Mapping):
        raise fields.wrong(name, rope, "a mapping")
    inner = Fields(f"{fields.source} {name}", rope)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in KINDS or any(isinstance(value, Mapping) for value in rope.values()):
        raise fields.wrong(name, rope, f"rope_type {', '.join(KINDS)}", "not supported")
    part = inner if "partial_rotary_factor" in rope else fields
    share_stated = part.number("partial_rotary_factor", 1.0 if share is None else share)
    if share_stated > 1 or (share is None and share_stated != 1):
        raise fields.wrong(name, rope, f"partial_rotary_factor {'1' if share is None else 'up to 1'}")
    theta = inner.number("rope_theta") if "rope_theta" in rope else fields.number("rope_theta", 10_000.0)
    dims = int(head_dim * share_stated)
    if kind == "default":
        return Rope(dims, theta)
    if kind == "linear":
        return Rope(dims, theta, kind, inner.number("factor"))
    return _yarn(fields, inner, dims, theta)


def _yarn(fields: Fields, inner: Fields, dims: int, theta: float) -> Rope:
    most, rope = fields.size("max_position_embeddings", 32768), inner.values
    outer = "original_max_position_embeddings" in fields.values
    original = (fields if outer else inner).size("original_max_position_embeddings", most)
    factor = most / original if rope.get("factor") is None else inner.number("factor")

    def strength(times: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * times * math.log(factor) + 1.0

    stated = rope.get("attention_factor")
    if stated is not None:
        turned = inner.number("attention_factor")
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        turned = strength(inner.number("mscale")) / strength(inner.number("mscale_all_dim"))
    else:
        turned = strength(1.0)
    fast = inner.number("beta_fast") if rope.get("beta_fast") else 32.0
    slow = inner.number("beta_slow") if rope.get("beta_slow") else 1.0
    whole = inner.flag("truncate", True)
    if dims % 2 or dims == 0 or theta <= 1:
        raise inner.wrong("rope_type", "yarn", "an even number of rotary dimensions and rope_theta above 1")
    return Rope(dims, theta, "yarn", factor, turned, original, fast, slow, whole)


def rope_from_gguf(own: Fields, dims: int) -> Rope:
    """Read the rotary embedding from GGUF metadata: none, linear or yarn, in the form that llama.cpp's converter writes.

    As in llama.cpp, a factor without a type means linear scaling, and older files call it "rope.scale_linear".
    """
    theta = own.number("rope.freq_base", 10_000.0)
    own.only("rope.scaling.type", "none", None, "linear", "yarn")
    own.only("rope.scaling.attn_factor", 1.0)
    factor_name = "rope.scaling.factor"
    if own.prefix + factor_name not in own.values and f"{own.prefix}rope.scale_linear" in own.values:
        factor_name = "rope.scale_linear"
    scaled = own.values.get(own.prefix + factor_name, 0) != 0
    kind = own.values.get(f"{own.prefix}rope.scaling.type") or ("linear" if scaled else "none")
    if kind == "none":
        return Rope(dims, theta)
    factor = own.number(factor_name)
    if kind == "linear":
        return Rope(dims, theta, "linear", factor)
    for name in ("yarn_attn_factor", "yarn_ext_factor"):
        own.only(f"rope.scaling.{name}", 1.0)
    own.only("rope.scaling.yarn_log_multiplier", None)
    original = own.size("rope.scaling.original_context_length")
    fast, slow = own.number("rope.scaling.yarn_beta_fast", 32.0), own.number("rope.scaling.yarn_beta_slow", 1.0)
    strength = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
    if dims % 2 or theta <= 1:
        raise own.wrong("rope.scaling.type", "yarn", "an even number of rotary dimensions and freq_base above 1")
    return Rope(dims, theta, "yarn", factor, strength, original, fast, slow)
