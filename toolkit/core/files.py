"""Open files to read, replace files atomically, and make temporary files and folders that never pile up.

`open_regular` refuses everything that is not a regular file. `replacing` writes a temporary file next to the target and renames
it once it is complete: a reader finds the old file or the complete new one. Temporary files and folders are locked while their
process lives, so that the next one can delete those of processes that were killed.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from toolkit.core.errors import ToolkitError

try:
    import fcntl
except ImportError:  # Windows: the files of killed processes are not deleted
    fcntl = None  # type: ignore[assignment]

TEMPORARY = r"\.toolkit-[0-9a-f]{16}\.part"  # names of temporary files
_FILE = re.compile(TEMPORARY)
_FOLDER = re.compile(r"toolkit-worker-\w+")
_KINDS = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISBLK, "a device"),
          (stat.S_ISCHR, "a device"))  # fmt: skip


def shown(path: object) -> str:
    """Return a path for an error message: quoted, and without characters that cannot be printed."""
    try:
        text = os.fspath(path)  # type: ignore[call-overload]
    except TypeError:
        text = path
    return ascii(text) if isinstance(text, str) and not _is_unicode(text) else f"{text!r:.300}"


def check_path(path: str | os.PathLike[str], asked: str, error: type[ToolkitError]) -> Path:
    """Return `path` as a Path. Raises `error` unless it is a str or os.PathLike that can be the name of a file."""
    try:
        text = os.fspath(path)
    except TypeError:
        text = None  # type: ignore[assignment]
    if not isinstance(text, str):
        raise error(asked, f"it is a {type(path).__name__}, not a path", "Give a str or a pathlib.Path")
    if "\0" in text:
        raise error(asked, "the path contains a NUL byte", "Give another path")
    try:
        os.fsencode(text)
    except UnicodeEncodeError as problem:
        raise error(asked, "the path contains half of a surrogate pair", "Give another path") from problem
    return Path(text)


def open_regular(path: str | os.PathLike[str], asked: str, error: type[ToolkitError]) -> BinaryIO:
    """Open a regular file to read its bytes. Raises `error`, which begins with `asked`, if it is anything else.

    Opening a named pipe or a device neither blocks nor reads anything.
    """
    found = check_path(path, asked, error)
    try:
        number = os.open(found, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        if what := _kind(os.fstat(number)):
            os.close(number)
            raise error(asked, f"it is {what}, not a regular file", "Give the path of a regular file")
        return os.fdopen(number, "rb")
    except (FileNotFoundError, NotADirectoryError) as problem:
        raise error(asked, "no such file", "Check the path") from problem
    except OSError as problem:
        if problem.errno == errno.EISDIR or os.path.isdir(found):
            raise error(asked, "it is a folder, not a regular file", "Give the path of a regular file") from problem
        raise error(
            asked, f"it can't be read ({problem.strerror or problem})", "Check the path and its permissions"
        ) from problem


def read_regular(path: str | os.PathLike[str], asked: str, error: type[ToolkitError], most_bytes: int) -> bytes:
    """Return the bytes of a regular file. Raises `error` if it is anything else, or larger than `most_bytes`."""
    with open_regular(path, asked, error) as file:
        try:
            data = file.read(most_bytes + 1)
        except OSError as problem:
            raise error(asked, f"it can't be read ({problem.strerror or problem})", "Check the disk that holds it") from problem
    if len(data) > most_bytes:
        raise error(asked, f"it is larger than {most_bytes:,} bytes", "Check the file: it should be small")
    return data


@contextmanager
def writing(folder: Path) -> Iterator[BinaryIO]:
    """Open a new temporary file in `folder`, at the path `file.name`. It is deleted after the block unless it was renamed.

    Deletes temporary files in `folder` that killed processes left there. Raises OSError.
    """
    _sweep(folder, _FILE)
    path, file = _new_file(folder)
    try:
        with file:
            yield file
    finally:
        with suppress(OSError):
            os.unlink(path)


@contextmanager
def replacing(
    path: str | os.PathLike[str], error: type[ToolkitError] | None = None, *, sync: bool = False
) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` when the block ends. If the block raises, `path` is left as it was.

    A symbolic link stays, and the file that it points to is replaced. The new file has the mode and owner of the old one, or
    those of any new file. Read-only files and everything that is not a regular file are refused. `sync` flushes the data to the
    disk before the file is renamed, so that it also survives a power failure. If the file cannot be written, raises `error`, or
    OSError if `error` is None.
    """
    asked = f"writing {shown(path)}"
    target = check_path(path, asked, error or ToolkitError)
    try:
        target = Path(os.path.realpath(target))  # of a loop of links, this is one of them
        before = _replaceable(target)
        with writing(target.parent) as file:
            yield file
            file.flush()
            if before is not None:
                _restore(file, before)
            if sync:
                os.fsync(file.fileno())
            if fcntl is None:  # Windows cannot rename an open file
                file.close()
            os.replace(file.name, target)
    except OSError as problem:
        if error is None:
            raise
        do = "Check that the folder exists, that you may write to it and that its disk has space left"
        raise error(asked, problem.strerror or str(problem), do) from problem


def replace_text(
    path: str | os.PathLike[str], text: str, error: type[ToolkitError] | None = None, *, sync: bool = False
) -> Path:
    """Write `text` to `path` in UTF-8 as `replacing` does, and return the path. Unpaired surrogates become "?"."""
    with replacing(path, error, sync=sync) as file:
        file.write(text.encode(errors="replace"))
    return Path(path)


class TemporaryFolder:
    """A new folder for temporary files, at the path `name`. Deletes those that killed processes of this user left."""

    def __init__(self) -> None:
        _sweep(Path(tempfile.gettempdir()), _FOLDER)
        while True:
            self.name = tempfile.mkdtemp(prefix="toolkit-worker-")
            self._lock = _lock(self.name, wait=True)
            if self._lock is not None or fcntl is None:
                return

    def cleanup(self) -> None:
        """Delete the folder and everything in it."""
        shutil.rmtree(self.name, ignore_errors=True)
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(found: os.stat_result) -> str | None:
    """Return what a file is, or None if it is a regular file."""
    if stat.S_ISREG(found.st_mode):
        return None
    return next((name for test, name in _KINDS if test(found.st_mode)), "something else")


def _replaceable(target: Path) -> os.stat_result | None:
    """Return the properties of the file that will be replaced, None if there is none. Raises OSError for anything else."""
    try:
        found = os.lstat(target)
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(target))
    if what := _kind(found):
        raise OSError(errno.EEXIST, f"it is {what}, not a regular file", str(target))
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, "the file is read-only", str(target))
    return found


def _restore(file: BinaryIO, before: os.stat_result) -> None:
    """Give the file the owner and the mode of the one that it replaces."""
    if hasattr(os, "fchown"):
        with suppress(PermissionError):
            os.fchown(file.fileno(), before.st_uid, before.st_gid)
        os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode))


def _new_file(folder: Path) -> tuple[Path, BinaryIO]:
    """Create a locked temporary file."""
    while True:
        path = folder / f".toolkit-{os.urandom(8).hex()}.part"
        file = path.open("xb")
        if fcntl is None:
            return path, file
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        except OSError:  # the file system has no locks, so nobody deletes the file
            return path, file
        if os.fstat(file.fileno()).st_nlink:
            return path, file
        file.close()  # another process took it for the file of a killed process before it was locked


def _lock(path: str, wait: bool) -> int | None:
    """Lock a file or folder, and return the open descriptor. None if another process has locked or deleted it."""
    if fcntl is None:
        return None
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(number, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        if os.path.samestat(os.fstat(number), os.lstat(path)):
            return number
    except OSError:
        pass
    os.close(number)
    return None


def _sweep(folder: Path, names: re.Pattern[str]) -> None:
    """Delete the temporary files or folders of this user that no living process has locked."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not names.fullmatch(entry.name) or (lock := _lock(entry.path, wait=False)) is None:
                continue
            try:
                found = os.fstat(lock)
                if not hasattr(os, "getuid") or found.st_uid != os.getuid():
                    continue
                if stat.S_ISDIR(found.st_mode):
                    shutil.rmtree(entry.path, ignore_errors=True)
                elif stat.S_ISREG(found.st_mode):
                    with suppress(OSError):
                        os.unlink(entry.path)
            finally:
                os.close(lock)
