"""Measure how fast a model decodes under each strategy and at each context, and draw the records.

    python -m toolkit.bench.decode --model random/gemma4-31b --scheme q4_k_m --context 64,8192 --out FILE.json
    python -m toolkit.bench.decode --device virtual:h200 --model random/gemma4-31b --scheme q4_k_m --out FILE.json
    python -m toolkit.bench.decode --parts recorded --model random/gemma4-31b --scheme q4_k_m --out RECORDED.json
    python -m toolkit.bench.decode --report FILE.json [FILE.json ...] --out PAGE.html

The context is the number of tokens before the decoding begins. All strategies share one prefill of a context. A record has up
to three parts: "timed" (rates, measured without recording and before the first recording), "recorded" (what a step launches and
copies, and where its time goes; after another prefill) and "copies" (those of a whole generation). Parts can be measured in
processes of their own, and --report combines the records of a model. On a virtual GPU all times are modelled, so that one short
run of each suffices.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from toolkit.bench.decode_runs import (
    ERRORS,
    FEWEST_TOKENS,
    first_token,
    host_time,
    names_of,
    prefilled,
    recorded,
    timed,
    whole_copies,
)  # fmt: skip
from toolkit.bench.published import LLAMA_CPP, LLAMA_CPP_SOURCE
from toolkit.bench.record import about, listed_names, listed_numbers, out_file, read_record, run_command, whole, write_record
from toolkit.bench.step_breakdown import breakdown, expected_launches
from toolkit.core.errors import ModelError, unknown_name
from toolkit.core.units import GiB
from toolkit.decode.prefix import Prefix, most_positions
from toolkit.decode.strategies import STRATEGIES
from toolkit.loading.loader import load
from toolkit.models.cache_codes import check_kv
from toolkit.models.chunks import chunk_of
from toolkit.models.model import Model
from toolkit.planning.costs import costs_of
from toolkit.planning.sizes import sizes_of

PARTS = ("timed", "recorded", "copies")
CONTEXTS = "64,8192,32640,131072"
MODELLED_TOKENS = 16  # a modelled rate doesn't vary
DIRECT = 2048  # up to this context, the first token is timed in whole runs; beyond, a run from the shared prefill is added


class _Kernel(TypedDict):
    name: str
    us: float
    count: int
    bytes: NotRequired[int | None]
    gap_us: NotRequired[float]


class _Step(TypedDict):
    strategy: str
    step_us: NotRequired[float]
    gap_us: NotRequired[float]
    unrecorded_us: NotRequired[float]
    kernels: NotRequired[list[_Kernel]]


class _Prefill(TypedDict):
    seconds: float
    tok_per_s: float
    peak_bytes: int


class _Copies(TypedDict):
    count: float
    bytes: float


class _Strategy(TypedDict, total=False):
    tok_per_s: float
    tok_per_s_all: list[float]
    spread: float
    first_token_s: float
    bandwidth_percent: float | None
    host_us_per_step: float
    nodes: int | None
    peak_bytes: int
    kernels_per_step: float
    copies_per_step: dict[str, _Copies]
    why_not: str


class _Row(TypedDict):
    context: int
    why_not: NotRequired[str]
    bytes_per_token: NotRequired[float]
    limit_tok_per_s: NotRequired[float | None]
    prefill: NotRequired[_Prefill]
    strategies: NotRequired[dict[str, _Strategy]]
    breakdown: NotRequired[_Step]


class _Record(TypedDict):
    """What --report reads of a record."""

    model: str
    scheme: str | None
    kv: str | None
    device: str
    gpu: str | None
    clock: Literal["measured", "modelled"]
    torch: str
    date: str
    commit: str | None
    tokens: int
    repeats: int
    read_bytes_per_s: float | None
    rows: list[_Row]


Save = Callable[[list[dict[str, Any]]], None]


def _keep(rows: list[dict[str, Any]]) -> None:
    """Do nothing."""


class Bench:
    """The benchmark of one model: its strategies, and the options of every run."""

    def __init__(self, model: Model, names: Sequence[str], tokens: int, repeats: int, chunk: int, kv: str | None) -> None:
        self.model, self.names, self.chunk, self.kv = model, names, chunk, kv
        modelled = model.device.clock == "modelled"
        self.tokens, self.repeats = (min(tokens, MODELLED_TOKENS), 1) if modelled else (tokens, repeats)
        spec = model.device.spec
        self.read_bytes_per_s = spec.reached_bandwidth_bytes_per_s if spec else None

    def run(self, contexts: Sequence[int], parts: Sequence[str] = PARTS, save: Save = _keep) -> list[dict[str, Any]]:
        """Return a row per context. All timing comes before all recording. `save` gets the rows after each of them."""
        works = (self._time, "timed"), (self._time_step, "recorded"), (self._record, "recorded")
        rows: list[dict[str, Any]] = [{"context": context} for context in contexts if {"timed", "recorded"} & set(parts)]
        for work, part in works:
            for row in rows if part in parts else ():
                if "why_not" not in row:
                    try:
                        work(row)
                    except ERRORS as error:
                        row["why_not"] = f"{error}"
                    save(rows)
        return rows

    def generation(self, prompt: int, decode: int) -> Iterator[dict[str, Any]]:
        """Yield the copies of one whole generation per strategy, after each strategy."""
        ids, copies = self._ids(prompt), {}
        for name in self.names:
            copies[name] = whole_copies(self.model, ids, name, decode)
            yield {"prompt": prompt, "decode": decode, "copies": copies}

    def _ids(self, n: int) -> list[int]:
        """Return `n` token ids, the same in every run. Experts are chosen by the values, so the ids vary."""
        return random.Random(0).choices(range(self.model.config.vocab_size), k=n)

    def _room(self, context: int) -> int:
        """Return the size of the cache for all runs after a prompt of `context` tokens."""
        return context + max(self.tokens, FEWEST_TOKENS)

    def _begin(self, row: dict[str, Any]) -> list[int]:
        """Add the bounds of a row, and return its prompt. Raises ModelError if the model has too few positions."""
        context = row["context"]
        most = most_positions(self.model)
        if self._room(context) > most:
            asked = f"decoding after {context:,} tokens"
            raise ModelError(asked, f"the model has positions for {most:,}", "Give a shorter context")
        row |= self._bounds(context)
        return self._ids(context + 1)

    def _time(self, row: dict[str, Any]) -> None:
        """Add the rates of all strategies."""
        ids = self._begin(row)
        prefix = self._prefill(row, ids[:-1])
        try:
            row["strategies"] = {name: self._strategy(row, prefix, ids, name) for name in self.names}
        finally:
            prefix.free()

    def _time_step(self, row: dict[str, Any]) -> None:
        """Add which strategy's step will be broken down, and how long that takes without recording."""
        ids = self._begin(row)
        found = row.setdefault("strategies", {name: {} for name in self.names})
        name = _broken_down([name for name, each in found.items() if "why_not" not in each])
        if not name:
            return
        rate = found[name].get("tok_per_s")
        if rate is None:
            prefix, _ = self._prefilled(ids[:-1])
            try:
                rate = timed(prefix, ids, name, self.tokens, 1)["tok_per_s"]
            finally:
                prefix.free()
        row["breakdown"] = {"strategy": name, "unrecorded_us": 1e6 / rate}

    def _prefilled(self, ids: Sequence[int]) -> tuple[Prefix, float]:
        return prefilled(self.model, ids, self._room(len(ids)), self.kv, self.chunk)

    def _prefill(self, row: dict[str, Any], ids: Sequence[int]) -> Prefix:
        """Return the shared prefix, after a warm-up on at most two chunks and the last one. Short prefills are repeated."""
        model, times = self.model, []
        short = len(ids) <= self.chunk
        if model.device.clock == "measured":
            start = ids[: min(len(ids), 2 * self.chunk + len(ids) % self.chunk)]
            prefilled(model, start, self._room(len(ids)), self.kv, self.chunk)[0].free()
        model.device.reset_peak()
        for _ in range(self.repeats - 1 if short else 0):
            prefix, seconds = self._prefilled(ids)
            prefix.free()
            times.append(seconds)
        prefix, seconds = self._prefilled(ids)
        times.append(seconds)
        middle = statistics.median(times)
        row["prefill"] = {
            "seconds": middle, "seconds_all": times, "tok_per_s": len(ids) / middle,
            "peak_bytes": model.device.memory().peak_bytes,
        }  # fmt: skip
        return prefix

    def _bounds(self, context: int) -> dict[str, Any]:
        """Return the bytes that a token reads in the middle of the timed runs, and the rate that the bandwidth allows."""
        length = context + self.tokens // 2
        n_bytes = costs_of(self.model, length).token_bytes
        if self.kv is not None:
            plain, coded = (self._per_position(kv) for kv in (None, self.kv))
            n_bytes -= length * (plain - coded)
        rate = self.read_bytes_per_s
        return {"bytes_per_token": n_bytes, "limit_tok_per_s": rate / n_bytes if rate else None}

    def _per_position(self, kv: str | None) -> int:
        """Return the bytes that the cache takes for each further position."""
        model: Any = self.model
        return sum(size for size, slots in sizes_of(model, kv).states if slots is None)

    def _strategy(self, row: dict[str, Any], prefix: Prefix, ids: Sequence[int], name: str) -> dict[str, Any]:
        try:
            found = timed(prefix, ids, name, self.tokens, self.repeats)
            found |= host_time(prefix, ids, name, self.chunk)
            if row["context"] <= DIRECT:
                options = {"prefill_chunk": self.chunk, "kv": self.kv}
                times = first_token(self.model, ids[:-1], name, self.repeats, **options)
            else:
                rests = first_token(self.model, ids, name, self.repeats, prefix=prefix)
                times = [row["prefill"]["seconds"] + rest for rest in rests]
            found |= {"first_token_s": statistics.median(times), "first_token_s_all": times}
        except ERRORS as error:
            return {"why_not": f"{error}"}
        limit = row["limit_tok_per_s"]
        return found | {"bandwidth_percent": 100 * found["tok_per_s"] / limit if limit else None}

    def _record(self, row: dict[str, Any]) -> None:
        """Add what recorded runs show to the strategies of a row, and the breakdown of a step."""
        ids, divided = self._ids(row["context"] + 1), row.get("breakdown", {})
        prefix, _ = self._prefilled(ids[:-1])
        try:
            for name, found in row["strategies"].items():
                if "why_not" in found:
                    continue
                try:
                    more, trace = recorded(prefix, ids, name)
                except ERRORS as error:
                    found["why_not"] = f"{error}"
                    continue
                found |= more
                if name == divided.get("strategy"):
                    divided |= breakdown(trace, expected_launches(prefix, ids, name, self.chunk)) or {}
        finally:
            prefix.free()


def _broken_down(names: Sequence[str]) -> str:
    """Return the last strategy whose steps are captured one by one, or else the last one that captures nothing."""
    for capture in ("step", "none", "loop"):
        chosen = [name for name in names if STRATEGIES[name].capture == capture]
        if chosen:
            return chosen[-1]
    return ""


def bench(
    device: str, name: str, scheme: str | None, contexts: Sequence[int], decode: Sequence[str] = ("all",), *, tokens: int = 128,
    repeats: int = 5, chunk: int | None = None, kv: str | None = None, generation: Sequence[int] = (19, 128),
    parts: Sequence[str] = PARTS, out: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the record of a model (JSON-able), and write what is known of it to the file `out` after each part.

    `generation` is the prompt and the steps of the copies that are counted. Raises UnknownNameError for an unknown part or
    `kv`, and ModelError if the model has too few positions for `generation`.
    """
    for part in parts:
        if part not in PARTS:
            raise unknown_name("part of a record", part, PARTS)
    if kv is not None:
        check_kv(kv)
    model = load(name, device=device, scheme=scheme, progress=False)
    chunk = chunk or chunk_of(model)
    if generation and "copies" in parts and sum(generation) > most_positions(model):
        asked = f"copies of {generation[1]:,} decode steps after {generation[0]:,} tokens"
        raise ModelError(asked, f"the model has positions for {most_positions(model):,}", "Give smaller numbers as --copies")
    made = Bench(model, names_of(model, decode), tokens, repeats, chunk, kv)
    record = {
        **about(device), "model": name, "scheme": scheme, "kv": kv, "dtype": str(model.dtype), "tokens": made.tokens,
        "repeats": made.repeats, "chunk": chunk, "read_bytes_per_s": made.read_bytes_per_s, "parts": list(parts), "rows": [],
    }  # fmt: skip

    def save(rows: list[dict[str, Any]]) -> None:
        record["rows"] = rows
        if out is not None:
            write_record(record, out)

    save(made.run(contexts, parts, save))
    for found in made.generation(*generation) if generation and "copies" in parts else ():
        record["generation"] = found
        save(record["rows"])
    return record


def combined(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records, with the parts of one model on one device in one of them. The first one says where it was made."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in records:
        key = tuple(record[name] for name in ("model", "scheme", "kv", "device", "clock"))
        known = found.setdefault(key, {**record, "rows": []})
        rows = {row["context"]: row for row in known["rows"]}
        for row in record["rows"]:
            rows[row["context"]] = _joined(rows.get(row["context"], {}), row)
        known["rows"] = [rows[context] for context in sorted(rows)]
        if "generation" in record:
            known.setdefault("generation", record["generation"])
    return list(found.values())


def _joined(row: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return two rows of one context as one; what `row` has stays."""
    both = [one.get("strategies", {}) for one in (other, row)]
    names = dict.fromkeys([*both[1], *both[0]])
    strategies = {name: {**both[0].get(name, {}), **both[1].get(name, {})} for name in names}
    return {**other, **row, **({"strategies": strategies} if names else {})}


def table(record: dict[str, Any]) -> str:
    """Return the record as a Markdown table, with "-" for what it doesn't have."""
    where = f"{'virtual ' if record['clock'] == 'modelled' else ''}{record['gpu'] or record['device']}"
    lines = [
        f"{record['model']}, {record['scheme'] or record['dtype']} on {where}, times {record['clock']}", "",
        "| context | strategy | tok/s | first token, ms | % of bandwidth | kernels per step | host µs per step | peak, GiB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for row in record["rows"]:
        if "why_not" in row:
            lines.append(f"| {row['context']:,} | {row['why_not']} |  |  |  |  |  |  |")
        for name, found in row.get("strategies", {}).items():
            cells = [found["why_not"], *[""] * 5] if "why_not" in found else _cells(row, found)
            lines.append(f"| {row['context']:,} | `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(row: dict[str, Any], found: dict[str, Any]) -> list[str]:
    kernels = f"{found['kernels_per_step']:.0f}" if "kernels_per_step" in found else "-"
    if "tok_per_s" not in found:
        return ["-", "-", "-", kernels, "-", "-"]
    share = found["bandwidth_percent"]
    return [
        f"{found['tok_per_s']:.1f} ± {50 * found['spread']:.1f} %", f"{1e3 * found['first_token_s']:.1f}",
        "-" if share is None else f"{share:.1f}", kernels, f"{found['host_us_per_step']:.1f}",
        f"{max(found['peak_bytes'], row['prefill']['peak_bytes']) / GiB:.2f}",
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.bench.decode", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help='"cuda" (default), "virtual:h200"...')
    parser.add_argument("--model", default="demo/qwen3", help="a model name or path, as in tk.load (default: demo/qwen3)")
    parser.add_argument("--scheme", help="how matrices are stored, as in tk.load")
    parser.add_argument("--kv", help='the format of keys and values: "int8", "int4" or "k4v8"')
    parser.add_argument(
        "--context", type=listed_numbers, default=CONTEXTS, help=f"numbers of prompt tokens (default: {CONTEXTS})"
    )
    parser.add_argument("--decode", type=listed_names, default="all", help='strategies, separated by commas (default: "all")')
    parser.add_argument("--tokens", type=partial(whole, least=2), default=128, help="tokens per timed run (default: 128)")
    parser.add_argument("--repeats", type=whole, default=5, help="timed runs per strategy (default: 5)")
    parser.add_argument("--chunk", type=whole, help="prompt tokens per part of a prefill (default: as tk.generate)")
    parser.add_argument("--copies", type=_generation, default="19,128", help="prompt and decode steps for counting, or empty")
    parser.add_argument("--parts", type=listed_names, default=",".join(PARTS), help="parts of the record (default: all)")
    parser.add_argument("--report", nargs="+", type=Path, metavar="FILE", help="write the page of these records instead")
    parser.add_argument("--out", type=out_file, help="the JSON file (default: print the record) or page (decode_speed.html)")
    options = parser.parse_args(arguments)
    if options.report:
        return _report(options.report, options.out or Path("decode_speed.html"))
    record = bench(
        options.device, options.model, options.scheme, options.context, options.decode, tokens=options.tokens,
        repeats=options.repeats, chunk=options.chunk, kv=options.kv, generation=options.copies,
        parts=options.parts, out=options.out,
    )  # fmt: skip
    write_record(record, options.out)
    if options.out:
        print(table(record))
    return 0


def _report(files: Sequence[Path], out: Path) -> int:
    from toolkit.ui.figures.speed_page import write_speed_page

    records = combined([read_record(path, _Record) for path in files])
    print(write_speed_page(records, out, LLAMA_CPP, name="llama.cpp", source=LLAMA_CPP_SOURCE))
    return 0


def _generation(text: str) -> list[int]:
    if len(found := listed_numbers(text) if text.strip() else []) not in (0, 2):
        raise argparse.ArgumentTypeError(f"{text!r} is not two numbers, such as 19,128")
    return found


if __name__ == "__main__":
    run_command(main)
