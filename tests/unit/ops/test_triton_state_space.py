"""Selective scan and rounding on Triton's interpreter; see test_triton_interpreter.py."""

import importlib.util

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the kernels themselves", allow_module_level=True)
if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from tandem.ops.selective_scan import triton as selective_scan
from tandem.ops.ssd import triton as ssd
from tests.gpu import cases, state_space_cases


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [5, 24])
def test_rounding(dtype, size):
    state_space_cases.check_rounding("cpu", dtype, (2, 6, size))


def test_ssd_with_state_rounded_at_random():
    options = {"dtype": torch.float32, "state_dtype": torch.float16, "is_random": True}
    options |= {"heads": 2, "groups": 1, "head_dim": 5, "state_size": 7}
    cases.check_ssd_prefill(ssd, "cpu", [5, 0, 20], [True, True, False], **options)
    cases.check_ssd_update(ssd, "cpu", 3, **options)


@pytest.mark.parametrize(
    ("lengths", "has_state"),
    [([40, 16], [True, False]), ([150], [True]), ([17, 0, 33], [True, True, False])],
)
def test_ssd_prefill_in_boxes(lengths, has_state):
    """Rows that keep 16 bytes, and tiles without a rest: whole chunks are read in boxes."""
    options = {"dtype": torch.float32, "head_dim": 16, "state_size": 16, "gap": 4}
    cases.check_ssd_prefill(ssd, "cpu", lengths, has_state, **options)


@pytest.mark.parametrize(
    ("lengths", "has_state"),
    [([5, 0, 20], [True, True, False]), ([1, 16], [False, True]), ([1, 1, 1], None)],
)
@pytest.mark.parametrize("is_random", [False, True])
def test_selective_scan(lengths, has_state, is_random):
    state_space_cases.check_selective_scan(
        selective_scan,
        "cpu",
        lengths,
        has_state,
        dtype=torch.float32,
        state_dtype=torch.float16 if is_random else torch.float32,
        channels=12,
        groups=2,
        state_size=11 if is_random else 5,
        has_gate=not is_random,
        is_random=is_random,
    )
