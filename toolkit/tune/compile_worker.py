"""The process that compiles configs for any GPU and reports their resources: `python -m toolkit.tune.compile_worker`.

It runs in a pool of `toolkit.core.workers`. Triton's JIT compiles with a driver that reports the target as the current GPU, so
that arguments are specialized exactly as at a real launch (alignment, ints that are 1 or divisible by 16, None, constants).
Registers and stack sizes come from the cuobjdump that Triton includes. The pool removes TRITON_INTERPRET from the environment,
because a process that imported Triton with it cannot compile.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from toolkit.core.workers import listen
from toolkit.kernels.base import Config, Kernel, Launch
from toolkit.tune.compiling import NOT_KEPT
from toolkit.tune.identity import Origin
from toolkit.tune.limits import WARP, Compiled, LaunchUse

MESSAGE = 600  # length to which a compiler's message is cut


class AbsentGpu:
    """A Triton driver with only the methods that compiling needs. It reports a GPU of this capability as the current one."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, WARP)

    def get_current_device(self) -> int:
        return self.capability  # the JIT caches compiled kernels per device

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_for(kernel: Kernel, shape_key: str, config: Config, capability: int) -> Compiled:
    """Compile every launch of `config` for `sm_<capability>`. A failure is returned in `error` and never raised."""
    driver.set_active(AbsentGpu(capability))
    try:
        shape = kernel.shape_type.from_key(shape_key)
        inputs = kernel.inputs(shape, "meta")
    except Exception as error:  # the fingerprint doesn't change if inputs() is mended
        return Compiled(error=f"{NOT_KEPT}could not make the inputs: {message(error)}")
    try:
        launches = kernel.launches(shape, config, inputs, kernel.outputs(shape, inputs))
        uses = tuple(compile_launch(launch) for launch in launches if 0 not in launch.grid)
        for launch in launches:
            getattr(launch.function, "device_caches", {}).clear()  # frees the code of configs that are done
        return Compiled(uses)
    except (OSError, MemoryError) as error:  # a problem of this machine, such as a full disk
        return Compiled(error=f"{NOT_KEPT}could not run: {message(error)}")
    except Exception as error:
        return Compiled(error=message(error))


def compile_launch(launch: Launch) -> LaunchUse:
    """Compile the kernel of one launch for the current GPU, exactly as launching it would, and return its resources."""
    capability = divmod(driver.active.get_current_target().arch, 10)
    compiled = launch.compile(capability)
    if "launch_pdl" in launch.options(capability) and not waits_first(compiled.asm["ptx"]):
        found = "it writes to global memory before it has waited for the previous launch, or never waits"
        raise ValueError(f"a kernel launched with early=True must call take_turn() first, but {found}: see kernels/early.py")
    cubin = compiled.asm["cubin"]
    registers, stack = resources(cubin)
    return LaunchUse(
        name=compiled.metadata.name, grid=tuple(launch.grid), threads=compiled.metadata.num_warps * WARP,
        registers=registers, spill_bytes=stack, shared_bytes=compiled.metadata.shared,
        tensor_memory=getattr(compiled.metadata, "tmem_size", None) or 0,
        ptx_bytes=len(compiled.asm["ptx"]), sass_bytes=code_bytes(cubin),
    )  # fmt: skip


def waits_first(ptx: str) -> bool:
    """Return whether PTX code waits for the launch before it, and writes nothing to global memory before that.

    On Blackwell, `tcgen05.st` writes to tensor memory.
    """
    before, wait, _ = ptx.partition("griddepcontrol.wait")
    return bool(wait) and re.search(r"(?<![\w.:])(st|atom|red)\.(?!shared)", before) is None


def resources(cubin: bytes) -> tuple[int, int]:
    """Return registers per thread and stack bytes per thread, as cuobjdump reports them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    return max(int(registers) for registers, *_ in found), max(int(stack) + int(local) for _, stack, local in found)


def code_bytes(cubin: bytes) -> int:
    """Return the bytes of machine code: the sections of the ELF file whose names begin with .text."""
    table, size, count, names_at = struct.unpack_from("<Q10xHHH", cubin, 40)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    names = headers[names_at][4]
    return sum(length for name, _, _, _, _, length in headers if cubin[names + name :].startswith(b".text"))


def message(error: BaseException) -> str:
    """Return an exception as one line: Triton's message without the quoted source, followed by the exception's cause."""
    text = getattr(error, "error_message", None) or ("" if hasattr(error, "error_message") else str(error))
    text = " ".join(text.split())
    line = getattr(getattr(error, "node", None), "lineno", None)
    at = f" at line {line} of the function" if line is not None else ""
    if error.__cause__ is not None:
        text = f"{text} {message(error.__cause__)}".strip()
    return f"{type(error).__name__}{at}: {text}"[:MESSAGE]


def compiler_of(about: dict[str, Any]) -> Callable[[dict[str, Any]], Compiled]:
    """Load the kernel that `about` names, and return the function that compiles one job for it."""
    origin = Origin(**about["origin"])
    sys.path[:] = about["path"]
    try:
        kernel = origin.load()
    except Exception as error:
        failed = Compiled(error=f"{NOT_KEPT}could not load the kernel: {message(error)}")
        return lambda job: failed

    def compiled(job: dict[str, Any]) -> Compiled:
        found = compile_for(kernel, job["shape"], Config(**job["config"]), job["capability"])
        if origin.module == "__main__" and "NameError" in found.error:
            return Compiled(error=f"{NOT_KEPT}sees only the kernel's cell, which must define every name it uses: {found.error}")
        return found

    return compiled


def main() -> None:
    torch.set_num_threads(1)
    about, jobs, answer = listen()
    compiled = compiler_of(about)
    for job in jobs:
        answer(compiled(job).to_dict())


if __name__ == "__main__":
    main()
