"""Record decode steps of every strategy on a real GPU, as the traces that ship with the package.

    python -m toolkit.bench.traces --out toolkit/trace/recorded
    python -m toolkit.bench.traces --ranks 2 --out toolkit/trace/recorded

Each trace is a file of `Trace.save`, named GPU/MODEL/STRATEGY.trace; of two H200s, the first part is "2xh200". `meta` says what
was recorded: the model, the strategy, the numbers of tokens, versions, and `tok_per_s`, the rate without recording. All rates
are measured before the first recording. To keep the files small, traces of large models hold a few steps only, and none has
allocations. Texts hold no absolute paths.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any

import numpy as np

from toolkit.bench.record import about, run_command
from toolkit.core.errors import ToolkitError
from toolkit.decode.loop import generate
from toolkit.decode.strategies import STRATEGIES
from toolkit.gpu.opening import open_device
from toolkit.loading.loader import load
from toolkit.models.model import Model
from toolkit.planning.describe import describe
from toolkit.ranks.cluster import Cluster, cluster
from toolkit.ranks.remote import RankedModel
from toolkit.trace.columns import COPY_KINDS, TEXT_COLUMNS
from toolkit.trace.events import Trace
from toolkit.trace.shipped import SUFFIX

RATE_TOKENS = 96  # of the run that is timed
STEADY = 5  # from this step on, all steps of a run are alike
LOOPED = 2  # the first step of a loop


@dataclass(frozen=True)
class Case:
    """What to record of one model. `steps` is how many decode steps a trace keeps; None keeps the prefill and all steps."""

    model: str
    scheme: str | None
    strategies: Sequence[str]
    prompt: int
    tokens: int
    steps: int | None = None


CASES = (
    Case("demo/qwen3", None, tuple(STRATEGIES), prompt=19, tokens=12),
    Case(
        # Of a loop this large, CUPTI reports no kernels at all.
        "random/qwen3-8b", "q4_k_m", ("host-sampling", "roundtrip", "double-buffered", "cuda-graph"),
        prompt=64, tokens=10, steps=3,
    ),
)  # fmt: skip
DIVIDED = (Case("random/gemma4-31b", "q4_k_m", ("cuda-graph",), prompt=64, tokens=10, steps=2),)  # several GPUs share the model


def record_traces(device: str, out: Path, cases: Sequence[Case] = CASES, on: Cluster | None = None) -> list[Path]:
    """Record all traces of `cases` on `device`, and return the files, which are written to folders in `out`.

    The GPUs of the cluster `on`, all of them like `device`, divide each model. Raises ToolkitError if the GPU isn't in the
    catalogue.
    """
    gpu, facts = open_device(device), about(device)
    if gpu.spec is None:
        raise ToolkitError(f"recording traces on {gpu.name}", "it isn't in tk.GPUS", "Add the GPU to the catalogue first")
    where: dict[str, Any] = {"device": gpu} if on is None else {"cluster": on}
    folder = gpu.spec.key if on is None else f"{on.ranks}x{gpu.spec.key}"
    work = [(case, load(case.model, scheme=case.scheme, progress=False, **where)) for case in cases]
    rates = {(case.model, name): _rate(model, case, name, gpu.clock) for case, model in work for name in case.strategies}
    files = []
    for case, model in work:
        for name in case.strategies:
            trace = generate(model, _prompt(case), name, max_new_tokens=case.tokens, eos=()).trace
            meta = {
                **{key: facts[key] for key in ("date", "toolkit", "commit", "gpu", "torch", "cuda")},
                "model": case.model, "scheme": case.scheme, "strategy": name, "prompt_tokens": case.prompt,
                "tokens": case.tokens, "tok_per_s": rates[case.model, name],
            }  # fmt: skip
            path = out / folder / case.model.partition("/")[2] / f"{name}{SUFFIX}"
            path.parent.mkdir(parents=True, exist_ok=True)
            files.append(shortened(trace, case.steps, meta).save(path))
    return files


def _prompt(case: Case) -> list[int]:
    return random.Random(0).choices(range(describe(case.model).config.vocab_size), k=case.prompt)


def _rate(model: Model | RankedModel, case: Case, name: str, clock: str) -> float | None:
    """Return the tokens per second without recording, after a warm-up."""
    options: dict[str, Any] = {"max_new_tokens": RATE_TOKENS, "eos": (), "record": False}
    if clock == "measured":
        generate(model, _prompt(case), name, **options)
    return generate(model, _prompt(case), name, **options).tok_per_s


def shortened(trace: Trace, steps: int | None, meta: dict[str, Any]) -> Trace:
    """Return a trace without allocations and segments, with times from 0 on, and with `meta` added to its own.

    `steps` keeps so many decode steps: the first ones in the steady state that have kernels. CUPTI may report the kernels of
    only the first step of a loop; then the first steps are kept.
    """
    keep = trace.is_kind("kernel", "launch", "memset", "sync", "mark", "collective", *COPY_KINDS)
    if steps is not None:
        busy = np.unique(trace["step"][trace.is_kind("kernel")])
        first = min(busy[busy >= STEADY], default=LOOPED)
        keep &= (trace["step"] >= first) & (trace["step"] < first + steps)
    chosen = trace.select(keep)
    columns = dict(chosen.columns)
    columns["start_ns"] = columns["start_ns"] - columns["start_ns"][:1].sum()  # events are sorted by time
    texts: dict[str, int] = {}
    for name in TEXT_COLUMNS:
        found = [None if text is None else relative(text) for text in chosen.text(name)]
        columns[name] = np.array([-1 if text is None else texts.setdefault(text, len(texts)) for text in found], np.int32)
    return Trace(columns, texts, trace.meta | meta)


def relative(text: str) -> str:
    """Return a text without the folders of an absolute path: "threading.py:12" for a line of Python's own library."""
    path = PureWindowsPath(text) if PureWindowsPath(text).drive else PurePath(text)
    return path.name if path.is_absolute() else text


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.bench.traces", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help='"cuda" (default), "cuda:1"...')
    parser.add_argument("--model", help="record only this model")
    parser.add_argument("--out", type=Path, required=True, help="the folder to which the traces are written")
    parser.add_argument("--ranks", type=int, default=1, help="this many GPUs divide each model (default: 1)")
    options = parser.parse_args(arguments)
    cases = [case for case in (CASES if options.ranks == 1 else DIVIDED) if options.model in (None, case.model)]
    if not cases:
        parser.error(f"with --ranks {options.ranks}, there is no case of {options.model}")
    with nullcontext() if options.ranks == 1 else cluster(options.device, options.ranks) as on:
        files = record_traces(options.device, options.out, cases, on)
    for path in files:
        print(f"{path}: {path.stat().st_size:,} bytes, {len(Trace.load(path)):,} events")
    print(f"{sum(path.stat().st_size for path in files):,} bytes in {len(files)} files")
    return 0


if __name__ == "__main__":
    run_command(main)
