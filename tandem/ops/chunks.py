"""How packed sequences are cut into chunks that all of them run side by side: shared by the
references of the recurrent ops.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tandem.errors import ShapeError


@dataclass(frozen=True)
class ChunkPlan:
    """Where tokens lie in chunks.

    Chunks are ordered by their place in the sequence first: all first chunks, then all second ones,
    the sequences by falling length. So step k of the state passing is one interval of chunks, and
    the sequences that still run are a prefix of those of step k - 1.
    """

    chunk: int
    steps: tuple[int, ...]  # number of sequences that have a k-th chunk
    order: torch.Tensor  # [S] sequence of each rank; the stable sort by falling length
    rows: int  # number of sequences
    row_length: int  # of every sequence, where `positions` is None
    positions: (
        torch.Tensor | None
    )  # [T] place of each token in [num_chunks * chunk]; None: equal lengths

    def to_chunks(self, x: torch.Tensor) -> torch.Tensor:
        """[T, ...] → [num_chunks, chunk, ...]; places without a token hold zeros."""
        inner = x.shape[1:]
        if self.positions is None:
            x = x.unflatten(0, (self.rows, -1))
            padding = len(self.steps) * self.chunk - x.shape[1]
            if padding:
                x = F.pad(x, (0, 0) * len(inner) + (0, padding))
            x = x.unflatten(1, (len(self.steps), self.chunk)).transpose(0, 1)
            return x.reshape(-1, self.chunk, *inner)
        out = x.new_zeros(sum(self.steps) * self.chunk, *inner)
        return out.index_copy(0, self.positions, x).view(-1, self.chunk, *inner)

    def to_tokens(self, y: torch.Tensor) -> torch.Tensor:
        """[num_chunks, chunk, ...] → [T, ...]; the inverse of `to_chunks`."""
        if self.positions is None:
            y = y.unflatten(0, (len(self.steps), self.rows)).transpose(0, 1).flatten(1, 2)
            return y[:, : self.row_length].flatten(0, 1)
        return y.flatten(0, 1).index_select(0, self.positions)


def plan_chunks(
    starts: Sequence[int], num_tokens: int, chunk: int, device: torch.device
) -> ChunkPlan:
    """Chunks of `chunk` tokens of sequences that begin at `starts` and end at the last of these.

    Raises: ShapeError when they do not cover the tokens.
    """
    lengths = torch.tensor(starts, dtype=torch.int64).diff()
    if starts[0] != 0 or starts[-1] != num_tokens or bool((lengths < 0).any()):
        raise ShapeError(
            f"query_start={list(starts)} does not cover the {num_tokens} tokens of x; "
            "it has to ascend from 0 to the number of tokens"
        )
    num_chunks = (lengths + chunk - 1) // chunk  # [S]
    order = torch.argsort(num_chunks, descending=True, stable=True)
    steps = tuple(
        int((num_chunks > k).sum()) for k in range(int(num_chunks.max()) if len(lengths) else 0)
    )
    if num_tokens and bool((lengths == lengths[0]).all()):
        # Equal rows, as in training, are reshaped: no index, no atomics in the backward pass.
        row_length = num_tokens // len(lengths)
        return ChunkPlan(chunk, steps, order.to(device), len(lengths), row_length, None)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)  # [T]
    offset = torch.arange(num_tokens) - torch.tensor(starts)[sequence]
    first_chunk = torch.tensor((0, *steps)).cumsum(0)  # [num steps + 1]
    positions = (first_chunk[offset // chunk] + rank[sequence]) * chunk + offset % chunk
    return ChunkPlan(chunk, steps, order.to(device), len(lengths), 0, positions.to(device))
