"""Tests of the tuning store: readable, atomic, mergeable files; damaged and foreign files are reported and rebuilt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from toolkit.core.errors import FormatError
from toolkit.kernels.base import Config
from toolkit.tune import __main__ as commands
from toolkit.tune import store
from toolkit.tune.store import (  # fmt: skip
    DeviceFacts,
    Record,
    Tuned,
    TunedFileWarning,
    add_rows,
    from_words,
    kept_gpus,
    read_tuned,
    tuned_path,
    words,
)

H200 = DeviceFacts("NVIDIA H200", "9.0", 132, 150_110_011_392, 1980, 3201)
H100 = DeviceFacts("NVIDIA H100 80GB HBM3", "9.0", 132, 85_017_493_504)
FAST = Record(
    "ok", us=35.7, spread_us=0.2, cosine=0.99999, max_error=0.002, kernel="ab", versions="triton 3.6.0", when="2026-11-02"
)
WRONG = Record("wrong", "cosine 0.0200 is below the required 0.999", cosine=0.02, max_error=0.9, kernel="ab")
ROWS = {
    ("matmul", "n=8 k=8", "block_n=64 warps=4 stages=2"): FAST,
    ("matmul", "n=8 k=8", "block_n=16 warps=4 stages=2"): WRONG,
    ("matmul", "n=9 k=8", "block_n=16 warps=4 stages=2"): Record("excluded", "needs 131,072 B of shared memory"),
    ("norm", "rows=1", "warps=4 stages=1"): Record("failed", "CompilationError: at line 3"),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(store, "SHIPPED", tmp_path / "shipped")
    return tmp_path


def test_rows_come_back_as_they_were(folder: Path) -> None:
    path = add_rows("h200", H200, ROWS)
    assert path == tuned_path("h200") == folder / "tuned" / "h200.json"
    kept = read_tuned("h200", H200)
    assert kept == Tuned(H200, ROWS)
    assert kept_gpus() == ["h200"]
    assert read_tuned("rtx-5090") is None


def test_a_person_can_read_the_file() -> None:
    lines = add_rows("h200", H200, ROWS).read_text().splitlines()
    line = next(line for line in lines if "block_n=64" in line)
    assert line.strip().startswith('"block_n=64 warps=4 stages=2": {"verdict": "ok", "us": 35.7, "spread_us": 0.2')
    assert sum('"verdict"' in line for line in lines) == len(ROWS)  # one line per config
    assert '"name": "NVIDIA H200"' in lines[1]
    assert '"sms": 132' in lines[1]
    assert json.loads("\n".join(lines))["kernels"]["matmul"]["n=8 k=8"]


def test_configs_as_words() -> None:
    config = Config(block_n=64, split=2, warps=8, stages=3)
    assert words(config) == "block_n=64 split=2 warps=8 stages=3"
    assert from_words(words(config)) == config


def test_one_row_more_leaves_the_others() -> None:
    add_rows("h200", H200, ROWS)
    place = ("matmul", "n=8 k=8", "block_n=128 warps=8 stages=2")
    add_rows("h200", H200, {place: replace(FAST, us=30.0)})
    kept = read_tuned("h200", H200)
    assert kept is not None
    assert kept.rows == {**ROWS, place: replace(FAST, us=30.0)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Expecting value"),
        ('{"format": "decode-toolkit tuned 1", "dev', "Unterminated string"),
        ("[]", "expected `object`, got `array`"),
        ("{}", "missing required field `format`"),
        ('{"format": "decode-toolkit tuned 9"}', "invalid enum value 'decode-toolkit tuned 9'"),
        (Tuned(H200, ROWS).to_text().replace('"ok"', '"splendid"'), "invalid enum value 'splendid'"),
        (Tuned(H200, ROWS).to_text().replace("35.7", "-35.7"), ">= -1.0 - at `$.kernels[...][...][...].us`"),
        (Tuned(H200, ROWS).to_text().replace("35.7", "NaN"), ">= -1.0 - at `$.kernels[...][...][...].us`"),
        (Tuned(H200, ROWS).to_text().replace("35.7", '"35.7"'), "expected `float | null`, got `str`"),
        (Tuned(H200, ROWS).to_text().replace("block_n=64", "block_n=many"), "invalid literal"),
        (Tuned(H200, ROWS).to_text().replace("warps=4 stages=2", "warps=4 stages=2 carveout=500"), "Config(carveout=500)"),
        (Tuned(H200, ROWS).to_text().replace("stages=2", "stages=-1"), "Config(stages=-1)"),
        (Tuned(H200, ROWS).to_text().replace('"cosine"', '"kosinus"'), "kosinus"),
        (Tuned(H100, ROWS).to_text(),
         "a NVIDIA H100 80GB HBM3 (compute capability 9.0) with 132 SMs, but this GPU is a NVIDIA H200"),
        (Tuned(replace(H200, compute_capability="9.1"), ROWS).to_text(), "(compute capability 9.1) with 132 SMs, but this"),
        (Tuned(replace(H200, sms=114), ROWS).to_text(),
         "with 114 SMs, but this GPU is a NVIDIA H200 (compute capability 9.0) with 132 SMs"),
        ("[" * 100_000, "nested too deeply"),
    ],
    ids=lambda text: text[:24] if len(text) < 60 else "",
)  # fmt: skip
def test_a_broken_file_is_set_aside_told_and_built_anew(folder: Path, text: str, said: str) -> None:
    path = tuned_path("h200")
    path.parent.mkdir()
    path.write_text(text)
    with pytest.warns(TunedFileWarning, match="renamed to h200.set-aside-1") as told:
        assert read_tuned("h200", H200) is None
    assert said.lower() in str(told[0].message).lower()
    assert path.with_name("h200.set-aside-1").read_text() == text
    add_rows("h200", H200, ROWS)
    assert read_tuned("h200", H200) == Tuned(H200, ROWS)


def test_bytes_that_are_no_text_are_set_aside_beside_earlier_ones() -> None:
    path = tuned_path("h200")
    path.parent.mkdir()
    path.with_name("h200.set-aside-1").write_text("an earlier one")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.warns(TunedFileWarning, match="set-aside-2"):
        add_rows("h200", H200, ROWS)
    assert path.with_name("h200.set-aside-1").read_text() == "an earlier one"
    assert read_tuned("h200", H200) == Tuned(H200, ROWS)


def test_the_packages_rows_are_read_beneath_the_users_and_never_written(folder: Path) -> None:
    shipped = folder / "shipped" / "h200.json"
    shipped.parent.mkdir()
    shipped.write_text(Tuned(H200, ROWS).to_text())
    place = next(iter(ROWS))
    add_rows("h200", H200, {place: replace(FAST, us=1.0)})
    kept = read_tuned("h200", H200)
    assert kept is not None
    assert kept.rows == {**ROWS, place: replace(FAST, us=1.0)}
    shipped.write_text("damaged")
    with pytest.warns(TunedFileWarning, match="is not used"):
        assert read_tuned("h200", H200) == Tuned(H200, {place: replace(FAST, us=1.0)})
    assert shipped.read_text() == "damaged"


def test_a_write_that_fails_leaves_the_old_file(monkeypatch: pytest.MonkeyPatch) -> None:
    path = add_rows("h200", H200, ROWS)
    before = path.read_text()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(TunedFileWarning, match="can't be stored: .*No space left"):
        add_rows("h200", H200, {("matmul", "n=1", "warps=4 stages=1"): FAST})
    assert path.read_text() == before
    assert {name.name for name in path.parent.iterdir()} == {"h200.json", ".h200.json.lock"}


def test_a_cache_that_is_a_file_or_holds_a_folder_for_a_file_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").touch()
    tuned_path("h200").mkdir(parents=True)
    with pytest.warns(TunedFileWarning, match="set-aside-1: it is a folder"):
        assert read_tuned("h200", H200) is None
    add_rows("h200", H200, ROWS)
    with monkeypatch.context() as denied:
        denied.setattr(os, "open", Mock(side_effect=PermissionError(13, "Permission denied")))
        with pytest.warns(TunedFileWarning, match="can't be read: .*Permission denied"):
            assert read_tuned("h200", H200) is None
    assert read_tuned("h200", H200) == Tuned(H200, ROWS)
    monkeypatch.setenv("TOOLKIT_CACHE", str(folder / "file"))
    assert (kept_gpus(), read_tuned("h200", H200)) == ([], None)
    with pytest.warns(TunedFileWarning, match="can't be stored: .*Not a directory"):
        add_rows("h200", H200, ROWS)


def test_newer_rows_of_the_package_count(folder: Path) -> None:
    place = next(iter(ROWS))
    add_rows("h200", H200, {place: replace(FAST, kernel="as it was", when="2026-11-01")})
    (folder / "shipped").mkdir()
    (folder / "shipped" / "h200.json").write_text(Tuned(H200, ROWS).to_text())
    kept = read_tuned("h200", H200)
    assert kept is not None
    assert kept.rows[place] == FAST


def test_two_writers_lose_no_row() -> None:
    def write(name: str) -> None:
        for n in range(15):
            add_rows("h200", H200, {("k", name, f"n={n} warps=1 stages=1"): FAST})

    writers = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    kept = read_tuned("h200", H200)
    assert kept is not None
    assert len(kept.rows) == 30


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    status = commands.run([str(one) for one in arguments])
    told = capsys.readouterr()
    return status, told.out + told.err


def test_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "No timings are stored" in run(capsys, "show")[1]
    add_rows("h200", H200, ROWS)
    status, told = run(capsys, "show")
    assert status == 0
    assert "h200: NVIDIA H200, 132 SMs, compute capability 9.0, 1980 MHz" in told
    assert "matmul n=8 k=8\n    block_n=64 warps=4 stages=2: 35.7 µs ± 100 ns, of 1 timed, 1 wrong" in told
    file = folder / "out.json"
    assert run(capsys, "export", "h200", file) == (0, f"4 rows of NVIDIA H200 written to {file}\n")
    tuned_path("h200").unlink()
    assert run(capsys, "import", file)[0] == 0
    assert read_tuned("h200", H200) == Tuned(H200, ROWS)


def test_importing_keeps_newer_rows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = next(iter(ROWS))
    newer = {place: replace(FAST, us=20.0, when="2026-11-09")}
    add_rows("h200", H200, newer)
    (folder / "old.json").write_text(Tuned(H200, ROWS).to_text())
    run(capsys, "import", folder / "old.json")
    kept = read_tuned("h200")
    assert kept is not None
    assert kept.rows == {**ROWS, **newer}


def test_merging(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = next(iter(ROWS))
    newer = Tuned(H200, {place: replace(FAST, us=20.0, when="2026-11-09")})
    names = {"a": Tuned(H200, ROWS), "b": newer, "other": Tuned(H100, ROWS)}
    for name, tuned in names.items():
        (folder / name).write_text(tuned.to_text())
    for order in ("ab", "ba"):
        assert run(capsys, "merge", *(folder / name for name in order), "--out", folder / "c")[0] == 0
        assert Tuned.from_text((folder / "c").read_text(), "c").rows == {**ROWS, **newer.rows}
    status, told = run(capsys, "merge", folder / "a", folder / "other", "--out", folder / "c")
    assert status == 1
    assert "Merge only files of the same GPU" in told
    (folder / "other").write_text(Tuned(replace(H200, sms=114), ROWS).to_text())  # cards of one name differ in their SMs
    told = run(capsys, "merge", folder / "a", folder / "other", "--out", folder / "c")[1]
    assert "other: it has timings of a NVIDIA H200 (compute capability 9.0) with 114 SMs" in told
    assert "a of a NVIDIA H200 (compute capability 9.0) with 132 SMs" in told


def test_importing_a_file_of_another_gpu_leaves_what_is_stored(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_rows("h200", H200, ROWS)
    (folder / "other.json").write_text(Tuned(replace(H200, compute_capability="9.1"), ROWS).to_text())
    status, told = run(capsys, "import", folder / "other.json")
    assert status == 1
    assert "it has timings of a NVIDIA H200 (compute capability 9.1)" in told
    assert told.count("\n") == 1
    assert read_tuned("h200", H200) == Tuned(H200, ROWS)


@pytest.mark.parametrize(("command", "says"), [
    (("export", "h100", "x"), "stored timings of GPU 'h100'"), (("show", "h100"), "stored timings of GPU 'h100'"),
    (("import", "nowhere.json"), "timings in nowhere.json: no such file"),
])  # fmt: skip
def test_what_isnt_there_is_one_line(command: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, told = run(capsys, *command)
    assert status == 1
    assert says in told
    assert told.count("\n") == 1


def test_a_time_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(capsys, "warm", "rms_norm", "--seconds", "-3")
    assert "not a number of seconds above 0" in capsys.readouterr().err


def test_what_cant_be_written_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_rows("h200", H200, ROWS)
    exported = run(capsys, "export", "h200", folder / "out.json") and folder / "out.json"
    for command in (("export", "h200", exported / "x"), ("merge", exported, "--out", exported / "x"), ("import", exported)):
        assert run(capsys, *command)[0] == (command[0] != "import")
    monkeypatch.setenv("TOOLKIT_CACHE", str(exported))
    for command in (("export", "h200", exported / "x"), ("merge", exported, "--out", exported / "x"), ("import", exported)):
        status, told = run(capsys, *command)
        assert status == 1
        assert told.count("\n") == 1


def test_only_what_is_kept_of_a_gpu_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine, damaged = folder / "mine.json", tuned_path("h200")
    mine.write_text("nothing of the toolkit's")
    assert run(capsys, "show", "../mine")[0] == 1
    assert mine.exists()
    damaged.parent.mkdir()
    damaged.write_text("{")
    status, told = run(capsys, "show", "h200")
    assert status == 1
    assert told.startswith("Warning: h200.json was renamed to h200.set-aside-1: Expecting")
    assert told.count("\n") == 2


def test_a_damaged_file_does_not_hide_those_of_other_gpus(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_rows("h200", H200, ROWS)
    tuned_path("another").write_text("{")
    status, told = run(capsys, "show")
    assert status == 0
    assert "h200: NVIDIA H200, 132 SMs" in told
    assert "Warning: another.json was renamed to another.set-aside-1" in told


def test_stopping_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped() -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "kept_gpus", stopped)
    assert run(capsys, "show") == (130, "\nStopped. Results so far are stored; run the command again to resume.\n")


def test_a_foreign_file_is_told_when_it_is_imported(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "x.json").write_text('{"name": "another program"}')
    assert "Give a file that `tune export` wrote" in run(capsys, "import", folder / "x.json")[1]
    os.mkfifo(folder / "pipe")
    assert "it is a named pipe, not a regular file" in run(capsys, "import", folder / "pipe")[1]
    monkeypatch.setattr(store, "LARGEST", 1000)
    (folder / "large.json").write_bytes(b" " * 1001)
    assert "it is larger than 1,000 bytes" in run(capsys, "merge", folder / "large.json", "--out", folder / "out.json")[1]
    with pytest.raises(FormatError):
        Tuned.from_text("{", "x")


def test_show_into_head_ends_quietly() -> None:
    """The command ends silently if the reader of its output closes the pipe early."""
    command = f"{sys.executable} -m toolkit.tune show h200 | head -1"
    found = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert found.stdout.startswith("h200: NVIDIA H200")
    assert (found.returncode, found.stderr) == (0, "")
