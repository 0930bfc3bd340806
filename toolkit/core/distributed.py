"""Ranks: processes that run the same program, each on its part of a model, and exchange results (SPMD).

The ranks are the processes of torch.distributed's default group, which torchrun or another launcher has started. `join` enters
the group and returns this process's `Shard`, which loading and models take. The functions below exchange data between the ranks
in host memory. All ranks must call them in the same order.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from toolkit.core.errors import RankError, brief
from toolkit.core.numbers import integer
from toolkit.core.units import plural

if TYPE_CHECKING:
    from torch import Tensor

TIMEOUT_S = 600.0  # a rank that takes longer to arrive counts as lost; ranks may load weights at different speeds
MOST = 64  # ranks on one machine
GROUP = "0"  # the name that torch.distributed gives its default group
_FAILED = "toolkit/failed"  # in the group's store: the first rank that failed, and its error


@dataclass(frozen=True)
class Shard:
    """The part of a model that one process holds: part `rank`, counted from 0, of `ranks` parts.

    `block` is the number of neighboring weights of a row that can't be separated, since they share scales.
    """

    rank: int = 0
    ranks: int = 1
    block: int = field(default=1, compare=False)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.ranks}"


WHOLE = Shard()  # a model on one process


def join(ranks: object) -> Shard:
    """Return the shard of this process among `ranks` processes; a single rank needs no group.

    If torch.distributed isn't initialized, its default group is started from the environment variables of torchrun, with gloo
    for host memory and NCCL for CUDA. Raises RankError if there aren't `ranks` processes.
    """
    import torch
    import torch.distributed as dist

    count = integer(ranks, least=1)
    asked = f"a model over {brief(ranks)} ranks"
    if count is None:
        raise RankError(asked, "not a whole number of at least 1", "Give the number of processes, for example 2")
    if count == 1:
        return WHOLE
    start = f"Start one process per rank, with tk.cluster(DEVICE, {count}) or torchrun --nproc-per-node {count} SCRIPT.py"
    if not dist.is_available():
        raise RankError(asked, "this build of PyTorch has no torch.distributed", "Install a build for Linux from pytorch.org")
    if not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise RankError(asked, "this process belongs to no group", start)
        rank, size = _variable("RANK", least=0), started()
        if rank >= size:  # the other ranks would wait for one that does not exist
            raise RankError(asked, f"RANK is {rank}, and WORLD_SIZE is {size}", "Number the processes from 0")
        try:
            backend = backend_of(torch.cuda.is_available() and dist.is_nccl_available())
            dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_S))
        except (RuntimeError, ValueError) as error:
            do = "Check MASTER_ADDR and MASTER_PORT, and look for the first error in the output of the other ranks"
            raise RankError(asked, f"the group can't be started ({_first_line(error)})", do) from error
    if (size := dist.get_world_size()) != count:
        found = f"the number of processes is {size}"
        raise RankError(asked, found, f"Give {plural(size, 'rank')}, or start {count} processes")
    return Shard(dist.get_rank(), count)


def backend_of(cuda: bool) -> str:
    """Return the backends of a group: gloo for host memory, and NCCL for CUDA if there is `cuda`.

    Call it before the group exists. The functions of torch.distributed.nn, which PyTorch's compiler imports, keep the default
    group of that moment as a default argument: a rank could then never leave it, and the others would wait for that rank.
    """
    import torch.distributed.nn  # noqa: F401

    switch_multicast_off()
    return "cpu:gloo,cuda:nccl" if cuda else "gloo"


def switch_multicast_off() -> None:
    """Keep NCCL and PyTorch's symmetric memory from using multicast over NVLink. Call it before the first communication."""
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def current() -> Shard:
    """Return the rank of this process and the number of ranks: those of the default group, if there is one."""
    module = sys.modules.get("torch.distributed")
    if module is None or not module.is_available() or not module.is_initialized():
        return WHOLE
    return Shard(module.get_rank(), module.get_world_size())


def described(shard: Shard) -> dict[str, Any]:
    """Return what the `meta` of a trace says about the rank that recorded it: nothing for a single one."""
    if shard == WHOLE:
        return {}
    return {"rank": shard.rank, "world_size": shard.ranks, "groups": {GROUP: list(range(shard.ranks))}}


def started() -> int:
    """Return how many processes a launcher such as torchrun has started: 1 without one. Raises RankError for no number."""
    return _variable("WORLD_SIZE", least=1)


def _variable(name: str, least: int) -> int:
    text = os.environ.get(name, str(least))
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < least:
        found = f"the environment variable {name} is {brief(text)}, not a whole number of at least {least}"
        raise RankError("the ranks of a launcher", found, f"Start the processes with torchrun, or unset {name}")
    return int(text)


def local_rank() -> int:
    """Return the number of this process among those that a launcher such as torchrun has started on this machine."""
    text = os.environ.get("LOCAL_RANK", "0")
    return int(text) if text.isdecimal() else 0


def gather(x: Tensor) -> Tensor:
    """Return the tensors of all ranks, [ranks, *x.shape], in host memory. `x` has the same shape and dtype on all of them.

    Raises RankError, which names the rank that failed if that is known, if another rank has ended or doesn't arrive.
    """
    import torch
    import torch.distributed as dist

    mine = x.detach().contiguous().view(-1).view(torch.uint8)  # gloo doesn't know every dtype
    ranks = dist.get_world_size()
    found = mine.new_empty(ranks * mine.numel())
    exchange(dist.all_gather, list(found.chunk(ranks)), mine)
    return found.view(x.dtype).view(ranks, *x.shape)


def latest(time_ns: int) -> int:
    """Return the latest of the times that the ranks pass."""
    import torch

    return int(gather(torch.tensor(time_ns, device="cpu")).max())


def check_same(
    shard: Shard, asked: str, do: str = "Run the same program with the same arguments on each rank", /, **facts: object
) -> None:
    """Raise RankError, which names the first fact that differs and says what to `do`, unless all ranks pass the same `facts`.

    Facts are compared by their repr. Ranks that differ would otherwise wait for each other, or compute nonsense.
    """
    if shard.ranks == 1:
        return
    import torch

    digests = [hashlib.sha256(repr(fact).encode()).digest() for fact in facts.values()]
    rows = gather(torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8)).view(shard.ranks, len(facts), -1)
    for i, (name, fact) in enumerate(facts.items()):
        others = [rank for rank in range(shard.ranks) if not torch.equal(rows[rank, i], rows[0, i])]
        if others:
            found = f"{name} of rank {others[0]} differs from rank 0's; here it is {brief(fact)}"
            raise RankError(f"{asked} on {shard.ranks} ranks", found, do)


@contextmanager
def announcing() -> Iterator[None]:
    """Tell the other ranks if the block raises an error: their collectives then raise a RankError that names this rank.

    Launchers run the program of a rank inside. After an error the group is left, which ends the others' waits at once.
    """
    try:
        yield
    except BaseException as error:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            with suppress(RuntimeError):  # the store may have ended with another rank
                told = f"rank {dist.get_rank()} failed with {type(error).__name__}: {error}"
                _store().compare_set(_FAILED, "", told.encode(errors="replace").decode())  # also half of a surrogate pair
            leave()
        raise


def leave() -> None:
    """Leave the default group, if there is one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        with suppress(RuntimeError):  # a group that has lost a rank
            dist.destroy_process_group()


def exchange(collective: Callable[..., Any], *tensors: Any) -> None:
    """Run a collective of torch.distributed. Raises RankError, which names the rank that failed if that is known."""
    try:
        collective(*tensors)
    except RuntimeError as error:
        reason = _announced()
        found = reason or f"another rank has ended or did not arrive ({_first_line(error)})"
        do = "Fix the error of that rank" if reason else "Look for the first error in the output of the other ranks"
        raise RankError("exchanging results between ranks", found, f"{do}, then start all ranks again") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:160]


def _announced() -> str:
    """Return what the rank that failed first has announced, or "" if none has."""
    with suppress(RuntimeError):
        store = _store()
        if store.check([_FAILED]):
            return str(store.get(_FAILED).decode())
    return ""


def _store() -> Any:
    import torch.distributed.distributed_c10d as c10d

    return c10d._get_default_store()
