"""The effects of operations on a device (kernels, copies, memsets, collectives, waits), and the model of how long they take.

The model is simple on purpose. A kernel takes a fixed time plus the larger of bytes / bandwidth and flops / peak, a copy a
fixed time plus bytes / rate, and the host a constant per launch. From the arrival of the last rank, a collective takes a fixed
time per phase plus the bytes that a rank receives / the rate between GPUs. Rates and the time of the shortest kernel come from
the `GpuSpec`. A rule says how far its kernel is from them (`floor`, `share` and `blocks` of an `Effect`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from toolkit.gpu.catalogue import GpuSpec

GEMM_EFFICIENCY = 0.8  # of peak. Measured: 815 of 989 TFLOP/s in bf16, 51 of 67 in fp32 (4096 x 4096 x 4096 on an H200)
L2_SPEEDUP = 1.85  # if the operands of a streaming kernel fit L2. Measured: 7.8 TB/s, not 4.22 (4 to 16 MiB on an H200)
SM_BYTES_PER_S = 64 * 1.7e9  # into one SM: 64 B per clock. Measured: a norm of one row, which one block reads (1.98 GHz)
_STAGED_AT_ONCE = 64 * 1024  # bytes; their staging is part of the measured time of the call
_FLOOR = {"h2d": "copy_floor_ns", "d2h": "d2h_floor_ns", "d2d": "d2d_floor_ns", "memset": "d2d_floor_ns"}
_RATE = {
    ("h2d", 0): "h2d_pageable_bytes_per_s", ("h2d", 1): "h2d_pinned_bytes_per_s",
    ("d2h", 0): "d2h_pageable_bytes_per_s", ("d2h", 1): "d2h_pinned_bytes_per_s",
}  # fmt: skip


class Effect(NamedTuple):
    """A kernel, a copy, a memset, a collective or a wait.

    `bytes` are the bytes that a copy or memset reports, `moved_bytes` those that a kernel reads and writes. `peak` names the
    GpuSpec figure that limits `flops`, and `cost` the one for the host's cost of the launch. The fixed time of a kernel is
    `floor` times that of the shortest kernel, and that of a collective `floor` times that of the smallest one. A kernel reaches
    a `share` of the bandwidth of a streaming kernel, and of the arithmetic rate of a large product; with fewer `blocks` than
    SMs, no more than these can load (0: enough blocks). The `moved_bytes` of a collective are those that a rank receives from
    others; `ranks` of them take part. The call of a `staged` copy returns when the host's memory may be used again, see
    `staged_ns`.
    """

    kind: str  # kernel | h2d | d2h | d2d | memset | collective | wait
    bytes: int
    name: str
    pinned: int = -1
    flops: float = 0.0
    moved_bytes: int = 0
    peak: str = "fp32_flops"
    floor: float = 1.0
    cost: str = "op_host_ns"
    share: float = 1.0
    blocks: int = 0
    ranks: int = 1
    algorithm: str = ""  # of a collective
    staged: bool = False


NCCL = "NCCL"  # an algorithm
NCCL_NS = 16_400  # of a collective of a few bytes by NCCL; measured: bench/results/h200x2_ranks.json
WAIT = Effect("wait", 0, "cudaStreamSynchronize", cost="")


def kernel(name: str, moved_bytes: int = 0, floor: float = 1.0, cost: str = "launch_host_ns") -> Effect:
    """Return a kernel whose time is that of reading and writing `moved_bytes`."""
    return Effect("kernel", 0, name, moved_bytes=moved_bytes, floor=floor, cost=cost)


def h2d(n_bytes: int, pinned: bool, cost: str = "h2d_host_ns") -> Effect:
    """Return a memcpy from host to device."""
    return Effect("h2d", n_bytes, _H2D[pinned], int(pinned), cost="pinned_async_host_ns" if pinned else cost)


def d2h(n_bytes: int, pinned: bool, cost: str = "d2h_host_ns") -> Effect:
    """Return a memcpy from device to host."""
    return Effect("d2h", n_bytes, _D2H[pinned], int(pinned), cost="pinned_async_host_ns" if pinned else cost)


def d2d(n_bytes: int, cost: str = "launch_host_ns") -> Effect:
    """Return a memcpy on the device."""
    return Effect("d2d", n_bytes, "Memcpy DtoD (Device -> Device)", moved_bytes=2 * n_bytes, cost=cost)


def memset(n_bytes: int) -> Effect:
    """Return a memset on the device."""
    return Effect("memset", n_bytes, "Memset (Device)", moved_bytes=n_bytes, cost="launch_host_ns")


_H2D = ("Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pinned -> Device)")
_D2H = ("Memcpy DtoH (Device -> Pageable)", "Memcpy DtoH (Device -> Pinned)")


def collective(name: str, n_bytes: int, received: int, ranks: int, algorithm: str) -> Effect:
    """Return a collective of `ranks` ranks, each of which receives `received` bytes. Its larger tensor has `n_bytes`."""
    return Effect("collective", n_bytes, name, moved_bytes=received, ranks=ranks, algorithm=algorithm)


def read_back(n_bytes: int) -> list[Effect]:
    """Return the effects of reading a value back to the host: a copy to pinned memory, and a wait."""
    return [d2h(n_bytes, True), WAIT]


def first(effects: list[Effect], cost: str = "op_host_ns") -> list[Effect]:
    """Return the effects with `cost` on the first launch, which also pays for Python and the dispatcher."""
    if effects and effects[0].cost == "launch_host_ns":
        effects[0] = effects[0]._replace(cost=cost)
    return effects


def nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements, whatever its strides."""
    return tensor.nbytes


def values_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a host tensor with the values of a device tensor, for rules that depend on them; None if it has no values."""
    host: torch.Tensor = getattr(tensor, "_host", tensor)
    return None if host.is_meta else host


def duration_ns(effect: Effect, spec: GpuSpec) -> int:
    """Return the time of `effect` on its stream in ns; 0 for a wait."""
    kind, moved = effect.kind, effect.moved_bytes
    if kind == "wait":
        return 0
    if kind == "h2d" or kind == "d2h":
        rate = getattr(spec, _RATE[kind, 1 if effect.pinned == 1 else 0])
        return int(getattr(spec, _FLOOR[kind]) + effect.bytes / rate * 1e9)
    if kind == "collective":
        fixed = max(NCCL_NS, spec.collective_ns) if effect.algorithm == NCCL else effect.floor * spec.collective_ns
        return int(fixed + moved / spec.peer_bytes_per_s * 1e9)
    rate = spec.reached_bandwidth_bytes_per_s
    if not effect.flops and 2 * moved < spec.l2_bytes:
        rate *= L2_SPEEDUP
    seconds = moved / (min(rate, effect.blocks * SM_BYTES_PER_S) if effect.blocks else rate)
    if effect.flops:
        seconds = max(seconds, effect.flops / (getattr(spec, effect.peak) * GEMM_EFFICIENCY))
    floor = spec.kernel_floor_ns if kind == "kernel" else spec.d2d_floor_ns
    return int(floor * effect.floor + seconds / effect.share * 1e9)


def staged_ns(effect: Effect, launched_ns: int, start_ns: int, spec: GpuSpec) -> int:
    """Return when the call of a copy from or to pageable memory returns that PyTorch doesn't wait for, in ns.

    Source: CUDA Driver API, "API synchronization behavior". A copy to pageable memory returns only once it has completed. A
    copy from pageable memory returns once the driver has staged it in pinned memory, which doesn't wait for the stream.
    """
    if effect.kind == "d2h":
        return start_ns + duration_ns(effect, spec)
    return launched_ns + (duration_ns(effect, spec) if effect.bytes > _STAGED_AT_ONCE else 0)


def host_ns(effect: Effect, spec: GpuSpec) -> int:
    """Return the cost of launching `effect` on the host in ns; 0 for a wait.

    The first launch of an operation includes the interpreter's time since the previous operation.
    """
    if not effect.cost:
        return 0
    cost: Any = getattr(spec, effect.cost)
    return int(cost if effect.cost == "launch_host_ns" else cost + spec.python_host_ns)
