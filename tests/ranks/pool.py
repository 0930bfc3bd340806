"""Processes that run functions of the tests as the ranks of a group of torch.distributed, with gloo on the loopback.

The processes are forked from one that has imported PyTorch. They end with the test run: each waits for a pipe that closes then.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

TIMEOUT_S = 30  # for a rank that doesn't arrive: on a busy machine, a first import takes several
PRELOADED = ["torch", "toolkit.loading.loader", "toolkit.decode.loop", "tests.ranks.programs"]


def _serve(pipe: Connection) -> None:
    """Run the functions that arrive: (function, arguments, rank, ranks, path of the group's new store or None)."""
    from toolkit.core.distributed import announcing

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    while True:
        try:
            function, args, rank, ranks, store = pipe.recv()
        except EOFError:
            return
        try:
            if dist.is_initialized():
                dist.destroy_process_group()
            if store is not None:
                group = {"store": dist.FileStore(store, ranks), "rank": rank, "world_size": ranks}
                dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S), **group)
                dist.barrier()  # a rank that fails at once would close connections that others still open
            with announcing():
                pipe.send((True, function(*args)))
        except Exception as error:
            pipe.send((False, error))


class Ranks:
    """Up to eight ranks. `run` returns what each returned; an error of a rank is returned in its place."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._runs = folder, 0
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._pipes: dict[int, Connection] = {}
        self.processes: dict[int, Any] = {}

    def run(self, ranks: int, function: Callable[..., Any], *args: Any, grouped: bool = True) -> list[Any]:
        """Run `function(*args)` on each of `ranks` ranks; without `grouped`, the processes belong to no group."""
        self._runs += 1
        store = str(self._folder / f"store-{self._runs}") if grouped else None
        for rank in range(ranks):
            self._start(rank)
            self._pipes[rank].send((function, args, rank, ranks, store))
        found, ends = [], time.monotonic() + 3 * TIMEOUT_S
        for rank in range(ranks):
            if not self._pipes[rank].poll(max(0.0, ends - time.monotonic())):
                self.processes[rank].kill()
                self.processes[rank].join()
            try:
                found.append(self._pipes[rank].recv()[1])
            except EOFError:  # the process has been killed
                self.processes[rank].join()
                found.append(None)
        return found

    def results(self, ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what each rank returned; raises the first error."""
        found = self.run(ranks, function, *args)
        for error in found:
            if isinstance(error, Exception):
                raise error
        return found

    def _start(self, rank: int) -> None:
        """Start the process of this rank unless it runs."""
        if rank not in self.processes or not self.processes[rank].is_alive():
            self._pipes[rank], theirs = self._context.Pipe()
            self.processes[rank] = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            self.processes[rank].start()
            theirs.close()

    def close(self) -> None:
        for pipe in self._pipes.values():
            pipe.close()
        for process in self.processes.values():
            process.join(5)
            process.kill()
