import pytest
import torch

from tandem.layers.spread_norm import SpreadNorm
from tests.stepper import ThreadGroup, ThreadRank

EPS = 1e-6
X = torch.randn(5, 24, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(24, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("copies", [1, 2])
def test_ranks_norm_all_channels_together(tp: int, copies: int) -> None:
    """Channels that several ranks hold count once."""
    if tp % copies:
        pytest.skip("as many copies as ranks allow")
    share = 24 * copies // tp

    def run(rank: ThreadRank) -> torch.Tensor:
        start = rank.rank // copies * share
        own = slice(start, start + share)
        norm = SpreadNorm(WEIGHT[own], EPS, 24, rank, copies)
        return norm(X[:, own])

    parts = ThreadGroup(tp).run(run)[::copies]
    expected = X / (X.square().mean(-1, keepdim=True) + EPS).sqrt() * WEIGHT
    torch.testing.assert_close(torch.cat(parts, dim=1), expected)
