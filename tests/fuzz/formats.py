"""Mutants of the files that are no models: traces of every kind, snapshots, sessions, timings and manifests of packages."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import pickle
import random
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz import lies
from tests.fuzz.lies import Mutant
from toolkit.trace.columns import COLUMNS
from toolkit.trace.events import Trace, TraceBuilder

Mutants = Iterator[Mutant]
PREFIX = "CUPTI_ACTIVITY_KIND_"


def recorded() -> Trace:
    builder = TraceBuilder()
    for i in range(40):
        builder.add("kernel", 1000 * i, 900, name=f"kernel {i % 4}", step=i // 4, stream=i % 2, where="a.py:3")
    builder.add("h2d", 500, 10, bytes=64, pinned=1, name="Memcpy HtoD")
    for i in range(8):
        builder.add("alloc", 700 * i, bytes=512, address=4096 * i, requested=500, where="cell 7:3 > model.py:41")
    builder.add("mark", 0, 40_000, name="decode", step=1)
    meta = {"device": "virtual:h200", "clock": "modelled", "steps_from": "marks", "opening": 2, "elapsed_s": 0.5}
    return builder.build(meta | {"host": {"peak_bytes": 9, "tensor_bytes": 5}, "sizes_only": False, "source": {"a.py:3": "x"}})


def kineto() -> dict[str, Any]:
    def event(cat: str, name: str, ts: float, dur: float, tid: int, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": tid, "args": args}

    events = []
    for i in range(4):
        at = 100.0 * i
        events.append(event("user_annotation", f"ProfilerStep#{i}", at, 90, 1))
        events.append(event("python_function", "a.py(12): f", at, 80, 1, **{"Python id": i}))
        events.append(event("cuda_runtime", "cudaLaunchKernel", at + 1, 2, 1, correlation=10 * i))
        events.append(event("kernel", "k", at + 5, 20, 7, device=0, stream=7, correlation=10 * i))
        events.append(event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", at + 30, 5, 7, device=0, stream=7, bytes=64))
        events.append(event("cuda_runtime", "cudaStreamSynchronize", at + 40, 5, 1, correlation=10 * i + 1))
        events.append(event("cuda_sync", "Stream Sync", at + 40, 5, 1, correlation=10 * i + 1, stream=7))
        events.append(event("cpu_instant_event", "[memory]", at, 0, 1, **{"Device Type": 1, "Device Id": 0, "Bytes": 512}))
    events.append({"ph": "M", "name": "process_name", "pid": 5, "tid": 0, "args": {"name": "/device:GPU:0"}})
    events.append(event("", "fusion", 3, 4, 2) | {"pid": 5})
    head = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "H200", "totalGlobalMem": 5}]}
    return head | {"distributedInfo": {"rank": 1}, "traceEvents": events}


def snapshot() -> dict[str, Any]:
    frames = [{"filename": "a.py", "name": "f", "line": 3}]
    entries = [
        {"action": action, "addr": 4096 * (i + 1), "size": 512, "stream": 0, "time_us": 10 + i, "frames": frames}
        for i, action in enumerate(("segment_alloc", "alloc", "alloc", "free_requested", "free_completed", "oom"))
    ]
    block = {"address": 8192, "size": 512, "requested_size": 500, "state": "active_allocated", "frames": frames}
    segment = {"device": 0, "address": 8192, "total_size": 1 << 21, "stream": 0, "segment_type": "small", "blocks": [block]}
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1}
    return {"segments": [segment], "device_traces": [entries], "allocator_settings": settings}


def cell() -> dict[str, Any]:
    numbers = ("number", "baseline_bytes", "peak_bytes", "end_bytes", "freed_bytes", "reserved_bytes", "host_bytes")
    return dict.fromkeys(numbers, 7) | {"title": "x = 1", "status": "ok", "device": "h200", "elapsed_s": 0.5, "ended_s": 1.0}


def timings() -> dict[str, Any]:
    row = {"verdict": "ok", "us": 3.5, "spread_us": 0.1, "cosine": 1.0, "kernel": "f", "versions": "v", "when": "2026-01-01"}
    device = {"name": "H200", "compute_capability": "9.0", "sms": 132, "memory_bytes": 1 << 37}
    kernels = {"int4_matmul": {"shape": {"block_n=64 split=2 warps=4 stages=2": row}}}
    return {"format": "decode-toolkit tuned 1", "device": device, "kernels": kernels}


def manifest() -> dict[str, Any]:
    entry = {"sha256": hashlib.sha256(b"data").hexdigest(), "bytes": 4}
    code, weights = "methods/decode-x-0123456789abcdef.pt2", "weights-0123456789abcdef.safetensors"
    pieces = [{"name": f"piece {n}", "layer": n, "weights": [None, "w"], "like": "x"} for n in (0, 1, None)]
    model = {"architecture": "qwen3", "config": {"num_hidden_layers": 2}, "dtype": "float32", "schemes": {}, "joined": False}
    phases = [{"name": "run", "parts": {"weights": 5}, "host_bytes": 7}]
    return {
        "format": "decode-toolkit package", "version": 3, "made": "2026-01-01", "context": 64, "chunk": 64, "least": 2,
        "kv": None, "pieces": pieces, "last": [None, 0.0, None], "compiled": {"x": {"decode": code, "prefill": code}},
        "files": {code: entry, weights: entry}, "model": model, "versions": {"toolkit": "0.1", "torch": "2.11"},
        "target": {"device": "cpu", "machine": "x86_64", "system": "Linux", "vectors": "AVX2"},
        "plan": {"budget_bytes": None, "export": phases, "run": phases}, "measured": {"phases": [], "pieces": []},
    }  # fmt: skip


# ---- writing the good files


def whole(write: Callable[[Path], object]) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir(parents=True)
        write(path)

    return make


def database(path: Path) -> None:
    event = "start INT, end INT, deviceId INT, streamId INT, correlationId INT"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            f"CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT); CREATE TABLE TARGET_INFO_GPU (name TEXT);"
            f"CREATE TABLE NVTX_EVENTS (start INT, end INT, eventType INT, text TEXT, textId INT);"
            f"CREATE TABLE {PREFIX}KERNEL ({event}, demangledName INT, shortName INT);"
            f"CREATE TABLE {PREFIX}MEMCPY ({event}, bytes INT, copyKind INT, srcKind INT, dstKind INT);"
            f"CREATE TABLE {PREFIX}RUNTIME (start INT, end INT, correlationId INT, globalTid INT, nameId INT);"
            "INSERT INTO StringIds VALUES (1, 'kernel'), (2, 'cudaStreamSynchronize_v3020'), (3, 'step');"
            "INSERT INTO TARGET_INFO_GPU VALUES ('H200');"
        )
        for i in range(20):
            connection.execute(f"INSERT INTO {PREFIX}KERNEL VALUES (?, ?, 0, 7, ?, 1, 1)", (100 * i, 100 * i + 50, i))
            connection.execute(
                f"INSERT INTO {PREFIX}MEMCPY VALUES (?, ?, 0, 7, ?, 64, 2, 2, 1)", (100 * i + 60, 100 * i + 70, i)
            )
            connection.execute(f"INSERT INTO {PREFIX}RUNTIME VALUES (?, ?, ?, 5, 2)", (100 * i + 1, 100 * i + 90, i))
            connection.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, 'step', NULL)", (100 * i, 100 * i + 99))
        connection.commit()


def write_manifest(path: Path) -> None:
    from toolkit.exporting.package import _text

    (path / "methods").mkdir()
    document = manifest()
    for name in document["files"]:
        (path / name).write_bytes(b"data")
    (path / "manifest.json").write_bytes(_text(document))


def write_session(path: Path) -> None:
    (path / "cells.jsonl").write_text("".join(json.dumps(cell() | {"number": n}) + "\n" for n in (1, 2, 3)))


# ---- mutants


def saved_lies(path: Path, rng: random.Random) -> Mutants:
    raw = (path / "x").read_bytes()
    with np.load(io.BytesIO(raw)) as file:
        arrays = {name: file[name] for name in file.files}
    header = json.loads(bytes(arrays["header"]))
    for mutant in lies.json_mutants("x", header, rng, 20, 60):
        written = io.BytesIO()
        np.savez(written, **arrays | {"header": np.frombuffer(mutant.files["x"] or b"", np.uint8)})
        yield Mutant(mutant.says, {"x": written.getvalue()})
    events = len(arrays["start_ns"])
    for name in COLUMNS:
        column = arrays.get(name, np.full(events, -1))  # columns of several ranks are not in the file
        for values in (np.full(3, 7), np.full(events, 1 << 40), np.zeros(1), np.array(["a"]), column - 9):
            written = io.BytesIO()
            np.savez(written, **arrays | {name: values})
            yield Mutant(f"{name} = {values!r:.40}", {"x": written.getvalue()})
    yield from lies.random_mutants("x", raw, rng, 700)


def chrome_lies(each: int, only: int) -> Callable[[Path, random.Random], Mutants]:
    def make(path: Path, rng: random.Random) -> Mutants:
        raw = (path / "x").read_bytes()
        yield from lies.json_mutants("x", json.loads(raw), rng, each, only)
        yield from lies.random_mutants("x", raw, rng, 600)
        for depth in (100, 10_000):
            yield Mutant(
                f"{depth} brackets", {"x": raw.replace(b'"ts":', b'"deep":' + b"[" * depth + b"]" * depth + b',"ts":', 1)}
            )
        yield Mutant("5,000 digits", {"x": raw.replace(b'"ts":', b'"n":' + b"9" * 5000 + b',"ts":', 1)})

    return make


def packed_lies(path: Path, rng: random.Random) -> Mutants:
    yield from lies.random_mutants("x", (path / "x").read_bytes(), rng, 1600)


def database_lies(path: Path, rng: random.Random) -> Mutants:
    raw = (path / "x").read_bytes()
    values: tuple[Any, ...] = (None, 0, -1, 70_000, 1 << 40, (1 << 63) - 1, -(1 << 63), 1.5, "a", "5", b"\0\xff", "\0")
    connection = sqlite3.connect(":memory:")
    connection.deserialize(raw)
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for table in tables:
        for column in [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]:
            for value in values:
                with contextlib.suppress(sqlite3.Error):
                    connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = 1", (value,))
                    connection.commit()
                    yield Mutant(f"{table}.{column} = {value!r}", {"x": connection.serialize()})
                connection.rollback()
                connection.deserialize(raw)
        connection.execute(f"DROP TABLE {table}")
        connection.execute(f"CREATE VIEW {table} AS SELECT 1 AS start, 2 AS end, hex(randomblob(9)) AS value, 1 AS id")
        connection.commit()
        yield Mutant(f"{table} is a view", {"x": connection.serialize()})
        connection.deserialize(raw)
    connection.close()
    yield from lies.random_mutants("x", raw, rng, 800)
    yield from lies.random_mutants("x", raw, rng, 400, head=4096)


def snapshot_lies(path: Path, rng: random.Random) -> Mutants:
    document = snapshot()
    for spot in [spot for spot in lies.spots(document) if spot]:
        for lie in [*rng.sample(lies.VALUES, 6), ..., b"bytes", {1: 2}, (1,)]:
            changed = lies.with_lie(document, spot, lie)
            with contextlib.suppress(UnicodeEncodeError):
                yield Mutant(f"{'.'.join(map(str, spot))} = {lie!r:.40}", {"x": pickle.dumps(changed, protocol=4)})
    many = document | {"segments": [document["segments"][0] | {"device": n} for n in range(300)]}
    yield Mutant("300 devices", {"x": pickle.dumps(many)})
    yield Mutant("code", {"x": b"\x80\x04cos\nsystem\n(S'true'\ntR."})
    yield from lies.random_mutants("x", (path / "x").read_bytes(), rng, 1600)


def session_lies(path: Path, rng: random.Random) -> Mutants:
    good = (path / "cells.jsonl").read_bytes()
    for mutant in lies.json_mutants("cells.jsonl", cell(), rng, 20):
        line = mutant.files["cells.jsonl"] or b""
        yield Mutant(mutant.says, {"cells.jsonl": good + line + b"\n" + json.dumps(cell() | {"number": 9}).encode() + b"\n"})
    yield Mutant("deep", {"cells.jsonl": good + b"[" * 100_000 + b"\n"})
    yield Mutant("digits", {"cells.jsonl": good + b'{"number": ' + b"9" * 5000 + b"}\n"})
    yield from lies.random_mutants("cells.jsonl", good, rng, 600)


def timing_lies(path: Path, rng: random.Random) -> Mutants:
    yield from lies.json_mutants("x", timings(), rng, 30)
    yield from lies.random_mutants("x", (path / "x").read_bytes(), rng, 900)


def manifest_lies(path: Path, rng: random.Random) -> Mutants:
    """Every field changed and hashed again, as somebody who knows how would do."""
    from toolkit.exporting.package import _text

    for mutant in lies.json_mutants("manifest.json", manifest(), rng, 6):
        with contextlib.suppress(ValueError, TypeError):
            changed = json.loads(mutant.files["manifest.json"] or b"")
            yield Mutant(mutant.says, {"manifest.json": _text(changed)})
    many = manifest() | {"pieces": [{"name": "", "layer": n, "weights": [], "like": "x"} for n in [*range(30_000), None]]}
    yield Mutant("many layers", {"manifest.json": _text(many)})
    yield from lies.random_mutants("manifest.json", (path / "manifest.json").read_bytes(), rng, 300)


# ---- loading


def open_it(path: Path) -> Any:
    """A trace as values that can be compared, after everything that a user would do with it first."""
    from toolkit.trace.ledger import Ledger
    from toolkit.trace.opening import open_trace
    from toolkit.vram.measure import MemoryUse

    trace = open_trace(path)
    found = repr(trace), trace.copies().to_json(), [str(mark) for mark in trace.marks()], Ledger(trace).peak_bytes
    if trace.is_kind("alloc", "free").any():
        found = (*found, MemoryUse(trace).line())
    return found, trace.strings, [column.tolist() for column in trace.columns.values()], json.dumps(trace.meta, default=str)


def open_session(path: Path) -> Any:
    """The cells; those of good lines must be there whatever another line says."""
    from toolkit.core.units import bytes_text
    from toolkit.vram.sessions import Session

    cells = Session.open(path).cells
    return [(cell.number, str(cell.title), cell.status, bytes_text(cell.kept_bytes), f"{cell.ended_s:.0f}") for cell in cells]


def open_timings(path: Path) -> Any:
    from toolkit.tune.store import Tuned

    return Tuned.from_text(path.read_bytes().decode(errors="surrogateescape"), "x").to_text()


def open_manifest(path: Path) -> Any:
    from toolkit.exporting.package import read_manifest

    found = read_manifest(path)[0]
    return json.dumps(found, sort_keys=True)


OTHERS = (
    ("trace, saved", whole(lambda path: recorded().save(path / "x")), saved_lies, "x", open_it),
    ("trace, to_chrome", whole(lambda path: recorded().to_chrome(path / "x")), chrome_lies(3, 150), "x", open_it),
    ("trace, kineto", whole(lambda path: (path / "x").write_text(json.dumps(kineto()))), chrome_lies(4, 150), "x", open_it),
    (
        "trace, gzip",
        whole(lambda p: (p / "x").write_bytes(gzip.compress(json.dumps(kineto()).encode()))),
        packed_lies,
        "x",
        open_it,
    ),
    ("trace, nsys", whole(lambda path: database(path / "x")), database_lies, "x", open_it),
    (
        "snapshot",
        whole(lambda path: (path / "x").write_bytes(pickle.dumps(snapshot(), protocol=4))),
        snapshot_lies,
        "x",
        open_it,
    ),
    ("session", whole(write_session), session_lies, ".", open_session),
    ("timings", whole(lambda path: (path / "x").write_text(json.dumps(timings()))), timing_lies, "x", open_timings),
    ("manifest", whole(write_manifest), manifest_lies, ".", open_manifest),
)
