"""Turns a StepPlan into the arrays of one step, and keeps the tables that plans extend.

It knows pages, slots and tokens of the requests that workers were told of; it decides nothing. All
is numpy in host memory: a step of many rows costs a few calls, not a few per row.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from tandem.layers.batch import ForwardBatch
from tandem.runner.sampling_table import SamplingPlan, SamplingTable
from tandem.scheduler.step import PENDING_TOKEN, Chunk, StepPlan

_MIN_COLUMNS = 16
_MIN_ROWS = 16


@dataclass(frozen=True)
class HostBatch:
    """A ForwardBatch in host memory, fields as there.

    rows: int64 [S], places in the request tables.
    sources: int64 [T], for a PENDING_TOKEN its place among the samples of the step before;
        None where no token is pending.
    """

    rows: np.ndarray
    token_ids: np.ndarray
    sources: np.ndarray | None
    positions: np.ndarray
    query_start: np.ndarray
    context_lens: np.ndarray
    page_table: np.ndarray
    slots: np.ndarray
    has_state: np.ndarray
    token_pages: np.ndarray
    token_offsets: np.ndarray
    num_decode: int

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    def arrays(self) -> dict[str, np.ndarray]:
        """What the device needs, by field name."""
        names = (
            "token_ids",
            "positions",
            "query_start",
            "context_lens",
            "page_table",
            "slots",
            "has_state",
            "token_pages",
            "token_offsets",
        )
        arrays: dict[str, np.ndarray] = {name: getattr(self, name) for name in names}
        if self.sources is not None:
            arrays["sources"] = self.sources
        return arrays


def forward_batch(
    tensors: Mapping[str, torch.Tensor],
    num_decode: int,
    state: Mapping[int, Mapping[str, torch.Tensor]],
    sampled: torch.Tensor | None = None,
) -> ForwardBatch:
    """The batch of a HostBatch's arrays on the device; `sampled`: tokens of the step before."""
    token_ids = tensors["token_ids"]
    if "sources" in tensors:
        assert sampled is not None, "no step before has sampled a token here"
        token_ids = resolve_tokens(token_ids, tensors["sources"], sampled)
    return ForwardBatch(
        token_ids=token_ids,
        positions=tensors["positions"],
        query_start=tensors["query_start"],
        context_lens=tensors["context_lens"],
        page_table=tensors["page_table"],
        slots=tensors["slots"],
        has_state=tensors["has_state"],
        token_pages=tensors["token_pages"],
        token_offsets=tensors["token_offsets"],
        num_decode=num_decode,
        state=state,
    )


def resolve_tokens(
    token_ids: torch.Tensor, sources: torch.Tensor, sampled: torch.Tensor
) -> torch.Tensor:
    """Pending tokens replaced by those that the step before has sampled."""
    return torch.where(token_ids == PENDING_TOKEN, sampled[sources], token_ids)


class InputBuilder:
    """Per-request tables of one rank.

    Args:
        page_tokens: tokens of one page.
        sampling: parameters of requests, on the rank that samples.
    """

    def __init__(self, page_tokens: int, sampling: SamplingTable | None = None) -> None:
        self._page_tokens = page_tokens
        self._sampling = sampling
        self._rows: dict[str, int] = {}
        self._free: list[int] = []
        self._pages = np.zeros((0, _MIN_COLUMNS), dtype=np.int32)
        # Where and in which step a row's last token was sampled.
        self._last_place = np.zeros(0, dtype=np.int64)
        self._last_step = np.zeros(0, dtype=np.int64)
        self._num_sampling_steps = 0

    def apply(self, plan: StepPlan) -> None:
        """Drop, add and extend tables as the plan says."""
        for request_id in plan.forget:
            self._remove(request_id)
        for new in plan.new_requests:
            self._remove(new.request_id)
            row = self._add(new.request_id)
            if self._sampling is not None:
                self._sampling.set(row, new.sampling, new.prompt_token_ids, new.generated)
        for chunk in plan.chunks:
            if chunk.pages:
                self._write_pages(self._rows[chunk.request_id], chunk.first_page, chunk.pages)

    def _remove(self, request_id: str) -> None:
        row = self._rows.pop(request_id, None)
        if row is None:
            return
        self._free.append(row)
        if self._sampling is not None:
            self._sampling.clear(row)

    def _add(self, request_id: str) -> int:
        if not self._free:
            old = len(self._pages)
            size = max(2 * old, _MIN_ROWS)
            self._free.extend(range(size - 1, old - 1, -1))
            self._pages = _grown(self._pages, size, self._pages.shape[1])
            self._last_place = np.concatenate([self._last_place, np.zeros(size - old, np.int64)])
            self._last_step = np.concatenate([self._last_step, np.zeros(size - old, np.int64)])
        row = self._free.pop()
        self._rows[request_id] = row
        self._last_step[row] = -1
        return row

    def _write_pages(self, row: int, first: int, pages: list[int]) -> None:
        stop = first + len(pages)
        columns = self._pages.shape[1]
        if stop > columns:
            self._pages = _grown(self._pages, len(self._pages), max(stop, 2 * columns))
        self._pages[row, first:stop] = pages

    def build(self, chunks: list[Chunk], num_decode: int) -> HostBatch:
        """The batch of these chunks, in their order; decode rows are the first `num_decode`."""
        count = len(chunks)
        rows = np.array([self._rows[chunk.request_id] for chunk in chunks], dtype=np.int64)
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
        slots = np.array([chunk.slot for chunk in chunks], dtype=np.int64)
        if num_decode == count:
            token_ids = np.array([chunk.token_ids[0] for chunk in chunks], dtype=np.int64)
            context_lens = starts + 1
            query_start = np.arange(count + 1, dtype=np.int32)
            positions, of_token = starts, np.arange(count)
        else:
            token_ids = np.concatenate(
                [np.array(chunk.token_ids, dtype=np.int64) for chunk in chunks]
            )
            lengths = np.array([len(chunk.token_ids) for chunk in chunks], dtype=np.int64)
            context_lens = starts + lengths
            query_start = np.zeros(count + 1, dtype=np.int32)
            np.cumsum(lengths, out=query_start[1:])
            of_token = np.repeat(np.arange(count), lengths)
            first = starts - query_start[:-1]
            positions = np.arange(len(token_ids)) + first[of_token]
        num_pages = -(-context_lens // self._page_tokens)
        width = max(1, int(num_pages.max()))
        if width > self._pages.shape[1]:  # a model without attention names no pages
            self._pages = _grown(self._pages, len(self._pages), width)
        table = self._pages[rows, :width]
        # Pages beyond the context are reserved for later; a kernel has no business there.
        table[np.arange(width) >= num_pages[:, None]] = 0
        return HostBatch(
            rows=rows,
            token_ids=token_ids,
            sources=self._sources(rows, of_token, token_ids),
            positions=positions,
            query_start=query_start,
            context_lens=context_lens.astype(np.int32),
            page_table=table,
            slots=slots,
            has_state=starts > 0,
            token_pages=table[of_token, positions // self._page_tokens].astype(np.int64),
            token_offsets=positions % self._page_tokens,
            num_decode=num_decode,
        )

    def _sources(
        self, rows: np.ndarray, of_token: np.ndarray, token_ids: np.ndarray
    ) -> np.ndarray | None:
        is_pending = token_ids == PENDING_TOKEN
        if not is_pending.any():
            return None
        own = rows[of_token]
        is_known = self._last_step[own] == self._num_sampling_steps
        assert bool((is_known | ~is_pending).all()), "a pending token that was not just sampled"
        return np.where(is_pending, self._last_place[own], 0)

    def plan_sampling(self, rows: np.ndarray) -> SamplingPlan | None:
        """One token is sampled for each of `rows`, in this order: counts it from now on. None on a
        rank that does not sample: it only knows where the tokens are."""
        self._num_sampling_steps += 1
        self._last_place[rows] = np.arange(len(rows))
        self._last_step[rows] = self._num_sampling_steps
        return None if self._sampling is None else self._sampling.plan(rows)


def _grown(table: np.ndarray, num_rows: int, num_columns: int) -> np.ndarray:
    grown = np.zeros((num_rows, num_columns), dtype=table.dtype)
    grown[: table.shape[0], : table.shape[1]] = table
    return grown
