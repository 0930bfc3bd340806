"""What configs take of GPUs that aren't there: compiled figures, exclusions in words, occupancy; failures are rows."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import toy
from toy import CAPABILITIES, DIES, FAULTY, ODD, OVERSIZED, SMALL, SQUARE, TOY, ToyMatmul, fresh_cache, toy_config

from toolkit.devices.spec import CATALOGUE
from toolkit.errors import CancelledError, DeviceError, ToolkitError
from toolkit.kernels.tune import compiling
from toolkit.kernels.tune.compiling import Job, compile_configs
from toolkit.kernels.tune.identity import Origin, fingerprint, origin
from toolkit.kernels.tune.limits import Compiled, LaunchUse, obstacle, occupancy

USE = LaunchUse("toy", (100,), threads=128, registers=64, spill_bytes=0, shared_bytes=16_384)


def compiled(use: LaunchUse) -> Compiled:
    return Compiled((use,))


def test_what_exceeds_a_gpu_is_said_in_words() -> None:
    too_much = compiled(replace(USE, shared_bytes=131_072))
    assert obstacle(too_much, CATALOGUE["rtx-5090"]) == "needs 131,072 B of shared memory, RTX 5090 allows 101,376"
    assert obstacle(too_much, CATALOGUE["h200"]) == ""
    assert obstacle(too_much, CATALOGUE["a100-80g"]) == ""  # 8.0 has more than 8.6, 8.9 and 12.0
    assert "needs 2,048 threads a block" in obstacle(compiled(replace(USE, threads=2048)), CATALOGUE["h200"])
    assert "registers a block" in obstacle(compiled(replace(USE, threads=1024, registers=96)), CATALOGUE["h200"])
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
    monkeypatch.setattr(compiling, "Worker", None)  # all on disk: no process is started
    began = time.perf_counter()
    found = compile_configs(TOY, jobs)
    assert time.perf_counter() - began < 2
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
    assert found[jobs["h200"]].shared_bytes == 163_840  # the same tile takes a stage more on 9.0


def test_a_failing_compiler_is_a_row_with_its_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_cache(tmp_path, monkeypatch)
    *_, broken = FAULTY
    found = compile_configs(TOY, [Job(ODD, broken, (9, 0)), Job(ODD, SMALL, (9, 0))])
    assert "this config was never meant to compile" in found[Job(ODD, broken, (9, 0))].error
    assert "CompileTimeAssertionFailure at line" in found[Job(ODD, broken, (9, 0))].error
    assert not found[Job(ODD, SMALL, (9, 0))].error


def test_a_compiler_that_dies_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a kernel of a notebook: the compiling process has it from its cell's text."""
    fresh_cache(tmp_path, monkeypatch)
    cell = Origin("toy_matmul", "__main__", "", origin(TOY).text).load()
    shape = cell.known["odd"]
    dies, other = Job(shape, toy_config(fault=DIES), (9, 0)), Job(shape, toy_config(warps=2), (9, 0))
    found = compile_configs(cell, [dies, other], workers=1)
    assert found[dies].error.startswith("The compiler ended with signal 6")
    assert not found[other].error
    assert other.key in compiling.Kept(cell).rows
    assert dies.key not in compiling.Kept(cell).rows  # asked for again another time


def test_cancelling_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))

    def cancel(done: int, total: int, what: str) -> None:
        raise CancelledError("compiling", "it was cancelled", "Call it again")

    with pytest.raises(CancelledError):
        compile_configs(TOY, [Job(ODD, SMALL, (9, 0))], cancel)


def test_a_damaged_file_of_results_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    path = compiling.Kept(TOY).path
    path.parent.mkdir()
    for text in ("", "{", "[1, 2]", '{"a": 1}', '{"a": {"launches": [{"name": 1}], "error": ""}}'):
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
