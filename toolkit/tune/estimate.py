"""How long a config would take on a GPU, without running it: bytes over the bandwidth that its blocks can keep busy.

A model, and always labelled so: good for "which of these, on a GPU that I don't have" and for an order to time in, not for
a figure to quote. What bounds a run: the bytes over the bandwidth, or the operations over the peak, whichever is longer.
A config comes into it by how much it keeps in flight (Little's law: resident warps times the loads each has open, over
the memory's latency), by how many SMs have work, by the last wave's empty places, and by what it spills.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from toolkit.gpu.catalogue import GpuSpec
from toolkit.kernels.base import Config, Kernel, Shape
from toolkit.tune.limits import WARP, Compiled, LaunchUse, occupancy

LATENCY_NS = 700.0  # of a load from DRAM under load
OPEN_BYTES = 2 * WARP * 16  # a warp's loads under way without a pipeline: two of 16 B a lane
SM_BYTES_PER_S = 64 * 1.7e9  # into one SM: 64 B a clock
SPILL_BYTES_DOUBLE = 512.0  # a stack of this many bytes a thread doubles the time


@dataclass(frozen=True)
class Estimate:
    """A modelled time in ns, its floor from bytes and from operations (the roofline), and what bounds it."""

    ns: float
    memory_ns: float
    compute_ns: float
    bound: str  # "bandwidth", "operations" or "latency"


def estimate(kernel: Kernel, shape: Shape, config: Config, compiled: Compiled, spec: GpuSpec) -> Estimate:
    """The modelled time of `config`, compiled, on `spec`; the kernel's own estimate where it has one."""
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
    """The bandwidth that a launch can keep busy: what is in flight over the latency, and what its SMs can take in."""
    resident = min(use.blocks, max(occupancy(use, spec).blocks_per_sm, 1) * spec.sms)
    in_flight = resident * use.threads / WARP * OPEN_BYTES * max(config.stages - 1, 1)
    into_sms = min(use.blocks, spec.sms) * SM_BYTES_PER_S
    return min(spec.reached_bandwidth_bytes_per_s, in_flight / LATENCY_NS * 1e9, into_sms)


def wave_efficiency(use: LaunchUse, spec: GpuSpec) -> float:
    """The share of places that blocks fill, over all waves; 1 while everything fits at once."""
    places = max(occupancy(use, spec).blocks_per_sm, 1) * spec.sms
    waves = use.blocks / places
    return 1.0 if waves <= 1 else waves / math.ceil(waves)
