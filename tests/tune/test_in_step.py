"""Tests of tuning in a program: the program's time decides, a single short time doesn't, and lookups follow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.tune.toy import MEDIUM, OVERSIZED, SMALL, TOY, ToyShape, fresh_cache
from toolkit.kernels.base import Config
from toolkit.tune import in_step, lookup, store
from toolkit.tune.cards import find_card
from toolkit.tune.identity import fingerprint
from toolkit.tune.in_step import tune_in
from toolkit.tune.store import Record, add_rows, read_tuned, words

ODD, LONGER = ToyShape(17, 33, 40), ToyShape(34, 33, 40)
CARD = find_card("h200")
assert CARD is not None
SLOW = Record("ok", us=60.0, kernel=fingerprint(TOY), when="2026-11-02")


@pytest.fixture(autouse=True)
def timings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timings of ODD alone: SMALL is fastest, MEDIUM nearly so, and OVERSIZED far from it."""
    monkeypatch.setattr(store, "SHIPPED", tmp_path / "shipped")
    fresh_cache(tmp_path, monkeypatch)
    rows = {}
    for config, us in ((SMALL, 20.0), (MEDIUM, 20.5), (OVERSIZED, SLOW.us)):
        rows[TOY.name, ODD.key, words(config)] = replace(SLOW, us=us)
    assert CARD is not None
    add_rows(CARD.key, CARD.facts, rows)
    lookup.forget()


class Program:
    """A program that launches the kernel on LONGER. `ms` has its times by config, and `short` times that come only once."""

    def __init__(self, ms: dict[Config, float], short: dict[Config, float] | None = None) -> None:
        self.ms, self.short, self.ran = ms, dict(short or {}), []  # type: ignore[var-annotated]

    def __call__(self) -> float:
        config = lookup.choose(TOY, LONGER, CARD).config
        self.ran.append(config)
        return self.short.pop(config, self.ms[config])


def test_the_program_decides() -> None:
    assert CARD is not None
    program = Program({SMALL: 2.0, MEDIUM: 1.9})
    (trial,) = tune_in("a step", program, CARD)
    assert (trial.config, trial.before_ms, trial.ms, trial.better) == (MEDIUM, 2.0, 1.9, True)
    assert OVERSIZED not in program.ran  # too slow alone
    choice = lookup.choose(TOY, LONGER, CARD)
    assert (choice.config, choice.step) == (MEDIUM, "near shape")
    assert "in a step of 3 timed" in choice.note
    kept = read_tuned(CARD.key)
    assert kept is not None
    rows = kept.configs(TOY.name, ODD.key)
    assert {config: row.program_ms for config, row in rows.items()} == {
        words(SMALL): 2.0, words(MEDIUM): 1.9, words(OVERSIZED): None,
    }  # fmt: skip
    assert rows[words(MEDIUM)].us == 20.5  # the time alone remains


def test_one_short_time_does_not_decide() -> None:
    assert CARD is not None
    (trial,) = tune_in("a step", Program({SMALL: 2.0, MEDIUM: 2.1}, short={MEDIUM: 1.5}), CARD)
    assert (trial.ms, trial.better) == (2.1, False)
    assert lookup.choose(TOY, LONGER, CARD).config == SMALL


def test_times_in_different_programs_are_not_compared() -> None:
    assert CARD is not None
    list(tune_in("a short program", Program({SMALL: 0.2, MEDIUM: 0.3}), CARD))
    rows = {(TOY.name, ODD.key, words(OVERSIZED)): replace(SLOW, program="a short program", program_ms=0.25)}
    add_rows(CARD.key, CARD.facts, rows)  # not tried again
    list(tune_in("a long program", Program({SMALL: 9.0, MEDIUM: 8.0}), CARD))
    assert lookup.choose(TOY, LONGER, CARD).config == MEDIUM
    kept = read_tuned(CARD.key)
    assert kept is not None
    assert kept.configs(TOY.name, ODD.key)[words(OVERSIZED)].program_ms is None
    assert {row.program for row in kept.configs(TOY.name, ODD.key).values()} == {"", "a long program"}


def test_only_the_kernels_asked_for() -> None:
    assert CARD is not None
    assert list(tune_in("a step", Program({SMALL: 2.0}), CARD, kernels=["another"])) == []


def test_what_is_tried_is_forgotten_after_an_error() -> None:
    assert CARD is not None

    def failing() -> float:
        tried = lookup.choose(TOY, LONGER, CARD)
        if tried.config == MEDIUM:
            assert tried.step == "tried"
            raise RuntimeError("the program failed")
        return 1.0

    with pytest.raises(RuntimeError, match="the program failed"):
        list(tune_in("a step", failing, CARD))
    assert lookup.choose(TOY, LONGER, CARD).config == SMALL
    assert lookup.choose(TOY, LONGER, torch.device("cpu")).step == "default"
    assert lookup.looked_up(replace(CARD, key="another")) == {}


def test_shares_of_shared_memory_are_tried_with_the_best_config(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CARD is not None
    monkeypatch.setattr(type(TOY), "carveouts", (0, 50, 75))
    asked = []

    def warm(problems: list[tuple[object, ToyShape]], card: object, configs: list[Config], progress: bool) -> Any:
        asked.append((problems, configs))
        assert CARD is not None
        verdicts = dict(zip(configs, ("ok", "ok", "wrong"), strict=True))
        rows = {(TOY.name, ODD.key, words(one)): replace(SLOW, verdict=told, us=21.0) for one, told in verdicts.items()}
        add_rows(CARD.key, CARD.facts, rows)
        return SimpleNamespace(rows=[SimpleNamespace(config=one, verdict=told) for one, told in verdicts.items()])

    monkeypatch.setattr(in_step, "warm", warm)
    half, none = MEDIUM.prefer(50), MEDIUM.prefer(0)
    trials = list(tune_in("a step", Program({SMALL: 2.0, MEDIUM: 1.9, none: 2.1, half: 1.8}), CARD))
    assert {(trial.config, trial.better) for trial in trials} == {(MEDIUM, True), (none, False), (half, True)}
    assert asked == [([(TOY, ODD)], [none, half, MEDIUM.prefer(75)])]
    assert lookup.choose(TOY, LONGER, CARD).config == half
    kept = read_tuned(CARD.key)
    assert kept is not None
    rows = kept.configs(TOY.name, ODD.key)
    assert (rows[words(half)].us, rows[words(half)].program_ms) == (21.0, 1.8)
    assert (rows[words(none)].us, rows[words(none)].program_ms) == (21.0, None)


def test_a_share_that_is_shorter_by_chance_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CARD is not None
    half = SMALL.prefer(50)
    monkeypatch.setattr(type(TOY), "carveouts", (50,))
    add_rows(CARD.key, CARD.facts, {(TOY.name, ODD.key, words(half)): replace(SLOW, us=21.0)})
    found = SimpleNamespace(rows=[SimpleNamespace(config=half, verdict="ok")])
    monkeypatch.setattr(in_step, "warm", lambda *_, **__: found)
    trials = list(tune_in("a step", Program({SMALL: 2.0, MEDIUM: 2.1, half: 1.9999}), CARD))
    assert [(trial.config, trial.better) for trial in trials] == [(MEDIUM, False), (half, False)]
    assert lookup.choose(TOY, LONGER, CARD).config == SMALL
