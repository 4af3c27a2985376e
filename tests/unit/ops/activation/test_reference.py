import pytest
import torch
import torch.nn.functional as F

from tandem.errors import ShapeError
from tandem.ops.activation import activate
from tandem.ops.activation.reference import relu2, silu_mul


def test_relu2_squares_what_is_positive():
    assert relu2(torch.tensor([-3.0, 0.0, 2.0])).tolist() == [0.0, 0.0, 4.0]


def test_silu_mul_gates_with_the_first_half():
    gate, up = torch.randn(3, 5), torch.randn(3, 5)
    assert torch.equal(silu_mul(torch.cat([gate, up], dim=-1)), F.silu(gate) * up)


def test_activation_by_name():
    x = torch.randn(3, 4)
    torch.testing.assert_close(activate(x, "relu2"), relu2(x))
    torch.testing.assert_close(activate(x, "silu_gated"), silu_mul(x))
    with pytest.raises(ShapeError, match="gelu"):
        activate(x, "gelu")


def test_gelu_gates_the_second_half():
    gate, up = torch.tensor([[-1.0, 0.5]]), torch.tensor([[2.0, 3.0]])
    exact = activate(torch.cat([gate, up], dim=1), "gelu_gated")
    by_tanh = activate(torch.cat([gate, up], dim=1), "gelu_tanh_gated")
    normal = torch.distributions.Normal(0.0, 1.0)
    torch.testing.assert_close(exact, gate * normal.cdf(gate) * up)
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    torch.testing.assert_close(by_tanh, gate * (1 + torch.tanh(inner)) / 2 * up)
    assert not torch.equal(exact, by_tanh)
