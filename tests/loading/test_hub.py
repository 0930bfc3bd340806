"""Tests of `tk.load("ORG/REPO")` against a server on the loopback address, and against the cache it leaves."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants

import toolkit as tk
from tests.checkpoints import SHAPE, random_tensors, write_folder, write_gguf
from tests.int4_folders import GROUP, write_int4_folder
from tests.loading.hub_server import COMMIT, Hub, entry
from toolkit.core.errors import CancelledError, DeviceError, FormatError, HubError, ToolkitError
from toolkit.loading import download
from toolkit.loading.checkpoint import DEMOS
from toolkit.loading.hub import _entry, find, is_repository

IDS = torch.tensor([[3, 141, 59, 265, 35]])
MODEL, GGUF = "team/small", "team/small-gguf"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two repositories: shards in safetensors with files that no load needs, and three GGUF models, one of them in a folder."""
    root = tmp_path_factory.mktemp("hub")
    folder = write_folder(root / MODEL, SHAPE, random_tensors(SHAPE), shards=2)
    for name in ("pytorch_model.bin", "modeling_qwen3.py", "README.md", "original/consolidated.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"not to be downloaded")
    for name in ("small-F16.gguf", "small-Q8_0.gguf", "parts/small.gguf"):
        (root / GGUF / name).parent.mkdir(parents=True, exist_ok=True)
        write_gguf(root / GGUF / name, SHAPE, random_tensors(SHAPE), "F16" if "F16" in name else "Q8_0")
    return root


@pytest.fixture
def hub(stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(download, "_WAIT_S", 0.0)
    monkeypatch.setattr(download, "_CHUNK", 1 << 16)
    with Hub({name: stored / name for name in (MODEL, GGUF)}) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.address)  # as HF_ENDPOINT does when huggingface_hub is imported
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield server


def load(name: str = MODEL, **options: Any) -> Any:
    return tk.load(name, **{"device": "cpu", "dtype": torch.float32, "progress": False} | options)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS)


def refusal(name: str = MODEL, **options: Any) -> HubError:
    with pytest.raises(HubError) as caught:
        load(name, **options)
    return caught.value


def blobs() -> dict[str, int]:
    """Files of the cache that hold bytes, with their sizes."""
    return {path.name: path.stat().st_size for path in Path(constants.HF_HUB_CACHE).rglob("blobs/*")}


def test_a_repository_gives_the_model_of_its_folder(hub: Hub, stored: Path) -> None:
    reports: list[tuple[int, int, str]] = []
    model = load(progress=lambda *report: reports.append(report))
    torch.testing.assert_close(logits(model), logits(load(stored / MODEL)), atol=0, rtol=0)
    snapshot = Path(model.report.source)
    assert snapshot == Path(huggingface_hub.snapshot_download(MODEL, allow_patterns=["*.safetensors"], local_files_only=True))
    names = {path.name for path in snapshot.iterdir()}
    assert names == {"config.json", "model.safetensors.index.json", *(f"model-0000{i}-of-00002.safetensors" for i in (1, 2))}
    total = sum(blobs().values())
    assert any(report[:2] == (total, total) for report in reports)
    hub.requests.clear()
    assert torch.equal(logits(load()), logits(model))
    assert [path for _, path, _ in hub.requests] == [f"/api/models/{MODEL}/revision/main"]


@pytest.mark.parametrize("file", ["small-Q8_0.gguf", "parts/small.gguf"])
def test_a_gguf_file_of_a_repository(hub: Hub, stored: Path, file: str) -> None:
    model = load(f"{GGUF}:{file}")
    torch.testing.assert_close(logits(model), logits(load(stored / GGUF / file)), atol=0, rtol=0)
    assert len(blobs()) == 1


def test_a_gguf_file_with_an_extension_in_capitals(hub: Hub, stored: Path, tmp_path: Path) -> None:
    folder = hub.repositories["team/capitals"] = tmp_path / "capitals"
    folder.mkdir()
    shutil.copy(stored / GGUF / "small-F16.gguf", folder / "SMALL.GGUF")
    assert torch.equal(logits(load("team/capitals")), logits(load(folder / "SMALL.GGUF")))
    assert not is_repository("team/SMALL.GGUF")


def test_a_demo_in_a_repository_keeps_its_tokenizer_and_text(hub: Hub) -> None:
    hub.repositories["team/demo"] = DEMOS / "qwen3"
    texts = [tk.generate(load(name), "The capital", max_new_tokens=4).text for name in ("team/demo", "demo/qwen3")]
    assert texts[0] == texts[1]


def test_a_repository_brings_its_templates(hub: Hub, tmp_path: Path) -> None:
    folder = hub.repositories["team/demo"] = Path(shutil.copytree(DEMOS / "qwen3", tmp_path / "demo"))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0] }}")
    assert load("team/demo").tokenizer.chat([{"role": "user", "content": "Hi"}], tools=["a tool"]) == "a tool"


def test_shapes_are_known_before_the_download(hub: Hub, stored: Path) -> None:
    for name, local in ((MODEL, stored / MODEL), (f"{GGUF}:small-F16.gguf", stored / GGUF / "small-F16.gguf")):
        assert tk.costs(name).to_pandas().equals(tk.costs(local).to_pandas())
    assert not [size for size in blobs().values() if size > 1 << 16]
    assert tk.plan(MODEL, "virtual:rtx-5090").check().fits


def test_a_model_that_does_not_fit_is_not_downloaded(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.loading.room.free_bytes", lambda device: 1 << 20)
    for name in (MODEL, f"{GGUF}:small-F16.gguf"):
        with pytest.raises(DeviceError, match="its weights need"):
            load(name)
    assert max(blobs().values()) < 1 << 16


def test_a_full_disk_is_noticed_before_and_during_the_download(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
        error = refusal()
        assert "1000 B are free" in str(error)
        assert error.facts["needed_bytes"] == sum(p.stat().st_size for p in hub.repositories[MODEL].glob("model-*"))
    with monkeypatch.context() as patch:
        patch.setattr(download.Repository, "_fetch", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        assert "is full" in str(refusal(GGUF + ":small-F16.gguf"))


def test_an_interrupted_download_continues(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.core.progress.REPORTS_PER_S", 1e9)
    name = "small-F16.gguf"

    def interrupt(done: int, *_: Any) -> None:
        if done > 1 << 17:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(f"{GGUF}:{name}", progress=interrupt)
    [(partial, arrived)] = blobs().items()
    assert partial.endswith(".incomplete")
    assert 0 < arrived < (hub.repositories[GGUF] / name).stat().st_size
    hub.requests.clear()
    model = load(f"{GGUF}:{name}")
    assert hub.sent(f"{GGUF}/{name}")[-1].startswith(f"bytes={arrived}-")
    assert torch.equal(logits(model), logits(load(hub.repositories[GGUF] / name)))
    assert [name for name in blobs() if name.endswith(".incomplete")] == []


def test_cancel_keeps_the_part_that_arrived(hub: Hub) -> None:
    cancelled = threading.Event()
    with pytest.raises(CancelledError, match="kept"):
        load(f"{GGUF}:small-F16.gguf", cancel=cancelled, progress=lambda done, *_: done and cancelled.set())
    assert [name for name in blobs() if name.endswith(".incomplete")]


def test_headers_can_be_cancelled_and_are_resumed(hub: Hub) -> None:
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(CancelledError, match="reading the headers"):
        load(f"{GGUF}:small-F16.gguf", cancel=cancelled)
    assert hub.sent(f"{GGUF}/small-F16.gguf") == []
    hub.cuts, hub.cut_bytes = 1, 300_000
    assert len(tk.costs(f"{GGUF}:small-F16.gguf").to_pandas())
    assert len(hub.sent(f"{GGUF}/small-F16.gguf")) == 2


@pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "no ranges"])
def test_lost_connections_are_resumed(hub: Hub, ranges: bool) -> None:
    def cut(*_: Any) -> None:
        if not hub.cut_bytes:  # now the download begins
            hub.cuts, hub.cut_bytes, hub.ranges = 3, 300_000, ranges

    model = load(f"{GGUF}:small-F16.gguf", progress=cut)
    assert hub.cuts == 0
    assert torch.equal(logits(model), logits(load(hub.repositories[GGUF] / "small-F16.gguf")))


def test_a_file_that_ends_early_is_an_error(hub: Hub) -> None:
    hub.most_bytes = 1_000_000
    assert "only 1,000,000 of 2,674,592 bytes" in str(refusal(f"{GGUF}:small-F16.gguf"))


def test_bytes_with_another_hash_are_not_kept(hub: Hub, stored: Path) -> None:
    etag = entry(stored / GGUF, stored / GGUF / "small-F16.gguf")["lfs"]["sha256"]
    partial = Path(constants.HF_HUB_CACHE) / f"models--{GGUF.replace('/', '--')}" / "blobs" / f"{etag}.incomplete"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"something else")
    assert "hash" in str(refusal(f"{GGUF}:small-F16.gguf"))
    assert blobs() == {}
    assert logits(load(f"{GGUF}:small-F16.gguf")).isfinite().all()


def test_without_a_network_the_cache_is_used(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits(load()), logits(load(f"{GGUF}:small-F16.gguf"))
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert torch.equal(logits(load()), expected[0])
        assert "HF_HUB_OFFLINE is set" in str(refusal("team/other"))
    hub.answers["/api/"] = 503, ""
    assert torch.equal(logits(load()), expected[0])
    assert "status 503" in str(refusal("team/other"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # no server listens there
    assert torch.equal(logits(load(f"{GGUF}:small-F16.gguf")), expected[1])
    assert "cannot be reached" in str(refusal("team/other"))


def test_offline_loads_take_the_commit_that_the_branch_had_last(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    other = "d" * 40
    load()
    hub.commit = other
    load(revision=other)
    load()  # main has moved to a commit that is already there
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert Path(load().report.source).name == other
    hub.commit = COMMIT
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", lambda *_: (_ for _ in ()).throw(OSError(errno.EROFS, "read-only")))
        assert Path(load().report.source).name == COMMIT


def test_a_login_page_is_not_the_hub(hub: Hub) -> None:
    hub.login_page = True
    assert "the network may show a login page" in str(refusal())
    hub.login_page = False
    expected = logits(load())
    hub.login_page = True
    assert torch.equal(logits(load()), expected)


@pytest.mark.parametrize(
    "options",
    [{"engine": "hf", "scheme": "int8"}, {"engine": "hf", "dtype": "int3"}, {"engine": "hf", "device": "x"}, {"device": "x"}],
    ids=str,
)
def test_wrong_options_are_refused_before_the_download(hub: Hub, options: dict[str, str]) -> None:
    with pytest.raises(ToolkitError):
        load(f"{GGUF}:small-F16.gguf", **options)
    assert not [path for _, path, _ in hub.requests if "resolve" in path]


def test_transformers_is_missed_before_the_download(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ToolkitError, match="Install the extra"):
        load(f"{GGUF}:small-F16.gguf", engine="hf")
    assert blobs() == {}


def test_an_index_without_a_map_is_an_error(hub: Hub, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", SHAPE, random_tensors(SHAPE), shards=2)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": []}')
    hub.repositories["team/index"] = folder
    assert "has no weight_map" in str(refusal("team/index"))


def test_errors_say_what_is_missing(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no such repository" in str(refusal("team/absent"))
    assert "no revision 'v2'" in str(refusal(revision="v2"))
    for revision in ("../../x", "/x", "..\\x", "C:x", "a\nb", 5):
        assert "no revision can have" in str(refusal(revision=revision))
    assert "Leave out revision=" in str(refusal("demo/qwen3", revision="v2"))
    for name in ("team/small.git", "team/" + "a" * 97, "team-/small"):
        assert "no repository can have this name" in str(refusal(name))
    monkeypatch.setattr("huggingface_hub.utils._headers.get_token", lambda: None)
    assert "no access token is saved here" in str(refusal(token=True))
    assert "the access token is an int" in str(refusal(token=5))
    several = refusal(GGUF)
    assert several.facts["files"] == ["parts/small.gguf", "small-F16.gguf", "small-Q8_0.gguf"]
    assert all(name in str(several) for name in several.facts["files"])
    assert 'Pass one of them: "team/small-gguf:small-Q8_0.gguf"' in str(refusal(f"{GGUF}:Q8_0"))
    hub.answers[f"/api/models/{MODEL}"] = 403, "GatedRepo"
    assert "Accept the conditions on" in str(refusal())
    hub.answers[f"/api/models/{MODEL}"] = 401, ""
    assert "pass token=" in str(refusal())


@pytest.mark.parametrize(
    ("method", "file", "options"),
    [
        ("gptq", "config.json", {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": GROUP}}),
        ("gptq", "quantize_config.json", {"bits": 4, "group_size": GROUP, "desc_act": False}),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": GROUP}),
        ("hqq", "config.json", {}),
    ],
    ids=["config", "quantize_config", "quant_config", "no config"],
)
def test_quantized_folders_are_described_after_their_download(
    hub: Hub, tmp_path: Path, method: str, file: str, options: dict[str, Any]
) -> None:
    path = tmp_path / "m"
    write_int4_folder(path, method, SHAPE)
    (path / "config.json").write_text(json.dumps(SHAPE))
    (path / file).write_text(json.dumps((SHAPE if file == "config.json" else {}) | options))
    hub.repositories["team/quantized"] = path
    with pytest.raises(HubError, match="Download it first"):
        tk.costs("team/quantized")
    assert torch.equal(logits(load("team/quantized")), logits(load(str(path))))
    assert tk.costs("team/quantized").weight_bytes


def test_unsupported_methods_are_refused_before_the_download(hub: Hub, tmp_path: Path) -> None:
    write_folder(tmp_path / "m", SHAPE | {"quantization_config": {"load_in_4bit": True}}, random_tensors(SHAPE))
    hub.repositories["team/bitsandbytes"] = tmp_path / "m"
    with pytest.raises(FormatError, match="'bitsandbytes', which isn't supported"):
        load("team/bitsandbytes")
    assert max(blobs().values()) < 1 << 16


def test_adapters_are_refused_before_the_download(hub: Hub, tmp_path: Path) -> None:
    write_folder(tmp_path / "m", SHAPE, random_tensors(SHAPE))
    (tmp_path / "m" / "adapter_config.json").write_text("{}")
    hub.repositories["team/adapter"] = tmp_path / "m"
    with pytest.raises(FormatError, match="would not be applied"):
        load("team/adapter")
    assert max(blobs().values()) < 1 << 16


def test_pickles_are_not_downloaded(hub: Hub, tmp_path: Path) -> None:
    for name in ("config.json", "pytorch_model.bin"):
        (tmp_path / name).write_text("{}")
    hub.repositories["team/pickle"] = tmp_path
    assert "pickles (pytorch_model.bin)" in str(refusal("team/pickle"))
    assert not [path for _, path, _ in hub.requests if "resolve" in path]


def test_the_token_goes_to_the_hub_and_not_to_the_storage(hub: Hub) -> None:
    load(f"{GGUF}:small-F16.gguf", token="hf_secret", revision=COMMIT)
    to_storage = [headers for _, path, headers in hub.requests if path.startswith("/storage/")]
    assert to_storage
    assert not [headers for headers in to_storage if "authorization" in headers]
    to_hub = [headers for _, path, headers in hub.requests if not path.startswith("/storage/")]
    assert all(headers["authorization"] == "Bearer hf_secret" for headers in to_hub)


@pytest.mark.parametrize("token", ["hf_se\ncret", "hf_s\u00e9cret", "hf_se\0cret", " "])
def test_a_token_is_never_shown(hub: Hub, token: str) -> None:
    error = refusal(token=token)
    assert "the access token is empty or has characters" in str(error)
    assert "cret" not in "".join(traceback.format_exception(error))
    load(token="hf_secret\n")
    assert {headers["authorization"] for _, path, headers in hub.requests if "/storage/" not in path} == {"Bearer hf_secret"}


def test_a_refused_header_is_not_shown(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.hf_api.get_token", lambda: "hf_zq7\0", raising=False)
    monkeypatch.setattr("huggingface_hub.utils._headers.get_token", lambda: "hf_zq7\0")
    error = refusal()
    assert "(LocalProtocolError)" in str(error)
    assert "zq7" not in "".join(traceback.format_exception(error))


def test_a_repository_does_not_show_its_token(hub: Hub) -> None:
    assert "secret" not in repr(find(MODEL, None, "hf_secret"))


@pytest.mark.parametrize("name", ["C:/x/evil.gguf", "C:x.safetensors", "..\\x.gguf", "/x.gguf", "a/../../x.gguf", "x\n.gguf"])
def test_names_that_leave_the_folder_are_not_files(name: str) -> None:
    sibling = SimpleNamespace(rfilename=name, size=1, lfs=None, blob_id="a" * 40)
    assert _entry(sibling) is None
    assert _entry(SimpleNamespace(**vars(sibling) | {"rfilename": "a/b-ü.gguf"})) is not None


def test_a_relative_cache_and_a_disk_without_links(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "relative")
    assert len(tk.costs(MODEL).to_pandas())
    load()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "other")
    monkeypatch.setattr(Path, "symlink_to", lambda *_: (_ for _ in ()).throw(OSError("a required privilege is not held")))
    load()


def test_a_full_temporary_folder_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.copyfile", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    assert "the temporary folder cannot be written ([Errno 28] full). Free space there, or set TMPDIR" in str(refusal())


KILLED = """
import os, signal, sys
from toolkit.loading.hub import find
with find(sys.argv[1], None, None).headers(print):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_headers_that_a_killed_process_left_are_deleted(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    known = {"HF_ENDPOINT": hub.address, "HF_HUB_CACHE": constants.HF_HUB_CACHE, "TMPDIR": str(folder)}
    killed = subprocess.run([sys.executable, "-c", KILLED, MODEL], env=os.environ | known)
    assert killed.returncode == -signal.SIGKILL
    assert list(folder.glob("*/team/small/*.safetensors"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    load()
    assert list(folder.iterdir()) == []


def test_local_paths_come_first(hub: Hub, stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(stored)
    assert Path(load(MODEL).report.source) == Path(MODEL)
    assert hub.requests == []


@pytest.mark.parametrize("name", ["model", "a/b/c", "./a/b", "/a/b", "~/a", "models/x.gguf", "a/../b", "a--b/c", "demo/", ""])
def test_paths_are_not_repositories(name: str) -> None:
    assert not is_repository(name)
    with pytest.raises(ToolkitError):
        load(name)


def test_a_damaged_config_is_reported_before_the_weights_are_downloaded(hub: Hub, tmp_path: Path) -> None:
    write_folder(tmp_path / "m", SHAPE | {"num_hidden_layers": 3}, random_tensors(SHAPE))
    hub.repositories["team/damaged"] = tmp_path / "m"
    with pytest.raises(FormatError, match=r"^weights of team/damaged: they lack \d+ of \d+ tensors"):
        load("team/damaged")
    assert max(blobs().values()) < 1 << 16
