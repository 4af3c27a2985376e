import torch

from tandem.ops.greedy import best_tokens


def test_the_lowest_of_equal_tokens_is_the_best():
    logits = torch.tensor([[0.0, 3.0, 3.0], [-torch.inf, -torch.inf, -torch.inf], [1.0, 0.0, 2.0]])
    out = torch.full((3,), -1)
    assert best_tokens(logits, out) is out
    assert out.tolist() == best_tokens(logits).tolist() == [1, 0, 2]
