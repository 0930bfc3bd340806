"""Tune kernels for one GPU: compile configs, check the results of those that fit, and time the correct ones.

Stored results are not computed again. New ones are written within seconds, so that tuning can resume after it was cancelled, or
after a kernel broke the CUDA context.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch

from toolkit.core.units import plural
from toolkit.kernels.base import Config, Kernel, Shape
from toolkit.kernels.registry import configs_of
from toolkit.tune.cards import Card
from toolkit.tune.compiling import NOT_KEPT, Job, compile_configs, triton_version
from toolkit.tune.estimate import estimate
from toolkit.tune.gate import Check, Gate
from toolkit.tune.identity import fingerprint
from toolkit.tune.limits import Compiled, obstacle, worst_occupancy
from toolkit.tune.lookup import forget
from toolkit.tune.results import Row, Tuning
from toolkit.tune.store import Record, Rows, add_rows, read_tuned, words
from toolkit.tune.timing import Clock

WRITE_EVERY_S = 2.0
SLOW = "timed once only, because it is much slower than the best config"
Step = Callable[[int, int, str], None]


@dataclass
class Tuner:
    """Tunes for `card`. With `device` and `clock`, configs are run there and timed; otherwise they are only compiled."""

    card: Card
    device: torch.device | None = None
    clock: Clock | None = None
    step: Step = field(default=lambda done, total, what: None)
    again: bool = False  # also time configs with stored timings
    seed: int = field(default_factory=lambda: secrets.randbits(31))  # a wrong row names its seed

    def tune(
        self, kernel: Kernel, shape: Shape, configs: Sequence[Config] | None = None, found: Mapping[Job, Compiled] | None = None
    ) -> Tuning:
        """Return the rows of `configs` (by default the kernel's whole space), from stored results or computed now.

        `found` has the compiled results of all configs, if they were compiled before.
        """
        wanted = configs_of(kernel, shape, configs)
        kept = self.kept(kernel, shape)
        missing = [config for config in wanted if words(config) not in kept]
        jobs = {config: Job(shape, config, self.capability) for config in wanted}
        if found is None:
            found = compile_configs(kernel, jobs.values(), self.step)
        compiled = {config: found[job] for config, job in jobs.items()}
        notes: tuple[str, ...] = ()
        if self.device is not None and missing:
            times = [row.us * 1e3 for row in kept.values() if row.verdict == "ok" and row.us]
            problem = _Problem(self, kernel, shape, compiled, min(times, default=float("inf")))
            try:
                notes = problem.run(missing)
            finally:
                kept |= problem.records
                problem.write()
        return Tuning(tuple(self.row(kernel, shape, config, compiled[config], kept) for config in wanted), notes)

    @property
    def capability(self) -> tuple[int, int]:
        return self.card.spec.compute_capability

    def kept(self, kernel: Kernel, shape: Shape) -> dict[str, Record]:
        """Return the stored records of this problem for the kernel's current code, and {} if `again` is set.

        If configs are timed on this machine, records of other versions of Triton are left out.
        """
        if self.again:
            return {}
        tuned = read_tuned(self.card.key, self.card.facts if self.device is not None else None)
        rows = tuned.configs(kernel.name, shape.key) if tuned is not None else {}
        current = {config: row for config, row in rows.items() if row.kernel == fingerprint(kernel)}
        if self.device is None:
            return current
        return {config: row for config, row in current.items() if row.versions.startswith(f"triton {triton_version()},")}

    def row(self, kernel: Kernel, shape: Shape, config: Config, compiled: Compiled, kept: dict[str, Record]) -> Row:
        """Return the row of one config: its compiled figures, and its measured or modelled time."""
        spec, record = self.card.spec, kept.get(words(config))
        why = obstacle(compiled, spec)
        row = Row(
            kernel.name, shape.key, self.card.key, config, "failed" if compiled.error else "excluded" if why else "untried", why
        )
        full, use = worst_occupancy(compiled.launches, spec), compiled.main
        if use is not None and full is not None:
            row = replace(
                row, shared_bytes=compiled.shared_bytes, registers=compiled.registers, spill_bytes=compiled.spill_bytes,
                occupancy=full.share, occupancy_limit=full.limit,
                ptx_bytes=sum(u.ptx_bytes for u in compiled.launches), sass_bytes=sum(u.sass_bytes for u in compiled.launches),
            )  # fmt: skip
        if not compiled.error:
            guess, cost = estimate(kernel, shape, config, compiled, spec), kernel.cost(shape)
            row = replace(
                row, ns=guess.ns, clock="modelled", bytes=cost.bytes, flops=cost.flops,
                memory_ns=guess.memory_ns, compute_ns=guess.compute_ns, bound=guess.bound,
            )  # fmt: skip
        return row if record is None or why else _measured(row, record)


def _measured(row: Row, record: Record) -> Row:
    """Return `row` with the measured figures of `record`."""
    row = replace(row, verdict=record.verdict, reason=record.reason, cosine=record.cosine, max_error=record.max_error)
    if record.us is None:
        return row
    spread = record.spread_us * 1e3 if record.spread_us is not None else None
    return replace(row, ns=record.us * 1e3, clock="measured", spread_ns=spread)


@dataclass
class _Problem:
    """One problem that is being tuned, with its new records."""

    tuner: Tuner
    kernel: Kernel
    shape: Shape
    compiled: dict[Config, Compiled]
    best_ns: float = float("inf")  # so far, including stored records
    records: dict[str, Record] = field(default_factory=dict)
    wrote_at: float = field(default_factory=time.monotonic)

    def run(self, missing: Sequence[Config]) -> tuple[str, ...]:
        """Make a record for each of `missing`, and return notes. Exceptions of `step` are passed on; records so far remain."""
        spec = self.tuner.card.spec
        fitting = []
        for config in missing:
            if self.compiled[config].error.startswith(NOT_KEPT):
                continue
            if why := obstacle(self.compiled[config], spec):
                self.add(config, Record("failed" if self.compiled[config].error else "excluded", why))
            else:
                fitting.append(config)
        fitting.sort(key=lambda config: estimate(self.kernel, self.shape, config, self.compiled[config], spec).ns)
        if not fitting or self.tuner.device is None:
            return ()
        done = 0
        try:
            gates = [Gate(self.kernel, self.shape, self.tuner.device, self.tuner.seed + n) for n in range(2)]
            for done, config in enumerate(fitting):
                self.tuner.step(done, len(fitting), f"timing {words(config)}")
                self.add(config, self.measure(config, gates))
                if is_broken(self.tuner.device):
                    return (
                        f"{words(config)} made the CUDA context unusable: tune again in a new process, which skips this config",
                    )
        except torch.OutOfMemoryError as error:  # perhaps other programs use the memory
            left = f"{plural(len(fitting) - done, 'config')} of {self.kernel.name} {self.shape.key}"
            return (f"{left} not timed: {' '.join(str(error).split())}"[:300],)
        self.tuner.step(len(fitting), len(fitting), "")
        return ()

    def measure(self, config: Config, gates: Sequence[Gate]) -> Record:
        """Check one config, and time it if it is correct. A new best is checked again on other inputs.

        An exception of a launch is recorded as "failed". Raises torch.OutOfMemoryError.
        """
        assert self.tuner.clock is not None
        first, second = gates
        try:
            check = first.check(config)
            if not check.right:
                return wrong(check, first.seed)
            timing = self.tuner.clock(self.kernel, self.shape, config, first.inputs, self.best_ns)
            if timing.ns < self.best_ns and not (again := second.check(config)).right:
                return wrong(again, second.seed)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return Record("failed", f"{type(error).__name__}: {' '.join(str(error).split())}"[:600])
        return Record(
            "slow" if timing.stopped else "ok", SLOW if timing.stopped else "",
            us=round(timing.ns / 1e3, 3), spread_us=round(timing.spread_ns / 1e3, 3), cold=timing.cold, **figures(check),
        )  # fmt: skip

    def add(self, config: Config, record: Record) -> None:
        """Add a record with its compiled figures and versions, and write every `WRITE_EVERY_S` seconds."""
        compiled = self.compiled[config]
        if record.verdict == "ok" and record.us is not None:
            self.best_ns = min(self.best_ns, record.us * 1e3)
        self.records[words(config)] = replace(
            record, shared_bytes=compiled.shared_bytes, registers=compiled.registers, spill_bytes=compiled.spill_bytes,
            kernel=fingerprint(self.kernel), versions=f"triton {triton_version()}, torch {version('torch')}",
            when=datetime.now(UTC).isoformat(timespec="seconds"),
        )  # fmt: skip
        if time.monotonic() - self.wrote_at > WRITE_EVERY_S:
            self.write()

    def write(self) -> None:
        """Put all records into the file."""
        rows: Rows = {(self.kernel.name, self.shape.key, config): record for config, record in self.records.items()}
        if rows:
            add_rows(self.tuner.card.key, self.tuner.card.facts, rows)
            forget()
        self.wrote_at = time.monotonic()


def figures(check: Check) -> dict[str, Any]:
    """Return a check's figures, rounded, as keywords of a record."""
    return {"cosine": round(check.cosine, 7), "max_error": float(f"{check.max_error:.3g}")}


def wrong(check: Check, seed: int) -> Record:
    """Return the record of a config that is wrong for the inputs of `seed`."""
    return Record("wrong", f"{check.reason} (inputs of seed {seed})", **figures(check))


def is_broken(device: torch.device | None) -> bool:
    """Return whether a kernel's illegal memory access has made the CUDA context unusable."""
    if device is None or device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
        return False
    except RuntimeError:
        return True


def tune_all(tuner: Tuner, problems: Iterable[tuple[Kernel, Shape]], configs: Sequence[Config] | None = None) -> list[Tuning]:
    """Tune the problems, grouped by kernel. Stops early if a kernel has broken the CUDA context."""
    shapes: dict[Kernel, list[Shape]] = {}
    for kernel, shape in problems:
        shapes.setdefault(kernel, []).append(shape)
    found = []
    for kernel, mine in shapes.items():
        # One call for all shapes, because starting a worker process takes longer than compiling most configs.
        jobs = [Job(shape, config, tuner.capability) for shape in mine for config in configs_of(kernel, shape, configs)]
        compiled = compile_configs(kernel, jobs, tuner.step)
        for shape in mine:
            found.append(tuner.tune(kernel, shape, configs, compiled))
            if is_broken(tuner.device):
                return found
    return found
