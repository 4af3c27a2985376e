"""The plan of one step and its result: plain data between scheduler and workers.

Every rank receives the same plan. Workers keep per-request tables (pages, tokens, sampling), which
the plan extends, so that a decode step stays small on the wire.
"""

import msgspec

from tandem.scheduler.request import SamplingParams
from tandem.state.ticket import TokenLogprob

# Stands for the token that the step before this one samples for the request: workers have it on
# their device before the host knows it.
PENDING_TOKEN = -1


class NewRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request that workers hear of for the first time. `generated`: tokens produced before."""

    request_id: str
    prompt_token_ids: list[int]
    generated: list[int]
    sampling: SamplingParams


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Tokens `[start, start + len(token_ids))` of one request, to run in this step.

    `start == 0` means the slot's bytes are not this request's: begin from zero state. `pages` are
    written into the request's page table from index `first_page` on; earlier entries are known to
    the worker. `sample`: this chunk ends at the last known token, so a token is sampled after it.
    """

    request_id: str
    start: int
    token_ids: list[int]
    slot: int
    first_page: int
    pages: list[int]
    sample: bool


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step. `chunks`: one-token rows with state (decode) come first; `num_decode` of them.

    `forget`: requests whose tables workers drop before anything else.
    """

    step_id: int
    forget: list[str]
    new_requests: list[NewRequest]
    chunks: list[Chunk]
    num_decode: int

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


class Sample(msgspec.Struct, frozen=True, array_like=True):
    request_id: str
    token_id: int
    logprob: TokenLogprob | None


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """One sample for each chunk with `sample`, in plan order."""

    step_id: int
    samples: list[Sample]
