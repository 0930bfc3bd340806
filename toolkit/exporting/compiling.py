"""Compiles one piece of a model to native code with torch.export and AOTInductor, and caches the result.

The cache key covers the piece's graph, the compiler's options and versions, and the processor. A killed export therefore
resumes, and an export with another context length compiles little or nothing. Weights are inputs of every graph, so compiling
needs no weights. The exporting process calls `find_key`; worker processes call `trace` and `compile_program` (see `compilers`).
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from toolkit.core.errors import PackageError
from toolkit.core.files import TemporaryFolder, replacing
from toolkit.exporting import inductor
from toolkit.exporting.pieces import Traceable, digest
from toolkit.ops.define import describe_launches, has_kernel
from toolkit.tune.cards import Card
from toolkit.tune.compiling import triton_version
from toolkit.tune.store import cache_folder

KEPT = 256  # compiled pieces in the cache; older ones are deleted
DESCRIBED = 64  # descriptions of traced pieces that a process keeps
OPTIONS: dict[str, Any] = {
    "emulate_precision_casts": True,  # round between fused operations as separate ones do, so that tokens are equal
    # Omit assertions about shapes. They only check that a view of a cache is smaller than the whole cache, and the code is
    # right for the whole cache too, because its strides are the same.
    "scalar_asserts": False,
    "compile_threads": 1,
}


_described: dict[str, tuple[Any, ...]] = {}  # see `find_key`
_tracing = threading.Lock()
_environment = threading.Lock()  # held while TMPDIR is another folder


@dataclass(frozen=True)
class Compiled:
    """A compiled piece: its file's bytes, their SHA-256, and whether it was found in the cache."""

    data: bytes
    sha256: str
    kept: bool


def compile_program(program: Any, key: str, card: Card | None, folder: str) -> Compiled:
    """Compile a traced piece for the GPU `card` (None: the CPU) and cache it under `key`. Temporary files go into `folder`.

    Raises PackageError if there is no C++ compiler, or with the compiler's message if it fails.
    """
    options = OPTIONS | {"cpp.cxx": (check_compiler(),)} | ({} if card is None else inductor.OPTIONS)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        path = os.path.join(own, "piece.pt2")
        try:
            torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=options)
        except Exception as error:
            found = f"the compiler failed: {_summary(error)}"
            raise PackageError("compiling a layer", found, "Check that g++ works and that the disk isn't full") from error
        return _keep(key, Path(path).read_bytes())


def _summary(error: Exception) -> str:
    """Return the first line of an error and, if g++'s output follows it, the first error that g++ reports."""
    first, *rest = _first_line(error), *str(error).splitlines()[1:]
    errors = [found[0] for line in rest if (found := re.search(r"\berror: .*", line))]
    return f"{first}: {errors[0][:300]}" if errors else first


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def trace(traceable: Traceable) -> Any:
    """Return the piece's graph as a torch.export.ExportedProgram with dynamic shapes."""
    with torch.no_grad(), traceable.mode:
        program = torch.export.export(
            traceable.run,
            traceable.inputs,
            dynamic_shapes=(traceable.varying,),
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,  # some guards hold although the solver can't prove them
        )
    assert not program.state_dict, f"the graph holds weights: {list(program.state_dict)[:3]}"
    return program


def check_compiler() -> str:
    """Return the path of the C++ compiler: $CXX, or g++. Raises PackageError if there is none."""
    asked = os.environ.get("CXX") or "g++"
    found = shutil.which(asked)
    if found is None:
        do = "Install one (Debian, Ubuntu: apt install g++), or set the environment variable CXX to a compiler"
        raise PackageError("an export", f"there is no C++ compiler: {asked!r} isn't on the PATH", do)
    return found


def processor() -> dict[str, str]:
    """Return the properties that CPU code is compiled for: machine, operating system, and the widest vector instructions."""
    return {"machine": platform.machine(), "system": platform.system(), "vectors": torch.backends.cpu.get_cpu_capability()}


def key_of(program: Any, card: Card | None) -> str:
    """Return the cache key of a traced piece: a hash of everything that its native code depends on."""
    return _key_of_graph(_describe(program), [] if card is None else _launches(program), card)


def find_key(about: str, traceable: Callable[[], Traceable], card: Card | None) -> str:
    """Return the key of the piece that `traceable()` returns.

    It is traced at most once per process and `about`, a hash of everything that its graph depends on. For a GPU it is traced
    each time, because its key depends on the tuner's timings, which may change.
    """
    if card is not None:
        return key_of(_trace_in_thread(traceable), card)
    if about not in _described:
        while len(_described) >= DESCRIBED:
            _described.pop(next(iter(_described)))
        _described[about] = _describe(_trace_in_thread(traceable))
    return _key_of_graph(_described[about], [], None)


def _trace_in_thread(traceable: Callable[[], Traceable]) -> Any:
    """Return `trace(traceable())`, traced on another thread, which an interrupt does not reach.

    Inside of PyTorch's tracer, an interrupt may be lost in a destructor, or leave a mode open. Here it ends the waiting; the
    thread goes on until the piece is traced, and the next piece waits for it. The filters of warnings belong to the process, so
    this thread replaces them and puts them back, whether the other one goes on or not.
    """
    traced = Future[Any]()

    def run() -> None:
        with _tracing:
            try:
                traced.set_result(trace(traceable()))
            except BaseException as error:  # raised by `result`
                traced.set_exception(error)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        threading.Thread(target=run, name="toolkit-trace").start()
        return traced.result()


def _describe(program: Any) -> tuple[Any, ...]:
    """Return the code, input shapes, constraints and constants of a traced piece."""
    shapes = [str(node.meta.get("val")) for node in program.graph.nodes if node.op == "placeholder"]
    constants = {name: _values(value) for name, value in program.constants.items()}
    return program.graph_module.code, shapes, str(program.range_constraints), constants


def _key_of_graph(described: tuple[Any, ...], launched: list[str], card: Card | None) -> str:
    compiler = [os.environ.get(name, "") for name in ("CXX", "AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL")]
    made: tuple[Any, ...] = (torch.__version__, sorted(OPTIONS.items()), sorted(processor().items()), compiler)
    if card is None:
        made = (*made, torch.get_num_threads())  # Inductor writes this number into code for the CPU
    else:
        made = (*made, sorted(inductor.OPTIONS.items()), inductor.AS_PYTORCH, torch.version.cuda, triton_version(), card.facts)
    return digest(*described, launched, made) + digest(made)[:8]


def _launches(program: Any) -> list[str]:
    """Describe the launches of each toolkit operation in a graph."""

    def value(operand: Any) -> Any:
        return operand.meta["val"] if isinstance(operand, torch.fx.Node) else operand

    found = []
    for node in program.graph.nodes:
        ours = node.op == "call_function" and getattr(node.target, "namespace", "") == "toolkit"
        if ours and has_kernel(node.target._opname):
            operands = torch.fx.node.map_aggregate(node.args, value)
            with next(t for t in _tensors(operands)).fake_mode, torch.no_grad():
                found.append(describe_launches(node.target._opname, operands))
    return found


def _tensors(operands: Any) -> Iterator[Any]:
    return (operand for operand in operands if isinstance(operand, torch.Tensor))


def _values(value: Any) -> str:
    return hashlib.sha256(value.cpu().numpy().tobytes()).hexdigest() if isinstance(value, torch.Tensor) else repr(value)


# ---- the cache of compiled pieces


def _folder() -> Path:
    return cache_folder() / "compiled"


def find_kept(key: str) -> Compiled | None:
    """Return the piece cached under `key`, or None. A file whose contents don't match the hash in its name is deleted."""
    for path in _folder().glob(f"{key}-*.pt2"):
        with suppress(OSError):
            data = path.read_bytes()
            sha256 = hashlib.sha256(data).hexdigest()
            if path.stem == f"{key}-{sha256}":
                os.utime(path)
                return Compiled(data, sha256, kept=True)
            path.unlink()
    return None


def _keep(key: str, data: bytes) -> Compiled:
    """Write a piece to the cache if possible, and return it.

    If another process has cached the piece meanwhile, return that one: the bytes of two compilations differ, and packages of
    the same pieces should be identical.
    """
    if theirs := find_kept(key):
        return replace(theirs, kept=False)
    sha256, folder = hashlib.sha256(data).hexdigest(), _folder()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / f"{key}-{sha256}.pt2") as file:
            file.write(data)
        oldest = sorted(folder.glob("*.pt2"), key=lambda path: path.stat().st_mtime)
        for path in oldest[:-KEPT]:
            path.unlink()
    return Compiled(data, sha256, kept=False)


def load_piece(data: bytes, device: torch.device) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """Load verified bytes as a function. This is native code, which runs with all rights of this process.

    Raises PackageError if it can't be loaded. The function raises it if an operation in the code fails.
    """
    index = -1 if device.index is None else device.index
    with ExitStack() as held:
        try:
            folder = TemporaryFolder()
            held.callback(folder.cleanup)
            path = Path(folder.name, "piece.pt2")
            path.write_bytes(data)
            # torch._inductor.aoti_load_package would first compile and run a test program for each vector instruction set
            with _unpacking_into(folder.name):
                loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, index)  # type: ignore[attr-defined]
            path.unlink()
        except (OSError, RuntimeError) as error:
            found = f"it can't be loaded from the folder {tempfile.gettempdir()} ({_first_line(error)})"
            do = "Free disk space there, or start Python with TMPDIR set to a folder that is not mounted with noexec"
            raise PackageError("loading a layer's compiled code", found, do) from error
        weakref.finalize(loader, held.pop_all().close)  # code for a GPU is read from the folder when it runs first
    # calling the loader itself parses a description of the operands each time, which takes longer than a layer
    boxed: Callable[[list[torch.Tensor]], list[torch.Tensor]] = loader.boxed_run

    def run(operands: list[torch.Tensor]) -> list[torch.Tensor]:
        results = boxed(operands)
        # If a Python operation fails, as a collective can, PyTorch 2.11 prints the error and goes on. Later versions raise it.
        for result in results:  # `any` takes three times as long, for each layer of each step
            if result is None:
                found, do = "an operation in it failed, and PyTorch printed the error above", "Fix its cause, and run again"
                raise PackageError("running a layer's compiled code", found, do)
        return results

    return run


@contextmanager
def _unpacking_into(folder: str) -> Iterator[None]:
    """Let PyTorch's loader unpack into this folder. The loader takes the folder of temporary files from TMPDIR only.

    The loader of PyTorch 2.11 always unpacks into /tmp, and deletes the files when it is freed. Those of a killed process stay.
    """
    with _environment:
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before
