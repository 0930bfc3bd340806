"""Choose the config that a kernel is launched with, from stored timings. These steps are tried until one finds a config:

1. "this device": the fastest correct config that was timed on this model of GPU, in a decode step or else alone;
2. "near shape": the fastest one that was timed on it at other lengths (`Kernel.lengths`), the nearest lengths first;
3. "earlier code": as 1 and 2, timed with earlier code of the kernel;
4. "same capability": as 1 and 2, for another GPU of the same compute capability, if the config fits this GPU's limits;
5. "model": the first config within 5 % of the best modelled time, of those that `tune.explore` has compiled;
6. "default": the first config of the kernel's space, which fits every GPU.

Every choice is a config of the kernel's space. A lookup compiles nothing and runs nothing. Models look up before every launch,
so answers are cached.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from toolkit.core.errors import DeviceError, ToolkitError
from toolkit.core.units import seconds_text
from toolkit.kernels.base import Config, Kernel, Shape
from toolkit.kernels.registry import configs_of, find_kernel, find_shape, space_of
from toolkit.tune.cards import Card, find_card
from toolkit.tune.compiling import Job, Kept
from toolkit.tune.estimate import estimate
from toolkit.tune.identity import fingerprint
from toolkit.tune.limits import WARP, Compiled, LaunchUse, obstacle
from toolkit.tune.store import DeviceFacts, Record, Tuned, from_words, kept_gpus, read_tuned

SWITCHED = 0.01  # distance of shapes that differ in a bool of `Kernel.lengths`: less than any ratio of lengths
UNSURE = 0.05  # modelled times that differ by less count as equal


@dataclass(frozen=True)
class Choice:
    """The result of a lookup: the config, the step that found it, and the reason in words."""

    kernel: str
    shape: str
    gpu: str
    config: Config
    step: str
    note: str


_when_forgotten: list[Callable[[], None]] = []
_chosen: dict[tuple[Kernel, Shape, str], Choice] = {}  # by kernel, shape and the GPU's key
_at_once: dict[tuple[Kernel, Shape, Any], Choice] = {}  # by the argument `device`, if it always means the same GPU
_preferred: dict[tuple[Kernel, Shape], Config] = {}


def choose(kernel: Kernel | str, shape: Shape | str, device: Card | torch.device | str | int = "auto") -> Choice:
    """Return the config to launch `kernel` with on `device` (see `find_card`). Cached until timings are added.

    `kernel` is a Kernel or its name, `shape` a Shape, its key or its name. Raises UnknownNameError for an unknown name.
    """
    try:
        known = _at_once.get((kernel, shape, device))  # type: ignore[arg-type]
    except TypeError:  # a list, for example, which no dict has: the functions below name it
        known = None
    if known is not None:
        return known
    kernel = find_kernel(kernel)
    shape = find_shape(kernel, shape)
    card = find_card(device)
    place = (kernel, shape, card.key if card is not None else "cpu")
    found = _chosen.get(place)
    if found is None:
        found = _chosen[place] = _look(kernel, shape, card)
    if isinstance(device, torch.device) and (device.type == "cpu" or (device.type == "cuda" and device.index is not None)):
        _at_once[kernel, shape, device] = found
    return found


def choices() -> list[Choice]:
    """Return the choices made in this process since timings were last added."""
    return list(_chosen.values())


def looked_up(card: Card) -> dict[tuple[Kernel, Shape], Config]:
    """Return the configs chosen for `card` in this process since timings were last added, in the order of the first lookups."""
    return {(kernel, shape): one.config for (kernel, shape, key), one in _chosen.items() if key == card.key}


@contextmanager
def preferred(configs: Mapping[tuple[Kernel, Shape], Config]) -> Iterator[None]:
    """Choose `configs` in this block, whatever the timings say: to try them."""
    before = dict(_preferred)
    _preferred.update(configs)
    forget()
    try:
        yield
    finally:
        _preferred.clear()
        _preferred.update(before)
        forget()


def forget() -> None:
    """Clear the caches. Called when timings were added."""
    _chosen.clear()
    _at_once.clear()
    _kept.cache_clear()
    _kept_correct.cache_clear()
    for callback in _when_forgotten:
        callback()


def when_forgotten(callback: Callable[[], None]) -> None:
    """Call `callback` each time the caches were cleared: launches that were prepared with their configs are out of date."""
    _when_forgotten.append(callback)


def _look(kernel: Kernel, shape: Shape, card: Card | None) -> Choice:
    if card is None:
        default, note = configs_of(kernel, shape)[0], "the device is not a GPU"
        return Choice(kernel.name, shape.key, "cpu", default, "default", note)
    if (kernel, shape) in _preferred:
        return Choice(kernel.name, shape.key, card.key, _preferred[kernel, shape], "tried", "it is being tried")
    step, config, note = next(_steps(kernel, shape, card))
    return Choice(kernel.name, shape.key, card.key, config, step, note)


def _steps(kernel: Kernel, shape: Shape, card: Card) -> Iterator[tuple[str, Config, str]]:
    """Yield (step, config, reason) for each step that finds a config, the best step first."""
    here = _nearest(kernel, shape, _kept_correct(kernel, card.key, card.facts))
    if here:
        best, count = here[0], sum(one.shape == here[0].shape for one in here)
        where = f" in {best.record.program}" if best.record.program else ""
        what = f"{seconds_text(best.us / 1e6)}, the fastest{where} of {count} timed with {best.record.versions}"
        yield (
            ("near shape", best.config, f"{what} at {_differing(best, shape)}")
            if best.far
            else ("this device", best.config, what)
        )
    old = _nearest(kernel, shape, _kept_correct(kernel, card.key, card.facts, earlier=True))
    for best in filter(partial(_fits, kernel, card), old):
        where = f" at {_differing(best, shape)}" if best.far else ""
        yield "earlier code", best.config, f"the fastest{where} with earlier code of the kernel, on {best.record.when[:10]}"
    for best in _of_same_capability(kernel, shape, card):
        where = f" at {_differing(best, shape)}" if best.far else ""
        note = f"the fastest on {best.gpu}{where} ({seconds_text(best.us / 1e6)}), which has the same compute capability"
        yield "same capability", best.config, note
    if (modelled := _modelled(kernel, shape, card)) is not None:
        yield "model", *modelled
    note = f"no config was timed or compiled for this shape on {card.spec.name}; run tk.tune.warm"
    yield "default", configs_of(kernel, shape)[0], note


@dataclass(frozen=True)
class Timed:
    """A correct config with a measured time, and the GPU and shape of the measurement."""

    config: Config
    us: float
    far: float  # distance from the requested shape: 0 if it is the same, 1 for a length twice or half as long
    shape: str
    gpu: str
    record: Record


def timed(kernel: Kernel, shape: Shape, kept: Tuned | None, earlier: bool = False) -> list[Timed]:
    """Return the stored correct configs of the kernel's current code for `shape` or other lengths: nearest, then fastest.

    With `earlier`, return those that were timed with other code of the kernel instead. Their times no longer hold.

    Those that were timed in a program (`tune.in_step`) precede those that were only timed alone, the fastest program first.
    Configs outside of the kernel's space for `shape` are left out, since its buffers may be too small for them.
    """
    return _nearest(kernel, shape, _correct(kernel, kept, earlier))


_Rows = dict[str, tuple[Shape, list[tuple[Config, Record]]]]  # by the key of their shape
_Correct = dict[tuple[Any, ...], tuple[str, _Rows]]  # the name of the GPU and rows, by what shapes of other lengths share


def _correct(kernel: Kernel, kept: Tuned | None, earlier: bool) -> _Correct:
    """Return the correct rows of the kernel; see `timed`."""
    found: _Correct = {}
    if kept is None:
        return found
    code = fingerprint(kernel)
    for (name, key, words), row in kept.rows.items():
        if name == kernel.name and row.verdict == "ok" and row.us is not None and (row.kernel != code) == earlier:
            sizes = _sizes(kernel, key)
            if sizes is not None:
                _, rows = found.setdefault(_fixed(kernel, sizes), (kept.device.name, {}))
                rows.setdefault(key, (sizes, []))[1].append((_config(words), row))
    return found


def _nearest(kernel: Kernel, shape: Shape, correct: _Correct) -> list[Timed]:
    """Return those of the rows that suit `shape`, the best first."""
    gpu, rows = correct.get(_fixed(kernel, shape), ("", {}))
    space, found = set(space_of(kernel, shape)) if rows else set(), []
    for key, (other, configs) in rows.items():
        far = _apart(kernel, shape, other)
        found += [Timed(one, row.us or 0.0, far, key, gpu, row) for one, row in configs if one.prefer(-1) in space]
    return sorted((one for one in found if one.far < math.inf), key=_order)


def _fixed(kernel: Kernel, shape: Shape) -> tuple[Any, ...]:
    """Return the fields that a shape must share with another one for the timings of one to help the other."""
    return tuple(getattr(shape, field.name) for field in dataclasses.fields(shape) if field.name not in kernel.lengths)


def _order(one: Timed) -> tuple[float, str, float, float]:
    """Return the sort key of the best config: nearest, then fastest in a program, then fastest alone."""
    return one.far, one.shape, one.record.program_ms or math.inf, one.us


def distance(kernel: Kernel, shape: Shape, key: str) -> float:
    """Return the sum of |log2(ratio)| over `kernel.lengths`; infinity for a shape that differs in anything else.

    A bool among the lengths counts less than any ratio.
    """
    other = _sizes(kernel, key)
    return math.inf if other is None or _fixed(kernel, other) != _fixed(kernel, shape) else _apart(kernel, shape, other)


def _apart(kernel: Kernel, shape: Shape, other: Shape) -> float:
    """Return the distance of shapes that differ only in `kernel.lengths`."""
    far = 0.0
    for name in kernel.lengths:
        a, b = getattr(shape, name), getattr(other, name)
        if a != b and isinstance(a, bool):
            far += SWITCHED
        elif a != b:
            far += abs(math.log2(a) - math.log2(b)) if a > 0 and b > 0 else math.inf
    return far


@lru_cache(maxsize=4096)
def _sizes(kernel: Kernel, key: str) -> Shape | None:
    """Return the shape with this key; None if it is a key of an older version of the kernel."""
    try:
        return kernel.shape_type.from_key(key)
    except (ValueError, ToolkitError):
        return None


_config = lru_cache(maxsize=4096)(from_words)


def _differing(found: Timed, shape: Shape) -> str:
    """Return the sizes that differ: "slots=32768 (asked: slots=8192)"."""
    other = shape.from_key(found.shape).key  # in the usual order, whatever the file has
    pairs = [(a, b) for a, b in zip(other.split(), shape.key.split(), strict=True) if a != b]
    return f"{' '.join(a for a, _ in pairs)} (asked: {' '.join(b for _, b in pairs)})"


@lru_cache(maxsize=64)
def _kept(gpu: str, facts: DeviceFacts | None = None) -> Tuned | None:
    """Return the stored timings of a GPU. Cached, because models look up dozens of shapes."""
    return read_tuned(gpu, facts)


@lru_cache(maxsize=1024)
def _kept_correct(kernel: Kernel, gpu: str, facts: DeviceFacts | None = None, earlier: bool = False) -> _Correct:
    """Return `_correct` of the stored timings of a GPU. Cached, because a prompt of a new length looks up a dozen shapes."""
    return _correct(kernel, _kept(gpu, facts), earlier)


def _of_same_capability(kernel: Kernel, shape: Shape, card: Card) -> Iterator[Timed]:
    """Yield configs timed on other GPUs of the same compute capability that fit this GPU's limits, the best first."""
    found = []
    for gpu in kept_gpus():
        kept = _kept(gpu) if gpu != card.key else None
        if kept is not None and kept.device.compute_capability == card.facts.compute_capability:
            found += _nearest(kernel, shape, _kept_correct(kernel, gpu))
    yield from filter(partial(_fits, kernel, card), sorted(found, key=_order))


def _fits(kernel: Kernel, card: Card, one: Timed) -> bool:
    """Return whether the GPU can run the config, by the resources that it needed where it was timed."""
    row = one.record
    use = LaunchUse(kernel.name, (1,), one.config.warps * WARP, row.registers, row.spill_bytes, row.shared_bytes)
    return not obstacle(Compiled((use,)), card.spec)


def _modelled(kernel: Kernel, shape: Shape, card: Card) -> tuple[Config, str] | None:
    try:
        kept = Kept(kernel).rows
    except DeviceError:  # no Triton: nothing was compiled
        return None
    jobs = {config: Job(shape, config, card.spec.compute_capability).key for config in configs_of(kernel, shape)}
    fitting = {config: kept[key] for config, key in jobs.items() if key in kept and not obstacle(kept[key], card.spec)}
    times = {config: estimate(kernel, shape, config, compiled, card.spec).ns for config, compiled in fitting.items()}
    if not times:
        return None
    least = min(times.values())
    best = next(config for config, ns in times.items() if ns <= least * (1 + UNSURE))  # spaces list preferred configs first
    time = seconds_text(times[best] / 1e9)
    return best, f"{time} modelled, of {len(times)} configs that fit; none was timed on {card.spec.name}"
