"""Record `data/gloo_rank*.json.gz`: two processes that reduce with gloo under PyTorch's profiler, on the CPU.

`python -m tests.trace.record_gloo` writes the files anew, without the names of the machine and of its folders.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import ProfilerActivity, profile

_DATA = Path(__file__).parent / "data"
_KEPT = ("schemaVersion", "deviceProperties", "distributedInfo", "displayTimeUnit", "baseTimeNanoseconds")


def _run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    x = torch.ones(16)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for number in range(12):
            if rank == 1 and number % 4 == 3:
                time.sleep(0.1)
            dist.all_reduce(x)
    profiled.export_chrome_trace(f"{folder}/rank{rank}.json")
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run, args=(folder,), nprocs=2)
        for rank in range(2):
            made = json.loads((Path(folder) / f"rank{rank}.json").read_text())
            events = [event for event in made["traceEvents"] if event.get("ph") == "X" and event.get("cat") != "Trace"]
            kept = {name: made[name] for name in _KEPT} | {"traceEvents": events}
            with (_DATA / f"gloo_rank{rank}.json.gz").open("wb") as file, gzip.GzipFile("", "wb", 9, file, 0) as packed:
                packed.write(json.dumps(kept).encode())


if __name__ == "__main__":
    main()
