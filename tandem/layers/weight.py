"""Declarations of the tensors a layer holds: which checkpoint tensors, and which part of each.

It reads nothing: models/weights.py does. A layer states its weights relative to its own prefix.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

Range = tuple[int, int]  # half-open


@dataclass(frozen=True)
class Piece:
    """Part of one checkpoint tensor of `shape`: the intervals `ranges` of `axis`, joined in order.

    `ranges` None takes the whole tensor.
    """

    name: str
    shape: tuple[int, ...]
    axis: int = 0
    ranges: tuple[Range, ...] | None = None

    @property
    def taken(self) -> tuple[Range, ...]:
        return self.ranges if self.ranges is not None else ((0, self.shape[self.axis]),)

    @property
    def taken_shape(self) -> tuple[int, ...]:
        extent = sum(stop - start for start, stop in self.taken)
        return (*self.shape[: self.axis], extent, *self.shape[self.axis + 1 :])


@dataclass(frozen=True)
class Weight:
    """One tensor in memory: its pieces joined along axis 0, or stacked on a new one.

    `num_rows`: zero rows are added up to this many. `is_optional`: left out where the checkpoint
    has none of it.
    """

    pieces: tuple[Piece, ...]
    dtype: torch.dtype
    is_stacked: bool = False
    num_rows: int | None = None
    is_optional: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.pieces[0].taken_shape
        if self.is_stacked:
            return (len(self.pieces), *first)
        rows = sum(piece.taken_shape[0] for piece in self.pieces)
        return (rows if self.num_rows is None else self.num_rows, *first[1:])

    def under(self, prefix: str) -> "Weight":
        """The same weight with `prefix` before the name of each piece."""
        pieces = (replace(piece, name=prefix + piece.name) for piece in self.pieces)
        return replace(self, pieces=tuple(pieces))


Tensors = Mapping[str, torch.Tensor]


def whole(name: str, shape: Sequence[int], dtype: torch.dtype) -> Weight:
    return Weight((Piece(name, tuple(shape)),), dtype)


def part(
    name: str, shape: Sequence[int], dtype: torch.dtype, *ranges: Range, axis: int = 0
) -> Weight:
    """Intervals of one axis of one tensor."""
    return Weight((Piece(name, tuple(shape), axis, ranges),), dtype)


def linear(
    name: str,
    out_size: int,
    in_size: int,
    has_bias: bool,
    dtype: torch.dtype,
    *,
    rows: Sequence[Range] | None = None,
    columns: Range | None = None,
) -> dict[str, Weight]:
    """Weight and bias of one projection: `rows` of its outputs, or `columns` of its inputs.

    The bias of a projection that is cut by columns is whole on every rank: `RowLinear` adds it
    once.
    """
    shape = (out_size, in_size)
    taken = None if rows is None else tuple(rows)
    if columns is not None:
        weight = Weight((Piece(f"{name}.weight", shape, 1, (columns,)),), dtype)
    else:
        weight = Weight((Piece(f"{name}.weight", shape, 0, taken),), dtype)
    weights = {f"{name}.weight": weight}
    if has_bias:
        weights[f"{name}.bias"] = Weight((Piece(f"{name}.bias", (out_size,), 0, taken),), dtype)
    return weights


def fused(name: str, parts: Sequence[Mapping[str, Weight]]) -> dict[str, Weight]:
    """Several projections of one input as one: the rows of the first, then the second, ..."""
    joined: dict[str, Weight] = {}
    for suffix in ("weight", "bias"):
        found = [
            weight for item in parts for key, weight in item.items() if key.endswith(f".{suffix}")
        ]
        if found:
            pieces = tuple(piece for weight in found for piece in weight.pieces)
            joined[f"{name}.{suffix}"] = Weight(pieces, found[0].dtype)
    return joined
