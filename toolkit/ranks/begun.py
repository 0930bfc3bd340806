"""How many exchanges each rank has begun. A rank that has begun more than one that has returned may wait for it in vain.

A rank that begins nothing for QUIET_S writes its numbers to a file, which the process of the cluster reads.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

QUIET_S = 5.0
_LOOK_S = 0.5  # between two looks at the numbers


def begun() -> dict[str, int]:
    """Return how many exchanges in host memory this rank has begun in each group of torch.distributed, by the group's name."""
    found: dict[str, int] = {}
    for group, name in list(c10d._world.pg_names.items()) if dist.is_initialized() else ():
        with suppress(RuntimeError):  # a group without host memory
            backend: Any = group._get_backend(torch.device("cpu"))
            found[name] = backend._get_sequence_number_for_group()
    return found


@contextmanager
def published(folder: str | None) -> Iterator[None]:
    """Write the numbers of this rank to its file in `folder`, if there is one, while the block begins no other exchange."""
    if folder is None:
        yield
        return
    path, ended = _path(folder, int(os.environ["RANK"])), threading.Event()
    thread = threading.Thread(target=_publish, args=(path, ended), name="toolkit begun", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        path.unlink(missing_ok=True)


def _publish(path: Path, ended: threading.Event) -> None:
    last, quiet_s = begun(), 0.0
    while not ended.wait(_LOOK_S):
        found = begun()
        quiet_s = quiet_s + _LOOK_S if found == last else 0.0
        last = found
        if quiet_s >= QUIET_S:
            with suppress(OSError):  # the cluster was closed
                written = path.with_suffix(".new")
                written.write_text(json.dumps(found))
                os.replace(written, path)
        else:
            path.unlink(missing_ok=True)


def waits_for(folder: str, rank: int, returned: Mapping[str, int]) -> bool:
    """Return whether a rank may wait for one that has returned with these numbers."""
    try:
        found = json.loads(_path(folder, rank).read_text())
    except FileNotFoundError:
        return False
    return any(found.get(name, 0) > number for name, number in returned.items())


def _path(folder: str, rank: int) -> Path:
    return Path(folder) / f"begun-{rank}"
