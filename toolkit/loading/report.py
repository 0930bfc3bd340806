"""The record of a load: `model.report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from toolkit.core.distributed import WHOLE, Shard
from toolkit.core.units import bytes_text, plural
from toolkit.loading.layout import Fused


@dataclass(frozen=True)
class Report:
    """How a model was loaded. All bytes are device memory.

    `bytes_by_kind` are weights by scheme ("q4_k") or dtype ("bfloat16"), and `weight_bytes` is their sum. `allocated_bytes` is
    the same sum with each tensor rounded up as by the allocator. `peak_bytes` is the peak during loading minus the bytes
    allocated before; None if the device had a higher peak before, or reports none. `skipped` lists stored tensors that were not
    loaded. `shard` is the part of the model that was loaded. `drawn` is True for random weights; `seconds` is then the time for
    drawing them. `unquantized` has the names of matrices that the chosen scheme can't hold, by reason.
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
    shard: Shard = WHOLE
    unquantized: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __repr__(self) -> str:
        kinds = ", ".join(f"{bytes_text(size)} {kind}" for kind, size in self.bytes_by_kind.items())
        fused = f"; fused {', '.join(map(str, self.fused))}" if self.fused else ""
        skipped = f"; {plural(len(self.skipped), 'stored tensor')} skipped" if self.skipped else ""
        left = f"; {unquantized_text(self.unquantized)}" if self.unquantized else ""
        part = "" if self.shard == WHOLE else f", {self.shard},"
        how = "sizes only" if self.sizes_only else "drawn at random" if self.drawn else "loaded"
        return f"{self.source}{part} {how} on {self.device} in {self.seconds:.1f} s: {kinds}{left}{fused}{skipped}"


def unquantized_text(unquantized: Mapping[str, Sequence[str]]) -> str:
    """Return in words what is left: "not quantized: 12 matrices, rows of 100 are not a multiple of 32". "" if nothing is."""
    parts = [f"{plural(len(names), 'matrix', 'matrices')}, {why}" for why, names in unquantized.items()]
    return f"not quantized: {'; '.join(parts)}" if parts else ""
