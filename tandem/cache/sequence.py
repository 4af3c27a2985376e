"""`SequenceState`: the pages and the slot of one sequence. Who owns them: the manager."""

from dataclasses import dataclass


@dataclass
class SequenceState:
    """`pages[i]` holds the K/V of tokens `[i * page_tokens, (i + 1) * page_tokens)`; `slot` is None
    for a model without recurrence. Pages are only ever appended while a request owns them."""

    pages: list[int]
    slot: int | None
