"""Compiles configs for GPUs in processes of their own, several at once, and remembers what came of it on disk.

`compile_configs` is the tuner's static part: it needs no GPU. GPUs of one compute capability share a compile. Results are
kept by kernel fingerprint and Triton version, so that a second time costs a file read, and a config more one compile. A
compiler that fails, crashes or hangs leaves a message in its config's place; nothing is aborted.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

from toolkit.core.errors import DeviceError, ToolkitError
from toolkit.kernels.base import Config, Kernel, Shape
from toolkit.tune.identity import fingerprint, origin
from toolkit.tune.limits import Compiled
from toolkit.tune.store import cache_folder, locked, tell, words, write_whole

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
    pool = Pool(kernel, missing, min(workers or min(os.cpu_count() or 1, MOST_WORKERS), len(missing)))
    try:
        for job, compiled in pool:
            found[job] = compiled
            kept.add(job, compiled)
            tell(len(found), len(wanted), f"{words(job.config)} for sm_{job.sm}")
    finally:
        pool.close()
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
                write_whole(self.path, json.dumps({key: row.to_dict() for key, row in self.rows.items()}))
        except OSError as error:
            tell(f"What was compiled can't be kept: {error}. Set TOOLKIT_CACHE to a folder that can be written to.")


class Worker:
    """One compiling process; started anew after it has died."""

    def __init__(self, kernel: Kernel) -> None:
        self._about: dict[str, Any] = {"kernel": kernel.name, "origin": asdict(origin(kernel)), "path": sys.path}
        self._process: subprocess.Popen[str] | None = None
        self._said: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  # lives as long as the worker

    def compile(self, job: Job) -> Compiled:
        """One job's result, or what the process said when it died."""
        process = self._process if self._process is not None and self._process.poll() is None else self._start()
        asked = {"shape": job.shape.key, "config": job.config.to_dict(), "capability": job.sm}
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({**self._about, **asked}) + "\n")
            process.stdin.flush()
            line = self._answer(process)
        except (BrokenPipeError, TimeoutError) as error:
            self.close()
            hung = isinstance(error, TimeoutError)
            return Compiled(error=f"{NOT_KEPT}took more than {HANGS_AFTER_S:.0f} s" if hung else self._died(process))
        return Compiled.from_dict(json.loads(line)) if line.endswith("\n") else Compiled(error=self._died(process))

    def _start(self) -> subprocess.Popen[str]:
        self.close()
        hidden = ("TRITON_INTERPRET",)
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        # It finds what this process finds, the helpers of somebody's kernel too, and no more: -P keeps out whatever lies in the
        # folder that a program is started from.
        path = [os.path.abspath(entry) for entry in sys.path] + [str(Path(__file__).parents[2])]
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path))
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment[INSIDE] = self._about["kernel"]
        self._said.seek(0)
        self._said.truncate()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "toolkit.tune.compile_worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True, env=environment,
        )  # fmt: skip
        return self._process

    def _answer(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        with selectors.DefaultSelector() as waiting:
            waiting.register(process.stdout, selectors.EVENT_READ)
            if not waiting.select(HANGS_AFTER_S):
                raise TimeoutError
        return process.stdout.readline()

    def _died(self, process: subprocess.Popen[str]) -> str:
        status = process.wait()
        self._said.seek(0)
        last = [line.strip() for line in self._said.read()[-4000:].splitlines() if line.strip()][-1:]
        how = f"ended with signal {-status}" if status < 0 else f"ended with status {status}"
        return f"{NOT_KEPT}{how}{': ' if last else ''}{''.join(last)[:400]}"

    def kill(self) -> None:
        """End the process, whatever it does; from any thread."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process and let go of its pipes."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with suppress(BrokenPipeError):  # it died with a job in the pipe
                if pipe is not None:
                    pipe.close()


class Pool:
    """Several workers on one list of jobs; iterate for (job, result) as they come."""

    def __init__(self, kernel: Kernel, jobs: list[Job], count: int) -> None:
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Job, Compiled] | BaseException] = queue.SimpleQueue()
        self._left = len(jobs)
        self._stop = threading.Event()
        for job in jobs:
            self._jobs.put(job)
        self._workers = [Worker(kernel) for _ in range(count)]
        self._threads = [threading.Thread(target=self._run, args=(worker,), daemon=True) for worker in self._workers]
        for thread in self._threads:
            thread.start()

    def _run(self, worker: Worker) -> None:
        try:
            while not self._stop.is_set():
                job = self._jobs.get_nowait()
                self._done.put((job, worker.compile(job)))
        except queue.Empty:
            pass
        except BaseException as error:
            self._done.put(error)
        finally:
            worker.close()

    def __iter__(self) -> Pool:
        return self

    def __next__(self) -> tuple[Job, Compiled]:
        if not self._left:
            raise StopIteration
        found = self._done.get()
        if isinstance(found, BaseException):
            raise found
        self._left -= 1
        return found

    def close(self) -> None:
        """End every process; jobs that were not answered are dropped."""
        self._stop.set()
        for worker, thread in zip(self._workers, self._threads, strict=True):
            while thread.is_alive():
                worker.kill()
                thread.join(0.1)
