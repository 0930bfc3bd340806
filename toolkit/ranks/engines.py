"""The processes of a cluster: a controller and one engine per rank, which ipyparallel starts, watches and signals.

All of them end with this process, also if it is killed. They listen on the loopback only.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolkit.core.errors import RankError
from toolkit.core.extras import install_command
from toolkit.core.files import TemporaryFolder
from toolkit.core.signals import signals_deferred
from toolkit.core.units import plural
from toolkit.core.workers import processors, python_path
from toolkit.ranks.process import kill_all

LOOPBACK = "127.0.0.1"
START_S = 120.0  # for all engines to answer; each imports PyTorch later
LOOK_S = 1.0  # between two looks at whether an engine has ended before it answered
FILES_S = 0.05  # between two looks at whether the controller has written its files
BEAT_MS = 500  # between two heartbeats


def _ipyparallel() -> Any:
    try:
        import cloudpickle  # noqa: F401
        import ipyparallel
    except ImportError as error:
        do = f"Install the packages for clusters: {install_command('ranks')}"
        raise RankError("a cluster of several ranks", f"{error.name} is not installed", do) from error
    return ipyparallel


def _engine_set() -> Any:
    """Return a class that starts engines as ipyparallel's own does, and keeps their launchers in `started`.

    In `launchers`, ipyparallel keeps only those of the engines that run, if an event loop runs, as in a notebook.
    """
    from ipyparallel.cluster.launcher import LocalEngineSetLauncher

    class EngineSet(LocalEngineSetLauncher):  # type: ignore[misc]
        started: Sequence[Any] = ()

        def start(self, n: int) -> Any:
            try:
                return super().start(n)
            finally:
                self.started = list(self.launchers.values())

    return EngineSet


class Engines:
    """A controller and `ranks` engines. A rank that doesn't answer for `silent_s` seconds counts as dead."""

    def __init__(self, ranks: int, silent_s: float) -> None:
        ipyparallel = _ipyparallel()
        self._ranks, self.silent_s = ranks, silent_s
        try:
            self.folder = TemporaryFolder()
        except OSError as error:
            asked, found = f"a cluster of {plural(ranks, 'rank')}", f"its temporary folder can't be made ({error})"
            raise RankError(asked, found, "Free space there, or set TMPDIR to a folder that you may write to") from error
        self._owner = os.getpid()
        self._stores = 0
        self._closed = False
        self._gone = (IndexError, KeyError, ipyparallel.error.NoEnginesRegistered)  # what its client raises for a lost engine
        self._client: Any = None
        self._cluster = ipyparallel.Cluster(
            parent=None, profile_dir=self.folder.name, cluster_id="", cluster_file="", load_profile=False,
            shutdown_atexit=False, log_level=sys.maxsize, controller_ip=LOOPBACK, engine_launcher_class=_engine_set(),
        )  # fmt: skip

    def start(self) -> None:
        """Start the processes. If that raises, some of them may run until `close` is called."""
        try:
            self._start()
        except Exception as error:
            found = f"its processes can't be started ({error})"
            do = "Run `python -m ipyparallel.controller` to see the error"
            raise RankError(f"a cluster of {plural(self._ranks, 'rank')}", found, do) from error

    def _start(self) -> None:
        """Signals wait while a process is started: one that is not known yet would not be ended."""
        command = [sys.executable, "-P", "-W", "ignore", "-m", "toolkit.ranks.process"]
        environment = _environment(self._ranks, self.folder.name)
        beats = max(1, int(self.silent_s * 1000 / BEAT_MS))
        self._cluster.controller_args = [
            f"--HeartMonitor.period={BEAT_MS}", f"--HeartMonitor.max_heartmonitor_misses={beats}",
        ]  # fmt: skip
        parent = str(os.getpid())
        controller, engine = [*command, "controller", parent], [*command, "engine", parent]
        with signals_deferred:
            self._cluster.start_controller_sync(controller_cmd=controller, environment=dict(environment))
        self._wait_for_controller()  # without which no engine can start
        with signals_deferred:
            self._client = self._cluster.connect_client_sync()
            self._cluster.start_engines_sync(n=self._ranks, engine_cmd=engine, environment=environment, delay=0.0)
        self._wait_for_engines()
        self._ids = sorted(self._client.ids)
        self.pids: list[int] = self._client[self._ids].apply_sync(os.getpid)  # of the processes, by rank

    def _wait_for_controller(self) -> None:
        """Wait until the controller has written its files, or has ended. Raises TimeoutError after START_S.

        `connect_client_sync` would wait, too, but an interrupt would leave its task of asyncio behind, which prints a message.
        """
        deadline = time.monotonic() + START_S
        while self.alive and not all(map(os.path.exists, self._cluster.controller.connection_files.values())):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the controller has not answered for {START_S:g} s")
            time.sleep(FILES_S)

    def _wait_for_engines(self) -> None:
        """Wait until all engines answer. Raises RuntimeError if one ends before, or TimeoutError after START_S."""
        deadline = time.monotonic() + START_S
        while True:
            try:
                return self._client.wait_for_engines(self._ranks, timeout=LOOK_S, interactive=False)  # type: ignore[no-any-return]
            except TimeoutError:
                ended = [each for each in self._launchers() if not each.process.is_running()]
                if ended:
                    raise RuntimeError(f"one {self._ending(ended[0])}") from None
                if time.monotonic() > deadline:
                    raise

    def _launchers(self) -> list[Any]:
        """Return ipyparallel's launchers of the engines, which are not in the order of the ranks."""
        return [each for group in self._cluster.engines.values() for each in group.started]

    @property
    def is_ours(self) -> bool:
        """Whether this process has started the processes. A fork of it has not, and can't talk to them."""
        return os.getpid() == self._owner

    def submit(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function of an installed module on a rank. Returns a future, an AsyncResult of ipyparallel."""
        asked = "running on several ranks"
        try:
            return self._client[self._ids[rank]].apply_async(function, *args)
        except self._gone as error:
            do = "Open a new cluster: tk.cluster(...)"
            raise RankError(asked, f"rank {rank} {self.how_it_ended(rank)}", do) from error
        except RuntimeError:
            self.check(asked)  # another thread may have closed the client
            raise

    def submit_to_any(self, asked: str, ranks: list[int], function: Callable[..., Any], *args: Any) -> Any:
        """Run a function of an installed module on one of the ranks that is free.

        Returns a future as `submit` does, or None if the process of one of the ranks has ended.
        """
        try:
            return self._client.load_balanced_view([self._ids[rank] for rank in ranks]).apply_async(function, *args)
        except self._gone:
            return None
        except RuntimeError:
            self.check(asked)  # another thread may have closed the client
            raise

    def rank_of(self, future: Any) -> int:
        """Return the rank that ran a function which has ended."""
        return self._ids.index(future.engine_id)

    def alive_ranks(self, ranks: Iterable[int]) -> list[int]:
        """Return those of the ranks whose processes run, as far as the controller knows; none once it has ended."""
        alive = set(self._client.ids) if self.alive else set()
        return [rank for rank in ranks if self._ids[rank] in alive]

    def died(self, error: BaseException) -> bool:
        """Return whether a task failed with `error` because its process has ended or doesn't answer."""
        return getattr(error, "ename", "") == "EngineError"

    def new_store(self) -> str:
        """Return the path of a new file by which the ranks find each other."""
        self._stores += 1
        return str(Path(self.folder.name) / f"store-{self._stores}")

    @property
    def alive(self) -> bool:
        """Whether the controller runs, without which no result arrives."""
        return not self._closed and bool(self._cluster.controller.process.is_running())

    def check(self, asked: str) -> None:
        """Raise RankError if no result will arrive."""
        if not self.alive:
            found = "ipyparallel's controller has ended, or the cluster was closed by another thread"
            raise RankError(asked, found, "Open a new cluster: tk.cluster(...)")

    def interrupt(self, ranks: Iterable[int]) -> Callable[[float], None]:
        """Send SIGINT to those of the ranks whose processes run. Returns a function that waits until it has arrived there.

        It waits for so many seconds at most.
        """
        alive, sent = self.alive_ranks(ranks), []
        with suppress(*self._gone):  # one has ended meanwhile
            if alive:
                sent = [self._client.send_signal(signal.SIGINT, targets=[self._ids[rank] for rank in alive], block=False)]

        def arrived(seconds: float) -> None:
            for future in sent:
                with suppress(Exception):  # a process has ended, or another thread has closed the client
                    future.result(seconds)

        return arrived

    def how_it_ended(self, rank: int) -> str:
        """Return how the process of a rank ended: "was killed by signal 9 (SIGKILL)"."""
        return self._ending(next(each for each in self._launchers() if each.pid == self.pids[rank]))

    def _ending(self, launcher: Any) -> str:
        """Do as `how_it_ended`. The system says it once. A thread of ipyparallel asks it, and the process keeps the answer."""
        process, asking, status = launcher.process, getattr(launcher, "_wait_thread", None), None
        if asking is not None:
            asking.join(1)
        with suppress(Exception):
            status = process.wait(0)
        if status is None:
            return f"has not answered for {self.silent_s:g} s" if process.is_running() else "has ended"
        if status >= 0:
            return f"ended with status {status}"
        name = signal.Signals(-status).name
        cause = ", as the kernel does when the machine runs out of memory" if name == "SIGKILL" else ""
        return f"was killed by signal {-status} ({name}{cause})"

    def close(self) -> None:
        """End all processes and delete their files. Does nothing in a child of the process that started them."""
        if self.is_ours:
            with signals_deferred:
                self._close()

    def _close(self) -> None:
        self._closed = True  # first, since other threads may use the client
        for launcher in self._launchers():
            if launcher.pid > 0:  # otherwise it was not started
                kill_all(launcher.pid)  # also the processes that functions have started on this rank
        if self._client is not None:
            self._client.close(linger=0)
        controller = getattr(self._cluster.controller, "process", None)
        with suppress(Exception):
            self._cluster.stop_cluster_sync()
        with suppress(OSError):  # its children outlive a controller that was killed
            if controller is not None:
                os.killpg(controller.pid, signal.SIGKILL)
        self.folder.cleanup()


def _environment(ranks: int, folder: str) -> dict[str, str]:
    """Return environment variables for the processes: they find this process's modules, and read no profile of IPython."""
    environment = {"PYTHONPATH": python_path(), "IPYTHONDIR": folder}
    environment["NCCL_NVLS_ENABLE"] = "0"  # multicast over NVLink
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    if "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = str(max(1, processors() // ranks))
    return environment
