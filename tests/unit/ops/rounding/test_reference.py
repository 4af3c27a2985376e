"""Stochastic rounding: bits that depend on their inputs alone, and a mean that is the value."""

import pytest
import torch

from tandem.ops.rounding import Rounding, round_state
from tandem.ops.rounding.reference import _philox, random_bits

DTYPES = [torch.float16, torch.bfloat16]


def test_philox_is_that_of_the_runner():
    """Against an independent implementation, at the ten rounds that one has."""
    import numpy as np

    from tandem.ops.rounding import reference
    from tandem.runner.philox import philox

    counters = torch.randint(0, 1 << 32, (4, 50), generator=torch.Generator().manual_seed(0))
    key = (0xDEADBEEF, 0x12345678)
    rounds = reference.NUM_ROUNDS
    reference.NUM_ROUNDS = 10
    try:
        words = _philox(list(counters), key)
    finally:
        reference.NUM_ROUNDS = rounds
    keys = np.array([[key[0]] * 50, [key[1]] * 50], dtype=np.uint64)
    expected = philox(keys, counters.numpy().astype(np.uint64))
    assert torch.equal(torch.stack(words), torch.from_numpy(expected.astype(np.int64)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_result_is_one_of_the_two_neighbours_and_exact_values_stay(dtype):
    values = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))
    values[0] *= 1e-6  # among the subnormal numbers of fp16
    rounding = Rounding(3, torch.tensor([5, 6]))
    rounded = round_state(values, dtype, rounding)
    assert rounded.dtype == dtype
    nearest = values.to(dtype)
    step = torch.finfo(dtype).eps * values.abs()
    if dtype is torch.float16:
        step = step.clamp(min=2.0**-24)
    assert ((rounded.float() - values).abs() <= step).all()
    assert (rounded != nearest).any()
    assert torch.equal(round_state(rounded.float(), dtype, rounding), rounded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "value", [1.0 + 2.0**-13, -1.0 - 2.0**-12, 3e-7, -6.1e-5, 1e-8, 0.333333, 2047.7]
)
def test_mean_over_elements_is_the_value(dtype, value):
    values = torch.full((1, 512, 512), value)
    rounded = round_state(values, dtype, Rounding(1, torch.tensor([9]))).double()
    below, above = rounded.min().item(), rounded.max().item()
    share = 0.0 if above == below else (torch.tensor(value).item() - below) / (above - below)
    spread = (above - below) * (share * (1 - share) / values.numel()) ** 0.5
    # Bits resolve 1 / 2^13 (fp16) of a step; five standard deviations of the mean.
    assert abs(rounded.mean().item() - value) <= 5 * spread + (above - below) * 2.0**-13


@pytest.mark.parametrize("dtype", DTYPES)
def test_mean_over_tokens_is_the_value(dtype):
    """A decay below half a step, lost at once by rounding to the nearest, is kept on average."""
    state = torch.full((1, 64, 64), 1.0)
    decay = 1.0 - torch.finfo(dtype).eps / 8
    kept, lost = state, state
    for position in range(400):
        kept = round_state(kept * decay, dtype, Rounding(0, torch.tensor([position]))).float()
        lost = (lost * decay).to(dtype).float()
    assert (lost == 1.0).all()
    expected = decay**400
    assert abs(kept.mean().item() - expected) < 0.02 * (1 - expected)


def test_bits_depend_on_seed_position_and_element_but_not_on_the_row():
    shape = torch.Size((3, 4, 5, 20))
    bits = random_bits(shape, Rounding(7, torch.tensor([10, 11, 10])))
    assert torch.equal(bits[0], bits[2])
    assert (bits[0] != bits[1]).float().mean() > 0.9
    other = random_bits(shape, Rounding(8, torch.tensor([10, 11, 10])))
    assert (bits != other).float().mean() > 0.9
    assert bits[0].flatten().unique().numel() > 380  # of 400
    assert abs(bits.double().mean() / 65535 - 0.5) < 0.05
    assert int(bits.min()) >= 0
    assert int(bits.max()) < 1 << 16


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_nan_stay_and_fp16_saturates(dtype):
    values = torch.tensor([[torch.inf, -torch.inf, torch.nan, 1e30, -1e30, 65519.9, 0.0, -0.0]])
    rounded = round_state(values, dtype, Rounding(0, torch.tensor([1]))).float()[0]
    assert rounded[:2].tolist() == [torch.inf, -torch.inf]
    assert rounded[2].isnan()
    if dtype is torch.float16:
        assert rounded[3:6].tolist() == [65504.0, -65504.0, 65504.0]
    assert rounded[6:].tolist() == [0.0, 0.0]
