"""The framework of the lessons: a hint before an answer, nothing before a try, and progress that is kept."""

from __future__ import annotations

import json
import sys

import pytest
from IPython.core.interactiveshell import InteractiveShell

import toolkit as tk
from toolkit.ui.lessons import editions, progress
from toolkit.ui.lessons.course import course, forget
from toolkit.ui.lessons.lesson import Lesson, Question

QUESTIONS = {
    "copies": Question("count them", "because {found[h2d]} cross in {us:.0f} µs", '{"h2d": 2}'),
    "side": Question("who waits?", "the host waits", '{"side": "host"}', choices=("host", "GPU")),
    "mend": Question("use a number", "{n} copies are left", "def mended():\n    return 1"),
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def lesson():
    return Lesson("see_the_copies", "Test", 10, ("count",), QUESTIONS)


def test_a_prediction_gets_a_hint_and_then_the_answer(lesson):
    def ask(value):
        return repr(lesson.ask("copies", {"h2d": value}, {"h2d": 2}, us=3.2))

    assert ask(None).startswith("Write your prediction for 'h2d' in the cell above")
    hint = "wrong: h2d - you said 1\nHint: count them"
    assert ask(1) == hint
    assert ask(1) == hint  # the same prediction is no second try
    assert ask(3) == "wrong: h2d - you said 3, the trace says 2\nbecause 2 cross in 3 µs"
    assert lesson.solved == ()
    assert ask(2) == "right: h2d - you said 2, the trace says 2\nbecause 2 cross in 3 µs"
    assert lesson.solved == ("copies",)
    lesson.start()
    assert ask(4) == "wrong: h2d - you said 4\nHint: count them"


def test_a_prediction_without_one_of_the_names_is_asked_again(lesson):
    lesson.questions["both"] = Question("count them", "because", '{"h2d": 2, "d2h": f(1)["us"]}')
    found = {"h2d": 2, "d2h": 1, "d2d": 0}
    for value in (1, 2):
        assert "prediction for 'd2h' is missing" in repr(lesson.ask("both", {"h2d": value}, found))
    assert "both" not in lesson.solved
    assert repr(lesson.ask("both", {"h2d": 2, "d2h": 3}, found)).endswith("Hint: count them")  # the first try
    assert lesson.ask("both", {"h2d": 2, "d2h": 1}, found).right


def test_what_is_no_try_is_asked_again(lesson):
    other = lesson.ask("side", {"side": "CPU"}, {"side": "host"})
    assert repr(other) == "'CPU' is not one of the choices: 'host', 'GPU'."
    assert "Nothing is called 'd2h' here" in repr(lesson.ask("copies", {"d2h": 1}, {"h2d": 2}))
    assert "Hint" in repr(lesson.ask("side", {"side": "GPU"}, {"side": "host"}))
    with pytest.raises(tk.ToolkitError, match="copies, side, mend"):
        lesson.ask("step", {}, {})
    for nothing in ({}, 2, "GPU", None):
        verdict = lesson.ask("copies", nothing, {"h2d": 2})
        assert repr(verdict) == "Write a prediction for each name, as in the cell as it was: a dict of names and values."
    assert "copies" not in lesson.solved


def test_an_exercise_has_a_solution_after_a_try(lesson):
    assert "Try it first" in repr(lesson.solution("mend"))
    first = lesson.task("mend", {"copies: 1, wanted 0": False, "the same result": True}, n=1)
    assert repr(first) == "wrong: copies: 1, wanted 0\nright: the same result\nHint: use a number"
    again = lesson.task("mend", {"copies: 1, wanted 0": False}, n=1)
    assert repr(again).endswith('Hint: use a number\nStuck? lesson.solution("mend") shows a solution.')
    assert "def mended():\n    return 1" in repr(lesson.solution("mend"))
    assert repr(lesson.task("mend", {"copies: 0, wanted 0": True}, n=0)) == "right: copies: 0, wanted 0\n0 copies are left"
    assert lesson.solved == ("mend",)


def test_an_error_of_an_exercise_is_a_wrong_try_and_no_traceback(lesson, capsys):
    shell = InteractiveShell.instance()
    shell.user_ns["lesson"] = lesson
    shell.run_cell("def mended():\n    return [][int()]")
    result = shell.run_cell('with lesson.trying("mend", mended):\n    mended()\nwent_on = True')
    assert isinstance(result.error_in_exec, IndexError)  # so the cell ends
    said = "wrong: `mended` should run to its end, but it raised IndexError in its line 2: list index out of range"
    assert capsys.readouterr().out.strip() == f"{said}\nHint: use a number"
    assert "went_on" not in shell.user_ns
    assert "def mended()" in repr(lesson.solution("mend"))
    shell.reset()
    sys.modules["__main__"].__dict__.setdefault("__spec__", None)  # `reset` deletes it, and multiprocessing reads it


def test_an_exercise_without_conditions_is_not_solved(lesson):
    assert repr(lesson.task("mend", {}, n=0)) == "There was nothing to check. Run all cells above again."
    assert lesson.solved == ()


def test_progress_is_kept_across_kernels_and_survives_a_damaged_file(lesson, cache):
    lesson.ask("side", {"side": "host"}, {"side": "host"})
    assert "Solved: 1 of 3." in repr(Lesson("see_the_copies", "Test", 10, (), QUESTIONS).start())
    assert "Still open: copies, mend." in repr(lesson.finish())
    (cache / "lessons.json").write_text("{")
    assert lesson.solved == ()
    lesson.ask("side", {"side": "host"}, {"side": "host"})
    assert json.loads((cache / "lessons.json").read_text()) == {"see_the_copies": ["side"]}


def test_progress_that_cannot_be_saved_is_a_warning(lesson, cache, monkeypatch):
    (cache / "file").touch()
    monkeypatch.setenv("TOOLKIT_CACHE", str(cache / "file"))
    with pytest.warns(UserWarning, match="Set TOOLKIT_CACHE"):
        assert lesson.ask("side", {"side": "host"}, {"side": "host"}).right


def test_the_folder_of_a_lesson_goes_with_it(lesson):
    folder = lesson.folder
    (folder / "file").touch()
    assert lesson.folder == folder
    lesson.finish()
    assert not folder.exists()


def test_the_course_shows_what_was_solved():
    first = course().lessons[0]
    for name in first.questions:
        progress.note(first.name, name)
    said = repr(course())
    assert f"{len(first.questions)} of {len(first.questions)} ✓" in said
    assert f"1 of {len(course().lessons)} lessons solved." in said
    assert f'<a href="{first.notebook}">{first.title}</a>' in course()._repr_html_()
    for wrong in (0, 12, "1"):
        with pytest.raises(tk.ToolkitError, match=r"the lesson .*: the course has the lessons 1 to 11\. Give one"):
            forget(wrong)
    assert "0 of" in repr(forget(1))
    assert first.solved == ()


def test_the_courses_notebook_shows_it():
    cells = json.loads((editions.NOTEBOOKS / "00_course.ipynb").read_text())["cells"]
    (source,) = ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    *imports, last = source.splitlines()
    names = {}
    exec("\n".join(imports), names)
    assert repr(eval(last, names)) == repr(course())


def test_every_lesson_has_its_notebook():
    for lesson in course().lessons:
        assert (editions.NOTEBOOKS / lesson.notebook).is_file()
        assert 10 <= lesson.minutes <= 90
        assert 2 <= len(lesson.goals) <= 6


def test_answers_are_typed_into_the_cells_to_write_in(lesson):
    def code(source):
        return {"cell_type": "code", "source": source.splitlines(keepends=True)}

    sources = [
        'print(1)\nmy_prediction = {"h2d": None}',
        'lesson.ask("copies", my_prediction, found)',
        "# write your version here",
    ]
    notebook = {"cells": [code(one) for one in (*sources, 'lesson.task(\n    "mend", {})')]}
    typed = editions.answered(notebook, lesson, notes=True)["cells"]
    assert typed[0]["source"] == 'print(1)\nmy_prediction = {"h2d": 2}'
    assert "count them" in typed[2]["source"]
    assert typed[3]["source"] == QUESTIONS["mend"].answer


def cell(source, kind="code", **more):
    outputs = {"outputs": [], "execution_count": None} if kind == "code" else {}
    return {"cell_type": kind, "id": f"c{abs(hash(source))}", "metadata": {}, "source": source, **outputs} | more


SMALL = [
    cell("# A small lesson\n\nAbout copies.", "markdown"),
    cell(
        "from IPython.display import SVG, display\nprint('a picture')\ndisplay(SVG('<svg xmlns=\"http://www.w3.org/2000/svg\"/>'))"
    ),
    cell("## 1. Predict\n\nHow many copies?", "markdown"),
    cell('my_prediction = {"h2d": None}'),
    cell('lesson.ask("copies", my_prediction, {"h2d": 2}, us=3)'),
]
TESTED = """\
from toolkit.ui.lessons.lesson import Lesson, Question
lesson = Lesson("see_the_copies", "Test", 10, (), {"copies": Question("count them", "because", '{"h2d": 2}')})"""


@pytest.fixture
def small(own_ports, tmp_path, monkeypatch):
    """The folder of notebooks has one small lesson, with one question."""
    monkeypatch.setattr(editions, "NOTEBOOKS", tmp_path)
    lesson = Lesson("see_the_copies", "Test", 10, (), {"copies": QUESTIONS["copies"]})
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    cells = [SMALL[0], cell(TESTED), *SMALL[1:]]
    notebook = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / lesson.notebook).write_text(json.dumps(notebook))
    return lesson


def test_the_teachers_edition_has_answers_notes_and_slides(small, tmp_path, cache):
    pytest.importorskip("nbconvert")
    steps = []
    notebook, page = editions.write(small, tmp_path / "teacher", progress=lambda done, total, _: steps.append((done, total)))
    cells = json.loads(notebook.read_text())["cells"]
    assert any('my_prediction = {"h2d": 2}' in "".join(one["source"]) for one in cells)
    assert any("count them" in "".join(one["source"]) for one in cells)
    text = page.read_text()
    assert "right: h2d - you said 2" in text
    assert '<aside class="notes">' in text
    assert text.count("<section") == text.count("</section>") >= 4
    assert text.count('class="fragment"') == 1  # the answer
    assert "data:image/svg+xml" in text or "<svg" in text
    assert steps[-1][0] == steps[-1][1] == len(cells)
    assert progress.solved("see_the_copies") == frozenset()  # the user's own


def test_a_lesson_that_fails_is_named(small, tmp_path):
    pytest.importorskip("nbconvert")
    path = tmp_path / small.notebook
    path.write_text(path.read_text().replace('{\\"h2d\\": 2}, us', '{\\"h2d\\": 3}, us'))
    with pytest.raises(tk.ToolkitError, match="the answer to 'copies'"):
        editions.write(small, tmp_path / "teacher")
    assert not (tmp_path / "teacher").exists()


def test_a_number_that_no_lesson_has_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        editions.main([str(tmp_path / "teacher"), "--lesson", "2", "--lesson", "99"])
    assert "--lesson 99: the course has the lessons 1 to 11" in capsys.readouterr().err
    assert not (tmp_path / "teacher").exists()
