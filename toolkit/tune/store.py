"""Read and write the stored timings of a GPU: the file `tuned/<gpu>.json` with one row per config.

Two folders have such files: the package's (never written to), and the user's (`$TOOLKIT_CACHE/tuned`, by default in
`~/.cache/decode-toolkit`). Both are read; of two rows for a config the newer one counts. Each row has the kernel's fingerprint
and the versions of Triton and PyTorch. Files are written atomically under a lock, so that rows written by another process are
kept. A file that is damaged, or of another GPU, is renamed with a warning. This module needs neither Triton nor a GPU.
"""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from filelock import FileLock
from msgspec import Meta

from toolkit.core.errors import FormatError, ToolkitError
from toolkit.core.files import at_home, read_regular, replace_text
from toolkit.core.schema import convert, parse_json
from toolkit.kernels.base import Config

FORMAT = "decode-toolkit tuned 1"
SHIPPED = Path(__file__).parent / "tuned"
LARGEST = 64 << 20  # bytes of a file; an H200's has 0.4 MB
_Figure = Annotated[float, Meta(ge=-1, le=1e18)]
_Count = Annotated[int, Meta(ge=-1, le=1 << 62)]


class TunedFileWarning(UserWarning):
    """A file of timings could not be used; the message says what was done with it."""


@dataclass(frozen=True)
class Record:
    """The outcome of one config on one GPU.

    `verdict`: "ok" (correct and timed), "slow" (correct; timed once only), "wrong" (disagrees with the reference),
    "failed" (compiling or launching failed), "excluded" (exceeds the GPU's limits). `reason` says why in words.
    """

    verdict: Literal["ok", "slow", "wrong", "failed", "excluded"]
    reason: str = ""
    us: _Figure | None = None  # median time of the operation
    spread_us: _Figure | None = None  # interquartile range
    program: str = ""  # the program in which it was timed, too (see in_step.py)
    program_ms: _Figure | None = None  # the whole program's time with this config
    cold: bool = True  # inputs rotated through more memory than the L2 holds
    cosine: _Figure | None = None  # the worst result's, against the reference
    max_error: _Figure | None = None  # the worst result's, relative to the reference's largest value
    shared_bytes: _Count = 0
    registers: _Count = 0
    spill_bytes: _Count = 0
    kernel: str = ""  # fingerprint
    versions: str = ""  # "triton 3.6.0, torch 2.11.0"
    when: str = ""  # UTC, ISO 8601


@dataclass(frozen=True)
class DeviceFacts:
    """The GPU of the timings; clocks are its highest allowed ones in MHz, 0 if unknown."""

    name: str
    compute_capability: str
    sms: _Count
    memory_bytes: _Count
    sm_clock_mhz: _Count = 0
    memory_clock_mhz: _Count = 0

    @property
    def card(self) -> str:
        """The model for messages: "a NVIDIA H200 (compute capability 9.0) with 132 SMs"."""
        return f"a {self.name} (compute capability {self.compute_capability}) with {self.sms} SMs"

    def same_card(self, other: DeviceFacts) -> bool:
        """Return whether both are the same model with the same SM count. Clocks and visible memory may differ."""
        return (self.name, self.compute_capability, self.sms) == (other.name, other.compute_capability, other.sms)


class _File(TypedDict):
    format: Literal["decode-toolkit tuned 1"]
    device: DeviceFacts
    kernels: dict[str, dict[str, dict[str, Record]]]


Rows = dict[tuple[str, str, str], Record]  # by kernel, shape and config, as text


@dataclass
class Tuned:
    """The content of one GPU's file: the GPU and its rows."""

    device: DeviceFacts
    rows: Rows = field(default_factory=dict)

    def configs(self, kernel: str, shape: str) -> dict[str, Record]:
        """Return the rows of one problem by config."""
        return {config: row for (name, key, config), row in self.rows.items() if (name, key) == (kernel, shape)}

    def merge(self, other: Tuned) -> None:
        """Add the rows of `other` that are new, or newer than the existing ones."""
        for place, row in other.rows.items():
            if place not in self.rows or row.when >= self.rows[place].when:
                self.rows[place] = row

    def to_text(self) -> str:
        """Return JSON with one line per config, which is readable and suits line-based diffs."""
        kernels: dict[str, dict[str, dict[str, Record]]] = {}
        for (kernel, shape, config), row in sorted(self.rows.items()):
            kernels.setdefault(kernel, {}).setdefault(shape, {})[config] = row
        lines = [f'{{"format": {json.dumps(FORMAT)},', f' "device": {json.dumps(dataclasses.asdict(self.device))},']
        lines.append(' "kernels": {')
        for last_kernel, (kernel, shapes) in _marked(kernels):
            lines.append(f"  {json.dumps(kernel)}: {{")
            for last_shape, (shape, configs) in _marked(shapes):
                lines.append(f"   {json.dumps(shape)}: {{")
                for last, (config, row) in _marked(configs):
                    lines.append(f"    {json.dumps(config)}: {json.dumps(_short(row), allow_nan=False)}{'' if last else ','}")
                lines.append(f"   }}{'' if last_shape else ','}")
            lines.append(f"  }}{'' if last_kernel else ','}")
        return "\n".join([*lines, " }", "}"]) + "\n"

    @classmethod
    def read(cls, path: Path) -> Tuned:
        """Read a file. Raises FormatError if it can't be read, is larger than `LARGEST`, or wasn't written by `to_text`."""
        return cls.from_text(read_regular(path, f"timings in {path}", FormatError, LARGEST), str(path))

    @classmethod
    def from_text(cls, text: str | bytes, where: str) -> Tuned:
        """Parse the text of `to_text`. Raises FormatError, which names the file `where`, if it is anything else."""
        try:
            plain: dict[str, Any] = parse_json(text)
            found: _File = convert(plain, _File)
            rows = {
                (kernel, shape, words(from_words(config))): _checked(row, plain["kernels"][kernel][shape][config])
                for kernel, shapes in found["kernels"].items()
                for shape, configs in shapes.items()
                for config, row in configs.items()
            }
        except (ValueError, TypeError, ToolkitError) as error:
            raise FormatError(f"timings in {where}", str(error), "Give a file that `tune export` wrote") from error
        return cls(found["device"], rows)


def words(config: Config) -> str:
    """Return a config as text: "block_n=64 split=2 warps=4 stages=2"."""
    return " ".join(f"{name}={value}" for name, value in config.to_dict().items())


def from_words(text: str) -> Config:
    """Parse the text of `words`. Raises ValueError, TypeError or ToolkitError if it is anything else."""
    pairs = [word.partition("=") for word in text.split()]
    return Config(**{name: int(value) for name, _, value in pairs})


def cache_folder() -> Path:
    """Return the folder of cached files: $TOOLKIT_CACHE, or decode-toolkit in the user's cache folder."""
    asked = os.environ.get("TOOLKIT_CACHE")
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return at_home(asked or Path(root) / "decode-toolkit")


def tuned_path(gpu: str) -> Path:
    """Return the path of the user's file for `gpu`, a key as returned by `cards.key_of`."""
    return cache_folder() / "tuned" / f"{gpu}.json"


def read_tuned(gpu: str, device: DeviceFacts | None = None) -> Tuned | None:
    """Return the timings of `gpu`, merged from the package's file and the user's, or None if there are none.

    A file that is damaged, or not of `device` (if given), is renamed with a warning.
    """
    found = None
    for path in (SHIPPED / f"{gpu}.json", tuned_path(gpu)):
        try:
            part = _read_or_rename(path, device, ours=path.parent != SHIPPED)
        except OSError as error:
            tell(f"Timings of {gpu} can't be read: {error}.")
            continue
        if found is None:
            found = part
        elif part is not None:
            found.merge(part)
    return found


def kept_gpus() -> list[str]:
    """Return the keys of the GPUs that have stored timings."""
    folders = (SHIPPED, tuned_path("any").parent)
    found: set[str] = set()
    for folder in folders:
        with suppress(OSError):
            found |= {path.stem for path in folder.glob("*.json")}
    return sorted(found)


def add_rows(gpu: str, device: DeviceFacts, rows: Rows) -> Path:
    """Store rows as `put_rows` does, but warn if the folder is not writable instead of raising."""
    try:
        return put_rows(gpu, device, rows)
    except OSError as error:
        tell(f"Timings of {gpu} can't be stored: {error}. Set TOOLKIT_CACHE to a writable folder.")
        return tuned_path(gpu)


def put_rows(gpu: str, device: DeviceFacts, rows: Rows) -> Path:
    """Add `rows` to the user's file of `gpu` atomically. They replace rows of the same configs. Return the path.

    Raises OSError if the file cannot be read or the folder cannot be written to.
    """
    path = tuned_path(gpu)
    with locked(path):
        kept = _read_or_rename(path, device, ours=True) or Tuned(device)
        kept.device = device
        kept.rows.update(rows)
        replace_text(path, kept.to_text(), sync=True)
    return path


def _read_or_rename(path: Path, device: DeviceFacts | None, ours: bool) -> Tuned | None:
    try:
        found = Tuned.read(path)
        if device is None or found.device.same_card(device):
            return found
        why = f"it has timings of {found.device.card}, but this GPU is {device.card}"
    except FormatError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            return None
        if isinstance(error.__cause__, OSError):  # its contents may be good
            raise error.__cause__ from None
        why = error.found
    if not ours:
        tell(f"{path} is not used: {why}.")
        return None
    renamed = _free_name(path)
    with suppress(OSError):  # another process has just renamed it
        path.rename(renamed)
    tell(f"{path.name} was renamed to {renamed.name}: {why}. A new file will be written.")
    return None


def _free_name(path: Path) -> Path:
    numbers = (path.with_name(f"{path.stem}.set-aside-{n}") for n in range(1, 10_000))
    return next(name for name in numbers if not name.exists())


def tell(text: str) -> None:
    """Warn of timings or results that cannot be stored or read."""
    warnings.warn(text, TunedFileWarning, stacklevel=4)


def _checked(row: Record, plain: Mapping[str, Any]) -> Record:
    """Return the row, read from `plain`. Raises ValueError for unknown fields, and if a config was timed, but has no time."""
    if unknown := plain.keys() - Record.__dataclass_fields__.keys():
        raise ValueError(f"unknown field {min(unknown)!r:.40}")
    if row.verdict == "ok" and not (row.us is not None and row.us > 0):
        raise ValueError(f"a config with the verdict 'ok' has the time {row.us!r}")
    return row


def _short(row: Record) -> dict[str, Any]:
    """Return a record's fields that differ from their defaults."""
    defaults = {f.name: f.default for f in dataclasses.fields(Record)}
    return {name: value for name, value in dataclasses.asdict(row).items() if value != defaults[name]}


def _marked(found: Mapping[str, Any]) -> Iterator[tuple[bool, tuple[str, Any]]]:
    """Yield the items of a mapping, each with whether it is the last."""
    for n, item in enumerate(found.items(), 1):
        yield n == len(found), item


def locked(path: Path) -> FileLock:
    """Return the lock that lets one process at a time read, change and write `path`. Creates its folder.

    Raises OSError if the folder cannot be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path.with_name(f".{path.name}.lock"))
