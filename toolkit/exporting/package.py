"""The folder that an export makes: a manifest that names every file by its hash, compiled methods, and the weights once.

Files are named by what they hold and only ever added; the manifest is replaced last, in one step, and then what it no longer
names goes. So a kill at any moment leaves the package that was there before, or none, and an export into the same folder takes
up what it finds. What a manifest names is checked, byte for byte, before any code of it is loaded.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from toolkit.core.errors import PackageError
from toolkit.core.units import bytes_text
from toolkit.tune.store import cache_folder

FORMAT, VERSION = "decode-toolkit package", 1
MANIFEST = "manifest.json"
LARGEST_MANIFEST = 64 << 20
AGAIN = "Get the package again from where it was made, or export it anew with tk.export"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_WRITTEN = re.compile(  # by an export, beside the manifest and the tokenizer
    r"\.lock|weights-[0-9a-f]{16}\.safetensors|weights\.partial|(tokenizer|manifest)\.json\.partial"
    r"|methods/(prefill|decode)-[\w-]+-[0-9a-f]{16}\.pt2(\.partial)?"
)
_CHUNK = 4 << 20


# ---- writing


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The folder, made if need be, for one export at a time. PackageError where there is another, it can't be written, or it
    holds what no export wrote.
    """
    asked = f"an export into {folder}"
    try:
        new = not folder.exists()
        check_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / ".lock", "a") as file:
            _lock(file, asked)
            try:
                yield
            finally:
                with suppress(OSError):
                    if new and [p.name for p in folder.iterdir()] == [".lock"]:  # nothing came of it
                        (folder / ".lock").unlink()
                        folder.rmdir()
    except OSError as error:
        raise cant_write(asked, folder, error) from error


def check_folder(folder: Path) -> None:
    """PackageError where an export can't be into that folder: for a file, or for a folder that holds what no export wrote."""
    asked = f"an export into {folder}"
    if "\0" in str(folder):
        raise PackageError(asked.replace("\0", "\\0"), "no name has a zero in it", "Name a folder")
    try:
        if not folder.exists():
            return
        if not folder.is_dir():
            raise PackageError(asked, "there is a file of that name", "Name a folder")
        if (folder / "methods").is_symlink():
            raise PackageError(asked, "its folder methods is a link to somewhere else", "Name a new or an empty folder")
        strangers = [] if _is_package(folder) else [path.name for path in folder.iterdir() if not _ours(folder, path)]
    except OSError as error:
        raise cant_write(asked, folder, error) from error
    if strangers:
        found = f"the folder holds other files ({', '.join(sorted(strangers)[:3])})"
        raise PackageError(asked, found, "Name a new or an empty folder")


def _is_package(folder: Path) -> bool:
    """Is its manifest one that an export wrote? It may have been damaged since."""
    path = folder / MANIFEST
    return path.is_file() and path.stat().st_size <= LARGEST_MANIFEST and FORMAT.encode() in path.read_bytes()


def _ours(folder: Path, path: Path) -> bool:
    """Did an export write this, which lies in a folder that may be a package, or become one? By its whole name."""
    name = path.relative_to(folder).as_posix()
    if name in ("tokenizer.json", MANIFEST):  # other people have files that are called so
        return (folder / ".lock").exists() if name == "tokenizer.json" else _is_package(folder)
    if name == "methods":
        return all(_ours(folder, inside) for inside in path.iterdir()) if path.is_dir() else False
    return bool(_WRITTEN.fullmatch(name))


def _lock(file: Any, asked: str) -> None:
    try:
        import fcntl
    except ImportError:  # Windows: opening it for writing is enough of a hint
        return
    another = PackageError(
        asked, "another export into this folder is under way", "Wait for it, cancel it, or name another folder"
    )
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise another from error
    try:
        same = os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
    except FileNotFoundError:
        same = False
    if not same:  # one that ended has taken its folder away since this was opened
        raise another


def cant_write(asked: str, folder: Path, error: OSError) -> PackageError:
    """What went wrong while a package was written."""
    if error.errno == errno.ENOSPC:
        with suppress(OSError):
            left = bytes_text(shutil.disk_usage(folder).free)
            do = "Free some, or name a folder on another disk: exporting again goes on where this ended"
            return PackageError(asked, f"the disk is full ({left} left)", do)
    return PackageError(asked, f"it can't be written ({error.strerror or error})", "Name a folder that you may write to")


def check_disk(folder: Path, needed: int) -> None:
    """PackageError where the disk has less than `needed` bytes left."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        found = f"it takes {bytes_text(needed)}, the disk has {bytes_text(free)} left"
        raise PackageError(
            f"an export into {folder}", found, "Free some, or name a folder on another disk", needed_bytes=needed
        )


def put(folder: Path, name: str, data: bytes) -> None:
    """Write a file of the package: whole, or not at all."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def entry(data: bytes) -> dict[str, Any]:
    """What a manifest says of a file."""
    return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def finish(folder: Path, manifest: Mapping[str, Any]) -> str:
    """Replace the manifest, and let go of what it doesn't name. Returns the manifest's own hash."""
    data = _text({**manifest, "format": FORMAT, "version": VERSION})
    put(folder, MANIFEST, data)
    named = {*manifest["files"], MANIFEST, ".lock"}
    for path in [*folder.glob("*"), *folder.glob("methods/*")]:
        if path.is_file() and path.relative_to(folder).as_posix() not in named and _ours(folder, path):
            path.unlink()
    return hashlib.sha256(data).hexdigest()


def _text(manifest: Mapping[str, Any]) -> bytes:
    """The manifest's one spelling, with a hash of itself in it."""
    bare = json.dumps({**manifest, "sha256": ""}, indent=1, sort_keys=True)
    own = hashlib.sha256(bare.encode()).hexdigest()
    return json.dumps({**manifest, "sha256": own}, indent=1, sort_keys=True).encode()


# ---- reading


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Inside, what can't be read of a package is a PackageError."""
    try:
        yield
    except OSError as error:
        found = f"it can't be read ({error.strerror or error})"
        raise PackageError(f"package {folder}", found, "Name a folder all of which you may read") from error


def read_manifest(folder: Path) -> tuple[dict[str, Any], str]:
    """A package's manifest, checked, and its hash. No other file is touched. PackageError says what is wrong."""
    with _readable(folder):
        return _read_manifest(folder)


def _read_manifest(folder: Path) -> tuple[dict[str, Any], str]:
    asked, path = f"package {folder}", folder / MANIFEST
    if not folder.is_dir():
        raise PackageError(asked, "no such folder", "Give the folder that tk.export made")
    if not path.is_file() or path.is_symlink():
        begun = any(_ours(folder, path) for path in folder.iterdir())
        do = "Export into it again: it goes on where it ended" if begun else "Give the folder that tk.export made"
        raise PackageError(asked, "an export that was not finished" if begun else f"it has no {MANIFEST}", do)
    if path.stat().st_size > LARGEST_MANIFEST:
        raise PackageError(asked, f"{MANIFEST} is larger than {bytes_text(LARGEST_MANIFEST)}", AGAIN)
    data = path.read_bytes()
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise PackageError(asked, f"{MANIFEST} isn't JSON ({error!s:.100})", AGAIN) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise PackageError(asked, f"{MANIFEST} isn't that of a package", "Give the folder that tk.export made")
    version = manifest.get("version")
    if type(version) is not int or version > VERSION:
        do = "Update the toolkit, or export the model again with this one"
        raise PackageError(asked, f"its format is version {version!r:.20}, this toolkit reads up to {VERSION}", do)
    if _text(manifest) != data:
        raise PackageError(asked, f"{MANIFEST} was changed after it was written: its hash doesn't fit", AGAIN)
    if not _is_complete(manifest):
        raise PackageError(asked, f"{MANIFEST} isn't that of a package: something is missing from it", AGAIN)
    for name in manifest["files"]:
        _check_name(asked, folder, name)
    return manifest, hashlib.sha256(data).hexdigest()


def _is_complete(manifest: Mapping[str, Any]) -> bool:
    """Does it say all that a package says, and name only methods that are among its files?"""
    kinds: dict[str, type] = {"pieces": list, "last": list, "context": int, "chunk": int, "least": int}
    kinds |= dict.fromkeys(("files", "compiled", "target", "versions", "model"), dict)
    if not all(isinstance(manifest.get(name), kind) for name, kind in kinds.items()):
        return False
    files = manifest["files"]
    entries = all(
        isinstance(e, dict) and type(e.get("bytes")) is int and isinstance(e.get("sha256"), str) for e in files.values()
    )
    methods = all(isinstance(m, dict) and set(m.values()) <= set(files) for m in manifest["compiled"].values())
    pieces = all(isinstance(piece, dict) and piece.get("like") in manifest["compiled"] for piece in manifest["pieces"])
    return entries and methods and pieces and sum(name.startswith("weights-") for name in files) == 1


def _check_name(asked: str, folder: Path, name: str) -> None:
    """PackageError for a file that isn't in the folder, as a real file."""
    if not _NAME.fullmatch(name) or ".." in name:
        raise PackageError(asked, f"it names {name!r:.80}, which isn't a file of the folder", "Don't trust this package")
    path = folder / name
    if path.is_symlink() or path.parent.is_symlink():
        raise PackageError(asked, f"{name} is a link to somewhere else", "Copy the package with its files, not with links")
    if not path.is_file():
        raise PackageError(asked, f"{name} is missing", AGAIN)


def verified(folder: Path, name: str, expected: Mapping[str, Any]) -> bytes:
    """The bytes of a file that hash to what the manifest says: what was checked is what is used."""
    with _readable(folder):
        _check_size(folder, name, expected)
        data = (folder / name).read_bytes()
    if hashlib.sha256(data).hexdigest() != expected["sha256"]:
        raise _changed(folder, name, "its bytes aren't those that were written")
    return data


def verify(folder: Path, name: str, expected: Mapping[str, Any], step: Any) -> None:
    """Check a large file as a stream."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    with _readable(folder):
        _check_size(folder, name, expected)
        with open(folder / name, "rb", buffering=0) as file:
            while n := file.readinto(buffer):
                digest.update(buffer[:n])
                step(n, name)
    if digest.hexdigest() != expected["sha256"]:
        raise _changed(folder, name, "its bytes aren't those that were written")


def _check_size(folder: Path, name: str, expected: Mapping[str, Any]) -> None:
    if (size := (folder / name).stat().st_size) != expected["bytes"]:
        raise _changed(folder, name, f"it has {size:,} bytes, not {expected['bytes']:,}")


def _changed(folder: Path, name: str, found: str) -> PackageError:
    return PackageError(f"package {folder}", f"{name} was changed or damaged: {found}. Nothing of it was run", AGAIN, file=name)


# ---- trust: hashes say that a package is whole, not who made it


def _made_here() -> Path:
    return cache_folder() / "packages-made-here"


_made_by_this_process: set[str] = set()


def remember(own: str) -> None:
    """This user made the package whose manifest hashes to `own`."""
    _made_by_this_process.add(own)  # also where the user's cache can't be written
    with suppress(OSError):
        _made_here().parent.mkdir(parents=True, exist_ok=True)
        with open(_made_here(), "a") as file:
            file.write(own + "\n")


def made_here(own: str) -> bool:
    """Did this user make it?"""
    try:
        return own in _made_by_this_process or own in _made_here().read_text().split()
    except OSError:
        return False
