"""Random allocations under various allocator settings, and the counters of CUDA's allocator during them on an H200.

`python -m tests.golden.allocator OUT.json` measures them on a CUDA machine, with one process per settings and seed. The steps
depend only on the seed and on which allocations failed, so that another allocator that behaves the same sees the same steps.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Generator
from typing import Any

from toolkit.gpu.virtual.allocator.counters import Counters

SETTINGS = (
    "", "expandable_segments:True", "max_split_size_mb:32", "roundup_power2_divisions:4",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", "garbage_collection_threshold:0.6",
    "max_split_size_mb:24,garbage_collection_threshold:0.5,roundup_power2_divisions:2",
    "expandable_segments:True,max_split_size_mb:32",
    "expandable_segments:True,garbage_collection_threshold:0.6,roundup_power2_divisions:8",
)  # fmt: skip
LIMITS = (48 << 20, 192 << 20, 300 << 20)  # by seed: the bytes that the process may reserve
_SIZES = ((0, 23.0), (0, 26.5), (18, 25.5))  # by seed: base-2 logarithms of the smallest and the largest size
KEYS = (
    "allocated_bytes.all.current", "reserved_bytes.all.current", "inactive_split_bytes.all.current", "segment.all.current",
    "num_alloc_retries", "num_ooms", "requested_bytes.all.current", "oversize_segments.current",
)  # fmt: skip
NAMES = sorted(Counters().figures())
EVERY = 50  # steps between two recorded rows


def steps(seed: int, n: int = 700) -> Generator[tuple[str, int, int], bool, None]:
    """Yield ("free", index of a held block, 0) or ("take", bytes, stream). The caller sends whether a take succeeded."""
    rng, live = random.Random(seed), 0
    for _ in range(n):
        if live and rng.random() < 0.46:
            which, live = rng.randrange(live), live - 1
            yield "free", which, 0
        else:
            live += yield "take", int(2 ** rng.uniform(*_SIZES[seed])), rng.randrange(2)


def run(seed: int, take: Any, give: Any) -> Generator[None, None, list[Any]]:
    """Execute the steps with `take(bytes, stream)`, which returns None on failure, and `give(block)`. Yield after each."""
    held: list[Any] = []
    walk, granted = steps(seed), None
    while True:
        try:
            kind, a, stream = next(walk) if granted is None else walk.send(granted)
        except StopIteration:
            return held
        if kind == "free":
            give(held.pop(a))
            granted = True
        else:
            block = take(a, stream)
            granted = block is not None
            if granted:
                held.append(block)
        yield


def measure(seed: int) -> dict[str, Any]:
    """Return one run on the first CUDA GPU, with the allocator settings of the environment."""
    import torch

    torch.cuda.set_per_process_memory_fraction(LIMITS[seed] / torch.cuda.get_device_properties(0).total_memory)
    streams, rows = (torch.cuda.default_stream(), torch.cuda.Stream()), []
    torch.cuda.memory._record_memory_history("all", context=None)

    def take(n_bytes: int, stream: int) -> Any:
        try:
            with torch.cuda.stream(streams[stream]):
                return torch.empty(n_bytes, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            return None

    walk = run(seed, take, lambda block: None)
    for at, _ in enumerate(walk):
        if at % EVERY == 0:
            stats = torch.cuda.memory_stats()
            rows.append([stats[key] for key in KEYS])
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    segments = [e["addr"] for e in events if e["action"] == "segment_alloc"]
    return {"segments": [a - min(segments) for a in segments] if segments else [], "rows": rows,
            "stats": [v for k, v in sorted(torch.cuda.memory_stats().items()) if k != "max_split_size"]}  # fmt: skip


def main(path: str) -> None:
    """Measure every run, and write the results to `path`."""
    runs = []
    for settings in SETTINGS:
        for seed in range(len(LIMITS)):
            code = f"import json; from tests.golden.allocator import measure; print(json.dumps(measure({seed})))"
            environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": settings}
            done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
            runs.append({"settings": settings, "seed": seed, **json.loads(done.stdout.splitlines()[-1])})
    with open(path, "w") as file:
        json.dump({"names": NAMES, "runs": runs}, file, separators=(",", ":"))


if __name__ == "__main__":
    main(*sys.argv[1:])
