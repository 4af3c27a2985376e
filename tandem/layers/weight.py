"""Declarations of the tensors a layer holds: which checkpoint tensors, and which part of each.

It reads nothing: models/weights.py does. A layer states its weights relative to its own prefix.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

Range = tuple[int, int]  # half-open


@dataclass(frozen=True)
class Piece:
    """Part of one checkpoint tensor of `shape`: the intervals `ranges` of `axis`, joined in order.

    `ranges` None takes the whole tensor. `scales`: a factor on each interval. `entry`: the tensor
    is this entry of one with a further first axis.
    """

    name: str
    shape: tuple[int, ...]
    axis: int = 0
    ranges: tuple[Range, ...] | None = None
    scales: tuple[float, ...] | None = None
    entry: int | None = None

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

    `pieces_each`: when stacked, so many pieces in a row are joined to one entry. `num_rows`: zero
    rows are added up to this many. `is_optional`: left out where the checkpoint has none of it.
    `offset`: added to every stored value.
    """

    pieces: tuple[Piece, ...]
    dtype: torch.dtype
    is_stacked: bool = False
    pieces_each: int = 1
    num_rows: int | None = None
    is_optional: bool = False
    offset: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        joined = self.pieces[: self.pieces_each] if self.is_stacked else self.pieces
        rows = sum(piece.taken_shape[0] for piece in joined)
        rest = self.pieces[0].taken_shape[1:]
        if self.is_stacked:
            return (len(self.pieces) // self.pieces_each, rows, *rest)
        return (rows if self.num_rows is None else self.num_rows, *rest)


Tensors = Mapping[str, torch.Tensor]


def whole(name: str, shape: Sequence[int], dtype: torch.dtype) -> Weight:
    return Weight((Piece(name, tuple(shape)),), dtype)


def norm_weight(
    name: str, size: int, dtype: torch.dtype, offset: float, rows: Range | None = None
) -> Weight:
    """The scale of a norm over `size` channels; fp32 where an offset is added: 1 + w loses what is
    small in w when the sum is kept in 16 bits."""
    piece = Piece(name, (size,), 0, None if rows is None else (rows,))
    return Weight((piece,), torch.float32 if offset else dtype, offset=offset)


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
