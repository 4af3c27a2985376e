"""Turns a StepPlan into the ForwardBatch of one rank, and keeps the tables that plans extend.

It knows pages, slots and tokens of the requests that workers were told of; it decides nothing.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from tandem.layers.batch import ForwardBatch
from tandem.runner.sampler import SamplingState
from tandem.scheduler.step import Chunk, NewRequest, StepPlan


@dataclass
class _Known:
    sampling: SamplingState
    pages: np.ndarray = field(default_factory=lambda: np.zeros(8, dtype=np.int32))

    def write_pages(self, first: int, pages: list[int]) -> None:
        stop = first + len(pages)
        if stop > len(self.pages):
            grown = np.zeros(max(stop, 2 * len(self.pages)), dtype=np.int32)
            grown[: len(self.pages)] = self.pages
            self.pages = grown
        self.pages[first:stop] = pages


class InputBuilder:
    """Per-request tables of one rank.

    Args:
        page_tokens: tokens of one page.
        eos_token_ids: what ends a sequence, for min_tokens.
        device: where batches go.
    """

    def __init__(
        self, page_tokens: int, eos_token_ids: tuple[int, ...], device: torch.device
    ) -> None:
        self._page_tokens = page_tokens
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._known: dict[str, _Known] = {}

    def apply(self, plan: StepPlan) -> None:
        """Drop, add and extend tables as the plan says."""
        for request_id in plan.forget:
            self._known.pop(request_id, None)
        for new in plan.new_requests:
            self._known[new.request_id] = _Known(self._sampling_state(new))
        for chunk in plan.chunks:
            self._known[chunk.request_id].write_pages(chunk.first_page, chunk.pages)

    def _sampling_state(self, new: NewRequest) -> SamplingState:
        assert new.sampling.seed is not None, "the engine draws a seed before planning"
        return SamplingState(
            params=new.sampling,
            prompt_token_ids=new.prompt_token_ids,
            output_token_ids=list(new.generated),
            eos_token_ids=self._eos_token_ids,
            seed=new.sampling.seed,
        )

    def build(
        self, chunks: list[Chunk], num_decode: int, state: dict[int, dict[str, torch.Tensor]]
    ) -> ForwardBatch:
        """The batch of these chunks, in their order; decode rows are the first `num_decode`."""
        lengths = np.array([len(chunk.token_ids) for chunk in chunks], dtype=np.int64)
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
        query_start = np.zeros(len(chunks) + 1, dtype=np.int32)
        np.cumsum(lengths, out=query_start[1:])
        rows = np.repeat(np.arange(len(chunks)), lengths)
        positions = np.arange(len(rows)) - query_start[:-1].astype(np.int64)[rows] + starts[rows]
        context_lens = (starts + lengths).astype(np.int32)
        width = max(1, -(-int(context_lens.max()) // self._page_tokens))
        table = np.zeros((len(chunks), width), dtype=np.int32)
        for row, chunk in enumerate(chunks):
            count = -(-int(context_lens[row]) // self._page_tokens)
            pages = self._known[chunk.request_id].pages[:count]
            table[row, : len(pages)] = pages
        token_ids = np.fromiter(
            (token for chunk in chunks for token in chunk.token_ids), np.int64, len(rows)
        )
        return ForwardBatch(
            token_ids=self._tensor(token_ids),
            positions=self._tensor(positions),
            query_start=self._tensor(query_start),
            context_lens=self._tensor(context_lens),
            page_table=self._tensor(table),
            slots=self._tensor(np.array([chunk.slot for chunk in chunks], dtype=np.int64)),
            has_state=self._tensor(starts > 0),
            token_pages=self._tensor(table[rows, positions // self._page_tokens].astype(np.int64)),
            token_offsets=self._tensor(positions % self._page_tokens),
            num_decode=num_decode,
            state=state,
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def sampling_states(self, request_ids: list[str]) -> list[SamplingState]:
        return [self._known[request_id].sampling for request_id in request_ids]

    def append(self, request_id: str, token_id: int) -> None:
        """Record a sampled token: penalties and the next draw count it."""
        self._known[request_id].sampling.output_token_ids.append(token_id)
