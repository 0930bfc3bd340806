"""Compile configs in worker processes, several at once, and cache the results on disk.

`compile_configs` needs no GPU. GPUs of the same compute capability share a result. The cache on disk is keyed by kernel
fingerprint and Triton version. If the compiler fails, crashes or hangs, the config's result is an error message, and the
other configs are still compiled.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from toolkit.core.errors import DeviceError, ToolkitError
from toolkit.core.files import replace_text
from toolkit.core.schema import parse_json
from toolkit.core.workers import Worker, WorkerError, WorkerPool, processors
from toolkit.kernels.base import Config, Kernel, Shape
from toolkit.tune.identity import fingerprint, origin
from toolkit.tune.limits import Compiled
from toolkit.tune.store import cache_folder, locked, tell, words

HANGS_AFTER_S = 180.0  # ptxas can take minutes for a config that spills kilobytes of registers
SAVE_EVERY_S = 2.0
MOST_WORKERS = 16
INSIDE = "TOOLKIT_COMPILES"  # environment variable that is set to the kernel's name in compiling processes
NOT_KEPT = "The compiler "  # prefix of errors that the config did not cause: not stored, so that it is compiled again

Capability = tuple[int, int]
Step = Callable[[int, int, str], None]  # done, total, name of the last job; may raise to cancel


@dataclass(frozen=True)
class Job:
    """A config to compile for a shape and a compute capability."""

    shape: Shape
    config: Config
    capability: Capability

    @property
    def sm(self) -> int:
        """The capability as the compiler writes it: 90 for (9, 0)."""
        return 10 * self.capability[0] + self.capability[1]

    @property
    def key(self) -> str:
        """The job's key in the file of results."""
        return f"sm_{self.sm} | {self.shape.key} | {words(self.config)}"


def triton_version() -> str:
    """Return Triton's version. Raises DeviceError if it is not installed; it exists only for Linux."""
    try:
        return version("triton")
    except PackageNotFoundError:
        if importlib.util.find_spec("triton") is not None:
            return "unknown"
        found = "Triton isn't installed" + ("" if sys.platform == "linux" else f", and has no build for {sys.platform}")
        raise DeviceError("compiling kernels", found, "On Linux: pip install triton") from None


def compile_configs(
    kernel: Kernel, jobs: Iterable[Job], step: Step | None = None, workers: int | None = None
) -> dict[Job, Compiled]:
    """Return the result of each job, read from disk or compiled now.

    `step` is called after each job and may raise to end early; results so far are stored. Raises DeviceError if Triton is not
    installed. Raises ToolkitError in a compiling process, which runs the code of a kernel's cell: if that code called the
    tuner, processes would start processes without end.
    """
    if INSIDE in os.environ:
        why = f"the code that defines kernel {os.environ[INSIDE]!r} calls the tuner, and a worker process runs this code"
        raise ToolkitError("compiling kernels", why, "Move the call to another cell or file")
    kept = Kept(kernel)
    wanted = list(dict.fromkeys(jobs))
    found = {job: kept.rows[job.key] for job in wanted if job.key in kept.rows}
    missing = [job for job in wanted if job not in found]
    tell = step or (lambda done, total, what: None)
    tell(len(found), len(wanted), "")
    if not missing:
        return found
    about = {"kernel": kernel.name, "origin": asdict(origin(kernel)), "path": sys.path}
    environment = {INSIDE: kernel.name, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    count = min(workers or min(processors(), MOST_WORKERS), len(missing))
    try:
        with WorkerPool("toolkit.tune.compile_worker", about, count, environment, HANGS_AFTER_S) as pool:
            futures = {pool.submit(_compile, job): job for job in missing}
            for future in as_completed(futures):
                job = futures[future]
                found[job] = future.result()
                kept.add(job, found[job])
                tell(len(found), len(wanted), f"{words(job.config)} for sm_{job.sm}")
    finally:
        kept.save()
    return found


class Kept:
    """The results on disk for the current code of a kernel and the installed version of Triton."""

    def __init__(self, kernel: Kernel) -> None:
        self.path = cache_folder() / "compiled" / f"{kernel.name}-{fingerprint(kernel)}-triton-{triton_version()}.json"
        self.rows = self._read()
        self._saved = time.monotonic()
        self._unsaved = False

    def _read(self) -> dict[str, Compiled]:
        """Return the rows of the file, or {} if it is absent or damaged; a new file then replaces it."""
        try:
            plain: dict[str, Any] = parse_json(self.path.read_text(), dict[str, Any])
            return {key: Compiled.from_dict(row) for key, row in plain.items()}
        except (OSError, ValueError, TypeError, KeyError):
            return {}

    def add(self, job: Job, compiled: Compiled) -> None:
        """Add one result, unless it is an error that the config did not cause. Saves every `SAVE_EVERY_S` seconds."""
        if compiled.error.startswith(NOT_KEPT):
            return
        self.rows[job.key] = compiled
        self._unsaved = True
        if time.monotonic() - self._saved > SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Write new results, merged with those that other processes have written. Warns if the folder is not writable."""
        if not self._unsaved:
            return
        self._saved, self._unsaved = time.monotonic(), False
        try:
            with locked(self.path):
                self.rows = {**self._read(), **self.rows}
                replace_text(self.path, json.dumps({key: row.to_dict() for key, row in self.rows.items()}), sync=True)
        except OSError as error:
            tell(f"Compiled results can't be stored: {error}. Set TOOLKIT_CACHE to a writable folder.")


def _compile(worker: Worker, job: Job) -> Compiled:
    try:
        return Compiled.from_dict(worker.ask({"shape": job.shape.key, "config": job.config.to_dict(), "capability": job.sm}))
    except WorkerError as error:
        return Compiled(error=f"{NOT_KEPT}{error}")
