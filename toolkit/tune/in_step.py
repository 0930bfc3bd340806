"""Tune the configs of kernels in the program that launches them, such as a decode step.

Launches overlap on Hopper and later GPUs, and they share caches and memory, so the time of a kernel alone doesn't show what it
costs a program. On an H200, the config of attention that was 2 % faster alone made a decode step of Qwen3-8B 7 % slower. So the
configs that are fastest alone are tried in the program, one kernel after the other, and the program's time decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from toolkit.kernels.base import Config, Kernel, Shape
from toolkit.tune import lookup, warm
from toolkit.tune.cards import Card
from toolkit.tune.store import add_rows, read_tuned, words

NEAR = 0.10  # configs that take longer than the fastest by more than this share, alone, are not tried,
NEAR_US = 3.0  # or by more than this in addition: short kernels are limited by what overlaps with them
MOST = 16  # configs of a kernel that are tried
GAIN = 0.001  # a config must shorten the program by this share: timings vary by about half of it


@dataclass(frozen=True)
class Trial:
    """The time of the program with one config of a kernel, and with the best of the kernel's configs before it."""

    kernel: str
    shape: str
    config: Config
    ms: float
    before_ms: float
    better: bool


def tune_in(
    program: str, time_ms: Callable[[], float], card: Card, kernels: Sequence[str] = (), most: int = MOST
) -> Iterator[Trial]:
    """Yield a trial for each config tried, and store the program's times once a kernel's configs have been tried.

    `time_ms` runs the program and returns its time; it looks configs up again in each call (`toolkit.tune.lookup.choose`).
    `program` is its name in the stored timings. `kernels` are the names of those to tune, by default all. From then on, lookups
    prefer the config with which the program was fastest. Kernels without stored timings are left out: see `tune.warm`.
    """
    best: dict[tuple[Kernel, Shape], Config] = {}

    def timed(place: tuple[Kernel, Shape], config: Config) -> float:
        with lookup.preferred({**best, place: config}):
            return time_ms()

    def tried(place: tuple[Kernel, Shape], config: Config, others: Sequence[Config]) -> Iterator[Trial]:
        """Yield a trial for each of `others`. The last one that is better becomes the best config of the place."""
        for other in others:
            now, ms = times[config], timed(place, other)
            if ms < now * (1 - GAIN):  # both again: a time may be too short or too long by chance
                now, ms = min(now, timed(place, config)), max(ms, timed(place, other))
            better = ms < now * (1 - GAIN)
            times[config], times[other] = now, ms
            yield Trial(place[0].name, place[1].key, other, ms, now, better)
            if better:
                config = other
        best[place] = config

    lookup.forget()
    time_ms()  # compiles the kernels
    for place, config in lookup.looked_up(card).items():
        rows = _candidates(*place, card, config, most)
        if not rows or len(rows) + len(place[0].carveouts) < 2 or (kernels and place[0].name not in kernels):
            continue
        times = {config: timed(place, config)}
        yield from tried(place, config, [row.config for row in rows if row.config != config])
        shares = _carveouts(place[0], rows[0].shape, best[place], card)
        yield from tried(place, best[place], [one for one in shares if one not in times])
        # A share that is no better must not be chosen for a time that is shorter by chance: it may hold for other shapes, too.
        kept = {one: ms for one, ms in times.items() if one.carveout < 0 or one == best[place]}
        _store(card, program, place[0], rows[0].shape, kept)
    lookup.forget()


def _carveouts(kernel: Kernel, shape: str, config: Config, card: Card) -> list[Config]:
    """Return the config with other shares of shared memory, once they are timed alone; without those that aren't correct."""
    if not kernel.carveouts:
        return []
    others = [config.prefer(share) for share in (-1, *kernel.carveouts) if share != config.carveout]
    found = warm([(kernel, kernel.shape_type.from_key(shape))], card, others, progress=False)
    return [row.config for row in found.rows if row.verdict == "ok"]


def _candidates(kernel: Kernel, shape: Shape, card: Card, config: Config, most: int) -> list[lookup.Timed]:
    """Return the configs to try, of those timed at the nearest lengths: the present one, and others about as fast alone.

    Others have no share of shared memory: `_carveouts` has those of the best one.
    """
    rows = lookup.timed(kernel, shape, read_tuned(card.key, card.facts))
    tried = [row for row in rows if row.shape == rows[0].shape and (row.config.carveout < 0 or row.config == config)]
    near = sorted(tried, key=lambda row: row.us)
    fast = [row for row in near if row.us <= (1 + NEAR) * near[0].us + NEAR_US][:most]
    return fast + [row for row in near if row.config == config and row not in fast]


def _store(card: Card, program: str, kernel: Kernel, shape: str, times: dict[Config, float]) -> None:
    """Store the times of the configs tried. The times of all others are removed: those in other programs don't compare."""
    kept = read_tuned(card.key, card.facts)
    assert kept is not None
    when, stored = datetime.now(UTC).isoformat(timespec="seconds"), {}
    tried = {words(config): round(ms, 4) for config, ms in times.items()}
    for config, row in kept.configs(kernel.name, shape).items():
        if config in tried:
            stored[kernel.name, shape, config] = replace(row, program=program, program_ms=tried[config], when=when)
        elif row.program:
            stored[kernel.name, shape, config] = replace(row, program="", program_ms=None, when=when)
    add_rows(card.key, card.facts, stored)
