"""Wait for a function that runs on all ranks, show what it prints, and find the rank that failed first.

After the first failure, the other ranks are interrupted. Those that do not end then are killed with the cluster.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from toolkit.core.callers import short_path, source_line
from toolkit.core.errors import RankError
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
        would stop the next function.
        """
        if self.stuck:
            arrived = self._engines.interrupt(self.stuck)
            self._wait(GRACE_S)
            if not self.stuck and not self.dead:  # otherwise the cluster is closed anyway
                arrived(GRACE_S)

    @property
    def stuck(self) -> set[int]:
        """The ranks that still run."""
        return set(range(self._ranks)) - self.outcomes.keys()

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


def first_failure(outcomes: dict[int, Outcome]) -> tuple[int, Failure] | None:
    """Return the rank that caused the others to fail, and why it failed; None if no rank failed.

    A collective fails on a rank because another one has ended or did not arrive. One that did not arrive was then interrupted.
    """
    failed = [(rank, outcome.failure) for rank, outcome in outcomes.items() if outcome.failure]
    own = [each for each in failed if not each[1].lost_peer and not each[1].interrupted]
    late = [each for each in failed if each[1].interrupted]
    return next(iter(own or late or failed), None)


def error_of(asked: str, rank: int, failure: Failure, cluster: str = "") -> RankError:
    """Return the error that names a rank, what happened to it, and its line. `cluster` says what has become of the cluster."""
    reason = failure.reason
    if failure.interrupted:
        reason = "did not arrive at a collective in which the others waited, and was interrupted"
    if failure.file:
        source = source_line(f"{failure.file}:{failure.line}")
        reason += f" at {short_path(failure.file)}:{failure.line}" + (f" ({source})" if source else "")
    do = f"{failure.do.removesuffix('.')}. Then run again" if failure.do else "Fix the cause and run again"
    do += f": {cluster}" if cluster else ""
    message = failure.message.rstrip(".")
    error = RankError(asked, f"rank {rank} {reason}" + (f": {message}" if message else ""), do, rank=rank)
    if failure.traceback:
        error.add_note(f"On rank {rank}:\n{failure.traceback}")
    return error
