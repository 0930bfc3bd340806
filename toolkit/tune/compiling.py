"""Compiles configs for GPUs in processes of their own, several at once, and remembers what came of it on disk.

`compile_configs` is the tuner's static part: it needs no GPU. GPUs of one compute capability share a compile. Results are
kept by kernel fingerprint and Triton version, so that a second time costs a file read, and a config more one compile. A
compiler that fails, crashes or hangs leaves a message in its config's place; nothing is aborted.
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

from toolkit.core.errors import DeviceError, ToolkitError
from toolkit.core.files import replace_text
from toolkit.core.workers import Worker, WorkerError, WorkerPool
from toolkit.kernels.base import Config, Kernel, Shape
from toolkit.tune.identity import fingerprint, origin
from toolkit.tune.limits import Compiled
from toolkit.tune.store import cache_folder, locked, tell, words

HANGS_AFTER_S = 180.0  # ptxas itself can take minutes over a config that spills by the kilobyte
SAVE_EVERY_S = 2.0
MOST_WORKERS = 16
INSIDE = "TOOLKIT_COMPILES"  # in the environment of a compiling process: the kernel's name
NOT_KEPT = "The compiler "  # begins an error that says nothing of the config: it is asked for again another time

Capability = tuple[int, int]
Step = Callable[[int, int, str], None]  # done, total, what was done; raises to cancel


@dataclass(frozen=True)
class Job:
    """One thing to compile."""

    shape: Shape
    config: Config
    capability: Capability

    @property
    def sm(self) -> int:
        """The capability as the compiler calls it: 90 for (9, 0)."""
        return 10 * self.capability[0] + self.capability[1]

    @property
    def key(self) -> str:
        """How the file of kept results calls it."""
        return f"sm_{self.sm} | {self.shape.key} | {words(self.config)}"


def triton_version() -> str:
    """Triton's version. Raises DeviceError where it isn't installed (it is made for Linux alone)."""
    try:
        return version("triton")
    except PackageNotFoundError:
        if importlib.util.find_spec("triton") is not None:
            return "unknown"
        found = f"Triton isn't installed, and has no build for {sys.platform}" if sys.platform != "linux" else "no Triton"
        raise DeviceError("compiling kernels", found, "On Linux: pip install triton") from None


def compile_configs(
    kernel: Kernel, jobs: Iterable[Job], step: Step | None = None, workers: int | None = None
) -> dict[Job, Compiled]:
    """What each job takes, from disk or compiled now. `step` is told of each, and may raise to end early.

    What was compiled until then is kept. Raises DeviceError where there is no Triton, ToolkitError in a compiling process: it
    runs a kernel's cell, and were that to tune in there too, processes would start processes without end.
    """
    if INSIDE in os.environ:
        raise ToolkitError("compiling kernels", f"this process compiles {os.environ[INSIDE]}", "Compile outside of it")
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
    count = min(workers or min(os.cpu_count() or 1, MOST_WORKERS), len(missing))
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
    """The results on disk of one kernel as it is now, compiled by the Triton that is installed."""

    def __init__(self, kernel: Kernel) -> None:
        self.path = cache_folder() / "compiled" / f"{kernel.name}-{fingerprint(kernel)}-triton-{triton_version()}.json"
        self.rows = self._read()
        self._saved = time.monotonic()
        self._unsaved = False

    def _read(self) -> dict[str, Compiled]:
        """What the file holds; nothing where it is absent or damaged: it is written anew."""
        try:
            return {key: Compiled.from_dict(row) for key, row in json.loads(self.path.read_text()).items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return {}

    def add(self, job: Job, compiled: Compiled) -> None:
        """Keep one result, if it is the config's and not the compiler's."""
        if compiled.error.startswith(NOT_KEPT):
            return
        self.rows[job.key] = compiled
        self._unsaved = True
        if time.monotonic() - self._saved > SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Write what is new, beside what another process has added meanwhile. A folder that can't be written to is told."""
        if not self._unsaved:
            return
        self._saved, self._unsaved = time.monotonic(), False
        try:
            with locked(self.path):
                self.rows = {**self._read(), **self.rows}
                replace_text(self.path, json.dumps({key: row.to_dict() for key, row in self.rows.items()}), sync=True)
        except OSError as error:
            tell(f"What was compiled can't be kept: {error}. Set TOOLKIT_CACHE to a folder that can be written to.")


def _compile(worker: Worker, job: Job) -> Compiled:
    try:
        return Compiled.from_dict(worker.ask({"shape": job.shape.key, "config": job.config.to_dict(), "capability": job.sm}))
    except WorkerError as error:
        return Compiled(error=f"{NOT_KEPT}{error}")
