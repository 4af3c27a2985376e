"""Tensor parallelism: collectives between the ranks of one engine, and how units are shared.

It knows no layers. A layer takes a `TensorParallel`, so that a test can build rank 3 of 4 in one
process.
"""

from typing import Protocol

import torch
import torch.distributed as dist

from tandem.errors import ShardingError


class TensorParallel(Protocol):
    """The ranks that hold one model together. Every rank calls the same collectives in order."""

    rank: int
    size: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, equal to the bit on every rank. May overwrite its argument."""
        ...

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The tensors of all ranks, equal in shape, joined along `dim` in rank order."""
        ...

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite the tensor, contiguous and equal in shape everywhere, with rank 0's."""
        ...


class SingleRank:
    """The whole model on one rank: collectives return their argument."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor

    def broadcast(self, tensor: torch.Tensor) -> None:
        pass


class ProcessGroup:
    """Ranks in processes, over torch.distributed (gloo on CPU, nccl on GPU).

    Args:
        group: an initialised process group; None takes the default one. The caller owns it.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous()
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor, group=self._group)
        return torch.cat(parts, dim=dim)

    def broadcast(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, group=self._group, group_src=0)


def shard(units: int, tp: TensorParallel, component: str) -> tuple[int, int]:
    """The units `[start, stop)` of this rank when all ranks must hold equal, disjoint shares.

    Raises: ShardingError naming component, units and tp.
    """
    if units % tp.size:
        raise ShardingError(
            f"{component} has {units} units, which do not divide by tp={tp.size}; "
            f"use a tensor-parallel size that divides {units}"
        )
    share = units // tp.size
    return tp.rank * share, (tp.rank + 1) * share
