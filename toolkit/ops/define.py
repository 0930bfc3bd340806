"""How an operation is defined, and how it runs: its reference, its launches, its effects.

On a GPU, a real or a virtual one, and where no gradient is asked for, the operation runs. The virtual GPU computes by the
reference and sees the launches that CUDA would get (a config that splits its work further may make one more there). Triton
is imported by the first call on CUDA. It knows no operation.
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

LEAST_CAPABILITY = (8, 0)  # computes in bf16
GPUS = ("cuda", "vgpu")
COUNTERS = 4096  # int32 zeros that kernels count their blocks in, and leave as zeros

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
    """Register an operation: `problem` makes of its operands what a kernel takes, `result` of what that wrote, and of the
    first operand, what is returned.
    """
    name = schema.split("(")[0]
    _library.define(schema)
    _library.impl(name, reference, "CPU")
    _library.impl(name, partial(by_kernels, name), "CUDA")
    torch.library.register_fake(f"toolkit::{name}", shapes, lib=_library)
    torch.library.register_torch_dispatch(f"toolkit::{name}", FunctionalTensorMode, partial(_decomposed, name), lib=_library)
    _operations[name] = problem, result


def by_kernels(name: str, *operands: Any) -> Any:
    """The operation `name` as CUDA runs it: launched with the config that the tuner's lookup names."""
    from toolkit.tune.lookup import choose

    problem, result = _operations[name]
    device = operands[0].device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # Triton launches on the current one
        kernel, shape, inputs = problem(*operands)
        outputs = kernel.outputs(shape, inputs)
        for launch in kernel.launches(shape, choose(kernel, shape, device).config, inputs, outputs):
            launch.run()
    return result(outputs, operands[0])


def _decomposed(name: str, mode: Any, op: Any, types: Any, operands: tuple[Any, ...], named: Any = None) -> Any:
    """The operation as a compiler sees it: for a GPU that it compiles for (`compiling_for`) its launches, else whole."""
    if _compiling_for is None or operands[0].device.type != "cuda":
        return mode.__torch_dispatch__(op, types, operands, named or {})
    with mode:
        with _launches(name, operands) as (_, found, outputs):
            for launch in found:
                launch.trace()
        return _operations[name][1](outputs, operands[0])


def describe_launches(name: str, operands: Sequence[Any]) -> str:
    """What compiled code of the operation follows from, beside its operands: which kernel, as it is now, launched how."""
    from toolkit.tune.identity import fingerprint

    with _launches(name, operands) as (kernel, found, outputs):
        launched = [(dict(one.constants), one.warps, one.stages) for one in found]
    return f"{kernel.name} {fingerprint(kernel)} {launched} {[tuple(map(str, t.shape)) for t in outputs.values()]}"


@contextmanager
def _launches(name: str, operands: Sequence[Any]) -> Iterator[tuple[Kernel, Sequence[Launch], dict[str, Tensor]]]:
    """What the operation launches on the GPU that is compiled for, and what that writes."""
    from toolkit.tune.lookup import choose

    assert _compiling_for is not None
    kernel, shape, inputs = _operations[name][0](*operands)
    with _by_example(shape) as example:
        outputs = kernel.outputs(shape, inputs)
        yield kernel, kernel.launches(shape, choose(kernel, example, _compiling_for).config, inputs, outputs), outputs


@contextmanager
def _by_example(shape: Shape) -> Iterator[Shape]:
    """`shape` with the sizes it was traced with in place of those that may vary.

    Inside, what a kernel decides by a varying size is decided by that example, and holds for all: kernels are right for any
    length that they are told, and only their speed depends on what was decided. But scratch whose size was decided so is the
    example's: of tokens, the example has to be the most (see `exporting.pieces`).
    """
    varying = {f.name: size for f in fields(shape) if isinstance(size := getattr(shape, f.name), torch.SymInt)}
    environments = {size.node.shape_env for size in varying.values()}
    with ExitStack() as guards:
        for environment in environments:
            guards.enter_context(environment.suppress_guards())
        yield replace(shape, **{name: size.node.hint for name, size in varying.items()})


@contextmanager
def compiling_for(card: Card) -> Iterator[None]:
    """Inside, operations on CUDA's fake tensors are those of `card`, which needn't be there."""
    global _compiling_for
    from toolkit.kernels.registry import kernels

    kernels()  # imported now: on fake tensors the numbers that their files work out would be none
    before, _compiling_for = _compiling_for, card
    try:
        yield
    finally:
        _compiling_for = before


def operations() -> tuple[str, ...]:
    """Those that were defined, by name."""
    return tuple(_operations)


def call(name: str, *operands: Any) -> Any:
    """Run the operation `name`; a problem that runs inside `record_problems` is noted there."""
    for recorder in _recorders:
        recorder.append(_operations[name][0](*operands)[:2])
    return getattr(torch.ops.toolkit, name)(*operands)


@contextmanager
def record_problems() -> Iterator[list[tuple[Kernel, Shape]]]:
    """Gathers the (kernel, shape) of every operation that runs inside: what there is to tune. ImportError without Triton."""
    found: list[tuple[Kernel, Shape]] = []
    _recorders.append(found)
    try:
        yield found
    finally:
        _recorders.remove(found)


def on_gpu(*tensors: Tensor | None) -> bool:
    """Do operations run, rather than references? Where the first of `tensors` is on a GPU that they run on, and none of them
    is asked for a gradient.
    """
    first = tensors[0]
    assert first is not None
    if first.device.type not in GPUS or (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)):
        return False
    if _compiling_for is not None and first.device.type == "cuda":
        return _compiling_for.spec.compute_capability >= LEAST_CAPABILITY
    return first.device.type != "cuda" or _can_compile(first.device)


@cache
def _can_compile(device: torch.device) -> bool:
    """Is Triton there, and a card that computes in bf16?"""
    return importlib.util.find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


@cache
def _zeros(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def counters(like: Tensor, count: int) -> Tensor:
    """`count` int32 zeros, the same for every kernel of a stream: each waits for the one before it to be done.

    A graph that is being captured gets zeros of its own: its memory is the graph's, and its fill runs when the graph does.
    """
    device = like.device
    if count > COUNTERS or device.type != "cuda" or _compiling_for is not None or torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    return _zeros(device, torch.cuda.current_stream(device).cuda_stream)[:count]


def aligned(x: Tensor) -> Tensor:
    """`x`, contiguous and from a multiple of 16 bytes on, as kernels load it: itself, or a copy."""
    x = x.contiguous()
    return x.clone() if x.storage_offset() * x.element_size() % 16 else x


def launches(name: str, n: int, moved: int, flops: float = 0.0) -> list[Effect]:
    """`n` launches of which one moves and computes all that there is."""
    main = Effect("kernel", 0, name, flops=flops, moved_bytes=moved, peak="bf16_flops")
    return [Effect("kernel", 0, f"{name}_part", cost="launch_host_ns")] * (n - 1) + [main]


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16: how kernels' shapes call it."""
    return str(dtype).removeprefix("torch.")
