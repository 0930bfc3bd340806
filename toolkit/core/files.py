"""Write files atomically: a reader finds the old file or the complete new one, never a part of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from toolkit.core.errors import TraceError


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` when the block ends. If the block raises, `path` is left as it was.

    Raises TraceError if the file cannot be written.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        with temporary.open("xb") as file:
            yield file
        os.replace(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise TraceError(f"writing {os.fspath(path)!r}", str(error), "Check that the folder is there and has room") from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
