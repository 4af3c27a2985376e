import pytest
import torch

from tandem.config.model import MlpConfig
from tandem.layers.weight import Piece, Weight
from tandem.models.family import Branch, Names, Scales, Stored
from tandem.models.names import stored_weight

CONFIG = MlpConfig(8, "relu2", False)


def moved(piece: Piece, names: Names, scales: Scales | None = None) -> Piece:
    branch = Branch("layers.2.mlp.", CONFIG, names, scales or {})
    (found,) = stored_weight(Weight((piece,), torch.float32), branch, "model.").pieces
    return found


@pytest.mark.parametrize(
    ("declared", "stored"),
    [
        ("up.weight", "up.weight"),
        ("up_proj.weight", "w3.weight"),
        ("up_proj.bias", "w3.bias"),
        ("experts.11.up_proj.weight", "e.11.w1"),
        ("experts.11.down_proj.weight", "mlps.11.down_proj.weight"),
    ],
)
def test_the_longest_name_that_fits_decides(declared: str, stored: str) -> None:
    names = {"experts.*.up_proj.weight": "e.*.w1", "up_proj": "w3", "experts": "mlps"}
    assert moved(Piece(declared, (4, 2)), names).name == f"model.layers.2.mlp.{stored}"


def test_a_run_of_rows_lies_behind_those_before_it() -> None:
    names = {"up_proj": Stored("gate_up", 1, 3)}
    found = moved(Piece("up_proj.weight", (4, 2), 0, ((1, 2), (3, 4))), names)
    assert (found.name, found.shape) == ("model.layers.2.mlp.gate_up.weight", (12, 2))
    assert found.ranges == ((5, 6), (7, 8))
    assert moved(Piece("up_proj.bias", (4,)), names).ranges == ((4, 8),)
    unequal = {"up_proj": Stored("qkv", 1, sizes=(6, 4, 4))}
    found = moved(Piece("up_proj.weight", (4, 2)), unequal)
    assert (found.shape, found.ranges) == ((14, 2), ((6, 10),))


def test_an_expert_is_an_entry_of_a_stacked_tensor() -> None:
    names = {"experts.*.up_proj.weight": Stored("experts.up", 1, 2, is_stacked=True)}
    found = moved(Piece("experts.7.up_proj.weight", (4, 2)), names)
    assert (found.name, found.shape, found.entry) == ("model.layers.2.mlp.experts.up", (8, 2), 7)
    assert found.ranges == ((4, 8),)


def test_factors_are_for_a_tensor_or_for_each_interval_of_it() -> None:
    scales = {"in_proj": [2.0, 3.0], "out_proj.weight": 5.0}
    piece = Piece("in_proj.weight", (9, 2), 0, ((0, 4), (6, 8)))
    assert moved(piece, {}, scales).scales == (2.0, 3.0)
    assert moved(Piece("out_proj.weight", (2, 4)), {}, scales).scales == (5.0,)
    assert moved(Piece("out_proj.bias", (2,)), {}, scales).scales is None
