"""What the lesson "Why each GPU gets its own config" says in words and numbers is what the app says."""

from __future__ import annotations

import json
from pathlib import Path

import toolkit as tk
from toolkit.models.shapes import SHAPES
from toolkit.tune.store import from_words
from toolkit.ui.lessons.autotune_per_gpu import SMALL, TIMED, stopwatch, timed_configs


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


def test_the_stopwatch_returns_what_triton_asks_for() -> None:
    times = stopwatch(lambda: sum(range(1000)), quantiles=(0.5, 0.2, 0.8))
    assert len(times) == 3
    assert min(times) > 0
