"""Find models on the Hugging Face Hub: `tk.load("ORG/REPO")` and `tk.load("ORG/REPO:FILE.gguf")`.

`find` returns the path of a model that is in the cache of `huggingface_hub`, or the `Repository` to download it from, with the
files that `tk.load` reads.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from toolkit.core.errors import HubError, brief, kind_of
from toolkit.loading.download import CONFIG, NOT_JSON, WEIGHTS, File, Repository, explained, transport_error
from toolkit.text.tokenizer import NOT_READ, TEMPLATE, TOOL_TEMPLATE
from toolkit.weights.safetensors_files import INDEX, PICKLES, read_json

_SMALL = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", TEMPLATE, TOOL_TEMPLATE, "chat_template.json",
    "quantize_config.json", "quant_config.json", "adapter_config.json",
)  # fmt: skip
_NAME = re.compile(r"(?P<repository>[\w][\w.-]*/[\w.-]*[\w])(:(?P<file>.+))?", re.ASCII)
_PART = re.compile(r"(.*-)\d{5}(-of-\d{5}\.gguf)", re.IGNORECASE)
_HASH = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")  # of git, or SHA-256 of files in large file storage


def is_repository(asked: str) -> bool:
    """Return whether a name has the form "ORG/REPO" or "ORG/REPO:FILE"."""
    name = asked.partition(":")[0]
    odd = ".." in name or "--" in name or name.lower().endswith((".gguf", WEIGHTS, ".json", *PICKLES))
    return _NAME.fullmatch(asked) is not None and not odd


def find(asked: str, revision: str | None, token: str | bool | None) -> Path | Repository:
    """Return the path of a model in the cache, or the Repository to download it from.

    The Hub is asked for the present commit of `revision` (default: "main"). If it does not answer, the cached commit is used.
    Raises HubError if there is no such model.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    match = _NAME.fullmatch(asked)
    assert match is not None
    name, file, branch = match["repository"], match["file"], revision or constants.DEFAULT_REVISION
    if not isinstance(token, str | bool | None):
        raise HubError(f"model {asked!r}", f"the access token is {kind_of(token)}", "Pass a str, or leave out token=")
    if isinstance(token, str):
        token = token.strip()
        if not token or not token.isascii() or not token.isprintable():  # the message must not repeat it
            why = "the access token is empty or has characters that no token has"
            raise HubError(f"model {asked!r}", why, "Pass the token as the Hub shows it, or leave out token=")
    if not isinstance(branch, str) or not _stays_inside(branch):  # it becomes a path in the cache
        raise HubError(f"model {asked!r}", f"no revision can have the name {brief(branch)}", "Pass a branch, a tag or a commit")
    with explained(asked, name, branch):
        try:
            api = HfApi(endpoint=constants.ENDPOINT, token=token)
            info = api.model_info(name, revision=branch, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        except (transport_error(), OfflineModeIsEnabled, HfHubHTTPError, *NOT_JSON) as error:
            silent = isinstance(error, HfHubHTTPError) and error.response.status_code < 500
            cached = None if silent else _cached(name, branch)
            if cached is None:
                raise
            names = [path.relative_to(cached).as_posix() for path in cached.rglob("*") if path.is_file()]
            return cached / _model(asked, name, names, file)
        files = {f.name: f for f in map(_entry, info.siblings or ()) if f is not None}
        model = _model(asked, name, list(files), file)
        found = Repository(asked, name, branch, str(info.sha), token, (), model)
        if not _HASH.fullmatch(found.commit):
            raise HubError(f"model {asked!r}", f"{constants.ENDPOINT} names no commit", "Check that HF_ENDPOINT is a Hub")
        wanted = _parts(model, files) if model else _folder(asked, found, files)
        found = replace(found, files=tuple(files[n] for n in wanted))
        if found.missing():
            return found
        found.remember()
        return found.folder / model


def _stays_inside(name: str) -> bool:
    """Return whether a name is a relative path that stays in its folder, on every operating system."""
    path = PurePosixPath(name)
    return name.isprintable() and not path.is_absolute() and ".." not in path.parts and "\\" not in name and ":" not in name


def _entry(sibling: Any) -> File | None:
    """Return the entry of a file in the Hub's answer, or None if its name or its hash is not one."""
    name, etag = sibling.rfilename, sibling.lfs.sha256 if sibling.lfs else sibling.blob_id
    if not _stays_inside(name) or not isinstance(sibling.size, int) or sibling.size < 0 or not _HASH.fullmatch(str(etag)):
        return None
    return File(name, sibling.size, etag)


def _model(asked: str, name: str, names: list[str], file: str | None) -> str:
    """Return the GGUF file to load, or "" for the repository's folder. Raises HubError, which names the GGUF files."""
    ggufs = sorted(n for n in names if n.lower().endswith(".gguf") and "mmproj" not in n)
    first = [n for n in ggufs if not _PART.fullmatch(n) or "-00001-of-" in n]
    if file is None and CONFIG in names and (len(ggufs) == 0 or any(n.endswith(WEIGHTS) for n in names)):
        return ""
    if (file is None and len(first) == 1) or file in ggufs:
        return file or first[0]
    listed = ", ".join(n for n in first[:40]) or "no GGUF file"
    if file is not None:
        near = [n for n in first if file.lower() in n.lower()] or first
        do = f'Pass one of them: "{name}:{near[0]}"' if first else "Leave out the part after the colon"
        raise HubError(f"model {asked!r}", f"no such file. The repository has {listed}", do, files=first)
    if first:
        do = f'Pass one of them: "{name}:{first[0]}"'
        raise HubError(f"model {asked!r}", f"the repository has {len(first)} models: {listed}", do, files=first)
    found = "the repository has neither a config.json nor a GGUF file"
    raise HubError(f"model {asked!r}", found, "Pass a repository of a language model in safetensors or GGUF", files=names)


def _parts(model: str, names: Any) -> list[str]:
    """Return the names of all parts of a GGUF model."""
    split = _PART.fullmatch(model)
    if split is None:
        return [model]
    return sorted(n for n in names if (other := _PART.fullmatch(n)) and other.groups() == split.groups())


def _folder(asked: str, repository: Repository, files: dict[str, File]) -> list[str]:
    """Return the names of the files of a safetensors model: what `tk.load` reads."""
    weights = [n for n in files if n.endswith(WEIGHTS) and "/" not in n]
    if INDEX in files:
        shards = read_json(repository.whole(files[INDEX]), "index").get("weight_map")
        if not isinstance(shards, dict):
            do = "Pass a repository with a complete index, or one in GGUF"
            raise HubError(f"model {asked!r}", f"its {INDEX} has no weight_map from tensor to file names", do)
        weights = [n for n in weights if n in shards.values()]
    elif "model.safetensors" in files:
        weights = ["model.safetensors"]
    if not weights:
        pickles = [n for n in files if n.endswith(PICKLES)]
        pickle = f"its weights are pickles ({pickles[0]}), which could run any code" if pickles else ""
        found = pickle or "it has no .safetensors file"
        raise HubError(f"model {asked!r}", found, "Pass a repository with safetensors or GGUF", files=list(files))
    others = () if "tokenizer.json" in files else NOT_READ  # loading a model names the one that it does not read
    return [n for n in (CONFIG, *_SMALL, *others, INDEX) if n in files] + sorted(weights)


def _cached(name: str, revision: str) -> Path | None:
    """Return the folder of the cached commit of a revision, or None."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=[], local_files_only=True))
    except LocalEntryNotFoundError:
        return None
