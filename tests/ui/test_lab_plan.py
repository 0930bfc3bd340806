"""Tests of the Lab's Plan and export panel without a browser: plans for unloaded models, the slider, exports, errors."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from toolkit.core.errors import BudgetError, CancelledError
from toolkit.core.units import bytes_text
from toolkit.ui.lab import plan_panel as module
from toolkit.ui.lab.app import Lab
from toolkit.ui.lab.plan_panel import target_of
from toolkit.vram.what_if import CONTEXT_BYTES as CUDA

GiB = 1 << 30


class Exporter:
    """A fake `tk.export` that advances step by step, or waits until it is canceled."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, dict]] = []
        self.waits = False
        self.under_way = threading.Event()

    def __call__(self, path, folder, progress, cancel, **options):
        self.asked.append((path, folder, options))
        progress("compile", 0.25, "layers.0 <decode>")
        self.under_way.set()
        if self.waits:
            assert cancel.wait(10)
            raise CancelledError("exporting", "it was cancelled", "Exporting again goes on from here")
        return SimpleNamespace(path=folder)


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Exporter:
    made = Exporter()
    monkeypatch.setattr(module, "export", made)
    monkeypatch.setattr(module, "package_html", lambda package: f"a picture of {package.path}")
    return made


@pytest.fixture
def app() -> Lab:
    lab = Lab(device="virtual:rtx-4090", model="random/gemma4-31b")
    lab.loading.scheme_field.value = "q4_k_m"
    return lab


def planned(app: Lab) -> Lab:
    app.plan.plan_button.click()
    assert app.wait(60)
    return app


def test_a_plan_of_what_the_fields_say(app: Lab) -> None:
    app.plan.context_field.value, app.plan.kv_field.value = 131072, "plain"
    planned(app)
    found = app.plan.plan
    assert (found.card.key, found.context, found.budget_bytes, found.kv) == ("rtx-4090", 131072, 4 * GiB, None)
    assert "it doesn't fit" in app.plan.status.value
    assert "Lower context to" in app.plan.view.value
    assert "random/gemma4-31b, q4_k_m" in app.plan.view.value
    app.plan.context_field.value = 8192
    planned(app)
    assert "it fits" in app.plan.status.value
    assert app.model is None  # nothing was loaded


def test_a_plan_and_an_export_for_several_gpus(exporter: Exporter) -> None:
    app = Lab(device="virtual:rtx-4090", model="random/qwen3-8b")
    app.plan.ranks_field.value = 2
    planned(app)
    found = app.plan.plan
    assert len(found.ranks) == 2
    page = app.plan.view.value
    assert "for each of 2 x NVIDIA GeForce RTX 4090" in page
    assert all(f'<th scope="row">{rank}</th><td>{bytes_text(CUDA)}</td>' in page for rank in (0, 1))
    assert "Which GPUs can export and run it, 2 of each" in page
    assert '<th scope="col">CUDA</th>' in page
    (_, code), (_, exported) = app.plan.code.snippets
    assert "tk.plan('random/qwen3-8b', 'rtx-4090', budget='4 GiB', tensor_parallel=2)" in code
    assert exported.endswith("tensor_parallel=2)")
    app.plan.export()
    assert app.wait(60)
    assert exporter.asked[0][2]["tensor_parallel"] == 2
    app.plan.ranks_field.value = 3
    planned(app)
    assert "can&#x27;t divide 32 num_attention_heads" in app.plan.status.value


def test_fields_that_change_while_a_plan_is_made_are_planned_again(app: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, real = [], module.plan

    def slow(shapes, target, budget, context, **options):
        asked.append((target, context))
        if len(asked) == 1:
            app.plan.target_field.value, app.plan.context_field.value = "h200", 2048
        return real(shapes, target, budget, context, **options)

    monkeypatch.setattr(module, "plan", slow)
    planned(app)
    assert asked == [("rtx-4090", 4096), ("h200", 2048)]
    assert app.plan.plan.context == 2048
    assert "Plan for <b>h200</b>" in app.plan.status.value
    app.plan.context_field.value = 1024
    assert app.wait(60)
    assert app.plan.plan.context == 1024


def test_a_field_that_changes_while_a_plan_is_drawn_is_planned_again(app: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, real = [], module.html

    def slow(plan):
        drawn.append(plan.context)
        if len(drawn) == 1:
            app.plan.context_field.value = 2048
        return real(plan)

    monkeypatch.setattr(module, "html", slow)
    planned(app)
    assert (app.error, drawn) == (None, [4096, 2048])
    assert app.plan.plan.context == 2048
    assert "it fits" in app.plan.status.value


def test_a_model_that_changes_while_its_shapes_are_looked_up_lowers_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    app, real = Lab(model="demo/qwen3"), module.describe

    def slow(path, scheme):
        model = real(path, scheme)
        app.loading.model_field.value = "random/qwen3-8b"
        return model

    monkeypatch.setattr(module, "describe", slow)
    planned(app)
    assert app.error is None
    assert "random/qwen3-8b" in app.plan.view.value
    assert app.plan.context_field.value == app.plan.plan.context == 4096
    assert "lowered" not in app.plan.status.value


def test_an_error_of_fields_that_have_changed_is_not_shown(app: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.describe

    def slow(path, scheme):
        app.loading.model_field.value = "random/gemma4-31b"  # corrected before the error is known
        return real(path, scheme)

    monkeypatch.setattr(module, "describe", slow)
    app.loading.model_field.value = "random/gemma9"
    planned(app)
    assert app.error is None
    assert "it fits" in app.plan.status.value
    assert "random/gemma4-31b" in app.plan.view.value


def test_the_slider_plans_again_once_there_is_a_plan(app: Lab) -> None:
    app.plan.budget_field.value = 2 * GiB
    assert app.plan.plan is None
    planned(app)
    app.plan.budget_field.value = GiB // 2
    assert app.wait(60)
    assert app.plan.plan.budget_bytes == GiB // 2
    assert "Use a budget of at least" in app.plan.view.value


def test_no_plan_of_other_fields_is_shown(app: Lab) -> None:
    assert planned(app).plan.plan is not None
    app.plan.ranks_field.value = 7
    assert app.wait(60)
    assert "divide" in app.plan.status.value
    assert (app.plan.plan, app.plan.view.value) == (None, "")
    app.plan.ranks_field.value = 1
    assert planned(app).plan.plan is not None
    begun, go_on = threading.Event(), threading.Event()
    app.work.run("Waiting", lambda: (begun.set(), go_on.wait(60)), app.loading.status)
    assert begun.wait(60)
    app.plan.budget_field.value = 16 * GiB  # can't be planned now
    assert (app.plan.plan, app.plan.view.value) == (None, "")
    go_on.set()
    assert app.wait(60)


def test_a_context_that_the_model_has_not_is_lowered(exporter: Exporter) -> None:
    app = planned(Lab(model="demo/qwen3"))
    assert app.error is None
    assert app.plan.context_field.value == app.plan.plan.context == 1024
    assert "Context was lowered to 1,024" in app.plan.status.value
    app.loading.model_field.value = "random/qwen3-8b"  # not for the next model
    assert planned(app).plan.plan.context == 4096
    assert "lowered" not in app.plan.status.value
    app.loading.model_field.value = "demo/qwen3"
    planned(app).plan.context_field.value = 512
    assert app.wait(60)
    app.loading.model_field.value = "random/qwen3-8b"
    assert app.plan.context_field.value == 512


def test_exporting_tells_and_keeps_the_package(app: Lab, exporter: Exporter) -> None:
    app.plan.folder_field.value = " out "
    app.plan.export_button.click()
    assert app.wait(60)
    (path, folder, options), *rest = exporter.asked
    assert (path, folder, rest) == ("random/gemma4-31b", "out", [])
    assert options == {"target": "rtx-4090", "budget": 4 * GiB, "context": 4096, "kv": None, "scheme": "q4_k_m"}
    assert "Exported for <b>rtx-4090</b> into the folder <b>out</b>." in app.plan.status.value
    assert app.plan.package.path == "out"
    assert app.plan.view.value == "a picture of out"
    assert app.work.bar.value == 0.25
    assert "lab.plan.package.load()" in app.plan.status.value
    assert not app.plan.export_button.disabled


def test_automatic_kv_exports_what_the_plan_found(app: Lab, exporter: Exporter) -> None:
    app.plan.context_field.value = 98304
    planned(app)
    assert app.plan.plan.kv is not None
    (_, (_, code)) = app.plan.code.snippets
    kv = app.plan.plan.kv
    app.plan.export()
    assert app.wait(60)
    assert exporter.asked[0][2]["kv"] == kv
    assert "plan = tk.plan('random/gemma4-31b', 'rtx-4090'" in code
    assert "kv=plan.kv" in code
    app.plan.kv_field.value = "plain"
    assert "kv=" not in app.plan.code.snippets[1][1]


def test_fields_that_change_after_export_was_pressed_are_for_the_next_one(
    app: Lab, exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, real = [], module.describe

    def slow(path, scheme):
        model = real(path, scheme)
        app.loading.scheme_field.value, app.plan.budget_field.value, app.plan.context_field.value = "int4", 8 * GiB, 2048
        return model

    def plan(shapes, target, budget, context, **options):
        asked.append((target, budget, context, options["name"]))
        return SimpleNamespace(kv=None)

    monkeypatch.setattr(module, "describe", slow)
    monkeypatch.setattr(module, "plan", plan)
    app.plan.export()
    assert app.wait(60)
    assert app.error is None
    assert asked == [("rtx-4090", 4 * GiB, 4096, "random/gemma4-31b, q4_k_m")]
    ((_, _, options),) = exporter.asked
    assert (options["scheme"], options["budget"], options["context"]) == ("q4_k_m", 4 * GiB, 4096)


def test_an_export_can_be_cancelled(app: Lab, exporter: Exporter) -> None:
    exporter.waits = True
    app.plan.export_button.click()
    assert exporter.under_way.wait(60)
    assert "&lt;decode&gt;; in use: " in app.plan.status.value
    assert "of host memory" in app.plan.status.value
    assert app.plan.export_button.disabled
    assert app.loading.load_button.disabled
    assert not app.work.cancel_button.disabled
    app.work.cancel_button.click()
    assert app.wait(10)
    assert app.plan.status.value == "Cancelled. Exporting again goes on from here."
    assert app.error is None


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model_field": "random/gemma9"}, "gemma9"),
        ({"model_field": " "}, "its field is empty"),
        ({"device_field": "virtual:rtx-9090"}, "rtx-9090"),
    ],
)
def test_errors_are_shown_in_the_panel(app: Lab, fields: dict[str, str], says: str) -> None:
    for name, value in fields.items():
        getattr(app.loading, name).value = value
    planned(app)
    assert says in app.plan.status.value
    assert 'role="alert"' in app.plan.status.value


def test_a_plan_and_an_export_are_for_one_target(app: Lab, exporter: Exporter) -> None:
    planned(app)
    assert "Plan for <b>rtx-4090</b>" in app.plan.status.value
    app.loading.device_field.value = "virtual:h200"
    assert (app.plan.target_field.value, app.plan.plan, app.plan.view.value) == ("h200", None, "")
    app.plan.target_field.value = "cpu"
    planned(app)
    assert app.plan.plan.card is None
    app.plan.export()
    assert app.wait(60)
    assert exporter.asked[0][2]["device"] == "cpu"
    assert app.plan.plan is None  # the package's figures replace it
    assert [target_of(name) for name in ("virtual:8GiB", "cuda:1", " virtual:l4 ")] == ["virtual:8GiB", "cuda:1", "l4"]


def test_errors_of_an_export_are_shown_in_the_panel(app: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args, **options):
        raise BudgetError("exporting", "it takes more", "Name more")

    monkeypatch.setattr(module, "export", refuse)
    app.plan.folder_field.value = ""
    app.plan.export_button.click()
    assert app.wait(60)
    assert "Type the name of a new folder" in app.plan.status.value
    app.plan.folder_field.value = "out"
    app.plan.export_button.click()
    assert app.wait(60)
    assert "Name more" in app.plan.status.value
    assert isinstance(app.error, BudgetError)
