"""Spread independent work over the ranks of a cluster: each free rank gets the next item, by ipyparallel's load-balanced view.

If the process of a rank ends, its item is repeated on another rank.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from toolkit.core.errors import RankError
from toolkit.core.signals import signals_deferred
from toolkit.ranks.engines import Engines
from toolkit.ranks.rank import Outcome
from toolkit.ranks.waiting import GRACE_S, POLL_S

TRIES = 3  # of an item: one that has ended this many processes is given up


class Spread:
    """Items that the ranks work through. At most one item per rank is under way."""

    def __init__(self, engines: Engines, asked: str, ranks: Sequence[int]) -> None:
        self._engines, self._asked, self._ranks = engines, asked, ranks
        self._running: dict[int, Any] = {}  # AsyncResults of ipyparallel, by the number of the item
        self._lost: Counter[int] = Counter()  # how many processes have ended while they worked on an item without a result

    def outcomes(self, function: Callable[..., Any], payloads: Sequence[bytes]) -> Iterator[tuple[int, int, Outcome]]:
        """Run `function(payload)` for each payload, and yield (its number, the rank, the outcome) as they end."""
        waiting = deque(range(len(payloads)))
        while waiting or self._running:
            alive = self._engines.alive_ranks(self._ranks)
            self._engines.check(self._asked)  # after the last line, which returns none if the cluster was closed
            if not alive:
                raise self._all_ended()
            if waiting and len(self._running) < len(alive):
                with signals_deferred:
                    future = self._engines.submit_to_any(self._asked, alive, function, payloads[waiting[0]])
                    if future is not None:
                        self._running[waiting.popleft()] = future
                if future is None:  # the client soon knows which process has ended
                    time.sleep(POLL_S)
                continue
            for number, rank, outcome in self._ended():
                if outcome is None:
                    waiting.appendleft(number)
                else:
                    self._lost.pop(number, None)
                    yield number, rank, outcome

    def stop(self) -> bool:
        """Interrupt what is under way. Return whether all of it has ended, and no signal can stop what comes next."""
        arrived = self._engines.interrupt(self._ranks if self._running else ())
        deadline = time.monotonic() + GRACE_S
        while self._running and self._engines.alive_ranks(self._ranks) and time.monotonic() < deadline:
            self._running = {number: future for number, future in self._running.items() if not future.ready()}
            time.sleep(POLL_S)
        if not self._running:
            arrived(GRACE_S)
        return not self._running

    def _all_ended(self) -> RankError:
        """Return the error that names the items on which processes have ended, and how each of them ended."""
        under_way = {number for number, future in self._running.items() if not (future.ready() and future.successful())}
        items = sorted(under_way | self._lost.keys())
        name = f"item{'s' if len(items) > 1 else ''} {', '.join(map(str, items))}"
        how = ", ".join(f"rank {rank} {self._engines.how_it_ended(rank)}" for rank in self._ranks)
        what = f"all processes have ended{f' while they worked on {name}' if items else ''}: {how}"
        do = f"Leave {name} out, or look at the output of the function. " if items else ""
        return RankError(self._asked, what, f"{do}Open a new cluster: tk.cluster(...)")

    def _ended(self) -> list[tuple[int, int, Outcome | None]]:
        """Wait a moment, and return the items that have ended. The outcome is None if the process has ended with the item."""
        next(iter(self._running.values())).wait(POLL_S)
        ended = [number for number, future in self._running.items() if future.ready()]
        found: list[tuple[int, int, Outcome | None]] = []
        for number in ended:
            future = self._running.pop(number)
            try:
                outcome: Outcome = future.get()
                found.append((number, self._engines.rank_of(future), outcome))
            except Exception as error:
                if not self._engines.died(error):
                    raise
                self._lost[number] += 1
                if self._lost[number] == TRIES:
                    what = f"{TRIES} processes have ended while they worked on item {number}"
                    raise RankError(self._asked, what, "Leave the item out, or look at the output of its function") from error
                found.append((number, -1, None))
        return found
