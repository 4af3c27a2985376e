"""Random workloads on a scheduler and a worker that checks every rule (fake.py).

Requests of every kind arrive, are aborted, read, fail and expire at random, in a pool that is too
small for them, with and without a prefix tree, one plan at a time or two. Whatever happens: each
request that finishes says what it would say alone, memory that is written is never shared,
something advances whenever anything can, and all memory comes back.
"""

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import CapacityError
from tandem.scheduler.request import Request, RequestState, TokenDelta
from tandem.scheduler.scheduler import MAX_RUNNING_PLANS, Scheduler
from tandem.scheduler.step import StepPlan, StepResult
from tests.unit.scheduler.fake import (
    FakeWorker,
    generate,
    make_request,
    make_scheduler,
    make_ticket,
)

KINDS = ("plain", "hold", "read", "generated")


@dataclass
class Running:
    plan: StepPlan
    result: StepResult | None = None  # None while the worker has not begun


@dataclass
class Simulation:
    """An engine around the scheduler. Time is counted in rounds; every event is drawn.

    max_plans: that run at once. A worker does the work of one at any time before it is asked for.
    """

    rng: random.Random
    scheduler: Scheduler
    worker: FakeWorker
    max_plans: int = 1
    running: deque[Running] = field(default_factory=deque)
    requests: dict[str, Request] = field(default_factory=dict)
    expected: dict[str, list[int]] = field(default_factory=dict)
    said: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    reading: dict[str, int] = field(default_factory=dict)  # id -> rounds until its read is over
    arrived: set[str] = field(default_factory=set)  # reads whose bytes came before their end
    draining: dict[str, int] = field(default_factory=dict)
    leases: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str) -> None:
        rng, request_id = self.rng, f"r{len(self.requests)}"
        prompt = self._start() + [rng.randrange(3, 900) for _ in range(rng.randint(1, 60))]
        max_tokens = rng.randint(1, 50)
        text = generate(prompt, max_tokens)
        num_given = {"read": rng.randint(0, 1), "generated": rng.randint(0, max_tokens - 1)}
        generated = tuple(text[: num_given.get(kind, 0)])
        stop = rng.choice(text[len(generated) :] or text)
        stops = {stop} - set(generated) if rng.random() < 0.5 else set()
        request = make_request(
            request_id,
            prompt,
            max_tokens,
            hold=kind == "hold",
            ticket=make_ticket(prompt) if kind == "read" else None,
            generated=generated,
            stop_token_ids=tuple(stops),
        )
        try:
            self.scheduler.add(request)
        except CapacityError:
            assert not self.scheduler.cache.fits_alone(request.max_total_tokens - 1)
            return
        self.requests[request_id] = request
        self.said[request_id] = []
        if stops:
            text = text[: text.index(stop) + 1]
        self.expected[request_id] = text[len(generated) :]
        if kind == "hold":
            self.expected[request_id] = text[:1]

    def _start(self) -> list[int]:
        """A chat goes on, or a few prompts have the same start; often neither."""
        choice = self.rng.randint(0, 3)
        if choice == 0 and self.requests:
            name = self.rng.choice(list(self.requests))
            return (self.requests[name].prompt_token_ids + self.expected[name])[:100]
        return [choice] * 37 if choice == 1 else []

    def take(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            request_id = delta.request_id
            assert request_id not in self.ended
            self.said[request_id] += delta.token_ids
            if delta.finish_reason is not None:
                self.ended[request_id] = delta.finish_reason
            if delta.finish_reason == "hold":
                held = self.scheduler.cache.held(request_id)
                prompt = self.requests[request_id].prompt_token_ids
                assert self.worker.slots[held.slot] == tuple(prompt)
                self.leases[request_id] = self.rng.randint(0, 20)

    def abort(self, request_id: str) -> None:
        request = self.requests[request_id]
        was_reading = request.state is RequestState.READING
        if self.scheduler.abort(request_id) is None:
            return
        self.ended[request_id] = "abort"
        if was_reading:
            self._drain(request_id)

    def _drain(self, request_id: str) -> None:
        if self.reading.pop(request_id, None) is None:
            self.scheduler.cache.drained(request_id)  # never posted
        else:
            self.draining[request_id] = self.rng.randint(0, 20)

    def pass_time(self) -> None:
        for request_id in _due(self.leases):
            self.scheduler.cache.release_held(request_id)
        for request_id in _due(self.draining):
            self.scheduler.cache.drained(request_id)
        for request_id in _due(self.reading):
            if self.rng.random() < 0.7:
                if request_id not in self.arrived:
                    self.worker.fill(self.requests[request_id])
                self.scheduler.on_read_ready(request_id)
            else:
                assert self.scheduler.on_read_failed(request_id, "lost") is not None
                self.draining[request_id] = self.rng.randint(0, 20)

    def round(self, *, may_abort: bool) -> None:
        self.pass_time()
        for request in self.scheduler.next_reads():
            self.reading[request.request_id] = self.rng.randint(0, 6)
            self.arrived.discard(request.request_id)
            if self.rng.random() < 0.5:
                # Bytes arrive as they like, whatever plans still run.
                self.worker.fill(request)
                self.arrived.add(request.request_id)
        counts = self.scheduler.counts()
        plan = self.scheduler.schedule()
        if plan is not None:
            self.running.append(Running(plan))
        elif not self.running:
            waits_for = self.reading or self.draining or self.leases or self.scheduler.next_reads()
            assert waits_for or not (counts.waiting or counts.running), "no progress"
        live = [item for item in self.requests.values() if item.state is not RequestState.FINISHED]
        if may_abort and live and self.rng.random() < 0.1:
            self.abort(self.rng.choice(live).request_id)
        if self.rng.random() < 0.5:
            self.work(self.rng.randint(0, len(self.running)))
        if len(self.running) == self.max_plans or (plan is None and self.running):
            if may_abort and self.rng.random() < 0.05:
                self.work(self.rng.randint(0, len(self.running)))
                self.running.clear()
                self.take(self.scheduler.cancel())
            else:
                self.work(1)
                done = self.running.popleft()
                assert done.result is not None
                self.take(self.scheduler.update(done.plan, done.result))
        self.take(self.scheduler.take_deltas())

    def work(self, num_plans: int) -> None:
        """Let the worker come so far, in the order of plans."""
        for item in list(self.running)[:num_plans]:
            if item.result is None:
                item.result = self.worker.execute(item.plan)

    def finish(self) -> None:
        for _ in range(20_000):
            if not (self.scheduler.has_work() or self.leases or self.draining):
                return
            self.round(may_abort=False)
        raise AssertionError("starved")


def _due(timers: dict[str, int]) -> list[str]:
    due = [name for name, rounds in timers.items() if rounds <= 0]
    for name in due:
        del timers[name]
    for name in timers:
        timers[name] -= 1
    return due


@given(
    st.randoms(use_true_random=False),
    st.integers(3, 9),
    st.integers(1, 6),
    st.sampled_from([1, 7, 16, 33, 128]),
    st.integers(1, 6),
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=14),
    st.booleans(),
    st.integers(1, MAX_RUNNING_PLANS),
)
def test_any_workload_ends_with_right_texts_and_full_pools(
    rng, num_slabs, pages_per_slab, budget, max_num_seqs, kinds, has_prefix_tree, max_plans
):
    scheduler = make_scheduler(
        num_slabs=num_slabs,
        pages_per_slab=pages_per_slab,
        budget_tokens=budget,
        max_num_seqs=max_num_seqs,
        has_prefix_tree=has_prefix_tree,
    )
    simulation = Simulation(rng, scheduler, FakeWorker(scheduler), max_plans)
    for kind in kinds:
        simulation.add(kind)
        for _ in range(rng.randint(0, 6)):
            simulation.round(may_abort=True)
    simulation.finish()
    assert set(simulation.ended) == set(simulation.requests)
    for request_id, reason in simulation.ended.items():
        said, expected = simulation.said[request_id], simulation.expected[request_id]
        if reason == "abort":
            assert said == expected[: len(said)]
        else:
            assert reason in ("length", "hold", "stop")
            assert said == expected
    assert scheduler.cache.counts().is_idle
    scheduler.cache.evict_all()
    assert scheduler.cache.counts().pool.is_full
    counts = scheduler.counts()
    assert (counts.waiting, counts.reading, counts.running) == (0, 0, 0)
    assert counts.finished_total + counts.aborted_total == len(simulation.requests)


@pytest.mark.parametrize("max_plans", [1, MAX_RUNNING_PLANS])
def test_hundreds_of_mixed_requests_leak_nothing(max_plans):
    rng = random.Random(5)
    scheduler = make_scheduler(num_slabs=12, budget_tokens=96, max_num_seqs=6, has_prefix_tree=True)
    idle = scheduler.cache.counts().pool
    simulation = Simulation(rng, scheduler, FakeWorker(scheduler), max_plans)
    for _ in range(300):
        simulation.add(rng.choice(KINDS))
        for _ in range(rng.randint(0, 4)):
            simulation.round(may_abort=True)
    simulation.finish()
    assert scheduler.cache.counts().is_idle
    scheduler.cache.evict_all()
    assert scheduler.cache.counts().pool == idle
    assert len(simulation.ended) == len(simulation.requests)
    assert set(simulation.ended.values()) == {"abort", "length", "hold", "stop"}
    assert scheduler.counts().preempted_total > 0
    assert scheduler.counts().failed_reads_total > 0
    assert scheduler.counts().prefix_hit_tokens_total > 0
    assert scheduler.counts().cache.cached.num_evicted_pages > 0
