from pathlib import Path

import pytest
import torch

from tandem.layers.parallel import SingleRank
from tandem.models.decoder import Decoder
from tandem.models.registry import FAMILIES, load_model_config
from tandem.models.weights import Checkpoint, stored_shapes
from tests.stepper import ThreadGroup
from tests.tiny_models import TINY, save_tiny


@pytest.mark.parametrize("name", TINY)
def test_declared_weights_are_those_of_a_published_layout(name: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(save_tiny(name, tmp_path))
    config = load_model_config(tmp_path)
    family = FAMILIES[config.family]
    weights = Decoder.weights(config, family, SingleRank(), checkpoint.prefix(family.prefixes))
    assert stored_shapes(weights.values()) == {
        name: checkpoint.shape(name) for name in checkpoint.names()
    }


@pytest.mark.parametrize("name", TINY)
def test_ranks_together_take_every_byte(name: str, tmp_path: Path) -> None:
    """Whole on one rank = the union over ranks, element by element."""
    config = load_model_config(save_tiny(name, tmp_path))
    family = FAMILIES[config.family]
    seen: dict[str, torch.Tensor] = {}
    for rank in ThreadGroup(4).ranks():
        weights = Decoder.weights(config, family, rank, family.prefixes[0]).values()
        shapes = stored_shapes(weights)
        for piece in (piece for weight in weights for piece in weight.pieces):
            table = seen.setdefault(piece.name, torch.zeros(shapes[piece.name], dtype=torch.int32))
            entry = table if piece.entry is None else table[piece.entry]
            for start, stop in piece.taken:
                entry.narrow(piece.axis, start, stop - start).add_(1)
    assert all(bool((table > 0).all()) for table in seen.values())


def test_every_rank_holds_as_much(tmp_path: Path) -> None:
    config = load_model_config(save_tiny("nemotron_h_latent", tmp_path, vocab_size=509))
    family = FAMILIES[config.family]
    shapes = [
        {k: w.shape for k, w in Decoder.weights(config, family, rank, "backbone.").items()}
        for rank in ThreadGroup(4).ranks()
    ]
    assert all(item == shapes[0] for item in shapes)
