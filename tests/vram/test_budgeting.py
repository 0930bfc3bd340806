"""Tests of memory budgets: they fail like a card of that size, and the error lists the owners and remedies."""

import asyncio
import gc
import subprocess
import sys
import textwrap
import warnings
from itertools import chain, repeat

import pytest
import torch
from torch import nn

import toolkit as tk
from toolkit.core.errors import BudgetError, DeviceError, RecorderError, ToolkitError
from toolkit.vram import advice, keepers

MiB = 1 << 20


@pytest.fixture
def gpu():
    gpu = tk.device("virtual:h200")
    gc.collect()
    yield gpu
    tk.budget(None)


def ones(mib, dtype=torch.float32):
    return torch.ones(mib * MiB // dtype.itemsize, dtype=dtype, device="vgpu")


@pytest.mark.parametrize("spelling", ["64 MiB", "64MiB", "64 mib", 64 * MiB, "0.0625 GiB", float(64 * MiB)])
def test_spellings_of_a_budget(gpu, spelling):
    with tk.budget(spelling) as budget:
        assert budget.bytes == gpu.limit_bytes == 64 * MiB
    assert gpu.limit_bytes == gpu.memory().total_bytes


@pytest.mark.parametrize("spelling", ["", "8 apples", "-1 GiB", True, [8], 0.5, 8])
def test_what_is_no_size_says_how_to_write_one(gpu, spelling):
    with pytest.raises(ToolkitError, match=r'[Ww]rite .*"24 GiB"'):
        tk.budget(spelling)


def test_what_does_not_fit_fails_with_pytorchs_error_and_who_held_what(gpu):
    with pytest.raises(torch.OutOfMemoryError) as caught, tk.budget("64 MiB"):  # noqa: PT012 - the budget explains as it ends
        logits = ones(24, torch.bfloat16)
        logits.float()
    (note,) = caught.value.__notes__
    assert "Tried to allocate 48.0 MiB" in str(caught.value)
    assert "48.0 MiB requested by logits.float() in" in note
    assert "24.0 MiB: logits = ones(24, torch.bfloat16) in" in note
    assert "held by `logits`" in note
    assert "del logits" not in note  # the failing line reads it
    assert "logits[:, -1].float() (nearly all of it): saves 48.0 MiB, enough" in note
    assert gpu.limit_bytes == gpu.memory().total_bytes


def test_a_copy_in_another_dtype_that_is_kept_has_its_proposal(gpu):
    def widened(x):
        return x.to(torch.float32)

    with pytest.raises(torch.OutOfMemoryError) as caught, tk.budget("64 MiB"):  # noqa: PT012 - the budget explains as it ends
        logits = ones(12, torch.bfloat16)
        kept = widened(logits)
        kept + ones(24)
    (note,) = caught.value.__notes__
    assert "without the copy in another dtype by return x.to(torch.float32) in tests/vram/test_budgeting.py" in note
    assert note.count("saves 24.0 MiB, enough") == 1
    assert "del logits: saves 12.0 MiB" in note
    assert "del kept" not in note


def test_a_model_that_the_failing_line_calls_is_not_to_be_moved_away(gpu):
    net, other = (nn.Linear(2048, 2048).to("vgpu") for _ in range(2))
    with pytest.raises(torch.OutOfMemoryError) as caught, tk.budget("60 MiB"):  # noqa: PT012 - the budget explains as it ends
        x = ones(8).view(-1, 2048)
        y = [net(x).relu(), net(
            x.square()
        )]  # fmt: skip
    (note,) = caught.value.__notes__
    assert 'other.to("cpu"), until it is needed' in note
    assert "net.to" not in note
    assert "del x" not in note
    assert "y" not in locals()


def test_predicted_savings_are_what_is_saved(gpu):
    """Each proposed `del` frees the stated number of bytes."""
    with pytest.raises(torch.OutOfMemoryError) as caught, tk.budget("64 MiB"):  # noqa: PT012 - the budget explains as it ends
        first, second = ones(16), ones(20)
        alias = second  # so that deleting `second` alone saves nothing
        ones(40)
    note = caught.value.__notes__[0]
    assert "del first: saves 16.0 MiB" in note
    assert "del second, alias: saves 20.0 MiB" in note
    assert "del second:" not in note
    assert "del alias" not in note
    caught.value.__traceback__ = None
    before = gpu.memory().allocated_bytes
    del first
    assert before - gpu.memory().allocated_bytes == 16 * MiB
    del alias, second
    assert before - gpu.memory().allocated_bytes == 36 * MiB


class Holder:
    def __init__(self, **attributes):
        vars(self).update(attributes)


class Remembering(nn.Module):
    remembered = 0

    def __init__(self):
        super().__init__()
        self.net, self.hidden = nn.Linear(1024, 1024), []

    def forward(self, x):
        y = self.net(x)
        self.hidden.append(y.detach())
        Remembering.remembered += 1
        return y


def advice_on(run, budget="128 MiB"):
    """Return what is proposed when `run` runs out of memory, one line per proposal."""
    gc.collect()  # what the last run held
    torch.vgpu.empty_cache()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run(budget)
    return [line.strip() for line in caught.value.__notes__[0].partition("What would help:\n")[2].splitlines()]


def test_memory_under_several_names_is_freed_by_deleting_all_of_them(gpu):
    def view(budget):
        with tk.budget(budget):
            base = ones(100)
            first, last = base[:10], base[-1]
            ones(64)
        return first, last

    def attribute(budget):
        with tk.budget(budget):
            held = Holder(batch=ones(60), other=ones(40))
            batch = held.batch
            ones(64)
        return batch

    def many(budget):
        with tk.budget(budget):
            a = b = c = d = e = f = ones(100)
            ones(64)
        return a, b, c, d, e, f

    def again(budget):
        with tk.budget(budget):
            x = ones(40)
            y = [x, ones(50)]
            ones(70)
        return y

    def read(budget):
        with tk.budget(budget):
            x = y = ones(100)
            x * 2
        return y

    assert advice_on(view) == ["del base, first, last: saves 100 MiB, enough"]
    assert advice_on(attribute) == ["del held.batch, batch: saves 60.0 MiB, enough", "del held.other: saves 40.0 MiB, enough"]
    assert advice_on(many) == ["del a, b, c, d and 2 more names of it: saves 100 MiB, enough"]
    assert advice_on(again) == ["del y: saves 50.0 MiB, enough"]  # deleting x, too, is more than is needed
    assert advice_on(again, "96 MiB") == ["del x, y: saves 90.0 MiB, enough", "del y: saves 50.0 MiB"]
    assert advice_on(read) == []  # the failing line reads it


def test_names_that_are_not_walked_in_time_may_hold_everything(gpu, monkeypatch):
    def run(budget):
        with tk.budget(budget):
            small, shared, large = ones(8), ones(16), ones(60)
            also = [shared]
            ones(64)
        return small, shared, large, also

    alike = ["del large: saves 60.0 MiB, enough", "del shared, also: saves 16.0 MiB", "del small: saves 8.00 MiB"]
    assert advice_on(run) == alike
    times = chain([0, 0, 1], repeat(10))  # when the searches of graphs and of names begin, before one name, later
    monkeypatch.setattr(keepers, "thread_time", lambda: next(times))
    assert advice_on(run) == alike[:1]


def test_tensors_that_a_module_remembers_have_their_proposal(gpu):
    def run(budget):
        model = Remembering().to("vgpu")
        with torch.no_grad(), tk.budget(budget):
            x = ones(16).view(-1, 1024)
            for _ in range(10):
                model(x)

    proposed = advice_on(run)
    assert f"del model.hidden: saves {16 * Remembering.remembered}.0 MiB, enough" in proposed


def test_an_object_whose_method_fails_is_not_to_be_deleted(gpu):
    class Trainer:
        def run(self, budget):
            with tk.budget(budget):
                self.kept = [ones(60), ones(20)]
                self.read = ones(30)
                self.read * 2

    assert advice_on(Trainer().run) == ["del self.kept: saves 80.0 MiB, enough"]


def test_kept_graphs_have_their_proposal(gpu):
    net = nn.Linear(1024, 1024).to("vgpu")
    x = ones(16).view(-1, 1024)

    def losses(budget):
        with tk.budget(budget):
            kept = []
            for _ in range(10):
                loss = net(x).relu().square().sum()
                kept.append(loss)

    def total(budget):
        with tk.budget(budget):
            total = 0
            for _ in range(10):
                total += net(x).relu().square().sum()

    def outputs(budget):
        with tk.budget(budget):
            kept = {}
            for n in range(10):
                kept[n] = net(x).relu().exp().sin()

    def states(budget):
        with tk.budget(budget):
            h = x
            for _ in range(10):
                h = net(h).exp()

    def saves(run):
        return [line for line in advice_on(run, "104 MiB") if "detach" in line]

    unless = "unless backward() needs"
    # of the graphs of 4 losses, `loss` holds one, too
    assert saves(losses) == [
        f"elements of kept without their graphs (.detach() or .item()), {unless} them: saves 48.0 MiB, enough"
    ]
    assert saves(total) == [f"total without its graph (.detach() or .item()), {unless} it: saves 64.0 MiB, enough"]
    assert saves(outputs) == [f"elements of kept without their graphs (.detach()), {unless} them: saves 32.0 MiB, enough"]
    assert saves(states) == []  # the failing line reads h


def test_a_variable_of_the_failing_function_with_the_same_name_is_another_one(gpu):
    def fails():
        kept = [ones(8) for _ in range(3)]
        return ones(32), kept

    kept = [ones(4)]
    with pytest.raises(torch.OutOfMemoryError) as caught, tk.budget("48 MiB"):
        fails()
    (note,) = caught.value.__notes__
    assert "del kept: saves 4.00 MiB\n" in f"{note}\n"
    assert len(kept) == 1


def test_graphs_weights_and_states_have_their_proposals(gpu):
    net = nn.Linear(1024, 4096, bias=False).to("vgpu")
    kept = []
    with pytest.raises(torch.OutOfMemoryError) as caught, tk.budget("96 MiB"):  # noqa: PT012 - the budget explains as it ends
        for _ in range(10):
            kept.append(net(torch.ones(512, 1024, device="vgpu")).relu().square().sum())
    note = caught.value.__notes__[0]
    assert "torch.inference_mode()" in note
    assert "net in bfloat16 instead of float32: saves 8.00 MiB" in note
    assert "net in 4 bits" not in note  # tk.load didn't make it


def test_a_budget_below_what_is_held_says_by_whom(gpu, monkeypatch):
    held = ones(48)
    with pytest.raises(BudgetError, match=r"48\.0 MiB are already allocated") as caught:
        tk.budget("32 MiB")
    assert caught.value.facts["allocated_bytes"] == gpu.memory().allocated_bytes
    assert caught.value.do == "Set a budget of at least 48.0 MiB, or free memory first"  # a variable of a function isn't known
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["__main__"], "kept", held, raising=False)
        with pytest.raises(BudgetError, match=r"free memory first\. Largest owners: kept \(48\.0 MiB\)$"):
            tk.budget("32 MiB")
    del held
    with pytest.raises(BudgetError, match=r"at least 2\.00 MiB"):
        tk.budget("1 MiB")
    with pytest.raises(BudgetError, match="the GPU has"):
        tk.budget("2 TiB")


def test_memory_that_the_allocator_cannot_return_may_exceed_the_budget(gpu, empty_card):
    freed, held = ones(9), ones(9)  # in one segment of 20 MiB
    del freed
    with pytest.warns(UserWarning, match=r"the allocator holds 20\.0 MiB: tensors use 9\.00 MiB, and") as warned:
        budget = tk.budget("12 MiB")
    assert warned[0].filename == __file__
    assert budget.note in str(warned[0].message)
    again = ones(9)
    with pytest.raises(torch.OutOfMemoryError):
        ones(9)
    del held, again
    with warnings.catch_warnings(action="error"):
        assert tk.budget("12 MiB").note == ""


def test_an_error_in_a_group_says_who_held_what(gpu):
    async def fails():
        return torch.ones(8 << 20, device="vgpu")

    async def both():
        async with asyncio.TaskGroup() as group:
            group.create_task(fails())

    with pytest.raises(ExceptionGroup) as raised, tk.budget("16 MiB", gpu):
        asyncio.run(both())
    (note,) = raised.value.exceptions[0].__notes__
    assert note.startswith("Where the memory went:\n32.0 MiB requested by")


def test_without_any_memory_in_use_no_list_of_it_is_begun(gpu, empty_card):
    with pytest.raises(torch.OutOfMemoryError) as info, tk.budget("16 MiB"):
        ones(32)
    assert info.value.__notes__[0].endswith("of 16.0 MiB, 0 B were allocated and 16.0 MiB free: 16.0 MiB short.")


def test_room_that_is_too_small_for_a_segment_is_not_called_fragments(gpu, empty_card):
    with pytest.raises(torch.OutOfMemoryError) as info, tk.budget("16 MiB"):
        ones(4)
    assert info.value.__notes__[0].endswith(
        "16.0 MiB free, but CUDA's allocator reserves 20.0 MiB at a time for a request of this size."
    )


def test_memory_of_other_programs_is_not_called_fragments(gpu, empty_card):
    message = "CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 139 GiB of which 2.00 GiB is free."
    sizes = dict.fromkeys(("asked", "held"), 0) | {"limit": gpu.memory().total_bytes, "cached": 1 << 30}
    assert advice._stated(advice._FREE, RuntimeError(message)) == 2 << 30
    assert advice._not_short(**sizes | {"asked": 4 << 30, "free": 2 << 30}) == (
        ", but only 3.00 GiB of the GPU are free: other programs or CUDA itself use the rest."
    )
    assert advice._not_short(**sizes | {"asked": 3 << 30, "free": 2 << 30}) == ", but only in fragments."


def test_budgets_nest_and_come_back(gpu):
    with tk.budget("128 MiB"):
        with tk.budget("64 MiB"):
            assert gpu.limit_bytes == 64 * MiB
        assert gpu.limit_bytes == 128 * MiB


def test_a_larger_budget_leaves_no_free_memory_to_the_smaller_one_around_it(gpu, empty_card):
    with tk.budget("64 MiB"):
        with tk.budget("128 MiB"):
            ones(100)
        with pytest.raises(torch.OutOfMemoryError):
            ones(100)


def test_a_budget_that_is_used_again_limits_again(gpu):
    budget = tk.budget("64 MiB")
    for _ in range(2):
        with budget:
            assert gpu.limit_bytes == 64 * MiB
            with pytest.raises(RecorderError, match="already measures a block"), budget:
                pass
            assert gpu.limit_bytes == 64 * MiB
        assert gpu.limit_bytes == gpu.memory().total_bytes
    held = ones(128)
    with pytest.raises(BudgetError, match="128 MiB are already allocated"), budget:
        pass
    assert gpu.limit_bytes == gpu.memory().total_bytes
    del held


def test_a_block_of_a_budget_that_was_overridden_limits_again(gpu):
    first, second = tk.budget("64 MiB"), tk.budget("128 MiB")
    with first:
        assert gpu.limit_bytes == 64 * MiB
    assert gpu.limit_bytes == 128 * MiB
    second.lift()
    assert gpu.limit_bytes == gpu.memory().total_bytes


def test_budgets_may_be_lifted_in_any_order(gpu):
    first, second = tk.budget("128 MiB"), tk.budget("64 MiB")
    first.lift()
    assert gpu.limit_bytes == 64 * MiB
    second.lift()
    second.lift()
    assert gpu.limit_bytes == gpu.memory().total_bytes


def test_a_budget_alone_keeps_no_history(gpu):
    from toolkit.gpu.allocation_log import log

    tk.budget("64 MiB")
    for _ in range(10):
        ones(1)
    assert log.builder is None
    assert log.lines


def test_the_cpu_has_nothing_to_cap():
    with pytest.raises(DeviceError, match="no caching allocator to limit"):
        tk.budget("8 GiB", "cpu")


def script(text):
    return subprocess.run([sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, timeout=120)


def test_without_any_gpu_it_says_how_to_have_one():
    done = script("import toolkit as tk; tk.budget('8 GiB')")
    assert 'no GPU is in use. Open a virtual one: tk.device("virtual:8GiB")' in done.stderr


def test_a_script_that_runs_out_says_why():
    done = script("""
        import torch, toolkit as tk
        tk.device("virtual:h200")
        tk.budget("64 MiB")
        big = torch.ones(40 << 18, device="vgpu")
        torch.ones(40 << 18, device="vgpu")
    """)
    assert done.returncode == 1
    assert "Where the memory went:" in done.stderr
    assert "held by `big`" in done.stderr
    assert "del big: saves 40.0 MiB, enough" in done.stderr
