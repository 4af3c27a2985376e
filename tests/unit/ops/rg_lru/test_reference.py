"""Prefill and update against the recurrence by token in float64."""

import pytest
import torch

from tandem.errors import ShapeError
from tandem.ops.rg_lru.reference import rg_lru_prefill, rg_lru_update
from tests.tolerances import assert_close
from tests.unit.ops.arena import GarbageArena

BLOCKS, WIDTH = 3, 5


def make_problem(num_tokens, dtype=torch.float32):
    """x, gates and A; one channel hardly forgets."""
    generator = torch.Generator().manual_seed(0)
    joined = torch.randn(num_tokens, BLOCKS, 3 * WIDTH, generator=generator).to(dtype)
    A = -torch.rand(BLOCKS, WIDTH, generator=generator) * 8
    A[0, 0] = -1e-5
    return *joined.split(WIDTH, dim=-1), A


def loop(x, input_gate, decay_gate, A, state):
    """`state` None: a sequence begins."""
    out = []
    for t in range(len(x)):
        a = torch.exp(A.double() * decay_gate[t].double().sigmoid())
        gated = input_gate[t].double().sigmoid() * x[t].double()
        state = gated if state is None else a * state + (1 - a.square()).sqrt() * gated
        out.append(state)
    return torch.stack(out), state


def filled(state_dtype, slots):
    generator = torch.Generator().manual_seed(1)
    arena = GarbageArena(8, (BLOCKS, WIDTH), state_dtype)
    for slot in slots:
        arena.fill(slot, torch.randn(BLOCKS, WIDTH, generator=generator))
    return arena


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("lengths", "has_state"),
    [
        ([1], [False]),
        ([63], [True]),
        ([5, 0, 7], [True, True, False]),
        ([0, 3], [False, False]),
        ([1, 1, 40, 1], [True, False, False, True]),
        ([4, 4, 4], [False, True, False]),
        ([0], [True]),
        ([0, 0], [False, True]),
    ],
    ids=str,
)
def test_prefill_equals_recurrence(lengths, has_state, dtype, state_dtype):
    values = make_problem(sum(lengths), dtype)
    slots = [2 * row for row in range(len(lengths))][::-1]
    live = [slot for slot, known in zip(slots, has_state, strict=True) if known]
    arena = filled(state_dtype, live)
    before = arena.view.double()
    starts = torch.tensor([0, *lengths]).cumsum(0)
    where = torch.tensor(slots), starts.int(), torch.tensor(has_state)
    h = rg_lru_prefill(*values, arena.view, *where)

    outputs, finals, touched = [values[0][:0].double()], [], []
    for row, (slot, known) in enumerate(zip(slots, has_state, strict=True)):
        here = slice(int(starts[row]), int(starts[row + 1]))
        if lengths[row]:
            own = [item[here] for item in values[:3]]
            output, final = loop(*own, values[3], before[slot] if known else None)
            outputs.append(output)
            finals.append(final)
            touched.append(slot)
    assert h.dtype == dtype
    assert_close(h, torch.cat(outputs))
    arena.assert_only_changed(touched)
    if touched:
        assert_close(arena.view[touched], torch.stack(finals))


@pytest.mark.parametrize("cut", [1, 2, 19])
def test_prefill_in_two_chunks_equals_prefill_in_one(cut):
    x, input_gate, decay_gate, A = make_problem(20)
    whole, other = filled(torch.float32, []), filled(torch.float32, [])
    slot = torch.tensor([3])

    def run(arena, start, stop):
        own = [item[start:stop] for item in (x, input_gate, decay_gate)]
        rows = torch.tensor([0, stop - start]), torch.tensor([start > 0])
        return rg_lru_prefill(*own, A, arena.view, slot, *rows)

    expected = run(whole, 0, 20)
    assert_close(torch.cat([run(other, 0, cut), run(other, cut, 20)]), expected)
    assert_close(other.view[3], whole.view[3])


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_update_is_one_step_of_the_recurrence(state_dtype):
    x, input_gate, decay_gate, A = make_problem(2)
    arena = filled(state_dtype, [6, 1])
    before = arena.view.double()
    h = rg_lru_update(x, input_gate, decay_gate, A, arena.view, torch.tensor([6, 1]))
    expected = torch.cat(
        [
            loop(x[row, None], input_gate[row, None], decay_gate[row, None], A, before[slot])[0]
            for row, slot in enumerate((6, 1))
        ]
    )
    assert_close(h, expected)
    arena.assert_only_changed([6, 1])
    assert_close(arena.view[[6, 1]], expected, state_dtype)


def test_nan_in_one_sequence_stays_there():
    x, input_gate, decay_gate, A = make_problem(9)
    x[0] = torch.nan
    arena = filled(torch.float32, [])
    rows = torch.tensor([2, 5]), torch.tensor([0, 4, 9]), torch.tensor([False, False])
    h = rg_lru_prefill(x, input_gate, decay_gate, A, arena.view, *rows)
    assert h[:4].isnan().any()
    assert not h[4:].isnan().any()
    assert not arena.view[5].isnan().any()


def test_query_start_that_does_not_cover_the_tokens_is_refused():
    values = make_problem(5)
    rows = torch.tensor([0]), torch.tensor([0, 4]), torch.tensor([False])
    with pytest.raises(ShapeError, match="query_start"):
        rg_lru_prefill(*values, filled(torch.float32, []).view, *rows)
