"""The native kernels: the cases of the reference again, and sizes and layouts of real models."""

import pytest
import torch

from tandem.ops.delta_rule import cpu, reference
from tandem.ops.rounding import Rounding
from tests.tolerances import assert_close
from tests.unit.ops.delta_rule import test_reference as cases

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture(autouse=True)
def _run_cases_natively(monkeypatch):
    monkeypatch.setattr(cases, "delta_prefill", cpu.delta_prefill)
    monkeypatch.setattr(cases, "delta_update", cpu.delta_update)


test_prefill_slots = cases.test_prefill_reads_and_writes_exactly_the_slots_of_its_rows
test_gates = cases.test_gates_are_those_of_prefill_and_update
test_two_chunks = cases.test_prefill_in_two_chunks_equals_prefill_in_one
test_update = cases.test_update_is_one_step_of_the_recurrence
test_nan_stays = cases.test_nan_in_one_sequence_stays_there


def _problem(num_tokens, groups, heads, key, value, by_channel):
    """Slices of one projection, as a layer passes them."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    widths = [groups * key, groups * key, heads * value, heads, heads * key]
    projected = randn(num_tokens, 5 + sum(widths))[:, 5:].bfloat16()
    q, k, v, b, f = projected.split(widths, dim=1)
    inner = (heads, key) if by_channel else (heads,)
    return {
        "q": q.unflatten(1, (groups, key)),
        "k": k.unflatten(1, (groups, key)),
        "v": v.unflatten(1, (heads, value)),
        "a": f.unflatten(1, inner) if by_channel else f[:, :heads],
        "b": b,
        "A": -torch.rand(heads, generator=generator) * 8 - 0.01,
        "dt_bias": randn(*inner) - 3,
    }


SIZES = [(2, 4, 128, 128), (3, 3, 33, 17), (1, 4, 16, 96), (2, 2, 5, 64)]
CHANNELS = pytest.mark.parametrize("by_channel", [False, True], ids=["head", "channel"])


@CHANNELS
@pytest.mark.parametrize("lengths", [[1], [33], [70, 0, 31]], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_prefill_equals_reference(size, lengths, by_channel, num_threads):
    p = _problem(sum(lengths), *size, by_channel)
    query_start = torch.tensor([0, *lengths]).cumsum(0).int()
    slots = torch.tensor([4, 0, 2])[: len(lengths)]
    has_state = torch.tensor([True, False, False])[: len(lengths)]
    states = torch.full((5, size[1], size[3], size[2]), torch.nan)
    states[4] = torch.randn(states[4].shape)
    expected_states = states.clone()
    rows = {"slots": slots, "query_start": query_start, "has_state": has_state}
    got = cpu.delta_prefill(**p, state=states, **rows)
    expected = reference.delta_prefill(**p, state=expected_states, **rows)
    assert_close(got, expected.double())
    touched = [int(slot) for slot, length in zip(slots, lengths, strict=True) if length]
    assert_close(states[touched], expected_states[touched].double())
    others = [slot for slot in range(5) if slot not in touched]
    assert states[others].isnan().all()


@CHANNELS
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [0, 1, 33])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_update_equals_reference(size, num_rows, state_dtype, by_channel, num_threads):
    p = _problem(num_rows, *size, by_channel)
    slots = torch.randperm(40)[:num_rows]
    states = torch.randn(40, size[1], size[3], size[2]).to(state_dtype)
    expected_states = states.clone()
    got = cpu.delta_update(**p, state=states, slots=slots, max_beta=2.0)
    expected = reference.delta_update(**p, state=expected_states, slots=slots, max_beta=2.0)
    assert_close(got, expected.double())
    assert_close(states, expected_states.double())


@CHANNELS
def test_decay_far_beyond_what_a_sum_could_hold(by_channel):
    p = _problem(40, 1, 2, 16, 16, by_channel)
    p["a"] = p["a"] * 60
    states = torch.randn(1, 2, 16, 16)
    expected_states = states.clone()
    rows = torch.tensor([0]), torch.tensor([0, 40]), torch.tensor([True])
    got = cpu.delta_prefill(*p.values(), states, *rows)
    assert_close(got, reference.delta_prefill(*p.values(), expected_states, *rows).double())
    assert_close(states, expected_states.double())


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_state_in_fp16_is_rounded_at_random_as_in_the_reference(num_tokens):
    """Random bits are those of the reference; what is rounded may differ by one of its units."""
    p = _problem(num_tokens, 1, 2, 16, 8, False)
    states = torch.randn(2, 2, 8, 16).half()
    expected_states, slots = states.clone(), torch.tensor([1])
    rounding = Rounding(3, torch.tensor([17]))
    if num_tokens == 1:
        cpu.delta_update(**p, state=states, slots=slots, rounding=rounding)
        reference.delta_update(**p, state=expected_states, slots=slots, rounding=rounding)
    else:
        rows = {"query_start": torch.tensor([0, num_tokens]), "has_state": torch.tensor([True])}
        cpu.delta_prefill(**p, state=states, slots=slots, **rows, rounding=rounding)
        reference.delta_prefill(**p, state=expected_states, slots=slots, **rows, rounding=rounding)
    same = (states == expected_states).float().mean()
    assert same > 0.97
    assert_close(states, expected_states.double())


def test_a_row_is_bitwise_the_same_in_every_batch():
    p = _problem(8, 2, 4, 64, 64, False)
    states = torch.randn(8, 4, 64, 64)
    whole_states, slots = states.clone(), torch.arange(8)
    whole = cpu.delta_update(**p, state=whole_states, slots=slots)
    p.update({name: p[name][5:6] for name in ("q", "k", "v", "a", "b")})
    alone = cpu.delta_update(**p, state=states, slots=slots[5:6])
    assert torch.equal(alone[0], whole[5])
    assert torch.equal(states[5], whole_states[5])


def test_slots_beyond_32_bit_offsets(far_slots):
    state = far_slots((2, 16, 16), torch.float32)
    p = _problem(2, 1, 2, 16, 16, False)
    slots = torch.tensor([2, 1])
    state[1:] = 1.0
    close = torch.ones(3, 2, 16, 16)
    assert torch.equal(
        cpu.delta_update(**p, state=state, slots=slots),
        cpu.delta_update(**p, state=close, slots=slots),
    )
    rows = {"query_start": torch.tensor([0, 1, 2]), "has_state": torch.tensor([True, True])}
    assert torch.equal(
        cpu.delta_prefill(**p, state=state, slots=slots, **rows),
        cpu.delta_prefill(**p, state=close, slots=slots, **rows),
    )
    assert torch.equal(state[1:], close[1:])
