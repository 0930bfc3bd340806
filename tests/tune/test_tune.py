"""Tests of the tuner with a fake clock: timing, storing, looking up and watching."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from toy import FAULTY, MEDIUM, ODD, OVERSIZED, SMALL, SQUARE, TOY, ToyShape, fresh_cache, toy_config

from toolkit import tune
from toolkit.core.errors import CancelledError, ToolkitError, UnknownNameError
from toolkit.core.progress import Counter
from toolkit.gpu.catalogue import CATALOGUE
from toolkit.gpu.opening import open_device
from toolkit.kernels.base import Config, Kernel, Shape, Tensors
from toolkit.kernels.int4_matmul import INT4_MATMUL, MatmulShape
from toolkit.kernels.registry import find_kernel, find_shape
from toolkit.tune import compiling, lookup, store, tuner
from toolkit.tune.cards import Card, find_card, find_cards
from toolkit.tune.compiling import Job
from toolkit.tune.estimate import estimate
from toolkit.tune.identity import fingerprint
from toolkit.tune.limits import Compiled, LaunchUse
from toolkit.tune.results import Row, Tuning
from toolkit.tune.store import DeviceFacts, Record, add_rows, read_tuned, words
from toolkit.tune.timing import Timing
from toolkit.tune.tuner import Tuner

H200 = Card("h200", CATALOGUE["h200"], DeviceFacts("NVIDIA H200", "9.0", 132, 1, 1980, 3201), index=0)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(store, "SHIPPED", tmp_path / "shipped")
    lookup.forget()
    return fresh_cache(tmp_path, monkeypatch)


class FakeClock:
    """Returns the given times and records what was timed."""

    def __init__(self, **us: float) -> None:
        self.us, self.timed = us, []  # type: ignore[var-annotated]

    def __call__(self, kernel: Kernel, shape: Shape, config: Config, inputs: Tensors, best_ns: float) -> Timing:
        self.timed.append(config)
        ns = 1e3 * self.us.get(f"block{config['block_m']}", 50.0)
        return Timing(ns, 100.0, cold=True, stopped=ns > 3 * best_ns)


def tuned(configs: list[Config], clock: FakeClock) -> Tuning:
    return Tuner(H200, DEVICE, clock, seed=5).tune(TOY, ODD, configs)


def test_everything_gets_a_row_and_the_right_ones_a_time() -> None:
    clock = FakeClock(block128=5.0, block32=7.0, block16=90.0)  # the order that the model predicts
    table = tuned([SMALL, MEDIUM, OVERSIZED, *FAULTY], clock)
    assert set(clock.timed) == {SMALL, MEDIUM, OVERSIZED}
    assert [row.verdict for row in table.rows] == ["slow", "ok", "ok", "wrong", "wrong", "failed"]
    assert all("NaN or infinite (inputs of seed 5)" in row.reason for row in table.rows[3:5])
    assert "this config was never meant to compile" in table.rows[5].reason
    assert table.rows[0].reason == "timed once only, because it is much slower than the best config"
    best = table.best("h200")
    assert best is not None
    assert (best.config, best.ns, best.clock) == (OVERSIZED, 5000.0, "measured")
    assert table.line("h200").startswith(f"{OVERSIZED!r}  # h200: 5.00 µs measured, the next one of 2 takes 40.0 % longer")
    assert table.line("h200").endswith("2 wrong, 1 failed")
    kept = read_tuned("h200", H200.facts)
    assert kept is not None
    row = kept.configs("toy_matmul", ODD.key)[words(OVERSIZED)]
    assert (row.us, row.kernel, row.versions.split(",")[0]) == (5.0, fingerprint(TOY), f"triton {triton.__version__}")


def test_a_config_more_is_one_compile_one_check_one_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned([SMALL, *FAULTY], FakeClock())
    clock, checked = FakeClock(), []
    from toolkit.tune.gate import Gate

    check = Gate.check
    monkeypatch.setattr(Gate, "check", lambda gate, config: (checked.append(config), check(gate, config))[1])
    table = tuned([SMALL, *FAULTY, MEDIUM], clock)
    assert clock.timed == [MEDIUM]
    assert set(checked) == {MEDIUM}
    assert [row.verdict for row in table.rows] == ["ok", "wrong", "wrong", "failed", "ok"]
    again = FakeClock()
    assert tuned([SMALL, *FAULTY, MEDIUM], again).rows == table.rows
    assert again.timed == []


def test_again_times_what_is_kept_too() -> None:
    tuned([SMALL, MEDIUM], FakeClock(block16=3.0))
    clock = FakeClock(block16=4.0)
    table = Tuner(H200, DEVICE, clock, again=True).tune(TOY, ODD, [SMALL, MEDIUM])
    assert set(clock.timed) == {SMALL, MEDIUM}
    assert table.rows[0].ns == 4000.0
    assert tuned([SMALL, MEDIUM], FakeClock()).rows[0].ns == 4000.0


@pytest.mark.parametrize("what", ["kernel", "triton"])
def test_another_kernel_or_triton_is_timed_anew(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned([SMALL], FakeClock())
    kept = read_tuned("h200")
    assert kept is not None
    change = {"kernel": {"kernel": "another"}, "triton": {"versions": "triton 1.0, torch 2.11.0"}}[what]
    add_rows("h200", H200.facts, {place: replace(row, **change) for place, row in kept.rows.items()})
    clock = FakeClock()
    tuned([SMALL], clock)
    assert clock.timed == [SMALL]


def test_a_winner_that_fails_on_other_inputs_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    from toolkit.tune.gate import Check, Gate

    check = Gate.check

    def fails_at_six(gate: Gate, config: Config) -> Check:
        return Check(0.1, 1.0, "cosine 0.1") if gate.seed == 6 and config == MEDIUM else check(gate, config)

    monkeypatch.setattr(Gate, "check", fails_at_six)
    table = tuned([SMALL, MEDIUM], FakeClock(block32=1.0, block16=2.0))
    assert [row.verdict for row in table.rows] == ["ok", "wrong"]
    assert "inputs of seed 6" in table.rows[1].reason


def test_what_a_launch_raises_is_a_row() -> None:
    class Breaks(FakeClock):
        def __call__(self, kernel: Kernel, shape: Shape, config: Config, inputs: Tensors, best_ns: float) -> Timing:
            if config == SMALL:
                raise RuntimeError("out of resource:\n  shared memory")
            return super().__call__(kernel, shape, config, inputs, best_ns)

    table = tuned([SMALL, MEDIUM], Breaks())
    assert [(row.verdict, row.reason) for row in table.rows] == [
        ("failed", "RuntimeError: out of resource: shared memory"),
        ("ok", ""),
    ]


def test_a_compiler_that_died_is_a_row_that_isnt_kept() -> None:
    found = {Job(ODD, SMALL, (9, 0)): Compiled(error="The compiler ended with signal 9")}
    table = Tuner(H200, DEVICE, FakeClock()).tune(TOY, ODD, [SMALL], found)
    assert [(row.verdict, row.reason) for row in table.rows] == [("failed", "The compiler ended with signal 9")]
    assert read_tuned("h200") is None


def test_a_problem_too_large_for_the_gpu_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def reference(*_: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 100 GiB")

    monkeypatch.setattr(type(TOY), "reference", reference)
    clock = FakeClock()
    table = tuned([SMALL, FAULTY[-1]], clock)
    assert table.notes == (f"1 config of toy_matmul {ODD.key} not timed: Tried to allocate 100 GiB",)
    assert [row.verdict for row in table.rows] == ["untried", "failed"]
    assert clock.timed == []


def test_memory_that_others_use_is_no_fault_of_a_config() -> None:
    class Full(FakeClock):
        def __call__(self, *args: object) -> Timing:
            if self.timed:
                raise torch.OutOfMemoryError("Tried to allocate 100 GiB")
            return super().__call__(*args)  # type: ignore[arg-type]

    table = tuned([SMALL, MEDIUM, OVERSIZED], Full())
    assert table.notes == (f"2 configs of toy_matmul {ODD.key} not timed: Tried to allocate 100 GiB",)
    assert sorted(row.verdict for row in table.rows) == ["ok", "untried", "untried"]
    later = FakeClock()
    assert {row.verdict for row in tuned([SMALL, MEDIUM, OVERSIZED], later).rows} == {"ok"}
    assert len(later.timed) == 2


def test_cancelling_keeps_what_was_timed() -> None:
    cancel = threading.Event()

    class Cancels(FakeClock):
        def __call__(self, *args: object) -> Timing:
            cancel.set()
            return super().__call__(*args)  # type: ignore[arg-type]

    steps = Counter("tuning", False, cancel, tune.AFTER_CANCEL)
    first = Cancels()
    with pytest.raises(CancelledError, match="run it again to resume"):
        Tuner(H200, DEVICE, first, steps, seed=5).tune(TOY, ODD, [SMALL, MEDIUM])
    assert len(first.timed) == 1
    second = FakeClock()
    tuned([SMALL, MEDIUM], second)
    assert {*first.timed, *second.timed} == {SMALL, MEDIUM}
    assert len(second.timed) == 1


def test_lookup_goes_from_step_to_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(card: Card | str, shape: ToyShape = ODD) -> tuple[str, Config]:
        choice = tune.choose(TOY, shape, card)
        return choice.step, choice.config

    assert look(H200, ToyShape(3, 3, 3)) == ("default", SMALL)
    assert look(H200) == ("model", OVERSIZED)
    tuned([MEDIUM], FakeClock())
    assert look(H200) == ("this device", MEDIUM)
    assert look("h100") == ("same capability", MEDIUM)
    assert look("rtx-5090") == ("default", SMALL)
    assert look("rtx-5090", SQUARE)[0] == "model"
    assert tune.choose(TOY, ODD, "cpu").step == "default"
    assert list(tune.choices().step).count("default") == 2
    assert "the fastest on NVIDIA H200" in next(one.note for one in lookup.choices() if one.gpu == "h100")


def test_a_shape_near_a_timed_one_gets_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned([SMALL, MEDIUM, OVERSIZED], FakeClock(block128=1.0, block32=2.0, block16=3.0))
    monkeypatch.setattr(type(TOY), "space", lambda kernel, shape: [SMALL, MEDIUM])
    longer = replace(ODD, m=34)
    choice = tune.choose(TOY, longer, H200)
    assert (choice.step, choice.config) == ("near shape", MEDIUM)  # the fastest one isn't in the space
    assert tune.choose(TOY, ODD, H200).config == MEDIUM
    assert choice.note.startswith("2.00 µs, the fastest of 2 timed with triton ")
    assert choice.note.endswith("at m=17 (asked: m=34)")
    right = Record("ok", us=9.0, shared_bytes=4096, kernel=fingerprint(TOY))
    places = [replace(longer, m=60).key, replace(longer, m=30, k=48).key, "m=33 n=33", f"{longer.key} window=0"]
    add_rows("h200", H200.facts, {("toy_matmul", place, words(SMALL)): right for place in places})
    lookup.forget()
    assert tune.choose(TOY, longer, H200).config == SMALL  # 60 is nearer by ratio; others differ in more than lengths
    assert tune.choose(TOY, replace(ODD, n=16), H200).config == MEDIUM
    assert tune.choose(TOY, replace(ODD, k=41), H200).step == "default"
    elsewhere = tune.choose(TOY, longer, "h100")
    assert (elsewhere.step, elsewhere.config) == ("same capability", SMALL)
    assert "on NVIDIA H200 at m=60 (asked: m=34) (9.00 µs)" in elsewhere.note
    tuned([SMALL], FakeClock())
    assert tune.choose(TOY, ODD, H200).step == "this device"


def test_timings_of_earlier_code_are_better_than_none(monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = Record("ok", us=9.0, shared_bytes=4096, registers=32, kernel="of earlier code", when="2026-01-02T03:04:05+00:00")
    too_large = replace(earlier, us=1.0, shared_bytes=1 << 20)
    rows = {("toy_matmul", ODD.key, words(MEDIUM)): earlier, ("toy_matmul", ODD.key, words(OVERSIZED)): too_large}
    add_rows("h200", H200.facts, rows)
    lookup.forget()
    choice = tune.choose(TOY, ODD, H200)
    assert (choice.step, choice.config) == ("earlier code", MEDIUM)  # the fastest one doesn't fit the GPU
    assert choice.note == "the fastest with earlier code of the kernel, on 2026-01-02"
    assert tune.choose(TOY, ODD, "h100").step in ("model", "default")
    tuned([SMALL], FakeClock())
    assert tune.choose(TOY, ODD, H200).config == SMALL


@pytest.mark.parametrize(
    ("key", "far"),
    [
        ("m=16 n=33 k=40", 1.0),
        ("m=4 n=66 k=40", 2.0),
        ("m=8 n=33 k=20", math.inf),
        ("m=0 n=33 k=40", math.inf),
        ("m=8", math.inf),
    ],
)
def test_how_far_shapes_are(key: str, far: float) -> None:
    assert lookup.distance(TOY, ToyShape(8, 33, 40), key) == far


@pytest.mark.parametrize(
    ("key", "differs"),
    [
        (f"m={'9' * 400} n=33 k=40", f"m={'9' * 400} (asked: m=8)"),
        ("k=40 m=16 n=33", "m=16 (asked: m=8)"),
        ("m=4 n=33 k=40 m=16", "m=16 (asked: m=8)"),
    ],
    ids=["huge", "order", "twice"],
)
def test_keys_that_this_version_never_wrote(key: str, differs: str) -> None:
    add_rows("h200", H200.facts, {(TOY.name, key, words(SMALL)): Record("ok", us=9.0, kernel=fingerprint(TOY))})
    lookup.forget()
    choice = tune.choose(TOY, ToyShape(8, 33, 40), H200)
    assert (choice.step, choice.config) == ("near shape", SMALL)
    assert choice.note.endswith(differs)


def test_products_of_a_quantized_x_take_the_config_of_others() -> None:
    """Reading the matrix, which takes the time, is the same. A config of another number of rows counts less."""
    shape = MatmulShape(n=6144, k=4096, quantised=True)
    others = (replace(shape, quantised=False), replace(shape, n=6272), replace(shape, scheme="q6_k"))
    near, further, never = (lookup.distance(INT4_MATMUL, shape, other.key) for other in others)
    assert 0 < near < further < never == math.inf


def test_lookup_of_the_same_capability_checks_the_limits() -> None:
    """The fastest config of another card of compute capability 12.0 is skipped if this card lacks the memory for it."""
    other = DeviceFacts("NVIDIA Another", "12.0", 20, 1)
    right = Record("ok", us=1.0, shared_bytes=131_072, registers=64, kernel=fingerprint(TOY))
    rows = {OVERSIZED: right, MEDIUM: replace(right, us=2.0, shared_bytes=4096)}
    add_rows("another", other, {("toy_matmul", ODD.key, words(config)): row for config, row in rows.items()})
    assert tune.choose(TOY, ODD, "rtx-5090").config == MEDIUM


def test_a_program_on_another_gpu_of_the_same_capability_decides() -> None:
    other = DeviceFacts("NVIDIA Another", "12.0", 20, 1)
    alone = Record("ok", us=1.0, shared_bytes=4096, registers=64, kernel=fingerprint(TOY))
    in_step = replace(alone, us=2.0, program="a step", program_ms=5.0)
    rows = {SMALL: replace(alone, program="a step", program_ms=6.0), MEDIUM: in_step, OVERSIZED: alone}
    add_rows("another", other, {("toy_matmul", ODD.key, words(config)): row for config, row in rows.items()})
    assert tune.choose(TOY, ODD, "rtx-5090").config == MEDIUM


def test_kernels_and_shapes_are_looked_up_by_name() -> None:
    kernel = tune.kernels()["read"]
    (name, shape), *_ = kernel.known.items()
    for given in (name, shape, shape.key):
        assert tune.choose("read", given, "h200") == tune.choose(kernel, shape, "h200")
    with pytest.raises(UnknownNameError, match="kernel 'reed'"):
        tune.choose("reed", name, "h200")
    with pytest.raises(UnknownNameError, match="shape of read '2 GiB'"):
        tune.choose("read", "2 GiB", "h200")
    with pytest.raises(UnknownNameError, match=r"kernel \['read', 'sample'\]: no such name"):
        tune.explore(["read", "sample"], gpus="h200")  # type: ignore[arg-type]


def test_what_cant_be_looked_up_is_named() -> None:
    unhashable: list[Any] = ["read"]
    with pytest.raises(UnknownNameError, match="kernel"):
        tune.choose(unhashable, ODD, "h200")  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="shape of toy_matmul"):
        tune.choose(TOY, unhashable, "h200")  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="GPU"):
        tune.choose(TOY, ODD, unhashable)  # type: ignore[arg-type]


@pytest.mark.parametrize(("old", "new", "said"), [
    ("dtype=bfloat16", "dtype=bf16", "bf16"), ("kv_heads=4", "kv_heads=0", "zero"),
    ("quantised=True", "quantised=true", "no such name"),
])  # fmt: skip
def test_a_shape_that_was_mistyped_is_an_error_of_the_toolkit(old: str, new: str, said: str) -> None:
    key = find_shape(find_kernel("attention_decode"), "gemma4-31b full 32k").key
    assert f" {old}" in key
    with pytest.raises(ToolkitError, match=rf"attention_decode.*{said}"):
        tune.choose("attention_decode", key.replace(f" {old}", f" {new}"), "h200")


def test_a_kernel_without_known_shapes_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(TOY), "known", {})
    with pytest.raises(UnknownNameError, match=r"shape of toy_matmul 'None': no such name\. Known: none"):
        tune.explore(TOY, gpus="h200")


def test_lookups_are_remembered_until_something_is_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    first = tune.choose(TOY, ODD, H200)
    with monkeypatch.context() as patch:
        patch.setattr(lookup, "_look", None)
        assert tune.choose(TOY, ODD, H200) is first
    tuned([MEDIUM], FakeClock())
    assert lookup.choices() == []


def test_a_lookup_while_another_thread_adds_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cleared(dict[Any, Any]):
        def __setitem__(self, key: Any, value: Any) -> None:
            """Forget it at once, as `forget` in another thread does."""

    monkeypatch.setattr(lookup, "_chosen", Cleared())
    assert tune.choose(TOY, ODD, "l4").gpu == "l4"
    assert tune.choose(TOY, ODD, torch.device("cpu")).gpu == "cpu"


def test_a_known_device_is_asked_nothing_a_current_one_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(lookup, "find_card", lambda device: (asked.append(device), H200)[1])
    for _ in range(2):
        tune.choose(TOY, ODD, torch.device("cuda", 0))
        tune.choose(TOY, ODD, "cuda")
        tune.choose(TOY, ODD, "vgpu:0")  # index 0: the virtual GPU opened last
    assert asked == [torch.device("cuda", 0), "cuda", "vgpu:0", "cuda", "vgpu:0"]
    assert len(lookup.choices()) == 1


def test_looking_up_needs_no_triton_and_no_pandas() -> None:
    code = (
        "import sys; sys.modules.update(triton=None, pandas=None, IPython=None); import torch\n"
        "from toolkit.kernels.base import Config, Kernel, Shape\n"
        "from toolkit.tune.lookup import choose\n"
        "Kernel.__abstractmethods__ = frozenset()\n"
        "class Plain(Kernel):\n"
        "    name, shape_type = 'plain', Shape\n"
        "    def space(self, shape): return [Config(block=8)]\n"
        "print(choose(Plain(), Shape(), torch.device('cpu')).step, choose(Plain(), Shape(), 'h200').config)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.stdout == "default Config(block=8, warps=4, stages=1)\n", found.stderr


def test_warm_without_a_gpu_compiles_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    heard: list[tuple[int, int]] = []
    table = tune.warm([(TOY, ODD)], configs=[SMALL, MEDIUM], progress=lambda done, total, what: heard.append((done, total)))
    assert [row.verdict for row in table.rows] == ["untried", "untried"]
    assert all(row.clock == "modelled" for row in table.rows)
    assert "Nothing was timed: this machine has no CUDA GPU" in repr(table)
    assert heard[-1] == (2, 2)
    assert read_tuned("h200") is None


def test_warm_without_a_gpu_shows_stored_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned([SMALL], FakeClock())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    table = tune.warm([(TOY, ODD)], configs=[SMALL, MEDIUM], progress=False)
    assert [row.clock for row in table.rows] == ["measured", "modelled"]
    assert table.notes[0].endswith("stored timings are shown as measured, other times are modelled.")


def test_problems_of_one_kernel_are_compiled_together(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted(kernel: Kernel, jobs: list[Job], *rest: object) -> dict[Job, Compiled]:
        asked.append(len(jobs))
        return compiling.compile_configs(kernel, jobs)

    monkeypatch.setattr(tuner, "compile_configs", counted)
    table = tune.warm([(TOY, ODD), (TOY, SQUARE)], "h200", [SMALL], progress=False)
    assert asked == [2]
    assert [row.shape for row in table.rows] == [ODD.key, SQUARE.key]


class Model:
    def kernel_shapes(self) -> list[tuple[Kernel, Shape]]:
        return [(TOY, ODD), (TOY, SQUARE), (TOY, ODD)]


def test_what_warm_takes() -> None:
    assert tune.problems_of(Model()) == [(TOY, ODD), (TOY, SQUARE)]
    assert tune.problems_of(TOY) == [(TOY, SQUARE), (TOY, ODD)]
    assert tune.problems_of([(TOY, "odd"), (TOY, "m=1 n=2 k=3")]) == [(TOY, ODD), (TOY, ToyShape(1, 2, 3))]
    with pytest.raises(ToolkitError, match=r"tuning on '2xcpu': that is no cluster\. Give the result of tk\.cluster"):
        tune.warm(TOY, cluster="2xcpu")  # type: ignore[arg-type]
    with pytest.raises(ToolkitError, match="not a model, a kernel or a list of"):
        tune.problems_of(3)
    with pytest.raises(ToolkitError, match="not a model, a kernel or a list of"):
        tune.problems_of([(TOY,)])  # type: ignore[list-item]
    with pytest.raises(UnknownNameError, match="Known: odd, square"):
        tune.problems_of([(TOY, "od")])


def test_exploring_needs_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "WorkerPool", None)  # all on disk
    table = tune.explore(TOY, "square", ["h200", "rtx-5090", "a100-80g"], [SMALL, OVERSIZED], progress=False)
    verdicts = {(row.gpu, row.config): row.verdict for row in table.rows}
    assert verdicts["rtx-5090", OVERSIZED] == "excluded"
    assert verdicts["h200", OVERSIZED] == verdicts["a100-80g", OVERSIZED] == "untried"
    frame = table.to_pandas()
    assert set(frame.clock) == {"modelled"}
    assert list(table.table().columns) == table.gpus
    assert table.table("registers").notna().all(axis=None)
    assert table.summary().loc["rtx-5090", "fastest_excluded"].endswith("RTX 5090 allows 101,376")
    assert table.summary().loc["h200", "untried"] == 2
    assert frame.bytes.nunique() == 1
    assert "1 excluded" in table.line("rtx-5090")
    assert table.losses().loc["h200", "h200"] == 0
    with pytest.raises(UnknownNameError, match="Did you mean"):
        tune.explore(TOY, gpus=["rtx-509"])
    for gpus in (3.5, "", ["h200", None]):
        with pytest.raises(UnknownNameError, match="no such name"):
            tune.explore(TOY, gpus=gpus)
    for configs in ([1], 1, "block_m=16"):
        with pytest.raises(ToolkitError, match="Give a list of Config"):
            tune.explore(TOY, gpus="h200", configs=configs)
    with pytest.raises(UnknownNameError, match="GPU of this table"):
        table.of("l4")
    with pytest.raises(UnknownNameError, match="problem of this table 'toy_matmul square'"):
        table.best("h200", "toy_matmul square")
    with pytest.raises(UnknownNameError, match=r"verdict 'exclude'.*Did you mean \"excluded\""):
        table.fastest("h200", "exclude")


@pytest.mark.parametrize(("space", "said"), [
    ([], r"space\(\) has none for m=1024 n=1024 k=1024"), (None, "None is not a Config"), ([16], "16 is not a Config"),
])  # fmt: skip
def test_a_space_without_configs_is_an_error_of_the_toolkit(space: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(TOY), "space", lambda kernel, shape: space)
    uses = (tune.explore, tune.warm, lambda toy: tune.choose(toy, SQUARE, "h200"), lambda toy: tune.choose(toy, SQUARE, "cpu"))
    for use in uses:
        with pytest.raises(ToolkitError, match=f"configs of toy_matmul: {said}"):
            use(TOY)


def test_the_numbers_of_a_config_may_be_in_another_order() -> None:
    """Otherwise it would be stored under another name, and lookups would not find it in the kernel's space."""
    numbers = list(MEDIUM.to_dict().items())
    clock = FakeClock()
    table = tuned([Config(**dict(reversed(numbers))), MEDIUM], clock)
    assert clock.timed == [MEDIUM]
    assert [row.config for row in table.rows] == [MEDIUM]
    assert tune.choose(TOY, ODD, H200).step == "this device"


def test_exploring_shows_what_was_measured() -> None:
    tuned([SMALL, MEDIUM], FakeClock(block16=30.0))
    table = tune.explore(TOY, ODD, "h200", [SMALL, MEDIUM, toy_config(fault=1)], progress=False)
    assert [(row.clock, row.verdict) for row in table.rows] == [("measured", "ok"), ("measured", "ok"), ("modelled", "untried")]
    best = table.best("h200")
    assert best is not None
    assert best.config == SMALL


def test_what_another_gpus_winner_costs() -> None:
    def row(gpu: str, config: Config, ns: float | None, verdict: str = "ok") -> Row:
        return Row("toy", "s", gpu, config, verdict, "no room" if ns is None else "", ns, "measured" if ns else "")

    table = Tuning(
        (row("a", SMALL, 100.0), row("a", MEDIUM, 150.0), row("b", SMALL, 30.0), row("b", MEDIUM, 20.0),
         row("c", SMALL, None, "excluded"), row("c", MEDIUM, 7.0))
    )  # fmt: skip
    assert table.loss("a", "b") == pytest.approx(0.5)
    assert table.loss("b", "a") == pytest.approx(0.5)
    assert table.loss("c", "a") == "no room"
    assert table.loss("c", "b") == 0
    assert list(table.losses().columns) == ["a", "b", "c"]


def test_the_model_of_time() -> None:
    def modelled(shape: ToyShape, warps: int = 8, blocks: int = 1024, spill: int = 0, gpu: str = "h200") -> float:
        use = LaunchUse("toy", (blocks,), 32 * warps, 64, spill, 4096)
        return estimate(TOY, shape, toy_config(stages=3), Compiled((use,)), CATALOGUE[gpu]).ns

    thin = ToyShape(1, 32_768, 32_768)  # 2 GiB
    floor = TOY.cost(thin).bytes / CATALOGUE["h200"].reached_bandwidth_bytes_per_s * 1e9
    assert floor <= modelled(thin) < 1.1 * floor
    assert modelled(thin, blocks=8) > 3 * floor  # a few SMs can't use the full bandwidth
    assert modelled(thin, warps=1, blocks=132) > 3 * floor  # too few loads in flight
    assert modelled(thin, spill=512) > 1.9 * modelled(thin)
    assert modelled(thin, gpu="l4") > 10 * modelled(thin)


def test_which_gpu_is_meant() -> None:
    card = find_card("virtual:rtx-5090")
    assert card is not None
    assert (card.key, card.present, card.facts.compute_capability) == ("rtx-5090", False, "12.0")
    assert find_card("cpu") is None
    sized = find_card(open_device("virtual:8GiB"))
    assert sized is not None
    assert sized == find_card("virtual:8GiB")
    assert sized.spec.memory_bytes == 8 << 30
    with pytest.raises(UnknownNameError, match=r"cuda:first.* auto, .*, cpu, cuda, h100, .*, virtual:8GiB$"):
        find_card("cuda:first")
    assert find_card(CATALOGUE["l4"]) == find_card("l4")
    assert [card.key for card in find_cards("l4")] == ["l4"]
    assert {card.key for card in find_cards()} >= set(CATALOGUE)


@triton.autotune(
    configs=[triton.Config({"BLOCK": 4}, num_warps=1), triton.Config({"BLOCK": 8}, num_warps=1)],
    key=["n"], do_bench=lambda call, quantiles: (call(), [0.25, 0.2, 0.3])[1],
)  # fmt: skip
@triton.jit
def double(x_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)


def test_watching_anybodys_autotuned_kernels() -> None:
    original = triton.runtime.autotuner.Autotuner.run
    x = torch.ones(8, device=DEVICE)
    double[lambda meta: (triton.cdiv(8, meta["BLOCK"]),)](x, 8)  # launched before watching began: not recorded
    with tune.watch() as seen:
        for n in (8, 4, 4):
            double[lambda meta, n=n: (triton.cdiv(n, meta["BLOCK"]),)](x, n)
        with tune.watch() as inner:
            double[(1,)](x, 4)
    assert triton.runtime.autotuner.Autotuner.run is original
    known, new = seen
    assert (known.key, known.tuned, known.hits, known.timings_ms) == ({"n": 8, "dtype of x_ptr": "torch.float32"}, 0, 1, {})
    assert (new.tuned, new.hits, new.from_disk, len(new.timings_ms)) == (1, 2, 0, 2)
    assert set(new.timings_ms.values()) == {0.25}
    assert "BLOCK: 4" in new.choice
    assert len(inner) == 1
    assert list(seen.to_pandas().hits) == [1, 2]
    assert list(seen.timings().chosen) == [True, False]
    assert "double(n=4, dtype of x_ptr torch.float32): BLOCK: 4" in repr(seen)


@triton.autotune(
    configs=[triton.Config({"BLOCK": 4}, num_warps=1), triton.Config({"BLOCK": 8}, num_warps=1)],
    key=["n", "n"], do_bench=lambda call, quantiles: (call(), [0.25, 0.2, 0.3])[1],
    prune_configs_by={"early_config_prune": lambda configs, named, **_: configs if named["n"] == 4 else configs[1:]},
)  # fmt: skip
@triton.jit
def pruned(x_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)


def test_watching_a_kernel_with_one_config_left_after_pruning() -> None:
    x = torch.ones(8, device=DEVICE)
    with tune.watch() as seen:
        for n in (4, 8, 8, 4):
            pruned[lambda meta, n=n: (triton.cdiv(n, meta["BLOCK"]),)](x, n)
    both, one = seen
    assert (both.tuned, both.hits, both.from_disk, len(both.timings_ms)) == (1, 1, 0, 2)
    assert (one.tuned + one.hits, one.from_disk) == (2, 0)  # some versions of Triton time the one
    assert "BLOCK: 8" in one.choice
    assert set(one.timings_ms) <= {one.choice}  # none of the other key


def test_watching_tells_what_a_kernel_raised() -> None:
    with tune.watch() as seen, pytest.raises(Exception, match=r"dtype|<class 'str'>"):  # the words of versions of Triton
        double[(1,)](torch.ones(8, device=DEVICE), "eight")
    assert next(iter(seen)).error
