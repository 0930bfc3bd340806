"""Return resources of the virtual GPU when the Python objects that use them are gone.

A destructor or weakref callback must not run Python code: Python prints and drops a KeyboardInterrupt that arrives in it, and
the resource would be lost. A `Tie` is a weak reference whose callback, a C function, only queues it; `settle` frees the rest.
The virtual GPU settles before it allocates, before its clock or step changes, and before anyone reads its memory.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque

from toolkit.core.signals import signals_deferred

_ended: deque[Tie] = deque()
lock = threading.RLock()


class Tie(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to an object, made as `Tie(object, queue)`, whose resource `end` frees. It must be kept alive."""

    __slots__ = ()

    def end(self) -> None:
        """Free the resource. Called once, after the object is gone."""
        raise NotImplementedError


queue = _ended.append  # a method of a C type, so that nothing can interrupt it


def settle() -> None:
    """Free the resources of all objects that are gone."""
    if not _ended:
        return
    with signals_deferred, lock:
        while _ended:
            _ended.popleft().end()
