"""Recorded decode steps give the tokens of plain ones, on a CPU, where recording runs the work."""

from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.config.args import build_config
from tandem.errors import ConfigError
from tandem.layers.parallel import SingleRank
from tandem.models.loader import load_model
from tandem.models.registry import load_model_config
from tandem.runner.graphs import bucket_sizes
from tandem.runner.worker import Worker
from tandem.scheduler.request import SamplingParams
from tandem.scheduler.step import PENDING_TOKEN, Chunk, NewRequest, StepPlan
from tests.decode_rank import Rank, run
from tests.tiny_models import TINY, save_tiny

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=TINY)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(request.param, tmp_path_factory.mktemp("graphs") / request.param)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, seed=1),
        SamplingParams(temperature=1.0, top_p=0.9, seed=5, frequency_penalty=0.5, logprobs=2),
    ],
    ids=["greedy", "random"],
)
def test_recorded_steps_sample_what_plain_ones_do(folder: Path, params: SamplingParams) -> None:
    plain = run(Rank(folder, None), params, 12)
    rank = Rank(folder, [2, 4, 6])
    recorded = run(rank, params, 12)
    assert rank.recorder.num_recorded == 3
    assert rank.recorder.num_replayed == 12
    for expected, found in zip(plain, recorded, strict=True):
        assert [item[:2] for item in found] == [item[:2] for item in expected]
        for (_, _, ours), (_, _, theirs) in zip(found, expected, strict=True):
            if params.logprobs:
                assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
                assert [i for i, _ in ours.top] == [i for i, _ in theirs.top]


def test_padding_rows_touch_their_own_slot_and_page_alone(folder: Path) -> None:
    rank = Rank(folder, [6])
    untouched = rank.arena.buffer.clone()
    rank.runner.execute(rank.prefill("a", SamplingParams(temperature=0, seed=1)))
    before = rank.arena.buffer.clone()
    assert not torch.equal(before, untouched)
    rank.runner.execute(rank.decode([("a", 5, 9)]))
    own = set(rank.pages("a"))
    geometry = rank.arena.geometry
    for views in rank.arena.views.values():
        for name, view in views.items():
            count = geometry.num_pages if name == "kv" else geometry.num_slots
            assert len(view) > count  # padding lies behind
    changed = (rank.arena.buffer != before).nonzero().flatten().numpy()
    pages = set((changed // geometry.page_nbytes).tolist())
    slot = rank.slot("a")
    in_slot = set(
        range(
            slot * geometry.slot_stride // geometry.page_nbytes,
            -(-(slot + 1) * geometry.slot_stride // geometry.page_nbytes),
        )
    )
    assert pages
    assert pages <= own | in_slot


def test_pending_tokens_need_not_come_to_the_host(folder: Path) -> None:
    """Two steps are started before the first one's tokens are asked for."""
    params = SamplingParams(temperature=0, seed=1)
    plain, overlapped = Rank(folder, None), Rank(folder, [2, 4])
    for rank in (plain, overlapped):
        for name in ("a", "ccc", "e"):
            rank.runner.execute(rank.prefill(name, params))
    starts = {"a": 5, "ccc": 8, "e": 1}
    first = [(name, start, 11) for name, start in starts.items()]
    samples = plain.runner.execute(plain.decode(first)).samples
    second = [(s.request_id, starts[s.request_id] + 1, s.token_id) for s in samples][::-1]
    expected = plain.runner.execute(plain.decode(second)).samples
    pending = overlapped.runner.submit(overlapped.decode(first))
    follow = [(name, start, PENDING_TOKEN) for name, start, _ in second]
    later = overlapped.runner.submit(overlapped.decode(follow))
    assert pending.result().samples == samples
    assert later.result().samples == expected


def test_a_step_beyond_the_largest_bucket_or_table_runs_plainly(folder: Path) -> None:
    rank = Rank(folder, [2])
    params = SamplingParams(temperature=0, seed=1)
    for name in ("a", "ccc", "e"):
        rank.runner.execute(rank.prefill(name, params))
    rank.runner.execute(rank.decode([("a", 5, 9), ("ccc", 8, 9), ("e", 1, 9)]))
    assert rank.recorder.num_replayed == 0
    rank.runner.execute(rank.decode([("a", 6, 9), ("ccc", 9, 9)]))
    assert rank.recorder.num_replayed == 1


def test_parameters_of_sampling_that_do_not_fit_beside_the_rows_are_sent_apart(
    folder: Path,
) -> None:
    """Biases, as many as the vocabulary; the room beside the rows is made too small for them."""
    bias = dict.fromkeys(range(500), -50.0)
    params = SamplingParams(temperature=0, seed=1, logit_bias=bias)
    rank = Rank(folder, [2])
    rank.runner.execute(rank.prefill("a", params))
    graphs = rank.runner._graphs
    assert graphs is not None
    graphs._capacity = 2048
    (sample,) = rank.runner.execute(rank.decode([("a", 5, 9)])).samples
    assert rank.recorder.num_replayed == 1
    assert sample.token_id >= 500


def test_buckets_waste_an_eighth_at_most() -> None:
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(5) == [1, 2, 4, 5]
    assert bucket_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    sizes = bucket_sizes(1024)
    assert sizes[-1] == 1024
    assert len(sizes) < 50
    for low, high in pairwise(sizes):
        assert high - low <= max(8, (high + 7) // 8)


def plan_of(prompt: list[int], params: SamplingParams) -> Iterator[StepPlan]:
    new = NewRequest("a", prompt, [], params)
    yield StepPlan(0, [], [new], [Chunk("a", 0, prompt, 0, 0, [20, 21], True)], 0)
    for step in range(6):
        token = yield  # type: ignore[misc]
        chunk = Chunk("a", len(prompt) + step, [token], 0, 2, [], True)
        yield StepPlan(1 + step, [], [], [chunk], 1)


def test_a_worker_records_the_rows_that_its_settings_name(folder: Path) -> None:
    tokens = {}
    for setting in ("auto", "2,1,2,64"):
        config = build_config(
            str(folder), {"decode_graphs": setting, "max_num_seqs": 4, "threads": 1}
        )
        with closing(Worker(config, rank=0, num_slabs=40, engine_id="test")) as worker:
            plans = plan_of([5, 6, 7], SamplingParams(temperature=0, seed=1))
            found = [worker.submit(next(plans)).result().samples[0].token_id]
            for _ in range(6):
                next(plans)
                found.append(worker.submit(plans.send(found[-1])).result().samples[0].token_id)
            tokens[setting] = found
            graphs = worker.runner._graphs
            assert (graphs is not None) == (setting != "auto")  # no GPU here
            if graphs is not None:
                assert graphs._buckets == [1, 2, 4]
    assert tokens["auto"] == tokens["2,1,2,64"]


@pytest.mark.parametrize("value", ["", "on", "0", "1,,2", "-1", "1.5", "²"])
def test_settings_that_name_no_rows_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="expected auto, off or numbers of rows"):
        build_config("model", {"decode_graphs": value})


def test_logits_are_written_where_they_shall_stay(folder: Path) -> None:
    model = load_model(folder, load_model_config(folder), SingleRank(), CPU, show_progress=False)
    hidden = torch.randn(3, 64)
    out = torch.full((3, 512), torch.nan)
    assert model.logits(hidden, out=out) is out
    np.testing.assert_array_equal(out.numpy(), model.logits(hidden).numpy())
