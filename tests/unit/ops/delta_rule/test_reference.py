"""The chunked scan against the recurrence by token in float64."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from tandem.errors import ShapeError
from tandem.ops.delta_rule.reference import delta_prefill, delta_scan, delta_update
from tests.tolerances import assert_close
from tests.unit.ops.arena import GarbageArena

LENGTHS = [[1], [63], [150], [5, 0, 7], [0, 3], [32, 32], [1, 70, 1, 33, 0, 64], [0], [0, 0]]
CHANNELS = pytest.mark.parametrize("by_channel", [False, True], ids=["head", "channel"])


@dataclass
class Problem:
    """Random raw arguments of one packed batch; G = 2 key heads, H = 6 heads, K = 5, V = 7."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    A: torch.Tensor
    dt_bias: torch.Tensor
    initial: torch.Tensor
    query_start: torch.Tensor

    @property
    def raw(self):
        return self.q, self.k, self.v, self.a, self.b, self.A, self.dt_bias


def make_problem(lengths, by_channel=False, dtype=torch.float32, groups=2, heads=6, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    num_tokens, key, value = sum(lengths), 5, 7
    # q, k and v are slices of one tensor, as the convolution leaves them.
    widths = [groups * key, groups * key, heads * value]
    q, k, v = randn(num_tokens, sum(widths)).to(dtype).split(widths, dim=1)
    inner = (heads, key) if by_channel else (heads,)
    return Problem(
        q=q.unflatten(1, (groups, key)),
        k=k.unflatten(1, (groups, key)),
        v=v.unflatten(1, (heads, value)),
        a=randn(num_tokens, *inner).to(dtype),
        b=randn(num_tokens, heads).to(dtype),
        A=-torch.exp(randn(heads)).float(),
        dt_bias=randn(*inner).float(),
        initial=randn(len(lengths), heads, value, key).float(),
        query_start=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
    )


def loop(q, k, v, g, beta, initial, query_start):
    """S = S exp(g); S += beta (v - S k) k^T; o = S q: one token after the other, in float64."""
    q, k, v, g, beta = (value.double() for value in (q, k, v, g, beta))
    repeat = v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(repeat, dim=1), k.repeat_interleave(repeat, dim=1)
    g = g if g.dim() == 3 else g.unsqueeze(-1)
    o, final = torch.zeros_like(v), initial.double().clone()
    for row in range(len(query_start) - 1):
        for t in range(int(query_start[row]), int(query_start[row + 1])):
            kept = final[row] * g[t].exp().unsqueeze(-2)
            error = v[t] - torch.einsum("hvk,hk->hv", kept, k[t])
            final[row] = kept + torch.einsum("h,hv,hk->hvk", beta[t], error, k[t])
            o[t] = torch.einsum("hvk,hk->hv", final[row], q[t])
    return o, final


def loop_raw(p, initial, max_beta=1.0, floor=None):
    """`loop` behind the gates and norms as the papers have them."""

    def unit(x):
        return x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()

    raw = p.a.double() + p.dt_bias.double()
    rate = -p.A.double()
    rate = rate if p.a.dim() == 2 else rate.unsqueeze(-1)
    g = -rate * F.softplus(raw) if floor is None else floor * torch.sigmoid(rate * raw)
    q = unit(p.q) * p.q.shape[-1] ** -0.5
    return loop(q, unit(p.k), p.v, g, max_beta * p.b.double().sigmoid(), initial, p.query_start)


def scan_arguments(p, seed=3):
    """q and k of length about 1, decays of every size, beta up to 2."""
    generator = torch.Generator().manual_seed(seed)
    g = -torch.exp(3 * torch.randn(p.a.shape, generator=generator) - 2)
    beta = 2 * torch.rand(p.b.shape, generator=generator)
    return F.normalize(p.q.float(), dim=-1), F.normalize(p.k.float(), dim=-1), p.v, g, beta


@CHANNELS
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scan_equals_recurrence(lengths, dtype, by_channel):
    p = make_problem(lengths, by_channel, dtype)
    arguments = (*scan_arguments(p), p.initial, p.query_start)
    o, final = delta_scan(*arguments, chunk=32)
    expected_o, expected_final = loop(*arguments)
    assert o.dtype == dtype
    assert_close(o, expected_o, torch.float32 if dtype == torch.float64 else None)
    assert_close(final, expected_final, torch.float32)


@CHANNELS
@pytest.mark.parametrize(("groups", "heads"), [(1, 1), (5, 5), (1, 4), (3, 12)])
@pytest.mark.parametrize("chunk", [1, 7, 16, 40, 64])
def test_scan_does_not_depend_on_chunk_or_grouping(groups, heads, chunk, by_channel):
    p = make_problem([70, 3], by_channel, groups=groups, heads=heads)
    arguments = (*scan_arguments(p), p.initial, p.query_start)
    o, final = delta_scan(*arguments, chunk=chunk)
    expected_o, expected_final = loop(*arguments)
    assert_close(o, expected_o)
    assert_close(final, expected_final)


@CHANNELS
def test_decay_of_any_size_neither_overflows_nor_blurs_its_neighbours(by_channel):
    """Products of exp(sum) and exp(-sum) would end in inf or nan."""
    p = make_problem([64], by_channel)
    q, k, v, g, beta = scan_arguments(p)
    g = torch.full_like(g, -1e-3)
    g[3], g[20], g[33:36] = -1e5, -200.0, -90.0
    arguments = (q, k, v, g, beta, p.initial, p.query_start)
    o, final = delta_scan(*arguments)
    expected_o, expected_final = loop(*arguments)
    error = (o - expected_o).abs().amax((1, 2)) / expected_o.abs().amax((1, 2))
    assert error.max() < 1e-4
    assert_close(final, expected_final)


def test_equal_keys_are_overwritten_not_summed():
    """The same key at every token and beta = 1: the state holds the last value alone."""
    p = make_problem([64], groups=1, heads=1)
    k = F.normalize(p.k[:1], dim=-1).expand_as(p.k)
    ones, still = torch.ones_like(p.b), torch.zeros_like(p.b)
    o, final = delta_scan(k, k, p.v, still, ones, p.initial, p.query_start)
    assert_close(o, p.v)
    assert_close(final[0, 0] @ k[0, 0], p.v[-1, 0])


@CHANNELS
def test_scan_is_differentiable(by_channel):
    p = make_problem([2, 0, 5], by_channel, torch.float64, groups=1, heads=2)
    q, k, v, g, beta = scan_arguments(p)
    inputs = [x.detach().double().clone().requires_grad_() for x in (q, k, v, g, beta, p.initial)]
    assert torch.autograd.gradcheck(
        lambda *args: delta_scan(*args, query_start=p.query_start, chunk=3), inputs
    )


@pytest.mark.parametrize("query_start", [[0, 4], [0, 7, 5], [1, 5]])
def test_scan_refuses_query_start_that_does_not_cover_the_tokens(query_start):
    p = make_problem([5])
    with pytest.raises(ShapeError, match="query_start"):
        delta_scan(*scan_arguments(p), p.initial, torch.tensor(query_start))


def filled_arena(p, state_dtype, has_state):
    """Row i in slot 2 i + 1; rows without state find NaN there."""
    slots = [2 * row + 1 for row in range(len(p.initial))]
    arena = GarbageArena(2 * len(slots) + 1, tuple(p.initial.shape[1:]), state_dtype)
    for slot, is_live, state in zip(slots, has_state, p.initial, strict=True):
        if is_live:
            arena.fill(slot, state)
    return arena, slots


@CHANNELS
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
def test_prefill_reads_and_writes_exactly_the_slots_of_its_rows(
    lengths, has_state, state_dtype, by_channel
):
    dtype = torch.bfloat16 if state_dtype != torch.float32 else torch.float32
    p = make_problem(lengths, by_channel, dtype)
    arena, slots = filled_arena(p, state_dtype, has_state)
    live = torch.tensor(has_state)
    initial = torch.where(live[:, None, None, None], arena.view[slots].double(), 0.0)
    o = delta_prefill(*p.raw, arena.view, torch.tensor(slots), p.query_start, live, chunk=16)

    expected_o, expected_final = loop_raw(p, initial)
    assert_close(o, expected_o)
    touched = [row for row, length in enumerate(lengths) if length]
    arena.assert_only_changed([slots[row] for row in touched])
    assert_close(arena.view[[slots[row] for row in touched]], expected_final[touched])


@pytest.mark.parametrize("max_beta", [1.0, 2.0])
@pytest.mark.parametrize("floor", [None, -5.0])
@CHANNELS
def test_gates_are_those_of_prefill_and_update(max_beta, floor, by_channel):
    p = make_problem([9, 1], by_channel)
    options = {"max_beta": max_beta, "decay_floor": floor}
    arena, slots = filled_arena(p, torch.float32, [True, True])
    live = torch.tensor([True, True])
    o = delta_prefill(*p.raw, arena.view, torch.tensor(slots), p.query_start, live, **options)
    expected_o, expected_final = loop_raw(p, p.initial, max_beta, floor)
    assert_close(o, expected_o)
    assert_close(arena.view[slots], expected_final)

    arena, slots = filled_arena(p, torch.float32, [True, True])
    last = [x[9:] for x in (p.q, p.k, p.v, p.a, p.b)]
    where = (p.A, p.dt_bias, arena.view, torch.tensor(slots[1:]))
    assert_close(delta_update(*last, *where, **options), expected_o[9:])
    assert_close(arena.view[slots[1]], expected_final[1])


@CHANNELS
@pytest.mark.parametrize("cut", [1, 2, 15, 16, 17, 39])
def test_prefill_in_two_chunks_equals_prefill_in_one(cut, by_channel):
    p = make_problem([40], by_channel)
    whole, (slot,) = filled_arena(p, torch.float32, [False])
    fresh = torch.tensor([False])
    expected = delta_prefill(*p.raw, whole.view, torch.tensor([slot]), p.query_start, fresh)
    other = GarbageArena(2, tuple(p.initial.shape[1:]), torch.float32)
    parts = []
    for start, stop in ((0, cut), (cut, 40)):
        tokens = [x[start:stop] for x in (p.q, p.k, p.v, p.a, p.b)]
        rows = torch.tensor([1]), torch.tensor([0, stop - start]), torch.tensor([start > 0])
        parts.append(delta_prefill(*tokens, p.A, p.dt_bias, other.view, *rows, chunk=16))
    assert_close(torch.cat(parts), expected)
    assert_close(other.view[1], whole.view[slot])


@CHANNELS
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_update_is_one_step_of_the_recurrence(num_rows, dtype, state_dtype, by_channel):
    p = make_problem([1] * num_rows, by_channel, dtype)
    slots = [3, 0, 4][:num_rows]
    arena = GarbageArena(6, tuple(p.initial.shape[1:]), state_dtype)
    for slot, state in zip(slots, p.initial, strict=True):
        arena.fill(slot, state)
    expected_o, expected_final = loop_raw(p, arena.view[slots].double())
    o = delta_update(*p.raw, arena.view, torch.tensor(slots))

    assert o.dtype == dtype
    assert_close(o, expected_o)
    arena.assert_only_changed(slots)
    assert_close(arena.view[slots], expected_final)


@CHANNELS
def test_nan_in_one_sequence_stays_there(by_channel):
    p = make_problem([6, 40, 3], by_channel)
    p.v[0] = torch.nan
    arena, slots = filled_arena(p, torch.float32, [False] * 3)
    fresh = torch.tensor([False] * 3)
    o = delta_prefill(*p.raw, arena.view, torch.tensor(slots), p.query_start, fresh)
    assert o[:6].isnan().any()
    assert not o[6:].isnan().any()
    assert not arena.view[slots[1:]].isnan().any()
