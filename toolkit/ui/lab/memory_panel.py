"""The Lab's Memory panel: the device's memory and budget, measurements of loads and generations, and hidden holders.

It calls `Scope` (in the measured thread), `tk.budget`, `owners`, `what_if` and the pictures of memory. If measuring fails, the
measured work continues and the panel shows the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from html import escape
from typing import Any

import anywidget
import ipywidgets as widgets
import torch
import traitlets

from toolkit.core.callers import ipython_shell
from toolkit.core.errors import CancelledError, ToolkitError
from toolkit.core.units import bytes_text, plural, seconds_text
from toolkit.gpu import allocation_scopes
from toolkit.gpu import host_memory as host
from toolkit.gpu.device import Device
from toolkit.gpu.virtual.allocator.blocks import Settings
from toolkit.ranks.remote import RankedModel
from toolkit.ui.lab.code import CopyAsCode, Name, call
from toolkit.ui.lab.fields import Panel, button, field, path_of, replace_children, row
from toolkit.ui.lab.ranks import IN_RANKS
from toolkit.ui.lab.ranks import now_html as ranks_html
from toolkit.ui.lab.work import Work
from toolkit.ui.memory import picture as memory_picture
from toolkit.vram import hidden
from toolkit.vram.budget import budget
from toolkit.vram.hidden import user_variables
from toolkit.vram.measure import HOST_ONLY, MemoryUse, Scope, out_of_memory
from toolkit.vram.what_if import CONTEXT_BYTES, what_if

MOST = 20  # number of kept measurements; each holds every event of its run
_SETTINGS = {"by default": Settings(), "with expandable segments": Settings(expandable_segments=True)}
_LOOKS_PER_S = 2  # updates of the device's memory per second while work runs
_EMPTY = "Nothing has been measured yet. Every load and every generation is listed here: press Load in the first tab."
_CHOOSE = "Choose a row to see its memory over time and the holders at the peak."
_HIDDEN = "Tracebacks and <code>Out[]</code> can keep tensors alive that no variable refers to."
_CELLS = """For the memory of each cell: run <code>%load_ext toolkit</code> and <code>%memory on</code> in the notebook, then
some cells, and press <b>Show the cells</b>."""
_HOST = "It used no GPU memory, only host memory."
_COLUMNS = ("work", "peak", "", "kept", "freed", "reserved", "host peak", "time")
_NO_CELLS = "No cell has been measured: run <code>%load_ext toolkit</code> and <code>%memory on</code>, then some cells."
_TABLE_JS = """
function render({ model, el }) {
  const group = "tk" + Math.random().toString(36).slice(2);
  const draw = () => {
    const focused = el.contains(document.activeElement) && document.activeElement.value;
    el.innerHTML = model.get("table");
    for (const input of el.querySelectorAll("input")) {
      input.name = group; // a group of its own for each view
      input.checked = Number(input.value) === model.get("chosen");
      if (input.value === focused) input.focus();
    }
  };
  el.onchange = (event) => { model.set("chosen", Number(event.target.value)); model.save_changes(); };
  el.onclick = (event) => event.target.closest("label") || event.target.closest("tr")?.querySelector("input")?.click();
  model.on("change:table change:chosen", draw);
  draw();
}
export default { render };
"""


class Measured(anywidget.AnyWidget):
    """A table of measurements. `chosen` is the number of the chosen row, or -1."""

    _esm = _TABLE_JS
    table = traitlets.Unicode().tag(sync=True)
    chosen = traitlets.Int(-1).tag(sync=True)


class MemoryPanel(Panel):
    """The panel. `held()` returns the objects that the Lab holds by name; `opened()` returns the device of a budget, opened."""

    def __init__(self, work: Work, held: Callable[[], Mapping[str, Any]], opened: Callable[[], Device]) -> None:
        self.uses: dict[int, tuple[str, MemoryUse]] = {}  # by number, the oldest first
        self._work, self._held, self._opened = work, held, opened
        self._numbers, self._next_look, self._in_thread = 0, 0.0, list[widgets.Button]()
        self._why = ""  # explanation of the last out-of-memory error
        self.now, self.budget_status, self.status, self.what_if_view, self.cells_view = (widgets.HTML() for _ in range(5))
        self.note, self.hidden_view, self.cells_status = widgets.HTML(_EMPTY), widgets.HTML(_HIDDEN), widgets.HTML(_CELLS)
        self.measured, self.shown = Measured(), widgets.VBox()
        self.measured.observe(lambda _: self._show(), "chosen")
        size = {"width": "260px", "max_width": "98%"}
        self.budget_field = field(widgets.Text, "", "Budget", 60, placeholder="8 GiB, 8gb, 8e9", layout=size)
        self.file_field = field(widgets.Text, "memory", "File", 60, placeholder="a name, or a path", layout=size)
        self._make_buttons()
        self.code = CopyAsCode(self._snippets, (self.budget_field, self.file_field))
        super().__init__(
            self.now, row(self.budget_field, self.set_button, self.lift_button, self.refresh_button), self.budget_status,
            widgets.HTML("<h4>Loads and generations</h4>"), self.note, self.measured, self.shown, self.actions,
            self.status, self.what_if_view, widgets.HTML("<h4>Held without a variable</h4>"),
            row(self.look_button, self.release_button), self.hidden_view, widgets.HTML("<h4>The notebook's cells</h4>"),
            row(self.cells_button), self.cells_status, self.cells_view, self.code,
        )  # fmt: skip
        self.enable(True)

    def _make_buttons(self) -> None:
        """Make the buttons. Those that start work do it in the Lab's thread, and do nothing if other work is running."""

        def works(name: str, icon: str, tip: str, what: str, work: Callable[[], None], status: widgets.HTML) -> widgets.Button:
            self._in_thread.append(button(name, icon, lambda: self._work.run(what, work, status), tip))
            return self._in_thread[-1]

        told, seen, cells, one = self.budget_status, self.hidden_view, self.cells_status, self.status
        self.set_button = works("Set", "lock", "Limit the allocator to this size", "Budget", self._set_budget, told)
        self.lift_button = works("Lift", "unlock", "Remove the limit", "Budget", self._lift_budget, told)
        update = "Update the memory of the device"
        self.refresh_button = works("Look again", "refresh", update, "Looking", self._look_again, told)
        fits, viz = "Would it fit on another GPU?", "A file for pytorch.org/memory_viz"
        self.what_if_button = works("What if", "question", fits, "Replaying", self._what_if, one)
        self.page_button = works("Save as HTML", "file", "A self-contained page", "Saving", lambda: self._save(".html"), one)
        self.snapshot_button = works("Save as PyTorch snapshot", "file-o", viz, "Saving", lambda: self._save(".pickle"), one)
        self.actions = row(self.what_if_button, self.file_field, self.page_button, self.snapshot_button)
        self.actions.layout.display = "none"
        hidden, forget = (
            "List tracebacks, Out[] and _ that hold GPU memory",
            "Delete the last traceback and the results in Out[]",
        )
        self.look_button = works("Look for it", "eye", hidden, "Looking", self._look_hidden, seen)
        self.release_button = works("Release", "eraser", forget, "Releasing", self._release, seen)
        session = "Show the cells measured by %memory on"
        self.cells_button = works("Show the cells", "bar-chart", session, "Drawing the cells", self._show_cells, cells)

    # ---- called by the Lab

    def enable(self, idle: bool) -> None:
        """Enable or disable the buttons."""
        for one in self._in_thread:
            one.disabled = not idle
        if idle:
            self.code.update()  # it names the device

    def tick(self) -> None:
        """Update the device's memory from time to time while work runs."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + 1 / _LOOKS_PER_S
            self.refresh()

    @contextmanager
    def measuring(self, what: str, device: Any) -> Iterator[None]:
        """Measure the memory of a `with` block on `device` and list it as `what`; None: it runs on the ranks of a cluster."""
        self._why = ""
        if device is None:
            self.note.value = f"<b>{escape(what)}</b> is not listed: {IN_RANKS}."
            yield
            return
        try:
            scope = Scope(device)
            scope.__enter__()
        except ToolkitError as problem:  # for example, another tool records the history; the work continues
            self.note.value = f"{escape(what)} is not measured: {escape(str(problem))}"
            yield
            return
        try:
            yield
        except BaseException as error:
            self._end(what, scope, error)
            raise
        self._end(what, scope, None)

    def why_html(self) -> str:
        """Return the explanation of the last error if it was a measured out-of-memory error, else ""."""
        why, self._why = self._why, ""
        return f'<pre class="tk-why">{escape(why)}</pre>' if why else ""

    def _end(self, what: str, scope: Scope, error: BaseException | None) -> None:
        try:
            full = out_of_memory(error)  # loading raises an error of its own from it
            use = scope.end(self._variables(), error if full is None else full)
            use.ledger.blocks  # noqa: B018  # computed here, so that a click on its row responds at once
        except Exception as problem:  # such as variables that a cell changes meanwhile; the load must not fail
            self.note.value = f"{escape(what)} was not measured: {escape(f'{type(problem).__name__}: {problem}')}"
            return
        self._why = str(use.shortage) if use.shortage is not None else ""
        self._numbers += 1
        self.uses = dict([*self.uses.items(), (self._numbers, (what, use))][-MOST:])
        self.measured.table = measured_html(self.uses)
        self.note.value = _CHOOSE if self._numbers <= MOST else f"{_CHOOSE} The last {MOST} are kept."
        if self.measured.chosen not in self.uses:
            self.measured.chosen = -1

    def _variables(self) -> dict[str, Any]:
        """Return the notebook's variables except widgets (which refer to each other), and the objects that the Lab holds."""
        shell = ipython_shell()
        names = user_variables(shell) if shell is not None else {}
        return {**{k: v for k, v in names.items() if not isinstance(v, widgets.Widget)}, **self._held()}

    # ---- the device now

    def refresh(self) -> None:
        """Show the current memory of the device."""
        model = self._held()["lab.model"]
        self.now.value = ranks_html(model.cluster) if isinstance(model, RankedModel) else now_html(self._device())

    def _look_again(self) -> None:
        """Wait until all ranks of a cluster answer. The end of all work shows the memory, but can't be cancelled."""
        self.budget_status.value = ""
        model = self._held()["lab.model"]
        if isinstance(model, RankedModel):
            model.cluster.memory_now(self._work.cancelled)

    def _device(self) -> Device | None:
        """Return the model's device, else the one in use; None for a cluster, or if looking at it would initialize CUDA."""
        model = self._held()["lab.model"]
        if isinstance(model, RankedModel):
            return None
        device = getattr(model, "device", None)
        if not isinstance(device, Device):
            device = allocation_scopes.in_use()
        starts = device is not None and device.torch.type == "cuda" and not torch.cuda.is_initialized()
        return None if starts else device

    def _set_budget(self) -> None:
        device = self._opened()
        found = budget(self.budget_field.value, device)
        said = f"Allocations beyond {bytes_text(device.limit_bytes)} fail on {escape(device.name)}; errors list the holders."
        self.budget_status.value = said if found is None or not found.note else f"{said} But {escape(found.note)}."

    def _lift_budget(self) -> None:
        budget(None, self._device() or self._opened())
        self.budget_status.value = "No budget: the allocator can use all memory of the GPU."

    # ---- one measurement

    def _show(self) -> None:
        """Show the chosen measurement: its picture and its holders."""
        self.what_if_view.value, self.status.value = "", ""
        _, use = self.uses.get(self.measured.chosen, ("", None))
        if use is None:
            replace_children(self.shown)
        elif len(use.ledger.rows):
            table = widgets.HTML(f'<div class="tk-held">{memory_picture.html(use)}</div>')
            replace_children(self.shown, use.timeline(), table)
        else:
            replace_children(self.shown, widgets.HTML(_HOST))
        self.actions.layout.display = "none" if use is None else ""

    def _what_if(self) -> None:
        what, use = chosen = self._chosen()
        self.what_if_view.value = ""
        self.status.value = f"Replaying {escape(what)} on every GPU of the catalogue ..."
        found: dict[str, list[dict[str, Any]]] = {}
        for name, settings in _SETTINGS.items():
            if self._work.cancelled.is_set():
                raise CancelledError("replaying", "it was cancelled", 'Press "What if" to start again')
            self._work.share(len(found), len(_SETTINGS))
            found[name] = what_if(use.trace, settings=[settings], device=use.ledger.device).to_dict("records")
        if self.uses.get(self.measured.chosen) is chosen:  # another row may have been chosen meanwhile
            self.what_if_view.value = what_if_html(what, found)
            self.status.value = ""

    def _save(self, suffix: str) -> None:
        what, use = self._chosen()
        path = path_of(self.file_field.value, suffix, ".html", ".pickle")
        self.status.value = f"Writing {escape(str(path))} ..."
        try:
            written = use.to_html(path) if suffix == ".html" else use.to_snapshot(path)
        except OSError as error:
            do = "Choose a folder that exists and is writable"
            raise ToolkitError(f"writing {str(path)!r}", error.strerror or str(error), do) from error
        self.status.value = f"Wrote {escape(str(written.resolve()))} ({escape(what)})."

    def _chosen(self) -> tuple[str, MemoryUse]:
        found = self.uses.get(self.measured.chosen)
        if found is None:
            raise ToolkitError("a measurement", "no row is chosen", "Choose a row of the table first")
        return found

    def _snippets(self) -> dict[str, str]:
        """Return the code of each action. Saving and What if need a measurement, which `tk.memory` makes."""
        device = self._device()
        gpu = f"gpu = {call('tk.device', 'auto' if device is None else device.name)}"
        measured = f"{gpu}\nwith tk.memory(gpu) as use:\n    ...  # load, generate, train\n"
        name = self.file_field.value.strip() or "memory"
        saved: dict[str, str] = {}
        with suppress(ToolkitError):  # the field doesn't name a file: saving says so
            page, snapshot = (str(path_of(name, suffix, ".html", ".pickle")) for suffix in (".html", ".pickle"))
            saved["Save as HTML"] = f"{measured}{call('use.to_html', page)}"
            saved["Save as PyTorch snapshot"] = f"{measured}{call('use.to_snapshot', snapshot)}"
        size = self.budget_field.value.strip() or "8 GiB"
        return {
            "Set": f"{gpu}\n{call('tk.budget', size, Name('gpu'))}",
            "Lift": f"{gpu}\n{call('tk.budget', None, Name('gpu'))}",
            "Measure": f"{measured}use.timeline()",
            "What if": f"{measured}use.what_if()",
            **saved,
            "Look for it": "%load_ext toolkit\n%memory hidden",
            "Release": "%load_ext toolkit\n%memory release",
            "Show the cells": "%load_ext toolkit\n%memory on",
        }

    # ---- hidden holders, and the notebook's cells

    def _look_hidden(self) -> None:
        self.hidden_view.value = hidden_html(hidden.listed(self._variables(), ipython_shell()))

    def _release(self) -> None:
        self.hidden_view.value = f"Released {bytes_text(hidden.release(ipython_shell()))}."

    def _show_cells(self) -> None:
        magics = _magics()
        cells = list(magics.session.cells) if magics is not None and magics.session is not None else []
        if magics is None or not cells:
            self.cells_status.value, self.cells_view.value = _NO_CELLS, ""
            return
        details: list[str] = []
        for n, cell in enumerate(cells):
            if self._work.cancelled.is_set():
                raise CancelledError("drawing the cells", "it was cancelled", 'Press "Show the cells" to start again')
            self.cells_status.value = f"Drawing cell {cell.number} ..."
            self._work.share(n, len(cells))
            details.append(memory_picture.cell_html(cell, magics.budget_bytes))
        self.cells_view.value = memory_picture.session_html(cells, details, magics.budget_bytes)
        goes_on = "press again to update" if magics.recorder else "<code>%memory on</code> measures more"
        self.cells_status.value = f"{plural(len(cells), 'cell')} measured; {goes_on}."


def measured_html(uses: Mapping[int, tuple[str, MemoryUse]]) -> str:
    """Return the table of measurements, the last one first, each with a radio button whose value is its number."""
    most = max((use.ledger.peak_bytes for _, use in uses.values()), default=0)
    body = "".join(_measured_row(n, *uses[n], max(most, 1)) for n in sorted(uses, reverse=True))
    return f'<div class="tk-measured tk-list">{_table(_COLUMNS, body)}</div>'


def _measured_row(number: int, what: str, use: MemoryUse, most_bytes: int) -> str:
    failed = str(use.trace.meta.get("failed") or "")
    bad = {"": "", "OutOfMemoryError": "out of memory", "CancelledError": "cancelled"}.get(failed, f"ended with {failed}")
    texts = ["-", "", "-", "-", "-"]
    if use.device not in HOST_ONLY:
        before = min(use.baseline_bytes, use.peak_bytes)
        widths = [100 * n / most_bytes for n in (before, use.peak_bytes - before)]
        said = f"held before {bytes_text(before)}, peak {bytes_text(use.peak_bytes)} on {escape(use.device)}"
        bar = f'<span class="tk-span" title="{said}"><i class="tk-before" style="width:{widths[0]:.1f}%"></i>'
        bar += f'<i class="tk-over" style="width:{widths[1]:.1f}%"></i></span>'
        texts = [bytes_text(use.peak_bytes), bar, memory_picture.signed(use.kept_bytes)]
        texts += [bytes_text(n) for n in (use.freed_bytes, use.peak_reserved_bytes)]
    texts += [bytes_text(use.host_peak_bytes) if use.host_peak_bytes else "-", seconds_text(use.elapsed_s)]
    # without the attribute, JupyterLab would handle the arrow keys
    radio = f'<input type="radio" value="{number}" data-lm-suppress-shortcuts="true">'
    label = f"<label>{radio}<span>{escape(what)}{f' <em>{escape(bad)}</em>' if bad else ''}</span></label>"
    return f"<tr><td>{label}</td>{''.join(f'<td>{text}</td>' for text in texts)}</tr>"


def now_html(device: Device | None) -> str:
    """Return the current memory of a device, as numbers and as a bar with the budget."""
    resident = host.resident_bytes()
    on_host = f"<span>host memory of this process <b>{bytes_text(resident)}</b></span>" if resident else ""
    if device is None:
        return f'No device is in use: load a model, or set a budget.<div class="tk-figures">{on_host}</div>'
    memory, name = device.memory(), escape(device.name)
    if not memory.total_bytes:
        return f'The memory of {name} isn\'t counted.<div class="tk-figures">{on_host}</div>'
    free = memory.total_bytes - memory.reserved_bytes
    if device.torch.type == "cuda":
        free = torch.cuda.mem_get_info(device.torch)[0]  # other processes use memory, too
    capped = device.limit_bytes if device.limit_bytes < memory.total_bytes else 0
    scale = min(memory.total_bytes, max(capped * 5 // 4, memory.reserved_bytes)) if capped else memory.total_bytes
    taken, idle = (100 * n / scale for n in (memory.allocated_bytes, memory.reserved_bytes - memory.allocated_bytes))
    mark = f'<i class="tk-cap" style="left:{min(100 * capped / scale, 99.8):.2f}%"></i>' if capped else ""
    figures = {"allocated": memory.allocated_bytes, "reserved": memory.reserved_bytes, "free": free}
    said = "".join(f'<span><i class="tk-{key}"></i>{key} <b>{bytes_text(n)}</b></span>' for key, n in figures.items())
    said += f'<span><i class="tk-cap"></i>budget <b>{bytes_text(capped)}</b></span>' if capped else "<span>no budget</span>"
    said += f"<span>the bar ends at {bytes_text(scale)}</span>" if scale < memory.total_bytes else ""
    return (
        f'<b>{name}</b> now, of {bytes_text(memory.total_bytes)}<div class="tk-room" role="img" aria-label="'
        f'{bytes_text(memory.allocated_bytes)} allocated"><i class="tk-allocated" style="width:{taken:.2f}%"></i>'
        f'<i class="tk-reserved" style="width:{max(idle, 0):.2f}%"></i>{mark}</div>'
        f'<div class="tk-figures">{said}{on_host}</div>'
    )


def hidden_html(found: list[hidden.Hidden]) -> str:
    """Return the table of memory held without a variable."""
    if not found:
        return "Nothing on a GPU is held without a variable."
    rows = "".join(
        f"<tr><td>{escape(held.owner)}</td><td>{escape(held.where or '')}</td><td>{bytes_text(held.bytes)}</td></tr>"
        for held in found
    )
    total = bytes_text(sum(held.bytes for held in found))
    return f"{total} in all. Release frees it{hidden.except_for(found)}.{_table(('held by', 'allocated in', 'bytes'), rows)}"


def what_if_html(what: str, found: Mapping[str, list[dict[str, Any]]]) -> str:
    """Return the GPUs on which a measurement would fit, the smallest first, with a column per allocator setting."""
    least = ", ".join(f"{bytes_text(rows[0]['smallest_bytes'])} {name}" for name, rows in found.items())
    words, body = {True: '<td class="tk-yes">fits</td>', False: '<td class="tk-no">fails</td>'}, ""
    fail = any(not each["fits"] for rows in found.values() for each in rows)
    for pair in sorted(zip(*found.values(), strict=True), key=lambda pair: pair[0]["capacity_bytes"]):
        bad = next((each for each in pair if not each["fits"]), None)
        where = f"{bytes_text(bad['asked_bytes'])} requested by {bad['fails_at']}" if bad else ""
        cells = "".join(words[bool(each["fits"])] for each in pair)
        gpu, memory = escape(pair[0]["gpu"]), bytes_text(pair[0]["capacity_bytes"])
        body += f"<tr><td>{gpu}</td><td>{memory}</td>{cells}{f'<td>{escape(where)}</td>' if fail else ''}</tr>"
    needs = f"needs a GPU with {least}, {bytes_text(CONTEXT_BYTES)} of it for the CUDA context (as on an H200)"
    table = _table(("GPU", "memory", *found, *(["where it fails"] if fail else [])), body)
    return f'<div class="tk-what-if"><b>{escape(what)}</b> {needs}. The same allocations on other GPUs:{table}</div>'


def _table(names: Sequence[str], body: str) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    return f'<div class="tk-wrap"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _magics() -> Any | None:
    """Return the notebook's `%memory` magics, or None if the extension isn't loaded."""
    manager = getattr(ipython_shell(), "magics_manager", None)
    return manager.registry.get("MemoryMagics") if manager is not None else None
