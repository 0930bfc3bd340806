"""One piece to native code: traced by torch.export, compiled by AOTInductor, and kept.

What was compiled is kept in the user's cache by what it was made of (its graph, the compiler's options and versions, the
processor), so an export that was killed goes on where it was, and one of another context compiles little or nothing anew.
Weights are inputs of every graph: none is on any device while it is compiled. `trace` and `key_of` say what a piece is,
`compile_program` runs in processes of their own (see `compilers`).
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from toolkit.core.errors import PackageError
from toolkit.exporting import inductor
from toolkit.exporting.pieces import Traceable, digest
from toolkit.ops.define import describe_launches
from toolkit.tune.cards import Card
from toolkit.tune.compiling import triton_version
from toolkit.tune.store import cache_folder

KEPT = 256  # compiled pieces; the oldest go
STALE_S = 3600.0
OPTIONS: dict[str, Any] = {
    "emulate_precision_casts": True,  # rounds between fused operations as the operations by themselves do: same tokens
    # What tracing took to be so of shapes. The asserts say no more than that a view of a cache is none of all of it, and one
    # that is runs by the same strides.
    "scalar_asserts": False,
    "compile_threads": 1,
}


@dataclass(frozen=True)
class Compiled:
    """A compiled piece: its file's bytes, their SHA-256, and whether it was kept from before."""

    data: bytes
    sha256: str
    kept: bool


def compile_program(program: Any, key: str, card: Card | None, folder: str) -> Compiled:
    """Native code for a traced piece, for the GPU `card` or the CPU, kept under `key`; it is put together in `folder`.

    Raises PackageError where there is no C++ compiler, or with what it said.
    """
    options = OPTIONS | {"cpp.cxx": (check_compiler(),)} | ({} if card is None else inductor.OPTIONS)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        path = os.path.join(own, "piece.pt2")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=options)
        except Exception as error:
            found = f"the compiler said: {_what_it_said(error)}"
            raise PackageError("compiling a layer", found, "Check that g++ works and that the disk isn't full") from error
        return _keep(key, Path(path).read_bytes())


def _what_it_said(error: Exception) -> str:
    """The first line of an error, and where it goes on with what g++ printed, the first that g++ calls one."""
    first, *rest = _first_line(error), *str(error).splitlines()[1:]
    errors = [found[0] for line in rest if (found := re.search(r"\berror: .*", line))]
    return f"{first}: {errors[0][:300]}" if errors else first


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def trace(traceable: Traceable) -> Any:
    """The piece's graph, with dynamic shapes."""
    with torch.no_grad(), traceable.mode, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(
            traceable.run,
            traceable.inputs,
            dynamic_shapes=(traceable.varying,),
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,  # guards that hold, but that the solver can't prove
        )
    assert not program.state_dict, f"the graph holds weights: {list(program.state_dict)[:3]}"
    return program


def check_compiler() -> str:
    """The C++ compiler that is used; PackageError where there is none."""
    asked = os.environ.get("CXX") or "g++"
    found = shutil.which(asked)
    if found is None:
        do = "Install one (Debian, Ubuntu: apt install g++), or name one in the environment variable CXX"
        raise PackageError("an export", f"no C++ compiler: {asked!r} isn't on the PATH", do)
    return found


def processor() -> dict[str, str]:
    """What compiled code for a CPU runs on: the machine, the system, and the widest vectors that it has."""
    return {"machine": platform.machine(), "system": platform.system(), "vectors": torch.backends.cpu.get_cpu_capability()}


def key_of(program: Any, card: Card | None) -> str:
    """What a traced piece's native code follows from."""
    shapes = [str(node.meta.get("val")) for node in program.graph.nodes if node.op == "placeholder"]
    constants = {name: _values(value) for name, value in program.constants.items()}
    compiler = [os.environ.get(name, "") for name in ("CXX", "AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL")]
    made: tuple[Any, ...] = (torch.__version__, sorted(OPTIONS.items()), sorted(processor().items()), compiler)
    if card is None:
        made = (*made, torch.get_num_threads())  # code for the CPU uses as many
    else:
        made = (*made, sorted(inductor.OPTIONS.items()), inductor.AS_PYTORCH, torch.version.cuda, triton_version(), card.facts)
    launched = [] if card is None else _launches(program)
    return (
        digest(program.graph_module.code, shapes, str(program.range_constraints), constants, launched, made) + digest(made)[:8]
    )


def _launches(program: Any) -> list[str]:
    """How each of our operations in a graph is launched."""

    def value(operand: Any) -> Any:
        return operand.meta["val"] if isinstance(operand, torch.fx.Node) else operand

    found = []
    for node in program.graph.nodes:
        if node.op == "call_function" and getattr(node.target, "namespace", "") == "toolkit":
            operands = torch.fx.node.map_aggregate(node.args, value)
            with next(t for t in _tensors(operands)).fake_mode, torch.no_grad():
                found.append(describe_launches(node.target._opname, operands))
    return found


def _tensors(operands: Any) -> Iterator[Any]:
    return (operand for operand in operands if isinstance(operand, torch.Tensor))


def _values(value: Any) -> str:
    return hashlib.sha256(value.cpu().numpy().tobytes()).hexdigest() if isinstance(value, torch.Tensor) else repr(value)


# ---- what was compiled before


def _folder() -> Path:
    return cache_folder() / "compiled"


def find_kept(key: str) -> Compiled | None:
    """The piece kept under `key`, if it is whole. Its name ends with what its bytes hash to."""
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
    """Keep a piece for another time; where it can't be kept, it will be compiled again. The one that somebody else has kept
    meanwhile, if there is one: their bytes differ, and packages of the same pieces are to hold the same.
    """
    if theirs := find_kept(key):
        return replace(theirs, kept=False)
    sha256, folder = hashlib.sha256(data).hexdigest(), _folder()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.partial"):  # of a process that was killed
            if time.time() - path.stat().st_mtime > STALE_S:
                path.unlink()
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".partial", delete=False) as file:
            try:
                file.write(data)
                file.flush()
            except OSError:
                os.unlink(file.name)
                raise
        os.replace(file.name, folder / f"{key}-{sha256}.pt2")
        oldest = sorted(folder.glob("*.pt2"), key=lambda path: path.stat().st_mtime)
        for path in oldest[:-KEPT]:
            path.unlink()
    return Compiled(data, sha256, kept=False)


def load_piece(data: bytes, device: torch.device) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """The function that verified bytes hold. Native code: it runs with all rights of this process. PackageError where it
    can't be loaded.
    """
    index = -1 if device.index is None else device.index
    try:
        with tempfile.NamedTemporaryFile(suffix=".pt2") as file:
            file.write(data)
            file.flush()
            # not torch._inductor.aoti_load_package, which first compiles and tries a program for every kind of vectors
            loader = torch._C._aoti.AOTIModelPackageLoader(file.name, "model", True, 1, index)  # type: ignore[attr-defined]
    except (OSError, RuntimeError) as error:
        found = f"it can't be loaded by way of {os.environ.get('TMPDIR') or tempfile.gettempdir()} ({_first_line(error)})"
        do = "Make room there, or name another folder in the variable TMPDIR, one that programs may run from"
        raise PackageError("a layer's compiled code", found, do) from error
    # called by itself a loaded package parses a description of its operands every time, which takes longer than a layer
    run: Callable[[list[torch.Tensor]], list[torch.Tensor]] = loader.boxed_run
    return run
