"""Packages that aren't what they say: every one refused by name, and nothing of it run."""

import hashlib
import json
import os
import random
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

import toolkit as tk
from toolkit.core.errors import DeviceError, PackageError
from toolkit.exporting import compiling
from toolkit.exporting import package as folders


def rewrite(folder, **changes):
    """A manifest changed by somebody who knows how to hash it."""
    manifest = json.loads((folder / folders.MANIFEST).read_bytes())
    (folder / folders.MANIFEST).write_bytes(folders._text(manifest | changes))


@pytest.fixture(autouse=True)
def loads(monkeypatch):
    """Loading native code is a failure here, but where a test says otherwise: by this."""
    load = compiling.load_piece
    monkeypatch.setattr(compiling, "load_piece", lambda data, device: pytest.fail("code of a bad package was loaded"))
    return load


def refused(folder, match, **options):
    with pytest.raises(PackageError, match=match) as caught:
        tk.load_exported(folder, progress=False, **options)
    return caught.value


def test_one_flipped_byte_anywhere(package):
    rng = random.Random(0)
    for path in sorted(p for p in package.rglob("*") if p.is_file() and p.name != ".lock"):
        data = path.read_bytes()
        for _ in range(6 if path.name == folders.MANIFEST else 2):
            where = rng.randrange(len(data))
            path.write_bytes(data[:where] + bytes([data[where] ^ (1 << rng.randrange(8))]) + data[where + 1 :])
            error = refused(package, "changed|isn't valid JSON|isn't the manifest of a package|version", trust=True)
            assert path.name in str(error) or path.name == folders.MANIFEST
        path.write_bytes(data)


def test_files_cut_or_longer_or_missing(package):
    path = next(package.glob("methods/*"))
    data = path.read_bytes()
    for wrong in (data[:-1], data + b"x", b""):
        path.write_bytes(wrong)
        refused(package, f"{path.name} was changed or damaged: it has", trust=True)
    path.unlink()
    refused(package, f"{path.name} is missing", trust=True)


def test_a_package_of_somebody_else_has_to_be_trusted(package, monkeypatch, tmp_path):
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "another user"))
    monkeypatch.setattr(folders, "_made_by_this_process", set())
    error = refused(package, "native code, and you didn't export it on this machine")
    assert "trust=True" in error.do
    with pytest.raises(pytest.fail.Exception, match="was loaded"):  # whole and trusted: it would run
        tk.load_exported(package, trust=True, progress=False)


def test_a_manifest_that_was_changed_and_hashed_again_is_not_ours_any_more(package):
    rewrite(package, context=100)
    refused(package, "you didn't export it on this machine")


@pytest.mark.parametrize("version", [1, 99, "1", None, 1.5, True])
def test_other_formats(package, version):
    manifest = json.loads((package / folders.MANIFEST).read_bytes()) | {"version": version, "sha256": ""}
    own = hashlib.sha256(json.dumps(manifest, indent=1, sort_keys=True).encode()).hexdigest()
    (package / folders.MANIFEST).write_text(json.dumps(manifest | {"sha256": own}, indent=1, sort_keys=True))
    refused(package, r"it has format version .*, and this toolkit reads version 3", trust=True)


@pytest.mark.parametrize(
    "name",
    ["../secret", "/etc/passwd", "methods/../../secret", "a/b/c", "methods/..", ".hidden", "C:\\x", "methods\\x", "", "x\n"],
)
def test_paths_that_leave_the_folder(package, name):
    files = json.loads((package / folders.MANIFEST).read_bytes())["files"]
    rewrite(package, files=files | {name: next(iter(files.values()))})
    refused(package, "isn't the name of a package's file", trust=True)


@pytest.mark.parametrize(
    "changes",
    [{"files": {}}, {"files": None}, {"pieces": [{}]}, {"compiled": {}}, {"context": "64"}, {"target": 3}, {"last": None}],
    ids=str,
)
def test_manifests_that_leave_something_out(package, changes):
    rewrite(package, **changes)
    refused(package, "has missing or invalid fields", trust=True)


def first_layers_code(manifest):
    return manifest["compiled"][manifest["pieces"][0]["like"]]


@pytest.mark.parametrize(
    ("lie", "says"),
    [
        (lambda manifest: first_layers_code(manifest).update(decode="tokenizer.json"), "compiled methods that are not"),
        (lambda manifest: first_layers_code(manifest).pop("prefill"), "layers without code for prompts"),
        (lambda manifest: manifest["pieces"][0].update(weights=[]), "layers that share code and have different numbers"),
        (lambda manifest: manifest["pieces"][0]["weights"].__setitem__(0, "no.such.weight"), "doesn't have: no.such.weight"),
        (lambda manifest: manifest.update(last=["no.such.norm", 1e-6, None]), "doesn't have: no.such.norm"),
        (lambda manifest: manifest.update(kv="int3"), "the unknown kv='int3'"),
        (lambda manifest: manifest.update(context=1), "a context of 1; the model has positions for 2 to 1,024 tokens"),
        (lambda manifest: manifest.update(context=4096), "a context of 4,096; the model has positions"),
        (lambda manifest: manifest.update(least=1 << 50), "caches for at least 1,125,899,906,842,624 tokens"),
        (lambda manifest: manifest.update(chunk=1 << 20), "prompts in parts of 1,048,576 tokens"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)  # fmt: skip
def test_manifests_that_contradict_themselves_or_the_model(package, lie, says):
    manifest = json.loads((package / folders.MANIFEST).read_bytes())
    lie(manifest)
    rewrite(package, **manifest)
    refused(package, says, trust=True)


def test_links_out_of_the_folder(package, tmp_path):
    """The folder itself may be a link."""
    (tmp_path / "latest").symlink_to(package)
    with pytest.raises(pytest.fail.Exception, match="was loaded"):
        tk.load_exported(tmp_path / "latest", trust=True, progress=False)
    path = next(package.glob("methods/*"))
    (tmp_path / "elsewhere.pt2").write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere.pt2")
    refused(package, "is a symbolic link", trust=True)
    path.unlink()
    (tmp_path / "elsewhere.pt2").rename(path)
    (package / folders.MANIFEST).rename(tmp_path / "elsewhere.json")
    (package / folders.MANIFEST).symlink_to(tmp_path / "elsewhere.json")
    refused(package, r"manifest\.json is a symbolic link\. Replace the link by the file", trust=True)
    (tmp_path / "elsewhere.json").replace(package / folders.MANIFEST)
    os.rename(package / "methods", tmp_path / "methods")
    (package / "methods").symlink_to(tmp_path / "methods")
    refused(package, "is a symbolic link", trust=True)


@pytest.mark.parametrize(
    ("what", "value", "says"),
    [
        ("machine", "aarch64", "it was exported for aarch64"),
        ("system", "Plan9", "it was exported for Plan9"),
        ("vectors", "AVX1024", "needs a processor with AVX1024"),
        ("device", "cuda", "exported for a CUDA GPU; "),
    ],
)
def test_packages_for_another_machine(package, what, value, says):
    target = json.loads((package / folders.MANIFEST).read_bytes())["target"]
    rewrite(package, target=target | {what: value})
    refused(package, says, trust=True)


def test_packages_of_another_pytorch(package):
    rewrite(package, versions={"toolkit": "0.1.0", "torch": "2.5.1"})
    error = refused(package, "exported with torch 2.5.1", trust=True)
    assert "export the model again" in error.do


def test_a_model_that_is_not_described(package):
    plain = json.loads((package / folders.MANIFEST).read_bytes())["model"]
    for wrong in ({**plain, "architecture": "gpt5"}, {**plain, "config": {}}, {**plain, "schemes": {"x.weight": "q4_k"}}):
        rewrite(package, model=wrong)
        refused(package, r"^package .*can't be built .*Toolkit [\d.]+\S* wrote the package", trust=True)
    rewrite(package, model={**plain, "dtype": "int3"})
    refused(package, r"^package .*dtype 'int3': no such name", trust=True)
    rewrite(package, model={**plain, "config": {**plain["config"], "num_hidden_layers": 10_000_000}})
    refused(package, "10,000,000 layers, and the package 3", trust=True)
    rewrite(package, model={})
    refused(package, "missing required field `architecture`", trust=True)
    rewrite(package, model={**plain, "config": {**plain["config"], "vocab_size": 512}})
    refused(package, "the shapes of its weights don't match the model", trust=True)


def test_what_is_no_package(tmp_path):
    refused(tmp_path / "nothing", "no such folder")
    refused(tmp_path, "it has no manifest.json")
    (tmp_path / folders.MANIFEST).write_text("[]")
    refused(tmp_path, "isn't the manifest of a package")
    refused(tmp_path / folders.MANIFEST, "it is a file, not a folder")
    (tmp_path / folders.MANIFEST).write_text("{" * 100_000)
    refused(tmp_path, "isn't valid JSON")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_package_given_as_a_model(package, tmp_path, ranks):
    if ranks > 1:
        (tmp_path / "divided").mkdir()
        package = package.rename(tmp_path / "divided" / f"rank-0-of-{ranks}").parent
    for call in (tk.load, partial(tk.plan, device="h200"), partial(tk.export, path=tmp_path / "out", progress=False)):
        with pytest.raises(tk.ToolkitError, match=r"but a manifest\.json, as packages have") as caught:
            call(package)
        assert f'tk.load_exported("{package}")' in caught.value.do


def test_on_another_device(package):
    with pytest.raises(PackageError, match="it was exported for the CPU"):
        tk.load_exported(package, "virtual:h200", trust=True, progress=False)
    with pytest.raises(tk.errors.UnknownNameError, match="device ''"):
        tk.load_exported(package, "", trust=True, progress=False)
    for device in ("cuda:99", torch.device("cuda", 99)):
        refused(package, r"on cuda:99: it was exported for the CPU\. Leave out device=", device=device, trust=True)
    for device in (3, [], True):
        with pytest.raises(DeviceError, match=r"^a device: an? \w+\. Give a name"):
            tk.load_exported(package, device, trust=True, progress=False)


def test_code_that_does_not_load(package, monkeypatch, loads, tmp_path):
    """Nothing of it stays in the temporary folder."""
    temporary, damaged = tmp_path / "temporary", tmp_path / "damaged.pt2"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    with zipfile.ZipFile(next(package.glob("methods/*"))) as whole, zipfile.ZipFile(damaged, "w") as copy:
        for name in whole.namelist():
            copy.writestr(name, b"no library" if name.endswith(".so") else whole.read(name))
    for data in (b"no archive", damaged.read_bytes()):
        with pytest.raises(PackageError, match=r"can't be loaded from the folder .* Free disk space there"):
            loads(data, torch.device("cpu"))
    assert not list(temporary.iterdir())
    assert os.environ["TMPDIR"] == str(temporary)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(PackageError, match=r"gone \(.*No such file"):
        loads(b"", torch.device("cpu"))


def test_of_two_exports_at_the_same_moment_one_goes_on(tmp_path):
    """Into a folder that isn't there yet: who is refused takes nothing away from the other."""

    def attempt(folder, together):
        together.wait()
        try:
            with folders.locked(folder):
                time.sleep(0.003)
                folders.put(folder, "methods/decode-head-0123456789abcdef.pt2", b"x")
                return "done"
        except PackageError as error:
            return error.found

    with ThreadPoolExecutor(2) as threads:
        for i in range(100):
            together = threading.Barrier(2)
            found = {one.result() for one in [threads.submit(attempt, tmp_path / str(i), together) for _ in range(2)]}
            assert found <= {"done", "another export into this folder is running"}
            assert "done" in found


def test_what_this_process_made_is_trusted_where_the_cache_can_not_be_written(exported, tmp_path, monkeypatch, loads):
    monkeypatch.setattr(compiling, "load_piece", loads)
    own = folders.read_manifest(exported.path)[1]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match=r"only with trust=True: .*Set TOOLKIT_CACHE to a writable folder"):
        folders.remember(own)
    assert folders.made_here(own)
    assert not folders.made_here("another")
    exported.load()


@pytest.mark.parametrize("trust", ["no", "yes", 1, None], ids=repr)
def test_trust_is_true_or_false(trust):
    refused("a package", f"trust={trust!r}: neither True nor False", trust=trust)


def test_a_list_of_own_packages_that_is_damaged(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    (tmp_path / "packages-made-here").write_bytes(b"\xff\n0123\n")
    assert folders.made_here("0123")
    assert not folders.made_here("another")


def test_what_can_not_be_read_is_a_clear_error(package, monkeypatch):
    def refused(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refused)
    with monkeypatch.context() as denied:
        denied.setattr("os.open", refused)
        with pytest.raises(PackageError, match=r"can't be read \(Permission denied\)"):
            tk.load_exported(package)
    with pytest.raises(PackageError, match="can't be written"):
        folders.check_folder(package)


def test_a_name_that_no_folder_has(tmp_path):
    with pytest.raises(PackageError, match="an export into"):
        folders.check_folder(tmp_path / ("x" * 300))


@pytest.mark.parametrize("path", [None, 5, b"x", "a\0b"])
def test_paths_of_no_folder(path, tmp_path):
    with pytest.raises(PackageError, match=r"an export into .*(not a path|NUL)"):
        tk.export("demo/qwen3", path)
    for ranks in (1, 2) if path is not None else ():
        with pytest.raises(PackageError, match=r"sharing the weights of .*(not a path|NUL)"):
            tk.export("demo/qwen3", tmp_path / "out", share=path, tensor_parallel=ranks)
    with pytest.raises(PackageError, match=r"package .*(not a path|NUL)"):
        tk.load_exported(path)


def test_weights_that_are_swapped_while_they_are_loaded_are_not_used(package, monkeypatch):
    """The bytes that are hashed are those of the file that was mapped, whatever the name refers to later."""
    path = next(package.glob("weights-*"))
    evil = bytearray(path.read_bytes())
    evil[-4096:] = bytes(4096)
    opened = folders.opened

    def swapped(folder, name):
        file = opened(folder, name)
        if name == path.name:
            (package / "evil").write_bytes(evil)
            os.replace(package / "evil", path)
        return file

    monkeypatch.setattr(folders, "opened", swapped)
    monkeypatch.setattr(compiling, "load_piece", lambda data, device: None)  # the fixture fails if it is called
    loaded = tk.load_exported(package, trust=True, progress=False)
    monkeypatch.setattr(folders, "opened", opened)
    prompt = torch.arange(5).unsqueeze(0)
    assert torch.equal(loaded(prompt), tk.load("demo/qwen3", device="cpu", progress=False)(prompt))
    refused(package, "hash", trust=True)


def test_an_operation_that_fails_without_raising(loads, monkeypatch):
    """As in PyTorch 2.11: the error is printed, and the result of the operation is missing."""
    results = [[torch.ones(1)], [torch.ones(1), None]]
    loader = type("Loader", (), {"boxed_run": lambda self, operands: results[len(operands)]})
    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", lambda *arguments: loader())
    run = loads(b"", torch.device("cpu"))
    assert run([]) is results[0]
    with pytest.raises(PackageError, match="an operation in it failed, and PyTorch printed the error above"):
        run([torch.ones(1)])
