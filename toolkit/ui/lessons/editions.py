"""Editions of a lesson's notebook: with the answers typed in, and as slides.

`python -m toolkit.ui.lessons.editions FOLDER` (or `make teacher`) runs every lesson with its answers and writes, per lesson, a
notebook with the outputs and a page of slides. It needs a checkout of the repository, and nbconvert, which JupyterLab installs.
What the user has solved is not changed.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from toolkit.core.errors import ToolkitError
from toolkit.core.files import replace_text
from toolkit.core.progress import Counter, Progress
from toolkit.tune.store import cache_folder
from toolkit.ui.lessons import slides
from toolkit.ui.lessons.course import lessons
from toolkit.ui.lessons.lesson import NAMES, Lesson

NOTEBOOKS = Path(__file__).parents[3] / "notebooks"
PREDICTION = re.compile(r"^my_prediction = \{.*\}$", re.MULTILINE)
EXERCISE = "# write your"
CHECK = re.compile(r"lesson\.(?:ask|task)\(\s*\"([^\"]+)\"")
_CELL_S = 600  # seconds that a cell may take: lesson 9 compiles an export


def questions_of(notebook: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Return for each question of a notebook its name and the indices of two cells: to write in, and to check."""
    found = []
    for at, cell in enumerate(notebook["cells"]):
        for name in CHECK.findall("".join(cell["source"])) if cell["cell_type"] == "code" else ():
            open_ones = [n for n in range(at) if _is_open("".join(notebook["cells"][n]["source"]))]
            found.append((name, open_ones[-1], at))
    return found


def answered(notebook: dict[str, Any], lesson: Lesson, notes: bool = False) -> dict[str, Any]:
    """Return the notebook with the answers typed in. `notes` puts the hint of each question next to it."""
    result = copy.deepcopy(notebook)
    for name, at, check in reversed(questions_of(notebook)):
        cell, question = result["cells"][at], lesson.questions[name]
        source, answer = "".join(cell["source"]), question.answer
        if PREDICTION.search(source):
            answer = PREDICTION.sub(lambda _, to=answer: f"my_prediction = {to}", source)  # type: ignore[misc]
        cell["source"] = answer
        cell.setdefault("metadata", {})["answer"] = True
        if notes:
            text = f"**For teachers, {name}.** Hint after a wrong try: {question.hint}"
            note = {"cell_type": "markdown", "id": f"note-{check}", "metadata": {"note": True}, "source": text}
            result["cells"].insert(check + 1, note)
    return result


def executed(notebook: dict[str, Any], lesson: Lesson, progress: bool | Progress = False) -> dict[str, Any]:
    """Run a notebook in a new kernel and return it with its outputs.

    The kernel has a cache of its own, except for compiled exports, so that it changes nothing that the user has solved or
    tuned. `progress` is called with cells done, cells in all, and the notebook's name. Raises ToolkitError if a cell fails or a
    check isn't right.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    count = Counter(f"running {lesson.notebook}", progress)
    cells = len(notebook["cells"])
    count.begin(cells)

    def show(cell_index: int, **_: object) -> None:
        count(cell_index + 1, cells, lesson.notebook)

    with tempfile.TemporaryDirectory() as folder, _cache(Path(folder) / "cache") as environment:
        made = nbformat.reads(json.dumps(notebook), as_version=4)
        client = NotebookClient(
            made, timeout=_CELL_S, kernel_name="python3", resources={"metadata": {"path": folder}}, on_cell_complete=show
        )
        try:
            client.execute(env=environment)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            found = str(error).strip().splitlines()[-1]
            raise ToolkitError(f"running {lesson.notebook}", found, "Run the notebook in JupyterLab to see the cell") from error
    count(cells, cells, lesson.notebook)
    for name, _, check in questions_of(made):
        said = [_text_of(output) for output in made["cells"][check]["outputs"]]
        if not any(text.startswith("right: ") and "wrong: " not in text for text in said):
            found = f"its check says {said[0] if said else 'nothing'!r}"
            raise ToolkitError(f"the answer to {name!r} in {lesson.notebook}", found, "Fix the answer in the lesson's module")
    return dict(made)


def write(lesson: Lesson, folder: Path, reveal: str | Path = slides.REVEAL, progress: bool | Progress = False) -> list[Path]:
    """Write the edition of a lesson with answers: a notebook with outputs and notes, and a page of slides. Returns their paths.

    `reveal` is the address of reveal.js or a folder that has it. Raises ToolkitError if the lesson fails.
    """
    ran = executed(answered(read(lesson), lesson, notes=True), lesson, progress)
    folder.mkdir(parents=True, exist_ok=True)
    notebook, page = folder / lesson.notebook, folder / f"{Path(lesson.notebook).stem}.slides.html"
    replace_text(notebook, json.dumps(slides.without_widgets(ran), indent=1, ensure_ascii=False) + "\n")
    replace_text(page, slides.page(ran, f"{lesson.number}. {lesson.title}", reveal))
    return [notebook, page]


def read(lesson: Lesson) -> dict[str, Any]:
    """Return the notebook of a lesson, as JSON. Raises ToolkitError outside of a checkout of the repository."""
    path = NOTEBOOKS / lesson.notebook
    if not path.is_file():
        raise ToolkitError(f"the notebook {lesson.notebook}", f"there is no {path}", "Run this in a checkout of the repository")
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return notebook


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the editions of all lessons, or of those asked for. Returns 1 if a lesson failed; the others are written."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.ui.lessons.editions", description="Write the teacher's edition.")
    parser.add_argument("folder", type=Path, help="where to write notebooks and slides")
    parser.add_argument("--lesson", type=int, action="append", help="the number of a lesson (default: all)")
    parser.add_argument(
        "--reveal", default=slides.REVEAL, help="address of reveal.js, or a folder with it (default: %(default)s)"
    )
    asked = parser.parse_args(arguments)
    if unknown := set(asked.lesson or ()) - set(range(1, len(NAMES) + 1)):
        parser.error(f"--lesson {min(unknown)}: the course has the lessons 1 to {len(NAMES)}")
    chosen = [lesson for lesson in lessons() if asked.lesson is None or lesson.number in asked.lesson]
    failed = []
    for lesson in chosen:
        begun = monotonic()
        try:
            paths = write(lesson, asked.folder, asked.reveal, progress=True)
        except ToolkitError as error:
            failed.append(lesson.number)
            print(f"Lesson {lesson.number} failed: {error}", file=sys.stderr, flush=True)
        else:
            print(f"{' and '.join(path.name for path in paths)} in {monotonic() - begun:.0f} s", flush=True)
    print(f"{len(chosen) - len(failed)} of {len(chosen)} lessons are in {asked.folder}")
    return 1 if failed or not chosen else 0


@contextmanager
def _cache(folder: Path) -> Iterator[dict[str, str]]:
    """Yield an environment with a new cache that shares the user's compiled exports."""
    compiled = cache_folder() / "compiled"
    compiled.mkdir(parents=True, exist_ok=True)
    folder.mkdir()
    (folder / "compiled").symlink_to(compiled.absolute(), target_is_directory=True)
    yield {**os.environ, "TOOLKIT_CACHE": str(folder)}


def _text_of(output: dict[str, Any]) -> str:
    return str(output.get("text") or output.get("data", {}).get("text/plain", ""))


def _is_open(source: str) -> bool:
    return PREDICTION.search(source) is not None or EXERCISE in source


if __name__ == "__main__":
    sys.exit(main())
