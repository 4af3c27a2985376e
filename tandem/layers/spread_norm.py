"""A root-mean-square norm over channels that are spread over the ranks."""

import torch

from tandem.layers.parallel import TensorParallel
from tandem.ops.norm import rms_norm


class SpreadNorm:
    """RMS norm of `total_size` channels, of which this rank holds some.

    Args:
        weight: [channels of this rank].    copies: ranks that hold the same channels.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        eps: float,
        total_size: int,
        tp: TensorParallel,
        copies: int = 1,
    ) -> None:
        self._weight = weight
        self._eps = eps
        self._total_size = total_size
        self._tp = tp
        self._copies = copies

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, channels of this rank] → the same, in x.dtype."""
        if self._tp.size == 1:
            return rms_norm(x, self._weight, self._eps)
        values = x.float()
        squares = self._tp.all_reduce(values.square().sum(-1, keepdim=True)) / self._copies
        inverse = torch.rsqrt(squares / self._total_size + self._eps)
        return (values * inverse * self._weight.float()).to(x.dtype)
