"""What a load did, as a frozen record on the model: `model.report`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.core.units import bytes_text
from toolkit.loading.layout import Fused


@dataclass(frozen=True)
class Report:
    """How a model was loaded. Bytes are of device memory.

    `bytes_by_kind`: of weights, by scheme ("q4_k") or dtype where plain ("bfloat16"). `weight_bytes`: their sum;
    `allocated_bytes`: as the allocator counts them, each tensor rounded up. `peak_bytes`: the most that was allocated while
    loading, above what was before; None where the device had a higher peak before, or counts none. `skipped`: stored
    tensors that were left out. `drawn`: the weights are random, and `seconds` were spent drawing them.
    """

    source: str
    device: str
    fused: tuple[Fused, ...]
    bytes_by_kind: Mapping[str, int]
    weight_bytes: int
    allocated_bytes: int
    peak_bytes: int | None
    stored_bytes: int
    skipped: tuple[str, ...]
    seconds: float
    drawn: bool = False
    sizes_only: bool = False

    def __repr__(self) -> str:
        kinds = ", ".join(f"{bytes_text(size)} {kind}" for kind, size in self.bytes_by_kind.items())
        fused = f"; fused {', '.join(map(str, self.fused))}" if self.fused else ""
        skipped = f"; {len(self.skipped):,} stored tensors left out" if self.skipped else ""
        how = "sizes only" if self.sizes_only else "drawn at random" if self.drawn else "loaded"
        return f"{self.source} {how} on {self.device} in {self.seconds:.1f} s: {kinds}{fused}{skipped}"
