"""Tune on all GPUs of a cluster: each free GPU times the next configs, and all of them write into one file per type of GPU.

Configs are compiled once, by the calling process. A process that times configs stores them within seconds, so a process that
ends loses almost nothing: its part is repeated on another GPU, without the configs that are stored.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from toolkit.core.progress import Counter
from toolkit.kernels.base import Config, Kernel, Shape
from toolkit.kernels.registry import configs_of
from toolkit.tune.cards import Card, find_card
from toolkit.tune.compiling import Job, compile_configs
from toolkit.tune.identity import Origin, origin
from toolkit.tune.limits import Compiled
from toolkit.tune.lookup import forget
from toolkit.tune.results import Tuning
from toolkit.tune.store import cache_folder, words
from toolkit.tune.timing import CudaClock
from toolkit.tune.tuner import Tuner, is_broken

PART = 16  # configs that a GPU gets at a time: each part needs the problem's inputs and reference results once

Compiling = dict[tuple[Kernel, Shape], dict[Job, Compiled]]


class Cluster(Protocol):
    """The part of the result of `tk.cluster` that tuning needs."""

    @property
    def device(self) -> str: ...

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]: ...

    def spread(
        self, function: Callable[..., Any], items: Sequence[Any], ranks: Sequence[int] | None = None
    ) -> Iterator[tuple[int, Any]]: ...


@dataclass(frozen=True)
class Part:
    """Some configs of one problem, for one process of a cluster. `find` returns that process's tuner."""

    find: Callable[[], Tuner | None]
    kernel: Origin
    shape: str
    configs: tuple[Config, ...]
    again: bool
    cache: str  # folder of the calling process's results


@functools.cache
def own_tuner() -> Tuner | None:
    """Return a tuner for the current GPU of this process, or None if it has none."""
    if not torch.cuda.is_available():
        return None
    card = find_card("cuda")
    assert card is not None
    assert card.index is not None
    return Tuner(card, torch.device("cuda", card.index), CudaClock())


def own_card(find: Callable[[], Tuner | None]) -> dict[str, Any] | None:
    """Return the GPU of this process as plain data, or None."""
    tuner = find()
    return None if tuner is None else tuner.card.to_plain()


def tune_part(part: Part) -> tuple[str, ...]:
    """Check and time the configs of a part on the GPU of this process, store the results, and return notes.

    If a config has made the CUDA context unusable, this process ends: its other configs are then timed by another one.
    """
    os.environ["TOOLKIT_CACHE"] = part.cache
    tuner, kernel = part.find(), part.kernel.load()
    assert tuner is not None
    tuner.again = part.again
    found = tuner.tune(kernel, kernel.shape_type.from_key(part.shape), part.configs)
    if isinstance(tuner.clock, CudaClock):
        tuner.clock.release()
    if is_broken(tuner.device):
        os._exit(1)
    return found.notes


def tune_on(
    cluster: Cluster, problems: Sequence[tuple[Kernel, Shape]], configs: Sequence[Config] | None, steps: Counter, again: bool,
    find: Callable[[], Tuner | None] = own_tuner,
) -> list[Tuning]:  # fmt: skip
    """Tune the problems on the GPUs of a cluster, and return their tables, for each type of GPU. [] if it has no GPU."""
    ranks: dict[str, list[int]] = {}
    cards: dict[str, Card] = {}
    for rank, plain in enumerate(cluster.run(own_card, find)):
        if plain is not None:
            card = Card.from_plain(plain)
            cards[card.key] = card
            ranks.setdefault(card.key, []).append(rank)
    found = []
    for key, card in cards.items():
        compiled = _compile(card, problems, configs, steps)
        notes = _time(cluster, ranks[key], card, compiled, configs, steps, again, find)
        forget()
        tables = [Tuner(card).tune(kernel, shape, configs, jobs) for (kernel, shape), jobs in compiled.items()]
        found += [Tuning((), notes), *tables]
    return found


def _compile(
    card: Card, problems: Sequence[tuple[Kernel, Shape]], configs: Sequence[Config] | None, steps: Counter
) -> Compiling:
    """Compile the configs of all problems, by kernel. The processes of the cluster then find the results in the cache."""
    found: Compiling = {}
    for kernel in dict.fromkeys(kernel for kernel, _ in problems):
        mine = {
            shape: [Job(shape, config, card.spec.compute_capability) for config in configs_of(kernel, shape, configs)]
            for other, shape in problems
            if other is kernel
        }
        compiled = compile_configs(kernel, [job for jobs in mine.values() for job in jobs], steps)
        found |= {(kernel, shape): {job: compiled[job] for job in jobs} for shape, jobs in mine.items()}
    return found


def _time(
    cluster: Cluster, ranks: list[int], card: Card, compiled: Compiling, configs: Sequence[Config] | None, steps: Counter,
    again: bool, find: Callable[[], Tuner | None],
) -> tuple[str, ...]:  # fmt: skip
    """Time the configs without a stored timing on the ranks with one type of GPU, and return notes."""
    local = Tuner(card, torch.device("cuda"), again=again)  # only finds stored timings
    parts: list[Part] = []
    for kernel, shape in compiled:
        kept = local.kept(kernel, shape)
        missing = [config for config in configs_of(kernel, shape, configs) if words(config) not in kept]
        count = -(-len(missing) // PART)
        chosen = (tuple(missing[first::count]) for first in range(count))  # a mixture, since neighbors are about as fast
        about = find, origin(kernel), shape.key
        parts += [Part(*about, some, again, str(cache_folder())) for some in chosen]
    done, total = 0, sum(len(part.configs) for part in parts)
    notes: dict[str, None] = {}
    steps(done, total, "")
    for number, said in cluster.spread(tune_part, parts, ranks):
        done += len(parts[number].configs)
        notes |= dict.fromkeys(said)
        steps(done, total, f"timing {parts[number].kernel.kernel} {parts[number].shape}")
    return tuple(notes)
