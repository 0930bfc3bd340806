"""Collectives on CUDA GPUs: small tensors in one launch, through memory that all ranks write to; large ones by NCCL.

A product of a decode step can send its result to all ranks itself (`can_send`, `inbox_of`). The operation that needs the sum
then receives the results, or `all_reduce_sent` does.

The launches run in CUDA graphs, also in the body of a loop. Ranks whose GPUs don't reach each other's memory use NCCL for all
sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from toolkit.core import distributed
from toolkit.core.errors import DeviceError
from toolkit.gpu.cuda.device import open_cuda
from toolkit.gpu.cuda.peers import Shared, connect
from toolkit.gpu.virtual.effects.effect import NCCL
from toolkit.ops.launch_plan import handles
from toolkit.ops.tape import recording

if TYPE_CHECKING:
    from toolkit.kernels.base import Launch
    from toolkit.kernels.exchange import Inbox, Sent

MOST_BYTES = 1 << 19  # of the tensor of a rank that is exchanged in one launch; `toolkit.kernels.exchange` has the same figure
SENT_BYTES = 1 << 17  # of a result that a product sends itself; likewise
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VIRTUAL = ("vgpu",)
ONE_SHOT = "one-shot"  # an algorithm, as NCCL


@dataclass(frozen=True, eq=False)
class Links:
    """How the ranks of a group exchange tensors: through `inbox`, or, if that is None, by NCCL, because of `why_not`."""

    group: Any  # of torch.distributed
    device: torch.device
    shared: Shared | None
    inbox: Inbox | None
    why_not: str


_links: Links | None = None


def links(device: torch.device) -> Links:
    """Return the links of this rank's GPU with those of the other ranks. The first call of a group connects them, on all ranks.

    Raises DeviceError if the ranks share a GPU or the group has no NCCL.
    """
    global _links
    import torch.distributed as dist

    group = dist.distributed_c10d._get_default_group()
    if _links is None or _links.group is not group or _links.device != device:
        _links = _connected(group, device)
    return _links


def _connected(group: Any, device: torch.device) -> Links:
    import torch.distributed as dist

    shard = distributed.current()
    if "cuda:nccl" not in str(dist.get_backend_config()):
        found, do = f"the group's backends are {dist.get_backend_config()}", 'Call init_process_group("cpu:gloo,cuda:nccl")'
        raise DeviceError(f"a model over {shard.ranks} ranks on CUDA", found, do)
    from toolkit.kernels.exchange import in_memory, memory_words

    shared, why_not = connect(device, shard, memory_words(shard.ranks))
    inbox = None if shared is None else in_memory(shard.rank, shared.own, shared.addresses)
    return Links(group, device, shared, inbox, why_not)


def can_send(device: torch.device, n_bytes: int) -> bool:
    """Return whether products on this device send results of this size. Virtual GPUs do what linked ones would."""
    linked = links(device).inbox is not None if device.type == "cuda" else device.type in VIRTUAL
    return linked and n_bytes <= SENT_BYTES


def inbox_of(device: torch.device) -> Sent:
    """Return the memory by which products send and operations receive, if they can.

    After a product that sends, and before another one does, all ranks must receive the results: by an operation, or by
    `all_reduce_sent`. If an error, such as an interrupt, comes between the two, what was sent stays there: leave the process
    group then.
    """
    inbox = links(device).inbox
    assert inbox is not None
    return inbox.sent


def all_reduce(x: Tensor, count: int) -> Tensor:
    """Return the sum of the tensors of `count` ranks, computed in fp32."""
    inbox, x = links(x.device).inbox, x.contiguous()
    if inbox is None or not is_small(x, x.nbytes):
        return _by_nccl("all_reduce", x, x.nbytes).sum(0)
    from toolkit.kernels import exchange

    out = torch.empty_like(x)
    if x.numel():
        key = inbox.rank, count, x.dtype, x.numel(), x.data_ptr() % 16, out.data_ptr() % 16
        _start(exchange.all_reduce(inbox, x, out), x, out, partial(_note_sum, x, count), key)
    return out


def all_reduce_sent(share: Tensor, count: int) -> None:
    """Write to `share`, contiguous, the sum of the results that products of `count` ranks have sent, computed in fp32."""
    inbox = links(share.device).inbox
    assert inbox is not None
    from toolkit.kernels import exchange

    key = "sent", inbox.rank, count, share.dtype, share.numel(), share.data_ptr() % 16
    _start(exchange.sum_of_sent(inbox, share), share, share, partial(_note_sum, share, count), key)


def announce(share: Tensor, count: int) -> None:
    """Tell a recording that the last launch also summed tensors like `share` over `count` ranks."""
    tape = recording()
    if tape is None:
        _note_sum(share, count)
    else:
        tape.start(_note, share.device, "all_reduce", share.nbytes, count, ONE_SHOT)


def all_gather(x: Tensor, sizes: Sequence[int], dim: int, fp32: bool = False) -> Tensor:
    """Return the tensors of all ranks, joined along `dim`, in their dtype or in fp32."""
    inbox, rows, width = links(x.device).inbox, x.movedim(dim, -1).contiguous(), sum(sizes)
    dtype = torch.float32 if fp32 else x.dtype
    if inbox is None or not is_small(x, bytes_with(x, max(sizes), dim)):
        return _joined_by_nccl(rows, sizes).to(dtype).movedim(-1, dim).contiguous()
    from toolkit.kernels import exchange

    out = torch.empty((*rows.shape[:-1], width), dtype=dtype, device=rows.device)  # a tape knows this function
    if out.numel():
        launch = exchange.all_gather(inbox, rows, sizes, out)
        note = partial(_note, x.device, "all_gather", bytes_with(x, width, dim), len(sizes), ONE_SHOT)
        _start(launch, rows, out, note)
    return out.movedim(-1, dim).contiguous()


def bytes_with(x: Tensor, size: int, dim: int) -> int:
    """Return how many bytes a tensor like `x` with `size` entries along `dim` has."""
    others = [n for i, n in enumerate(x.shape) if i != dim % x.ndim]
    return math.prod(others) * size * x.itemsize


def is_small(x: Tensor, most: int) -> bool:
    """Return whether tensors of the dtype of `x` are exchanged in one launch; the largest of a rank has `most` bytes."""
    return most <= MOST_BYTES and x.dtype in DTYPES


def _by_nccl(operation: str, x: Tensor, n_bytes: int) -> Tensor:
    """Return the tensors of all ranks, [ranks, *x.shape].

    Sums are computed from them, so that they don't depend on the order in which NCCL adds.
    """
    import torch.distributed as dist

    count = dist.get_world_size()
    found = x.new_empty(count, *x.shape)
    _note(x.device, operation, n_bytes, count, NCCL)
    distributed.exchange(dist.all_gather_into_tensor, found.view(-1), x.view(-1))
    return found


def _joined_by_nccl(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return [..., sum(sizes)], given the rank's part [..., sizes[rank]]."""
    short = max(sizes) - rows.shape[-1]
    padded = torch.nn.functional.pad(rows, (0, short)) if short else rows
    found = _by_nccl("all_gather", padded, bytes_with(rows, sum(sizes), -1))
    return torch.cat([part[..., :size] for part, size in zip(found, sizes, strict=True)], -1)


def _start(launch: Launch, x: Tensor, out: Tensor, note: Callable[[], None], key: tuple[Any, ...] | None = None) -> None:
    """Run `launch`, and record it if a tape records. Launches with the same `key` differ only in their pointers."""
    start = partial(_run, launch, note, key)
    tape = recording()
    with torch.cuda.device(x.device):
        if tape is None:
            start()
        else:
            tape.use((x,))
            tape.hold(out)
            tape.start(start)


class _Known(NamedTuple):
    compiled: Any  # Triton unloads a kernel when this is freed
    handles: tuple[Any, Any, Any]


_known: dict[tuple[Any, ...], _Known] = {}


def _run(launch: Launch, note: Callable[[], None], key: tuple[Any, ...] | None) -> None:
    """Launch, as Triton does. A launch like an earlier one starts the same compiled kernel, which is ten times as fast."""
    note()
    known = None if key is None else _known.get(key)
    if known is None:
        compiled = launch.run()
        if key is not None:
            _known[key] = _Known(compiled, handles(compiled))
        return
    run, function, metadata = known.handles
    given = [launch.arguments.get(name, launch.constants.get(name)) for name in launch.function.arg_names]
    values = [value.data_ptr() if isinstance(value, Tensor) else value for value in given]
    stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
    run(*(*launch.grid, 1, 1)[:3], stream, function, metadata, None, None, None, *values)


def _note_sum(x: Tensor, count: int) -> None:
    _note(x.device, "all_reduce", x.nbytes, count, ONE_SHOT)


def _note(device: torch.device, operation: str, n_bytes: int, count: int, algorithm: str) -> None:
    """Tell a recording what the next collective is."""
    open_cuda(device.index).note_collective(operation, n_bytes, count, algorithm)
