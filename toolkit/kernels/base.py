"""What a kernel is here: a reference in PyTorch, Triton launches, the configs it may be launched with, what it moves.

A kernel describes its launches; it doesn't choose. The same description launches on CUDA, compiles for a GPU that isn't
there (tensors on "meta"), and runs under Triton's interpreter on the CPU. Importing this file imports no Triton.
"""

from __future__ import annotations

import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import index
from typing import Any, ClassVar

import torch
from torch import Tensor

from toolkit.gpu.catalogue import GpuSpec

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, init=False)
class Config:
    """How a kernel is launched: `Config(block_n=64, split=2, warps=4, stages=2)`. Its repr can be pasted.

    `warps` and `stages` are Triton's num_warps and num_stages; every other number is one of the kernel's own choices.
    """

    choices: tuple[tuple[str, int], ...]
    warps: int
    stages: int

    def __init__(self, *, warps: int = 4, stages: int = 1, **choices: int) -> None:
        # As plain ints: True and NumPy's numbers would be written into files as what can't be read again.
        object.__setattr__(self, "choices", tuple((name, int(index(value))) for name, value in choices.items()))
        object.__setattr__(self, "warps", int(index(warps)))
        object.__setattr__(self, "stages", int(index(stages)))

    def __getitem__(self, name: str) -> int:
        return dict(self.choices)[name]

    def to_dict(self) -> dict[str, int]:
        """All its numbers, ready for JSON: `Config(**config.to_dict())` is the same again."""
        return {**dict(self.choices), "warps": self.warps, "stages": self.stages}

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={value}' for name, value in self.to_dict().items())})"


@dataclass(frozen=True)
class Shape:
    """The sizes, dtypes and variants of one problem; each kernel has a subclass with its own fields (int, str or bool)."""

    @property
    def key(self) -> str:
        """How the tuner's files call it: "n=43008 k=5376 m=1 scheme=q4_k"."""
        return " ".join(f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self))

    @classmethod
    def from_key(cls, key: str) -> Shape:
        """The inverse of `key`. Raises ValueError for one that isn't of this kernel."""
        found = dict(word.split("=", 1) for word in key.split())
        names = {f.name for f in dataclasses.fields(cls)}
        if set(found) != names:
            raise ValueError(f"{key!r} names {sorted(found)}, a {cls.__name__} has {sorted(names)}")
        return cls(**{f.name: _value(f.type, found[f.name]) for f in dataclasses.fields(cls)})


def _value(kind: Any, text: str) -> int | str | bool:
    # The annotation is a word where the file that defines the shape postpones its annotations, else the type itself.
    return text == "True" if kind in ("bool", bool) else int(text) if kind in ("int", int) else text


@dataclass(frozen=True)
class Cost:
    """What a problem asks of any GPU: bytes read and written at least once, and operations."""

    bytes: int
    flops: float = 0.0
    peak: str = "fp32_flops"  # the GpuSpec's figure that limits the operations


@dataclass(frozen=True)
class Launch:
    """One launch of a `triton.jit` function: its grid, its arguments by name (tensors, ints, floats), its constants."""

    function: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any] = field(default_factory=dict)
    warps: int = 4
    stages: int = 1
    # May begin while the launch before it still runs, of this operation or of another: it waits itself (see early.py). GPUs
    # before Hopper run one after the other.
    early: bool = False

    def options(self, capability: tuple[int, int]) -> dict[str, Any]:
        """What Triton is told of the launch on a GPU of this capability."""
        found: dict[str, Any] = {"num_warps": self.warps, "num_stages": self.stages}
        return found | {"launch_pdl": True} if self.early and capability >= (9, 0) else found

    def run(self) -> Any:
        """Launch it on its tensors' device; returns Triton's compiled kernel. Nothing happens for an empty grid."""
        if 0 in self.grid:
            return None
        options = self.options(current_capability() if self.early else (0, 0))
        return self.function[self.grid](**self.arguments, **self.constants, **options)

    def trace(self) -> None:
        """Put it into the graph that is being traced, in place of launching it."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        torch.library.wrap_triton(self.function)[self.grid](**self.arguments, **self.constants, **options)


def current_capability() -> tuple[int, int]:
    """Of the current CUDA GPU; (0, 0) where none is in use."""
    return _capability(torch.cuda.current_device()) if torch.cuda.is_initialized() else (0, 0)


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


class Kernel(ABC):
    """An operation with a reference and Triton launches. Subclasses are stateless; one instance of each is registered."""

    name: ClassVar[str]
    shape_type: ClassVar[type[Shape]]
    # Shapes of the real models at batch 1, by a name people know ("gemma4-31b gate+up"): what the tuner and the explorer offer.
    known: ClassVar[Mapping[str, Shape]]
    # Fields of the shape that say how often, and not how: what a config takes of an SM doesn't depend on them. The tuner's
    # lookup goes by these: a config timed with slots=32768 serves slots=8192.
    lengths: ClassVar[tuple[str, ...]] = ()
    cosine: ClassVar[float] = 0.999  # the gate: at least this, and `max_abs` at most, against the reference
    max_abs: ClassVar[float] = 1e-2  # ... relative to the reference's largest value

    @abstractmethod
    def space(self, shape: Shape) -> Sequence[Config]:
        """Every config that makes sense for `shape` on some GPU, the safe default first; limits are checked elsewhere."""

    @abstractmethod
    def inputs(self, shape: Shape, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
        """Random inputs, new for every seed, as hard as real ones; on "meta" without values."""

    @abstractmethod
    def reference(self, shape: Shape, inputs: Tensors) -> tuple[Tensor, ...]:
        """What comes of `inputs`, in plain PyTorch on their device. Inputs that the kernel writes in place are not changed."""

    @abstractmethod
    def outputs(self, shape: Shape, inputs: Tensors) -> dict[str, Tensor]:
        """Uninitialised results and scratch, on the inputs' device: the results first, in the reference's order."""

    @abstractmethod
    def launches(self, shape: Shape, config: Config, inputs: Tensors, outputs: Tensors) -> Sequence[Launch]:
        """What to launch, in order. Depends on shapes and dtypes only, so that tensors on "meta" do for compiling."""

    @abstractmethod
    def cost(self, shape: Shape) -> Cost:
        """What the problem moves and computes, however it is done."""

    def modelled_ns(self, shape: Shape, config: Config, spec: GpuSpec) -> float | None:
        """A kernel's own estimate for a GPU, where it knows better than bytes over bandwidth; None leaves it to the tuner."""
        return None

    def run(self, shape: Shape, config: Config, inputs: Tensors) -> tuple[Tensor, ...]:
        """Launch everything; returns as many results as the reference."""
        outputs = self.outputs(shape, inputs)
        for launch in self.launches(shape, config, inputs, outputs):
            launch.run()
        return tuple(outputs.values())[: self.results(shape)]

    def results(self, shape: Shape) -> int:
        """How many of the outputs are results; the rest is scratch."""
        return 1


def arrivals(inputs: Tensors, count: int, device: torch.device) -> Tensor:
    """`count` int32 zeros that blocks count themselves in and the last sets back: given beside the inputs, or new."""
    return inputs["arrivals"] if "arrivals" in inputs else torch.zeros(count, dtype=torch.int32, device=device)


def config_grid(
    default: Config, warps: Sequence[int] = (), stages: Sequence[int] = (), **choices: Sequence[int]
) -> list[Config]:
    """`default` and then every combination of the given values, each once."""
    names = list(choices)
    every = itertools.product(*choices.values(), warps or (default.warps,), stages or (default.stages,))
    found = [Config(**dict(zip(names, values[:-2], strict=True)), warps=values[-2], stages=values[-1]) for values in every]
    return list(dict.fromkeys([default, *found]))
