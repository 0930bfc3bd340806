"""Compare a model's memory on the virtual GPU with the real GPU: loading and decoding, by phase and by step.

    python -m toolkit.bench.memory random/gemma4-31b --scheme q4_k_m --context 32768 --device cuda --out real.json
    python -m toolkit.bench.memory random/gemma4-31b --scheme q4_k_m --context 32768 --device virtual:h200 --out virtual.json
    python -m toolkit.bench.memory --compare real.json virtual.json

On a virtual GPU the tensors have sizes but no values. Peaks come from the allocator's history and count the bytes above those
that were allocated at the start.
"""

from __future__ import annotations

import argparse
import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypedDict

import torch

from toolkit.bench.record import about, out_file, read_record, run_command, write_record
from toolkit.decode.loop import generate
from toolkit.gpu.opening import open_device
from toolkit.loading.loader import load
from toolkit.vram.measure import MemoryUse, Scope


class _Phase(TypedDict):
    peak_bytes: int
    end_bytes: int


class _Record(TypedDict):
    """What --compare reads of a record."""

    load: _Phase
    decode: _Phase
    peak_bytes: int
    step_peaks: dict[str, int]


def bench(name: str, device: str, scheme: str | None, context: int, prompt: int, steps: int) -> dict[str, Any]:
    """Load `name`, feed a prompt of `prompt` tokens, decode `steps` more, and return the record of the memory (JSON-able)."""
    gpu = open_device(device)
    torch.zeros(1, device=gpu.torch)  # creates the CUDA context before anything is measured
    gpu.sync()
    before = gpu.memory().allocated_bytes
    gpu.reset_peak()
    sizes = gpu.sizes_only() if hasattr(gpu, "sizes_only") else nullcontext()
    ids = torch.arange(prompt) % 1000 + 100
    with sizes:
        loading = Scope(gpu)
        loading.__enter__()
        model = load(name, device=gpu, scheme=scheme)
        loaded = loading.end({"model": model})
        gc.collect()
        decoding = Scope(gpu)
        decoding.__enter__()
        generate(model, ids, max_new_tokens=steps, context=context, eos=(), record=False)
        decoded = decoding.end({"model": model})
    counted = gpu.memory().peak_bytes
    over = decoded.ledger.over("step")
    return {
        **about(device), "model": name, "scheme": scheme, "context": context, "prompt_tokens": prompt, "steps": steps,
        "load": _phase(loaded, before), "decode": _phase(decoded, before),
        "peak_bytes": max(loaded.peak_bytes, decoded.peak_bytes) - before, "peak_counted_bytes": counted - before,
        "peak_by_kind": {row.kind: int(row.at_peak_bytes) for row in decoded.by("kind").itertuples()},
        "step_peaks": {str(row.step): int(row.peak_bytes - before) for row in over.itertuples() if row.step >= 0},
        "largest_at_peak": decoded.ledger.sentences(),
    }  # fmt: skip


def _phase(use: MemoryUse, before: int) -> dict[str, Any]:
    return {
        "peak_bytes": use.peak_bytes - before, "end_bytes": use.end_bytes - before, "events": len(use.ledger.rows),
        "reserved_peak_bytes": use.peak_reserved_bytes, "elapsed_s": use.elapsed_s,
    }  # fmt: skip


def compare(real: dict[str, Any], virtual: dict[str, Any]) -> list[str]:
    """Return lines that state how far the second record is from the first, for each phase and for the worst step."""
    lines = []
    for what in ("load", "decode"):
        for figure in ("peak_bytes", "end_bytes"):
            lines.append(_apart(f"{what} {figure}", real[what][figure], virtual[what][figure]))
    lines.append(_apart("peak_bytes", real["peak_bytes"], virtual["peak_bytes"]))
    both = [step for step in real["step_peaks"] if step in virtual["step_peaks"]]
    worst = max(both, key=lambda step: abs(virtual["step_peaks"][step] / max(real["step_peaks"][step], 1) - 1), default=None)
    if worst is not None:
        lines.append(_apart(f"worst of {len(both)} steps ({worst})", real["step_peaks"][worst], virtual["step_peaks"][worst]))
    return lines


def _apart(name: str, real: int, virtual: int) -> str:
    return f"{name}: {real:,} real, {virtual:,} virtual, {100 * (virtual / max(real, 1) - 1):+.3f} %"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.bench.memory", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "model", nargs="?", default="random/gemma4-31b", help="a name or path, as in tk.load (default: %(default)s)"
    )
    parser.add_argument("--device", default="cuda", help='"cuda" (default), "virtual:h200"...')
    parser.add_argument("--scheme", help="as in tk.load (default: as stored)")
    parser.add_argument("--context", type=int, default=32768, help="positions that the cache holds (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of the prompt (default: the context minus the steps)")
    parser.add_argument("--steps", type=int, default=16, help="tokens to decode (default: %(default)s)")
    parser.add_argument("--out", type=out_file, help="write the record to this JSON file (default: print it)")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("REAL", "VIRTUAL"), help="compare two records instead")
    options = parser.parse_args(arguments)
    if options.compare:
        print("\n".join(compare(*(read_record(path, _Record) for path in options.compare))))
        return 0
    prompt = options.prompt or options.context - options.steps
    record = bench(options.model, options.device, options.scheme, options.context, prompt, options.steps)
    write_record(record, options.out)
    return 0


if __name__ == "__main__":
    run_command(main)
