"""The operations of decoding: small models run by kernels (on a GPU if there is one) against the references on the CPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import toolkit as tk
from toolkit.core.errors import ModelError
from toolkit.gpu.opening import open_device
from toolkit.kernels.attention import ATTENTION_DECODE, DecodeShape
from toolkit.kernels.attention_prefill import ATTENTION_PREFILL, PrefillShape
from toolkit.kernels.base import Config, Kernel, Shape
from toolkit.kernels.int4_matmul import INT4_MATMUL, MatmulShape
from toolkit.models import gemma4, qwen3, qwen3_5_moe
from toolkit.models.layers import Joined
from toolkit.ops import attention, codes, define, embedding, gates, mixers, mixture, norms, plans, products, sampling
from toolkit.tune import lookup
from toolkit.weights.packed import PackedMatrix
from toolkit.weights.schemes import find_scheme

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PARTS: tuple[ModuleType, ...] = (attention, codes, embedding, gates, mixers, mixture, norms, products, sampling)
SHARED = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
QWEN3 = SHARED | {"model_type": "qwen3", "attention_bias": True}
QWEN3_MOE = SHARED | EXPERTS | {"model_type": "qwen3_moe", "norm_topk_prob": True, "mlp_only_layers": [0]}
GEMMA4 = SHARED | {
    "model_type": "gemma4_text", "global_head_dim": 32, "sliding_window": 8, "attention_k_eq_v": True,
    "layer_types": ["sliding_attention", "full_attention"], "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0,
}  # fmt: skip
GEMMA4_SHARING = GEMMA4 | {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 64, "attention_k_eq_v": False,
}  # fmt: skip
QWEN3_5_MOE = SHARED | EXPERTS | {
    "model_type": "qwen3_5_moe_text", "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 32, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000, "partial_rotary_factor": 0.5},
}  # fmt: skip


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run operations by their kernels: on a GPU, or on the CPU in Triton's interpreter. Returns the names of those that ran."""
    ran: list[str] = []

    def run(name: str, *operands: Any) -> Any:
        ran.append(name)
        return define.by_kernels(name, *operands)

    def choose(kernel: Kernel, shape: Shape, device: object) -> SimpleNamespace:
        """Choose as the lookup does, except for products: many small programs take long in the interpreter."""
        wide = Config(block_k=32, rows=1, tokens=8, ahead=1, warps=4)
        return SimpleNamespace(config=wide if kernel.name == "int4_matmul" else kernel.space(shape)[0])

    monkeypatch.setattr(lookup, "choose", choose)
    monkeypatch.setattr(define, "GPUS", (DEVICE,))
    monkeypatch.setattr(plans, "ENABLED", False)  # a tape would not see operations that bypass `call`
    for part in PARTS:
        monkeypatch.setattr(part, "call", run)
    return ran


def small(architecture: Any, config: dict[str, Any], scheme: str | None, dtype: torch.dtype, device: str = "cpu") -> Any:
    """Return a model with random weights large enough to matter."""
    model = architecture.Model(architecture.Config.from_hf(config), open_device(device), dtype).init_weights(3)
    with torch.no_grad():
        for name, parameter in model.requires_grad_(False).named_parameters():
            if parameter.ndim > 1 and "conv" not in name:
                parameter.mul_(8)
        for module in list(model.modules()):
            if isinstance(module, Joined):
                module.join()
    # One token to compare on: by default, quantize runs both models on 32.
    return tk.quantize(model, scheme, progress=False, prompt=[1]) if scheme else model


def decoded(model: Any, ends: tuple[int, ...] = (9, 11, 12), kv: str | None = None, context: int = 16) -> Tensor:
    """Logits after tokens fed in chunks that end there, past the window of 8: [chunks, vocab]."""
    device = model.device.torch
    ids = torch.tensor([[7 * i % 61 for i in range(12)]], device=device)
    cache, found = model.new_cache(context, kv), []
    with torch.no_grad():
        for start, stop in pairwise((0, *ends)):
            positions = torch.arange(start, stop, device=device)
            hidden = model.advance(model.embed(ids[:, start:stop]), positions, cache, stop)
            found.append(model.logits(hidden[:, -1:]).flatten())
    return torch.stack(found).cpu()


@pytest.mark.parametrize(
    ("architecture", "config", "expected"),
    [
        (qwen3, QWEN3, set()),
        (gemma4, GEMMA4, {"make_heads", "embed_rows"}),
        (gemma4, GEMMA4_SHARING, {"make_heads", "embed_rows"}),
        (qwen3_5_moe, QWEN3_5_MOE, {"delta_net", "gate_heads", "choose_experts"}),
    ],
    ids=["qwen3", "gemma4", "gemma4 that shares", "qwen3.5"],
)
def test_plain_models_by_kernels(architecture: Any, config: dict[str, Any], expected: set[str], request: Any) -> None:
    wanted = decoded(small(architecture, config, None, torch.float32))
    ran = request.getfixturevalue("by_kernels")
    found = decoded(small(architecture, config, None, torch.float32, DEVICE))
    assert set(ran) == {"rms_norm", "write_heads", "attention"} | expected
    assert (found - wanted).abs().max() < 2e-5 * wanted.abs().max()


@pytest.mark.parametrize("config", [GEMMA4, GEMMA4_SHARING], ids=["gemma4", "gemma4 that shares"])
@pytest.mark.parametrize("ends", [(8,), (5, 7, 8)])
def test_a_window_that_holds_the_whole_context(config: dict[str, Any], ends: tuple[int, ...], request: Any) -> None:
    """The heads of a prompt are written to a ring by the kernel that makes them, as to other caches."""
    longer = decoded(small(gemma4, config, None, torch.float32), ends)
    wanted = decoded(small(gemma4, config, None, torch.float32), ends, context=8)
    assert (wanted - longer).abs().max() < 2e-5 * wanted.abs().max()
    ran = request.getfixturevalue("by_kernels")
    found = decoded(small(gemma4, config, None, torch.float32, DEVICE), ends, context=8)
    assert "write_heads" in ran
    assert ("make_heads" in ran) == (config is GEMMA4_SHARING)  # queries of layers that share keys
    assert (found - wanted).abs().max() < 2e-5 * wanted.abs().max()


@pytest.mark.parametrize(("kv", "most"), [("int8", 1e-3), ("k4v8", 5e-3), ("int4", 0.05)])
@pytest.mark.parametrize(
    ("architecture", "config"),
    [(qwen3, QWEN3 | {"head_dim": 64, "num_hidden_layers": 1}), (gemma4, GEMMA4_SHARING | {"global_head_dim": 64})],
    ids=["qwen3", "gemma4 that shares"],
)
def test_caches_in_codes_by_kernels(architecture: Any, config: dict[str, Any], kv: str, most: float, request: Any) -> None:
    """Products of codes are fp16's, of 10 bits. Of two scales that are as good for a vector either may be taken: half of its
    4-bit codes are others then, so one such value among ten is the distance, and one layer is coded.
    """
    wanted = decoded(small(architecture, config, None, torch.float32), (9, 10), kv)
    ran = request.getfixturevalue("by_kernels")
    found = decoded(small(architecture, config, None, torch.float32, DEVICE), (9, 10), kv)
    assert set(ran) >= {"make_heads", "write_codes", "attention_codes"}
    assert ((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max() < most


FILTERED = {"temperature": 0.9, "top_k": 20, "top_p": 0.9}


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9}, FILTERED], ids=["greedy", "drawn", "filtered"])
def test_tokens_chosen_by_kernels(sampling: dict[str, Any], request: Any) -> None:
    config = QWEN3 | {"num_hidden_layers": 1}
    options: dict[str, Any] = {"max_new_tokens": 6, "seed": 4, "eos": (), "record": False} | sampling
    wanted = tk.generate(small(qwen3, config, None, torch.float32), [5, 6, 7], "double-buffered", **options).tokens
    ran = request.getfixturevalue("by_kernels")
    model = small(qwen3, config, None, torch.float32, DEVICE)
    for strategy in ("double-buffered", "roundtrip"):
        ran.clear()
        assert tk.generate(model, [5, 6, 7], strategy, **options).tokens == wanted
        assert ran.count("sample") == 6


@pytest.mark.parametrize(
    ("architecture", "config", "dtype", "expected", "most"),
    [
        (qwen3, QWEN3_MOE, torch.bfloat16, {"moe", "experts"}, 0.08),
        (gemma4, GEMMA4, torch.bfloat16, set(), 0.08),
        (qwen3_5_moe, QWEN3_5_MOE, torch.float32, {"delta_net"}, 2e-4),
        (qwen3_5_moe, QWEN3_5_MOE, torch.bfloat16, {"delta_net", "moe", "experts"}, 0.08),
    ],
    ids=["qwen3 with experts in bf16", "gemma4 in bf16", "qwen3.5 in fp32", "qwen3.5 in bf16"],
)
def test_packed_models_by_kernels(
    architecture: Any, config: dict[str, Any], dtype: torch.dtype, expected: set[str], most: float, request: Any
) -> None:
    """In fp32 activations keep 16 bits. In bf16 they have 8: that, and bf16's own rounding of rows of 32, is the distance."""
    wanted = decoded(small(architecture, config, "int4-g32", dtype), (9, 10))
    model = small(architecture, config, "int4-g32", dtype, DEVICE)  # quantising runs it, too: not by the interpreter
    ran = request.getfixturevalue("by_kernels")
    found = decoded(model, (9, 10))
    assert set(ran) >= {"packed_matmul", *expected}
    assert ((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max() < most


@pytest.mark.parametrize(
    ("architecture", "config", "saved"),  # launches per step
    [(qwen3, QWEN3, 5), (gemma4, GEMMA4, 6), (qwen3_5_moe, QWEN3_5_MOE, 4)],
    ids=["qwen3", "gemma4", "qwen3.5 with experts"],
)
def test_operands_in_8_bits_change_nothing_but_the_launches(
    architecture: Any, config: dict[str, Any], saved: int, request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products after norms, attention and gates need no launch that quantizes. Experts normalize and quantize on their own, and
    heads of 16 numbers share a scale.
    """
    model = small(architecture, config, "int4-g32", torch.bfloat16, DEVICE)
    request.getfixturevalue("by_kernels")
    by_kernels, given = define.call, []

    def call(name: str, *operands: Any) -> Tensor:
        given.append(operands[4])
        return by_kernels(name, *operands)

    monkeypatch.setattr(products, "call", call)
    found = decoded(model, (1, 2))
    assert len(list(filter(None, given))) == 2 * saved
    for part in (norms, gates):
        monkeypatch.setattr(part, "quantizes", lambda x: False)
    monkeypatch.setattr(attention, "quantizes_heads", lambda query: False)
    assert torch.equal(decoded(model, (1, 2)), found)
    assert len(list(filter(None, given))) == 2 * saved


@pytest.mark.parametrize("scheme", ["q4_0", "int4-g32", "q4_1"])
def test_what_is_not_a_number_shows_behind_a_norm(scheme: str, request: Any) -> None:
    matrix = PackedMatrix(find_scheme(scheme), (8, 64), "cpu")
    for name, part in INT4_MATMUL.inputs(MatmulShape(8, 64, scheme=scheme), "cpu").items():
        if name != "x":
            matrix.get_parameter(name).data = part
    request.getfixturevalue("by_kernels")
    for wrong in (torch.inf, torch.nan):
        x = torch.ones(1, 64, dtype=torch.bfloat16)
        x[0, 3] = wrong
        found = products.matmul(norms.rms_norm(x.to(DEVICE), torch.ones(64, device=DEVICE), 1e-6, True), matrix.to(DEVICE))
        assert found.isnan().all()


def test_what_pytorch_asks_of_an_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schemas declare operands that are written or share memory; shapes on "meta" equal those of the results."""
    operands: dict[str, tuple[Any, ...]] = {}

    def run(name: str, *given: Any) -> Any:
        operands.setdefault(name, given)
        return getattr(torch.ops.toolkit, name)(*given)

    monkeypatch.setattr(define, "GPUS", ("cpu",))
    for part in PARTS:
        monkeypatch.setattr(part, "call", run)
    for architecture, config in ((qwen3_5_moe, QWEN3_5_MOE), (gemma4, GEMMA4)):
        model = small(architecture, config, "int4-g32", torch.bfloat16)
        decoded(model, (9, 10))
    decoded(small(qwen3, QWEN3 | {"head_dim": 64}, None, torch.bfloat16), (9, 10), "int4")
    tk.generate(model, [1, 2], max_new_tokens=2, temperature=0.9, eos=(), record=False)
    assert set(operands) == set(define.operations())
    for name, given in operands.items():
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(getattr(torch.ops.toolkit, name).default, given, test_utils=checks)


def test_what_there_is_to_tune_in_a_model() -> None:
    model = tk.load("random/qwen3.5-35b-a3b", device="virtual:h200", scheme="q4_k_m", progress=False)
    found = {(kernel.name, shape.key) for kernel, shape in model.kernel_shapes(context=3000)}
    names = {name for name, _ in found}
    assert names >= {"moe_step", "moe_prefill", "delta_step", "delta_chunks", "int4_matmul", "int4_prefill", "attention_decode"}
    attention = "heads=16 kv_heads=2 head_dim=256 slots=3000 window=0 dtype=bfloat16 scaled=True"
    assert ("attention_decode", f"{attention} key_dim=0 quantised=False") in found
    cpu = tk.load("demo/qwen3", device="cpu", progress=False)
    with pytest.raises(ModelError, match="where the operators run in plain PyTorch"):
        cpu.kernel_shapes()


def test_caches_of_any_length_run_one_program() -> None:
    """A prompt of another length makes another cache: nothing is to be compiled for it."""
    for kernel, shape in (
        (ATTENTION_DECODE, DecodeShape(8, 2, 64, 2000)),
        (ATTENTION_PREFILL, PrefillShape(8, 2, 64, 2000)),
    ):
        programs = []
        for slots in (2000, 2001, 2300):
            problem = replace(shape, slots=slots)
            inputs = kernel.inputs(problem, "meta")
            launches = kernel.launches(problem, kernel.space(problem)[0], inputs, kernel.outputs(problem, inputs))
            programs.append([(launch.function, launch.constants) for launch in launches])
        assert programs[0] == programs[1] == programs[2]


def test_products_of_half_precision_by_kernels(request: Any) -> None:
    wanted = decoded(small(qwen3, QWEN3, "int4-g32", torch.float16), (2, 3))
    model = small(qwen3, QWEN3, "int4-g32", torch.float16, DEVICE)
    ran = request.getfixturevalue("by_kernels")
    found = decoded(model, (2, 3))
    assert "packed_matmul" in ran
    assert (found - wanted).abs().max() < 0.02 * wanted.abs().max()


def test_routers_over_packed_experts_get_gradients() -> None:
    model = small(qwen3, QWEN3_MOE, "int4-g32", torch.bfloat16, "virtual:h200")
    routers = [module.router for module in model.modules() if hasattr(module, "router")]
    assert routers
    for router in routers:
        router.requires_grad_(True)
    model(torch.tensor([[1, 2, 3]], device=model.device.torch)).sum().backward()
    assert all(router.weight.grad is not None for router in routers)


def test_a_vector_in_the_middle_of_another_is_copied_first() -> None:
    whole = torch.arange(40.0)
    assert define.aligned(whole) is whole
    assert define.aligned(whole[4:]).data_ptr() == whole[4:].data_ptr()
    part = define.aligned(whole[3:9])
    assert part.storage_offset() == 0
    assert torch.equal(part, whole[3:9])


def test_several_sequences_are_refused_by_name() -> None:
    for architecture, config in ((qwen3, QWEN3), (gemma4, GEMMA4), (qwen3_5_moe, QWEN3_5_MOE)):
        model = small(architecture, config, None, torch.float32)
        ids = torch.ones(2, 3, dtype=torch.int64)
        with pytest.raises(ModelError, match="2 sequences at once"):
            model.advance(model.embed(ids), torch.arange(3), model.new_cache(8), 3)
