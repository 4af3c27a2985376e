"""The native kernel: the cases of the reference again, and sizes and layouts of real models."""

import pytest
import torch

from tandem.errors import ShapeError
from tandem.ops.conv1d import cpu, reference
from tests.tolerances import assert_close
from tests.unit.ops.conv1d import test_reference as cases

pytestmark = pytest.mark.usefixtures("native")

WIDTHS = (200, 128, 37)
NUM_CHANNELS = sum(WIDTHS)


@pytest.fixture(autouse=True)
def _run_cases_natively(monkeypatch):
    monkeypatch.setattr(cases, "conv1d_prefill", cpu.conv1d_prefill)
    monkeypatch.setattr(cases, "conv1d_update", cpu.conv1d_update)


test_prefill_slots = cases.test_prefill_reads_and_writes_exactly_the_slots_of_its_rows
test_update = cases.test_update_is_one_token_of_the_loop


def _arguments(num_tokens, taps=4, dtype=torch.bfloat16, weight_dtype=torch.bfloat16):
    wide = torch.randn(num_tokens, NUM_CHANNELS + 60).to(dtype)
    weight, bias = torch.randn(NUM_CHANNELS, taps), torch.randn(NUM_CHANNELS)
    windows = [torch.randn(40, width, taps - 1).to(dtype) for width in WIDTHS]
    x = wide[:, 50 : 50 + NUM_CHANNELS]
    return x, weight.to(weight_dtype), bias.to(weight_dtype), windows


def _assert_windows_equal(windows, expected):
    for one, other in zip(windows, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("lengths", [[1], [2, 0, 3], [64, 300], [1, 1, 1, 9]], ids=str)
@pytest.mark.parametrize("taps", [2, 3, 4, 7])
@pytest.mark.parametrize("activation", ["silu", None])
def test_prefill_equals_reference(lengths, taps, activation, num_threads):
    x, weight, bias, windows = _arguments(sum(lengths), taps)
    copies = [window.clone() for window in windows]
    slots = torch.randperm(40)[: len(lengths)]
    query_start = torch.tensor([0, *lengths]).cumsum(0).int()
    rows = (slots, query_start, torch.arange(len(lengths)) % 2 == 0, activation)
    got = cpu.conv1d_prefill(x, weight, bias, windows, *rows)
    assert_close(got, reference.conv1d_prefill(x, weight, bias, copies, *rows).double())
    _assert_windows_equal(windows, copies)


@pytest.mark.parametrize("num_rows", [1, 3, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_update_equals_reference(num_rows, dtype, weight_dtype, num_threads):
    x, weight, bias, windows = _arguments(num_rows, 4, dtype, weight_dtype)
    copies = [window.clone() for window in windows]
    slots = torch.randperm(40)[:num_rows]
    got = cpu.conv1d_update(x, weight, bias, windows, slots)
    assert_close(got, reference.conv1d_update(x, weight, bias, copies, slots).double())
    _assert_windows_equal(windows, copies)
    assert torch.equal(
        cpu.conv1d_update(x[:1], weight, None, windows, slots[:1], None)[0],
        cpu.conv1d_update(x, weight, None, copies, slots, None)[0],
    )


def test_windows_of_another_dtype_go_to_the_reference():
    x, weight, bias, windows = _arguments(2)
    wide = [window.float() for window in windows]
    slots = torch.tensor([3, 1])
    got = cpu.conv1d_update(x, weight, bias, wide, slots)
    assert_close(got, cpu.conv1d_update(x, weight, bias, windows, slots).double())
    assert torch.equal(wide[0][slots].bfloat16(), windows[0][slots])


def test_unknown_activation_is_refused():
    x, weight, bias, windows = _arguments(1)
    with pytest.raises(ShapeError, match="gelu"):
        cpu.conv1d_update(x, weight, bias, windows, torch.tensor([0]), "gelu")


def test_slots_beyond_32_bit_offsets(far_slots):
    window, close = far_slots((32, 3), torch.bfloat16), torch.zeros(3, 32, 3).bfloat16()
    window[1:] = 0.0
    x, weight = torch.randn(2, 32).bfloat16(), torch.randn(32, 4)
    slots = torch.tensor([2, 1])
    got = cpu.conv1d_update(x, weight, None, [window], slots)
    assert torch.equal(got, cpu.conv1d_update(x, weight, None, [close], slots))
    assert torch.equal(window[1:], close[1:])
