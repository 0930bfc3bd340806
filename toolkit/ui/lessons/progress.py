"""What the learner has solved, kept in a file of the user's cache folder across notebooks and kernels.

The file holds the names of the solved questions of each lesson. It is no secret and no grade: delete it to begin again.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

from toolkit.core.files import replace_text
from toolkit.tune.store import cache_folder, locked


def path() -> Path:
    """Return the path of the file."""
    return cache_folder() / "lessons.json"


def solved(lesson: str) -> frozenset[str]:
    """Return the names of the questions of `lesson` that were solved."""
    return frozenset(_read().get(lesson, ()))


def note(lesson: str, question: str) -> None:
    """Add a question to the solved ones. Warns if the file can't be written."""
    if question in solved(lesson):
        return
    try:
        with locked(path()):
            found = _read()
            found[lesson] = sorted({*found.get(lesson, ()), question})
            replace_text(path(), json.dumps(found, indent=1))
    except OSError as error:
        warnings.warn(f"Progress isn't saved: {error}. Set TOOLKIT_CACHE to a writable folder.", stacklevel=4)


def forget(lesson: str | None = None) -> None:
    """Forget what was solved in `lesson`, or in all lessons."""
    if not path().exists():
        return
    with locked(path()):
        found = _read()
        kept = {} if lesson is None else {name: names for name, names in found.items() if name != lesson}
        replace_text(path(), json.dumps(kept, indent=1))


def _read() -> dict[str, list[str]]:
    """Return the file's content; of a missing or damaged file, nothing."""
    try:
        found = json.loads(path().read_text(encoding="utf-8"))
        return {str(name): [str(one) for one in names] for name, names in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
