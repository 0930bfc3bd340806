"""Every benchmark's record has the same first fields, and a file that reads back as it was."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.bench import decode_copies, ranks
from toolkit.bench.record import about, commit_of, listed_names, listed_numbers, process_bytes, run_command, write_record
from toolkit.core.errors import DeviceError, FormatError, ToolkitError

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


READERS = {
    "decode": (["--report", "FILE", "--out", "page.html"], "h200_speed_qwen3-8b"),
    "decode_copies": (["--table", "FILE", "FILE"], "h200_decode_copies"),
    "kernels": (["--table", "FILE"], "h200_kernels"),
    "memory": (["--compare", "FILE", "FILE"], "h200_memory"),
}


def read_with(name: str, file: Path) -> int | None:
    """What the command of a benchmark returns that reads a record."""
    found: int | None = importlib.import_module(f"toolkit.bench.{name}").main(
        [str(file) if word == "FILE" else word for word in READERS[name][0]]
    )
    return found


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(("text", "said"), [
    (None, "no such file"), (b"", "Expecting value"), (b"[]", "Expected `object`, got `array`"), (b"{}", "no field"),
    (b'{"rows": [', "Expecting value"), (b"\xff", "can't decode"), (b"[" * 100_000, "nested too deeply"),
])  # fmt: skip
def test_a_file_that_is_no_record_is_one_line(
    name: str, text: bytes | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "record.json").write_bytes(text)
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: read_with(name, tmp_path / "record.json"))
    line = str(ended.value.code)  # exit status 1
    assert line.startswith("FormatError: the record in ")
    assert said in line
    assert "\n" not in line
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("name", READERS)
def test_records_of_other_benchmarks_are_not_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not read_with(name, BENCH / "results" / f"{READERS[name][1]}.json")
    assert capsys.readouterr().out
    of_its_own = {"decode": ("_speed_", "_steps_"), "decode_copies": ("_decode_copies",)}.get(name, (READERS[name][1],))
    for path in RESULTS:
        if not any(part in f"{path.stem}_" for part in of_its_own):
            with pytest.raises(FormatError, match="Give a file that this benchmark wrote"):
                read_with(name, path)


@pytest.mark.parametrize(("name", "change"), [
    ("decode", {"rows": [{}]}), ("decode", {"rows": [{"context": "64"}]}), ("decode", {"clock": "sundial"}),
    ("decode_copies", {"strategies": {"roundtrip": {}}}), ("kernels", {"rows": [{"kernel": "read"}]}),
    ("memory", {"load": None}), ("memory", {"step_peaks": {"0": "many"}}),
])  # fmt: skip
def test_a_record_with_a_damaged_part_is_not_read(
    name: str, change: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    record = json.loads((BENCH / "results" / f"{READERS[name][1]}.json").read_text())
    (tmp_path / "record.json").write_text(json.dumps({**record, **change}))
    with pytest.raises(FormatError, match=rf"at `\$\.{next(iter(change))}"):
        read_with(name, tmp_path / "record.json")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_usage_names_the_command(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module(f"toolkit.bench.{name}").main()
    said = capsys.readouterr().out
    command = "torchrun" if name == "ranks" else "python"
    assert said.startswith(f"usage: {command} -m toolkit.bench.{name} ")


def test_a_list_has_commas_and_perhaps_spaces() -> None:
    assert listed_names("roundtrip") == ["roundtrip"]
    assert listed_names(" roundtrip, cuda-graph ,whole-loop") == ["roundtrip", "cuda-graph", "whole-loop"]
    assert listed_numbers("64, 128") == [64, 128]


@pytest.mark.parametrize(
    ("text", "said"), [("", "'' has no entry"), (" , ", "' , ' has no entry"), ("a,", "'a,' has an empty entry")]
)
def test_a_list_without_an_entry_is_refused(text: str, said: str) -> None:
    for parse in (listed_names, listed_numbers):
        with pytest.raises(argparse.ArgumentTypeError, match=f"^{said}: give one, or several separated by commas$"):
            parse(text)


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
