"""The reference against the recurrence, one token after the other in float64."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tandem.errors import ShapeError
from tandem.ops.selective_scan import (
    selective_scan,
    selective_scan_prefill,
    selective_scan_update,
)
from tests.tolerances import assert_close
from tests.unit.ops.arena import GarbageArena

LENGTHS = [[1], [40], [5, 0, 7], [0, 3], [0], [3, 1, 17, 17, 2]]


def make_problem(lengths, dtype=torch.float32, channels=6, groups=1, state_size=7, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    count = sum(lengths)
    # x and z are halves of one tensor, B and C slices of another.
    x, z = randn(count, 2 * channels).to(dtype).chunk(2, dim=1)
    low = randn(count, groups, 2 * state_size + 3).to(dtype)
    return SimpleNamespace(
        x=x,
        z=z,
        dt=randn(count, channels).to(dtype),
        A=-torch.exp(randn(channels, state_size)).float(),
        B=low[..., 3 : 3 + state_size],
        C=low[..., 3 + state_size :],
        D=randn(channels).float(),
        dt_bias=randn(channels).float(),
        initial=randn(len(lengths), channels, state_size).float(),
        query_start=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
    )


def loop(p, initial, step):
    x, A, D = p.x.double(), p.A.double(), p.D.double()
    per_group = x.shape[1] // p.B.shape[1]
    B, C = (value.double().repeat_interleave(per_group, dim=1) for value in (p.B, p.C))
    y, final = torch.zeros_like(x), initial.double().clone()
    for row in range(len(p.query_start) - 1):
        for t in range(int(p.query_start[row]), int(p.query_start[row + 1])):
            for d in range(x.shape[1]):
                decay = torch.exp(step[t, d] * A[d])
                final[row, d] = decay * final[row, d] + step[t, d] * x[t, d] * B[t, d]
                y[t, d] = final[row, d] @ C[t, d] + D[d] * x[t, d]
    return y, final


def loop_step(p):
    return F.softplus(p.dt.double() + p.dt_bias.double())


def gated(y, z):
    return y * F.silu(z.double())


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 3])
def test_scan_equals_recurrence(lengths, dtype, groups):
    p = make_problem(lengths, dtype, groups=groups)
    step = loop_step(p).to(torch.promote_types(dtype, torch.float32))
    y, final = selective_scan(p.x, step, p.A, p.B, p.C, p.D, p.initial, p.query_start)
    expected_y, expected_final = loop(p, p.initial, step.double())
    assert y.dtype == dtype
    assert_close(y, expected_y)
    assert_close(final, expected_final, torch.float32)


def test_scan_is_differentiable():
    p = make_problem([2, 0, 4], torch.float64, channels=2, state_size=3)
    step = loop_step(p)
    values = [p.x, step, p.A, p.B, p.C, p.D, p.initial]
    inputs = [value.detach().double().clone().requires_grad_() for value in values]
    assert torch.autograd.gradcheck(
        lambda *args: selective_scan(*args, query_start=p.query_start), inputs
    )


@pytest.mark.parametrize("query_start", [[0, 4], [0, 7, 5], [1, 5]])
def test_scan_refuses_query_start_that_does_not_cover_the_tokens(query_start):
    p = make_problem([5])
    with pytest.raises(ShapeError, match="query_start"):
        selective_scan(p.x, p.dt, p.A, p.B, p.C, None, p.initial, torch.tensor(query_start))


def prefill_in_arena(p, state_dtype, has_state):
    """Run with row i in slot 2 i + 1; rows without state find NaN there."""
    slots = [2 * row + 1 for row in range(len(p.initial))]
    arena = GarbageArena(2 * len(slots) + 1, tuple(p.initial.shape[1:]), state_dtype)
    for slot, is_live, state in zip(slots, has_state, p.initial, strict=True):
        if is_live:
            arena.fill(slot, state)
    before = arena.view[slots].double()
    where = arena.view, torch.tensor(slots), p.query_start, torch.tensor(has_state)
    y = selective_scan_prefill(p.x, p.dt, p.A, p.B, p.C, p.D, p.z, *where, p.dt_bias)
    return y, arena, slots, before


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("lengths", "has_state"),
    [
        ([5, 0, 7], [True, True, False]),
        ([0, 3], [False, False]),
        ([1, 1, 40, 1], [True, False, False, True]),
        ([0], [True]),
    ],
    ids=str,
)
def test_prefill_reads_and_writes_exactly_the_slots_of_its_rows(
    lengths, has_state, dtype, state_dtype
):
    p = make_problem(lengths, dtype, groups=2)
    y, arena, slots, before = prefill_in_arena(p, state_dtype, has_state)
    initial = torch.where(torch.tensor(has_state)[:, None, None], before, 0.0)
    expected_y, expected_final = loop(p, initial, loop_step(p))
    assert y.dtype == dtype
    assert_close(y, gated(expected_y, p.z))
    touched = [row for row, length in enumerate(lengths) if length]
    arena.assert_only_changed([slots[row] for row in touched])
    assert_close(arena.view[[slots[row] for row in touched]], expected_final[touched])


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 2])
def test_update_is_one_step_of_the_recurrence(dtype, state_dtype, groups):
    p = make_problem([1, 1, 1], dtype, groups=groups)
    slots = [3, 0, 4]
    arena = GarbageArena(6, tuple(p.initial.shape[1:]), state_dtype)
    for slot, state in zip(slots, p.initial, strict=True):
        arena.fill(slot, state)
    before = arena.view[slots].double()
    where = arena.view, torch.tensor(slots)
    y = selective_scan_update(p.x, p.dt, p.A, p.B, p.C, p.D, p.z, *where, p.dt_bias)
    expected_y, expected_final = loop(p, before, loop_step(p))
    assert y.dtype == dtype
    assert_close(y, gated(expected_y, p.z))
    arena.assert_only_changed(slots)
    assert_close(arena.view[slots], expected_final)


def test_without_skip_and_gate():
    p = make_problem([9])
    arena = GarbageArena(1, tuple(p.initial.shape[1:]), torch.float32)
    where = arena.view, torch.tensor([0]), p.query_start, torch.tensor([False])
    y = selective_scan_prefill(p.x, p.dt, p.A, p.B, p.C, None, None, *where, p.dt_bias)
    p.D = torch.zeros_like(p.D)
    assert_close(y, loop(p, torch.zeros_like(p.initial), loop_step(p))[0])


def test_nan_in_one_sequence_stays_there():
    p = make_problem([6, 40, 3])
    p.x[0] = torch.nan
    y, arena, slots, _ = prefill_in_arena(p, torch.float32, [False, False, False])
    assert y[:6].isnan().any()
    assert not y[6:].isnan().any()
    assert not arena.view[slots[1:]].isnan().any()
