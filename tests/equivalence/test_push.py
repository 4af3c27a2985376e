"""Prefill engines that write into pages which the decode engine reserved: the same answers."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tandem.engine.engine import EngineCore
from tests.equivalence.engines import (
    Output,
    assert_equal_outputs,
    finish,
    follow,
    greedy,
    poison,
    random_prompts,
    request,
    run,
    run_apart,
    run_streamed,
    step_until,
    step_until_early_pages,
    wait_until_idle,
)
from tests.equivalence.pairs import (
    MODEL,
    Engines,
    assert_equals_one_engine,
    each_pair,
    roled,
)

pytestmark = pytest.mark.nixl

# By tp; pages of equal and of unequal size meet (see pairs.py).
TP_PAIRS = [(1, 1), (1, 2), (2, 1), (4, 1), (1, 4)]


@pytest.fixture(scope="module")
def engines(tiny_folder: Callable[[str], Path]) -> Iterator[Engines]:
    engines = Engines(tiny_folder(MODEL), transfer="push")
    yield engines
    engines.close()


@pytest.mark.slow
@each_pair(TP_PAIRS)
def test_every_pair_of_sizes_equals_one_engine(
    engines: Engines, expected: list[Output], prefill_tp: int, decode_tp: int
) -> None:
    prefill, decode = engines.get("prefill", prefill_tp), engines.get("decode", decode_tp)
    assert_equals_one_engine(prefill, decode, expected)


@pytest.fixture(scope="module")
def chunked(tiny_folder: Callable[[str], Path]) -> Iterator[tuple[EngineCore, EngineCore]]:
    """A pair whose prompts of more than 24 tokens take several steps of the prefill engine."""
    settings = {"transfer": "push", "budget_tokens": 24}
    prefill = roled(tiny_folder(MODEL), "prefill", 1, **settings)
    decode = roled(tiny_folder(MODEL), "decode", 1, **{**settings, "page_tokens": 24})
    yield prefill, decode
    decode.close()
    prefill.close()


def test_pages_are_written_before_the_prefill_has_ended(
    chunked: tuple[EngineCore, EngineCore], together: EngineCore
) -> None:
    """From poisoned memory into poisoned memory; again, what D keeps is not written anew."""
    prefill, decode = chunked
    item = request("long", random_prompts([300], seed=5)[0], greedy(12, logprobs=3))
    expected = run(together, [item])
    poison(prefill)
    poison(decode)
    before = decode.stats()
    assert_equal_outputs(run_streamed(prefill, decode, [item]), expected)
    after = decode.stats()
    assert after["failed_reads_total"] == before["failed_reads_total"]
    assert after["transfer_early_pages"] > before["transfer_early_pages"]
    assert prefill.stats()["pushes_num_done"] >= 2
    num_pages = after["transfer_page_nbytes"] - before["transfer_page_nbytes"]
    (again,) = run_apart(prefill, decode, [msgspec.structs.replace(item, request_id="again")])
    assert_equal_outputs([again], expected)
    assert decode.stats()["transfer_page_nbytes"] - after["transfer_page_nbytes"] < num_pages / 4


def test_a_prefill_that_begins_anew_is_written_anew(
    chunked: tuple[EngineCore, EngineCore], together: EngineCore
) -> None:
    prefill, decode = chunked
    decode.flush_prefix_cache()
    item = request("anew", random_prompts([200], seed=6)[0], greedy(12, logprobs=3))
    before = decode.stats()
    leg = follow(prefill, decode, item)
    step_until_early_pages(prefill, decode, leg)
    # What was asked for has not been seen by the prefill engine yet: it has gone meanwhile.
    prefill._scheduler._preempt(prefill._scheduler._requests[leg])
    assert_equal_outputs([finish(decode, prefill)], run(together, [item]))
    wait_until_idle(prefill, decode)
    assert decode.stats()["failed_reads_total"] == before["failed_reads_total"]


def test_an_abort_on_the_decode_engine_at_every_stage_frees_both_sides(
    chunked: tuple[EngineCore, EngineCore], together: EngineCore
) -> None:
    prefill, decode = chunked
    (prompt,) = random_prompts([120], seed=9)
    for num_steps in range(14):
        decode.flush_prefix_cache()
        follow(prefill, decode, request(f"a{num_steps}", prompt, greedy(50)))
        for _ in range(num_steps):
            decode.step()
            prefill.step()
            time.sleep(0.0005 * num_steps)
        decode.abort(f"a{num_steps}")
        wait_until_idle(decode, prefill)
    assert prefill.stats()["leases_computing"] == prefill.stats()["leases_active"] == 0
    item = request("after", prompt, greedy(5))
    assert_equal_outputs(run_apart(prefill, decode, [item]), run(together, [item]))


@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_memory_that_a_prefill_engine_may_write_to_is_kept_until_it_says_that_it_does_not(
    tiny_folder: Callable[[str], Path], chunked: tuple[EngineCore, EngineCore], how: str
) -> None:
    """The request ends at once; the prefill engine's loop does not turn for a while."""
    prefill, _ = chunked
    decode = roled(tiny_folder(MODEL), "decode", 1, transfer="push", deadline_s=0.5)
    try:
        item = request(f"gone-{how}", random_prompts([60])[0], greedy(50))
        (held,) = run(prefill, [msgspec.structs.replace(item, hold=True)])
        decode.add(msgspec.structs.replace(item, ticket=held.ticket))
        step_until([decode], lambda: decode.stats()["transfer_parts"], "not asked")
        if how == "abort":
            decode.abort(item.request_id)
        else:
            step_until([decode], lambda: decode.stats()["failed_reads_total"], "no deadline")
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            decode.step()
            assert decode.stats()["quarantined_num_sequences"] == 1
            assert decode.stats()["quarantined_num_slots"] == 1
        decode.abort(item.request_id)
        wait_until_idle(prefill, decode)
        assert prefill.stats()["leases_active"] == 0
    finally:
        decode.close()


@pytest.mark.parametrize(("ours", "theirs"), [("push", "pull"), ("pull", "push")])
def test_engines_that_move_state_in_different_ways_refuse_each_other_by_name(
    tiny_folder: Callable[[str], Path], ours: str, theirs: str
) -> None:
    prefill = roled(tiny_folder(MODEL), "prefill", 1, transfer=ours)
    decode = roled(tiny_folder(MODEL), "decode", 1, transfer=theirs, on_failure="fail")
    try:
        item = request("r", random_prompts([20])[0], greedy(4))
        (held,) = run(prefill, [msgspec.structs.replace(item, hold=True)])
        (output,) = run(decode, [msgspec.structs.replace(item, ticket=held.ticket)])
        assert output.error is not None
        expected = f"transfer is {ours} on the prefill engine and {theirs} on the decode engine"
        assert expected in output.error
        wait_until_idle(prefill, decode)
    finally:
        decode.close()
        prefill.close()
