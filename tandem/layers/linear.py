"""Projections of one rank: cut by outputs (no collective), or by inputs (summed over ranks)."""

import torch

from tandem.layers.parallel import TensorParallel
from tandem.layers.weight import Tensors
from tandem.ops.linear import PackedLinear


def build_linear(tensors: Tensors, name: str) -> PackedLinear:
    """The projection `name` of this rank: x [T, K] → [T, N of this rank]."""
    return PackedLinear(tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))


class RowLinear:
    """A projection whose inputs are spread over the ranks: partial products, then their sum."""

    def __init__(self, tensors: Tensors, name: str, tp: TensorParallel) -> None:
        # The sum over ranks must hold the bias once.
        bias = tensors.get(f"{name}.bias") if tp.rank == 0 else None
        self._linear = PackedLinear(tensors[f"{name}.weight"], bias)
        self._tp = tp

    @property
    def matrix(self) -> torch.Tensor | None:
        """See `PackedLinear.matrix`."""
        return self._linear.matrix

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sum, for a caller that adds more before it sums over ranks."""
        return self._linear(x)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._tp.all_reduce(self._linear(x))
