"""The command line: the demo's table and page, and errors as one line."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import toolkit as tk
from tests.trace.rank_files import collective, write_rank
from toolkit.__main__ import main
from toolkit.core.units import bytes_text


def test_demo_prints_the_table_and_writes_a_page(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "toolkit",
        "demo",
        "--out",
        "page.html",
        "--device",
        "virtual:rtx-4090",
        "--max-new-tokens",
        "8",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    for strategy in (
        "host-sampling",
        "host-embedding",
        "roundtrip",
        "token-on-device",
        "position-on-device",
        "double-buffered",
    ):
        assert strategy in done.stdout
    assert "modelled" in done.stdout
    page = (tmp_path / "page.html").read_text()
    assert "double-buffered" in page
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_another_model(tmp_path: Path, capsys) -> None:
    page = tmp_path / "page.html"
    command = ["demo", "--model", "demo/gemma4", "--out", str(page), "--device", "cpu", "--max-new-tokens", "3"]
    assert main(command) == 0
    assert "Loading demo/gemma4" in capsys.readouterr().out
    assert page.exists()
    assert main([*command[:2], "demo/gemma5", *command[3:]]) == 1
    assert "demo/gemma4" in capsys.readouterr().err


@pytest.mark.parametrize("device", [[], ["--device", "cpu"]])
def test_a_demo_does_not_overwrite_a_trace(device: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.trace"
    file.write_text("a trace")
    assert main(["demo", "--out", str(file), *device]) == 1
    assert "a.trace': the name of a page ends in .html. Give another name after --out" in capsys.readouterr().err
    assert file.read_text() == "a trace"


def test_an_unknown_device_is_one_line_that_names_the_nearest(tmp_path: Path, capsys) -> None:
    assert main(["demo", "--device", "virtual:rtx-5900", "--out", str(tmp_path / "page.html")]) == 1
    said = capsys.readouterr().err
    assert "rtx-5090" in said
    assert "Traceback" not in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize("option", ["--device", "--strategy"])
def test_an_empty_name_is_no_default(option: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """An unset variable of a shell is one."""
    monkeypatch.setattr("toolkit.__main__.demo_everywhere", lambda *_: pytest.fail("it ran"))
    commands = [["run", "demo/qwen3", "The", "--max-new-tokens", "1"], *([["demo"]] if option == "--device" else [])]
    for command in commands:
        assert main([*command, option, ""]) == 1
        assert "'': no such name" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [["toolkit", "run", "demo/qwen3", "The", "--device", "cpu"], ["toolkit.tune", "show", "h200"]], ids="-".join
)
def test_output_that_nobody_reads_ends_the_command_quietly(command: list[str]) -> None:
    with subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 0, said
    assert b"BrokenPipe" not in said


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell that can close standard output")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file of Linux")
@pytest.mark.parametrize("buffered", ["", "1"])
@pytest.mark.parametrize("command", [["toolkit", "open", "h200/qwen3/roundtrip"], ["toolkit.tune", "show", "h200"]])
def test_output_to_a_full_disk_is_one_line(command: list[str], buffered: str) -> None:
    with open("/dev/full", "w") as full:
        environment = os.environ | {"PYTHONUNBUFFERED": buffered}
        done = subprocess.run(
            [sys.executable, "-m", *command], stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False
        )
    assert done.stderr == "OSError: [Errno 28] No space left on device\n"
    assert done.returncode == 1


def test_without_standard_output_a_command_still_runs() -> None:
    command = f"{shlex.quote(sys.executable)} -m toolkit.tune show h200 >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("status", [0, 1])
def test_a_demo_that_fails_on_cuda_is_no_traceback(status: int, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("toolkit.__main__.demo", lambda *_: print("the table"))
    monkeypatch.setattr("toolkit.__main__.has_cuda", lambda: True)
    said = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        done: subprocess.CompletedProcess[str] = subprocess.CompletedProcess(command, status)
        said.append(capsys.readouterr().out)
        if options.get("check"):
            done.check_returncode()
        return done

    monkeypatch.setattr("toolkit.__main__.subprocess.run", run)
    assert main(["demo", "--out", str(tmp_path / "page.html")]) == status
    assert said == ["the table\n\n"]
    assert ("Try next" in capsys.readouterr().out) == (status == 0)


def test_an_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("toolkit.__main__.run", interrupted)
    assert main(["run", "demo/qwen3", "The"]) == 130
    assert capsys.readouterr().err == "Interrupted\n"


def test_plan_prints_what_tk_plan_shows(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "random/qwen3-8b", "--device", "rtx-4090", "--context", "8192", "--scheme=q4_k_m", "--budget=4 GiB"]
    plan = tk.plan("random/qwen3-8b", "rtx-4090", "4 GiB", 8192, scheme="q4_k_m")
    assert main(command) == 0
    assert capsys.readouterr().out == f"{plan}\n"
    assert main([*command, "--gpus"]) == 0
    said, table = capsys.readouterr().out, plan.gpus()
    assert [line.split()[0] for line in said.splitlines()[2:]] == list(table.index)
    (l4,) = (line.split() for line in said.splitlines() if line.startswith("l4 "))
    memory, needed, spare = (bytes_text(n).split() for n in table.loc["l4", ["memory_bytes", "run_bytes", "spare_bytes"]])
    assert l4 == ["l4", *memory, "True", "True", *needed, *spare, str(table.longest_context["l4"])]
    assert main(["plan", "demo/qwen3", "--budget", "0.5"]) == 1
    assert capsys.readouterr().err.startswith("ToolkitError: a size of '0.5': not a whole number of bytes. ")


def test_a_plan_that_does_not_fit_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    """It is what was asked for. The guide on loading says so, and what raises an error."""
    assert main(["plan", "random/qwen3-32b", "--device", "rtx-4090"]) == 0
    said = capsys.readouterr()
    assert "does not fit: running random/qwen3-32b" in said.out
    assert not said.err
    with pytest.raises(tk.BudgetError, match="running random/qwen3-32b"):
        tk.plan("random/qwen3-32b", "rtx-4090").check()


def test_a_plain_cache_has_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "random/qwen3-8b", "--device", "rtx-4090", "--context", "40960", "--kv", "none"]) == 0
    assert capsys.readouterr().out == f"{tk.plan('random/qwen3-8b', 'rtx-4090', context=40960, kv=None)}\n"
    assert main(["run", "demo/qwen3", "The", "--device", "cpu", "--max-new-tokens", "2", "--kv", "none"]) == 0


def test_open_prints_copies_ranks_and_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, snapshot = tmp_path / "page.html", Path(__file__).parent / "trace" / "data" / "snapshot_h200_all.pickle"
    assert main(["open", "h200/qwen3/roundtrip", "--html", str(page)]) == 0
    said, trace = capsys.readouterr().out, tk.open_trace("h200/qwen3/roundtrip")
    assert said.startswith(f"{trace}\n\n{trace.copies().to_string(index=False)}\n\nTimeline: {page} ")
    assert page.exists()
    files = [str(file) for file in sorted(snapshot.parent.glob("nccl_ddp_h100-*.json.gz"))]
    assert main(["open", *files]) == 0
    said, job = capsys.readouterr().out, tk.open_trace(files)
    assert said.startswith(f"{job}\nThe clocks of the ranks are aligned on the ends of ")
    assert said.endswith(f"\n\n{job.ranks().to_string(index=False)}\n")
    assert main(["open", str(snapshot)]) == 0
    assert capsys.readouterr().out == f"{tk.open_trace(snapshot)}\n\n{tk.open_memory(snapshot)}\n"
    assert main(["open", __file__]) == 1
    assert "its format is unknown. tk.open_trace opens" in capsys.readouterr().err


def test_open_says_once_which_ranks_are_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(write_rank(tmp_path / f"{rank}.json", rank, 3, [collective(0, 5)])) for rank in (0, 2)]
    with pytest.warns(UserWarning, match="rank 1 is missing") as warned:
        assert main(["open", *files]) == 0
    said = capsys.readouterr().out
    assert len(warned) == 1
    assert "rank 1 is missing" not in said
    assert "The clocks of the ranks" in said


def test_open_does_not_write_a_page_over_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tk.open_trace("h200/qwen3/roundtrip").save(tmp_path / "a.trace")
    before = file.read_bytes()
    assert main(["open", "--html", str(file), "h200/qwen3/cuda-graph"]) == 1  # as if --html took no value
    assert "a.trace': the name of a page ends in .html. Give another name after --html" in capsys.readouterr().err
    assert file.read_bytes() == before


def test_a_warning_is_one_line_as_an_error_is(tmp_path: Path) -> None:
    event = '{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1, "dur": 1}'
    (tmp_path / "a.json").write_text(f'{{"traceEvents": [{event}, {{"ph": "X", "cat": "kernel"}}]}}')
    command = [sys.executable, "-m", "toolkit", "open", "a.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "UserWarning: a.json: 1 event has unexpected fields and is left out.\n"
