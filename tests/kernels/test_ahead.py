"""Lines that a norm asks for ahead: which ones they are, and that nothing else depends on them."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from toolkit import ops
from toolkit.kernels.ahead import LINE, LINES, MOST_BYTES, RUN, SHARE, SHARE_AT_ONCE, asked_of, lines_of
from toolkit.kernels.norms_rope import RMS_NORM, NormShape
from toolkit.ops import norms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = (1, LINE, 100 * LINE + 5, 3 << 20, 200 << 20)


@triton.jit
def _lines(out_ptr, stride, RUN: tl.constexpr, LINES: tl.constexpr):
    block = tl.program_id(0)
    tl.store(out_ptr + block * LINES + tl.arange(0, LINES), lines_of(block, stride, RUN, LINES))


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_lines_are_a_share_spread_over_the_tensor(size: int, at_once: bool) -> None:
    asked = asked_of(torch.empty(size, dtype=torch.uint8, device="meta"), at_once)
    found = torch.full((asked.blocks, LINES), -1, dtype=torch.int32, device=DEVICE)
    _lines[(asked.blocks,)](found, asked.stride, RUN, LINES)
    lines = found.flatten()[found.flatten() < asked.lines].tolist()
    assert len(set(lines)) == len(lines)
    wanted = [line for line in range(asked.lines) if line // RUN % asked.stride == 0]
    assert sorted(lines) == wanted
    assert len(lines) * LINE <= min(MOST_BYTES, size / (SHARE_AT_ONCE if at_once else SHARE)) + RUN * LINE


@pytest.mark.parametrize("name", ["ahead", "ahead_at_once"])
@pytest.mark.parametrize("form", ["norm", "add_norm", "norm_add_norm"])
def test_the_norm_is_the_same(form: str, name: str) -> None:
    shape = NormShape(2, 96, form, quantised=True)
    inputs = RMS_NORM.inputs(shape, DEVICE)
    config = RMS_NORM.space(shape)[0]
    wanted = RMS_NORM.run(shape, config, inputs)
    matrix = torch.arange(300_000, dtype=torch.int32, device=DEVICE).view(100, 3000)
    launch = RMS_NORM.launches(shape, config, inputs | {name: matrix}, RMS_NORM.outputs(shape, inputs))[0]
    assert launch.grid == (2 + asked_of(matrix, name == "ahead_at_once").blocks,)
    found = RMS_NORM.run(shape, config, inputs | {name: matrix})
    assert all(map(torch.equal, found, wanted))
    assert torch.equal(matrix.flatten(), torch.arange(300_000, dtype=torch.int32, device=DEVICE))


@pytest.mark.parametrize(
    ("rows", "post", "of_ranks", "wanted"),
    [(1, True, False, (True, False)), (1, False, False, (False, False)), (1, False, True, (True, True)),
     (1, True, True, (True, True)), (8, True, False, (True, False)), (9, True, True, (False, True))],
)  # fmt: skip
def test_it_asks_where_steps_get_faster(
    empty_card: object, monkeypatch: pytest.MonkeyPatch, rows: int, post: bool, of_ranks: bool, wanted: tuple[bool, bool]
) -> None:
    """After two norms and after sums over ranks, in decode steps only."""
    seen = []
    monkeypatch.setattr(norms, "call", lambda name, *given: seen.append(given) or given[:2])
    x, weight = torch.ones(1, rows, 64, device="vgpu", dtype=torch.bfloat16), torch.ones(64, device="vgpu")
    matrix = torch.ones(64, 64, device="vgpu", dtype=torch.uint8)
    with torch.no_grad():
        ops.add_norm(x, x, weight, 1e-6, weight if post else None, ahead=matrix, of_ranks=of_ranks)
    ahead, at_once = seen[0][-2:]
    assert (ahead is matrix, at_once) == wanted
