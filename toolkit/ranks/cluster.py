"""`tk.cluster`: processes that run the same functions, each with its own GPU or virtual GPU.

ipyparallel starts and drives the processes. They communicate by torch.distributed: gloo, and NCCL on CUDA.
"""

from __future__ import annotations

import pickle
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from toolkit.core.distributed import MOST, TIMEOUT_S
from toolkit.core.errors import CancelledError, DeviceError, RankError, ToolkitError, brief, unknown_name
from toolkit.core.numbers import integer, real
from toolkit.core.signals import signals_deferred
from toolkit.core.units import plural
from toolkit.gpu.catalogue import CATALOGUE
from toolkit.gpu.device import Memory
from toolkit.gpu.virtual.device import find_spec, joint, meant
from toolkit.ranks.engines import Engines
from toolkit.ranks.packing import pack
from toolkit.ranks.rank import at_peak, enter, execute, memory_now, prepare, set_budget, versions
from toolkit.ranks.remote import RankedModel, check_seen, load_on
from toolkit.ranks.spreading import Spread
from toolkit.ranks.waiting import Tasks, error_of, first_failure

if TYPE_CHECKING:
    import pandas as pd

_OUTSIDE = "Do it outside of that block. The function itself may contain one"
_SEVERAL = re.compile(r"(virtual:)?(\d{1,9})x(.+)")


def cluster(device: str, ranks: object = None, *, timeout_s: float = TIMEOUT_S, silent_s: float = 10.0) -> Cluster:
    """Start one process per rank on this machine, open a device on each, and return the `Cluster`. Needs `ipyparallel`.

    Args:
        device: "virtual:2xh200" (two ranks with a virtual H200 each), "2xcuda" (rank i opens "cuda:i") or "2xcpu"; or the name
            without a number: "virtual:h200", "cuda" or "cpu".
        ranks: number of ranks. Default: the number in the name, or the number of CUDA GPUs.
        timeout_s: how long a rank waits in a collective for the others before the collective fails.
        silent_s: a process that shows no sign of life for this long, for example because it was stopped, counts as dead.

    Raises DeviceError or UnknownNameError if the machine doesn't have such devices, and RankError if ipyparallel is missing,
    `ranks` is not a number from 1 to 64, or a process can't be started or has other versions of PyTorch, Python or the toolkit.
    """
    kind, count = checked(device, ranks)
    asked = f"a cluster of {plural(count, 'rank')} with {kind}"
    for name, seconds in (("timeout_s", timeout_s), ("silent_s", silent_s)):
        if (found := real(seconds)) is None or not 1 <= found <= 1e6:
            raise RankError(asked, f"{name}={brief(seconds)} is not a number of seconds from 1 to 1e6", f"Try {name}=60")
    return Cluster(kind, count, timeout_s, silent_s)


class Cluster:
    """Processes that run functions together. Get one from `tk.cluster`, and close it: `with tk.cluster(...) as cluster:`."""

    def __init__(self, device: str, ranks: int, timeout_s: float, silent_s: float) -> None:
        self.device, self.ranks, self.timeout_s = device, ranks, timeout_s
        self._asked = f"a cluster of {plural(ranks, 'rank')} with {device}"
        self.handles: weakref.WeakValueDictionary[int, RankedModel] = weakref.WeakValueDictionary()  # of models on the ranks
        self._limit: int | float | str | None = None  # of `budget`
        self._lock = threading.Lock()
        self._engines = Engines(ranks, silent_s)
        self._finalizer = weakref.finalize(self, self._engines.close)  # also at the end of the program
        try:
            self._engines.start()
            found = self._on_all(self._asked, lambda rank: (prepare, rank, ranks, device))
            check_versions(self._asked, found)
            self._enter()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"Cluster({self.device!r}, ranks={self.ranks}, {'closed' if self.closed else 'open'})"

    def __reduce__(self) -> Any:
        found = "only the process that opened the cluster can use it"
        raise RankError("sending a cluster", found, "Pass what the function needs of it, such as cluster.ranks")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The process ids, by rank."""
        return self._engines.pids

    @property
    def closed(self) -> bool:
        """Whether the processes have ended."""
        return not self._finalizer.alive

    def close(self) -> None:
        """End all processes, which frees their memory. A closed cluster can't be opened again."""
        self._finalizer()

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run `function(*args, **kwargs)` on all ranks at once and return the results by rank.

        The function may come from a notebook. On each rank, the device is open (`torch.device("vgpu")` is a virtual GPU) and
        torch.distributed's default group is initialized. Printed lines are shown with the number of the rank. Arguments and
        results are pickled.

        Raises RankError if a rank raises an error, ends, or stops answering: all others are stopped, and the error names the
        rank, its line and the reason, with the rank's traceback as a note. The cluster stays open if all ranks could be
        stopped, otherwise it is closed; the error says which. An interrupt (Ctrl-C) stops all ranks in the same way. Raises
        RecorderError inside of a block that records or measures this process only; the function itself may contain one.
        """
        doing = f"running {_name(function)}"
        check_seen(doing, _OUTSIDE)
        return self.run_as(doing, None, function, *args, **kwargs)

    def run_as(
        self, doing: str, cancel: threading.Event | None, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> list[Any]:
        """Do as `run` does. Errors say what the ranks were `doing`.

        If another thread sets `cancel`, all ranks are interrupted as by Ctrl-C, and CancelledError is raised.
        """
        asked = f"{doing} on {plural(self.ranks, 'rank')}"
        payload = self._pack(asked, function, args, kwargs)
        with self._busy(asked):
            return [unpacked(asked, rank, value) for rank, value in enumerate(self._run(asked, payload, cancel))]

    def spread(
        self, function: Callable[..., Any], items: Iterable[Any], ranks: Sequence[int] | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Call `function(item)` for each item on a rank that is free, and yield (number of the item, result) as they end.

        This is for independent work: the function must not exchange anything with other ranks. `ranks` are those that take
        part (default: all). If the process of a rank ends, its item is repeated on another one; `run` is then refused. If the
        function leaves torch.distributed's default group, the ranks enter a new one after the last item.

        The call reads all items and checks its arguments. The ranks begin when the first result is asked for, for example by
        `for number, result in cluster.spread(function, items)`.

        Raises RankError if the cluster is closed, if `items` are no items, or if `ranks` has none of the cluster or others; and
        while the ranks work, if the function raises an error, if an item ends three processes, or if all processes have ended.
        Raises RecorderError as `run` does.
        """
        asked = f"spreading {_name(function)} over {plural(self.ranks, 'rank')}"
        self._check_open(asked)
        if not isinstance(items, Iterable):
            raise RankError(asked, f"the items are {brief(items)}", "Give a list of them")
        chosen = self._chosen(asked, ranks)
        return self._spread(asked, chosen, [self._pack(asked, function, (item,), {}) for item in items])

    def _spread(self, asked: str, ranks: list[int], payloads: list[bytes]) -> Iterator[tuple[int, Any]]:
        """Do what `spread` has checked and packed."""
        check_seen(asked, _OUTSIDE)
        with self._busy(asked):
            work, alone = Spread(self._engines, asked, ranks), False
            try:
                for number, rank, outcome in work.outcomes(execute, payloads):
                    if outcome.failure:
                        raise error_of(asked, rank, outcome.failure)
                    alone |= outcome.alone
                    yield number, unpacked(asked, rank, outcome.value or b"")
                if alone:
                    self._after(work)
            except BaseException as error:
                _add_note(error, lambda: self._after(work))
                raise

    def _chosen(self, asked: str, ranks: object) -> list[int]:
        """Return the ranks that take part. Raises RankError unless they are ranks of this cluster."""
        given = range(self.ranks) if ranks is None else ranks
        found = [integer(rank, 0, self.ranks - 1) for rank in given] if isinstance(given, Iterable) else []
        chosen = [rank for rank in dict.fromkeys(found) if rank is not None]
        if not chosen or None in found:
            do = f"Give a list of ranks from 0 to {self.ranks - 1}, or leave ranks out"
            raise RankError(asked, f"ranks={brief(ranks)} are not ranks of the cluster", do)
        return chosen

    @contextmanager
    def _busy(self, asked: str) -> Iterator[None]:
        """Hold the cluster for one function. Raises RankError if it runs another one, or is closed."""
        if not self._lock.acquire(blocking=False):
            raise RankError(asked, "the cluster already runs a function", "Wait for it, or open a second cluster")
        try:
            self._check_open(asked)
            yield
        finally:
            self._lock.release()

    def _check_open(self, asked: str) -> None:
        """Raise RankError if the cluster is closed, or was opened by another process."""
        found = "the cluster is closed" if self.closed else ""
        if not self._engines.is_ours:
            found = "another process, from which this one was forked, has opened the cluster"
        if found:
            raise RankError(asked, found, f"Open a new one: tk.cluster({self.device!r}, {self.ranks})")

    def _after(self, work: Spread) -> str:
        """Stop work that was not completed, and enter a new group on all ranks: functions that were stopped have left it.

        Returns what has become of the cluster.
        """
        with signals_deferred:
            stopped = work.stop()
        alive = len(self._engines.alive_ranks(range(self.ranks)))
        if not stopped or not alive or (alive == self.ranks and not self._entered()):
            self.close()
        return "is closed" if self.closed else "is still open"

    def memory(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> pd.DataFrame:
        """Run a function on all ranks that measures its memory, and return who held how much at the peak, by rank.

        The function returns `m` of its block `with tk.memory() as m:`. The table has one row per rank, owner, kind and line:
        `rank` and the columns of `m.at_peak()`. Raises as `run` does.
        """
        import pandas as pd

        doing = f"measuring the memory of {_name(function)}"
        check_seen(doing, _OUTSIDE)
        tables = self.run_as(doing, None, at_peak, function, args, kwargs)
        return pd.concat(dict(enumerate(tables)), names=["rank"]).reset_index("rank").reset_index(drop=True)

    def memory_now(self, cancel: threading.Event | None = None) -> list[Memory]:
        """Return the memory of each rank's device now, as `device.memory()` does. For `cancel` see `run_as`."""
        return self.run_as("looking at the memory", cancel, memory_now)

    def budget(self, size: int | float | str | None) -> None:
        """Limit the memory of each rank's device to `size`, such as "8 GiB", as `tk.budget` does. None removes the limits.

        Raises RankError with the reason if a rank can't set it, for example because more is already allocated. Then the limits
        of an earlier call stay.
        """
        try:
            self.run_as("setting a budget", None, set_budget, size)
        except RankError:
            if not self.closed:
                self.run_as("restoring the budget", None, set_budget, self._limit)
            raise
        self._limit = size

    def load(self, path: Any, **options: Any) -> RankedModel:
        """Load a model on all ranks, each of which holds its part; `tk.load(path, cluster=...)` calls this."""
        defaults = {"device": "auto", "tensor_parallel": 1, "progress": True, "cancel": None, "engine": None}
        return load_on(self, path, defaults | options)

    def _run(self, asked: str, payload: bytes, cancel: threading.Event | None) -> list[bytes]:
        tasks = Tasks(self._engines, self.ranks)
        try:
            with signals_deferred:
                tasks.start(execute, payload, self._engines.folder.name)
            tasks.wait(cancel)
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)

            def recover() -> str:
                if interrupted:
                    tasks.interrupt()
                return self._recover(tasks)

            _add_note(error, recover)
            raise
        if tasks.cancelled:
            raise CancelledError(asked, "it was cancelled", f"Start it again: the cluster {self._recover(tasks)}")
        found = first_failure(tasks.outcomes, tasks.missed)
        if found:
            raise error_of(asked, *found, f"the cluster {self._recover(tasks)}")
        if tasks.left or any(outcome.alone for outcome in tasks.outcomes.values()):
            self._recover(tasks)
        return [tasks.outcomes[rank].value or b"" for rank in range(self.ranks)]

    def _recover(self, tasks: Tasks) -> str:
        """Enter a new group if all ranks have ended the function that failed; otherwise close. Returns which of the two."""
        if not tasks.stuck and not tasks.dead and not self.closed and self._entered():
            return "is still open"
        self.close()
        return f"is closed; open a new one with tk.cluster({self.device!r}, {self.ranks})"

    def _entered(self) -> bool:
        """Return whether all ranks have entered a new group. An interrupt closes the cluster: only some may have entered it."""
        try:
            self._enter()
        except RankError:
            return False
        except BaseException as error:
            self.close()
            error.add_note("The cluster is closed.")
            raise
        return True

    def _enter(self) -> None:
        store = self._engines.new_store()
        self._on_all(self._asked, lambda rank: (enter, rank, self.ranks, self.device, store, self.timeout_s))

    def _on_all(self, asked: str, call: Callable[[int], tuple[Any, ...]]) -> list[Any]:
        """Return what functions of this package return on the ranks."""
        futures = [self._engines.submit(rank, *call(rank)) for rank in range(self.ranks)]
        found = []
        for rank, future in enumerate(futures):
            try:
                found.append(future.get())
            except Exception as error:
                raise RankError(asked, f"rank {rank} failed with {str(error)[:400]}", "Open the cluster again") from error
        return found

    def _pack(self, asked: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
        try:
            return pack((function, args, dict(kwargs)))
        except ToolkitError as error:
            raise RankError(asked, f"the function uses what can't be sent. {error.asked}: {error.found}", error.do) from error
        except Exception as error:
            do = "Create the object on the ranks, inside the function, or pass plain values and CPU tensors"
            raise RankError(asked, f"the function or an argument can't be pickled ({error})", do) from error


def _name(function: object) -> str:
    """Return the name of a function. Raises RankError if it is none."""
    if not callable(function):
        do = "Pass the function and its arguments: run(f, 1, 2)"
        raise RankError(f"running {brief(function)} on the ranks", f"{brief(function)} is not a function", do)
    return str(getattr(function, "__name__", brief(function)))


def _add_note(error: BaseException, recover: Callable[[], str]) -> None:
    """Add to an error what has become of the cluster, which `recover` returns. Another interrupt waits, and says the same."""
    told = ""
    try:
        with signals_deferred:
            told = f"The cluster {recover()}."
    except BaseException as later:
        if told:
            later.add_note(told)
        raise
    error.add_note(told)


def unpacked(asked: str, rank: int, value: bytes) -> Any:
    """Return what a function returned on a rank. Raises RankError if it can only be unpickled there."""
    try:
        return pickle.loads(value)
    except Exception as error:
        found = f"rank {rank} returned what can't be read in this process ({error})"
        raise RankError(asked, found, "Return plain values and CPU tensors", rank=rank) from error


def check_versions(asked: str, found: Sequence[Mapping[str, str]]) -> None:
    """Raise RankError, which names the first rank whose versions differ from those of this process, by rank in `found`."""
    ours = versions()
    for rank, theirs in enumerate(found):
        for name, version in ours.items():
            if theirs.get(name) != version:
                what = f"rank {rank} has {name} {theirs.get(name)}, and this process has {version}"
                raise RankError(asked, what, f"Install {name} {version} for all ranks")


def several(device: str) -> tuple[str, int] | None:
    """Return the device of each rank and the number of ranks if a name asks for several: "virtual:2xh200", "2xcuda"."""
    found = _SEVERAL.fullmatch(device)
    return (f"{found[1] or ''}{found[3]}", int(found[2])) if found else None


def checked(device: str, ranks: object = None) -> tuple[str, int]:
    """Return the device that each rank opens and the number of ranks. Raises an error for what this machine doesn't have."""
    asked = f"a cluster of {brief(device)}" + (f" with ranks={brief(ranks)}" if ranks is not None else "")
    kind, number = several(str(device)) or (str(device), None)
    if kind not in ("cpu", "cuda") and not (kind.startswith("virtual:") and find_spec(kind.removeprefix("virtual:"))):
        names = ["cpu", "cuda", "2xcuda", *(joint(f"virtual:{card}", 2) for card in CATALOGUE)]
        raise unknown_name("device of a cluster", device, names, _nearest(str(device), ranks))
    default = max(_gpus(), 1) if kind == "cuda" and number is None else number
    if default is None and ranks is None:
        raise RankError(asked, "the number of ranks is not stated", f'Write "{joint(kind, 2)}", or pass ranks=2')
    count = integer(default if ranks is None else ranks, least=1, most=MOST)
    if count is None:
        usable = kind if kind != "cuda" or _gpus() > 1 else "virtual:h200"
        raise RankError(asked, f"the number of ranks is not a whole number from 1 to {MOST}", f'Try tk.cluster("{usable}", 2)')
    if number is not None and number != count:
        raise RankError(asked, f"the name asks for {plural(number, 'rank')}", f"Give one of the two: tk.cluster({device!r})")
    if kind == "cuda" and count > _gpus():
        found = f"this machine has {plural(_gpus(), 'CUDA GPU')}, and each rank needs one"
        raise DeviceError(asked, found, f'Use virtual GPUs: "virtual:{max(count, 2)}xh200"')
    return kind, count


def _nearest(device: str, ranks: object) -> str | None:
    """Return the name that a misspelt one stands for. It has the number of ranks, unless that is given as `ranks`."""
    if found := meant(device):
        return joint(*found)
    found = meant(f"2x{device}")
    return None if found is None else joint(*found) if ranks is None else found[0]


def _gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
