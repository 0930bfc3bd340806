"""The interface of a kernel: a reference in PyTorch, its Triton launches, its possible configs, and its cost.

A kernel describes its launches for a given config but does not choose the config. The same description launches on CUDA,
compiles for a GPU that isn't installed (with tensors on "meta"), and runs in Triton's interpreter on the CPU. Importing this
file does not import Triton.
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

from toolkit.core.errors import ToolkitError
from toolkit.core.units import plural
from toolkit.gpu.catalogue import GpuSpec
from toolkit.gpu.cuda.carveout import prefer_shared
from toolkit.kernels import interpreter

# Of operands and results, by the name that shapes have.
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
WARPS = (1, 2, 4, 8, 16, 32)  # of a block: Triton takes powers of 2, and CUDA at most 1024 threads

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, init=False)
class Config:
    """The launch configuration of a kernel: `Config(block_n=64, split=2, warps=4, stages=2)`. Its repr is valid code.

    `warps` and `stages` are Triton's num_warps and num_stages. `carveout` is how much of the largest shared memory of a
    multiprocessor the launches prefer, in percent: the rest of that memory is L1 cache. -1 leaves it to the driver. The other
    numbers belong to the kernel. Raises ToolkitError for values that Triton or CUDA would refuse for every kernel.
    """

    choices: tuple[tuple[str, int], ...]
    warps: int
    stages: int
    carveout: int

    def __init__(self, *, warps: int = 4, stages: int = 1, carveout: int = -1, **choices: int) -> None:
        # Convert to int: booleans and NumPy integers would be written to files in a form that can't be read back.
        object.__setattr__(self, "choices", tuple((name, int(index(value))) for name, value in choices.items()))
        object.__setattr__(self, "warps", int(index(warps)))
        object.__setattr__(self, "stages", int(index(stages)))
        object.__setattr__(self, "carveout", int(index(carveout)))
        if self.warps not in WARPS:
            raise ToolkitError(f"Config(warps={self.warps})", "not a power of 2 up to 32", f"Give one of {list(WARPS)}")
        if self.stages < 0:
            found = "a loop can't have fewer than 0 stages"
            raise ToolkitError(f"Config(stages={self.stages})", found, "Give 1 for a loop that is not pipelined, or more")
        if not -1 <= self.carveout <= 100:
            found = "not a share of the shared memory"
            raise ToolkitError(f"Config(carveout={self.carveout})", found, "Give 0 to 100, or -1 for the driver's choice")

    def __getitem__(self, name: str) -> int:
        return dict(self.choices)[name]

    def to_dict(self) -> dict[str, int]:
        """Return all numbers, ready for JSON. `Config(**config.to_dict())` equals this config."""
        found = {**dict(self.choices), "warps": self.warps, "stages": self.stages}
        return found if self.carveout < 0 else {**found, "carveout": self.carveout}

    def prefer(self, carveout: int) -> Config:
        """Return this config with this carveout."""
        return self if carveout == self.carveout else Config(**{**self.to_dict(), "carveout": carveout})

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={value}' for name, value in self.to_dict().items())})"


@dataclass(frozen=True)
class Shape:
    """The sizes, dtypes and variants of one problem. Each kernel has a subclass with its own fields (int, str or bool)."""

    @property
    def key(self) -> str:
        """The name of the shape in the tuner's files: "n=43008 k=5376 m=1 scheme=q4_k"."""
        return " ".join(f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self))

    @classmethod
    def from_key(cls, key: str) -> Shape:
        """Return the shape with this key. Raises ValueError if the key belongs to another kernel."""
        found = dict(word.split("=", 1) for word in key.split())
        names = {f.name for f in dataclasses.fields(cls)}
        if set(found) != names:
            raise ValueError(f"{key!r} names {sorted(found)}, a {cls.__name__} has {sorted(names)}")
        return cls(**{f.name: _value(f.type, found[f.name]) for f in dataclasses.fields(cls)})


def _value(kind: Any, text: str) -> int | str | bool:
    # The annotation is a string if the file that defines the shape postpones annotations, otherwise the type.
    if kind in ("bool", bool):
        if text not in ("False", "True"):
            raise ValueError(f"{text!r:.40} is neither True nor False")
        return text == "True"
    return int(text) if kind in ("int", int) else text


@dataclass(frozen=True)
class Cost:
    """The minimum work of a problem on any GPU: bytes that must be read and written, and operations."""

    bytes: int
    flops: float = 0.0
    peak: str = "fp32_flops"  # the field of GpuSpec that limits the operations


@dataclass(frozen=True)
class Launch:
    """One launch of a `triton.jit` function: grid, arguments by name (tensors, ints, floats), and constants."""

    function: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any] = field(default_factory=dict)
    warps: int = 4
    stages: int = 1
    # Whether it may start while the previous launch still runs. The kernel then waits by itself (see early.py). GPUs before
    # Hopper run launches one after the other.
    early: bool = False
    registers: int = 0  # the most registers per thread, so that more blocks fit on a multiprocessor; 0: the compiler's choice
    carveout: int = -1  # see `Config`; packages run without it

    def options(self, capability: tuple[int, int]) -> dict[str, Any]:
        """Return Triton's launch options for a GPU of this compute capability.

        Products and sums are fused, as by Triton's default before version 3.10.
        """
        found: dict[str, Any] = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}
        found |= {"maxnreg": self.registers} if self.registers else {}
        return found | {"launch_pdl": True} if self.early and capability >= (9, 0) else found

    def run(self) -> Any:
        """Launch on the device of the tensors and return Triton's compiled kernel. An empty grid does nothing."""
        if 0 in self.grid:
            return None
        if type(self.function).__module__ == interpreter.MODULE:
            interpreter.index_by_arrays()
        options = self.options(current_capability() if self.early else (0, 0))
        compiled = self.function[self.grid](**self.arguments, **self.constants, **options)
        compiled = compiled.result() if hasattr(compiled, "result") else compiled  # compiled in the background
        if compiled is not None and current_capability() != (0, 0):  # nothing is compiled for the interpreter
            prefer_shared(compiled, self.carveout)
        return compiled

    def compile(self, capability: tuple[int, int]) -> Any:
        """Compile the kernel for the current GPU, which has this compute capability, as launching it would.

        Returns Triton's compiled kernel. Nothing is launched, so the tensors may be on "meta", where they count as aligned
        to 16 bytes. Raises Triton's CompilationError.
        """
        options = self.options(capability)
        return self.function.warmup(grid=self.grid, **self.arguments, **self.constants, **options)

    def trace(self) -> None:
        """Add the launch to the graph that is being traced instead of running it.

        Inductor passes no limit of registers, so packages run without it.
        """
        options = {"num_warps": self.warps, "num_stages": self.stages}
        torch.library.wrap_triton(self.function)[self.grid](**self.arguments, **self.constants, **options)


def current_capability() -> tuple[int, int]:
    """Return the compute capability of the current CUDA GPU; (0, 0) if CUDA is not in use."""
    return _capability(torch.cuda.current_device()) if torch.cuda.is_initialized() else (0, 0)


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


class Kernel(ABC):
    """An operation with a reference and Triton launches. Subclasses are stateless; one instance of each is registered."""

    name: ClassVar[str]
    shape_type: ClassVar[type[Shape]]
    # Shapes of real models at batch 1, by a readable name ("gemma4-31b gate+up"), which the tuner and the explorer offer.
    known: ClassVar[Mapping[str, Shape]]
    # Fields of the shape that scale the work without changing the resources that a config takes on an SM. The tuner's lookup
    # relies on this: a config timed with slots=32768 is used for slots=8192, too. A bool switches a small part of the work.
    lengths: ClassVar[tuple[str, ...]] = ()
    carveouts: ClassVar[tuple[int, ...]] = ()  # that `tune.in_step` tries with the config that is fastest in a program
    cosine: ClassVar[float] = 0.999  # the smallest cosine similarity to the reference that passes
    max_abs: ClassVar[float] = 1e-2  # the largest error that passes, relative to the reference's largest value

    def __repr__(self) -> str:
        return f"Kernel({self.name!r}, {plural(len(self.known), 'known shape')})"

    @abstractmethod
    def space(self, shape: Shape) -> Sequence[Config]:
        """Return every config that makes sense for `shape` on some GPU, the safe default first."""

    @abstractmethod
    def inputs(self, shape: Shape, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
        """Return random inputs for `seed`, as demanding as real ones; on "meta", tensors without values."""

    @abstractmethod
    def reference(self, shape: Shape, inputs: Tensors) -> tuple[Tensor, ...]:
        """Compute the results in plain PyTorch on the inputs' device, without changing the inputs."""

    @abstractmethod
    def outputs(self, shape: Shape, inputs: Tensors) -> dict[str, Tensor]:
        """Return uninitialized results and scratch on the device of the inputs, the results first, in the reference's order."""

    @abstractmethod
    def launches(self, shape: Shape, config: Config, inputs: Tensors, outputs: Tensors) -> Sequence[Launch]:
        """Return the launches in order. They depend on shapes and dtypes only, so tensors on "meta" suffice for compiling."""

    @abstractmethod
    def cost(self, shape: Shape) -> Cost:
        """Return the memory traffic and arithmetic that any implementation needs."""

    def modelled_ns(self, shape: Shape, config: Config, spec: GpuSpec) -> float | None:
        """Return the kernel's own time estimate if it is better than bytes / bandwidth, or None."""
        return None

    def run(self, shape: Shape, config: Config, inputs: Tensors) -> tuple[Tensor, ...]:
        """Run all launches and return the results."""
        outputs = self.outputs(shape, inputs)
        for launch in self.launches(shape, config, inputs, outputs):
            launch.run()
        return tuple(outputs.values())[: self.results(shape)]

    def results(self, shape: Shape) -> int:
        """Return how many of the outputs are results; the others are scratch."""
        return 1


def arrivals(inputs: Tensors, count: int, device: torch.device) -> Tensor:
    """Return `count` int32 zeros in which blocks count themselves and which the last one resets: an input, or new."""
    return inputs["arrivals"] if "arrivals" in inputs else torch.zeros(count, dtype=torch.int32, device=device)


def config_grid(
    default: Config, warps: Sequence[int] = (), stages: Sequence[int] = (), **choices: Sequence[int]
) -> list[Config]:
    """Return `default` followed by every combination of the given values, without duplicates."""
    names = list(choices)
    every = itertools.product(*choices.values(), warps or (default.warps,), stages or (default.stages,))
    found = [Config(**dict(zip(names, values[:-2], strict=True)), warps=values[-2], stages=values[-1]) for values in every]
    return list(dict.fromkeys([default, *found]))
