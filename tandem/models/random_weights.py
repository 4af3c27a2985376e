"""Random weights of any config's shapes, to time it without its checkpoint."""

from collections.abc import Mapping

import torch

from tandem.layers.weight import Weight

_STD = 0.02


def random_weights(
    weights: Mapping[str, Weight], device: torch.device, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Matrices normal with standard deviation 0.02, vectors 1; optional tensors are left out.

    Ranks draw the same numbers for their own shapes, so the ranks of one engine do not form one
    model: for timing only.
    """
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for key, weight in weights.items():
        if weight.is_optional:
            continue
        shape = weight.shape
        if len(shape) < 2:
            tensors[key] = torch.ones(shape, dtype=weight.dtype, device=device)
            continue
        tensor = torch.empty(shape, dtype=weight.dtype, device=device)
        tensors[key] = tensor.normal_(0.0, _STD, generator=generator)
    return tensors
