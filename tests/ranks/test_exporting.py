"""Packages of divided models: one per rank, written by one process and loaded by all ranks.

The pieces are traced here and not compiled, which would take a minute; `tests/exporting` compiles those of whole models.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest

import toolkit as tk
from tests.checkpoints import SHAPE, random_tensors, write_gguf
from tests.ranks import programs
from tests.ranks.pool import Ranks
from toolkit.core.errors import ModelError, PackageError, RankError
from toolkit.exporting import compiling, exporter, package
from toolkit.exporting.exporter import Package

OPTIONS: dict[str, Any] = {"device": "cpu", "context": 64, "progress": False}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """A package of demo/qwen3 for two ranks, whose methods hold no code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOOLKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(compiling, "check_compiler", lambda: "g++")
        patch.setattr(compiling, "find_key", lambda about, traceable, card: about)
        patch.setattr(compiling, "find_kept", lambda key: compiling.Compiled(b"", hashlib.sha256(b"").hexdigest(), True))
        folder = tmp_path_factory.mktemp("package")
        return tk.export("demo/qwen3", folder, budget="2 GiB", tensor_parallel=2, **OPTIONS)


def test_each_rank_has_a_package_of_its_part(exported: Package) -> None:
    assert repr(exported).startswith(f"Package({str(exported.path)!r}, 2 ranks with each ")
    assert sorted(path.name for path in exported.path.iterdir()) == ["rank-0-of-2", "rank-1-of-2"]
    whole = tk.load("demo/qwen3", "cpu", progress=False).report.weight_bytes
    plan = tk.plan("demo/qwen3", "cpu", budget="2 GiB", context=64, tensor_parallel=2)
    for rank in range(2):
        manifest, _ = package.read_manifest(exported.path / f"rank-{rank}-of-2")
        assert manifest["model"]["shard"] == [rank, 2]
        (weights,) = (entry["bytes"] for name, entry in manifest["files"].items() if name.startswith("weights-"))
        assert weights < 0.52 * whole
        assert [phase["host_bytes"] for phase in manifest["plan"]["export"]] == [phase.host_bytes for phase in plan.export]


def test_ranks_load_their_packages(ranks: Ranks, exported: Package) -> None:
    for error, shards in ranks.results(2, programs.loads_packages, str(exported.path)):
        assert error == 0  # the same weights as those of the loaded model
        assert shards == "2"


def test_pieces_of_a_part_compute_what_it_computes(ranks: Ranks) -> None:
    for found, wanted in ranks.results(2, programs.traced_tokens, "demo/qwen3"):
        assert found == wanted


def test_packages_for_other_ranks(ranks: Ranks, exported: Package, tmp_path: Path) -> None:
    for error in ranks.run(2, programs.loads_package, str(exported.path / "rank-0-of-2")):
        assert "it was exported for 1 rank, and this is rank" in str(error)
    assert all("no such folder" in str(error) for error in ranks.run(2, programs.loads_package, str(tmp_path / "none")))
    with pytest.raises(
        PackageError, match=r"exported for 2 ranks, and this is rank 0 of 1\. Load it with tensor_parallel=2 in"
    ):
        tk.load_exported(exported.path)
    with pytest.raises(PackageError, match=r"it is for rank 1 of 2, and this is rank 0 of 1"):
        tk.load_exported(exported.path / "rank-1-of-2", trust=True)
    with pytest.raises(RankError, match="this process belongs to no group"):
        exported.load()
    with pytest.raises(PackageError, match=r"contains other files \(rank-0-of-2, rank-1-of-2\)"):
        tk.export("demo/qwen3", exported.path, **OPTIONS)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(PackageError, match=r"for 2 ranks .*contains other files \(notes.txt\)"):
        tk.export("demo/qwen3", tmp_path, tensor_parallel=2, **OPTIONS)


def test_parts_of_two_exports(ranks: Ranks, exported: Package, tmp_path: Path) -> None:
    copy = shutil.copytree(exported.path, tmp_path / "copy")
    manifest, _ = package.read_manifest(copy / "rank-1-of-2")
    package.finish(copy / "rank-1-of-2", manifest | {"made": "2026-01-01T00:00:00+00:00"})
    for error in ranks.run(2, programs.loads_package, str(copy)):
        assert "the export time of rank 1 differs from rank 0's" in str(error)
        assert str(error).endswith("perhaps because one was interrupted. Export the model again")


def test_what_can_not_be_exported_for_ranks(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="it was loaded whole"):
        tk.export(tk.load("demo/qwen3", "cpu", progress=False), tmp_path, tensor_parallel=2, **OPTIONS)
    with pytest.raises(ModelError, match="an export for 0 ranks: not a whole number"):
        tk.export("demo/qwen3", tmp_path, tensor_parallel=0, **OPTIONS)
    with pytest.raises(ModelError, match="they can't divide"):
        tk.export("demo/qwen3", tmp_path / "out", tensor_parallel=3, **OPTIONS)
    with pytest.raises(tk.BudgetError, match="Use a budget of at least"):
        tk.export("demo/qwen3", tmp_path / "out", tensor_parallel=2, budget="1 MiB", **OPTIONS)


def test_no_part_is_exported_if_another_does_not_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = SHAPE | {"num_attention_heads": 8, "intermediate_size": 768, "num_hidden_layers": 1}
    write_gguf(tmp_path / "three_blocks.gguf", config, random_tensors(config), "Q4_K")
    model = str(tmp_path / "three_blocks.gguf")
    monkeypatch.setattr(exporter, "load_part", lambda *args: pytest.fail("the part of rank 0 is exported"))
    plan = tk.plan(model, "cpu", "2 GiB", 64, kv=None, tensor_parallel=2)
    needed = plan.export_peak_bytes  # of rank 1, which holds two of the three blocks
    with pytest.raises(tk.BudgetError) as caught:
        tk.export(model, tmp_path / "out", budget=needed - 1, tensor_parallel=2, **OPTIONS)
    assert caught.value.facts["needed_bytes"] == needed
    assert not (tmp_path / "out").exists()


def test_a_rank_that_no_group_has(exported: Package, tmp_path: Path) -> None:
    copy = shutil.copytree(exported.path / "rank-0-of-2", tmp_path / "copy")
    manifest, _ = package.read_manifest(copy)
    for shard in ([2, 2], [0, 0], [-1, 2], [0, 1 << 40]):
        manifest["model"]["shard"] = shard
        package.finish(copy, manifest)
        with pytest.raises(PackageError, match="missing or invalid fields"):
            tk.load_exported(copy, trust=True)
