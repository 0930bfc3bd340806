"""`%memory` and `%%memory`: what each cell does with GPU memory. Argument parsing only; see `memory_session`."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.display import HTML

from toolkit.core.errors import ToolkitError
from toolkit.core.units import bytes_text, parse_bytes
from toolkit.gpu.device import Device
from toolkit.gpu.opening import open_device
from toolkit.ui.magics.shared import Parser, awaits, failure_of, plain, show
from toolkit.vram import owners
from toolkit.vram.budget import budget
from toolkit.vram.measure import MemoryUse, Scope
from toolkit.vram.sessions import CellUse, Recorder, Session, saved_sessions, user_variables
from toolkit.vram.what_if import joined, what_if

USAGE = """%memory on [--device NAME] [--budget SIZE]   a line under each cell from now on: peak, kept, freed
%memory off                                  no more
%memory                                      the cells so far: a chart, and each one's picture
%memory cell N                               one cell, to zoom in
%memory hidden                               what is held without a variable: tracebacks, Out[], closures
%memory release                              let go of it
%memory budget SIZE | none                   let the allocator take so much and no more
%memory whatif [GPU ...] [--settings CONF]   would the cells have fit on other GPUs, or with other allocator settings?
%memory save FILE.html | FILE.pickle [--cell N]   a page, or PyTorch's snapshot of a cell
%memory sessions                             those that were kept
%memory open [FOLDER | FILE]                 a kept session, the last one unless named; or PyTorch's snapshot"""


@magics_class
class MemoryMagics(Magics):
    """`%memory` and `%%memory`."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)  # type: ignore[no-untyped-call]
        before = shell.magics_manager.registry.get("MemoryMagics")  # %reload_ext: what it measures goes on
        self.recorder: Recorder | None = getattr(before, "recorder", None)
        self.session: Session | None = getattr(before, "session", None)
        self.budget_bytes: int | None = getattr(before, "budget_bytes", None)
        if self.recorder is not None:
            self.recorder.show = self._under_cell

    @line_cell_magic
    def memory(self, line: str, cell: str | None = None) -> None:
        """%%memory [--budget SIZE] [--device NAME]

        Runs the cell and shows what it did with memory. With a budget, the allocator may take so much and no more meanwhile,
        and what doesn't fit fails with who held what. A cell with `await` is refused: a magic can't wait for it.
        `%memory` is about the whole session: `%memory help` lists what can be said.
        """
        if cell is None:
            self._command(line)
        else:
            self._run(line, cell)

    def _command(self, line: str) -> None:
        words = _words(line)
        command = words[0] if words else "show"
        commands: dict[str, Callable[[list[str]], None]] = {
            "on": self._on, "off": self._off, "show": self._show, "cell": self._cell, "hidden": self._hidden,
            "release": self._release, "budget": self._budget, "save": self._save, "sessions": self._sessions,
            "open": self._open, "whatif": self._what_if, "help": lambda _: print(USAGE),
        }  # fmt: skip
        if command not in commands:
            raise UsageError(f"%memory {command}: no such command.\n{USAGE}")
        try:
            commands[command](words[1:])
        except ToolkitError as error:
            raise plain(error) from None

    def _run(self, line: str, cell: str) -> None:
        parser = Parser("%%memory")
        parser.add_argument("--budget", default=None)
        parser.add_argument("--device", default=None)
        options = parser.parse_args(_words(line))
        if awaits(self.shell, cell):
            raise UsageError("%%memory can't run a cell with await. Use %memory on, which can.")
        try:
            guard = None if options.budget is None else budget(options.budget, options.device)
        except ToolkitError as error:
            raise plain(error) from None
        failed: BaseException | None = None
        try:
            scope = Scope(guard.device if guard is not None else options.device)
            scope.__enter__()
            try:
                result = self.shell.run_cell(cell, store_history=False)  # type: ignore[union-attr]
                failed = result.error_before_exec or result.error_in_exec
            finally:
                use = scope.end(user_variables(self.shell), failed)
        except ToolkitError as error:
            raise plain(error) from None
        finally:
            if guard is not None:
                guard.lift()
        _show_line(use, guard.bytes if guard is not None else self.budget_bytes, is_open=True)
        if failed is not None:
            raise failure_of(failed)

    # ---- %memory WORD

    def _on(self, words: list[str]) -> None:
        parser = Parser("%memory on")
        parser.add_argument("--device", default=None)
        parser.add_argument("--budget", default=None)
        options = parser.parse_args(words)
        device = None if options.device is None else open_device(options.device)
        if options.budget is not None:
            self._set_budget(options.budget, device)
        if self.recorder is not None:
            print("Every cell is measured already. %memory off ends that.")
            return
        self.recorder = Recorder(self.shell, self._under_cell, device)
        self.session = self.recorder.session
        self.recorder.on()
        limit = "" if self.budget_bytes is None else f", red above {bytes_text(self.budget_bytes)}"
        print(f"From the next cell on: peak, kept and freed under each cell{limit}. %memory shows them all.")
        if self.session.problem:
            print(self.session.problem)

    def _off(self, words: list[str]) -> None:
        _none("off", words)
        if self.recorder is None:
            print("Cells aren't measured. %memory on begins that.")
            return
        self.recorder.off()
        self.recorder = None
        print("Cells are no longer measured. %memory shows those that were.")

    def _under_cell(self, cell: CellUse, source: str) -> None:
        if not source.lstrip().startswith("%%memory"):  # which shows its own
            _show_line(cell.use, self.budget_bytes)

    def _show(self, words: list[str]) -> None:
        _none("show", words)
        if self.session is None or not self.session.cells:
            print(f"No cell has been measured.\n{USAGE}" if self.recorder is None else "No cell has ended since %memory on.")
            return
        from toolkit.ui.memory.picture import line_html, session_html

        details = [line_html(cell.read(), self.budget_bytes, is_open=True) for cell in self.session.cells]
        show(HTML(session_html(self.session.cells, details, self.budget_bytes)))  # type: ignore[no-untyped-call]
        if self.session.problem:
            print(self.session.problem)

    def _cell(self, words: list[str]) -> None:
        if len(words) != 1 or not words[0].isdigit():
            raise UsageError("%memory cell N, with the number of a cell that was measured")
        if self.session is None:
            raise UsageError("No cell has been measured. %memory on begins that.")
        show(self.session.find(int(words[0])).use.timeline())

    def _hidden(self, words: list[str]) -> None:
        _none("hidden", words)
        visible = owners.find(user_variables(self.shell))
        held = {place: h for place, h in owners.hidden(self.shell).items() if place not in visible and place[0] != "cpu"}
        for holder in sorted(held.values(), key=lambda holder: -holder.bytes):
            print(f"{bytes_text(holder.bytes):>9}  {holder.owner}")
        print("%memory release lets go of these." if held else "Nothing on a GPU is held without a variable.")

    def _release(self, words: list[str]) -> None:
        _none("release", words)
        print(f"Let go of {bytes_text(owners.release(self.shell))}.")

    def _budget(self, words: list[str]) -> None:
        size = " ".join(words)
        if not size:
            text = "no budget" if self.budget_bytes is None else bytes_text(self.budget_bytes)
            print(f"{text}. %memory budget SIZE sets one, %memory budget none lifts it.")
            return
        self._set_budget(size, None)

    def _set_budget(self, size: str, device: Device | None) -> None:
        wanted = None if size.lower() == "none" else parse_bytes(size)
        guard = budget(wanted, device)
        self.budget_bytes = wanted
        print("No budget." if guard is None else f"{guard}: what doesn't fit fails, and says who held what.")

    def _what_if(self, words: list[str]) -> None:
        parser = Parser("%memory whatif")
        parser.add_argument("gpus", nargs="*", metavar="GPU")
        parser.add_argument("--settings", action="append", metavar="CONF", help="as in PYTORCH_CUDA_ALLOC_CONF")
        options = parser.parse_args(words)
        if self.session is None or not self.session.cells:
            raise UsageError("No cell has been measured. %memory on begins that.")
        table = what_if(joined(cell.read().trace for cell in self.session.cells), options.gpus or None, options.settings)
        for name in [name for name in table.columns if name.endswith("_bytes")]:
            table[name.removesuffix("_bytes")] = table.pop(name).map(bytes_text)
        show(table.drop(columns=["fails_cell", "fails_step"]))

    def _save(self, words: list[str]) -> None:
        parser = Parser("%memory save")
        parser.add_argument("file")
        parser.add_argument("--cell", type=int, default=None)
        options = parser.parse_args(words)
        if self.session is None or not self.session.cells:
            raise UsageError("No cell has been measured. %memory on begins that.")
        cell = self.session.cells[-1] if options.cell is None else self.session.find(options.cell)
        options.file = Path(options.file).expanduser()
        suffix = options.file.suffix
        if suffix == ".html":
            from toolkit.ui.memory.page import write_memory_page

            cells = self.session.cells if options.cell is None else [cell]
            print(f"Wrote {write_memory_page(cells, options.file, budget_bytes=self.budget_bytes)}")
        elif suffix == ".pickle":
            print(f"Wrote {cell.use.to_snapshot(options.file)} (cell {cell.number})")
        else:
            raise UsageError(
                f"%memory save writes .html (a page) or .pickle (PyTorch's snapshot), not {suffix or 'another'} file"
            )

    def _sessions(self, words: list[str]) -> None:
        _none("sessions", words)
        found = list(saved_sessions())
        for folder in found:
            cells = Session.open(folder).cells
            peak = max((cell.peak_bytes for cell in cells), default=0)
            print(f"{folder.name}: {len(cells)} cells, peak {bytes_text(peak)}\n  %memory open {shlex.quote(str(folder))}")
        if not found:
            print("None was kept. %memory on begins one.")

    def _open(self, words: list[str]) -> None:
        path = Path(" ".join(words)).expanduser() if words else None
        if path is not None and path.is_file():
            from toolkit.vram.measure import open_memory

            show(open_memory(path).timeline())
            return
        running = self.session.folder if self.recorder is not None and self.session is not None else None
        if path is None:
            path = next((folder for folder in saved_sessions() if folder != running), None)
        opened = Session.open(path)
        kept, self.session = self.session, opened
        try:
            print(f"The session of {opened.folder.name}")
            self._show([])
        finally:
            if self.recorder is not None:  # what is measured now goes on
                self.session = kept


def _show_line(use: MemoryUse, budget_bytes: int | None, *, is_open: bool = False) -> None:
    """The quiet line, and, where the memory ran out, why."""
    from toolkit.ui.memory.picture import line_html

    show(HTML(line_html(use, budget_bytes, is_open=is_open)))  # type: ignore[no-untyped-call]
    if use.shortage is not None:
        print(use.shortage)


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:  # quotes that aren't closed
        raise UsageError(str(error)) from None


def _none(command: str, words: list[str]) -> None:
    if words:
        raise UsageError(f"%memory {command} takes nothing after it, not {' '.join(words)!r}\n{USAGE}")
