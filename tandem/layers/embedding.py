"""Token embedding and output head, their vocabulary cut in equal runs over the ranks.

A vocabulary that does not divide is padded with zero rows at its end; padding never leaves here.
"""

import torch
import torch.nn.functional as F

from tandem.layers.parallel import TensorParallel
from tandem.layers.weight import Piece, Weight
from tandem.ops.linear import PackedLinear
from tandem.units import ceil_div


def vocab_weight(
    name: str,
    vocab_size: int,
    hidden_size: int,
    dtype: torch.dtype,
    tp: TensorParallel,
    *,
    is_optional: bool = False,
) -> Weight:
    """Rows of this rank, as many on each."""
    num_rows = ceil_div(vocab_size, tp.size)
    start = min(tp.rank * num_rows, vocab_size)
    stop = min(start + num_rows, vocab_size)
    piece = Piece(name, (vocab_size, hidden_size), 0, ((start, stop),))
    return Weight((piece,), dtype, num_rows=num_rows, is_optional=is_optional)


class Embedding:
    """Rows of this rank; `tied` is the head that holds the same rows, so that they exist once."""

    def __init__(
        self, weight: torch.Tensor, tp: TensorParallel, tied: "OutputHead | None" = None
    ) -> None:
        self._num_rows = len(weight)
        self._weight = weight if tied is None else None
        self._tied = tied
        self._tp = tp

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] → [T, hidden], whole on every rank."""
        if self._tp.size == 1:
            return self._rows(token_ids)
        local = token_ids - self._tp.rank * self._num_rows
        is_elsewhere = (local < 0) | (local >= self._num_rows)
        hidden = self._rows(local.masked_fill(is_elsewhere, 0))
        return self._tp.all_reduce(hidden.masked_fill(is_elsewhere.unsqueeze(1), 0.0))

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        if self._tied is not None:
            return self._tied.rows(ids)
        assert self._weight is not None
        return F.embedding(ids, self._weight)


class OutputHead:
    """weight: [rows of this rank, hidden]."""

    def __init__(self, weight: torch.Tensor, vocab_size: int, tp: TensorParallel) -> None:
        self._linear = PackedLinear(weight, None)
        self._vocab_size = vocab_size
        self._tp = tp

    def __call__(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[R, hidden] → fp32 [R, vocab], complete on every rank; in `out` where it is given."""
        if self._tp.size == 1:
            return self._linear.wide(hidden, out)
        logits = self._tp.all_gather(self._linear(hidden), dim=1)[:, : self._vocab_size]
        return logits.float() if out is None else out.copy_(logits)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight: int64 [T], counted on this rank → [T, hidden]."""
        return self._linear.embedding(ids)
