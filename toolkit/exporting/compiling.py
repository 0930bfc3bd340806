"""One piece to native code: traced by torch.export, compiled by AOTInductor, and kept.

What was compiled is kept in the user's cache by what it was made of (its graph, the compiler's options and versions, the
processor), so an export that was killed goes on where it was, and one of another context compiles little or nothing anew.
Weights are inputs of every graph: none is on any device while it is compiled.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import shutil
import tempfile
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import PackageError
from toolkit.exporting.pieces import Traceable, digest
from toolkit.kernels.tune.store import cache_folder

KEPT = 256  # compiled pieces; the oldest go
OPTIONS: dict[str, Any] = {
    "emulate_precision_casts": True,  # rounds between fused operations as the operations by themselves do: same tokens
    # What tracing took to be so of shapes. The asserts say no more than that a view of a cache is none of all of it, and one
    # that is runs by the same strides.
    "scalar_asserts": False,
}


@dataclass(frozen=True)
class Compiled:
    """A compiled piece: its file's bytes, their SHA-256, and whether it was kept from before."""

    data: bytes
    sha256: str
    kept: bool


def compile_piece(traceable: Traceable) -> Compiled:
    """Native code for a piece. PackageError where there is no C++ compiler, or what it said.

    The graph must hold no weight and no number of its own: it would be compiled into every package.
    """
    compiler = check_compiler()
    program = trace(traceable)
    key = _key(program)
    kept = _kept(key)
    if kept is not None:
        return kept
    with tempfile.TemporaryDirectory(prefix="toolkit-export-") as folder:
        path = os.path.join(folder, "piece.pt2")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch._inductor.aoti_compile_and_package(
                    program, package_path=path, inductor_configs=OPTIONS | {"cpp.cxx": (compiler,)}
                )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            found = (
                f"the compiler said: {str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__:.300}"
            )
            raise PackageError("compiling a layer", found, "Check that g++ works and that the disk isn't full") from error
        data = Path(path).read_bytes()
    return _keep(key, data)


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


def _key(program: Any) -> str:
    """What the compiled piece follows from."""
    shapes = [str(node.meta.get("val")) for node in program.graph.nodes if node.op == "placeholder"]
    constants = {name: _values(value) for name, value in program.constants.items()}
    made = (torch.__version__, sorted(OPTIONS.items()), sorted(processor().items()), os.environ.get("CXX", ""))
    return digest(program.graph_module.code, shapes, str(program.range_constraints), constants, made) + digest(made)[:8]


def _values(value: Any) -> str:
    return hashlib.sha256(value.cpu().numpy().tobytes()).hexdigest() if isinstance(value, torch.Tensor) else repr(value)


# ---- what was compiled before


def _folder() -> Path:
    return cache_folder() / "compiled"


def _kept(key: str) -> Compiled | None:
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
    """Keep a piece for another time; where it can't be kept, it will be compiled again."""
    sha256, folder = hashlib.sha256(data).hexdigest(), _folder()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".partial", delete=False) as file:
            file.write(data)
        os.replace(file.name, folder / f"{key}-{sha256}.pt2")
        oldest = sorted(folder.glob("*.pt2"), key=lambda path: path.stat().st_mtime)
        for path in oldest[:-KEPT]:
            path.unlink()
    return Compiled(data, sha256, kept=False)


def load_piece(data: bytes) -> Any:
    """The function that verified bytes hold. Native code: it runs with all rights of this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch._inductor.aoti_load_package(io.BytesIO(data), run_single_threaded=True)
