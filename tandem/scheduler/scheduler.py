"""When each request runs: `Scheduler`, one per engine.

Each step it plans decode rows first, then chunks of prompts within the token budget, and admits
waiting requests in order of arrival. It owns the life of every request and asks the CacheManager
for memory; it knows no tensors, no peers and no clocks.

Three rules keep it free of deadlock:
- A request is admitted with the pages of all tokens it knows, a read with those of all it will
  receive: nobody waits half-filled for memory that another half-filled one has.
- Decode rows alone grow. Without a free page, the youngest running request gives up everything and
  comes back by recompute; the oldest one therefore always advances.
- What ends by itself (reads, leases, quarantine) is waited for, never preempted.

Plan n + 1 may be made while plan n runs: it names tokens that are not known yet (PENDING_TOKEN).
- What ends by its length is not planned past its last token. A stop token is found one plan late:
  the row that was planned behind it is thrown away with what it samples.
- Memory that a running plan writes goes back when the last such plan has ended: nothing else may
  take it before, least of all a read, which waits for no device.
- Nobody is preempted while a plan runs: who is short of a page waits for its end.

With a prefix tree in the cache, a request that reads its state shares the full pages of its prompt
that are there, and leaves its own full pages there. A request that computes takes all pages anew:
K/V without the recurrent state behind it cannot be continued, and shared pages are never written.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from itertools import takewhile

from tandem.cache.manager import CacheCounts, CacheManager
from tandem.config.engine import SchedulerOptions
from tandem.errors import RequestError
from tandem.scheduler.policy import Finish, check_request, finish_of
from tandem.scheduler.request import Request, RequestState, TokenDelta
from tandem.scheduler.step import PENDING_TOKEN, Chunk, NewRequest, StepPlan, StepResult
from tandem.state.ticket import Progress, TokenLogprob

# A model without recurrence has no slots; its chunks name none.
NO_SLOT = -1
# A pending token is one of the step directly before.
MAX_RUNNING_PLANS = 2
# Tokens that the pages of a model without attention cover.
_NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class SchedulerCounts:
    """Requests by state now, and totals since start. `cache`: who owns which memory."""

    waiting: int
    following: int
    reading: int
    running: int
    finished_total: int
    aborted_total: int
    preempted_total: int
    failed_reads_total: int
    prompt_tokens_total: int  # fed through the model, recomputed ones included
    output_tokens_total: int  # sampled here
    prefix_tokens_total: int  # of prompts whose state was to be read
    prefix_hit_tokens_total: int  # of these, K/V that was here already
    cache: CacheCounts


@dataclass
class _RunningPlan:
    """Requests by chunk, and memory that goes back when the plan has ended: of these requests, with
    the tokens whose pages the plan does not write."""

    plan: StepPlan
    requests: list[Request]
    releases: dict[str, list[int]] = field(default_factory=dict)


class Scheduler:
    """Plans steps over one cache.

    Args:
        cache: pages and slots; nobody else reserves from it.
        options: rows and tokens of one step.
        max_model_len: longest prompt plus output.
        recompute_failed_reads: what a read that failed becomes: an ordinary request that computes
            its prompt here, or an error of this request alone.

    Use: `schedule` -> workers run the plan -> `update`. One more plan may be made before `update`
    of the first; plans end in their order, or all together by `cancel`. The other methods may be
    called at any time between, also while plans run.
    """

    def __init__(
        self,
        cache: CacheManager,
        options: SchedulerOptions,
        *,
        max_model_len: int,
        recompute_failed_reads: bool = True,
    ) -> None:
        self.cache = cache
        self.max_model_len = max_model_len
        self._max_num_seqs = options.max_num_seqs
        self._budget_tokens = options.budget_tokens
        self._recompute_failed_reads = recompute_failed_reads
        self._requests: dict[str, Request] = {}
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._following: dict[str, Request] = {}
        self._reading: dict[str, Request] = {}
        self._running: dict[str, Request] = {}  # in order of arrival
        self._new_reads: list[Request] = []
        self._deltas: list[TokenDelta] = []
        self._forget: list[str] = []
        self._plans: deque[_RunningPlan] = deque()
        self._num_steps = 0
        self._num_added = 0
        self._totals = dict.fromkeys(
            (
                "finished",
                "aborted",
                "preempted",
                "failed_reads",
                "prompt_tokens",
                "output_tokens",
                "prefix_tokens",
                "prefix_hit_tokens",
            ),
            0,
        )

    # --- requests come and go ---

    def add(self, request: Request) -> None:
        """Queue a request. What it reports at once (the ticket's first token) is in `take_deltas`.

        Raises: RequestError, CapacityError if it can never run here; nothing is kept of it then.
        """
        request_id = request.request_id
        if self._owns(request_id):
            raise RequestError(
                f"request_id={request_id} is in use; choose another one", "request_id"
            )
        check_request(request, max_model_len=self.max_model_len, cache=self.cache)
        request.state = RequestState.WAITING
        request.serial = self._num_added
        self._num_added += 1
        ticket = request.ticket
        if ticket is not None and not request.output_token_ids:
            request.output_token_ids.append(ticket.first_token)
            if self._report(request, [ticket.first_token], ticket.first_logprob) is not None:
                return
        elif (finish := finish_of(request)) is not None:
            self._finish(request, finish)
            return
        self._requests[request_id] = request
        if request.source is not None:
            # Memory for a prompt that waits in a peer's queue would be idle here.
            request.state = RequestState.FOLLOWING
            self._following[request_id] = request
        else:
            self._waiting[request_id] = request

    def _owns(self, request_id: str) -> bool:
        return (
            request_id in self._requests
            or any(request_id in running.releases for running in self._plans)
            or self.cache.is_held(request_id)
            or self.cache.is_quarantined(request_id)
        )

    def abort(self, request_id: str) -> Request | None:
        """End a request in any state; no delta follows. None if it has ended already.

        The memory of a READING one goes to quarantine: call `cache.drained` when no byte can
        arrive any more (at once if its read was never posted). A held prefill is not touched:
        its lease decides.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._totals["aborted"] += 1
        self._deltas = [delta for delta in self._deltas if delta.request_id != request_id]
        # Stop strings end answers by an abort: what was computed is as good as a finished one's.
        self._drop(request, self._computed(request))
        return request

    def fail(self, request_id: str, error: str) -> Request | None:
        """End one request with an error delta; its memory goes as in `abort`."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._deltas.append(
            TokenDelta(
                request_id=request_id,
                token_ids=[],
                finish_reason="error",
                error=error,
                num_prompt_tokens=len(request.prompt_token_ids),
            )
        )
        self._totals["finished"] += 1
        self._drop(request, [])
        return request

    def _computed(self, request: Request) -> list[int]:
        """The tokens whose K/V is complete, for the cache."""
        return request.token_ids(0, request.num_computed) if self.cache.has_prefix_tree else []

    def _drop(self, request: Request, computed: list[int]) -> None:
        request_id = request.request_id
        if request.state is RequestState.RUNNING:
            del self._running[request_id]
            self._release(request, computed)
        else:
            self._leave(request)
        self._end(request)

    def _leave(self, request: Request) -> None:
        """Out of the queues of a request that does not run."""
        request_id = request.request_id
        if request.state is RequestState.READING:
            self._quarantine(request)
        elif request.state is RequestState.FOLLOWING:
            del self._following[request_id]
        else:
            # A request that its first token ends never entered the queue.
            self._waiting.pop(request_id, None)

    def _end(self, request: Request) -> None:
        request.state = RequestState.FINISHED
        self._requests.pop(request.request_id, None)
        self._disown(request)

    def _disown(self, request: Request) -> None:
        """Workers forget it, if they know it."""
        if request.is_known:
            request.is_known = False
            self._forget.append(request.request_id)

    def _release(self, request: Request, computed: list[int]) -> None:
        # A step that runs may still write to this memory, and a read posted into it by its next
        # owner would not wait for that step.
        for running in self._plans:
            if running.plan.step_id == request.last_step:
                running.releases[request.request_id] = computed
                return
        self.cache.release(request.request_id, computed)

    # --- reads ---

    def next_reads(self) -> list[Request]:
        """Requests that became READING since the last call: slot and pages of all their tokens are
        theirs, and the engine shall fetch the prompt's state into the first of the pages. The pages
        of the first `num_cached_tokens` are shared, hold their K/V already, and must not be
        written."""
        self._admit_reads()
        reads, self._new_reads = self._new_reads, []
        return [request for request in reads if request.state is RequestState.READING]

    def on_progress(self, request_id: str, progress: Progress) -> Request | None:
        """News of the prefill that a request follows: once it has begun, the request waits for
        memory; with its ticket comes the first token, which is reported at once.

        Returns the request if that token has ended it; its memory goes as in `abort`.
        """
        request = self._requests.get(request_id)
        if request is None or request.source is None:
            return None
        if request.state is RequestState.FOLLOWING and progress.num_tokens:
            del self._following[request_id]
            self._requeue(request)
        ticket = progress.ticket
        if ticket is None:
            return None
        request.ticket, request.source = ticket, None
        request.output_token_ids.append(ticket.first_token)
        finish = self._report(request, [ticket.first_token], ticket.first_logprob)
        return None if finish is None else request

    def on_read_ready(self, request_id: str) -> None:
        """Every byte has arrived: the request decodes from now on. Late events are ignored."""
        request = self._reading.pop(request_id, None)
        if request is None:
            return
        assert request.ticket is not None
        request.num_computed = request.num_planned = request.ticket.num_tokens
        request.ticket = None
        self._start_running(request)
        assert request.num_sent_pages == 0, "workers know pages that may be replaced"
        self.cache.share(request_id, self._computed(request))

    def on_read_failed(self, request_id: str, error: str) -> Request | None:
        """The state will not come: recompute it here, or fail this request alone.

        The memory of a READING one goes to quarantine as in `abort`; one that still waits for
        memory has none. None if the request has ended.
        """
        request = self._requests.get(request_id)
        if request is None or not request.is_remote:
            return None
        self._totals["failed_reads"] += 1
        if not self._recompute_failed_reads:
            return self.fail(request_id, error)
        if request.state is not RequestState.WAITING:
            self._leave(request)
            self._requeue(request)
        request.ticket = request.source = None
        return request

    def _quarantine(self, request: Request) -> None:
        del self._reading[request.request_id]
        self.cache.quarantine(request.request_id)

    def _requeue(self, request: Request) -> None:
        """Back into the queue, at the place of its arrival."""
        request.state = RequestState.WAITING
        request.num_computed = request.num_planned = request.num_pending = 0
        request.num_sent_pages = request.num_cached_tokens = 0
        # The queue is in order of arrival, and few who wait came before one that ran.
        earlier = list(takewhile(lambda item: item.serial < request.serial, self._waiting.values()))
        self._waiting[request.request_id] = request
        self._waiting.move_to_end(request.request_id, last=False)
        for item in reversed(earlier):
            self._waiting.move_to_end(item.request_id, last=False)

    # --- a step ---

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing can run now: reads, leases and the ends of plans that
        run may change that."""
        assert len(self._plans) < MAX_RUNNING_PLANS, "schedule() before update() of an older plan"
        budget = self._budget_tokens
        decode: list[Request] = []
        prefill: list[tuple[Request, int]] = []
        longer: list[Request] = []
        for request in self._running.values():
            if request.is_ending:
                continue
            num_tokens = request.num_tokens + request.num_pending - request.num_planned
            (decode if num_tokens == 1 and request.num_planned else longer).append(request)
        grown = self._grow_rows(decode[:budget])
        if grown is None:
            return None
        decode = grown
        budget -= len(decode)
        for request in longer:
            if not budget:
                break
            if request.state is RequestState.RUNNING:
                budget -= self._plan_more(request, budget, decode, prefill)
        while budget and (admitted := self._admit_next()) is not None:
            budget -= self._plan_more(admitted, budget, decode, prefill)
        if not decode and not prefill:
            return None
        return self._start_plan(decode, prefill)

    @staticmethod
    def _plan_more(
        request: Request, budget: int, decode: list[Request], prefill: list[tuple[Request, int]]
    ) -> int:
        """As many of its known tokens as the budget allows; how many those are."""
        num_tokens = min(budget, request.num_tokens - request.num_planned)
        # One token with state behind it is a decode row whatever it belongs to; one token at the
        # start of a sequence has no state and is not.
        if num_tokens == 1 and request.num_planned:
            decode.append(request)
        else:
            prefill.append((request, num_tokens))
        return num_tokens

    def _grow_rows(self, rows: list[Request]) -> list[Request] | None:
        """Pages for the next token of each row: the rows that run. None if one is short of a page
        and the ends of running plans must be waited for."""
        for request in rows:
            if request.num_planned < request.num_paged_tokens:
                continue
            if request.state is RequestState.RUNNING and not self._grow(request) and self._plans:
                return None
        return [
            request
            for request in rows
            if request.state is RequestState.RUNNING
            and request.num_planned < request.num_paged_tokens
        ]

    def _grow(self, request: Request) -> bool:
        """A page more; when no plan runs, preempts the youngest until there is one. False if there
        is none."""
        num_tokens = request.num_planned + 1
        while not self.cache.try_grow(request.request_id, num_tokens):
            victim = next(reversed(self._running.values()))
            if self._plans or (victim is request and len(self._running) == 1):
                # Only reads, leases and quarantine hold the rest: they end without our help.
                return False
            self._preempt(victim)
            if victim is request:
                return False
        self._count_pages(request)
        return True

    def _count_pages(self, request: Request) -> None:
        geometry = self.cache.geometry
        num_pages = len(self.cache.state(request.request_id).pages)
        has_pages = geometry.page_nbytes > 0
        request.num_paged_tokens = num_pages * geometry.page_tokens if has_pages else _NO_LIMIT

    def _preempt(self, request: Request) -> None:
        del self._running[request.request_id]
        self.cache.release(request.request_id)
        request.num_preemptions += 1
        self._totals["preempted"] += 1
        self._requeue(request)

    def _admit_next(self) -> Request | None:
        """Admit the next request that computes, and the reads before it, which cost no tokens."""
        self._admit_reads()
        request = next(iter(self._waiting.values()), None)
        if request is None or request.is_remote or not self._reserve(request):
            return None
        self._start_running(request)
        return request

    def _start_running(self, request: Request) -> None:
        request.state = RequestState.RUNNING
        running = self._running
        is_youngest = not running or next(reversed(running.values())).serial < request.serial
        running[request.request_id] = request
        if not is_youngest:
            ordered = sorted(running.values(), key=lambda item: item.serial)
            self._running = {item.request_id: item for item in ordered}

    def _admit_reads(self) -> None:
        while (request := next(iter(self._waiting.values()), None)) is not None:
            if not request.is_remote or not self._reserve(request):
                return
            request.state = RequestState.READING
            self._reading[request.request_id] = request
            self._new_reads.append(request)

    def _reserve(self, request: Request) -> bool:
        """Take a row, a slot and the pages of all known tokens, and leave the queue."""
        num_rows = len(self._running) + len(self._reading)
        if num_rows >= self._max_num_seqs:
            return False
        # Who was preempted, or comes with its state, would be dear to preempt soon: it enters when
        # each row can take one page more. Others enter as soon as they fit.
        is_dear = request.num_preemptions > 0 or request.is_remote
        spare_pages = num_rows if is_dear else 0
        prefix = request.prompt_token_ids if request.is_remote else []
        # The first token of a prefill that still runs is to come.
        num_tokens = request.num_tokens + (request.source is not None)
        state = self.cache.try_reserve(
            request.request_id, num_tokens, spare_pages=spare_pages, prefix=prefix
        )
        if state is None:
            return False
        request.num_cached_tokens = state.num_shared * self.cache.geometry.page_tokens
        self._count_pages(request)
        self._totals["prefix_tokens"] += len(prefix)
        self._totals["prefix_hit_tokens"] += request.num_cached_tokens
        del self._waiting[request.request_id]
        return True

    def _start_plan(self, decode: list[Request], prefill: list[tuple[Request, int]]) -> StepPlan:
        """The plan of one token of each decode row and so many of each other one."""
        requests = decode + [request for request, _ in prefill]
        new_requests = [
            NewRequest(
                request_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                generated=list(request.output_token_ids),
                sampling=request.sampling,
            )
            for request in requests
            if not request.is_known
        ]
        chunks = [self._chunk(request, 1) for request in decode]
        chunks += [self._chunk(request, num_tokens) for request, num_tokens in prefill]
        plan = StepPlan(
            step_id=self._num_steps,
            forget=self._forget,
            new_requests=new_requests,
            chunks=chunks,
            num_decode=len(decode),
        )
        self._plans.append(_RunningPlan(plan, requests))
        self._forget = []
        self._num_steps += 1
        return plan

    def _chunk(self, request: Request, num_tokens: int) -> Chunk:
        start = request.num_planned
        stop = start + num_tokens
        state = self.cache.state(request.request_id)
        first_page = request.num_sent_pages
        pages: list[int] = []
        if len(state.pages) > first_page:
            pages = state.pages[first_page:]
            request.num_sent_pages = len(state.pages)
        is_pending = request.num_pending > 0
        sample = is_pending or stop == request.num_tokens
        chunk = Chunk(
            request.request_id,
            start,
            [PENDING_TOKEN] if is_pending else request.token_ids(start, stop),
            NO_SLOT if state.slot is None else state.slot,
            first_page,
            pages,
            sample,
        )
        request.num_planned = stop
        request.num_pending += sample
        request.last_step = self._num_steps
        request.is_known = True
        return chunk

    def update(self, plan: StepPlan, result: StepResult) -> list[TokenDelta]:
        """Take in what the oldest running plan sampled; returns what to report, earlier unreported
        deltas first.

        A held prefill that has its first token yields finish_reason "hold" without a ticket: its
        memory is `cache.held(request_id)` from then on, and the caller grants the lease.
        """
        assert result.step_id == plan.step_id, f"result {result.step_id} of step {plan.step_id}"
        assert self._plans, "no plan runs"
        running = self._plans.popleft()
        assert plan is running.plan, "this is not the oldest plan that runs"
        for request_id, computed in running.releases.items():
            self.cache.release(request_id, computed)
        samples = iter(result.samples)
        num_sampled = num_prompt = 0
        for chunk, request in zip(plan.chunks, running.requests, strict=True):
            sample = next(samples) if chunk.sample else None
            if request.state is not RequestState.RUNNING:
                continue  # ended while the step ran: thrown away
            request.num_computed += len(chunk.token_ids)
            if chunk.start < request.num_prompt_tokens:
                num_prompt += len(chunk.token_ids)
            if sample is not None:
                assert sample.request_id == request.request_id, "samples are in plan order"
                request.num_pending -= 1
                request.output_token_ids.append(sample.token_id)
                num_sampled += 1
                self._report(request, [sample.token_id], sample.logprob)
        self._totals["prompt_tokens"] += num_prompt
        self._totals["output_tokens"] += num_sampled
        return self.take_deltas()

    def cancel(self) -> list[TokenDelta]:
        """End all running plans, of which one has failed on the workers; returns unreported deltas.

        What they did to memory and to workers' tables is unknown: their requests that still run
        (call `fail` for those that shall not) start over, and workers hear of them anew.
        """
        plans, self._plans = self._plans, deque()
        victims: dict[str, Request] = {}
        for running in plans:
            for request_id in running.releases:
                self.cache.release(request_id)
            self._forget += running.plan.forget
            victims |= {request.request_id: request for request in running.requests}
        for request in sorted(victims.values(), key=lambda item: item.serial, reverse=True):
            if request.state is RequestState.RUNNING:
                self._preempt(request)
                self._disown(request)
        return self.take_deltas()

    def take_deltas(self) -> list[TokenDelta]:
        """Deltas that arose outside `update`: first tokens of tickets, errors."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def _report(
        self, request: Request, token_ids: list[int], logprob: TokenLogprob | None
    ) -> Finish | None:
        """Queue the delta of new tokens, and finish or hold the request if they end it."""
        finish = finish_of(request)
        if finish is None and request.hold:
            finish = Finish("hold")
        self._deltas.append(
            TokenDelta(
                request_id=request.request_id,
                token_ids=token_ids,
                logprobs=[logprob]
                if logprob is not None and request.sampling.logprobs is not None
                else None,
                finish_reason=finish.reason if finish else None,
                stop_token_id=finish.stop_token_id if finish else None,
                num_prompt_tokens=len(request.prompt_token_ids),
            )
        )
        if finish is not None:
            self._close(request, finish)
        return finish

    def _finish(self, request: Request, finish: Finish) -> None:
        """Finish a request that has nothing new to report."""
        self._deltas.append(
            TokenDelta(
                request_id=request.request_id,
                token_ids=[],
                finish_reason=finish.reason,
                stop_token_id=finish.stop_token_id,
                num_prompt_tokens=len(request.prompt_token_ids),
            )
        )
        self._close(request, finish)

    def _close(self, request: Request, finish: Finish) -> None:
        if request.state is RequestState.RUNNING:
            del self._running[request.request_id]
            if finish.reason == "hold":
                self.cache.hold(request.request_id)
            else:
                self._release(request, self._computed(request))
        else:
            self._leave(request)
        self._totals["finished"] += 1
        self._end(request)

    # --- what is going on ---

    def has_work(self) -> bool:
        """Whether any request is unfinished, any plan runs or any delta is unreported."""
        return bool(self._requests or self._deltas or self._plans)

    def counts(self) -> SchedulerCounts:
        return SchedulerCounts(
            waiting=len(self._waiting),
            following=len(self._following),
            reading=len(self._reading),
            running=len(self._running),
            finished_total=self._totals["finished"],
            aborted_total=self._totals["aborted"],
            preempted_total=self._totals["preempted"],
            failed_reads_total=self._totals["failed_reads"],
            prompt_tokens_total=self._totals["prompt_tokens"],
            output_tokens_total=self._totals["output_tokens"],
            prefix_tokens_total=self._totals["prefix_tokens"],
            prefix_hit_tokens_total=self._totals["prefix_hit_tokens"],
            cache=self.cache.counts(),
        )
