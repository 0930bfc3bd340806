"""Every benchmark's record has the same first fields, and a file that reads back as it was."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from toolkit.bench import decode_copies
from toolkit.bench.record import about, commit_of, process_bytes, write_record
from toolkit.core.errors import ToolkitError

FIELDS = ["date", "device", "gpu", "clock", "toolkit", "commit", "torch", "cuda", "python"]
RESULTS = sorted((Path(__file__).parents[2] / "toolkit" / "bench" / "results").glob("*.json"))


def test_about_has_the_fields_of_shipped_records() -> None:
    assert list(about("cpu")) == FIELDS
    shipped = [json.loads(path.read_text()) for path in RESULTS if path.stem != "h200_primitives"]  # older than `about`
    assert len(shipped) > 10
    assert all(list(record)[: len(FIELDS)] == FIELDS for record in shipped)


def test_the_commit_is_that_of_the_files_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "environment" / "record.py"
    file.parent.mkdir()
    file.touch()
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")

    def git(*words: str) -> str:
        return subprocess.run(["git", *who, *words], cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    git("init")
    git("commit", "--allow-empty", "-m", "of another project")
    assert commit_of(file) is None
    git("add", "environment")
    git("commit", "-m", "with the file")
    assert commit_of(file) == git("rev-parse", "HEAD")
    monkeypatch.setenv("PATH", str(tmp_path))  # without git
    assert commit_of(file) is None


def test_a_record_reads_back_and_has_a_line_per_list_of_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = {"curve": [[1, 2.5], [-3, 1e-9]], "none": [], "names": ["a", "1, 2"], "commit": None}
    write_record(record, tmp_path / "record.json")
    text = (tmp_path / "record.json").read_text()
    assert json.loads(text) == record
    assert "[1, 2.5]" in text
    write_record(record, None)
    assert capsys.readouterr().out == text
    with pytest.raises(ToolkitError):
        write_record(record, tmp_path)
    assert capsys.readouterr().out == text  # it is not lost


@pytest.mark.parametrize("out", [".", "nowhere/record.json"])
def test_nothing_is_measured_if_the_record_cant_be_written(
    out: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decode_copies, "bench", lambda *_, **__: pytest.fail("it was measured"))
    with pytest.raises(SystemExit):
        decode_copies.main(["--out", out])
    assert "argument --out: writing" in capsys.readouterr().err


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux's /proc")
def test_process_bytes() -> None:
    (resident,) = process_bytes("VmRSS")
    assert resident > 1 << 20
    assert process_bytes("VmRSS", "NoSuchField") == [0, 0]
