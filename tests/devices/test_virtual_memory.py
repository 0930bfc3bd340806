"""Tests of the virtual GPU's memory: it is counted by storage, freed at once, and raises when full."""

from __future__ import annotations

import gc
import subprocess
import sys
import traceback

import pytest
import torch

from toolkit.core.units import GiB
from toolkit.gpu.opening import open_device
from toolkit.gpu.virtual.allocator.memory import Memory
from toolkit.gpu.virtual.allocator.settings import Settings
from toolkit.gpu.virtual.dispatch import machine
from toolkit.gpu.virtual.host_room import could_be_large
from toolkit.gpu.virtual.machine import Machine


@pytest.fixture
def gpu():
    gc.collect()
    gpu = open_device("virtual:h200")
    torch.vgpu.empty_cache()
    return gpu


@pytest.fixture
def held(gpu):
    before = gpu.memory().allocated_bytes
    return lambda: gpu.memory().allocated_bytes - before


@pytest.mark.parametrize(
    ("n", "size"), [(0, 0), (1, 512), (511, 512), (512, 512), (513, 1024), ((1 << 20) + 1, (1 << 20) + 512)]
)
def test_rounded_to_512_bytes(held, n, size):
    x = torch.empty(n, dtype=torch.uint8, device="vgpu")
    assert held() == size
    del x
    assert held() == 0


def test_views_take_nothing_and_keep_their_storage(held):
    x = torch.ones(1000, device="vgpu")
    view = x.view(10, 100)[3:].t()
    del x
    assert held() == 4096
    del view
    assert held() == 0


def test_resizing_in_place(held):
    x = torch.ones(4, device="vgpu")
    x.resize_(2000)
    assert held() == 8192
    x.resize_(1)  # PyTorch keeps the larger storage
    assert held() == 8192


def test_temporaries_are_gone_and_the_peak_remembers(gpu, held):
    x = torch.ones(256, 256, device="vgpu")
    gpu.reset_peak()
    y = (x + 1) * 2 + x
    assert held() == 2 * x.nbytes
    assert gpu.memory().peak_bytes - gpu.memory().allocated_bytes == x.nbytes
    assert torch.vgpu.max_memory_allocated() == gpu.memory().peak_bytes
    del y


def test_autograd_holds_what_it_saved_until_backward(held):
    x = torch.ones(256, 256, device="vgpu", requires_grad=True)
    y = x.exp().sum()
    assert held() == 2 * x.nbytes + 512
    y.backward()
    del y
    assert held() == 2 * x.nbytes  # x and its gradient


def test_blocks_without_values_of_two_threads_may_overlap(gpu):
    first, second = gpu.sizes_only(), gpu.sizes_only()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.ones(3, device="vgpu").sum().item() == 0
    second.__exit__(None, None, None)
    assert torch.ones(3, device="vgpu").sum().item() == 3


def test_out_of_memory_says_what_cuda_says_and_who_holds_it(gpu):
    with gpu.sizes_only():
        keep = torch.empty(100 * GiB, dtype=torch.uint8, device="vgpu")
    before = gpu.memory()
    with pytest.raises(torch.OutOfMemoryError) as error:
        torch.empty(60 * GiB, dtype=torch.uint8, device="vgpu")
    text = str(error.value)
    assert "CUDA out of memory. Tried to allocate 60.0 GiB. GPU 0 has a total capacity of 140 GiB of which" in text
    assert "test_virtual_memory.py:" in text
    assert "100 GiB" in text
    assert gpu.memory() == before
    assert torch.vgpu.OutOfMemoryError is torch.OutOfMemoryError
    del keep, error


LARGE = {
    "product": lambda x: x @ x.t(),
    "added product": lambda x: torch.addmm(x[:1], x, x.t()),
    "batch of products": lambda x: x[None] @ x.t()[None],
    "broadcast": lambda x: x + x.t(),
    "copy": lambda x: x.expand(-1, len(x)).clone(),
    "indexed": lambda x: x.expand(-1, 1_000_000)[torch.zeros(len(x), dtype=torch.long, device="vgpu")],
    "range": lambda x: torch.arange(len(x) ** 2, device="vgpu"),
    "fine range": lambda x: torch.arange(0, 1, 1e-12, device="vgpu"),
    "identity": lambda x: torch.eye(len(x), device="vgpu"),
    "permutation": lambda x: torch.randperm(len(x) ** 2, device="vgpu"),
    "spaced": lambda x: torch.linspace(0, 1, len(x) ** 2, device="vgpu"),
}


@pytest.mark.parametrize("make", LARGE.values(), ids=LARGE)
def test_what_has_no_room_on_the_card_is_not_computed_on_the_host(gpu, make):
    x = torch.ones(1_000_000, 1, device="vgpu")  # results of terabytes: more than any host gives
    gpu.memory()  # frees what earlier tests left
    torch.vgpu.empty_cache()
    reserved = gpu.memory().reserved_bytes
    torch.empty(32 << 20, dtype=torch.uint8, device="vgpu")  # is cached
    before = torch.vgpu.memory_stats()
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        make(x)
    after = torch.vgpu.memory_stats()
    assert [after[name] - before[name] for name in ("num_ooms", "num_alloc_retries")] == [1, 1]
    assert before["reserved_bytes.all.current"] == reserved + (32 << 20)
    assert after["reserved_bytes.all.current"] <= reserved + (20 << 20)  # a segment may hold temporary memory


def test_the_sizes_of_ordinary_results_are_not_looked_up():
    def large(name, *sizes):
        return could_be_large(name, [torch.empty(size, device="meta") for size in sizes])

    assert not large("mm", (512, 1024), (1024, 1024))
    assert not large("addmm", (1024,), (512, 1024), (1024, 1024))
    assert not large("bmm", (4, 512, 1024), (4, 1024, 1024))
    assert large("bmm", (4, 1 << 14, 1), (4, 1, 1 << 14))
    assert not large("rms_norm", (5, 256), (256,), (5, 256))
    assert large("add", (1 << 15, 1), (1, 1 << 15))


TOO_LARGE_FOR_THE_HOST = """
import resource, torch, toolkit as tk
tk.device("virtual:h200")
resource.setrlimit(resource.RLIMIT_AS, (32 << 30, 32 << 30))
try:
    torch.empty(100 << 30, dtype=torch.uint8, device="vgpu")
except tk.ToolkitError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's memory so")
def test_a_host_without_the_memory_says_so():
    """Runs in a process with limited memory, because a large machine would grant the allocation."""
    done = subprocess.run([sys.executable, "-c", TOO_LARGE_FOR_THE_HOST], capture_output=True, text=True, timeout=120)
    assert "this machine has too little memory for its values" in done.stdout, done.stderr[-2000:]


def test_memory_functions(gpu):
    x = torch.ones(1000, device="vgpu")
    free, total = torch.vgpu.mem_get_info()
    assert total == gpu.spec.memory_bytes
    assert total - free == torch.vgpu.memory_reserved() == gpu.memory().reserved_bytes
    assert 4096 <= torch.vgpu.memory_allocated() == gpu.memory().allocated_bytes <= torch.vgpu.memory_reserved()
    assert torch.vgpu.memory_stats()["allocated_bytes.all.current"] == gpu.memory().allocated_bytes
    assert torch.accelerator.memory_allocated() == gpu.memory().allocated_bytes
    torch.vgpu.empty_cache()
    assert len(x) == 1000


def test_every_counter_of_torch_cuda_is_there(gpu):
    """The names are those of torch.cuda.memory_stats on an H200 with PyTorch 2.11."""
    stats = torch.vgpu.memory_stats()
    kinds, pools = ("allocated", "current", "freed", "peak"), ("all", "large_pool", "small_pool")
    names = ("active", "active_bytes", "allocated_bytes", "allocation", "inactive_split", "inactive_split_bytes",
             "requested_bytes", "reserved_bytes", "segment")  # fmt: skip
    want = {f"{name}.{pool}.{kind}" for name in names for pool in pools for kind in kinds}
    want |= {f"oversize_{what}.{kind}" for what in ("allocations", "segments") for kind in kinds}
    want |= {"max_split_size", "num_alloc_retries", "num_device_alloc", "num_device_free", "num_ooms", "num_sync_all_streams"}
    assert set(stats) == want
    assert list(stats) == sorted(stats)
    torch.vgpu.reset_accumulated_memory_stats()
    x = torch.ones(1000, device="vgpu")
    after = torch.vgpu.memory_stats()
    assert (after["allocation.all.allocated"], after["requested_bytes.small_pool.allocated"]) == (1, x.nbytes)
    assert "Allocated memory" in torch.vgpu.memory_summary(abbreviated=True)


def test_the_snapshot_has_every_segment_with_its_blocks(gpu):
    x = torch.ones(1000, device="vgpu")
    snapshot = torch.vgpu.memory_snapshot()
    assert sum(segment["total_size"] for segment in snapshot) == torch.vgpu.memory_reserved()
    assert sum(segment["allocated_size"] for segment in snapshot) == torch.vgpu.memory_allocated()
    for segment in snapshot:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
        assert {block["state"] for block in segment["blocks"]} <= {"inactive", "active_allocated"}
    assert any(block["requested_size"] == x.nbytes for segment in snapshot for block in segment["blocks"])


def test_a_process_may_be_held_to_a_share_of_the_card(gpu):
    total = gpu.memory().total_bytes
    try:
        torch.vgpu.set_per_process_memory_fraction(8 * GiB / total)
        assert torch.vgpu.get_per_process_memory_fraction() == pytest.approx(8 * GiB / total)
        with gpu.sizes_only(), pytest.raises(torch.OutOfMemoryError, match=r"is free\. 8\.00 GiB allowed; Of the allocated"):
            torch.empty(9 * GiB, dtype=torch.uint8, device="vgpu")
        with pytest.raises(ValueError, match="0~1"):
            torch.vgpu.set_per_process_memory_fraction(1.5)
    finally:
        machine().memory.limit_bytes = None
    assert torch.vgpu.get_per_process_memory_fraction() == 1.0


def test_a_listener_hears_of_segments_and_of_what_was_refused():
    memory, heard = Memory(30 << 20, "card"), []
    memory.listener = lambda *event: heard.append(event)
    block = memory.allocate(11 << 20)
    with pytest.raises(torch.OutOfMemoryError):
        memory.allocate(25 << 20)
    memory.free(block)
    memory.empty_cache()
    mebibyte = 1 << 20
    assert heard == [("segment_alloc", 12 * mebibyte, 0), ("oom", 25 * mebibyte, -1), ("segment_free", 12 * mebibyte, 0)]


SCRATCH = {
    "a sum over blocks": (lambda d: torch.ones(1_000_000, device=d), lambda x: x.sum(), [4, 492, 4]),
    "a sort": (lambda d: torch.ones(10_000, device=d), lambda x: x.sort(), [40_000, 80_000, 80_000, 131_071]),
    "positions": (lambda d: torch.ones(10_000, device=d), lambda x: x.nonzero(), [4, 21_503, 80_000, 1023]),
    "a running sum": (lambda d: torch.ones(100_000, device=d), lambda x: x.cumsum(0), [400_000, 1279]),
    "the largest few": (lambda d: torch.ones(1, 20_000, device=d), lambda x: x.topk(20),
                        [80, 160, 4, 8, 8, 10_240, 1024, 80, 80, 1279]),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRATCH)
def test_what_an_operation_takes_for_itself_is_allocated_and_given_back(gpu, name):
    """The sizes were recorded from the allocator of an H200."""
    make, run, sizes = SCRATCH[name]
    x = make("vgpu")
    before = gpu.memory().allocated_bytes
    with gpu.record(lines=False) as trace:
        out = run(x)
        held = gpu.memory().allocated_bytes - before
    alloc = trace.is_kind("alloc")
    assert trace["bytes"][alloc].tolist()[-len(sizes) :] == [-(-n // 512) * 512 for n in sizes]
    results = out if isinstance(out, tuple) else (out,)
    assert held == sum(-(-r.nbytes // 512) * 512 for r in results)


def test_allocations_are_recorded_with_their_lines(gpu):
    with gpu.record() as trace:
        x = torch.empty(100, device="vgpu")
        del x
    kinds = trace.to_pandas()["kind"].tolist()
    assert kinds == ["alloc", "free"]
    assert trace["bytes"].tolist() == [512, 512]
    assert trace.text("where")[0].startswith("tests/devices/test_virtual_memory.py:")


def test_cycles_hold_memory_until_collected(held):
    cycle = [torch.ones(1000, device="vgpu")]
    cycle.append(cycle)
    gc.disable()
    try:
        del cycle
        assert held() == 4096
    finally:
        gc.enable()
    gc.collect()
    assert held() == 0


SWITCH = """
from concurrent.futures import ThreadPoolExecutor
import pytest, torch, toolkit as tk
from toolkit.core.errors import DeviceError, UnknownNameError
assert not hasattr(torch, "vgpu")
with ThreadPoolExecutor(8) as pool:
    small, *others = pool.map(tk.device, ["virtual:8GiB"] * 8)
assert all(other is small for other in others) and small is tk.device("virtual:8GiB") and tk.device("vgpu") is small
assert small.memory().total_bytes == 8 << 30 and torch.vgpu.get_device_properties().total_memory == 8 << 30
x = torch.ones(1000, device="vgpu")
with pytest.raises(DeviceError, match="1 live tensor .4.00 KiB. is on virtual:8GiB") as error:
    tk.device("virtual:rtx-5090")
assert error.value.facts == {"tensors": 1, "bytes": 4096}
assert error.value.do == 'Delete it first (del x; gc.collect()), or stay with virtual:8GiB: device="virtual:8GiB"'
with pytest.raises(torch.OutOfMemoryError):
    torch.empty(9 << 30, dtype=torch.uint8, device="vgpu")
del x
card = tk.device("virtual:rtx-5090")
assert torch.vgpu.get_device_name() == card.spec.name
with pytest.raises(DeviceError, match="virtual:rtx-5090 was opened since"):
    small.sync()
for use in (small.memory, lambda: tk.budget("1 GiB", small), lambda: tk.load("demo/qwen3", device=small, progress=False)):
    with pytest.raises(DeviceError, match="virtual:rtx-5090 was opened since"):
        use()
assert card.memory().peak_bytes == 0
assert tk.device("vgpu:0") is card and tk.device("cpu:0").name == "cpu"
for wrong in ("vgpu:1", "cpu:x", "cpu:1", "cuda:x", "cuda:-1"):
    with pytest.raises(UnknownNameError, match=f"device '{wrong}'"):
        tk.device(wrong)
with pytest.raises(UnknownNameError, match="rtx-5090"):
    tk.device("virtual:rtx5090")
with pytest.raises(UnknownNameError):
    tk.device("virtual:")
"""


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_settings_of_the_environment_are_followed(gpu, monkeypatch, name):
    monkeypatch.setenv(name, "expandable_segments:True")
    assert Machine(gpu.spec).memory.settings == Settings(expandable_segments=True)
    monkeypatch.setenv(name, "expandable_segment:True")
    with pytest.warns(UserWarning, match="expandable_segments"):
        assert Machine(gpu.spec).memory.settings == Settings()


def test_one_card_at_a_time():
    subprocess.run([sys.executable, "-c", SWITCH], check=True, timeout=120)


FULL = {  # the code of the user's function, and the frames that PyTorch shows below it on CUDA
    "x.double() * 2": [], "x + x.view(-1, 1)": [], "torch.cat([x] * 20)": [], "torch.empty(2 << 24).to('vgpu')": [],
    "torch.ones(2 << 24, device='vgpu')": [], "torch.tensor(1.0, device='vgpu').repeat(2 << 24)": [],
    "nn.functional.relu(x.expand(4, -1))": ["relu"], "nn.Linear(1 << 13, 1 << 12, device='vgpu')": ["__init__"],
    "x.requires_grad_().exp().sum().backward()": ["backward", "backward", "_engine_run_backward"],
}  # fmt: skip


@pytest.mark.parametrize("code", FULL)
def test_the_traceback_of_an_error_for_lack_of_memory_ends_as_on_cuda(gpu, code):
    x = torch.ones(1 << 22, device="vgpu")
    gpu.limit(gpu.memory().reserved_bytes + (30 << 20))  # room for one more like x, wherever small tensors go
    try:
        with pytest.raises(torch.OutOfMemoryError) as error:
            eval(compile(code, "user.py", "eval"), {"torch": torch, "nn": torch.nn, "x": x})
    finally:
        gpu.limit(None)
    frames = traceback.extract_tb(error.value.__traceback__)
    at = [frame.filename for frame in frames].index("user.py")
    assert [frame.name for frame in frames[at + 1 :]] == FULL[code]
    assert error.value.__context__ is None
