"""What the lesson "Why each GPU gets its own config" says in words and numbers is what the app says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import toolkit as tk
from toolkit.kernels.base import Config
from toolkit.kernels.registry import find_kernel
from toolkit.models.shapes import SHAPES
from toolkit.tune.results import Tuning
from toolkit.tune.store import from_words
from toolkit.ui.lessons.autotune_per_gpu import SMALL, TIMED, for_all, stopwatch, timed_configs


def test_the_picture_shows_every_timed_config_of_the_model_it_names() -> None:
    kernel, shape = TIMED
    file = Path(tk.__file__).parent / "tune" / "tuned" / "h200.json"
    rows = json.loads(file.read_text())["kernels"][kernel][shape]
    (dots,) = timed_configs().lines
    assert dots.dots
    assert list(dots.y) == sorted(row["us"] for row in rows.values())
    assert len({from_words(words) for words in rows}) == len(dots.y)
    assert {row["verdict"] for row in rows.values()} <= {"ok", "slow"}  # "all of them have the same result"
    sizes = dict(word.split("=") for word in shape.split())
    config = SHAPES["qwen3-8b"].config
    wanted = {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
    assert {name: int(sizes[name]) for name in wanted} == {name: config[field] for name, field in wanted.items()}
    assert sizes["slots"] == "8192"


def test_the_figures_in_the_text() -> None:
    small = tk.GPUS[SMALL]
    assert (small.name, small.smem_per_sm_bytes) == ("NVIDIA L4", 100 << 10)
    capabilities = {(8, 6), (8, 9), (12, 0)}
    limits = {card.smem_per_block_optin_bytes for card in tk.GPUS.values() if card.compute_capability in capabilities}
    assert limits == {99 << 10}


@pytest.mark.parametrize(("blocks", "missing"), [
    ({"block_n": 128, "block_k": 32}, "block_m"), ({"block_m": 128, "block_n": 128}, "block_k"),
    ({"blok_m": 128, "block_n": 128}, "block_m, block_k"),
])  # fmt: skip
def test_a_config_without_a_number_of_the_kernel_is_named(
    blocks: dict[str, int], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.tune.explore", lambda *_, **__: Tuning(()))
    said = for_all(find_kernel(TIMED[0]), Config(**blocks, warps=8, stages=4), [SMALL])
    assert said == {f"numbers that the kernel needs and the config lacks: {missing}, wanted none": False}


def test_the_stopwatch_returns_what_triton_asks_for() -> None:
    times = stopwatch(lambda: sum(range(1000)), quantiles=(0.5, 0.2, 0.8))
    assert len(times) == 3
    assert min(times) > 0
