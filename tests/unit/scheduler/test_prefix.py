"""What requests leave in the prefix tree, and what they take from it."""

import pytest

from tandem.errors import RequestError
from tandem.scheduler.request import Request
from tandem.scheduler.scheduler import Scheduler
from tests.unit.scheduler.fake import (
    PAGE_TOKENS,
    FakeWorker,
    generate,
    make_request,
    make_scheduler,
    make_ticket,
    outputs,
)


def prompt_of(num_tokens: int) -> list[int]:
    return [5 + index for index in range(num_tokens)]


def decode_engine(**options: int) -> tuple[Scheduler, FakeWorker]:
    scheduler = make_scheduler(has_prefix_tree=True, **options)
    return scheduler, FakeWorker(scheduler)


def read(request_id: str, prompt: list[int], max_tokens: int = 4) -> Request:
    return make_request(request_id, prompt, max_tokens, ticket=make_ticket(prompt))


def answer(worker: FakeWorker, request: Request) -> list[int]:
    worker.scheduler.add(request)
    return outputs(worker.run())[request.request_id]


def cached_pages(scheduler: Scheduler) -> int:
    return scheduler.cache.counts().cached.num_pages


@pytest.mark.parametrize("num_cached", [0, 15, 16, 17, 31, 32, 33, 48, 60])
@pytest.mark.parametrize("num_prompt", [15, 16, 17, 31, 32, 33, 47, 48, 49])
def test_a_read_starts_after_the_full_pages_that_are_here(num_cached, num_prompt):
    scheduler, worker = decode_engine()
    prompt = prompt_of(60)
    if num_cached:
        answer(worker, read("before", prompt[:num_cached], max_tokens=2))
    request = read("r", prompt[:num_prompt])
    scheduler.add(request)
    (started,) = scheduler.next_reads()
    # The answer's pages are not the prompt's: its tokens are others.
    full = min(num_cached // PAGE_TOKENS, num_prompt // PAGE_TOKENS)
    assert started.num_cached_tokens == full * PAGE_TOKENS
    assert scheduler.counts().prefix_hit_tokens_total == full * PAGE_TOKENS
    worker.fill(started)
    scheduler.on_read_ready("r")
    assert outputs(worker.run())["r"][-3:] == generate(prompt[:num_prompt], 4)[1:]
    assert scheduler.cache.counts().is_idle


def test_a_chat_that_goes_on_finds_prompt_and_answer():
    scheduler, worker = decode_engine(num_slabs=16)
    prompt = prompt_of(40)
    text = answer(worker, read("one", prompt, max_tokens=30))
    # The last token was never fed: 69 tokens have K/V.
    assert cached_pages(scheduler) == 69 // PAGE_TOKENS
    request = read("two", prompt + text + prompt_of(20))
    scheduler.add(request)
    scheduler.next_reads()
    assert request.num_cached_tokens == 64


def test_two_running_requests_share_pages_and_workers_are_told_of_them():
    scheduler, worker = decode_engine()
    prompt = prompt_of(40)
    scheduler.add(read("one", prompt, max_tokens=20))
    for request in scheduler.next_reads():
        worker.fill(request)
        scheduler.on_read_ready(request.request_id)
    worker.step()
    scheduler.add(read("two", [*prompt, 3], max_tokens=20))
    (second,) = scheduler.next_reads()
    assert second.num_cached_tokens == 32
    worker.fill(second)
    scheduler.on_read_ready("two")
    worker.step()
    assert [worker.tables["one"][i] for i in range(2)] == [worker.tables["two"][i] for i in (0, 1)]
    assert worker.tables["one"][2] != worker.tables["two"][2]
    said = outputs(worker.run())
    assert said["two"][-10:] == generate([*prompt, 3], 20)[-10:]
    assert said["one"][-10:] == generate(prompt, 20)[-10:]


def test_equal_prompts_that_were_read_at_once_keep_one_copy():
    scheduler, worker = decode_engine()
    prompt = prompt_of(40)
    for name in ("one", "two"):
        scheduler.add(read(name, prompt, max_tokens=10))
    reads = scheduler.next_reads()
    assert [request.num_cached_tokens for request in reads] == [0, 0]
    for request in reads:
        worker.fill(request)
    for request in reads:
        scheduler.on_read_ready(request.request_id)
    counts = scheduler.cache.counts()
    assert (counts.cached.num_used_pages, counts.active.num_pages) == (2, 2)
    said = outputs(worker.run())
    assert said["one"] == said["two"] == generate(prompt, 10)


def test_a_request_that_computes_takes_no_shared_page():
    scheduler, worker = decode_engine()
    prompt = prompt_of(40)
    answer(worker, read("before", prompt))
    assert cached_pages(scheduler) == 2
    assert answer(worker, make_request("plain", prompt, 4)) == generate(prompt, 4)
    assert worker.steps[-4].chunks[0].start == 0
    assert scheduler.counts().prefix_hit_tokens_total == 0
    assert cached_pages(scheduler) == 2  # the ones that were there


def test_what_a_request_computes_here_is_kept_for_reads():
    scheduler, worker = decode_engine()
    answer(worker, make_request("plain", prompt_of(40), 4))
    request = read("r", prompt_of(40))
    scheduler.add(request)
    scheduler.next_reads()
    assert request.num_cached_tokens == 32


@pytest.mark.parametrize("how", ["abort", "fail", "recompute"])
def test_pages_of_a_read_that_did_not_arrive_are_not_kept(how):
    scheduler, _ = decode_engine()
    scheduler.add(read("r", prompt_of(40)))
    scheduler.next_reads()
    if how == "abort":
        scheduler.abort("r")
    elif how == "fail":
        scheduler.fail("r", "no")
    else:
        scheduler.on_read_failed("r", "lost")
        scheduler.abort("r")
    assert cached_pages(scheduler) == 0
    assert scheduler.cache.is_quarantined("r")
    scheduler.cache.drained("r")
    counts = scheduler.cache.counts()
    assert counts.cached.num_pages == 0
    assert counts.pool.is_full


def test_a_failed_read_lets_go_of_what_it_shared_and_computes_in_its_own_pages():
    scheduler, worker = decode_engine()
    prompt = prompt_of(40)
    answer(worker, read("before", prompt))
    request = read("r", prompt)
    scheduler.add(request)
    scheduler.next_reads()
    shared = scheduler.cache.state("r").pages[:2]
    scheduler.on_read_failed("r", "lost")
    assert request.num_cached_tokens == 0
    scheduler.cache.drained("r")
    assert outputs(worker.run())["r"][-3:] == generate(prompt, 4)[1:]
    chunk = next(plan.chunks[0] for plan in worker.steps if plan.chunks[0].request_id == "r")
    assert chunk.start == 0
    assert not set(chunk.pages) & set(shared)
    assert scheduler.cache.counts().is_idle


def test_a_preempted_request_computes_in_its_own_pages():
    scheduler, worker = decode_engine(num_slabs=6, max_num_seqs=2)
    prompt = prompt_of(40)
    for name in ("one", "two"):
        scheduler.add(read(name, prompt, max_tokens=150))
    said = outputs(worker.run())
    assert scheduler.counts().preempted_total > 0
    assert said["one"] == said["two"] == generate(prompt, 150)
    assert scheduler.cache.counts().is_idle


def test_an_answer_that_is_aborted_leaves_what_was_computed():
    """A stop string ends it so. The pages of the step that runs now are written until it ends."""
    scheduler, worker = decode_engine()
    request = read("r", prompt_of(40), max_tokens=50)
    scheduler.add(request)
    for item in scheduler.next_reads():
        worker.fill(item)
    scheduler.on_read_ready("r")
    for _ in range(9):
        worker.step()
    plan = scheduler.schedule()
    scheduler.abort("r")
    assert scheduler.cache.counts().active.num_sequences == 1
    scheduler.update(plan, worker.execute(plan))
    assert cached_pages(scheduler) == 3  # of 49 tokens
    assert scheduler.cache.counts().is_idle


@pytest.mark.parametrize("ends", ["fail", "abort"])
def test_a_failed_step_leaves_nothing_of_its_requests(ends):
    scheduler, worker = decode_engine()
    scheduler.add(make_request("r", prompt_of(40), 20))
    worker.step()
    scheduler.schedule()
    if ends == "fail":
        scheduler.fail("r", "the step failed")
    else:
        scheduler.abort("r")
    scheduler.cancel()
    counts = scheduler.cache.counts()
    assert counts.cached.num_pages == 0
    assert counts.pool.is_full


def test_a_cache_that_is_full_keeps_nobody_waiting():
    """Long prompts, done; then many short requests, then a long one again."""
    scheduler, worker = decode_engine(num_slabs=8, max_num_seqs=8, budget_tokens=256)
    for index in range(6):
        prompt = [index + 3, *prompt_of(150)]
        answer(worker, read(f"long{index}", prompt))
    assert scheduler.cache.counts().pool.free_slabs <= 1
    for index in range(5):
        scheduler.add(read(f"short{index}", [index + 50, 7]))
    assert len(scheduler.next_reads()) == 5  # all at once: slots and pages gave way
    for index in range(5):
        worker.fill(scheduler._requests[f"short{index}"])
        scheduler.on_read_ready(f"short{index}")
    worker.run()
    prompt = [99, *prompt_of(200)]
    assert answer(worker, read("last", prompt)) == generate(prompt, 4)
    assert scheduler.counts().preempted_total == 0
    assert scheduler.cache.counts().is_idle


def test_a_ticket_of_another_prompt_is_refused():
    """Its pages would be filed under tokens that are not theirs, and serve whoever asks next."""
    scheduler, _ = decode_engine()
    request = make_request("r", prompt_of(40), 4, ticket=make_ticket([9, *prompt_of(39)]))
    with pytest.raises(RequestError, match="of another prompt"):
        scheduler.add(request)
    assert not scheduler.has_work()


def test_without_a_tree_nothing_is_kept():
    scheduler = make_scheduler()
    worker = FakeWorker(scheduler)
    for name in ("one", "two"):
        assert answer(worker, read(name, prompt_of(40))) == generate(prompt_of(40), 4)
    assert scheduler.counts().prefix_hit_tokens_total == 0
    assert scheduler.cache.counts().pool.is_full
