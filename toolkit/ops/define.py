"""Register operations with PyTorch, and run their Triton launches or their reference in plain PyTorch.

`define` registers one operation. On CUDA it launches its kernels, by a plan if it has run before on operands like these (see
`plans`); Triton is imported by the first call. The virtual GPU computes with the reference and records the launches of CUDA,
less one for configs that split the work further. It records a sum over ranks apart from the launch that receives it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import fields, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.compiler import is_compiling

from toolkit.gpu.virtual.effects.effect import Effect
from toolkit.ops import plans, zeros
from toolkit.ops.launch_plan import MISSING, Call, Operation, stand_in
from toolkit.ops.launch_plan import Problem as Problem
from toolkit.ops.tape import recording
from toolkit.weights.packed import Parts

if TYPE_CHECKING:
    from toolkit.kernels.base import Kernel, Launch, Shape
    from toolkit.tune.cards import Card

LEAST_CAPABILITY = (8, 0)  # the first capability with bf16 arithmetic
GPUS = ("cuda", "vgpu")

_library = torch.library.Library("toolkit", "DEF")
_operations: dict[str, Operation] = {}
_compiling_for: Card | None = None
_recorders: list[Callable[[Kernel, Shape, dict[str, Tensor]], None]] = []
_launching = ContextVar("launching", default=True)


def define(
    schema: str,
    reference: Callable[..., Any],
    shapes: Callable[..., Any],
    problem: Callable[..., Problem],
    result: Callable[[dict[str, Tensor], Tensor], Any],
    hints: int = 0,
) -> None:
    """Register an operation with its PyTorch schema.

    Args:
        reference: The implementation in plain PyTorch, with the operands of the schema.
        shapes: Returns empty results for fake tensors, with the same operands.
        problem: Maps the operands to a kernel, the shape of the problem, and the kernel's inputs.
        result: Maps the kernel's outputs and the first operand to the operation's return value.
        hints: How many operands at the end only the reference reads.
    """
    name = schema.split("(")[0]
    _library.define(schema)
    _library.impl(name, reference, "CPU")
    _library.impl(name, partial(by_kernels, name), "CUDA")
    torch.library.register_fake(f"toolkit::{name}", shapes, lib=_library)
    torch.library.register_torch_dispatch(f"toolkit::{name}", FunctionalTensorMode, partial(_decomposed, name), lib=_library)
    _operations[name] = Operation(name, problem, result, hints)


def by_kernels(name: str, *operands: Any) -> Any:
    """Run the operation `name` on CUDA: by its plan, or else with the config that the tuner's lookup returns."""
    operation = _operations[name]
    planned = plans.ENABLED and _compiling_for is None and not _recorders and operands[0].device.type in zeros.KINDS
    found = plans.replay(operation, operands) if planned else MISSING
    return _by_kernels(operation, operands, planned) if found is MISSING else found


def _by_kernels(operation: Operation, operands: tuple[Any, ...], planned: bool) -> Any:
    """Run the operation without a plan; if it may be `planned`, make a plan for the next call."""
    from toolkit.tune.lookup import choose

    device, current = operands[0].device, plans.current()
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # Triton launches on the current device
        kernel, shape, inputs = operation.problem(*operands)
        config = choose(kernel, shape, device).config
        outputs = kernel.outputs(shape, inputs)
        launches = kernel.launches(shape, config, inputs, outputs)
        compiled = [launch.run() for launch in launches]
        returned = operation.result(outputs, operands[0])
        if planned:
            call = Call(operands, kernel, shape, config, inputs, outputs, launches, compiled, returned)
            plans.learn(operation, call, current)
    return returned


def _decomposed(name: str, mode: Any, op: Any, types: Any, operands: tuple[Any, ...], named: Any = None) -> Any:
    """Trace the operation: as kernel launches when compiling for a GPU (`compiling_for`), otherwise as one operator."""
    if _compiling_for is None or operands[0].device.type != "cuda":
        return mode.__torch_dispatch__(op, types, operands, named or {})
    with mode:
        with _launches(name, operands) as (_, found, outputs):
            for launch in found:
                launch.trace()
        return _operations[name].result(outputs, operands[0])


def problem_of(name: str, operands: Sequence[Any]) -> tuple[Kernel, Shape]:
    """Return the kernel of the operation `name` on these operands, and the shape of its problem."""
    return _operations[name].problem(*operands)[:2]


def has_kernel(name: str) -> bool:
    """Return whether the operation launches a kernel of the toolkit; collectives don't."""
    return name in _operations


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
    kernel, shape, inputs = _operations[name].problem(*operands)
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
    if direct(operands[0]):
        operation = _operations[name]
        found = plans.replay(operation, operands)
        if found is not MISSING:
            return found
        if plans.key_of(operation, operands) is not None:
            return _by_kernels(operation, operands, True)
    elif (tape := recording()) is not None:
        found = plans.record(_operations[name], operands, tape)
        if found is not MISSING:
            return found
        tape.refuse(f"{name} has no plan")
    if _recorders:
        kernel, shape, inputs = _operations[name].problem(*operands)
        for recorder in _recorders:
            recorder(kernel, shape, inputs)
        if operands[0].device.type in zeros.KINDS and not _launching.get():
            outputs = kernel.outputs(shape, inputs)
            for output in outputs.values():
                if not output.is_floating_point():
                    output.zero_()  # it may be read as indices
            return _operations[name].result(outputs, operands[0])
    plain = [list(operand) if type(operand) is Parts else operand for operand in operands]
    return getattr(torch.ops.toolkit, name)(*plain)


def is_launched() -> bool:
    """Return whether operations launch their kernels now; otherwise they are traced for a package."""
    return _compiling_for is None


def describing() -> bool:
    """Return whether this thread is inside of `describe_problems`, where operations launch nothing on CUDA."""
    return not _launching.get()


def direct(first: Tensor) -> bool:
    """Return whether operations on `first` run by their plans: nothing observes, compiles, traces or records them."""
    return not is_compiling() and not _recorders and _compiling_for is None and plans.unobserved(first)


@contextmanager
def record_problems() -> Iterator[list[tuple[Kernel, Shape]]]:
    """Collect the (kernel, shape) of every operation that runs in the block, for tuning. Raises ImportError without Triton."""
    found: list[tuple[Kernel, Shape]] = []
    with _recording(lambda kernel, shape, inputs: found.append((kernel, shape))):
        yield found


@contextmanager
def describe_problems() -> Iterator[list[Problem]]:
    """As `record_problems`, but collect inputs, too, which are on "meta", and launch nothing on CUDA.

    So nothing is compiled. The results of operations that this thread runs on CUDA are zeros if they are integers, and
    uninitialized otherwise.
    """
    found: list[Problem] = []

    def add(kernel: Kernel, shape: Shape, inputs: dict[str, Tensor]) -> None:
        found.append((kernel, shape, {name: stand_in(tensor) for name, tensor in inputs.items()}))

    before = _launching.get()
    try:
        _launching.set(False)
        with _recording(add):
            yield found
    finally:
        _launching.set(before)


@contextmanager
def _recording(recorder: Callable[[Kernel, Shape, dict[str, Tensor]], None]) -> Iterator[None]:
    try:
        _recorders.append(recorder)
        yield
    finally:
        if recorder in _recorders:  # an interrupt may come first
            _recorders.remove(recorder)


def on_gpu(*tensors: Tensor | None) -> bool:
    """Return whether operations run their kernels: the first tensor is on a supported GPU, and none requires a gradient."""
    first = tensors[0]
    assert first is not None
    device = first.device
    kind = device.type
    if kind not in GPUS or (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)):
        return False
    if kind != "cuda":
        return True
    return _can_compile(device) if _compiling_for is None else _compiling_for.spec.compute_capability >= LEAST_CAPABILITY


@cache
def _can_compile(device: torch.device) -> bool:
    """Return whether Triton is installed and the GPU supports bf16."""
    return importlib.util.find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


def counters(like: Tensor, count: int) -> Tensor:
    """Return `count` int32 zeros on the device of `like`, which kernels set back to zero (see `toolkit.ops.zeros.counters`)."""
    if _compiling_for is not None:
        return torch.zeros(count, dtype=torch.int32, device=like.device)
    return zeros.counters(like, count)


def aligned(x: Tensor) -> Tensor:
    """Return `x` contiguous and aligned to 16 bytes, as the kernels load it; copies only if it is not."""
    if not x.is_contiguous():
        return x.contiguous()  # new memory
    offset = x.storage_offset()
    return x.clone() if offset and offset * x.element_size() % 16 else x


def aligned_rows(x: Tensor) -> Tensor:
    """Return `x` [T, n], whose rows may lie apart, aligned to 16 bytes; copies only if it or its rows are not.

    Triton loads whole rows fast if it knows that they lie a multiple of 16 elements apart.
    """
    fits = x.stride(1) == 1 and not x.stride(0) % 16 and not x.storage_offset() * x.element_size() % 16
    return x if fits else aligned(x)


def launches(
    name: str, n: int, moved: int, flops: float = 0.0, *, floor: float = 1.0, share: float = 1.0, blocks: int = 0
) -> list[Effect]:
    """Return the effects of `n` launches, of which the last does all the memory traffic and arithmetic.

    For `floor`, `share` and `blocks` of the last launch see `Effect`. The rules take them from the timings of the kernels on an
    H200 (`tune/tuned/h200.json`), as `fixed time + bytes / (share * bandwidth)` fits them; `tests/ops/test_times.py` compares.
    """
    main = Effect("kernel", 0, name, flops=flops, moved_bytes=moved, peak="bf16_flops", floor=floor, share=share, blocks=blocks)
    return [Effect("kernel", 0, f"{name}_part", cost="launch_host_ns")] * (n - 1) + [main]
