"""What of Inductor is different while a piece is compiled for a GPU: nothing runs on one, so nothing is allocated there.

Inductor runs every Triton kernel once on random tensors of full size, to choose among configs and to have it compiled. Ours
have one config, which the tuner's lookup named, and the few that Inductor writes itself take their first: all are compiled
and none is loaded or run. So a layer is compiled beside whatever else is on the GPU, or for another GPU than is there.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from toolkit.errors import PackageError
from toolkit.kernels.tune.cards import Card


def check_known(card: Card) -> None:
    """PackageError where this PyTorch's compiler isn't the one that is known here."""
    import torch._higher_order_ops.triton_kernel_wrap as wrap

    if not hasattr(wrap, "identify_mutated_tensors"):
        found = f"the compiler of PyTorch {torch.__version__} isn't known"
        raise PackageError(f"an export for {card.spec.name}", found, "Install torch 2.11, with which it was tested")


@contextmanager
def compiling_only(card: Card) -> Iterator[None]:
    """Inside, `aoti_compile_and_package` compiles for `card` and runs nothing. For one thread of a process at a time."""
    import torch._higher_order_ops.triton_kernel_wrap as wrap
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._subclasses import FakeTensorMode
    from triton.compiler import CompiledKernel
    from triton.runtime import driver

    from toolkit.kernels.tune.compile_worker import AbsentGpu

    tune = PythonWrapperCodegen.generate_and_run_autotune_block

    def on_fake_tensors(wrapper: Any) -> None:
        with FakeTensorMode():
            tune(wrapper)

    with ExitStack() as replaced:
        for owner, name, instead in (
            (wrap, "identify_mutated_tensors", lambda kernel, operands, _: _written(kernel, operands, card)),
            (PythonWrapperCodegen, "generate_and_run_autotune_block", on_fake_tensors),
            (CachingAutotuner, "run", _keep),
            (CompiledKernel, "_init_handles", _unloaded),
            (driver, "_active", AbsentGpu(_number(card))),  # whom kernels ask which GPU they are compiled for
            (triton_helpers, "set_driver_to_gpu", lambda: None),
            (DeviceProperties, "create", lambda device: _properties(DeviceProperties, card, device)),
        ):
            replaced.enter_context(patch.object(owner, name, instead))
        yield


def _written(kernel: Any, operands: dict[str, Any], card: Card) -> list[str]:
    """Which tensors a Triton kernel writes, by PyTorch's analysis of Triton's representation of it.

    That gives up at inline assembly that isn't marked as pure, and takes everything for written; ours waits, converts and
    multiplies, but writes no memory. It also makes constants of all numbers, which have no `.to`.
    """
    import torch._higher_order_ops.triton_kernel_wrap as wrap
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    function = kernel.fn if hasattr(kernel, "configs") else kernel
    signature = {p.name: "constexpr" if p.is_constexpr else _kind(operands[p.name]) for p in function.params}
    constants = {name: operands[name] for name, kind in signature.items() if kind == "constexpr"}
    target = GPUTarget("cuda", _number(card), 32)
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options({})
    source = ASTSource(function, signature, constants, {})
    module = source.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)
    found = {
        name: {value: [_pure(op) for op in ops] for value, ops in blocks.items()}
        for name, blocks in wrap.ttir_to_functions(module).items()
    }
    names = [name for name, kind in signature.items() if kind != "constexpr"]
    wrap.analyze_kernel_mutations.reset()  # type: ignore[attr-defined]
    wrap.get_tma_stores.reset()  # type: ignore[attr-defined]
    written = wrap.analyze_kernel_mutations(found, next(iter(found)), len(names))  # type: ignore[attr-defined]
    # an address is a pointer and numbers: those count as written, too
    return [name for name, is_written in zip(names, written, strict=True) if is_written and signature[name].startswith("*")]


def _kind(operand: Any) -> str:
    """How Triton's signatures call the type of an operand; None is a constant."""
    from triton._utils import canonicalize_dtype

    if hasattr(operand, "get_dtype") or hasattr(operand, "dtype"):  # of Inductor, of PyTorch
        dtype = operand.get_dtype() if hasattr(operand, "get_dtype") else operand.dtype
        return f"*{canonicalize_dtype(dtype)}"
    if operand is None or isinstance(operand, str | bool):
        return "constexpr"
    return "fp32" if isinstance(operand, float) else "i64"


def _pure(op: Any) -> Any:
    return dataclasses.replace(op, is_pure=True) if op.name == "tt.elementwise_inline_asm" else op


def _keep(kernel: Any, *operands: Any, stream: Any, **named: Any) -> None:
    """In place of launching a kernel: its compiled code goes where the wrapper's code will look for it."""
    if not kernel.launchers:
        began = time.time_ns()
        kernel.precompile()
        kernel.precompile_time_taken_ns = time.time_ns() - began
    kernel.launchers = kernel.launchers[:1]
    kernel.save_gpu_kernel(stream, kernel.launchers[0])


def _unloaded(kernel: Any) -> None:
    """In place of loading a compiled kernel onto the GPU, which may be another than it is for."""
    kernel._run = kernel.module = kernel.function = "not loaded"
    kernel.n_regs = kernel.n_spills = 0


def _properties(kind: Any, card: Card, device: Any) -> Any:
    """What Inductor asks of a device, of the card that is compiled for."""
    spec = card.spec
    major = spec.compute_capability[0]
    return kind("cuda", device.index, spec.sms, _number(card), major, spec.registers_per_sm, spec.threads_per_sm, 1024, 32)


def _number(card: Card) -> int:
    """Of a compute capability: 90 for 9.0."""
    major, minor = card.spec.compute_capability
    return 10 * major + minor
