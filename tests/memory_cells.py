"""Generated code that allocates: blocks in blocks, errors, coroutines, threads, streams, and the peaks that counters say.

The truth comes from the allocator's own counters: each block folds the peak so far into those around it, and resets.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import toolkit as tk
from toolkit.bench.record import about

MOST = 3 << 20  # bytes of one allocation of the small kind


@dataclass
class Seen:
    """One block: what `tk.memory` measured, and what the counters said."""

    use: Any
    before: int
    most: int = 0
    after: int = 0


@dataclass
class Cells:
    """Runs generated blocks on a device. `seen` has every block that has ended."""

    gpu: Any
    seed: int
    kept: list[torch.Tensor] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    open: list[Seen] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng, self.device = random.Random(self.seed), self.gpu.torch

    def fold(self) -> None:
        """Give the peak since the last fold to every open block."""
        most = self.gpu.memory().peak_bytes
        for block in self.open:
            block.most = max(block.most, most)
        self.gpu.reset_peak()

    def run(self, depth: int = 0, fails: bool = False) -> None:
        """One block, of a few things that allocate."""
        self.fold()
        before = self.gpu.memory().allocated_bytes
        try:
            with tk.memory(self.gpu) as use:
                block = Seen(use, before)
                self.open.append(block)
                for _ in range(self.rng.randrange(1, 7)):
                    self.something(depth)
                if fails:
                    held = self.tensor()
                    raise ValueError(held.shape)
        finally:
            self.fold()
            self.open.remove(block)
            block.after = use.end_bytes if fails else self.gpu.memory().allocated_bytes  # the error lets go after the block
            self.seen.append(block)

    def something(self, depth: int) -> None:
        """One thing that allocates, frees, or is a block itself."""
        what = self.rng.randrange(9)
        if what == 0 and depth < 3:
            self.run(depth + 1)
        elif what == 1 and depth < 3:
            with suppress(ValueError):
                self.run(depth + 1, fails=True)
        elif what == 2:
            asyncio.run(self.wait())
        elif what == 3 and self.kept:
            del self.kept[self.rng.randrange(len(self.kept))]
        elif what == 4:
            thread = threading.Thread(target=self.keep)
            thread.start()
            thread.join()
        elif what == 5:
            self.compute()
        elif what == 6:
            self.large()
        else:
            self.keep()

    def tensor(self) -> torch.Tensor:
        return torch.empty(self.rng.randrange(1, MOST), dtype=torch.uint8, device=self.device)

    def keep(self) -> None:
        self.kept.append(self.tensor())

    def large(self) -> None:
        """Sizes around those where the allocator changes its ways: segments, and remainders that it doesn't cut off."""
        size = self.rng.choice([1 << 20, 10 << 20, 20 << 20, 24 << 20]) + 512 * self.rng.randrange(-3, 4)
        self.kept.append(torch.empty(size, dtype=torch.uint8, device=self.device))
        if self.rng.random() < 0.5:
            self.kept.pop(self.rng.randrange(len(self.kept)))

    def compute(self) -> None:
        """Temporaries, and a graph that is dropped."""
        x = torch.ones(self.rng.randrange(1, 400), 256, device=self.device, requires_grad=True)
        y = (x @ x.T).softmax(-1).float().sort().values.sum()
        if self.rng.random() < 0.5:
            y.backward()

    async def wait(self) -> None:
        held = self.tensor()
        await asyncio.sleep(0)
        self.keep()
        del held


def table(device: str, cells: int) -> list[dict[str, Any]]:
    """A row a generated cell: how many blocks it had, its peak as measured and as counted, and whether all its blocks agree."""
    rows = []
    for seed in range(cells):
        run = Cells(tk.device(device), seed)
        run.run()
        outer = run.seen[-1]
        wrong = [
            block for block in run.seen
            if (block.use.baseline_bytes, block.use.peak_bytes, block.use.end_bytes) != (block.before, block.most, block.after)
        ]  # fmt: skip
        rows.append({
            "cell": seed, "blocks": len(run.seen), "failed_blocks": sum("failed" in b.use.trace.meta for b in run.seen),
            "events": len(outer.use.ledger.rows), "peak_bytes": outer.use.peak_bytes, "counted_peak_bytes": outer.most,
            "unequal_blocks": len(wrong),
        })  # fmt: skip
    return rows


def main(arguments: list[str] | None = None) -> None:
    """`python -m tests.memory_cells cuda OUT.json`: the exactness table of 100 generated cells."""
    device, *out = arguments or sys.argv[1:] or ["virtual:h200"]
    rows = table(device, 100)
    record = {
        **about(device), "cells": len(rows), "blocks": sum(row["blocks"] for row in rows),
        "unequal_blocks": sum(row["unequal_blocks"] for row in rows), "rows": rows,
    }  # fmt: skip
    if out:
        Path(out[0]).write_text(json.dumps(record, indent=1) + "\n")
    print({name: value for name, value in record.items() if name != "rows"})


if __name__ == "__main__":
    main()
