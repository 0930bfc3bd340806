"""Tests of the gated delta rule, in steps, in chunks and with extreme gates, against its token-by-token definition in fp64."""

from __future__ import annotations

import itertools

import pytest
import torch

from toolkit.ops.reference.delta_rule import CHUNK, gated_delta_rule

TOLERANCE = 2e-5  # fp32 sums over up to 200 tokens, values of order one
HEADS = {  # (axes of the key heads, table of the value heads)
    "one_value_a_key": ((3, 1), (3, 1)),
    "grouped": ((2, 1), (2, 3)),
    "tiled": ((1, 2), (3, 2)),
    "one_head": ((1, 1), (1, 1)),
}


def draw(tokens, keys, table, dk=5, dv=7, batch=1, seed=0, forget=1.0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(batch, tokens, *shape, generator=generator)

    q, k = (torch.nn.functional.normalize(normal(*keys, dk), dim=-1) for _ in "qk")
    gate = -torch.rand(batch, tokens, *table, generator=generator) * forget
    return q, k, normal(*table, dv), gate, normal(*table).sigmoid()


def defined(q, k, v, g, beta, state):
    """Compute the definition in fp64. Return the output [B, T, M, N, Dv] and the state after the last token."""
    q, k, v, g, beta, now = (x.double() for x in (q, k, v, g, beta, state))
    found = []
    for t in range(v.shape[1]):
        now = now * g[:, t].exp()[..., None, None]
        key = k[:, t].expand(-1, *v.shape[2:4], -1)
        delta = (v[:, t] - torch.einsum("bmnk,bmnkv->bmnv", key, now)) * beta[:, t][..., None]
        now = now + key[..., None] * delta[..., None, :]
        found.append(torch.einsum("bmnk,bmnkv->bmnv", q[:, t].expand(-1, *v.shape[2:4], -1), now))
    return torch.stack(found, 1), now


@pytest.mark.parametrize(("keys", "table"), HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("tokens", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5], ids="T={}".format)
def test_without_a_state(keys, table, tokens):
    given = draw(tokens, keys, table, batch=2)
    expected, _ = defined(*given, torch.zeros(2, *table, 5, 7))
    assert (gated_delta_rule(*given) - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize(("keys", "table"), HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("parts", [[1] * 9, [70, 1, 64], [2, 3, 130], [65]], ids=str)
def test_in_parts_with_a_state_written_in_place(keys, table, parts):
    given = draw(sum(parts), keys, table)
    state = torch.randn(*table, 5, 7, generator=torch.Generator().manual_seed(1))
    expected, after = defined(*given, state[None])
    where, found = state.data_ptr(), []
    for start, stop in itertools.pairwise([0, *itertools.accumulate(parts)]):
        found.append(gated_delta_rule(*(x[:, start:stop] for x in given), state))
    assert (torch.cat(found, 1) - expected).abs().max() <= TOLERANCE
    assert (state - after[0]).abs().max() <= TOLERANCE
    assert state.data_ptr() == where


@pytest.mark.parametrize("gate", [0.0, -1e-6, -20.0, -1e4], ids="g={}".format)
@pytest.mark.parametrize("same", [False, True], ids=["keys_differ", "one_key_repeated"])
def test_extremes_stay_finite_and_right(gate, same):
    """Gates that forget nothing or everything, and one key repeated with beta 1, whose updates must cancel within a chunk."""
    q, k, v, _, beta = draw(150, (2, 1), (2, 2))
    if same:
        k, beta = k[:, :1].expand_as(k), torch.ones_like(beta)
    given = q, k, v, torch.full_like(beta, gate), beta
    expected, _ = defined(*given, torch.zeros(1, 2, 2, 5, 7))
    assert (gated_delta_rule(*given) - expected).abs().max() <= 5 * TOLERANCE
    state = torch.zeros(2, 2, 5, 7)
    stepped = torch.cat([gated_delta_rule(*(x[:, t : t + 1] for x in given), state) for t in range(150)], 1)
    assert (stepped - expected).abs().max() <= 5 * TOLERANCE


@pytest.mark.parametrize("gate", [-5.0, -50.0, -500.0], ids="g={}".format)
def test_some_tokens_forget_all_and_others_nothing(gate):
    """A chunk subtracts fp32 sums of logarithms, which loses `digits` of precision. Single steps don't."""
    q, k, v, g, beta = draw(150, (2, 1), (2, 2))
    given = q, k, v, torch.where(g < -0.7, gate, -1e-3), beta
    expected, _ = defined(*given, torch.zeros(1, 2, 2, 5, 7))
    digits = CHUNK * -gate * torch.finfo(torch.float32).eps
    assert (gated_delta_rule(*given) - expected).abs().max() <= TOLERANCE + digits
    state = torch.zeros(2, 2, 5, 7)
    stepped = torch.cat([gated_delta_rule(*(x[:, t : t + 1] for x in given), state) for t in range(150)], 1)
    assert (stepped - expected).abs().max() <= TOLERANCE


def test_gradients_are_those_of_the_definition():
    given = [x.requires_grad_() for x in draw(70, (1, 2), (2, 2), batch=2)]
    weights = torch.randn(2, 70, 2, 2, 7, generator=torch.Generator().manual_seed(2))
    found = torch.autograd.grad((gated_delta_rule(*given) * weights).sum(), given)
    expected = torch.autograd.grad((defined(*given, torch.zeros(2, 2, 2, 5, 7))[0] * weights).sum(), given)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).abs().max() <= 1e-4 * max(1.0, float(theirs.abs().max()))
