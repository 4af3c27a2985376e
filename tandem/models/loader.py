"""The one way to load a model."""

from pathlib import Path

import torch

from tandem.config.model import ModelConfig
from tandem.errors import ModelError
from tandem.layers.parallel import TensorParallel
from tandem.models.decoder import Decoder
from tandem.models.random_weights import random_weights
from tandem.models.registry import FAMILIES
from tandem.models.weights import Checkpoint, load_weights

# What callers hold: `forward(batch) -> hidden`, `logits(hidden) -> fp32 [R, vocab]`.
Model = Decoder


def load_model(
    path: str | Path,
    config: ModelConfig,
    tp: TensorParallel,
    device: torch.device,
    *,
    is_random: bool = False,
    show_progress: bool = True,
) -> Model:
    """Build this rank's share of the model in an HF folder and read its weights.

    Only this rank's part of each tensor is read. `show_progress` draws a bar on a terminal.
    `is_random`: the folder needs no weights; random ones are made, for timing.

    Raises: ShardingError when the tp does not divide the model; ModelError when a shard is missing
    or damaged, or when tensors are missing, unexpected or of another shape (all of them listed).
    """
    family = FAMILIES.get(config.family)
    if family is None:
        raise ModelError(f"family={config.family!r} has no model; supported: {', '.join(FAMILIES)}")
    # Before any file is opened: a size that does not divide needs no checkpoint to be refused.
    weights = Decoder.weights(config, family, tp, family.prefixes[0])
    if is_random:
        return Decoder(config, family, random_weights(weights, device), tp)
    checkpoint = Checkpoint(path)
    prefix = checkpoint.prefix(family.prefixes)
    if prefix != family.prefixes[0]:
        weights = Decoder.weights(config, family, tp, prefix)
    tensors = load_weights(
        checkpoint, weights, device, ignored=family.ignored, show_progress=show_progress
    )
    return Decoder(config, family, tensors, tp)
