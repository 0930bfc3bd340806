"""The processes that compile: what they answer, how they end, and what of their memory is seen."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.exc import CppCompileError

from toolkit.core.errors import PackageError
from toolkit.exporting import compiling, inductor, skeleton
from toolkit.exporting.compilers import Compilers
from toolkit.exporting.progress import POINTS, _thinned
from toolkit.gpu import host_memory as host
from toolkit.gpu.cuda import device as cuda


@pytest.fixture
def compilers(model):
    with Compilers(skeleton.to_plain(model), 64, None, None, 1) as found:
        yield found


@pytest.mark.slow
def test_a_piece_that_is_traced_otherwise_is_not_compiled(compilers):
    with pytest.raises(PackageError, match=r"the graph of layers\.0 decode"):
        compilers.compile("layers.0", "decode", "another key").result(120)


def test_one_that_dies_says_so(compilers):
    future = compilers.compile("layers.0", "decode", "any")
    while compilers.workers[0].process is None:
        time.sleep(0.01)
    os.kill(compilers.workers[0].process.pid, signal.SIGKILL)
    with pytest.raises(PackageError, match="the compiling process ended with signal 9"):
        future.result(60)


def test_nothing_is_left_of_them(model):
    with Compilers(skeleton.to_plain(model), 64, None, None, 1) as compilers:
        future = compilers.compile("layers.0", "decode", "any")
        while compilers.workers[0].process is None:
            time.sleep(0.01)
        process, folder = compilers.workers[0].process, Path(compilers.workers[0].folder.name)
        assert folder.is_dir()
    assert process.returncode == -signal.SIGTERM
    assert not folder.exists()
    with pytest.raises(PackageError):
        future.result(0)


def test_an_interrupt_of_tracing_puts_the_filters_of_warnings_back(monkeypatch, python_handles_interrupts):
    go_on, during, before = threading.Event(), [], list(warnings.filters)

    def export(*operands, **options):
        during.append(warnings.filters[0][0])
        os.kill(os.getpid(), signal.SIGINT)
        go_on.wait(60)
        return SimpleNamespace(state_dict={})

    monkeypatch.setattr(torch.export, "export", export)
    traceable = SimpleNamespace(mode=nullcontext(), run=None, inputs=(), varying=None)
    with pytest.raises(KeyboardInterrupt):
        compiling._trace_in_thread(lambda: traceable)
    assert during == ["ignore"]
    assert warnings.filters == before  # although the thread goes on
    go_on.set()
    with compiling._tracing:
        assert warnings.filters == before


def test_what_two_compiled_is_kept_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    assert (
        compiling._keep("key", b"one") == compiling._keep("key", b"another") == replace(compiling.find_kept("key"), kept=False)
    )
    assert [path.read_bytes() for path in (tmp_path / "compiled").iterdir()] == [b"one"]


def test_precompiled_headers_are_there_for_the_next_process(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    for own in (tmp_path / "first", tmp_path / "next"):
        monkeypatch.setattr(tempfile, "tempdir", str(own))
        headers = Path(inductor.default_cache_dir(), "precompiled_headers")
        inductor.find_headers()
        if own.name == "first":
            headers.mkdir(parents=True)
            (headers / "a.h.gch").write_bytes(b"compiled")
        inductor.keep_headers()
    assert (headers / "a.h.gch").read_bytes() == b"compiled"


def test_what_the_compiler_calls_an_error_is_told():
    printed = "in file included from a.h:1:\na.cpp:3:14: error: 'b' was not declared\na.cpp:4:1: error: another"
    said = compiling._summary(CppCompileError(["g++", "-Werror", "a.cpp"], printed))
    assert said == "C++ compile error: error: 'b' was not declared"
    assert compiling._summary(RuntimeError("no room\nfor it")) == "no room"


def test_arrays_are_declared_by_whom_they_belong_to_not_by_a_methods_id():
    """As PyTorch 2.11 does it, whose bound methods are other objects each time, and whose ids are given out again."""

    class Lines:
        def writeline(self, line):
            pass

    asked = []
    declare = inductor._with_lasting_methods(lambda wrapper, array, writeline, graph=None: asked.append((writeline, graph)))
    wrapper, own, other = SimpleNamespace(), Lines(), Lines()
    for lines in (own, other, own, other):
        declare(wrapper, "{1L}", lines.writeline, graph=lines)
    methods = [id(method) for method, _ in asked]
    assert methods[:2] == methods[2:]
    assert len(set(methods)) == 2
    assert [(method.__self__, graph) for method, graph in asked] == [(own, own), (other, other)] * 2


def test_memory_of_what_was_started_is_seen():
    before = host.started_bytes()
    code = "import sys; held = b'1' * (64 << 20); print(flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    assert host.started_bytes() - before >= 64 << 20
    child.communicate()
    assert host.started_bytes() - before < 64 << 20


def test_a_long_curve_keeps_its_peaks():
    curve = [(float(i), i % 1000, 7) for i in range(5000)]
    thin = _thinned(curve)
    assert len(thin) <= POINTS
    assert max(held for _, held, _ in thin) == 999
    assert [at for at, _, _ in thin] == sorted(at for at, _, _ in thin)
    assert _thinned(curve[:POINTS]) == curve[:POINTS]


@pytest.mark.parametrize(
    ("listed", "want"),
    [([(1, 5), (os.getpid(), 520)], (520, True)), ([(1, 5)], (60, False)), ([(os.getpid(), None)], (60, False))],
    ids=["told", "not among them", "not said"],
)
def test_in_use_of_a_gpu_is_the_processs_own_where_the_driver_tells(monkeypatch, listed, want):
    processes = [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in listed]
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlDeviceGetComputeRunningProcesses=lambda handle: processes))
    monkeypatch.setattr(cuda, "_nvml_handle", lambda index: index)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40, 100))
    assert cuda.in_use(torch.device("cuda", 0)) == want


def test_without_nvml_it_is_the_cards(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40, 100))
    assert cuda.in_use(torch.device("cuda", 0)) == (60, False)
