"""Compile the pieces of a model in worker processes (`compile_worker`), several at once.

The compiler's memory is returned to the system when its process ends, and no process sees a GPU. The processes end with the
export, even if the export is killed.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from toolkit.core.errors import PackageError
from toolkit.core.units import dtype_name
from toolkit.core.workers import Worker, WorkerError, WorkerPool
from toolkit.exporting.compiling import Compiled
from toolkit.tune.cards import Card


class Compilers(WorkerPool):
    """A pool of at most `count` compiling processes.

    `plain` is the model (see `skeleton`), with caches for `context` tokens in `kv`; `card` is the GPU to compile for, None for
    the CPU.
    """

    def __init__(self, plain: dict[str, Any], context: int, kv: str | None, card: Card | None, count: int) -> None:
        about = {
            "model": plain, "context": context, "kv": kv, "card": None if card is None else card.to_plain(),
            "threads": torch.get_num_threads(), "default_dtype": dtype_name(torch.get_default_dtype()),
        }  # fmt: skip
        environment = {
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir(),  # outlives workers
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # by default Inductor starts one more process per core
            # Inductor trusts the processor's flags instead of compiling a test program for its vector instructions.
            "TORCHINDUCTOR_VEC_ISA_OK": os.environ.get("TORCHINDUCTOR_VEC_ISA_OK", "1"),
        }
        super().__init__("toolkit.exporting.compile_worker", about, count, environment)

    def compile(self, piece: str, method: str, key: str) -> Future[Compiled]:
        """Compile a piece for one method. The future raises PackageError if that fails."""
        return self.submit(_compile, {"piece": piece, "method": method, "key": key})


def _compile(worker: Worker, job: dict[str, str]) -> Compiled:
    asked = "compiling a layer"
    try:
        answer = worker.ask(job)
        if "error" in answer:
            raise PackageError(*answer["error"])
        data = Path(answer["path"]).read_bytes()
        os.unlink(answer["path"])
        return Compiled(data, hashlib.sha256(data).hexdigest(), kept=False)
    except WorkerError as error:
        do = "Check free memory and disk space, then run it again; the export resumes"
        raise PackageError(asked, f"the compiling process {error}", do) from error
    except OSError as error:
        found = f"no compiling process can be started in {tempfile.gettempdir()} ({error.strerror or error})"
        raise PackageError(asked, found, "Free some space there, or set TMPDIR to another folder") from error
