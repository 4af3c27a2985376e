"""Prefill and update against the recurrence by token in float64, on every path this device has."""

import pytest
import torch

from tandem.ops.linear_attention import linear_attention_prefill, linear_attention_update
from tests.tolerances import assert_close
from tests.unit.ops.arena import GarbageArena

HEADS, KEY, VALUE = 3, 6, 5


def make_problem(num_tokens, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    width = 2 * KEY + VALUE
    qkv = torch.randn(num_tokens, HEADS, width, generator=generator).to(dtype)
    A = -torch.tensor([0.8, 0.05, 1e-4])
    return *qkv.split([KEY, KEY, VALUE], dim=-1), A


def loop(q, k, v, A, state):
    q, k, v, decay = q.double(), k.double(), v.double(), A.double().exp()[:, None, None]
    out, state = [], state.double()
    for t in range(len(q)):
        state = decay * state + v[t].unsqueeze(-1) * k[t].unsqueeze(-2)
        out.append((state @ q[t].unsqueeze(-1)).squeeze(-1))
    return torch.stack(out), state


@pytest.fixture(params=["1", "0"], ids=["native", "reference"], autouse=True)
def path(request, monkeypatch):
    monkeypatch.setenv("TANDEM_NATIVE", request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_equals_recurrence(dtype):
    q, k, v, A = make_problem(300, dtype)
    arena = GarbageArena(7, (HEADS, VALUE, KEY), torch.float32)
    before = torch.randn(HEADS, VALUE, KEY, generator=torch.Generator().manual_seed(1))
    arena.fill(5, before)
    o = linear_attention_prefill(
        q, k, v, A, arena.view, torch.tensor([5, 3, 0]),
        torch.tensor([0, 260, 260, 300], dtype=torch.int32), torch.tensor([True, True, False]),
    )  # fmt: skip
    first, first_state = loop(q[:260], k[:260], v[:260], A, before)
    last, last_state = loop(q[260:], k[260:], v[260:], A, torch.zeros_like(before))
    assert o.dtype == dtype
    assert_close(o, torch.cat([first, last]))
    arena.assert_only_changed([5, 0])
    assert_close(arena.view[[5, 0]], torch.stack([first_state, last_state]), dtype)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_update_is_one_step_of_the_recurrence(state_dtype):
    q, k, v, A = make_problem(2)
    arena = GarbageArena(6, (HEADS, VALUE, KEY), state_dtype)
    for slot in (4, 1):
        arena.fill(slot, torch.randn(HEADS, VALUE, KEY))
    before = arena.view[[4, 1]].double()
    o = linear_attention_update(q, k, v, A, arena.view, torch.tensor([4, 1]))
    found = [
        loop(q[row : row + 1], k[row : row + 1], v[row : row + 1], A, before[row])
        for row in range(2)
    ]
    assert_close(o, torch.cat([item[0] for item in found]))
    arena.assert_only_changed([4, 1])
    assert_close(arena.view[[4, 1]], torch.stack([item[1] for item in found]), state_dtype)
