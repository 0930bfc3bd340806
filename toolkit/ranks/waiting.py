"""Wait for a function that runs on all ranks, show what it prints, and find the rank that failed first.

After the first failure, the other ranks are interrupted. Those that do not end then are killed with the cluster.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

from toolkit.core.callers import short_path, source_line
from toolkit.core.distributed import leave
from toolkit.core.errors import RankError
from toolkit.ranks.begun import waits_for
from toolkit.ranks.engines import Engines
from toolkit.ranks.rank import Failure, Outcome

POLL_S = 0.02
LEAVE_S = 1.0  # for ranks to notice by themselves, in a collective, that another one has failed
GRACE_S = 4.0  # after the interrupt


class Tasks:
    """A function that runs on all ranks."""

    def __init__(self, engines: Engines, ranks: int) -> None:
        self._engines, self._ranks = engines, ranks
        self._futures: list[Any] = []  # AsyncResults of ipyparallel, by rank
        self._outputs: list[_Output] = []
        self.outcomes: dict[int, Outcome] = {}  # by rank, in the order in which the ranks ended
        self.dead: set[int] = set()  # ranks whose process has ended or doesn't answer
        self.left: set[int] = set()  # ranks that have returned, and then had to leave the group
        self.missed: set[int] = set()  # those of them for which others seemed to wait
        self.cancelled = False

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Start a function of an installed module on all ranks. Raises RankError if the process of a rank has ended."""
        self._futures = [self._engines.submit(rank, function, *args) for rank in range(self._ranks)]
        self._outputs = [_Output(rank, future.metadata) for rank, future in enumerate(self._futures)]

    def wait(self, cancel: threading.Event | None = None) -> None:
        """Wait until all ranks have ended, or until `cancel` is set, which makes `cancelled` True.

        After that, or after the first failure, stop the others; those that don't stop are in `stuck`.
        """
        while self.stuck and not self.cancelled and not any(outcome.failure for outcome in self.outcomes.values()):
            self._poll()
            missed = {rank for rank in self._returned if self._awaited(rank)}
            self._leave(missed)
            self.missed |= missed
            self.cancelled = bool(self.stuck) and cancel is not None and cancel.is_set()
        if not self.cancelled:
            self._wait(LEAVE_S)
        if not self.dead:  # otherwise the cluster is closed anyway
            self.interrupt()
        for rank, future in enumerate(self._futures):
            if rank not in self.stuck | self.dead:
                future.wait_for_output(LEAVE_S)
        self._show(end=True)

    def interrupt(self) -> None:
        """Send SIGINT to the ranks that still run, and wait for them for at most GRACE_S.

        A rank may end before its signal arrives, because another one has left a collective. Wait for the signal also then: it
        would stop the next function. Ranks that have returned leave the group: others may wait for them where no signal helps.
        """
        if self.stuck:
            self._leave(self._returned)
            arrived = self._engines.interrupt(self.stuck)
            self._wait(GRACE_S)
            if not self.stuck and not self.dead:  # otherwise the cluster is closed anyway
                arrived(GRACE_S)

    @property
    def stuck(self) -> set[int]:
        """The ranks that still run."""
        return set(range(self._ranks)) - self.outcomes.keys()

    @property
    def _returned(self) -> set[int]:
        """The ranks whose function has returned, and which are still in the group."""
        return {rank for rank, outcome in self.outcomes.items() if not outcome.failure and not outcome.alone} - self.left

    def _awaited(self, returned: int) -> bool:
        """Return whether another rank may wait for one that has returned."""
        begun = self.outcomes[returned].begun
        return any(waits_for(self._engines.folder.name, rank, begun) for rank in self.stuck)

    def _leave(self, ranks: set[int]) -> None:
        """Make ranks that have returned leave the group. Exchanges that wait for them fail then, and no others do."""
        for rank in ranks:
            with suppress(RankError):  # its process has ended
                self._engines.submit(rank, leave)
            self.left.add(rank)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.stuck and time.monotonic() < deadline:
            self._poll()

    def _poll(self) -> None:
        self._futures[min(self.stuck)].wait(POLL_S)
        for rank in self.stuck:
            if self._futures[rank].ready():
                self.outcomes[rank] = self._outcome(rank)
        self._show()
        self._engines.check("running on several ranks")

    def _outcome(self, rank: int) -> Outcome:
        try:
            return self._futures[rank].get()  # type: ignore[no-any-return]
        except Exception as error:
            if self._engines.died(error):
                self.dead.add(rank)
                return Outcome(failure=Failure(self._engines.how_it_ended(rank)))
            return Outcome(failure=Failure("failed", str(error)))

    def _show(self, end: bool = False) -> None:
        for output in self._outputs:
            output.show(end)


class _Output:
    """What a rank prints, shown here line by line after the rank's number."""

    def __init__(self, rank: int, printed: dict[str, str]) -> None:
        self._rank, self._printed = rank, printed
        self._shown = {"stdout": 0, "stderr": 0}

    def show(self, end: bool) -> None:
        for name in self._shown:
            text = self._printed[name][self._shown[name] :]
            text = text if end else text[: text.rfind("\n") + 1]
            self._shown[name] += len(text)
            lines = [f"rank {self._rank}: {line}\n" for line in text.splitlines()]
            if lines:
                getattr(sys, name).write("".join(lines))


def first_failure(outcomes: dict[int, Outcome], missed: Collection[int] = ()) -> tuple[int, Failure] | None:
    """Return the rank that caused the others to fail, and why it failed; None if no rank failed.

    A collective fails on a rank because another one has ended, has returned, or did not arrive. `missed` are ranks that have
    returned, and for which others seemed to wait. One that did not arrive was interrupted.
    """
    failed = [(rank, outcome.failure) for rank, outcome in outcomes.items() if outcome.failure]
    own = [each for each in failed if not each[1].lost_peer and not each[1].interrupted]
    lost = [each for each in failed if each[1].lost_peer]
    late = [each for each in failed if each[1].interrupted]
    if own or not lost:
        return next(iter(own or late), None)
    timed_out = any("Timed out" in failure.message for _, failure in lost)  # otherwise, another rank has left the group
    gone = sorted(missed or [rank for rank, outcome in outcomes.items() if outcome.alone])
    if gone and not timed_out:
        also = f", and so did {_ranks(gone[1:])}" if gone[1:] else ""
        reason = f"returned without taking part in a collective in which {_waits(lost)}{also}"
        return gone[0], Failure(reason, traceback=lost[0][1].traceback, do="Run the same collectives on all ranks")
    if late or not timed_out:
        return (late or lost)[0]
    returned = [rank for rank in outcomes if rank not in dict(lost)]
    reason = f"timed out in a collective: {_waits(lost)}" + (f"; {_ranks(returned)} had returned" if returned else "")
    do = "Run the same collectives on all ranks, with tensors of the same shapes"
    return lost[0][0], Failure(reason, traceback=lost[0][1].traceback, do=do)


def _waits(lost: Sequence[tuple[int, Failure]]) -> str:
    """Return in which lines the ranks waited that have `lost` another one."""
    places: dict[str, list[int]] = {}
    for rank, failure in sorted(lost, key=lambda each: each[0]):
        places.setdefault(_place(failure), []).append(rank)
    return " and ".join(f"{_ranks(ranks)} waited{place}" for place, ranks in places.items())


def _ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1", or "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(rank) for rank in sorted(ranks))}"


def _place(failure: Failure) -> str:
    """Return " at FILE:LINE (the line)", or "" if that is not known."""
    if not failure.file:
        return ""
    source = source_line(f"{failure.file}:{failure.line}")
    return f" at {short_path(failure.file)}:{failure.line}" + (f" ({source})" if source else "")


def error_of(asked: str, rank: int, failure: Failure, cluster: str = "") -> RankError:
    """Return the error that names a rank, what happened to it, and its line. `cluster` says what has become of the cluster."""
    reason = failure.reason
    if failure.interrupted:
        reason = "did not arrive at a collective in which the others waited, and was interrupted"
    do = f"{failure.do.removesuffix('.')}. Then run again" if failure.do else "Fix the cause and run again"
    do += f": {cluster}" if cluster else ""
    message = failure.message.rstrip(".")
    found = f"rank {rank} {reason}{_place(failure)}" + (f": {message}" if message else "")
    error = RankError(asked, found, do, rank=rank)
    if failure.traceback:
        error.add_note(failure.traceback)
    return error
