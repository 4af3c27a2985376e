"""The packed convolution against a loop over tokens in float64, with every cut of a sequence."""

import pytest
import torch
import torch.nn.functional as F

from tandem.errors import ShapeError
from tandem.ops.conv1d.reference import causal_conv, conv1d_prefill, conv1d_update
from tests.tolerances import assert_close
from tests.unit.ops.arena import GarbageArena

CHANNELS = (6, 3, 3)  # x, B and C have a window each
NUM_CHANNELS = sum(CHANNELS)


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def starts(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def loop(x, weight, bias, window, lengths, activation="silu"):
    """Push one token after the other through a window of W inputs, in float64."""
    x, weight, after = x.double(), weight.double(), window.double().clone()
    y, t = torch.zeros_like(x), 0
    for row, length in enumerate(lengths):
        for _ in range(length):
            inputs = torch.cat([after[row], x[t][:, None]], dim=1)  # [C, W]
            y[t] = (inputs * weight).sum(1) + (0 if bias is None else bias.double())
            after[row] = inputs[:, 1:]
            t += 1
    return (F.silu(y) if activation else y), after


def arenas(num_rows, taps, dtype):
    return [GarbageArena(num_rows, (channels, taps - 1), dtype) for channels in CHANNELS]


@pytest.mark.parametrize("lengths", [[1], [63], [257], [5, 0, 7], [0, 3], [1, 2, 1], [0]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_conv_equals_loop_over_tokens(lengths, dtype):
    x = randn(sum(lengths), NUM_CHANNELS, seed=1).to(dtype)
    weight, bias = randn(NUM_CHANNELS, 4).to(dtype), randn(NUM_CHANNELS, seed=2).to(dtype)
    window = randn(len(lengths), NUM_CHANNELS, 3, seed=3).to(dtype)
    y, after = causal_conv(x, weight, bias, window, starts(lengths))

    expected_y, expected_after = loop(x, weight, bias, window, lengths)
    assert y.dtype == dtype
    assert_close(y, expected_y)
    assert torch.equal(after.double(), expected_after)  # raw inputs, only moved


@pytest.mark.parametrize("taps", [2, 3, 4, 7])
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("has_bias", [True, False])
def test_any_taps_bias_and_activation(taps, activation, has_bias):
    x, weight = randn(11, NUM_CHANNELS), randn(NUM_CHANNELS, taps, seed=1)
    bias = randn(NUM_CHANNELS, seed=2) if has_bias else None
    window = randn(2, NUM_CHANNELS, taps - 1, seed=3)
    y, after = causal_conv(x, weight, bias, window, starts([4, 7]), activation)

    expected_y, expected_after = loop(x, weight, bias, window, [4, 7], activation)
    assert_close(y, expected_y)
    assert torch.equal(after, expected_after)


def test_unknown_activation_is_refused():
    x, weight = randn(1, NUM_CHANNELS), randn(NUM_CHANNELS, 4)
    window = randn(1, NUM_CHANNELS, 3)
    with pytest.raises(ShapeError, match="gelu"):
        causal_conv(x, weight, None, window, starts([1]), "gelu")


def test_conv_is_differentiable():
    inputs = [randn(5, 2), randn(2, 4, seed=1), randn(2, seed=2), randn(3, 2, 3, seed=3)]
    inputs = [value.requires_grad_() for value in inputs]
    assert torch.autograd.gradcheck(lambda *a: causal_conv(*a, starts([1, 0, 4])), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("lengths", "has_state"),
    [
        ([5, 0, 7], [True, True, False]),
        ([0, 3], [False, False]),
        ([1, 1, 2, 1], [True, False, False, True]),
        ([0], [False]),
    ],
    ids=str,
)
def test_prefill_reads_and_writes_exactly_the_slots_of_its_rows(lengths, has_state, dtype):
    slots = [2 * row + 1 for row in range(len(lengths))]
    windows = arenas(2 * len(lengths) + 1, 4, dtype)
    initial = torch.zeros(len(lengths), NUM_CHANNELS, 3, dtype=dtype)
    for row, is_live in enumerate(has_state):
        if is_live:
            initial[row] = randn(NUM_CHANNELS, 3, seed=row).to(dtype)
            for window, part in zip(windows, initial[row].split(CHANNELS), strict=True):
                window.fill(slots[row], part)
    x = randn(sum(lengths), NUM_CHANNELS, seed=9).to(dtype)
    weight, bias = randn(NUM_CHANNELS, 4).to(dtype), randn(NUM_CHANNELS, seed=2).to(dtype)
    y = conv1d_prefill(
        x, weight, bias, [window.view for window in windows], torch.tensor(slots),
        starts(lengths), torch.tensor(has_state),
    )  # fmt: skip

    expected_y, expected_after = loop(x, weight, bias, initial, lengths)
    assert_close(y, expected_y)
    touched = [row for row, length in enumerate(lengths) if length]
    after = [window.view[[slots[row] for row in touched]] for window in windows]
    assert torch.equal(torch.cat(after, dim=1).double(), expected_after[touched])
    for window in windows:
        window.assert_only_changed([slots[row] for row in touched])


@pytest.mark.parametrize("num_tokens", range(1, 9))
@pytest.mark.parametrize("is_update", [False, True])
def test_chunks_shorter_than_the_window_equal_the_whole(num_tokens, is_update):
    """n tokens one by one; the window is never full at first, and each chunk shifts it by one."""
    x, weight = randn(num_tokens, NUM_CHANNELS), randn(NUM_CHANNELS, 4, seed=1)
    whole, parts = arenas(1, 4, torch.float64), arenas(1, 4, torch.float64)
    slot = torch.tensor([0])

    def prefill(tokens, windows, has_state):
        views, is_live = [window.view for window in windows], torch.tensor([has_state])
        return conv1d_prefill(tokens, weight, None, views, slot, starts([len(tokens)]), is_live)

    expected = prefill(x, whole, False)
    y = [prefill(x[:1], parts, False)]
    for t in range(1, num_tokens):
        if is_update:
            views = [window.view for window in parts]
            y.append(conv1d_update(x[t : t + 1].float(), weight, None, views, slot))
        else:
            y.append(prefill(x[t : t + 1], parts, True))
    assert_close(torch.cat(y), expected, torch.float32)
    for one, other in zip(whole, parts, strict=True):
        assert_close(other.view, one.view, torch.float32)


@pytest.mark.parametrize(("first", "second"), [(a, b) for a in range(1, 6) for b in range(1, 6)])
def test_any_cut_equals_the_whole(first, second):
    x, weight = randn(first + second, NUM_CHANNELS), randn(NUM_CHANNELS, 4, seed=1)
    fresh = torch.zeros(1, NUM_CHANNELS, 3, dtype=torch.float64)
    expected, expected_after = causal_conv(x, weight, None, fresh, starts([first + second]))
    y0, middle = causal_conv(x[:first], weight, None, fresh, starts([first]))
    y1, after = causal_conv(x[first:], weight, None, middle, starts([second]))
    assert_close(torch.cat([y0, y1]), expected)
    assert torch.equal(after, expected_after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_update_is_one_token_of_the_loop(num_rows, dtype):
    slots = [3, 0, 4][:num_rows]
    windows = arenas(6, 4, dtype)
    initial = randn(num_rows, NUM_CHANNELS, 3, seed=5).to(dtype)
    for row, slot in enumerate(slots):
        for window, part in zip(windows, initial[row].split(CHANNELS), strict=True):
            window.fill(slot, part)
    # Wider than its channels, as the projection leaves it.
    x = randn(num_rows, NUM_CHANNELS + 5, seed=6).to(dtype)[:, 2 : 2 + NUM_CHANNELS]
    weight, bias = randn(NUM_CHANNELS, 4).to(dtype), randn(NUM_CHANNELS, seed=2).to(dtype)
    views = [window.view for window in windows]
    y = conv1d_update(x, weight, bias, views, torch.tensor(slots))

    expected_y, expected_after = loop(x, weight, bias, initial, [1] * num_rows)
    assert y.dtype == dtype
    assert_close(y, expected_y)
    after = torch.cat([view[slots] for view in views], dim=1)
    assert torch.equal(after.double(), expected_after)
    for window in windows:
        window.assert_only_changed(slots)
