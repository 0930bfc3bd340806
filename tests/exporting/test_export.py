"""Exports on the CPU: same tokens as the model, one copy of the weights, what is kept from before, what is refused."""

import copy
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import toolkit as tk
from tests.exporting.conftest import CONTEXT
from tests.exporting.traced import traced_package
from toolkit.core.distributed import WHOLE, Shard
from toolkit.core.errors import CancelledError, DeviceError, ModelError, PackageError
from toolkit.exporting import compiling, skeleton, weights
from toolkit.exporting import package as folders
from toolkit.exporting.exporter import Package
from toolkit.exporting.pieces import LEAST, Anatomy, compiled_for, least_context, traced_context
from toolkit.exporting.running import parts_of
from toolkit.models.shapes import SHAPES
from toolkit.planning.describe import describe

PROMPT = "The capital of France is"
IDS = torch.randint(0, 700, (150,), generator=torch.Generator().manual_seed(5)).tolist()
PHASES = ["trace", "compile prefill", "compile decode", "weights"]


def tokens(model, prompt=PROMPT, **options):
    return tk.generate(model, prompt, **{"max_new_tokens": 24, "record": False, "eos": (), **options}).tokens


@pytest.fixture(scope="module")
def loaded(exported):
    return tk.load_exported(exported.path, progress=False)


@pytest.mark.parametrize("strategy", [name for name, each in tk.STRATEGIES.items() if each.capture == "none"])
def test_every_strategy_gives_the_models_own_tokens(model, loaded, strategy):
    assert tokens(loaded, decode=strategy) == tokens(model, decode=strategy)
    assert tokens(loaded, decode=strategy, temperature=0.8, seed=3) == tokens(model, decode=strategy, temperature=0.8, seed=3)


@pytest.mark.parametrize("length", [1, 2, LEAST - 1, LEAST, LEAST + 1, 64, 300])
@pytest.mark.parametrize("chunk", [512, 50])
def test_prompts_of_any_length_in_any_chunks(model, loaded, length, chunk):
    ids = torch.randint(0, 700, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    assert tokens(loaded, ids, prefill_chunk=chunk) == tokens(model, ids)


def test_logits_are_the_models(model, loaded):
    ids = torch.randint(0, 700, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for one in (model, loaded):
            cache, positions = one.new_cache(64), torch.arange(40)
            one.found = one.logits(one.advance(one.embed(ids), positions, cache, 40))
    assert torch.allclose(loaded.found, model.found, atol=2e-4, rtol=1e-4)
    with torch.no_grad():
        assert torch.equal(loaded(ids), model(ids))


def test_a_plan_of_a_package_has_its_name_and_context(loaded):
    plan = tk.plan(loaded, "h200", kv=None)
    assert (plan.model, plan.context) == (loaded.package.name, loaded.context)
    assert tk.plan(loaded, "h200", context=64, kv=None).context == 64


def test_a_plan_of_a_package_is_that_of_its_model(model, loaded):
    for device in ("h200", "cpu"):
        plan = tk.plan(loaded, device)
        assert plan.run == tk.plan(model, device, context=CONTEXT, prefill_chunk=loaded.chunk).run
        assert set(plan.gpus().longest_context) == {CONTEXT}
    with pytest.raises(ModelError, match="this model supports 2 to 512 tokens"):
        tk.plan(loaded, "h200", context=CONTEXT + 1)


def test_pieces_of_gemma4_compute_what_the_model_computes():
    """As traced: `test_e2b` compiles pieces like these."""
    ours = tk.load("demo/gemma4", device="cpu", progress=False)
    made = traced_package(ours, CONTEXT)
    plan, own = tk.plan(made, "h200"), tk.plan(ours, "h200", context=CONTEXT)
    assert (plan.run[2], plan.chunk) == (own.run[2], made.chunk)
    short, window = tk.plan(made, "h200", context=40), tk.plan(ours, "h200", context=least_context(ours))
    assert short.run[2] == window.run[2]
    assert tokens(made) == tokens(ours)
    assert tokens(made, IDS, decode="roundtrip") == tokens(ours, IDS)


def test_contexts_beyond_that_of_the_package():
    made = traced_package(tk.load("demo/qwen3", device="cpu", progress=False), 64)
    with pytest.raises(ModelError, match=r"context of 65: the package was exported for contexts up to 64\. .*export the model"):
        tokens(made, context=65)
    with pytest.raises(ModelError, match=r"the context holds 16\. Shorten the prompt by 4 tokens, or give context=20$"):
        tokens(made, list(range(20)), context=16)
    with pytest.raises(ModelError, match=r"the context holds 16\. Shorten the prompt by 49 tokens$"):  # 65 is refused, too
        tokens(made, list(range(65)), context=16)


def test_costs_of_a_package_are_those_at_its_context():
    ours = tk.load("demo/qwen3", device="cpu", progress=False)
    found = tk.costs(traced_package(ours, 64))
    assert "one token after 64 tokens reads" in repr(found)
    assert found.parts == tk.costs(ours, context=64).parts
    assert list(found.contexts().index) == [0, 64]


def test_a_package_is_copied_and_not_pickled():
    ours = tk.load("demo/qwen3", device="cpu", progress=False)
    made = traced_package(ours, CONTEXT)
    assert tk.costs(made).name == tk.costs(ours).name
    twin = copy.deepcopy(made)
    assert twin.inner is not made.inner
    assert copy.copy(made).inner is made.inner
    assert tokens(twin) == tokens(copy.copy(made)) == tokens(ours)
    with pytest.raises(ModelError, match=r'^pickling Exported.*Load it there: tk\.load_exported\("traced"\)'):
        pickle.dumps(made)


def test_pieces_of_a_model_with_experts_in_int8():
    """As traced: the next test compiles pieces like these."""
    ours = tk.load("demo/qwen3.5-moe", device="cpu", progress=False, scheme="int8")
    made = traced_package(ours, CONTEXT, "int8")
    for kv in ("auto", None, "int8"):
        plan = tk.plan(made, "h200", kv=kv)
        assert (plan.kv, plan.run[2]) == ("int8", tk.plan(ours, "h200", context=CONTEXT, kv="int8").run[2])
    assert tokens(made) == tokens(ours, kv="int8")
    assert tokens(made, IDS, decode="roundtrip") == tokens(ours, IDS, kv="int8")
    with pytest.raises(ModelError, match="exported with kv='int8'"):
        made.new_cache(64, "int4")
    for unknown in ("int3", "none", 8, []):
        with pytest.raises(tk.errors.UnknownNameError, match="KV scheme"):
            made.new_cache(64, unknown)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_delta_net_and_experts_in_int8_are_compiled(tmp_path):
    """The first layer of the demo model. Packages of other models have compiled attention."""
    ours = tk.load(first_layer(tmp_path / "model"), device="cpu", progress=False, scheme="int8")
    made = tk.export(ours, tmp_path / "out", context=CONTEXT, progress=False).load()
    ids, next_ids = torch.tensor([IDS]), torch.tensor([[7]])
    with torch.no_grad():
        for one in (ours, made):
            cache = one.new_cache(CONTEXT)
            one.advance(one.embed(ids), torch.arange(len(IDS)), cache, len(IDS))
            one.found = one.logits(one.advance(one.embed(next_ids), torch.tensor([len(IDS)]), cache, len(IDS) + 1))
    assert ours.found.std() > 0.1
    assert torch.allclose(made.found, ours.found, atol=2e-4, rtol=1e-4)


def first_layer(folder):
    """Write the demo model with experts, but with its first layer alone, into `folder`, and return it."""
    shutil.copytree(Path(tk.__file__).parent / "demo" / "qwen3.5-moe", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "layer_types": config["layer_types"][:1]}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".layers." not in name or ".layers.0." in name}
    save_file(kept, folder / "model.safetensors")
    return folder


def test_a_new_process_loads_it_and_needs_no_compiler(exported, model, tmp_path):
    """It deletes the code that a killed process unpacked, and its own."""
    load = "import os, sys, toolkit as tk\nmodel = tk.load_exported(sys.argv[1])\n"
    kill = "os.kill(os.getpid(), 9)"
    generate = (
        "run = tk.generate(model, sys.argv[2], max_new_tokens=24, record=False, eos=())\nprint(list(run.tokens), run.text)"
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    bare = {**os.environ, "PATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TMPDIR": str(temporary)}
    bare.pop("CXX", None)
    for code in (load + kill, load + generate):
        run = [sys.executable, "-c", code, str(exported.path), PROMPT]
        done = subprocess.run(run, capture_output=True, text=True, timeout=120, env=bare)
        killed = done.returncode == -signal.SIGKILL
        in_tmp = torch.__version__.startswith("2.11.")  # whose loader always unpacks into /tmp
        assert any(temporary.rglob("*.so")) == (killed and not in_tmp), done.stderr
    assert not list(temporary.iterdir())
    assert done.stdout.startswith(str(list(tokens(model)))), done.stderr
    assert "Paris" in done.stdout


def test_the_weights_are_there_once_and_mapped(exported, model, loaded):
    files = [name for name in exported.manifest["files"] if name.startswith("weights-")]
    assert len(files) == 1
    size = (exported.path / files[0]).stat().st_size
    assert size == weights.size_of(model)
    assert size < 1.01 * sum(p.nbytes for p in model.parameters())
    compiled = [entry["bytes"] for name, entry in exported.manifest["files"].items() if name.startswith("methods/")]
    assert max(compiled) < 3 << 20
    held = {p.untyped_storage().data_ptr() for p in loaded.inner.parameters()}
    assert {w.untyped_storage().data_ptr() for _, ws, _ in loaded._layers for w in ws} <= held
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.inner.parameters(), strict=True))


def test_a_relative_path_is_loaded_from_another_folder(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = tk.export(model, "made", context=CONTEXT, progress=False)
    monkeypatch.chdir("made")
    here = tk.load_exported(".", progress=False)
    monkeypatch.chdir("/")
    assert made.path == here.package == tmp_path / "made"
    assert tk.plan(here, "h200").model == "made"
    assert tokens(made.load()) == tokens(here) == tokens(model)


def test_another_context_compiles_nothing_and_writes_no_weights(exported, model, package):
    before = {path.name: path.stat().st_ino for path in package.glob("weights-*")}
    again = tk.export(model, package, context=64, progress=False)
    assert all(piece["kept"] for piece in again.measured["pieces"])
    assert {path.name: path.stat().st_ino for path in package.glob("weights-*")} == before
    small = again.load()
    with pytest.raises(ModelError, match="exported for contexts up to 64"):
        small.new_cache(65)
    with pytest.raises(ModelError, match="a cache for -1 tokens"):
        small.new_cache(-1)
    with pytest.raises(ModelError, match=r"room|context"):
        tokens(small, list(range(65)))
    assert tokens(small, max_new_tokens=8) == tokens(model, max_new_tokens=8)


def test_a_process_traces_a_model_once(exported, model, tmp_path, monkeypatch):
    """Another context or model is traced: its graph may differ."""
    trace, traced = compiling.trace, []
    monkeypatch.setattr(compiling, "trace", lambda traceable: (traced.append(traceable), trace(traceable))[1])
    again = tk.export(model, tmp_path / "again", context=CONTEXT, progress=False)
    assert not traced
    assert again.manifest["compiled"] == exported.manifest["compiled"]
    tk.export(model, tmp_path / "shorter", context=72, progress=False)
    assert len(traced) == 3
    monkeypatch.setattr(compiling, "DESCRIBED", 1)
    monkeypatch.setattr(compiling, "_described", {})
    assert (
        tk.export(model, tmp_path / "anew", context=CONTEXT, progress=False).manifest["compiled"] == again.manifest["compiled"]
    )
    assert len(traced) == 6
    assert len(compiling._described) == 1


def test_packages_share_their_weights(exported, model, tmp_path, monkeypatch):
    with monkeypatch.context() as full:  # a link needs no space
        full.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
        made = tk.export(model, tmp_path / "second", context=64, share=exported.path, progress=False)
    name = next(name for name in made.manifest["files"] if name.startswith("weights-"))
    assert os.path.samefile(made.path / name, exported.path / name)
    other = tk.load("demo/qwen3", device="cpu", progress=False).init_weights(3)
    other.requires_grad_(False)
    apart = tk.export(other, tmp_path / "third", context=64, share=exported.path, progress=False)
    assert not (apart.path / name).exists()


def test_damaged_weights_are_written_again(model, package):
    path = next(package.glob("weights-*"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(PackageError, match=r"weights-\w+\.safetensors was changed or damaged"):
        tk.load_exported(package, progress=False)
    tk.export(model, package, context=CONTEXT, progress=False)
    assert tokens(tk.load_exported(package, progress=False)) == tokens(model)


def test_links_to_files_elsewhere_are_replaced_by_files(model, package, tmp_path):
    def check():
        tk.export(model, package, context=CONTEXT, progress=False)
        assert not [path for path in package.rglob("*") if path.is_symlink()]
        assert tokens(tk.load_exported(package, progress=False)) == tokens(model)

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for path in [next(package.glob("weights-*")), package / "tokenizer.json", next(package.glob("methods/*"))]:
        (elsewhere / path.name).write_bytes(path.read_bytes() if path.name != "tokenizer.json" else b"another file")
        path.unlink()
        path.symlink_to(elsewhere / path.name)
    check()
    assert (elsewhere / "tokenizer.json").read_bytes() == b"another file"
    weights_file = next(package.glob("weights-*"))
    weights_file.unlink()
    weights_file.symlink_to(tmp_path / "nowhere")
    check()


def test_a_cancelled_export_leaves_what_was_there(model, package, tmp_path):
    old, cancel = (package / folders.MANIFEST).read_bytes(), threading.Event()

    def stop(phase, share, what):
        if phase == "weights":
            cancel.set()

    for folder in (package, tmp_path / "new"):
        cancel.clear()
        with pytest.raises(CancelledError, match="it was cancelled at weights, 0 %"):
            tk.export(model, folder, context=64, progress=stop, cancel=cancel)
    assert (package / folders.MANIFEST).read_bytes() == old
    assert tokens(tk.load_exported(package, progress=False)) == tokens(model)
    with pytest.raises(PackageError, match="the export into it was not finished"):
        tk.load_exported(tmp_path / "new")
    tk.export(model, tmp_path / "new", context=64, progress=False)
    assert not list((tmp_path / "new").glob("**/.toolkit-*"))


def test_a_model_can_be_used_while_it_is_exported(model, exported, tmp_path):
    own, said = model.device, []

    def look(phase, share, what):
        assert model.device is own
        if phase == "compile decode" and not said:
            said.append(tokens(model))

    tk.export(model, tmp_path / "out", context=CONTEXT, progress=look)
    assert said == [tokens(model)]


def test_one_model_is_exported_twice_at_once(model, exported, tmp_path):
    own = model.device
    with ThreadPoolExecutor(2) as threads:
        made = [threads.submit(tk.export, model, tmp_path / name, context=CONTEXT, progress=False) for name in "ab"]
        assert [future.result().manifest["compiled"] for future in made] == [exported.manifest["compiled"]] * 2
    assert model.device is own


def test_progress_names_every_phase(model, tmp_path):
    seen = []
    made = tk.export(model, tmp_path / "out", context=64, progress=lambda *about: seen.append(about))
    assert list(dict.fromkeys(phase for phase, _, _ in seen)) == [*PHASES, "manifest"]
    assert all(0 <= share <= 1 for _, share, _ in seen)
    assert [phase["phase"] for phase in made.measured["phases"]] == PHASES
    assert all(phase["host_peak_bytes"] > 0 for phase in made.measured["phases"])
    assert "compile" in repr(made)


@pytest.mark.parametrize("step", ["layers.", "weights-"])
def test_errors_of_the_progress_function_are_passed_on(model, package, monkeypatch, step):
    """While a layer is traced, and while the file of weights in the package is checked."""
    monkeypatch.setattr("toolkit.core.progress.REPORTS_PER_S", 1e9)
    error = ConnectionResetError(104, "my server closed the connection")

    def report(now, share, item):
        if item.startswith(step):
            raise error

    with pytest.raises(ConnectionResetError) as caught:
        tk.export(model, package, context=CONTEXT, progress=report)
    assert caught.value is error
    tk.load_exported(package, progress=False)


def test_a_name_is_loaded_first(exported, tmp_path, monkeypatch):
    monkeypatch.setattr("toolkit.core.progress.REPORTS_PER_S", 1e9)
    seen = []
    made = tk.export("demo/qwen3", tmp_path / "out", context=CONTEXT, progress=lambda *about: seen.append(about))
    assert [item for phase, share, item in seen if phase == "load" and share > 0 and item]
    assert [phase["phase"] for phase in made.measured["phases"]] == ["load", *PHASES]
    assert made.load().tokenizer.decode(made.load().tokenizer.encode(PROMPT)) == PROMPT


def test_what_it_takes_was_foreseen(exported):
    predicted = max(phase["host_bytes"] for phase in exported.manifest["plan"]["export"])
    assert predicted > 0
    assert exported.manifest["plan"]["budget_bytes"] is None


def test_the_name_of_a_model_loaded_from_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(tk.__file__).parent / "demo" / "qwen3")
    with pytest.raises(tk.BudgetError, match=r"^exporting the model within"):
        tk.export(tk.load(".", device="cpu", progress=False), tmp_path / "out", budget="16 MiB", context=64, progress=False)


def test_a_budget_below_the_floor_is_refused_before_any_work(model, tmp_path):
    with pytest.raises(tk.BudgetError, match="Use a budget of at least"):
        tk.export(model, tmp_path / "out", budget="16 MiB", context=64, progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("context", [1, 0, -5, 1 << 20, "512", 2.0, True])
def test_contexts_that_can_not_be(model, tmp_path, context):
    with pytest.raises(tk.ToolkitError, match="positions for 2 to 1,024"):
        tk.export(model, tmp_path / "out", context=context, progress=False)


def test_what_can_not_be_exported(model, tmp_path):
    with pytest.raises(DeviceError, match="packages don't run on virtual GPUs"):
        tk.export(tk.load("demo/qwen3", device="virtual:h200", progress=False), tmp_path / "out")
    with pytest.raises(ModelError, match="its weights are already loaded"):
        tk.export(model, tmp_path / "out", scheme="int8")
    wrapped = tk.load(Path(tk.__file__).parent / "demo" / "qwen3", device="cpu", engine="hf", progress=False)
    for other in (torch.nn.Linear(2, 2), wrapped):
        with pytest.raises(ModelError, match=r"it isn't one of the toolkit's own models\. .*without engine="):
            tk.export(other, tmp_path / "out")
    for device in ("virtual:h200", "virtual:8GiB", "vgpu", "auto"):  # without opening another one than that of `held`
        held = torch.ones(3, device=tk.device("virtual:h200").torch)
        with pytest.raises(DeviceError, match="packages don't run on virtual GPUs"):
            tk.export(model, tmp_path / "out", device=device)
    assert held.device.type == "vgpu"
    with pytest.raises(tk.errors.UnknownNameError, match="h2000"):
        tk.export(model, tmp_path / "out", device="virtual:h2000")
    with pytest.raises(DeviceError, match=r"'h200': the exporting device is virtual:h200, .*Pass device=\"cpu\", too"):
        tk.export(model, tmp_path / "out", device="virtual:h200", target="h200")
    with pytest.raises(tk.errors.UnknownNameError, match="GPU ''"):
        tk.export(model, tmp_path / "out", target="")
    assert not (tmp_path / "out").exists()


def test_without_a_compiler(model, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(PackageError, match=r"no C\+\+ compiler.*apt install g"):
        tk.export(model, tmp_path / "out", context=64)
    assert not (tmp_path / "out").exists()


def test_a_compiler_that_fails_says_so(tmp_path, monkeypatch):
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho 'no space for me' >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(PackageError, match="the compiler failed"):
        tk.export("demo/qwen3", tmp_path / "out", context=64, progress=False)
    assert not (tmp_path / "out" / folders.MANIFEST).exists()


def test_two_exports_into_one_folder(model, package):
    with folders.locked(package), pytest.raises(PackageError, match="another export into this folder is running"):
        tk.export(model, package, context=64, progress=False)
    tk.export(model, package, context=64, progress=False)


def test_nobody_elses_files_are_touched(model, package, tmp_path):
    """Files that are called as those of a package are refused where there is none, and stay where there is one."""
    theirs = {
        "weights": {"weights.safetensors": "precious"}, "tokenizer": {"tokenizer.json": "{}"},
        "manifest": {"manifest.json": '{"name": "my app"}', "weights.csv": "1"}, "methods": {"methods/chapter.tex": "text"},
    }  # fmt: skip
    for name, files in theirs.items():
        for file, text in files.items():
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text(text)
        with pytest.raises(PackageError, match="other files"):
            tk.export(model, tmp_path / name, context=64, progress=False)
        assert {p.relative_to(tmp_path / name).as_posix(): p.read_text() for p in (tmp_path / name).rglob("*.*")} == files
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "methods").symlink_to(tmp_path / "methods" / "methods")
    with pytest.raises(PackageError, match="is a symbolic link"):
        tk.export(model, tmp_path / "linked", context=64, progress=False)
    kept = [package / "methods" / "mine.txt", package / "weights_notes.txt"]
    for path in kept:
        path.write_text("notes")
    tk.export(model, package, context=64, progress=False)
    assert [path.read_text() for path in kept] == ["notes"] * 2


@pytest.mark.parametrize(
    ("name", "context"), [("demo/qwen3", 2), ("demo/qwen3", 3), ("demo/gemma4", 40), ("demo/qwen3.5-moe", 3)]
)
def test_short_contexts_are_traced_as_longer_ones(name, context):
    shapes = skeleton.from_plain(skeleton.to_plain(tk.load(name, device="cpu", progress=False)), None)
    with compiled_for(shapes, None):
        anatomy = Anatomy(shapes, traced_context(shapes, context))
        for piece in anatomy.distinct():
            compiling.trace(anatomy.traceable(piece, "decode"))


def test_a_package_of_two_tokens(model, tmp_path):
    made = tk.export(model, tmp_path / "out", context=np.int64(2), progress=False).load()
    assert tokens(made, [5], max_new_tokens=1) == tokens(model, [5], max_new_tokens=1)
    with pytest.raises(ModelError, match="exported for contexts up to 2"):
        made.new_cache(3)


def test_what_is_wrong_is_told_before_anything_is_loaded(model, tmp_path, monkeypatch):
    monkeypatch.setattr("toolkit.exporting.exporter.load_part", lambda *_, **__: pytest.fail("it was loaded"))
    out, asked = tmp_path / "out", {"progress": False, "device": "cpu"}
    with pytest.raises(ModelError, match="positions for"):
        tk.export("random/gemma4-31b", out, context=1, **asked)
    with pytest.raises(tk.BudgetError, match="Use a budget of at least"):
        tk.export("random/gemma4-31b", out, budget="1 GiB", **asked)
    with pytest.raises(PackageError, match="no such folder"):
        tk.export("demo/qwen3", out, share=tmp_path / "nowhere", **asked)
    with pytest.raises(tk.ToolkitError, match="cancel=3: not a threading"):
        tk.export("demo/qwen3", out, cancel=3, **asked)
    assert not out.exists()


def test_folders_that_can_not_be(model, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(PackageError, match="a file of that name exists"):
        tk.export(model, tmp_path / "file", context=64, progress=False)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(PackageError, match="it is a symbolic link to a folder that doesn't exist"):
        tk.export(model, tmp_path / "link", context=64, progress=False)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(PackageError, match=r"other files \(thesis.txt\)"):
        tk.export(model, mine, context=64, progress=False)
    assert [path.name for path in mine.iterdir()] == ["thesis.txt"]
    with pytest.raises(PackageError, match="can't be written"):
        tk.export(model, "/proc/no-such-folder/out", context=64, progress=False)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(PackageError, match="of disk space, and 1000 B is free"):
        tk.export(model, tmp_path / "full", context=64, progress=False)
    assert not (tmp_path / "full").exists()


def test_a_disk_that_fills_up_in_the_middle(model, package, monkeypatch):
    old = (package / folders.MANIFEST).read_bytes()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(PackageError, match="the disk is full"):
        tk.export(model, package, context=64, progress=False)
    monkeypatch.undo()
    assert (package / folders.MANIFEST).read_bytes() == old
    assert tokens(tk.load_exported(package, progress=False)) == tokens(model)


def test_layers_that_are_alike_are_one_piece():
    anatomy = Anatomy(describe("random/gemma4-31b", "q4_k_m"), 131072)
    assert len(anatomy.pieces) == 61
    kinds = {}
    for piece in anatomy.pieces:
        kinds.setdefault(piece.like, []).append(piece.name)
    # q4_k_m holds some layers' v and down in more bits than others': sliding ones of two kinds, full ones of two
    assert sum(len(names) for names in kinds.values()) == 61
    assert len(anatomy.distinct()) == len(kinds) <= 7
    assert anatomy.chunk == 512


@pytest.mark.parametrize(("name", "shard"), [*((name, WHOLE) for name in sorted(SHAPES)), ("gemma4-31b", Shard(1, 8))], ids=str)
def test_a_model_described_in_plain_data_is_the_same_model(name, shard):
    model = describe(f"random/{name}", "q4_k_m", shard=shard)
    plain = json.loads(json.dumps(skeleton.to_plain(model)))
    again = skeleton.from_plain(plain, model.device)
    assert skeleton.shapes_of(again) == skeleton.shapes_of(model)
    assert (again.config, again.shard) == (model.config, shard)


@pytest.mark.parametrize(
    ("name", "scheme", "wrong"),
    [
        ("demo/qwen3", None, {"head_dim": 0}), ("demo/qwen3", None, {"num_key_value_heads": 0}),
        ("demo/gemma4", None, {"intermediate_sizes": []}), ("demo/gemma4", "q4_k_m", {"layer_types": ["x"]}),
    ],
    ids=str,
)  # fmt: skip
def test_models_that_can_not_be_built(name, scheme, wrong):
    plain = skeleton.to_plain(tk.load(name, device="cpu", progress=False, scheme=scheme))
    plain["config"] = json.loads(json.dumps(plain["config"])) | wrong
    with pytest.raises(ModelError, match=r"the model in a package's manifest: it can't be built"):
        skeleton.from_plain(plain, None)


@pytest.mark.parametrize("most", [3, 9, 10, 63, 512])
def test_parts_cover_every_token_once(most):
    for count in range(1, 600):
        parts = list(parts_of(count, most))
        assert [a for a, _ in parts] == [0, *(b for _, b in parts)][:-1]
        assert parts[-1][1] == count
        assert all(size == 1 or LEAST <= size <= most for size in (b - a for a, b in parts))
        if count >= LEAST and most >= 2 * LEAST:
            assert min(b - a for a, b in parts) >= LEAST


def test_what_was_measured_is_drawn_over_what_was_predicted(model, tmp_path):
    made = tk.export(model, tmp_path / "out", budget="8 GiB", context=64, progress=False)
    for phase in made.measured["phases"]:
        assert phase["curve"]
        assert all(0 <= at <= phase["seconds"] + 0.1 and 0 < held <= phase["host_peak_bytes"] for at, held, _ in phase["curve"])
    html = made._repr_html_()
    assert html.count("<polyline") == 2 * len(PHASES)
    assert "measured at most" in html
    assert "budget 8.00 GiB" in html
    manifest = copy.deepcopy(made.manifest)
    manifest["target"] |= {"device": "cuda", "gpu": "NVIDIA <H200>", "capability": "9.0"}
    for phase in manifest["measured"]["phases"]:
        phase |= {
            "gpu_used_bytes": 700 << 20,
            "gpu_reserved_bytes": 2 << 20,
            "curve": [[0.0, 1, 600 << 20], [0.1, 1, 700 << 20]],
        }
    html = Package(made.path, manifest)._repr_html_()
    assert "NVIDIA &lt;H200&gt;" in html
    assert "measured at most 700 MiB" in html
