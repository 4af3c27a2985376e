import torch

from tandem.layers.linear import RowLinear, build_linear
from tests.stepper import ThreadGroup, ThreadRank

WEIGHT = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
BIAS = torch.linspace(1, 2, 5)
X = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


def test_projection_by_name() -> None:
    tensors = {"p.weight": WEIGHT, "p.bias": BIAS}
    torch.testing.assert_close(build_linear(tensors, "p")(X), X @ WEIGHT.t() + BIAS)
    del tensors["p.bias"]
    torch.testing.assert_close(build_linear(tensors, "p")(X), X @ WEIGHT.t())


def test_sum_over_ranks_holds_the_bias_once() -> None:
    def run(rank: ThreadRank) -> tuple[torch.Tensor, torch.Tensor]:
        mine = slice(2 * rank.rank, 2 * rank.rank + 2)
        layer = RowLinear({"p.weight": WEIGHT[:, mine], "p.bias": BIAS}, "p", rank)
        return layer(X[:, mine]), layer.partial(X[:, mine])

    found = ThreadGroup(4).run(run)
    for whole, _ in found:
        torch.testing.assert_close(whole, X @ WEIGHT.t() + BIAS)
    torch.testing.assert_close(sum(partial for _, partial in found), X @ WEIGHT.t() + BIAS)
