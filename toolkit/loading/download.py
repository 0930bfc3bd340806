"""Download one model of the Hugging Face Hub into the cache of `huggingface_hub`.

`Repository.headers` fetches enough to describe the model, a few megabytes; `Repository.download` fetches everything that
`tk.load` reads, and nothing else. Every file is written next to its place in the cache, checked against its hash and renamed,
so an interrupted download continues where it stopped.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from toolkit.core.errors import FormatError, HubError, ToolkitError
from toolkit.core.files import TemporaryFolder, at_home
from toolkit.core.progress import Counter, Progress
from toolkit.core.units import bytes_text
from toolkit.weights.safetensors_files import MAX_HEADER_BYTES

CONFIG, WEIGHTS = "config.json", ".safetensors"
_GGUF_HEADERS = (24 << 20, 96 << 20)  # bytes to try: the tokenizer takes 5 to 15 MB
_LATER_PARTS = 32  # how many times smaller the header of later parts is: they have no tokenizer
_FIRST = 1 << 18  # bytes of a safetensors file that are fetched first: its header is rarely longer
NOT_JSON = (json.JSONDecodeError, UnicodeDecodeError)  # an answer of something else than the Hub
_CHUNK = 1 << 20
_ATTEMPTS = 5  # without a byte between them
_WAIT_S = 1.0
_KEPT = "The part that has arrived is kept; load the model again to continue"


@dataclass(frozen=True)
class File:
    """One file of a repository; `etag` is its hash, and its name in the cache."""

    name: str
    nbytes: int
    etag: str


@dataclass(frozen=True)
class Repository:
    """A model on the Hub that is not in the cache, at one commit. `model` is the path of its folder or GGUF file in there."""

    asked: str
    name: str
    revision: str
    commit: str
    token: str | bool | None = field(repr=False)
    files: tuple[File, ...]
    model: str  # the GGUF file's name; "" is the folder

    @property
    def folder(self) -> Path:
        """The folder of the commit in the cache."""
        return _storage(self.name) / "snapshots" / self.commit

    def missing(self) -> list[File]:
        """Return the files that are not in the cache."""
        return [file for file in self.files if not (self.folder / file.name).exists()]

    @contextmanager
    def headers(self, opened: Callable[[Path], object], cancel: Event | None = None) -> Iterator[Path]:
        """Yield the model's path in a temporary folder, whose files of weights have their size but only their header.

        `opened` opens a model by its path, and raises FormatError where the header of a GGUF file is not complete. Errors that
        name a file of the temporary folder name it without that folder.
        """
        counter = Counter(f"reading the headers of {self.asked}", False, cancel, "Load the model again", bytes_text)
        counter.begin(sum(file.nbytes for file in self.files))
        with _written_temporarily(self.asked):
            temporary = TemporaryFolder()
        try:
            folder = Path(temporary.name) / self.name
            with explained(self.asked, self.name):
                for file in self.files:
                    path = folder / file.name
                    with _written_temporarily(self.asked):
                        path.parent.mkdir(parents=True, exist_ok=True)
                    if file.name.endswith(WEIGHTS):
                        self._header(file, path, counter)
                    elif not self.model:
                        whole = self.whole(file)
                        with _written_temporarily(self.asked):
                            shutil.copyfile(whole, path)
                if self.model:
                    self._gguf_headers(folder, opened, counter)
            try:
                yield folder / self.model
            except ToolkitError as error:
                texts = (text.replace(f"{temporary.name}{os.sep}", "") for text in (error.asked, error.found, error.do))
                make: Callable[..., ToolkitError] = type(error)
                raise make(*texts, **error.facts) from error.__cause__
        finally:
            temporary.cleanup()

    def download(self, progress: bool | Progress, cancel: Event | None) -> Path:
        """Download the missing files into the cache, and return the model's path there.

        Raises HubError if the Hub or the disk fails, and CancelledError. Both keep what has arrived for the next attempt.
        """
        missing = self.missing()
        left = sum(file.nbytes - _size(_partial(self.name, file)) for file in missing)
        _check_disk(self.asked, left)
        counter = Counter(f"downloading {self.asked}", progress, cancel, _KEPT, bytes_text)
        total = sum(file.nbytes for file in self.files)
        counter(total - sum(file.nbytes for file in missing), total, "")
        with explained(self.asked, self.name, kept=f". {_KEPT}"):
            for file in sorted(missing, key=lambda file: file.name.lower().endswith((WEIGHTS, ".gguf"))):
                self.whole(file, counter)
        self.remember()
        return self.folder / self.model

    def remember(self) -> None:
        """Write down which commit the revision is, as huggingface_hub does: it is loaded if the Hub does not answer."""
        ref = _storage(self.name) / "refs" / self.revision
        with suppress(OSError):  # a cache that cannot be written is still loaded
            if self.revision != self.commit and not (ref.is_file() and ref.read_text() == self.commit):
                ref.parent.mkdir(parents=True, exist_ok=True)
                ref.write_text(self.commit)

    def whole(self, file: File, counter: Counter | None = None) -> Path:
        """Return the path of a file in the cache. Downloads it if it is not there."""
        counter = counter or Counter(f"downloading {self.asked}", False)
        path = self.folder / file.name
        if path.exists():
            return path
        blob = _storage(self.name) / "blobs" / file.etag
        blob.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self.name, file, counter):
            if blob.exists():
                counter.step(file.nbytes, file.name)
            else:
                self._fetch(file, _partial(self.name, file), counter)
                os.replace(_partial(self.name, file), blob)
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                path.symlink_to(os.path.relpath(blob, path.parent))
            except FileExistsError:  # from another process
                pass
            except OSError:  # no links on this disk: huggingface_hub moves files there
                os.replace(blob, path)
        return path

    def _fetch(self, file: File, partial: Path, counter: Counter) -> None:
        """Complete the partial file. Raises HubError if the result does not have the hash of the file, and deletes it."""
        digest = hashlib.sha256() if len(file.etag) == 64 else hashlib.sha1(b"blob %d\0" % file.nbytes)
        with open(partial, "ab+") as out:
            out.seek(0)
            while chunk := out.read(_CHUNK):
                digest.update(chunk)
                counter.step(len(chunk), file.name)
            self._receive(file, out, file.nbytes, counter, digest.update)
            arrived = out.tell()
        if arrived < file.nbytes:
            found = f"only {arrived:,} of {file.nbytes:,} bytes are sent"
            raise HubError(f"file {file.name} of {self.name}", found, f"Try again later. {_KEPT}")
        if digest.hexdigest() != file.etag:
            partial.unlink()
            found = "it does not have the hash that the Hub names"
            raise HubError(f"file {file.name} of {self.name}", found, "Load the model again, which downloads this file again")

    def _receive(self, file: File, out: BinaryIO, stop: int, counter: Counter, arrived: Callable[[bytes], object]) -> None:
        """Write the bytes of a file from `out.tell()` to `stop`, as far as they are sent. Continues after lost connections."""
        counter.step(0, file.name)
        attempts = 0
        while (at := out.tell()) < stop and attempts < _ATTEMPTS:
            try:
                with self._stream(file, at, stop) as chunks:
                    for chunk in chunks:
                        out.write(chunk)
                        arrived(chunk)
                        counter.step(len(chunk), file.name)
            except transport_error():
                if attempts == _ATTEMPTS - 1 and out.tell() == at:
                    raise
            if out.tell() == at:
                attempts += 1
                time.sleep(_WAIT_S)
            else:
                attempts = 0

    def _header(self, file: File, path: Path, counter: Counter) -> None:
        """Write a file of the same size with the header of a safetensors file."""
        first = self._beginning(file, path, _FIRST, counter)
        length = 8 + int.from_bytes(first[:8], "little")
        if length > len(first) and length <= MAX_HEADER_BYTES:
            self._beginning(file, path, length, counter)

    def _gguf_headers(self, folder: Path, opened: Callable[[Path], object], counter: Counter) -> None:
        """Write files of the same size with the headers of all parts of a GGUF model. Their length is not stated anywhere."""
        for size in _GGUF_HEADERS:
            damaged = False
            for file in self.files:
                nbytes = size if file.name == self.model else size // _LATER_PARTS
                damaged |= not self._beginning(file, folder / file.name, nbytes, counter).startswith(b"GGUF")
            if damaged:  # more bytes do not help
                return
            try:
                opened(folder / self.model)
            except FormatError:
                continue
            return

    def _beginning(self, file: File, path: Path, nbytes: int, counter: Counter) -> bytes:
        """Write a file of the same size with the first `nbytes` of a file, and return these."""
        received = BytesIO()
        self._receive(file, received, min(nbytes, file.nbytes), counter, lambda _: None)
        first = received.getvalue()
        with _written_temporarily(self.asked), open(path, "wb") as out:
            out.write(first)
            out.truncate(file.nbytes)
        return first

    @contextmanager
    def _stream(self, file: File, start: int, stop: int | None = None) -> Iterator[Iterator[bytes]]:
        """Request a file from byte `start` on, and yield chunks of it. `stop` is the end of the last byte."""
        import huggingface_hub
        from huggingface_hub import constants

        utils: Any = huggingface_hub.utils  # which loads its functions when they are first used
        stop = file.nbytes if stop is None else stop
        url = huggingface_hub.hf_hub_url(self.name, file.name, revision=self.commit, endpoint=constants.ENDPOINT)
        headers = utils.build_hf_headers(token=self.token) | {
            "Accept-Encoding": "identity",
            "Range": f"bytes={start}-{stop - 1}",
        }
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with utils.http_stream_backoff("GET", url, headers=headers, timeout=timeout, retry_on_exceptions=()) as response:
            utils.hf_raise_for_status(response)
            skipped = start if response.status_code == 200 else 0  # a server that ignores ranges sends the whole file
            yield _cut(response.iter_bytes(_CHUNK), skipped, stop - start)


def _cut(chunks: Iterator[bytes], skipped: int, most: int) -> Iterator[bytes]:
    """Yield `chunks` without the first `skipped` bytes, `most` bytes at the most."""
    for chunk in chunks:
        kept = chunk[skipped:][:most]
        skipped, most = max(0, skipped - len(chunk)), most - len(kept)
        if kept:
            yield kept
        if not most:
            return


def _cache() -> Path:
    """Return the cache of huggingface_hub, whose name may be relative."""
    from huggingface_hub import constants

    return at_home(constants.HF_HUB_CACHE).absolute()


def _storage(name: str) -> Path:
    """Return the folder of a repository in the cache."""
    return _cache() / f"models--{name.replace('/', '--')}"


def _partial(name: str, file: File) -> Path:
    return _storage(name) / "blobs" / f"{file.etag}.incomplete"


def transport_error() -> type[Exception]:
    """Return the class of lost connections: of httpx, or of httpx2 in later versions of huggingface_hub."""
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]  # loaded when it is first used

    found: type[Exception] = sys.modules[type(get_session()).__module__.partition(".")[0]].TransportError
    return found


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@contextmanager
def _locked(name: str, file: File, counter: Counter) -> Iterator[None]:
    """Hold the lock of huggingface_hub for a file. While another process holds it, `counter` can cancel."""
    path = _cache() / ".locks" / f"models--{name.replace('/', '--')}" / f"{file.etag}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    while True:
        try:
            lock.acquire(timeout=0.1)
            break
        except Timeout:
            counter.step(0, f"{file.name} (another process downloads it)")
    with lock:
        lock.release()
        yield


def _check_disk(asked: str, needed: int) -> None:
    """Raise HubError if the disk of the cache has less than `needed` bytes free."""
    folder = _cache()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise _full(asked, f"{bytes_text(needed)} are to be downloaded, {bytes_text(free)} are free in {folder}", needed, free)


def _full(asked: str, found: str, needed: int | None = None, free: int | None = None) -> HubError:
    do = "Free space there, or set HF_HUB_CACHE to a folder on a larger disk before Python starts"
    return HubError(f"downloading {asked}", found, do, needed_bytes=needed, free_bytes=free)


@contextmanager
def explained(asked: str, name: str, revision: str = "", kept: str = "") -> Iterator[None]:
    """Turn errors of huggingface_hub, of the connection and of the disk into HubError."""
    from huggingface_hub import constants, errors

    hub, what = constants.ENDPOINT, f"model {asked!r}"
    log_in = "pass token=, or run: hf auth login"
    try:
        yield
    except errors.GatedRepoError as error:
        found = f"its authors share {name} only with accounts that they have admitted"
        raise HubError(what, found, f"Accept the conditions on {hub}/{name}, then {log_in}") from error
    except errors.RepositoryNotFoundError as error:
        found = f"no such file or folder here, and no such repository on {hub} (or it is private)"
        raise HubError(what, found, f"Check the name. For a private repository, {log_in}") from error
    except errors.RevisionNotFoundError as error:
        do = f"Leave out revision=, or pass a branch, tag or commit of {hub}/{name}"
        raise HubError(what, f"it has no revision {revision!r}", do) from error
    except errors.HFValidationError as error:
        raise HubError(what, "no repository can have this name", f"Check the name on {hub}") from error
    except errors.LocalTokenNotFoundError as error:
        raise HubError(what, "token=True, but no access token is saved here", f"To log in, {log_in}") from error
    except NOT_JSON as error:
        found = f"{hub} did not answer as a Hub does ({type(error).__name__}): the network may show a login page instead"
        raise HubError(what, found, "Log in to the network, and check that HF_ENDPOINT is a Hub if it is set") from error
    except errors.OfflineModeIsEnabled as error:
        found = "no such file or folder here, and it is not in the cache of downloaded models. HF_HUB_OFFLINE is set"
        raise HubError(what, found, "Unset HF_HUB_OFFLINE to download it, or pass a folder or a .gguf file") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        do = f"Check the token, or {log_in}" if status in (401, 403) else "Try again later"
        raise HubError(what, f"{hub} answered with status {status}", do, status=status) from error
    except (transport_error(), errors.LocalEntryNotFoundError) as error:
        secret = type(error).__name__ == "LocalProtocolError"  # its text has the header with the access token
        reason = type(error).__name__ + ("" if secret else f": {error!s:.120}")
        found = f"no such file or folder here, and {hub} cannot be reached ({reason})"
        do = f"Check the network, or pass a folder or a .gguf file{kept}"
        raise HubError(what, found, do) from (None if secret else error)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _full(asked, f"the disk of {constants.HF_HUB_CACHE} is full") from error
        found = f"{constants.HF_HUB_CACHE} cannot be written ({error.strerror or error})"
        raise HubError(f"downloading {asked}", found, "Set HF_HUB_CACHE to a folder that you may write to") from error


@contextmanager
def _written_temporarily(asked: str) -> Iterator[None]:
    """Turn errors of the temporary folder into HubError."""
    try:
        yield
    except OSError as error:
        do = "Free space there, or set TMPDIR to a folder that you may write to before Python starts"
        raise HubError(f"reading the headers of {asked}", f"the temporary folder cannot be written ({error})", do) from error
