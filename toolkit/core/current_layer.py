"""Which layer of a model runs, so that a recorder can say to which layer each kernel belongs.

Models run each layer inside `in_layer`. Each thread has a current layer of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import nn

NO_LAYER = -1


class _Thread(threading.local):
    layer = NO_LAYER


_thread = _Thread()
_listeners: tuple[Callable[[int], None], ...] = ()


def current_layer() -> int:
    """Return the number of the layer that runs on this thread, or `NO_LAYER`."""
    return _thread.layer


def set_layer(layer: int) -> None:
    """Make `layer` the current one on this thread. Listeners are called on this thread, too."""
    _thread.layer = layer
    for hear in _listeners:
        hear(layer)


class in_layer:  # a class takes less time than a generator
    """A context manager that makes `layer`, counted from 0, the current layer of this thread."""

    __slots__ = ("_layer", "_outer")

    def __init__(self, layer: int) -> None:
        self._layer = layer

    def __enter__(self) -> None:
        self._outer = _thread.layer
        set_layer(self._layer)

    def __exit__(self, *_: object) -> None:
        set_layer(self._outer)


@contextmanager
def layers_noted(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Make each of `layers` the current one while it runs, by its place among them. The modules have hooks inside the block."""
    with ExitStack() as hooks:
        hooks.callback(set_layer, current_layer())  # a KeyboardInterrupt in a layer runs no hook after it
        for number, layer in enumerate(layers):
            hooks.callback(layer.register_forward_pre_hook(partial(_set, number)).remove)
            hooks.callback(layer.register_forward_hook(partial(_set, NO_LAYER), always_call=True).remove)
        yield


def _set(layer: int, *_: object) -> None:
    set_layer(layer)


def listen(hear: Callable[[int], None]) -> None:
    """Call `hear` with each new layer from now on, on the thread whose layer changes."""
    global _listeners
    _listeners = (*_listeners, hear)


def unlisten(hear: Callable[[int], None]) -> None:
    """Call `hear` no more."""
    global _listeners
    _listeners = tuple(each for each in _listeners if each != hear)
