"""`python -m toolkit.tune`: show stored timings of GPUs, export and import them, merge files, and tune."""

from __future__ import annotations

import argparse
import sys
import threading
import warnings
from contextlib import suppress
from pathlib import Path

from toolkit.core.errors import CancelledError, FormatError, ToolkitError, unknown_name
from toolkit.core.files import replace_text
from toolkit.core.units import drop_output, print_any_text, seconds_text, unwritten
from toolkit.tune.store import DeviceFacts, Record, Tuned, TunedFileWarning, kept_gpus, put_rows, read_tuned


def run(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status. Prints errors of the toolkit, and warnings, as one line each."""
    options = _parser().parse_args(arguments)
    print_any_text()
    with warnings.catch_warnings():
        warnings.simplefilter("always", TunedFileWarning)
        warnings.showwarning = lambda message, *_, **__: print(f"Warning: {message}", file=sys.stderr)
        try:
            options.command(options)
            print(end="", flush=True)
        except BrokenPipeError:
            drop_output()
        except ToolkitError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 1
        except OSError as error:
            return unwritten(error)
        except KeyboardInterrupt:
            print("\nStopped. Results so far are stored; run the command again to resume.", file=sys.stderr)
            return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m toolkit.tune", description="Timings of kernels, stored per GPU.")
    commands = parser.add_subparsers(required=True)
    show = commands.add_parser("show", help="show the fastest config of every problem, and how many were wrong or excluded")
    show.add_argument("gpu", nargs="?", help='key of a GPU, such as "h200" (default: all GPUs with stored timings)')
    show.set_defaults(command=_show)
    export = commands.add_parser("export", help="write the stored timings of a GPU into a file")
    export.add_argument("gpu", help='key of a GPU, as `show` prints it, such as "h200"')
    export.add_argument("file", type=Path, help="the file to write")
    export.set_defaults(command=_export)
    bring = commands.add_parser("import", help="store the timings of a file that `export` wrote")
    bring.add_argument("file", type=Path, help="the file to read")
    bring.set_defaults(command=_import)
    merge = commands.add_parser("merge", help="merge files of one GPU; the newer timing of each config is kept")
    merge.add_argument("files", type=Path, nargs="+", help="files that `export` wrote")
    merge.add_argument("--out", type=Path, required=True, help="the file to write")
    merge.set_defaults(command=_merge)
    warm = commands.add_parser("warm", help="time the configs of kernels on this machine's GPU, and store the timings")
    warm.add_argument("kernel", nargs="*", help="names of kernels (default: every kernel)")
    warm.add_argument("--seconds", type=_seconds, help="stop after about this time; run the command again to resume")
    warm.add_argument("--again", action="store_true", help="also time configs with stored timings, including the package's")
    warm.add_argument("--shape", help="a known shape's name, or sizes (default: all known shapes)")
    warm.add_argument("--device", default="auto", help='the GPU, such as "cuda:1" (default: the first CUDA GPU)')
    warm.set_defaults(command=_warm)
    return parser


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < threading.TIMEOUT_MAX:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")


def _show(options: argparse.Namespace) -> None:
    found = {options.gpu: _kept(options.gpu)} if options.gpu else {gpu: read_tuned(gpu) for gpu in kept_gpus()}
    for gpu, kept in found.items():
        if kept is None:  # a damaged file, of which a warning tells
            continue
        device = kept.device
        clocks = f", {device.sm_clock_mhz} MHz" if device.sm_clock_mhz else ""
        print(f"{gpu}: {device.name}, {device.sms} SMs, compute capability {device.compute_capability}{clocks}")
        for kernel, shape in dict.fromkeys((kernel, shape) for kernel, shape, _ in kept.rows):
            print(f"  {kernel} {shape}\n    {_winner(kept.configs(kernel, shape))}")
    if not found:
        print("No timings are stored. On a machine with a CUDA GPU, run `python -m toolkit.tune warm KERNEL`.")


def _winner(rows: dict[str, Record]) -> str:
    right = {config: row for config, row in rows.items() if row.verdict == "ok" and row.us is not None}
    counts = {
        verdict: sum(row.verdict == verdict for row in rows.values()) for verdict in ("slow", "wrong", "failed", "excluded")
    }
    others = "".join(f", {count} {verdict}" for verdict, count in counts.items() if count)
    if not right:
        return f"no correct config was timed{others}"
    best = min(right, key=lambda config: right[config].us or 0.0)
    row = right[best]
    spread = f" ± {seconds_text((row.spread_us or 0) / 2e6)}" if row.spread_us else ""
    return f"{best}: {seconds_text((row.us or 0) / 1e6)}{spread}, of {len(right)} timed{others} ({row.versions}, {row.when})"


def _kept(gpu: str) -> Tuned:
    kept = read_tuned(gpu) if gpu in kept_gpus() else None  # never read (and rename) a file for a name such as "../x"
    if kept is None:
        raise unknown_name("stored timings of GPU", gpu, kept_gpus())
    return kept


def _write(path: Path, kept: Tuned) -> None:
    replace_text(path, kept.to_text(), ToolkitError)


def _export(options: argparse.Namespace) -> None:
    kept = _kept(options.gpu)
    _write(options.file, kept)
    print(f"{len(kept.rows)} rows of {kept.device.name} written to {options.file}")


def _import(options: argparse.Namespace) -> None:
    from toolkit.tune.cards import key_of

    found = Tuned.read(options.file)
    gpu = key_of(found.device.name, found.device.sms)
    kept = read_tuned(gpu) or Tuned(found.device)
    _check_card(f"importing {options.file}", found.device, kept.device, "those already stored")
    kept.merge(found)
    new = {place: row for place, row in found.rows.items() if kept.rows[place] is row}
    try:
        path = put_rows(gpu, found.device, new)
    except OSError as error:
        raise ToolkitError(f"storing timings of {gpu}", str(error), "Set TOOLKIT_CACHE to a writable folder") from error
    print(f"{len(new)} of {len(found.rows)} rows of {found.device.name} stored in {path}; newer rows were kept for the others")


def _merge(options: argparse.Namespace) -> None:
    whole, *others = [Tuned.read(path) for path in options.files]
    for path, other in zip(options.files[1:], others, strict=True):
        _check_card(f"merging {path}", other.device, whole.device, str(options.files[0]))
        whole.merge(other)
    _write(options.out, whole)
    print(f"{len(whole.rows)} rows of {whole.device.name} written to {options.out}")


def _check_card(asked: str, new: DeviceFacts, known: DeviceFacts, whose: str) -> None:
    """Raise FormatError unless both are the same model of GPU."""
    if not new.same_card(known):
        found = f"it has timings of {new.card}, {whose} of {known.card}"
        raise FormatError(asked, found, "Merge only files of the same GPU")


def _warm(options: argparse.Namespace) -> None:
    from toolkit.kernels.registry import find_kernel, find_shape, kernels
    from toolkit.tune import warm

    chosen = [find_kernel(name) for name in options.kernel or kernels()]
    pairs = [(one, find_shape(one, shape)) for one in chosen for shape in ([options.shape] if options.shape else one.known)]
    stop = threading.Event()
    if options.seconds is not None:
        timer = threading.Timer(options.seconds, stop.set)
        timer.daemon = True
        timer.start()
    try:
        print(warm(pairs, options.device, cancel=stop, again=options.again))
    except CancelledError as ended:
        print(ended)


if __name__ == "__main__":
    sys.exit(run())
