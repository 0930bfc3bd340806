"""Tests that loaded models can be copied and pickled: the copy is on the same device and generates the same tokens."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import toolkit as tk
from toolkit.gpu.opening import open_device

UNPICKLE = """
import pickle, sys
import toolkit as tk

with open(sys.argv[1], "rb") as file:
    model = pickle.load(file)
print(model.device.name, *tk.generate(model, "Hello", max_new_tokens=4).tokens)
"""


@pytest.mark.parametrize("device", ["cpu", "virtual:h200"])
@pytest.mark.parametrize("options", [{}, {"scheme": "q4_k_m"}, {"engine": "hf"}], ids=str)
def test_a_copy_has_weights_of_its_own_on_the_same_device(device: str, options: dict[str, str], tmp_path: Path) -> None:
    if "engine" in options:
        pytest.importorskip("transformers")
    model = tk.load("demo/qwen3", device=device, progress=False, **options)
    tokens = tk.generate(model, "Hello", max_new_tokens=4).tokens
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.device is model.device
        assert all(ours is not theirs for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True))
        assert tk.generate(twin, "Hello", max_new_tokens=4).tokens == tokens
    file = tmp_path / "model.pickle"
    file.write_bytes(pickle.dumps(model))
    said = subprocess.check_output([sys.executable, "-c", UNPICKLE, str(file)], text=True)
    assert said.split() == [device, *map(str, tokens)]


def test_copies_of_a_model_without_values_outlive_it() -> None:
    model = tk.load("random/qwen3-0.6b", device="virtual:h200", progress=False)
    twins = [copy.copy(model), copy.deepcopy(model), tk.quantize(model, "int4", progress=False)]
    del model
    gc.collect()
    for twin in twins:
        assert twin.new_cache(64).states[0].keys._host.is_meta


def test_a_copy_of_a_device_is_that_device() -> None:
    for device in (open_device("cpu"), open_device("virtual:h200")):
        assert copy.copy(device) is copy.deepcopy(device) is pickle.loads(pickle.dumps(device)) is device
