"""Model the time of a config on a GPU without running it.

A roofline: the larger of bytes / bandwidth and operations / peak rate. The bandwidth that a config reaches follows from its
bytes in flight (Little's law: outstanding loads of the resident warps / memory latency). Idle SMs, a partly filled last wave
and register spills add to the time. The result ranks configs, to choose one for an absent GPU or an order to time them in; it
is always labelled as modelled and not meant to be quoted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from toolkit.gpu.catalogue import GpuSpec
from toolkit.gpu.virtual.effects.effect import SM_BYTES_PER_S
from toolkit.kernels.base import Config, Kernel, Shape
from toolkit.tune.limits import WARP, Compiled, LaunchUse, occupancy

LATENCY_NS = 700.0  # of a load from DRAM when the memory is busy
OPEN_BYTES = 2 * WARP * 16  # outstanding loads of a warp without a pipeline: two of 16 B per lane
SPILL_BYTES_DOUBLE = 512.0  # a stack of this many bytes per thread doubles the time


@dataclass(frozen=True)
class Estimate:
    """A modelled time in ns, its lower bounds from bytes and from operations (the roofline), and the limiting resource."""

    ns: float
    memory_ns: float
    compute_ns: float
    bound: str  # "bandwidth", "operations" or "latency"


def estimate(kernel: Kernel, shape: Shape, config: Config, compiled: Compiled, spec: GpuSpec) -> Estimate:
    """Return the modelled time of a compiled config on `spec`, or the kernel's own estimate if it has one."""
    cost = kernel.cost(shape)
    memory_ns = cost.bytes / spec.reached_bandwidth_bytes_per_s * 1e9
    compute_ns = cost.flops / getattr(spec, cost.peak) * 1e9
    own = kernel.modelled_ns(shape, config, spec)
    if own is not None:
        return Estimate(own, memory_ns, compute_ns, "bandwidth" if memory_ns >= compute_ns else "operations")
    use = compiled.main
    floor = spec.kernel_floor_ns + spec.graph_node_ns * max(len(compiled.launches) - 1, 0)
    if use is None:
        return Estimate(floor, memory_ns, compute_ns, "latency")
    busy, wave = min(use.blocks / spec.sms, 1.0), wave_efficiency(use, spec)
    slow_memory = memory_ns * spec.reached_bandwidth_bytes_per_s / reached_bytes_per_s(use, config, spec)
    slowest = max(slow_memory, compute_ns / busy) / wave * (1 + compiled.spill_bytes / SPILL_BYTES_DOUBLE)
    bound = (
        "latency"
        if slow_memory > 1.05 * max(memory_ns, compute_ns)
        else "bandwidth"
        if memory_ns > compute_ns
        else "operations"
    )
    return Estimate(slowest + floor, memory_ns, compute_ns, bound)


def reached_bytes_per_s(use: LaunchUse, config: Config, spec: GpuSpec) -> float:
    """Return the bandwidth that a launch can use, limited by its bytes in flight / latency and by the rate into its SMs."""
    resident = min(use.blocks, max(occupancy(use, spec).blocks_per_sm, 1) * spec.sms)
    in_flight = resident * use.threads / WARP * OPEN_BYTES * max(config.stages - 1, 1)
    into_sms = min(use.blocks, spec.sms) * SM_BYTES_PER_S
    return min(spec.reached_bandwidth_bytes_per_s, in_flight / LATENCY_NS * 1e9, into_sms)


def wave_efficiency(use: LaunchUse, spec: GpuSpec) -> float:
    """Return the share of block slots that are filled, over all waves: 1 if all blocks are resident at once."""
    places = max(occupancy(use, spec).blocks_per_sm, 1) * spec.sms
    waves = use.blocks / places
    return 1.0 if waves <= 1 else waves / math.ceil(waves)
