"""Quantization recipes: choose a scheme for each weight of a model from its name and shape.

Every recipe leaves vectors and scalars (norms, biases, values per head or layer), matrices of one row, convolutions and
routers unquantized (routers are small, and a wrong choice of expert costs much accuracy). All other matrices are quantized,
including the embedding table and the head.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from toolkit.core.errors import ModelError, UnknownNameError, unknown_name
from toolkit.weights.schemes import SCHEMES, Scheme, find_scheme

ALWAYS_PLAIN = "always plain"  # why norms, routers and others are not quantized
_PLAIN = re.compile(r"norm|router|conv")
_LAYER = re.compile(r"layers\.(\d+)\.")
# What replaces a scheme whose groups don't divide the rows: that of llama.cpp for K formats (the fallbacks of
# llama_tensor_get_type), and smaller groups of the same bits for the others
_SMALLER = {
    "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "int8-g32",
    "int4-g128": "int4-g64", "int4-g64": "int4-g32", "int8-g128": "int8-g32",
}  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """The scheme of each weight.

    `base` is the scheme of ordinary matrices; `tables` that of the head, and of the embedding if they are tied. `more` is the
    scheme of matrices whose name matches the regex `wide` in the most sensitive layers: the first and last eighth and every
    third layer between them, as in llama.cpp's `use_more_bits`. Raises UnknownNameError for an unknown scheme.
    """

    name: str
    base: str
    tables: str
    more: str = ""
    wide: str = ""

    def __post_init__(self) -> None:
        for scheme in filter(None, (self.base, self.tables, self.more)):
            find_scheme(scheme)

    def scheme_for(self, name: str, shape: Sequence[int], layers: int, tied: bool = False) -> Scheme | None:
        """Return the scheme of the weight `name` ("layers.3.mlp.down.weight"), or None if it stays unquantized.

        `layers` is the number of layers; `tied` says that the embedding is also the head. If the groups of a scheme don't
        divide the rows, one with smaller groups replaces it: K formats as in llama.cpp, the others by the same bits. Returns
        None if these don't fit either.
        """
        meant = self.meant_for(name, shape, layers, tied)
        return None if meant is None or misfit(meant, shape) else meant

    def meant_for(self, name: str, shape: Sequence[int], layers: int, tied: bool = False) -> Scheme | None:
        """Return the scheme like `scheme_for`, but the one with the smallest groups if none divides the rows."""
        if len(shape) < 2 or shape[-2] == 1 or not name.endswith("weight") or _PLAIN.search(name):
            return None
        chosen = self.base
        if name == "head.weight" or (name == "embed.weight" and tied):
            chosen = self.tables
        layer = _LAYER.match(name)
        if self.more and layer and re.search(self.wide, name) and _more_bits(int(layer[1]), layers):
            chosen = self.more
        while misfit(SCHEMES[chosen], shape) and chosen in _SMALLER:
            chosen = _SMALLER[chosen]
        return SCHEMES[chosen]


def misfit(scheme: Scheme, shape: Sequence[int]) -> str:
    """Return why a matrix of this shape can't be in `scheme`: "rows of 100 are not a multiple of 32". "" if it can."""
    return f"rows of {shape[-1]:,} are not a multiple of {scheme.multiple}" if shape[-1] % scheme.multiple else ""


def nothing_to_quantize(name: str, reasons: Iterable[str]) -> ModelError:
    """Return the error for a model whose matrices can all not be quantized to `name`, for these reasons."""
    found = f"there is nothing to quantize: {'; '.join(sorted(set(reasons)))[:160]}"
    return ModelError(f"quantizing to {name}", found, "Choose another scheme")


def _more_bits(layer: int, layers: int) -> bool:
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


RECIPES = {scheme: Recipe(scheme, scheme, scheme) for scheme in SCHEMES} | {
    "int4": Recipe("int4", "int4-g32", "int8-g32"),
    "int8": Recipe("int8", "int8-g32", "int8-g32"),
    # llama.cpp's Q4_K_M: more bits for the value projections and for the down projections of MLPs and experts
    "q4_k_m": Recipe("q4_k_m", "q4_k", "q6_k", "q6_k", r"attention\.(\w+\.)?v\.weight$|\bdown\.weight$"),
}


def recipe(name: str | Recipe | Scheme) -> Recipe:
    """Return the recipe `name`: "q4_k_m", "int4", "int8", or a scheme for all matrices. Raises UnknownNameError otherwise."""
    if isinstance(name, Recipe):
        return name
    if isinstance(name, Scheme):
        return Recipe(name.name, name.name, name.name)
    if not isinstance(name, str) or name not in RECIPES:
        raise unknown_name("scheme", name, RECIPES)
    return RECIPES[name]


def storage(scheme: str | Recipe | Scheme | None) -> Recipe | str | None:
    """Return the argument `scheme` of `tk.load` as None (as stored), "none" (plain) or a Recipe.

    Raises UnknownNameError for other names.
    """
    if scheme is None or scheme == "none":
        return scheme
    try:
        return recipe(scheme)
    except UnknownNameError:
        raise unknown_name("scheme", scheme, [*RECIPES, "none"]) from None
