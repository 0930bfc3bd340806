"""Every strategy with every architecture: equal tokens, and exactly the copies in the table of the strategies."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
from functools import cache
from typing import Any

import pytest
import torch

import toolkit as tk
from toolkit.core.errors import ModelError
from toolkit.decode.compare import decode_steps
from toolkit.decode.prefix import Prefix
from toolkit.decode.strategies import strategies_of
from toolkit.gpu.opening import open_device
from toolkit.models import gemma4

DEMOS = ("demo/qwen3", "demo/gemma4", "demo/qwen3.5-moe")
GPU = "virtual:h200"
TEXT = "The capital of France is Paris. The capital of Japan is Tokyo. The capital of Italy is"
PER_LAYER = {  # a small Gemma 4 with per-layer inputs and shared keys and values, as E2B has them
    "model_type": "gemma4_text", "vocab_size": 97, "vocab_size_per_layer_input": 97, "hidden_size": 24, "intermediate_size": 40,
    "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "global_head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 7, "hidden_size_per_layer_input": 5,
    "num_kv_shared_layers": 2, "final_logit_softcapping": 30.0, "max_position_embeddings": 300, "use_double_wide_mlp": True,
}  # fmt: skip
PLAIN = {"max_new_tokens": 16, "eos": ()}
DRAWN = {**PLAIN, "temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 5}
models = pytest.mark.parametrize("name", [*DEMOS, "per-layer inputs"])


@cache
def model_on(name: str, device: str = "cpu", dtype: str = "float32") -> Any:
    if name in DEMOS:
        return tk.load(name, device=device, dtype=dtype, progress=False)
    model = gemma4.Model(gemma4.Config.from_hf(PER_LAYER), open_device(device), torch.float32).init_weights(3)
    with torch.no_grad():
        for path, parameter in model.requires_grad_(False).named_parameters():
            if parameter.ndim > 1 and path.startswith("layers"):
                parameter.mul_(20)
    return model


@pytest.fixture(scope="module", autouse=True)
def let_go():
    yield
    model_on.cache_clear()
    gc.collect()


def prompt_of(model: Any, length: int) -> list[int]:
    """Return text whose tokens exceed the windows: 64 for the demo, 7 for the small model."""
    if model.tokenizer is None:
        return [7 * i % 97 for i in range(length)]
    return (model.tokenizer.encode(TEXT) * 9)[:length]


def expected_copies(model: Any) -> dict[str, tuple[list[int], list[int], list[int]]]:
    """Bytes of each copy of a decode step, up, down and within; a row is all that the embedding gives for a token."""
    row = model.embed(torch.zeros(1, 1, dtype=torch.int64, device=model.device.torch)).nbytes
    return {
        "host-sampling": ([8, 8], [model.config.vocab_size * 4], []),
        "host-embedding": ([8, row], [8], []),
        "roundtrip": ([8, 8], [8], []),
        "token-on-device": ([8], [8], []),
        "position-on-device": ([], [8], [8]),
        "double-buffered": ([], [8], []),
        "cuda-graph": ([], [8], []),
        "whole-loop": ([], [], []),
    }


@models
@pytest.mark.parametrize("options", [PLAIN, DRAWN], ids=["greedy", "drawn"])
def test_same_tokens_on_the_cpu_whatever_the_chunks(name, options):
    model = model_on(name)
    prompt = prompt_of(model, 54)  # the 16 new ones cross the demo's window
    reference = tk.generate(model, prompt, "roundtrip", record=False, **options).tokens
    assert len(set(reference)) > 5
    for strategy in strategies_of(model):
        assert tk.generate(model, prompt, strategy, record=False, **options).tokens == reference, strategy
    for chunk in (1, 7, 53):
        run = tk.generate(model, prompt, "double-buffered", record=False, prefill_chunk=chunk, **options)
        assert run.tokens == reference, f"prefill in chunks of {chunk}"


@models
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_autocast_around_a_run_changes_nothing(name, device):
    model = model_on(name, device)
    prompt = prompt_of(model, 12)
    exact = tk.generate(model, prompt, record=False, **PLAIN).tokens
    with torch.autocast(model.device.torch.type, dtype=torch.bfloat16):
        for strategy in strategies_of(model):
            assert tk.generate(model, prompt, strategy, record=False, **PLAIN).tokens == exact, strategy
        prefix = Prefix(model, prompt[:-2], 64)
        assert torch.is_autocast_enabled(model.device.torch.type)
    assert tk.generate(model, prompt, prefix=prefix, record=False, **PLAIN).tokens == exact
    prefix.free()


@models
def test_the_tokens_of_whole_forward_passes(name):
    """Prompts shorter and longer than the window, and one that ends just at it."""
    model = model_on(name)
    for length in (1, 6, 63, 64, 65, 130):
        run = tk.generate(model, prompt_of(model, length), max_new_tokens=12, eos=(), record=False)
        with torch.no_grad():
            whole = model(torch.tensor([run.prompt_tokens + run.tokens]))[0]
        assert tuple(whole[length - 1 : -1].argmax(-1).tolist()) == run.tokens, length


@models
def test_every_decode_step_copies_what_the_table_says(name):
    model, cpu = model_on(name, GPU), model_on(name)
    prompt = prompt_of(model, 62)
    steps = 4  # across the demo's window
    reference = tk.generate(cpu, prompt, "roundtrip", max_new_tokens=steps + 1, eos=(), record=False).tokens
    for strategy, sizes in expected_copies(model).items():
        run = tk.generate(model, prompt, strategy, max_new_tokens=steps + 1, eos=(), lines=False)
        assert run.tokens == reference, strategy
        for step in range(1, steps + 1):
            events = [run.trace.select(run.trace.is_kind(kind) & (run.trace["step"] == step)) for kind in ("h2d", "d2h", "d2d")]
            assert tuple(sorted(part["bytes"].tolist()) for part in events) == sizes, (strategy, step)
        assert len(decode_steps(run.trace)) == steps
        outside = run.trace.is_kind("h2d", "d2h", "d2d") & (run.trace["step"] == -1)
        assert not outside.any()


@pytest.mark.parametrize("name", DEMOS[1:])
def test_bf16_copies_no_more(name):
    model = model_on(name, GPU, "bfloat16")
    with tk.copy_budget(h2d=0, d2h=1, d2d=0, per="step", device=GPU):
        tk.generate(model, prompt_of(model, 62), "double-buffered", max_new_tokens=5, eos=(), lines=False)


@models
def test_prefill_reads_nothing_back_but_the_first_token(name):
    model = model_on(name, GPU)
    run = tk.generate(model, prompt_of(model, 70), "roundtrip", max_new_tokens=2, prefill_chunk=33, eos=(), lines=False)
    down = run.trace.select(run.trace.is_kind("d2h") & (run.trace["step"] == 0))
    assert down["bytes"].tolist() == [8]


@models
def test_cancel_and_eos(name):
    model = model_on(name)
    prompt = prompt_of(model, 60)
    whole = tk.generate(model, prompt, "roundtrip", record=False, **PLAIN).tokens
    cancel, seen = threading.Event(), []

    def on_token(token, text):
        seen.append(token)
        if len(seen) == 9:
            cancel.set()

    run = tk.generate(model, prompt, "double-buffered", record=False, cancel=cancel, on_token=on_token, **PLAIN)
    assert run.stop_reason == "cancelled"
    assert run.tokens == tuple(seen) == whole[: len(seen)]
    ended = tk.generate(model, prompt, "double-buffered", record=False, max_new_tokens=16, eos=[whole[7]])
    assert ended.tokens == whole[: whole.index(whole[7]) + 1]


@models
def test_context_counts_all_positions_whatever_the_window(name):
    model = model_on(name)
    prompt = prompt_of(model, 70)
    whole = tk.generate(model, prompt, record=False, **PLAIN).tokens
    assert tk.generate(model, prompt, record=False, context=300, **PLAIN).tokens == whole
    tight = tk.generate(model, prompt, record=False, context=75, **PLAIN)
    assert tight.tokens == whole[:6]
    assert tight.stop_reason == "length"
    with pytest.raises(ModelError, match="the context holds 69"):
        tk.generate(model, prompt, context=69)


@pytest.mark.parametrize("name", DEMOS)
def test_memory_is_given_back(name):
    model = model_on(name, GPU)
    gc.collect()
    before = model.device.memory().allocated_bytes
    run = tk.generate(model, prompt_of(model, 70), max_new_tokens=4, lines=False)
    assert run.tokens
    assert model.device.memory().allocated_bytes == before


@pytest.mark.parametrize(("name", "scheme"), [*((name, "q4_k_m") for name in DEMOS), ("demo/qwen3.5-moe", "int4-g32")])
def test_packed_weights_give_every_strategy_the_same_tokens(name, scheme):
    model = tk.quantize(model_on(name), scheme)
    prompt = prompt_of(model, 60)
    reference = tk.generate(model, prompt, "roundtrip", record=False, max_new_tokens=12, eos=()).tokens
    for strategy in strategies_of(model):
        assert tk.generate(model, prompt, strategy, record=False, max_new_tokens=12, eos=()).tokens == reference, strategy


def test_packed_weights_copy_no_more():
    model = tk.load("demo/qwen3.5-moe", device=GPU, scheme="int4-g32", progress=False)
    with tk.copy_budget(h2d=0, d2h=1, d2d=0, per="step", device=GPU):
        tk.generate(model, prompt_of(model, 20), "double-buffered", max_new_tokens=4, eos=(), lines=False)
    del model
    gc.collect()


@pytest.mark.parametrize("name", ["random/gemma4-31b", "random/qwen3.5-35b-a3b"])
def test_sizes_only_models_decode(name):
    """Models with real shapes but without values: the copies are the same; the tokens mean nothing."""
    model = tk.load(name, device=GPU, progress=False)
    for strategy in ("host-embedding", "double-buffered", "whole-loop"):
        sizes = expected_copies(model)[strategy]
        run = tk.generate(model, [1, 2, 3], strategy, max_new_tokens=2, eos=(), lines=False)
        assert len(run.tokens) == 2
        assert run.text == ""
        assert run.trace.meta["sizes_only"]
        events = [run.trace.select(run.trace.is_kind(kind) & (run.trace["step"] == 1)) for kind in ("h2d", "d2h", "d2d")]
        assert tuple(sorted(part["bytes"].tolist()) for part in events) == sizes, strategy
    del model, run
    gc.collect()


@pytest.mark.parametrize(
    "change",
    [lambda m: m.half(), lambda m: m.double(), lambda m: m.cpu(), lambda m: m.to("meta"), lambda m: m.to(torch.bfloat16)],
)
@pytest.mark.parametrize("scheme", [None, "int4"])
def test_a_loaded_model_is_neither_moved_nor_converted(change, scheme):
    model = tk.load("demo/qwen3", device=GPU, scheme=scheme, dtype="float32", progress=False)
    same = tk.generate(model, [1, 2, 3], max_new_tokens=3, record=False).tokens
    with pytest.raises(ModelError, match=r"^moving or converting a model to .* it was made for float32 on virtual:h200"):
        change(model)
    assert model.float().to(model.device.torch) is model, "nothing to do"
    assert tk.generate(model, [1, 2, 3], max_new_tokens=3, record=False).tokens == same


def test_the_virtual_gpu_needs_no_triton():
    """Models decode on the virtual GPU without Triton, as on macOS and Windows; features that need Triton say so."""
    code = """
        import importlib.util, sys
        found = importlib.util.find_spec
        importlib.util.find_spec = lambda name, package=None: None if name == "triton" else found(name, package)
        sys.modules["triton"] = None
        import toolkit as tk
        model = tk.load("demo/qwen3.5-moe", device="virtual:h200", progress=False)
        assert len(tk.generate(model, "The capital of France is", max_new_tokens=3, eos=(), lines=False).tokens) == 3
        try:
            model.kernel_shapes()
        except tk.core.errors.DeviceError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Triton isn't installed" in done.stdout
