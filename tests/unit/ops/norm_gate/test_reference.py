import pytest
import torch

from tandem.errors import ShapeError
from tandem.ops.norm_gate import norm_gate
from tests.tolerances import assert_close


def problem(dtype, groups=3, size=5):
    generator = torch.Generator().manual_seed(0)
    y, gate = torch.randn(2, 4, groups * size, generator=generator, dtype=torch.float64).to(dtype)
    return y, gate, torch.randn(groups * size, generator=generator).to(dtype)


def expected(y, gate, weight, size, activation):
    values = y.double().unflatten(1, (-1, size))
    normed = values / (values.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    opened = gate.double().sigmoid() * (gate.double() if activation == "silu" else 1.0)
    return normed.flatten(1) * weight.double() * opened


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [5, 15])
def test_norms_each_group_then_gates(dtype, activation, size):
    y, gate, weight = problem(dtype)
    out = norm_gate(y, gate, weight, 1e-5, size, activation)
    assert out.dtype == dtype
    assert_close(out, expected(y, gate, weight, size, activation))


def test_one_weight_serves_every_group():
    y, gate, weight = problem(torch.float32)
    shared = weight[:5]
    out = norm_gate(y, gate, shared, 1e-5, 5, "silu")
    assert_close(out, expected(y, gate, shared.repeat(3), 5, "silu"))


def test_group_that_spans_ranks_is_normed_over_all_of_them():
    y, gate, weight = problem(torch.float32)
    whole = norm_gate(y, gate, weight, 1e-5, 15, "sigmoid")
    others = y[:, 5:].square().sum(1, keepdim=True)
    part = norm_gate(
        y[:, :5], gate[:, :5], weight[:5], 1e-5, 5, "sigmoid", lambda own: own + others, 15
    )
    assert_close(part, whole[:, :5])


def test_unknown_activation_is_refused():
    with pytest.raises(ShapeError, match=r"'tanh'.*silu, sigmoid"):
        norm_gate(*problem(torch.float32), 1e-5, 5, "tanh")
