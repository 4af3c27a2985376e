"""The selective scan, and state rounded at random, against their references."""

import pytest
import torch

from tests.gpu import cases, state_space_cases

pytestmark = pytest.mark.gpu

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
CUDA = "cuda"


@pytest.fixture(scope="module")
def scan():
    """Triton is only there with CUDA."""
    from tandem.ops.selective_scan import triton

    return triton


def test_cuda_tensors_go_to_the_kernels(scan):
    from tandem.ops.dispatch import choose

    assert choose("selective_scan", None, torch.zeros(1, device=CUDA)) is scan


@pytest.mark.parametrize(
    ("lengths", "has_state"),
    [
        ([1], [False]),
        ([63], [True]),
        ([257], [False]),
        ([5, 0, 7], [True, True, False]),
        ([0, 3], [False, False]),
        ([64, 1, 128, 65], [True, False, True, False]),
        ([3] * 300, [True, False, True] * 100),
        ([5000], [True]),
        ([1], None),
        ([1] * 257, None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_selective_scan(scan, lengths, has_state):
    state_space_cases.check_selective_scan(scan, CUDA, lengths, has_state)


@pytest.mark.parametrize("state_dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize(
    ("channels", "groups", "state_size"),
    [(42, 1, 8), (42, 3, 5), (128, 2, 32), (33, 1, 64), (40, 1, 128)],
)
def test_selective_scan_of_any_shape_and_dtype(
    scan, dtype, state_dtype, channels, groups, state_size
):
    for rows in (([33, 0, 1, 90], [True, True, False, False]), ([1] * 5, None)):
        state_space_cases.check_selective_scan(
            scan,
            CUDA,
            *rows,
            dtype=dtype,
            state_dtype=state_dtype,
            channels=channels,
            groups=groups,
            state_size=state_size,
            has_skip=state_size != 8,
            has_gate=state_size != 64,
            is_random=state_dtype is not FP32,
        )


@pytest.mark.parametrize(
    ("lengths", "has_state"),
    [
        ([64], [True]),
        ([257], [False]),
        ([64, 1, 128, 65], [True, False, True, False]),
        ([3] * 300, [True, False, True] * 100),
        ([30001, 40], [True, True]),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        ((4, 2, 64, 128), BF16),
        ((4, 2, 64, 128), FP16),
        ((6, 1, 128, 64), BF16),
        ((8, 8, 64, 16), FP32),
        ((2, 1, 64, 256), BF16),
    ],
    ids=str,
)
def test_ssd_prefill_in_boxes(lengths, has_state, size, dtype):
    """Rows that keep 16 bytes, and tiles without a rest: whole chunks are read in boxes."""
    from tandem.ops.ssd import triton as ssd

    names = ("heads", "groups", "head_dim", "state_size")
    options = {"gap": 8, "dtype": dtype, **dict(zip(names, size, strict=True))}
    cases.check_ssd_prefill(ssd, CUDA, lengths, has_state, **options)


@pytest.mark.parametrize("state_dtype", [BF16, FP16])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    ("heads", "groups", "head_dim", "state_size"), [(6, 3, 5, 7), (3, 1, 80, 16), (2, 2, 64, 128)]
)
def test_ssd_with_state_rounded_at_random(dtype, state_dtype, heads, groups, head_dim, state_size):
    from tandem.ops.ssd import triton as ssd

    options = {"heads": heads, "groups": groups, "head_dim": head_dim, "state_size": state_size}
    options |= {"dtype": dtype, "state_dtype": state_dtype, "is_random": True}
    cases.check_ssd_prefill(ssd, CUDA, [33, 0, 1, 90], [True, True, False, False], **options)
    cases.check_ssd_update(ssd, CUDA, 5, **options)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("shape", [(3, 64, 128), (2, 7, 5), (1, 4, 24)])
def test_rounding_at_random_is_that_of_the_reference(dtype, shape):
    state_space_cases.check_rounding(CUDA, dtype, shape)
