"""Tests of training, attention, autocast and data loading on the virtual GPU, against the CPU's values."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import comm, replicate
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from toolkit.gpu.opening import open_device
from toolkit.gpu.virtual.torch_backend import pinned


@pytest.fixture(autouse=True)
def gpu():
    return open_device("virtual:h200")


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adamw fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "sgd momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_equals_the_cpu_bit_for_bit(optimizer):
    def train(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 16), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(16), nn.Linear(16, 5)).to(device)
        steps = OPTIMIZERS[optimizer](model.parameters())
        x, y = torch.randn(33, 7).to(device), torch.randint(5, (33,)).to(device)
        for _ in range(5):
            steps.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            steps.step()
        return [loss.item(), *(p.detach().cpu() for p in model.parameters())]

    expected, found = train("cpu"), train("vgpu")
    assert found[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1:], expected[1:], strict=True))


def test_an_optimizer_made_before_the_move_trains_what_was_moved():
    layer = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    before = layer.weight.tolist()[0]
    layer.to("vgpu")(torch.ones(1, 3, device="vgpu")).sum().backward()
    optimizer.step()
    assert layer.weight.tolist()[0] == pytest.approx([w - 0.5 for w in before])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    def grads(device, use):
        torch.manual_seed(0)
        layer, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).to(device), torch.randn(4, 8).to(device).requires_grad_()
        torch.manual_seed(1)
        (checkpoint(layer, x, use_reentrant=reentrant) if use else layer(x)).square().sum().backward()
        return x.grad.cpu()

    assert torch.equal(grads("vgpu", True), grads("cpu", False))


def test_accumulating_and_assigning_gradients():
    x = torch.ones(3, device="vgpu", requires_grad=True)
    x.register_hook(lambda g: g * 2)
    (x * 3).sum().backward()
    assert x.grad.tolist() == [6, 6, 6]
    x.grad = torch.ones(3, device="vgpu")
    (x * 3).sum().backward()
    assert x.grad.tolist() == [7, 7, 7]


@pytest.mark.parametrize("start", [lambda y, g: y.backward(g), lambda y, g: torch.autograd.grad(y, y, g)])
def test_a_gradient_on_another_device_is_refused(start):
    there, here = torch.ones(2, device="vgpu", requires_grad=True), torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="invalid gradient at index 0 - expected device vgpu:0 but got cpu"):
        start(there * 2, torch.ones(2))
    with pytest.raises(RuntimeError, match="invalid gradient at index 0 - expected device cpu but got vgpu:0"):
        start(here * 2, torch.ones(2, device="vgpu"))
    assert there.grad is here.grad is None


def test_a_gradient_without_dimensions_is_copied_to_the_device(gpu):
    x = torch.ones((), device="vgpu", requires_grad=True)
    with gpu.record() as trace:
        (x * 2).backward(torch.tensor(3.0))
    assert x.grad.device == x.device
    assert x.grad.item() == 6
    assert trace.is_kind("h2d").sum() == 1


def test_in_place_on_a_view_in_the_graph():
    x = torch.ones(4, device="vgpu", requires_grad=True)
    y = x * 1
    y[1:].mul_(3)
    y.sum().backward()
    assert x.grad.tolist() == [1, 3, 3, 3]


MASKS = {
    "plain": dict,
    "causal": lambda: {"is_causal": True},
    "additive": lambda: {"attn_mask": torch.randn(5, 5)},
    "boolean": lambda: {"attn_mask": torch.ones(5, 5, dtype=torch.bool).tril()},
    "batched": lambda: {"attn_mask": torch.randn(2, 1, 5, 5)},
    "scaled": lambda: {"scale": 0.3},
    "grouped": lambda: {"enable_gqa": True},
    "dropout 0 of 1 head": lambda: {"dropout_p": 0.0},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("mask", MASKS)
def test_attention_and_its_gradients(mask, dtype):
    results = []
    for device in ("cpu", "vgpu"):
        torch.manual_seed(0)
        options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in MASKS[mask]().items()}
        if "attn_mask" in options and options["attn_mask"].is_floating_point():
            options["attn_mask"] = options["attn_mask"].to(dtype)
        heads = 2 if mask == "grouped" else 4
        q, k, v = (torch.randn(2, h, 5, 8, dtype=dtype).to(device).requires_grad_() for h in (4, heads, heads))
        out = F.scaled_dot_product_attention(q, k, v, **options)
        out.square().sum().backward()
        results.append([t.detach().cpu() for t in (out, q.grad, k.grad, v.grad)])
    # The same kernels, except that grouped heads are repeated for the CPU's fused one (bf16) or run in parts (fp32).
    tolerance = (
        {"rtol": 0, "atol": 0} if mask != "grouped" else {"rtol": 1.6e-2, "atol": 1e-2 if dtype == torch.bfloat16 else 1e-5}
    )
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, **tolerance)


def test_attention_is_one_kernel(gpu):
    q = torch.randn(1, 2, 4, 8, device="vgpu")
    with gpu.record() as trace:
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert trace.is_kind("kernel").sum() == 1
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), gpu.record() as trace:
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert trace.is_kind("kernel").sum() > 5


def test_attention_with_dropout_has_gradients():
    q = torch.randn(1, 2, 4, 8, device="vgpu", requires_grad=True)
    F.scaled_dot_product_attention(q, q, q, dropout_p=0.5).sum().backward()
    assert q.grad.abs().sum().item() > 0


class TestAutocast:
    def test_types(self):
        layer, x = nn.Linear(3, 3).to("vgpu"), torch.ones(2, 3, device="vgpu")
        with torch.autocast("vgpu", dtype=torch.bfloat16):
            y = layer(x)
            assert (y.dtype, y.softmax(-1).dtype, (y + 1).dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
            with torch.autocast("vgpu", enabled=False):
                assert layer(x).dtype == torch.float32
        y.float().sum().backward()
        assert layer.weight.grad.dtype == torch.float32

    def test_scaler(self):
        layer = nn.Linear(3, 3).to("vgpu")
        before = layer.weight.detach().clone()
        optimizer, scaler = torch.optim.SGD(layer.parameters(), 0.1), torch.amp.GradScaler("vgpu", init_scale=128.0)
        with torch.autocast("vgpu", dtype=torch.float16):
            loss = layer(torch.ones(2, 3, device="vgpu")).float().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        torch.testing.assert_close(layer.weight.detach().cpu(), before.cpu() - 0.2)


class TestPinned:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.ones(4).pin_memory(),
            lambda: torch.empty(4, pin_memory=True),
            lambda: torch.zeros(2, 3, pin_memory=True),
            lambda: torch.tensor([1, 2], pin_memory=True),
            lambda: torch.zeros_like(torch.ones(4), pin_memory=True),
            lambda: torch.ones(8).pin_memory()[2:5],
            lambda: torch.ones(2).new_empty(3, pin_memory=True),
            lambda: torch.normal(0.0, 1.0, (3,), pin_memory=True),
            lambda: torch.fft.fftfreq(3, pin_memory=True),
            lambda: torch.sparse_coo_tensor([[0], [1]], [1.0], (2, 2), pin_memory=True),
        ],
        ids=["pin_memory()", "empty", "zeros", "tensor", "like", "view", "new_empty", "normal", "fftfreq", "sparse"],
    )
    def test_is_known(self, make):
        host = make()
        assert host.device.type == "cpu"
        assert host.is_pinned()
        assert not torch.ones(4).is_pinned()

    def test_every_factory_of_this_pytorch_can_pin(self):
        schemas = torch._C._jit_get_all_schemas()
        names = {s.name.removeprefix("aten::") for s in schemas if "pin_memory" in {a.name for a in s.arguments}}
        public = {name for name in names - {"to", "from_file"} if hasattr(torch, name) or hasattr(torch.Tensor, name)}
        known = {name for names in pinned._FACTORIES.values() for name in names}
        assert {name for name in public if not name.startswith("_")} <= known

    @pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "sparse_csc"])
    def test_the_parts_of_a_sparse_tensor(self, gpu, layout):
        sparse = torch.eye(3).to_sparse(layout=getattr(torch, layout))
        host = sparse.pin_memory()
        with gpu.record() as trace:
            moved = host.to("vgpu", non_blocking=True)
        assert (host.is_pinned(), sparse.is_pinned(), host.layout) == (True, False, sparse.layout)
        assert torch.equal(host.to_dense(), torch.eye(3))
        assert trace["pinned"][trace.is_kind("h2d")].all()
        assert not trace.is_kind("sync").any()
        with pytest.raises(RuntimeError, match="cannot pin a tensor on vgpu:0"):
            moved.pin_memory()

    def test_not_for_device_tensors(self):
        x = torch.ones(3, device="vgpu")
        assert not x.is_pinned()
        with pytest.raises(RuntimeError, match="cannot pin"):
            x.pin_memory()
        with pytest.raises(RuntimeError, match="can be pinned"):
            torch.empty(3, device="vgpu", pin_memory=True)

    def test_pinning_twice_is_no_copy(self):
        host = torch.ones(3).pin_memory()
        assert host.pin_memory() is host

    def test_indices_and_values_are_uploaded_from_it(self, gpu):
        x, index, value = torch.zeros(4, device="vgpu"), torch.tensor([1, 2]), torch.tensor(1.0)
        with gpu.record() as trace:
            x[index.pin_memory()] = value.pin_memory()
            x[index] = value
        assert trace["pinned"][trace.is_kind("h2d")].tolist() == [1, 1, 0, 0]
        assert trace.is_kind("sync").sum() == 4

    def test_non_blocking_to_the_host_gives_pinned_memory(self, gpu):
        x = torch.arange(6.0, device="vgpu").view(2, 3)
        with gpu.record() as trace:
            host = x.to("cpu", non_blocking=True)
        assert host.is_pinned()
        assert host.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert x.t().to("cpu", torch.float16, non_blocking=True).tolist() == [[0, 3], [1, 4], [2, 5]]
        assert trace["pinned"][trace.is_kind("d2h")].tolist() == [1]
        assert not trace.is_kind("sync").any()

    @pytest.mark.parametrize("workers", [0, 1])
    def test_data_loader(self, gpu, workers):
        data = TensorDataset(torch.arange(12.0).view(4, 3))
        with gpu.record() as trace:
            batches = [
                batch.to("vgpu", non_blocking=True) for (batch,) in DataLoader(data, 2, pin_memory=True, num_workers=workers)
            ]
        assert [b.sum().item() for b in batches] == [15, 51]
        assert trace["pinned"][trace.is_kind("h2d")].tolist() == [1, 1]
        assert not trace.is_kind("sync").any()

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
    def test_a_worker_of_a_data_loader_can_not_use_the_gpu_of_its_parent(self):
        data = [torch.ones(3)] * 4
        kwargs = {"num_workers": 2, "timeout": 60, "multiprocessing_context": "fork"}
        loader = DataLoader(data, collate_fn=lambda parts: torch.stack(parts).to("vgpu"), **kwargs)
        with pytest.raises(RuntimeError, match=r"Cannot re-initialize CUDA in forked subprocess.*use the 'spawn' start method"):
            list(loader)

    def test_scripted_factories_still_compile(self):
        @torch.jit.script
        def make(n: int):
            return torch.zeros(n)

        assert make(3).tolist() == [0, 0, 0]


class TestDataParallel:
    @pytest.mark.parametrize("where", ["cpu", "vgpu"])
    def test_the_module_runs_on_the_only_gpu(self, gpu, where):
        layer = nn.DataParallel(nn.Linear(2, 2).to("vgpu"), device_ids=[0])
        x = torch.ones(3, 2, device=where)
        with gpu.record() as trace:
            y = layer(x)
        y.sum().backward()
        assert y.device.type == "vgpu"
        assert trace["bytes"][trace.is_kind("h2d")].tolist() == [24] * (where == "cpu")
        assert not trace.is_kind("d2d").any()
        assert layer.module.weight.grad.tolist() == [[3, 3], [3, 3]]

    def test_a_replica_gives_its_gradient_to_the_module(self):
        layer = nn.Linear(2, 2).to("vgpu")
        (replica,) = replicate(layer, [0])
        replica(torch.ones(3, 2, device="vgpu")).sum().backward()
        assert layer.weight.grad.tolist() == [[3, 3], [3, 3]]

    def test_tensors_are_scattered_and_gathered(self):
        host, parts = torch.arange(3.0), [torch.ones(1, device="vgpu"), torch.zeros(2, device="vgpu")]
        assert [x.tolist() for x in comm.scatter(host, [0])] == [[0, 1, 2]]
        assert [x.tolist() for x in comm.scatter(host, out=parts)] == [[0], [1, 2]]
        assert comm.gather(parts, destination=0).tolist() == [0, 1, 2]
        assert comm.gather(parts, destination="cpu").device.type == "cpu"
        assert [x.tolist() for x in comm.broadcast(parts[0], out=[torch.ones(1, device="vgpu")])] == [[0]]
        assert comm.broadcast(parts[0], [0])[0] is parts[0]
        assert comm.broadcast(host, [0])[0].device.type == "vgpu"

    @pytest.mark.parametrize(
        "work", [lambda x: comm.broadcast(x, [0, 1]), lambda x: comm.scatter(x, [1]), lambda x: comm.gather([x], destination=1)]
    )
    def test_there_is_one_gpu(self, work):
        with pytest.raises(RuntimeError, match="the only virtual GPU is vgpu:0"):
            work(torch.ones(4, device="vgpu"))


AFTER_A_CPU_PASS = """
import torch
w = torch.ones(3, requires_grad=True)
(w * 2).sum().backward()  # autograd starts its threads here, and the virtual GPU isn't among the devices yet
import toolkit as tk
tk.device("virtual:h200")
v = torch.ones(3, device="vgpu", requires_grad=True)
(v * 3).sum().backward()
assert v.grad.tolist() == [3, 3, 3]
assert torch.autograd.grad((v * w.to("vgpu")).sum(), w)[0].tolist() == [1, 1, 1]
"""


def test_a_process_may_train_on_the_cpu_before_it_opens_a_card():
    done = subprocess.run([sys.executable, "-c", AFTER_A_CPU_PASS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


WITHOUT_GRADIENTS = """
import torch
import toolkit as tk
with torch.{block}():
    tk.device("virtual:h200")

class Large(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        return gradient.new_empty(1 << 50)

try:
    Large.apply(torch.ones(3, device="vgpu", requires_grad=True)).sum().backward()
except torch.OutOfMemoryError:
    print("out of memory")
"""


@pytest.mark.parametrize("block", ["no_grad", "inference_mode"])
def test_a_card_opened_in_a_block_without_gradients_reports_errors_of_backward_passes(block):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_GRADIENTS.format(block=block)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "out of memory\n", done.stderr[-2000:]
