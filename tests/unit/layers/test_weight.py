import torch

from tandem.layers.weight import Piece, Weight, fused, linear, part, whole


def test_shape_of_a_cut_follows_its_ranges() -> None:
    assert Piece("a", (10, 4)).taken_shape == (10, 4)
    assert Piece("a", (10, 4), 0, ((0, 2), (5, 9))).taken_shape == (6, 4)
    assert Piece("a", (10, 4), 1, ((1, 3),)).taken_shape == (10, 2)
    assert part("a", (10, 4), torch.float32, (0, 3)).shape == (3, 4)


def test_pieces_join_on_rows_or_stack() -> None:
    pieces = (Piece("a", (3, 4)), Piece("b", (5, 4), 0, ((1, 3),)))
    assert Weight(pieces, torch.float32).shape == (5, 4)
    assert Weight(pieces, torch.float32, num_rows=8).shape == (8, 4)
    assert Weight((Piece("a", (3, 4)),) * 6, torch.float32, is_stacked=True).shape == (6, 3, 4)
    pairs = Weight(pieces * 3, torch.float32, is_stacked=True, pieces_each=2)
    assert pairs.shape == (3, 5, 4)


def test_projection_cut_by_rows_cuts_its_bias_and_by_columns_does_not() -> None:
    by_rows = linear("p", 8, 6, True, torch.float32, rows=[(2, 4)])
    assert (by_rows["p.weight"].shape, by_rows["p.bias"].shape) == ((2, 6), (2,))
    by_columns = linear("p", 8, 6, True, torch.float32, columns=(3, 6))
    assert (by_columns["p.weight"].shape, by_columns["p.bias"].shape) == ((8, 3), (8,))
    assert list(linear("p", 8, 6, False, torch.float32)) == ["p.weight"]


def test_fused_projections_keep_their_order() -> None:
    parts = [linear(name, size, 6, True, torch.float32) for name, size in (("q", 4), ("k", 2))]
    joined = fused("qk", parts)
    assert {name: weight.shape for name, weight in joined.items()} == {
        "qk.weight": (6, 6),
        "qk.bias": (6,),
    }
    assert [piece.name for piece in joined["qk.weight"].pieces] == ["q.weight", "k.weight"]


def test_whole_takes_everything() -> None:
    assert whole("a", (3, 4), torch.bfloat16).shape == (3, 4)
