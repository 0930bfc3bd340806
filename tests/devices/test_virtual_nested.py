"""Tests of the fast path of nn.TransformerEncoder on the virtual GPU, which computes on nested tensors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from toolkit.gpu.opening import open_device
from toolkit.gpu.virtual.torch_backend.nested import Nested

LENGTHS = (5, 2, 4)
PADDING = torch.arange(5) >= torch.tensor(LENGTHS)[:, None]


@pytest.fixture(autouse=True)
def gpu():
    return open_device("virtual:h200")


def encoder(activation="gelu", heads=2, width=16):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, heads, 32, activation=activation, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval()


def encode(model, device, dtype=torch.float32):
    x = torch.arange(240.0).view(3, 5, 16).sin()
    with torch.no_grad():
        return copy.deepcopy(model).to(device, dtype)(x.to(device, dtype), src_key_padding_mask=PADDING.to(device)).cpu()


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_values_are_those_of_the_cpu(activation):
    model = encoder(activation)
    found = encode(model, "vgpu")
    torch.testing.assert_close(found, encode(model, "cpu"))
    assert found[PADDING].abs().max() == 0


def test_copies_and_memory(gpu):
    """Sizes are read back, and uploaded for each kernel that needs them: twice per attention."""
    model = encoder().to("vgpu")
    x, padding = torch.ones(3, 5, 16, device="vgpu"), PADDING.to("vgpu")
    before = gpu.memory().allocated_bytes
    with torch.no_grad(), gpu.record() as trace:
        out = model(x, src_key_padding_mask=padding)
    sizes = {kind: trace["bytes"][trace.is_kind(kind)].tolist() for kind in ("h2d", "d2h", "d2d")}
    assert sizes == {"h2d": [104, 16, 16, 16, 16, 40], "d2h": [1, 48], "d2d": []}
    assert gpu.memory().allocated_bytes - before == 1024
    del out


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("options", [{}, {"norm_first": True, "activation": "gelu"}], ids=str)
def test_a_layer_without_a_mask_runs_its_parts(gpu, options, context):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, **options).eval()
    x, moved = torch.randn(4, 128, 512), copy.deepcopy(layer).to("vgpu")
    on_device = x.to("vgpu")
    with context():
        torch.testing.assert_close(moved(on_device).cpu(), layer(x), atol=1e-5, rtol=1e-4)
        gpu.reset_peak()
        before = gpu.memory().allocated_bytes
        with gpu.record() as trace:
            moved(on_device)
    assert trace.is_kind("kernel").sum() == 9
    assert not trace.is_kind("d2d", "d2h", "h2d", "sync").any()
    # The hidden layer has 4 MiB, its input and its result 1 MiB each.
    assert gpu.memory().peak_bytes - before == 6 << 20


def test_attention_without_a_mask_runs_its_parts(gpu):
    torch.manual_seed(0)
    module, x = nn.MultiheadAttention(64, 4, batch_first=True).eval(), torch.randn(2, 10, 64)
    moved, on_device = copy.deepcopy(module).to("vgpu"), x.to("vgpu")
    with torch.no_grad():
        expected, weights = module(x, x, x)
        with gpu.record() as trace:
            found, none = moved(on_device, on_device, on_device, need_weights=False)
        assert none is None
        torch.testing.assert_close(found.cpu(), expected)
        torch.testing.assert_close(moved(on_device, on_device, on_device)[1].cpu(), weights)
    assert trace.is_kind("kernel").sum() == 3


def test_padding_without_a_size_pads_to_the_longest():
    mask = ~PADDING[:, :4]
    made = torch._nested_tensor_from_mask(torch.ones(3, 4, 8, device="vgpu"), mask[:, :4].to("vgpu"))
    assert (type(made), made.is_nested, made.lengths) == (Nested, True, [4, 2, 4])
    assert made.to_padded_tensor(0.0).sum((1, 2)).tolist() == [32, 16, 32]


def test_sizes_only(gpu):
    """The module turns its mask into numbers, which have no values then."""
    with gpu.sizes_only():
        model, padding = encoder().to("vgpu"), PADDING.to("vgpu")
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"sizes only: the lengths .*enable_nested_tensor=False"):
            model(torch.ones(3, 5, 16, device="vgpu"), src_key_padding_mask=padding)


@pytest.mark.parametrize(
    "work",
    [
        lambda: encode(encoder(), "vgpu", torch.float16),
        lambda: encode(encoder(heads=4), "vgpu"),
        lambda: torch._nested_tensor_from_mask(torch.ones(3, 5, 16, device="vgpu"), ~PADDING.to("vgpu")) + 1,
        lambda: torch.ones(1, device="vgpu") + torch._nested_tensor_from_mask(
            torch.ones(3, 5, 16, device="vgpu"), ~PADDING.to("vgpu")
        ),
    ],
    ids=["half precision", "heads of 4", "number", "strided"],
)  # fmt: skip
def test_the_rest_is_refused(work):
    with pytest.raises(RuntimeError, match="does not support nested tensors outside of the fast path"):
        work()
