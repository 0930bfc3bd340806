"""Tests of rules about copies and temporaries: what CUDA does inside operations, gradients, recurrent networks and optimizers.

The figures on an H200 that the rules rest on are those of `tests/programs/h200.json`. The tests here use other operands.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from toolkit.gpu.opening import open_device
from toolkit.gpu.virtual.torch_backend import recurrent


@pytest.fixture(autouse=True)
def gpu():
    return open_device("virtual:h200")


def copies(gpu, kind, work):
    """Return the bytes of the copies of a kind that `work` makes."""
    with gpu.record() as trace:
        work()
    return trace["bytes"][trace.is_kind(kind)].tolist()


def peak(work):
    """Return the peak of the allocated bytes above those before `work`."""
    base = torch.vgpu.memory_allocated()
    torch.vgpu.reset_peak_memory_stats()
    work()
    return torch.vgpu.max_memory_allocated() - base


PICKS = {
    "max": lambda x: x.max(1).values,
    "gather": lambda x: x.gather(1, torch.zeros_like(x).long()),
    "index_select": lambda x: x.index_select(0, torch.zeros(3, dtype=torch.int64, device="vgpu")),
    "index": lambda x: x[torch.zeros(3, dtype=torch.int64, device="vgpu")],
}


class TestGradients:
    def test_sums_of_gradients_need_no_memory_of_their_own(self):
        x = torch.ones(1024, device="vgpu", requires_grad=True)
        factors = torch.ones(3, 1024, device="vgpu")
        y = sum(x * factor for factor in factors).sum()
        assert peak(y.backward) == 2 * 4096 + 512  # the sum so far, a new gradient, and that of y

    def test_a_gradient_that_python_holds_is_not_overwritten(self):
        x = torch.ones(4, device="vgpu", requires_grad=True)
        seen = []
        a, b = x * 2, x * 3
        for y in (a, b):
            y.register_hook(seen.append)
        (a.sum() + b.sum()).backward()
        assert [g.tolist() for g in seen] == [[1.0] * 4] * 2
        assert x.grad.tolist() == [5.0] * 4

    def test_gradients_of_gradients_keep_their_operands(self):
        x = torch.tensor([1.0, 2.0], device="vgpu", requires_grad=True)
        (first,) = torch.autograd.grad((x**3).sum() + (x**2).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        assert first.tolist() == [5.0, 16.0]
        assert second.tolist() == [8.0, 14.0]

    @pytest.mark.parametrize("pick", PICKS, ids=PICKS)
    def test_gradients_of_picks_are_written_into_zeros(self, gpu, pick):
        x = torch.randn(4, 6, device="vgpu", requires_grad=True)
        y = PICKS[pick](x).sum()
        assert copies(gpu, "d2d", y.backward) == []

    def test_scatter_in_the_forward_pass_copies(self, gpu):
        index, source = torch.zeros(2, 3, dtype=torch.int64, device="vgpu"), torch.ones(2, 3, device="vgpu")
        assert copies(gpu, "d2d", lambda: torch.zeros(2, 3, device="vgpu").scatter_add(1, index, source)) == [24]

    def test_the_gradient_of_select_is_copied_into_zeros(self, gpu):
        x = torch.ones(3, 5, device="vgpu", requires_grad=True)
        y = x[1].exp().sum()
        assert copies(gpu, "d2d", y.backward) == [20]

    def test_linear_folds_its_operand_in_inference_mode_too(self, gpu):
        layer, x = nn.Linear(6, 4, device="vgpu"), torch.ones(3, 6, 5, device="vgpu").transpose(1, 2)
        with torch.no_grad(), gpu.record() as outside:
            layer(x)
        with torch.inference_mode(), gpu.record() as inside:
            layer(x)
        assert inside.is_kind("kernel").sum() == outside.is_kind("kernel").sum()

    def test_linear_adds_its_bias_in_place(self):
        layer, x = nn.Linear(64, 64, device="vgpu"), torch.ones(8, 4, 64, device="vgpu").transpose(0, 1)
        product = 4 * 8 * 4 * 64
        assert peak(lambda: layer(x)) == 2 * product  # the contiguous operand and the product

    @pytest.mark.parametrize("script", [torch.jit.ignore, torch.jit.script], ids=["python", "torchscript"])
    def test_a_product_that_is_used_again_keeps_its_memory(self, script):
        @script
        def twice(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            product = x.matmul(weight)
            return product + bias, product

        size = 4 * 8 * 4 * 64
        x, weight, bias = torch.ones(8, 4, 64, device="vgpu"), torch.ones(64, 64, device="vgpu"), torch.ones(64, device="vgpu")
        held, base = twice(x, weight, bias), torch.vgpu.memory_allocated()
        del held
        assert base - torch.vgpu.memory_allocated() == 2 * size
        assert peak(lambda: twice(x, weight, bias)) == 2 * size


class TestOptimizers:
    def test_temporaries_of_all_parameters_live_together(self):
        layers = nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(4)).to("vgpu")
        optimizer = torch.optim.Adam(layers.parameters())
        for p in layers.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert peak(optimizer.step) == 4 * 4 * 128 * 128  # the square roots of all second moments

    def test_norms_of_gradients(self):
        parameters = [nn.Parameter(torch.ones(n, device="vgpu")) for n in (10, 70000)]
        for p in parameters:
            p.grad = torch.ones_like(p)
        assert nn.utils.clip_grad_norm_(parameters, 1e9).item() == pytest.approx(70010**0.5)


class TestAutocast:
    def test_the_cast_of_a_weight_is_shared_inside_the_block(self, gpu):
        layer, x = nn.Linear(16, 16, bias=False, device="vgpu"), torch.ones(2, 16, device="vgpu")

        def twice():
            with torch.autocast("vgpu", dtype=torch.bfloat16):
                return layer(x) + layer(x)

        base = torch.vgpu.memory_allocated()
        with torch.autocast("vgpu", dtype=torch.bfloat16):
            layer(x)
            assert torch.vgpu.memory_allocated() - base >= 512
        assert torch.vgpu.memory_allocated() == base
        twice().sum().backward()
        assert layer.weight.grad.dtype == torch.float32
        assert layer.weight.grad.flatten().tolist() == [4.0] * 256

    def test_a_weight_that_changed_is_cast_again_in_the_next_block(self):
        layer, x = nn.Linear(4, 4, bias=False, device="vgpu"), torch.ones(1, 4, device="vgpu")
        results = []
        for value in (1.0, 2.0):
            with torch.no_grad():
                layer.weight.fill_(value)
            with torch.autocast("vgpu", dtype=torch.bfloat16):
                results.append(layer(x)[0, 0].item())
        assert results == [4.0, 8.0]

    @pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
    def test_a_use_without_gradients_takes_none_from_later_ones(self, without):
        """As in PPO: the first use in the block keeps the cast."""
        net, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)).to("vgpu"), torch.ones(2, 4, device="vgpu")
        with torch.autocast("vgpu", dtype=torch.bfloat16):
            with without():
                net(x)
            y = net(x)
        y.sum().backward()
        assert all(p.grad is not None for p in net.parameters())

    def test_sums_and_softmax_return_fp32(self):
        x = torch.ones(3, 4, device="vgpu", dtype=torch.bfloat16)
        with torch.autocast("vgpu", dtype=torch.bfloat16):
            assert x.sum().dtype == x.softmax(-1).dtype == x.cumsum(0).dtype == torch.float32
            assert x.sum(dtype=torch.bfloat16).dtype == torch.bfloat16


class TestAttention:
    @pytest.mark.parametrize("tokens", [8, 70])
    def test_temporaries_of_the_gradient_in_fp32(self, tokens):
        q, k, v = (torch.randn(1, 2, tokens, 16, device="vgpu", requires_grad=True) for _ in range(3))
        y = F.scaled_dot_product_attention(q, k, v)
        gradient = torch.ones(1, tokens, 2, 16, device="vgpu").transpose(1, 2)
        size, tiles = -(-4 * q.numel() // 512) * 512, -(-tokens // 64)
        partial = -(-2 * tiles * (4 * 64 * 64 + 16) // 512) * 512
        sums = -(-4 * 2 * tokens // 512) * 512
        assert peak(lambda: y.backward(gradient)) == 3 * size + partial + sums

    @pytest.mark.parametrize("dropout", [0.0, 0.4])
    def test_a_bias_has_a_gradient(self, dropout):
        torch.manual_seed(0)
        values = [torch.randn(2, 2, 5, 8) for _ in range(3)] + [torch.randn(2, 5, 5)]
        q, k, v, bias = leaves = [x.to("vgpu").requires_grad_() for x in values]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)
        y.sum().backward()
        if not dropout:
            again = [x.detach().cpu().requires_grad_() for x in leaves]
            weights = (again[0] @ again[1].mT / 8**0.5 + again[3]).softmax(-1)
            (weights @ again[2]).sum().backward()
            for here, there in zip(leaves, again, strict=True):
                torch.testing.assert_close(here.grad.cpu(), there.grad)
        assert bias.grad.shape == bias.shape

    def test_dropout_scales_what_it_keeps(self):
        torch.manual_seed(0)
        v = torch.ones(4, 4, 64, 8, device="vgpu", requires_grad=True)
        q = torch.zeros(4, 4, 64, 8, device="vgpu")
        y = F.scaled_dot_product_attention(q, q, v, dropout_p=0.5)
        y.sum().backward()
        assert y.mean().item() == pytest.approx(1.0, abs=0.02)
        assert v.grad.mean().item() == pytest.approx(y.mean().item(), abs=1e-3)  # the same entries were dropped

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_dropout_is_the_same_if_hooks_copy_what_is_saved(self, dtype):
        torch.manual_seed(0)
        q, v = torch.randn(2, 2, 2, 64, 16, device="vgpu", dtype=dtype)
        v.requires_grad_()
        with torch.autograd.graph.save_on_cpu():
            y = F.scaled_dot_product_attention(q, q, v, dropout_p=0.5)
        y.sum().backward()
        assert (v.grad * v).sum().item() == pytest.approx(y.sum().item(), rel=0.02)  # it is linear in v

    def test_all_is_dropped(self):
        q = torch.ones(1, 2, 8, 16, device="vgpu")
        assert F.scaled_dot_product_attention(q, q, q, dropout_p=1.0).abs().max().item() == 0

    def test_a_mask_by_columns_has_no_fused_kernel(self, gpu):
        q = torch.randn(1, 2, 8, 16, device="vgpu")
        mask = torch.zeros(8, 8, device="vgpu")
        with gpu.record() as fused:
            F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        with gpu.record() as parts:
            F.scaled_dot_product_attention(q, q, q, attn_mask=mask.t())
        assert fused.is_kind("kernel").sum() == 1 < parts.is_kind("kernel").sum()

    @pytest.mark.parametrize(
        ("backends", "options", "kernels"),
        [
            (SDPBackend.CUDNN_ATTENTION, {}, 1),
            (SDPBackend.FLASH_ATTENTION, {}, 1),
            (SDPBackend.EFFICIENT_ATTENTION, {"mask": True, "dtype": torch.float32}, 1),
            ([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], {}, 1),
            (SDPBackend.FLASH_ATTENTION, {"dtype": torch.float32}, "No available kernel"),
            (SDPBackend.FLASH_ATTENTION, {"mask": True}, "No available kernel"),
            (SDPBackend.CUDNN_ATTENTION, {"dtype": torch.float32}, "No available kernel"),
            (SDPBackend.CUDNN_ATTENTION, {"dropout_p": 0.1}, "No available kernel"),
            (SDPBackend.EFFICIENT_ATTENTION, {"dtype": torch.float32, "width": 6}, "No available kernel"),
            ([], {}, "No viable backend"),
        ],
    )
    def test_the_user_chooses_the_implementation(self, gpu, backends, options, kernels):
        options = dict(options)
        dtype, width = options.pop("dtype", torch.float16), options.pop("width", 16)
        q = torch.ones(1, 2, 8, width, device="vgpu", dtype=dtype)
        if options.pop("mask", False):
            options["attn_mask"] = torch.zeros(8, 8, device="vgpu", dtype=dtype)
        refused = pytest.raises(RuntimeError, match=kernels) if isinstance(kernels, str) else nullcontext()
        with gpu.record() as trace, sdpa_kernel(backends), refused:
            F.scaled_dot_product_attention(q, q, q, **options)
        assert isinstance(kernels, str) or trace.is_kind("kernel").sum() == kernels

    def test_the_order_of_implementations(self, gpu):
        q = torch.ones(1, 2, 8, 16, device="vgpu", dtype=torch.float16)
        with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True), gpu.record() as trace:
            F.scaled_dot_product_attention(q, q, q)
        assert trace.is_kind("kernel").sum() > 1


class TestFlexAttention:
    """Called without `torch.compile`, `flex_attention` runs in parts; `attention.flex_alibi` has a mask of blocks too."""

    @staticmethod
    def operands(heads=4):
        torch.manual_seed(0)
        query, key, value = torch.randn(2, heads, 24, 8), torch.randn(2, 2, 24, 8), torch.randn(2, 2, 24, 8)
        return [x.to("vgpu") for x in (query, key, value)]

    def test_grouped_heads_and_a_score_of_captured_tensors(self, gpu):
        operands, window = self.operands(), torch.tensor(5.0, device="vgpu")

        def soft_window(score, batch, head, q, k):
            return score - ((q - k).abs() / window) ** 2

        def work():
            return flex_attention(*operands, score_mod=soft_window, enable_gqa=True)

        q, k, v = (x.cpu() for x in operands)
        at = torch.arange(24)
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=-(((at[:, None] - at) / 5) ** 2))
        torch.testing.assert_close(work().cpu(), expected)
        assert copies(gpu, "d2h", work) == []
        assert peak(work) > 4 * 2 * 4 * 24 * 24  # the scores are in memory

    def test_autocast_and_sizes_only(self, gpu):
        operands = self.operands(heads=2)
        with torch.autocast("vgpu", dtype=torch.bfloat16):
            assert flex_attention(*operands).dtype == torch.bfloat16
        with gpu.sizes_only():
            absent = torch.randn(2, 2, 24, 8, device="vgpu")
            assert flex_attention(absent, absent, absent).shape == (2, 2, 24, 8)

    def test_gradients_and_compiling_are_refused(self):
        operands = self.operands(heads=2)
        operands[1].requires_grad_()
        with pytest.raises(RuntimeError, match="does not support gradients of flex_attention"):
            flex_attention(*operands)
        operands[1].requires_grad_(False)
        slope = torch.ones(2, device="vgpu", requires_grad=True)

        def captured(score, batch, head, q, k):
            return score * slope[head]

        with pytest.raises(RuntimeError, match="tensors that score_mod uses"):
            flex_attention(*operands, score_mod=captured)
        flex_attention(*operands, score_mod=lambda score, b, h, q, k: score * slope.detach()[h])
        operands[1].requires_grad_()
        with torch.no_grad():
            assert flex_attention(*operands).shape == (2, 2, 24, 8)
            assert flex_attention(*operands, score_mod=captured).shape == (2, 2, 24, 8)
            with pytest.raises(RuntimeError, match=r"torch\.compile is not supported on the virtual GPU"):
                torch.compile(flex_attention, backend="eager")(*operands)

    def test_other_devices_are_left_alone(self):
        operands = [torch.randn(1, 1, 4, 4) for _ in range(3)]
        with pytest.raises(NotImplementedError, match="backward on CPU"):
            flex_attention(operands[0].requires_grad_(), *operands[1:])


@pytest.mark.parametrize(
    ("work", "shape", "read_back", "moved", "most"),
    [
        (torch.linalg.svd, (10, 10), [4, 1], [1], 6656),
        (partial(torch.linalg.svd, full_matrices=False), (200, 30), [4] * 9 + [1], [120, 24000, 1], 3199488),
        (torch.linalg.qr, (200, 30), [], [], 3175424),
        (torch.linalg.eigh, (30, 30), [4, 1], [1], 370688),
    ],
)  # fmt: skip
def test_decompositions_copy_and_allocate_as_on_an_h200(gpu, work, shape, read_back, moved, most):
    a = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to("vgpu")
    assert copies(gpu, "d2h", lambda: work(a)) == read_back
    assert copies(gpu, "d2d", lambda: work(a)) == moved
    assert peak(lambda: work(a)) == most


def _module(kind, **options):
    torch.manual_seed(0)
    return getattr(nn, kind)(6, 10, **options)


# cuDNN's workspaces of a forward and a backward pass on an H200, for: module, steps, batch, input size, hidden size, options.
WORKSPACES = [
    (("LSTM", 10, 4, 32, 64, {}), (8715552, 8715552)),
    (("LSTM", 10, 4, 32, 192, {}), (9751840, 9266464)),
    (("LSTM", 1, 4, 32, 64, {"num_layers": 2}), (17049888, 17049888)),
    (("LSTM", 10, 4, 32, 64, {"num_layers": 2, "bidirectional": True}), (34493728, 34493728)),
    (("LSTM", 10, 4, 32, 64, {"num_layers": 2, "proj_size": 32}), (17004832, 17004832)),
    (("GRU", 10, 4, 128, 64, {}), (8778016, 8778016)),
    (("GRU", 10, 4, 128, 64, {"bidirectional": True}), (17414432, 17414432)),
    (("GRU", 10, 4, 32, 256, {}), (9468192, 9468192)),
    (("RNN", 10, 4, 32, 64, {}), (8562976, 8562976)),
    (("RNN", 10, 4, 32, 512, {}), (9881888, 9881888)),
]


class TestRecurrent:
    @pytest.fixture(autouse=True)
    def free_the_state_of_dropout(self):
        """The device keeps it, as CUDA does: later tests would find memory without an owner."""
        yield
        recurrent._Dropout.state = None

    def test_weights_are_packed_when_a_module_moves(self, gpu):
        module = _module("LSTM", num_layers=2)
        sizes = sorted(p.nbytes for p in module.parameters())
        assert sorted(copies(gpu, "d2d", lambda: module.to("vgpu"))) == sizes
        assert torch.vgpu.memory_allocated() >= sum(sizes)
        assert copies(gpu, "d2d", lambda: module(torch.ones(3, 2, 6, device="vgpu"))) == []

    @pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True, "bias": False}])
    @pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
    def test_values_and_gradients_equal_the_cpu(self, kind, options):
        results = []
        for device in ("cpu", "vgpu"):
            module = _module(kind, **options).to(device)
            x = torch.linspace(-1, 1, 4 * 3 * 6).view(4, 3, 6).to(device).requires_grad_()
            out, states = module(x)
            last = states[0] if kind == "LSTM" else states
            (out.sum() + last.square().sum()).backward()
            results.append([y.detach().cpu() for y in (out, last, x.grad, *(p.grad for p in module.parameters()))])
        for expected, found in zip(*results, strict=True):
            torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize(("network", "measured"), WORKSPACES, ids=lambda value: "-".join(map(str, value)))
    def test_workspaces_are_those_of_an_h200(self, gpu, monkeypatch, network, measured):
        kind, steps, batch, size, hidden, options = network
        module = getattr(nn, kind)(size, hidden, **options).to("vgpu")
        x, allocate, sizes = torch.ones(steps, batch, size, device="vgpu"), type(gpu.machine).allocate, []

        def note(machine, n_bytes, *args, **kwargs):
            sizes.append(n_bytes)
            return allocate(machine, n_bytes, *args, **kwargs)

        monkeypatch.setattr(type(gpu.machine), "allocate", note)
        module(x)[0].sum().backward()
        assert [n for n in sizes if n > 8 << 20] == [measured[0], measured[1], measured[1]]

    def test_weights_that_are_not_packed_are_copied_by_each_call(self, gpu):
        """Those without biases, and those in bfloat16."""
        for options in ({"bias": False}, {"dtype": torch.bfloat16}):
            module = _module("GRU", **options).to("vgpu")
            x = torch.ones(3, 2, 6, device="vgpu", dtype=module.weight_ih_l0.dtype)
            assert sorted(copies(gpu, "d2d", lambda: module(x))) == sorted(p.nbytes for p in module.parameters())  # noqa: B023

    @pytest.mark.parametrize(
        ("kind", "both", "states"),
        [
            ("RNN", False, [2, 1]), ("LSTM", False, [2, 2, 1, 1]), ("RNN", True, [1, 2, 3, 1, 2, 1, 4]),
            ("GRU", True, [1, 2, 3, 1, 6, 1, 2, 2, 1, 1, 1, 4]),
            ("LSTM", True, [1, 2, 3, 1, 3, 1, 1, 2, 2, 1, 2, 2, 1, 1, 1, 4]),
        ],
    )  # fmt: skip
    def test_packed_sequences_copy_states_as_an_h200(self, gpu, kind, both, states):
        """Measured for lengths of 10, 7, 7 and 2."""
        module = _module(kind, bidirectional=both).to("vgpu")
        packed = nn.utils.rnn.pack_padded_sequence(torch.ones(10, 4, 6, device="vgpu"), torch.tensor([10, 7, 7, 2]))
        assert copies(gpu, "d2d", lambda: module(packed)[0].data.sum().backward()) == [n * 10 * 4 for n in states]

    def test_packed_sequences_equal_the_cpu(self):
        results = []
        for device in ("cpu", "vgpu"):
            module = _module("GRU", bidirectional=True).to(device)
            x = torch.linspace(-1, 1, 5 * 3 * 6).view(5, 3, 6).to(device)
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3, 2]))
            out, last = module(packed)
            out.data.sum().backward()
            results.append([y.detach().cpu() for y in (out.data, last, *(p.grad for p in module.parameters()))])
        for expected, found in zip(*results, strict=True):
            torch.testing.assert_close(found, expected)

    def test_dropout_between_layers_draws_a_new_state_after_a_seed(self, gpu):
        module = _module("LSTM", num_layers=2, dropout=0.5).to("vgpu")
        x = torch.ones(3, 2, 6, device="vgpu")
        torch.manual_seed(1)
        assert copies(gpu, "d2h", lambda: module(x)) == [8]
        assert copies(gpu, "d2h", lambda: module(x)) == []
        module(x)[0].sum().backward()
        assert all(p.grad is not None for p in module.parameters())

    @pytest.mark.parametrize("dropout", [0.0, 0.5])
    def test_saved_tensors_may_be_copied(self, dropout):
        """PyTorch copies the reserve if the graph is kept, and hooks of saved tensors copy all."""
        module, x = _module("LSTM", num_layers=2, dropout=dropout).to("vgpu"), torch.ones(3, 2, 6, device="vgpu")
        out = module(x)[0]
        out.sum().backward(retain_graph=True)
        first = [p.grad.clone() for p in module.parameters()]
        module.zero_grad()
        out.sum().backward()
        for p, grad in zip(module.parameters(), first, strict=True):
            torch.testing.assert_close(p.grad, grad)
        with torch.autograd.graph.save_on_cpu():
            out = module(x)[0]
        out.sum().backward()

    def test_there_are_no_gradients_in_evaluation(self):
        """cuDNN keeps what they need in training only."""
        out = _module("GRU").to("vgpu").eval()(torch.ones(3, 2, 6, device="vgpu"))[0]
        with pytest.raises(RuntimeError, match="can only be called in training mode"):
            out.sum().backward()

    def test_autocast_runs_in_half_precision(self):
        module = _module("LSTM", bidirectional=True).to("vgpu")
        with torch.autocast("vgpu", dtype=torch.bfloat16):
            out, _ = module(torch.ones(3, 2, 6, device="vgpu"))
        assert out.dtype == torch.bfloat16
        out.sum().backward()
        assert all(p.grad.dtype == torch.float32 for p in module.parameters())

    def test_in_inference_mode_and_in_half_precision(self):
        module = _module("GRU").to("vgpu", torch.float16)
        with torch.inference_mode():
            out, _ = module(torch.ones(3, 2, 6, device="vgpu", dtype=torch.float16))
        assert out.shape == (3, 2, 10)

    def test_sizes_only(self, gpu):
        with gpu.sizes_only():
            module = nn.LSTM(6, 10, 2, dropout=0.1, device="vgpu")
            out, _ = module(torch.ones(3, 2, 6, device="vgpu"))
            out.sum().backward()
        assert module.weight_hh_l1.grad.shape == (40, 10)


class TestOperations:
    def test_complex_to_real_clones_its_operand(self, gpu):
        spectrum = torch.fft.rfft(torch.ones(3, 20, device="vgpu"))
        assert copies(gpu, "d2d", lambda: torch.fft.irfft(spectrum, n=20)) == [8 * 3 * 11]
        assert copies(gpu, "d2d", lambda: torch.fft.rfft(torch.ones(3, 20, device="vgpu"))) == []

    def test_the_absolute_value_of_complex_numbers_is_complex_first(self):
        x = torch.ones(1024, dtype=torch.complex64, device="vgpu")
        assert peak(x.abs) == 4 * 1024 + 8 * 1024

    def test_solving_for_a_vector_copies_it_twice(self, gpu):
        matrix = torch.eye(5, device="vgpu")
        assert copies(gpu, "d2d", lambda: torch.linalg.solve_ex(matrix, torch.ones(5, device="vgpu"))) == [20, 20]
        assert copies(gpu, "d2d", lambda: torch.linalg.solve_ex(matrix, torch.ones(5, 2, device="vgpu"))) == []

    def test_rows_of_an_embedding_are_scaled_after_their_indices_are_sorted(self, gpu):
        weight, indices = torch.ones(8, 4, device="vgpu"), torch.tensor([3, 1, 3], device="vgpu")
        assert copies(gpu, "d2d", lambda: F.embedding(indices, weight, max_norm=1.0)) == [24, 24, 24]
        assert copies(gpu, "d2h", lambda: F.embedding(indices, weight, max_norm=1.0)) == []
        assert weight.sum(1).tolist() == pytest.approx([4, 2, 4, 2, 4, 4, 4, 4], abs=1e-5)
        assert F.embedding(indices[0], weight, max_norm=1.0).shape == (4,)
        many = torch.zeros(1000, 6, dtype=torch.int64, device="vgpu")
        assert peak(lambda: torch.embedding_renorm_(weight, many, 1.0, 2.0)) == 2 * 48128 + 512 + 1024

    @pytest.mark.parametrize("determinant", [torch.linalg.det, torch.linalg.slogdet, torch.logdet])
    def test_determinants_copy_the_matrix(self, gpu, determinant):
        matrix = torch.eye(5, device="vgpu")
        assert copies(gpu, "d2d", lambda: determinant(matrix)) == [100]
        assert copies(gpu, "d2d", lambda: determinant(matrix.t())) == []

    def test_cholesky_solve_clones_both(self, gpu):
        factor = torch.linalg.cholesky_ex(torch.eye(5, device="vgpu"))[0]  # by columns
        assert copies(gpu, "d2d", lambda: torch.cholesky_solve(torch.ones(5, 1, device="vgpu"), factor)) == [20, 100]

    @pytest.mark.parametrize(("dtype", "read"), [(torch.bfloat16, []), (torch.float32, [12])])
    def test_grouped_products_read_their_offsets_only_without_a_fused_kernel(self, gpu, dtype, read):
        a, b = torch.ones(24, 16, device="vgpu", dtype=dtype), torch.ones(3, 16, 32, device="vgpu", dtype=dtype)
        offsets = torch.tensor([8, 16, 24], dtype=torch.int32, device="vgpu")
        assert copies(gpu, "d2h", lambda: F.grouped_mm(a, b, offs=offsets)) == read

    def test_composites_are_decomposed_in_inference_mode_too(self, gpu):
        x = torch.tensor([3, 1, 2], device="vgpu")
        with torch.inference_mode():
            assert x.argsort().tolist() == [1, 2, 0]
            assert copies(gpu, "d2h", lambda: x.repeat_interleave(2)) == []
            assert x.repeat_interleave(2).tolist() == [3, 3, 1, 1, 2, 2]

    def test_ctc_loss_equals_the_cpu(self, gpu):
        torch.manual_seed(0)
        scores, targets = torch.randn(12, 2, 5).log_softmax(-1), torch.randint(1, 5, (2, 4))
        lengths = torch.tensor([12, 10]), torch.tensor([4, 3])
        x = scores.to("vgpu").requires_grad_()
        loss = F.ctc_loss(x, targets.to("vgpu"), *lengths)
        assert loss.item() == pytest.approx(F.ctc_loss(scores, targets, *lengths).item())
        assert sorted(copies(gpu, "h2d", loss.backward)) == [16, 16, 16]
        with torch.inference_mode():
            assert F.ctc_loss(x, targets.to("vgpu"), *lengths).item() == pytest.approx(loss.item())

    def test_ctc_loss_without_values_needs_the_same_memory(self, gpu):
        def train():
            x = torch.zeros(12, 2, 5, device="vgpu", requires_grad=True)
            targets, lengths = torch.ones(2, 4, device="vgpu").long(), (torch.tensor([12, 10]), torch.tensor([4, 3]))
            F.ctc_loss(x.log_softmax(-1), targets, *lengths, zero_infinity=True).backward()
            assert x.grad.shape == x.shape

        expected = peak(train)
        with gpu.sizes_only():
            assert peak(train) == expected

    def test_batch_norm_in_evaluation_mode(self, gpu):
        flat, images = nn.BatchNorm1d(8).to("vgpu").eval(), nn.BatchNorm2d(8).to("vgpu").eval()
        assert copies(gpu, "d2d", lambda: flat(torch.ones(2, 8, device="vgpu"))) == [32]
        assert copies(gpu, "d2d", lambda: images(torch.ones(2, 8, 4, 4, device="vgpu"))) == []

    def test_fake_quantisation_by_channel_reads_the_bounds_of_its_zero_points(self, gpu):
        scale, zero = torch.ones(4, device="vgpu"), torch.zeros(4, dtype=torch.int32, device="vgpu")
        x = torch.ones(4, 3, device="vgpu")
        assert copies(gpu, "d2h", lambda: torch.fake_quantize_per_channel_affine(x, scale, zero, 0, -8, 7)) == [4, 4]
