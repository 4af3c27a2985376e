"""Prefill and decode on two engines say what one engine says, over NIXL, at every pair of sizes."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tandem.engine.engine import EngineCore
from tandem.errors import LeaseError, RequestError
from tandem.scheduler.request import EngineRequest, SamplingParams, TokenDelta
from tandem.state.ticket import Ticket, digest_of
from tests.equivalence.engines import (
    Output,
    assert_equal_logprobs,
    assert_equal_outputs,
    build_core,
    greedy,
    poison,
    random_prompts,
    request,
    run,
    run_apart,
    run_streamed,
    set_budget,
    step_until,
    wait_until_idle,
)
from tests.equivalence.pairs import (
    LENGTHS,
    MODEL,
    Engines,
    assert_equals_one_engine,
    each_pair,
    mixed_requests,
    roled,
)
from tests.tiny_models import TINY, save_tiny

pytestmark = pytest.mark.nixl

# By tp.
TP_PAIRS = [(1, 1), (2, 2), (1, 2), (2, 1), (1, 4), (4, 1), (2, 4), (4, 2)]


@pytest.fixture(scope="module")
def engines(tiny_folder: Callable[[str], Path]) -> Iterator[Engines]:
    engines = Engines(tiny_folder(MODEL))
    yield engines
    engines.close()


@pytest.mark.slow
@each_pair(TP_PAIRS)
def test_every_pair_of_sizes_equals_one_engine(
    engines: Engines, expected: list[Output], prefill_tp: int, decode_tp: int
) -> None:
    prefill, decode = engines.get("prefill", prefill_tp), engines.get("decode", decode_tp)
    assert_equals_one_engine(prefill, decode, expected)


@pytest.mark.slow
@each_pair(TP_PAIRS)
def test_reading_while_the_prefill_goes_on_equals_one_engine(
    engines: Engines, together: EngineCore, prefill_tp: int, decode_tp: int
) -> None:
    prefill, decode = engines.get("prefill", prefill_tp), engines.get("decode", decode_tp)
    # Prompts of their own, longer than a page of any engine: nothing of them is cached yet.
    requests = mixed_requests(seed=100 * prefill_tp + decode_tp)[11:]
    before = decode.stats()
    set_budget(prefill, 20)  # the longest prompts take several steps, whatever runs beside them
    try:
        outputs = run_streamed(prefill, decode, requests)
    finally:
        set_budget(prefill, 96)
    assert_equal_outputs(outputs, run(together, requests), LENGTHS[11:])
    after = decode.stats()
    difference = {name: after[name] - before[name] for name in after}
    num_moved = sum(item.sampling.max_tokens != 1 for item in requests)
    assert difference["failed_reads_total"] == difference["prompt_tokens_total"] == 0
    assert difference["transfer_num_done"] == num_moved
    assert difference["transfer_parts"] > num_moved
    assert difference["transfer_early_pages"] > 0


@pytest.mark.parametrize("name", TINY)
def test_every_family_equals_one_engine(tiny_folder: Callable[[str], Path], name: str) -> None:
    """Whatever other bytes lie around: both arenas are poisoned before."""
    folder = tiny_folder(name)
    together = build_core(folder)
    expected = run(together, mixed_requests())
    together.close()
    prefill = roled(folder, "prefill", 1)
    decode = roled(folder, "decode", 1, page_tokens=8)
    try:
        poison(prefill)
        poison(decode)
        outputs = run_apart(prefill, decode, mixed_requests())
        assert_equal_outputs(outputs, expected, LENGTHS)
        assert prefill.stats()["prompt_tokens_total"] == sum(LENGTHS)
        assert decode.stats()["prompt_tokens_total"] == 0
    finally:
        decode.close()
        prefill.close()


def test_a_first_token_that_ends_the_answer_ends_it_on_the_prefill_engine(
    engines: Engines, together: EngineCore
) -> None:
    """End-of-sequence, a stop token, max_tokens and the length limit, as on one engine."""
    prefill, decode = engines.get("prefill", 1), engines.get("decode", 1)
    (prompt,) = random_prompts([21], seed=4)
    (free,) = run(together, [request("free", prompt, greedy(3))])
    first, second = free.token_ids[:2]
    cases = {
        "stop": greedy(8, stop_token_ids=(first,), logprobs=1),
        "later": greedy(8, stop_token_ids=(second,), logprobs=1),
        "length": greedy(1, logprobs=1),
        "masked": greedy(8, stop_token_ids=(first,), min_tokens=3, logprobs=1),
    }
    requests = [request(name, prompt, sampling) for name, sampling in cases.items()]
    expected = run(together, requests)
    assert [len(output.token_ids) for output in expected[:3]] == [1, 2, 1]
    before = prefill.stats()["leases_granted"]
    assert_equal_outputs(run_apart(prefill, decode, requests), expected, list(cases))
    assert prefill.stats()["leases_granted"] - before == 2  # later and masked


def test_a_first_token_that_is_end_of_sequence_ends_a_held_request(
    tiny_folder: Callable[[str], Path],
) -> None:
    (prompt,) = random_prompts([9], seed=4)
    folder = tiny_folder(MODEL)
    together = build_core(folder)
    prefill = roled(folder, "prefill", 1)
    try:
        (free,) = run(together, [request("free", prompt, greedy(2))])
        outputs = []
        for core in (together, prefill):
            core._eos_token_ids = frozenset(free.token_ids[:1])
            sampling = SamplingParams(temperature=0, max_tokens=8)
            outputs += run(core, [request("r", prompt, sampling, hold=core is prefill)])
        assert_equal_outputs(outputs[1:], outputs[:1])
        assert (outputs[0].finish_reason, outputs[0].token_ids) == ("stop", free.token_ids[:1])
        wait_until_idle(prefill)
    finally:
        prefill.close()
        together.close()


def test_tokens_that_were_generated_before_count_on_the_decode_engine(
    engines: Engines, together: EngineCore
) -> None:
    """As a router sends it: the first token is reported by P alone, and penalised on D."""
    prefill, decode = engines.get("prefill", 1), engines.get("decode", 1)
    (prompt,) = random_prompts([18], seed=8)
    sampling = greedy(9, repetition_penalty=1.5, frequency_penalty=1.0, logprobs=2)
    (whole,) = run(together, [request("r", prompt, sampling)])
    (first,) = run(prefill, [request("r", prompt, sampling, hold=True)])
    (rest,) = run(
        decode,
        [request("r", prompt, sampling, ticket=first.ticket, generated=first.token_ids)],
    )
    assert first.token_ids + rest.token_ids == whole.token_ids
    assert_equal_logprobs(first.logprobs + rest.logprobs, whole.logprobs)
    assert rest.finish_reason == "length"
    wait_until_idle(prefill, decode)


def test_more_requests_than_the_decode_engine_has_memory_for(
    tiny_folder: Callable[[str], Path], together: EngineCore
) -> None:
    """Reads wait for memory; what is preempted on D is recomputed there, and says the same."""
    folder = tiny_folder(MODEL)
    prompts = random_prompts([40, 70, 33, 90, 12, 64, 5, 77, 41, 28], seed=12)
    requests = [request(f"r{i}", prompt, greedy(60)) for i, prompt in enumerate(prompts)]
    expected = run(together, requests)
    prefill = roled(folder, "prefill", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tandem.engine.sizing._arena_nbytes", lambda config, spec, limit: 7 << 15)
        decode = roled(folder, "decode", 1, max_model_len=160)
    try:
        assert_equal_outputs(run_apart(prefill, decode, requests), expected)
        assert decode.stats()["transfer_num_done"] == len(requests)
    finally:
        decode.close()
        prefill.close()


# --- what goes wrong ---


def hold(prefill: EngineCore, item: EngineRequest) -> Ticket:
    (output,) = run(prefill, [msgspec.structs.replace(item, hold=True)])
    assert output.ticket is not None
    return output.ticket


def test_an_abort_at_every_stage_of_a_read_frees_both_sides(engines: Engines) -> None:
    prefill, decode = engines.get("prefill", 1), engines.get("decode", 1)
    (prompt,) = random_prompts([60], seed=6)
    totals = decode.stats()
    num_rounds = 12
    for num_steps in range(num_rounds):
        item = request(f"a{num_steps}", prompt, greedy(50))
        decode.add(msgspec.structs.replace(item, ticket=hold(prefill, item)))
        for _ in range(num_steps):
            decode.step()
            time.sleep(0.0005 * num_steps)
        decode.abort(item.request_id)
        wait_until_idle(decode, prefill)
    assert decode.stats()["requests_aborted_total"] - totals["requests_aborted_total"] == num_rounds
    # The memory that they had serves the next one.
    item = request("after", prompt, greedy(5))
    outputs = run_apart(prefill, decode, [item])
    assert outputs[0].finish_reason == "length"


@pytest.mark.parametrize("way", ["release", "abort"])
@pytest.mark.parametrize("state", ["unknown", "queued", "prefilling", "held"])
def test_a_ticket_can_be_given_back_in_any_state(engines: Engines, state: str, way: str) -> None:
    """By the id of its request, which is known before anything else is."""
    prefill = engines.get("prefill", 1)
    before = prefill.stats()
    (prompt,) = random_prompts([90], seed=6)
    item = request(f"{state}-{way}", prompt, greedy(50), hold=True)
    set_budget(prefill, 20)
    try:
        if state != "unknown":
            prefill.add(item)
        for _ in range({"prefilling": 2, "held": 5}.get(state, 0)):
            prefill.step()
        stats = prefill.stats()
        assert stats["leases_computing"] == (state in ("queued", "prefilling"))
        assert stats["leases_active"] == stats["held_num_sequences"] == (state == "held")
        assert stats["active_num_sequences"] == (state == "prefilling")
        if way == "abort":
            prefill.abort(item.request_id)
        else:
            prefill.release_ticket(item.request_id)
        if state == "unknown" and way == "release":
            with pytest.raises(LeaseError, match="given back before its request came"):
                prefill.add(item)
        # Whoever listens learns of it, unless it was he who ended it.
        deltas = [delta for _ in range(3) for delta in prefill.step()]
        assert prefill.stats()["is_idle"]
        assert prefill.stats()["leases_computing"] == 0
        is_told = way == "release" and state in ("queued", "prefilling")
        assert [delta.finish_reason for delta in deltas] == ["error"] * is_told
        steps = prefill.stats()["steps_total"] - before["steps_total"]
        assert steps == {"prefilling": 2, "held": 5}.get(state, 0)
    finally:
        set_budget(prefill, 96)


def test_memory_of_a_read_that_is_given_up_is_quarantined_until_it_drains(
    engines: Engines, expected: list[Output], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While bytes may still arrive, its pages and slot are nobody's."""
    prefill, decode = engines.get("prefill", 1), engines.get("decode", 1)
    worker = decode._executor._worker  # type: ignore[attr-defined]
    num_failed = decode.stats()["failed_reads_total"]
    arrived = worker.poll_moves
    monkeypatch.setattr(worker, "poll_moves", lambda: [])
    item = request("gone", random_prompts([60])[0], greedy(50))
    decode.add(msgspec.structs.replace(item, ticket=hold(prefill, item)))
    posted = decode._executor.post_move
    is_posted = []
    monkeypatch.setattr(
        decode._executor,
        "post_move",
        lambda peer, command: (is_posted.append(command), posted(peer, command)),
    )
    step_until([decode], lambda: is_posted, "not posted")
    decode.abort(item.request_id)
    for _ in range(20):
        decode.step()
        time.sleep(0.002)
    stats = decode.stats()
    assert (stats["quarantined_num_sequences"], stats["quarantined_num_slots"]) == (1, 1)
    assert stats["quarantined_num_pages"] == 4
    assert decode.not_ready() is None
    # Others are served beside it, from other memory.
    others = mixed_requests()[-3:]
    monkeypatch.setattr(
        worker, "poll_moves", lambda: [it for it in arrived() if it.request_id != "gone"]
    )
    taken = set(decode._cache._quarantined["gone"].pages)
    held = run(prefill, [msgspec.structs.replace(it, hold=True) for it in others])
    for it, first in zip(others, held, strict=True):
        decode.add(msgspec.structs.replace(it, ticket=first.ticket))
    outputs = {it.request_id: Output() for it in others}
    while any(output.finish_reason is None for output in outputs.values()):
        for delta in decode.step():
            outputs[delta.request_id].add(delta)
        for state in decode._cache._active.values():
            assert not taken & set(state.pages)
    assert_equal_outputs(list(outputs.values()), expected[-3:])
    assert decode.stats()["failed_reads_total"] == num_failed
    assert decode.stats()["quarantined_num_sequences"] == 1
    monkeypatch.undo()
    # Its events were swallowed above; an engine would get the drained one now.
    decode._reads._draining.clear()  # type: ignore[union-attr]
    decode._cache.drained("gone")
    wait_until_idle(prefill, decode)


@pytest.fixture(scope="module")
def gone(tiny_folder: Callable[[str], Path]) -> Iterator[tuple[EngineRequest, Ticket]]:
    """A request whose prefill engine has been closed."""
    prefill = roled(tiny_folder(MODEL), "prefill", 1)
    item = request("r", random_prompts([37], seed=2)[0], greedy(9, logprobs=2))
    ticket = hold(prefill, item)
    prefill.close()
    return item, ticket


def test_a_prefill_engine_that_is_gone_before_the_read_is_recomputed(
    tiny_folder: Callable[[str], Path], together: EngineCore, gone: tuple[EngineRequest, Ticket]
) -> None:
    item, ticket = gone
    decode = roled(tiny_folder(MODEL), "decode", 1, deadline_s=0.5)
    try:
        outputs = run(decode, [msgspec.structs.replace(item, ticket=ticket)])
        assert_equal_outputs(outputs, run(together, [item]))
        stats = decode.stats()
        # The first token, which the ticket brought, is fed with the prompt.
        assert (stats["failed_reads_total"], stats["prompt_tokens_total"]) == (1, 38)
        assert stats["is_idle"]
    finally:
        decode.close()


def test_with_on_failure_fail_the_deadline_is_an_error_of_that_request_alone(
    tiny_folder: Callable[[str], Path], together: EngineCore, gone: tuple[EngineRequest, Ticket]
) -> None:
    item, ticket = gone
    decode = roled(tiny_folder(MODEL), "decode", 1, deadline_s=0.5, on_failure="fail")
    try:
        other = request("other", item.prompt_token_ids, greedy(20))
        failed, fine = run(decode, [msgspec.structs.replace(item, ticket=ticket), other])
        assert failed.finish_reason == "error"
        assert failed.error
        assert failed.token_ids == [ticket.first_token]  # known before the read
        assert_equal_outputs([fine], run(together, [other]))
        assert decode.stats()["is_idle"]
    finally:
        decode.close()


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("bamba", {}, "different models: number of layers is 6 on the prefill engine and 4 on"),
        (MODEL, {"state_dtype": "bfloat16"}, "float32 on the prefill engine and bfloat16 on"),
        ("trained on", {}, "different models: digest of the weights is "),
    ],
)
def test_a_peer_with_another_model_is_refused_by_name(
    tiny_folder: Callable[[str], Path],
    tmp_path: Path,
    engines: Engines,
    name: str,
    settings: dict[str, str],
    message: str,
) -> None:
    folder = save_tiny(MODEL, tmp_path, seed=1) if name == "trained on" else tiny_folder(name)
    prefill = engines.get("prefill", 1)
    item = request("r", random_prompts([20])[0], greedy(4))
    errors = {}
    for on_failure in ("fail", "recompute"):
        decode = roled(folder, "decode", 1, on_failure=on_failure, **settings)
        try:
            (output,) = run(decode, [msgspec.structs.replace(item, ticket=hold(prefill, item))])
            errors[on_failure] = output.error
            assert len(output.token_ids) == (1 if on_failure == "fail" else 4)
            assert decode.stats()["failed_reads_total"] == 1
            # Refused at once, not at the deadline, and the prefill's memory is free again.
            wait_until_idle(prefill, decode)
        finally:
            decode.close()
    assert errors["recompute"] is None
    assert errors["fail"] is not None
    assert message in errors["fail"]


def test_a_lease_that_ended_before_the_read_is_recomputed(
    tiny_folder: Callable[[str], Path], together: EngineCore
) -> None:
    folder = tiny_folder(MODEL)
    prefill = roled(folder, "prefill", 1, lease_s=0.3, deadline_s=0.2)
    decode = roled(folder, "decode", 1)
    item = request("r", random_prompts([50], seed=2)[0], greedy(5))
    try:
        ticket = hold(prefill, item)
        step_until([prefill], lambda: prefill.stats()["is_idle"], "lease did not end")
        # Its pages belong to others by now.
        run(prefill, [request("next", random_prompts([90])[0], greedy(2))])
        outputs = run(decode, [msgspec.structs.replace(item, ticket=ticket)])
        assert_equal_outputs(outputs, run(together, [item]))
        assert decode.stats()["failed_reads_total"] == 1
        assert prefill.stats()["leases_expired"] == 1
        wait_until_idle(prefill, decode)
    finally:
        decode.close()
        prefill.close()


def test_one_ticket_read_by_two_engines_is_kept_until_both_are_done(
    engines: Engines, tiny_folder: Callable[[str], Path], together: EngineCore
) -> None:
    """One reads and releases it while the other, whose only row is busy, has its lease; then the
    prefill engine serves others."""
    prefill, quick = engines.get("prefill", 1), engines.get("decode", 1)
    prompts = random_prompts([90] * 12, seed=77)
    item = request("twice", prompts[0], greedy(12, logprobs=3))
    expected = run(together, [item])
    slow = roled(tiny_folder(MODEL), "decode", 1, max_num_seqs=1)
    try:
        poison(prefill)
        poison(quick)
        slow.add(request("busy", prompts[1], greedy(300)))
        slow.step()
        ticket = hold(prefill, msgspec.structs.replace(item, request_id="twice-p"))
        slow.add(msgspec.structs.replace(item, ticket=ticket))
        desk = slow._reads
        assert desk is not None
        # Without a step of the row that is busy: it must not finish meanwhile.
        step_until(
            [], lambda: slow._advance_reads(desk) or desk._reads["twice"].is_open, "no lease"
        )
        answers = run(quick, [msgspec.structs.replace(item, ticket=ticket)])
        assert_equal_outputs(answers, expected)
        assert quick._client is not None
        channels = quick._client._channels.values()
        step_until([], lambda: not any(item.has_notes for item in channels), "not released")
        others = [
            request(f"other-{index}", prompt, greedy(2)) for index, prompt in enumerate(prompts)
        ]
        run(prefill, others)
        slow.abort("busy")
        deltas: list[TokenDelta] = []
        step_until([], lambda: deltas.extend(slow.step()) or _is_last(deltas), "no answer")
        output = Output()
        for delta in deltas:
            output.add(delta)
        assert_equal_outputs([output], expected)
        assert slow.stats()["failed_reads_total"] == 0
        wait_until_idle(prefill, quick, slow)
    finally:
        slow.close()


def _is_last(deltas: list[TokenDelta]) -> bool:
    return bool(deltas) and deltas[-1].finish_reason is not None


def test_a_forged_ticket_brings_no_state_of_another_prompt_under_a_prompts_name(
    engines: Engines, together: EngineCore
) -> None:
    """It says that it is of the prompt that it comes with: its engine knows better."""
    prefill, decode = engines.get("prefill", 1), engines.get("decode", 1)
    theirs, ours = random_prompts([90, 90], seed=78)
    item, later = request("forged", ours, greedy(4)), request("later", [*ours, 7, 8], greedy(8))
    ticket = hold(prefill, request("forged-p", theirs))
    before = decode.stats()
    forged = msgspec.structs.replace(ticket, prompt_digest=digest_of(ours))
    # Whoever forges is told the first token that he gives, and computed what follows from it.
    assert run(decode, [msgspec.structs.replace(item, ticket=forged)])[0].finish_reason == "length"
    assert_equal_outputs(run_apart(prefill, decode, [later]), run(together, [later]))
    assert decode.stats()["failed_reads_total"] - before["failed_reads_total"] == 1
    wait_until_idle(prefill, decode)


def test_a_refused_request_gives_its_ticket_back(engines: Engines) -> None:
    prefill, decode = engines.get("prefill", 1), engines.get("decode", 1)
    item = request("r", random_prompts([30])[0], greedy(4))
    ticket = hold(prefill, item)
    too_long = msgspec.structs.replace(item.sampling, max_tokens=4000)
    with pytest.raises(RequestError, match="limit of 512"):
        decode.add(msgspec.structs.replace(item, ticket=ticket, sampling=too_long))
    start = time.monotonic()
    wait_until_idle(prefill, decode)
    assert time.monotonic() - start < 5  # not at the end of its lease


# --- what is seen of it ---


def test_both_sides_show_what_happened_to_a_request(engines: Engines) -> None:
    prefill, decode = engines.get("prefill", 1), engines.get("decode", 1)
    before = decode.transfer_report()
    (prompt,) = random_prompts([40], seed=8)
    item = request("seen", prompt, greedy(5))
    ticket = hold(prefill, item)
    run(decode, [msgspec.structs.replace(item, ticket=ticket)])
    wait_until_idle(prefill, decode)
    rows = [
        next(row for row in core.watch.timelines.table() if row["request_id"] == "seen")
        for core in (prefill, decode)
    ]
    names = [[event["event"] for event in row["events"]] for row in rows]
    assert names[0] == ["arrived", "queued", "admitted", "first token", "held", "freed"]
    # Handshake and memory are waited for side by side.
    assert sorted(names[1][2:5]) == ["admitted", "handshake", "lease"]
    assert names[1][:2] + names[1][5:] == [
        *("arrived", "queued", "part 0 posted", "part 0 done", "ready", "first decode"),
        "finished",
    ]
    assert rows[0]["ticket_id"] == rows[1]["ticket_id"] == ticket.ticket_id
    assert rows[1]["peer"] == ticket.engine_id
    after = decode.transfer_report()
    peer = next(peer for peer in after.peers if peer.engine_id == ticket.engine_id)
    assert all(sum(times.counts) >= 1 for times in peer.phases.values())
    # Series and totals tell the same, and nothing is left in quarantine.
    stats = decode.stats()
    of_all = [peer.parts for peer in after.peers]
    assert sum(parts["slots"].nbytes for parts in of_all) == stats["transfer_slot_nbytes"]
    assert sum(parts["pages"].nbytes for parts in of_all) == stats["transfer_page_nbytes"]
    num_descriptors = sum(part.num_descriptors for parts in of_all for part in parts.values())
    assert num_descriptors == stats["transfer_num_descriptors"]
    assert after.failures == before.failures
    assert (after.num_quarantined, after.quarantined_nbytes) == (0, 0)


def test_counters_never_fall_and_no_number_is_negative(engines: Engines) -> None:
    """Whatever happens to requests: reads, aborts in any state, tickets that are given back."""
    cores = engines.get("prefill", 1), engines.get("decode", 1)
    prefill, decode = cores
    seen: list[dict[str, float]] = [{}, {}]

    def look() -> None:
        for index, core in enumerate(cores):
            now = core.stats()
            assert min(now.values()) >= 0, now
            falls = {
                name: (seen[index][name], value)
                for name, value in now.items()
                if is_counter(name) and value < seen[index].get(name, 0)
            }
            assert not falls
            seen[index] = now

    prompts = random_prompts([20, 60, 33, 9], seed=77)
    for number, prompt in enumerate(prompts):
        item = request(f"count{number}", prompt, greedy(12))
        ticket = hold(prefill, item)
        look()
        if number == 3:
            prefill.release_ticket(ticket.ticket_id)
        else:
            decode.add(msgspec.structs.replace(item, ticket=ticket))
        for step in range(25):
            if (number, step) in {(1, 0), (2, 12)}:
                decode.abort(item.request_id)
            for core in cores:
                core.step()
            look()
            time.sleep(0.001)
    wait_until_idle(prefill, decode)
    look()
    assert sum(map(is_counter, seen[1])) > 10


def is_counter(name: str) -> bool:
    gauges = ("leases_active", "leases_computing")
    return name.endswith("_total") or (
        name.startswith(("transfer_", "leases_")) and name not in gauges
    )
