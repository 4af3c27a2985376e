"""What one step feeds to the model: packed tokens, and where their state lies."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class ForwardBatch:
    """S rows of T packed tokens. The first `num_decode` rows are one token each and have state.

    Fields:
        token_ids, positions: int64 [T].
        query_start: int32 [S + 1], tokens of row s are `[query_start[s], query_start[s + 1])`.
        context_lens: int32 [S], tokens of each sequence with this step's.
        page_table: int32 [S, max_pages], pages of each sequence in token order.
        slots: int64 [S].    has_state: bool [S]; a row without it starts from zero state whatever
            bytes its slot holds.
        token_pages, token_offsets: int64 [T], page of each token and its row in that page.
        state: `state[layer][component]`, strided views of one arena: for a slot component
            [num_slots, units, *unit_shape], for K/V [num_pages, heads, 2, page_tokens, head_dim].
        routing: None, or where each layer of experts leaves the choices of its tokens [T, k].
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    page_table: torch.Tensor
    slots: torch.Tensor
    has_state: torch.Tensor
    token_pages: torch.Tensor
    token_offsets: torch.Tensor
    num_decode: int
    state: Mapping[int, Mapping[str, torch.Tensor]]
    routing: list[torch.Tensor] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    # The two halves of a mixed batch, cut once a step and not once a layer.

    @cached_property
    def decode_slots(self) -> torch.Tensor:
        return self.slots[: self.num_decode]

    @cached_property
    def prefill_slots(self) -> torch.Tensor:
        return self.slots[self.num_decode :]

    @cached_property
    def prefill_has_state(self) -> torch.Tensor:
        return self.has_state[self.num_decode :]

    @cached_property
    def decode_context_lens(self) -> torch.Tensor:
        return self.context_lens[: self.num_decode]

    @cached_property
    def prefill_context_lens(self) -> torch.Tensor:
        return self.context_lens[self.num_decode :]

    @cached_property
    def prefill_query_start(self) -> torch.Tensor:
        """int32 [S - num_decode + 1], counted from the first token behind the decode rows."""
        return self.query_start[self.num_decode :] - self.num_decode


def in_halves(
    batch: ForwardBatch,
    update: Callable[[slice], torch.Tensor],
    prefill: Callable[[slice], torch.Tensor],
) -> torch.Tensor:
    """`update` of the tokens of the decode rows and `prefill` of the tokens behind them, joined.

    A half without rows is not called.
    """
    num_decode = batch.num_decode
    if num_decode == batch.num_rows:
        return update(slice(None))
    if num_decode == 0:
        return prefill(slice(None))
    return torch.cat([update(slice(num_decode)), prefill(slice(num_decode, None))])
