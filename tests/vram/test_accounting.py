"""Tests of `tk.memory` on the virtual GPU: exact peaks of nested, raising and async blocks, and the names of owners."""

import asyncio
import functools
import gc
import mmap
from contextlib import suppress

import pytest
import torch
from torch import nn

import toolkit as tk
from tests.memory_cells import Cells
from toolkit.core.errors import RecorderError, ToolkitError, TraceError
from toolkit.gpu import allocation_scopes
from toolkit.vram.measure import MemoryUse

MiB = 1 << 20


@pytest.fixture
def gpu():
    gpu = tk.device("virtual:h200")
    gc.collect()
    return gpu


def ones(mib, dtype=torch.float32):
    return torch.ones(mib * MiB // dtype.itemsize, dtype=dtype, device="vgpu")


def truth(gpu):
    """Return the allocator's (allocated bytes, peak bytes since the last reset)."""
    memory = gpu.memory()
    return memory.allocated_bytes, memory.peak_bytes


@pytest.mark.parametrize("seed", range(25))
def test_generated_blocks_have_their_exact_peaks(gpu, seed):
    cells = Cells(gpu, seed)
    cells.run()
    for block in cells.seen:
        use = block.use
        assert (use.baseline_bytes, use.peak_bytes, use.end_bytes) == (block.before, block.most, block.after)


def test_the_outer_peak_is_the_allocators_own(gpu):
    gpu.reset_peak()
    with tk.memory() as outer:
        x = ones(8)
        with tk.memory() as inner:
            y = x * 2 + 1
        del y
    assert outer.peak_bytes == truth(gpu)[1] == inner.peak_bytes
    assert outer.kept_bytes == 8 * MiB
    assert inner.kept_bytes == 8 * MiB
    assert gpu.memory().peak_bytes == truth(gpu)[1]  # the device's own counters weren't reset


def test_what_is_alive_is_named_by_the_variable_that_holds_it(gpu):
    with tk.memory() as use:
        net = nn.Linear(512, 1024).to("vgpu")  # noqa: F841 - named all the same
        state = {"cache": [ones(2), ones(3)]}
        temporary = ones(4)
        del temporary
    named = use.by("owner").set_index("owner")
    assert named.loc["net.weight", "end_bytes"] == 2 * MiB
    assert named.loc["state['cache'][1]", "end_bytes"] == 3 * MiB
    kinds = use.by("kind").set_index("kind")
    assert kinds.loc["weights", "at_peak_bytes"] == 2 * MiB + 4096
    text = repr(use)
    assert "temporary = ones(4)" in text
    assert "held by elements of `state['cache']`" in text
    del state


def test_a_graph_that_a_list_keeps_is_named(gpu):
    net, losses = nn.Linear(256, 256).to("vgpu"), []
    with tk.memory() as use:
        for _ in range(3):
            losses.append(net(ones(1).view(-1, 256)).pow(2).sum())
    owners = " ".join(use.by("owner")["owner"])
    assert "losses[2] (its graph: PowBackward0)" in owners
    assert use.kept_bytes >= 3 * 2 * MiB


def test_many_small_tensors_of_a_list_are_one_sentence(gpu):
    nets, history = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(3)).to("vgpu"), []
    x = ones(1).view(-1, 1024)
    with torch.no_grad(), tk.memory() as use:
        for _ in range(30):
            history.append(nets[0](x))
    first, second = use.ledger.sentences(most=2)
    assert first.startswith("30.0 MiB in 30 blocks: history.append(nets[0](x)) in ")
    assert first.endswith(", held by elements of `history`")
    assert second.startswith("4.00 MiB: ")
    loss = x.requires_grad_().exp().sin().cos().sum()
    with pytest.raises(torch.OutOfMemoryError) as caught, tk.budget("128 MiB"):
        ones(128)
    assert "held by elements of `history`\n" in caught.value.__notes__[0]
    assert "held by `loss` and its graph\n" in caught.value.__notes__[0]
    del loss


def test_what_an_exception_pins_is_named(gpu):
    def failing():
        pinned = ones(16)
        raise ValueError(pinned.shape)

    with pytest.raises(ValueError, match="Size"), tk.memory() as use:
        failing()
    assert "pinned in failing() (the traceback of ValueError)" in set(use.by("owner")["owner"])


def test_a_decorated_function_says_a_line_a_call(gpu, capsys):
    @tk.memory
    def step(mib):
        return ones(mib) * 2

    step(8)
    assert "step: peak" in capsys.readouterr().out
    assert step.memory.peak_bytes - step.memory.baseline_bytes == 16 * MiB

    @tk.memory(gpu)
    async def later(mib):
        held = ones(mib)
        await asyncio.sleep(0)
        return held.shape

    asyncio.run(later(2))
    assert later.memory.kept_bytes == 0
    assert later.memory.peak_bytes - later.memory.baseline_bytes == 2 * MiB


def test_a_card_that_opens_inside_is_seen():
    tk.device("virtual:h200")
    gc.collect()
    with tk.memory() as use:
        card = tk.device("virtual:rtx-5090")
        x = ones(1)
    assert use.device == card.name
    assert use.kept_bytes == x.nbytes
    del x
    tk.device("virtual:h200")


def test_measuring_keeps_nothing_alive(gpu):
    before = truth(gpu)[0]
    with tk.memory() as use:
        x = ones(4)
    assert truth(gpu)[0] == before + 4 * MiB
    del x
    assert truth(gpu)[0] == before
    assert use.kept_bytes == 4 * MiB


def test_reading_too_early_is_an_error(gpu):
    with tk.memory() as use:
        assert "still running" in repr(use)
        with pytest.raises(RecorderError, match="still running"):
            _ = use.peak_bytes


def test_a_measurement_is_saved_and_opened(gpu, tmp_path):
    with tk.memory() as use:
        kept = ones(4)
    opened = tk.open_memory(use.save(tmp_path / "cell.trace"))
    assert isinstance(opened, MemoryUse)
    assert repr(opened) == repr(use)
    assert opened.at_peak().equals(use.at_peak())
    assert opened.host_peak_bytes == use.host_peak_bytes > 0
    (tmp_path / "no.trace").write_bytes(b"nothing")
    with pytest.raises(TraceError):
        tk.open_memory(tmp_path / "no.trace")
    (tmp_path / "no.json").write_text('{"peak": 1}')
    with pytest.raises(TraceError, match=r"opening the measurement .*without allocations. Give .* memory snapshot of PyTorch"):
        tk.open_memory(tmp_path / "no.json")
    with pytest.raises(TraceError, match=r"a trace without allocations.*tk\.open_trace"):
        tk.open_memory("h200/qwen3/roundtrip")
    del kept


def test_a_recording_says_that_earlier_memory_is_missing(gpu, tmp_path):
    kept = ones(4)
    with gpu.record() as trace:
        ones(1)
    opened = tk.open_memory(trace.save(tmp_path / "run.trace"))
    assert opened.peak_bytes == MiB
    assert "without what was allocated before the recording" in opened.line()
    with pytest.raises(TraceError, match=r"before its recording began.*tk\.memory"):
        opened.what_if("h200")
    with tk.memory() as use:
        pass
    assert "recording" not in use.line()
    assert use.peak_bytes == kept.nbytes


def test_steps_of_decoding_have_their_own_peaks(gpu):
    model = tk.load("demo/qwen3", device=gpu)
    with tk.memory() as use:
        tk.generate(model, "The", max_new_tokens=5)
    steps = use.ledger.over("step")
    assert set(range(5)) <= set(steps["step"])
    assert steps["peak_bytes"].max() == use.peak_bytes
    assert use.by("kind").set_index("kind").loc["kv", "peak_bytes"] > 0


def test_host_memory_is_beside_it(gpu):
    with tk.memory() as outer:
        with tk.memory() as inner:
            block = mmap.mmap(-1, 64 * MiB)  # pages that are new to this process
            block.write(b"x" * (64 * MiB))
        block.close()
    assert inner.host_peak_bytes - inner.trace.meta["host"]["before_bytes"] >= 60 * MiB
    assert outer.host_peak_bytes >= inner.host_peak_bytes


def test_watching_costs_nothing_afterwards(gpu):
    from toolkit.gpu.allocation_log import log

    with tk.memory():
        assert log.builder is not None
    assert log.builder is None


def outer_lines(trace, least):
    """Return the source of the lines that allocated at least this many bytes."""
    source, rows = trace.meta["source"], zip(trace.text("where"), trace["bytes"], strict=True)
    return [source.get(place.partition(" > ")[0]) for place, n in rows if place and n >= least]


def test_without_lines_the_bytes_are_the_same(gpu):
    with tk.memory() as outer, tk.memory(lines=False) as inner:
        kept = ones(1) + 1
    with tk.memory(lines=False) as alone:
        more = kept * 2 + 1
    assert (inner.peak_bytes, inner.kept_bytes) == (outer.peak_bytes, outer.kept_bytes) == (2 * MiB + inner.baseline_bytes, MiB)
    assert (alone.peak_bytes - alone.baseline_bytes, alone.kept_bytes) == (2 * MiB, MiB)
    assert "more = kept * 2 + 1" in outer_lines(alone.trace, 1 << 20)  # large allocations note their line in any case
    assert set(alone.by("kind")["kind"]) <= {"activations", "cached"}
    del more


def test_would_it_have_fit_elsewhere(gpu):
    with tk.memory() as use:
        kept = [ones(300) for _ in range(4)]
    table = use.what_if(["h200", "rtx-5090"]).set_index(["gpu", "settings"])
    assert table["fits"].all()
    assert (table["smallest_bytes"] >= use.peak_bytes).all()
    del kept


def test_a_scope_that_is_used_again_measures_anew(gpu):
    scope = tk.memory()
    with scope as first:
        small = ones(1)
    with scope as second:
        large = ones(8)
    assert (first.kept_bytes, second.kept_bytes) == (MiB, 8 * MiB)
    del small, large


def test_a_scope_in_itself_is_refused(gpu):
    scope = tk.memory()
    with scope as use:
        with pytest.raises(RecorderError, match="already measures a block"), scope:
            pass
        x = ones(4)
    assert use.kept_bytes == 4 * MiB
    assert not allocation_scopes.measuring()
    del x


def test_a_decorated_function_that_raises_pins_nothing(gpu):
    @tk.memory
    def failing():
        held = ones(8)
        raise ValueError(held.shape)

    before = truth(gpu)[0]
    gc.disable()
    try:
        with suppress(ValueError):
            failing()
        assert truth(gpu)[0] == before
    finally:
        gc.enable()


def test_garbage_collected_meanwhile_leaves_the_peak_exact(gpu):
    class Ring:
        def __init__(self):
            self.held, self.ring = ones(1), self

    thresholds = gc.get_threshold()
    try:
        for threshold in (1, 2, 3, 5, 7, 11, 13):
            gc.collect()
            gc.set_threshold(threshold)
            with tk.memory(gpu) as use:
                gpu.reset_peak()
                for _ in range(8):
                    Ring()
                    ones(2) + 1
                counted = gpu.memory().peak_bytes
            gc.set_threshold(*thresholds)
            assert use.peak_bytes == max(counted, use.baseline_bytes)
    finally:
        gc.set_threshold(*thresholds)


def test_a_generator_is_refused_with_what_to_do(gpu):
    def values():
        yield ones(1)

    with pytest.raises(ToolkitError, match="around the loop that consumes them"):
        tk.memory(values)


@pytest.mark.parametrize("decorate", [tk.memory, tk.memory("cpu")], ids=["plain", "with a device"])
@pytest.mark.parametrize("kind", [property, classmethod, staticmethod, functools.cached_property])
def test_what_is_no_function_is_refused_at_once(decorate, kind):
    name = kind.__name__
    with pytest.raises(ToolkitError, match=f"of a {name}: it is not a function. Put @tk.memory below @{name}$"):
        decorate(kind(lambda *_: None))
    for value, name in ((3, "an int"), (0.5, "a float"), ([], "a list")):
        with pytest.raises(ToolkitError, match=f"{name}: it is neither a function nor a device"):
            decorate(value)


@pytest.mark.parametrize("decorate", [tk.memory, tk.memory("cpu")], ids=["plain", "with a device"])
def test_a_class_is_refused(decorate):
    with pytest.raises(ToolkitError, match=r"of the class Linear: it is no function\. Decorate its methods$"):
        decorate(torch.nn.Linear)


def test_methods_are_measured_below_other_decorators(gpu, capsys):
    class Model:
        @classmethod
        @tk.memory
        def make(cls):
            return ones(1)

        @property
        @tk.memory
        def size(self):
            return ones(2).shape

    Model.make()
    assert len(Model().size) == 1
    said = capsys.readouterr().out
    assert "Model.make: peak" in said
    assert "Model.size: peak" in said


def test_on_the_cpu_no_size_is_0_as_a_fact(gpu):
    with tk.memory("cpu") as use:
        kept = torch.ones(MiB)
    line, advice = repr(use).splitlines()
    assert line.startswith("memory of the CPU isn't counted, host peak ")
    assert 'tk.device("virtual:h200")' in advice
    assert use.host_tensor_bytes >= kept.nbytes
    for read in ("peak_bytes", "kept_bytes", "baseline_bytes", "end_bytes", "freed_bytes", "peak_reserved_bytes"):
        with pytest.raises(RecorderError, match="read host_peak_bytes"):
            getattr(use, read)
    for call in (use.at_peak, lambda: use.by("owner"), use.timeline):
        with pytest.raises(RecorderError, match="only the memory of GPUs is counted"):
            call()


def test_memory_of_a_variable_that_is_older_than_the_scope_is_no_workspace(gpu):
    x, held = ones(1)[:1000].clone(), [ones(1)[:1000].clone()]  # too small for their lines to be recorded
    with tk.memory() as use:
        pass
    assert len(x) == len(held[0])
    rows = use.by("owner").set_index("owner")
    assert set(rows.index) == {"x", "held[0]"}
    kinds = use.by("kind").set_index("kind")["end_bytes"]
    assert kinds["activations"] == 2 * 4096
    assert "workspace" not in kinds
