"""What the first run of a process compiles, and where: `toolkit.decode.compile_ahead`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys, threading
from triton import knobs
import toolkit as tk
from toolkit.decode import loop

name, scheme, kv, ahead = json.loads(sys.argv[1])
late, early = [], []

def tell(*, src, **others):
    (late if threading.current_thread() is threading.main_thread() else early).append(src.name)

knobs.compilation.listener = tell
if not ahead:
    loop.compile_ahead = lambda *arguments: None
model = tk.load(name, device="cuda", scheme=scheme, progress=False)
prompt = [1 + i % 100 for i in range(70)]
run = tk.generate(model, prompt, "cuda-graph", max_new_tokens=8, kv=kv, prefill_chunk=50, eos=())
compilers = sorted({"torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules))
print(json.dumps({"tokens": run.tokens, "late": late, "early": early, "compilers": compilers}))
"""


def first_run(cache: Path, *arguments: object) -> dict[str, list[str]]:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, json.dumps(arguments)]
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    return json.loads(said.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "scheme", "kv"),
    [("demo/qwen3", None, None), ("demo/gemma4", "int4-g32", "int8"), ("demo/qwen3.5-moe", "int4-g32", None)],
)
def test_a_run_compiles_its_kernels_before_it_begins(name: str, scheme: str | None, kv: str | None, tmp_path: Path) -> None:
    """All of them, and each once. The run is the same as one that compiles when it launches, and imports no other compiler."""
    found = first_run(tmp_path / "ahead", name, scheme, kv, True)
    plain = first_run(tmp_path / "plain", name, scheme, kv, False)
    assert found["late"] == []
    assert set(plain["late"]) <= set(found["early"])
    assert plain["early"] == []
    assert found["tokens"] == plain["tokens"]
    assert found["compilers"] == plain["compilers"] == []
