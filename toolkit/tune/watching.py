"""Watch `@triton.autotune` kernels of any code: the chosen config for each key, its timings, and cache hits.

Triton keeps its choices by key (the arguments named in `key`, and the dtypes), in memory and optionally on disk. `watch`
records every call of every autotuned kernel in the process while its block runs, and changes none.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolkit.core.blocks import block
from toolkit.core.errors import DeviceError
from toolkit.core.units import seconds_text

if TYPE_CHECKING:
    import pandas as pd


@dataclass
class Watched:
    """One key of one autotuned kernel: the chosen config and the timings in ms (none if it had been tuned before)."""

    kernel: str
    key: dict[str, Any]  # argument (or "dtype of ...") to value
    choice: str = ""
    timings_ms: dict[str, float] = field(default_factory=dict)  # infinity: the config failed
    tuned: int = 0  # calls that timed every config
    hits: int = 0  # calls that found a choice in memory, or had one config to choose from
    from_disk: int = 0  # calls that read a choice from Triton's file
    tuning_s: float = 0.0
    error: str = ""  # the last exception of a call


class Watching:
    """The autotuned kernels that `tk.tune.watch` saw: iterate over one entry per kernel and key, by their first calls."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Any, ...], Watched] = {}
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Watched]:
        return iter(list(self._seen.values()))

    def __len__(self) -> int:
        return len(self._seen)

    def at(self, kernel: str, key: dict[str, Any]) -> Watched:
        """Return the entry of a kernel and key, which is created if it is new."""
        with self._lock:
            return self._seen.setdefault((kernel, *((name, repr(value)) for name, value in key.items())), Watched(kernel, key))

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per kernel and key; `timings()` has one row per config."""
        import pandas as pd

        names = ("kernel", "key", "choice", "configs", "best_ms", "tuned", "hits", "from_disk", "tuning_s", "error")
        rows = [
            (one.kernel, _key_text(one.key), one.choice, len(one.timings_ms), min(one.timings_ms.values(), default=None),
             one.tuned, one.hits, one.from_disk, one.tuning_s, one.error)
            for one in self
        ]  # fmt: skip
        return pd.DataFrame(rows, columns=list(names))

    def timings(self) -> pd.DataFrame:
        """Return one row per kernel, key and config: its time, and whether it was chosen."""
        import pandas as pd

        rows = [
            (one.kernel, _key_text(one.key), config, ms, config == one.choice)
            for one in self
            for config, ms in sorted(one.timings_ms.items(), key=lambda item: item[1])
        ]
        return pd.DataFrame(rows, columns=["kernel", "key", "config", "ms", "chosen"])

    def __repr__(self) -> str:
        return "\n".join(_line(one) for one in self) or "no @triton.autotune kernel has run"


_open: list[Watching] = []
_lock = threading.Lock()


@block("with tk.tune.watch() as seen:")
def watch() -> Iterator[Watching]:
    """Record the `@triton.autotune` kernels that are called in a `with` block, in any thread.

    Raises DeviceError if Triton is not installed.
    """
    try:
        from triton.runtime.autotuner import Autotuner
    except ImportError as error:
        raise DeviceError("watching autotuned kernels", "Triton isn't installed", "On Linux: pip install triton") from error
    seen = Watching()
    with _lock:
        _open.append(seen)
        if len(_open) == 1:
            Autotuner.run = _recording(Autotuner.run)
    try:
        yield seen
    finally:
        with _lock:
            _open.remove(seen)
            if not _open:
                Autotuner.run = Autotuner.run.__wrapped__


def _recording(original: Any) -> Any:
    """Wrap `Autotuner.run` to add each call to every open watch."""

    @functools.wraps(original)
    def run(self, *args, **kwargs):
        key, values = _key(self, args, kwargs)
        known, before = values in self.cache, _timed(self)
        error = ""
        try:
            return original(self, *args, **kwargs)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"[:300]
            raise
        finally:
            timed_now, told = (after is not earlier for after, earlier in zip(_timed(self), before, strict=True))
            for seen in list(_open):
                _note(seen.at(self.base_fn.__name__, key), self, self.cache.get(values), known, timed_now, told, error)

    return run


def _timed(tuner: Any) -> tuple[Any, Any]:
    """Return the duration of the kernel's last tuning and its timings. Each tuning replaces both, each file the timings."""
    return tuner.__dict__.get("bench_time"), tuner.__dict__.get("configs_timings")


def _key(tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Return Triton's tuning key with names, and as it is in Triton's cache, where a name in `key` may occur twice."""
    if len(tuner.configs) < 2:
        return {}, ()
    given = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
    given = {name: value for name, value in given.items() if name in tuner.arg_names}
    dtypes = {f"dtype of {name}": str(value.dtype) for name, value in given.items() if hasattr(value, "dtype")}
    named = [(name, given[name]) for name in tuner.keys if name in given]
    return {**dict(named), **dtypes}, (*(value for _, value in named), *dtypes.values())


def _note(entry: Watched, tuner: Any, chosen: Any, known: bool, timed_now: bool, told: bool, error: str) -> None:
    """Add one call to its entry. `told`: it brought timings, which may be of an earlier process."""
    entry.error = error or entry.error
    if len(tuner.configs) < 2:
        chosen, known = tuner.configs[0], True
    entry.choice = str(chosen) if chosen is not None else entry.choice
    if error and chosen is None:
        return
    known = known or not (timed_now or told)  # one config was left after pruning, which isn't timed
    entry.hits += known
    if known:
        return
    entry.tuned += timed_now
    entry.from_disk += not timed_now
    entry.tuning_s += tuner.bench_time if timed_now else 0.0
    timings = tuner.configs_timings.items() if told else ()
    entry.timings_ms = {str(config): float(ms[0] if isinstance(ms, list | tuple) else ms) for config, ms in timings}


def _key_text(key: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" if not name.startswith("dtype of") else f"{name} {value}" for name, value in key.items())


def _line(one: Watched) -> str:
    best = min(one.timings_ms.values(), default=None)
    timed = f", {seconds_text(best / 1e3)}, the fastest of {len(one.timings_ms)} configs" if best is not None else ""
    how = (
        f"tuned in {seconds_text(one.tuning_s)}"
        if one.tuned
        else "read from Triton's file"
        if one.from_disk
        else "not tuned here"
    )
    failed = f", {one.error}" if one.error else ""
    return f"{one.kernel}({_key_text(one.key)}): {one.choice}{timed}; {how}, reused {one.hits} times{failed}"
