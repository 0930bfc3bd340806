"""Synthetic tunings for display tests: with every verdict, measured and modeled, empty, and without a config that runs."""

from __future__ import annotations

from toolkit.kernels.base import Config
from toolkit.tune.results import Row, Tuning

GPUS = ("rtx-3090", "rtx-4090", "rtx-5090", "a100-80g", "l4", "l40s", "h200", "b200", "rtx-pro-6000")
SMALL_CARDS = ("rtx-3090", "rtx-4090", "rtx-5090", "l4", "l40s", "rtx-pro-6000")
CONFIGS = tuple(Config(block_m=m, block_n=64, warps=w, stages=s) for m in (32, 64, 128) for w in (4, 8) for s in (2, 4))


def row(gpu: str, config: Config, n: int, **known: object) -> Row:
    """Return the row of a config that fits, with a time that depends on the GPU and the config."""
    ns = 20_000.0 * (1 + GPUS.index(gpu) % 4) * (1 + 0.07 * ((n * 5 + GPUS.index(gpu)) % 12))
    made: dict[str, object] = {
        "verdict": "untried", "ns": ns, "clock": "modelled", "shared_bytes": 8192 * config["block_m"] * config.stages // 32,
        "registers": 40 + 16 * n, "spill_bytes": 8 * max(n - 8, 0), "occupancy": 0.75 / (1 + n % 3),
        "occupancy_limit": "shared memory", "ptx_bytes": 24_000 + 900 * n, "sass_bytes": 6_000 + 300 * n,
        "bytes": 25_165_824, "flops": 3.4e10, "memory_ns": 9_000.0,
        "compute_ns": 4_000.0 * (1 + n % 4), "bound": "bandwidth",
    }  # fmt: skip
    return Row("a_matmul", "m=1024 n=4096 k=4096", gpu, config, **{**made, **known})  # type: ignore[arg-type]


def needs(gpu: str, shared: int) -> dict[str, object]:
    why = f"needs {shared:,} B of shared memory, {gpu.upper()} allows 101,376"
    return {"verdict": "excluded", "reason": why, "shared_bytes": shared}


def every_verdict() -> Tuning:
    """Return twelve configs on nine GPUs: measured on the H200 (two with wrong results), one compiles on no GPU."""
    rows = []
    for gpu in GPUS:
        for n, config in enumerate(CONFIGS):
            known: dict[str, object] = {}
            if config["block_m"] == 128 and config.stages == 4 and gpu in SMALL_CARDS:
                known = needs(gpu, 131_072)
            elif n == 10:
                unknown = ("ns", "shared_bytes", "registers", "spill_bytes", "occupancy", "ptx_bytes", "sass_bytes")
                reason = "CompileTimeAssertionFailure at line 12: BLOCK_M < 128"
                known = {"verdict": "failed", "reason": reason, "clock": "", "bound": "", **dict.fromkeys(unknown)}
            elif gpu == "h200":
                known = {
                    "verdict": "ok",
                    "clock": "measured",
                    "spread_ns": 300.0,
                    "cosine": 0.9999912,
                    "max_error": 2e-4 * (n + 1),
                }
                if n in (3, 6):
                    reason = "cosine 0.97120 is below the required 0.999 (inputs of seed 7)"
                    known |= {"verdict": "wrong", "reason": reason, "clock": "modelled", "spread_ns": None, "max_error": 0.31}
                if n == 1:
                    known |= {
                        "verdict": "slow",
                        "reason": "timed once only, because it is much slower than the best config",
                        "ns": 900_000.0,
                    }
            rows.append(row(gpu, config, n, **known))
    return Tuning(tuple(rows), ("rtx-4090 is not in this machine: its times are modelled",))


def nothing_runs() -> Tuning:
    """Two configs that fit neither of two GPUs."""
    gpus = ("rtx-5090", "l4")
    return Tuning(tuple(row(gpu, config, n, **needs(gpu, 262_144)) for gpu in gpus for n, config in enumerate(CONFIGS[:2])))
