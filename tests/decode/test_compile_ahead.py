"""Compile the kernels of a run before it, several at once. Whether all of them are found is tested on CUDA (tests/gpu)."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

import toolkit as tk
from toolkit import ops
from toolkit.decode import compile_ahead
from toolkit.decode.prefix import Prefix
from toolkit.models.model import CausalLM
from toolkit.models.problems import samples
from toolkit.tune.lookup import forget

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
    def wait_for_the_first(futures, timeout):
        if len(futures) > 1:
            raise KeyboardInterrupt
        return wait(futures, timeout)
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


# Prints the kernels whose arguments are a part of a longer tensor, and whether their programs depend on where it begins.
PARTS = """
from toolkit.decode import compile_ahead
from toolkit.kernels.registry import kernels

for kernel in kernels().values():
    shape = next(iter(kernel.known.values()))
    inputs = kernel.inputs(shape, "meta")
    parts = [inputs[name] for name in ("ids", "at", "positions") if name in inputs]
    for launch in compile_ahead._launches([(kernel, shape, inputs)], "h200"):
        for parameter in launch.function.params:
            if any(launch.arguments.get(parameter.name) is part for part in parts):
                print(kernel.name, "any" if parameter.do_not_specialize_on_alignment else "aligned")
"""


def run(cache: Path, *arguments: str, script: str = SCRIPT) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", script, *arguments]
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


@pytest.mark.slow
def test_a_prompt_may_begin_at_any_position_of_its_cache(tmp_path: Path) -> None:
    """No kernel has another program where the positions or tokens of a run begin at an odd number."""
    attention = {"attention_codes", "attention_decode", "attention_prefill"}
    kernels = {"delta_chunks", "delta_step", "embed_rows", "kv_encode", "qk_norm_rope", *attention}
    assert set(run(tmp_path, script=PARTS)) == {f"{kernel} any" for kernel in kernels}


@pytest.mark.parametrize("kv", [None, "k4v8"])
@pytest.mark.parametrize("name", ["demo/qwen3", "demo/gemma4", "demo/qwen3.5-moe"])
def test_some_layers_and_a_short_cache_have_all_problems_of_a_run(name: str, kv: str | None) -> None:
    model = tk.load(name, device="virtual:h200", scheme="int4-g32", progress=False)
    prompt = [1 + i % 100 for i in range(70)]
    with ops.record_problems() as found:
        tk.generate(model, prompt, "cuda-graph", max_new_tokens=3, context=369, kv=kv, prefill_chunk=50, eos=(), record=False)
    described = compile_ahead._problems(model, (50, 20, 1), 369, kv)
    assert set(found) <= {(kernel, shape) for kernel, shape, _ in described}


def test_layers_that_are_alike() -> None:
    """In Gemma 4, layers 0 to 4 have a sliding window, and layer 5 sees all positions."""
    layers = samples(tk.load("random/gemma4-31b", device="virtual:h200", scheme="int4-g32", progress=False))
    assert layers == [0, 1, 5, 11]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As on CUDA, but nothing is compiled: the number of launches of each call of `compile_launches`."""
    found: list[int] = []

    def compile_launches(launches: list[object], cancel: threading.Event | None = None) -> bool:
        found.append(len(launches))
        return cancel is None or not cancel.is_set()

    monkeypatch.setattr(compile_ahead, "compile_launches", compile_launches)
    monkeypatch.setattr(compile_ahead, "_supported", lambda model: True)
    monkeypatch.setattr(compile_ahead, "_current", lambda device: nullcontext())
    monkeypatch.setattr(compile_ahead, "direct", lambda first: True)
    monkeypatch.setattr(compile_ahead, "_failures", [])
    return found


@pytest.fixture
def model() -> CausalLM:
    return tk.load("demo/qwen3", device="virtual:h200", progress=False)


def test_what_is_compiled_again(model: CausalLM, compiled: list[int]) -> None:
    """Runs with similar numbers compile nothing, and those with others only what they need."""

    def run(prompt: int, context: int = 500, chunk: int = 512, decodes: bool = True, kv: str | None = None) -> bool:
        before = len(compiled)
        compile_ahead.compile_ahead(model, prompt, chunk, context, kv, decodes)
        return len(compiled) > before

    assert run(70)
    assert not run(71)
    assert not run(70, decodes=False)
    assert compiled[0] > 0
    assert run(80)  # a multiple of 16
    assert run(130)
    assert [run(141, chunk=131), run(141, chunk=131)] == [True, False]  # 131 and 10 tokens
    assert [run(5), run(6), run(6)] == [True, True, False]  # few tokens have programs of their own
    assert run(70, kv="int8")
    assert not run(70, kv="int8")
    assert not run(70, 501, kv="int8")
    assert run(70, 513, kv="int8")
    assert not run(70, 501)
    assert not run(501, 500)  # refused by the run
    forget()
    assert run(70)
    assert compile_ahead.failures() == []


def test_a_cancelled_run_compiles_again(model: CausalLM, compiled: list[int]) -> None:
    cancel = threading.Event()
    cancel.set()
    for _ in range(2):
        compile_ahead.compile_ahead(model, 20, 512, 100, None, True, cancel)
    assert len(compiled) == 2


def test_what_goes_wrong_is_left_to_the_run(model: CausalLM, compiled: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ahead.compile_ahead(model, 20, 512, 100, None, True)
    del model.layers[1:]  # layers are looked for again
    compile_ahead.compile_ahead(model, 200, 512, 500, None, True)
    model.layers.append(model.layers[0])
    monkeypatch.setattr(compile_ahead, "samples", lambda model: [99])
    compile_ahead.compile_ahead(model, 300, 512, 500, None, True)
    assert len(compiled) == 2
    assert compile_ahead.failures() == ["IndexError: index 99 is out of range"]


def test_nothing_is_compiled_under_a_mode_or_with_hooks(
    model: CausalLM, compiled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model.layers[0].register_forward_hook(lambda *arguments: None)
    compile_ahead.compile_ahead(model, 20, 512, 100, None, True)
    model.layers[0]._forward_hooks.clear()
    monkeypatch.setattr(compile_ahead, "direct", lambda first: False)
    compile_ahead.compile_ahead(model, 20, 512, 100, None, True)
    assert compiled == []


def test_without_cuda_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise AssertionError("unreachable")

    monkeypatch.setattr(compile_ahead, "compile_launches", fail)
    for device in ("cpu", "virtual:h200"):
        model = tk.load("demo/qwen3", device=device, progress=False)
        tk.generate(model, [1, 2, 3], max_new_tokens=2, record=False)
        Prefix(model, [1, 2], 16).free()
