"""The Lab's Traces tab: the history of runs. Compare any two, save them, and open traces and saved runs from files."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from html import escape
from pathlib import Path

import ipywidgets as widgets

from toolkit.core.display import render
from toolkit.core.errors import ToolkitError
from toolkit.core.files import at_home
from toolkit.decode.run import run_of
from toolkit.trace.opening import open_trace
from toolkit.ui.lab.code import CopyAsCode, call
from toolkit.ui.lab.fields import Panel, button, field, path_of, replace_children, row
from toolkit.ui.lab.history import MOST, Entry, History, copies_html, timeline_of
from toolkit.ui.lab.work import Work

_SUFFIXES = (".trace", ".json", ".json.gz", ".sqlite", ".pickle")
_NONE = 0  # the number of no entry; ipywidgets shows no option if the value is None
_MOST_FILES = 200  # offered in the field
_EMPTY = """There are no runs yet. The tab <b>Generate and compare</b> adds its runs here. Or type the name of a file and press
<b>Open</b>: a run that was saved here, a trace of PyTorch's profiler (.json, .json.gz) or of Nsight Systems (.sqlite).
<code>h200/qwen3/cuda-graph</code> is a recording of an H200 that comes with the toolkit."""


class TracesPanel(Panel):
    """The panel of `history`."""

    def __init__(self, work: Work, history: History) -> None:
        self._work, self._history = work, history
        wide, size = {"width": "320px", "max_width": "98%"}, {"width": "260px", "max_width": "98%"}
        self.open_field = field(widgets.Combobox, "", "File", 40, options=_files(), ensure_option=False, layout=wide,
                                placeholder="a trace or a saved run")  # fmt: skip
        self.open_button = button("Open", "folder-open", self.open_file, "Open a trace or a saved run, and add it to the list")
        self.list_view, self.status = widgets.HTML(_EMPTY), widgets.HTML()
        self.a_field = field(widgets.Dropdown, None, "A", 20, layout=wide)
        self.b_field = field(widgets.Dropdown, None, "B", 20, layout=wide)
        self.file_field = field(widgets.Text, "run", "Save as", 60, placeholder="a name, or a path", layout=size)
        self.show_button = button("Show", "eye", self.show, "Show A, next to B if one is chosen", primary=True)
        page, kept = "A self-contained page with A, next to B if one is chosen", "A file with A alone, which Open reads"
        self.page_button = button("Save as HTML", "file", self.save_page, page)
        self.save_button = button("Save run", "save", self.save, kept)
        self.table, self.timeline_box = widgets.HTML(), widgets.VBox()
        chosen = (self.open_field, self.a_field, self.b_field, self.file_field)
        self.code = CopyAsCode(self._snippets, chosen)
        self.actions = widgets.VBox([
            row(self.a_field, self.b_field, self.show_button), row(self.file_field, self.page_button, self.save_button)
        ])  # fmt: skip
        super().__init__(
            row(self.open_field, self.open_button), self.list_view, self.actions, self.code, self.status, self.timeline_box,
            self.table,
        )  # fmt: skip
        self.refresh()

    def open_file(self) -> None:
        """Open the file of the field, like the Open button. Returns at once."""
        self._work.run("Opening", self._open, self.status)

    def show(self) -> None:
        """Show A, next to B if one is chosen, like the Show button. Returns at once."""
        self._work.run("Drawing", self._show, self.status)

    def save_page(self) -> None:
        """Write the page of A, next to B if one is chosen, like the "Save as HTML" button. Returns at once."""
        self._work.run("Saving", self._save_page, self.status)

    def save(self) -> None:
        """Write A to a file that `open_file` reads, like the "Save run" button. Returns at once."""
        self._work.run("Saving", self._save, self.status)

    def enable(self, idle: bool) -> None:
        """Enable or disable the buttons."""
        for one in (self.open_button, self.show_button, self.page_button, self.save_button):
            one.disabled = not idle

    def refresh(self) -> None:
        """List the history, and choose the last two entries."""
        entries = list(self._history.entries.values())
        self.actions.layout.display = "" if entries else "none"
        self.open_field.options = _files()
        if entries:
            kept = f"<small>The last {MOST} are kept.</small>" if len(entries) == MOST else ""
            self.list_view.value = f'<div class="tk-list">{copies_html(reversed(entries))}</div>{kept}'
            options = [(entry.label, entry.number) for entry in reversed(entries)]
            self.a_field.options, self.b_field.options = options, [("(none)", _NONE), *options]
            self.a_field.value = entries[-2 if len(entries) > 1 else -1].number
            self.b_field.value = entries[-1].number if len(entries) > 1 else _NONE
        self.code.update()

    def _chosen(self) -> list[Entry]:
        """Return the entries that A and B name. Raises ToolkitError if there are none."""
        entries = self._entries()
        if not entries:
            raise ToolkitError("a run", "none is chosen", "Generate first, or open a file")
        return entries

    def _entries(self) -> list[Entry]:
        numbers, entries = dict.fromkeys((self.a_field.value, self.b_field.value)), self._history.entries
        return [entries[n] for n in numbers if n in entries]

    def _open(self) -> None:
        name = self.open_field.value.strip()
        if not name:
            raise ToolkitError("opening a trace", "the file field is empty", "Type the name of a file")
        path = at_home(name)
        self.status.value = f"Opening {escape(str(path))} ..."
        trace = open_trace(path)
        run = run_of(trace)
        title = path.name if path.exists() else name  # shipped traces of several models have the same last name
        entry = self._history.add(title, trace, run, call("tk.open_trace", name))
        self.refresh()
        self.a_field.value, self.b_field.value = entry.number, _NONE
        self._show()

    def _show(self) -> None:
        entries = self._chosen()
        self.status.value = "Drawing ..."
        self.table.value = copies_html(entries)
        replace_children(self.timeline_box, timeline_of(entries))
        self.status.value = " next to ".join(f"<b>{escape(entry.label)}</b>" for entry in entries)

    def _save_page(self) -> None:
        shown = [entry.run or entry.trace for entry in self._chosen()]
        path = path_of(self.file_field.value, ".html", ".trace")
        written = render("page", shown[0], path, *shown[1:])
        self.status.value = f"Wrote {escape(str(written.resolve()))}: it opens in any browser, without a network."

    def _save(self) -> None:
        entry = self._chosen()[0]
        written = (entry.run or entry.trace).save(path_of(self.file_field.value, ".trace", ".html"))
        self.status.value = f"Wrote {escape(str(written.resolve()))} ({escape(entry.label)}). Open reads it."
        self.open_field.options = _files()

    def _snippets(self) -> dict[str, str]:
        found = {"Open": f"trace = {call('tk.open_trace', self.open_field.value.strip() or 'run.trace')}\ntrace.timeline()"}
        entries, name = self._entries(), self.file_field.value.strip() or "run"
        if not entries:
            return found
        made, second = _made(entries), ", b" if len(entries) > 1 else ""
        found["Show"] = f"{made}\na.timeline({second[2:]})"
        with suppress(ToolkitError):  # the field doesn't name a file: saving says so
            found["Save as HTML"] = f"{made}\na.to_html({str(path_of(name, '.html', '.trace'))!r}{second})"
            found["Save run"] = f"{made}\na.save({str(path_of(name, '.trace', '.html'))!r})"
        return found


def _made(entries: Sequence[Entry]) -> str:
    """Return the code that makes the entries, as `a` and `b`. Each model is loaded before its run, and only one at a time."""
    lines, loaded = list[str](), ""
    for letter, entry in zip("ab", entries, strict=False):
        if entry.setup and entry.setup != loaded:
            lines += [*(["del model"] if loaded else []), entry.setup]
            loaded = entry.setup
        lines.append(f"{letter} = {entry.source}")
    return "\n".join(lines)


def _files() -> list[str]:
    """Return the files in the current folder that may be traces."""
    try:
        names = sorted(path.name for path in Path().iterdir() if path.name.endswith(_SUFFIXES))
    except OSError:
        return []
    return names[:_MOST_FILES]
