"""What the first run of a process compiles, and where: `toolkit.decode.compile_ahead`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, sys, threading
from triton import knobs
import toolkit as tk
from toolkit.decode import compile_ahead, loop

name, scheme, kv, ahead = json.loads(sys.argv[1])
late, early = [], []
main = threading.current_thread()

def tell(*, src, **others):
    (late if threading.current_thread() is main else early).append(src.name)

knobs.compilation.listener = tell
if not ahead:
    loop.compile_ahead = lambda *arguments: None
model = tk.load(name, device="cuda", scheme=scheme, progress=False)
tokens, compiled = [], []
for length, chunk, strategy, context in [
    (70, 50, "cuda-graph", None),
    (75, 49, "cuda-graph", None),  # other lengths of the same ranges, and an odd position
    (70, 63, "double-buffered", None),  # ends with seven tokens, as many as a decode step may feed
    (64, 63, "double-buffered", None),  # and with one
    (300, 2048, "roundtrip", 1000),  # longer than the window of a sliding layer
]:
    prompt = [1 + i % 100 for i in range(length)]
    run = tk.generate(
        model, prompt, strategy, max_new_tokens=8, kv=kv, prefill_chunk=chunk, context=context, temperature=0.8, seed=1, eos=()
    )
    tokens.append(run.tokens)
    compiled.append({"late": list(late), "early": list(early)})
    late.clear(), early.clear()
compilers = sorted({"torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules))
failures = compile_ahead.failures()
print(json.dumps({"tokens": tokens, "compiled": compiled, "compilers": compilers, "failures": failures}))
"""


def first_run(cache: Path, *arguments: object) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, json.dumps(arguments)]
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert not ended.returncode, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "scheme", "kv"),
    [("demo/qwen3", None, None), ("demo/gemma4", "int4-g32", "int8"), ("demo/qwen3.5-moe", "int4-g32", None)],
)
def test_a_run_compiles_its_kernels_before_it_begins(name: str, scheme: str | None, kv: str | None, tmp_path: Path) -> None:
    """All of them, and each once. The run is the same as one that compiles when it launches, and imports no other compiler."""
    found = first_run(tmp_path / "ahead", name, scheme, kv, True)
    plain = first_run(tmp_path / "plain", name, scheme, kv, False)
    assert found["failures"] == found["compilers"] == plain["compilers"] == []
    assert found["tokens"] == plain["tokens"]
    first, similar, *_ = found["compiled"]
    assert [one["late"] for one in found["compiled"]] == [[]] * 5
    assert similar["early"] == []
    assert set(plain["compiled"][0]["late"]) <= set(first["early"])
    assert [one["early"] for one in plain["compiled"]] == [[]] * 5
