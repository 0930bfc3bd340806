"""Tests of `%memory` and `%%memory` in an IPython shell: failing, async and rerun cells, and session files."""

import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

import toolkit
from toolkit.core.callers import current_cell
from toolkit.trace.events import Trace
from toolkit.vram import owners
from toolkit.vram.measure import MemoryUse
from toolkit.vram.sessions import CellUse, Session, saved_sessions

MiB = 1 << 20
FREED = "x = y = z = kept = None"


@pytest.fixture
def shell(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    shell = InteractiveShell.instance()
    toolkit.load_ipython_extension(shell)
    # Free the leftovers of other tests now, so that no cell measured here frees them, and no budget leaves them in the cache.
    shell.run_cell(f"import gc, torch, toolkit as tk; gpu = tk.device('virtual:h200'); d = gpu.torch; {FREED}")
    gc.collect()
    shell.run_cell("torch.vgpu.empty_cache()")
    yield shell
    for line in (FREED, "%memory off", "%memory budget none", "%memory release"):
        shell.run_cell(line)


@pytest.fixture
def run(shell, capsys):
    def run(cell):
        capsys.readouterr()
        shell.run_cell(cell, store_history=True)
        done = capsys.readouterr()
        return done.out + done.err

    return run


def cells(shell):
    return shell.magics_manager.registry["MemoryMagics"].session.cells


def test_every_cell_has_its_numbers(shell, run):
    run("%memory on")
    run("x = torch.ones(4 << 18, device=d)")
    said = run("y = x.double() + 1")
    run("del x")
    assert "HTML" in said
    first, second, third = cells(shell)
    assert (first.kept_bytes, first.freed_bytes) == (4 * MiB, 0)
    assert (second.kept_bytes, second.peak_bytes - second.baseline_bytes) == (8 * MiB, 16 * MiB)
    assert (third.kept_bytes, third.freed_bytes) == (-4 * MiB, 4 * MiB)
    assert [cell.status for cell in cells(shell)] == ["ok"] * 3
    assert [b.number - a.number for a, b in zip(cells(shell), cells(shell)[1:], strict=False)] == [1, 1]
    assert "held by `x`" in second.use.ledger.sentences()[1] or "held by `x`" in str(second.use)


def test_cells_that_fail_are_interrupted_or_wait_keep_right_numbers(shell, run):
    run("%memory on")
    run("def f():\n    held = torch.ones(8 << 18, device=d)\n    raise ValueError('on purpose')\nf()")
    run("raise KeyboardInterrupt")
    run("import asyncio\nx = torch.ones(2 << 18, device=d)\nawait asyncio.sleep(0)\ny = x * 2")
    run("this is no Python")
    failed, interrupted, waited, wrong = cells(shell)
    assert [cell.status for cell in cells(shell)] == ["error", "interrupted", "ok", "error"]
    assert failed.peak_bytes - failed.baseline_bytes == failed.kept_bytes == 8 * MiB
    owners = " ".join(failed.use.by("owner")["owner"])
    assert "held in f() (the traceback of ValueError)" in owners
    assert waited.peak_bytes - waited.baseline_bytes >= 4 * MiB - failed.kept_bytes
    assert wrong.kept_bytes == interrupted.kept_bytes == 0


def test_a_cell_run_again_is_a_cell_of_its_own(shell, run):
    run("%memory on")
    for _ in range(2):
        run("z = torch.ones(1 << 18, device=d)")
    again = cells(shell)
    assert again[0].kept_bytes == MiB
    assert again[1].kept_bytes == 0
    assert again[1].peak_bytes - again[1].baseline_bytes == MiB
    assert again[1].number == again[0].number + 1
    line = again[1].use.at_peak()["where"].tolist()
    assert f"cell {again[1].number}:1" in line


def test_hidden_state_is_named_and_released(shell, run):
    run("%memory on")
    run("_cache = {'x': torch.ones(2 << 18, device=d)}")
    assert "_cache['x']" in set(cells(shell)[0].use.by("owner")["owner"])
    run("def f():\n    pinned = torch.ones(8 << 18, device=d)\n    raise ValueError('on purpose')\nf()")
    run("torch.ones(4 << 18, device=d)")
    said = run("%memory hidden")
    assert "8.00 MiB  pinned in f() (the traceback of ValueError)" in said
    assert "4.00 MiB  Out[" in said
    assert "_cache" not in said
    run("del _cache")
    before = shell.user_ns["gpu"].memory().allocated_bytes
    said = run("%memory release")
    assert "Released 12.0 MiB" in said
    assert before - shell.user_ns["gpu"].memory().allocated_bytes == 12 * MiB
    said = run("%memory hidden")
    assert "Nothing on a GPU is held without a variable" in said


def test_what_one_list_holds_is_one_line(shell, run):
    run("def f():\n    kept = [torch.ones(1 << 18, device=d) for _ in range(5)]\n    raise ValueError('on purpose')\nf()")
    said = run("%memory hidden")
    assert "5.00 MiB  kept in f() (the traceback of ValueError), 5 blocks, allocated in cell" in said
    assert said.count("kept in f()") == 1
    assert "Released 5.00 MiB" in run("%memory release")


FAILS = "def f(mib):\n    pinned = torch.ones(mib << 18, device=d)\n    raise ValueError('on purpose')\nf({})"


def test_an_out_of_memory_error_names_what_no_variable_holds(run):
    gc.disable()
    try:
        run(FAILS.format(24))
        run(FAILS.format(2))
        run("kept = torch.ones(1 << 18, device=d)\nkept")
        said = run("with gpu.sizes_only(): torch.empty(1 << 40, dtype=torch.uint8, device=d)")
    finally:
        gc.enable()
    first, second = said.split("No variable holds this memory, which %memory release frees:\n")[1].splitlines()[:2]
    assert "24.0 MiB  garbage: pinned in f() (the traceback of ValueError), allocated in cell" in first
    assert " 2.00 MiB  pinned in f() (the traceback of ValueError), allocated in cell" in second
    assert "MiB  Out[" not in said  # a variable holds that result


def test_what_an_older_error_holds_is_named_everywhere_and_released(shell, run):
    gc.disable()  # it may free the memory at any time
    try:
        run("torch.vgpu.empty_cache()")
        run(FAILS.format(24))
        run(FAILS.format(2))
        said = run("%memory hidden")
        assert "24.0 MiB  garbage: pinned in f() (the traceback of ValueError), allocated in cell" in said
        assert "2.00 MiB  pinned in f() (the traceback of ValueError)" in said
        run("with tk.memory() as measured: pass")
        measured = shell.user_ns["measured"]
        assert measured.by("kind").set_index("kind").loc["garbage", "end_bytes"] == 24 * MiB
        assert measured.by("owner")["owner"][0] == "garbage: pinned in f() (the traceback of ValueError)"
        said = run("%%memory --budget '64 MiB'\nx = torch.ones(14 << 18, device=d)\ntorch.cat([x, x])")
        assert "held by `garbage: pinned in f() (the traceback of ValueError)`" in said
        assert "%memory release (reference cycles): saves 26.0 MiB, enough" in said
        assert "del x" not in said
        assert "Released 26.0 MiB" in run("%memory release")
    finally:
        gc.enable()


WIDGETS = """
import ipywidgets
before = set(ipywidgets.widgets.widget._instances)
def button():
    big = torch.ones(24 << 18, device=d)
    made = ipywidgets.Button(description="go")
    made.on_click(lambda _: print(big))
    return made
def slider():
    held, made = torch.ones(4 << 18, device=d), ipywidgets.IntSlider()
    made.observe(lambda change: print(held), "value")
    return made
class Shown(ipywidgets.VBox):
    pass
def box():
    inner = ipywidgets.HTML()
    inner.kept = torch.ones(2 << 18, device=d)
    return Shown([ipywidgets.HBox([inner])])
"""


def test_memory_of_open_widgets_has_an_owner(shell, run):
    try:
        run(WIDGETS)
        run("for make in (button, slider, box): make()")
        said = run("%memory hidden")
        assert "24.0 MiB  callback of an open Button 'go' (its closure): big, allocated in cell" in said
        assert "4.00 MiB  callback of an open IntSlider (its closure): held, allocated in cell" in said
        assert "2.00 MiB  an open HTML (in a Shown).kept, allocated in cell" in said
        assert "%memory release frees these, but not what open widgets hold (widget.close() does)." in said
        assert "Released 0 B" in run("%memory release")
        said = run("%%memory --budget '64 MiB'\ntorch.ones(40 << 18, device=d)")
        assert "held by `callback of an open Button 'go' (its closure): big`" in said
        assert "closing the open widgets that hold memory: widget.close(): saves 30.0 MiB, enough" in said
    finally:
        run("opened = ipywidgets.widgets.widget._instances\nfor each in set(opened) - before: opened[each].close()\ndel opened")
        run("del each, make\ngc.collect()")
    assert run("%memory hidden").strip() == "Nothing on a GPU is held without a variable."


def test_a_search_begins_with_the_newest_widgets(shell, run, monkeypatch):
    """Those of a hundred Labs can't all be searched."""
    monkeypatch.setattr(owners, "_MOST_S", 0.0)
    try:
        run(WIDGETS + "for _ in range(3000): ipywidgets.HTML()")
        run("for make in (button, slider, box): make()")
        said = run("%memory hidden")
        for owner in ("Button 'go' (its closure): big", "IntSlider (its closure): held", "HTML (in a Shown).kept"):
            assert f"an open {owner}" in said
    finally:
        run("opened = ipywidgets.widgets.widget._instances\nfor each in set(opened) - before: opened[each].close()\ndel opened")
        run("del each, make, _\ngc.collect()")


def test_one_cell_under_a_budget_says_why_it_failed(shell, run):
    run("x = torch.ones(4 << 18, device=d)")
    said = run("%%memory --budget '64 MiB'\nkept = torch.ones(40 << 18, device=d)\ntorch.cat([x] * 8)")
    assert not shell.last_execution_result.success
    assert "32.0 MiB requested by torch.cat([x] * 8) in cell" in said
    assert "held by `kept`" in said
    assert "del kept: saves 40.0 MiB, enough" in said
    assert said.count("What would help") == 1
    assert shell.user_ns["gpu"].limit_bytes == shell.user_ns["gpu"].memory().total_bytes


def test_a_budget_for_the_session_fails_in_the_cell_with_who_held_what(shell, run):
    said = run("%memory on --budget 64MiB")
    assert "red above 64.0 MiB" in said
    said = run("kept = torch.ones(40 << 18, device=d)\nz = [torch.ones(8 << 18, device=d) for _ in range(5)]")
    assert said.count("What would help") == 1
    assert "expandable_segments:True" in said  # 8 MiB more would fit, but not the segment of 20 MiB that they come from
    assert "16.0 MiB in 2 blocks: z = [torch.ones(8 << 18, device=d) for _ in range(5)] in cell" in said


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("%memory nonsense", "has no command"), ("%memory on --nonsense", "unrecognized arguments"),
        ("%memory budget 8 apples", "not a number of bytes"), ("%memory cell", "needs the number of a measured cell"),
        ("%memory save", "the following arguments are required"), ("%memory 'open", "No closing quotation"),
        ("%memory off now", "takes no arguments"), ("%%memory --budget\n1", "expected one argument"),
        ("%memory open /nowhere", "opening the session"), ("%%memory --device virtual:h2000\n1", "h200"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_without_a_traceback(shell, run, line, says):
    said = run(line)
    assert not shell.last_execution_result.success
    assert says in said
    assert "Traceback" not in said


def test_a_page_and_a_snapshot_are_written(shell, run, tmp_path):
    run("%memory on")
    run("x = torch.ones(4 << 18, device=d)")
    said = run(f"%memory save {tmp_path / 'session.html'}")
    assert "Wrote" in said
    assert "<html" in (tmp_path / "session.html").read_text()
    run(f"%memory save {tmp_path / 'cell.pickle'}")
    opened = toolkit.open_memory(tmp_path / "cell.pickle")
    assert opened.kept_bytes == 4 * MiB
    said = run(f"%memory save {tmp_path / 'cell.txt'}")
    assert ".html (a page) or .pickle" in said


def test_what_if_of_the_whole_session(shell, run):
    run("%memory on")
    run("x = torch.ones(40 << 18, device=d)")
    run("y = x.double()")
    said = run("%memory whatif rtx-5090 --settings expandable_segments:True")
    assert "rtx-5090" in said
    assert "True" in said
    assert "120 MiB" in said


def test_what_if_replays_the_gpu_that_was_measured(shell, run, monkeypatch):
    run("%memory on")
    run("x = torch.ones(40 << 18, device=d)")
    read = CellUse.read

    def on_the_second_gpu(cell):
        trace = read(cell).trace
        return MemoryUse(Trace({**trace.columns, "device": trace["device"] + 1}, trace.strings, trace.meta))

    monkeypatch.setattr(CellUse, "read", on_the_second_gpu)
    assert "40.0 MiB" in run("%memory whatif rtx-5090")


@pytest.mark.parametrize("magic", ["%%memory", "%%capture"])
def test_lines_of_an_earlier_cell_with_a_magic_have_their_source(run, magic):
    run("def t(n): return torch.ones(n << 18, device=d)")
    run(f"{magic}\nx = t(40)\ny = t(2).double()\ndef later(): return t(5)")
    run("z = t(3)")
    run("kept = later()")
    cell = current_cell() - 3  # the first one
    full = "try:\n    with tk.budget('60 MiB'): t(30)\nexcept torch.OutOfMemoryError as error: print(*error.__notes__)"
    said = run(full)
    for line in (
        f"40.0 MiB: x = t(40) in cell {cell + 1} line 1, through cell {cell} line 1, held by `x`",
        f"4.00 MiB: y = t(2).double() in cell {cell + 1} line 2, held by `y`",
        f"3.00 MiB: z = t(3) in cell {cell + 2} line 1, through cell {cell} line 1, held by `z`",
        f"5.00 MiB: kept = later() in cell {cell + 3} line 1, through cell {cell} line 1, held by `kept`",
        f"without the copy in another dtype by y = t(2).double() in cell {cell + 1} line 2: saves 4.00 MiB",
    ):
        assert line in said
    assert "run_cell_magic" not in said


SCRIPT = """
    import os, signal, toolkit
    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell.instance()
    toolkit.load_ipython_extension(shell)
    shell.run_cell("import torch, toolkit as tk; d = tk.device('virtual:h200').torch", store_history=True)
    shell.run_cell("%memory on", store_history=True)
    shell.run_cell("x = torch.ones(4 << 18, device=d)", store_history=True)
    shell.run_cell("y = x.double()", store_history=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="kills with SIGKILL")
def test_a_killed_session_opens_again(tmp_path, monkeypatch, run):
    env = {**os.environ, "TOOLKIT_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(SCRIPT)], env=env, capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL
    (folder,) = saved_sessions()
    with (folder / "cells.jsonl").open("a") as log:
        log.write('{"number": 5, "tit')  # as if it had been killed while writing
    session = Session.open()
    assert [cell.kept_bytes for cell in session.cells] == [4 * MiB, 8 * MiB]
    assert "y = x.double()" in repr(session.cells[1].use)
    said = run("%memory open")
    assert "The session of" in said
    assert "HTML" in said


def test_a_cell_whose_file_is_gone_leaves_the_others_to_see(tmp_path, run):
    run("%memory on")
    run("x = torch.ones(4 << 18, device=d)")
    (folder,) = saved_sessions()
    assert f"{folder.name}: 1 cell, peak" in run("%memory sessions")
    run("y = x.double()")
    (folder / "0001.trace").unlink()
    for command in ("%memory", "%memory open"):
        said = run(command)
        assert "HTML" in said
        assert "Error" not in said


def test_a_folder_that_cannot_be_written_is_told_and_cells_are_measured_all_the_same(shell, run, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "file"))
    said = run("%memory on")
    assert "Set TOOLKIT_CACHE" in said
    run("x = torch.ones(4 << 18, device=d)")
    run("y = x * 2")
    assert [cell.kept_bytes for cell in cells(shell)] == [4 * MiB, 4 * MiB]
    assert cells(shell)[0].use.kept_bytes == 4 * MiB


def test_old_sessions_are_deleted(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    for day in range(25):
        folder = tmp_path / "memory" / f"2026-01-{day + 1:02} 10.00.00 1"
        folder.mkdir(parents=True)
        (folder / "cells.jsonl").write_text(json.dumps({}) + "\n")
    Session.begin()
    kept = sorted(path.name for path in Path(tmp_path / "memory").iterdir())
    assert len(kept) <= 21
    assert kept[0].startswith("2026-01-06")


def test_a_session_whose_kernel_runs_is_not_deleted(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    running, ended = Session.begin(), Session.begin()
    for session in (running, ended):
        (session.folder / "cells.jsonl").write_text(json.dumps({}) + "\n")
    folder = ended.folder
    del session, ended
    for day in range(20):
        newer = tmp_path / "memory" / f"2999-01-{day + 1:02} 10.00.00 1"
        newer.mkdir()
        (newer / "cells.jsonl").write_text(json.dumps({}) + "\n")
    begun = Session.begin()
    assert begun.problem is None
    assert running.folder.exists()
    assert not folder.exists()
