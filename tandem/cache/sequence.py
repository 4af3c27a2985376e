"""`SequenceState`: the pages and the slot of one sequence. Who owns them: the manager."""

from dataclasses import dataclass, field

from tandem.cache.prefix import PrefixNode


@dataclass
class SequenceState:
    """`pages[i]` holds the K/V of tokens `[i * page_tokens, (i + 1) * page_tokens)`; `slot` is None
    for a model without recurrence. Pages are only ever appended while a request owns them.

    The first `num_shared` pages are those of `path` in the prefix tree: full, others may use them
    too, and nobody writes them. The rest is the sequence's own.
    """

    pages: list[int]
    slot: int | None
    path: list[PrefixNode] = field(default_factory=list)

    @property
    def num_shared(self) -> int:
        return len(self.path)

    @property
    def own_pages(self) -> list[int]:
        return self.pages[len(self.path) :]
