"""Every notebook runs from top to bottom, is stored without outputs, and its questions accept the right answers alone."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import cache_of_lessons, compiling_alone, exports_cache
from toolkit.ui.lessons import editions, progress
from toolkit.ui.lessons.lesson import Lesson

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")


def lesson_of(path: Path) -> Lesson | None:
    """The lesson of a notebook."""
    name = path.stem.split("_", 1)[1]
    found = importlib.util.find_spec(f"toolkit.ui.lessons.{name}")
    return getattr(importlib.import_module(found.name), "lesson", None) if found else None


NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
IDS = [path.stem for path in NOTEBOOKS]
LESSONS = {path: lesson for path in NOTEBOOKS if (lesson := lesson_of(path))}
VERDICTS = ("Write your prediction", "right: ", "wrong: ")


@pytest.fixture(autouse=True, scope="module")
def one_cache(own_ports: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What lessons 7 and 9 compile is kept apart from the user's, and compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOOLKIT_CACHE", str(cache_of_lessons(tmp_path_factory)))
        yield


@contextmanager
def kernel(notebook, folder: Path) -> Iterator[Any]:
    """A client with a kernel that runs the cells of this notebook. What it holds in the end needs no tidying up."""
    client = nbclient.NotebookClient(
        notebook,
        timeout=120,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        shutdown_kernel="immediate",
    )
    with client.setup_kernel():
        yield client


def texts(notebook) -> list[str]:
    """The text/plain of every cell's outputs."""
    plain = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            plain.append(output.get("text") or output.get("data", {}).get("text/plain", ""))
    return plain


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_is_stored_without_outputs(path: Path) -> None:
    raw = json.loads(path.read_text())
    code = [cell for cell in raw["cells"] if cell["cell_type"] == "code"]
    assert code
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
    assert "widgets" not in raw["metadata"]


@pytest.mark.parametrize("lesson", LESSONS.values(), ids=[path.stem for path in LESSONS])
def test_a_notebook_checks_every_question_and_has_no_answer(lesson: Lesson) -> None:
    notebook = editions.read(lesson)
    text = "".join("".join(cell["source"]) for cell in notebook["cells"])
    names = [name for name, _, _ in editions.questions_of(notebook)]
    assert names == list(lesson.questions)
    for question in lesson.questions.values():
        assert question.hint
        assert question.answer not in text
        assert question.why[:40] not in text
        assert question.hint[:40] not in text
    sources = ["".join(cell["source"]) for cell in notebook["cells"]]
    for name, at, _ in editions.questions_of(notebook):
        if found := editions.PREDICTION.search(sources[at]):
            assert tuple(ast.literal_eval(found[0].partition("=")[2].strip())) == lesson.questions[name].names
    assert text.count("lesson.start()") == text.count("lesson.finish()") == 1
    assert editions.CHECK.search(text[: text.index("lesson.start()")]) is None


@pytest.mark.parametrize("lesson", LESSONS.values(), ids=[path.stem for path in LESSONS])
def test_a_skipped_prediction_is_not_judged_by_the_one_before(lesson: Lesson) -> None:
    """All predictions are in `my_prediction`, so the names of neighbors must differ."""
    asked = [question.names for question in lesson.questions.values() if question.names]
    assert all(set(names) != set(before) for before, names in pairwise(asked))


@pytest.mark.slow
@pytest.mark.parametrize("path", LESSONS, ids=[path.stem for path in LESSONS])
def test_a_lesson_runs_as_it_is_and_again_with_the_answers(
    path: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Twice in one kernel, with the same numbers; no answer is given away, and no file is left.

    The first time without predictions, and each exercise is run as it is, and then with an answer.
    """
    lesson = LESSONS[path]
    notebook = editions.read(lesson)
    questions = editions.questions_of(notebook)
    exercises = {name: at for name, at, _ in questions if editions.EXERCISE in "".join(notebook["cells"][at]["source"])}
    alone = compiling_alone(exports_cache(tmp_path_factory)) if "export" in lesson.name else nullcontext()
    with kernel(opened(notebook), tmp_path) as client:
        with alone:
            for number, cell in enumerate(client.nb.cells):
                client.execute_cell(cell, number)
                for name in (name for name, _, check in questions if check == number):
                    expected = "\nHint: " if name in exercises else "Write your prediction"
                    assert expected in verdict(cell), name
                    if name in exercises:
                        client.nb.cells[exercises[name]].source = lesson.questions[name].answer
                        for again in range(exercises[name], number + 1):
                            client.execute_cell(client.nb.cells[again], again)
                        is_right(cell)
        predictions = [question for name, question in lesson.questions.items() if name not in exercises]
        assert not [text for text in texts(client.nb) for question in predictions if question.why[:30] in text]
        assert lesson.solved == tuple(exercises)
        before = numbers(client.nb)
        client.nb = opened(editions.answered(notebook, lesson))
        checks = {check for _, _, check in questions}
        for number, cell in enumerate(client.nb.cells):
            for _ in range(2 if number in checks else 1):  # a learner runs a check again with the next prediction
                client.execute_cell(cell, number)
                if number in checks:
                    is_right(cell)
        skipped = depend_on_answers(notebook)
        assert [row for row in numbers(client.nb) if row[0] not in skipped] == [row for row in before if row[0] not in skipped]
    assert lesson.solved == tuple(lesson.questions)
    assert list(tmp_path.iterdir()) == []
    progress.forget(lesson.name)


def verdict(cell: Any) -> str:
    """The text of a check. A line about the cell's memory may be below it."""
    (found,) = (text for text in texts(nbformat.v4.new_notebook(cells=[cell])) if text.startswith(VERDICTS))
    return found


def is_right(cell: Any) -> None:
    text = verdict(cell)
    assert text.startswith("right: "), cell.source
    assert "wrong: " not in text, cell.source


def depend_on_answers(notebook: dict[str, Any]) -> set[int]:
    """Cells that may show something else with the predictions: progress, checks, and cells to write in."""
    sources = ["".join(cell["source"]) for cell in notebook["cells"]]
    return {at for at, source in enumerate(sources) if "lesson." in source or "my_prediction =" in source}


def opened(notebook: dict[str, Any]) -> Any:
    return nbformat.reads(json.dumps(notebook), as_version=4)


def numbers(notebook) -> list[tuple[int, str]]:
    """The numbers of each code cell's text and of the line below it, without times, pictures, and names of cells and folders.

    A cell's text is one: how many parts it arrives in depends on the time.
    """
    found = []
    for number, cell in enumerate(notebook.cells):
        texts = []
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            texts += [
                output.get("text", ""),
                data.get("text/plain", ""),
                *re.findall(r"peak [^(<]*", data.get("text/html", "")),
            ]
        if texts:
            plain = re.sub(r"cell \d+|stream \d+|[\d.]+ (ns|µs|ms|s)\b|base64,[\w+/=]+|toolkit-\w+", "", "".join(texts))
            found.append((number, re.sub(r"[\s-]+", " ", plain)))
    return found
