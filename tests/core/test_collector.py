"""Tests of `no_collection`."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator

import pytest

from toolkit.core import collector
from toolkit.core.collector import no_collection


@pytest.fixture(autouse=True)
def _collector_stays_on() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


def test_the_collector_is_off_inside_and_on_afterwards() -> None:
    with pytest.raises(KeyError), no_collection():  # noqa: PT012
        assert not gc.isenabled()
        with no_collection():
            pass
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with no_collection():
        pass
    assert not gc.isenabled()


@pytest.mark.usefixtures("python_handles_interrupts")
def test_an_interrupt_on_the_way_in_leaves_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupting:
        def __enter__(self) -> None:
            if gc.isenabled():
                signal.raise_signal(signal.SIGINT)

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(collector, "_lock", Interrupting())
    with pytest.raises(KeyboardInterrupt), no_collection():
        pytest.fail("the block runs")
    assert gc.isenabled()


def test_the_last_of_several_threads_turns_it_on() -> None:
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        with no_collection():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=work)
    with no_collection():
        thread.start()
        assert entered.wait(60)
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()
