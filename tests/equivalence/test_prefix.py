"""A prefix that a decode engine holds changes what is read, and nothing of what is said."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from tandem.engine import sizing
from tandem.engine.engine import EngineCore
from tandem.scheduler.request import EngineRequest
from tandem.scheduler.step import StepPlan
from tests.equivalence.engines import (
    Output,
    assert_equal_outputs,
    build_core,
    greedy,
    poison,
    random_prompts,
    request,
    run,
    run_apart,
    wait_until_idle,
)

pytestmark = pytest.mark.nixl

# (tp, page_tokens) of the prefill and of the decode engine.
PAIRS = {
    "1 to 1, 16 to 24": ((1, 16), (1, 24)),
    "1 to 1, 64 to 16": ((1, 64), (1, 16)),
    "1 to 2, 64 to 24": ((1, 64), (2, 24)),
    "2 to 1, 24 to 16": ((2, 24), (1, 16)),
}
# Bamba differs from Nemotron-H in layers, not in how they are cut.
FAMILIES = [("nemotron_h", pair) for pair in PAIRS] + [("bamba", pair) for pair in list(PAIRS)[:2]]
NUM_PAGES = 4


def roled(folder: Path, role: str, tp: int, page_tokens: int, **settings: object) -> EngineCore:
    options = {"arena_mib": 4, "budget_tokens": 96, **settings}
    return build_core(folder, role=role, tp=tp, page_tokens=page_tokens, **options)


@dataclass
class Pair:
    """A prefill and a decode engine, and one engine that says what they shall say."""

    prefill: EngineCore
    decode: EngineCore
    together: EngineCore

    def ask(self, item: EngineRequest) -> tuple[Output, dict[str, float]]:
        """The answer, and by how much the decode engine's numbers rose meanwhile."""
        before = self.decode.stats()
        (output,) = run_apart(self.prefill, self.decode, [item])
        after = self.decode.stats()
        return output, {name: after[name] - before[name] for name in after}

    def clear(self) -> None:
        """Nothing is cached; every byte of an engine in this process is NaN."""
        # Release notes of the test before may still be on their way.
        wait_until_idle(self.prefill, self.decode)
        for core in (self.prefill, self.decode):
            if hasattr(core._executor, "_worker"):
                poison(core)
            core.flush_prefix_cache()
            assert core.stats()["pool_free_slabs"] == core.stats()["pool_num_slabs"]

    @property
    def page_tokens(self) -> int:
        return self.decode._cache.geometry.page_tokens

    @property
    def page_nbytes(self) -> int:
        """Of one page on all ranks of the decode engine."""
        return self.decode._cache.geometry.page_nbytes * self.decode.info.tp


class Engines:
    """Engines by family, role, tp and page_tokens, started at first use."""

    def __init__(self, folder: Callable[[str], Path]) -> None:
        self._folder = folder
        self._cores: dict[tuple[str, str, int, int], EngineCore] = {}

    def pair(self, family: str, name: str) -> Pair:
        prefill, decode = PAIRS[name]
        return Pair(
            self._get(family, "prefill", *prefill),
            self._get(family, "decode", *decode),
            self._get(family, "colocated", 1, 16),
        )

    def _get(self, family: str, role: str, tp: int, page_tokens: int) -> EngineCore:
        key = (family, role, tp, page_tokens)
        if key not in self._cores:
            self._cores[key] = roled(self._folder(family), role, tp, page_tokens)
        return self._cores[key]

    def close(self) -> None:
        # Decode engines first: what they read from outlives them.
        for _, core in sorted(self._cores.items(), key=lambda item: item[0][1]):
            core.close()


@pytest.fixture(scope="module")
def engines(tiny_folder: Callable[[str], Path]) -> Iterator[Engines]:
    engines = Engines(tiny_folder)
    yield engines
    engines.close()


@pytest.mark.parametrize(("family", "pair_name"), FAMILIES)
def test_hits_of_none_some_and_all_pages_move_the_rest_and_the_slot(
    engines: Engines, family: str, pair_name: str
) -> None:
    """Around the end of a page of either engine's size; a read counts what it moved."""
    pair = engines.pair(family, pair_name)
    page = pair.page_tokens
    (text,) = random_prompts([NUM_PAGES * page + 1], seed=17)
    for num_prompt in (NUM_PAGES * page - 1, NUM_PAGES * page, NUM_PAGES * page + 1):
        item = request("r", text[:num_prompt], greedy(6, logprobs=2))
        (expected,) = run(pair.together, [item])
        pair.clear()
        output, cold = pair.ask(item)
        assert_equal_outputs([output], [expected])
        assert cold["prefix_hit_tokens_total"] == 0
        assert cold["transfer_page_nbytes"] > (NUM_PAGES - 1) * pair.page_nbytes
        for num_cached in (1, 2, NUM_PAGES):
            pair.clear()
            pair.ask(request("before", text[: num_cached * page + 1][:num_prompt], greedy(2)))
            output, hit = pair.ask(item)
            assert_equal_outputs([output], [expected], [(num_prompt, num_cached)])
            num_hit = min(num_cached, num_prompt // page)
            assert hit["prefix_hit_tokens_total"] == num_hit * page
            assert hit["transfer_nbytes"] == cold["transfer_nbytes"] - num_hit * pair.page_nbytes
            assert hit["transfer_slot_nbytes"] == cold["transfer_slot_nbytes"] > 0
            assert (hit["transfer_num_done"], hit["prompt_tokens_total"]) == (1, 0)


@pytest.mark.parametrize(("family", "pair_name"), FAMILIES)
def test_chats_of_several_turns_equal_one_engine(
    engines: Engines, family: str, pair_name: str
) -> None:
    """Each turn's prompt is the last one, its answer and new text; chats share a start."""
    pair = engines.pair(family, pair_name)
    pair.clear()
    page = pair.page_tokens
    (start,) = random_prompts([40], seed=5)
    chats = [start + text for text in random_prompts([3, 17, 30], seed=6)]
    num_hit = 0
    for turn, new in enumerate((20, 1, 35)):
        items = [
            request(f"chat{index}-{turn}", chat, greedy(30, logprobs=1))
            for index, chat in enumerate(chats)
        ]
        expected = run(pair.together, items)
        before = pair.decode.stats()
        outputs = run_apart(pair.prefill, pair.decode, items)
        assert_equal_outputs(outputs, expected)
        after = pair.decode.stats()
        assert after["prompt_tokens_total"] == before["prompt_tokens_total"]
        rise = after["prefix_hit_tokens_total"] - before["prefix_hit_tokens_total"]
        assert rise >= num_hit
        # The last token of an answer was not fed: it has no K/V.
        num_hit = sum((len(chat) + 29) // page * page for chat in chats)
        chats = [
            chat + output.token_ids + random_prompts([new], seed=turn)[0]
            for chat, output in zip(chats, outputs, strict=True)
        ]
    assert pair.decode.flush_prefix_cache() > 0
    assert pair.decode.stats()["pool_free_slabs"] == pair.decode.stats()["pool_num_slabs"]


@pytest.fixture
def small(engines: Engines, tiny_folder: Callable[[str], Path]) -> Iterator[Pair]:
    """A decode engine with 7 slabs of 16 pages or one slot."""
    pair = engines.pair("nemotron_h", "1 to 1, 64 to 16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizing, "_arena_nbytes", lambda config, spec, limit: 7 << 15)
        decode = roled(tiny_folder("nemotron_h"), "decode", 1, 8, max_model_len=160, max_num_seqs=6)
    poison(decode)
    yield Pair(pair.prefill, decode, pair.together)
    decode.close()


def test_a_cache_that_is_full_gives_way(small: Pair) -> None:
    starts = random_prompts([40, 48, 70], seed=9)
    rng = random.Random(4)
    items = []
    for index, text in enumerate(random_prompts([3, 30, 1, 16, 44, 9, 25, 2] * 3, seed=8)):
        prompt = rng.choice(starts) + text
        items.append(request(f"r{index}", prompt, greedy(rng.choice([2, 30, 159 - len(prompt)]))))
    expected = run(small.together, items)
    for batch in range(0, len(items), 8):
        outputs = run_apart(small.prefill, small.decode, items[batch : batch + 8])
        assert_equal_outputs(outputs, expected[batch : batch + 8])
    stats = small.decode.stats()
    assert stats["prefix_hit_tokens_total"] > 0
    assert stats["cached_num_evicted_pages"] > 0
    assert stats["failed_reads_total"] == 0
    assert stats["cached_num_pages"] == stats["pool_held_pages"] > 0
    small.decode.flush_prefix_cache()
    assert small.decode.stats()["pool_free_slabs"] == 7


def test_requests_that_are_preempted_on_shared_pages_say_the_same(
    small: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four fit with their prompts, and not with their answers."""
    (start,) = random_prompts([48], seed=9)
    items = [
        request(f"r{index}", start + text, greedy(100, logprobs=1))
        for index, text in enumerate(random_prompts([3, 1, 5, 2], seed=8))
    ]
    expected = run(small.together, items)
    run_apart(small.prefill, small.decode, [request("before", start, greedy(2))])
    held = run(small.prefill, [msgspec.structs.replace(item, hold=True) for item in items])
    # Nobody decodes before all are there, however long a read takes.
    schedule = small.decode._scheduler.schedule

    def schedule_together() -> StepPlan | None:
        is_begun = small.decode.stats()["output_tokens_total"] > num_said
        return schedule() if is_begun or small.decode.stats()["running"] == 4 else None

    num_said = small.decode.stats()["output_tokens_total"]
    monkeypatch.setattr(small.decode._scheduler, "schedule", schedule_together)
    outputs = run(
        small.decode,
        [
            msgspec.structs.replace(item, ticket=first.ticket)
            for item, first in zip(items, held, strict=True)
        ],
    )
    assert_equal_outputs(outputs, expected)
    stats = small.decode.stats()
    assert stats["prefix_hit_tokens_total"] == 4 * 48
    assert stats["preemptions_total"] > 0
    assert stats["is_idle"]


def test_requests_that_are_aborted_at_random_leave_cached_pages_alone(small: Pair) -> None:
    """Half of them go at some step: queued, reading or running on shared pages."""
    wait_until_idle(small.prefill, small.decode)  # of the test before
    starts = random_prompts([40, 48], seed=9)
    rng = random.Random(5)
    items = [
        request(f"r{index}", rng.choice(starts) + text, greedy(25))
        for index, text in enumerate(random_prompts([5, 20, 1, 13] * 5, seed=8))
    ]
    expected = run(small.together, items)
    held = run(small.prefill, [msgspec.structs.replace(item, hold=True) for item in items])
    outputs = {item.request_id: Output() for item in items}
    leaves_at = {item.request_id: rng.randint(0, 80) for item in items[::2]}
    for item, first in zip(items, held, strict=True):
        small.decode.add(msgspec.structs.replace(item, ticket=first.ticket))
    kept = [item.request_id for item in items[1::2]]
    step, deadline = 0, time.monotonic() + 120
    while leaves_at or any(outputs[name].finish_reason is None for name in kept):
        for name in [name for name, at in leaves_at.items() if at <= step]:
            small.decode.abort(name)
            del leaves_at[name]
        for delta in small.decode.step():
            outputs[delta.request_id].add(delta)
        step += 1
        assert time.monotonic() < deadline
    assert_equal_outputs([outputs[name] for name in kept], expected[1::2])
    for item, whole in zip(items[::2], expected[::2], strict=True):
        said = outputs[item.request_id].token_ids
        assert said == whole.token_ids[: len(said)]
    wait_until_idle(small.prefill, small.decode)
    stats = small.decode.stats()
    assert stats["prefix_hit_tokens_total"] > 0
    assert stats["pool_held_pages"] == stats["cached_num_pages"]
    assert small.decode.flush_prefix_cache() == stats["cached_num_pages"]
    assert small.decode.stats()["pool_free_slabs"] == 7


def test_a_failed_read_on_shared_pages_is_recomputed_beside_them(
    engines: Engines, tiny_folder: Callable[[str], Path]
) -> None:
    folder = tiny_folder("nemotron_h")
    pair = engines.pair("nemotron_h", "1 to 1, 64 to 16")
    decode = roled(folder, "decode", 1, 16, deadline_s=0.5)
    lost = roled(folder, "prefill", 1, 16)
    pair = Pair(pair.prefill, decode, pair.together)
    (text,) = random_prompts([70], seed=2)
    item = request("r", text, greedy(9, logprobs=2))
    expected = run(pair.together, [item])
    (first,) = run(lost, [msgspec.structs.replace(item, hold=True)])
    lost.close()
    try:
        pair.ask(request("before", text[:50], greedy(2)))
        outputs = run(decode, [msgspec.structs.replace(item, ticket=first.ticket)])
        assert_equal_outputs(outputs, expected)
        stats = decode.stats()
        assert (stats["failed_reads_total"], stats["is_idle"]) == (1, 1)
        # What was cached before serves again, and what was recomputed too.
        output, hit = pair.ask(item)
        assert_equal_outputs([output], expected)
        assert hit["prefix_hit_tokens_total"] == 64
    finally:
        decode.close()


def test_without_the_setting_everything_is_read_again(
    engines: Engines, tiny_folder: Callable[[str], Path]
) -> None:
    pair = engines.pair("nemotron_h", "1 to 1, 64 to 16")
    decode = roled(tiny_folder("nemotron_h"), "decode", 1, 16, prefix_cache=False)
    try:
        without = Pair(pair.prefill, decode, pair.together)
        item = request("r", random_prompts([50], seed=2)[0], greedy(4))
        (output, once), (_, again) = without.ask(item), without.ask(item)
        assert_equal_outputs([output], run(pair.together, [item]))
        assert once["transfer_nbytes"] == again["transfer_nbytes"]
        assert decode.stats()["pool_free_slabs"] == decode.stats()["pool_num_slabs"]
    finally:
        decode.close()
