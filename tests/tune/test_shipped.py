"""Check that the timings shipped with the package belong to the current source of its kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import toolkit as tk
import toolkit.tune
from toolkit import tune
from toolkit.core.units import seconds_text
from toolkit.kernels.kv_codes import KV_SCHEMES
from toolkit.kernels.registry import find_kernel
from toolkit.tune.identity import fingerprint
from toolkit.tune.lookup import choose, forget
from toolkit.tune.store import SHIPPED, Tuned, from_words

FILES = sorted((Path(toolkit.tune.__file__).parent / "tuned").glob("*.json"))

LONGEST = {
    "attention_codes", "attention_decode", "attention_prefill", "delta_chunks", "delta_step", "int4_matmul", "int4_prefill",
    "moe_prefill", "moe_step",
}  # fmt: skip


def untimed(model: Any) -> list[tuple[str, str, str]]:
    """Return (GPU, kernel, shape) of a model's slowest kernels that get a default config, which may take twice as long."""
    forget()  # what other tests looked up
    found = {one for kv in (None, *KV_SCHEMES) for one in model.kernel_shapes(32768, kv=kv) if one[0].name in LONGEST}
    assert {"attention_codes", "attention_decode", "attention_prefill"} <= {kernel.name for kernel, _ in found}
    places = [(gpu, kernel, shape) for kernel, shape in found for gpu in ("h100", "h200")]
    return sorted((gpu, k.name, s.key) for gpu, k, s in places if choose(k, s, gpu).step in ("model", "default"))


def current(file: Path) -> set[tuple[str, str]]:
    """Return the (kernel, shape) whose rows are all of the kernel's current code."""
    kernels = json.loads(file.read_text())["kernels"]
    return {
        (name, key)
        for name, shapes in kernels.items()
        for key, rows in shapes.items()
        if {row["kernel"] for row in rows.values()} == {fingerprint(find_kernel(name))}
    }


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_rows_are_of_the_current_code_or_timed_again_on_another_gpu(file: Path) -> None:
    """If this fails because a kernel changed, time it again (see CONTRIBUTING)."""
    anywhere = set().union(*map(current, FILES))
    for name, shapes in json.loads(file.read_text())["kernels"].items():
        kernel = find_kernel(name)
        for key, rows in shapes.items():
            shape = kernel.shape_type.from_key(key)
            assert shape.key == key
            configs = [from_words(row) for row in rows]
            assert {config.prefer(-1) for config in configs} <= set(kernel.space(shape)), (name, key)
            assert {config.carveout for config in configs} <= {-1, *kernel.carveouts}, (name, key)
            assert (name, key) in anywhere
            assert len({row["kernel"] for row in rows.values()}) == 1, (name, key)
            assert {row["verdict"] for row in rows.values()} <= {"ok", "slow", "excluded"}, (name, key)
            assert any(row["verdict"] == "ok" for row in rows.values()), (name, key)


@pytest.mark.parametrize("model", ["qwen3-8b", "gemma4-31b", "qwen3.5-35b-a3b"])
def test_kernels_that_take_longest_were_timed_for_all_caches(model: str) -> None:
    assert untimed(tk.load(f"random/{model}", device="virtual:h200", scheme="q4_k_m", progress=False)) == []


def test_a_gpu_that_is_not_there_gets_what_was_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    forget()
    kernel = find_kernel("int4_matmul")
    shape = kernel.known["gemma4-31b gate+up"]
    choice = choose(kernel, shape, "h100")
    row = tune.explore(kernel, shape, "h100", [choice.config], progress=False).best("h100")
    assert (choice.step, row.clock) == ("this device", "measured")
    assert 20e3 < row.ns < 50e3


def test_the_example_of_the_guide_has_the_shipped_time() -> None:
    """If this fails, run the example in docs/guides/kernels.md again, and update its output."""
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "kernels.md").read_text()
    shown = guide.partition("```text\n")[2].partition("```")[0]
    kernel = find_kernel("attention_decode")
    key = kernel.known["qwen3-8b 8k"].key
    rows = Tuned.read(SHIPPED / "h200.json").configs(kernel.name, key)
    us, best = min((row.us or 0.0, config) for config, row in rows.items() if row.verdict == "ok")
    assert shown.startswith(f"{kernel.name} {key}\n")
    assert f"  {from_words(best)!r}  # h200: {seconds_text(us / 1e6)} measured" in shown
