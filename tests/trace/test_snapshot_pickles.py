"""Tests of the pickle reader: it agrees with Python on plain data, runs no code, and rejects damaged files cleanly."""

import io
import os
import pickle
import random
import struct
from pathlib import Path

import pytest

import toolkit as tk
from tests.trace.test_snapshot import DATA, FRAMES, SAMPLES, entry, large, opened, snap
from toolkit.core.errors import TraceError
from toolkit.trace.events import Trace
from toolkit.trace.snapshot.entries import Entries
from toolkit.trace.snapshot.pickle_stream import PickleStream, Shared


def load(raw):
    return PickleStream(io.BytesIO(raw), len(raw), "reading").load()


def plain(value):
    """Replace the containers that the reader shares by lists, for comparison."""
    if isinstance(value, Shared | list):
        return [plain(item) for item in (value.items if isinstance(value, Shared) else value)]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return tuple(plain(item) for item in value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_are_read_as_python_reads_them(protocol):
    word = "shared " * 50
    value = {
        "numbers": [0, 1, 255, 256, 65535, 65536, -1, -(2**31), 2**31, 2**40, -(2**40), 2**63, -(2**63), 2**100, 1.5, -1e300],
        "words": ["", "a", "ä" * 300, "\ud800", word, word, "x" * 70_000], "none": None, "truth": [True, False],
        "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((), [(word,)])], 7: {1.5: 2, None: 3, True: 4},
        "lists": [[], [word], [word] * 5, [word] * 2500, list(range(5000))],
        "dicts": [{}, {"a": {}}, dict.fromkeys(range(3000))],
    }  # fmt: skip
    if protocol > 2:
        value |= {b"k": b"bytes" * 100, "empty": b""}
    if protocol == 5:
        value |= {"large": [bytes(300), b"x"]}
    assert plain(load(pickle.dumps(value, protocol))) == value


def test_framed_chunks_and_long_texts_are_put_together(monkeypatch):
    monkeypatch.setattr("toolkit.trace.snapshot.pickle_stream.CHUNK_BYTES", 1000)
    value = [{"k": "text" * (i % 700), "n": list(range(i % 90))} for i in range(500)]
    assert plain(load(pickle.dumps(value))) == value


class Bomb:
    """An object that calls `function(*arguments)` when it is unpickled."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(("function", "name"), [(os.system, "system"), (eval, "eval"), (exec, "exec"), (open, "open")])
def test_nothing_is_run(tmp_path, protocol, function, name):
    target = tmp_path / "ran"
    bomb = Bomb(function, f"touch {target}" if function is os.system else f"open({str(target)!r}, 'w')")
    for value in (
        bomb,
        {"segments": [], "device_traces": [[entry("alloc", 1, 2), bomb]]},
        snap([], [entry("alloc", 1, 2, bomb)]),
    ):
        with pytest.raises(TraceError, match=name):
            opened(tmp_path, value, protocol)
    assert not target.exists()


@pytest.mark.parametrize(
    "raw",
    [
        b"\x80\x04cos\nsystem\n.", b"\x80\x04(ios\nsystem\n.", b"\x80\x04\x8c\x02os\x8c\x06system\x93.", b"\x80\x04K\x01R.",
        b"\x80\x04Nb.", b"\x80\x04(o.", b"\x80\x04N)\x81.", b"\x80\x04N)}\x92.", b"\x80\x02\x82\x01.", b"\x80\x02\x83\x01\x00.",
        b"\x80\x02\x84\x01\x00\x00\x00.", b"\x80\x04Pid\n.", b"\x80\x04NQ.", b"\x80\x05\x97.", b"\x80\x05N\x98.",
        b"\x80\x04\x8f.",
    ],
)  # fmt: skip
def test_instructions_that_make_objects_are_refused(raw):
    with pytest.raises(TraceError, match="pickle that would"):
        load(raw)


def test_the_name_of_what_it_would_call_is_said():
    for raw in (b"\x80\x02cos\nsystem\n.", b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93."):
        with pytest.raises(TraceError, match=r"import os\.system, and was not run"):
            load(raw)
    with pytest.raises(TraceError) as error:
        load(b"\x80\x02c" + b"a" * 10**6)
    assert len(str(error.value)) < 1000


TERABYTE = struct.pack("<Q", 1 << 40)


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"\x80", b"\x80\x04", b"\x80\x04.", b"\x80\x09N.", b"\x80\x04\x8d" + TERABYTE + b"abc", b"\x80\x04\x8e" + TERABYTE,
        b"\x80\x05\x96" + TERABYTE, b"\x80\x04X\xff\xff\xff\xff", b"\x80\x04B\xff\xff\xff\xff",
        b"\x80\x04\x8a\xff" + b"1" * 255,
        b"\x80\x04\x8b\xff\xff\xff\x7f", b"\x80\x04\x8b\xff\xff\xff\xff", b"\x80\x04\x95" + TERABYTE, b"\x80\x04h\x05.",
        b"\x80\x04j\xff\xff\xff\xff.", b"\x80\x04Nr\xff\xff\xff\xff.", b"\x80\x04N\x94Nq\x00.", b"\x80\x04e.", b"\x80\x04]u.",
        b"\x80\x04](K\x01u.", b"\x80\x04}(K\x01u.", b"\x80\x04}]K\x01s.", b"\x80\x04}))s.", b"\x80\x04Na.", b"\x80\x04(\x85.",
        b"\x80\x04NN.", b"\x80\x04" + b"(" * 10**6, b"\x80\x04\x8c\x02\xff\xff.", b"\x80\x04I1\n.", b"\x80\x04]\x94(h\x00ea.",
        b"\x80\x04]\x94(h\x00h\x00eK\x01a.",
    ],
)  # fmt: skip
def test_damaged_pickles_are_damaged(raw):
    with pytest.raises(TraceError):
        load(raw)


def test_deep_and_circular_data_do_no_harm(tmp_path):
    deep = b"]" * 30_000 + b"a" * 29_999
    wide = b"N" + b"\x85" * 100_000
    circle = b"]\x94h\x00a"
    for raw in (deep, wide, circle):
        with pytest.raises(TraceError):
            opened(tmp_path, b"\x80\x04" + raw + b".")
        for key in (b"segments", b"device_traces", b"allocator_settings", b"toolkit", b"more"):
            value = b"\x80\x04}(X\x08\x00\x00\x00segments]X" + struct.pack("<I", len(key)) + key + raw
            try:
                trace = opened(tmp_path, value + b"u.")
            except TraceError:
                continue
            trace.save(tmp_path / "a.trace")


def test_more_objects_than_any_snapshot_has_are_refused(monkeypatch):
    monkeypatch.setattr("toolkit.trace.snapshot.pickle_stream.CHUNK_BYTES", 10_000)
    monkeypatch.setattr("toolkit.trace.snapshot.pickle_stream.MAX_OBJECTS", 50_000)
    for value in (list(range(100_000)), [{} for _ in range(100_000)], [f"text {i}" for i in range(100_000)]):
        with pytest.raises(TraceError, match="more than"):
            load(pickle.dumps(value))
    with pytest.raises(TraceError, match="more than"):
        load(b"\x80\x04" + b"N" * 100_000)


def good(raw, path):
    """Return whether a damaged file opens; any exception but TraceError fails the test."""
    path.write_bytes(raw)
    try:
        trace = tk.open_trace(path)
    except TraceError:
        return False
    assert isinstance(trace, Trace)
    return True


def small():
    raw = pickle.loads((DATA / SAMPLES[1]).read_bytes())
    raw["device_traces"] = [raw["device_traces"][0][:4]]
    raw["segments"] = raw["segments"][:1]
    return raw


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_file_cut_short_anywhere_is_damaged(tmp_path, protocol):
    raw = pickle.dumps(small(), protocol)
    path = tmp_path / "cut.pickle"
    assert good(raw, path)
    assert not any(good(raw[:n], path) for n in range(1, len(raw), 3))


@pytest.mark.parametrize("name", SAMPLES)
def test_flipped_bytes_do_no_harm(tmp_path, name):
    raw, rng, path = (DATA / name).read_bytes(), random.Random(1), tmp_path / "flipped.pickle"
    begin = raw.index(b"device_traces")
    for i in range(300):
        damaged = bytearray(raw)
        for _ in range(rng.choice((1, 1, 3, 20))):
            damaged[rng.randrange(begin if i % 2 else 0, len(raw))] = rng.choice((rng.randrange(256), *b"hj(eu}]\x94.a"))
        good(bytes(damaged), path)


def test_skimmed_entries_with_flipped_bytes_do_no_harm(tmp_path):
    raw, rng = bytearray(pickle.dumps(large(2000, n_stacks=20, depth=4))), random.Random(2)
    for _ in range(60):
        damaged = raw[:]
        for _ in range(20):
            damaged[rng.randrange(3, len(raw))] = rng.choice((rng.randrange(256), *b"hj(eu}]\x94.a"))
        good(bytes(damaged), Path(tmp_path / "flipped.pickle"))


def test_numbers_that_no_entry_has_are_damage(tmp_path):
    for key in ("addr", "size", "time_us", "stream"):
        for bad in (-5, -(2**40), 2**64, 2**70, "text", None, 1.5):
            value = snap([], [entry("alloc", 4096 * i, 512, 10**15) for i in range(5)])
            value["device_traces"][0][3][key] = bad
            with pytest.raises(TraceError):
                opened(tmp_path, value)


def test_an_entry_in_two_lists_is_one_row():
    value = [entry("alloc", 4096 * i, 512, 1000, stack) for i, stack in enumerate([FRAMES] * 6)]
    for protocol in (4, 5):  # the first entry is read instruction by instruction, the others in bulk
        raw = pickle.dumps([value, [value[3], value[2]]], protocol)
        entries = Entries()
        found = PickleStream(io.BytesIO(raw), len(raw), "reading", entries).load()
        every, some = plain(found)
        assert entries.skimmed == 5
        assert sorted(every) == list(range(6))
        assert entries.history(every).address.tolist() == [4096 * i for i in range(6)]
        assert some == [every[3], every[2]]
    for bad in ([6], [-1]):
        with pytest.raises((IndexError, ValueError)):
            entries.history(bad)


@pytest.mark.parametrize("key", ["action", "size"])
def test_an_entry_without_its_action_or_size_is_damage(tmp_path, key):
    value = snap([], [entry("alloc", 4096 * i, 512) for i in range(5)])
    del value["device_traces"][0][1][key]
    with pytest.raises(TraceError, match=key if key == "action" else "damaged"):
        opened(tmp_path, value)
