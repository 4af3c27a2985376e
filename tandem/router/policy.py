"""Which engine gets a request, and when an engine is left alone. Pure: no clock, no network."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

_turns = count(1)


@dataclass(frozen=True)
class RouterOptions:
    """Deadlines and limits of a router. There is no limit on how long an answer takes."""

    connect_s: float = 2.0
    idle_s: float = 300.0  # without a token of a request: its queue and prefill count too
    probe_s: float = 1.0  # from one look at an engine to the next
    probe_timeout_s: float = 2.0
    max_missed_probes: int = 3  # then the engine is dead, and its requests go elsewhere
    release_pause_s: float = 0.5  # before a ticket is given back once more; then doubled
    max_attempts: int = 3  # engines that one stage of a request may be given to


@dataclass
class Load:
    """What a router has running on one engine."""

    num_requests: int = 0
    num_tokens: int = 0  # of the prompts and answers at the time they were sent
    last_turn: int = 0

    def add(self, num_tokens: int) -> None:
        self.num_requests += 1
        self.num_tokens += num_tokens
        self.last_turn = next(_turns)

    def remove(self, num_tokens: int) -> None:
        self.num_requests -= 1
        self.num_tokens -= num_tokens


@dataclass
class Standing:
    """Whether an engine may be given requests, from its probes and from requests that it lost.

    One lost request is enough to stop; only an answered probe starts again. So a dead engine costs
    at most the requests that it had.
    """

    max_missed_probes: int
    reason: str | None = "not heard of yet"  # None: usable
    num_missed: int = 0

    @property
    def is_usable(self) -> bool:
        return self.reason is None

    @property
    def is_dead(self) -> bool:
        return self.num_missed >= self.max_missed_probes

    def answered(self, reason: str | None) -> None:
        """A probe came back; `reason`: why the engine says that it is not ready."""
        self.num_missed = 0
        self.reason = reason

    def missed(self, reason: str) -> None:
        self.num_missed += 1
        self.reason = reason

    def lost_request(self, reason: str) -> None:
        self.reason = reason


@dataclass
class Candidate:
    """An engine as the choice sees it."""

    url: str
    role: str  # prefill or decode
    standing: Standing
    load: Load = field(default_factory=Load)


def choose(candidates: Iterable[Candidate], tried: set[str]) -> str | None:
    """URL of the least loaded usable engine that was not tried yet; None if there is none.

    A prefill is as long as its tokens; a decode step as its sequences. Equals take turns.
    """

    def weight(candidate: Candidate) -> tuple[int, int, int]:
        load = candidate.load
        if candidate.role == "prefill":
            return load.num_tokens, load.num_requests, load.last_turn
        return load.num_requests, load.num_tokens, load.last_turn

    free = [each for each in candidates if each.standing.is_usable and each.url not in tried]
    return min(free, key=weight).url if free else None
