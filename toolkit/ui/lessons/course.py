"""The course: all lessons in order, and what was solved in each. The notebook 00_course shows it."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from html import escape

from toolkit.core.errors import ToolkitError, brief
from toolkit.ui.lessons import progress
from toolkit.ui.lessons.lesson import COURSE, HANGING, NAMES, Lesson

_LEFT = 'style="text-align: left; vertical-align: top"'


def lessons() -> list[Lesson]:
    """Return the lessons in their order."""
    modules = [f"toolkit.ui.lessons.{name}" for name in NAMES]
    found = [importlib.import_module(name) for name in modules if importlib.util.find_spec(name)]
    return [module.lesson for module in found if hasattr(module, "lesson")]


@dataclass(frozen=True)
class Course:
    """A table with a row per lesson: number, title, minutes, goals, and how many of its questions were solved.

    In a notebook, each title links to the lesson's notebook next to it.
    """

    lessons: tuple[Lesson, ...]

    def __repr__(self) -> str:
        rows = [f"{one.number:>2}  {_state(one):<16}  {one.minutes:>3} min  {one.title}" for one in self.lessons]
        return "\n".join([COURSE, *rows, self._total()])

    def _repr_html_(self) -> str:
        head = "".join(f"<th {_LEFT}>{name}</th>" for name in ("", "Lesson", "Minutes", "Solved", "You can then"))
        return f"<table><tr>{head}</tr>{''.join(map(_row, self.lessons))}</table><div>{self._total()}</div>"

    def _total(self) -> str:
        done = sum(len(one.solved) == len(one.questions) for one in self.lessons)
        return f"{done} of {len(self.lessons)} lessons solved."


def course() -> Course:
    """Return all lessons with their progress."""
    return Course(tuple(lessons()))


def forget(lesson: int | None = None) -> Course:
    """Forget what was solved in the lesson with this number, or in all lessons, and return the course."""
    if lesson is not None and lesson not in range(1, len(NAMES) + 1):
        found = f"the course has the lessons 1 to {len(NAMES)}"
        raise ToolkitError(f"the lesson {brief(lesson)}", found, "Give one of these numbers")
    for one in lessons():
        if lesson in (None, one.number):
            progress.forget(one.name)
    return course()


def _state(lesson: Lesson) -> str:
    solved, questions = len(lesson.solved), len(lesson.questions)
    return f"{solved} of {questions}" + (" ✓" if solved == questions else "")


def _row(lesson: Lesson) -> str:
    goals = "".join(f"<div{HANGING}>· {escape(goal)}</div>" for goal in lesson.goals)
    title = f'<a href="{lesson.notebook}">{escape(lesson.title)}</a>'
    cells = (str(lesson.number), title, str(lesson.minutes), _state(lesson), goals)
    return f"<tr>{''.join(f'<td {_LEFT}>{cell}</td>' for cell in cells)}</tr>"
