"""Which config a kernel is launched with: looked up in named steps, never tuned by surprise.

1. "this device": the fastest right one that was timed on this very GPU;
2. "same capability": the fastest one of another GPU of the same compute capability that fits in this one's limits;
3. "model": the first within 5 % of the best by `estimate`, of the configs whose compiled figures are on disk (`tune.explore`
   puts them there);
4. "default": the first of the kernel's space, which fits everywhere.

A lookup compiles nothing and runs nothing. Each answer is remembered, with the step it came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from toolkit.errors import DeviceError
from toolkit.kernels.base import Config, Kernel, Shape
from toolkit.kernels.tune.cards import Card, find_card
from toolkit.kernels.tune.compiling import Job, Kept
from toolkit.kernels.tune.estimate import estimate
from toolkit.kernels.tune.identity import fingerprint
from toolkit.kernels.tune.limits import WARP, Compiled, LaunchUse, obstacle
from toolkit.kernels.tune.store import Record, from_words, kept_gpus, read_tuned
from toolkit.units import seconds_text

UNSURE = 0.05  # the model doesn't tell apart what differs by less
STEPS = ("this device", "same capability", "model", "default")


@dataclass(frozen=True)
class Choice:
    """What a lookup answered: the config, the step that found it, and the reason in words."""

    kernel: str
    shape: str
    gpu: str
    config: Config
    step: str
    note: str


_chosen: dict[tuple[str, Shape, Any], Choice] = {}


def choose(kernel: Kernel, shape: Shape, device: Card | torch.device | str | int = "auto") -> Choice:
    """The config to launch `kernel` with on `device`; remembered until something is tuned."""
    key = (kernel.name, shape, device)
    if key not in _chosen:
        _chosen[key] = _look(kernel, shape, find_card(device))
    return _chosen[key]


def choices() -> list[Choice]:
    """Every choice that was made in this process since something was tuned last."""
    return list(_chosen.values())


def forget() -> None:
    """Look everything up anew: called when timings were added."""
    _chosen.clear()


def _look(kernel: Kernel, shape: Shape, card: Card | None) -> Choice:
    default = kernel.space(shape)[0]
    if card is None:
        return Choice(kernel.name, shape.key, "cpu", default, "default", "there is no GPU to choose for")
    for step, look in zip(STEPS, (_this_device, _same_capability, _modelled), strict=False):
        found = look(kernel, shape, card)
        if found is not None:
            return Choice(kernel.name, shape.key, card.key, found[0], step, found[1])
    note = f"nothing is known of this shape on {card.spec.name}; tk.tune.warm times it"
    return Choice(kernel.name, shape.key, card.key, default, "default", note)


def timed(kernel: Kernel, shape: Shape, gpu: str, card: Card | None = None) -> list[tuple[float, Config, Record]]:
    """The right configs that were timed on `gpu` with the kernel as it is now, fastest first, in µs."""
    kept = read_tuned(gpu, card.facts if card is not None else None)
    if kept is None:
        return []
    rows = kept.configs(kernel.name, shape.key).items()
    right = [
        (row.us, from_words(config), row) for config, row in rows if row.verdict == "ok" and row.kernel == fingerprint(kernel)
    ]
    return sorted([(us, config, row) for us, config, row in right if us is not None], key=lambda found: found[0])


def _this_device(kernel: Kernel, shape: Shape, card: Card) -> tuple[Config, str] | None:
    found = timed(kernel, shape, card.key, card)
    if not found:
        return None
    us, config, row = found[0]
    return config, f"{seconds_text(us / 1e6)}, the fastest of {len(found)} timed with {row.versions}"


def _same_capability(kernel: Kernel, shape: Shape, card: Card) -> tuple[Config, str] | None:
    found = []
    for gpu in kept_gpus():
        kept = read_tuned(gpu) if gpu != card.key else None
        if kept is not None and kept.device.compute_capability == card.facts.compute_capability:
            found += [(us, config, row, kept.device.name) for us, config, row in timed(kernel, shape, gpu)]
    for us, config, row, name in sorted(found, key=lambda one: one[0]):
        use = LaunchUse(kernel.name, (1,), config.warps * WARP, row.registers, row.spill_bytes, row.shared_bytes)
        if not obstacle(Compiled((use,)), card.spec):
            return config, f"the fastest on {name} ({seconds_text(us / 1e6)} there), of the same compute capability"
    return None


def _modelled(kernel: Kernel, shape: Shape, card: Card) -> tuple[Config, str] | None:
    try:
        kept = Kept(kernel).rows
    except DeviceError:  # no Triton: nothing was compiled
        return None
    jobs = {config: Job(shape, config, card.spec.compute_capability).key for config in kernel.space(shape)}
    fitting = {config: kept[key] for config, key in jobs.items() if key in kept and not obstacle(kept[key], card.spec)}
    times = {config: estimate(kernel, shape, config, compiled, card.spec).ns for config, compiled in fitting.items()}
    if not times:
        return None
    least = min(times.values())
    best = next(config for config, ns in times.items() if ns <= least * (1 + UNSURE))  # the author's favourites come first
    return best, f"{seconds_text(times[best] / 1e9)} modelled, of {len(times)} that fit; never timed on {card.spec.name}"
