"""Runs steps of a model by hand, without engine or scheduler: arena, pages, batches, ranks.

Several ranks run as threads of this process.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from tandem.config.model import ModelConfig
from tandem.layers.batch import ForwardBatch
from tandem.layers.parallel import SingleRank, TensorParallel
from tandem.models.loader import Model, load_model
from tandem.models.registry import load_model_config
from tandem.runner.memory import Arena, build_arena
from tandem.state.arena import build_geometry
from tandem.state.spec import build_state_spec
from tandem.transfer.layout import RankLayout
from tandem.transfer.plan import Placement, build_rank_plans
from tandem.units import ceil_div

CPU = torch.device("cpu")
T = TypeVar("T")


class ThreadGroup:
    """Collectives between threads that stand for ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=60)
        self._given: list[torch.Tensor | None] = [None] * size

    def ranks(self) -> list["ThreadRank"]:
        return [ThreadRank(self, rank) for rank in range(self.size)]

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._given[rank] = tensor.clone()
        self._barrier.wait()
        given = [item for item in self._given if item is not None]
        self._barrier.wait()
        return given

    def run(self, function: Callable[["ThreadRank"], T]) -> list[T]:
        """`function` on every rank at once; the first error of any rank."""

        def guarded(rank: "ThreadRank") -> T:
            try:
                return function(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(guarded, self.ranks()))


class ThreadRank:
    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._group = group
        self.rank = rank
        self.size = group.size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._group.exchange(self.rank, tensor)).sum(0)

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self._group.exchange(self.rank, tensor), dim=dim)

    def broadcast(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self._group.exchange(self.rank, tensor)[0])


class Stepper:
    """One model over one arena a rank. Every byte that no owner has written is NaN.

    Sequences are named by a number below `num_sequences`; each has a slot, and pages that are
    scattered over the arena.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tp: int = 1,
        page_tokens: int = 8,
        max_tokens: int = 64,
        num_sequences: int = 4,
        dtype: str | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.config: ModelConfig = load_model_config(folder, dtype=dtype)
        self._page_tokens = page_tokens
        self._device = device
        self._group = ThreadGroup(tp)
        self._num_computed = [0] * num_sequences
        pages_each = ceil_div(max_tokens, page_tokens)

        def build(rank: TensorParallel) -> tuple[Model, Arena]:
            own: TensorParallel = SingleRank() if tp == 1 else rank
            spec = build_state_spec(self.config, tp=tp, rank=rank.rank, page_tokens=page_tokens)
            one = build_geometry(
                page_tokens=page_tokens,
                page_nbytes=spec.page_nbytes,
                slot_nbytes=spec.slot_nbytes,
                num_slabs=1,
            )
            geometry = build_geometry(
                page_tokens=page_tokens,
                page_nbytes=spec.page_nbytes,
                slot_nbytes=spec.slot_nbytes,
                num_slabs=one.slabs_for(pages_each * num_sequences, num_sequences),
            )
            arena = build_arena(spec, geometry, device)
            arena.buffer.fill_(0xFF)
            return load_model(folder, self.config, own, device, show_progress=False), arena

        self._ranks = self._group.run(build)
        geometry = self._ranks[0][1].geometry
        # Slots from the end, pages from the front, both in no order.
        generator = torch.Generator().manual_seed(7)
        pages = torch.randperm(pages_each * num_sequences, generator=generator)
        self._pages = pages.view(num_sequences, pages_each)
        self._slots = geometry.num_slots - 1 - torch.randperm(num_sequences, generator=generator)

    def forget(self, sequence: int) -> None:
        """The sequence starts anew; its slot and pages keep their bytes."""
        self._num_computed[sequence] = 0

    def move_from(self, other: "Stepper", sequence: int) -> None:
        """The state of a sequence as `other` has it, byte by byte as a transfer would move it."""
        num_tokens = other._num_computed[sequence]
        layouts = [_layout(arena) for _, arena in other._ranks]
        from_, to = other._placement(sequence), self._placement(sequence)
        for _, arena in self._ranks:
            for plan in build_rank_plans(layouts, _layout(arena)):
                ids = plan.read_ids(0, num_tokens, from_, to)
                source = other._ranks[plan.src_rank][1].buffer
                pieces = zip(
                    *plan.local.intervals(ids.local.astype(np.int64)),
                    *plan.remote.intervals(ids.remote.astype(np.int64)),
                    strict=True,
                )
                for start, nbytes, src_start, src_nbytes in pieces:
                    assert nbytes == src_nbytes
                    arena.buffer[start : start + nbytes] = source[src_start : src_start + nbytes]
        self._num_computed[sequence] = num_tokens

    def _placement(self, sequence: int) -> Placement:
        has_slot = self._ranks[0][1].spec.slot_nbytes > 0
        slot = int(self._slots[sequence]) if has_slot else None
        return Placement(self._pages[sequence].tolist(), slot)

    def step(self, rows: Sequence[tuple[int, Sequence[int]]]) -> list[torch.Tensor]:
        """Feed tokens to sequences; returns logits [tokens, vocab] a row, in the order of `rows`.

        One-token rows with state run as decode rows, whatever their place in `rows`.
        """
        order = sorted(range(len(rows)), key=lambda i: not self._is_decode(*rows[i]))
        num_decode = sum(self._is_decode(*row) for row in rows)
        fields = {
            name: value.to(self._device) if isinstance(value, torch.Tensor) else value
            for name, value in self._fields([rows[i] for i in order], num_decode).items()
        }

        def run(rank: ThreadRank) -> torch.Tensor:
            model, arena = self._ranks[rank.rank]
            with torch.inference_mode():
                return model.logits(
                    model.forward(ForwardBatch(**fields, state=arena.views))  # type: ignore[arg-type]
                )

        logits = self._group.run(run)
        for other in logits[1:]:
            assert torch.equal(other, logits[0]), "ranks disagree"
        parts = logits[0].cpu().split([len(rows[i][1]) for i in order])
        result = [parts[0]] * len(rows)
        for place, part in zip(order, parts, strict=True):
            result[place] = part
            self._num_computed[rows[place][0]] += len(rows[place][1])
        return result

    def read_from(self, source: "Stepper", source_sequence: int, *, sequence: int) -> None:
        """A sequence's state comes from another model's ranks, by the plans of the transfer."""
        num_tokens = source._num_computed[source_sequence]
        src_layouts = [RankLayout(0, arena.spec, arena.geometry) for _, arena in source._ranks]
        for _, arena in self._ranks:
            layout = RankLayout(0, arena.spec, arena.geometry)
            for plan in build_rank_plans(src_layouts, layout):
                sides = (source._placement(source_sequence), self._placement(sequence))
                ids = plan.read_ids(0, num_tokens, *sides)
                ours, lengths = plan.local.intervals(ids.local)
                theirs, _ = plan.remote.intervals(ids.remote)
                remote = source._ranks[plan.src_rank][1].buffer
                for to, start, nbytes in zip(ours, theirs, lengths, strict=True):
                    arena.buffer[to : to + nbytes] = remote[start : start + nbytes]
        self._num_computed[sequence] = num_tokens

    def _placement(self, sequence: int) -> Placement:
        slot = int(self._slots[sequence])
        is_kept = self._ranks[0][1].geometry.slots_per_slab > 0
        return Placement(self._pages[sequence].tolist(), slot if is_kept else None)

    def _is_decode(self, sequence: int, tokens: Sequence[int]) -> bool:
        return len(tokens) == 1 and self._num_computed[sequence] > 0

    def _fields(self, rows: Sequence[tuple[int, Sequence[int]]], num_decode: int) -> dict:
        sequences = [sequence for sequence, _ in rows]
        starts = torch.tensor([self._num_computed[sequence] for sequence in sequences])
        lengths = torch.tensor([len(tokens) for _, tokens in rows])
        positions = torch.cat(
            [start + torch.arange(length) for start, length in zip(starts, lengths, strict=True)]
        )
        of_token = torch.repeat_interleave(torch.tensor(sequences), lengths)
        return {
            "token_ids": torch.tensor([token for _, tokens in rows for token in tokens]),
            "positions": positions,
            "query_start": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int(),
            "context_lens": (starts + lengths).int(),
            "page_table": self._pages[sequences].int(),
            "slots": self._slots[sequences],
            "has_state": starts > 0,
            "token_pages": self._pages[of_token, positions // self._page_tokens],
            "token_offsets": positions % self._page_tokens,
            "num_decode": num_decode,
        }


def _layout(arena: Arena) -> RankLayout:
    """Where a transfer would find it; no bytes are read at this address."""
    return RankLayout(1 << 40, arena.spec, arena.geometry)


def random_tokens(count: int, seed: int = 1, vocab_size: int = 512) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (count,), generator=generator).tolist()
