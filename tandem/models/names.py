"""Turns the weights that layers declare into those that a checkpoint holds: names and factors."""

import re
from dataclasses import replace

from tandem.layers.weight import Piece, Weight
from tandem.models.family import Branch, Names, Scales, Stored


def stored_weight(weight: Weight, branch: Branch, prefix: str) -> Weight:
    """The same tensor in memory, from where the branch's checkpoint keeps it.

    `prefix` stands before every name of the checkpoint.
    """
    pieces = (
        replace(moved, name=f"{prefix}{branch.prefix}{moved.name}")
        for moved in (_move(_scale(piece, branch.scales), branch.names) for piece in weight.pieces)
    )
    return replace(weight, pieces=tuple(pieces))


def _scale(piece: Piece, scales: Scales) -> Piece:
    found = _longest(piece.name, scales)
    if found is None:
        return piece
    factor = scales[found[0]]
    if isinstance(factor, float | int):
        factor = (factor,) * len(piece.taken)
    assert len(factor) == len(piece.taken), (piece, factor)
    return replace(piece, scales=tuple(factor))


def _move(piece: Piece, names: Names) -> Piece:
    found = _longest(piece.name, names)
    if found is None:
        return piece
    key, numbers = found
    rest = ".".join(piece.name.split(".")[len(key.split(".")) :])
    stored = names[key]
    if isinstance(stored, str):
        filled = iter(numbers)
        stored = Stored(re.sub(r"\*", lambda _: str(next(filled)), stored))
    name = f"{stored.name}.{rest}" if rest else stored.name
    shape, taken = piece.shape, piece.taken
    sizes = stored.sizes or (shape[0],) * stored.num_runs
    if len(sizes) > 1:
        assert piece.axis == 0, f"columns of a run of rows: {piece}"
        assert sizes[stored.run] == shape[0], (stored, piece)
        first = sum(sizes[: stored.run])
        shape = (sum(sizes), *shape[1:])
        taken = tuple((start + first, stop + first) for start, stop in taken)
    entry = numbers[0] if stored.is_stacked else None
    return replace(piece, name=name, shape=shape, ranges=taken, entry=entry)


def _longest(name: str, keys: Names | Scales) -> tuple[str, list[int]] | None:
    """(the longest key that `name` begins with, up to a dot; the numbers its `*` stand for)."""
    words = name.split(".")
    for count in range(len(words), 0, -1):
        for key in keys:
            parts = key.split(".")
            if len(parts) == count and all(
                part == word or (part == "*" and word.isdigit())
                for part, word in zip(parts, words, strict=False)
            ):
                return key, [
                    int(word) for part, word in zip(parts, words, strict=False) if part == "*"
                ]
    return None
