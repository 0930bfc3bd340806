"""Every benchmark's record has the same first fields, and a file that reads back as it was."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.bench import decode_copies, ranks
from toolkit.bench.record import about, commit_of, process_bytes, run_command, write_record
from toolkit.core.errors import DeviceError, ToolkitError

FIELDS = ["date", "device", "gpu", "clock", "toolkit", "commit", "torch", "cuda", "python"]
BENCH = Path(__file__).parents[2] / "toolkit" / "bench"
RESULTS = sorted((BENCH / "results").glob("*.json"))
COMMANDS = sorted(path.stem for path in BENCH.glob("*.py") if "__main__" in path.read_text())


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


@pytest.mark.parametrize(("error", "status", "told"), [
    (None, 0, ""), (KeyboardInterrupt(), 130, "Interrupted\n"),
    (DeviceError("a device", "it is missing", "Use another"), 1, "DeviceError: a device: it is missing. Use another\n"),
])  # fmt: skip
def test_a_command_ends_with_one_line(
    error: BaseException | None, status: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> int:
        if error is not None:
            raise error
        return 0

    with pytest.raises(SystemExit) as ended:
        run_command(main)
    code = ended.value.code
    assert (1 if isinstance(code, str) else code) == status  # Python prints a text, and exits with 1
    assert (f"{code}\n" if isinstance(code, str) else capsys.readouterr().err) == told


@pytest.mark.parametrize("name", COMMANDS)
def test_the_usage_names_the_command(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module(f"toolkit.bench.{name}").main()
    said = capsys.readouterr().out
    command = "torchrun" if name == "ranks" else "python"
    assert said.startswith(f"usage: {command} -m toolkit.bench.{name} ")


def test_ranks_are_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "argv", ["ranks.py", "--out", str(tmp_path / "record.json"), "--device", "virtual:h200"])
    with pytest.raises(SystemExit, match="2"):
        ranks.main()
    assert "start it with torchrun" in capsys.readouterr().err


def test_a_benchmark_without_the_gpu_that_it_asks_for_prints_no_traceback() -> None:
    command = [sys.executable, "-m", "toolkit.bench.captured_steps", "--device", "virtual:nothing"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("UnknownNameError: virtual GPU 'nothing'")
    assert done.stderr.count("\n") == 1
