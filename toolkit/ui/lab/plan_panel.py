"""The Lab's Plan and export tab: the memory for exporting and running the chosen model against a budget, and the export.

`tk.plan`, which needs no GPU, and `tk.export` answer for the same target, which both results name.
"""

from __future__ import annotations

from html import escape
from typing import Any

import ipywidgets as widgets
import torch

from toolkit.core.distributed import MOST
from toolkit.core.units import GiB, bytes_text
from toolkit.exporting.exporter import Package, export
from toolkit.exporting.progress import memory_now
from toolkit.gpu.catalogue import CATALOGUE
from toolkit.kernels.kv_codes import KV_SCHEMES
from toolkit.planning.describe import describe, plan
from toolkit.planning.plans import Plan, verdict
from toolkit.ranks.cluster import several
from toolkit.ui.figures.plan import html, package_html
from toolkit.ui.lab.code import CopyAsCode, Name, call
from toolkit.ui.lab.fields import Panel, button, field, folder_of, row, without_gpu
from toolkit.ui.lab.load_panel import LoadPanel
from toolkit.ui.lab.work import Work

CONTEXT = 4096  # the default of `tk.plan` and `tk.export`
_PLAIN = "plain"  # instead of None, for which ipywidgets shows no option
BUDGETS = (0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192)  # GiB
_NO_GPU = 'Choose "h200" or another GPU of the catalogue as Target, or "cpu": a plan for these needs no GPU'
_EMPTY = """Plan predicts the memory for exporting and running <b>{}</b> on the target; it needs no GPU and allocates nothing.
Export compiles the model for the same target into the folder. If the target is a GPU that isn't in this machine, the installed
PyTorch must be a build for CUDA."""


class PlanPanel(Panel):
    """The panel. The model and its scheme are those of `loading`; the target follows its device."""

    def __init__(self, work: Work, loading: LoadPanel) -> None:
        self.plan: Plan | None = None
        self.package: Package | None = None
        self._work, self._loading = work, loading
        self._described: tuple[tuple[str, Any], Any] | None = None  # the model on "meta" of the last plan
        self._lowered: tuple[int, int] | None = None  # the context before and after a model lowered it
        options = [("automatic", "auto"), ("plain", _PLAIN), *((name, name) for name in KV_SCHEMES)]
        budgets = [(bytes_text(int(size * GiB)), int(size * GiB)) for size in BUDGETS]
        self.target_field = field(widgets.Combobox, target_of(loading.device_field.value), "Target", options=_targets(),
                                  ensure_option=False, placeholder="cpu, cuda:0, rtx-5090, ...")  # fmt: skip
        self.context_field = field(widgets.BoundedIntText, CONTEXT, "Context", min=2, max=1 << 20, layout={"width": "175px"})
        self.kv_field = field(widgets.Dropdown, "auto", "KV cache", 70, options=options, layout={"width": "215px"})
        self.ranks_field = field(
            widgets.BoundedIntText, ranks_of(loading.device_field.value), "GPUs", 70, min=1, max=MOST, layout={"width": "140px"}
        )
        self.budget_field = field(
            widgets.SelectionSlider, 4 * GiB, "Budget", options=budgets, continuous_update=False, layout={"width": "400px"}
        )
        self.folder_field = field(widgets.Text, "package", "Folder")
        self.plan_button = button("Plan", "bar-chart", self.show, "Predict the memory on the target", primary=True)
        self.export_button = button("Export", "archive", self.export, "Compile the model for the target into the folder")
        self.status, self.view = widgets.HTML(), widgets.HTML()
        for one in (self.context_field, self.kv_field, self.ranks_field, self.budget_field):
            one.observe(lambda _: self._again(), "value")
        loading.device_field.observe(lambda change: self._follow(change["new"]), "value")
        places = (self.target_field, loading.model_field, loading.scheme_field)
        for one in places:
            one.observe(lambda _: self._clear(), "value")
        loading.model_field.observe(lambda _: self._raise_context(), "value")
        fields = (self.target_field, self.context_field, self.kv_field, self.ranks_field, self.budget_field, self.folder_field)
        self.code = CopyAsCode(self._snippets, (*fields, loading.model_field, loading.scheme_field))
        super().__init__(
            row(*fields[:4]), row(self.budget_field, self.folder_field), row(self.plan_button, self.export_button), self.code,
            self.status, self.view,
        )  # fmt: skip
        self._clear()

    def show(self) -> None:
        """Plan, like the Plan button, and like the context, KV and budget once there is a plan. Returns at once."""
        self._work.run("Planning", self._plan, self.status)

    def export(self) -> None:
        """Export, like the Export button. Returns at once, and does nothing if other work is running."""
        self._work.run("Exporting", self._export, self.status)

    def enable(self, idle: bool) -> None:
        """Enable or disable the buttons."""
        self.plan_button.disabled = self.export_button.disabled = not idle

    def _again(self) -> None:
        """Plan again with other fields if there is a plan. While other work runs, remove the plan of the fields before."""
        if self.plan is not None:
            if self._work.busy:
                self._clear()
            self.show()

    def _follow(self, device: str) -> None:
        """Take the target and the number of GPUs from the device of the tab Load."""
        self.target_field.value, self.ranks_field.value = target_of(device), ranks_of(device)

    def _clear(self) -> None:
        """Remove results that are for another model or target."""
        self.plan = None
        self.view.value, self.status.value = "", _EMPTY.format(escape(self._loading.model_field.value))

    def _chosen(self) -> tuple[str, str, Any]:
        """Return the target, the model and the scheme."""
        _, path, scheme = self._loading.chosen()
        return self.target_field.value.strip() or "cpu", path, scheme

    def _limits(self) -> tuple[int, int, int]:
        """Return the number of GPUs, the budget and the context."""
        return self.ranks_field.value, self.budget_field.value, self.context_field.value

    def _asked(self) -> tuple[Any, ...]:
        """Return the fields that a plan answers for."""
        return (*self._chosen(), *self._limits(), self._kv())

    def _plan(self) -> None:
        """Plan for the fields, again if they have changed meanwhile."""
        planned = None
        while planned != (asked := self._asked()):
            try:
                self._show_plan(*asked)
            except BaseException:
                self._clear()  # what is shown is of the fields before
                if self._asked() == asked:
                    raise
            planned = asked

    def _show_plan(self, *asked: Any) -> None:
        target, path, scheme, _, _, context, _ = asked
        self.status.value = f"Planning {escape(path)} for {escape(target)} ..."
        shapes = self._shapes(path, scheme)
        if self._asked() != asked:
            return
        self.plan = found = self._plan_of(shapes, *asked)
        self.view.value = html(found)  # not self.plan, which a change of a field removes meanwhile
        fits = f"it {verdict(found)}" if found.fits else "it doesn't fit, for the reasons below"
        place = f"Plan for <b>{escape(target)}</b>: {fits}."
        lowered = self._lowered
        if lowered is not None and context == lowered[1]:
            place += f" Context was lowered to {context:,}, the most that the model allows."
        self.status.value = f"{place} This is a prediction: nothing was allocated. In a cell: lab.plan.plan."

    def _plan_of(
        self, shapes: Any, target: str, path: str, scheme: Any, ranks: int, budget: int, context: int, kv: str | None
    ) -> Plan:
        """Return the plan for one GPU with the whole model `shapes`, or for each of `ranks` GPUs."""
        named: dict[str, Any] = {"kv": kv, "name": f"{path}, {scheme}" if scheme else path}
        with without_gpu(target, _NO_GPU):
            if ranks == 1:
                return plan(shapes, target, budget, context, **named)
            return plan(path, target, budget, context, scheme=scheme, tensor_parallel=ranks, **named)

    def _shapes(self, path: str, scheme: Any) -> Any:
        """Return the model on "meta", built once. Lower the context field to its number of positions if it is still chosen."""
        if self._described is None or self._described[0] != (path, scheme):
            self._described = (path, scheme), describe(path, scheme)
        model = self._described[1]
        context, most = self.context_field.value, model.config.max_position_embeddings
        if context > most and self._loading.model_field.value.strip() == path:
            self._lowered = context, most
            self.context_field.value = most
        return model

    def _raise_context(self) -> None:
        """Set the context back that the previous model lowered, unless another one was typed since."""
        lowered, self._lowered = self._lowered, None
        if lowered is not None and self.context_field.value == lowered[1]:
            self.context_field.value = lowered[0]

    def _kv(self) -> str | None:
        """Return the argument `kv` of `tk.plan`: a scheme, "auto", or None for plain."""
        return None if self.kv_field.value == _PLAIN else self.kv_field.value

    def _export(self) -> None:
        target, path, scheme, ranks, budget, context, kv = self._asked()
        folder = folder_of(self.folder_field.value)
        self.package = self.plan = None
        self.view.value = ""

        def show(phase: str, share: float, what: str) -> None:
            self._work.share(share, 1.0, phase)
            held, used = memory_now(torch.device(target) if target.startswith("cuda") else None)
            memory = f"{bytes_text(held)} of host memory" + (f", {bytes_text(used)} of GPU memory" if used else "")
            self.status.value = f"{escape(phase)}{': ' if what else ' ...'}{escape(what)}; in use: {memory}"

        shapes = self._shapes(path, scheme)
        limits = ranks, budget, min(context, shapes.config.max_position_embeddings)
        kv = self._plan_of(shapes, target, path, scheme, *limits, kv).kv
        options = _options(target, scheme, *limits, kv)
        self.package = export(path, folder, progress=show, cancel=self._work.cancelled, **options)
        self.view.value = package_html(self.package)
        into = f"Exported for <b>{escape(target)}</b> into the folder <b>{escape(folder)}</b>."
        self.status.value = f"{into} In a cell: lab.plan.package.load()."

    def _snippets(self) -> dict[str, str]:
        target, path = self.target_field.value.strip() or "cpu", self._loading.model_field.value.strip()
        kv = Name("plan.kv") if self._kv() == "auto" else self._kv()
        options = _options(target, self._loading.scheme, *self._limits(), kv)
        options["budget"] = f"{self.budget_field.value / GiB:g} GiB"
        if options["context"] == CONTEXT:
            del options["context"]  # it is the default, or fewer if the model has fewer positions
        shared = {key: options[key] for key in ("budget", "context", "scheme", "tensor_parallel") if key in options}
        planned = call("tk.plan", path, target, **shared)
        planned = planned if self._kv() == "auto" else f"{planned[:-1]}, kv={self._kv()!r})"  # None is a choice of its own
        exported = f"package = {call('tk.export', path, self.folder_field.value.strip(), **options)}"
        return {"Plan": planned, "Export": f"plan = {planned}\n{exported}" if self._kv() == "auto" else exported}


def target_of(device: str) -> str:
    """Return the name for `tk.plan` and `tk.export` of the GPU that the virtual GPU `device` imitates, or else `device`.

    Of a name of several GPUs, "virtual:2xh200", it is that of one of them.
    """
    name = device.strip()
    name = (several(name) or (name, 1))[0]
    return name.removeprefix("virtual:") if name.removeprefix("virtual:") in CATALOGUE else name


def ranks_of(device: str) -> int:
    """Return the number of GPUs that a name of a device asks for, in the range of the field."""
    return min(max((several(device.strip()) or ("", 1))[1], 1), MOST)


def _options(target: str, scheme: Any, ranks: int, budget: int, context: int, kv: str | None) -> dict[str, Any]:
    """Return the arguments of `tk.export` other than the model and the folder, with `kv` other than "auto"."""
    here = target == "cpu" or target.startswith(("cuda", "virtual:"))
    return {
        "device" if here else "target": target, "budget": budget, "context": context, "kv": kv, "scheme": scheme,
        **({"tensor_parallel": ranks} if ranks > 1 else {}),
    }  # fmt: skip


def _targets() -> list[str]:
    cuda = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return ["cpu", *cuda, *CATALOGUE]
