"""Write files atomically: a reader finds the old file or the complete new one, never a part of it.

`replacing` opens a temporary file next to the target and renames it over the target once it is complete; `replace_text` does
so for a text. Both are used for every file that the toolkit writes as a whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from toolkit.core.errors import ToolkitError


@contextmanager
def replacing(
    path: str | os.PathLike[str], error: type[ToolkitError] | None = None, *, sync: bool = False
) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` when the block ends. If the block raises, `path` is left as it was.

    `sync` flushes the data to the disk before the file is renamed, so that it also survives a power failure. If the file cannot
    be written, raises `error`, or OSError if `error` is None.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.urandom(4).hex()}.part")
    try:
        with temporary.open("xb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as problem:
        with suppress(OSError):
            temporary.unlink()
        if error is None or not isinstance(problem, OSError):
            raise
        do = "Check that the folder exists, that you may write to it and that its disk has space left"
        raise error(f"writing {os.fspath(path)!r}", problem.strerror or str(problem), do) from problem


def replace_text(path: Path, text: str, error: type[ToolkitError] | None = None, *, sync: bool = False) -> Path:
    """Write `text` to `path` in UTF-8 as `replacing` does, and return `path`."""
    with replacing(path, error, sync=sync) as file:
        file.write(text.encode())
    return path
