import pytest
import torch

from tandem.ops.experts import Router, route


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_routes_the_product_with_the_gate_in_fp32(score):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 24, generator=generator).bfloat16()
    gate = torch.randn(12, 24, generator=generator)
    bias = torch.randn(12, generator=generator)
    weights, ids = Router(gate, bias, 3, 4, 2, True, 2.5, score)(hidden)
    logits = (hidden.double() @ gate.double().T).float()
    expected_weights, expected_ids = route(logits, bias, 3, 4, 2, True, 2.5, score)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)
