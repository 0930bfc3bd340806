"""The modelled rates of three large models against those measured on an H200."""

import json
from pathlib import Path

import pytest

import toolkit as tk
import toolkit.bench
from toolkit.bench.decode_runs import host_time
from toolkit.decode.prefix import Prefix
from toolkit.decode.strategies import STRATEGIES

RESULTS = Path(toolkit.bench.__file__).parent / "results"


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3.5-35b-a3b", "gemma4-31b"])
def test_modelled_rates_are_near_the_measured_ones(name):
    """Within 15 % with graphs, and within 25 % without."""
    real, virtual = (
        {row["context"]: row["strategies"] for row in json.loads((RESULTS / f"{gpu}_speed_{name}.json").read_text())["rows"]}
        for gpu in ("h200", "virtual_h200")
    )
    compared = 0
    for context, strategies in real.items():
        for strategy, measured in strategies.items():
            ratio, limit = virtual[context][strategy]["tok_per_s"] / measured["tok_per_s"], 0.25
            if STRATEGIES[strategy].capture != "none":
                limit = 0.15
            assert abs(ratio - 1) <= limit, (context, strategy, ratio)
            compared += 1
    assert compared >= 4


def test_steps_of_a_virtual_gpu_are_launched_as_from_a_tape():
    """A module with a hook can't be on a tape, so that Python launches every kernel of its steps."""
    model = tk.load("demo/qwen3", device="virtual:h200", progress=False)
    prefix, gpu = Prefix(model, [1, 2], 40), model.device
    with gpu.record() as trace:
        tk.generate(model, [1, 2, 3], max_new_tokens=4, eos=(), prefix=prefix)
    launches = int((trace.is_kind("kernel") & (trace["step"] == 3)).sum())
    taped = host_time(prefix, [1, 2, 3], "double-buffered", 512)["host_us_per_step"]
    assert launches > 20
    assert abs(taped - launches * gpu.spec.tape_host_ns / 1e3) < 2
    hook = model.layers[0].register_forward_hook(lambda module, given, out: None)
    assert host_time(prefix, [1, 2, 3], "double-buffered", 512)["host_us_per_step"] > 1.5 * taped
    hook.remove()
    prefix.free()
