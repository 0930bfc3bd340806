"""The runs of all ranks as one: the run of rank 0, with the events of every rank on one timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from toolkit.core.distributed import Shard, exchange
from toolkit.decode.run import Run
from toolkit.trace.join import join


def joined(runs: Sequence[Run]) -> Run:
    """Return the run of rank 0, with the traces of all ranks joined (see `toolkit.trace.join`). `runs` are by rank."""
    if len(runs) == 1:
        return runs[0]
    devices = [run.device for run in runs]
    counted = [f"{devices.count(name)} x {name}" if devices.count(name) > 1 else name for name in dict.fromkeys(devices)]
    recorded = None
    if all(run.recorded is not None for run in runs):
        recorded = join([run.trace for run in runs], [f"rank {rank}" for rank in range(len(runs))])
    return replace(runs[0], device=", ".join(counted), recorded=recorded)


def collected(run: Run, shard: Shard) -> Run | None:
    """Return the runs of all ranks joined, on rank 0; None on the others. All ranks must call it."""
    import torch.distributed as dist

    if shard.ranks == 1:
        return run
    found: list[Run] | None = [run] * shard.ranks if shard.rank == 0 else None
    exchange(dist.gather_object, run, found)
    return None if found is None else joined(found)
