"""Pieces compiled in processes of their own (`compile_worker`), several at once.

Nothing of the compiler stays in the user's process, and none of these processes sees a GPU: what they take is host memory.
They end with the export, also with one that is killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch

from toolkit.errors import PackageError
from toolkit.exporting.compiling import Compiled
from toolkit.kernels.tune.cards import Card


class Compilers:
    """At most `most` processes, each started when it is first needed. To be closed, which ends them.

    `plain` is the model (see `skeleton`), with caches for `context` tokens in `kv`; `card` the GPU to compile for (None: CPU).
    """

    def __init__(self, plain: dict[str, Any], context: int, kv: str | None, card: Card | None, most: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="toolkit-export-", ignore_cleanup_errors=True)
        held = None if card is None else card.to_plain()
        self._about = {"model": plain, "context": context, "kv": kv, "card": held, "folder": self._folder.name}
        self._threads = ThreadPoolExecutor(most, "toolkit-export-compiler")
        self._own = threading.local()
        self._lock, self._workers, self._closed = threading.Lock(), list[_Worker](), False

    def submit(self, piece: str, method: str, key: str) -> Future[Compiled]:
        """Have a piece compiled; the future raises PackageError with what the compiler said."""
        return self._threads.submit(self._compile, {"piece": piece, "method": method, "key": key})

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()
        self._folder.cleanup()

    def _compile(self, job: dict[str, str]) -> Compiled:
        if not hasattr(self._own, "worker"):
            with self._lock:
                if self._closed:
                    raise PackageError("compiling a layer", "the export has ended", "")
                self._own.worker = _Worker(self._about)
                self._workers.append(self._own.worker)
        answer = self._own.worker.ask(job)
        if "error" in answer:
            raise PackageError(*answer["error"])
        data = Path(answer["path"]).read_bytes()
        os.unlink(answer["path"])
        return Compiled(data, hashlib.sha256(data).hexdigest(), kept=False)


class _Worker:
    """One process, in a session of its own: its compilers end with it."""

    def __init__(self, about: dict[str, Any]) -> None:
        self._said: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  # lives as long as the worker
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        package = str(Path(__file__).parents[2])
        environment["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [environment.get("PYTHONPATH")])])
        environment["CUDA_VISIBLE_DEVICES"] = ""  # what it compiles for, it is told
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # or it starts a process for each core, to compile kernels in
        environment.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # not tried out by one more process: the processor says so
        environment["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # code for the CPU uses as many as compile it
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "toolkit.exporting.compile_worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True, env=environment,
            start_new_session=True,
        )  # fmt: skip
        self._send(about)

    def ask(self, job: dict[str, str]) -> dict[str, Any]:
        """What became of a job; PackageError where the process died of it."""
        assert self._process.stdout is not None
        self._send(job)
        line = self._process.stdout.readline()
        if line.endswith("\n"):
            answer: dict[str, Any] = json.loads(line)
            return answer
        status = self._process.wait()
        self._said.seek(0)
        last = [text.strip() for text in self._said.read()[-4000:].splitlines() if text.strip()][-1:]
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        why = f"the compiling process ended {how}{': ' if last else ''}{''.join(last)[:300]}"
        raise PackageError("compiling a layer", why, "Is there memory and room on the disk for it? Export again: it goes on")

    def kill(self) -> None:
        """End the process, whatever it does, with those that it started; from any thread."""
        with suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()

    def close(self) -> None:
        """Wait for the end, and let go of pipes."""
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):  # it died with a job in the pipe
                if pipe is not None:
                    pipe.close()
        self._said.close()

    def _send(self, said: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it is dead, which its answer will tell
            self._process.stdin.write(json.dumps(said) + "\n")
            self._process.stdin.flush()
