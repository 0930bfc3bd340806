"""Pause Python's garbage collector."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from toolkit.core.signals import signals_deferred

_lock = threading.Lock()
_paused = 0  # how many blocks run now, on all threads
_collected = False  # whether the collector was on before the first of them


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect no garbage while this block runs. Afterwards the collector is on again if it was on before.

    Blocks may overlap, also on several threads: the last one turns the collector on.
    """
    global _paused, _collected
    entered = False
    try:
        with signals_deferred, _lock:
            if not _paused:
                _collected = gc.isenabled()
            gc.disable()
            _paused += 1
            entered = True
        yield  # an interrupt may arrive before it
    finally:
        if entered:
            with signals_deferred, _lock:
                _paused -= 1
                if _collected and not _paused:
                    gc.enable()
