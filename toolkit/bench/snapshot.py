"""Measure how long a large memory snapshot takes to open, and how much memory opening it takes.

    python -m toolkit.bench.snapshot --gib 1 --out opened.json

The snapshot has the structure that `torch.cuda.memory._dump_snapshot` writes: each entry of the history has its own list of
stack frames, and the frames are shared. The file is written and opened in separate processes, and deleted afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from toolkit.bench.record import about, out_file, process_bytes, run_command, write_record

STACKS, FRAMES, DEPTH = 20_000, 5_000, 25
BASE, SEGMENTS, SEGMENT_BYTES = 0x7F0000000000, 4096, 32 << 20
ENTRY_BYTES = 205  # bytes of the file per entry with a stack of this depth
_CLEAR = Path("/proc/self/clear_refs")


def make(path: Path, gib: float, protocol: int) -> None:
    """Write a snapshot of about `gib` GiB to `path`."""
    rng = random.Random(0)
    frames = [
        {
            "name": f"function_{i}",
            "filename": f"/opt/venv/lib/python3.12/site-packages/torch/nn/modules/m{i % 97}.py",
            "line": i,
        }
        if i % 3
        else {"name": f"step_{i}", "filename": f"/home/user/project/model_{i % 50}.py", "line": 1 + i}
        for i in range(FRAMES)
    ]
    stacks = [rng.sample(frames, rng.randint(DEPTH - 5, DEPTH + 5)) for _ in range(STACKS)]
    free = [BASE + i * SEGMENT_BYTES for i in range(SEGMENTS)]
    entries: list[dict[str, Any]] = []
    live: list[tuple[int, int]] = []
    time_us = 1_795_303_563_844_275

    def add(action: str, address: int, size: int) -> None:
        entries.append({
            "action": action, "addr": address, "size": size, "stream": 0, "time_us": time_us,
            "compile_context": "/".join("NA"), "user_metadata": "", "frames": list(rng.choice(stacks)),
        })  # fmt: skip

    for address in free:
        add("segment_alloc", address, SEGMENT_BYTES)
    while len(entries) < gib * (1 << 30) / ENTRY_BYTES:
        time_us += rng.randrange(1, 30)
        if not live or (free and rng.random() < 0.5):
            live.append((free.pop(), rng.choice((1024, 4000, 65_536, 3 << 20, 12_345_678))))
            add("alloc", *live[-1])
        else:
            block = live.pop(rng.randrange(len(live)))
            free.append(block[0])
            add("free_requested", *block)
            add("free_completed", *block)
    sizes = dict(live)
    segments = [_segment(BASE + i * SEGMENT_BYTES, sizes.get(BASE + i * SEGMENT_BYTES, 0)) for i in range(SEGMENTS)]
    settings = {"expandable_segments": False, "max_split_size": -1}
    value = {"segments": segments, "device_traces": [entries], "allocator_settings": settings, "external_annotations": []}
    with path.open("wb") as file:
        pickle.dump(value, file, protocol)


def _segment(address: int, requested: int) -> dict[str, Any]:
    """Return a segment of 32 MiB with at most one block in use, at its start."""
    size, blocks = -(-requested // 512) * 512, []
    if requested:
        blocks.append(
            {"address": address, "size": size, "requested_size": requested, "state": "active_allocated", "frames": []}
        )
    blocks.append(
        {"address": address + size, "size": SEGMENT_BYTES - size, "requested_size": 0, "state": "inactive", "frames": []}
    )
    return {
        "device": 0, "address": address, "total_size": SEGMENT_BYTES, "allocated_size": size, "active_size": size,
        "requested_size": requested, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False,
        "frames": [], "blocks": blocks,
    }  # fmt: skip


def opened(path: Path) -> dict[str, Any]:
    """Open the file once in this process and return the record. Sizes are in bytes, times in seconds."""
    import toolkit

    (before,) = process_bytes("VmRSS")
    if _CLEAR.exists():
        _CLEAR.write_text("5")  # proc(5): resets the peak to the current resident size
    began, used = time.perf_counter(), time.process_time()
    trace = toolkit.open_trace(path)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - used
    (peak,) = process_bytes("VmHWM")
    return {
        "file_bytes": path.stat().st_size, "seconds": seconds, "cpu_seconds": cpu_seconds,
        "file_bytes_per_s": path.stat().st_size / seconds, "peak_bytes": peak,
        "peak_above_start_bytes": peak - before, "rows": len(trace), "opening": trace.meta["opening"],
        "unaccounted_bytes": trace.meta["unaccounted_bytes"],
    }  # fmt: skip


def bench(gib: float, protocol: int, folder: Path | None) -> dict[str, Any]:
    """Write the file, open it, delete it, and return the record (JSON-able)."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        path = Path(made) / "snapshot.pickle"
        command = [sys.executable, "-m", "toolkit.bench.snapshot", "--gib", str(gib), "--protocol", str(protocol)]
        subprocess.run([*command, "--make", str(path)], check=True)
        found = subprocess.run([*command, "--open", str(path)], check=True, capture_output=True, text=True)
    return {**about("cpu"), "cpus": os.cpu_count(), "protocol": protocol, **json.loads(found.stdout)}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.bench.snapshot", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gib", type=float, default=1, help="size of the file (default: 1)")
    parser.add_argument("--protocol", type=int, default=pickle.DEFAULT_PROTOCOL, help="pickle protocol (default: Python's)")
    parser.add_argument("--folder", type=Path, help="folder with room for the file (default: the system's temporary folder)")
    parser.add_argument("--make", type=Path, help="only write this file, and keep it")
    parser.add_argument("--open", type=Path, help="only open this file")
    parser.add_argument("--out", type=out_file, help="write the record to this JSON file (default: print it)")
    options = parser.parse_args(arguments)
    if options.make:
        make(options.make, options.gib, options.protocol)
        return 0
    record = opened(options.open) if options.open else bench(options.gib, options.protocol, options.folder)
    write_record(record, options.out)
    return 0


if __name__ == "__main__":
    run_command(main)
