"""Settings and replacements with which PyTorch's compiler (Inductor) compiles for a GPU that this process never uses.

Inductor asks the GPU for its properties, and runs every Triton kernel once to choose a config. The processes that compile a
package (`compile_worker`) must not need a GPU: several run at once, and the target may be a GPU that is not installed.
`compile_only_for` therefore answers Inductor's questions from the catalogue of GPUs, and saves compiled kernels without loading
them. All private functions of PyTorch and Triton that exports replace are in this file, by version: see `_replacements`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

from toolkit.core.errors import PackageError
from toolkit.tune.cards import Card

VERSIONS = ((2, 11), (2, 15))  # the oldest and the newest PyTorch that this file was tested with
HEADERS = {  # CUDA header files that compiled code includes, and the pip package that has each
    "cuda.h": "nvidia-cuda-runtime", "crt/host_defines.h": "nvidia-cuda-crt", "nv/target": "nvidia-cuda-cccl",
}  # fmt: skip
OPTIONS: dict[str, Any] = {
    "triton.autotune_at_compile_time": True,  # compile kernels now, in `_compile_kernels`, and not at the first run
    "_use_fp64_for_unbacked_floats": False,  # pass floats to kernels as fp32, as Triton's own launcher does
    "joint_graph_constant_folding": False,  # it would compute constants on the GPU
    "shape_padding": False,  # it would time matrix products on the GPU
    "eager_numerics.division_rounding": True,  # round quotients as PyTorch's kernels do
}

# GPU packages call PyTorch's kernels for these operations, since Inductor would sum in another order or use another exp.
# A difference in the last bit of fp32 sometimes changes a bf16 value, and then which of 256 experts a token goes to.
AS_PYTORCH = ("sigmoid", "_softmax", "sum")

_written_tensors: dict[tuple[Any, ...], list[str]] = {}  # results of `_find_written`, by kernel, signature and constants


# ---- checks and set-up


def check_supported(card: Card) -> None:
    """Raise PackageError if this PyTorch can't compile for a GPU: untested version, no CUDA support, or no CUDA headers."""
    asked, (oldest, newest) = f"an export for {card.spec.name}", VERSIONS
    if not oldest <= _version() <= newest:
        found = f"PyTorch {torch.__version__} is installed, and exports for GPUs work with 2.{oldest[1]} to 2.{newest[1]}"
        raise PackageError(asked, found, f"pip install 'torch>=2.{oldest[1]},<2.{newest[1] + 1}'")
    if torch.version.cuda is None:
        found = f"PyTorch {torch.__version__} is a build without CUDA"
        raise PackageError(asked, found, "Install a CUDA build of PyTorch; no GPU is needed to compile")
    folders = _header_folders()
    missing = [name for name in HEADERS if not any((folder / name).is_file() for folder in folders)]
    if missing:
        do = f"pip install {' '.join(HEADERS[name] for name in missing)}, or install the CUDA toolkit and set CUDA_HOME"
        raise PackageError(asked, f"the CUDA header files {', '.join(missing)} are not installed", do)


def _version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _header_folders() -> list[Path]:
    """Return the folders that may hold CUDA headers: the CUDA toolkit's, those of pip packages, and Triton's own."""
    packages = Path(torch.__file__).parents[1]
    homes = [Path(home) for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    homes += packages.glob("nvidia/*")  # dependencies of PyTorch's wheels
    homes += [Path(nvcc).resolve().parents[1]] if (nvcc := shutil.which("nvcc")) else []
    folders = [home / "include" for home in (*homes, Path("/usr/local/cuda"))]
    return [folder for folder in (*folders, packages / "triton/backends/nvidia/include") if folder.is_dir()]


def find_cuda(folder: str, compiler: str) -> None:
    """Set environment variables with which `compiler` finds CUDA headers and a libcuda to link against.

    The driver's libcuda may not be installed. A library of that name with empty functions, written into `folder`, is enough to
    link a package; loading the package loads the driver's.
    """
    folders = _header_folders()
    header = next(path for each in folders if (path := each / "cuda.h").is_file())
    os.environ.setdefault("CUDA_HOME", str(header.parents[1]))  # Inductor raises an error if it finds no CUDA
    names = sorted(set(re.findall(r"\bcu[A-Z]\w+", header.read_text())))
    stubs = tempfile.mkdtemp(dir=folder)
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o", f"{stubs}/libcuda.so"]
    subprocess.run(command, input="".join(f"void {name}(void) {{}}\n" for name in names), text=True, check=True)
    for variable, found in (("CPATH", folders), ("LIBRARY_PATH", [stubs])):
        os.environ[variable] = os.pathsep.join(filter(None, [os.environ.get(variable), *map(str, found)]))


def find_headers() -> None:
    """Link the headers that earlier processes precompiled into the folder where Inductor looks for them.

    That folder is under TMPDIR, of which each worker process has its own. Precompiling the headers takes about as long as
    compiling two pieces.
    """
    _link_headers(cache_dir(), default_cache_dir())


def keep_headers() -> None:
    """Link the headers that this process precompiled into Inductor's cache.

    Inductor would write them there directly. If g++ were killed, others would then find half a file.
    """
    _link_headers(default_cache_dir(), cache_dir())


def _link_headers(source: str, target: str) -> None:
    folder = Path(target, "precompiled_headers")
    for path in Path(source, "precompiled_headers").glob("*.gch"):
        with suppress(OSError):  # it is there, or the folders are on different file systems
            folder.mkdir(parents=True, exist_ok=True)
            os.link(path, folder / path.name)


def compile_only_for(card: Card) -> None:
    """Make `aoti_compile_and_package` compile for `card` from now on, without a GPU. For a process that does nothing else.

    Raises PackageError if this PyTorch lacks one of the functions that have to be replaced.
    """
    from torch._dynamo import device_interface
    from torch._inductor import lowering
    from torch._inductor.decomposition import decompositions
    from triton.runtime import driver

    from toolkit.tune.compile_worker import AbsentGpu

    as_pytorch = [getattr(torch.ops.aten, name) for name in AS_PYTORCH]
    torch._decomp.remove_decompositions(decompositions, as_pytorch)
    for operation in as_pytorch:
        lowering.make_fallback(operation, warn=False)
    device_interface.get_registered_device_interfaces()  # registers the defaults, which would replace ours later
    device_interface.register_interface_for_device("cuda", _interface(device_interface.CudaInterface, card))
    driver.set_active(AbsentGpu(_number(card)))  # Triton's JIT asks it which GPU to compile for
    for owner, name, replacement in _replacements(card):
        if not hasattr(owner, name):
            found = f"PyTorch {torch.__version__} has no {owner.__name__}.{name}"
            raise PackageError(f"an export for {card.spec.name}", found, "Please report this, with your versions")
        setattr(owner, name, replacement)


def _replacements(card: Card) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return the private functions to replace in this version of PyTorch, as (module or class, name, replacement)."""
    import torch._higher_order_ops.triton_kernel_wrap as wrap
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.runtime import triton_helpers
    from triton.compiler import CompiledKernel

    analysis: tuple[Any, str, Callable[..., Any]]
    if _version() == (2, 11):
        analysis = wrap, "identify_mutated_tensors", lambda kernel, operands, _: _find_written(kernel, operands, card)
    else:
        read = wrap.ttir_to_functions
        analysis = wrap, "ttir_to_functions", lambda module: _mark_pure(read(module))
    return [
        analysis,
        (torch.cuda, "get_device_capability", lambda device=None: card.spec.compute_capability),
        (PythonWrapperCodegen, "generate_and_run_autotune_block", _compile_kernels),
        (CompiledKernel, "_init_handles", _skip_loading),
        (triton_helpers, "set_driver_to_gpu", lambda: None),  # it raises an error where there is no GPU
    ]


# ---- the GPU to compile for


def _interface(cuda: Any, card: Card) -> Any:
    """Return a subclass of PyTorch's `CudaInterface` that describes `card` in place of the installed GPU."""
    spec = card.spec
    major, minor = spec.compute_capability
    properties = SimpleNamespace(
        name=spec.name, major=major, minor=minor, total_memory=spec.memory_bytes, multi_processor_count=spec.sms,
        regs_per_multiprocessor=spec.registers_per_sm, max_threads_per_multi_processor=spec.threads_per_sm,
        max_threads_per_block=1024, warp_size=32, shared_memory_per_block_optin=spec.smem_per_block_optin_bytes,
    )  # fmt: skip

    class Current:
        """A device guard that does nothing."""

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

    return Absent


def _number(card: Card) -> int:
    """Return a compute capability as Triton writes it: 90 for 9.0."""
    major, minor = card.spec.compute_capability
    return 10 * major + minor


# ---- kernels


def _compile_kernels(wrapper: Any) -> None:
    """Compile and save the Triton kernels of a graph. Unlike Inductor, do not run them to choose among configs.

    Our kernels have one config, the tuner's; for kernels that Inductor writes itself, the first config is taken.
    """
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    scope: dict[str, Any] = {}
    exec(f"{wrapper.kernel_autotune_defs.getvalue()}\nasync_compile.wait(globals())\n", scope)
    for kernel in scope.values():
        if isinstance(kernel, CachingAutotuner):
            if not kernel.launchers:
                kernel.precompile()
            kernel.save_gpu_kernel(0, kernel.launchers[0])


def _skip_loading(kernel: Any) -> None:
    """Set the attributes of a compiled kernel that loading it onto a GPU would set."""
    kernel._run = kernel.module = kernel.function = "not loaded"
    kernel.n_regs = kernel.n_spills = 0


def _mark_pure(functions: dict[str, Any]) -> dict[str, Any]:
    """Mark inline assembly as pure in a kernel's operations. Otherwise PyTorch assumes that the kernel writes all its tensors.

    The assembly in our kernels waits, converts and multiplies, and writes no memory.
    """

    def pure(op: Any) -> Any:
        return dataclasses.replace(op, is_pure=True) if op.name == "tt.elementwise_inline_asm" else op

    return {name: {value: [pure(op) for op in ops] for value, ops in blocks.items()} for name, blocks in functions.items()}


# ---- PyTorch 2.11 and 2.12 alone


def declare_arrays_once() -> None:
    """Make Inductor declare arrays of sizes before their first use in the C++ that it writes, in PyTorch 2.11 and 2.12.

    These versions identify an array's destination by the `id` of a bound method, which is reused once the method is gone. The
    C++ code therefore sometimes used an array before its declaration.
    """
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    if _version() < (2, 13):
        setattr(CppWrapperCpu, "codegen_int_array_var", _with_lasting_methods(CppWrapperCpu.codegen_int_array_var))  # noqa: B010


def _with_lasting_methods(declare: Callable[..., str]) -> Callable[..., str]:
    """Wrap `declare(wrapper, array, writeline, ...)` so that equal bound methods `writeline` are always the same object."""

    @functools.wraps(declare)
    def declare_once(wrapper: Any, array: str, writeline: Any, *rest: Any, **named: Any) -> str:
        lasting = wrapper.__dict__.setdefault("_lasting_methods", {})
        return declare(wrapper, array, lasting.setdefault(writeline, writeline), *rest, **named)

    return declare_once


def _find_written(kernel: Any, operands: dict[str, Any], card: Card) -> list[str]:
    """Return the names of the tensors that a Triton kernel writes, in place of PyTorch 2.11's `identify_mutated_tensors`.

    2.11 compiles the kernel with its numbers as constants, which fails on `number.to(...)`, and then assumes that it writes all
    its tensors. This uses PyTorch's analysis on the kernel with its numbers as arguments.
    """
    import torch._higher_order_ops.triton_kernel_wrap as wrap
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    function = kernel.fn if hasattr(kernel, "configs") else kernel
    signature = {p.name: "constexpr" if p.is_constexpr else _type_name(operands[p.name]) for p in function.params}
    constants = {name: operands[name] for name, kind in signature.items() if kind == "constexpr"}
    if (asked := (function, *signature.items(), *constants.items())) in _written_tensors:
        return _written_tensors[asked]
    target = GPUTarget("cuda", _number(card), 32)
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options({})
    source = ASTSource(function, signature, constants, {})
    module = source.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)
    found = _mark_pure(wrap.ttir_to_functions(module))
    names = [name for name, kind in signature.items() if kind != "constexpr"]
    wrap.analyze_kernel_mutations.reset()  # type: ignore[attr-defined]
    wrap.get_tma_stores.reset()  # type: ignore[attr-defined]
    written = wrap.analyze_kernel_mutations(found, next(iter(found)), len(names))  # type: ignore[attr-defined]
    # an address is a pointer plus numbers, so the analysis also reports numbers as written
    _written_tensors[asked] = [
        name for name, is_written in zip(names, written, strict=True) if is_written and signature[name].startswith("*")
    ]
    return _written_tensors[asked]


def _type_name(operand: Any) -> str:
    """Return the type of a kernel's operand as Triton's signatures write it. None, strings and bools are constants."""
    from triton._utils import canonicalize_dtype

    if hasattr(operand, "get_dtype") or hasattr(operand, "dtype"):  # a value in Inductor's graph, or a tensor
        dtype = operand.get_dtype() if hasattr(operand, "get_dtype") else operand.dtype
        return f"*{canonicalize_dtype(dtype)}"
    if operand is None or isinstance(operand, str | bool):
        return "constexpr"
    return "fp32" if isinstance(operand, float) else "i64"
