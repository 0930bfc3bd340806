"""Lines that a norm asks for ahead: which ones they are, and that nothing else depends on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import toolkit as tk
from toolkit import ops
from toolkit.kernels.ahead import LINE, LINES, MOST_BYTES, RUN, SHARE, asked_of, lines_of
from toolkit.kernels.norms_rope import RMS_NORM, NormShape
from toolkit.ops import define, norms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
AHEAD = -2  # the place of "ahead" among the operands of the norm
SIZES = (1, LINE, 100 * LINE + 5, 3 << 20, 200 << 20)


@triton.jit
def _lines(out_ptr, stride, RUN: tl.constexpr, LINES: tl.constexpr):
    block = tl.program_id(0)
    tl.store(out_ptr + block * LINES + tl.arange(0, LINES), lines_of(block, stride, RUN, LINES))


@pytest.mark.parametrize("size", SIZES)
def test_lines_are_a_share_spread_over_the_tensor(size: int) -> None:
    asked = asked_of(torch.empty(size, dtype=torch.uint8, device="meta"))
    found = torch.full((asked.blocks, LINES), -1, dtype=torch.int32, device=DEVICE)
    _lines[(asked.blocks,)](found, asked.stride, RUN, LINES)
    lines = found.flatten()[found.flatten() < asked.lines].tolist()
    assert len(set(lines)) == len(lines)
    wanted = [line for line in range(asked.lines) if line // RUN % asked.stride == 0]
    assert sorted(lines) == wanted
    assert len(lines) * LINE <= min(MOST_BYTES, size / SHARE) + RUN * LINE


@pytest.mark.parametrize("form", ["norm", "add_norm", "norm_add_norm"])
def test_the_norm_is_the_same(form: str) -> None:
    shape = NormShape(2, 96, form, quantised=True)
    inputs = RMS_NORM.inputs(shape, DEVICE)
    config = RMS_NORM.space(shape)[0]
    wanted = RMS_NORM.run(shape, config, inputs)
    matrix = torch.arange(300_000, dtype=torch.int32, device=DEVICE).view(100, 3000)
    given = inputs | {"ahead": matrix}
    launch = RMS_NORM.launches(shape, config, given, RMS_NORM.outputs(shape, given))[0]
    assert launch.grid == (2 + asked_of(matrix).blocks,)
    assert all(map(torch.equal, RMS_NORM.run(shape, config, given), wanted))
    assert torch.equal(matrix.flatten(), torch.arange(300_000, dtype=torch.int32, device=DEVICE))


@pytest.mark.parametrize(("rows", "post", "wanted"), [(1, True, True), (1, False, False), (8, True, True), (9, True, False)])
def test_decode_steps_ask_during_two_norms(
    empty_card: object, monkeypatch: pytest.MonkeyPatch, rows: int, post: bool, wanted: bool
) -> None:
    seen = []
    monkeypatch.setattr(norms, "call", lambda name, *given: seen.append(given) or given[:2])
    x, weight = torch.ones(1, rows, 64, device="vgpu", dtype=torch.bfloat16), torch.ones(64, device="vgpu")
    matrix = torch.ones(64, 64, device="vgpu", dtype=torch.uint8)
    with torch.no_grad():
        ops.add_norm(x, x, weight, 1e-6, weight if post else None, ahead=matrix)
    assert (seen[0][AHEAD] is matrix) == wanted


def test_packages_do_not_ask(empty_card: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The instruction is not traced: Inductor would take the matrix for one that the launch writes."""
    seen = []
    monkeypatch.setattr(norms, "call", lambda name, *given: seen.append(given) or given[:2])
    monkeypatch.setattr(define, "_compiling_for", object())
    x, weight = torch.ones(1, 1, 64, device="vgpu", dtype=torch.bfloat16), torch.ones(64, device="vgpu")
    with torch.no_grad():
        ops.add_norm(x, x, weight, 1e-6, weight, ahead=torch.ones(64, 64, device="vgpu", dtype=torch.uint8))
    assert seen[0][AHEAD] is None


@pytest.mark.parametrize(("path", "asks"), [("demo/gemma4", True), ("demo/qwen3", False)])
def test_steps_of_models_ask_for_what_is_read_next(
    empty_card: object, monkeypatch: pytest.MonkeyPatch, path: str, asks: bool
) -> None:
    model = tk.load(path, device="virtual:h200", scheme="int4", dtype="bfloat16", progress=False)
    asked: list[int | None] = []
    real = norms.call

    def noted(name: str, *given: Any) -> Any:
        asked.append(None if given[AHEAD] is None else given[AHEAD].data_ptr())
        return real(name, *given)

    monkeypatch.setattr(norms, "call", noted)
    tk.generate(model, "The", "position-on-device", max_new_tokens=3, eos=(), record=False)
    found = {pointer for pointer in asked if pointer is not None}
    assert bool(found) == asks
    codes = {parameter.data_ptr() for name, parameter in model.named_parameters() if name.endswith("codes")}
    assert found <= codes
    if asks:  # two per layer, but for the norm before the first one
        assert len(found) == 2 * model.config.num_hidden_layers - 1
