"""Sessions are read back line by line: a line that is damaged takes no other cell with it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.formats import cell
from tests.fuzz.lies import VALUES
from toolkit.core.errors import TraceError
from toolkit.vram.sessions import Session


@pytest.mark.parametrize("name", cell())
def test_a_bad_line_takes_no_other_cell_with_it(tmp_path: Path, name: str) -> None:
    lines = [json.dumps(cell() | {"number": 1})]
    lines += [json.dumps(cell() | {name: lie, "number": 5} | {name: lie}) for lie in VALUES]
    lines += ["[" * 100_000, '{"number": ' + "9" * 5000 + "}", "\x00", "null", json.dumps(cell() | {"number": 9})]
    (tmp_path / "cells.jsonl").write_text("\n".join(lines) + "\n")
    cells = Session.open(tmp_path).cells
    assert [cells[0].number, cells[-1].number] == [1, 9]
    assert cells[-1].file == str(tmp_path / f"{len(lines):04}.trace")
    for found in cells:
        assert [type(value) for value in (found.number, found.title, found.kept_bytes)] == [int, str, int]


@pytest.mark.parametrize("path", [5, "a\0b", "half \ud800", "long" * 1000], ids=lambda path: ascii(path)[:20])
def test_paths_that_name_no_session(path: Any) -> None:
    with pytest.raises(TraceError):
        Session.open(path)


def test_a_pipe_is_no_session(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "cells.jsonl")
    with pytest.raises(TraceError, match="named pipe"):
        Session.open(tmp_path)
