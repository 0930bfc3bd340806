"""Tests of the line log against lines that record their own times."""

import heapq
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import perf_counter_ns

import numpy as np
import pytest

from toolkit.core.current_layer import in_layer
from toolkit.gpu.line_log import LineLog, know_thread


@pytest.fixture(autouse=True)
def _no_other_tracer():
    if sys.gettrace() is not None:
        pytest.skip("a debugger or a coverage tool traces this thread: the log steps aside")


# perf_counter_ns is a built-in: no line of Python runs between the line that calls it and its answer
def straight():
    seen.append((perf_counter_ns(), sys._getframe().f_lineno))
    seen.append((perf_counter_ns(), sys._getframe().f_lineno))


seen: list[tuple[int, int]] = []


def inner(x):
    seen.append((perf_counter_ns(), sys._getframe().f_lineno))
    return x


def calls():
    inner(1)
    seen.append((perf_counter_ns(), sys._getframe().f_lineno))
    inner(2), seen.append((perf_counter_ns(), sys._getframe().f_lineno)), inner(3)
    [inner(i) for i in range(3)]
    seen.append((perf_counter_ns(), sys._getframe().f_lineno))


def generates():
    for _ in range(2):
        yield
        seen.append((perf_counter_ns(), sys._getframe().f_lineno))


def generators():
    for _ in generates():
        seen.append((perf_counter_ns(), sys._getframe().f_lineno))
    seen.append((perf_counter_ns(), sys._getframe().f_lineno))


def fails():
    raise ValueError


def exceptions():
    try:
        fails()
    except ValueError:
        seen.append((perf_counter_ns(), sys._getframe().f_lineno))
    seen.append((perf_counter_ns(), sys._getframe().f_lineno))


def through_a_library():
    sorted([2, 1], key=lambda x: (inner(x), 0)[1])
    seen.append((perf_counter_ns(), sys._getframe().f_lineno))


class Scope:
    def __enter__(self):
        seen.append((perf_counter_ns(), sys._getframe().f_lineno))

    def __exit__(self, *_):
        seen.append((perf_counter_ns(), sys._getframe().f_lineno))


def scopes():
    with Scope():
        seen.append((perf_counter_ns(), sys._getframe().f_lineno))
    seen.append((perf_counter_ns(), sys._getframe().f_lineno))


def loops():
    for i in range(50):
        if i % 7:
            continue
        seen.append((perf_counter_ns(), sys._getframe().f_lineno))


@pytest.mark.parametrize(
    "work", [straight, calls, generators, exceptions, through_a_library, scopes, loops], ids=lambda f: f.__name__
)
def test_the_line_that_ran_at_a_time(work):
    seen.clear()
    log = LineLog()
    log.start()
    work()
    log.stop()
    times = np.array([time for time, _ in seen])
    said = log.where(np.full(len(seen), threading.get_native_id()), times)
    assert log.problem is None
    assert [int(text.rpartition(":")[2]) for text in said] == [line for _, line in seen]
    assert {text.rpartition(":")[0].rpartition("/")[2] for text in said} == {"test_lines.py"}


def test_threads_have_their_own_lines_under_both_of_their_numbers():
    rows = {}

    def work(n):
        for _ in range(20):
            numbers = threading.get_native_id(), know_thread()
            rows.setdefault(n, []).append((*numbers, perf_counter_ns(), sys._getframe().f_lineno))

    log = LineLog()
    log.start()
    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.stop()
    for row in rows.values():
        native, cupti, times, lines = np.array(row).T
        for numbers in (native, cupti):
            assert [int(text.rpartition(":")[2]) for text in log.where(numbers, times)] == lines.tolist()


def test_threads_have_layers_of_their_own():
    rows = []

    def work(thread):
        def note(layer):
            rows.append((know_thread(), perf_counter_ns(), layer))

        note(-1)
        for layer in range(3):
            with in_layer(layer):
                note(layer)
                with suppress(ValueError), in_layer(10 * thread):
                    note(10 * thread)
                    raise ValueError
                note(layer)
            note(-1)

    log = LineLog()
    with in_layer(77):
        log.start()
        began = perf_counter_ns()
    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 4)]
    for thread in threads:
        thread.start()
    work(4)
    for thread in threads:
        thread.join()
    log.stop()
    with in_layer(78):
        later = perf_counter_ns()
    own = threading.get_native_id()
    rows += [(own, began, 77), (own, began - 10**9, -1), (own, later, -1), (-7, began, 77)]
    thread_ids, times, layers = np.array(rows).T
    assert log.layers(thread_ids, times).tolist() == layers.tolist()


def test_a_thread_outside_of_layers_has_none_while_another_runs_one():
    rows = []

    def work():
        rows.append((know_thread(), perf_counter_ns()))

    log = LineLog()
    with in_layer(5):
        log.start()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        work()
    log.stop()
    assert log.layers(*np.array(rows).T).tolist() == [-1, 5]


def test_a_thread_without_python_takes_the_line_that_waits_for_it():
    log = LineLog()
    log.start()
    time, line = perf_counter_ns(), sys._getframe().f_lineno
    log.stop()
    (text,) = log.where(np.array([-12345]), np.array([time]))
    assert text.endswith(f"test_lines.py:{line}")


def test_before_the_log_began_nothing_is_known():
    log = LineLog()
    log.start()
    log.stop()
    assert log.where(np.array([threading.get_native_id()]), np.array([0])) == [None]
    assert log.where(np.empty(0, np.int64), np.empty(0, np.int64)) == []


def test_logs_follow_one_another_and_leave_nothing_behind():
    before = sys.gettrace(), threading.gettrace()
    for _ in range(30):
        log = LineLog()
        log.start()
        time, line = perf_counter_ns(), sys._getframe().f_lineno
        log.stop()
        assert log.where(np.array([threading.get_native_id()]), np.array([time]))[0].endswith(f":{line}")
    assert (sys.gettrace(), threading.gettrace()) == before
    assert sys._getframe().f_trace is None


def test_libraries_are_no_cause():
    import torch

    log = LineLog()
    log.start()
    line = sys._getframe().f_lineno + 1
    torch.nn.functional.relu(torch.ones(3), inplace=False)
    time = perf_counter_ns()
    log.stop()
    texts = {
        text
        for text in log.where(np.full(50, threading.get_native_id()), np.linspace(time - 10**6, time, 50).astype(np.int64))
        if text
    }
    assert not [text for text in texts if "torch" in text.rpartition(":")[0]]
    assert line


def test_the_standard_library_is_no_cause():
    log = LineLog()
    log.start()
    line = sys._getframe().f_lineno + 1
    time = next(heapq.merge(iter(perf_counter_ns, 0)))
    log.stop()
    (text,) = log.where(np.array([threading.get_native_id()]), np.array([time]))
    assert text.endswith(f"test_lines.py:{line}")


def test_a_worker_that_runs_libraries_takes_the_line_that_waits_for_it():
    """Its last line of the user's is over."""
    log = LineLog()
    with ThreadPoolExecutor(1) as pool:
        log.start()
        assert pool.submit(lambda: 1).result()
        line = sys._getframe().f_lineno + 1
        thread, time = pool.submit(threading.get_native_id).result(), pool.submit(perf_counter_ns).result()
        log.stop()
    (text,) = log.where(np.array([thread]), np.array([time]))
    assert text.endswith(f"test_lines.py:{line}")


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="sys.monitoring has room for several tools")
def test_another_tracer_is_left_alone_and_named():
    def tracer(*_):
        return None

    sys.settrace(tracer)
    try:
        log = LineLog()
        log.start()
        log.stop()
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(None)
    assert "debugger" in log.problem


def test_a_runaway_loop_keeps_to_its_limit(monkeypatch):
    monkeypatch.setattr("toolkit.gpu.line_log._LIMIT", 100)
    log = LineLog()
    log.start()
    for i in range(1000):
        seen.append((i, i))
    log.stop()
    assert "100 lines" in log.problem
    assert all(len(thread.times) <= 100 for thread in log._threads.values())
