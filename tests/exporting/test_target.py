"""Packages for a GPU that this machine doesn't have: compiled by a CUDA build of PyTorch, refused by any other."""

import os
import subprocess
import sys

import pytest
import torch

import toolkit as tk
from toolkit.core.errors import PackageError
from toolkit.exporting import inductor
from toolkit.tune.cards import find_card

CARD = find_card("rtx-4090")


def test_versions_that_were_not_tested_are_named(monkeypatch):
    for version in ("2.10.1", "2.16.0+cu132"):
        monkeypatch.setattr(torch, "__version__", version)
        with pytest.raises(PackageError, match=rf"PyTorch {version[:4]}.* work with 2\.11 to 2\.15") as error:
            inductor.check_supported(CARD)
        assert error.value.do == "pip install 'torch>=2.11,<2.16'"


def test_missing_cuda_headers_are_named(monkeypatch, tmp_path):
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda.h").touch()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(inductor, "_header_folders", lambda: [tmp_path / "include"])
    with pytest.raises(PackageError, match=r"crt/host_defines\.h, nv/target are not installed") as error:
        inductor.check_supported(CARD)
    assert error.value.do.startswith("pip install nvidia-cuda-crt nvidia-cuda-cccl, or")


@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch can compile for GPUs")
def test_a_build_without_cuda_says_so(model, tmp_path):
    with pytest.raises(PackageError, match="is a build without CUDA"):
        tk.export(model, tmp_path / "out", target="rtx-5090")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of PyTorch; a GPU it needs not")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "held", "kv", "target"),
    [
        ("demo/qwen3", {}, None, "rtx-4090"),
        ("demo/qwen3", {"scheme": "int4", "dtype": "bfloat16"}, "int4", "h200"),
        ("demo/gemma4", {"scheme": "int4", "dtype": "bfloat16"}, None, "rtx-5090"),
        ("demo/qwen3.5-moe", {"scheme": "int4", "dtype": "bfloat16"}, None, "a100-80g"),
    ],
    ids=["qwen3 for an rtx-4090", "qwen3 in int4 for an h200", "gemma4 for an rtx-5090", "qwen3.5-moe for an a100"],
)
def test_a_gpu_that_is_not_there(name, held, kv, target, tmp_path):
    package = tk.export(name, tmp_path / "out", device="cpu", target=target, context=384, kv=kv, progress=False, **held)
    capability = "{}.{}".format(*find_card(target).spec.compute_capability)
    assert package.manifest["target"] == {**package.manifest["target"], "device": "cuda", "capability": capability}
    assert {phase["phase"] for phase in package.measured["phases"]} >= {"compile prefill", "compile decode"}
    if not torch.cuda.is_available():
        with pytest.raises(PackageError, match="it was exported for"):
            package.load()


WRITTEN = """
import torch
import torch._higher_order_ops.triton_kernel_wrap as wrap
from torch._subclasses import FakeTensorMode
from toolkit.exporting import inductor
from toolkit.kernels.registry import kernels
from toolkit.tune.cards import find_card
from toolkit.tune.lookup import choose

card = find_card("h200")
inductor.compile_only_for(card)
kernel = kernels()["int4_matmul"]
shape = next(iter(kernel.known.values()))
inputs = kernel.inputs(shape, "meta")
with FakeTensorMode(allow_non_fake_inputs=True):
    inputs, outputs = (
        {name: torch.empty(t.shape, dtype=t.dtype, device="cuda") for name, t in tensors.items()}
        for tensors in (inputs, kernel.outputs(shape, inputs))
    )
    for launch in kernel.launches(shape, choose(kernel, shape, card).config, inputs, outputs):
        operands = {**launch.arguments, **launch.constants}
        if hasattr(wrap, "identify_mutated_tensors"):  # PyTorch 2.11
            print(*wrap.identify_mutated_tensors(launch.function, operands, {}))
        else:
            print(*(one.name for one in wrap.identify_accessed_tensors(launch.function, operands, {}).read_writes.writes))
"""


@pytest.mark.skipif(torch.version.cuda is None, reason="needs Triton and a CUDA build of PyTorch")
def test_inductor_knows_which_tensors_a_kernel_writes():
    """If it assumed that a kernel writes all its tensors, it would copy weights before each launch."""
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", WRITTEN], capture_output=True, text=True, timeout=300, env=compiled)
    assert sorted(done.stdout.split()) == ["codes_ptr", "out_ptr", "scales_ptr", "sums_ptr"], done.stderr
