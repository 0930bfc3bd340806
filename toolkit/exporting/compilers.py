"""Pieces compiled in processes of their own (`compile_worker`), several at once.

Nothing of the compiler stays in the user's process, and none of these processes sees a GPU: what they take is host memory.
They end with the export, also with one that is killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch

from toolkit.core.errors import PackageError
from toolkit.exporting.compiling import Compiled
from toolkit.tune.cards import Card

LETS_GO_S = 2.0  # in which compilers that are told to end delete what they have half written

Job = tuple[dict[str, str], "Future[Compiled]"]


class Compilers:
    """At most `most` processes, each started when it is first needed. To be closed, which ends them.

    `plain` is the model (see `skeleton`), with caches for `context` tokens in `kv`; `card` the GPU to compile for (None: CPU).
    """

    def __init__(self, plain: dict[str, Any], context: int, kv: str | None, card: Card | None, most: int) -> None:
        self._about = {
            "model": plain, "context": context, "kv": kv, "card": None if card is None else card.to_plain(),
            "threads": torch.get_num_threads(), "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        }  # fmt: skip
        self._most, self._jobs = most, queue.SimpleQueue[Job | None]()
        self._lock, self._workers, self._closed = threading.Lock(), list[_Worker](), False
        self._threads: list[threading.Thread] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # there once a process is

    def submit(self, piece: str, method: str, key: str) -> Future[Compiled]:
        """Have a piece compiled; the future raises PackageError with what the compiler said."""
        future: Future[Compiled] = Future()
        self._jobs.put(({"piece": piece, "method": method, "key": key}, future))
        if len(self._threads) < self._most:
            self._threads.append(threading.Thread(target=self._work, name="toolkit-export-compiler", daemon=True))
            self._threads[-1].start()
        return future

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed = True
        for worker in self._workers:
            worker.tell(signal.SIGTERM)
        for worker in self._workers:
            worker.end()
        for _thread in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        if self._folder is not None:
            self._folder.cleanup()

    def _work(self) -> None:
        """What one thread does: a process, and job after job for it."""
        worker: _Worker | None = None
        while (job := self._jobs.get()) is not None:
            asked, future = job
            try:
                worker = worker or self._start()
                future.set_result(worker.compiled(asked))
            except OSError as error:
                future.set_exception(_no_room(error))
            except BaseException as error:
                future.set_exception(error)
        if worker is not None:
            worker.close()

    def _start(self) -> _Worker:
        with self._lock:
            if self._closed:
                raise PackageError("compiling a layer", "the export has ended", "Export again: it goes on")
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="toolkit-export-", ignore_cleanup_errors=True)
            self._workers.append(_Worker(self._about | {"folder": self._folder.name}))
            return self._workers[-1]


def _no_room(error: OSError) -> PackageError:
    found = f"the processes that compile can't be started in {tempfile.gettempdir()} ({error.strerror or error})"
    return PackageError("compiling a layer", found, "Make room there, or name another folder in the variable TMPDIR")


class _Worker:
    """One process, in a session of its own with the compilers that it starts."""

    def __init__(self, about: dict[str, Any]) -> None:
        self._said: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # lives as long as the worker
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        package = str(Path(__file__).parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*filter(None, sys.path), package]))
        environment["CUDA_VISIBLE_DEVICES"] = ""  # what it compiles for, it is told
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # or it starts a process for each core, to compile kernels in
        environment.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # not tried out by one more process: the processor says so
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", "-m", "toolkit.exporting.compile_worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True, env=environment,
            start_new_session=True,
        )  # fmt: skip
        self._send(about)

    def compiled(self, job: dict[str, str]) -> Compiled:
        """What a job became; PackageError with what the compiler said, or where the process died of it."""
        assert self._process.stdout is not None
        self._send(job)
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            raise self._died()
        answer = json.loads(line)
        if "error" in answer:
            raise PackageError(*answer["error"])
        data = Path(answer["path"]).read_bytes()
        os.unlink(answer["path"])
        return Compiled(data, hashlib.sha256(data).hexdigest(), kept=False)

    def _died(self) -> PackageError:
        status = self._process.wait()
        self._said.seek(0)
        last = [text.strip() for text in self._said.read()[-4000:].splitlines() if text.strip()][-1:]
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        why = f"the compiling process ended {how}{': ' if last else ''}{''.join(last)[:300]}"
        return PackageError("compiling a layer", why, "Is there memory and room on the disk for it? Export again: it goes on")

    def end(self) -> None:
        """End the process and what it started, whatever they do; from any thread.

        First by asking: a compiler that is killed leaves a file half written that all later ones would take for whole.
        """
        self.tell(signal.SIGTERM)
        until = time.monotonic() + LETS_GO_S
        while self._lives() and time.monotonic() < until:
            time.sleep(0.01)
        if self._lives() and hasattr(signal, "SIGKILL"):
            self.tell(signal.SIGKILL)

    def close(self) -> None:
        """End it, and let go of pipes."""
        self.end()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._said):
            with suppress(OSError):  # it died with a job in the pipe
                if pipe is not None:
                    pipe.close()

    def tell(self, number: int) -> None:
        """Send a signal to the process and to what it started."""
        with suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, number)
            else:
                self._process.terminate()

    def _lives(self) -> bool:
        if self._process.poll() is None:
            return True
        try:
            os.killpg(self._process.pid, 0)
        except (ProcessLookupError, PermissionError, AttributeError):
            return False
        return True

    def _send(self, said: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it is dead, which its answer will tell
            self._process.stdin.write(json.dumps(said) + "\n")
            self._process.stdin.flush()
