"""The chunked scan against the recurrence by token in float64, and against its matrix form."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from tandem.errors import ShapeError
from tandem.ops.ssd.reference import discretize, ssd_prefill, ssd_scan, ssd_update
from tests.tolerances import assert_close
from tests.unit.ops.arena import GarbageArena

NO_LIMIT = (0.0, float("inf"))
LENGTHS = [
    [1],
    [63],
    [257],
    [5, 0, 7],
    [0, 3],
    [32, 32],
    [20, 20, 20],
    [1, 70, 1, 33, 0, 64],
    [0],
    [0, 0],
]


@dataclass
class Problem:
    """Random arguments of one packed batch; H = 6 heads in G = 3 groups, P = 5, N = 7."""

    x: torch.Tensor
    dt: torch.Tensor  # raw
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor
    dt_bias: torch.Tensor
    initial: torch.Tensor
    query_start: torch.Tensor


def make_problem(lengths, dtype=torch.float32, heads=6, groups=3, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    num_tokens, head_dim, state_size = sum(lengths), 5, 7
    # x, B and C are slices of one tensor, as the convolution leaves them.
    widths = [heads * head_dim, groups * state_size, groups * state_size]
    x, B, C = randn(num_tokens, sum(widths)).to(dtype).split(widths, dim=1)
    return Problem(
        x=x.unflatten(1, (heads, head_dim)),
        dt=randn(num_tokens, heads).to(dtype),
        A=-torch.exp(randn(heads)).float(),
        B=B.unflatten(1, (groups, state_size)),
        C=C.unflatten(1, (groups, state_size)),
        D=randn(heads).float(),
        dt_bias=randn(heads).float(),
        initial=randn(len(lengths), heads, head_dim, state_size).float(),
        query_start=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
    )


def loop(x, step, A, B, C, D, initial, query_start):
    """h = exp(step A) h + step x B^T, y = h C + D x: one token after the other, in float64."""
    x, step, A, B, C, D = (value.double() for value in (x, step, A, B, C, D))
    repeat = x.shape[1] // B.shape[1]
    B, C = B.repeat_interleave(repeat, dim=1), C.repeat_interleave(repeat, dim=1)
    y, final = torch.zeros_like(x), initial.double().clone()
    for row in range(len(query_start) - 1):
        for t in range(int(query_start[row]), int(query_start[row + 1])):
            decay = torch.exp(step[t] * A)[:, None, None]
            added = step[t][:, None, None] * x[t][:, :, None] * B[t][:, None, :]
            final[row] = decay * final[row] + added
            y[t] = torch.einsum("hpn,hn->hp", final[row], C[t]) + D[:, None] * x[t]
    return y, final


def loop_step(dt, dt_bias, limit):
    return F.softplus(dt.double() + dt_bias.double()).clamp(*limit)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_scan_equals_recurrence(lengths, dtype):
    p = make_problem(lengths, dtype)
    step = loop_step(p.dt, p.dt_bias, NO_LIMIT).float()
    y, final = ssd_scan(p.x, step, p.A, p.B, p.C, p.D, p.initial, p.query_start, chunk=32)

    expected_y, expected_final = loop(p.x, step, p.A, p.B, p.C, p.D, p.initial, p.query_start)
    assert y.dtype == dtype
    assert_close(y, expected_y)
    assert_close(final, expected_final, torch.float32)


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (5, 1), (5, 5), (12, 3)])
@pytest.mark.parametrize("chunk", [1, 7, 16, 128])
def test_scan_does_not_depend_on_chunk_or_grouping(heads, groups, chunk):
    p = make_problem([40, 3], heads=heads, groups=groups)
    step = loop_step(p.dt, p.dt_bias, NO_LIMIT).float()
    y, final = ssd_scan(p.x, step, p.A, p.B, p.C, None, p.initial, p.query_start, chunk)

    no_skip = torch.zeros(heads)
    expected = loop(p.x, step, p.A, p.B, p.C, no_skip, p.initial, p.query_start)
    assert_close(y, expected[0])
    assert_close(final, expected[1])


def test_scan_equals_matrix_form():
    """y = (L * C B^T) (step x) over a whole sequence: arXiv:2405.21060, equation 16."""
    p = make_problem([50], torch.float64, heads=4, groups=1)
    step = loop_step(p.dt, p.dt_bias, NO_LIMIT)
    total = (step * p.A).cumsum(0)  # [T, H]
    decay = (total[:, None] - total[None, :]).exp() * torch.ones(50, 50).tril()[..., None]
    scores = p.C[:, 0] @ p.B[:, 0].T  # [T, T]
    expected = torch.einsum("ts,tsh,shp->thp", scores, decay, p.x * step[..., None])

    fresh = torch.zeros_like(p.initial)
    y, _ = ssd_scan(p.x, step, p.A, p.B, p.C, None, fresh, p.query_start, chunk=16)
    assert_close(y, expected, torch.float32)


def test_large_step_does_not_blur_the_small_ones_after_it():
    p = make_problem([64])
    step = torch.full_like(p.dt, 1e-3)
    step[3] = 1e5
    y, final = ssd_scan(p.x, step, p.A, p.B, p.C, p.D, p.initial, p.query_start)

    expected_y, expected_final = loop(p.x, step, p.A, p.B, p.C, p.D, p.initial, p.query_start)
    # Relative to each token: the scale of token 3 would hide the others.
    error = (y - expected_y).abs().amax((1, 2)) / expected_y.abs().amax((1, 2))
    assert error.max() < 1e-4
    assert_close(final, expected_final)


@pytest.mark.parametrize("lengths", [[2, 0, 5], [3, 3], [4, 4]], ids=str)
def test_scan_is_differentiable(lengths):
    p = make_problem(lengths, torch.float64, heads=2, groups=1)
    step = loop_step(p.dt, p.dt_bias, NO_LIMIT)
    values = [p.x, step, p.A, p.B, p.C, p.D, p.initial]
    inputs = [value.detach().double().clone().requires_grad_() for value in values]
    assert torch.autograd.gradcheck(
        lambda *args: ssd_scan(*args, query_start=p.query_start, chunk=3), inputs
    )


@pytest.mark.parametrize("query_start", [[0, 4], [0, 7, 5], [1, 5]])
def test_scan_refuses_query_start_that_does_not_cover_the_tokens(query_start):
    p = make_problem([5])
    with pytest.raises(ShapeError, match="query_start"):
        ssd_scan(p.x, p.dt.exp(), p.A, p.B, p.C, p.D, p.initial, torch.tensor(query_start), chunk=4)


def prefill_in_arena(p, state_dtype, has_state, chunk=32, limit=NO_LIMIT):
    """Run with row i in slot 2 i + 1; rows without state find NaN there."""
    slots = [2 * row + 1 for row in range(len(p.initial))]
    arena = GarbageArena(2 * len(slots) + 1, tuple(p.initial.shape[1:]), state_dtype)
    for slot, is_live, state in zip(slots, has_state, p.initial, strict=True):
        if is_live:
            arena.fill(slot, state)
    before = arena.view[slots].double()
    y = ssd_prefill(
        p.x, p.dt, p.A, p.B, p.C, p.D, arena.view, torch.tensor(slots), p.query_start,
        torch.tensor(has_state), p.dt_bias, limit, chunk,
    )  # fmt: skip
    return y, arena, slots, before


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("lengths", "has_state"),
    [
        ([5, 0, 7], [True, True, False]),
        ([0, 3], [False, False]),
        ([1, 1, 40, 1], [True, False, False, True]),
        ([33, 64], [False, True]),
        ([0], [True]),
    ],
    ids=str,
)
def test_prefill_reads_and_writes_exactly_the_slots_of_its_rows(lengths, has_state, state_dtype):
    p = make_problem(lengths, torch.bfloat16 if state_dtype != torch.float32 else torch.float32)
    y, arena, slots, before = prefill_in_arena(p, state_dtype, has_state)

    initial = torch.where(torch.tensor(has_state)[:, None, None, None], before, 0.0)
    step = loop_step(p.dt, p.dt_bias, NO_LIMIT)
    expected_y, expected_final = loop(p.x, step, p.A, p.B, p.C, p.D, initial, p.query_start)
    assert_close(y, expected_y)
    touched = [row for row, length in enumerate(lengths) if length]
    arena.assert_only_changed([slots[row] for row in touched])
    assert_close(arena.view[[slots[row] for row in touched]], expected_final[touched])


@pytest.mark.parametrize("limit", [NO_LIMIT, (0.0, 0.2), (0.5, 0.7), (1e-4, 1e3)])
def test_given_step_limits_are_the_only_ones(limit):
    p = make_problem([9, 20])
    p.dt[::2] -= 12.0  # steps far below the minimum that some checkpoints use for initialisation
    y, arena, slots, _ = prefill_in_arena(p, torch.float32, [False, True], limit=limit)

    initial = p.initial.clone()
    initial[0] = 0
    step = loop_step(p.dt, p.dt_bias, limit)
    expected_y, expected_final = loop(p.x, step, p.A, p.B, p.C, p.D, initial, p.query_start)
    assert_close(y, expected_y)
    assert_close(arena.view[slots], expected_final)
    assert discretize(torch.tensor([-20.0]), torch.zeros(1), NO_LIMIT).item() < 1e-8


@pytest.mark.parametrize("cut", [1, 2, 15, 16, 17, 39])
def test_prefill_in_two_chunks_equals_prefill_in_one(cut):
    p = make_problem([40])
    whole, arena, (slot,), _ = prefill_in_arena(p, torch.float32, [False], chunk=16)
    other = GarbageArena(2, tuple(p.initial.shape[1:]), torch.float32)
    parts = []
    for start, stop in ((0, cut), (cut, 40)):
        here = slice(start, stop)
        query_start, has_state = torch.tensor([0, stop - start]), torch.tensor([start > 0])
        tokens = p.x[here], p.dt[here], p.A, p.B[here], p.C[here], p.D
        where = other.view, torch.tensor([1]), query_start, has_state
        parts.append(ssd_prefill(*tokens, *where, p.dt_bias, NO_LIMIT, 16))
    assert_close(torch.cat(parts), whole)
    assert_close(other.view[1], arena.view[slot])


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_update_is_one_step_of_the_recurrence(num_rows, dtype, state_dtype):
    p = make_problem([1] * num_rows, dtype)
    slots = [3, 0, 4][:num_rows]
    arena = GarbageArena(6, tuple(p.initial.shape[1:]), state_dtype)
    for slot, state in zip(slots, p.initial, strict=True):
        arena.fill(slot, state)
    before = arena.view[slots].double()
    limit = (0.01, 2.0)
    y = ssd_update(p.x, p.dt, p.A, p.B, p.C, p.D, arena.view, torch.tensor(slots), p.dt_bias, limit)

    step = loop_step(p.dt, p.dt_bias, limit)
    expected_y, expected_final = loop(p.x, step, p.A, p.B, p.C, p.D, before, p.query_start)
    assert y.dtype == dtype
    assert_close(y, expected_y)
    arena.assert_only_changed(slots)
    assert_close(arena.view[slots], expected_final)


def test_nan_in_one_sequence_stays_there():
    p = make_problem([6, 40, 3])
    p.x[0] = torch.nan
    y, arena, slots, _ = prefill_in_arena(p, torch.float32, [False, False, False])
    assert y[:6].isnan().any()
    assert not y[6:].isnan().any()
    assert not arena.view[slots[1:]].isnan().any()
