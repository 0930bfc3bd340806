"""A worker process that compiles pieces of a model: `python -m toolkit.exporting.compile_worker`, started by `compilers`.

It reads lines of JSON from stdin: first a description of the model, then one job per line. It answers each job with one line on
stdout. It builds the model without weights, traces the job's piece as the export did, and compiles it, without using a GPU. It
exits when stdin is closed, that is when the export ends.
"""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import torch

from toolkit.core.errors import PackageError
from toolkit.core.workers import listen
from toolkit.exporting import compiling, inductor, skeleton
from toolkit.exporting.pieces import Anatomy, compiled_for
from toolkit.tune.cards import Card


def compile_piece(anatomy: Anatomy, card: Card | None, folder: str, job: dict[str, str]) -> dict[str, Any]:
    """Compile a job's piece. Return {"path": ...} of its native code, or {"error": [asked, found, do]}."""
    try:
        piece = next(piece for piece in anatomy.pieces if piece.name == job["piece"])
        program = compiling.trace(anatomy.traceable(piece, job["method"]))
        if compiling.key_of(program, card) != job["key"]:
            found = f"the graph of {piece.name} {job['method']} in the compiling process differs from the one in the export"
            raise PackageError("compiling a layer", found, "Please report this, with the model's config and your versions")
        made = compiling.compile_program(program, job["key"], card, folder)
        inductor.keep_headers()
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".pt2", delete=False) as file:
            file.write(made.data)
        return {"path": file.name}
    except PackageError as error:
        return {"error": [error.asked, error.found, error.do]}
    except (OSError, MemoryError) as error:
        return {
            "error": [
                "compiling a layer",
                str(error) or type(error).__name__,
                "Check free memory and disk space, then run it again; the export resumes",
            ]
        }


def main() -> None:
    about, jobs, answer = listen()
    warnings.simplefilter("ignore")
    torch.set_num_threads(about["threads"])  # Inductor writes this number into code for the CPU
    torch.set_default_dtype(getattr(torch, about["default_dtype"]))
    card = None if about["card"] is None else Card.from_plain(about["card"])
    model = skeleton.from_plain(about["model"], None)
    inductor.declare_arrays_once()
    inductor.find_headers()
    if card is not None:
        inductor.find_cuda(about["folder"], compiling.check_compiler())
        inductor.compile_only_for(card)
    with compiled_for(model, card):
        anatomy = Anatomy(model, about["context"], about["kv"])
        for job in jobs:
            answer(compile_piece(anatomy, card, about["folder"], job))


if __name__ == "__main__":
    main()
