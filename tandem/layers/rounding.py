"""Which states are rounded at random when a layer writes them back."""

import torch

from tandem.ops.rounding import Rounding


def state_rounding(state: torch.Tensor, layer: int, positions: torch.Tensor) -> Rounding | None:
    """fp16 at random, anything else to the nearest.

    Args:
        positions: integer [S], tokens of each sequence with this step's.
    """
    return Rounding(layer, positions) if state.dtype is torch.float16 else None
