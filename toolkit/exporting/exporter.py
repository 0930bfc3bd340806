"""From a model to a package and back: `export`, `load_exported`.

In order: `pieces` takes the model apart, `compilers` make native code of each distinct layer, `weights` writes the weights
once, `package` puts the folder together so that it is whole or not there. `loading` checks such a folder, `running` is what it
gives.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import shutil
import threading
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toolkit.core.display import render
from toolkit.core.errors import DeviceError, ModelError, PackageError
from toolkit.core.units import bytes_text, parse_bytes
from toolkit.core.version import __version__
from toolkit.exporting import compiling, inductor, package, skeleton, weights
from toolkit.exporting.compilers import Compilers
from toolkit.exporting.loading import load_exported
from toolkit.exporting.pieces import LEAST, METHODS, Anatomy, Piece, check_exportable, compiled_for, least_context
from toolkit.exporting.progress import Progress, Watch
from toolkit.exporting.running import Exported
from toolkit.gpu.device import Device
from toolkit.gpu.opening import open_device
from toolkit.loading.loader import load
from toolkit.models.model import CausalLM
from toolkit.ops.define import LEAST_CAPABILITY
from toolkit.planning.describe import describe
from toolkit.planning.plans import BARE_CONTEXT, Levers, Plan, plan_of
from toolkit.tune.cards import Card, find_card
from toolkit.vram.budget import budget as cap

__all__ = ["Exported", "Package", "export", "load_exported"]

CONTEXT = 4096  # unless asked otherwise, or the model has fewer positions


@dataclass(frozen=True)
class Package:
    """What an export made: the folder, and what its manifest says. `load()` makes a model of it."""

    path: Path
    manifest: dict[str, Any]

    def load(self, device: Device | str | None = None) -> Exported:
        """See `load_exported`; this package was made by this process, so it is trusted."""
        return load_exported(self.path, device)

    @property
    def measured(self) -> dict[str, Any]:
        """Seconds and the most memory of each phase; which pieces were compiled and which were kept from before."""
        found: dict[str, Any] = self.manifest["measured"]
        return found

    def _repr_html_(self) -> str:
        return str(render("html", self))

    def __repr__(self) -> str:
        files = self.manifest["files"].values()
        phases = ", ".join(f"{p['phase']} {p['seconds']:.1f} s" for p in self.measured["phases"])
        return f"Package({str(self.path)!r}, {bytes_text(sum(f['bytes'] for f in files))}: {phases})"


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
) -> Package:
    """Compile a model ahead of time into the folder `path`: methods for prefill and decode, and its weights, stored once.

    `model` is a loaded one, or what `tk.load` takes, with `scheme` and `dtype` as there; that is loaded into the host's memory,
    and its weights never go onto a GPU. `device`: what the code is for, the CPU or a CUDA GPU; a loaded model's own, else
    the first GPU, or the CPU where there is none. `target` ("rtx-5090"): another GPU of the catalogue, for which this one
    compiles. `budget` ("4 GiB"): what exporting may take of the GPU's memory, or of the host's where the code is for the CPU; a
    plan (`tk.plan`) says beforehand whether that is enough, and the GPU's allocator is held to it. `context`: how many tokens
    its caches hold at most (4,096, or all that the model has positions for), `kv` in what they hold keys and values (see
    `tk.generate`). `share`: another package with
    the same weights, whose file is linked rather than written again. `progress` is True (a line on a terminal), False, or a
    function of (phase, share done, what) that is called at most ten times a second; once `cancel` is set the export ends
    within seconds.

    A killed or cancelled export leaves the package that was there before, or none; exporting again takes up what was done.
    Raises BudgetError (before any work, with the smallest budget that would do), DeviceError (a virtual GPU, a GPU before
    Ampere, a `target` without a CUDA GPU to compile on), PackageError (no C++ compiler, another PyTorch than is known for GPUs,
    a full disk, a folder that can't be written or is in use), ModelError (a variant that can't be exported, a context that the
    model hasn't), CancelledError.
    """
    folder = Path(path).expanduser()
    device, card = _device(model, device, target)
    watch = Watch(f"exporting into {folder}", progress, cancel, device)
    compiling.check_compiler()
    if not isinstance(model, str | os.PathLike) and (scheme is not None or dtype is not None):
        raise ModelError("a loaded model with a scheme or a dtype", "it is held as it is", "Give its name or path instead")
    package.check_folder(folder)
    others = [] if share is None else _weights_of(Path(share).expanduser())
    looked_at = describe(model, scheme, dtype) if isinstance(model, str | os.PathLike) else model
    check_exportable(looked_at)
    context, most = _context(looked_at, context), None if budget is None else parse_bytes(budget)
    spec = None if card is None else card.spec
    called = os.fspath(model) if isinstance(model, str | os.PathLike) else _name(model)
    foreseen = plan_of(looked_at, called, spec, context, most, None, kv, Levers()).check()
    with package.locked(folder), ExitStack() as held:
        loaded = looked_at
        if isinstance(model, str | os.PathLike):
            with watch.phase("load"):
                loaded = load(model, "cpu", dtype, scheme, progress=False, cancel=cancel)
        held.enter_context(_held_to(most, device))  # no sooner: what else runs in this process is held to it too
        plain, room = skeleton.to_plain(loaded), max(context, least_context(loaded))
        package.check_disk(folder, weights.size_of(loaded) if not list(folder.glob("weights-*")) else 0)
        files: dict[str, dict[str, Any]] = {}
        compiled: dict[str, dict[str, str]] = {}
        shapes = _shapes_alone(loaded, plain)
        with Compilers(plain, room, kv, card, foreseen.compilers) as compilers:
            with watch.phase("trace"), compiled_for(shapes, card):
                anatomy = Anatomy(shapes, room, kv)
                jobs = {method: _trace(anatomy, method, compilers, watch, card) for method in METHODS}
            for method in METHODS:
                with watch.phase(f"compile {method}"):
                    _gather(jobs[method], folder, files, compiled, watch)
        with watch.phase("weights"):
            files |= _weights(loaded, folder, others, watch)
        with watch.phase("manifest"):
            files |= _tokenizer(loaded, folder)
            manifest = _manifest(context, plain, anatomy, compiled, files, foreseen, watch, card)
            package.remember(package.finish(folder, manifest))
    return Package(folder, package.read_manifest(folder)[0])


# ---- the parts of an export


def _shapes_alone(model: CausalLM, plain: dict[str, Any]) -> CausalLM:
    """A model without values, to be taken apart in place of `model`, which somebody may use meanwhile."""
    found = skeleton.from_plain(plain, None)
    if skeleton.shapes_of(found) != skeleton.shapes_of(model):
        raise ModelError("an export", "its weights aren't those of a model that was loaded: changed since?", "Load it again")
    return found


@dataclass(frozen=True)
class _Job:
    """A piece in one of its methods: kept from before, or being compiled."""

    piece: Piece
    method: str
    made: compiling.Compiled | Future[compiling.Compiled]

    def done(self) -> bool:
        return not isinstance(self.made, Future) or self.made.done()


def _trace(anatomy: Anatomy, method: str, compilers: Compilers, watch: Watch, card: Card | None) -> list[_Job]:
    """Each distinct piece by one method. What isn't kept from before is compiled from now on, by other processes."""
    jobs = []
    for piece in anatomy.distinct():
        if _needed(anatomy, piece, method):
            watch.step(0.0, f"{piece.name} {method}")
            key = compiling.key_of(compiling.trace(anatomy.traceable(piece, method)), card)
            jobs.append(_Job(piece, method, compiling.find_kept(key) or compilers.submit(piece.name, method, key)))
    return jobs


def _gather(jobs: list[_Job], folder: Path, files: dict[str, Any], compiled: dict[str, dict[str, str]], watch: Watch) -> None:
    """What one method's pieces became: into the folder, and into `compiled`, kind to method to file."""
    while waiting := [job for job in jobs if not job.done()]:
        watch.step(1 - len(waiting) / len(jobs), f"compiling {', '.join(job.piece.name for job in waiting)}")
        futures = [job.made for job in waiting if isinstance(job.made, Future)]
        for future in wait(futures, timeout=0.1, return_when=FIRST_COMPLETED).done:
            future.result()  # an error ends the export at once
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
    """The weights' file in the folder: one that is there already, one of another package, or written now."""
    size = weights.size_of(model)
    there = [p for p in [*folder.glob("weights-*.safetensors"), *others] if p.stat().st_size == size]
    if there:
        sha256 = weights.hash_of(model, watch.bytes(size))
        name = f"weights-{sha256[:16]}.safetensors"
        for path in there:
            if path.name == name and _is_whole(path, sha256, size, watch.bytes(size)):
                _link(path, folder / name)
                return {name: {"sha256": sha256, "bytes": size}}
    partial = folder / "weights.partial"
    try:
        sha256 = weights.write(model, partial, watch.bytes(size))
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    name = f"weights-{sha256[:16]}.safetensors"
    os.replace(partial, folder / name)
    return {name: {"sha256": sha256, "bytes": size}}


def _weights_of(other: Path) -> list[Path]:
    """The weights' file of another package. PackageError where it is none."""
    return [other / name for name in package.read_manifest(other)[0]["files"] if name.startswith("weights-")]


def _is_whole(path: Path, sha256: str, size: int, step: Any) -> bool:
    try:
        package.verify(path.parent, path.name, {"sha256": sha256, "bytes": size}, step)
    except PackageError:
        return False
    return True


def _link(path: Path, wanted: Path) -> None:
    """Have a file at `wanted` too: linked where that goes, else copied."""
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
    context: int, plain: dict[str, Any], anatomy: Anatomy, compiled: dict[str, Any], files: dict[str, Any], foreseen: Plan,
    watch: Watch, card: Card | None,
) -> dict[str, Any]:  # fmt: skip
    names = {id(parameter): name for name, parameter in anatomy.model.named_parameters()}
    post, scalar = anatomy.last
    return {
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
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
    return Path(getattr(getattr(model, "report", None), "source", "") or "the model").name


def _device(model: object, device: Device | str | None, target: str | None) -> tuple[Device, Card | None]:
    """What the code is compiled on, and the GPU that it is for; None for the CPU."""
    if not isinstance(model, str | os.PathLike) and not hasattr(model, "device"):
        raise ModelError("an export", f"a {type(model).__name__}, not a model", "Give one that tk.load made, or a name or path")
    if device is None:
        device = getattr(model, "device", None) or ("cuda" if torch.cuda.is_available() else "cpu")
    found = open_device(device)
    if found.torch.type not in ("cpu", "cuda"):
        do = 'Give device="cpu" for a package that runs here; tk.plan says what an export would take of a GPU'
        raise DeviceError(f"an export for {target or found.name}", "no package runs on a virtual GPU", do)
    card = find_card(target or found)
    if card is None:
        return found, None
    if card.spec.compute_capability < LEAST_CAPABILITY:
        do = "Name an Ampere GPU, or a later one"
        raise DeviceError(f"an export for {card.spec.name}", "the kernels need compute capability 8.0", do)
    inductor.check_supported(card)
    return found, card


def _held_to(budget: int | None, device: Device) -> AbstractContextManager[Any]:
    """The GPU's allocator gives no more than the budget, less what CUDA itself takes."""
    if budget is None or device.torch.type != "cuda":
        return nullcontext()
    return cap(budget - BARE_CONTEXT, device) or nullcontext()


def _context(model: CausalLM, context: int | None) -> int:
    most = model.config.max_position_embeddings
    if context is None:
        return min(CONTEXT, most)
    if type(context) is not int or not 2 <= context <= most:
        raise ModelError(
            f"a context of {context!r}", f"this model has positions for 2 to {most:,}", "Give a number among these"
        )
    return context


def _target(card: Card | None) -> dict[str, Any]:
    """The device that a package is for, as its manifest has it."""
    if card is None:
        return {"device": "cpu"}
    return {"device": "cuda", "gpu": card.spec.name, "capability": card.facts.compute_capability}
