"""`python -m toolkit demo`: compare every decode strategy with a demo model.

Loads the demo model, generates under every strategy on the virtual GPU (and on CUDA, if available), prints the
comparison, writes a self-contained page with the timelines, and says what to try next.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import toolkit as tk
from toolkit.core.units import print_any_text

PROMPT = "The capital of France is"


def demo(out: Path, device: str, max_new_tokens: int, name: str) -> None:
    """Compare every strategy with the model called `name` on `device`, print the table, and write the page `out`."""
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


def demo_everywhere(out: Path, max_new_tokens: int, name: str) -> None:
    """The demo on the virtual GPU, then on CUDA in its own process: registering one changes what pinning means in the other."""
    demo(out, "virtual:h200", max_new_tokens, name)
    if has_cuda():
        print()
        page = out.with_name(f"{out.stem}-cuda{out.suffix}")
        command = ["demo", "--out", str(page), "--device", "cuda", "--max-new-tokens", str(max_new_tokens), "--model", name]
        subprocess.run([sys.executable, "-m", "toolkit", *command], check=True)
    print("\nTry next:  make lab   (the same in JupyterLab: a lesson that lets you predict the copies before you run)")


def has_cuda() -> bool:
    """Return whether there is a CUDA GPU. A subprocess checks, so that this process does not initialize CUDA."""
    code = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=tempfile.gettempdir()).returncode == 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status. Prints errors of the toolkit as one line."""
    parser = argparse.ArgumentParser(prog="python -m toolkit", description="See every copy of every decode step.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("demo", help="generate under every strategy, print the copies, write a page of timelines")
    run.add_argument("--out", type=Path, default=Path("demo.html"), help="the page to write (default: demo.html)")
    run.add_argument("--device", help='where to run: "cuda", "virtual:rtx-5090"... (default: virtual, and CUDA if available)')
    run.add_argument("--max-new-tokens", type=int, default=64, help="tokens to generate (default: 64)")
    run.add_argument("--model", default="demo/qwen3", help='"demo/gemma4", "demo/qwen3.5-moe", a path (default: demo/qwen3)')
    options = parser.parse_args(arguments)
    print_any_text()
    try:
        if options.device:
            demo(options.out, options.device, options.max_new_tokens, options.model)
        else:
            demo_everywhere(options.out, options.max_new_tokens, options.model)
    except tk.ToolkitError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
