"""Decode steps as recorded graphs: one launch instead of hundreds.

A graph is recorded for each of a few numbers of rows (buckets). It reads its inputs from memory
that stays, and a step with fewer rows is filled up with padding rows, which touch a slot and a page
of their own alone. How a recording is made is given from outside, so that the same code runs on a
CPU, where nothing is recorded.
"""

import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from tandem.layers.batch import ForwardBatch
from tandem.log import get_logger
from tandem.models.loader import Model
from tandem.ops.greedy import best_tokens
from tandem.runner.inputs import HostBatch, resolve_tokens
from tandem.runner.memory import Padding
from tandem.runner.staging import Staging, place, view

log = get_logger(__name__)

# A function's work, recorded; the result does that work again on the same memory.
Record = Callable[[Callable[[], None]], Callable[[], None]]

# Beside rows and page table, one step may send parameters of sampling.
EXTRA_NBYTES = 1 << 20


def bucket_sizes(max_rows: int) -> list[int]:
    """Ascending numbers of rows that get a graph; the last is `max_rows`.

    Padding costs bytes of state, and experts that nobody asked for: it is fewer than eight rows, or
    an eighth of them.
    """
    sizes = [1, 2, 4]
    step = 8
    while sizes[-1] < max_rows:
        first = sizes[-1] // step * step + step
        sizes.append(first)
        if first >= 16 * step:
            step *= 2
    return sorted({min(size, max_rows) for size in sizes})


class CudaRecorder:
    """Records CUDA graphs that share one pool of memory: only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        # Once without recording: kernels are compiled and loaded, libraries choose algorithms and
        # take workspaces, ranks connect; none of that may happen while a stream records.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Thread-local: other threads (NCCL's watchdog, transfers) may go on with their own calls.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            work()
        return graph.replay


def run_again(work: Callable[[], None]) -> Callable[[], None]:
    """Stands for a recorder where there are no graphs: the work itself, tried once."""
    work()
    return work


class DecodeGraphs:
    """Decode steps of one rank, by bucket.

    Args:
        model, state: this rank's share, and the views of its arena; both stay where they are.
        padding: slot and page of padding rows.
        max_rows: rows of the largest bucket.
        max_pages: columns of the page table, pages of the longest sequence.
        vocab_size: of the logits.
        sampled: int64 [max_rows], tokens that the step before has sampled.
        record: how recordings are made.
        buckets: numbers of rows to record; None takes `bucket_sizes(max_rows)`.

    Records in the constructor, the largest first: the others then fit into its memory.
    """

    def __init__(
        self,
        model: Model,
        state: Mapping[int, Mapping[str, torch.Tensor]],
        *,
        padding: Padding,
        max_rows: int,
        max_pages: int,
        vocab_size: int,
        sampled: torch.Tensor,
        staging: Staging,
        record: Record,
        buckets: list[int] | None = None,
    ) -> None:
        device = sampled.device
        self._model = model
        self._state = state
        self._padding = padding
        self._max_pages = max_pages
        self._sampled = sampled
        self._staging = staging
        self._buckets = sorted(buckets or bucket_sizes(max_rows))
        rows = self._buckets[-1]
        self._table = torch.full((rows, max_pages), padding.page, dtype=torch.int32, device=device)
        self._logits = torch.empty((rows, vocab_size), dtype=torch.float32, device=device)
        self._greedy = torch.empty(rows, dtype=torch.int64, device=device)
        self._query_start = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._has_state = torch.ones(rows, dtype=torch.bool, device=device)
        fields = self._fields(_padding_rows(rows, padding), rows)
        table = {"page_table": np.zeros((rows, max_pages), dtype=np.int32)}
        self._capacity = place(fields | table)[1] + EXTRA_NBYTES
        self._staged = torch.zeros(self._capacity, dtype=torch.uint8, device=device)
        self._replays: dict[int, Callable[[], None]] = {}
        start = time.monotonic()
        for bucket in reversed(self._buckets):
            self._record(bucket, record)
        log.info(
            "recorded decode steps of %s rows in %.1f s",
            ", ".join(map(str, self._buckets)),
            time.monotonic() - start,
        )

    def _record(self, bucket: int, record: Record) -> None:
        fields = self._fields(_padding_rows(bucket, self._padding), bucket)
        self._staging.send_to(self._staged, fields)
        offsets, _ = place(fields)
        tensors = {name: view(self._staged, offsets[name], fields[name]) for name in fields}

        def work() -> None:
            batch = ForwardBatch(
                token_ids=resolve_tokens(tensors["token_ids"], tensors["sources"], self._sampled),
                positions=tensors["positions"],
                query_start=self._query_start[: bucket + 1],
                context_lens=tensors["context_lens"],
                page_table=self._table[:bucket],
                slots=tensors["slots"],
                has_state=self._has_state[:bucket],
                token_pages=tensors["token_pages"],
                token_offsets=tensors["token_offsets"],
                num_decode=bucket,
                state=self._state,
            )
            logits = self._logits[:bucket]
            self._model.logits(self._model.forward(batch), out=logits)
            best_tokens(logits, self._greedy[:bucket])

        self._replays[bucket] = record(work)

    def _fields(self, host: HostBatch, bucket: int) -> dict[str, np.ndarray]:
        """Row fields filled up to the bucket's size; always the same names, in the same order."""
        sources = np.zeros(host.num_rows, np.int64) if host.sources is None else host.sources
        padding = self._padding
        return {
            "token_ids": _filled(host.token_ids, bucket, 0),
            "sources": _filled(sources, bucket, 0),
            "positions": _filled(host.positions, bucket, 0),
            "context_lens": _filled(host.context_lens, bucket, 1),
            "slots": _filled(host.slots, bucket, padding.slot),
            "token_pages": _filled(host.token_pages, bucket, padding.page),
            "token_offsets": _filled(host.token_offsets, bucket, 0),
        }

    def takes(self, host: HostBatch) -> bool:
        """Whether a recorded step can run this batch."""
        return (
            host.num_decode == host.num_rows <= self._buckets[-1]
            and host.page_table.shape[1] <= self._max_pages
        )

    def run(
        self, host: HostBatch, extra: Mapping[str, np.ndarray]
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Run a step that `takes` accepts.

        Args:
            extra: arrays that something else needs on the device, sent in the same copy.

        Returns: (logits fp32 [S, vocab], best tokens int64 [S], `extra` on the device). All of it
        is overwritten by the next step.
        """
        num_rows = host.num_rows
        bucket = next(size for size in self._buckets if size >= num_rows)
        pages = host.page_table
        if bucket > num_rows:
            own = np.full((bucket - num_rows, pages.shape[1]), self._padding.page, pages.dtype)
            pages = np.concatenate([pages, own])
        arrays = self._fields(host, bucket) | {"page_table": pages}
        together = arrays | dict(extra)
        if place(together)[1] <= self._capacity:
            self._staging.send_to(self._staged, together)
            offsets, _ = place(together)
            sent = {name: view(self._staged, offsets[name], extra[name]) for name in extra}
        else:
            self._staging.send_to(self._staged, arrays)
            offsets, _ = place(arrays)
            sent = self._staging.send(extra)
        table = view(self._staged, offsets["page_table"], pages)
        self._table[:bucket, : table.shape[1]].copy_(table)
        self._replays[bucket]()
        return self._logits[:num_rows], self._greedy[:num_rows], sent


def _filled(values: np.ndarray, size: int, value: int) -> np.ndarray:
    filled = np.full(size, value, dtype=values.dtype)
    filled[: len(values)] = values
    return filled


def _padding_rows(count: int, padding: Padding) -> HostBatch:
    """A batch of nothing but padding."""
    zeros = np.zeros(count, dtype=np.int64)
    return HostBatch(
        rows=zeros,
        token_ids=zeros,
        sources=zeros,
        positions=zeros,
        query_start=np.arange(count + 1, dtype=np.int32),
        context_lens=np.ones(count, dtype=np.int32),
        page_table=np.full((count, 1), padding.page, dtype=np.int32),
        slots=np.full(count, padding.slot, dtype=np.int64),
        has_state=np.ones(count, dtype=np.bool_),
        token_pages=np.full(count, padding.page, dtype=np.int64),
        token_offsets=zeros,
        num_decode=count,
    )
