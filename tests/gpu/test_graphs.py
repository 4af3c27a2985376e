"""Recorded decode steps and sampling on a GPU say what plain steps and the CPU say."""

import msgspec
import numpy as np
import pytest
import torch

from tandem.runner import sampler
from tandem.runner.sampling_table import SamplingTable
from tandem.runner.staging import Staging
from tandem.scheduler.request import SamplingParams
from tandem.scheduler.step import PENDING_TOKEN
from tests.decode_rank import LENGTHS, Rank, run
from tests.tiny_models import TINY, save_tiny
from tests.unit.runner import test_prefill_graphs as prefills

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=TINY)
def folder(request, tmp_path_factory):
    return save_tiny(request.param, tmp_path_factory.mktemp("graphs") / request.param)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, seed=1),
        SamplingParams(temperature=1.0, top_p=0.9, seed=5, frequency_penalty=0.5, logprobs=2),
    ],
    ids=["greedy", "random"],
)
def test_recorded_steps_sample_what_plain_ones_do(folder, params):
    plain = run(Rank(folder, None, "cuda"), params, 12)
    rank = Rank(folder, [2, 4, 6], "cuda")
    recorded = run(rank, params, 12)
    assert (rank.recorder.num_recorded, rank.recorder.num_replayed) == (3, 12)
    for expected, found in zip(plain, recorded, strict=True):
        assert [item[:2] for item in found] == [item[:2] for item in expected]
        for (_, _, ours), (_, _, theirs) in zip(found, expected, strict=True):
            if params.logprobs:
                assert ours.logprob == pytest.approx(theirs.logprob, abs=5e-3)


def test_recorded_prefill_steps_sample_what_plain_ones_do(folder):
    plain = Rank(folder, None, "cuda")
    rank = Rank(folder, None, "cuda", prefill_buckets=[16, 25, 40])
    for cuts, sampled in prefills.STEPS:
        expected, found = (
            one.runner.execute(prefills.chunks_of(one, cuts, sampled)).samples
            for one in (plain, rank)
        )
        assert [(s.request_id, s.token_id) for s in found] == [
            (s.request_id, s.token_id) for s in expected
        ]
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.logprob.logprob == pytest.approx(theirs.logprob.logprob, abs=5e-3)
    assert rank.recorder.num_replayed == len(prefills.STEPS)


def test_pending_tokens_need_not_come_to_the_host(folder):
    params = SamplingParams(temperature=0, seed=1)
    plain, overlapped = Rank(folder, None, "cuda"), Rank(folder, [2, 4], "cuda")
    starts = {"a": 5, "ccc": 8, "e": 1}
    for rank in (plain, overlapped):
        for name in starts:
            rank.runner.execute(rank.prefill(name, params))
    rows = [(name, start, 11) for name, start in starts.items()]
    pending = [overlapped.runner.submit(overlapped.decode(rows))]
    expected = [plain.runner.execute(plain.decode(rows)).samples]
    for step in range(1, 8):
        last = expected[-1]
        rows = [(s.request_id, starts[s.request_id] + step, s.token_id) for s in last]
        expected.append(plain.runner.execute(plain.decode(rows)).samples)
        follow = [(name, start, PENDING_TOKEN) for name, start, _ in rows]
        pending.append(overlapped.runner.submit(overlapped.decode(follow)))
    assert [step.result().samples for step in pending] == expected


SAMPLINGS = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "top_k": 40},
    {"top_p": 0.9},
    {"top_k": 50, "top_p": 0.8},
    {"min_p": 0.05},
    {"top_k": 2000, "top_p": 0.95, "min_p": 0.01},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    {"logit_bias": {7: 4.0, 9: -50.0}, "logprobs": 5},
    {"temperature": 0.0, "min_tokens": 4, "logprobs": 0},
]


@pytest.fixture(scope="module")
def rank(tmp_path_factory):
    return Rank(save_tiny("nemotron_h_moe", tmp_path_factory.mktemp("rank")), [2, 4], "cuda")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("fields", SAMPLINGS, ids=str)
def test_to_start_a_step_waits_for_nothing_on_the_device(rank, fields):
    """Else the host could not plan a step while the one before runs: any hidden wait raises."""
    names = ("a", "ccc", "e")

    def start():
        pending = []
        for name in names:
            plan = rank.prefill(name, SamplingParams(seed=1, **fields))
            plan.forget.append(name)  # of the test before
            pending.append(rank.runner.submit(plan))
        for step in range(3):
            rows = [(name, LENGTHS[name] + step, PENDING_TOKEN if step else 9) for name in names]
            plan = rank.decode(rows)
            if step == 2:  # one row of several is not sampled
                plan.chunks[0] = msgspec.structs.replace(plan.chunks[0], sample=False)
            pending.append(rank.runner.submit(plan))
        return pending

    [step.result() for step in start()]  # compiled, and memory taken
    try:
        torch.cuda.set_sync_debug_mode("error")
        pending = start()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [len(step.result().samples) for step in pending] == [1, 1, 1, 3, 3, 2]


def test_sampling_on_the_device_gives_the_tokens_of_the_cpu():
    """The same uniforms, cuts and penalties, ties included: logits are rounded to bf16."""
    vocab, num_rows = 4000, 8 * len(SAMPLINGS)
    generator = torch.Generator().manual_seed(3)
    tables = {name: SamplingTable(vocab, (2,), torch.device(name)) for name in ("cpu", "cuda")}
    for row in range(num_rows):
        params = SamplingParams(seed=row, **SAMPLINGS[row % len(SAMPLINGS)])
        prompt = torch.randint(0, vocab, (50,), generator=generator).tolist()
        for table in tables.values():
            table.set(row, params, prompt, prompt[:3])
    num_equal = 0
    for _ in range(4):
        logits = (3 * torch.randn(num_rows, vocab, generator=generator)).bfloat16().float()
        found = {}
        for name, table in tables.items():
            plan = table.plan(np.arange(num_rows))
            given = Staging(torch.device(name)).send(plan.arrays)
            sampled = sampler.sample(logits.clone().to(name), plan, given, table.counts)
            found[name] = sampled.wait()
        (ours, our_logprobs), (theirs, their_logprobs) = found["cuda"], found["cpu"]
        num_equal += sum(a == b for a, b in zip(ours, theirs, strict=True))
        for a, b in zip(our_logprobs, their_logprobs, strict=True):
            assert (a is None) == (b is None)
            if a is not None and a.top:
                assert [v for _, v in a.top] == pytest.approx([v for _, v in b.top], abs=1e-4)
    # Sums over the vocabulary round differently: a draw at an edge may fall to its neighbour.
    assert num_equal >= 4 * num_rows - 1
