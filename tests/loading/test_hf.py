"""Tests of transformers models under the toolkit's strategies: same greedy tokens, on the CPU and the virtual GPU."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import toolkit as tk
from toolkit.core.current_layer import NO_LAYER, current_layer
from toolkit.core.errors import FormatError, HubError, ModelError, RecorderError, ToolkitError, UnknownNameError
from toolkit.core.extras import install_command
from toolkit.decode.compare import decode_steps
from toolkit.decode.prefix import Prefix
from toolkit.decode.sampling import Sampler, Sampling
from toolkit.decode.strategies import strategies_of
from toolkit.loading import huggingface as hf

transformers = pytest.importorskip("transformers")  # the `hf` extra

TINY = {"vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "max_position_embeddings": 256, "eos_token_id": None, "pad_token_id": 0, "bos_token_id": None}  # fmt: skip
GEMMA = {**TINY, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "sliding_window": 8,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0,
         "vocab_size_per_layer_input": 131, "final_logit_softcapping": 30.0}  # fmt: skip
CONFIGS = {
    "llama": transformers.LlamaConfig(**TINY, num_key_value_heads=4),
    "gpt2": transformers.GPT2Config(
        vocab_size=131, n_embd=32, n_layer=2, n_head=4, n_positions=256, eos_token_id=None, bos_token_id=None
    ),
    "qwen2": transformers.Qwen2Config(**TINY, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**TINY, num_key_value_heads=2, head_dim=8),
    "gemma4": transformers.Gemma4TextConfig(**GEMMA),
    "gemma4_per_layer": transformers.Gemma4TextConfig(**{**GEMMA, "hidden_size_per_layer_input": 6}),
    "qwen3_5_moe": transformers.Qwen3_5MoeTextConfig(
        **{key: value for key, value in TINY.items() if key != "intermediate_size"}, num_key_value_heads=2, head_dim=8,
        linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
    ),
}  # fmt: skip
PROMPT = list(range(1, 20))
N = 12  # new tokens: with the prompt, well past the window of the sliding layers


def build(name: str):
    """Build a model with weights large enough that its greedy tokens vary."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(2 if "emb" in key or "wte" in key or "head" in key else 40)
    return model


def reference(model, n=N, prompt=PROMPT):
    ids = torch.tensor([prompt])
    return tuple(model.generate(ids, max_new_tokens=n, do_sample=False, pad_token_id=0)[0, len(prompt) :].tolist())


@pytest.mark.parametrize("name", CONFIGS)
def test_every_strategy_gives_the_tokens_of_its_own_generate(name):
    model = build(name)
    expected = reference(model)
    assert len(set(expected)) > 3, "varied enough to tell a difference"
    wrapped = hf.wrap(model, "cpu")
    for strategy in strategies_of(wrapped):
        for chunk in (512, 5) if strategy == "double-buffered" else (512,):
            run = tk.generate(wrapped, PROMPT, strategy, max_new_tokens=N, prefill_chunk=chunk)
            assert run.tokens == expected, (strategy, chunk)
            assert [mark.name for mark in run.trace.marks()][:2] == ["prefill", "decode"]
            assert len(decode_steps(run.trace)) == N - 1


@pytest.mark.parametrize("name", ["gpt2", "gemma4_per_layer", "qwen3_5_moe"])
def test_the_same_tokens_on_the_virtual_gpu(name):
    model = build(name)
    expected = reference(model, n=5)
    wrapped = hf.wrap(model, "virtual:h200")
    for strategy in ("host-embedding", "double-buffered", hf.HF_GENERATE):
        assert tk.generate(wrapped, PROMPT, strategy, max_new_tokens=5, lines=False).tokens == expected, strategy
    del model, wrapped
    gc.collect()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_kernels_have_their_layer(name):
    model = build(name)
    wrapped = hf.wrap(model, "virtual:h200")
    for strategy in ("double-buffered", hf.HF_GENERATE):
        trace = tk.generate(wrapped, PROMPT, strategy, max_new_tokens=4).trace
        layers = trace["layer"][trace.is_kind("kernel") & (trace["step"] == 2)]
        inside = layers[layers >= 0].tolist()
        assert inside == sorted(inside), strategy
        assert set(inside) == set(range(wrapped.config.num_hidden_layers)), strategy
        assert layers[0] == layers[-1] == -1, strategy
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    del model, wrapped
    gc.collect()


def test_an_interrupted_layer_is_not_the_current_one_any_more():
    wrapped = hf.wrap(build("llama"), "cpu")

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = wrapped.inner.model.layers[1].mlp.register_forward_hook(interrupt)
    for strategy in ("double-buffered", hf.HF_GENERATE):
        with pytest.raises(KeyboardInterrupt):
            tk.generate(wrapped, PROMPT, strategy, max_new_tokens=4)
        assert current_layer() == NO_LAYER, strategy
    hook.remove()


def test_what_our_strategies_cross_is_theirs_and_what_the_model_copies_is_named():
    wrapped = hf.wrap(build("llama"), "virtual:h200")
    for strategy, counts in {"roundtrip": (2, 1, 0), "position-on-device": (0, 1, 1), "double-buffered": (0, 1, 0)}.items():
        table = decode_steps(tk.generate(wrapped, PROMPT, strategy, max_new_tokens=6).trace)
        assert {tuple(row) for row in table[["h2d_count", "d2h_count", "d2d_count"]].to_numpy()} == {counts}, strategy
    gemma = hf.wrap(build("gemma4"), "virtual:h200")
    run = tk.generate(gemma, PROMPT, "double-buffered", max_new_tokens=6)
    up = run.trace.select(run.trace.is_kind("h2d") & (run.trace["step"] > 0))
    assert len(up)
    assert all(where.startswith("transformers/") for where in up.text("where")), "its sliding cache uploads an index"


def test_compare_has_a_row_for_its_own_generate():
    comparison = tk.compare(hf.wrap(build("qwen3"), "virtual:h200"), PROMPT, max_new_tokens=6)
    eager = [name for name, strategy in tk.STRATEGIES.items() if strategy.capture == "none"]
    assert list(comparison.table["strategy"]) == [*eager, "hf-generate"]
    assert comparison.table["same_tokens"].all()
    own = comparison.table.set_index("strategy").loc["hf-generate"]
    assert own["d2h_count"] >= 1
    assert own["tok_per_s"] > 0
    assert "hf-generate" in str(comparison)


@pytest.fixture(scope="module")
def pair():
    yield {engine: hf_or_ours(engine) for engine in ("ours", "transformers")}
    gc.collect()


def hf_or_ours(engine):
    if engine == "ours":
        return tk.load("demo/qwen3", device="virtual:h200", progress=False)
    return tk.load("demo/qwen3", device="virtual:h200", engine="hf")


def test_beside_our_model_of_the_same_weights(pair):
    comparison = tk.compare(pair, "The capital of France is", ["roundtrip", "hf-generate"], max_new_tokens=12)
    assert comparison.table[["model", "strategy"]].to_numpy().tolist() == [
        ["ours", "roundtrip"], ["transformers", "roundtrip"], ["transformers", "hf-generate"],
    ]  # fmt: skip
    assert list(comparison.runs) == ["ours: roundtrip", "transformers: roundtrip", "transformers: hf-generate"]
    assert comparison.table["same_tokens"].all()
    assert {run.text[:6] for run in comparison.runs.values()} == {" Paris"}
    assert "transformers" in str(comparison)
    unnamed = tk.compare(list(pair.values()), [1, 2], "token-on-device", max_new_tokens=2)
    assert list(unnamed.runs) == ["model 1: token-on-device", "model 2: token-on-device"]


def test_a_model_of_transformers_has_no_plan(pair):
    with pytest.raises(ToolkitError, match=r'a HfModel is not a model of the toolkit.*engine="hf"'):
        tk.plan(pair["transformers"], "h200")


def test_comparisons_of_several_that_cannot_be(pair):
    with pytest.raises(ToolkitError, match="the list of models is empty"):
        tk.compare([], PROMPT)
    with pytest.raises(ToolkitError, match=r"they are on several devices: cpu, virtual:h200"):
        tk.compare({**pair, "elsewhere": hf.wrap(build("llama"), "cpu")}, PROMPT)
    with pytest.raises(UnknownNameError, match='Did you mean "hf-generate"'):
        tk.compare(pair, PROMPT, ["hf_generate"])


def test_its_own_loop_is_no_strategy_of_our_models(pair):
    with pytest.raises(UnknownNameError, match="hf-generate"):
        tk.generate(pair["ours"], PROMPT, "hf-generate")


def test_a_folder_brings_config_tokenizer_and_ends(pair):
    model = pair["transformers"]
    assert model.config.vocab_size == 768
    assert model.config.eos_token_ids == (767, 765)
    assert model.config.tie_word_embeddings
    assert model.dtype == torch.float32
    assert "Qwen3ForCausalLM" in repr(model)
    assert model.report.weight_bytes == sum(p.nbytes for p in model.parameters())
    assert model.tokenizer.eos_ids == model.config.eos_token_ids
    answer = tk.generate(model, "Question: What is the capital of Spain?\nAnswer:", "hf-generate", max_new_tokens=40)
    assert answer.stop_reason == "eos"
    assert answer.text == " The capital of Spain is Madrid."
    assert model(torch.tensor([[1, 2]], device=model.device.torch)).shape == (1, 2, 768)


def test_an_instance_stays_where_it_is_with_auto_and_moves_where_asked():
    inner = build("llama")
    assert hf.wrap(inner).device.name == "cpu"
    moved = hf.wrap(inner.train(), "virtual:h200", torch.bfloat16)
    assert moved.inner is inner
    assert {p.device.type for p in inner.parameters()} == {"vgpu"}
    assert moved.dtype == torch.bfloat16
    assert not inner.training
    assert inner.model.rotary_emb.inv_freq.dtype == torch.float32
    assert hf.wrap(inner).device.name == "virtual:h200"


@pytest.mark.parametrize("strategy", ["double-buffered", "hf-generate"])
def test_stops_at_an_end(strategy):
    wrapped = hf.wrap(build("llama"), "cpu")
    tokens = tk.generate(wrapped, PROMPT, strategy, max_new_tokens=N).tokens
    run = tk.generate(wrapped, PROMPT, strategy, max_new_tokens=N, eos=[tokens[4]])
    assert run.tokens == tokens[: tokens.index(tokens[4]) + 1]
    assert run.stop_reason == "eos"
    assert tk.generate(wrapped, PROMPT, strategy, max_new_tokens=N).tokens == tokens


def test_sampling_of_its_own_generate_is_a_function_of_the_seed():
    wrapped = hf.wrap(build("llama"), "cpu")
    wrapped.inner.generation_config.repetition_penalty = 5.0  # ignored, since the caller didn't ask for it
    before = torch.get_rng_state()
    draws = [
        tk.generate(wrapped, PROMPT, "hf-generate", max_new_tokens=8, temperature=1.5, top_k=50, top_p=0.9, seed=seed).tokens
        for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]
    assert torch.equal(torch.get_rng_state(), before)
    assert wrapped.inner.generation_config.repetition_penalty == 5.0
    greedy = {tk.generate(wrapped, PROMPT, name, max_new_tokens=8).tokens for name in ("roundtrip", "hf-generate")}
    assert len(greedy) == 1
    ours = [name for name in strategies_of(wrapped) if name != hf.HF_GENERATE]
    drawn = {tk.generate(wrapped, PROMPT, name, max_new_tokens=8, temperature=1.5, seed=4).tokens for name in ours}
    assert len(drawn) == 1


def test_its_own_generate_applies_every_option():
    wrapped, never = hf.wrap(build("llama"), "cpu"), threading.Event()
    sampling = Sampling(repetition_penalty=1.6, logit_bias={5: 3.0, 9: -math.inf})
    sampler, ids = Sampler(sampling, 131, torch.device("cpu")), torch.tensor(PROMPT)
    sampler.begin(ids)
    for _ in range(N):
        logits = wrapped.inner(ids[None]).logits[0, -1].detach()
        ids = torch.cat((ids, sampler.choose(logits, torch.empty(1, dtype=torch.int64))))
    found = [token for token, _ in wrapped.hf_generate(PROMPT, N, sampling, (), never)]
    assert found == ids[len(PROMPT) :].tolist() != list(reference(wrapped.inner))
    only_the_best = Sampling(5.0, min_p=1.0)
    assert tuple(t for t, _ in wrapped.hf_generate(PROMPT, N, only_the_best, (), never)) == reference(wrapped.inner)


@pytest.mark.parametrize("after", [0, 3], ids="after={}".format)
def test_cancel_of_its_own_generate_keeps_what_was_decoded(after):
    wrapped = hf.wrap(build("llama"), "cpu")
    whole = tk.generate(wrapped, PROMPT, "hf-generate", max_new_tokens=N).tokens
    cancel, passes = threading.Event(), []

    def count(*_):
        passes.append(1)
        if len(passes) > after:
            cancel.set()

    if not after:
        cancel.set()
    handle = wrapped.inner.register_forward_hook(count)
    run = tk.generate(wrapped, PROMPT, "hf-generate", max_new_tokens=N, cancel=cancel)
    handle.remove()
    assert run.stop_reason == "cancelled"
    assert run.tokens == whole[: after + 1 if after else 0]
    assert not wrapped.inner._forward_pre_hooks


def test_the_models_own_error_leaves_all_as_it_was():
    wrapped = hf.wrap(build("llama"), "cpu")
    config = wrapped.inner.generation_config

    def fail(*_):
        raise KeyError("mine")

    handle = wrapped.inner.register_forward_hook(fail)
    with pytest.raises(KeyError, match="mine"):
        tk.generate(wrapped, PROMPT, "hf-generate", max_new_tokens=3)
    handle.remove()
    assert wrapped.inner.generation_config is config
    assert wrapped.device.recording is None
    assert len(tk.generate(wrapped, PROMPT, "hf-generate", max_new_tokens=3).tokens) == 3


def test_its_own_generate_beside_other_threads():
    wrapped = hf.wrap(build("llama"), "cpu")
    config, expected = wrapped.inner.generation_config, tk.generate(wrapped, PROMPT, max_new_tokens=N).tokens
    begun, go_on = threading.Event(), threading.Event()
    found = []

    def generate(**options):
        found.append(tk.generate(wrapped, PROMPT, "hf-generate", record=False, **{"max_new_tokens": N, **options}))

    def hold(*_):
        if threading.current_thread() is first and not begun.is_set():
            begun.set()
            assert go_on.wait(20)

    first, cancel = threading.Thread(target=generate), threading.Event()
    second = threading.Thread(target=generate, kwargs={"cancel": cancel})
    with wrapped.inner.get_input_embeddings().register_forward_pre_hook(hold):
        first.start()
        assert begun.wait(20)
        assert tk.generate(wrapped, PROMPT, max_new_tokens=N, record=False).tokens == expected
        second.start()
        cancel.set()
        second.join(20)
        assert [(run.tokens, run.stop_reason) for run in found] == [((), "cancelled")]
        go_on.set()
        first.join(20)
    assert found.pop().tokens == expected

    drawn = {"temperature": 0.9, "seed": 3, "max_new_tokens": 30}
    generate(**drawn)
    threads = [threading.Thread(target=generate, kwargs=drawn) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == 5
    assert len({run.tokens for run in found[1:]}) == 1
    assert wrapped.inner.generation_config is config


def test_memory_is_given_back():
    wrapped = hf.wrap(build("llama"), "virtual:h200")
    gc.collect()
    before = wrapped.device.memory().allocated_bytes
    for strategy in ("double-buffered", "hf-generate"):
        run = tk.generate(wrapped, PROMPT, strategy, max_new_tokens=4)
        gc.collect()
        assert wrapped.device.memory().allocated_bytes == before
        assert run.tokens


def test_autocast_around_a_run_is_for_its_own_generate():
    model = build("llama")
    wrapped, expected = hf.wrap(model, "cpu"), reference(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lower = reference(model)
        for strategy in strategies_of(wrapped):
            tokens = tk.generate(wrapped, PROMPT, strategy, max_new_tokens=N).tokens
            assert tokens == (lower if strategy == "hf-generate" else expected), strategy
    assert lower != expected


@pytest.mark.parametrize("name", ["llama", "gemma4_per_layer", "qwen3_5_moe"])
def test_every_run_from_a_prefix_has_the_tokens_of_a_run_without(name):
    wrapped = hf.wrap(build(name), "virtual:h200")
    expected = tk.generate(wrapped, PROMPT, max_new_tokens=N).tokens
    gc.collect()
    before = wrapped.device.memory().allocated_bytes
    with torch.inference_mode():
        prefix = Prefix(wrapped, PROMPT[:-3], 64)
    assert repr(prefix) == "Prefix(16 tokens in HfCache(3 layers, 16 of 64 positions filled))"
    for strategy in ("double-buffered", "host-sampling", "double-buffered"):
        with torch.inference_mode(strategy == "host-sampling"):
            assert tk.generate(wrapped, PROMPT, strategy, prefix=prefix, max_new_tokens=N).tokens == expected
    with pytest.raises(ModelError, match=r'hf-generate with a prefix.*Leave it out, or use decode="double-buffered"'):
        tk.generate(wrapped, PROMPT, "hf-generate", prefix=prefix)
    prefix.free()
    assert repr(prefix) == "Prefix(16 tokens in HfCache(freed))"
    gc.collect()
    assert wrapped.device.memory().allocated_bytes == before
    with pytest.raises(ModelError, match="rollback to 4: checkpoints: none"):
        wrapped.new_cache(8).rollback(4)


def test_context_and_records():
    wrapped = hf.wrap(build("gpt2"), "cpu")
    assert wrapped.config.max_position_embeddings == 256
    with pytest.raises(ModelError, match="257 tokens"):
        tk.generate(wrapped, [1] * 257)
    assert len(tk.generate(wrapped, [1] * 254, "hf-generate", max_new_tokens=9).tokens) == 3
    with pytest.raises(RecorderError):
        tk.generate(wrapped, PROMPT, "hf-generate", max_new_tokens=2, record=False).copies()


def test_models_that_cannot_be_driven_say_why_and_keep_their_own_loop():
    config = transformers.MambaConfig(vocab_size=131, hidden_size=16, num_hidden_layers=2, state_size=4, pad_token_id=0)
    wrapped = hf.wrap(transformers.MambaForCausalLM(config), "cpu")
    with pytest.raises(ModelError, match=r'its forward\(\) has no argument past_key_values.*decode="hf-generate"'):
        tk.generate(wrapped, PROMPT)
    comparison = tk.compare(wrapped, PROMPT, max_new_tokens=3, eos=())
    assert list(comparison.runs) == ["hf-generate"]
    assert len(comparison.runs["hf-generate"].tokens) == 3


# ---- refused


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.nn.Linear(2, 2), "wrapping a Linear: not a causal language model"),
        (lambda: transformers.AutoModel.from_config(CONFIGS["llama"]), "not a causal language model"),
        (
            lambda: transformers.T5ForConditionalGeneration(
                transformers.T5Config(vocab_size=8, d_model=4, d_kv=2, d_ff=8, num_layers=1)
            ),
            "not a causal",
        ),
        (lambda: build("llama").to("meta"), "offloaded: meta"),
    ],
    ids=["no_model", "no_head", "encoder_decoder", "meta"],
)
def test_instances_that_are_refused(make, said):
    with pytest.raises(ModelError, match=said):
        hf.wrap(make())


def test_an_instance_over_several_devices_is_refused():
    inner = build("llama")
    inner.hf_device_map = {"model.layers.0": "cpu", "model.layers.1": "disk"}
    with pytest.raises(ModelError, match="on several devices or offloaded"):
        hf.wrap(inner)


def test_folders_that_are_refused(tmp_path):
    with pytest.raises(FormatError, match=r"config\.json"):
        hf.wrap("meta-llama/Llama-3.1-8B")
    build("llama").config.save_pretrained(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(FormatError, match="safetensors"):
        hf.wrap(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}')
    (tmp_path / "mine.py").write_text("raise SystemExit('ran')")
    with pytest.raises(FormatError, match="cannot load it"):
        hf.wrap(tmp_path)


def test_a_path_object_is_the_same_as_its_text():
    models = [tk.load(path, "cpu", engine="hf", progress=False) for path in ("demo/qwen3", Path("demo/qwen3"))]
    first, second = (tk.generate(model, [1, 2, 3], max_new_tokens=4, record=False).tokens for model in models)
    assert first == second
    with pytest.raises(FormatError, match="no such file or folder"):
        tk.load(Path("neither/a/model"), "cpu", engine="hf")
    with pytest.raises(HubError, match="not a repository"):
        tk.load(Path("demo/qwen3"), "cpu", engine="hf", revision="main")


def test_without_the_extra_it_says_what_to_install():
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from toolkit.loading import huggingface as hf; from toolkit.core import errors\n"
        "try: hf.wrap('.')\n"
        "except errors.ToolkitError as e: print(e)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert install_command("hf") in said
