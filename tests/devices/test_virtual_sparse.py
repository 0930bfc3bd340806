"""Tests of sparse tensors on the virtual GPU: their values are those of the CPU, their copies and memory those of CUDA."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torchgen
from torch import nn

from toolkit.gpu.opening import open_device
from toolkit.gpu.virtual.tensor import VirtualTensor
from toolkit.gpu.virtual.torch_backend.sparse import COMPOSED, OWN

INDICES = torch.tensor([[0, 1, 1, 4, 1, 5, 3, 1], [2, 0, 2, 4, 0, 5, 1, 2]])  # two pairs occur twice
VALUES = torch.linspace(0.1, 0.9, 8)
DENSE = torch.arange(24.0).view(6, 4).sin()


@pytest.fixture(autouse=True)
def gpu():
    return open_device("virtual:h200")


def coo(device):
    return torch.sparse_coo_tensor(INDICES.to(device), VALUES.clone().to(device), (6, 6))


def summed(device):
    return coo("cpu").coalesce().to(device)


def csr(device):
    return coo("cpu").coalesce().to_sparse_csr().to(device)


def strided(x):
    x = x.detach().cpu()
    return x if x.layout is torch.strided else x.to_dense()


def same(work):
    """Assert that `work` returns the same values on the CPU and on the virtual GPU, and return the latter."""
    expected, found = work("cpu"), work("vgpu")
    assert (found.is_vgpu, found.layout) == (True, expected.layout)
    torch.testing.assert_close(strided(found), strided(expected))
    return found


MAKING = {
    "parts": coo,
    "moved": summed,
    "rows": csr,
    "of a matrix": lambda d: F.relu(DENSE.to(d)).to_sparse(),
    "hybrid of a matrix": lambda d: F.relu(DENSE.to(d)).to_sparse(1),
    "rows of a matrix": lambda d: F.relu(DENSE.to(d)).to_sparse_csr(),
    "of zeros": lambda d: torch.zeros(3, 3, device=d).to_sparse(),
    "without a size": lambda d: torch.sparse_coo_tensor(INDICES.to(d), VALUES.to(d)),
    "checked": lambda d: torch.sparse_coo_tensor(INDICES.to(d), VALUES.to(d), (6, 6), check_invariants=True),
    "of lists": lambda d: torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 2), device=d),
    "rows of lists": lambda d: torch.sparse_csr_tensor([0, 1, 2], [0, 1], [1.0, 2.0], device=d),
    "empty": lambda d: torch.zeros(3, 3, layout=torch.sparse_coo, device=d),
    "to rows": lambda d: coo(d).to_sparse_csr(),
    "to columns": lambda d: coo(d).to_sparse_csc(),
    "from rows": lambda d: csr(d).to_sparse(),
    "to dense": lambda d: coo(d).to_dense(),
    "rows to dense": lambda d: csr(d).to_dense(),
    "double": lambda d: coo(d).double(),
    "rows in half": lambda d: csr(d).half(),
}

PRODUCTS = {
    "@": lambda d: coo(d) @ DENSE.to(d),
    "sparse.mm": lambda d: torch.sparse.mm(summed(d), DENSE.to(d)),
    "by columns": lambda d: coo(d) @ DENSE.t().contiguous().to(d).t(),
    "strided @ sparse": lambda d: DENSE.t().to(d) @ coo(d),
    "vector": lambda d: coo(d) @ DENSE[:, 0].to(d),
    "rows": lambda d: csr(d) @ DENSE.to(d),
    "rows, by columns": lambda d: csr(d) @ DENSE.t().contiguous().to(d).t(),
    "addmm": lambda d: torch.addmm(torch.ones(4, device=d), coo(d), DENSE.to(d), beta=2, alpha=3),
    "sparse.addmm": lambda d: torch.sparse.addmm(torch.ones(6, 4, device=d), coo(d), DENSE.to(d)),
    "addmm_": lambda d: torch.ones(6, 4, device=d).addmm_(coo(d), DENSE.to(d)),
    "addmm rows": lambda d: torch.addmm(torch.ones(6, 4, device=d), csr(d), DENSE.to(d), beta=2, alpha=3),
    "addmm_ rows": lambda d: torch.ones(6, 4, device=d).addmm_(csr(d), DENSE.to(d)),
}

ARITHMETIC = {
    "coalesce": lambda d: coo(d).coalesce(),
    "hybrid coalesce": lambda d: torch.sparse_coo_tensor(INDICES[:1].to(d), VALUES.expand(3, 8).t().to(d), (6, 3)).coalesce(),
    "coalesce in bf16": lambda d: coo(d).bfloat16().coalesce(),
    "add": lambda d: torch.add(coo(d), summed(d).t(), alpha=2),
    "add_": lambda d: coo(d).add_(coo(d)),
    "add_ until it is coalesced": lambda d: [x := coo(d), [x.add_(coo(d)) for _ in range(5)]][0],
    "to strided": lambda d: torch.ones(6, 6, device=d) + coo(d),
    "coalesced to strided": lambda d: torch.ones(6, 6, device=d) - summed(d),
    "to fp64": lambda d: torch.ones(6, 6, device=d, dtype=torch.float64) + coo(d),
    "strided add_": lambda d: torch.ones(6, 6, device=d).add_(coo(d), alpha=3),
    "by a number": lambda d: coo(d) * 3,
    "by a scalar": lambda d: coo(d) * torch.tensor(3.0, device=d),
    "rows by a number": lambda d: csr(d) * 3,
    "by strided": lambda d: coo(d) * DENSE[:, :1].to(d),
    "division": lambda d: coo(d) / 2,
    "power": lambda d: coo(d) ** 2,
    "cat": lambda d: torch.cat([coo(d), coo(d)], 1),
    "stack": lambda d: torch.stack([coo(d), summed(d)]),
    "transpose": lambda d: coo(d).transpose(0, 1),
    "sparse_mask": lambda d: torch.ones(6, 6, device=d).sparse_mask(summed(d)),
    "sum": lambda d: torch.sparse.sum(coo(d)),
    "sum of rows": lambda d: torch.sparse.sum(coo(d), 1),
    "norm": lambda d: coo(d).norm(),
    "square roots": lambda d: coo(d).sqrt(),
    "square roots of rows": lambda d: csr(d).sqrt(),
    "abs_ of rows": lambda d: csr(d).neg_().abs_(),
    "indices": lambda d: coo(d).coalesce().indices(),
    "values of rows": lambda d: csr(d).values(),
    "offsets of rows": lambda d: csr(d).crow_indices(),
}


@pytest.mark.parametrize("work", [*MAKING.values(), *PRODUCTS.values(), *ARITHMETIC.values()],
                         ids=[*MAKING, *PRODUCTS, *ARITHMETIC])  # fmt: skip
def test_values(work):
    same(work)


def test_the_parts_are_on_the_device(gpu):
    before = gpu.memory().allocated_bytes
    x = summed("vgpu")
    assert [type(part) for part in (x._indices(), x._values())] == [VirtualTensor] * 2
    assert gpu.memory().allocated_bytes - before == 2 * 512
    assert str(x).startswith("tensor(indices=tensor([[0, 1, 1, 3, 4, 5],")
    del x
    assert gpu.memory().allocated_bytes == before


def _sizes(trace, kind):
    return trace["bytes"][trace.is_kind(kind)].tolist()


def test_coalescing_reads_back_how_many_entries_are_distinct(gpu):
    x = coo("vgpu")
    with gpu.record() as trace:
        x.coalesce()
    assert (_sizes(trace, "h2d"), _sizes(trace, "d2h")) == ([], [4])
    assert _sizes(trace, "d2d") == [48, 48]  # the distinct positions become columns, then rows
    with gpu.record() as trace:
        x.coalesce().coalesce()
    assert _sizes(trace, "d2h") == [4]


def test_moving_copies_the_parts(gpu):
    x = coo("cpu")
    with gpu.record() as trace:
        back = x.to("vgpu").cpu()
    assert sorted(_sizes(trace, "h2d")) == sorted(_sizes(trace, "d2h")) == [32, 128]
    assert torch.equal(back.to_dense(), x.to_dense())


def test_a_product_of_coalesced_matrices_copies_nothing_else(gpu):
    x, y = summed("vgpu"), DENSE.to("vgpu")
    with gpu.record() as trace:
        x @ y
    assert [_sizes(trace, kind) for kind in ("h2d", "d2h", "d2d")] == [[], [], []]
    with pytest.raises(NotImplementedError, match="not implemented for"):
        x.half() @ y.half()


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.SparseAdam(p, 0.1),
        lambda p: torch.optim.Adagrad(p, 0.1),
    ],
    ids=["SGD", "SparseAdam", "Adagrad"],
)
@pytest.mark.parametrize("bag", [None, "sum", "mean"])
def test_sparse_gradients(optimizer, bag):
    def train(device):
        torch.manual_seed(0)
        module = nn.EmbeddingBag(20, 4, mode=bag, sparse=True) if bag else nn.Embedding(20, 4, sparse=True)
        module = module.to(device)
        steps = optimizer(list(module.parameters()))
        for _ in range(2):
            ids = torch.randint(0, 20, (2, 4)).to(device)
            steps.zero_grad()
            module(ids).square().sum().backward()
            assert module.weight.grad.is_sparse
            steps.step()
        return module.weight

    same(train)


def test_a_new_gradient_is_not_copied(gpu):
    module = nn.Embedding(20, 4, sparse=True).to("vgpu")
    loss = (module(torch.arange(4, device="vgpu")) * 2).sum()
    with gpu.record() as trace:
        loss.backward()
    assert _sizes(trace, "d2d") == []


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_know_their_indices(mode):
    """CUDA returns the bag of each index in every mode, which the gradient needs."""

    def run(device):
        module = nn.EmbeddingBag(20, 4, mode=mode, include_last_offset=True)
        nn.init.constant_(module.weight, 0.5)
        module = module.to(device)
        module(torch.tensor([3, 3, 7, 1], device=device), torch.tensor([0, 2, 2, 4], device=device)).square().sum().backward()
        return module.weight.grad

    same(run)
    out = torch._embedding_bag(torch.ones(20, 4, device="vgpu"), torch.arange(4).to("vgpu"), torch.tensor([0, 3]).to("vgpu"))
    assert out[1].tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("what", ["matrix", "features", "to_sparse", "sum"])
def test_gradients(what):
    def run(device):
        a, x = summed(device), DENSE.clone().to(device)
        if what == "to_sparse":
            leaf = x.requires_grad_()
            torch.sparse.mm(F.relu(leaf).to_sparse(), torch.ones(4, 2, device=device)).sum().backward()
        elif what == "sum":
            leaf = a.requires_grad_()
            torch.sparse.sum(leaf).backward()
        else:
            leaf = (a if what == "matrix" else x).requires_grad_()
            torch.sparse.mm(a, x).square().sum().backward()
        return leaf.grad

    same(run)


def test_saving():
    file = io.BytesIO()
    torch.save([summed("vgpu"), csr("vgpu")], file)
    file.seek(0)
    for loaded in torch.load(file, weights_only=True):
        assert loaded.is_vgpu
        assert torch.equal(loaded.cpu().to_dense(), summed("cpu").to_dense())


def test_a_sparse_buffer_moves_with_its_module():
    module = nn.Module()
    module.register_buffer("adjacency", summed("cpu"))
    assert module.to("vgpu").adjacency.is_vgpu


def test_sizes_only(gpu):
    with gpu.sizes_only():
        module = nn.Embedding(1000, 4, sparse=True, device="vgpu")
        module(torch.tensor([5, 7, 5], device="vgpu")).sum().backward()
        grad = module.weight.grad.coalesce()
        assert grad.indices().tolist() == [[5, 7]]
        assert (summed("cpu").to("vgpu") @ torch.ones(6, 3, device="vgpu")).shape == (6, 3)


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (lambda: coo("vgpu") * coo("vgpu"), "element by element"),
        (lambda: torch.sparse.mm(coo("vgpu"), coo("vgpu")), "_sparse_sparse_matmul"),
        (lambda: csr("vgpu") @ csr("vgpu"), "addmm"),
        (lambda: csr("vgpu") + csr("vgpu"), "add"),
        (lambda: csr("vgpu") @ DENSE[:, 0].to("vgpu"), "addmv|mv"),
        (lambda: torch.sparse.softmax(coo("vgpu"), 1), "softmax"),
        (lambda: coo("vgpu").index_select(0, torch.tensor([1], device="vgpu")), "index_select"),
        (lambda: csr("vgpu")[1], "select"),
        (lambda: coo("vgpu").sparse_mask(summed("vgpu")), "sparse_mask"),
        (lambda: torch.ones(4, 4, device="vgpu").to_sparse_bsr((2, 2)), "result is a sparse tensor"),
    ],
)
def test_other_operations_are_refused(work, reason):
    with pytest.raises(RuntimeError, match=f"the virtual GPU does not support .*({reason})"):
        work()


def test_operands_on_the_host_are_refused():
    with pytest.raises(RuntimeError, match="found at least two devices, vgpu:0 and cpu"):
        coo("cpu") @ DENSE.to("vgpu")
    with pytest.raises(RuntimeError, match="found at least two devices, vgpu:0 and cpu"):
        coo("vgpu") @ DENSE
    with pytest.raises(RuntimeError, match="found at least two devices, vgpu:0 and cpu"):
        DENSE[:, :1] + coo("vgpu")


@pytest.mark.parametrize("key", COMPOSED, ids=lambda key: key.name)
def test_composed_operations_have_one_function_for_the_cpu_and_cuda(key):
    """Otherwise PyTorch's function for the CPU would run here, and read memory that a device tensor doesn't have."""
    text = (Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml").read_text()
    checked = set()
    for entry in re.split(r"^- func: ", text, flags=re.MULTILINE)[1:]:
        full = entry[: entry.index("(")]
        name = full.partition(".")[0]
        for keys in re.findall(r"^    ([\w, ]+): \w+", entry, re.MULTILINE):
            keys = keys.split(", ")
            if key.name in keys and {name, name.removesuffix("_")} & COMPOSED[key]:
                assert full in OWN[key] or key.name.replace("CPU", "CUDA") in keys, full
                checked |= {name, name.removesuffix("_")}
    assert COMPOSED[key] <= checked
