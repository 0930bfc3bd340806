"""Models in other processes: what the functions that take a model need to know about those that a cluster holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from toolkit.core.errors import ModelError


class Remote(ABC):
    """A model in other processes. `tk.generate` and `tk.compare` pass their arguments on to it."""

    clock: str  # "measured" or "modelled", as that of a device
    named: str  # its name, scheme and dtype, as arguments of `tk.load`
    reports: Sequence[Any]  # what each process loaded

    @abstractmethod
    def generate(self, prompt: Any, decode: Any, **options: Any) -> Any:
        """Generate there; see `tk.generate`."""

    @abstractmethod
    def compare(self, prompt: Any, decode: Any, **options: Any) -> Any:
        """Compare strategies there; see `tk.compare`."""


def check_here(model: object, asked: str, do: str) -> None:
    """Raise ModelError if the weights of `model` are in other processes.

    In `do`, "{named}" stands for the arguments that name the model, and "{divided}" for these with tensor_parallel.
    """
    if isinstance(model, Remote):
        divided = f"{model.named}, tensor_parallel={len(model.reports)}"
        raise ModelError(asked, "the ranks of a cluster hold its weights", do.format(named=model.named, divided=divided))
