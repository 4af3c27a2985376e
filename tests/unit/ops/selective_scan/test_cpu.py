"""The native kernels: the cases of the reference again, and sizes and layouts of real models."""

import pytest
import torch

from tandem.ops.rounding import Rounding
from tandem.ops.selective_scan import cpu, reference
from tests.tolerances import assert_close
from tests.unit.ops.selective_scan import test_reference as cases

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture(autouse=True)
def _run_cases_natively(monkeypatch):
    monkeypatch.setattr(cases, "selective_scan_prefill", cpu.selective_scan_prefill)
    monkeypatch.setattr(cases, "selective_scan_update", cpu.selective_scan_update)


test_prefill_slots = cases.test_prefill_reads_and_writes_exactly_the_slots_of_its_rows
test_update = cases.test_update_is_one_step_of_the_recurrence
test_without_skip_and_gate = cases.test_without_skip_and_gate
test_nan_stays = cases.test_nan_in_one_sequence_stays_there

# channels, groups, state size
SIZES = [(160, 1, 16), (66, 2, 16), (17, 1, 5), (130, 1, 40)]


def arguments(num_tokens, size, dtype):
    channels, groups, state_size = size
    p = cases.make_problem([num_tokens], dtype, channels, groups, state_size)
    p.dt = (p.dt.float() * 4 - 3).to(dtype)
    return {name: getattr(p, name) for name in ("x", "dt", "A", "B", "C", "D", "z", "dt_bias")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_prefill_equals_reference(size, dtype, num_threads):
    lengths = [33, 0, 90]
    p = arguments(sum(lengths), size, dtype)
    rest = {
        "slots": torch.tensor([4, 0, 2]),
        "query_start": torch.tensor([0, *lengths]).cumsum(0).int(),
        "has_state": torch.tensor([True, False, False]),
    }
    states = torch.full((5, size[0], size[2]), torch.nan)
    states[4] = torch.randn(states[4].shape)
    expected_states = states.clone()
    got = cpu.selective_scan_prefill(**p, state=states, **rest)
    expected = reference.selective_scan_prefill(
        **{name: value.float() for name, value in p.items()}, state=expected_states, **rest
    )
    assert got.dtype == dtype
    assert_close(got, expected)
    assert_close(states[[2, 4]], expected_states[[2, 4]])
    assert states[[0, 1, 3]].isnan().all()


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [0, 1, 33])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_update_equals_reference(size, num_rows, state_dtype, num_threads):
    p = arguments(num_rows, size, torch.float32)
    slots = torch.randperm(40)[:num_rows]
    states = torch.randn(40, size[0], size[2]).to(state_dtype)
    expected_states = states.clone()
    got = cpu.selective_scan_update(**p, state=states, slots=slots)
    expected = reference.selective_scan_update(**p, state=expected_states, slots=slots)
    assert_close(got, expected)
    assert_close(states, expected_states.double())


def test_state_rounded_at_random_equals_that_of_the_reference():
    """To the bit, but where fp32 sums in another order fall on the other side of a draw."""
    size, lengths = (66, 2, 16), [5, 0, 1]
    p = arguments(sum(lengths), size, torch.float32)
    rest = {
        "slots": torch.tensor([4, 0, 2]),
        "query_start": torch.tensor([0, *lengths]).cumsum(0).int(),
        "has_state": torch.tensor([True, True, False]),
        "rounding": Rounding(5, torch.tensor([9, 0, 1])),
    }
    states = torch.full((5, size[0], size[2]), torch.nan, dtype=torch.float16)
    states[4] = torch.randn(states[4].shape).half()
    found = []
    for module in (cpu, reference):
        state = states.clone()
        module.selective_scan_prefill(**p, state=state, **rest)
        names = ("x", "dt", "B", "C", "z")
        one = {name: value[:2] if name in names else value for name, value in p.items()}
        rounding = Rounding(6, torch.tensor([2, 10]))
        module.selective_scan_update(
            **one, state=state, slots=torch.tensor([2, 4]), rounding=rounding
        )
        assert state[[0, 1, 3]].isnan().all()
        found.append(state[[2, 4]])
    assert (found[0] != found[1]).float().mean() < 0.02
    assert_close(found[0], found[1])


@pytest.mark.parametrize("name", ["prefill", "update"])
def test_offsets_beyond_32_bits(name, far_slots):
    size = (6, 1, 5)
    p = arguments(1, size, torch.float32)
    states = far_slots((size[0], size[2]), torch.float32)
    states[2] = torch.randn(states[2].shape)
    near = states[2:].clone()
    where = {"query_start": torch.tensor([0, 1]), "has_state": torch.tensor([True])}
    rest = where if name == "prefill" else {}
    run = getattr(cpu, f"selective_scan_{name}")
    got = run(**p, state=states, slots=torch.tensor([2]), **rest)
    expected = run(**p, state=near, slots=torch.tensor([0]), **rest)
    assert torch.equal(got, expected)
    assert torch.equal(states[2], near[0])
