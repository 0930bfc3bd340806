"""Tests of the shared layers: fused matrices, experts, embeddings, packed products, and the launches of a decode step."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import toolkit as tk
from toolkit.core.distributed import Shard
from toolkit.models import layers
from toolkit.models.cuts import evenly
from toolkit.models.layers import Embedding, Experts, GatedMLP, Joined, Linear, RMSNorm
from toolkit.models.places import initialize, set_scheme, spot, to_dtype
from toolkit.ops import Partial, matmul
from toolkit.ops.reference.attention import causal_attention
from toolkit.weights.fitting import quantize_minmax
from toolkit.weights.packed import PackedMatrix
from toolkit.weights.schemes import SCHEMES, Scheme

IN = 256
CPU = torch.device("cpu")
# One product of 256 terms in fp32 against the same in another order or blocking, for outputs of up to 7: a few units in the
# last place. Measured: 1.5e-6 at most.
LIBRARY = 4e-6


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(values: Tensor, scheme: Scheme | str) -> PackedMatrix:
    found = SCHEMES[scheme] if isinstance(scheme, str) else scheme
    matrix = PackedMatrix(found, tuple(values.shape))
    for name, part in quantize_minmax(values, found).items():
        setattr(matrix, name, nn.Parameter(part, requires_grad=False))
    return matrix


def hold(linear: Linear | Embedding, kind: str) -> None:
    """Store the weights of `linear` in a scheme or dtype."""
    values = linear.weight.detach()
    del linear.weight
    linear.weight = (
        packed(values, kind) if kind in SCHEMES else nn.Parameter(values.to(getattr(torch, kind)), requires_grad=False)
    )


def joined(kinds: dict[str, str], experts: int | None = None, bias: bool = False) -> Joined:
    """Return three matrices with odd numbers of rows; `kinds` maps each name to its scheme or dtype."""
    found = Joined(IN, {"q": 24, "k": 7, "v": 11}, bias, experts)
    initialize(found, CPU, 0)
    for name in found.sizes:
        part = found.get_submodule(name)
        if bias:
            part.bias.data.copy_(noise(*part.bias.shape))
        hold(part, kinds[name])
    return found.requires_grad_(False)


def values_of(found: Joined, name: str) -> Tensor:
    weight = spot_of(found, name).weight
    values = weight.dequantize() if isinstance(weight, PackedMatrix) else weight
    rows = spot_of(found, name).rows
    return values if rows is None else values[..., rows, :]


def spot_of(found: Joined, name: str):
    return spot(nn.ModuleDict({"m": found}), f"m.{name}.weight")


@pytest.mark.parametrize("experts", [None, 3], ids=["matrices", "stacks"])
@pytest.mark.parametrize("kind", [*SCHEMES, "float32", "bfloat16"])
def test_joined_weights_are_the_same_to_the_bit(kind: str, experts: int | None) -> None:
    """Weights are equal. Outputs may differ by rounding, since the BLAS library divides a taller matrix into other blocks."""
    apart, whole = (joined(dict.fromkeys("qkv", kind), experts) for _ in range(2))
    assert whole.join() == [("q", "k", "v")]
    for name in apart.sizes:
        assert float((values_of(apart, name) - values_of(whole, name)).abs().max()) == 0.0
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    x = noise(3, 5, IN).to(dtype) if experts else noise(1, 5, IN).to(dtype)
    chosen = torch.tensor([2, 0, 2]) if experts else None
    for a, b in zip(apart(x, chosen), whole(x, chosen), strict=True):
        assert a.shape == b.shape
        assert float((a - b).abs().max()) <= (LIBRARY if dtype == torch.float32 else 2.0**-6)


@pytest.mark.parametrize(
    ("kinds", "groups"),
    [
        (("q4_k", "q4_k", "q6_k"), (("q", "k"), ("v",))),
        (("q6_k", "q4_k", "q4_k"), (("q",), ("k", "v"))),
        (("q4_k", "q6_k", "q4_k"), (("q",), ("k",), ("v",))),
        (("int4-g32", "int4-g64", "float32"), (("q",), ("k",), ("v",))),
        (("float32", "float32", "bfloat16"), (("q", "k"), ("v",))),
    ],
    ids=["first two", "last two", "none: not neighbours", "none", "dtypes"],
)
def test_only_neighbours_held_alike_are_joined(kinds: tuple[str, ...], groups: tuple[tuple[str, ...], ...]) -> None:
    apart, whole = (joined(dict(zip("qkv", kinds, strict=True))) for _ in range(2))
    assert whole.join() == [group for group in groups if len(group) > 1]
    assert whole.groups == groups
    for name in apart.sizes:
        assert torch.equal(values_of(apart, name), values_of(whole, name))
    if "bfloat16" not in kinds:
        for a, b in zip(apart(noise(1, 3, IN)), whole(noise(1, 3, IN)), strict=True):
            assert float((a - b).abs().max()) <= LIBRARY


@pytest.mark.parametrize("kind", ["float32", "q4_k", "int8-g32"])
def test_biases_are_joined_too_and_come_apart_again(kind: str) -> None:
    found, x = joined(dict.fromkeys("qkv", kind), bias=True), noise(2, 3, IN)
    before, weights = found(x), [values_of(found, name) for name in found.sizes]
    biases = [found.get_submodule(name).bias.clone() for name in found.sizes]
    assert found.join() == [("q", "k", "v")]
    assert found.join() == [("q", "k", "v")]  # a second time changes nothing
    assert torch.equal(spot_of(found, "k").owner.bias[24:31], biases[1])
    for a, b in zip(before, found(x), strict=True):
        assert float((a - b).abs().max()) <= LIBRARY
    found.split()
    assert found.groups == (("q",), ("k",), ("v",))
    for name, weight, bias in zip(found.sizes, weights, biases, strict=True):
        assert torch.equal(values_of(found, name), weight)
        assert torch.equal(found.get_submodule(name).bias, bias)


def test_joining_on_meta_takes_no_memory_and_keeps_what_trains() -> None:
    with torch.device("meta"):
        found = Joined(IN, {"gate": 512, "up": 512})
    found.join()
    weight = spot_of(found, "up").weight
    assert weight.is_meta
    assert weight.requires_grad
    assert spot_of(found, "up").rows == slice(512, 1024)


def experts_of(count: int, kind: str = "float32", join: bool = False) -> Experts:
    found = Experts(count, IN, 64)
    initialize(found, CPU, 1, std=0.05)
    if kind != "float32":
        for linear in (found.gate_up.gate, found.gate_up.up, found.down):
            hold(linear, kind)
    if join:
        found.gate_up.join()
    return found.requires_grad_(False)


def one_by_one(found: Experts, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Return the sum over each token's experts, computed in plain loops."""

    def of(weight, e: int) -> Tensor:
        return (weight.dequantize() if isinstance(weight, PackedMatrix) else weight)[e]

    out = torch.zeros_like(x)
    for n, row in enumerate(chosen.tolist()):
        for k, e in enumerate(row):
            gate, up = (x[n] @ of(found.gate_up.get_submodule(name).weight, e).T for name in ("gate", "up"))
            out[n] += shares[n, k] * (F.silu(gate) * up @ of(found.down.weight, e).T)
    return out


@pytest.mark.parametrize("kind", ["float32", "int4-g32", "q4_0"])
@pytest.mark.parametrize(
    ("count", "k", "n"),
    [(8, 2, 1), (8, 2, 4), (8, 2, 5), (8, 2, 40), (1, 1, 1), (1, 1, 3), (4, 4, 1), (4, 4, 3), (40, 7, 5), (40, 7, 6)],
)
def test_experts_equal_plain_loops_on_both_sides_of_the_switch(count: int, k: int, n: int, kind: str) -> None:
    found, x = experts_of(count, kind), noise(n, IN)
    chosen = torch.stack([torch.randperm(count, generator=torch.Generator().manual_seed(i))[:k] for i in range(n)])
    shares = noise(n, k).softmax(-1)
    assert torch.allclose(found(x, chosen, shares), one_by_one(found, x, chosen, shares), atol=1e-5)


@pytest.mark.parametrize("n", [2, 50])
def test_experts_in_small_pieces_and_joined(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, shares = noise(n, IN), noise(n, 3).softmax(-1)
    chosen = torch.stack([torch.randperm(7, generator=torch.Generator().manual_seed(i))[:3] for i in range(n)])
    expected = experts_of(7, "q5_1")(x, chosen, shares)
    monkeypatch.setattr("toolkit.weights.packed.CHUNK_WEIGHTS", 2 * 128 * IN)
    monkeypatch.setattr("toolkit.models.layers.DENSE_VALUES", 3 * n * IN)
    assert torch.allclose(experts_of(7, "q5_1", join=True)(x, chosen, shares), expected, atol=1e-5)
    assert torch.allclose(experts_of(7, join=True)(x, chosen, shares), experts_of(7)(x, chosen, shares), atol=1e-5)


def test_experts_train() -> None:
    found = experts_of(4).requires_grad_(True)
    x, shares = noise(9, IN).requires_grad_(), noise(9, 2).softmax(-1).requires_grad_()
    chosen = torch.tensor([[0, 3], [1, 0], [3, 1]] * 3)
    found(x, chosen, shares).square().sum().backward()
    gradients = [x.grad, shares.grad, found.down.weight.grad]
    assert all(gradient is not None and bool(gradient.any()) for gradient in gradients)
    assert not found.down.weight.grad[2].any()  # nobody chose it


@pytest.mark.parametrize("kind", ["float32", "bfloat16", *SCHEMES])
def test_embedding_rows_and_the_table_on_the_host(kind: str) -> None:
    table = Embedding(31, IN, torch.bfloat16 if kind == "bfloat16" else torch.float32, scale=3.0)
    initialize(table, CPU, 0)
    hold(table, kind)
    ids = torch.tensor([[30, 0, 7], [7, 7, 1]])
    whole = table.weight.dequantize() if kind in SCHEMES else table.weight
    rows = table(ids)
    assert rows.shape == (2, 3, IN)
    assert torch.equal(rows, whole[ids] * 3.0)
    gpu = tk.device("virtual:h200")
    there = copy.deepcopy(table).to(gpu.torch)
    host = there.on_host()
    assert {p.device.type for p in host.parameters()} == {"cpu"}
    assert {p.device.type for p in there.parameters()} == {"vgpu"}
    assert torch.equal(host(ids), rows)
    assert torch.equal(there(ids.to(gpu.torch)).cpu(), rows)


def test_to_dtype_leaves_norms_packed_scales_and_what_says_so() -> None:
    class Kept(nn.Module):
        KEEPS_FP32 = ("decay",)

        def __init__(self) -> None:
            super().__init__()
            self.decay, self.gain = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
            self.norm, self.mlp = RMSNorm(IN, 1e-6), GatedMLP(IN, 64)

    model = Kept()
    initialize(model, CPU, 0)
    hold(model.mlp.down, "int4-g32")
    to_dtype(model, torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert dtypes.pop("mlp.down.weight.scales") == dtypes.pop("mlp.down.weight.zeros") == torch.float16
    assert dtypes.pop("mlp.down.weight.codes") == torch.uint8
    assert dtypes.pop("decay") == dtypes.pop("norm.weight") == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}


def test_norm_in_bfloat16_computes_in_fp32() -> None:
    norm, x = RMSNorm(IN, 1e-6), (noise(4, IN) * 100).bfloat16()
    norm.weight.data = 1 + noise(IN) * 0.1
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    out = norm(x)
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.double(), exact, rtol=2.0**-8, atol=0)  # a single rounding, at the end


@pytest.mark.parametrize("window", [None, 1, 2, 5, 12, 13, 100])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (6, 1)], ids=str)
def test_causal_attention_equals_one_that_is_written_out(heads: tuple[int, int], window: int | None) -> None:
    length, dim = 13, 10
    q, k, v = noise(2, length, heads[0], dim), noise(2, length, heads[1], dim, seed=1), noise(2, length, heads[1], dim, seed=2)
    each = heads[0] // heads[1]
    scores = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(each, 2)) * 0.3
    t, s = torch.arange(length)[:, None], torch.arange(length)
    hidden = (s > t) | (s <= t - (window or length))
    mixed = torch.einsum("bhts,bshd->bthd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v.repeat_interleave(each, 2))
    assert torch.allclose(causal_attention(q, k, v, 0.3, window), mixed.flatten(2), atol=1e-5)


def test_a_scheme_is_set_by_name_and_refused_where_rows_do_not_divide() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"mlp": GatedMLP(IN, 96), "experts": Experts(3, IN, 64)})
    set_scheme(model, "mlp.gate_up.up.weight", SCHEMES["q6_k"])
    set_scheme(model, "experts.down.weight", SCHEMES["int4-g64"])
    assert model["mlp"].gate_up.up.weight.parts()["scales"].shape == (96, IN // 16)
    assert model["experts"].down.weight.parts()["codes"].shape == (3, IN, 32)
    with pytest.raises(tk.ToolkitError, match="rows of 96 don't divide by 64"):
        set_scheme(model, "mlp.down.weight", SCHEMES["int4-g64"])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_packed_product_in_pieces(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, x = packed(noise(50, IN), scheme), noise(2, 3, IN)
    exact = x @ matrix.dequantize().T
    assert torch.allclose(matmul(x, matrix), exact, atol=LIBRARY * 4)
    monkeypatch.setattr("toolkit.weights.packed.CHUNK_WEIGHTS", 7 * IN)
    assert torch.allclose(matmul(x, matrix), exact, atol=LIBRARY * 4)
    assert matmul(x.bfloat16(), matrix).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", ["int4-g32", "int8-g32", "q4_k", "q5_1", "q6_k"])
def test_one_token_launches_kernels_only(scheme: str, dtype: torch.dtype) -> None:
    gpu = tk.device("virtual:h200")
    parts = nn.ModuleDict({"qkv": joined(dict.fromkeys("qkv", scheme), bias=True), "table": Embedding(40, IN, dtype)})
    initialize(parts["table"], CPU, 0)
    hold(parts["table"], scheme)
    parts["qkv"].join()
    if scheme in ("int4-g32", "int8-g32", "q5_1"):
        parts["experts"] = experts_of(6, scheme, join=True)
    parts.to(gpu.torch)
    ids, chosen = torch.tensor([[3]]).to(gpu.torch), torch.tensor([[4, 1]]).to(gpu.torch)
    shares = torch.tensor([[0.5, 0.5]]).to(gpu.torch)
    with tk.copy_budget(h2d=0, d2h=0, d2d=0, device=gpu), tk.record(gpu) as trace:
        x = parts["table"](ids)
        parts["qkv"](x)
        if "experts" in parts:
            parts["experts"](x[0], chosen, shares)
        matmul(x, parts["table"].weight)
    kinds = trace.to_pandas()["kind"].astype(str).value_counts().to_dict()
    assert set(kinds) <= {"launch", "kernel", "alloc", "free"} | {kind for kind, n in kinds.items() if n == 0}
    assert kinds["kernel"] <= 120


def test_a_large_head_multiplies_in_bounded_scratch() -> None:
    """The 6-bit head of Gemma 4 31B has 1.4 billion weights: 1.1 GB packed, and 5.6 GB if it were dequantized at once."""
    gpu = tk.device("virtual:h200")
    with gpu.sizes_only():
        head = PackedMatrix(SCHEMES["q6_k"], (262144, 5376), gpu.torch)
        x = torch.empty(1, 1, 5376, device=gpu.torch, dtype=torch.bfloat16)
        before = gpu.memory().allocated_bytes
        gpu.reset_peak()
        out = matmul(x, head)
        assert out.shape == (1, 1, 262144)
        assert gpu.memory().peak_bytes - before < 512 << 20


def test_prefill_of_experts_in_bounded_scratch() -> None:
    """31 tokens with 8 of 256 experts each select up to 248 matrices, which would take 3 GB in fp32."""
    gpu = tk.device("virtual:h200")
    with gpu.sizes_only():
        with torch.device("meta"):
            experts = Experts(256, 2048, 512)
        for name in ("gate_up.gate", "gate_up.up", "down"):
            set_scheme(experts, f"{name}.weight", SCHEMES["q4_k"])
        experts.gate_up.join()
        experts.to_empty(device=gpu.torch)
        for n in (31, 512):
            x, shares = torch.empty(n, 2048, device=gpu.torch, dtype=torch.bfloat16), torch.empty(n, 8, device=gpu.torch)
            chosen = torch.zeros(n, 8, dtype=torch.long, device=gpu.torch)
            before = gpu.memory().allocated_bytes
            gpu.reset_peak()
            experts(x, chosen, shares)
            assert gpu.memory().peak_bytes - before < 1 << 30


def test_packed_matrices_give_operations_one_list_until_a_part_is_replaced() -> None:
    found = joined(dict.fromkeys("qkv", "q4_k"))
    matrix = spot_of(found, "k").owner.weight
    held = matrix.operand()
    assert matrix.operand() is held
    assert [*map(id, held)] == [*map(id, matrix.parameters())]
    assert list(matrix.parts()) == [name for name, _ in matrix.named_parameters()] == list(matrix.scheme.parts())
    copied = copy.deepcopy(matrix)
    assert [*map(id, copied.operand())] == [*map(id, copied.parameters())]
    found.join()
    whole = spot_of(found, "k").owner.weight
    joined_parts = whole.operand()
    assert [*map(id, joined_parts)] == [*map(id, whole.parameters())]
    found.split()
    assert spot_of(found, "k").owner.weight.operand() is not held
    assert [part.data_ptr() for part in spot_of(found, "q").owner.weight.operand()] == [t.data_ptr() for t in joined_parts]
    for change in (
        lambda: matrix.load_state_dict({n: t.clone() for n, t in matrix.state_dict().items()}, assign=True),
        lambda: matrix.half(),
        lambda: matrix.to("meta"),
        lambda: matrix._parameters.update(codes=nn.Parameter(matrix.codes.clone(), requires_grad=False)),
    ):
        before = matrix.operand()
        change()
        assert matrix.operand() is not before
        assert [*map(id, matrix.operand())] == [*map(id, matrix.parameters())]


@pytest.mark.parametrize(("width", "shared", "sends"), [(1024, 1024, True), (1280, 1024, False), (1024, 1280, False)])
def test_all_ranks_agree_on_whether_experts_send_their_result(
    width: int, shared: int, sends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With unequal parts, the operation may fit on one rank only, and a rank that sends waits for ranks that send."""
    asked: list[int] = []

    def moe(x: Tensor, residual: Tensor, *given: object, ranks: int) -> tuple[Tensor | Partial, Tensor]:
        asked.append(ranks)
        return Partial(x, ranks, sent=True) if ranks > 1 else x, residual

    monkeypatch.setattr(layers.ops, "moe", moe)
    monkeypatch.setattr(layers.ops, "moe_fits", lambda *given: True)
    for rank in range(2):
        shard = Shard(rank, 2, block=256)
        with torch.device("meta"):
            experts = Experts(4, 512, evenly(width, shard, "width"))
            own = GatedMLP(512, evenly(shared, shard, "width"), partial=True)
            for each in (experts, own):
                each.gate_up.join()
            router, x, norm = nn.Parameter(torch.empty(5, 512)), torch.empty(1, 1, 512), RMSNorm(512, 1e-6)
        monkeypatch.setattr(layers, "packed_pair", lambda *given: True)
        found = experts.step(layers.Residual(x, x), norm, router, 2, own)
        assert found is not None
        assert isinstance(found.added, Partial)
        assert (found.added.ranks, found.added.sent) == (2, sends)
    assert asked == ([2, 2] if sends else [1, 1])
