"""Kernels of the delta rule, the RG-LRU and their norms against their references."""

import pytest
import torch

from tests.gpu import cases

pytestmark = pytest.mark.gpu

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
CUDA = "cuda"
ROWS = [
    ([1], [False]),
    ([63], [True]),
    ([257], [False]),
    ([5, 0, 7], [True, True, False]),
    ([0, 3], [False, False]),
    ([64, 1, 128, 65], [True, False, True, False]),
    ([3] * 300, [True, False, True] * 100),
]
# Each pair is compiled anew.
DTYPES = pytest.mark.parametrize(
    ("dtype", "state_dtype"), [(FP32, FP32), (BF16, FP16), (FP16, FP32), (FP16, BF16)], ids=str
)
CHANNELS = pytest.mark.parametrize("by_channel", [False, True], ids=["head", "channel"])


@pytest.fixture(scope="module")
def ops():
    """The Triton modules; Triton itself is only there with CUDA."""
    from tandem.ops.delta_rule import triton as delta_rule
    from tandem.ops.norm_gate import triton as norm_gate
    from tandem.ops.rg_lru import triton as rg_lru

    class Ops:
        pass

    Ops.delta_rule, Ops.norm_gate, Ops.rg_lru = delta_rule, norm_gate, rg_lru
    return Ops


@pytest.mark.parametrize("op", ["delta_rule", "norm_gate", "rg_lru"])
def test_cuda_tensors_go_to_the_kernels(ops, op):
    from tandem.ops.dispatch import choose

    assert choose(op, None, torch.zeros(1, device=CUDA)) is getattr(ops, op)


@CHANNELS
@pytest.mark.parametrize(("lengths", "has_state"), ROWS, ids=str)
def test_delta_prefill(ops, lengths, has_state, by_channel):
    cases.check_delta_prefill(ops.delta_rule, CUDA, lengths, has_state, by_channel=by_channel)


@CHANNELS
@pytest.mark.parametrize(
    ("lengths", "has_state"), [([8192], [False]), ([5001, 40], [True, True])], ids=str
)
def test_delta_prefill_of_long_prompts(ops, lengths, has_state, by_channel):
    cases.check_delta_prefill(ops.delta_rule, CUDA, lengths, has_state, by_channel=by_channel)


@CHANNELS
@pytest.mark.parametrize("rate", [0.01, 50.0])
def test_delta_prefill_of_slow_and_of_very_fast_decay(ops, by_channel, rate):
    cases.check_delta_prefill(
        ops.delta_rule, CUDA, [200, 9], [True, False], by_channel=by_channel, rate=rate
    )


@CHANNELS
@pytest.mark.parametrize("max_beta", [1.0, 2.0])
@DTYPES
def test_delta_prefill_of_odd_shape(ops, dtype, state_dtype, max_beta, by_channel):
    cases.check_delta_prefill(
        ops.delta_rule,
        CUDA,
        [70, 5],
        [True, False],
        dtype=dtype,
        state_dtype=state_dtype,
        heads=6,
        groups=3,
        key=24,
        value=20,
        by_channel=by_channel,
        max_beta=max_beta,
        floor=-5.0 if by_channel else None,
    )


@CHANNELS
@pytest.mark.parametrize("rows", [0, 1, 3, 257])
def test_delta_update(ops, rows, by_channel):
    cases.check_delta_update(ops.delta_rule, CUDA, rows, by_channel=by_channel)


@CHANNELS
@DTYPES
def test_delta_update_of_odd_shape(ops, dtype, state_dtype, by_channel):
    cases.check_delta_update(
        ops.delta_rule,
        CUDA,
        3,
        dtype=dtype,
        state_dtype=state_dtype,
        heads=6,
        groups=3,
        key=24,
        value=20,
        by_channel=by_channel,
        floor=-5.0 if by_channel else None,
    )


@pytest.mark.parametrize("state_dtype", [BF16, FP16])
def test_delta_rule_rounds_state_at_random(ops, state_dtype):
    options = {"state_dtype": state_dtype, "is_random": True}
    cases.check_delta_update(ops.delta_rule, CUDA, 5, **options)
    cases.check_delta_prefill(ops.delta_rule, CUDA, [80, 0, 5], [True, True, False], **options)


@pytest.mark.parametrize(("lengths", "has_state"), [*ROWS, ([5000], [True])], ids=str)
def test_rg_lru_prefill(ops, lengths, has_state):
    cases.check_rg_lru(ops.rg_lru, CUDA, lengths, has_state)


@pytest.mark.parametrize("rows", [0, 1, 3, 257])
def test_rg_lru_update(ops, rows):
    cases.check_rg_lru(ops.rg_lru, CUDA, [1] * rows, None)


@DTYPES
def test_rg_lru_of_odd_shape(ops, dtype, state_dtype):
    options = {"dtype": dtype, "state_dtype": state_dtype, "blocks": 3, "width": 7}
    cases.check_rg_lru(ops.rg_lru, CUDA, [40, 0, 3], [True, False, False], **options)
    cases.check_rg_lru(ops.rg_lru, CUDA, [1, 1], None, **options)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize(
    ("num_tokens", "groups", "size"), [(0, 2, 4), (3, 32, 128), (5, 3, 20), (4, 1, 8192)]
)
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_norm_gate(ops, num_tokens, groups, size, activation, dtype):
    cases.check_norm_gate(ops.norm_gate, CUDA, num_tokens, groups, size, activation, dtype)
