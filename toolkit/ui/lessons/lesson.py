"""The framework of the lesson notebooks: predictions and exercises that are checked, with a hint before an answer.

Each lesson has a module next to this one, with a `Lesson` that holds the hints, explanations and answers, so that the notebook
contains none of them. The notebook calls `lesson.start()`, `lesson.ask(...)` for predictions, `lesson.task(...)` for exercises
and `lesson.finish()`. CONTRIBUTING.md says how to write a lesson.
"""

from __future__ import annotations

import ast
import atexit
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from toolkit.core.errors import ToolkitError
from toolkit.core.files import TemporaryFolder
from toolkit.ui.lessons import progress
from toolkit.ui.lessons.checks import Verdict, compare, failed, inline

COURSE = "From 10 to 200 tokens a second"
NAMES = (
    "see_the_copies", "what_a_token_costs", "prefill_and_decode", "kv_cache", "memory_cell_by_cell", "decode_faster",
    "autotune_per_gpu", "quantization", "export_under_a_budget", "copies_by_hand", "two_gpus",
)  # fmt: skip
HANGING = ' style="padding-left: 0.7em; text-indent: -0.7em"'  # of a point: where it wraps, its next lines begin further right


@dataclass(frozen=True)
class Question:
    """A prediction or an exercise: a hint for a wrong try, the explanation of the answer, and an answer.

    `why` and `hint` may have fields such as "{found[h2d]}" or "{step_us:.0f}", which `ask` and `task` fill in. `answer` is
    Python: of a prediction, the dict of the right values, and of an exercise, the source of the cell to write. Numbers are
    right within the share `within` (0.05: 5 %), `who` names the source of the answer, and `choices` are the texts to choose
    from.
    """

    hint: str
    why: str
    answer: str
    within: float = 0.0
    who: str = "the trace"
    choices: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the right predictions, if `answer` is a dict of them."""
        with suppress(SyntaxError):  # the answer of an exercise may have magics of IPython
            body = ast.parse(self.answer, mode="eval").body
            if isinstance(body, ast.Dict):
                return tuple(ast.literal_eval(key) for key in body.keys if key is not None)
        return ()


@dataclass(frozen=True)
class Card:
    """A few lines that a notebook shows with a bold title, and other front ends as text."""

    title: str
    lines: tuple[str, ...]
    code: bool = False

    def __repr__(self) -> str:
        return "\n".join([self.title, *self.lines])

    def _repr_html_(self) -> str:
        title = f"<b>{escape(self.title)}</b>"
        if self.code:
            return f"{title}<pre>{escape(chr(10).join(self.lines))}</pre>"
        return title + "".join(f"<div{HANGING if line.startswith('· ') else ''}>{inline(line)}</div>" for line in self.lines)


class Lesson:
    """A lesson: its questions by name, in the notebook's order, and the tries of this kernel.

    `name` is the module's name; the lesson's place in `NAMES` is its number, and its notebook is "NUMBER_NAME.ipynb". `minutes`
    is the time that a newcomer needs, and each of `goals` ends the sentence "After this lesson you can ...".
    """

    def __init__(self, name: str, title: str, minutes: int, goals: tuple[str, ...], questions: Mapping[str, Question]) -> None:
        self.name, self.title, self.minutes, self.goals, self.questions = name, title, minutes, goals, dict(questions)
        self.number = NAMES.index(name) + 1
        self._wrong: dict[str, list[str]] = {}  # the different wrong tries of each question
        self._folder: TemporaryFolder | None = None

    @property
    def notebook(self) -> str:
        """The file name of the lesson's notebook."""
        return f"{self.number:02}_{self.name}.ipynb"

    @property
    def solved(self) -> tuple[str, ...]:
        """The names of the solved questions, in the lesson's order."""
        names = progress.solved(self.name)
        return tuple(name for name in self.questions if name in names)

    @property
    def folder(self) -> Path:
        """A folder for files of this lesson. `start` and `finish` delete it, and so does the end of the kernel."""
        if self._folder is None:
            self._folder = TemporaryFolder()
            atexit.register(self._clean)
        return Path(self._folder.name)

    def start(self) -> Card:
        """Begin: forget the tries of an earlier run of the notebook, and return duration, goals and progress."""
        self._wrong.clear()
        self._clean()
        goals = [f"· {goal}" for goal in self.goals]
        about = f"About {self.minutes} minutes. {self._progress()}"
        return Card(f"Lesson {self.number} of {len(NAMES)}: {self.title}", (about, "After this lesson you can", *goals))

    def ask(
        self, question: str, predicted: Mapping[str, float | str | None], found: Mapping[str, float | str], **facts: object
    ) -> Verdict:
        """Compare predictions with the numbers or choices that the app found, name by name.

        While a prediction is missing, the verdict asks for it. The first wrong prediction gets the hint, and the answer is
        shown with its explanation after a right prediction or a second, different wrong one. A wrong one raises no error.
        """
        about = self._question(question)
        verdict = compare(predicted, found, about.within, about.who, about.choices, tell=False, names=about.names)
        if verdict.asks:
            return verdict
        tries = self._tried(question, repr(dict(predicted)), verdict.right)
        if not verdict.right and tries == 1:
            return verdict.with_line(f"Hint: {about.hint.format(found=found, **facts)}")
        told = compare(predicted, found, about.within, about.who, about.choices, tell=True)
        return told.with_line(about.why.format(found=found, **facts))

    def task(self, question: str, conditions: Mapping[str, bool], **facts: object) -> Verdict:
        """Check an exercise: each condition is a line that says what was measured and what is wanted, and whether it is met.

        If a condition isn't met, the verdict has the hint, and after the second time, says how to see a solution.
        """
        about = self._question(question)
        if not conditions:
            return Verdict(("There was nothing to check. Run all cells above again.",), False, True)
        right = all(conditions.values())
        lines = tuple(f"{'right' if met else 'wrong'}: {line}" for line, met in conditions.items())
        tries = self._tried(question, str(len(self._wrong.get(question, ()))), right)
        verdict = Verdict(lines, right).with_line((about.why if right else f"Hint: {about.hint}").format(**facts))
        return verdict if right or tries < 2 else verdict.with_line(f'Stuck? lesson.solution("{question}") shows a solution.')

    @contextmanager
    def trying(self, question: str, function: Callable[..., Any]) -> Iterator[None]:
        """Call the learner's `function` in this block. Its error ends the cell, and is shown as a wrong try of the exercise.

        So the learner sees the line and a hint, and not the traceback through the functions that the line calls.
        """
        try:
            yield
        except Exception as error:
            shown = repr(self.task(question, failed(function, error))).splitlines()
            error._render_traceback_ = lambda *_: shown  # type: ignore[attr-defined]  # IPython prints it instead
            raise

    def solution(self, question: str) -> Card:
        """Return an answer to the question, after a try: a wrong one in this kernel, or the right one at any time."""
        about = self._question(question)
        if question not in self._wrong and question not in self.solved:
            return Card("Try it first", ("Write your answer, run the cell that checks it, and come back.",))
        return Card(f"A solution of {question!r}", tuple(about.answer.splitlines()), code=True)

    def finish(self) -> Card:
        """End: delete the lesson's files, and return what is solved, what isn't, and what comes next."""
        self._clean()
        open_ones = [name for name in self.questions if name not in self.solved]
        lines = [self._progress()]
        if open_ones:
            lines.append(f"Still open: {', '.join(open_ones)}.")
        more = self.number < len(NAMES)
        if more:
            lines.append(f"Next: lesson {self.number + 1}. The notebook 00_course shows all lessons.")
        then = " first" if more else ""
        lines.append(f"Shut this notebook's kernel down{then} (menu Kernel): it holds several hundred MiB of memory.")
        return Card(f"End of lesson {self.number}: {self.title}", tuple(lines))

    def _question(self, name: str) -> Question:
        if name not in self.questions:
            found = f"the lesson has {', '.join(self.questions)}"
            raise ToolkitError(f"the question {name!r}", found, "Use one of these names")
        return self.questions[name]

    def _tried(self, question: str, attempt: str, right: bool) -> int:
        """Note a try, and return how many different wrong ones there were."""
        if right:
            progress.note(self.name, question)
            return 0
        wrong = self._wrong.setdefault(question, [])
        if attempt not in wrong:
            wrong.append(attempt)
        return len(wrong)

    def _progress(self) -> str:
        return f"Solved: {len(self.solved)} of {len(self.questions)}."

    def _clean(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
            atexit.unregister(self._clean)
        self._folder = None
