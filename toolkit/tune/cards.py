"""Find the GPU to tune for: one of the catalogue, the virtual GPU, or one in this machine."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch

from toolkit.core.errors import unknown_name
from toolkit.gpu.catalogue import CATALOGUE, GpuSpec, Source
from toolkit.gpu.device import Device
from toolkit.tune.store import DeviceFacts

DDR = 2  # transfers per memory clock


@dataclass(frozen=True)
class Card:
    """A GPU to tune for: its key in files of timings, its specification, and its CUDA index if it is in this machine."""

    key: str
    spec: GpuSpec
    facts: DeviceFacts
    index: int | None = None

    @property
    def present(self) -> bool:
        return self.index is not None

    def to_plain(self) -> dict[str, Any]:
        """Return the card as JSON data for another process, without the sources of its figures."""
        spec = {f.name: getattr(self.spec, f.name) for f in fields(self.spec) if f.name != "sources"}
        return {"spec": spec, "facts": asdict(self.facts), "index": self.index}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Card:
        """Return the card from the data of `to_plain`."""
        capability = tuple(plain["spec"]["compute_capability"])
        spec = GpuSpec(**plain["spec"] | {"compute_capability": capability, "sources": MappingProxyType({})})
        return cls(spec.key, spec, DeviceFacts(**plain["facts"]), plain["index"])


def find_card(device: Card | Device | GpuSpec | torch.device | str | int = "auto") -> Card | None:
    """Return the GPU called `device`: "h200", "virtual:8GiB", "cuda:1", a device of `tk.device` or torch; None for the CPU.

    "auto" is the first CUDA GPU, or None without one. A name of the catalogue never means the GPU in this machine; "cuda"
    does. Raises UnknownNameError for an unknown name, and DeviceError if CUDA is not available or the name asks for several.
    """
    if isinstance(device, Card):
        return device
    if isinstance(device, GpuSpec):
        return _absent(device)
    if isinstance(device, Device):
        device = device.name
    name = f"cuda:{device}" if isinstance(device, int) else str(device)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, rest = name.partition(":")
    if kind in ("cpu", "meta"):
        return None
    if kind == "cuda" and (not rest or rest.isdecimal()):
        return present_card(int(rest) if rest.isdecimal() else torch.cuda.current_device() if torch.cuda.is_available() else 0)
    if kind in ("vgpu", "virtual"):
        from toolkit.gpu.virtual.device import current_virtual, spec_of

        return _absent(current_virtual().spec if kind == "vgpu" else spec_of(rest))
    if name not in CATALOGUE:
        from toolkit.gpu.virtual.device import check_single

        check_single(name)
        raise unknown_name("GPU", name, ["auto", "cpu", "cuda", "virtual:8GiB", *CATALOGUE])
    return _absent(CATALOGUE[name])


def find_cards(gpus: Any = None) -> list[Card]:
    """Return several GPUs, each given as for `find_card`; None means the catalogue and the GPU of this machine, if any."""
    if gpus is None:
        here = find_card("auto")
        names: list[Any] = [*([here] if here else []), *(key for key in CATALOGUE if here is None or key != here.key)]
    else:
        names = list(gpus) if isinstance(gpus, Iterable) and not isinstance(gpus, str) else [gpus]
    cards = [card for name in names if (card := find_card(name)) is not None]
    return list({card.key: card for card in cards}.values())


@lru_cache
def present_card(index: int) -> Card:
    """Return the CUDA GPU with this index. Raises DeviceError if there is none."""
    from toolkit.gpu.cuda.device import open_cuda

    open_cuda(index)
    found, extra = torch.cuda.get_device_properties(index), _driver_figures(index)
    capability = (found.major, found.minor)
    facts = DeviceFacts(
        found.name, f"{found.major}.{found.minor}", found.multi_processor_count, found.total_memory,
        extra.get("sm_clock_rate", 0) // 1000, extra.get("mem_clock_rate", 0) // 1000,
    )  # fmt: skip
    key = key_of(facts.name, facts.sms)
    spec = CATALOGUE.get(key) or _spec_of(key, found, capability, extra)
    return Card(spec.key, spec, facts, index)


def _absent(spec: GpuSpec) -> Card:
    major, minor = spec.compute_capability
    return Card(spec.key, spec, DeviceFacts(spec.name, f"{major}.{minor}", spec.sms, spec.memory_bytes))


def _driver_figures(index: int) -> dict[str, int]:
    """Return clocks and memory bus width, which Triton reads from the driver and torch does not report; {} without Triton."""
    try:
        from triton.runtime import driver

        return dict(driver.active.utils.get_device_properties(index))
    except (ImportError, RuntimeError, AttributeError):
        return {}


def key_of(name: str, sms: int) -> str:
    """Return a card's key: the catalogue's, or its name and SM count (cards of one name are sold with different SM counts)."""
    same = (spec.key for spec in CATALOGUE.values() if (spec.name, spec.sms) == (name, sms))
    return next(same, None) or f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}-{sms}sm"


def _spec_of(key: str, found: Any, capability: tuple[int, int], extra: dict[str, int]) -> GpuSpec:
    """Return the spec of a card that is not in the catalogue: CUDA's figures, others scaled from the most similar card."""
    near = min(
        CATALOGUE.values(),
        key=lambda spec: (_distance(spec.compute_capability, capability), abs(spec.sms - found.multi_processor_count)),
    )
    scale = found.multi_processor_count / near.sms
    rates = {name: getattr(near, name) * scale for name in ("fp32_flops", "tf32_flops", "bf16_flops")}
    bus = extra.get("mem_clock_rate", 0) * 1e3 * DDR * extra.get("mem_bus_width", 0) / 8 or near.bandwidth_bytes_per_s * scale
    reached = near.reached_bandwidth_bytes_per_s / near.bandwidth_bytes_per_s
    told = {
        "name": found.name, "compute_capability": capability, "memory_bytes": found.total_memory,
        "sms": found.multi_processor_count, "registers_per_sm": found.regs_per_multiprocessor,
        "threads_per_sm": found.max_threads_per_multi_processor, "l2_bytes": found.L2_cache_size,
        "smem_per_block_bytes": found.shared_memory_per_block,
        "smem_per_block_optin_bytes": found.shared_memory_per_block_optin,
        "smem_per_sm_bytes": found.shared_memory_per_multiprocessor,
    }  # fmt: skip
    guessed = {**rates, "bandwidth_bytes_per_s": bus, "reached_bandwidth_bytes_per_s": bus * reached}
    sources = {name: Source("measured", "what CUDA reports of this card") for name in told}
    sources |= {name: Source("estimated", f"from the {near.name}, or the memory's clock and width") for name in guessed}
    return replace(near, key=key, sources=MappingProxyType({**near.sources, **sources}), **told, **guessed)


def _distance(a: tuple[int, int], b: tuple[int, int]) -> int:
    return abs(10 * a[0] + a[1] - 10 * b[0] - b[1])
