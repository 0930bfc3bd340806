"""A pool of worker processes that exchange JSON with this one: one object per line, a job in and an answer out.

`WorkerPool` runs `python -m MODULE` in several processes; the module calls `listen` to receive jobs. It is for jobs that may
crash or hang their process. `concurrent.futures.ProcessPoolExecutor` cannot be used for those: it fails all jobs when one
process dies, cannot stop a running job, and runs the user's script again in every process that it spawns.
"""

from __future__ import annotations

import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self, TypeVar

from toolkit.core.files import TemporaryFolder
from toolkit.core.signals import signals_deferred

GRACE_S = 0.5  # between SIGTERM and SIGKILL: time for compilers to delete their half-written files

T = TypeVar("T")


class WorkerError(Exception):
    """The worker process ended, or was stopped, before it answered: "ended with signal 9: last line of its stderr"."""


class Worker:
    """A worker process: started by its first job, and restarted by the next job after it has died. See `WorkerPool`."""

    def __init__(self, module: str, about: Mapping[str, Any], environment: Mapping[str, str], timeout_s: float | None) -> None:
        self._module, self._about, self._environment, self._timeout_s = module, about, environment, timeout_s
        self._lock, self._stopped = threading.Lock(), False
        self.process: subprocess.Popen[str] | None = None
        self.folder: TemporaryFolder | None = None
        self._stderr: IO[str] | None = None

    def ask(self, job: Mapping[str, Any]) -> Any:
        """Send `job` to the process and return its answer.

        Raises WorkerError if the process dies, is stopped or exceeds the timeout, and OSError if it cannot be started.
        """
        with self._lock:
            if self._stopped:
                raise WorkerError("was stopped")
            is_new = self.process is None
            process = self.process = self.process or self._start()
        try:
            if is_new:
                assert self.folder is not None
                self._send(process, {**self._about, "folder": self.folder.name})
            self._send(process, job)
            line = self._receive(process)
            if line.endswith("\n"):
                return json.loads(line)
            why = self._how_it_ended(process)
        except TimeoutError:
            why = f"took more than {self._timeout_s:.0f} s"
        self.close()
        raise WorkerError(why)

    def stop(self) -> None:
        """Ask the process and those that it started to terminate, and refuse new jobs. May be called from any thread."""
        with self._lock:
            self._stopped = True
        if self.process is not None:
            _signal(self.process, signal.SIGTERM)

    def end(self) -> None:
        """Terminate the process and those that it started; kill them after GRACE_S. May be called from any thread."""
        process = self.process
        if process is None:
            return
        _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while _group_lives(process) and time.monotonic() < deadline:
            time.sleep(0.01)
        if _group_lives(process) and hasattr(signal, "SIGKILL"):
            _signal(process, signal.SIGKILL)

    def close(self) -> None:
        """End the process, close its pipes and delete its folder."""
        self.end()
        process, self.process = self.process, None
        if process is None:
            return
        process.wait()
        for pipe in (process.stdin, process.stdout, self._stderr):
            with suppress(OSError):  # closing flushes the pipe, which fails if the process died before it read a job
                if pipe is not None:
                    pipe.close()
        if self.folder is not None:
            self.folder.cleanup()

    def _start(self) -> subprocess.Popen[str]:
        self.folder = TemporaryFolder()
        self._stderr = open(Path(self.folder.name) / "stderr", "w+", errors="replace")  # noqa: SIM115  # closed with the process
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= {"PYTHONPATH": python_path(), "CUDA_VISIBLE_DEVICES": "", "TMPDIR": self.folder.name}
        environment |= self._environment
        return subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", "-m", self._module],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, text=True, env=environment,
            start_new_session=True,
        )  # fmt: skip

    def _send(self, process: subprocess.Popen[str], value: Mapping[str, Any]) -> None:
        assert process.stdin is not None
        with suppress(OSError):  # the process has died; `ask` reports it, since `_receive` then returns no line
            process.stdin.write(json.dumps(value) + "\n")
            process.stdin.flush()

    def _receive(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        if self._timeout_s is not None:
            with selectors.DefaultSelector() as waiting:
                waiting.register(process.stdout, selectors.EVENT_READ)
                if not waiting.select(self._timeout_s):
                    raise TimeoutError
        return process.stdout.readline()

    def _how_it_ended(self, process: subprocess.Popen[str]) -> str:
        status = process.wait()
        assert self._stderr is not None
        self._stderr.seek(0)
        last = [line.strip() for line in self._stderr.read()[-4000:].splitlines() if line.strip()][-1:]
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return f"ended with {how}{': ' if last else ''}{''.join(last)[:400]}"


def python_path() -> str:
    """Return a PYTHONPATH with which a child process finds the modules of this one: `sys.path`, and the toolkit.

    Start it with -P: otherwise files of the working directory may shadow modules, which this path leaves out.
    """
    return os.pathsep.join(dict.fromkeys([*filter(None, sys.path), str(Path(__file__).parents[2])]))


def processors() -> int:
    """Return how many processors this process may use. `taskset` and containers allow it fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _signal(process: subprocess.Popen[str], number: int) -> None:
    """Send a signal to the process and to those that it started."""
    with suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, number)
        else:
            process.terminate()


def _group_lives(process: subprocess.Popen[str]) -> bool:
    """Return whether the process, or one that it started, is still running."""
    if process.poll() is None:
        return True
    try:
        os.killpg(process.pid, 0)
    except (ProcessLookupError, PermissionError, AttributeError):
        return False
    states = [_state_and_group(path) for path in Path("/proc").glob("[0-9]*/stat")]
    ended = [state == "Z" for state, group in states if group == str(process.pid)]
    return not ended or not all(ended)  # some systems take a second to remove a process that has ended


def _state_and_group(path: Path) -> tuple[str, str]:
    """Return two fields of a /proc/PID/stat: "Z" if the process has ended, and its process group."""
    try:
        fields = path.read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return "Z", ""
    return fields[0], fields[2]


class WorkerPool:
    """Runs jobs on at most `count` processes of `python -m module`, none of which sees a GPU. Leaving the block stops them.

    Each process is first sent `about`, to which "folder" is added, a temporary folder of its own. `environment` has variables
    to set. A process that needs more than `timeout_s` for a job is killed. Processes run in sessions of their own: Ctrl-C
    reaches only this process, which stops them. They also end when this process is killed.
    """

    def __init__(
        self,
        module: str,
        about: Mapping[str, Any],
        count: int,
        environment: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.workers = [Worker(module, about, environment or {}, timeout_s) for _ in range(count)]
        self._idle = queue.LifoQueue[Worker]()  # last in, first out: no process is started while another one is idle
        for worker in self.workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(count, "toolkit-worker")

    def submit(self, run: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run `run(worker, *arguments)` in a thread, with a worker that no other job uses meanwhile."""
        return self._threads.submit(self._run, run, *arguments)

    def _run(self, run: Callable[..., T], *arguments: Any) -> T:
        worker = self._idle.get()
        try:
            return run(worker, *arguments)
        finally:
            self._idle.put(worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with signals_deferred:  # an interrupt must not leave a process behind
            self._threads.shutdown(wait=False, cancel_futures=True)
            for worker in self.workers:
                worker.stop()
            for worker in self.workers:
                worker.end()
            self._threads.shutdown()
            for worker in self.workers:
                worker.close()


def listen() -> tuple[Any, Iterator[Any], Callable[[Any], None]]:
    """Return the pool's `about`, an iterator over jobs, and a function that answers a job. Worker modules call it once.

    Afterwards, printed text goes to stderr, because stdout carries the answers. When the pool closes stdin or dies, even in the
    middle of a job, the process and the processes that it started end, and its folder is deleted.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    jobs = queue.SimpleQueue[Any]()
    about = json.loads(sys.stdin.readline() or "null")
    if about is None:
        sys.exit()
    threading.Thread(target=_read, args=(jobs, about["folder"]), daemon=True).start()
    return about, iter(jobs.get, None), answer


def _read(jobs: queue.SimpleQueue[Any], folder: str) -> None:
    for line in sys.stdin:
        jobs.put(json.loads(line))
    TemporaryFolder.delete(folder)
    if hasattr(os, "killpg") and os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGTERM)
    os._exit(0)
