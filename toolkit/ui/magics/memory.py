"""The `%memory` and `%%memory` magics, which show the GPU memory of each cell. toolkit/vram/sessions.py does the measuring."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.display import HTML

from toolkit.core.errors import ToolkitError
from toolkit.core.files import at_home
from toolkit.core.units import bytes_text, parse_bytes, plural
from toolkit.gpu.device import Device
from toolkit.gpu.opening import open_device
from toolkit.trace.ledger import Ledger, fullest
from toolkit.ui.magics.shared import Parser, awaits, displayed_later, failure_of, plain, show, silenced
from toolkit.vram import hidden
from toolkit.vram.budget import budget
from toolkit.vram.hidden import user_variables
from toolkit.vram.measure import MemoryUse, Scope
from toolkit.vram.sessions import CellUse, Recorder, Session, saved_sessions
from toolkit.vram.what_if import joined, what_if

USAGE = """%memory on [--device NAME] [--budget SIZE]   measure each cell from now on, and show its peak, kept and freed bytes;
                                             a budget also limits the allocator
%memory off                                  stop measuring
%memory                                      show the measured cells: a chart, and a picture of each cell
%memory cell N                               show the zoomable picture of one cell
%memory hidden                               list memory held without a variable: by tracebacks, Out[], cycles, widgets
%memory release                              free that memory
%memory budget SIZE | none                   limit the allocator to SIZE, or lift the limit
%memory whatif [GPU ...] [--settings CONF]   would the cells fit on other GPUs, or with other allocator settings?
%memory save FILE.html | FILE.pickle [--cell N]   save a page, or a PyTorch snapshot of a cell
%memory sessions                             list the saved sessions
%memory open [FOLDER | FILE]                 show a saved session (default: the last), or a PyTorch snapshot"""


@magics_class
class MemoryMagics(Magics):
    """`%memory` and `%%memory`."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)  # type: ignore[no-untyped-call]
        before = shell.magics_manager.registry.get("MemoryMagics")  # %reload_ext: measuring continues
        self.recorder: Recorder | None = getattr(before, "recorder", None)
        self.session: Session | None = getattr(before, "session", None)
        self.budget_bytes: int | None = getattr(before, "budget_bytes", None)
        if self.recorder is not None:
            self.recorder.show = self._under_cell

    @line_cell_magic
    def memory(self, line: str, cell: str | None = None) -> None:
        """%%memory [--budget SIZE] [--device NAME]

        Run the cell and show its memory. A budget limits the allocator while the cell runs; if the cell needs more, the
        error lists the holders of the memory. Cells with `await` are not supported: they raise UsageError. `%memory` is for
        the whole session: `%memory help` lists its commands.
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
            raise UsageError(f"%memory has no command {command!r}.\n{USAGE}")
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
            scope = Scope(guard.device if guard is not None else options.device, asked=True)
            scope.__enter__()
            try:
                with displayed_later(self.shell, cell) if silenced(self.shell, cell) else nullcontext():
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
            print("Cells are being measured already. %memory off stops it.")
            return
        self.recorder = Recorder(self.shell, self._under_cell, device)
        self.session = self.recorder.session
        self.recorder.on()
        limit = "" if self.budget_bytes is None else f", red above {bytes_text(self.budget_bytes)}"
        print(
            f"From the next cell on, a line under each cell shows peak, kept and freed bytes{limit}. %memory shows all cells."
        )
        if self.session.problem:
            print(self.session.problem)

    def _off(self, words: list[str]) -> None:
        _none("off", words)
        if self.recorder is None:
            print("Cells are not being measured. %memory on starts it.")
            return
        self.recorder.off()
        self.recorder = None
        print("Cells are no longer measured. %memory shows the measured cells.")

    def _under_cell(self, cell: CellUse, source: str) -> None:
        if not source.lstrip().startswith("%%memory"):  # %%memory shows a line of its own
            _show_line(cell.use, self.budget_bytes)

    def _show(self, words: list[str]) -> None:
        _none("show", words)
        if self.session is None or not self.session.cells:
            print(f"No cell has been measured.\n{USAGE}" if self.recorder is None else "No cell has finished since %memory on.")
            return
        from toolkit.ui.memory.picture import cell_html, session_html

        details = [cell_html(cell, self.budget_bytes) for cell in self.session.cells]
        show(HTML(session_html(self.session.cells, details, self.budget_bytes)))  # type: ignore[no-untyped-call]
        if self.session.problem:
            print(self.session.problem)

    def _cell(self, words: list[str]) -> None:
        if len(words) != 1 or not words[0].isdecimal():
            raise UsageError("%memory cell needs the number of a measured cell: %memory cell N")
        if self.session is None:
            raise UsageError("No cell has been measured. %memory on starts it.")
        show(self.session.find(int(words[0])).use.timeline())

    def _hidden(self, words: list[str]) -> None:
        _none("hidden", words)
        held = hidden.listed(user_variables(self.shell), self.shell)
        for holder in held:
            print(holder)
        frees = f"%memory release frees these{hidden.except_for(held)}."
        print(frees if held else "Nothing on a GPU is held without a variable.")

    def _release(self, words: list[str]) -> None:
        _none("release", words)
        print(f"Released {bytes_text(hidden.release(self.shell))}.")

    def _budget(self, words: list[str]) -> None:
        size = " ".join(words)
        if not size:
            text = "no budget" if self.budget_bytes is None else bytes_text(self.budget_bytes)
            print(f"{text}. %memory budget SIZE sets one, %memory budget none removes it.")
            return
        self._set_budget(size, None)

    def _set_budget(self, size: str, device: Device | None) -> None:
        wanted = None if size.lower() == "none" else parse_bytes(size)
        guard = budget(wanted, device)
        self.budget_bytes = wanted
        print("No budget." if guard is None else f"{guard}: allocations beyond it fail, and the error lists the holders.")

    def _what_if(self, words: list[str]) -> None:
        parser = Parser("%memory whatif")
        parser.add_argument("gpus", nargs="*", metavar="GPU")
        parser.add_argument("--settings", action="append", metavar="CONF", help="as in PYTORCH_CUDA_ALLOC_CONF")
        options = parser.parse_args(words)
        if self.session is None or not self.session.cells:
            raise UsageError("No cell has been measured. %memory on starts it.")
        trace = joined(cell.read().trace for cell in self.session.cells)
        device = Ledger(trace, fullest(trace)).device
        table = what_if(trace, options.gpus or None, options.settings, device=device)
        for name in [name for name in table.columns if name.endswith("_bytes")]:
            table[name.removesuffix("_bytes")] = table.pop(name).map(bytes_text)
        show(table.drop(columns=["fails_cell", "fails_step"]))

    def _save(self, words: list[str]) -> None:
        parser = Parser("%memory save")
        parser.add_argument("file")
        parser.add_argument("--cell", type=int, default=None)
        options = parser.parse_args(words)
        if self.session is None or not self.session.cells:
            raise UsageError("No cell has been measured. %memory on starts it.")
        cell = self.session.cells[-1] if options.cell is None else self.session.find(options.cell)
        options.file = at_home(options.file)
        suffix = options.file.suffix
        if suffix == ".html":
            from toolkit.ui.memory.page import write_memory_page

            cells = self.session.cells if options.cell is None else [cell]
            print(f"Wrote {write_memory_page(cells, options.file, budget_bytes=self.budget_bytes)}")
        elif suffix == ".pickle":
            print(f"Wrote {cell.use.to_snapshot(options.file)} (cell {cell.number})")
        else:
            raise UsageError(
                f"%memory save writes .html (a page) or .pickle (a PyTorch snapshot), not {suffix or 'files without a suffix'}"
            )

    def _sessions(self, words: list[str]) -> None:
        _none("sessions", words)
        from toolkit.ui.memory.picture import peak_words

        found = list(saved_sessions())
        for folder in found:
            cells = Session.open(folder).cells
            print(f"{folder.name}: {plural(len(cells), 'cell')}, {peak_words(cells)}")
            print(f"  %memory open {shlex.quote(str(folder))}")
        if not found:
            print("There are no saved sessions. %memory on starts one.")

    def _open(self, words: list[str]) -> None:
        path = at_home(" ".join(words)) if words else None
        if path is not None and os.path.isfile(path):
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
            if self.recorder is not None:  # the running session continues
                self.session = kept


def _show_line(use: MemoryUse, budget_bytes: int | None, *, is_open: bool = False) -> None:
    """Show the line under a cell and, if it ran out of memory, the explanation."""
    from toolkit.ui.memory.picture import line_html

    show(HTML(line_html(use, budget_bytes, is_open=is_open)))  # type: ignore[no-untyped-call]
    if use.shortage is not None:
        print(use.shortage)


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:  # unclosed quotes
        raise UsageError(str(error)) from None


def _none(command: str, words: list[str]) -> None:
    if words:
        raise UsageError(f"%memory {command} takes no arguments, but got {' '.join(words)!r}\n{USAGE}")
