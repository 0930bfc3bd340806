"""Open files to read, replace files atomically, and make temporary files and folders that never pile up.

`open_regular` refuses everything that is not a regular file. `replacing` writes a temporary file next to the target and renames
it once it is complete: a reader finds the old file or the complete new one. A temporary file is locked while its process lives,
so that the next process can delete it if its process was killed. A temporary folder has such a file beside it. The locks are
record locks (`lockf`). Unlike those of `flock`, they belong to one process: a child holds none, not even between fork and exec,
where it shares all open files.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from toolkit.core.errors import ToolkitError, kind_of

try:
    import fcntl
except ImportError:  # Windows: the files of killed processes are not deleted
    fcntl = None  # type: ignore[assignment]

TEMPORARY = r"\.toolkit-[0-9a-f]{16}\.tmp"  # names of temporary files
_FILE = re.compile(TEMPORARY)
_ours: set[str] = set()  # their names while this process writes them. It must not open one again: closing it ends the lock
_KINDS = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISBLK, "a device"),
          (stat.S_ISCHR, "a device"))  # fmt: skip

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ours.clear)


def shown(path: object) -> str:
    """Return a path for an error message: quoted, and without characters that cannot be printed."""
    try:
        text = os.fspath(path)  # type: ignore[call-overload]
    except TypeError:
        text = path
    return ascii(text) if isinstance(text, str) and not _is_unicode(text) else f"{text!r:.300}"


def check_path(path: str | os.PathLike[str], asked: str, error: type[ToolkitError]) -> Path:
    """Return `path` as a Path, `at_home`. Raises `error` unless it is a str or os.PathLike that can be the name of a file."""
    try:
        text = os.fspath(path)
    except TypeError:
        text = None  # type: ignore[assignment]
    if not isinstance(text, str):
        raise error(asked, f"it is {kind_of(path)}, not a path", "Give a str or a pathlib.Path")
    if not text:
        raise error(asked, "the path is empty", "Give the path of a file or a folder")
    if "\0" in text:
        raise error(asked, "the path contains a NUL byte", "Give another path")
    try:
        os.fsencode(text)
    except UnicodeEncodeError as problem:
        raise error(asked, "the path contains half of a surrogate pair", "Give another path") from problem
    found = at_home(text)
    try:
        os.lstat(found)
    except OSError as problem:
        if problem.errno == errno.ENAMETOOLONG:  # which Path.is_dir and Path.exists raise
            raise error(asked, "the path, or a name in it, is too long", "Give a shorter path") from problem
    return found


def at_home(path: str | os.PathLike[str]) -> Path:
    """Return `path` with the home folder in place of "~". If there is no such user, it stays, and is not found."""
    return Path(os.path.expanduser(path))


class _Checked(io.FileIO):
    """A file whose reads raise `error` if the disk fails."""

    def __init__(self, number: int, asked: str, error: type[ToolkitError]) -> None:
        super().__init__(number)
        self._asked, self._error = asked, error

    def readinto(self, buffer: Any, /) -> int | None:
        try:
            return super().readinto(buffer)
        except OSError as problem:
            raise self._unread(problem) from problem

    def readall(self) -> bytes:
        try:
            return super().readall()
        except OSError as problem:
            raise self._unread(problem) from problem

    def _unread(self, problem: OSError) -> ToolkitError:
        return self._error(self._asked, f"it can't be read ({problem.strerror or problem})", "Check the disk that holds it")


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
        return io.BufferedReader(_Checked(number, asked, error))
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
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise error(asked, f"it is larger than {most_bytes:,} bytes", "Check the file: it should be small")
    return data


@contextmanager
def writing(folder: Path) -> Iterator[BinaryIO]:
    """Open a new temporary file in `folder`, at the path `file.name`. It is deleted after the block unless it was renamed.

    Nothing else in this process may open that path before it is renamed, because closing it would end the lock. Deletes
    temporary files in `folder` that killed processes left there. Raises OSError.
    """
    _sweep(folder)
    path, file = _new_file(folder)
    try:
        with file:
            yield file
    finally:
        _forget(path)


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
        if problem.errno == errno.EEXIST:  # of `_replaceable`
            do = "Give the path of a regular file"
        raise error(asked, problem.strerror or str(problem), do) from problem


class _Writable(Exception):
    """Ends the block of `check_writable`."""


def check_writable(path: str | os.PathLike[str], error: type[ToolkitError]) -> Path:
    """Return the path. Raises `error` if `replacing` can't write there. Leaves everything as it is."""
    with suppress(_Writable), replacing(path, error):
        raise _Writable
    return at_home(path)


def replace_text(
    path: str | os.PathLike[str], text: str, error: type[ToolkitError] | None = None, *, sync: bool = False
) -> Path:
    """Write `text` to `path` in UTF-8 as `replacing` does, and return the path. Unpaired surrogates become "?"."""
    with replacing(path, error, sync=sync) as file:
        file.write(text.encode(errors="replace"))
    return at_home(path)


class TemporaryFolder:
    """A new folder for temporary files, at the path `name`. Deletes those that killed processes of this user left."""

    def __init__(self) -> None:
        top = Path(tempfile.gettempdir())
        _sweep(top)
        while True:
            path, self._lock = _new_file(top)
            self.name = str(_folder_of(path))
            try:
                os.mkdir(self.name, 0o700)
                return
            except BaseException as error:
                self._lock.close()
                _forget(path)
                if not isinstance(error, FileExistsError):
                    raise

    def cleanup(self) -> None:
        """Delete the folder and everything in it."""
        shutil.rmtree(self.name, ignore_errors=True)
        self._lock.close()
        _forget(Path(self._lock.name))

    @staticmethod
    def delete(name: str) -> None:
        """Delete the folder `name` of a process that has died."""
        shutil.rmtree(name, ignore_errors=True)
        _forget(_file_of(Path(name)))


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
        path = folder / f".toolkit-{os.urandom(8).hex()}.tmp"
        _ours.add(path.name)
        try:
            file = path.open("xb")
        except BaseException:
            _ours.discard(path.name)
            raise
        if fcntl is None:
            return path, file
        try:
            fcntl.lockf(file.fileno(), fcntl.LOCK_EX)
        except OSError:  # the file system has no locks, so nobody deletes the file
            return path, file
        if os.fstat(file.fileno()).st_nlink:
            return path, file
        file.close()  # another process took it for the file of a killed process before it was locked
        _ours.discard(path.name)


def _forget(path: Path) -> None:
    """Delete a temporary file if it was not renamed."""
    with suppress(OSError):
        os.unlink(path)
    _ours.discard(path.name)


def _folder_of(file: Path) -> Path:
    """Return the path of the temporary folder that exists as long as the temporary file."""
    return file.with_name(file.stem[1:])


def _file_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.tmp")


def _sweep(folder: Path) -> None:
    """Delete the temporary files of this user that no living process has locked, and their folders."""
    if fcntl is None:
        return
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _FILE.fullmatch(entry.name) and entry.name not in _ours:
                with suppress(OSError):
                    _delete_if_unlocked(Path(entry.path))


def _delete_if_unlocked(path: Path) -> None:
    number = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        fcntl.lockf(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or not os.path.samestat(found, os.lstat(path)):
            return
        inside = _folder_of(path)
        shutil.rmtree(inside, ignore_errors=True)
        if not os.path.lexists(inside):  # else the next process tries again
            os.unlink(path)
    finally:
        os.close(number)
