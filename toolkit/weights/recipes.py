"""Quantization recipes: choose a scheme for each weight of a model from its name and shape.

Every recipe leaves vectors and scalars (norms, biases, values per head or layer), matrices of one row, convolutions and
routers unquantized (routers are small, and a wrong choice of expert costs much accuracy). All other matrices are quantized,
including the embedding table and the head.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.core.errors import unknown_name
from toolkit.weights.schemes import SCHEMES, Scheme, find_scheme

_PLAIN = re.compile(r"norm|router|conv")
_LAYER = re.compile(r"layers\.(\d+)\.")
# llama.cpp's replacements where the row length isn't a multiple of 256 (the fallbacks of llama_tensor_get_type)
_SMALLER = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "int8-g32"}


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

        `layers` is the number of layers; `tied` says that the embedding is also the head. If the row length isn't a multiple
        of 256, K formats are replaced by schemes with groups of 32, as in llama.cpp. Returns None if the groups don't fit.
        """
        meant = self.meant_for(name, shape, layers, tied)
        return None if meant is None or shape[-1] % meant.multiple else meant

    def meant_for(self, name: str, shape: Sequence[int], layers: int, tied: bool = False) -> Scheme | None:
        """Return the scheme like `scheme_for`, but even if its groups don't divide the rows."""
        if len(shape) < 2 or shape[-2] == 1 or not name.endswith("weight") or _PLAIN.search(name):
            return None
        chosen = self.base
        if name == "head.weight" or (name == "embed.weight" and tied):
            chosen = self.tables
        layer = _LAYER.match(name)
        if self.more and layer and re.search(self.wide, name) and _more_bits(int(layer[1]), layers):
            chosen = self.more
        if shape[-1] % SCHEMES[chosen].multiple:
            chosen = _SMALLER.get(chosen, chosen)
        return SCHEMES[chosen]


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
