"""Tests of the resources that configs need on absent GPUs: compiled usage, reasons for exclusion, occupancy, failures."""

from __future__ import annotations

import ast
import json
import math
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import toy
from toy import CAPABILITIES, DIES, FAULTY, ODD, OVERSIZED, RUSHES, SMALL, SQUARE, TOY, ToyMatmul, fresh_cache, toy_config

from tests.speed import is_quick
from toolkit.core.errors import CancelledError, DeviceError, ToolkitError
from toolkit.gpu.catalogue import CATALOGUE
from toolkit.kernels.base import Config, Shape
from toolkit.tune import compiling
from toolkit.tune.compile_worker import waits_first
from toolkit.tune.compiling import Job, compile_configs
from toolkit.tune.identity import Origin, _written, fingerprint, origin
from toolkit.tune.limits import Compiled, LaunchUse, obstacle, occupancy
from toolkit.tune.store import TunedFileWarning

USE = LaunchUse("toy", (100,), threads=128, registers=64, spill_bytes=0, shared_bytes=16_384)


def compiled(use: LaunchUse) -> Compiled:
    return Compiled((use,))


def test_what_exceeds_a_gpu_is_said_in_words() -> None:
    too_much = compiled(replace(USE, shared_bytes=131_072))
    assert obstacle(too_much, CATALOGUE["rtx-5090"]) == "needs 131,072 B of shared memory, RTX 5090 allows 101,376"
    assert obstacle(too_much, CATALOGUE["h200"]) == ""
    assert obstacle(too_much, CATALOGUE["a100-80g"]) == ""  # 8.0 has more shared memory than 8.6, 8.9 and 12.0
    assert "needs 2,048 threads per block" in obstacle(compiled(replace(USE, threads=2048)), CATALOGUE["h200"])
    assert "registers per block" in obstacle(compiled(replace(USE, threads=1024, registers=96)), CATALOGUE["h200"])
    assert "needs 70,000 blocks along grid axis 1" in obstacle(compiled(replace(USE, grid=(1, 70_000))), CATALOGUE["h200"])
    assert "tensor memory" in obstacle(compiled(replace(USE, tensor_memory=600)), CATALOGUE["b200"])
    assert obstacle(Compiled(error="no"), CATALOGUE["h200"]) == "no"


@pytest.mark.parametrize(
    ("use", "gpu", "blocks", "limit"),
    [
        (USE, "h200", 8, "registers"),  # 65,536 / (64 x 128)
        (replace(USE, registers=32), "h200", 13, "shared memory"),  # 228 KiB / 17 KiB, the driver's kilobyte included
        (replace(USE, registers=32, shared_bytes=0), "h200", 16, "threads"),  # 2,048 / 128
        (replace(USE, registers=32, shared_bytes=0, threads=32), "h200", 32, "blocks"),
        (replace(USE, registers=32, shared_bytes=0, threads=32), "rtx-3090", 16, "blocks"),
        (replace(USE, registers=32, shared_bytes=0, threads=32), "rtx-4090", 24, "blocks"),
        (replace(USE, registers=33, shared_bytes=0), "rtx-4090", 12, "threads"),  # 33 x 32 is granted as 1,280
    ],
)
def test_occupancy(use: LaunchUse, gpu: str, blocks: int, limit: str) -> None:
    found = occupancy(use, CATALOGUE[gpu])
    assert (found.blocks_per_sm, found.limit) == (blocks, limit)
    assert found.share == blocks * use.threads / CATALOGUE[gpu].threads_per_sm


def test_every_gpu_of_the_catalogue_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_cache(tmp_path, monkeypatch)
    jobs = [Job(SQUARE, SMALL, capability) for capability in CAPABILITIES]
    monkeypatch.setattr(compiling, "WorkerPool", None)  # all on disk: no process is started
    found = compile_configs(TOY, jobs)
    assert is_quick(lambda: compile_configs(TOY, jobs), 2)
    assert len(found) == 6 <= len(CATALOGUE)
    assert not [result.error for result in found.values() if result.error]
    assert all(result.main and result.main.grid == (64, 64) for result in found.values())
    assert all(16 < result.registers < 256 and result.main and result.main.sass_bytes > 500 for result in found.values())


def test_an_oversized_config_is_excluded_by_the_gpus_that_lack_the_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_cache(tmp_path, monkeypatch)
    gpus = ("a100-80g", "h200", "rtx-5090", "rtx-pro-6000")
    jobs = {gpu: Job(SQUARE, OVERSIZED, CATALOGUE[gpu].compute_capability) for gpu in gpus}
    found = compile_configs(TOY, jobs.values())
    words = {gpu: obstacle(found[job], CATALOGUE[gpu]) for gpu, job in jobs.items()}
    assert words["a100-80g"] == words["h200"] == ""
    assert words["rtx-5090"] == "needs 131,072 B of shared memory, RTX 5090 allows 101,376"
    assert words["rtx-pro-6000"].endswith("RTX PRO 6000 Blackwell Workstation Edition allows 101,376")
    assert found[jobs["h200"]].shared_bytes == 163_840  # the same tile needs one more stage on 9.0


def test_an_early_launch_that_does_not_wait_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches overlap only from compute capability 9.0 on; on 8.9 the config is valid."""
    fresh_cache(tmp_path, monkeypatch)
    jobs = [Job(ODD, toy_config(fault=RUSHES), capability) for capability in ((8, 9), (9, 0))]
    ada, hopper = (compile_configs(TOY, jobs)[job].error for job in jobs)
    assert not ada
    assert "must call take_turn() first" in hopper


def test_what_is_written_before_the_wait_is_seen() -> None:
    wait, load, store = "griddepcontrol.wait;\n", "ld.global.b32 %r1, [%rd1];\n", "st.global.b32 [%rd2], %r1;\n"
    assert waits_first(load + wait + store)
    assert waits_first("st.shared.b32 [%r2], %r1;\n" + wait)
    assert waits_first("@%p3 tcgen05.st.sync.aligned.32x32b.x1.b32 [%r4], {%r1};\ntcgen05.wait::st.sync.aligned;\n" + wait)
    assert not waits_first(load + store)
    assert not waits_first(store + wait)
    assert not waits_first("@%p3 " + store + wait)
    assert not waits_first("atom.global.add.u32 %r3, [%rd2], 1;\n" + wait)


def test_a_failing_compiler_is_a_row_with_its_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_cache(tmp_path, monkeypatch)
    *_, broken = FAULTY
    found = compile_configs(TOY, [Job(ODD, broken, (9, 0)), Job(ODD, SMALL, (9, 0))])
    assert "this config was never meant to compile" in found[Job(ODD, broken, (9, 0))].error
    assert "CompileTimeAssertionFailure at line" in found[Job(ODD, broken, (9, 0))].error
    assert not found[Job(ODD, SMALL, (9, 0))].error


def test_a_compiler_that_dies_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel defined in a notebook: the compile worker gets it from the text of its cell."""
    fresh_cache(tmp_path, monkeypatch)
    cell = Origin("toy_matmul", "__main__", "", origin(TOY).text).load()
    shape = cell.known["odd"]
    dies, other = Job(shape, toy_config(fault=DIES), (9, 0)), Job(shape, toy_config(warps=2), (9, 0))
    found = compile_configs(cell, [dies, other], workers=1)
    assert found[dies].error.startswith("The compiler ended with signal 6")
    assert not found[other].error
    assert other.key in compiling.Kept(cell).rows
    assert dies.key not in compiling.Kept(cell).rows  # compiled again next time


def test_compiling_finds_what_this_process_finds_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_cache(tmp_path, monkeypatch)
    work, helpers = tmp_path / "work", tmp_path / "helpers"
    work.mkdir()
    helpers.mkdir()
    (work / "json.py").write_text("raise ValueError('not the module that was meant')")
    (helpers / "my_faults.py").write_text("RIGHT, LEAVES_OUT, ADDS, BROKEN, DIES, RUSHES = 0, 1, 2, 3, 4, 5")
    monkeypatch.chdir(work)
    monkeypatch.syspath_prepend(helpers)
    own = "RIGHT, LEAVES_OUT, ADDS, BROKEN, DIES, RUSHES = 0, 1, 2, 3, 4, 5"
    text = origin(TOY).text
    assert own in text
    cell = Origin("toy_matmul", "__main__", "", text.replace(own, f"from my_faults import {own.partition(' =')[0]}")).load()
    job = Job(cell.known["odd"], toy_config(warps=2), (9, 0))
    assert not compile_configs(cell, [job])[job].error


def test_a_compiling_process_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(compiling, "HANGS_AFTER_S", 0.1)  # it takes longer to import PyTorch
    job = Job(ODD, SMALL, (9, 0))
    assert compile_configs(TOY, [job])[job].error == "The compiler took more than 0 s"
    assert compiling.Kept(TOY).rows == {}


def quick(worker: object, job: Job) -> Compiled:
    """Return a result without starting a compiler process."""
    return compiled(USE)


def test_what_cant_be_kept_is_told_and_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(compiling, "_compile", quick)
    with pytest.warns(TunedFileWarning, match="Compiled results can't be stored: .*Set TOOLKIT_CACHE"):
        found = compile_configs(TOY, [Job(ODD, SMALL, (9, 0))])
    assert list(found.values()) == [compiled(USE)]


def test_two_writers_of_results_lose_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(compiling, "_compile", quick)
    jobs = [Job(ODD, toy_config(stages=stages), (9, 0)) for stages in range(1, 25)]
    writers = [threading.Thread(target=compile_configs, args=(TOY, [job])) for job in jobs]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert set(compiling.Kept(TOY).rows) == {job.key for job in jobs}


def test_a_script_that_tunes_as_it_runs_starts_no_processes_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compile worker executes the definitions of a script or cell, but not its other statements."""
    does = """
did = []
did.append("this would be done in every process")
for _ in did: raise SystemExit
found = compile_configs(TOY, [Job(SQUARE, SMALL, (9, 0))])
"""
    monkeypatch.setenv(compiling.INSIDE, "toy_matmul")
    script = Origin("toy_matmul", "__main__", "", origin(TOY).text + does).load()
    defined = sys.modules[type(script).__module__]
    assert defined.did == []
    assert not hasattr(defined, "found")
    with pytest.raises(ToolkitError, match="kernel 'toy_matmul' calls the tuner"):
        compile_configs(TOY, [])


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "def toy_product(",
            "def another(",
            "The compiler sees only the kernel's cell, which must define every name it uses: NameError",
        ),
        ("import Job,", "import Jobs,", ""),
        ("from toolkit.kernels.base import", "from toolkit.kernels.basis import", "The compiler could not load the kernel: "),
    ],
    ids=["cell without its launch", "a failing import that the kernel can do without", "without what it needs"],
)
def test_a_cell_that_lacks_something(old: str, new: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from toolkit.tune import compile_worker

    monkeypatch.setattr(compile_worker.driver, "set_active", lambda driver: None)
    where = asdict(origin(TOY)) | {"module": "__main__", "text": origin(TOY).text.replace(old, new)}
    compiled = compile_worker.compiler_of({"origin": where, "path": sys.path})
    error = compiled({"shape": ODD.key, "config": SMALL.to_dict(), "capability": 90}).error
    assert said in error
    assert error.startswith("The compiler ") == bool(said)


def test_inputs_that_fail_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fingerprint leaves out inputs(), so a result would be found again after inputs() was mended."""
    from toolkit.tune import compile_worker

    def fails(*_: object) -> None:
        raise RuntimeError("no generator on meta")

    monkeypatch.setattr(compile_worker.driver, "set_active", lambda driver: None)
    monkeypatch.setattr(ToyMatmul, "inputs", fails)
    error = compile_worker.compile_for(TOY, ODD.key, SMALL, 90).error
    assert error == "The compiler could not make the inputs: RuntimeError: no generator on meta"
    assert error.startswith(compiling.NOT_KEPT)


def test_cancelling_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))

    def cancel(done: int, total: int, what: str) -> None:
        raise CancelledError("compiling", "it was cancelled", "Call it again")

    with pytest.raises(CancelledError):
        compile_configs(TOY, [Job(ODD, SMALL, (9, 0))], cancel)


DAMAGES: list[tuple[str, Any]] = [
    ("name", 3), ("grid", [[]]), ("grid", [0]), ("threads", 0), ("threads", None), ("registers", "64"), ("shared_bytes", -1),
    ("spill_bytes", math.nan), ("sass_bytes", 2**70), ("ptx_bytes", 1.5), ("tensor_memory", True),
]  # fmt: skip


def test_a_damaged_file_of_results_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    path = compiling.Kept(TOY).path
    path.parent.mkdir()
    rows = [{"launches": [asdict(replace(USE, **{field: value}))], "error": ""} for field, value in DAMAGES]
    rows += [{"launches": [{"name": 1}], "error": ""}, {"launches": [], "error": None}]
    for text in ("", "{", "[1, 2]", "[" * 100_000, '{"a": 1}', *(json.dumps({"a": row}) for row in rows)):
        path.write_text(text)
        kept = compiling.Kept(TOY)
        assert kept.rows == {}
    kept.add(Job(ODD, SMALL, (9, 0)), compiled(USE))
    kept.save()
    assert list(compiling.Kept(TOY).rows.values()) == [compiled(USE)]


def test_without_triton_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise compiling.PackageNotFoundError(name)

    monkeypatch.setattr(compiling, "version", absent)
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(DeviceError, match="Triton isn't installed, and has no build for darwin"):
        compiling.triton_version()


def test_fingerprint_follows_what_runs_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(__file__).with_name("toy.py").read_text()
    changes = {
        "same": source,
        "comment": source.replace("    acc *= scale", "    # half of it\n    acc *= scale"),
        "docstring": source.replace("sum_k a[m, k] b[k, n]", "a times b"),
        "space": source.replace("[SMALL, MEDIUM, OVERSIZED]", "[SMALL, MEDIUM]"),
        "body": source.replace("    acc *= scale", "    acc *= scale * 2"),
        "launch": source.replace('"scale": 0.5', '"scale": 0.25'),
    }
    found = {name: fingerprint(Origin("toy_matmul", "__main__", "", text).load()) for name, text in changes.items()}
    assert found["same"] == found["comment"] == found["docstring"] == found["space"] == fingerprint(TOY)
    assert len({found["same"], found["body"], found["launch"]}) == 3


def test_fingerprint_is_the_same_in_every_python() -> None:
    """Fingerprints must not depend on the Python version: `ast.unparse` and `ast.dump` differ between versions."""
    text = "def f(x: int = 1):\n    return f'{x:>4} of \\'{x!r}\\''"
    args = "arguments(args=[arg(arg='x' annotation=Name(id='int'))] defaults=[Constant(value=1)])"
    spec = "format_spec=JoinedStr(values=[Constant(value='>4')])"
    parts = [
        f"FormattedValue(value=Name(id='x') conversion=-1 {spec})", "Constant(value=\" of '\")",
        "FormattedValue(value=Name(id='x') conversion=114)", "Constant(value=\"'\")",
    ]  # fmt: skip
    body = f"Return(value=JoinedStr(values=[{' '.join(parts)}]))"
    assert _written(ast.parse(text)) == f"Module(body=[FunctionDef(name='f' args={args} body=[{body}])])"


def test_fingerprint_is_the_same_with_and_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    for kind in (InterpretedFunction, JITFunction):
        monkeypatch.setattr(toy, "toy_product", kind(toy.toy_product.fn))
        assert fingerprint.__wrapped__(TOY) == fingerprint(TOY)


def test_a_kernel_of_a_notebook_comes_as_its_cell() -> None:
    where = origin(TOY)
    assert (where.kernel, where.module, where.file) == ("toy_matmul", "toy", str(Path(__file__).with_name("toy.py")))
    cell = Origin("toy_matmul", "__main__", "ipykernel_1/2.py", where.text).load()
    assert type(cell).__name__ == ToyMatmul.__name__
    assert type(cell) is not ToyMatmul
    with pytest.raises(ToolkitError, match="defines no instance"):
        Origin("another", "__main__", "", where.text).load()


class Narrowed(ToyMatmul):
    """The toy kernel with fewer configs: its launches are in another file."""

    name = "narrowed"

    def space(self, shape: Shape) -> list[Config]:
        return [SMALL]


class Renamed(ToyMatmul):
    """A kernel without a method of its own."""

    name = "renamed"


NARROWED, RENAMED = Narrowed(), Renamed()


@pytest.mark.parametrize("kernel", [NARROWED, RENAMED], ids=repr)
def test_a_kernel_that_inherits_its_launches_is_found_in_its_own_file(kernel: ToyMatmul) -> None:
    where = origin(kernel)
    assert where.file == __file__
    assert type(where.load()).__name__ == type(kernel).__name__


def test_a_kernel_without_source_is_an_error_of_the_toolkit() -> None:
    scope: dict[str, Any] = {"ToyMatmul": ToyMatmul, "__name__": "no_source"}
    exec("class Typed(ToyMatmul):\n    def outputs(self, shape, inputs): return {}", scope)
    for needs_source in (fingerprint, origin):
        with pytest.raises(ToolkitError, match=r"source of kernel 'toy_matmul': .*Define the kernel in a file or a notebook"):
            needs_source(scope["Typed"]())
