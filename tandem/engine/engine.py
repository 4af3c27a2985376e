"""The core of an engine: scheduler, cache, transfers and ranks, turned by one loop.

`step()` does one turn: reads move on, ended leases free their memory, the next plan starts on every
rank, and what came out of the oldest plan is returned. With overlapped steps that is the plan
before, so that the device works while the host takes in, tells and plans. It never waits for a
peer, and for a plan only when as many run as may. Not thread-safe, except `check` and `stats`.
"""

import random
import time
import uuid
from collections import deque
from dataclasses import asdict, replace
from pathlib import Path

import msgspec

from tandem.cache.lease import LeaseTable
from tandem.cache.manager import CacheManager
from tandem.config.engine import EngineConfig
from tandem.config.secret import read_cluster_secret, require_secret
from tandem.engine.executor import Executor, start_executor
from tandem.engine.holds import HoldDesk
from tandem.engine.messages import EngineInfo
from tandem.engine.pushes import PushDesk
from tandem.engine.reads import ReadDesk, ReadOutcome
from tandem.engine.sizing import log_sizing, size_engine
from tandem.engine.transfer_watch import TransferReport
from tandem.engine.watch import EngineWatch
from tandem.errors import EngineDeadError, LeaseError, RequestError, TandemError
from tandem.log import get_logger
from tandem.models.weights import weight_files
from tandem.models.weights_digest import digest_weights
from tandem.runner.worker import model_config, plans_in_flight
from tandem.scheduler.policy import build_request, check_request
from tandem.scheduler.request import (
    EngineRequest,
    Request,
    RequestState,
    TokenDelta,
    outside_vocabulary,
)
from tandem.scheduler.scheduler import Scheduler
from tandem.scheduler.step import StepPlan
from tandem.state.ticket import Progress, Ticket, digest_of
from tandem.transfer.identity import EngineIdentity, build_model_identity, current_process
from tandem.transfer.push_board import PushBoard
from tandem.transfer.ticket_client import TicketClient
from tandem.transfer.ticket_server import TicketServer

log = get_logger(__name__)

# A rank that fails this many steps in a row will not get better.
_MAX_FAILED_STEPS = 3
# Requests that wait for longer than this without any step are stuck.
_MAX_IDLE_S = 60.0
# Memory in quarantine for this many times the limit that makes the engine not-ready ends it.
_END_QUARANTINE_FACTOR = 5


def _weights_of(config: EngineConfig) -> str:
    """What two engines with the same weights have in common."""
    if config.model_options.load_format == "random":
        return "random"
    return digest_weights(weight_files(Path(config.model)))


class EngineCore:
    """One engine in this process (its ranks may be in others).

    Raises at construction: ModelError, ConfigError, CapacityError, ShardingError, TransferError.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        log_level: str | None = None,
        pulse_endpoint: str | None = None,
    ) -> None:
        """`pulse_endpoint`: where ranks in processes of their own show that they live."""
        self._config = config
        self._secret = _cluster_secret(config)
        self._model = model_config(config)
        sizing = size_engine(config, self._model)
        log_sizing(sizing)
        self._engine_id = f"{config.transfer.role}-{uuid.uuid4().hex[:8]}"
        self._generation = uuid.uuid4().hex
        self._eos_token_ids = frozenset(self._model.eos_token_ids)
        # Without a peer's slot, K/V alone cannot be continued: only reads can use the tree.
        self._cache = CacheManager(
            sizing.geometry,
            has_prefix_tree=config.cache.prefix_cache and config.transfer.role == "decode",
        )
        self._spec = sizing.spec
        self._scheduler = Scheduler(
            self._cache,
            replace(config.scheduler, max_num_seqs=sizing.max_num_seqs),
            max_model_len=sizing.max_model_len,
            recompute_failed_reads=config.transfer.on_failure == "recompute",
        )
        self._executor: Executor = start_executor(
            config, sizing.geometry.num_slabs, self._engine_id, log_level, pulse_endpoint
        )
        # Of a prefill engine that writes to us, the core tells for all of its ranks.
        self._num_movers = config.parallel.tp if config.transfer.is_mover else 1
        slot_nbytes = sum(placed.nbytes for placed in self._spec.slot) * config.parallel.tp
        self._slot_nbytes = slot_nbytes // self._num_movers
        self.watch = EngineWatch(self._num_movers, slot_nbytes=self._slot_nbytes)
        self._server: TicketServer | None = None
        self._client: TicketClient | None = None
        self._holds: HoldDesk | None = None
        self._reads: ReadDesk | None = None
        self._pushes: PushDesk | None = None
        try:
            self._start_transfer()
        except BaseException:
            self.close()
            raise
        self.info = EngineInfo(
            engine_id=self._engine_id,
            model_name=config.model_options.served_name or self._model.name,
            vocab_size=self._model.vocab_size,
            max_model_len=sizing.max_model_len,
            eos_token_ids=self._model.eos_token_ids,
            role=config.transfer.role,
            side_channel=self._server.address if self._server is not None else None,
            generation=self._generation,
            lease_s=config.transfer.lease_s,
            # Writes begin when the prefill is finished.
            streams=config.transfer.stream_reads
            and config.transfer.role != "colocated"
            and not config.transfer.is_push,
            tp=config.parallel.tp,
        )
        self._can_run = False
        self._max_plans = plans_in_flight(config)
        self._plans: deque[tuple[StepPlan, float]] = deque()  # that run, with their starts
        self._last_end = 0.0  # of a plan
        self._num_failed_steps = 0
        self._num_steps = 0
        self._compute_s = 0.0
        self._quarantined_since: dict[str, float] = {}  # by request, as last looked at
        self._last_step = time.monotonic()
        # Held prefills may rightly keep others waiting for as long as a lease.
        self._max_idle_s = max(_MAX_IDLE_S, 2 * config.transfer.lease_s)
        log.info("ready: model %s, up to %d tokens", self._model.name, sizing.max_model_len)

    def _start_transfer(self) -> None:
        options = self._config.transfer
        if options.role == "colocated":
            return
        identity = EngineIdentity(
            engine_id=self._engine_id,
            generation=self._generation,
            tp=self._config.parallel.tp,
            process=current_process(),
            model=build_model_identity(self._model, weights=_weights_of(self._config)),
            transfer=options.transfer,
        )
        if options.role == "prefill":
            leases: LeaseTable[Progress] = LeaseTable(lease_s=options.lease_s)
            board = PushBoard() if options.is_push else None
            self._server = TicketServer(
                options.side_channel_host,
                options.side_channel_port,
                identity,
                self._executor.ranks,
                leases,
                self._secret,
                board,
            )
            self._holds = HoldDesk(
                self._cache,
                leases,
                engine_id=self._engine_id,
                generation=self._generation,
                address=self._server.address,
            )
            if board is not None:
                self._pushes = PushDesk(
                    board, self._executor, self._config.parallel.tp, self._cache, leases.news
                )
        else:
            self._client = TicketClient(
                identity,
                deadline_s=options.deadline_s,
                secret=self._secret,
                ranks=self._executor.ranks if options.is_push else (),
            )
            self._reads = ReadDesk(
                self._client,
                self._client if options.is_push else self._executor,
                self._num_movers,
                options.deadline_s,
                self._cache.geometry.page_tokens,
                slot_nbytes=self._slot_nbytes,
                watch=self.watch.transfers,
            )

    # --- requests ---

    def _build(self, request: EngineRequest) -> Request:
        request.sampling.validate(self._model.vocab_size)
        if request.hold and self._holds is None:
            raise RequestError(f"role={self.role} holds no prefills; use --role prefill", "hold")
        if request.ticket is not None and self._reads is None:
            raise RequestError(f"role={self.role} reads no tickets; use --role decode", "ticket")
        if request.source is not None and self._reads is None:
            raise RequestError(f"role={self.role} follows no prefills; use --role decode", "source")
        first = () if request.ticket is None else (request.ticket.first_token,)
        token_ids = [*request.prompt_token_ids, *request.generated, *first]
        wrong = outside_vocabulary(token_ids, self._model.vocab_size)
        if wrong is not None:
            raise RequestError(
                f"token id {wrong} is outside the vocabulary of {self._model.vocab_size}", "prompt"
            )
        if request.sampling.seed is None:
            sampling = msgspec.structs.replace(request.sampling, seed=random.getrandbits(63))
            request = msgspec.structs.replace(request, sampling=sampling)
        return build_request(
            request,
            eos_token_ids=self._eos_token_ids,
            max_model_len=self._scheduler.max_model_len,
        )

    @property
    def role(self) -> str:
        return self._config.transfer.role

    def check(self, request: EngineRequest) -> None:
        """Raises what add() would raise for this request; keeps nothing."""
        check_request(
            self._build(request), max_model_len=self._scheduler.max_model_len, cache=self._cache
        )

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises: RequestError, CapacityError; its ticket is given back then.
        LeaseError for a prefill whose ticket was given back before it came.
        """
        try:
            built = self._build(request)
            self._scheduler.add(built)
        except TandemError as error:
            self.watch.refused(request, error)
            # Refused for its id, it may share the ticket with the request that has the id.
            if getattr(error, "param", None) != "request_id":
                self._give_back(request.ticket)
            raise
        self._can_run = True
        if (
            built.hold
            and self._holds is not None
            and not self._holds.register(request.request_id, request.prompt_token_ids)
        ):
            self._scheduler.abort(request.request_id)
            early = LeaseError(
                f"ticket {request.request_id} was given back before its request came"
            )
            self.watch.refused(request, early)
            raise early
        self.watch.queued(request)
        if built.state is RequestState.FINISHED:
            self._give_back(request.ticket)  # the ticket's first token ended it
            return
        source = request.ticket or request.source
        if source is not None and self._reads is not None:
            self._reads.open(
                request.request_id,
                source,
                len(request.prompt_token_ids),
                digest_of(request.prompt_token_ids),
            )

    def _give_back(self, ticket: Ticket | None) -> None:
        if self._client is not None and ticket is not None:
            self._client.release(ticket)

    def abort(self, request_id: str) -> None:
        """End a request in any state; unknown and finished ones are ignored.

        A held one too: whoever aborts has not seen the delta with its ticket.
        """
        request = self._scheduler.abort(request_id)
        if request is not None:
            self.watch.aborted(request_id)
            self._let_go(request)
        if self._holds is not None:
            self._holds.abort(request_id)

    def _let_go(self, request: Request) -> None:
        """An ended request's read, if it has one, must not be waited for by anyone."""
        request_id = request.request_id
        if self._reads is None or not self._reads.is_reading(request_id):
            return
        # Not quiet: what was reserved stays in quarantine until the read has drained.
        if self._reads.abandon(request_id) and self._cache.is_quarantined(request_id):
            self._cache.drained(request_id)

    def release_ticket(self, ticket_id: str) -> None:
        """Give back a prefill that nobody will read: queued, running, held, or yet to come."""
        if self._holds is not None:
            self._holds.release(ticket_id)
            self._sweep(self._holds)

    def _sweep(self, holds: HoldDesk) -> None:
        for request_id in holds.sweep():
            self._scheduler.fail(request_id, "its ticket was given back before it was finished")
            self._can_run = True

    # --- the loop ---

    def has_work(self) -> bool:
        """Whether step() would do something now: it found something last time, or one came."""
        return self._can_run

    def is_waiting(self) -> bool:
        """Whether something is on its way that step() should look for soon."""
        if self._pushes is not None and self._holds is not None:
            # Whoever waits for a ticket may ask for its state at any time.
            return self._pushes.is_busy() or self._holds.counts().active > 0
        return self._reads is not None and self._reads.is_busy()

    def step(self) -> list[TokenDelta]:
        """One turn of the loop; returns what requests produced.

        Raises: EngineDeadError when ranks are lost or fail again and again.
        """
        if self._holds is not None:
            self._sweep(self._holds)
        if self._pushes is not None:
            self._pushes.advance()
        if self._reads is not None:
            self._advance_reads(self._reads)
        plan = self._scheduler.schedule()
        if plan is not None:
            self.watch.planned(plan)
            self._plans.append((plan, time.monotonic()))
            self._executor.submit(plan)
        is_due = len(self._plans) == self._max_plans or (plan is None and bool(self._plans))
        self._can_run = plan is not None or is_due
        # What waits for peers ends by itself; what waits here must run.
        is_waiting = self._scheduler.has_work() and not self.is_waiting()
        if self._can_run or not is_waiting:
            self._last_step = time.monotonic()
        deltas = self._collect() if is_due else self._scheduler.take_deltas()
        if self._holds is not None:
            deltas = [self._with_ticket(self._holds, delta) for delta in deltas]
            self.watch.freed(self._cache.is_held)
        self.watch.reported(deltas)
        return deltas

    @staticmethod
    def _with_ticket(holds: HoldDesk, delta: TokenDelta) -> TokenDelta:
        if delta.finish_reason == "hold":
            return msgspec.structs.replace(delta, ticket=holds.grant(delta))
        if delta.finish_reason in ("stop", "length") and delta.token_ids:
            holds.finish(delta)
        elif delta.finish_reason is not None:
            holds.withdraw(delta.request_id)
        return delta

    def _advance_reads(self, reads: ReadDesk) -> None:
        self._advance_with_news(reads)
        fresh = self._scheduler.next_reads()
        for request in fresh:
            state = self._cache.state(request.request_id)
            num_pages = self._cache.pages_for(len(request.prompt_token_ids))
            reads.start(
                request.request_id,
                state.pages[:num_pages],
                state.slot,
                start_token=request.num_cached_tokens,
            )
        if fresh:  # what is there to read is asked for now, not a step later
            self._advance_with_news(reads)

    def _advance_with_news(self, reads: ReadDesk) -> None:
        outcomes = reads.advance()
        for request_id, progress in reads.take_news():
            outcomes += self._on_progress(reads, request_id, progress)
        # At once: a read that has failed must not be started.
        for outcome in outcomes:
            if outcome.is_ready:
                self._scheduler.on_read_ready(outcome.request_id)
            elif outcome.error is not None:
                self._scheduler.on_read_failed(outcome.request_id, outcome.error)
            if outcome.is_quiet and self._cache.is_quarantined(outcome.request_id):
                self._cache.drained(outcome.request_id)

    def _on_progress(
        self, reads: ReadDesk, request_id: str, progress: Progress
    ) -> list[ReadOutcome]:
        ticket = progress.ticket
        if ticket is not None and ticket.first_token >= self._model.vocab_size:
            if not reads.is_reading(request_id):
                return []
            return [reads.fail(request_id, f"first_token={ticket.first_token} is no token")]
        finished = self._scheduler.on_progress(request_id, progress)
        if finished is not None:
            self._let_go(finished)
        return []

    def _collect(self) -> list[TokenDelta]:
        """Wait for the oldest plan that runs, and take in what came out of it."""
        plan, started = self._plans.popleft()
        try:
            result = self._executor.collect()
        except EngineDeadError:
            raise
        except Exception as error:
            return self._fail_step(plan, error)
        self._num_failed_steps = 0
        self._num_steps += 1
        now = time.monotonic()
        # While two plans run, one of them waits for the other.
        self._compute_s += now - max(started, self._last_end)
        self._last_end = now
        self.watch.sampled(plan)
        deltas = self._scheduler.update(plan, result)
        if self._holds is not None:
            for chunk in plan.chunks:
                self._holds.advance(chunk)
        return deltas

    def _fail_step(self, plan: StepPlan, error: Exception) -> list[TokenDelta]:
        """A step that failed costs its own requests and no others. A step that was planned behind
        it cannot be believed: what it alone computed is computed again."""
        log.error("step %d failed: %s: %s", plan.step_id, type(error).__name__, error)
        self._num_failed_steps += 1
        if self._num_failed_steps >= _MAX_FAILED_STEPS:
            raise EngineDeadError(f"{_MAX_FAILED_STEPS} steps in a row failed; last: {error}")
        for chunk in plan.chunks:
            self._scheduler.fail(chunk.request_id, f"the step failed: {error}")
        while self._plans:
            later, _ = self._plans.popleft()
            try:
                self._executor.collect()
            except EngineDeadError:
                raise
            except Exception as also:
                log.error("so did step %d: %s: %s", later.step_id, type(also).__name__, also)
        return self._scheduler.cancel()

    # --- what is going on ---

    def flush_prefix_cache(self) -> int:
        """Drop the cached pages that no request uses; returns how many."""
        return self._cache.evict_all()

    def not_ready(self) -> str | None:
        """Why this engine should get no requests now.

        Raises: EngineDeadError if it never will be ready again.
        """
        self._executor.check()
        for part in (self._server, self._client):
            if part is not None and not part.is_alive:
                raise EngineDeadError("the side channel has ended; its trace is on stderr")
        idle_s = time.monotonic() - self._last_step
        if self._scheduler.has_work() and idle_s > self._max_idle_s:
            return f"requests wait, but no step has run for {idle_s:.0f} s"
        return self._stuck_quarantine()

    def _stuck_quarantine(self) -> str | None:
        """Judged by the oldest: reads that are given up all the time and drain are no fault."""
        now = time.monotonic()
        known = self._quarantined_since
        self._quarantined_since = {
            request_id: known.get(request_id, now) for request_id in self._cache.quarantined_ids()
        }
        quarantined = len(self._quarantined_since)
        waited_s = now - min(self._quarantined_since.values(), default=now)
        limit_s = self._config.transfer.quarantine_s
        if waited_s < limit_s:
            return None
        if waited_s > _END_QUARANTINE_FACTOR * limit_s:
            # Only the end of this process makes its memory safe; a supervisor starts a new one.
            raise EngineDeadError(f"{quarantined} given-up reads have not drained; restart")
        return f"memory of {quarantined} given-up reads has not drained for {waited_s:.0f} s"

    def stats(self) -> dict[str, float]:
        """Counters since start and pools as they are now; `is_idle` 1 when all memory is free."""
        counts = self._scheduler.counts()
        cache = counts.cache
        stats: dict[str, float] = {
            "waiting": counts.waiting,
            "following": counts.following,
            "reading": counts.reading,
            "running": counts.running,
            "steps_total": self._num_steps,
            "compute_seconds_total": self._compute_s,
            "requests_finished_total": counts.finished_total,
            "requests_aborted_total": counts.aborted_total,
            "preemptions_total": counts.preempted_total,
            "failed_reads_total": counts.failed_reads_total,
            "prompt_tokens_total": counts.prompt_tokens_total,
            "output_tokens_total": counts.output_tokens_total,
            "prefix_tokens_total": counts.prefix_tokens_total,
            "prefix_hit_tokens_total": counts.prefix_hit_tokens_total,
            "is_idle": float(cache.is_idle),
        }
        for name, value in asdict(cache.pool).items():
            stats[f"pool_{name}"] = value
        for owner in ("active", "held", "quarantined", "cached"):
            for name, value in asdict(getattr(cache, owner)).items():
                stats[f"{owner}_{name}"] = value
        if self._holds is not None:
            for name, value in asdict(self._holds.counts()).items():
                stats[f"leases_{name}"] = value
        if self._reads is not None:
            for name, value in asdict(self._reads.totals).items():
                stats[f"transfer_{name}"] = value
        if self._pushes is not None:
            for name, value in asdict(self._pushes.totals).items():
                stats[f"pushes_{name}"] = value
        return stats

    def transfer_report(self) -> TransferReport:
        """Series of transfers by peer, without those of peers that have ended, and quarantine."""
        if self._client is not None:
            self.watch.transfers.drop_dead_peers(self._client.is_peer_dead)
        report = self.watch.transfers.report()
        quarantined = self._cache.counts().quarantined
        report.num_quarantined = quarantined.num_sequences
        spec = self._spec
        report.quarantined_nbytes = self._config.parallel.tp * (
            quarantined.num_pages * spec.page_nbytes + quarantined.num_slots * spec.slot_nbytes
        )
        return report

    def close(self) -> None:
        """End ranks and side channels. Memory that peers may read lives until then."""
        if self._client is not None:
            self._client.close()
        if self._server is not None:
            self._server.close()
        self._executor.close()


def _cluster_secret(config: EngineConfig) -> bytes | None:
    """Before anything is loaded: an engine that may not start says so at once."""
    options = config.transfer
    if options.role == "colocated":
        return None
    secret = read_cluster_secret(options.cluster_secret_file)
    if options.role == "prefill":
        require_secret(secret, "side_channel_host", options.side_channel_host)
    return secret
