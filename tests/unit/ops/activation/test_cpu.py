import pytest
import torch

from tandem.ops.activation import cpu, reference
from tests.tolerances import assert_close

pytestmark = pytest.mark.usefixtures("native")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (1, 4096), (3, 14), (65, 1000), (2, 3, 22)], ids=str)
def test_activations_equal_reference(shape, dtype, num_threads):
    x = (torch.randn(shape) * 5).to(dtype)
    assert_close(cpu.relu2(x), reference.relu2(x.double()))
    assert_close(cpu.silu_mul(x), reference.silu_mul(x.double()))


def test_rows_of_a_wider_tensor():
    x = torch.randn(5, 40)[:, 3:23]
    assert_close(cpu.silu_mul(x), reference.silu_mul(x.double()))
    assert_close(cpu.relu2(x), reference.relu2(x.double()))


def test_extreme_values():
    gate = torch.tensor([-3e38, -100.0, -88.0, 0.0, 88.0, 100.0, torch.inf, torch.nan])
    out = cpu.silu_mul(torch.cat([gate, torch.ones(8)]).unsqueeze(0))[0]
    expected = torch.tensor([0.0, 0.0, 0.0, 0.0, 88.0, 100.0, torch.inf, torch.nan])
    torch.testing.assert_close(out, expected, equal_nan=True)
    assert cpu.relu2(torch.tensor([torch.nan, -1.0])).isnan().tolist() == [True, False]


def test_rounding_is_to_nearest_even():
    """Truncation, or rounding half up, would bias every activation."""
    up = torch.randn(1000).bfloat16()
    gate = torch.full((1000,), 100.0).bfloat16()  # silu is the identity there
    exact = up.double() * 100
    assert torch.equal(cpu.silu_mul(torch.cat([gate, up])), exact.bfloat16())
