"""Predict the memory of exporting and running a model, phase by phase, before anything is allocated.

A plan is a pure function of a model's shapes (on "meta"), a GPU's figures and a budget. No GPU is queried and no large tensor
is created. A plan has two peaks: the export must stay within the user's budget, and running must fit on the card. `Levers`
lower the peak of the export; a plan states what each one saves.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.core.display import render
from toolkit.core.errors import BudgetError, ModelError, brief
from toolkit.core.numbers import integer
from toolkit.core.units import MiB, bytes_text, unit_hint
from toolkit.core.workers import processors
from toolkit.decode.prefix import most_positions
from toolkit.gpu.catalogue import GpuSpec, find_specs
from toolkit.kernels.kv_codes import KV_SCHEMES
from toolkit.loading.report import unquantized_text
from toolkit.models.model import CausalLM
from toolkit.planning.sizes import Sizes, sizes_by_rank, sizes_of
from toolkit.vram.what_if import CONTEXT_BYTES

if TYPE_CHECKING:
    import pandas as pd


# Constants that do not follow from shapes. `what_if.CONTEXT_BYTES` is CUDA's own memory while a model runs.
BARE_CONTEXT = 518 * MiB  # measured on an H200, equal in three processes: the CUDA context of a process that runs no kernel
FIRST_BLOCK = 2 * MiB  # measured: PyTorch's tracer puts one number on the GPU, for which the allocator takes a 2 MiB segment
RUN_SCRATCH = 128 * MiB  # measured on an H200: partial sums of matrix products in prefill (kernels/int4_prefill.py)
CONTEXT_NOTE = "The memory of the CUDA context was measured once, on an H200; on other GPUs it may differ."
STAGING = 64 * MiB  # chosen: bytes of a weight that are copied at a time
HOST_BASE = 480 * MiB  # measured: Python with PyTorch, its compiler and the graph of one layer
COMPILER = 900 * MiB  # measured: one worker process that compiles a layer, including its C++ compiler
LITTLE = 0.03  # chosen: share of the memory below which what remains is said to be little
MOST_COMPILERS = 4  # chosen: worker processes at a time


@dataclass(frozen=True)
class Levers:
    """Measures by which an export saves GPU memory. `tk.export` applies all of them; off, they model an export without them.

    - `weights_as_inputs`: weights are inputs of the compiled graphs, so none is on the GPU during compilation.
    - `state_as_inputs`: keys, values and recurrent states are inputs, too. As buffers, the compiler would clone them.
    - `tables_outside`: the embedding lookup is outside the graphs. Inside, the compiler would copy the table for autotuning.
    - `tiled_dequantization`: kernels multiply packed weights directly, without creating plain matrices first.
    """

    weights_as_inputs: bool = True
    state_as_inputs: bool = True
    tables_outside: bool = True
    tiled_dequantization: bool = True


NONE = Levers(False, False, False, False)
WHY = {
    "weights_as_inputs": "no weight is on the GPU during compilation",
    "state_as_inputs": "keys, values and states are inputs: buffers that a graph writes would exist twice",
    "tables_outside": "the compiler makes no temporary copy of the embedding table",
    "tiled_dequantization": "packed weights are multiplied directly, without a plain copy of the largest matrix",
}


@dataclass(frozen=True)
class Phase:
    """One phase of work and its memory: `parts` are bytes on the GPU by purpose, `host_bytes` is host memory."""

    name: str
    parts: dict[str, int]
    host_bytes: int = 0

    @property
    def device_bytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Pull:
    """A lever in use: the bytes by which it lowers the peak, and why."""

    lever: str
    saves_bytes: int
    why: str


@dataclass(frozen=True, repr=False)
class Plan:
    """The predicted memory of exporting and running a model. Nothing in it is measured.

    `export` and `run` are phases, those of the rank that needs most if several ranks divide the model. `ranks` has the sizes
    of each rank's part. `kv` is the format of keys and values, `chunk` the number of prompt tokens processed at once
    (`prefill_chunk` if that was given, otherwise chosen for the card), and `compilers` the number of layers compiled at once.
    `problems` explains what does not fit and what would; `check()` raises the first one.
    """

    model: str
    card: GpuSpec | None  # None: the CPU
    context: int
    budget_bytes: int | None
    run_budget_bytes: int
    kv: str | None
    chunk: int
    levers: Levers
    compilers: int
    export: tuple[Phase, ...]
    run: tuple[Phase, ...]
    pulled: tuple[Pull, ...]
    problems: tuple[BudgetError, ...]
    ranks: tuple[Sizes, ...]
    prefill_chunk: int | None = None
    unquantized: str = ""  # in words, the matrices that the chosen scheme can't hold

    @property
    def sizes(self) -> Sizes:
        """The sizes of the rank that needs most."""
        return max(self.ranks, key=lambda sizes: sizes.weights)

    @property
    def where(self) -> str:
        """The device in words: "NVIDIA H200", "each of 2 x NVIDIA H200"."""
        name = "this machine" if self.card is None else self.card.name
        return name if len(self.ranks) == 1 else f"each of {len(self.ranks)} x {name}"

    @property
    def export_peak_bytes(self) -> int:
        """The peak of the export, on the GPU, or on the host for a plan without GPU."""
        return _peak(self.export, self.card)

    @property
    def run_bytes(self) -> int:
        """The peak of loading the package and generating."""
        return _peak(self.run, self.card)

    @property
    def spare_bytes(self) -> int:
        """What running leaves of `run_budget_bytes`; negative if it does not fit."""
        return self.run_budget_bytes - self.run_bytes

    @property
    def fits(self) -> bool:
        """Whether the export and the run fit; otherwise `problems` says what doesn't."""
        return not self.problems

    def check(self) -> Plan:
        """Return the plan if everything fits. Raises BudgetError otherwise."""
        if self.problems:
            raise self.problems[0]
        return self

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per phase: bytes on the GPU by purpose, their sum, and host bytes."""
        import pandas as pd

        rows = [
            {"when": when, "phase": p.name, **p.parts, "device_bytes": p.device_bytes, "host_bytes": p.host_bytes}
            for when, phases in (("export", self.export), ("run", self.run))
            for p in phases
        ]
        found = pd.DataFrame(rows).set_index(["when", "phase"]).fillna(0)
        return found.astype("int64")

    def by_rank(self) -> pd.DataFrame:
        """Return one row per rank: the predicted bytes on its GPU while it processes a prompt, by purpose, and their sum.

        `state_bytes` are keys, values and recurrent states; `cuda_bytes` is the context of a process with one GPU.
        """
        import pandas as pd

        rows = []
        for sizes in self.ranks:
            run = _run(sizes, self.context, self.chunk, self.card)
            parts = max(run, key=lambda phase: phase.device_bytes).parts
            row = {f"{name.lower()}_bytes": n_bytes for name, n_bytes in parts.items()}
            row["activations_bytes"] -= sizes.logits_bytes
            rows.append(row | {"logits_bytes": sizes.logits_bytes, "run_bytes": sum(parts.values())})
        return pd.DataFrame(rows).rename_axis("rank")

    def fits_on(self, cards: Iterable[GpuSpec | str] | GpuSpec | str | None = None) -> list[dict[str, Any]]:
        """Return, for each card (default: the catalogue), whether it can export and run this model, and its longest context.

        A card is a spec or its key. With several ranks, each has such a card. `can_export` is whether the export fits into
        the budget, or into the card's memory without one. `run_bytes` is what running needs with the plan's context.
        `spare_bytes` is what then remains of the card. `longest_context` is in tokens with the same `kv`; None if fewer than
        256 tokens fit. All bytes are predicted; those of the CUDA context were measured on an H200.
        """
        rows = []
        for card in find_specs(cards):
            budget = card.memory_bytes if self.budget_bytes is None else min(self.budget_bytes, card.memory_bytes)
            chunk = self.prefill_chunk or self.sizes.chunk(card)
            run = _run(self.sizes, self.context, chunk, card)
            row = {
                "gpu": card.key,
                "memory_bytes": card.memory_bytes,
                "can_export": _peak(self.export, card) <= budget,
                "can_run": _peak(run, card) <= card.memory_bytes,
                "run_bytes": _peak(run, card),
                "spare_bytes": card.memory_bytes - _peak(run, card),
            }
            rows.append(row | {"longest_context": longest_context(self.sizes, card, card.memory_bytes, chunk)})
        return rows

    def gpus(self, cards: Iterable[GpuSpec | str] | GpuSpec | str | None = None) -> pd.DataFrame:
        """Return `fits_on` as a table with one row per card."""
        import pandas as pd

        columns = ["gpu", "memory_bytes", "can_export", "can_run", "run_bytes", "spare_bytes", "longest_context"]
        return pd.DataFrame(self.fits_on(cards), columns=columns).set_index("gpu").astype({"longest_context": "Int64"})

    def __repr__(self) -> str:
        return text(self)

    def _repr_html_(self) -> str:
        return str(render("html", self))


def plan_of(
    models: Sequence[CausalLM], name: str, card: GpuSpec | None, context: int | None, budget: int | None,
    run_budget: int | None, kv: str | None, levers: Levers, prefill_chunk: int | None = None,
) -> Plan:  # fmt: skip
    """Return the plan for a model, or for the parts of one, by rank. They may be on "meta". `card` is None for the CPU.

    `prefill_chunk` is the number of prompt tokens processed at once (default: as `tk.generate`).
    """
    most = most_positions(models[0])
    wanted = min(4096, most) if context is None else context
    context = integer(wanted, 2, most)
    if context is None:
        supported = f"this model supports 2 to {most:,} tokens"
        raise ModelError(f"a plan for a context of {brief(wanted)}", supported, "Choose a number in this range")
    has = _memory(card)
    whole = has if run_budget is None else min(run_budget, has)
    options = []
    for one in [kv] if kv != "auto" else [None, *KV_SCHEMES]:
        try:
            ranks = sizes_by_rank(models, one)
        except ModelError:  # heads of a size that the kernels of this format don't support
            if kv != "auto":
                raise
            continue
        sizes = max(ranks, key=lambda each: each.weights)
        chunk = prefill_chunk or sizes.chunk(card)
        options.append((one, ranks, sizes, chunk, _run(sizes, context, chunk, card)))
        if _peak(options[-1][-1], card) <= whole:
            break
    else:  # none fits: the last one that fits the longest context
        options.sort(key=lambda option: longest_context(option[2], card, whole, option[3]) or 0)
    chosen, ranks, sizes, chunk, run = options[-1]
    compilers = _compilers(sizes, _host_bytes() if budget is None or card is not None else min(budget, has))
    export = _export(sizes, context, levers, compilers)
    found = Plan(
        name, card, context, budget, whole, chosen, chunk, levers, compilers, export, run, (), (), ranks, prefill_chunk,
        unquantized_text(getattr(models[0], "unquantized", {})),
    )  # fmt: skip
    return replace(found, pulled=_pulled(found, models[0]), problems=tuple(_problems(found, models)))


def longest_context(sizes: Sizes, card: GpuSpec | None, memory_bytes: int, chunk: int) -> int | None:
    """Return the longest context that runs in `memory_bytes` of `card`, or of this machine if it is None.

    The result is the model's maximum or a multiple of 256 tokens; None if fewer than 256 tokens fit.
    """

    def fits(context: int) -> bool:
        return _peak(_run(sizes, context, chunk, card), card) <= memory_bytes

    if fits(sizes.positions):
        return sizes.positions
    low, high = 0, sizes.positions // 256
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(256 * middle) else (low, middle - 1)
    return 256 * low or None


def _compilers(sizes: Sizes, host_bytes: int) -> int:
    """Return how many layers to compile at once: one per processor, as far as host memory allows."""
    return max(1, min(MOST_COMPILERS, processors(), (host_bytes - HOST_BASE - sizes.weights) // COMPILER))


def _export(sizes: Sizes, context: int, levers: Levers, compilers: int) -> tuple[Phase, ...]:
    """Return the phases of an export. `held` stays on the GPU throughout; `scratch` only while tracing and compiling."""
    held = {"CUDA": BARE_CONTEXT}
    state = sizes.state_bytes(context)
    if not levers.weights_as_inputs:
        held["weights"] = sizes.weights
    if not levers.state_as_inputs:
        held["state"] = state
    scratch = {"PyTorch": FIRST_BLOCK}
    if not levers.state_as_inputs:
        scratch["cloned state"] = state
    if not levers.tables_outside:
        scratch["copied table"] = sizes.table
    if not levers.tiled_dequantization:
        scratch["plain matrix"] = sizes.largest
    host = HOST_BASE + sizes.weights
    return (
        Phase("load", {**held, **({} if levers.weights_as_inputs else {"staging": STAGING})}, host),
        *(Phase(name, held | scratch, host + compilers * COMPILER) for name in ("trace", "compile prefill", "compile decode")),
        Phase(
            "weights",
            {**held, "PyTorch": FIRST_BLOCK, **({} if levers.weights_as_inputs else {"staging": STAGING})},
            host + STAGING,
        ),
    )


def _run(sizes: Sizes, context: int, chunk: int, card: GpuSpec | None) -> tuple[Phase, ...]:
    held = ({} if card is None else {"CUDA": CONTEXT_BYTES}) | {"weights": sizes.weights}
    state = held | {"state": sizes.state_bytes(context)}

    def working(tokens: int) -> dict[str, int]:
        found = {"attention": sizes.attention_bytes(tokens, context, card is None)}
        found["plain matrix"] = sizes.plain_bytes(tokens, card is None)
        return {"activations": sizes.activation_bytes(tokens)} | {name: size for name, size in found.items() if size}

    prefill = state | working(min(chunk, context)) | {"scratch": RUN_SCRATCH}
    decode = state | working(1)
    host = HOST_BASE + (sum(prefill.values()) if card is None else STAGING)
    return Phase("load", held, host), Phase("prefill", prefill, host), Phase("decode", decode, host)


def _peak(phases: tuple[Phase, ...], card: GpuSpec | None) -> int:
    return max(phase.host_bytes if card is None else phase.device_bytes for phase in phases)


def _pulled(plan: Plan, model: CausalLM) -> tuple[Pull, ...]:
    """Return what each lever saves at the peak of the export, and a quantized cache at the peak of running: if it does."""
    found = []
    for field in fields(Levers):
        if plan.card is not None and getattr(plan.levers, field.name):
            without = _export(plan.sizes, plan.context, replace(plan.levers, **{field.name: False}), plan.compilers)
            saves = _peak(without, plan.card) - plan.export_peak_bytes
            if saves > 0:
                found.append(Pull(field.name, saves, WHY[field.name]))
    if plan.kv is not None:
        without = _run(sizes_of(model), plan.context, plan.chunk, plan.card)
        saves = _peak(without, plan.card) - plan.run_bytes
        if saves > 0:  # a prompt dequantizes the keys and values of a layer, which may take more
            found.append(Pull(f'kv="{plan.kv}"', saves, "keys and values are quantized"))
    return tuple(sorted(found, key=lambda pull: -pull.saves_bytes))


def _problems(plan: Plan, models: Sequence[CausalLM]) -> Iterable[BudgetError]:
    has, larger = _memory(plan.card), "more memory" if plan.card is None else "a larger card"
    most = has if plan.budget_bytes is None else min(plan.budget_bytes, has)
    if plan.export_peak_bytes > most:
        worst = max(plan.export, key=lambda p: p.host_bytes if plan.card is None else p.device_bytes)
        off = [f.name for f in fields(Levers) if not getattr(plan.levers, f.name)]
        budget = f'a budget of at least "{-(-plan.export_peak_bytes // MiB)} MiB"'
        more = [name for lacks, name in ((most < has, budget), (plan.export_peak_bytes > has, larger)) if lacks]
        pull = f", or switch on {', '.join(off)}" if off else ""
        yield BudgetError(
            f"exporting {plan.model} within {bytes_text(most)}",
            f"it needs {bytes_text(plan.export_peak_bytes)} in the phase {worst.name!r} ({_listed(worst, plan.card)})",
            f"Use {' and '.join(more)}{pull}{unit_hint(plan.budget_bytes)}",
            budget_bytes=most,
            needed_bytes=plan.export_peak_bytes,
        )
    if plan.run_bytes > plan.run_budget_bytes:
        longest = longest_context(plan.sizes, plan.card, plan.run_budget_bytes, plan.chunk)
        worst = max(plan.run, key=lambda p: p.device_bytes)
        instead = f"a smaller scheme{f' or {larger}' if plan.run_bytes > has else ''}"
        do = f"Lower context to {longest:,}" if longest else f"Use {instead}: not even 256 tokens fit"
        codes = next((kv for kv in KV_SCHEMES if _fits_with(kv, plan, models)), None) if plan.kv is None else None
        do += f', or use kv="{codes}"' if codes else ""
        if plan.run_bytes <= has:
            do += f', or use a run_budget of at least "{-(-plan.run_bytes // MiB)} MiB"'
        yield BudgetError(
            f"running {plan.model} at context {plan.context:,} on {plan.where}",
            f"it needs {bytes_text(plan.run_bytes)} of {bytes_text(plan.run_budget_bytes)} ({_listed(worst, plan.card)})",
            do + unit_hint(plan.run_budget_bytes if plan.run_budget_bytes < has else None),
            budget_bytes=plan.run_budget_bytes,
            needed_bytes=plan.run_bytes,
            longest_context=longest,
        )


def _fits_with(kv: str, plan: Plan, models: Sequence[CausalLM]) -> bool:
    """Return whether the plan would fit with keys and values in the format `kv`."""
    with suppress(ModelError):  # heads of a size that the kernels don't support
        phases = (_run(sizes, plan.context, plan.chunk, plan.card) for sizes in dict.fromkeys(sizes_by_rank(models, kv)))
        return max(_peak(each, plan.card) for each in phases) <= plan.run_budget_bytes
    return False


def _listed(phase: Phase, card: GpuSpec | None) -> str:
    if card is None:
        return f"host memory, {bytes_text(HOST_BASE)} of it for PyTorch"
    return ", ".join(f"{name} {bytes_text(size)}" for name, size in sorted(phase.parts.items(), key=lambda item: -item[1]))


def _memory(card: GpuSpec | None) -> int:
    """Return the memory of a GPU, or of this machine if `card` is None."""
    return _host_bytes() if card is None else card.memory_bytes


def _host_bytes() -> int:
    """Return the memory of this machine, or the limit of the container."""
    try:
        most = int(os.sysconf("SC_PHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):  # Windows
        return 1 << 62
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # "max", or no such file
            most = min(most, int(Path(path).read_text()))
    return most


def text(plan: Plan) -> str:
    """Return the plan as text for a terminal."""
    budget = "" if plan.budget_bytes is None else f" within {bytes_text(plan.budget_bytes)}"
    running = f"running within {bytes_text(plan.run_budget_bytes)}" if plan.run_budget_bytes < _memory(plan.card) else "running"
    lines = [f"{plan.model} for {plan.where}, context {plan.context:,}{f', kv={plan.kv!r}' if plan.kv else ''} (predicted)"]
    lines += [plan.unquantized] if plan.unquantized else []
    for title, phases in ((f"exporting{budget}", plan.export), (running, plan.run)):
        lines.append(title)
        for phase in phases:
            parts = ", ".join(f"{name} {bytes_text(size)}" for name, size in phase.parts.items())
            held = phase.host_bytes if plan.card is None else phase.device_bytes
            lines.append(f"  {phase.name:<16} {bytes_text(held):>9}{f'   {parts}' if plan.card is not None else ''}")
    lines += ["levers in use, with the bytes that each saves at the peak"] if plan.pulled else []
    lines += [f"  {pull.lever:<22} saves {bytes_text(pull.saves_bytes):>9}: {pull.why}" for pull in plan.pulled]
    lines += [f"does not fit: {problem}" for problem in plan.problems] or [verdict(plan)]
    lines += [CONTEXT_NOTE] if plan.card is not None and plan.card.key != "h200" else []
    return "\n".join(lines)


def verdict(plan: Plan) -> str:
    """Return in words how much memory a plan that fits leaves, of the card and of the export's budget."""
    found = [f"running leaves {left(plan.spare_bytes, plan.run_budget_bytes)}"]
    if plan.budget_bytes is not None:
        found.insert(0, f"exporting leaves {left(plan.budget_bytes - plan.export_peak_bytes, plan.budget_bytes)}")
    return f"fits: {', '.join(found)}"


def left(spare: int, whole: int) -> str:
    """Return what remains of `whole` bytes in words, which say so if it is little: "only 40.0 MiB of 24.0 GiB"."""
    return f"{'only ' if is_little(spare, whole) else ''}{bytes_text(spare)} of {bytes_text(whole)}"


def is_little(spare: int, whole: int) -> bool:
    """Return whether so little of `whole` bytes remains that other processes or a larger CUDA context might take it."""
    return spare < LITTLE * whole
