"""Which scheme holds which weight of a model: recipes as data, by the names that our models give their weights.

What every recipe leaves plain: vectors and scalars (norms, biases, one value a head or a layer), matrices of one row, routers
(a wrong choice of expert costs more than their few bytes), convolutions. Everything else is a matrix that a token reads, and is
quantised, the embedding table and the head too. Knows names and shapes, no model and no values.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.core.errors import unknown_name
from toolkit.weights.schemes import SCHEMES, Scheme, find_scheme

_PLAIN = re.compile(r"norm|router|conv")
_LAYER = re.compile(r"layers\.(\d+)\.")
# What llama.cpp takes where a row isn't a whole number of 256 weights (llama_tensor_get_type's fallbacks).
_SMALLER = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "int8-g32"}


@dataclass(frozen=True)
class Recipe:
    """A scheme for each weight.

    `base` holds the matrices, `tables` the head, and the embedding where it is the head as well. `more` holds the matrices
    that `wide` matches in the layers that matter most: the first and last eighth and every third between, as llama.cpp's
    `use_more_bits` picks them. Raises UnknownNameError for a scheme that there isn't.
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
        """The scheme of the weight called `name` ("layers.3.mlp.down.weight"), or None where it stays plain.

        `layers`: how many the model has; `tied`: the embedding is the head. K formats whose 256 weights don't divide a row
        give way to 32 at a time, as in llama.cpp; other schemes leave such a row plain.
        """
        meant = self.meant_for(name, shape, layers, tied)
        return None if meant is None or shape[-1] % meant.multiple else meant

    def meant_for(self, name: str, shape: Sequence[int], layers: int, tied: bool = False) -> Scheme | None:
        """As `scheme_for`, whether or not its groups divide the rows: None is for what is always plain."""
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
    # llama.cpp's Q4_K_M: values of attention and what leads out of an MLP (of every expert too) matter most.
    "q4_k_m": Recipe("q4_k_m", "q4_k", "q6_k", "q6_k", r"attention\.(\w+\.)?v\.weight$|\bdown\.weight$"),
}


def recipe(name: str | Recipe | Scheme) -> Recipe:
    """The recipe called `name`: "q4_k_m", "int4", "int8", or a scheme for all matrices. UnknownNameError otherwise."""
    if isinstance(name, Recipe):
        return name
    if isinstance(name, Scheme):
        return Recipe(name.name, name.name, name.name)
    if name not in RECIPES:
        raise unknown_name("scheme", name, RECIPES)
    return RECIPES[name]
