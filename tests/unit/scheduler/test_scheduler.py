"""One scenario a test; random workloads are in test_workloads.py."""

import time

import msgspec
import pytest

from tandem.errors import RequestError
from tandem.scheduler.policy import capacity_table
from tandem.scheduler.request import RequestState
from tandem.scheduler.step import PENDING_TOKEN, Sample, StepResult
from tandem.state.ticket import TokenLogprob
from tests.unit.scheduler.fake import (
    EOS,
    FakeWorker,
    generate,
    make_request,
    make_scheduler,
    make_ticket,
    next_token,
    outputs,
    reasons,
)


def prompt_of(request_id: str, num_tokens: int) -> list[int]:
    return make_request(request_id, num_tokens).prompt_token_ids


def read_request(request_id: str, num_tokens: int, max_tokens: int = 4, **options):
    """A request whose prompt was prefilled elsewhere."""
    prompt = prompt_of(request_id, num_tokens)
    first = options.pop("first_token", None)
    return make_request(
        request_id, prompt, max_tokens, ticket=make_ticket(prompt, first), **options
    )


# --- chunks and rows ---


@pytest.mark.parametrize("budget", [1, 2, 3, 15, 16, 17, 39, 40, 64])
@pytest.mark.parametrize("num_prompt", [1, 2, 3, 16, 40, 48])
def test_any_budget_chunks_any_prompt_to_the_same_text(budget, num_prompt):
    scheduler = make_scheduler(budget_tokens=budget)
    worker = FakeWorker(scheduler)
    request = make_request("a", num_prompt, 20)
    scheduler.add(request)
    deltas = worker.run()
    assert outputs(deltas)["a"] == generate(request.prompt_token_ids, 20)
    assert reasons(deltas) == {"a": "length"}
    assert all(plan.num_tokens <= budget for plan in worker.steps)
    assert scheduler.cache.counts().is_idle


def test_decode_rows_come_first_and_prompts_share_the_rest():
    scheduler = make_scheduler(budget_tokens=10)
    worker = FakeWorker(scheduler)
    for request_id in ("a", "b"):
        scheduler.add(make_request(request_id, 3, 9))
    worker.step()
    scheduler.add(make_request("long", 30))
    plan = scheduler.schedule()
    assert [chunk.request_id for chunk in plan.chunks] == ["a", "b", "long"]
    assert [len(chunk.token_ids) for chunk in plan.chunks] == [1, 1, 8]
    assert [chunk.sample for chunk in plan.chunks] == [True, True, False]
    assert plan.num_decode == 2


def test_a_first_chunk_of_one_token_has_no_state_and_is_no_decode_row():
    scheduler = make_scheduler(budget_tokens=3)
    worker = FakeWorker(scheduler)
    scheduler.add(make_request("a", 1, 9))
    plan = scheduler.schedule()
    assert (plan.num_decode, plan.chunks[0].start) == (0, 0)
    scheduler.update(plan, worker.execute(plan))
    scheduler.add(make_request("b", 1, 9))
    worker.step()
    scheduler.add(make_request("c", 5, 9))
    plan = scheduler.schedule()
    last = plan.chunks[-1]
    assert (last.request_id, last.start, len(last.token_ids)) == ("c", 0, 1)
    assert plan.num_decode == 2
    scheduler.update(plan, worker.execute(plan))
    plan = scheduler.schedule()
    # Continued with one token, it has state and is a row like any other.
    assert plan.num_decode == 3
    assert [chunk.sample for chunk in plan.chunks if chunk.request_id == "c"] == [False]


def test_every_row_may_run_when_rows_exceed_the_budget():
    scheduler = make_scheduler(budget_tokens=2, num_slabs=20)
    requests = [make_request(f"r{index}", 2, 6) for index in range(6)]
    for request in requests:
        scheduler.add(request)
    found = outputs(FakeWorker(scheduler).run())
    assert found == {
        request.request_id: generate(request.prompt_token_ids, 6) for request in requests
    }


def test_pages_are_told_once():
    scheduler = make_scheduler(budget_tokens=20)
    scheduler.add(make_request("a", 40, 12))
    worker = FakeWorker(scheduler)
    worker.run()
    told = [
        (chunk.first_page, len(chunk.pages))
        for plan in worker.steps
        for chunk in plan.chunks
        if chunk.pages
    ]
    assert told == [(0, 3), (3, 1)]


def test_workers_hear_of_a_request_once_and_forget_it_once():
    scheduler = make_scheduler()
    worker = FakeWorker(scheduler)
    for request_id in ("a", "b"):
        scheduler.add(make_request(request_id, 4, 3))
    worker.run()
    scheduler.add(make_request("c", 4, 1))
    worker.run()
    new = [new.request_id for plan in worker.steps for new in plan.new_requests]
    assert new == ["a", "b", "c"]
    assert sorted(worker.steps[-1].forget) == ["a", "b"]


def test_generated_tokens_count_but_are_not_reported_again():
    scheduler = make_scheduler()
    prompt = prompt_of("a", 20)
    text = generate(prompt, 6)
    scheduler.add(make_request("a", prompt, 6, generated=tuple(text[:4])))
    worker = FakeWorker(scheduler)
    deltas = worker.run()
    assert outputs(deltas)["a"] == text[4:]
    assert worker.steps[0].new_requests[0].generated == text[:4]


def test_generated_tokens_that_already_end_the_request():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 20, 6, generated=(5, EOS)))
    (delta,) = scheduler.take_deltas()
    assert (delta.token_ids, delta.finish_reason, delta.stop_token_id) == ([], "stop", EOS)
    assert not scheduler.has_work()


def test_finish_in_the_step_that_samples():
    scheduler = make_scheduler()
    worker = FakeWorker(scheduler, {"a": {2: EOS}, "b": {0: 9}})
    scheduler.add(make_request("a", 4, 10))
    scheduler.add(make_request("b", 4, 10, stop_token_ids=(9,)))
    scheduler.add(make_request("c", 4, 1))
    deltas = worker.step()
    assert reasons(deltas) == {"b": "stop", "c": "length"}
    assert {delta.request_id: delta.stop_token_id for delta in deltas} == {
        "a": None,
        "b": 9,
        "c": None,
    }
    assert scheduler.cache.counts().active.num_sequences == 1
    deltas = worker.run()
    assert reasons(deltas) == {"a": "stop"}
    assert outputs(deltas)["a"][-1] == EOS


def test_logprobs_are_reported_when_asked_for():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 4, 1, logprobs=0))
    scheduler.add(make_request("b", 4, 1))
    plan = scheduler.schedule()
    logprob = TokenLogprob(-0.5)
    samples = [Sample("a", 5, logprob), Sample("b", 5, logprob)]
    first, second = scheduler.update(plan, StepResult(plan.step_id, samples))
    assert first.logprobs == [logprob]
    assert first.num_prompt_tokens == 4
    assert second.logprobs is None


# --- admission ---


def test_requests_wait_for_slots_though_pages_are_free():
    # 4 slabs: 3 slots leave one slab of pages.
    scheduler = make_scheduler(num_slabs=4, max_num_seqs=100)
    worker = FakeWorker(scheduler)
    requests = [make_request(f"r{index}", 2, 3) for index in range(9)]
    for request in requests:
        scheduler.add(request)
    worker.step()
    assert (scheduler.counts().running, scheduler.counts().waiting) == (3, 6)
    assert scheduler.cache.counts().pool.free_pages == 1
    assert len(reasons(worker.run())) == 9


def test_rows_never_exceed_max_num_seqs():
    scheduler = make_scheduler(num_slabs=40, max_num_seqs=3)
    worker = FakeWorker(scheduler)
    for index in range(10):
        scheduler.add(make_request(f"r{index}", 2, 3))
    deltas = worker.run()
    assert len(reasons(deltas)) == 10
    assert max(len(plan.chunks) for plan in worker.steps) == 3


def test_first_come_first_served():
    """A short newcomer does not pass a long prompt that waits for memory."""
    scheduler = make_scheduler(num_slabs=4)
    worker = FakeWorker(scheduler)
    scheduler.add(make_request("a", 100, 2))
    worker.step()
    scheduler.add(make_request("long", 100, 2))
    scheduler.add(make_request("short", 2, 2))
    worker.step()
    assert scheduler.counts().waiting == 2
    order = [delta.request_id for delta in worker.run() if delta.finish_reason]
    assert order == ["a", "long", "short"]


def test_a_prompt_that_is_half_prefilled_never_waits_for_pages():
    """Many long prompts at once, pool of two: no deadlock and no recompute."""
    scheduler = make_scheduler(num_slabs=8, budget_tokens=16)
    worker = FakeWorker(scheduler)
    requests = [make_request(f"r{index}", 150, 1) for index in range(8)]
    for request in requests:
        scheduler.add(request)
    assert len(reasons(worker.run())) == 8
    assert scheduler.counts().preempted_total == 0
    assert scheduler.counts().prompt_tokens_total == 8 * 150


def test_short_request_starts_soon_after_long_ones_are_aborted():
    scheduler = make_scheduler(num_slabs=100, budget_tokens=32)
    worker = FakeWorker(scheduler)
    for index in range(10):
        scheduler.add(make_request(f"long{index}", 200, 4))
    worker.step()
    for index in range(10):
        scheduler.abort(f"long{index}")
    scheduler.add(make_request("short", 10, 1))
    assert reasons(worker.step()) == {"short": "length"}


def test_duplicate_id_is_refused_while_the_first_one_lives():
    scheduler = make_scheduler()
    worker = FakeWorker(scheduler)
    scheduler.add(make_request("a", 4, 2))
    with pytest.raises(RequestError, match="request_id=a is in use"):
        scheduler.add(make_request("a", 4, 2))
    assert len(reasons(worker.run())) == 1
    scheduler.add(make_request("a", 4, 2))
    assert len(reasons(worker.run())) == 1


def test_a_refused_request_leaves_the_others_alone():
    scheduler = make_scheduler()
    worker = FakeWorker(scheduler)
    scheduler.add(make_request("a", 4, 3))
    worker.step()
    before = scheduler.counts()
    with pytest.raises(RequestError):
        scheduler.add(make_request("b", []))
    assert scheduler.counts() == before
    assert reasons(worker.run()) == {"a": "length"}


@pytest.mark.parametrize("num_tokens", [1, 30, 64, 100, 200])
@pytest.mark.parametrize(("pages_per_slab", "num_slabs"), [(4, 40), (16, 20), (1, 60)])
def test_forecast_of_concurrency_is_what_runs(num_tokens, pages_per_slab, num_slabs):
    scheduler = make_scheduler(
        num_slabs=num_slabs, pages_per_slab=pages_per_slab, max_num_seqs=64, budget_tokens=10**6
    )
    (row,) = capacity_table(scheduler.cache.geometry, 64, (num_tokens,))
    for index in range(70):
        scheduler.add(make_request(f"r{index}", num_tokens, 2))
    worker = FakeWorker(scheduler)
    worker.step()
    assert len(worker.steps[0].chunks) == row.num_sequences
    worker.run()


@pytest.mark.parametrize(("page_nbytes", "slot_nbytes"), [(256, 0), (0, 1024)])
def test_models_with_one_kind_of_state(page_nbytes, slot_nbytes):
    scheduler = make_scheduler(
        num_slabs=6, page_nbytes=page_nbytes, slot_nbytes=slot_nbytes, budget_tokens=20
    )
    worker = FakeWorker(scheduler)
    requests = [make_request(f"r{index}", 30, 12) for index in range(9)]
    for request in requests:
        scheduler.add(request)
    found = outputs(worker.run())
    assert found == {item.request_id: generate(item.prompt_token_ids, 12) for item in requests}
    assert scheduler.cache.counts().is_idle


# --- preemption ---


def test_preempted_requests_say_the_same():
    """Pool of about one and a half requests: the younger is preempted, also twice."""
    scheduler = make_scheduler(num_slabs=4, pages_per_slab=2, budget_tokens=32)
    worker = FakeWorker(scheduler)
    requests = [make_request(f"r{index}", 10, 40) for index in range(3)]
    for request in requests:
        scheduler.add(request)
    deltas = worker.run()
    assert outputs(deltas) == {
        item.request_id: generate(item.prompt_token_ids, 40) for item in requests
    }
    assert scheduler.counts().preempted_total >= 1
    assert requests[0].num_preemptions == 0
    assert scheduler.cache.counts().is_idle


def test_a_preempted_request_starts_over_from_zero_with_a_new_page_table():
    scheduler = make_scheduler(num_slabs=4, pages_per_slab=1, budget_tokens=64)
    worker = FakeWorker(scheduler)
    a, b = make_request("a", 14, 20), make_request("b", 15, 20)
    scheduler.add(a)
    scheduler.add(b)
    while not b.num_preemptions:
        worker.step()
    assert b.state is RequestState.WAITING
    assert b.num_computed == 0
    assert b.output_token_ids
    assert scheduler.cache.counts().active.num_sequences == 1
    worker.run()
    again = [chunk for plan in worker.steps for chunk in plan.chunks if chunk.request_id == "b"]
    restarts = [chunk for chunk in again if chunk.start == 0]
    assert len(restarts) == 2
    assert restarts[1].first_page == 0
    assert len(restarts[1].pages) == 2
    assert [new.request_id for plan in worker.steps for new in plan.new_requests] == ["a", "b"]


def test_preempted_requests_keep_their_place_in_the_queue():
    scheduler = make_scheduler(num_slabs=6, pages_per_slab=1, budget_tokens=64)
    worker = FakeWorker(scheduler)
    for request_id in ("a", "b", "c", "d", "e"):
        scheduler.add(make_request(request_id, 12, 24))
    order = [delta.request_id for delta in worker.run() if delta.finish_reason]
    assert order == ["a", "b", "c", "d", "e"]
    assert scheduler.counts().preempted_total > 1


def test_a_preempted_request_does_not_return_into_the_last_page():
    """Else the next row that needs a page would throw it out again at once."""
    scheduler = make_scheduler(num_slabs=4, pages_per_slab=1, slot_nbytes=0)
    worker = FakeWorker(scheduler)
    a, c, b = make_request("a", 15, 30), make_request("c", 8, 6), make_request("b", 17, 20)
    for request in (a, c, b):  # 1 + 1 + 2 of 4 pages
        scheduler.add(request)
    while c.state is not RequestState.FINISHED:
        worker.step()
    assert b.state is RequestState.WAITING  # a took a second page
    assert scheduler.cache.counts().pool.free_pages == 2  # what b needs, and none to spare
    worker.run()
    assert b.num_preemptions == scheduler.counts().preempted_total == 1
    assert b.output_token_ids == generate(b.prompt_token_ids, 20)


def test_everybody_returns_to_the_queue_in_order_of_arrival():
    scheduler = make_scheduler(num_slabs=12)
    for request in (make_request("x", 4), make_request("y", 4), read_request("z", 4)):
        scheduler.add(request)
    plan = scheduler.schedule()
    scheduler.next_reads()
    scheduler.add(make_request("late", 4))
    scheduler.cancel()
    scheduler.on_read_failed("z", "lost")
    plan = scheduler.schedule()
    assert [chunk.request_id for chunk in plan.chunks] == ["x", "y", "z", "late"]


# --- abort ---


def test_abort_in_each_state_frees_everything():
    scheduler = make_scheduler(num_slabs=6, max_num_seqs=2, budget_tokens=8)
    worker = FakeWorker(scheduler)
    for request_id in ("decoding", "prefilling", "waiting"):
        num_prompt = 4 if request_id == "decoding" else 20
        scheduler.add(make_request(request_id, num_prompt, 50))
    worker.step()
    assert scheduler.abort("nobody") is None
    for request_id in ("waiting", "prefilling", "decoding"):
        request = scheduler.abort(request_id)
        assert request.state is RequestState.FINISHED
        assert scheduler.abort(request_id) is None
    assert not scheduler.has_work()
    assert scheduler.cache.counts().is_idle
    assert scheduler.take_deltas() == []
    assert scheduler.counts().aborted_total == 3
    scheduler.add(make_request("next", 4, 2))
    assert reasons(worker.run()) == {"next": "length"}
    assert sorted(worker.steps[1].forget) == ["decoding", "prefilling"]


def test_abort_while_the_step_runs_frees_after_it_and_drops_its_sample():
    """A read posted into memory that a running step still writes would be overwritten."""
    scheduler = make_scheduler()
    worker = FakeWorker(scheduler)
    scheduler.add(make_request("a", 4, 9))
    scheduler.add(make_request("b", 4, 2))
    plan = scheduler.schedule()
    old = scheduler.cache.state("a")
    scheduler.abort("a")
    assert scheduler.cache.counts().active.num_sequences == 2
    scheduler.add(read_request("read", 4))
    (read,) = scheduler.next_reads()
    assert scheduler.cache.state(read.request_id).slot != old.slot
    with pytest.raises(RequestError, match="in use"):
        scheduler.add(make_request("a", 4, 9))
    deltas = scheduler.update(plan, worker.execute(plan))
    # The step's own delta and the first token of the read, none of the aborted one.
    assert {delta.request_id for delta in deltas} == {"b", "read"}
    assert scheduler.cache.counts().active.num_sequences == 2
    scheduler.add(make_request("a", 4, 2))


def test_fail_reports_an_error_of_one_request():
    scheduler = make_scheduler()
    worker = FakeWorker(scheduler)
    scheduler.add(make_request("a", 4, 3))
    scheduler.add(make_request("b", 4, 3))
    worker.step()
    scheduler.fail("a", "broken")
    assert scheduler.fail("a", "again") is None
    deltas = worker.run()
    assert reasons(deltas) == {"a": "error", "b": "length"}
    assert next(delta.error for delta in deltas if delta.error) == "broken"
    assert scheduler.cache.counts().is_idle


@pytest.mark.parametrize("has_run", [False, True])
def test_a_failed_step_ends_what_the_caller_fails_and_restarts_the_rest(has_run):
    scheduler = make_scheduler()
    worker = FakeWorker(scheduler)
    requests = {name: make_request(name, 10, 6) for name in ("old", "gone")}
    for request in requests.values():
        scheduler.add(request)
    worker.step()
    scheduler.abort("gone")
    for name in ("failed", "new", "aborted"):
        requests[name] = make_request(name, 10, 6)
        scheduler.add(requests[name])
    plan = scheduler.schedule()
    if has_run:
        worker.execute(plan)
    scheduler.abort("aborted")
    scheduler.fail("failed", "the step failed")
    deltas = scheduler.cancel()
    assert reasons(deltas) == {"failed": "error"}
    deltas = worker.run()
    assert reasons(deltas) == {"old": "length", "new": "length"}
    for name in ("old", "new"):
        assert requests[name].output_token_ids == generate(requests[name].prompt_token_ids, 6)
    assert not {"gone", "failed", "aborted"} & set(worker.tokens)
    assert scheduler.cache.counts().is_idle


# --- hold: a prefill engine ---


def test_hold_keeps_memory_and_reports_the_first_token():
    scheduler = make_scheduler(budget_tokens=16)
    worker = FakeWorker(scheduler)
    request = make_request("a", 40, 9, hold=True)
    scheduler.add(request)
    (delta,) = worker.run()
    assert delta.token_ids == generate(request.prompt_token_ids, 1)
    assert (delta.finish_reason, delta.ticket) == ("hold", None)
    held = scheduler.cache.held("a")
    assert len(held.pages) == 3
    assert worker.slots[held.slot] == tuple(request.prompt_token_ids)
    counts = scheduler.cache.counts()
    assert (counts.held.num_sequences, counts.active.num_sequences) == (1, 0)
    assert not scheduler.has_work()
    scheduler.cache.release_held("a")
    assert scheduler.cache.counts().is_idle


@pytest.mark.parametrize(
    ("max_tokens", "first_token", "reason"), [(1, 5, "length"), (9, EOS, "stop"), (9, 9, "stop")]
)
def test_hold_finishes_when_the_first_token_ends_the_request(max_tokens, first_token, reason):
    scheduler = make_scheduler()
    worker = FakeWorker(scheduler, {"a": {0: first_token}})
    scheduler.add(make_request("a", 40, max_tokens, hold=True, stop_token_ids=(9,)))
    (delta,) = worker.run()
    assert (delta.token_ids, delta.finish_reason) == ([first_token], reason)
    assert scheduler.cache.counts().is_idle


def test_hold_finishes_when_the_models_length_is_reached():
    scheduler = make_scheduler(max_model_len=41)
    scheduler.add(make_request("a", 40, None, max_model_len=41, hold=True))
    assert reasons(FakeWorker(scheduler).run()) == {"a": "length"}
    assert scheduler.cache.counts().is_idle


def test_admission_waits_when_held_prefills_fill_the_pool():
    scheduler = make_scheduler(num_slabs=4)
    worker = FakeWorker(scheduler)
    for request_id in ("a", "b", "c", "d"):
        scheduler.add(make_request(request_id, 20, 9, hold=True))
    deltas = worker.step()
    assert reasons(deltas) == {"a": "hold", "b": "hold"}
    assert worker.step() is None
    assert scheduler.has_work()
    scheduler.cache.release_held("a")
    assert reasons(worker.step()) == {"c": "hold"}
    for request_id in ("b", "c"):
        scheduler.cache.release_held(request_id)
    assert reasons(worker.run()) == {"d": "hold"}


def test_late_abort_of_a_finished_prefill_is_ignored():
    scheduler = make_scheduler()
    worker = FakeWorker(scheduler)
    scheduler.add(make_request("a", 20, 9, hold=True))
    worker.run()
    assert scheduler.abort("a") is None
    assert scheduler.cache.is_held("a")
    with pytest.raises(RequestError, match="in use"):
        scheduler.add(make_request("a", 20, 9, hold=True))
    scheduler.cache.release_held("a")
    assert scheduler.cache.counts().is_idle


# --- reads: a decode engine ---


@pytest.mark.parametrize("num_prompt", [1, 2, 3, 15, 16, 17, 32, 40])
def test_a_read_request_continues_at_its_first_token(num_prompt):
    """Also when prompt and first token end on, before or after the edge of a page."""
    scheduler = make_scheduler()
    worker = FakeWorker(scheduler)
    request = read_request("a", num_prompt, 20)
    scheduler.add(request)
    (first,) = scheduler.take_deltas()
    assert first.token_ids == generate(request.prompt_token_ids, 1)
    (read,) = scheduler.next_reads()
    assert read.state is RequestState.READING
    assert len(scheduler.cache.state("a").pages) == -(-(num_prompt + 1) // 16)
    assert scheduler.schedule() is None
    worker.fill(read)
    scheduler.on_read_ready("a")
    text = first.token_ids + outputs(worker.run())["a"]
    assert text == generate(request.prompt_token_ids, 20)
    chunks = [chunk for plan in worker.steps for chunk in plan.chunks]
    assert (chunks[0].start, chunks[0].token_ids) == (num_prompt, first.token_ids)
    assert worker.steps[0].num_decode == 1
    assert scheduler.counts().prompt_tokens_total == 0
    assert scheduler.cache.counts().is_idle


def test_first_token_is_not_reported_again_when_the_request_brings_it():
    scheduler = make_scheduler()
    prompt = prompt_of("a", 20)
    text = generate(prompt, 5)
    ticket = make_ticket(prompt)
    scheduler.add(make_request("a", prompt, 5, ticket=ticket, generated=(text[0],)))
    assert scheduler.take_deltas() == []
    worker = FakeWorker(scheduler)
    assert outputs(worker.run())["a"] == text[1:]


def test_more_generated_tokens_than_the_ticket_covers_are_fed_here():
    scheduler = make_scheduler()
    prompt = prompt_of("a", 20)
    text = generate(prompt, 9)
    scheduler.add(
        make_request("a", prompt, 9, ticket=make_ticket(prompt), generated=tuple(text[:3]))
    )
    worker = FakeWorker(scheduler)
    assert outputs(worker.run())["a"] == text[3:]
    (chunk,) = worker.steps[0].chunks
    assert (chunk.start, chunk.token_ids, worker.steps[0].num_decode) == (20, text[:3], 0)


@pytest.mark.parametrize(
    ("max_tokens", "first_token", "reason"), [(1, 5, "length"), (9, EOS, "stop"), (9, 9, "stop")]
)
def test_a_first_token_that_ends_the_request_needs_no_read(max_tokens, first_token, reason):
    scheduler = make_scheduler()
    request = read_request(
        "a", 20, max_tokens, first_token=first_token, stop_token_ids=(9,), logprobs=0
    )
    scheduler.add(request)
    (delta,) = scheduler.take_deltas()
    assert (delta.token_ids, delta.finish_reason) == ([first_token], reason)
    assert request.state is RequestState.FINISHED
    assert scheduler.next_reads() == []
    assert not scheduler.has_work()


def test_the_first_tokens_logprob_is_reported():
    scheduler = make_scheduler()
    prompt = prompt_of("a", 20)
    logprob = TokenLogprob(-1.5, ((5, -1.5),))
    ticket = msgspec.structs.replace(make_ticket(prompt), first_logprob=logprob)
    scheduler.add(make_request("a", prompt, 4, ticket=ticket, logprobs=1))
    (delta,) = scheduler.take_deltas()
    assert delta.logprobs == [logprob]


def test_reads_take_rows_and_wait_for_memory_in_order():
    scheduler = make_scheduler(num_slabs=40, max_num_seqs=3)
    for index in range(5):
        scheduler.add(read_request(f"r{index}", 20))
    assert [request.request_id for request in scheduler.next_reads()] == ["r0", "r1", "r2"]
    assert scheduler.next_reads() == []
    assert scheduler.counts().reading == 3
    scheduler.abort("r1")
    scheduler.cache.drained("r1")
    assert [request.request_id for request in scheduler.next_reads()] == ["r3"]


def test_reads_are_admitted_though_the_budget_is_spent():
    scheduler = make_scheduler(budget_tokens=8)
    scheduler.add(make_request("long", 100))
    scheduler.add(read_request("r", 20))
    worker = FakeWorker(scheduler)
    worker.step()
    assert [request.request_id for request in scheduler.next_reads()] == ["r"]


def test_an_aborted_read_keeps_its_memory_until_it_is_drained():
    scheduler = make_scheduler(num_slabs=3)
    worker = FakeWorker(scheduler)
    scheduler.add(read_request("a", 40))
    (read,) = scheduler.next_reads()
    state = scheduler.cache.state("a")
    assert scheduler.abort("a") is read
    assert read.ticket is not None  # the caller still has to release it at the source
    counts = scheduler.cache.counts()
    assert (counts.active.num_sequences, counts.quarantined.num_pages) == (0, len(state.pages))
    scheduler.on_read_ready("a")
    assert scheduler.on_read_failed("a", "late") is None
    assert not scheduler.cache.counts().is_idle
    with pytest.raises(RequestError, match="in use"):
        scheduler.add(make_request("a", 4))
    # A newcomer waits; it never gets the pages that bytes may still arrive in.
    scheduler.take_deltas()
    scheduler.add(make_request("b", 40, 2))
    assert worker.step() is None
    scheduler.cache.drained("a")
    assert reasons(worker.run()) == {"b": "length"}
    assert scheduler.cache.counts().is_idle


def test_an_aborted_read_is_not_handed_to_the_engine():
    scheduler = make_scheduler()
    scheduler.add(make_request("x", 3))
    scheduler.add(read_request("a", 40))
    scheduler.add(read_request("b", 40))
    plan = scheduler.schedule()
    scheduler.abort("a")
    scheduler.cache.drained("a")
    assert [request.request_id for request in scheduler.next_reads()] == ["b"]
    assert plan is not None


def test_a_failed_read_is_recomputed_in_other_memory():
    scheduler = make_scheduler(num_slabs=16)
    worker = FakeWorker(scheduler)
    others = [make_request(f"r{index}", 10, 20) for index in range(3)]
    for request in others:
        scheduler.add(request)
    worker.step()
    request = read_request("a", 40, 8)
    scheduler.add(request)
    (first,) = scheduler.take_deltas()
    scheduler.next_reads()
    state = scheduler.cache.state("a")
    assert scheduler.on_read_failed("a", "peer is gone") is request
    assert scheduler.on_read_failed("a", "reported twice") is None
    deltas = worker.run()
    assert first.token_ids + outputs(deltas)["a"] == generate(request.prompt_token_ids, 8)
    assert len(reasons(deltas)) == 4
    used = {
        page
        for plan in worker.steps
        for chunk in plan.chunks
        if chunk.request_id == "a"
        for page in chunk.pages
    }
    assert used
    assert not used & set(state.pages)
    assert scheduler.cache.counts().quarantined.num_sequences == 1
    scheduler.cache.drained("a")
    assert scheduler.cache.counts().is_idle
    assert scheduler.counts().failed_reads_total == 1


def test_a_failed_read_fails_its_request_alone_when_told_so():
    scheduler = make_scheduler(recompute_failed_reads=False)
    worker = FakeWorker(scheduler)
    scheduler.add(make_request("b", 10, 3))
    scheduler.add(read_request("a", 40))
    scheduler.next_reads()
    plan = scheduler.schedule()
    scheduler.next_reads()
    scheduler.on_read_failed("a", "peer is gone")
    deltas = scheduler.update(plan, worker.execute(plan)) + worker.run()
    assert reasons(deltas) == {"a": "error", "b": "length"}
    assert next(delta.error for delta in deltas if delta.error) == "peer is gone"
    scheduler.cache.drained("a")
    assert scheduler.cache.counts().is_idle


def test_a_read_request_that_is_preempted_computes_its_prompt_here():
    scheduler = make_scheduler(num_slabs=4, pages_per_slab=2, budget_tokens=64)
    worker = FakeWorker(scheduler)
    a, b = make_request("a", 30, 34), read_request("b", 14, 40)
    scheduler.add(a)
    worker.step()
    scheduler.add(b)
    found = outputs(worker.run())
    assert b.num_preemptions >= 1
    assert found["a"][-1] == generate(a.prompt_token_ids, 34)[-1]
    assert found["b"] == generate(b.prompt_token_ids, 40)
    assert scheduler.cache.counts().is_idle


def test_a_row_waits_for_reads_instead_of_preempting_them():
    # 4 pages beside the two slots: 2 for the read, 2 for the row, which needs a third.
    scheduler = make_scheduler(num_slabs=4, pages_per_slab=2)
    worker = FakeWorker(scheduler)
    a = make_request("a", 15, 30)
    scheduler.add(a)
    worker.step()
    b = read_request("b", 20, 2)
    scheduler.add(b)
    assert scheduler.next_reads() == [b]
    while worker.step() is not None:
        pass
    assert (a.state, b.state) == (RequestState.RUNNING, RequestState.READING)
    assert scheduler.counts().preempted_total == 0
    worker.fill(b)
    scheduler.on_read_ready("b")
    worker.run()
    assert a.output_token_ids == generate(a.prompt_token_ids, 30)
    assert b.output_token_ids == generate(b.prompt_token_ids, 2)


# --- two plans at once ---


@pytest.mark.parametrize("budget", [1, 2, 3, 16, 17, 64])
@pytest.mark.parametrize("num_prompt", [1, 2, 16, 40])
def test_plans_that_overlap_give_the_same_text(budget, num_prompt):
    scheduler = make_scheduler(budget_tokens=budget)
    worker = FakeWorker(scheduler)
    request = make_request("a", num_prompt, 20)
    scheduler.add(request)
    deltas = worker.run(overlap=True)
    assert outputs(deltas)["a"] == generate(request.prompt_token_ids, 20)
    assert reasons(deltas) == {"a": "length"}
    # Its end was known: no plan more than one after the other.
    assert sum(plan.num_tokens for plan in worker.steps) == num_prompt + 19
    assert scheduler.cache.counts().is_idle


def test_two_plans_at_a_time():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 4))
    assert [chunk.token_ids for chunk in scheduler.schedule().chunks] != [[PENDING_TOKEN]]
    assert [chunk.token_ids for chunk in scheduler.schedule().chunks] == [[PENDING_TOKEN]]
    with pytest.raises(AssertionError, match="schedule"):
        scheduler.schedule()


def test_plans_end_in_their_order():
    scheduler = make_scheduler()
    worker = FakeWorker(scheduler)
    scheduler.add(make_request("a", 4))
    first, second = scheduler.schedule(), scheduler.schedule()
    worker.execute(first)
    with pytest.raises(AssertionError, match="oldest"):
        scheduler.update(second, worker.execute(second))


def test_a_token_is_pending_for_one_plan_alone():
    """A row without a place in the plan after its sample is fed the token itself later."""
    scheduler = make_scheduler(budget_tokens=1)
    worker = FakeWorker(scheduler)
    for name in ("a", "b"):
        scheduler.add(make_request(name, 1, 5))
    worker.run(overlap=True)
    fed = [chunk.token_ids[0] for plan in worker.steps for chunk in plan.chunks if chunk.start]
    assert PENDING_TOKEN in fed
    scheduler = make_scheduler(budget_tokens=2)
    worker = FakeWorker(scheduler)
    for name in ("a", "b", "c"):
        scheduler.add(make_request(name, 1, 5))
    deltas = worker.run(overlap=True)
    assert outputs(deltas)["c"] == generate(prompt_of("c", 1), 5)


def test_a_stop_token_is_found_late_and_the_row_behind_it_is_thrown_away():
    scheduler = make_scheduler()
    worker = FakeWorker(scheduler, {"a": {2: EOS}})
    scheduler.add(make_request("a", 4, 9))
    scheduler.add(make_request("b", 4, 9))
    deltas = [worker.overlapped_step() for _ in range(4)]
    assert reasons(deltas[3]) == {"a": "stop"}
    # The plan behind still writes to its memory, which nobody gets before that has ended.
    assert scheduler.cache.counts().active.num_sequences == 2
    with pytest.raises(RequestError, match="in use"):
        scheduler.add(make_request("a", 4, 9))
    last = worker.overlapped_step()
    assert {delta.request_id for delta in last} == {"b"}
    assert scheduler.cache.counts().active.num_sequences == 1
    assert scheduler.counts().output_tokens_total == 3 + 4
    scheduler.add(make_request("a", 4, 2))
    assert reasons(worker.run(overlap=True)) == {"a": "length", "b": "length"}


def test_a_thrown_away_row_leaves_no_page_of_its_own_in_the_tree():
    """Its token fills a page whose K/V nobody may share: the request ended before."""
    scheduler = make_scheduler(has_prefix_tree=True)
    prompt = prompt_of("a", 29)
    worker = FakeWorker(scheduler, {"a": {2: EOS}})
    scheduler.add(make_request("a", prompt, 9))
    for _ in range(5):
        worker.overlapped_step()
    # Computed and told of: 31 tokens; the row behind the stop token was the 32nd.
    assert sum(plan.num_tokens for plan in worker.steps) == 32
    assert scheduler.cache.counts().cached.num_pages == 1
    assert scheduler.cache.counts().is_idle


@pytest.mark.parametrize("max_tokens", [1, 9])
def test_nothing_is_planned_behind_a_held_prefill(max_tokens):
    """Its slot is the state after the prompt: a reader may fetch it as soon as it is told of."""
    scheduler = make_scheduler()
    worker = FakeWorker(scheduler)
    request = make_request("a", 20, max_tokens, hold=True)
    scheduler.add(request)
    plan = scheduler.schedule()
    assert scheduler.schedule() is None
    (delta,) = scheduler.update(plan, worker.execute(plan))
    assert delta.finish_reason == ("length" if max_tokens == 1 else "hold")


def test_a_row_without_a_page_waits_for_the_plan_that_runs():
    """Only then somebody is preempted: the memory of a row that runs is written."""
    scheduler = make_scheduler(num_slabs=4, pages_per_slab=1, budget_tokens=64)
    worker = FakeWorker(scheduler)
    a, b = make_request("a", 14, 20), make_request("b", 15, 20)
    scheduler.add(a)
    scheduler.add(b)
    plans = [scheduler.schedule(), scheduler.schedule()]
    deltas = []
    while not b.num_preemptions:
        deltas += scheduler.update(plans[0], worker.execute(plans.pop(0)))
        if (plan := scheduler.schedule()) is not None:
            assert not plans or not b.num_preemptions
            plans.append(plan)
    assert len(plans) == 1
    assert [chunk.request_id for chunk in plans[0].chunks] == ["a"]
    deltas += scheduler.update(plans[0], worker.execute(plans[0])) + worker.run(overlap=True)
    for request in (a, b):
        assert outputs(deltas)[request.request_id] == generate(request.prompt_token_ids, 20)


def test_an_abort_while_two_plans_run_frees_after_the_second():
    scheduler = make_scheduler()
    worker = FakeWorker(scheduler)
    scheduler.add(make_request("a", 4, 9))
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.abort("a")
    assert scheduler.has_work()
    assert scheduler.update(first, worker.execute(first)) == []
    assert scheduler.cache.counts().active.num_sequences == 1
    assert scheduler.update(second, worker.execute(second)) == []
    assert scheduler.cache.counts().is_idle
    assert not scheduler.has_work()


@pytest.mark.parametrize("num_run", [0, 1, 2])
def test_a_failed_step_takes_the_plan_behind_it_along(num_run):
    scheduler = make_scheduler(budget_tokens=12)
    worker = FakeWorker(scheduler)
    requests = {name: make_request(name, 10, 6) for name in ("failed", "behind", "late", "gone")}
    for request in requests.values():
        scheduler.add(request)
    plans = [scheduler.schedule(), scheduler.schedule()]
    names = [{chunk.request_id for chunk in plan.chunks} for plan in plans]
    assert names == [{"failed", "behind"}, {"failed", "behind", "late"}]
    for plan in plans[:num_run]:
        worker.execute(plan)
    scheduler.abort("gone")
    scheduler.fail("failed", "the step failed")
    assert scheduler.cache.counts().active.num_sequences == 3
    assert reasons(scheduler.cancel()) == {"failed": "error"}
    assert scheduler.cache.counts().active.num_sequences == 0
    deltas = worker.run(overlap=True)
    assert reasons(deltas) == {"behind": "length", "late": "length"}
    for name in ("behind", "late"):
        assert outputs(deltas)[name] == generate(requests[name].prompt_token_ids, 6)
    assert not {"gone", "failed"} & set(worker.tokens)
    assert scheduler.cache.counts().is_idle


def test_requests_run_in_order_of_arrival_whenever_they_start():
    scheduler = make_scheduler(num_slabs=16)
    worker = FakeWorker(scheduler)
    for request in (read_request("a", 4), make_request("b", 4, 9), read_request("c", 4)):
        scheduler.add(request)
    reads = scheduler.next_reads()
    worker.step()
    for request in [*reads, *scheduler.next_reads()][::-1]:
        worker.fill(request)
        scheduler.on_read_ready(request.request_id)
    assert [chunk.request_id for chunk in scheduler.schedule().chunks] == ["a", "b", "c"]


def test_a_step_of_many_rows_is_planned_quickly():
    """Generous bound: catches work that grows with prompts or with the square of the rows."""
    scheduler = make_scheduler(
        num_slabs=2000, pages_per_slab=64, max_num_seqs=256, budget_tokens=10**6, max_model_len=5000
    )
    for index in range(256):
        scheduler.add(make_request(f"r{index}", 2000, 50, max_model_len=5000))
    times = []
    while scheduler.has_work():
        start = time.perf_counter()
        plan = scheduler.schedule()
        times.append(time.perf_counter() - start)
        samples = [Sample(chunk.request_id, 5, None) for chunk in plan.chunks]
        scheduler.update(plan, StepResult(plan.step_id, samples))
    assert sorted(times)[len(times) // 2] < 0.01


def test_next_token_of_the_fake_model_depends_on_every_token():
    assert next_token((1, 2, 3)) != next_token((2, 2, 3))
