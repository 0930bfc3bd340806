"""The command line.

    python -m toolkit demo                                 compare every decode strategy with a demo model
    python -m toolkit run MODEL PROMPT                     generate, and save the trace with --save
    python -m toolkit plan MODEL --device rtx-4090         predict the memory of a model on a GPU
    python -m toolkit open FILE                            print what a trace or a memory snapshot has
    torchrun --nproc-per-node 2 -m toolkit run MODEL PROMPT     the same on two ranks, which divide the model

The demo generates under every strategy on the virtual GPU (and on CUDA, if available), prints the comparison, writes a
self-contained page with the timelines, and says what to try next.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import toolkit as tk
from toolkit.core.distributed import announcing, join, leave, started
from toolkit.core.errors import RankError
from toolkit.core.files import check_writable
from toolkit.core.units import bytes_text, drop_output, print_any_text, unwritten
from toolkit.ranks.runs import collected
from toolkit.vram.measure import MemoryUse

if TYPE_CHECKING:
    import pandas as pd

PROMPT = "The capital of France is"


def demo(out: Path, device: str, max_new_tokens: int, name: str) -> None:
    """Compare every strategy with the model called `name` on `device`, print the table, and write the page `out`."""
    _check_page(out, "--out")
    gpu = tk.device(device)
    print(f"Loading {name} on {gpu.name}")
    model = tk.load(name, device=gpu)
    comparison = tk.compare(model, PROMPT, max_new_tokens=max_new_tokens)
    first = next(iter(comparison.runs.values()))
    text = first.text.strip().replace("\n", " ")
    print(f'\n"{PROMPT}" continues: {text[:160]}{"..." if len(text) > 160 else ""}\n')
    print(comparison)
    page = comparison.to_html(out)
    print(f"\nTimelines of every strategy: {page} (open it in a browser; it needs no network)")


def demo_everywhere(out: Path, max_new_tokens: int, name: str) -> int:
    """The demo on the virtual GPU, then on CUDA in its own process: registering one changes what pinning means in the other.

    Returns the exit status.
    """
    status = 0
    demo(out, "virtual:h200", max_new_tokens, name)
    if has_cuda():
        print(flush=True)  # before what the other process prints
        page = out.with_name(f"{out.stem}-cuda{out.suffix}")
        command = ["demo", "--out", str(page), "--device", "cuda", "--max-new-tokens", str(max_new_tokens), "--model", name]
        status = subprocess.run([sys.executable, "-m", "toolkit", *command]).returncode
    if status == 0:
        print("\nTry next:  make lab   (the same in JupyterLab: a lesson that lets you predict the copies before you run)")
    return status


def has_cuda() -> bool:
    """Return whether there is a CUDA GPU. A subprocess checks, so that this process does not initialize CUDA."""
    code = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=tempfile.gettempdir()).returncode == 0


def run(options: argparse.Namespace) -> None:
    """Load a model, generate, and print the text as it comes. With several ranks, only rank 0 prints and saves."""
    processes = started()
    ranks = processes if options.tensor_parallel is None else options.tensor_parallel
    if processes not in (1, ranks):
        raise RankError(f"a model over {ranks} ranks", f"torchrun started {processes}", "Leave out --tensor-parallel")
    shard = join(ranks)
    first, gpu = shard.rank == 0, tk.device(options.device)
    strategy = options.strategy
    if strategy is None:
        strategy = "cuda-graph" if gpu.graphs else "double-buffered"
    with announcing():
        if first and options.save is not None:  # other nodes need not have the folder
            check_writable(options.save, tk.ToolkitError)
        model = tk.load(
            options.model, device=gpu, dtype=options.dtype, scheme=options.scheme, progress=first,
            tensor_parallel=shard.ranks,
        )  # fmt: skip
        found = tk.generate(
            model, options.prompt, strategy, max_new_tokens=options.max_new_tokens, temperature=options.temperature,
            seed=options.seed, context=options.context, kv=options.kv,
            record=options.save is not None, on_token=_print_piece if first else None,
        )  # fmt: skip
        whole = collected(found, shard)
        leave()
    if whole is not None:
        print(f"\n\n{whole}")
        if options.save is not None:
            print(f"Saved as {whole.save(options.save)}: tk.open_trace shows it")


def show_plan(options: argparse.Namespace) -> None:
    """Print the memory that a model needs on a GPU, or with --gpus whether it fits on each GPU of the catalogue."""
    found = tk.plan(
        options.model, options.device, options.budget, options.context, scheme=options.scheme, dtype=options.dtype,
        kv=options.kv, run_budget=options.run_budget, tensor_parallel=options.tensor_parallel,
    )  # fmt: skip
    print(_gpus_text(found.gpus()) if options.gpus else found)


def _gpus_text(table: pd.DataFrame) -> str:
    """Return the table of all GPUs, with sizes in the units of the plan."""
    names = {name: name.removesuffix("_bytes") for name in table if name.endswith("_bytes")}
    return table.rename(columns=names).to_string(formatters=dict.fromkeys(names.values(), bytes_text))


def show_trace(options: argparse.Namespace) -> None:
    """Print the events of a trace, and its copies per step, or its memory if it has no steps. Several files are ranks."""
    if options.html is not None:
        _check_page(options.html, "--html")
    with warnings.catch_warnings(record=True) as caught:
        trace = tk.open_trace(options.files[0] if len(options.files) == 1 else options.files)
    for one in caught:
        warnings.showwarning(one.message, one.category, one.filename, one.lineno)
    warned = {str(one.message) for one in caught}  # some are notes, too
    copies = trace.copies()
    print(trace, *(note for note in trace.meta.get("notes") or [] if note not in warned), sep="\n")
    for table in (copies, trace.ranks()):
        if len(table):
            print(f"\n{table.to_string(index=False)}")
    if not len(copies) and trace.is_kind("alloc", "free").any():
        print(f"\n{MemoryUse(trace)}")
    if options.html is not None:
        print(f"\nTimeline: {trace.to_html(options.html)} (open it in a browser; it needs no network)")


def _check_page(path: Path, option: str) -> None:
    """Raise ToolkitError if `path` can't be written, or isn't the name of a page. The page would replace a trace."""
    if path.suffix.lower() not in (".html", ".htm"):  # as in "open --html a.json b.json"
        raise tk.ToolkitError(f"writing {str(path)!r}", "the name of a page ends in .html", f"Give another name after {option}")
    check_writable(path, tk.ToolkitError)


def _print_piece(token: int, text: str) -> None:
    print(text, end="", flush=True)


def _kv(text: str) -> str | None:
    """Return the format of keys and values; None, which is plain, for "none"."""
    return None if text == "none" else text


def _add_run(commands: Any) -> None:
    parser = commands.add_parser("run", help="generate text; with torchrun, on several ranks that divide the model")
    parser.add_argument("model", help='"demo/qwen3", a folder, a .gguf file, a repository of the Hub')
    parser.add_argument("prompt", help="the text to continue")
    what = '"cuda", "cpu", "virtual:rtx-5090"... (default: CUDA if available, or virtual:h200)'
    parser.add_argument("--device", default="auto", help=what)
    parser.add_argument("--tensor-parallel", type=int, help="ranks that divide the model (default: all that torchrun started)")
    parser.add_argument("--strategy", help="how to decode (default: cuda-graph; on the CPU double-buffered)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens to generate (default: 128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default): the most probable token")
    parser.add_argument("--seed", type=int, default=0, help="the seed of sampling (default: 0)")
    parser.add_argument("--dtype", help='the dtype of computation, such as "bfloat16" (default: that of the model)')
    parser.add_argument("--scheme", help='how matrices are stored: "q4_k_m", "int8"... (default: as in the file)')
    parser.add_argument("--context", type=int, help="positions in the cache (default: as many as needed)")
    parser.add_argument(
        "--kv", type=_kv, help='the format of keys and values in the cache: "int8", "k4v8", "int4" (default: "none")'
    )
    parser.add_argument("--save", type=Path, help="the file for the run and its trace, which has the events of all ranks")


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser("plan", help="predict the GPU memory of exporting and running a model; needs no GPU")
    parser.add_argument("model", help='"Qwen/Qwen3-8B", "random/gemma4-31b", a folder, a .gguf file')
    parser.add_argument("--device", default="auto", help='"rtx-4090", "cuda"... (default: CUDA if available, or h200)')
    parser.add_argument("--context", type=int, help="positions in the cache (default: 4,096, or the model's maximum)")
    parser.add_argument("--scheme", help='how matrices are stored: "q4_k_m", "int8"... (default: as in the file)')
    parser.add_argument("--dtype", help='the dtype of computation, such as "bfloat16" (default: that of the model)')
    parser.add_argument(
        "--kv", type=_kv, default="auto", help='"none", "int8", "k4v8", "int4" (default: "auto", the first that fits)'
    )
    parser.add_argument("--budget", help='GPU memory for the export, such as "4 GiB" (default: all)')
    parser.add_argument("--run-budget", help='GPU memory for running, such as "12 GiB" (default: all)')
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks that divide the model (default: 1)")
    parser.add_argument("--gpus", action="store_true", help="print on which GPUs of the catalogue the model fits")


def _add_open(commands: Any) -> None:
    parser = commands.add_parser("open", help="print the copies per step of a trace, or the memory of a snapshot")
    what = "a file of the toolkit, the PyTorch profiler or Nsight Systems, or a memory snapshot; of several ranks, all files"
    parser.add_argument("files", nargs="+", metavar="FILE", help=what)
    parser.add_argument("--html", type=Path, help="also write this page with the timeline")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status. Prints errors of the toolkit and interrupts as one line."""
    parser = argparse.ArgumentParser(prog="python -m toolkit", description="See every copy of every decode step.")
    parser.add_argument("--version", action="version", version=f"toolkit {tk.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_run(commands)
    _add_plan(commands)
    _add_open(commands)
    shown = commands.add_parser("demo", help="generate under every strategy, print the copies, write a page of timelines")
    shown.add_argument("--out", type=Path, default=Path("demo.html"), help="the page to write (default: demo.html)")
    shown.add_argument("--device", help='"cuda", "cpu", "virtual:rtx-5090"... (default: virtual:h200, and CUDA if available)')
    shown.add_argument("--max-new-tokens", type=int, default=64, help="tokens to generate (default: 64)")
    shown.add_argument("--model", default="demo/qwen3", help='"demo/gemma4", "demo/qwen3.5-moe", a path (default: demo/qwen3)')
    options = parser.parse_args(arguments)
    print_any_text()
    status = 0
    try:
        if options.command == "run":
            run(options)
        elif options.command == "plan":
            show_plan(options)
        elif options.command == "open":
            show_trace(options)
        elif options.device is not None:
            demo(options.out, options.device, options.max_new_tokens, options.model)
        else:
            status = demo_everywhere(options.out, options.max_new_tokens, options.model)
        print(end="", flush=True)
    except BrokenPipeError:
        drop_output()
    except tk.ToolkitError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        return unwritten(error)
    except KeyboardInterrupt:
        print("Interrupted", file=sys.stderr)
        return 130  # as the shell reports an end by SIGINT
    return status


def _warning_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:  # fmt: skip
    """Return a warning as errors are printed. One that names the user's line would name Python's `runpy` here."""
    shown = message if filename.startswith("<frozen ") else f"{filename}:{lineno}: {message}"
    return f"{category.__name__}: {shown}\n"


if __name__ == "__main__":
    warnings.formatwarning = _warning_line
    sys.exit(main())
