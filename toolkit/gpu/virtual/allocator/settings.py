"""The settings of PYTORCH_CUDA_ALLOC_CONF: how CUDA's caching allocator rounds, splits, caches and expands.

`Settings.parse` accepts the same text as the environment variable. The rules are those of c10/core/AllocatorConfig.cpp and
c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass

from toolkit.core.errors import DeviceError, ToolkitError, unknown_name
from toolkit.core.units import MiB

ROUND_BYTES = 512
LEAST_SPLIT_MB = 20  # max_split_size_mb must be larger: a segment of 20 MiB can always be split
ABOVE = 0  # in roundup_power2_divisions: all sizes above the largest one listed (">" in the text)
_INTERVALS = 16  # powers of two from 1 MiB to 64 GiB
_ASKED = "settings of the allocator"
# Settings that PyTorch knows and that do not change how device memory is allocated.
_NO_EFFECT = {
    "pinned_use_cuda_host_register", "pinned_num_register_threads", "pinned_use_background_threads",
    "pinned_reserve_segment_size_mb", "release_lock_on_cudamalloc", "release_lock_on_hipmalloc",
    "pinned_use_hip_host_register", "graph_capture_record_stream_reuse", "pinned_max_round_threshold_mb",
    "pinned_free_catch_all", "pinned_max_cached_size_mb", "throw_on_cudamalloc_oom",
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Settings of the allocator, with PyTorch's defaults. Raises DeviceError if a value is invalid.

    `expandable_segments`: one range of addresses per stream and size class, which grows and shrinks in place.
    `max_split_size_mb`: blocks of at least this size are not split for smaller requests. `roundup_power2_divisions`: round
    sizes up to one of this many steps between powers of two; a number, or (MiB, steps) pairs with `ABOVE` for larger sizes.
    `garbage_collection_threshold`: above this fraction of the limit that `set_per_process_memory_fraction` sets, release
    the cached blocks that have been unused longest before reserving more. `max_non_split_rounding_mb`: a block that is not
    split may exceed the request by less than this. `per_process_memory_fraction`: the part of the memory that may be reserved.
    """

    expandable_segments: bool = False
    max_split_size_mb: int | None = None
    roundup_power2_divisions: int | tuple[tuple[int, int], ...] = 0
    garbage_collection_threshold: float = 0.0
    max_non_split_rounding_mb: int = 20
    per_process_memory_fraction: float = 1.0

    def __post_init__(self) -> None:
        if self.max_split_size_mb is not None and self.max_split_size_mb <= LEAST_SPLIT_MB:
            raise DeviceError(f"max_split_size_mb:{self.max_split_size_mb}", "too small", f"Use more than {LEAST_SPLIT_MB}")
        if not 0 <= self.garbage_collection_threshold < 1:
            asked = f"garbage_collection_threshold:{self.garbage_collection_threshold}"
            raise DeviceError(asked, "not a fraction of the limit", "Use a value from 0 (off) to less than 1")
        if not 0 < self.per_process_memory_fraction <= 1:
            asked = f"per_process_memory_fraction:{self.per_process_memory_fraction}"
            raise DeviceError(asked, "not a fraction of the GPU's memory", "Use a value above 0, up to 1")
        for megabytes, steps in self._pairs():
            if steps < 0 or steps & (steps - 1) or megabytes & (megabytes - 1):
                asked = f"roundup_power2_divisions of {steps} steps" + (f" for {megabytes} MiB" if megabytes else "")
                raise DeviceError(asked, "not a power of two", "Use 1, 2, 4, 8, ...")

    @classmethod
    def parse(cls, text: str) -> Settings:
        """Return the settings in `text`, for example "expandable_segments:True,max_split_size_mb:128".

        Raises DeviceError for an invalid value, and UnknownNameError for an unknown setting.
        """
        found: dict[str, object] = {}
        for part in re.split(r",(?![^\[]*\])", text):
            name, _, value = part.strip().partition(":")
            if not name or name in _NO_EFFECT:
                continue
            if name == "backend":
                if value.strip() != "native":
                    raise DeviceError(f"{_ASKED}: backend:{value}", "only backend:native is supported", "Leave it out")
            elif name in _PARSERS:
                found[name] = _PARSERS[name](name, value.strip())
            else:
                raise unknown_name("allocator setting", name, [*_PARSERS, "backend"])
        return cls(**found)  # type: ignore[arg-type]  # each parser returns its field's type

    @classmethod
    def of_environment(cls) -> Settings:
        """Return the settings of PYTORCH_ALLOC_CONF, else of PYTORCH_CUDA_ALLOC_CONF.

        Warns and returns the defaults if one of them is wrong, or is not modelled: CUDA may know it.
        """
        text = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
        try:
            return cls.parse(text)
        except ToolkitError as error:
            warnings.warn(f"the virtual GPU uses the allocator's default settings, not {text!r}: {error}", stacklevel=2)
            return cls()

    def __str__(self) -> str:
        """Return the text for PYTORCH_CUDA_ALLOC_CONF, or "default" if all settings have their defaults."""
        parts = ["expandable_segments:True"] if self.expandable_segments else []
        if self.max_split_size_mb is not None:
            parts.append(f"max_split_size_mb:{self.max_split_size_mb}")
        steps = self.roundup_power2_divisions
        if isinstance(steps, tuple):
            named = ",".join(f"{'>' if size == ABOVE else size}:{n}" for size, n in steps)
            parts.append(f"roundup_power2_divisions:[{named}]")
        elif steps:
            parts.append(f"roundup_power2_divisions:{steps}")
        if self.garbage_collection_threshold:
            parts.append(f"garbage_collection_threshold:{self.garbage_collection_threshold}")
        if self.max_non_split_rounding_mb != Settings.max_non_split_rounding_mb:
            parts.append(f"max_non_split_rounding_mb:{self.max_non_split_rounding_mb}")
        if self.per_process_memory_fraction != 1:
            parts.append(f"per_process_memory_fraction:{self.per_process_memory_fraction}")
        return ",".join(parts) or "default"

    @property
    def max_split_bytes(self) -> int | None:
        """`max_split_size_mb` in bytes, or None."""
        return None if self.max_split_size_mb is None else self.max_split_size_mb * MiB

    def steps(self) -> tuple[int, ...] | None:
        """Return the number of steps for each power of two from 1 MiB on; None if sizes are only rounded to 512 bytes."""
        given = self.roundup_power2_divisions
        table = [given if isinstance(given, int) else 0] * _INTERVALS
        last = -1
        for megabytes, steps in () if isinstance(given, int) else given:
            if megabytes == ABOVE:
                table[last + 1 :] = [steps] * (_INTERVALS - last - 1)
                continue
            at = min(megabytes.bit_length() - 1, _INTERVALS - 1)
            if last < 0:
                table[:at] = [steps] * at
            table[at], last = steps, at
        return tuple(table) if max(table) > 1 else None

    def _pairs(self) -> tuple[tuple[int, int], ...]:
        steps = self.roundup_power2_divisions
        return ((ABOVE, steps),) if isinstance(steps, int) else steps


def rounded(n_bytes: int, steps: tuple[int, ...] | None = None) -> int:
    """Return `n_bytes` rounded up as the allocator does: to a multiple of 512, or to a step between two powers of two."""
    if steps is not None and n_bytes:
        top = n_bytes.bit_length() - 1
        divisions = steps[min(max(top - 20, 0), _INTERVALS - 1)]
        if divisions > 1 and n_bytes > ROUND_BYTES * divisions:
            step = 1 << top >> divisions.bit_length() - 1
            return -(-n_bytes // step) * step
    return -(-n_bytes // ROUND_BYTES) * ROUND_BYTES


def _flag(name: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise DeviceError(f"{_ASKED}: {name}:{value}", "neither True nor False", f"Use {name}:True")
    return value == "True"


def _number(name: str, value: str) -> int:
    if not value.isdecimal():
        raise DeviceError(f"{_ASKED}: {name}:{value}", "not a whole number", f"Use {name}:128")
    return int(value)


def _share(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError as error:
        raise DeviceError(f"{_ASKED}: {name}:{value}", "not a number", f"Use {name}:0.8") from error


def _divisions(name: str, value: str) -> int | tuple[tuple[int, int], ...]:
    if not value.startswith("["):
        return _number(name, value)
    pairs = [part.strip().split(":") for part in value.strip("[]").split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise DeviceError(f"{_ASKED}: {name}:{value}", "not a list of size:steps", f"Use {name}:[256:1,512:2,>:4]")
    return tuple((ABOVE if size.strip() == ">" else _number(name, size.strip()), _number(name, n.strip())) for size, n in pairs)


_PARSERS = {
    "expandable_segments": _flag, "max_split_size_mb": _number, "roundup_power2_divisions": _divisions,
    "garbage_collection_threshold": _share, "max_non_split_rounding_mb": _number, "per_process_memory_fraction": _share,
}  # fmt: skip
