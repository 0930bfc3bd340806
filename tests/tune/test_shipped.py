"""Check that the timings shipped with the package belong to the current source of its kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import toolkit.tune
from toolkit import tune
from toolkit.kernels.registry import find_kernel
from toolkit.tune.identity import fingerprint
from toolkit.tune.lookup import choose, forget
from toolkit.tune.store import words

FILES = sorted((Path(toolkit.tune.__file__).parent / "tuned").glob("*.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_row_is_of_another_kernel(file: Path) -> None:
    """If this fails because a kernel changed, time it again on that GPU or remove its rows (see CONTRIBUTING)."""
    for name, shapes in json.loads(file.read_text())["kernels"].items():
        kernel = find_kernel(name)
        for key, rows in shapes.items():
            shape = kernel.shape_type.from_key(key)
            assert shape.key == key
            assert set(rows) <= {words(config) for config in kernel.space(shape)}, (name, key)
            assert {row["kernel"] for row in rows.values()} == {fingerprint(kernel)}, (name, key)
            assert {row["verdict"] for row in rows.values()} <= {"ok", "slow", "excluded"}, (name, key)
            assert any(row["verdict"] == "ok" for row in rows.values()), (name, key)


def test_an_h200_that_is_not_there_gets_what_was_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    forget()
    kernel = find_kernel("int4_matmul")
    shape = kernel.known["gemma4-31b gate+up"]
    choice = choose(kernel, shape, "h200")
    row = tune.explore(kernel, shape, "h200", [choice.config], progress=False).best("h200")
    assert (choice.step, row.clock) == ("this device", "measured")
    assert 20e3 < row.ns < 50e3
