"""Short prefill steps as recorded graphs: one launch instead of hundreds.

A prefill of a thousand tokens keeps a GPU busy for less time than the host needs to start its
kernels. So such steps are recorded as decode steps are (graphs.py), for a few numbers of tokens
(buckets) and of rows. A step is filled up to its bucket with a sequence of padding tokens, which
touches a slot and a page of its own alone, and with empty rows, which touch nothing.
"""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from tandem.log import get_logger
from tandem.models.loader import Model
from tandem.runner.graphs import EXTRA_NBYTES, Record
from tandem.runner.inputs import HostBatch, forward_batch
from tandem.runner.memory import Padding
from tandem.runner.staging import Staging, place, view
from tandem.units import ceil_div

log = get_logger(__name__)

# Beyond this many tokens the kernels take longer than their launches.
MAX_TOKENS = 2048
# Sequences of one step: few kernels care how many there could be, but those cut work by it.
_ROWS = (1, 4)


def bucket_tokens(max_tokens: int) -> list[int]:
    """Ascending numbers of tokens that get a graph, none over `max_tokens`.

    Padding is fewer than 128 tokens, or an eighth of them.
    """
    sizes = [*range(128, 1024, 128), *range(1024, MAX_TOKENS + 1, 256)]
    return [size for size in sizes if size <= max_tokens]


class PrefillGraphs:
    """Prefill steps of one rank, by bucket.

    Args:
        model, state: this rank's share, and the views of its arena; both stay where they are.
        padding: slot and page of padding tokens.
        page_tokens: tokens of one page.
        max_pages: columns of the page table, pages of the longest sequence.
        vocab_size: of the logits.
        device: where the model is.
        staging: how inputs get there.
        record: how recordings are made.
        buckets: ascending numbers of tokens.

    Records in the constructor, the largest first: the others then fit into its memory.
    """

    def __init__(
        self,
        model: Model,
        state: Mapping[int, Mapping[str, torch.Tensor]],
        *,
        padding: Padding,
        page_tokens: int,
        max_pages: int,
        vocab_size: int,
        device: torch.device,
        staging: Staging,
        record: Record,
        buckets: list[int],
    ) -> None:
        self._model = model
        self._state = state
        self._padding = padding
        self._page_tokens = page_tokens
        self._max_pages = max_pages
        self._staging = staging
        self._buckets = buckets
        rows = _ROWS[-1]
        # A step may be all padding.
        table = (rows + 1, max(max_pages, ceil_div(buckets[-1], page_tokens)))
        self._table = torch.full(table, padding.page, dtype=torch.int32, device=device)
        self._logits = torch.empty((rows, vocab_size), dtype=torch.float32, device=device)
        self._greedy = torch.empty(rows, dtype=torch.int64, device=device)
        largest = self._fields(_no_rows(), [], buckets[-1], rows)
        largest["page_table"] = np.zeros(table, dtype=np.int32)
        self._capacity = place(largest)[1] + EXTRA_NBYTES
        self._staged = torch.zeros(self._capacity, dtype=torch.uint8, device=device)
        self._replays: dict[tuple[int, int], Callable[[], None]] = {}
        if device.type == "cuda" and _waits(self._work(buckets[0], 1)):
            log.warning("prefill steps are not recorded: this model's wait for the device")
            self._buckets = []
            return
        start = time.monotonic()
        for num_rows in reversed(_ROWS):
            for num_tokens in reversed(buckets):
                self._replays[num_tokens, num_rows] = record(self._work(num_tokens, num_rows))
        log.info(
            "recorded prefill steps of %s tokens in %.1f s",
            ", ".join(map(str, buckets)),
            time.monotonic() - start,
        )

    def _work(self, num_tokens: int, num_rows: int) -> Callable[[], None]:
        """A step of a bucket, on memory that stays; what lies there now is padding alone."""
        fields = self._fields(_no_rows(), [], num_tokens, num_rows)
        self._staging.send_to(self._staged, fields)
        offsets, _ = place(fields)
        tensors = {name: view(self._staged, offsets[name], fields[name]) for name in fields}
        tensors["page_table"] = self._table[: num_rows + 1]

        def work() -> None:
            hidden = self._model.forward(forward_batch(tensors, 0, self._state))
            logits = self._logits[:num_rows]
            self._model.logits(hidden[tensors["ends"]], out=logits)
            torch.argmax(logits, dim=-1, out=self._greedy[:num_rows])

        return work

    def _fields(
        self, host: HostBatch, sampled: Sequence[int], num_tokens: int, num_rows: int
    ) -> dict[str, np.ndarray]:
        """Fields filled up to a bucket; always the same names, in the same order.

        Tokens: | those of the batch | padding |. Rows: | those of the batch | empty | padding |.
        """
        own = len(host.token_ids)
        rest = num_tokens - own
        at = np.arange(rest)
        empty = num_rows - host.num_rows
        starts = np.append(host.query_start, np.full(empty + 1, own, host.query_start.dtype))
        starts[-1] = num_tokens
        contexts = np.append(host.context_lens, np.zeros(empty + 1, host.context_lens.dtype))
        contexts[-1] = rest
        ends = np.zeros(num_rows, dtype=np.int64)
        ends[: len(sampled)] = host.query_start[1:][list(sampled)] - 1
        padding = self._padding
        return {
            "token_ids": np.append(host.token_ids, np.zeros(rest, np.int64)),
            "positions": np.append(host.positions, at),
            "query_start": starts,
            "context_lens": contexts,
            "slots": np.append(host.slots, np.full(empty + 1, padding.slot, np.int64)),
            "has_state": np.append(host.has_state, np.zeros(empty + 1, np.bool_)),
            "token_pages": np.append(host.token_pages, np.full(rest, padding.page, np.int64)),
            "token_offsets": np.append(host.token_offsets, at % self._page_tokens),
            "ends": ends,
        }

    def takes(self, host: HostBatch) -> bool:
        """Whether a recorded step can run this batch: prefill alone, and not much of it."""
        return (
            bool(self._buckets)
            and host.num_decode == 0
            and host.sources is None
            and host.num_rows <= _ROWS[-1]
            and len(host.token_ids) <= self._buckets[-1]
            and host.page_table.shape[1] <= self._max_pages
        )

    def run(
        self, host: HostBatch, sampled: Sequence[int], extra: Mapping[str, np.ndarray]
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Run a step that `takes` accepts.

        Args:
            sampled: rows whose logits are wanted.
            extra: arrays that something else needs on the device, sent in the same copy.

        Returns: (logits fp32 [sampled rows, vocab], their best tokens int64, `extra` on the
        device). All of it is overwritten by the next step.
        """
        num_tokens = next(size for size in self._buckets if size >= len(host.token_ids))
        num_rows = next(count for count in _ROWS if count >= host.num_rows)
        fields = self._fields(host, sampled, num_tokens, num_rows)
        # Columns for the padding too: those beyond hold pages of earlier steps.
        width = ceil_div(int(fields["context_lens"][-1]), self._page_tokens)
        width = max(width, host.page_table.shape[1])
        pages = np.full((num_rows + 1, width), self._padding.page, dtype=np.int32)
        pages[: host.num_rows, : host.page_table.shape[1]] = host.page_table
        arrays = fields | {"page_table": pages}
        together = arrays | dict(extra)
        if place(together)[1] <= self._capacity:
            self._staging.send_to(self._staged, together)
            offsets, _ = place(together)
            sent = {name: view(self._staged, offsets[name], extra[name]) for name in extra}
        else:
            self._staging.send_to(self._staged, arrays)
            offsets, _ = place(arrays)
            sent = self._staging.send(extra)
        self._table[: num_rows + 1, :width].copy_(view(self._staged, offsets["page_table"], pages))
        self._replays[num_tokens, num_rows]()
        count = len(sampled)
        return self._logits[:count], self._greedy[:count], sent


def _waits(work: Callable[[], None]) -> bool:
    """Whether the work asks the device for a value, which a recording cannot."""
    work()  # what is done once alone may wait
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            work()
        except RuntimeError as error:  # torch has no narrower class for it
            if "synchroniz" not in str(error):
                raise
            return True
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return False


def _no_rows() -> HostBatch:
    """A batch without a row."""
    none = np.zeros(0, dtype=np.int64)
    return HostBatch(
        rows=none,
        token_ids=none,
        sources=None,
        positions=none,
        query_start=np.zeros(1, dtype=np.int32),
        context_lens=np.zeros(0, dtype=np.int32),
        page_table=np.zeros((0, 1), dtype=np.int32),
        slots=none,
        has_state=np.zeros(0, dtype=np.bool_),
        token_pages=none,
        token_offsets=none,
        num_decode=0,
    )
