"""Compile the kernels of a run before it, several at once. Whether all of them are found is tested on CUDA (tests/gpu)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import toolkit as tk
from toolkit import ops
from toolkit.decode import compile_ahead
from toolkit.decode.prefix import Prefix
from toolkit.models.problems import samples

# For an H200 that isn't there. Prints which kernel was compiled by which thread, or read from Triton's cache on disk.
SCRIPT = """
import sys, threading
import triton
from triton import knobs
from triton.runtime import driver
from toolkit.decode import compile_ahead
from toolkit.kernels.base import Launch
from toolkit.kernels.registry import find_kernel
from toolkit.tune.compile_worker import AbsentGpu
from tests.decode.broken_kernel import broken

def say(line):
    sys.stdout.write(line + "\\n")  # at once: threads print, too

def tell(*, src, cache_hit, **others):
    say(f"{src.name} {threading.current_thread().name.partition('_')[0]} {'read' if cache_hit else 'compiled'}")

driver.set_active(AbsentGpu(90))
knobs.compilation.listener = tell
kernels = [(kernel, next(iter(kernel.known.values()))) for kernel in map(find_kernel, ("embed_rows", "gate_heads", "read"))]
problems = [(kernel, shape, kernel.inputs(shape, "meta")) for kernel, shape in kernels]
launches = [*compile_ahead._launches(problems * 2, "h200"), Launch(broken, (1,), {}, {})]
if "interrupt" in sys.argv:
    wait = compile_ahead.wait
    def wait_for_the_first(futures):
        if len(futures) > 1:
            raise KeyboardInterrupt
        return wait(futures)
    compile_ahead.wait = wait_for_the_first
    try:
        compile_ahead.compile_launches(launches)
    except KeyboardInterrupt:
        say("interrupted")
    compile_ahead.wait = wait
compile_ahead.compile_launches(launches)
say("again")
for launch in launches[:-1]:
    launch.compile((0, 0))  # as `compile_launches` without CUDA
try:
    launches[-1].compile((0, 0))
except triton.CompilationError:
    say("broken")
"""


def run(cache: Path, *arguments: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment | {"TRITON_CACHE_DIR": str(cache)}
    )
    return done.stdout.splitlines()


@pytest.mark.slow
def test_each_kernel_is_compiled_once_and_the_next_process_reads_it(tmp_path: Path) -> None:
    """One that can't be compiled stops nothing. Launching one then compiles nothing."""
    said = run(tmp_path)
    compiled, after = said[: said.index("again")], said[said.index("again") + 1 :]
    assert len(compiled) == len(set(compiled)) == 3
    assert all(line.endswith("compile compiled") for line in compiled)
    assert after == ["broken"]
    assert set(run(tmp_path)[:3]) == {line.removesuffix("compiled") + "read" for line in compiled}


@pytest.mark.slow
def test_after_an_interrupt_kernels_can_be_compiled(tmp_path: Path) -> None:
    said = run(tmp_path, "interrupt")
    assert "interrupted" in said
    assert "broken" in said
    assert len({line.split()[0] for line in said if "compile" in line}) == 3


@pytest.mark.parametrize("kv", [None, "k4v8"])
@pytest.mark.parametrize("name", ["demo/qwen3", "demo/gemma4", "demo/qwen3.5-moe"])
def test_some_layers_and_a_short_cache_have_all_problems_of_a_run(name: str, kv: str | None) -> None:
    model = tk.load(name, device="virtual:h200", scheme="int4-g32", progress=False)
    prompt = [1 + i % 100 for i in range(70)]
    with ops.record_problems() as found:
        tk.generate(model, prompt, "cuda-graph", max_new_tokens=3, context=369, kv=kv, prefill_chunk=50, eos=(), record=False)
    described = compile_ahead._problems(model, samples(model), (50, 20, 1), 369, kv)
    assert set(found) <= {(kernel, shape) for kernel, shape, _ in described}


def test_layers_that_are_alike() -> None:
    """In Gemma 4, layers 0 to 4 have a sliding window, and layer 5 sees all positions."""
    layers = samples(tk.load("random/gemma4-31b", device="virtual:h200", scheme="int4-g32", progress=False))
    assert layers == [0, 1, 5, 11]


def test_without_cuda_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise AssertionError("unreachable")

    monkeypatch.setattr(compile_ahead, "compile_launches", fail)
    for device in ("cpu", "virtual:h200"):
        model = tk.load("demo/qwen3", device=device, progress=False)
        tk.generate(model, [1, 2, 3], max_new_tokens=2, record=False)
        Prefix(model, [1, 2], 16).free()
