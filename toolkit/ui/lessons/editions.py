"""Editions of a lesson's notebook: with the answers typed in, and as slides.

`python -m toolkit.ui.lessons.editions FOLDER` (or `make teacher`) runs every lesson with its answers and writes, per lesson, a
notebook with the outputs and a page of slides. It needs a checkout of the repository, and nbconvert, which JupyterLab installs.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

from toolkit.ui.lessons.lesson import Lesson

NOTEBOOKS = Path(__file__).parents[3] / "notebooks"
PREDICTION = re.compile(r"^my_prediction = \{.*\}$", re.MULTILINE)
EXERCISE = "# write your"
CHECK = re.compile(r"lesson\.(?:ask|task)\(\s*\"([^\"]+)\"")


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
        if notes:
            text = f"**For teachers, {name}.** Hint after a wrong try: {question.hint}"
            result["cells"].insert(check + 1, {"cell_type": "markdown", "id": f"note-{check}", "metadata": {}, "source": text})
    return result


def _is_open(source: str) -> bool:
    return PREDICTION.search(source) is not None or EXERCISE in source


def read(lesson: Lesson) -> dict[str, Any]:
    """Return the notebook of a lesson, as JSON."""
    return json.loads((NOTEBOOKS / lesson.notebook).read_text(encoding="utf-8"))
