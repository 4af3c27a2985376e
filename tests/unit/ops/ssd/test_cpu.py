"""The native kernels: the cases of the reference again, and sizes and layouts of real models."""

import pytest
import torch

from tandem.ops.rounding import Rounding
from tandem.ops.ssd import cpu, reference
from tests.tolerances import assert_close
from tests.unit.ops.ssd import test_reference as cases

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture(autouse=True)
def _run_cases_natively(monkeypatch):
    monkeypatch.setattr(cases, "ssd_prefill", cpu.ssd_prefill)
    monkeypatch.setattr(cases, "ssd_update", cpu.ssd_update)


test_prefill_slots = cases.test_prefill_reads_and_writes_exactly_the_slots_of_its_rows
test_step_limits = cases.test_given_step_limits_are_the_only_ones
test_two_chunks = cases.test_prefill_in_two_chunks_equals_prefill_in_one
test_update = cases.test_update_is_one_step_of_the_recurrence
test_nan_stays = cases.test_nan_in_one_sequence_stays_there


def _problem(num_tokens, heads, head_dim, groups, state_size, dtype=torch.bfloat16):
    """Slices of one projection, as a layer passes them, the gate in front."""
    generator = torch.Generator().manual_seed(0)
    inner, width = heads * head_dim, groups * state_size
    projected = torch.randn(num_tokens, 2 * inner + 2 * width + heads, generator=generator)
    _, x, B, C, dt = projected.to(dtype).split([inner, inner, width, width, heads], dim=1)
    return {
        "x": x.unflatten(1, (heads, head_dim)),
        "dt": dt,
        "A": -torch.rand(heads, generator=generator) * 8 - 0.01,
        "B": B.unflatten(1, (groups, state_size)),
        "C": C.unflatten(1, (groups, state_size)),
        "D": torch.randn(heads, generator=generator),
        "dt_bias": torch.randn(heads, generator=generator) - 3,
        "dt_limit": (0.0, float("inf")),
    }


SIZES = [(24, 64, 1, 128), (8, 64, 8, 128), (4, 80, 2, 64), (3, 33, 1, 17), (2, 128, 1, 16)]


@pytest.mark.parametrize("lengths", [[1], [63], [129, 0, 257], [128, 5]], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_prefill_equals_reference(size, lengths, num_threads):
    p = _problem(sum(lengths), *size)
    query_start = torch.tensor([0, *lengths]).cumsum(0).int()
    slots = torch.tensor([4, 0, 2])[: len(lengths)]
    has_state = torch.tensor([True, False, False])[: len(lengths)]
    states = torch.full((5, size[0], size[1], size[3]), torch.nan)
    states[4] = torch.randn(states[4].shape)
    expected_states = states.clone()
    got = cpu.ssd_prefill(
        **p, state=states, slots=slots, query_start=query_start, has_state=has_state
    )
    expected = reference.ssd_prefill(
        **p, state=expected_states, slots=slots, query_start=query_start, has_state=has_state
    )
    assert_close(got, expected.double())
    touched = [int(slot) for slot, length in zip(slots, lengths, strict=True) if length]
    assert_close(states[touched], expected_states[touched].double())
    others = [slot for slot in range(5) if slot not in touched]
    assert states[others].isnan().all()


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 33])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_update_equals_reference(size, num_rows, state_dtype, num_threads):
    p = _problem(num_rows, *size)
    slots = torch.randperm(40)[:num_rows]
    states = torch.randn(40, size[0], size[1], size[3]).to(state_dtype)
    expected_states = states.clone()
    got = cpu.ssd_update(**p, state=states, slots=slots)
    expected = reference.ssd_update(**p, state=expected_states, slots=slots)
    assert_close(got, expected.double())
    assert_close(states, expected_states.double())


def test_a_row_is_bitwise_the_same_in_every_batch():
    p = _problem(8, 4, 64, 1, 128)
    states = torch.randn(8, 4, 64, 128)
    whole_states, slots = states.clone(), torch.arange(8)
    whole = cpu.ssd_update(**p, state=whole_states, slots=slots)
    p.update({name: p[name][5:6] for name in ("x", "dt", "B", "C")})
    alone = cpu.ssd_update(**p, state=states, slots=slots[5:6])
    assert torch.equal(alone[0], whole[5])
    assert torch.equal(states[5], whole_states[5])


def test_slots_beyond_32_bit_offsets(far_slots):
    state = far_slots((2, 16, 16), torch.float32)
    p = _problem(2, 2, 16, 1, 16)
    slots = torch.tensor([2, 1])
    state[1:] = 1.0
    close = torch.ones(3, 2, 16, 16)
    assert torch.equal(
        cpu.ssd_update(**p, state=state, slots=slots), cpu.ssd_update(**p, state=close, slots=slots)
    )
    rows = {"query_start": torch.tensor([0, 1, 2]), "has_state": torch.tensor([True, True])}
    assert torch.equal(
        cpu.ssd_prefill(**p, state=state, slots=slots, **rows),
        cpu.ssd_prefill(**p, state=close, slots=slots, **rows),
    )
    assert torch.equal(state[1:], close[1:])


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16])
def test_state_rounded_at_random_equals_that_of_the_reference(state_dtype):
    """To the bit, but where fp32 sums in another order fall on the other side of a draw."""
    lengths, size = [5, 0, 1], (6, 16, 2, 20)
    p = _problem(sum(lengths), *size, dtype=torch.float32)
    rest = {
        "slots": torch.tensor([4, 0, 2]),
        "query_start": torch.tensor([0, *lengths]).cumsum(0).int(),
        "has_state": torch.tensor([True, True, False]),
        "rounding": Rounding(5, torch.tensor([9, 0, 1])),
    }
    states = torch.full((5, size[0], size[1], size[3]), torch.nan, dtype=state_dtype)
    states[4] = torch.randn(states[4].shape).to(state_dtype)
    found = []
    for module in (cpu, reference):
        state = states.clone()
        module.ssd_prefill(**p, state=state, **rest)
        one = {
            name: value[:2] if name in ("x", "dt", "B", "C") else value for name, value in p.items()
        }
        module.ssd_update(
            **one,
            state=state,
            slots=torch.tensor([2, 4]),
            rounding=Rounding(6, torch.tensor([2, 10])),
        )
        assert state[[0, 1, 3]].isnan().all()
        found.append(state[[2, 4]])
    assert (found[0] != found[1]).float().mean() < 0.01
    assert_close(found[0], found[1])
    nearest = states.clone()
    del rest["rounding"]
    cpu.ssd_prefill(**p, state=nearest, **rest)
    assert (nearest[[2, 4]] != found[0]).any()
