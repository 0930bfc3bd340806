"""Packages for a real GPU: made within a budget, the model's own tokens and copies, refused where they can't run."""

import gc
import json
import subprocess
import sys

import pytest
import torch

import toolkit as tk
from tests.exporting.small_e2b import small_e2b
from toolkit.core.errors import BudgetError, PackageError
from toolkit.decode.strategies import strategies_of

FOX = "The quick brown fox jumps over the lazy dog. "
CASES = {
    "qwen3, plain": ("demo/qwen3", {}, None),
    "qwen3, int4, 4-bit cache": ("demo/qwen3", {"scheme": "int4", "dtype": "bfloat16"}, "int4"),
    "gemma4, int4": ("demo/gemma4", {"scheme": "int4", "dtype": "bfloat16"}, None),
    "qwen3.5-moe, int4": ("demo/qwen3.5-moe", {"scheme": "int4", "dtype": "bfloat16"}, None),
    "qwen3.5-moe, fp32": ("demo/qwen3.5-moe", {}, None),
    "as gemma4 e2b, int4, 4-bit cache": ("as e2b", {"scheme": "int4"}, "int4"),
}
MiB = 1 << 20
pytestmark = pytest.mark.timeout(900)  # a piece takes the compilers a while


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def both(request, gpu, tmp_path_factory):
    """A model on the GPU, its package, a prompt with the number of its tokens that the model processes at once, and the bytes
    of other tests' memory.

    The package processes as many as it was compiled for. In other parts, attention sums other blocks of the prompt, and is
    rounded differently. Trained models say the same nevertheless. Random weights amplify the last bit, so their prompt has
    whole chunks, in which both compute the same (docs/guides/export.md): 183 tokens, three chunks that overwrite a ring of 62.
    """
    name, held, kv = request.param
    gc.collect()  # what other tests left behind would count as reserved
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = torch.cuda.memory_reserved(gpu.torch)
    folder, asked = tmp_path_factory.mktemp("package") / "out", {"device": gpu, "budget": "1 GiB", "context": 384, "kv": kv}
    if name == "as e2b":
        model = small_e2b(gpu, "sliding sliding full | sliding sliding full", torch.bfloat16, sliding_window=62)
        model = tk.quantize(model, held["scheme"], progress=False)
        package = tk.export(model, folder, progress=False, **asked)
        return model, package, FOX * 7, package.manifest["chunk"], others
    package = tk.export(name, folder, progress=False, **asked, **held)
    return tk.load(name, device=gpu, progress=False, **held), package, FOX * 6, None, others


def copies(run):
    trace = run.trace
    parts = {kind: trace.select(trace.is_kind(kind) & (trace["step"] >= 2)) for kind in ("h2d", "d2h", "d2d")}
    return {kind: sorted(zip(part["step"].tolist(), part["bytes"].tolist(), strict=True)) for kind, part in parts.items()}


def test_it_was_made_without_its_weights_on_the_gpu(both):
    _, package, *_, others = both
    phases = {phase["phase"]: phase for phase in package.measured["phases"]}
    assert phases["compile decode"]["gpu_reserved_bytes"] <= others + 160 * MiB
    assert phases["compile decode"]["gpu_used_bytes"] > 100 * MiB
    assert package.manifest["target"]["capability"] == "{}.{}".format(*torch.cuda.get_device_capability())


def test_the_same_tokens_and_copies(both):
    model, package, long, chunk, _ = both
    exported = package.load()
    kv = package.manifest["kv"]
    for prompt in ("Hi", long):
        for name in strategies_of(exported):
            for sampling in ({}, {"temperature": 0.9, "top_k": 30, "seed": 11}):
                asked = {"max_new_tokens": 9, "context": 384, "eos": (), "prefill_chunk": chunk, **sampling}
                want = tk.generate(model, prompt, name, kv=kv, **asked)
                got = tk.generate(exported, prompt, name, **asked)
                assert list(got.tokens) == list(want.tokens), (name, sampling)
                assert copies(got) == copies(want), (name, sampling)


def test_kernels_have_their_layer(both):
    model, package, *_ = both
    exported = package.load()
    for name in ("double-buffered", "cuda-graph"):
        trace = tk.generate(exported, "Hi", name, max_new_tokens=8, context=384, eos=()).trace
        layers = trace["layer"][trace.is_kind("kernel") & (trace["step"] == 5)].tolist()
        assert [*dict.fromkeys(layers)] == [-1, *range(model.config.num_hidden_layers)], name
        assert layers[-1] == -1, name


def test_a_fresh_process_says_the_same(both):
    model, package, prompt, chunk, _ = both
    asked = {"max_new_tokens": 12, "eos": (), "context": 384, "prefill_chunk": chunk}
    want = tk.generate(model, prompt, kv=package.manifest["kv"], **asked)
    code = (
        "import sys, toolkit as tk; m = tk.load_exported(sys.argv[1], trust=True, progress=False); "
        "print(*tk.generate(m, sys.argv[2], max_new_tokens=12, eos=(), context=384).tokens)"
    )
    run = [sys.executable, "-W", "ignore", "-c", code, str(package.path), prompt]
    said = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert [int(word) for word in said.split()] == list(want.tokens)


def test_a_fresh_process_takes_what_was_planned(gpu, tmp_path):
    code = (
        "import json, sys, toolkit as tk; "
        "p = tk.export('demo/qwen3', sys.argv[1], device='cuda', context=384, progress=False); "
        "print(json.dumps([p.measured['phases'], p.manifest['plan']['export']]))"
    )
    run = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "out")]
    measured, plan = json.loads(subprocess.run(run, capture_output=True, text=True, check=True).stdout)
    if measured[0]["gpu_used_by"] != "process":
        pytest.skip("the driver doesn't tell what a process has in use")
    planned = {phase["name"]: sum(phase["parts"].values()) for phase in plan}
    for phase in measured:
        if phase["phase"] in planned:
            assert 0.95 * phase["gpu_used_bytes"] <= planned[phase["phase"]] <= 1.1 * phase["gpu_used_bytes"]


def test_for_another_gpu(gpu, tmp_path):
    package = tk.export("demo/qwen3", tmp_path / "out", target="rtx-4090", context=64, progress=False)
    assert package.manifest["target"]["capability"] == "8.9"
    with pytest.raises(PackageError, match=r"of compute capability 8\.9"):
        package.load()


def test_a_budget_that_is_too_small(gpu, tmp_path):
    with pytest.raises(BudgetError, match="Use a budget of at least"):
        tk.export("demo/qwen3", tmp_path / "out", device=gpu, budget="256 MiB", context=64, progress=False)
    assert not (tmp_path / "out").exists()


def test_a_loaded_model_stays_where_it_is(gpu, tmp_path):
    model = tk.load("demo/qwen3", device=gpu, progress=False)
    package = tk.export(model, tmp_path / "out", context=64, progress=False)
    assert model.device is gpu
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    asked = {"max_new_tokens": 8, "eos": (), "context": 64}
    assert list(tk.generate(package.load(), "Hi", **asked).tokens) == list(tk.generate(model, "Hi", **asked).tokens)
