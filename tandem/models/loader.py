"""The one way to load a model."""

from dataclasses import replace
from pathlib import Path

import torch

from tandem.config.model import ModelConfig
from tandem.errors import ModelError
from tandem.layers.parallel import TensorParallel
from tandem.layers.weight import Weight
from tandem.models.decoder import Decoder
from tandem.models.family import Family
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
    weights = _stored_weights(weights, config, family, tp, checkpoint)
    tensors = load_weights(
        checkpoint, weights, device, ignored=family.ignored, show_progress=show_progress
    )
    return Decoder(config, family, tensors, tp)


def _stored_weights(
    usual: dict[str, Weight],
    config: ModelConfig,
    family: Family,
    tp: TensorParallel,
    checkpoint: Checkpoint,
) -> dict[str, Weight]:
    """The weights by the names that this checkpoint uses; by the usual ones if it uses none."""
    prefix = checkpoint.prefix(family.prefixes)
    if prefix != family.prefixes[0]:
        usual = Decoder.weights(config, family, tp, prefix)
    if _are_in(checkpoint, usual):
        return usual
    for parts in family.other_parts:
        weights = Decoder.weights(config, replace(family, parts=parts), tp, prefix)
        if _are_in(checkpoint, weights):
            return weights
    return usual


def _are_in(checkpoint: Checkpoint, weights: dict[str, Weight]) -> bool:
    needed = (weight for weight in weights.values() if not weight.is_optional)
    return all(piece.name in checkpoint for weight in needed for piece in weight.pieces)
