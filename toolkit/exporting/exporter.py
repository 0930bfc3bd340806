"""`export` compiles a model ahead of time into a folder, called a package; `load_exported` loads a package as a model.

An export splits the model into layers (`pieces`), compiles each distinct layer in worker processes (`compilers`), writes the
weights once (`weights`), and finishes by replacing the package's manifest (`package`). `loading` checks and loads a package,
which is then an `Exported` model (`running`).
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from toolkit.core.display import render
from toolkit.core.distributed import WHOLE, Shard
from toolkit.core.errors import DeviceError, ModelError, PackageError, brief
from toolkit.core.files import check_path, shown, writing
from toolkit.core.numbers import integer
from toolkit.core.remote import check_here
from toolkit.core.units import bytes_text, parse_bytes
from toolkit.core.version import __version__
from toolkit.exporting import compiling, inductor, package, skeleton, weights
from toolkit.exporting.compilers import Compilers
from toolkit.exporting.loading import load_exported
from toolkit.exporting.pieces import LEAST, METHODS, MOST, Anatomy, Piece, compiled_for, digest, least_context, traced_context
from toolkit.exporting.progress import Progress, Watch
from toolkit.exporting.running import Exported
from toolkit.gpu.device import Device
from toolkit.gpu.opening import open_device, virtual_name
from toolkit.loading.loader import load_part
from toolkit.models.model import CausalLM
from toolkit.ops.define import LEAST_CAPABILITY
from toolkit.planning.describe import describe, describe_parts
from toolkit.planning.plans import BARE_CONTEXT, Levers, Plan, plan_of
from toolkit.tune.cards import Card, find_card
from toolkit.vram.budget import budget as cap

__all__ = ["Exported", "Package", "export", "load_exported"]

CONTEXT = 4096  # default, in tokens; fewer if the model has fewer positions


@dataclass(frozen=True)
class Package:
    """The result of `export`: the absolute path of the package's folder, and its manifest. `load()` returns the model.

    With several `ranks`, the folder has a package for each of them, and the manifest is that of rank 0.
    """

    path: Path
    manifest: dict[str, Any]
    ranks: int = 1

    def load(self, device: Device | str | None = None) -> Exported:
        """Load the package with `load_exported`. `trust=True` is not needed, since this process made the package."""
        return load_exported(self.path, device, tensor_parallel=self.ranks)

    @property
    def measured(self) -> dict[str, Any]:
        """The duration and peak memory of each phase, and whether each piece was compiled or found in the cache."""
        found: dict[str, Any] = self.manifest["measured"]
        return found

    def _repr_html_(self) -> str:
        return str(render("html", self))

    def __repr__(self) -> str:
        files = self.manifest["files"].values()
        phases = ", ".join(f"{p['phase']} {p['seconds']:.1f} s" for p in self.measured["phases"])
        each = f"{self.ranks} ranks with each " if self.ranks > 1 else ""
        return f"Package({str(self.path)!r}, {each}{bytes_text(sum(f['bytes'] for f in files))}: {phases})"


def export(
    model: CausalLM | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    device: Device | str | None = None,
    target: str | None = None,
    budget: int | float | str | None = None,
    context: int | None = None,
    kv: str | None = None,
    scheme: Any = None,
    dtype: torch.dtype | str | None = None,
    share: str | os.PathLike[str] | None = None,
    progress: bool | Progress = True,
    cancel: threading.Event | None = None,
    tensor_parallel: int = 1,
) -> Package:
    """Compile a model ahead of time into the folder `path`: methods for prefill and decode, and its weights, stored once.

    Args:
        model: A loaded model, or a name or path for `tk.load`. A named model is loaded into host memory, not onto a GPU.
        path: The package's folder. It must be new, empty or a package.
        device: The device to compile for: "cpu" or a CUDA GPU. Default: a loaded model's own device, else the first GPU, else
            the CPU.
        target: A GPU of the catalogue to compile for instead ("rtx-5090"). No GPU is needed, only a CUDA build of PyTorch.
        budget: Maximum memory for the export ("4 GiB"), on the GPU or, if the package is for the CPU, on the host. The
            export is planned first (see `tk.plan`), and then PyTorch's CUDA allocator is limited to the budget.
        context: The most tokens that a cache can hold. Default: 4,096, or fewer if the model has fewer positions.
        kv: The format in which caches hold keys and values (see `tk.generate`).
        scheme, dtype: As for `tk.load`, for a model given by name.
        share: Another package with the same weights. Its weights file is hard-linked if possible, else copied.
        progress: True prints a line to the terminal, False prints nothing. A function is called with (phase, fraction done,
            text) at most ten times per second.
        cancel: An event; once it is set, the export ends within seconds.
        tensor_parallel: The number of ranks that will divide the model, given by name, each on a GPU of its own. This process
            exports the parts one after the other, each into a package of its own in `path`. `budget` is that of one GPU.

    An export is atomic: if it is killed or cancelled, the previous package (if any) survives; run it again to resume. With
    several ranks, that holds for each part: parts of two exports are not loaded together.

    Raises:
        BudgetError: The plan needs more than `budget`. The error names the smallest sufficient budget; no work was done.
        DeviceError: The device is virtual, or older than the Ampere generation.
        PackageError: There is no C++ compiler, this PyTorch can't compile for GPUs, the disk is full, or the folder can't be
            written, is in use or holds other files.
        ModelError: This variant of the model can't be exported, the model has fewer positions than `context`, or the ranks
            can't divide it.
        CancelledError: `cancel` was set.
    """
    folder = Path(os.path.abspath(check_path(path, f"an export into {shown(path)}", PackageError)))
    check_here(model, "exporting a model on a cluster", "Give its name: tk.export({divided}, path=FOLDER)")
    ranks = _ranks(model, tensor_parallel)
    other = None if share is None else check_path(share, f"sharing the weights of {shown(share)}", PackageError)
    made = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    one = partial(_export, model, device=device, target=target, budget=budget, context=context, kv=kv, scheme=scheme,
                  dtype=dtype, progress=progress, cancel=cancel, made=made)  # fmt: skip
    if ranks == 1:
        return one(folder, other)
    package.check_parts(folder, ranks)
    assert isinstance(model, str | os.PathLike)  # otherwise `_ranks` has raised
    _planned(describe_parts(model, scheme, dtype, ranks), model, _device(model, device, target)[1], budget, context, kv)
    parts = []
    for shard in (Shard(rank, ranks) for rank in range(ranks)):
        name = package.part_name(shard)
        parts.append(one(folder / name, None if other is None else other / name, shard))
    return Package(folder, parts[0].manifest, ranks)


def _export(
    model: CausalLM | str | os.PathLike[str], folder: Path, share: Path | None, shard: Shard = WHOLE, *,
    device: Device | str | None, target: str | None, budget: int | float | str | None, context: int | None, kv: str | None,
    scheme: Any, dtype: torch.dtype | str | None, progress: bool | Progress, cancel: threading.Event | None, made: str,
) -> Package:  # fmt: skip
    """Export a model, or the part that `shard` holds, into a package. `made` is the time of the export, as text."""
    device, card = _device(model, device, target)
    watch = Watch(f"exporting into {folder}", progress, cancel, device)
    compiling.check_compiler()
    if not isinstance(model, str | os.PathLike) and (scheme is not None or dtype is not None):
        raise ModelError(
            "exporting a loaded model with scheme= or dtype=", "its weights are already loaded", "Pass the model's name or path"
        )
    package.check_folder(folder)
    others = [] if share is None else _weights_of(share)
    looked_at = describe(model, scheme, dtype, shard=shard) if isinstance(model, str | os.PathLike) else model
    foreseen = _planned([looked_at], model, card, budget, context, kv)
    context, most = foreseen.context, foreseen.budget_bytes
    with package.locked(folder, watch.raised), ExitStack() as held:
        loaded = looked_at
        if isinstance(model, str | os.PathLike):
            with watch.phase("load"):
                loaded = load_part(model, shard, dtype, scheme, watch.count, cancel)
        held.enter_context(_held_to(most, device))  # as late as possible, since the limit applies to the whole process
        plain, room = skeleton.to_plain(loaded), traced_context(loaded, context)
        there = any(path.stat().st_dev == folder.stat().st_dev for path in _reusable(loaded, folder, others))
        package.check_disk(folder, 0 if there else weights.size_of(loaded))
        files: dict[str, dict[str, Any]] = {}
        compiled: dict[str, dict[str, str]] = {}
        shapes = _shapes_alone(loaded, plain)
        with Compilers(plain, room, kv, card, foreseen.compilers) as compilers:
            with watch.phase("trace"), compiled_for(shapes, card):
                anatomy = Anatomy(shapes, room, kv)
                about = digest(plain, room, kv, torch.get_default_dtype())
                jobs = {method: _trace(anatomy, about, method, compilers, watch, card) for method in METHODS}
            for method in METHODS:
                with watch.phase(f"compile {method}"):
                    _gather(jobs[method], folder, files, compiled, watch)
        with watch.phase("weights"):
            files |= _weights(loaded, folder, others, watch)
        with watch.phase("manifest"):
            files |= _tokenizer(loaded, folder)
            manifest = _manifest(made, context, plain, anatomy, compiled, files, foreseen, watch, card)
            package.remember(package.finish(folder, manifest))
    return Package(folder, package.read_manifest(folder)[0])


# ---- the parts of an export


def _planned(
    parts: Sequence[CausalLM], model: CausalLM | str | os.PathLike[str], card: Card | None, budget: int | float | str | None,
    context: int | None, kv: str | None,
) -> Plan:  # fmt: skip
    """Return the plan for the model, given as the parts that the ranks hold. Raises BudgetError if one of them doesn't fit."""
    called = os.fspath(model) if isinstance(model, str | os.PathLike) else _name(model)
    spec, most = None if card is None else card.spec, None if budget is None else parse_bytes(budget)
    return plan_of(parts, called, spec, _context(parts[0], context), most, None, kv, Levers(), MOST).check()


def _shapes_alone(model: CausalLM, plain: dict[str, Any]) -> CausalLM:
    """Return a copy of the model without values. It is traced instead of `model`, which other threads may use meanwhile."""
    found = skeleton.from_plain(plain, None)
    if skeleton.shapes_of(found) != skeleton.shapes_of(model):
        raise ModelError(
            "exporting a loaded model",
            "the shapes of its weights don't match its config, so it was changed after loading",
            "Load the model again",
        )
    return found


@dataclass(frozen=True)
class _Job:
    """A piece and a method ("prefill" or "decode"), with its compiled code or the future of it."""

    piece: Piece
    method: str
    made: compiling.Compiled | Future[compiling.Compiled]

    def done(self) -> bool:
        return not isinstance(self.made, Future) or self.made.done()


def _trace(anatomy: Anatomy, about: str, method: str, compilers: Compilers, watch: Watch, card: Card | None) -> list[_Job]:
    """Trace each distinct piece for one method, and start compiling those that are not in the cache.

    `about` is a hash of the model and of its caches' size and format.
    """
    jobs = []
    for piece in anatomy.distinct():
        if _needed(anatomy, piece, method):
            watch.step(0.0, f"{piece.name} {method}")
            key = compiling.find_key(digest(about, piece.name, method), partial(anatomy.traceable, piece, method), card)
            jobs.append(_Job(piece, method, compiling.find_kept(key) or compilers.compile(piece.name, method, key)))
    return jobs


def _gather(jobs: list[_Job], folder: Path, files: dict[str, Any], compiled: dict[str, dict[str, str]], watch: Watch) -> None:
    """Wait for one method's pieces and write their code into the folder. Adds to `files`, `compiled` and `watch.pieces`.

    `compiled` maps a kind of piece (`Piece.like`) and a method to a file name.
    """
    while waiting := [job for job in jobs if not job.done()]:
        watch.step(1 - len(waiting) / len(jobs), f"compiling {', '.join(job.piece.name for job in waiting)}")
        futures = [job.made for job in waiting if isinstance(job.made, Future)]
        for future in wait(futures, timeout=0.1, return_when=FIRST_COMPLETED).done:
            future.result()  # raises at once if compiling failed
    for job in jobs:
        made = job.made.result() if isinstance(job.made, Future) else job.made
        name = f"methods/{job.method}-{job.piece.name.replace('.', '-')}-{made.sha256[:16]}.pt2"
        package.put(folder, name, made.data)
        files[name] = {"sha256": made.sha256, "bytes": len(made.data)}
        compiled.setdefault(job.piece.like, {})[job.method] = name
        watch.pieces.append({"piece": job.piece.name, "method": job.method, "kept": made.kept})


def _needed(anatomy: Anatomy, piece: Piece, method: str) -> bool:
    return method == "decode" or (piece.layer is not None and anatomy.chunk >= LEAST)


def _weights(model: CausalLM, folder: Path, others: list[Path], watch: Watch) -> dict[str, dict[str, Any]]:
    """Put the weights file into the folder, and return its entry for the manifest.

    A file with the same contents, in the folder or in another package, is reused.
    """
    size = weights.size_of(model)
    there = _reusable(model, folder, others)
    if there:
        sha256 = weights.hash_of(model, watch.bytes(size))
        name = f"weights-{sha256[:16]}.safetensors"
        for path in there:
            if path.name == name and _is_whole(path, sha256, size, watch.bytes(size)):
                _link(path, folder / name)
                return {name: {"sha256": sha256, "bytes": size}}
    with writing(folder) as file:
        sha256 = weights.write(model, file, watch.bytes(size))
        name = f"weights-{sha256[:16]}.safetensors"
        os.replace(file.name, folder / name)
    return {name: {"sha256": sha256, "bytes": size}}


def _reusable(model: CausalLM, folder: Path, others: list[Path]) -> list[Path]:
    """Return the weights files, in the folder or in another package, that have the size of the model's.

    A package has no symbolic links, so they are left out.
    """
    size = weights.size_of(model)
    found = [path for path in [*folder.glob("weights-*.safetensors"), *others] if path.is_file() and not path.is_symlink()]
    return [path for path in found if path.stat().st_size == size]


def _weights_of(other: Path) -> list[Path]:
    """Return the path of another package's weights file. Raises PackageError if the folder is not a package."""
    return [other / name for name in package.read_manifest(other)[0]["files"] if name.startswith("weights-")]


def _is_whole(path: Path, sha256: str, size: int, step: Any) -> bool:
    try:
        with package.opened(path.parent, path.name) as file:
            package.verify(path.parent, path.name, file, {"sha256": sha256, "bytes": size}, step)
    except PackageError:
        return False
    return True


def _link(path: Path, wanted: Path) -> None:
    """Hard-link the file to `wanted`, or copy it if the file system can't link."""
    if path == wanted:
        return
    partial = wanted.with_name("weights.partial")
    partial.unlink(missing_ok=True)
    try:
        os.link(path, partial)
    except OSError:
        shutil.copyfile(path, partial)
    os.replace(partial, wanted)


def _tokenizer(model: CausalLM, folder: Path) -> dict[str, dict[str, Any]]:
    if model.tokenizer is None:
        return {}
    data = model.tokenizer.to_bytes()
    package.put(folder, "tokenizer.json", data)
    return {"tokenizer.json": package.entry(data)}


def _manifest(
    made: str, context: int, plain: dict[str, Any], anatomy: Anatomy, compiled: dict[str, Any], files: dict[str, Any],
    foreseen: Plan, watch: Watch, card: Card | None,
) -> dict[str, Any]:  # fmt: skip
    names = {id(parameter): name for name, parameter in anatomy.model.named_parameters()}
    post, scalar = anatomy.last
    return {
        "made": made,
        "versions": {"toolkit": __version__, "torch": torch.__version__},
        "target": {**compiling.processor(), **_target(card)},
        "model": plain,
        "context": context,
        "kv": anatomy.kv,
        "chunk": anatomy.chunk,
        "least": least_context(anatomy.model),
        "pieces": [{"name": p.name, "layer": p.layer, "weights": p.weights, "like": p.like} for p in anatomy.pieces],
        "last": [post and names[id(post.weight)], post.eps if post else 0.0, None if scalar is None else names[id(scalar)]],
        "compiled": compiled,
        "files": files,
        "plan": {
            "budget_bytes": foreseen.budget_bytes,
            "export": [dataclasses.asdict(phase) for phase in foreseen.export],
            "run": [dataclasses.asdict(phase) for phase in foreseen.run],
        },
        "measured": {"phases": watch.phases, "pieces": watch.pieces},
    }


# ---- checks


def _name(model: CausalLM) -> str:
    return Path(getattr(getattr(model, "report", None), "source", "")).name or "the model"  # the source may be "."


def _ranks(model: object, tensor_parallel: object) -> int:
    """Return the number of ranks. Raises ModelError if it is not one, or if `model` is loaded and so can't be divided."""
    ranks = integer(tensor_parallel, least=1)
    if ranks is None:
        asked = f"an export for {brief(tensor_parallel)} ranks"
        raise ModelError(asked, "not a whole number of at least 1", "Give the number of processes, for example 2")
    if ranks > 1 and not isinstance(model, str | os.PathLike):
        found = "it was loaded whole, and each rank's part is loaded separately"
        raise ModelError(f"exporting a loaded model for {ranks} ranks", found, "Pass the model's name or path")
    return ranks


def _device(model: object, device: Device | str | None, target: str | None) -> tuple[Device, Card | None]:
    """Return the device of this machine that the export uses, and the GPU to compile for (None for the CPU)."""
    if not isinstance(model, str | os.PathLike):
        skeleton.architecture_of(model)
    shard: Shard = getattr(model, "shard", WHOLE)
    if shard != WHOLE:
        do = f"Pass the model's name or path, and tensor_parallel={shard.ranks}"
        raise ModelError("exporting a loaded model", f"it holds {shard} only", do)
    if device is None:
        device = getattr(model, "device", None) or ("cuda" if torch.cuda.is_available() else "cpu")
    if virtual := virtual_name(device):  # it isn't opened, as another one may be open
        if target is not None:
            has = f"the exporting device is {virtual}, and exports don't use virtual GPUs"
            raise DeviceError(f"an export for {brief(target)}", has, 'Pass device="cpu", too: an export needs no GPU')
        do = 'Use device="cpu" for a package that runs here, or tk.plan to see how much memory an export takes on a GPU'
        raise DeviceError(f"an export for {virtual}", "packages don't run on virtual GPUs", do)
    found = open_device(device)
    card = find_card(found if target is None else target)
    if card is None:
        return found, None
    if card.spec.compute_capability < LEAST_CAPABILITY:
        do = "Choose a GPU of the Ampere generation or later"
        has = f"its compute capability is {card.facts.compute_capability}, and the kernels need at least 8.0"
        raise DeviceError(f"an export for {card.spec.name}", has, do)
    inductor.check_supported(card)
    return found, card


def _held_to(budget: int | None, device: Device) -> AbstractContextManager[Any]:
    """Limit PyTorch's CUDA allocator to the budget, less the memory of the CUDA context."""
    if budget is None or device.torch.type != "cuda":
        return nullcontext()
    return cap(budget - BARE_CONTEXT, device) or nullcontext()


def _context(model: CausalLM, context: int | None) -> int:
    most = model.config.max_position_embeddings
    if context is None:
        return min(CONTEXT, most)
    found = integer(context, 2, most)
    if found is None:
        what = f"this model has positions for 2 to {most:,} tokens"
        raise ModelError(f"a context of {brief(context)}", what, "Choose a number in this range")
    return found


def _target(card: Card | None) -> dict[str, Any]:
    """Return the manifest's description of the device that a package is for."""
    if card is None:
        return {"device": "cpu"}
    return {"device": "cuda", "gpu": card.spec.name, "capability": card.facts.compute_capability}
