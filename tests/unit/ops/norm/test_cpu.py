"""The native kernels: the cases of the reference again, and sizes and layouts of real models."""

import pytest
import torch

from tandem.ops.norm import cpu, reference
from tests.tolerances import assert_close
from tests.unit.ops.norm import test_reference as cases

pytestmark = pytest.mark.usefixtures("native")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _run_cases_natively(monkeypatch):
    monkeypatch.setattr(cases, "rms_norm", cpu.rms_norm)
    monkeypatch.setattr(cases, "gated_rms_norm", cpu.gated_rms_norm)


test_gated_transformers = cases.test_gated_norm_equals_transformers
test_spans_ranks = cases.test_group_that_spans_ranks_equals_the_whole
test_extreme_values = cases.test_small_and_large_values_neither_vanish_nor_overflow


def _rows(num_rows, width, dtype):
    return torch.randn(num_rows, width + 9).to(dtype)[:, 4 : 4 + width]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 8), (1, 768), (3, 7), (65, 1000)], ids=str)
def test_norms_equal_reference(shape, dtype, weight_dtype, num_threads):
    x, residual = _rows(*shape, dtype), _rows(*shape, dtype)
    weight = torch.randn(shape[1]).to(weight_dtype)
    got = cpu.rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype
    assert_close(got, reference.rms_norm(x, weight, 1e-5).double())
    normed, total = cpu.add_rms_norm(x, residual, weight, 1e-5)
    expected, expected_total = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, expected_total)
    assert_close(normed, expected.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "width", "group_size"), [(1, 1536, 1536), (33, 96, 24), (2, 21, 7), (0, 8, 4)]
)
def test_gated_norm_equals_reference(num_rows, width, group_size, dtype, num_threads):
    y, gate = _rows(num_rows, width, dtype), _rows(num_rows, width, dtype)
    weight = torch.randn(width)
    got = cpu.gated_rms_norm(y, gate, weight, 1e-5, group_size)
    assert_close(got, reference.gated_rms_norm(y, gate, weight, 1e-5, group_size).double())


def test_leading_axes_are_kept():
    x, weight = torch.randn(2, 3, 16).transpose(0, 1), torch.randn(16)
    assert_close(cpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5).double())


def test_tensors_of_a_graph_are_not_taken():
    assert cpu.supports(torch.zeros(1))
    assert not cpu.supports(torch.zeros(1, dtype=torch.float64))
    parameter = torch.zeros(1, requires_grad=True)
    assert not cpu.supports(parameter)
    with torch.inference_mode():
        assert cpu.supports(parameter)
