"""Register operations with PyTorch, and run their Triton launches or their reference in plain PyTorch.

`define` registers one operation. On CUDA it launches its kernels; Triton is imported by the first call. The virtual GPU
computes with the reference and records the launches of CUDA, less one for configs that split the work further.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode

from toolkit.gpu.virtual.effects.effect import Effect

if TYPE_CHECKING:
    from toolkit.kernels.base import Kernel, Launch, Shape
    from toolkit.tune.cards import Card

LEAST_CAPABILITY = (8, 0)  # the first capability with bf16 arithmetic
GPUS = ("cuda", "vgpu")
COUNTERS = 4096  # number of int32 zeros; kernels count finished blocks in them and reset them to zero at the end

Problem = tuple["Kernel", "Shape", dict[str, Tensor]]
_library = torch.library.Library("toolkit", "DEF")
_operations: dict[str, tuple[Callable[..., Problem], Callable[[dict[str, Tensor], Tensor], Any]]] = {}
_compiling_for: Card | None = None
_recorders: list[list[tuple[Kernel, Shape]]] = []


def define(
    schema: str,
    reference: Callable[..., Any],
    shapes: Callable[..., Any],
    problem: Callable[..., Problem],
    result: Callable[[dict[str, Tensor], Tensor], Any],
) -> None:
    """Register an operation with its PyTorch schema.

    Args:
        reference: The implementation in plain PyTorch, with the operands of the schema.
        shapes: Returns empty results for fake tensors, with the same operands.
        problem: Maps the operands to a kernel, the shape of the problem, and the kernel's inputs.
        result: Maps the kernel's outputs and the first operand to the operation's return value.
    """
    name = schema.split("(")[0]
    _library.define(schema)
    _library.impl(name, reference, "CPU")
    _library.impl(name, partial(by_kernels, name), "CUDA")
    torch.library.register_fake(f"toolkit::{name}", shapes, lib=_library)
    torch.library.register_torch_dispatch(f"toolkit::{name}", FunctionalTensorMode, partial(_decomposed, name), lib=_library)
    _operations[name] = problem, result


def by_kernels(name: str, *operands: Any) -> Any:
    """Run the operation `name` on CUDA, with the config that the tuner's lookup returns."""
    from toolkit.tune.lookup import choose

    problem, result = _operations[name]
    device = operands[0].device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # Triton launches on the current device
        kernel, shape, inputs = problem(*operands)
        outputs = kernel.outputs(shape, inputs)
        for launch in kernel.launches(shape, choose(kernel, shape, device).config, inputs, outputs):
            launch.run()
    return result(outputs, operands[0])


def _decomposed(name: str, mode: Any, op: Any, types: Any, operands: tuple[Any, ...], named: Any = None) -> Any:
    """Trace the operation: as kernel launches when compiling for a GPU (`compiling_for`), otherwise as one operator."""
    if _compiling_for is None or operands[0].device.type != "cuda":
        return mode.__torch_dispatch__(op, types, operands, named or {})
    with mode:
        with _launches(name, operands) as (_, found, outputs):
            for launch in found:
                launch.trace()
        return _operations[name][1](outputs, operands[0])


def describe_launches(name: str, operands: Sequence[Any]) -> str:
    """Return a string that identifies the compiled code of the operation: the kernel, its fingerprint, and its launches."""
    from toolkit.tune.identity import fingerprint

    with _launches(name, operands) as (kernel, found, outputs):
        launched = [(dict(one.constants), one.warps, one.stages) for one in found]
    return f"{kernel.name} {fingerprint(kernel)} {launched} {[tuple(map(str, t.shape)) for t in outputs.values()]}"


@contextmanager
def _launches(name: str, operands: Sequence[Any]) -> Iterator[tuple[Kernel, Sequence[Launch], dict[str, Tensor]]]:
    """Yield the kernel, the launches and the outputs of the operation on the GPU that is compiled for."""
    from toolkit.tune.lookup import choose

    assert _compiling_for is not None
    kernel, shape, inputs = _operations[name][0](*operands)
    with _by_example(shape) as example:
        outputs = kernel.outputs(shape, inputs)
        yield kernel, kernel.launches(shape, choose(kernel, example, _compiling_for).config, inputs, outputs), outputs


@contextmanager
def _by_example(shape: Shape) -> Iterator[Shape]:
    """Yield `shape` with its symbolic sizes replaced by the sizes of the example that is being traced.

    A kernel that makes a choice by size makes it for the example, and the code keeps that choice for every size. This is safe
    because kernels are correct for any length; only their speed depends on the choice. Scratch memory gets the size of the
    example, however, so the example must have the largest number of tokens (see `exporting.pieces`).
    """
    varying = {f.name: size for f in fields(shape) if isinstance(size := getattr(shape, f.name), torch.SymInt)}
    environments = {size.node.shape_env for size in varying.values()}
    with ExitStack() as guards:
        for environment in environments:
            guards.enter_context(environment.suppress_guards())
        yield replace(shape, **{name: size.node.hint for name, size in varying.items()})


@contextmanager
def compiling_for(card: Card) -> Iterator[None]:
    """Compile the operations on CUDA's fake tensors for `card`, which need not be installed."""
    global _compiling_for
    from toolkit.kernels.registry import kernels

    kernels()  # imported first, because under fake tensors the constants in the kernels' files would have no values
    before, _compiling_for = _compiling_for, card
    try:
        yield
    finally:
        _compiling_for = before


def operations() -> tuple[str, ...]:
    """Return the names of the registered operations."""
    return tuple(_operations)


def call(name: str, *operands: Any) -> Any:
    """Run the operation `name`. Inside `record_problems`, its problem is recorded too."""
    for recorder in _recorders:
        recorder.append(_operations[name][0](*operands)[:2])
    return getattr(torch.ops.toolkit, name)(*operands)


@contextmanager
def record_problems() -> Iterator[list[tuple[Kernel, Shape]]]:
    """Collect the (kernel, shape) of every operation that runs in the block, for tuning. Raises ImportError without Triton."""
    found: list[tuple[Kernel, Shape]] = []
    _recorders.append(found)
    try:
        yield found
    finally:
        _recorders.remove(found)


def on_gpu(*tensors: Tensor | None) -> bool:
    """Return whether operations run their kernels: the first tensor is on a supported GPU, and none requires a gradient."""
    first = tensors[0]
    assert first is not None
    if first.device.type not in GPUS or (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)):
        return False
    if _compiling_for is not None and first.device.type == "cuda":
        return _compiling_for.spec.compute_capability >= LEAST_CAPABILITY
    return first.device.type != "cuda" or _can_compile(first.device)


@cache
def _can_compile(device: torch.device) -> bool:
    """Return whether Triton is installed and the GPU supports bf16."""
    return importlib.util.find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


@cache
def _zeros(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def counters(like: Tensor, count: int) -> Tensor:
    """Return `count` int32 zeros. All kernels of a stream share them, which is safe because they run one after the other.

    A graph that is being captured gets its own zeros: the memory belongs to the graph, and the fill runs when the graph does.
    """
    device = like.device
    if count > COUNTERS or device.type != "cuda" or _compiling_for is not None or torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    return _zeros(device, torch.cuda.current_stream(device).cuda_stream)[:count]


def aligned(x: Tensor) -> Tensor:
    """Return `x` contiguous and aligned to 16 bytes, as the kernels load it; copies only if it is not."""
    x = x.contiguous()
    return x.clone() if x.storage_offset() * x.element_size() % 16 else x


def launches(name: str, n: int, moved: int, flops: float = 0.0) -> list[Effect]:
    """Return the effects of `n` launches, of which one does all the memory traffic and arithmetic."""
    main = Effect("kernel", 0, name, flops=flops, moved_bytes=moved, peak="bf16_flops")
    return [Effect("kernel", 0, f"{name}_part", cost="launch_host_ns")] * (n - 1) + [main]


def dtype_name(dtype: torch.dtype) -> str:
    """Return "bfloat16" for torch.bfloat16, as the shapes of kernels spell it."""
    return str(dtype).removeprefix("torch.")
