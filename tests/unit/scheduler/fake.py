"""A worker that runs plans on token lists instead of tensors, and checks every rule of a plan.

Its arena maps each page place and each slot to what was last written there, so that stale state,
shared memory, a token fed twice or out of order shows at once.
"""

from collections import deque

from tandem.cache.manager import CacheManager
from tandem.config.engine import SchedulerOptions
from tandem.scheduler.policy import build_request
from tandem.scheduler.request import EngineRequest, Request, SamplingParams, TokenDelta
from tandem.scheduler.scheduler import MAX_RUNNING_PLANS, NO_SLOT, Scheduler
from tandem.scheduler.step import PENDING_TOKEN, Sample, StepPlan, StepResult
from tandem.state.arena import build_geometry
from tandem.state.ticket import Ticket, digest_of

EOS = 1
PAGE_TOKENS = 16


def next_token(tokens: tuple[int, ...]) -> int:
    """A deterministic model: depends on every token before it."""
    value = 7
    for token in tokens:
        value = (value * 31 + token + 11) % 1009
    return value if value != EOS else 2


def generate(prompt: list[int], num_tokens: int) -> list[int]:
    """What a request run alone says."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tuple(tokens)))
    return tokens[len(prompt) :]


def make_scheduler(
    *,
    num_slabs: int = 8,
    pages_per_slab: int = 4,
    max_num_seqs: int = 8,
    budget_tokens: int = 64,
    max_model_len: int = 256,
    page_nbytes: int = 256,
    slot_nbytes: int | None = None,
    has_prefix_tree: bool = False,
    **options: bool,
) -> Scheduler:
    geometry = build_geometry(
        page_tokens=PAGE_TOKENS,
        page_nbytes=page_nbytes,
        slot_nbytes=256 * pages_per_slab if slot_nbytes is None else slot_nbytes,
        num_slabs=num_slabs,
    )
    return Scheduler(
        CacheManager(geometry, has_prefix_tree=has_prefix_tree),
        SchedulerOptions(max_num_seqs=max_num_seqs, budget_tokens=budget_tokens),
        max_model_len=max_model_len,
        **options,
    )


def make_request(
    request_id: str,
    prompt: list[int] | int,
    max_tokens: int | None = 4,
    *,
    max_model_len: int = 256,
    hold: bool = False,
    ticket: Ticket | None = None,
    generated: tuple[int, ...] = (),
    **sampling: object,
) -> Request:
    """A request; an int prompt means so many tokens that are this request's own."""
    if isinstance(prompt, int):
        seed = sum(map(ord, request_id))
        prompt = [(seed * 13 + index * 7) % 997 + 3 for index in range(prompt)]
    return build_request(
        EngineRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
            hold=hold,
            ticket=ticket,
            generated=list(generated),
        ),
        eos_token_ids=frozenset({EOS}),
        max_model_len=max_model_len,
    )


def make_ticket(prompt: list[int], first_token: int | None = None) -> Ticket:
    return Ticket(
        ticket_id="ticket",
        engine_id="p",
        generation="1",
        address="tcp://127.0.0.1:1",
        num_tokens=len(prompt),
        prompt_digest=digest_of(prompt),
        pages=tuple(range(-(-len(prompt) // PAGE_TOKENS))),
        slot=0,
        page_tokens=PAGE_TOKENS,
        first_token=next_token(tuple(prompt)) if first_token is None else first_token,
        first_logprob=None,
        lease_s=30.0,
    )


class FakeWorker:
    """Runs plans; `script` overrides what a request samples next (token by output position)."""

    def __init__(self, scheduler: Scheduler, script: dict[str, dict[int, int]] | None = None):
        self.scheduler = scheduler
        self.geometry = scheduler.cache.geometry
        self.script = script or {}
        self.tokens: dict[str, list[int]] = {}  # prompt and output of known requests
        self.num_prompt: dict[str, int] = {}
        self.tables: dict[str, dict[int, int]] = {}
        self.slots: dict[int, tuple[int, ...]] = {}  # slot -> tokens that its state has absorbed
        self.places: dict[tuple[int, int], int] = {}  # (page, offset) -> token whose K/V is there
        self.steps: list[StepPlan] = []
        self.just_sampled: set[str] = set()
        self._running: deque[StepPlan] = deque()

    def fill(self, request: Request) -> None:
        """A finished read: the state of the ticket's tokens lies in the request's memory, in
        shared pages since before."""
        assert request.ticket is not None
        state = self.scheduler.cache.state(request.request_id)
        prompt = request.prompt_token_ids[: request.ticket.num_tokens]
        if state.slot is not None:
            self.slots[state.slot] = tuple(prompt)
        if self.geometry.page_nbytes:
            for position, token in enumerate(prompt):
                place = state.pages[position // PAGE_TOKENS], position % PAGE_TOKENS
                if position < request.num_cached_tokens:
                    assert self.places[place] == token
                else:
                    self.write(place, token)

    def write(self, place: tuple[int, int], token: int) -> None:
        """K/V of a token; nobody writes what others may read."""
        assert not self.scheduler.cache.is_shared(place[0])
        self.places[place] = token

    def execute(self, plan: StepPlan) -> StepResult:
        self.steps.append(plan)
        for request_id in plan.forget:
            # A failed step may have told of a request, or not.
            self.tokens.pop(request_id, None)
            self.tables.pop(request_id, None)
        for new in plan.new_requests:
            assert new.request_id not in self.tokens
            self.tokens[new.request_id] = [*new.prompt_token_ids, *new.generated]
            self.num_prompt[new.request_id] = len(new.prompt_token_ids)
            self.tables[new.request_id] = {}
        assert plan.chunks
        assert len({chunk.request_id for chunk in plan.chunks}) == len(plan.chunks)
        self._check_memory(plan)
        samples: list[Sample] = []
        for row, chunk in enumerate(plan.chunks):
            is_decode = len(chunk.token_ids) == 1 and chunk.start > 0
            assert is_decode == (row < plan.num_decode)
            tokens, table = self.tokens[chunk.request_id], self.tables[chunk.request_id]
            stop = chunk.start + len(chunk.token_ids)
            assert chunk.token_ids
            fed = tokens[chunk.start : stop]
            if chunk.token_ids == [PENDING_TOKEN]:
                # Workers know it from the step directly before.
                assert chunk.request_id in self.just_sampled
            else:
                assert chunk.token_ids == fed
            assert chunk.sample == (stop == len(tokens))
            for index, page in enumerate(chunk.pages, chunk.first_page):
                table[index] = page
            past = tuple(tokens[: chunk.start])
            if chunk.slot != NO_SLOT:
                # From zero at the start of a sequence, else exactly the tokens before.
                assert chunk.start == 0 or self.slots[chunk.slot] == past
                self.slots[chunk.slot] = past + tuple(fed)
            if self.geometry.page_nbytes:
                for position, token in enumerate(fed, chunk.start):
                    self.write((table[position // PAGE_TOKENS], position % PAGE_TOKENS), token)
                for position in range(stop):
                    place = table[position // PAGE_TOKENS], position % PAGE_TOKENS
                    assert self.places[place] == tokens[position]
            if chunk.sample:
                output_index = len(tokens) - self.num_prompt[chunk.request_id]
                scripted = self.script.get(chunk.request_id, {})
                token = scripted.get(output_index, next_token(tuple(tokens)))
                tokens.append(token)
                samples.append(Sample(chunk.request_id, token, None))
        self.just_sampled = {sample.request_id for sample in samples}
        return StepResult(plan.step_id, samples)

    def _check_memory(self, plan: StepPlan) -> None:
        slots = [chunk.slot for chunk in plan.chunks if chunk.slot != NO_SLOT]
        assert len(set(slots)) == len(slots)
        assert all(0 <= slot < self.geometry.num_slots for slot in slots)
        pages = [page for chunk in plan.chunks for page in chunk.pages]
        own = [page for page in pages if not self.scheduler.cache.is_shared(page)]
        assert len(set(own)) == len(own)
        assert all(0 <= page < self.geometry.num_pages for page in pages)

    def step(self) -> list[TokenDelta] | None:
        """One step; None if nothing can run."""
        plan = self.scheduler.schedule()
        return None if plan is None else self.scheduler.update(plan, self.execute(plan))

    def overlapped_step(self) -> list[TokenDelta] | None:
        """One plan more, and the end of the one before; None if nothing runs or can run.

        A plan does its work when it ends: memory that goes back too early shows.
        """
        plan = self.scheduler.schedule()
        if plan is not None:
            self._running.append(plan)
        if plan is not None and len(self._running) < MAX_RUNNING_PLANS:
            return []
        if not self._running:
            return None
        oldest = self._running.popleft()
        return self.scheduler.update(oldest, self.execute(oldest))

    def run(self, max_steps: int = 10_000, *, overlap: bool = False) -> list[TokenDelta]:
        """Steps until nothing is left; reads become ready at once."""
        deltas: list[TokenDelta] = self.scheduler.take_deltas()
        for _ in range(max_steps):
            if not self.scheduler.has_work():
                return deltas
            reads = self.scheduler.next_reads()
            for request in reads:
                self.fill(request)
                self.scheduler.on_read_ready(request.request_id)
            new = self.overlapped_step() if overlap else self.step()
            assert new is not None or reads or not self.scheduler.has_work(), "no progress"
            deltas += new or self.scheduler.take_deltas()
        raise AssertionError(f"still running after {max_steps} steps")


def outputs(deltas: list[TokenDelta]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for delta in deltas:
        found.setdefault(delta.request_id, []).extend(delta.token_ids)
    return found


def reasons(deltas: list[TokenDelta]) -> dict[str, str]:
    """How each request finished; each does so once."""
    finished = [delta for delta in deltas if delta.finish_reason is not None]
    assert len({delta.request_id for delta in finished}) == len(finished)
    return {delta.request_id: str(delta.finish_reason) for delta in finished}
