"""Recorded prefill steps give the tokens of plain ones, on a CPU, where recording runs the work."""

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from tandem.config.args import build_config
from tandem.errors import ConfigError
from tandem.runner.prefill_graphs import bucket_tokens
from tandem.runner.worker import Worker
from tandem.scheduler.request import SamplingParams
from tandem.scheduler.step import Chunk, NewRequest, StepPlan
from tests.decode_rank import LENGTHS, PROMPTS, Rank, run
from tests.tiny_models import TINY, save_tiny

GREEDY = SamplingParams(temperature=0, seed=1, logprobs=2)


@pytest.fixture(scope="module", params=TINY)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(request.param, tmp_path_factory.mktemp("graphs") / request.param)


def chunks_of(rank: Rank, cuts: list[tuple[str, int, int]], sampled: set[str]) -> StepPlan:
    """Tokens [start, stop) of each named prompt; a request is new where it starts."""
    new = [NewRequest(name, PROMPTS[name], [], GREEDY) for name, start, _ in cuts if not start]
    chunks = [
        Chunk(
            name, start, PROMPTS[name][start:stop], rank.slot(name), 0, rank.pages(name),
            name in sampled,
        )
        for name, start, stop in cuts
    ]  # fmt: skip
    return StepPlan(0, [], new, chunks, 0)


STEPS = [
    ([("bb", 0, 17)], {"bb"}),
    ([("dddd", 0, 9), ("a", 0, 5)], {"a"}),
    ([("dddd", 9, 25), ("e", 0, 1), ("ccc", 0, 8)], {"e"}),
    ([("dddd", 25, 30)], {"dddd"}),
    ([("dddd", 0, 20), ("bb", 0, 17)], set()),
]


def test_recorded_steps_sample_what_plain_ones_do(folder: Path) -> None:
    """Whole prompts and parts of them, some sampled, in steps that are filled up or just fit."""
    plain, rank = Rank(folder, None), Rank(folder, None, prefill_buckets=[16, 25, 40])
    assert rank.recorder.num_recorded == 6
    for cuts, sampled in STEPS:
        expected = plain.runner.execute(chunks_of(plain, cuts, sampled)).samples
        found = rank.runner.execute(chunks_of(rank, cuts, sampled)).samples
        assert [(s.request_id, s.token_id) for s in found] == [
            (s.request_id, s.token_id) for s in expected
        ]
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.logprob is not None
            assert theirs.logprob is not None
            assert ours.logprob.logprob == pytest.approx(theirs.logprob.logprob, abs=1e-3)
    assert rank.recorder.num_replayed == len(STEPS)


def test_decode_steps_go_on_from_recorded_prefills(folder: Path) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=5, frequency_penalty=0.5)
    plain = run(Rank(folder, None), params, 12)
    rank = Rank(folder, [2, 4, 6], prefill_buckets=[8, 32])
    assert run(rank, params, 12) == plain
    assert rank.recorder.num_replayed == 12 + len(PROMPTS)


def test_padding_tokens_touch_their_own_slot_and_page_alone(folder: Path) -> None:
    rank, plain = Rank(folder, None, prefill_buckets=[60]), Rank(folder, None)
    for one in (rank, plain):
        one.runner.execute(one.prefill("a", GREEDY))
    assert rank.recorder.num_replayed == 1
    changed, expected = ((one.arena.buffer != 0xFF).nonzero() for one in (rank, plain))
    geometry = rank.arena.geometry
    pages = set((changed // geometry.page_nbytes).flatten().tolist())
    assert pages
    assert pages == set((expected // geometry.page_nbytes).flatten().tolist())


def test_long_wide_and_mixed_steps_run_plainly(folder: Path) -> None:
    rank = Rank(folder, None, prefill_buckets=[20])
    rank.runner.execute(chunks_of(rank, [("dddd", 0, 21)], set()))
    rank.runner.execute(chunks_of(rank, [(name, 0, 1) for name in LENGTHS], set()))
    mixed = chunks_of(rank, [("a", 1, 2), ("bb", 1, 9)], {"a"})
    rank.runner.execute(msgspec.structs.replace(mixed, num_decode=1))
    assert rank.recorder.num_replayed == 0
    rank.runner.execute(chunks_of(rank, [("bb", 9, 17)], {"bb"}))
    assert rank.recorder.num_replayed == 1


def test_buckets_waste_128_tokens_or_an_eighth_at_most() -> None:
    assert bucket_tokens(100) == []
    assert bucket_tokens(300) == [128, 256]
    sizes = bucket_tokens(1 << 20)
    assert sizes[-1] == 2048
    assert max(high - low for low, high in pairwise(sizes)) <= 256


def test_a_worker_records_the_tokens_that_its_settings_name(folder: Path) -> None:
    found = {}
    for setting in ("auto", "8,32,8"):
        options = {"prefill_graphs": setting, "max_num_seqs": 4, "threads": 1}
        worker = Worker(build_config(str(folder), options), rank=0, num_slabs=40, engine_id="test")
        new = NewRequest("a", [5, 6, 7], [], GREEDY)
        plan = StepPlan(0, [], [new], [Chunk("a", 0, [5, 6, 7], 0, 0, [20], True)], 0)
        found[setting] = worker.submit(plan).result().samples[0].token_id
        graphs = worker.runner._prefill_graphs
        assert (graphs is not None) == (setting != "auto")  # no GPU here
        if graphs is not None:
            assert graphs._buckets == [8, 32]
        worker.close()
    assert found["auto"] == found["8,32,8"]


@pytest.mark.parametrize("value", ["", "on", "0", "1,,2", "-1"])
def test_settings_that_name_no_tokens_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="expected auto, off or numbers of tokens"):
        build_config("model", {"prefill_graphs": value})
