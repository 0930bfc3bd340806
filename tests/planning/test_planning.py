"""Tests of plans: predicted bytes against allocations on the virtual GPU and an H200, options, tables, oversized models."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import toolkit as tk
from tests.speed import is_quick
from toolkit.core.distributed import Shard
from toolkit.core.units import MiB, bytes_text
from toolkit.gpu.catalogue import CATALOGUE
from toolkit.planning.describe import describe
from toolkit.planning.plans import CONTEXT_BYTES, NONE, RUN_SCRATCH, Levers, longest_context
from toolkit.planning.sizes import allocated_bytes, sizes_of

RESULTS = Path(tk.__file__).parent / "bench" / "results"
GiB = 1 << 30


@pytest.fixture(scope="module")
def gemma():
    return describe("random/gemma4-31b", "q4_k_m")


def test_running_is_predicted_as_an_h200_measured_it(gemma):
    measured = json.loads((RESULTS / "h200_memory.json").read_text())
    assert (measured["model"], measured["scheme"], measured["context"]) == ("random/gemma4-31b", "q4_k_m", 32768)
    load, prefill, _ = tk.plan(gemma, "h200", context=32768, kv=None).run
    one = next(row for row in json.loads((RESULTS / "h200x2_ranks.json").read_text())["models"] if row["ranks"] == 1)
    assert one["model"] == measured["model"]
    workspace = 32 * MiB  # of cuBLAS, which an earlier part of this run had used
    assert 0 <= one["allocated_bytes"] - workspace - load.parts["weights"] < MiB  # it holds some buffers, too
    # The other record is of a layout in which a weight in q4_k took 0.125 bits more.
    more = measured["load"]["peak_bytes"] - load.parts["weights"]
    assert 0 < more < 0.125 / 4.5 * load.parts["weights"]
    assert -0.05 <= (prefill.device_bytes - CONTEXT_BYTES) / (measured["peak_bytes"] - more) - 1 <= 0.10


@pytest.mark.parametrize("name", ["random/qwen3-8b", "random/qwen3.5-35b-a3b", "random/gemma4-31b"])
def test_the_state_is_what_the_virtual_gpu_allocates(name, empty_card):
    before, shapes = empty_card.memory().allocated_bytes, describe(name, "q4_k_m")
    model = tk.load(name, device=empty_card, scheme="q4_k_m", progress=False)
    weights = empty_card.memory().allocated_bytes - before
    assert weights == sizes_of(shapes).weights
    for kv in (None, "int8", "int4"):
        cache = model.new_cache(8192, kv)
        held = empty_card.memory().allocated_bytes - before - weights
        cache.free()
        del cache
        assert sizes_of(shapes, kv).state_bytes(8192) == pytest.approx(held, rel=0.005)  # the order of blocks


@pytest.mark.parametrize(("scheme", "gib"), [("int4-g128", 12.7), ("int8-g128", 24.2)])
def test_smaller_groups_are_planned_to_the_byte(scheme, gib, empty_card):
    """The experts of this model have rows of 704, which groups of 128 don't divide."""
    before = empty_card.memory().allocated_bytes
    model = tk.load("random/gemma4-26b-a4b", device=empty_card, scheme=scheme, progress=False)
    assert model.report.weight_bytes / GiB == pytest.approx(gib, abs=0.05)
    planned = tk.plan("random/gemma4-26b-a4b", "h200", scheme=scheme).sizes.weights
    assert planned == empty_card.memory().allocated_bytes - before


@pytest.mark.parametrize("kv", [None, "int8", "int4", "k4v8"])
@pytest.mark.parametrize("name", ["demo/qwen3", "demo/gemma4", "demo/qwen3.5-moe"])
def test_a_small_cache_is_planned_to_the_byte(name, kv, empty_card):
    model = tk.load(name, device=empty_card, progress=False)
    before = empty_card.memory().allocated_bytes
    cache = model.new_cache(512, kv)
    held = empty_card.memory().allocated_bytes - before
    cache.free()
    assert sizes_of(describe(name), kv).state_bytes(512) == held


@pytest.mark.parametrize(
    ("name", "scheme", "kv", "context", "chunk", "dtype"),
    [
        ("random/qwen3-8b", "q4_k_m", None, 8192, None, None),
        ("random/qwen3-8b", "q4_k_m", None, 8192, 256, None),
        ("random/qwen3.5-35b-a3b", "q4_k_m", None, 8192, None, None),
        ("random/gemma4-e2b", "none", None, 8192, None, None),  # layers have inputs of their own
        ("random/gemma4-31b", "q4_k_m", "int4", 131072, None, None),  # prompts dequantize the keys and values of a layer
        ("random/qwen3-8b", "none", "int8", 40960, None, None),
        ("random/qwen3-8b", "q4_k_m", None, 8192, None, "float16"),  # prompts dequantize parts of the matrices
        ("random/gemma4-e2b", "int8", None, 512, 64, "float32"),
    ],
)
@torch.no_grad()
def test_the_peak_is_at_least_what_the_virtual_gpu_had(name, scheme, kv, context, chunk, dtype, empty_card):
    gpu, before = empty_card, empty_card.memory().allocated_bytes
    plan = tk.plan(name, gpu, context=context, scheme=scheme, kv=kv, prefill_chunk=chunk, dtype=dtype)
    with tk.memory(lines=False) as used:
        model = tk.load(name, device=gpu, scheme=scheme, dtype=dtype, progress=False)
        cache = model.new_cache(context, kv)
        for start in (0, context - plan.chunk):  # the first and the last part of a prompt
            ids = torch.zeros(1, plan.chunk, dtype=torch.int64, device=gpu.torch)
            hidden = model.advance(model.embed(ids), cache.slots[start : start + plan.chunk], cache, start + plan.chunk)
            model.logits(hidden[:, -1:])
            del ids, hidden
        cache.free()
    had = used.peak_bytes - before
    assert had <= plan.run_bytes - CONTEXT_BYTES - RUN_SCRATCH  # which libraries of a real GPU use
    assert plan.run_bytes - CONTEXT_BYTES <= 1.10 * had


def test_shorter_chunks_of_a_prompt_need_less_memory_on_every_card():
    plans = [tk.plan("demo/gemma4", "h200", context=200, kv=None, prefill_chunk=chunk) for chunk in (16, 128, None)]
    assert [plan.chunk for plan in plans][:2] == [16, 128]
    few, more, chosen = (plan.gpus()["run_bytes"] for plan in plans)
    assert (few < more).all()
    assert (more < chosen).all()
    assert few["h200"] == plans[0].run_bytes
    with pytest.raises(tk.ToolkitError, match="prefill_chunk=0"):
        tk.plan("demo/gemma4", "h200", prefill_chunk=0)


def test_a_plan_is_quick_and_needs_no_gpu(gemma):
    make = partial(tk.plan, gemma, "virtual:rtx-5090", budget="4 GiB", context=131072)
    plan = make()
    assert is_quick(make, 0.3)
    assert plan.fits
    assert plan.export_peak_bytes < GiB  # the target


def test_every_gpu_of_the_catalogue_has_its_row(gemma):
    table = tk.plan(gemma, "h200", budget="4 GiB", context=131072, kv=None).gpus()
    assert list(table.index) == list(CATALOGUE)
    assert table.can_export.all()
    assert dict(table.can_run)["rtx-4090"] is not True
    assert table.can_run["h200"]
    assert 0 < table.longest_context["rtx-4090"] < 262144 == table.longest_context["h200"]
    longest = int(table.longest_context["rtx-4090"])
    assert tk.plan(gemma, "rtx-4090", context=longest, kv=None).fits
    assert not tk.plan(gemma, "rtx-4090", context=longest + 512, kv=None).fits


def test_keys_and_values_are_coded_where_that_makes_it_fit(gemma):
    assert tk.plan(gemma, "h200", context=131072).kv is None
    plan = tk.plan(gemma, "rtx-4090", context=98304)
    assert plan.kv is not None
    assert plan.fits
    assert any(pull.lever == f'kv="{plan.kv}"' and pull.saves_bytes > GiB for pull in plan.pulled)
    assert not tk.plan(gemma, "rtx-4090", context=98304, kv=None).fits


def test_a_quantized_cache_that_saves_nothing_is_not_listed():
    """While a prompt is fed, the keys and values of one layer are dequantized, and plain keys are stored in part."""
    shapes = describe("random/gemma4-26b-a4b", "q4_k_m")
    plans = [tk.plan(shapes, "rtx-4090", context=131072, kv=kv) for kv in (None, "int8", "int4")]
    plain, coded, smaller = (plan.run_bytes for plan in plans)
    assert smaller < plain < coded
    listed = [[pull.saves_bytes for pull in plan.pulled if "kv=" in pull.lever] for plan in plans]
    assert listed == [[], [], [plain - smaller]]


def test_each_lever_saves_what_the_plan_says(gemma):
    plan = tk.plan(gemma, "h200", context=131072, kv=None)
    assert {pull.lever for pull in plan.pulled} == set(Levers.__dataclass_fields__)
    for pull in plan.pulled:
        without = tk.plan(gemma, "h200", context=131072, kv=None, levers=Levers(**{pull.lever: False}))
        assert without.export_peak_bytes - plan.export_peak_bytes == pull.saves_bytes
        assert pull.why
    plain = tk.plan(gemma, "h200", context=131072, kv=None, levers=NONE)
    weights, state = plain.export[2].parts["weights"], plain.export[2].parts["state"]
    assert plain.export_peak_bytes > weights + 2 * state


def test_what_does_not_fit_says_what_would(gemma):
    plan = tk.plan(gemma, "h200", budget="512 MiB", context=131072, kv=None)
    with pytest.raises(tk.BudgetError, match="Use a budget of at least") as caught:
        plan.check()
    needed = caught.value.facts["needed_bytes"]
    assert str(caught.value).count("CUDA") == 1
    assert tk.plan(gemma, "h200", budget=needed, context=131072, kv=None).fits
    quoted = caught.value.do.split('"')[1]
    assert tk.plan(gemma, "h200", budget=quoted, context=131072, kv=None).fits
    tight = tk.plan(gemma, "rtx-4090", context=98304, kv=None)
    with pytest.raises(tk.BudgetError, match=r"Lower context to [0-9,]+, or use kv="):
        tight.check()
    with pytest.raises(tk.BudgetError, match="larger card: not even 256 tokens fit"):
        tk.plan(gemma, "virtual:8GiB", context=4096).check()
    with pytest.raises(tk.BudgetError, match="or switch on weights_as_inputs"):
        tk.plan(gemma, "h200", budget="4 GiB", context=131072, levers=NONE).check()


def test_bad_input(gemma):
    with pytest.raises(tk.ToolkitError, match="this model supports 2 to"):
        tk.plan(gemma, "h200", context=1 << 20)
    with pytest.raises(tk.ToolkitError, match="a plan for a context of True: this model supports 2 to"):
        tk.plan(gemma, "h200", context=True)
    assert type(tk.plan(gemma, "h200", context=np.int64(64)).context) is int
    with pytest.raises(tk.ToolkitError, match="not a number of bytes"):
        tk.plan(gemma, "h200", budget="four")
    with pytest.raises(tk.ToolkitError, match="rtx-5090"):
        tk.plan(gemma, "virtual:rtx-5090ti")
    with pytest.raises(tk.ToolkitError, match="int4"):
        tk.plan(gemma, "h200", kv="int44")


def test_the_plan_in_words_and_as_a_table(gemma):
    plan = tk.plan(gemma, "virtual:rtx-5090", budget="4 GiB", context=4096)
    words = repr(plan)
    assert "compile decode" in words
    assert "(predicted)" in words
    table = plan.to_pandas()
    assert table.loc[("run", "load"), "weights"] == plan.sizes.weights
    assert (table.device_bytes > 0).all()


def test_a_budget_without_a_unit_is_noticed(gemma):
    hint = r'A number without a unit is in bytes: write "24 GiB"'
    with pytest.raises(tk.BudgetError, match=f"within 4 B: .*{hint}"):
        tk.plan(gemma, "h200", budget="4").check()
    with pytest.raises(tk.BudgetError, match=hint):
        tk.plan(gemma, "h200", run_budget=4).check()
    for plan in (tk.plan(gemma, "h200", budget="512 MiB"), tk.plan(gemma, "virtual:1MiB")):
        assert not plan.fits
        assert "unit" not in repr(plan)


def test_no_budget_is_larger_than_the_card(gemma):
    big = "300 GiB"
    assert not tk.plan(gemma, "virtual:8GiB", context=4096, run_budget=big).fits
    plan = tk.plan("demo/qwen3", "rtx-4090", run_budget=big)
    assert plan.spare_bytes == plan.card.memory_bytes - plan.run_bytes
    assert plan.run == tk.plan("demo/qwen3", "rtx-4090").run
    for budget in (None, big):
        plan = tk.plan(gemma, "rtx-4090", budget, context=4096, levers=NONE)
        assert (plan.fits, plan.fits_on("rtx-4090")[0]["can_export"]) == (False, False)
        with pytest.raises(tk.BudgetError, match=r"exporting .* within 23\.6 GiB: .* Use a larger card, or switch on weights"):
            plan.check()
    with pytest.raises(tk.BudgetError, match=r"within 4\.00 GiB: .* a budget of at least .* MiB. and a larger card, or switch"):
        tk.plan(gemma, "rtx-4090", "4 GiB", context=4096, levers=NONE).check()


def test_a_plan_says_how_much_memory_it_leaves(gemma):
    def said(plan):
        return next(line for line in repr(plan).splitlines() if line.startswith("fits"))

    plan = tk.plan(gemma, "virtual:rtx-5090", budget="4 GiB", context=4096, kv=None)
    assert plan.spare_bytes == plan.card.memory_bytes - plan.run_bytes
    spare, whole = bytes_text(plan.spare_bytes), bytes_text(plan.card.memory_bytes)
    assert said(plan) == f"fits: exporting leaves 3.49 GiB of 4.00 GiB, running leaves {spare} of {whole}"
    assert repr(plan).endswith("measured once, on an H200; on other GPUs it may differ.")
    tight = tk.plan(gemma, "h200", context=4096, kv=None, run_budget=plan.run_bytes + 40 * MiB)
    assert said(tight) == f"fits: running leaves only 40.0 MiB of {bytes_text(plan.run_bytes + 40 * MiB)}"
    assert f"\nrunning within {bytes_text(plan.run_bytes + 40 * MiB)}\n" in repr(tight)
    assert "\nrunning\n" in repr(plan)
    assert "measured once" not in repr(tight)
    assert "Fits: running leaves only 40.0 MiB of" in tight._repr_html_()
    over = tk.plan(gemma, "h200", context=4096, kv=None, run_budget=plan.run_bytes - MiB)
    assert over.spare_bytes == -MiB
    assert not any(line.startswith("fits") for line in repr(over).splitlines())
    longest = plan.gpus(["rtx-5090"]).longest_context.item()
    assert longest < plan.sizes.positions
    row = tk.plan(gemma, "virtual:rtx-5090", context=longest, kv=None).gpus(["rtx-5090"]).iloc[0]
    assert row.can_run
    assert row.spare_bytes == row.memory_bytes - row.run_bytes < 0.03 * row.memory_bytes


def test_on_a_cpu_the_host_is_what_counts():
    plan = tk.plan("demo/qwen3", "cpu", budget="2 GiB")
    assert plan.card is None
    assert plan.context == 1024
    assert 0 < plan.export_peak_bytes < 2 * GiB
    with pytest.raises(tk.BudgetError, match="PyTorch"):
        tk.plan("demo/qwen3", "cpu", budget="64 MiB").check()


def test_the_longest_context_is_the_longest():
    sizes = sizes_of(describe("random/qwen3-8b", "int4"))
    card = CATALOGUE["l4"]
    longest = longest_context(sizes, card, card.memory_bytes, 512)
    assert longest is not None
    assert longest % 256 == 0
    assert longest_context(sizes, card, sizes.weights, 512) is None


@pytest.mark.parametrize("budget", ["18.4 GiB", "18.6 GiB", "18.8 GiB", "19 GiB", "20 GiB"])
def test_the_advised_context_is_the_longest_that_fits(gemma, budget):
    """Prompts that are shorter than a chunk need less memory than a chunk does."""

    def plan(context):
        return tk.plan(gemma, "rtx-3090", context=context, kv=None, run_budget=budget)

    (problem,) = plan(131072).problems
    longest = problem.facts["longest_context"] or 0
    assert not plan(longest + 256).fits
    if longest:
        assert plan(longest).fits


def test_sizes_are_those_of_the_allocator():
    assert allocated_bytes([1, 512, 513]) == 512 + 512 + 1024
    assert allocated_bytes([(21 << 20) + 1]) == 22 << 20  # the remainder would be less than 1 MiB, so the block isn't split
    assert allocated_bytes([]) == 0


def test_ranks_need_less_than_one_gpu_would():
    options = {"device": "rtx-4090", "context": 8192, "kv": None}
    whole, halves = (tk.plan("random/qwen3-14b", tensor_parallel=n, **options) for n in (1, 2))
    assert not whole.fits
    assert halves.fits
    assert halves.gpus().can_run["l4"]
    assert halves.export_peak_bytes <= whole.export_peak_bytes
    assert repr(halves).startswith(
        "random/qwen3-14b for each of 2 x NVIDIA GeForce RTX 4090, context 8,192 (predicted)\nexporting\n"
    )
    with pytest.raises(tk.BudgetError, match="on each of 2 x NVIDIA GeForce RTX 4090: it needs"):
        tk.plan("random/qwen3-14b", run_budget="8 GiB", tensor_parallel=2, **options).check()


def test_each_row_of_ranks_is_the_plan_of_its_part():
    table = tk.plan("demo/qwen3", "h200", context=512, tensor_parallel=4).by_rank()
    assert list(table.index) == [0, 1, 2, 3]
    parts = [describe("demo/qwen3", shard=Shard(rank, 4)) for rank in range(4)]
    assert table.weights_bytes.tolist() == [sizes_of(part).weights for part in parts]
    assert table.state_bytes.tolist() == [sizes_of(part).state_bytes(512) for part in parts]
    assert (table.drop(columns="run_bytes").sum(axis=1) == table.run_bytes).all()


def test_ranks_that_can_not_divide_a_model():
    for ranks, found in ((3, "3 ranks: they can't divide"), (0, "0 ranks: not a whole number"), ("2", "not a whole number")):
        with pytest.raises(tk.ToolkitError, match=found):
            tk.plan("demo/qwen3", "h200", tensor_parallel=ranks)
    with pytest.raises(tk.ToolkitError, match="which come in blocks of 256"):
        tk.plan("random/qwen3.5-35b-a3b", "h200", scheme="q4_k_m", tensor_parallel=4)


def test_no_longer_context_than_the_model_has_positions_for():
    found = tk.plan("demo/qwen3", "h200").gpus()
    assert set(found.longest_context) == {1024}
    long = tk.plan("random/qwen3.5-35b-a3b", "h200", context=262_144, scheme="q4_k_m")
    assert long.gpus().longest_context["h200"] == 262_144


def test_gpus_are_given_by_spec_or_name():
    plan, costs = tk.plan("demo/qwen3", "h200"), tk.costs("demo/qwen3")
    for given in (["h200", tk.GPUS["l4"]], ("h200", "l4")):
        assert list(plan.gpus(given).index) == list(costs.gpus(given).index) == ["h200", "l4"]
    assert list(plan.gpus("l4").index) == list(costs.gpus("l4").index) == ["l4"]
    assert costs.bound("l4") == costs.bound(tk.GPUS["l4"])
    for found in (plan, costs):
        assert list(found.gpus([]).columns) == list(found.gpus("l4").columns)
        assert not len(found.gpus([]))
        with pytest.raises(tk.ToolkitError, match="GPU 'h300': no such name"):
            found.gpus(["h300"])
    with pytest.raises(tk.ToolkitError, match="GPU 'h300': no such name"):
        costs.bound("h300")


def test_a_plan_takes_a_gpu_of_the_catalogue_and_no_cluster():
    assert tk.plan("demo/qwen3", tk.GPUS["l4"]) == tk.plan("demo/qwen3", "l4")
    with pytest.raises(tk.errors.DeviceError, match='pass device="virtual:h200" and tensor_parallel=2'):
        tk.plan("demo/qwen3", SimpleNamespace(device="virtual:h200", ranks=2))


def test_nothing_fits_in_nothing():
    assert not tk.plan("demo/qwen3", "h200", budget=0).gpus().can_export.any()
    assert not tk.plan("demo/qwen3", "h200", run_budget=0).fits


def test_cards_run_the_same_whatever_the_plan_is_for():
    for_cpu, for_card = (tk.plan("demo/qwen3", device).gpus() for device in ("cpu", "h200"))
    assert for_cpu.run_bytes.equals(for_card.run_bytes)


def test_what_a_plan_is_not_made_of():
    for model in (3, None, torch.nn.Linear(2, 2)):
        with pytest.raises(tk.ToolkitError, match="not a model"):
            tk.plan(model)
    for ask in (partial(tk.plan, "demo/qwen3"), partial(tk.costs, "demo/qwen3"), partial(tk.export, "demo/qwen3", "out")):
        with pytest.raises(tk.ToolkitError, match=r"scheme 'int5': no such name.*Known: .*, none, "):
            ask(scheme="int5")
    loaded = tk.load("demo/qwen3", device="cpu", progress=False)
    for kv in ("int5", ["int8"], 4, "none"):
        with pytest.raises(tk.ToolkitError, match=r"Known: None \(plain\), auto, int4, int8, k4v8"):
            tk.plan("demo/qwen3", "h200", kv=kv)
    for options in ({"scheme": "int4"}, {"tensor_parallel": 2}):
        with pytest.raises(tk.ToolkitError, match="the model is already loaded"):
            tk.plan(loaded, "h200", **options)
    for size in ("1e400", "1e300 GiB"):
        with pytest.raises(tk.ToolkitError, match="not a number of bytes"):
            tk.plan("demo/qwen3", "h200", budget=size)


def test_a_plan_that_no_format_fits_has_the_one_for_the_longest_context():
    """Codes need scratch for attention, and a plain cache of this model shares most numbers of keys and values."""
    plans = {
        kv: tk.plan("random/gemma4-31b", "rtx-5090", context=32768, scheme="q4_k_m", run_budget="20 GiB", kv=kv)
        for kv in (None, "int8", "k4v8", "int4", "auto")
    }
    longest = {kv: plan.problems[0].facts["longest_context"] for kv, plan in plans.items()}
    assert longest[None] > longest["int4"]
    assert longest["auto"] == longest[None] == max(longest.values())
    assert plans["auto"].kv is None


def test_advice_for_running_works(gemma):
    """The first format of kv="auto" is advised that suffices, and the advised budget is enough."""
    advice = {}
    for context in (90112, 98304, 262144):
        plan = tk.plan(gemma, "rtx-4090", context=context, kv=None)
        (problem,) = plan.problems
        auto = tk.plan(gemma, "rtx-4090", context=context)
        assert (f'kv="{auto.kv}"' in problem.do) == ("kv=" in problem.do) == auto.fits
        assert "run_budget" not in problem.do  # the GPU has no more
        advice[context] = auto.kv if auto.fits else None
    assert advice == {90112: "k4v8", 98304: "int4", 262144: None}
    (problem,) = tk.plan("demo/qwen3", "h200", kv=None, run_budget="732 MiB").problems
    least = problem.do.rpartition('run_budget of at least "')[2].rstrip('"')
    assert tk.plan("demo/qwen3", "h200", kv=None, run_budget=least).fits
    (problem,) = tk.plan("demo/qwen3", "h200", kv=None, run_budget="1 MiB").problems
    assert problem.do.startswith("Use a smaller scheme: not even 256 tokens fit, or use a run_budget")  # the card is no problem


def test_on_the_cpu_the_scores_of_all_heads_count():
    shapes = describe("random/qwen3-0.6b")
    few, many = (tk.plan(shapes, "cpu", context=context, kv=None).run[1].parts["attention"] for context in (4096, 40960))
    assert many == 10 * few == 3 * 4 * 16 * 512 * 40960
    with pytest.raises(tk.ToolkitError, match="levers="):
        tk.plan(shapes, "cpu", levers={"weights_as_inputs": False})


def test_heads_without_a_quantized_cache_leave_the_plain_one():
    demo = describe("demo/qwen3")
    shapes = type(demo)(replace(demo.config, head_dim=18), tk.device("cpu"))
    plan = tk.plan(shapes, "h200", run_budget="700 MiB")
    assert plan.kv is None
    assert not plan.fits
    assert "kv=" not in plan.problems[0].do
    with pytest.raises(tk.ToolkitError, match="head_dim is 18"):
        tk.plan(shapes, "h200", kv="int8")
