"""`load_exported`: checks that a package is complete, unchanged and compiled for this machine, and loads it."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from toolkit.core.distributed import Shard, check_same, join
from toolkit.core.errors import CancelledError, DeviceError, PackageError, ToolkitError
from toolkit.core.files import check_path, shown
from toolkit.core.flags import flag
from toolkit.exporting import compiling, package, skeleton, weights
from toolkit.exporting.pieces import LEAST, MOST, least_context
from toolkit.exporting.progress import Progress, Watch
from toolkit.exporting.running import Exported
from toolkit.gpu.device import Device
from toolkit.gpu.opening import name_of, open_device
from toolkit.kernels.kv_codes import KV_SCHEMES
from toolkit.loading.loader import check_ranks
from toolkit.models.model import CausalLM
from toolkit.text import tokenizer as tokenizers
from toolkit.tune.cards import find_card
from toolkit.weights.safetensors_files import SafetensorsFile


def load_exported(
    path: str | os.PathLike[str], device: Device | str | None = None, *, trust: bool = False, progress: bool | Progress = True,
    tensor_parallel: int = 1,
) -> Exported:  # fmt: skip
    """Load a package as a model for `tk.generate`. Weights are mapped (on the CPU) or copied once (to a GPU).

    Every file is checked against its hash in the manifest: code before it is loaded, weights while they are loaded. Hashes show
    that a package is complete and unchanged, not who made it, and it contains native code that runs with all your rights.
    Therefore a package that this user didn't make on this machine requires `trust=True` (other values than True and False are
    refused).

    With `tensor_parallel`, `path` has a package per rank, and all processes of torch.distributed's default group load theirs
    (see `tk.load`).

    Raises PackageError if the package is incomplete, was changed, has a newer format, or was made by another version of PyTorch
    or for another processor or GPU; `found` and `do` say which. Raises RankError if the ranks differ or are missing.
    """
    trust = flag("trust", trust, PackageError)
    shard = join(tensor_parallel)
    folder = _folder_of(check_path(path, f"package {shown(path)}", PackageError), shard)
    manifest, own = package.read_manifest(folder)
    if skeleton.shard_of(manifest["model"]) != shard:
        found = f"it is for {skeleton.shard_of(manifest['model'])}, and this is {shard}"
        raise PackageError(f"package {folder}", found, "Give the folder that tk.export wrote, and its number of ranks")
    if not trust and not package.made_here(own):
        found = "it contains native code, and you didn't export it on this machine"
        do = "If you trust its author and the way it was transferred: tk.load_exported(path, trust=True)"
        raise PackageError(f"package {folder}", found, do)
    target = _check_target(folder, manifest, device)
    check_ranks(shard, f"package {folder.parent}", target)
    again = "The parts are of different exports, perhaps because one was interrupted. Export the model again"
    check_same(shard, f"loading package {folder.parent}", again, **{"the export time": manifest.get("made")})
    watch = Watch(f"loading {folder}", progress, None)
    files = manifest["files"]
    weights_name = next(name for name in files if name.startswith("weights-"))
    with watch.phase("verify"):
        data = {name: package.verified(folder, name, entry) for name, entry in files.items() if name != weights_name}
    model = _build(folder, manifest, target)
    _check_fits(folder, manifest, model)
    with watch.phase("weights"):
        _fill(model, folder, weights_name, files[weights_name], target.torch, watch)
    if "tokenizer.json" in files:
        model.tokenizer = tokenizers.from_bytes(data["tokenizer.json"], f"package {folder}")
    runs = {name: compiling.load_piece(held, target.torch) for name, held in data.items() if name.startswith("methods/")}
    return Exported(model, Path(os.path.abspath(folder)), manifest, runs)  # stays right after a change of folder


def _folder_of(folder: Path, shard: Shard) -> Path:
    """Return the folder of a rank's package. Raises PackageError if the packages are for another number of ranks."""
    ranks = package.ranks_in(folder) or (1 if (folder / package.MANIFEST).exists() else shard.ranks)
    if ranks != shard.ranks:
        start = f" in each process of torchrun --nproc-per-node {ranks}" if ranks > 1 else ""
        found = f"it was exported for {ranks} {'ranks' if ranks > 1 else 'rank'}, and this is {shard}"
        raise PackageError(f"package {folder}", found, f"Load it with tensor_parallel={ranks}{start}")
    return folder / package.part_name(shard) if shard.ranks > 1 else folder


def _build(folder: Path, manifest: dict[str, Any], device: Device) -> CausalLM:
    """Build the model that a manifest describes. Raises PackageError if it can't be built."""
    try:
        return skeleton.from_plain(manifest["model"], device, len(manifest["pieces"]) - 1)
    except ToolkitError as error:
        found = f"{error.asked}: {error.found}. Toolkit {manifest['versions']['toolkit']:.20} wrote the package"
        raise PackageError(f"package {folder}", found, "Export the model again with this version") from error


def _check_fits(folder: Path, manifest: dict[str, Any], model: CausalLM) -> None:
    """Raise PackageError if the manifest contradicts the model that it describes."""
    pieces, (post, _, scalar) = manifest["pieces"], manifest["last"]
    parameters = {name for name, _ in model.named_parameters()}
    unknown = {post, scalar, *(name for piece in pieces for name in piece["weights"])} - parameters - {None}
    context, least, chunk, kv = (manifest[name] for name in ("context", "least", "chunk", "kv"))
    methods = [manifest["compiled"][piece["like"]] for piece in pieces if piece["layer"] is not None]
    found = None
    if unknown:
        found = f"weights that the model doesn't have: {min(unknown):.80}"
    elif kv not in (None, *KV_SCHEMES):
        found = f"the unknown kv={kv!r:.20}"
    elif not 2 <= context <= model.config.max_position_embeddings:
        found = f"a context of {context:,}; the model has positions for 2 to {model.config.max_position_embeddings:,} tokens"
    elif least != least_context(model):
        found = f"caches for at least {least:,} tokens; the model needs {least_context(model):,}"
    elif chunk > MOST:
        found = f"prompts in parts of {chunk:,} tokens; the most is {MOST}"
    elif chunk >= LEAST and not all("prefill" in each for each in methods):
        found = "layers without code for prompts"
    if found is not None:
        raise PackageError(f"package {folder}", f"its manifest has {found}", package.AGAIN)


def _fill(model: CausalLM, folder: Path, name: str, entry: dict[str, Any], device: torch.device, watch: Watch) -> None:
    """Load a package's weights into a model while another thread checks the hash of the same open file.

    Raises PackageError if they were changed; the model then has no weights.
    """
    ended, hashed, verifier = threading.Event(), [0], ThreadPoolExecutor(1)

    def step(n: int, _: str) -> None:
        hashed[0] += n
        if ended.is_set():
            raise CancelledError(f"loading {folder}", "loading has ended", "Load it again")

    def tell(*_: Any) -> None:
        watch.step(hashed[0] / max(entry["bytes"], 1), name)

    opened = package.opened(folder, name)
    verifying = verifier.submit(package.verify, folder, name, opened, entry, step)
    try:
        try:
            file = SafetensorsFile(folder / name, opened)
            if weights.shapes_in(file) != skeleton.shapes_of(model):
                found = "the shapes of its weights don't match the model in its manifest"
                raise PackageError(f"package {folder}", found, package.AGAIN)
            weights.assign_from(file, model, device, tell)
        except ToolkitError:
            verifying.result()  # raises the more useful error if the file was changed
            raise
        while not wait([verifying], timeout=0.1).done:
            tell()
        verifying.result()
    except BaseException:
        ended.set()
        for module in model.modules():  # a traceback may keep the model alive
            module._parameters.clear()
        raise
    finally:
        verifier.shutdown()
        opened.close()


def _check_target(folder: Path, manifest: dict[str, Any], device: Device | str | None) -> Device:
    """Return the device to load onto. Raises PackageError if the code is for another PyTorch, machine or device."""
    asked, target, made = f"package {folder}", manifest["target"], manifest["versions"]["torch"]
    here = compiling.processor()
    if made.split("+")[0].split(".")[:2] != torch.__version__.split("+")[0].split(".")[:2]:
        do = f"Install torch {made.split('+')[0]}, or export the model again"
        raise PackageError(asked, f"it was exported with torch {made}, and torch {torch.__version__} is installed", do)
    for what in ("machine", "system"):
        if target[what] != here[what]:
            found = f"it was exported for {target[what]}, and this machine is {here[what]}"
            raise PackageError(asked, found, "Export the model on this machine")
    if target["device"] == "cpu" and not _runs(target["vectors"], here["vectors"]):
        found = f"its code needs a processor with {target['vectors']}, this one has {here['vectors']}"
        raise PackageError(asked, found, "Export the model on this machine")
    exported = f"it was exported for {'the CPU' if target['device'] == 'cpu' else target.get('gpu', 'a CUDA GPU')}"
    wanted = target["device"] if device is None else device
    name = wanted.name if isinstance(wanted, Device) else name_of(wanted)
    leave_out = "Leave out device=, or export the model for this device"
    try:
        found_device = open_device(wanted)
    except DeviceError as error:
        if target["device"] == "cpu":
            raise PackageError(f"{asked} on {name}", exported, leave_out) from error
        do = "Load it on a machine with such a GPU, or export the model here"
        raise PackageError(asked, f"{exported}; {error.found}", do) from error
    if found_device.torch.type != target["device"]:
        raise PackageError(f"{asked} on {found_device.name}", exported, leave_out)
    card = find_card(found_device)
    if card is not None and card.facts.compute_capability != target.get("capability"):
        has = f"{card.spec.name} has {card.facts.compute_capability}"
        found = f"{exported}, of compute capability {target.get('capability')}; {has}"
        raise PackageError(asked, found, f'Export the model here, or with target="{card.key}"')
    return found_device


def _runs(needed: str, has: str) -> bool:
    """Return whether a processor with the vector instructions `has` runs code for `needed`."""
    order = ["DEFAULT", "AVX2", "AVX512"]
    return needed == has or (needed in order and has in order and order.index(needed) <= order.index(has))
