import pytest
import torch

from tandem.layers.embedding import Embedding, OutputHead, vocab_weight
from tandem.layers.parallel import SingleRank
from tests.stepper import ThreadGroup, ThreadRank

HIDDEN = 6


def local_rows(weight: torch.Tensor, rank: ThreadRank) -> torch.Tensor:
    declared = vocab_weight("e", len(weight), HIDDEN, torch.float32, rank)
    ((start, stop),) = declared.pieces[0].taken
    rows = torch.zeros(declared.shape)
    rows[: stop - start] = weight[start:stop]
    return rows


@pytest.mark.parametrize("vocab_size", [8, 9, 11, 5])
@pytest.mark.parametrize("is_tied", [False, True])
def test_ranks_hold_one_vocabulary(vocab_size: int, is_tied: bool) -> None:
    weight = torch.randn(vocab_size, HIDDEN, generator=torch.Generator().manual_seed(0))
    ids, hidden = torch.arange(vocab_size), torch.randn(3, HIDDEN)

    def run(rank: ThreadRank) -> tuple[torch.Tensor, torch.Tensor]:
        rows = local_rows(weight, rank)
        head = OutputHead(rows, vocab_size, rank)
        return Embedding(rows, rank, head if is_tied else None)(ids), head(hidden)

    for embedded, logits in ThreadGroup(4).run(run):
        assert torch.equal(embedded, weight)
        torch.testing.assert_close(logits, hidden @ weight.t())


def test_logits_are_fp32() -> None:
    head = OutputHead(torch.randn(7, HIDDEN).bfloat16(), 7, SingleRank())
    logits = head(torch.randn(2, HIDDEN).bfloat16())
    assert (logits.dtype, logits.shape) == (torch.float32, (2, 7))


def test_rows_of_all_ranks_are_equal_in_number() -> None:
    shapes = {
        vocab_weight("e", 9, HIDDEN, torch.float32, rank).shape for rank in ThreadGroup(4).ranks()
    }
    assert shapes == {(3, HIDDEN)}
