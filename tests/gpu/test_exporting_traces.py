"""Pieces for CUDA GPUs that aren't there, as far as that goes without one: traced on fake tensors, their kernels chosen."""

import pytest

import toolkit as tk
from toolkit.exporting import compiling
from toolkit.exporting.pieces import Anatomy, compiled_for
from toolkit.ops.define import compiling_for
from toolkit.tune.cards import find_card

pytest.importorskip("triton")
CASES = {
    "qwen3": ("demo/qwen3", None, {"rms_norm", "int4_matmul", "qk_norm_rope", "attention_decode"}, {"int4_prefill"}),
    "qwen3, 4-bit cache": ("demo/qwen3", "int4", {"kv_encode", "attention_codes"}, {"kv_encode", "attention_prefill"}),
    "gemma4": ("demo/gemma4", None, {"rms_norm", "int4_matmul", "attention_decode"}, {"attention_prefill"}),
    "qwen3.5-moe": ("demo/qwen3.5-moe", None, {"delta_step", "moe_step"}, {"delta_chunks", "moe_prefill"}),
}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def case(request):
    name, kv, decode, prefill = request.param
    model = tk.load(name, device="cpu", scheme="int4", dtype="bfloat16", progress=False)
    return model, kv, {"decode": decode, "prefill": prefill}


def traced(model, kv, card, context=1024):
    """(piece, method) to its graph and key."""
    found, card = {}, find_card(card)
    with compiled_for(model, card):
        anatomy = Anatomy(model, context, kv)
        for piece in anatomy.distinct():
            for method in ("decode", "prefill") if piece.layer is not None else ("decode",):
                program = compiling.trace(anatomy.traceable(piece, method))
                found[piece.name, method] = program, compiling.key_of(program, card)
    return found


def test_operations_are_launches_by_the_tuners_configs(case):
    model, kv, wanted = case
    seen = {"decode": set(), "prefill": set()}
    with compiling_for(find_card("h200")):
        for (_, method), (program, _) in traced(model, kv, "h200").items():
            described = compiling._launches(program)
            calls = [n for n in program.graph.nodes if getattr(n.target, "namespace", "") == "toolkit"]
            assert len(described) == len(calls) > 0
            seen[method] |= {one.split()[0] for one in described}
    for method, names in wanted.items():
        assert names <= seen[method]


def test_another_context_is_the_same_code_and_another_gpu_is_not(case):
    model, kv, _ = case
    keys = [{name: key for name, (_, key) in traced(model, kv, *at).items()} for at in (("h200", 768), ("h200", 1024))]
    assert keys[0] == keys[1]
    other = {name: key for name, (_, key) in traced(model, kv, "rtx-4090").items()}
    assert not set(other.values()) & set(keys[0].values())


def test_no_size_that_may_vary_was_made_a_number(case):
    model, kv, _ = case
    for (name, method), (program, _) in traced(model, kv, "h200").items():
        varying = {str(symbol) for symbol in program.range_constraints}
        shapes = " ".join(str(node.meta["val"].shape) for node in program.graph.nodes if node.op == "placeholder")
        assert name == "head" or varying
        assert all(symbol in shapes for symbol in varying)
        assert method == "decode" or not shapes.startswith("torch.Size([1, 1,")
