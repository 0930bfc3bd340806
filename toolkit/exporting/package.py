"""Reads and writes the folder of a package: a manifest with the hash of every file, compiled methods, and the weights, once.

Files are named by the hash of their contents and never changed. The manifest is replaced last, atomically, and files that it
doesn't name are deleted after that. If an export is killed, the previous package (if any) survives, and the next export
into the folder reuses the files in it. All files are verified before any code is loaded.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NotRequired, TypedDict

from filelock import FileLock, Timeout
from msgspec import Meta

from toolkit.core.callers import warn
from toolkit.core.distributed import Shard
from toolkit.core.errors import PackageError
from toolkit.core.files import TEMPORARY, open_regular, read_regular, replacing
from toolkit.core.schema import convert, parse_json
from toolkit.core.units import bytes_text
from toolkit.tune.store import cache_folder

FORMAT, VERSION = "decode-toolkit package", 3
MANIFEST = "manifest.json"
LARGEST_MANIFEST = 8 << 20  # of 31 billion parameters: 0.1 MB
AGAIN = "Copy the package again from its source, or export the model again with tk.export"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_WRITTEN = re.compile(  # names of files that exports write, apart from the manifest and the tokenizer
    r"\.lock|weights-[0-9a-f]{16}\.safetensors|weights\.partial"
    rf"|methods/(prefill|decode)-[\w-]+-[0-9a-f]{{16}}\.pt2|(methods/)?{TEMPORARY}"
)
_PART = re.compile(r"rank-(\d{1,6})-of-(\d{1,6})")
_CHUNK = 4 << 20


# ---- the fields of a manifest

_Count = Annotated[int, Meta(ge=0, le=1 << 62)]


class _Entry(TypedDict):
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    bytes: _Count


class _Piece(TypedDict):
    name: str
    layer: _Count | None
    weights: list[str | None]
    like: str


class _Model(TypedDict):
    architecture: str
    config: dict[str, Any]
    dtype: str
    schemes: dict[str, str]
    joined: bool
    shard: NotRequired[tuple[_Count, Annotated[int, Meta(ge=1, le=1 << 20)]]]  # rank and ranks, of a part
    block: NotRequired[Annotated[int, Meta(ge=1, le=1 << 20)]]  # of weights that the ranks don't separate


class _Target(TypedDict):
    device: Literal["cpu", "cuda"]
    machine: str
    system: str
    vectors: str
    gpu: NotRequired[str]
    capability: NotRequired[str]


class _Versions(TypedDict):
    toolkit: str
    torch: str


class _Phase(TypedDict):
    name: str
    parts: dict[str, _Count]
    host_bytes: _Count


class _Plan(TypedDict):
    budget_bytes: _Count | None
    export: list[_Phase]
    run: list[_Phase]


class Manifest(TypedDict):
    """The fields of a manifest that are read."""

    context: _Count
    chunk: _Count
    least: _Count
    kv: str | None
    pieces: list[_Piece]
    last: tuple[str | None, float, str | None]
    compiled: dict[str, dict[Literal["prefill", "decode"], str]]
    files: dict[str, _Entry]
    model: _Model
    target: _Target
    versions: _Versions
    plan: _Plan


# ---- a folder with one package per rank


def part_name(shard: Shard) -> str:
    """Return the name of the folder of one rank's package: "rank-0-of-2"."""
    return f"rank-{shard.rank}-of-{shard.ranks}"


def ranks_in(folder: Path) -> int | None:
    """Return how many ranks the packages in a folder are for; None if there are none."""
    with suppress(OSError):  # no such folder, or a file: the package's own checks name that
        found = [_PART.fullmatch(path.name) for path in folder.iterdir()]
        return next((int(part[2]) for part in found if part), None)
    return None


def check_parts(folder: Path, ranks: int) -> None:
    """Raise PackageError if that folder is a file, or contains anything but packages of this number of ranks."""
    asked = f"an export for {ranks} ranks into {folder}"
    try:
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
    except OSError as error:
        raise cant_write(asked, folder, error) from error
    if strangers := [name for name in names if not (_PART.fullmatch(name) and name.endswith(f"-of-{ranks}"))]:
        found = f"the folder contains other files ({', '.join(sorted(strangers)[:3])})"
        raise PackageError(asked, found, "Choose a new or an empty folder")


# ---- writing


@contextmanager
def locked(folder: Path, passed_on: Callable[[OSError], bool] = lambda error: False) -> Iterator[None]:
    """Create the folder if necessary and lock it, so that one export at a time writes into it.

    Raises PackageError if another export holds the lock, the folder can't be written, or it contains other files. An OSError
    of the block means that the folder can't be written, unless it is to be `passed_on` unchanged.
    """
    asked = f"an export into {folder}"
    try:
        new = not folder.exists()
        check_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock", timeout=0):
            try:
                yield
            finally:
                with suppress(OSError):
                    if new and [p.name for p in folder.iterdir()] == [".lock"]:  # the export wrote nothing
                        (folder / ".lock").unlink()
                        folder.rmdir()
    except Timeout as error:
        found = "another export into this folder is running"
        raise PackageError(asked, found, "Wait until it ends, cancel it, or choose another folder") from error
    except OSError as error:
        if passed_on(error):
            raise
        raise cant_write(asked, folder, error) from error


def check_folder(folder: Path) -> None:
    """Raise PackageError if an export can't write into that folder: it is a file, or contains files that no export wrote."""
    asked = f"an export into {folder}"
    try:
        if not folder.exists() and not folder.is_symlink():
            return
        if not folder.is_dir():
            found = "a file of that name exists" if folder.exists() else "it is a symbolic link to a folder that doesn't exist"
            raise PackageError(asked, found, "Choose another folder")
        if (folder / "methods").is_symlink():
            raise PackageError(asked, "its folder 'methods' is a symbolic link", "Choose a new or an empty folder")
        strangers = [] if _is_package(folder) else [path.name for path in folder.iterdir() if not _ours(folder, path)]
    except OSError as error:
        raise cant_write(asked, folder, error) from error
    if strangers:
        found = f"the folder contains other files ({', '.join(sorted(strangers)[:3])})"
        raise PackageError(asked, found, "Choose a new or an empty folder")


def _is_package(folder: Path) -> bool:
    """Return whether the folder has a manifest that an export wrote, perhaps damaged since."""
    path = folder / MANIFEST
    return path.is_file() and path.stat().st_size <= LARGEST_MANIFEST and FORMAT.encode() in path.read_bytes()


def _ours(folder: Path, path: Path) -> bool:
    """Return whether an export wrote this file or folder, judging by its whole name."""
    name = path.relative_to(folder).as_posix()
    if name in ("tokenizer.json", MANIFEST):  # common names, so look for other signs of a package
        return (folder / ".lock").exists() if name == "tokenizer.json" else _is_package(folder)
    if name == "methods":
        return all(_ours(folder, inside) for inside in path.iterdir()) if path.is_dir() else False
    return bool(_WRITTEN.fullmatch(name))


def cant_write(asked: str, folder: Path, error: OSError) -> PackageError:
    """Return the PackageError for an OSError while a package was written."""
    if error.errno == errno.ENOSPC:
        with suppress(OSError):
            left = bytes_text(shutil.disk_usage(folder).free)
            do = "Free disk space or choose a folder on another disk, then run it again; the export resumes"
            return PackageError(asked, f"the disk is full ({left} free)", do)
    return PackageError(asked, f"it can't be written ({error.strerror or error})", "Choose a writable folder")


def check_disk(folder: Path, needed: int) -> None:
    """Raise PackageError if fewer than `needed` bytes are free on the disk."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        found = f"it needs {bytes_text(needed)} of disk space, and {bytes_text(free)} is free"
        raise PackageError(
            f"an export into {folder}", found, "Free disk space, or choose a folder on another disk", needed_bytes=needed
        )


def put(folder: Path, name: str, data: bytes) -> None:
    """Write a file of the package atomically. A symbolic link of that name is replaced, and what it points to is left."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    if path.is_symlink():  # `replacing` would replace the file that it points to
        path.unlink()
    with replacing(path, sync=True) as file:
        file.write(data)


def entry(data: bytes) -> dict[str, Any]:
    """Return a file's entry in the manifest."""
    return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def finish(folder: Path, manifest: Mapping[str, Any]) -> str:
    """Replace the manifest and delete files that it doesn't name. Returns the manifest's own hash."""
    data = _text({**manifest, "format": FORMAT, "version": VERSION})
    put(folder, MANIFEST, data)
    named = {*manifest["files"], MANIFEST, ".lock"}
    for path in [*folder.glob("*"), *folder.glob("methods/*")]:
        if path.is_file() and path.relative_to(folder).as_posix() not in named and _ours(folder, path):
            path.unlink()
    return hashlib.sha256(data).hexdigest()


def _text(manifest: Mapping[str, Any]) -> bytes:
    """Return the manifest's canonical JSON, which includes a hash of itself."""
    bare = json.dumps({**manifest, "sha256": ""}, indent=1, sort_keys=True)
    own = hashlib.sha256(bare.encode()).hexdigest()
    return json.dumps({**manifest, "sha256": own}, indent=1, sort_keys=True).encode()


# ---- reading


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Convert an OSError in the block into a PackageError."""
    try:
        yield
    except OSError as error:
        found = f"it can't be read ({error.strerror or error})"
        raise PackageError(f"package {folder}", found, "Check the permissions of the folder and its files") from error


def read_manifest(folder: Path) -> tuple[dict[str, Any], str]:
    """Return a package's manifest and its hash. Reads no other file. Raises PackageError if the manifest is invalid."""
    with _readable(folder):
        return _read_manifest(folder)


def _read_manifest(folder: Path) -> tuple[dict[str, Any], str]:
    asked, path = f"package {folder}", folder / MANIFEST
    if not folder.is_dir():
        found = "it is a file, not a folder" if folder.exists() else "no such folder"
        raise PackageError(asked, found, "Give a folder that tk.export wrote")
    if not os.path.lexists(path):
        begun = any(_ours(folder, path) for path in folder.iterdir())
        do = "Run tk.export into it again, which resumes" if begun else "Give a folder that tk.export wrote"
        raise PackageError(asked, "the export into it was not finished" if begun else f"it has no {MANIFEST}", do)
    _check_name(asked, folder, MANIFEST)
    data = read_regular(path, f"{asked}: {MANIFEST}", PackageError, LARGEST_MANIFEST)
    try:
        manifest: Any = parse_json(data)
    except ValueError as error:
        raise PackageError(asked, f"{MANIFEST} isn't valid JSON ({error!s:.100})", AGAIN) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise PackageError(asked, f"{MANIFEST} isn't the manifest of a package", "Give a folder that tk.export wrote")
    version = manifest.get("version")
    if type(version) is not int or version != VERSION:
        do = "Export the model again, or use the version of the toolkit that wrote the package"
        raise PackageError(asked, f"it has format version {version!r:.20}, and this toolkit reads version {VERSION}", do)
    if _text(manifest) != data:
        raise PackageError(asked, f"{MANIFEST} was changed after it was written: its hash doesn't match", AGAIN)
    try:
        _check_fields(convert(manifest, Manifest))
    except ValueError as error:
        raise PackageError(asked, f"{MANIFEST} has missing or invalid fields ({error!s:.200})", AGAIN) from error
    for name in manifest["files"]:
        _check_name(asked, folder, name)
    return manifest, hashlib.sha256(data).hexdigest()


def _check_fields(manifest: Manifest) -> None:
    """Raise ValueError if fields contradict each other: code that is not among the files, or layers without code."""
    files, compiled, pieces = manifest["files"], manifest["compiled"], manifest["pieces"]
    rank, ranks = manifest["model"].get("shard", (0, 1))
    if rank >= ranks:
        raise ValueError(f"it is of rank {rank}, and there are {ranks} ranks")
    code = {name for name in files if name.startswith("methods/")}
    if not {name for methods in compiled.values() for name in methods.values()} <= code:
        raise ValueError("it has compiled methods that are not among its files")
    if not all("decode" in compiled.get(piece["like"], {}) for piece in pieces):
        raise ValueError("it has layers without code")
    if len({(piece["like"], len(piece["weights"])) for piece in pieces}) != len({piece["like"] for piece in pieces}):
        raise ValueError("it has layers that share code and have different numbers of weights")
    layers = [piece["layer"] for piece in pieces]
    if layers.count(None) != 1 or sorted(n for n in layers if n is not None) != [*range(len(layers) - 1)]:
        raise ValueError("its pieces are not all layers and one head")
    if sum(name.startswith("weights-") for name in files) != 1:
        raise ValueError("it does not have one file of weights")


def _check_name(asked: str, folder: Path, name: str) -> None:
    """Raise PackageError unless the name is that of a regular file in the folder."""
    if not _NAME.fullmatch(name) or ".." in name:
        found = f"{MANIFEST} lists {name!r:.80}, which isn't the name of a package's file"
        raise PackageError(asked, found, "Don't use this package unless you trust its source")
    path = folder / name
    if path.is_symlink() or (path.parent != folder and path.parent.is_symlink()):  # the folder itself may be a link
        raise PackageError(asked, f"{name} is a symbolic link", "Replace the link by the file that it points to")
    if not path.is_file():
        raise PackageError(asked, f"{name} is missing", AGAIN)


def verified(folder: Path, name: str, expected: Mapping[str, Any]) -> bytes:
    """Return a file's bytes after checking their hash. Callers use these bytes, so the file can't change in between."""
    with _readable(folder), opened(folder, name) as file:
        _check_size(folder, name, os.fstat(file.fileno()).st_size, expected)
        data = file.read(expected["bytes"])
    if hashlib.sha256(data).hexdigest() != expected["sha256"]:
        raise _changed(folder, name, "its SHA-256 hash is not the one in the manifest")
    return data


def opened(folder: Path, name: str) -> BinaryIO:
    """Open a file of a package. Raises PackageError if it is not a regular file."""
    return open_regular(folder / name, f"package {folder}: {name}", PackageError)


def verify(folder: Path, name: str, file: BinaryIO, expected: Mapping[str, Any], step: Any) -> None:
    """Check the size and hash of a large open file without holding it in memory."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    with _readable(folder):
        _check_size(folder, name, os.fstat(file.fileno()).st_size, expected)
        file.seek(0)
    while n := _read(folder, file, buffer):
        digest.update(buffer[:n])
        step(n, name)  # may raise an OSError of the caller's own
    if digest.hexdigest() != expected["sha256"]:
        raise _changed(folder, name, "its SHA-256 hash is not the one in the manifest")


def _read(folder: Path, file: BinaryIO, buffer: memoryview) -> int:
    with _readable(folder):
        n: int = file.readinto(buffer)  # type: ignore[attr-defined]
        return n


def _check_size(folder: Path, name: str, size: int, expected: Mapping[str, Any]) -> None:
    if size != expected["bytes"]:
        raise _changed(folder, name, f"it has {size:,} bytes, not {expected['bytes']:,}")


def _changed(folder: Path, name: str, found: str) -> PackageError:
    return PackageError(
        f"package {folder}", f"{name} was changed or damaged: {found}. None of its code was run", AGAIN, file=name
    )


# ---- trust: which packages this user made


def _made_here() -> Path:
    return cache_folder() / "packages-made-here"


_made_by_this_process: set[str] = set()


def remember(own: str) -> None:
    """Record that this user made the package whose manifest has the hash `own`. Warns if the record can't be written."""
    _made_by_this_process.add(own)  # works even if the cache folder can't be written
    try:
        _made_here().parent.mkdir(parents=True, exist_ok=True)
        with open(_made_here(), "a") as file:
            file.write(f"\n{own}\n")  # the last line may be incomplete if a process was killed while it wrote it
    except OSError as error:
        warn(f"Other processes load this package only with trust=True: {error}. Set TOOLKIT_CACHE to a writable folder.")


def made_here(own: str) -> bool:
    """Return whether this user made the package whose manifest has the hash `own`."""
    try:
        return own in _made_by_this_process or own in _made_here().read_text(errors="replace").split()
    except OSError:
        return False
