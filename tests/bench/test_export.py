"""The benchmark of exports deletes nothing but the packages that it exported itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toolkit.bench import export


def test_only_the_packages_of_earlier_runs_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = []

    def process(what: str, asked: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
        assert not list(Path(asked["folder"]).glob("*"))
        Path(asked["folder"], "methods").mkdir(parents=True)
        exported.append(what)
        return {"about": {}, "seconds": 1.0, "phases": [{}]}

    monkeypatch.setattr(export, "_process", process)
    asked = ["demo/qwen3", "--runs", "2", "--decode", "0", "--out", str(tmp_path / "record.json"), "--folder"]
    kept = tmp_path / "kept" / "thesis.txt"
    kept.parent.mkdir()
    kept.write_text("years of work")
    for folder in (kept.parent, kept):
        with pytest.raises(SystemExit):
            export.main([*asked, str(folder)])
    assert kept.read_text() == "years of work"
    assert not exported
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for folder in (tmp_path / "new", tmp_path / "link"):
        export.main([*asked, str(folder)])
        assert [path.name for path in folder.iterdir()] == ["methods"]
    assert exported == ["export"] * 4
    assert len(json.loads((tmp_path / "record.json").read_text())["exports"]) == 2
