"""What of Inductor is different in a process that compiles for a GPU: nothing runs on one, and none has to be there.

Inductor asks the GPU what it is, and runs every Triton kernel once on random tensors of full size, to choose among configs and
to have it compiled. Here it is told of the GPU that is compiled for; our kernels have one config, which the tuner's lookup
named, and the few that Inductor writes itself take their first: all are compiled and none is loaded or run. So a layer is
compiled beside whatever else is on the GPU, by many processes at once, or for another GPU than is there.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from toolkit.core.errors import PackageError
from toolkit.tune.cards import Card

OPTIONS: dict[str, Any] = {
    "triton.autotune_at_compile_time": True,  # where kernels are compiled, all of them (see `compile_only_for`)
    "_use_fp64_for_unbacked_floats": False,  # a float that a kernel is given is fp32, as where Triton launches it
    "joint_graph_constant_folding": False,  # fills its constants on the GPU
    "shape_padding": False,  # times products there
    "eager_numerics.division_rounding": True,  # quotients as PyTorch's, to the last bit
}

# What Inductor would sum in another order, or by another exponential, than PyTorch's kernels do: where that is off by the last
# bit in fp32 it is now and then another number in bf16, and by way of one of 256 experts another token. A package calls those.
AS_PYTORCH = ("sigmoid", "_softmax", "sum")

_known: dict[tuple[Any, ...], list[str]] = {}  # by kernel, signature and constants: what is written


def check_known(card: Card) -> None:
    """PackageError where this PyTorch's compiler isn't the one that is known here."""
    import torch._higher_order_ops.triton_kernel_wrap as wrap

    if not hasattr(wrap, "identify_mutated_tensors"):
        found = f"the compiler of PyTorch {torch.__version__} isn't known"
        raise PackageError(f"an export for {card.spec.name}", found, "Install torch 2.11, with which it was tested")


def declare_arrays_once() -> None:
    """Have the C++ that this process's Inductor writes declare its arrays of sizes before their use, as newer PyTorches do.

    2.11 remembers what is declared by the `id` of a bound method, which may be that of another one that is gone: now and then
    code named an array that came further down, and g++ refused it.
    """
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    setattr(CppWrapperCpu, "codegen_int_array_var", _with_lasting_methods(CppWrapperCpu.codegen_int_array_var))  # noqa: B010


def _with_lasting_methods(declare: Callable[..., str]) -> Callable[..., str]:
    """`declare(wrapper, array, writeline, ...)`, which is given the same bound method whenever it is the same object's."""

    @functools.wraps(declare)
    def declare_once(wrapper: Any, array: str, writeline: Any, *rest: Any, **named: Any) -> str:
        lasting = wrapper.__dict__.setdefault("_lasting_methods", {})
        return declare(wrapper, array, lasting.setdefault(writeline, writeline), *rest, **named)

    return declare_once


def compile_only_for(card: Card) -> None:
    """From now on `aoti_compile_and_package` compiles for `card`, and no GPU is used; for a process that does nothing else."""
    import torch._higher_order_ops.triton_kernel_wrap as wrap
    from torch._dynamo import device_interface
    from torch._inductor import lowering
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.decomposition import decompositions
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._subclasses import FakeTensorMode
    from triton.compiler import CompiledKernel
    from triton.runtime import driver

    from toolkit.tune.compile_worker import AbsentGpu

    tune = PythonWrapperCodegen.generate_and_run_autotune_block

    def on_fake_tensors(wrapper: Any) -> None:
        with FakeTensorMode():
            tune(wrapper)

    as_pytorch = [getattr(torch.ops.aten, name) for name in AS_PYTORCH]
    torch._decomp.remove_decompositions(decompositions, as_pytorch)
    for operation in as_pytorch:
        lowering.make_fallback(operation, warn=False)
    absent = _interface(device_interface.CudaInterface, card)
    device_interface.get_registered_device_interfaces()  # those that there are, before one takes another's place
    device_interface.register_interface_for_device("cuda", absent)
    for owner, name, instead in (
        (torch.cuda, "get_device_capability", absent.capability),
        (torch.cuda, "get_device_properties", absent.get_device_properties),
        (torch.cuda, "_DeviceGuard", absent.device),
        (torch._C, "_cuda_getCurrentRawStream", absent.get_raw_stream),
        (wrap, "identify_mutated_tensors", lambda kernel, operands, _: _written(kernel, operands, card)),
        (PythonWrapperCodegen, "generate_and_run_autotune_block", on_fake_tensors),
        (CachingAutotuner, "run", _keep),
        (CompiledKernel, "_init_handles", _unloaded),
        (driver, "_active", AbsentGpu(_number(card))),  # whom kernels ask which GPU they are compiled for
        (triton_helpers, "set_driver_to_gpu", lambda: None),
    ):
        setattr(owner, name, instead)


def _interface(cuda: Any, card: Card) -> Any:
    """What PyTorch's compiler asks CUDA, answered for a card that needn't be there."""
    spec = card.spec
    major, minor = spec.compute_capability
    properties = SimpleNamespace(
        name=spec.name, major=major, minor=minor, total_memory=spec.memory_bytes, multi_processor_count=spec.sms,
        regs_per_multiprocessor=spec.registers_per_sm, max_threads_per_multi_processor=spec.threads_per_sm,
        max_threads_per_block=1024, warp_size=32, shared_memory_per_block_optin=spec.smem_per_block_optin_bytes,
    )  # fmt: skip

    class Current:
        """The current device, whichever is asked for."""

        def __init__(self, *_: Any) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *_: Any) -> None: ...

    class Answers:
        set_device = staticmethod(lambda device: None)
        current_device = staticmethod(lambda: 0)
        get_device_properties = staticmethod(lambda device=None: properties)

    class Absent(Answers, cuda):  # type: ignore[misc]
        Worker, device = Answers, Current
        device_count = staticmethod(lambda: 1)
        exchange_device = maybe_exchange_device = staticmethod(lambda device: 0)
        get_raw_stream = staticmethod(lambda device: 0)
        synchronize = staticmethod(lambda device=None: None)
        is_available = staticmethod(lambda: True)
        is_bf16_supported = staticmethod(lambda including_emulation=True: True)
        is_triton_capable = staticmethod(lambda device=None: True)
        raise_if_triton_unavailable = staticmethod(lambda device=None: None)
        get_compute_capability = staticmethod(lambda device=None: _number(card))
        capability = staticmethod(lambda device=None: spec.compute_capability)

    return Absent


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
    if (asked := (function, *signature.items(), *constants.items())) in _known:
        return _known[asked]
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
    _known[asked] = [n for n, is_written in zip(names, written, strict=True) if is_written and signature[n].startswith("*")]
    return _known[asked]


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


def _number(card: Card) -> int:
    """Of a compute capability: 90 for 9.0."""
    major, minor = card.spec.compute_capability
    return 10 * major + minor
