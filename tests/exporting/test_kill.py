"""An export that is killed at any moment leaves the package that was there before, or none, and goes on where it was."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="exports are killed as forks of one process")
def test_ten_kills_at_random_moments(exported, tmp_path):
    # What the other tests compiled, but for one piece: the first kills are to meet a compiler at work.
    cache = tmp_path / "cache" / "compiled"
    shutil.copytree(Path(os.environ["TOOLKIT_CACHE"]) / "compiled", cache)
    head = next(entry["sha256"] for name, entry in exported.manifest["files"].items() if "decode-head" in name)
    next(cache.glob(f"*-{head}.pt2")).unlink()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.exporting.kill", "10", str(tmp_path / "package")],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=600,
        env=os.environ | {"TOOLKIT_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    *attempts, last = map(json.loads, done.stdout.splitlines())
    assert last["kills"] == sum(one["how"] == "killed" for one in attempts) == 10
    assert last["same_tokens"]
