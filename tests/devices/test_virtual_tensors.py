"""Tests that tensors on the virtual GPU behave like CUDA tensors, and have the CPU's values."""

from __future__ import annotations

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from functorch.compile import aot_function, nop
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only
from torch.utils.serialization import config

from toolkit.gpu.opening import open_device
from toolkit.gpu.virtual.tensor import VirtualTensor


@pytest.fixture(autouse=True)
def gpu():
    return open_device("virtual:h200")


def ones(*shape, **options):
    return torch.ones(*shape, device="vgpu", **options)


class TestShapes:
    """Operations that change shape or strides in place change the device tensor itself."""

    def test_out_of_a_factory(self):
        out = torch.empty(0, device="vgpu", dtype=torch.long)
        torch.arange(5, out=out)
        assert out.shape == (5,)
        assert out.tolist() == [0, 1, 2, 3, 4]

    @pytest.mark.parametrize(
        ("change", "shape"),
        [
            (lambda x: x.t_(), (3, 2)),
            (lambda x: x.transpose_(0, 1), (3, 2)),
            (lambda x: x.unsqueeze_(0), (1, 2, 3)),
            (lambda x: x.unsqueeze_(1).squeeze_(1), (2, 3)),
            (lambda x: x.resize_(7), (7,)),
            (lambda x: x.resize_as_(ones(5)), (5,)),
            (lambda x: x.as_strided_((2,), (4,)), (2,)),
            (lambda x: x.set_(ones(4)), (4,)),
            (lambda x: x.swapaxes_(0, 1), (3, 2)),
        ],
        ids=["t_", "transpose_", "unsqueeze_", "squeeze_", "resize_", "resize_as_", "as_strided_", "set_", "swapaxes_"],
    )
    def test_in_place(self, change, shape):
        x = ones(2, 3)
        change(x)
        assert x.shape == shape
        assert (x + 1).shape == shape

    def test_set_to_a_storage_shares_it(self):
        x, y = ones(2, 3), torch.zeros(4, device="vgpu")
        x.set_(y.untyped_storage(), 0, (2, 2), (2, 1))
        x[0, 1] = 3
        assert y.tolist() == [0, 3, 0, 0]

    def test_assigning_data(self):
        x = ones(2, 3)
        x.data = torch.zeros(4, device="vgpu")
        assert x.shape == (4,)
        assert (x + 1).tolist() == [1, 1, 1, 1]

    @pytest.mark.parametrize(("there", "back"), [("cpu", "vgpu"), ("vgpu", "cpu")])
    def test_assigning_data_of_the_other_device(self, there, back):
        parameter = nn.Parameter(torch.ones(3, device=there))
        parameter.data = parameter.data.to(back)
        (parameter * 2).sum().backward()
        assert isinstance(parameter, nn.Parameter)
        assert (parameter.device.type, parameter.grad.tolist()) == (back, [2, 2, 2])

    def test_a_copy_shares_the_storage(self):
        x = ones(3)
        copy.copy(x)[0] = 5
        assert x.tolist() == [5, 1, 1]

    def test_views_write_through(self):
        x = torch.zeros(4, 4, device="vgpu")
        x.as_strided((2,), (5,)).fill_(1)
        x[2].copy_(torch.arange(4.0))
        x.view(16)[15:].mul_(0).add_(7)
        assert x.tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 2, 3], [0, 0, 0, 7]]

    def test_odd_and_empty_shapes(self):
        x = ones(7, 0, 3)
        assert (x + 1).shape == (7, 0, 3)
        assert x.sum().item() == 0
        assert torch.cat([ones(0), ones(3)]).shape == (3,)


class TestModules:
    def test_half_reaches_the_host_tensor(self):
        layer = nn.Linear(3, 3).to("vgpu").half()
        assert isinstance(layer.weight, nn.Parameter)
        assert layer.weight.dtype == layer.weight._host.dtype == torch.float16
        assert layer(ones(2, 3).half()).dtype == torch.float16

    def test_there_and_back(self):
        layer = nn.Linear(3, 5)
        expected = layer(torch.ones(2, 3))
        on_gpu = copy.deepcopy(layer).to("vgpu")
        assert torch.equal(on_gpu(ones(2, 3)).cpu(), expected)
        assert type(on_gpu.cpu().weight) is nn.Parameter

    def test_parameters_stay_the_objects_they_were(self):
        layer = nn.Linear(3, 5)
        layer.weight.mine = "kept"
        parameters = list(layer.parameters())
        layer.to("vgpu")
        assert [a is b for a, b in zip(layer.parameters(), parameters, strict=True)] == [True, True]
        assert isinstance(layer.weight, nn.Parameter)
        assert layer.weight.device.type == "vgpu"
        layer.half().cpu()
        assert layer.weight is parameters[0]
        assert (type(layer.weight), layer.weight.dtype, layer.weight.mine) == (nn.Parameter, torch.float16, "kept")

    def test_shared_parameters_stay_shared_and_go_up_once(self):
        layers = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)])
        layers[1].weight = layers[0].weight
        with open_device("virtual:h200").record() as trace:
            layers.to("vgpu")
        assert layers[1].weight is layers[0].weight
        assert trace["bytes"][trace.is_kind("h2d")].tolist() == [36]

    def test_made_on_the_device(self):
        with torch.device("vgpu"):
            layer = nn.Linear(3, 3)
            assert torch.tensor([1]).device.type == "vgpu"
        assert layer.weight.device == torch.device("vgpu", 0)

    def test_deepcopy_is_a_parameter_and_no_alias(self):
        layer = nn.Linear(3, 3).to("vgpu")
        twin = copy.deepcopy(layer)
        twin.weight.data.zero_()
        assert isinstance(twin.weight, nn.Parameter)
        assert layer.weight.abs().sum().item() > 0

    def test_deepcopy_copies_no_gradients_of_parameters(self, gpu):
        layer = nn.Linear(3, 3, bias=False).to("vgpu")
        layer(ones(2, 3)).sum().backward()
        with gpu.record() as trace:
            twin = copy.deepcopy(layer)
        assert trace["bytes"][trace.is_kind("d2d")].tolist() == [36]
        assert twin.weight.grad is None

    def test_deepcopy_copies_a_shared_storage_once(self, gpu):
        x = torch.arange(12.0, device="vgpu").view(3, 4)
        x.note = ["mine"]
        with gpu.record() as trace:
            twins = copy.deepcopy({"all": x, "row": x[1], "turned": x.t()})
        assert trace["bytes"][trace.is_kind("d2d")].tolist() == [48]
        assert not trace.is_kind("kernel").any()
        twins["all"].fill_(5)
        assert twins["row"].tolist() == [5] * 4
        assert twins["turned"].stride() == (1, 4)
        assert twins["all"].note == x.note
        assert twins["all"].note is not x.note
        assert x[1].tolist() == [4, 5, 6, 7]

    def test_deepcopy_of_a_leaf_copies_its_gradient(self):
        x = ones(3).requires_grad_()
        x.sum().backward()
        twin = copy.deepcopy(x)
        assert twin.requires_grad
        assert twin.grad.tolist() == [1, 1, 1]
        assert twin.grad.data_ptr() != x.grad.data_ptr()

    @pytest.mark.parametrize("module", [nn.LSTM, nn.GRU])
    def test_recurrent(self, module):
        torch.manual_seed(0)
        layer, x = module(3, 4), torch.randn(5, 2, 3)
        results = []
        for device in ("cpu", "vgpu"):
            moved = copy.deepcopy(layer).to(device)
            out = moved(x.to(device))[0]
            out.square().sum().backward()
            results.append([out.detach().cpu(), *(p.grad.cpu() for p in moved.parameters())])
        for expected, found in zip(*results, strict=True):
            torch.testing.assert_close(found, expected)


class Labelled(torch.Tensor):
    pass


class Scaled(nn.Parameter):
    def __new__(cls, data, scale=1.0, requires_grad=True):
        self = torch.Tensor._make_subclass(cls, data, requires_grad)
        self.scale = scale
        return self


class TestSubclasses:
    @pytest.mark.parametrize("move", [True, False], ids=["moved", "made on the device"])
    @pytest.mark.parametrize(
        ("layer", "shape"),
        [
            (lambda **on: nn.LazyLinear(3, **on), (2, 5)),
            (lambda **on: nn.LazyConv2d(3, 3, **on), (1, 2, 8, 8)),
            (lambda **on: nn.LazyBatchNorm1d(**on), (2, 5)),
        ],
        ids=["linear", "convolution", "norm"],
    )
    def test_lazy_modules(self, layer, shape, move):
        made = layer().to("vgpu") if move else layer(device="vgpu")
        twin = pickle.loads(pickle.dumps(made))
        assert made(ones(shape)).shape[1] in (3, 5)
        assert [type(p) for p in made.parameters()] == [type(nn.Linear(1, 1).to("vgpu").weight)] * 2
        assert twin.to("vgpu")(ones(shape)).device.type == "vgpu"
        assert type(made.cpu().weight) is nn.Parameter
        assert made(torch.ones(shape)).device.type == "cpu"

    @pytest.mark.parametrize("data", [torch.ones(2, 2), ones], ids=["of the host", "of the device"])
    def test_the_class_of_a_parameter_makes_parameters(self, data):
        data = data if torch.is_tensor(data) else data(2, 2)
        weight = nn.Linear(2, 2).to("vgpu").weight
        made = type(weight)(data, requires_grad=False)
        assert isinstance(made, nn.Parameter)
        assert (made.device, made.requires_grad) == (data.device, False)
        assert type(weight).__name__ == "Parameter"
        assert repr(nn.Parameter(ones(1))) == "Parameter containing:\ntensor([1.], device='vgpu:0', requires_grad=True)"

    def test_offloading_by_accelerate(self):
        accelerate = pytest.importorskip("accelerate")
        layer = nn.Linear(4, 4)
        expected = layer(torch.ones(2, 4))
        assert torch.equal(accelerate.cpu_offload(layer, execution_device=torch.device("vgpu"))(torch.ones(2, 4)), expected)

    def test_a_subclass_of_parameter(self):
        layer = nn.Linear(2, 2)
        layer.weight = Scaled(torch.ones(2, 2), 4.0)
        for device in ("vgpu", "cpu"):
            weight = copy.deepcopy(layer.to(device).half()).weight
            assert isinstance(weight, Scaled)
            assert (layer.weight.scale, layer.weight.device.type) == (4.0, device)
        assert type(layer.weight) is Scaled
        assert isinstance(Scaled(ones(2), 3.0), nn.Parameter)
        assert Scaled(ones(2), 3.0).scale == 3.0

    @pytest.mark.parametrize(
        "make", [lambda: torch.ones(2).as_subclass(Labelled).to("vgpu"), lambda: ones(2).as_subclass(Labelled)]
    )
    def test_a_subclass_of_tensor(self, make):
        x = make()
        for made in (x, x + 1, torch.ones(()) * x, x[0], *x.split(1), copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
            assert isinstance(made, Labelled)
            assert isinstance(made, VirtualTensor)
        assert type(x.cpu()) is Labelled
        assert type(x.as_subclass(torch.Tensor)) is VirtualTensor
        source = ones(2, requires_grad=True)
        source.as_subclass(Labelled).sum().backward()
        assert source.grad.tolist() == [1, 1]

    def test_attributes_are_saved(self):
        x, weight = ones(2), nn.Parameter(ones(2))
        x.note, weight.note = "mine", "yours"
        assert [pickle.loads(pickle.dumps(one)).note for one in (x, weight)] == ["mine", "yours"]

    def test_a_subclass_that_dispatches_itself_is_refused(self):
        class Traced(torch.Tensor):
            @classmethod
            def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
                return func(*args, **(kwargs or {}))

        with pytest.raises(TypeError, match="the virtual GPU does not support Traced, a subclass of Tensor with"):
            ones(2).as_subclass(Traced)

    def test_a_class_that_wraps_tensors_handles_its_operations(self, gpu):
        def unwrapped(tree):
            return tree_map_only(Halved, lambda x: x.stored * 2, tree)

        class Halved(torch.Tensor):
            @staticmethod
            def __new__(cls, stored):
                return torch.Tensor._make_wrapper_subclass(cls, stored.shape, dtype=stored.dtype, device=stored.device)

            def __init__(self, stored):
                self.stored = stored

            @classmethod
            def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
                return func(*unwrapped(args), **unwrapped(kwargs or {}))

        weight = Halved(torch.arange(6.0).view(2, 3).to("vgpu"))
        with gpu.record() as trace:
            found = torch.cat((F.linear(ones(1, 3), weight), torch.mv(weight, ones(3))[None], (ones(3) * weight).sum(1)[None]))
        assert found.tolist() == [[6.0, 24.0]] * 3
        assert trace.is_kind("kernel").sum() == 11  # 3 times ones and "* 2"; 2 products, "*" and sum; cat


class TestFactories:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.tensor([1, 2], device="vgpu"),
            lambda: torch.as_tensor([1, 2], device="vgpu"),
            lambda: torch.as_tensor(np.array([1, 2]), device="vgpu"),
            lambda: torch.asarray([1, 2], device="vgpu"),
            lambda: ones(1).new_tensor([1, 2]),
            lambda: torch.from_numpy(np.array([1, 2])).to("vgpu"),
            lambda: torch.zeros(2).new_tensor([1, 2], device="vgpu"),
            lambda: torch.arange(1, 3, device="vgpu"),
            lambda: torch.empty_like(torch.zeros(2), device="vgpu").copy_(torch.tensor([1, 2])),
            lambda: torch.tensor([1, 2]).vgpu(),
        ],
        ids=[
            "tensor",
            "as_tensor",
            "of numpy",
            "asarray",
            "new_tensor",
            "from_numpy",
            "cpu.new_tensor",
            "arange",
            "like",
            "vgpu()",
        ],
    )
    def test_makes_a_device_tensor(self, make):
        x = make()
        assert type(x) is VirtualTensor
        assert x.is_vgpu
        assert x.tolist() == [1, 2]

    def test_seeded_draws_are_those_of_the_cpu(self):
        torch.manual_seed(3)
        expected = (torch.randn(5), torch.rand(3), torch.randperm(7))
        torch.manual_seed(3)
        found = (torch.randn(5, device="vgpu"), torch.rand(3, device="vgpu"), torch.randperm(7, device="vgpu"))
        assert all(torch.equal(a, b.cpu()) for a, b in zip(expected, found, strict=True))

    def test_generator(self):
        generator = torch.Generator(device="vgpu").manual_seed(3)
        first = torch.randn(3, device="vgpu", generator=generator)
        assert generator.device.type == "vgpu"
        assert torch.equal(first.cpu(), torch.randn(3, generator=torch.Generator().manual_seed(3)))
        assert isinstance(generator, torch.Generator)
        assert isinstance(torch.Generator(), torch.Generator)

    @pytest.mark.parametrize(
        "draw",
        [
            lambda g: torch.randn(3, device="vgpu", generator=g),
            lambda g: torch.randperm(3, device="vgpu", generator=g),
            lambda g: ones(3).multinomial(1, generator=g),
            lambda g: ones(3).normal_(generator=g),
        ],
        ids=["randn", "randperm", "multinomial", "normal_"],
    )
    def test_a_generator_of_the_host_is_refused(self, draw):
        with pytest.raises(RuntimeError, match="Expected a 'vgpu' device type for generator but found 'cpu'"):
            draw(torch.Generator())
        assert draw(torch.Generator("vgpu")).device.type == "vgpu"

    @pytest.mark.parametrize(
        "again", [copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g)), lambda g: g.clone_state()],
        ids=["deepcopy", "pickle", "clone_state"],
    )  # fmt: skip
    def test_a_copied_generator_stays_on_the_device(self, again):
        generator = torch.Generator("vgpu").manual_seed(3)
        torch.rand(2, device="vgpu", generator=generator)
        twin = again(generator)
        assert twin.device.type == "vgpu"
        first, second = (torch.rand(3, device="vgpu", generator=g) for g in (generator, twin))
        assert torch.equal(first, second)
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.Generator("vgpu:1")


class TestDevices:
    """Operands on several devices raise or work as on CUDA."""

    @pytest.mark.parametrize(
        "mix",
        [
            lambda x: x + torch.ones(3),
            lambda x: torch.ones(3) + x,
            lambda x: torch.ones(3).add_(x),
            lambda x: torch.cat([x, torch.ones(3)]),
            lambda x: torch.ones(3, 3) @ x,
            lambda x: F.embedding(torch.tensor([1]), x[:, None]),
            lambda x: torch.ones(4).index_select(0, x.long()),
            lambda x: torch.ones(4)[x.long()],
            lambda x: torch.where(x > 0, x, torch.zeros(3)),
            lambda x: x.index_select(0, torch.tensor(1)),
            lambda x: x.gather(0, torch.tensor(1)),
            lambda x: x.scatter(0, torch.tensor(1), 2.0),
            lambda x: F.cross_entropy(x, torch.tensor(1)),
            lambda x: x.__setitem__(ones(2).long(), torch.ones(2)),
            lambda x: x.__setitem__(x > 0, torch.ones(3)),
            lambda x: x.index_put((ones(2).long(),), torch.ones(2)),
        ],
        ids=[
            "add", "radd", "add_", "cat", "matmul", "embedding", "index_select", "index a host tensor", "where",
            "select 0d", "gather 0d", "scatter 0d", "target 0d", "values", "values of a mask", "index_put",
        ],
    )  # fmt: skip
    def test_raises(self, mix):
        with pytest.raises(RuntimeError, match=r"same device, but found at least two devices, vgpu:0 and cpu!"):
            mix(ones(3))

    def test_allowed(self):
        x, number = ones(3), torch.tensor(2.0)
        assert (x + number).tolist() == (number + x).tolist() == [3, 3, 3]
        assert x.masked_fill(x > 0, number).tolist() == [2, 2, 2]
        assert x[torch.tensor([0, 2])].tolist() == [1, 1]
        x[torch.tensor([1])] = torch.tensor([5.0])
        assert x.tolist() == [1, 5, 1]

    @pytest.mark.parametrize("ask", [lambda: torch.ones(3, device="vgpu:1"), lambda: torch.ones(3).to("vgpu:1")])
    def test_no_second_card(self, ask):
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            ask()

    def test_numpy_wants_the_cpu(self):
        with pytest.raises(TypeError, match=r"can't convert vgpu:0 device type tensor to numpy. Use Tensor.cpu\(\)"):
            ones(2).numpy()
        with pytest.raises(TypeError, match="can't convert vgpu:0"):
            np.array(ones(2))
        assert ones(2).numpy(force=True).tolist() == [1, 1]

    @pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
    def test_nested_is_refused(self, layout):
        with pytest.raises(RuntimeError, match="does not support nested tensors"):
            torch.nested.nested_tensor([ones(2), ones(3)], layout=layout).unbind()


class TestReading:
    def test_scalars(self):
        x = torch.arange(3, device="vgpu")
        assert (bool(x[1]), int(x[2]), float(x[1]), [5, 6, 7][x[2]], len(x), 1 in x) == (True, 2, 1.0, 7, 3, True)
        assert [int(y) for y in x] == [0, 1, 2]

    def test_printing(self):
        x = torch.tensor([1.0, 2.0], device="vgpu")
        assert repr(x) == "tensor([1., 2.], device='vgpu:0')"
        assert repr(x.requires_grad_()) == "tensor([1., 2.], device='vgpu:0', requires_grad=True)"
        assert "grad_fn=<MulBackward0>" in repr(x * 2)
        assert repr(nn.Parameter(x.detach())).startswith("Parameter containing:\ntensor([1., 2.], device='vgpu:0'")
        assert f"{x[1]:.3f} {x[0]}" == "2.000 1.0"

    def test_setitem_of_numbers(self):
        x = torch.zeros(2, 3, dtype=torch.long, device="vgpu")
        x[1, 2] = 7
        x[0] = True
        x[x == 7] = 9
        x[[1], [0]] = 4
        x[1, 1] = np.int64(0)
        assert x.tolist() == [[1, 1, 1], [4, 0, 9]]
        with torch.device("vgpu"), open_device("virtual:h200").record() as trace:
            x[0, 0] = 5
        assert trace["bytes"][trace.is_kind("h2d", "d2d")].tolist() == [8]

    def test_value_dependent_operations(self):
        x = torch.tensor([3, 0, 3, 1], device="vgpu")
        assert x.nonzero().tolist() == [[0], [2], [3]]
        assert x[x > 1].tolist() == [3, 3]
        assert torch.unique(x).tolist() == [0, 1, 3]
        assert x.repeat_interleave(x).tolist() == [3, 3, 3, 3, 3, 3, 1]
        assert torch.bincount(x).tolist() == [1, 1, 0, 2]
        assert torch.equal(x, x.clone())

    @pytest.mark.parametrize("function", ["zeta", "xlog1py", "hermite_polynomial_h", "shifted_chebyshev_polynomial_t"])
    def test_special_functions_of_a_number(self, gpu, function):
        x, function = torch.tensor([1.25, 2.0, 3.0]), getattr(torch.special, function)
        with gpu.record() as trace:
            found = function(x.to("vgpu"), 3), function(1.25, x.to("vgpu")), function(x.to("vgpu"), 3, out=ones(3))
        expected = function(x, 3), function(1.25, x), function(x, 3)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))
        assert trace.is_kind("kernel").sum() == 4  # and ones

    def test_types_the_cpu_lacks(self):
        assert torch.histc(torch.arange(10, device="vgpu"), 5).tolist() == [2, 2, 2, 2, 2]
        assert torch.median(torch.tensor([True, False, True], device="vgpu")).item() is True
        x = torch.randn(4, 4, device="vgpu")
        assert F.conv2d(x[None, None].half(), x[None, None, :2, :2].half()).dtype == torch.float16
        assert x.to(torch.float8_e4m3fn).float().shape == (4, 4)

    @pytest.mark.parametrize(
        ("product", "kernel"),
        [
            (lambda x: x @ x, "addmm_cuda"),
            (lambda x: F.linear(x, x), "addmm_cuda"),
            (lambda x: x[None] @ x[None], "baddbmm_cuda"),
            (lambda x: torch.einsum("ij,jk->ik", x, x), "addmm_cuda|baddbmm_cuda"),
            (lambda x: x @ x[0], "addmv_impl_cuda"),
            (lambda x: x[0] @ x[0], "dot"),
        ],
        ids=["mm", "linear", "bmm", "einsum", "mv", "dot"],
    )
    def test_products_of_integers_are_refused(self, product, kernel):
        for dtype, name in ((torch.int64, "Long"), (torch.uint8, "Byte"), (torch.bool, "Bool")):
            with pytest.raises(NotImplementedError, match=rf"\"({kernel})\" not implemented for '{name}'"):
                product(ones(3, 3, dtype=dtype))
        assert (ones(0, 3, dtype=torch.int64) @ ones(3, 2, dtype=torch.int64)).shape == (0, 2)

    @pytest.mark.parametrize("function", [F.gelu, lambda x: F.softmax(x, -1), lambda x: F.layer_norm(x, (3,))])
    def test_functions_of_numbers_with_fractions_refuse_integers(self, function):
        with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
            function(ones(2, 3, dtype=torch.int64))

    def test_histograms_without_a_kernel_on_cuda_are_refused(self):
        for make in (lambda x: torch.histogram(x, 3), lambda x: torch.histogramdd(x[:, None], [3])):
            with pytest.raises(NotImplementedError, match=r"Could not run 'aten::_?histogram"):
                make(ones(5))

    def test_complex(self):
        x = torch.view_as_complex(torch.tensor([[3.0, 4.0]], device="vgpu"))
        assert (x * x.conj()).real.tolist() == [25]
        assert torch.fft.fft(ones(4)).abs().tolist() == [4, 0, 0, 0]


class TestSaving:
    def test_torch_save_and_load(self):
        layer = nn.Linear(3, 3).to("vgpu")
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        for where, device in ((None, "vgpu"), ("cpu", "cpu"), ("vgpu", "vgpu")):
            file.seek(0)
            loaded = torch.load(file, map_location=where, weights_only=True)
            assert loaded["weight"].device.type == device
            assert torch.equal(loaded["weight"].cpu(), layer.weight.detach().cpu())

    def test_a_host_checkpoint_onto_the_device(self, gpu):
        file = io.BytesIO()
        torch.save({"a": torch.arange(300.0)}, file)
        file.seek(0)
        before = gpu.memory().allocated_bytes
        loaded = torch.load(file, map_location="vgpu")["a"]
        assert loaded.device.type == "vgpu"
        assert loaded[299].item() == 299
        assert gpu.memory().allocated_bytes - before >= 1200

    def test_whole_module(self):
        layer = nn.Linear(3, 3).to("vgpu")
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert isinstance(loaded.weight, nn.Parameter)
        assert loaded(ones(1, 3)).shape == (1, 3)

    def test_pickle(self):
        x = pickle.loads(pickle.dumps(ones(3).requires_grad_()))
        assert x.device.type == "vgpu"
        assert x.requires_grad

    def test_a_shared_storage_is_copied_once(self, gpu):
        x, file = torch.arange(12.0, device="vgpu").view(3, 4), io.BytesIO()
        with gpu.record() as trace:
            torch.save({"all": x, "row": x[1], "weight": nn.Parameter(x)}, file)
        assert trace["bytes"][trace.is_kind("d2h")].tolist() == [48]
        assert trace.is_kind("sync").sum() == 1
        file.seek(0)
        before = gpu.memory().allocated_bytes
        with gpu.record() as trace:
            loaded = torch.load(file, weights_only=True)
        assert trace["bytes"][trace.is_kind("h2d")].tolist() == [48]
        assert gpu.memory().allocated_bytes - before == 512
        loaded["all"].fill_(5)
        assert loaded["row"].tolist() == [5] * 4
        assert isinstance(loaded["weight"], nn.Parameter)

    def test_a_function_as_map_location(self):
        file = io.BytesIO()
        torch.save(ones(3), file)
        file.seek(0)
        assert torch.load(file, map_location=lambda storage, where: storage).device.type == "cpu"

    def test_formats_and_options_of_saving(self, gpu):
        for options in ({}, {"_use_new_zipfile_serialization": False}):
            file = io.BytesIO()
            with gpu.record() as trace:
                torch.save(ones(3), file, **options)
            assert trace["bytes"][trace.is_kind("d2h")].tolist() == [12]
            file.seek(0)
            assert torch.load(file).tolist() == [1, 1, 1]
        config.save.use_pinned_memory_for_d2h = True
        try:
            file = io.BytesIO()
            torch.save(ones(3), file)
        finally:
            config.save.use_pinned_memory_for_d2h = False
        file.seek(0)
        assert torch.load(file).device.type == "vgpu"
        assert pickle.loads(ForkingPickler.dumps(ones(3))).tolist() == [1, 1, 1]

    def test_safetensors(self, tmp_path):
        from safetensors.torch import load_file, save_file

        save_file({"a": ones(3), "b": torch.zeros(2, device="vgpu")}, tmp_path / "x.safetensors")
        assert load_file(tmp_path / "x.safetensors")["a"].tolist() == [1, 1, 1]

    def test_a_storage_on_the_device(self):
        storage = torch.UntypedStorage(8, device="vgpu")
        assert storage.device.type == "vgpu"
        assert torch.UntypedStorage(8).device.type == "cpu"


class TestDlpack:
    @pytest.mark.parametrize("module", [torch, torch.utils.dlpack])
    def test_pytorch_shares_the_memory(self, gpu, module):
        x = ones(3)
        with gpu.record() as trace:
            y = module.from_dlpack(x)
        y.add_(1)
        assert x.tolist() == [2, 2, 2]
        assert len(trace) == 0
        assert module.from_dlpack(x, copy=True).add_(1).tolist() == [3, 3, 3]
        assert module.from_dlpack(x, device="cpu").device.type == "cpu"
        assert x.tolist() == [2, 2, 2]
        assert module.from_dlpack(np.ones(2)).tolist() == [1, 1]

    @pytest.mark.parametrize("share", [np.from_dlpack, lambda x: torch.to_dlpack(x), lambda x: x.__dlpack__(stream=None)])
    def test_other_libraries_can_not_read_it(self, share):
        with pytest.raises(BufferError, match=r"only PyTorch can read the memory of the virtual GPU.*Use Tensor\.cpu\(\)"):
            share(ones(3))

    def test_what_dlpack_refuses(self):
        with pytest.raises(BufferError, match="require gradient"):
            torch.from_dlpack(ones(3, requires_grad=True))
        with pytest.raises(ValueError, match="without copying"):
            torch.from_dlpack(ones(3), device="cpu", copy=False)


class TestTransforms:
    def test_vmap(self):
        assert torch.vmap(lambda a: a * 2 + a.sum())(ones(3, 4)).tolist() == [[6.0] * 4] * 3

    def test_grad_and_jvp(self):
        assert torch.func.grad(lambda x: (x**2).sum())(ones(3)).tolist() == [2, 2, 2]
        assert torch.func.jvp(lambda x: x * 3, (ones(3),), (ones(3),))[1].tolist() == [3, 3, 3]

    @pytest.mark.parametrize(
        "options", [{}, {"mode": "reduce-overhead"}, {"backend": "eager"}, {"backend": "aot_eager"}], ids=str
    )
    def test_compile_is_refused(self, options):
        with pytest.raises(RuntimeError, match=r"torch\.compile is not supported on the virtual GPU"):
            torch.compile(nn.Linear(3, 3).to("vgpu"), **options)(ones(2, 3))

    def test_compile_runs_operation_by_operation_if_asked_to(self):
        layer = nn.Linear(3, 3).to("vgpu")
        with torch.compiler.set_stance("force_eager"):
            found = torch.compile(layer)(ones(2, 3))
        found.sum().backward()
        assert torch.equal(found.detach().cpu(), layer(ones(2, 3)).detach().cpu())
        assert layer.weight.grad.device.type == "vgpu"

    @pytest.mark.parametrize("fullgraph", [True, False])
    def test_the_cpu_still_compiles(self, fullgraph):
        torch._dynamo.reset()
        counter = CompileCounter()
        layer = nn.Linear(3, 3)
        program = torch.compile(lambda x: layer(x).sin().sum(), backend=counter, fullgraph=fullgraph)
        program(torch.ones(2, 3)).backward()
        assert torch.equal(program(torch.ones(2, 3)), layer(torch.ones(2, 3)).sin().sum())
        assert layer.weight.grad.shape == (3, 3)
        assert counter.frame_count == 1

    @pytest.mark.parametrize("above", [0, 2])
    @pytest.mark.parametrize("where", ["cpu", "vgpu"])
    def test_cond_runs_one_branch(self, gpu, above, where):
        x, one = ones(2, 5), torch.ones((), device=where)
        with gpu.record() as trace:
            y = torch.cond(one > above, lambda a: a + 1, lambda a: a - 1, (x,))
        assert y[0, 0].item() == (2 if above == 0 else 0)
        assert trace.is_kind("kernel").sum() == 1 + (where == "vgpu")
        assert trace.is_kind("d2h").sum() == (where == "vgpu")

    def test_cond_still_compiles_for_the_cpu(self):
        program = torch.compile(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), backend="eager", fullgraph=True)
        assert torch.equal(program(torch.ones(3)), torch.ones(3).sin())
        assert torch.equal(torch.cond(torch.tensor(False), torch.sin, torch.cos, (torch.ones(3),)), torch.ones(3).cos())

    def test_make_fx_records_operations_with_tensors_from_outside(self):
        layer, other = nn.Linear(3, 3).to("vgpu"), torch.arange(3.0).to("vgpu")

        def program(x):
            return layer(x).add_(other) * other

        assert torch.equal(make_fx(program)(ones(2, 3))(ones(2, 3) * 2), program(ones(2, 3) * 2))

    def test_linearize(self):
        value, derivative = torch.func.linearize(torch.sin, torch.arange(3.0).to("vgpu"))
        assert value.tolist() == torch.arange(3.0).sin().tolist()
        assert derivative(ones(3) * 2).tolist() == (torch.arange(3.0).cos() * 2).tolist()

    def test_aot_autograd(self, gpu):
        x = ones(2, requires_grad=True)
        traced = aot_function(lambda a: a * 2, nop)
        traced(x).sum().backward()
        assert x.grad.tolist() == [2, 2]
        with gpu.record() as trace:
            traced(x)
        assert trace.is_kind("kernel").sum() == 1

    @pytest.mark.parametrize("grad", [False, True])
    def test_views_in_inference_mode(self, grad):
        """A view of an ordinary tensor is one too; other results are inference tensors."""

        def run(device):
            x = torch.ones(4, 4, device=device, requires_grad=grad)
            with torch.inference_mode():
                found = [x.view(16), x.t(), *x.split(2), x[1], x.unsqueeze(0), (x + x).view(16), x.t().contiguous()]
                found[0].add_(1)
            return [(one.is_inference(), one.requires_grad, one._is_view()) for one in found], x.sum().item()

        assert run("vgpu") == run("cpu")

    def test_inference_mode(self):
        with torch.inference_mode():
            x = ones(2, 2)
            x[0, 0] = 3
            assert x.view(4).mul_(2).tolist() == [6, 2, 2, 2]
            assert F.scaled_dot_product_attention(*[ones(1, 1, 2, 2)] * 3).tolist() == [[[[1, 1], [1, 1]]]]
