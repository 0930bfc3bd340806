"""Open a checkpoint by name or path: config, names of weights and tokenizer are checked.

No weight is read, apart from an embedding that may be the head, too, and the frequencies of a rotary embedding in GGUF files.

A checkpoint is a demo model, a Hugging Face folder, a GGUF file, a repository on the Hub, or shapes alone (random/NAME).
`toolkit.models` defines the architectures and the names of their weights.
"""

from __future__ import annotations

import difflib
import os
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from toolkit.core.errors import FormatError, HubError, ModelError, unknown_name
from toolkit.core.files import at_home
from toolkit.core.units import plural
from toolkit.loading.download import Repository
from toolkit.loading.hub import find, is_repository
from toolkit.models import ARCHITECTURES
from toolkit.models.places import Source
from toolkit.models.shapes import SHAPES
from toolkit.text import tokenizer as tokenizers
from toolkit.weights.gguf_files import open_gguf
from toolkit.weights.int4_folders import described_by_values, open_folder
from toolkit.weights.safetensors_files import PICKLES, open_safetensors, pickled, read_json
from toolkit.weights.stored import Stored, Weights, nearest

if TYPE_CHECKING:
    from toolkit.text.tokenizer import Tokenizer

DEMOS = Path(__file__).parent.parent / "demo"
COMPUTED = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = {
    "float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
    "float16": torch.float16, "fp16": torch.float16, "half": torch.float16,
}  # fmt: skip
ADAPTER = "adapter_config.json"
_STORAGE = ("quantization_config", "compression_config")  # describes the file format, not the architecture
_TWINS = re.compile(r"(.*\.)?(lm_head|output)\.weight")  # the head, which some checkpoints of tied models store again
ROPE_FREQS = "rope_freqs.weight"  # a small tensor of GGUF files whose values belong to the config
_TABLES = re.compile(r".*rotary_emb\.inv_freq")
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)  # second and later files of a split model
_COMPARED_BYTES = 16 << 20  # at a time
_LISTED = 5  # names shown in an error message; `error.facts` has all of them


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: everything that is needed to build and fill the model.

    `weights` is None for random/NAME. `names` maps our weight names to stored tensors. `skipped` lists stored tensors that are
    not loaded: parts that are left out (vision, audio, drafting) and duplicates.
    """

    path: Path
    weights: Weights | None
    architecture: ModuleType
    config: Any
    names: Mapping[str, Source]
    dtype: torch.dtype  # default dtype of computation
    tokenizer: Tokenizer | None = None
    skipped: tuple[str, ...] = ()


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open the checkpoint that `load` was given, and check names and tokenizer without reading large weights.

    A repository that is not in the cache is opened by its headers: its checkpoint has shapes and no values.
    """
    asked = os.fspath(path)
    found = resolve(asked)
    if not isinstance(found, Repository):
        return open_local(found)
    described = open_headers(found)
    if described is None:
        what = "its weights are in GPTQ, AWQ or HQQ, and are described by their values"
        raise HubError(f"model {asked!r}", what, f"Download it first: tk.load({asked!r})")
    return described


def open_headers(repository: Repository, cancel: threading.Event | None = None) -> Checkpoint | None:
    """Open a repository by its headers, before its weights are downloaded. Returns None if they do not describe it."""
    with repository.headers(open_local, cancel) as path:
        if path.is_dir() and described_by_values(open_safetensors(path)):
            return None
        return open_local(path)


def open_local(found: Path) -> Checkpoint:
    """Open the folder or GGUF file that `resolve` has found, or the shapes of random/NAME."""
    shape = _random(found.as_posix())
    if shape is not None:
        return shape
    checkpoint = _open_folder(found) if found.is_dir() else _open_gguf(found)
    known = 0 if checkpoint.tokenizer is None else checkpoint.tokenizer.vocab_size
    if known > checkpoint.config.vocab_size:
        raise FormatError(
            f"tokenizer of {found}",
            f"it has {known:,} tokens, but the model has {checkpoint.config.vocab_size:,}",
            "Use the tokenizer that belongs to these weights",
        )
    return checkpoint


def resolve(asked: str, revision: str | None = None, token: str | bool | None = None) -> Path | Repository:
    """Return the folder or GGUF file for `asked` ("random/NAME" as it is), or the repository on the Hub to download it from.

    GGUF files are recognized by their first bytes or their name. A folder without a config.json may contain one GGUF model.
    A path that exists is used before a name of a demo model, random/NAME and the Hub. Raises ToolkitError, which suggests a
    path, if there is no such model.
    """
    found = Path(asked) if _is_random(asked) else _local(asked)
    if found is not None and revision is not None:
        what = f"model {asked!r} with revision={revision!r}"
        raise HubError(what, "it is not a repository on the Hub", "Leave out revision=")
    if found is not None:
        return found
    if is_repository(asked):
        return find(asked, revision, token)
    do = 'Pass "demo/qwen3", "random/qwen3-8b", a Hugging Face folder, a .gguf file, or a repository: "ORG/REPO"'
    raise FormatError(f"model {asked!r}", "no such file or folder", do)


def _local(asked: str) -> Path | None:
    """Return the folder or GGUF file for `asked`, or None if there is none. Raises ToolkitError for other files."""
    family, _, name = asked.rstrip("/").partition("/")
    if family == "demo" and not os.path.exists(asked):
        demos = {p.parent.name for p in DEMOS.glob("*/config.json")}
        if name not in demos:
            raise unknown_name("demo model", asked, [f"demo/{demo}" for demo in demos])
        return DEMOS / name
    path = at_home(asked)
    if path.suffix in PICKLES and os.path.isfile(path):
        raise pickled(path)
    if path.suffix == ".safetensors" and os.path.isfile(path):
        if not os.path.exists(path.parent / "config.json"):
            raise FormatError(f"model {path}", "there is no config.json next to the weights", "Pass a folder that has both")
        files = {Path(stored.path).name for stored in open_safetensors(path.parent).stored.values()}
        if path.name not in files:
            found = f"the weights of its folder are in {_listed(sorted(files))}"
            raise FormatError(f"model {path}", found, "Move it to a folder of its own, with the config.json and the tokenizer")
        return path.parent
    if asked and os.path.isdir(path):
        return _gguf_in(path) or path
    if asked and _is_gguf(path):
        return path
    if asked and os.path.exists(path):
        raise FormatError(f"model {path}", "neither a folder nor a .gguf file", "Pass a Hugging Face folder or a .gguf file")
    return None


def _gguf_in(folder: Path) -> Path | None:
    """Return the GGUF model in a folder without a config.json, or None. Raises FormatError if there are several."""
    if os.path.exists(folder / "config.json"):  # unlike Path.exists, never raises
        return None
    files = sorted(file for file in folder.glob("*.[gG][gG][uU][fF]") if _is_gguf(file))
    first = [file for file in files if not _LATER_PART.search(file.name)]
    if len(first) > 1:
        found = f"it has {len(first)} models: {_listed([file.name for file in first])}"
        raise FormatError(f"model {folder}", found, f'Pass one of them: "{first[0]}"')
    return first[0] if first else None


def _is_gguf(path: Path) -> bool:
    """Return whether a regular file is a GGUF file, by its name or its first bytes."""
    if not os.path.isfile(path):
        return False
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def find_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype of that name, or None for None. Raises ToolkitError if models cannot compute in it."""
    if isinstance(dtype, str):
        if dtype.removeprefix("torch.") not in DTYPES:
            raise unknown_name("dtype", dtype, DTYPES)
        return DTYPES[dtype.removeprefix("torch.")]
    if dtype is not None and dtype not in COMPUTED:
        raise ModelError(f"dtype={dtype!r}", "models cannot compute in it", "Use float32, bfloat16 or float16")
    return dtype


def _is_random(asked: str) -> bool:
    """Return whether `asked` is "random/NAME". Raises ToolkitError if there is no such name."""
    family, _, name = asked.partition("/")
    if family != "random" or os.path.exists(asked):
        return False
    if name not in SHAPES:
        raise unknown_name("random model", asked, [f"random/{known}" for known in SHAPES])
    return True


def _random(asked: str) -> Checkpoint | None:
    """Return the checkpoint for "random/NAME", or None if `asked` is something else."""
    if not _is_random(asked):
        return None
    values = SHAPES[asked.partition("/")[2]].config
    architecture = _architecture(values["model_type"], asked)
    config = architecture.Config.from_hf(values)
    return Checkpoint(Path(asked), None, architecture, config, architecture.names_hf(config), torch.bfloat16)


def _open_folder(folder: Path) -> Checkpoint:
    packages = [*folder.glob("manifest.json"), *folder.glob("rank-0-of-*/manifest.json")]
    if packages and not os.path.lexists(folder / "config.json"):
        found = "it has no config.json, but a manifest.json, as packages have"
        raise FormatError(f"model {folder}", found, f'To load a package, call tk.load_exported("{folder}")')
    if os.path.lexists(folder / ADAPTER):
        found = f"it has an {ADAPTER}: weights of an adapter (LoRA), which would not be applied"
        do = "Merge the adapter into its base model (merge_and_unload of peft), and load the folder with the result"
        raise FormatError(f"model {folder}", found, do)
    values = read_json(folder / "config.json", "config", max_bytes=16 << 20)
    architecture = _architecture(values.get("model_type"), f"config {folder / 'config.json'}", values.get("architectures"))
    config = architecture.Config.from_hf(_without_storage(values))
    weights = open_folder(folder, values)
    _check_counts(folder, config, weights)
    inner = values.get("text_config")
    stated = [v.get("dtype", v.get("torch_dtype")) for v in (values, inner) if isinstance(v, dict)]
    named = [DTYPES[n] for n in (str(v).removeprefix("torch.") for v in stated) if n in DTYPES]
    config, names = _tied(architecture, config, weights)
    skipped = _check_names(folder, architecture, config, names, weights)
    dtype = named[0] if named else _most(weights.stored.values())
    tokenizer = tokenizers.from_folder(folder)
    config = replace(config, eos_token_ids=tokenizers.stated_ends(folder) or config.eos_token_ids)
    return Checkpoint(folder, weights, architecture, config, names, dtype, tokenizer, skipped)


def _tied(architecture: ModuleType, config: Any, weights: Weights) -> tuple[Any, dict[str, Source]]:
    """Return the config and the sources of the weights of a folder. The tensors that are stored decide on the head.

    As in transformers, if the config ties it to the embedding, but both are stored with different values, it is not tied. If
    only the head is stored, it is the embedding, too.
    """
    names: dict[str, Source] = architecture.names_hf(config, weights.stored)
    if not config.tie_word_embeddings:
        return config, names
    apart = replace(config, tie_word_embeddings=False)
    untied: dict[str, Source] = architecture.names_hf(apart, weights.stored)
    (embedding,), (head,) = names["embed.weight"].names, untied["head.weight"].names
    if head not in weights.stored:
        return config, names
    if embedding not in weights.stored:
        return config, names | {"embed.weight": untied["head.weight"]}
    return (config, names) if _same(weights, embedding, head) else (apart, untied)


def _same(weights: Weights, one: str, other: str) -> bool:
    """Return whether two tensors have the same shape and the same bytes."""
    first, second = weights.find(one), weights.find(other)
    if (first.kind, first.shape) != (second.kind, second.shape):
        return False
    step = max(1, _COMPARED_BYTES * first.rows // first.nbytes) if first.nbytes else 1 << 60
    for start in range(0, first.rows, step):
        parts, others = (weights.raw(name, start, min(start + step, first.rows)) for name in (one, other))
        if not all(torch.equal(part.view(torch.uint8), others[name].view(torch.uint8)) for name, part in parts.items()):
            return False
    return True


def _open_gguf(path: Path) -> Checkpoint:
    weights = open_gguf(path)
    architecture = _architecture(weights.metadata.get("general.architecture"), f"GGUF file {path}")
    freqs = weights.stored.get(ROPE_FREQS)
    known = freqs is not None and freqs.dtype is not None and freqs.nbytes < 1 << 16
    told = weights.metadata | {ROPE_FREQS: weights.read(ROPE_FREQS).flatten().tolist() if known else None}
    config = architecture.Config.from_gguf(told, {name: t.shape for name, t in weights.stored.items()})
    _check_counts(path, config, weights)
    names = architecture.names_gguf(config, weights.stored)
    skipped = _check_names(path, architecture, config, names, weights)
    tokenizer = tokenizers.from_gguf(weights.metadata, str(path))
    return Checkpoint(path, weights, architecture, config, names, _most(weights.stored.values()), tokenizer, skipped)


def _without_storage(values: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in values.items() if name not in _STORAGE}
    if isinstance(found.get("text_config"), dict):
        found["text_config"] = {n: value for n, value in found["text_config"].items() if n not in _STORAGE}
    return found


def _architecture(name: object, asked: str, classes: object = None) -> ModuleType:
    known = ", ".join(ARCHITECTURES)
    if isinstance(name, str) and name in ARCHITECTURES:
        return ARCHITECTURES[name]
    what = "it does not state its architecture" if name is None else f"its architecture is {name!r:.60}"
    also = f" ({', '.join(map(str, classes))[:80]})" if isinstance(classes, list) and classes else ""
    do = f"Supported architectures: {known}"
    if also:
        do += '. For a folder of another one that transformers has, tk.load(..., engine="hf") works'
    raise ModelError(asked, what + also, do, architecture=name, known=list(ARCHITECTURES))


def _check_counts(path: Path, config: Any, weights: Weights) -> None:
    """Refuse a config with more layers than tensors before building a list of names, which could have 2**31 entries."""
    if config.num_hidden_layers > len(weights.stored):
        found = f"the config has {config.num_hidden_layers:,} layers, but there are only {len(weights.stored):,} tensors"
        raise FormatError(f"model {path}", found, "Check that config and weights belong together")


def _most(stored: Iterable[Stored]) -> torch.dtype:
    """Return the dtype that most of the stored bytes have, or bfloat16 if models cannot compute in that dtype."""
    totals: dict[torch.dtype | None, int] = {}
    for tensor in stored:
        totals[tensor.dtype] = totals.get(tensor.dtype, 0) + tensor.nbytes
    most = max(totals, key=lambda dtype: totals[dtype], default=None)
    return most if most in COMPUTED and most is not None else torch.bfloat16


def _check_names(
    path: Path, architecture: ModuleType, config: Any, names: Mapping[str, Source], weights: Weights
) -> tuple[str, ...]:
    """Check that the file has every weight of the model and no unknown tensor. Returns the tensors that are skipped."""
    stored, wanted = weights.stored, {name for source in names.values() for name in source.names}
    left = [name for name in stored if name not in wanted]
    skipped = tuple(name for name in left if _is_skipped(name, architecture, config))
    unknown, missing = sorted(set(left) - set(skipped)), sorted(wanted - set(stored))
    asked = f"weights of {path}"
    if missing:
        found = f"they lack {len(missing):,} of {plural(len(wanted), 'tensor')}: {_listed(missing)}"
        raise FormatError(asked, found, nearest(missing[0], unknown), missing=missing, unknown=unknown)
    if unknown:
        found = f"this architecture has no place for {plural(len(unknown), 'tensor')}: {_listed(unknown)}"
        near = difflib.get_close_matches(unknown[0], wanted, n=1, cutoff=0.5)
        do = f"The nearest name of the architecture is {near[0]!r}. Check" if near else "Check"
        raise FormatError(asked, found, f"{do} that config and weights belong together", unknown=unknown)
    return skipped


def _is_skipped(name: str, architecture: ModuleType, config: Any) -> bool:
    """Return whether a tensor is skipped: part of a left-out component, a copy of the tied head, or a rotary table."""
    if any(re.match(p, name) for p in (*getattr(architecture, "SKIPPED", ()), *getattr(config, "skipped", ()))):
        return True
    return bool((config.tie_word_embeddings and _TWINS.fullmatch(name)) or _TABLES.fullmatch(name))


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
