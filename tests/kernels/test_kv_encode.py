"""Tests of encoding new keys and values into a cache: codes equal the reference, and no other slot is written."""

from __future__ import annotations

import pytest
import torch

from toolkit.core.errors import ModelError
from toolkit.kernels.base import Config
from toolkit.kernels.kv_codes import unpack_words
from toolkit.kernels.kv_encode import CACHES, KV_ENCODE, EncodeShape

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def run(shape, inputs):
    """Launch on caches filled with -7; return their contents by name and those of the reference."""
    inputs = {name: torch.full_like(t, -7) if name in CACHES else t for name, t in inputs.items()}
    wanted = dict(zip(CACHES, KV_ENCODE.reference(shape, inputs), strict=True))
    return dict(zip(CACHES, KV_ENCODE.run(shape, KV_ENCODE.space(shape)[0], inputs), strict=True)), wanted


def check(shape, inputs):
    found, wanted = run(shape, inputs)
    for name, bits in (("keys", shape.scheme.key_bits), ("values", shape.scheme.value_bits)):
        a, b = unpack_words(found[name], bits), unpack_words(wanted[name], bits)
        assert (a != b).float().mean() < 1e-3, "more than what stands on a border"
        scales = f"{name[:-1]}_scales"
        torch.testing.assert_close(found[scales], wanted[scales], rtol=1e-3, atol=0)
    return found


SHAPES = [
    EncodeShape(1, 2, 64, 20, codes="int4"),
    EncodeShape(19, 1, 128, 20, codes="k4v8"),
    EncodeShape(5, 1, 512, 20, codes="k4v8", dtype="float32"),
    EncodeShape(11, 2, 32, 7, ring=True),  # more tokens than slots
    EncodeShape(1, 1, 64, 7, ring=True, codes="k4v8"),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.key)
def test_codes_equal_the_reference(shape):
    check(shape, KV_ENCODE.inputs(shape, HERE, seed=1))


@pytest.mark.parametrize("start", [-3, 0, 17])
def test_positions_without_a_slot_are_not_written(start):
    shape = EncodeShape(6, 1, 64, 20, codes="k4v8")
    inputs = KV_ENCODE.inputs(shape, HERE)
    inputs["positions"] = torch.arange(start, start + 6, device=HERE, dtype=torch.int32)
    found = check(shape, inputs)
    kept = [slot for slot in range(20) if not start <= slot < start + 6]
    for name in CACHES:
        assert (found[name][:, :, kept] == -7).all()


def test_views_of_projections_zeros_and_large_values():
    shape = EncodeShape(4, 1, 64, 20, codes="int4")
    inputs = KV_ENCODE.inputs(shape, HERE)
    inputs["key"] = inputs["key"].transpose(1, 2).contiguous().transpose(1, 2)
    inputs["value"] = inputs["value"] * torch.tensor([0, 1e-3, 1, 1e3], device=HERE, dtype=torch.bfloat16)[:, None]
    found = check(shape, inputs)
    assert not found["value_scales"][:, :, 16].any()


def test_wrong_tensors_are_told_by_name():
    shape = EncodeShape(4, 1, 64, 20, codes="int4")
    inputs = KV_ENCODE.inputs(shape, HERE)
    config = Config(block_m=4)
    for name, wrong in (("key", inputs["key"].float()), ("value", inputs["value"].mT), ("keys", inputs["keys"].int())):
        with pytest.raises(ModelError, match=name):
            KV_ENCODE.run(shape, config, {**inputs, name: wrong})
    with pytest.raises(ModelError, match="head_dim is 32"):
        KV_ENCODE.run(EncodeShape(4, 1, 32, 20, codes="int4"), config, inputs)


@pytest.mark.parametrize("name", KV_ENCODE.known)
def test_launches_of_real_shapes_need_no_values(name):
    shape = KV_ENCODE.known[name]
    inputs = KV_ENCODE.inputs(shape, "meta")
    for config in KV_ENCODE.space(shape):
        assert KV_ENCODE.launches(shape, config, inputs, KV_ENCODE.outputs(shape, inputs))
    assert KV_ENCODE.cost(shape).bytes > 0
