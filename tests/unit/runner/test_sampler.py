"""Draws follow the distribution that was asked for, and depend on nothing but their own row."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.runner import sampler
from tandem.runner.philox import philox, uniforms
from tandem.runner.sampler import LOGPROB_FLOOR
from tandem.runner.sampling_table import SamplingTable
from tandem.scheduler.request import SamplingParams
from tandem.state.ticket import TokenLogprob

CPU = torch.device("cpu")
VOCAB = 16
EOS = 2
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -8.0] + [-30.0] * 8)


@dataclass
class State:
    """One request, as a worker hears of it."""

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]


@dataclass(frozen=True)
class Result:
    token_id: int
    logprob: TokenLogprob | None


def state(
    seed: int = 0,
    prompt: tuple[int, ...] = (3,),
    output: tuple[int, ...] = (),
    **params: object,
) -> State:
    return State(SamplingParams(seed=seed, **params), list(prompt), list(output))


def sample(logits: torch.Tensor, rows: Sequence[State]) -> list[Result]:
    """Sample for these requests, of which nothing was heard before."""
    table = SamplingTable(logits.shape[1], (EOS,), CPU)
    for row, item in enumerate(rows):
        table.set(row, item.params, item.prompt_token_ids, item.output_token_ids)
    return sample_again(table, logits, len(rows))


def sample_again(table: SamplingTable, logits: torch.Tensor, num_rows: int) -> list[Result]:
    plan = table.plan(np.arange(num_rows))
    given = {name: torch.from_numpy(array) for name, array in plan.arrays.items()}
    tokens, logprobs = sampler.sample(logits, plan, given, table.counts).wait()
    return list(map(Result, tokens, logprobs))


def draw(row: State, logits: torch.Tensor = LOGITS) -> int:
    return sample(logits.clone()[None], [row])[0].token_id


def draws(count: int = 3000, logits: torch.Tensor = LOGITS, **params: object) -> Counter:
    """Of as many seeds."""
    rows = [state(seed, **params) for seed in range(count)]
    return Counter(item.token_id for item in sample(logits.repeat(count, 1), rows))


def assert_distribution(counts: Counter, probs: torch.Tensor) -> None:
    """Frequencies within five standard deviations of probabilities."""
    total = sum(counts.values())
    for token, prob in enumerate(probs.tolist()):
        spread = 5 * math.sqrt(total * prob * (1 - prob)) + 1e-9
        assert abs(counts[token] - total * prob) <= spread, (token, counts[token], total * prob)


def adjusted(logits: torch.Tensor, row: State) -> torch.Tensor:
    """Logits after penalties, bias and masks, which sampling writes into its argument."""
    logits = logits.clone()[None]
    sample(logits, [row])
    return logits[0]


# --- greedy and temperature ---


def test_temperature_zero_takes_the_best_whatever_else_is_set() -> None:
    assert draw(state(temperature=0, top_k=3, top_p=0.1, min_p=0.5, seed=5)) == 0
    assert draw(state(temperature=0), torch.arange(16.0)) == 15


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_temperature_shapes_the_distribution(temperature: float) -> None:
    assert_distribution(
        draws(temperature=temperature), torch.softmax(LOGITS.double() / temperature, 0)
    )


def test_a_tiny_temperature_is_greedy_and_finite() -> None:
    assert set(draws(200, temperature=1e-6)) == {0}


def test_greedy_and_random_rows_mix() -> None:
    rows = [state(seed, temperature=1.0 if seed % 2 else 0.0) for seed in range(200)]
    tokens = [item.token_id for item in sample(LOGITS.repeat(200, 1), rows)]
    assert set(tokens[::2]) == {0}
    assert len(set(tokens[1::2])) > 3
    assert tokens[1::2] == [draw(row) for row in rows[1::2]]


# --- truncation ---


def test_top_k_keeps_the_best() -> None:
    probs = torch.zeros(VOCAB).double()
    probs[:3] = torch.softmax(LOGITS[:3].double(), 0)
    assert_distribution(draws(top_k=3), probs)
    assert set(draws(300, top_k=1)) == {0}


@pytest.mark.parametrize("top_k", [0, -1, 16, 1000])
def test_top_k_off_or_beyond_the_vocabulary_changes_nothing(top_k: int) -> None:
    assert draws(300, top_k=top_k) == draws(300)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    probs = torch.softmax(LOGITS.double(), 0)
    both = float(probs[:2].sum())
    assert set(draws(500, top_p=both - 1e-6)) == {0, 1}
    assert set(draws(500, top_p=both + 1e-6)) == {0, 1, 2}
    assert set(draws(300, top_p=1e-9)) == {0}


def test_top_p_counts_what_top_k_has_left() -> None:
    probs = torch.softmax(LOGITS[:3].double(), 0)
    top_p = float(probs[:2].sum()) - 1e-6  # of three tokens; of all, it would take more
    assert set(draws(500, top_k=3, top_p=top_p)) == {0, 1}


def test_min_p_is_relative_to_the_best() -> None:
    ratio = math.exp(float(LOGITS[2] - LOGITS[0]))
    assert set(draws(500, min_p=ratio - 1e-6)) == {0, 1, 2}
    assert set(draws(500, min_p=ratio + 1e-6)) == {0, 1}
    assert set(draws(100, min_p=1.0)) == {0}


def test_equal_probabilities_are_cut_by_id() -> None:
    """The same set on every engine."""
    assert set(draws(400, torch.zeros(VOCAB), top_k=4)) == {0, 1, 2, 3}


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((VOCAB,), -math.inf)
    logits[7] = -50.0
    logits[9] = -50.0
    assert set(draws(300, logits)) == {7, 9}
    assert set(draws(300, logits, top_p=0.999999)) <= {7, 9}


@pytest.mark.parametrize("params", [{"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.2}, {}])
def test_rows_with_and_without_cuts_do_not_see_each_other(params: dict) -> None:
    own = [state(seed, **params) for seed in range(100)]
    alone = [item.token_id for item in sample(LOGITS.repeat(100, 1), own)]
    others = [{"top_k": 5}, {"top_p": 0.5}, {"temperature": 0.0}, {"min_p": 0.5}, {"top_k": 1}]
    rows = []
    for seed, row in enumerate(own):
        rows += [row, state(seed, **others[seed % len(others)])]
    assert [item.token_id for item in sample(LOGITS.repeat(200, 1), rows)][::2] == alone


def test_a_top_k_beyond_the_short_selection_is_exact() -> None:
    """The whole vocabulary is sorted then."""
    logits = -torch.arange(3000.0) / 1000
    tokens = {draw(state(seed, top_k=2000), logits) for seed in range(400)}
    assert max(tokens) < 2000
    assert max(tokens) > 1024


# --- seeds ---


def test_a_draw_depends_on_its_seed_and_position_alone() -> None:
    row = state(seed=11, output=(5, 6))
    alone = draw(row)
    neighbours = [state(seed, temperature=0.7, top_k=5) for seed in range(7)]
    for place in range(8):
        rows = [*neighbours[:place], row, *neighbours[place:]]
        logits = torch.randn(8, VOCAB)
        logits[place] = LOGITS
        assert sample(logits, rows)[place].token_id == alone
    # Other tokens at the same position: the same draw. (Penalties aside, it does not see them.)
    assert draw(state(seed=11, output=(9, 9))) == alone
    assert len({draw(state(seed=11, output=(0,) * count)) for count in range(40)}) > 3


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**31))
def test_every_seed_and_position_gives_a_token(seed: int, position: int) -> None:
    row = state(seed)
    row.output_token_ids = range(position)
    assert 0 <= draw(row) < VOCAB


def test_the_draws_of_one_seed_follow_the_distribution() -> None:
    rows = []
    for position in range(3000):
        row = state(seed=3)
        row.output_token_ids = range(position)
        rows.append(row)
    counts = Counter(item.token_id for item in sample(LOGITS.repeat(3000, 1), rows))
    assert_distribution(counts, torch.softmax(LOGITS.double(), 0))


def test_uniforms_are_those_of_the_published_generator() -> None:
    """The known answers of its authors, and 53 bits of the first two words."""
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    zeros = np.zeros((4, 1), dtype=np.uint64)
    assert philox(zeros[:2], zeros)[:, 0].tolist() == words
    full = np.full((4, 1), 0xFFFFFFFF, dtype=np.uint64)
    assert philox(full[:2], full)[:, 0].tolist() == [
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    ]
    expected = ((words[0] << 32 | words[1]) >> 11) / 2**53
    assert uniforms(np.array([0], np.uint64), np.array([0])).tolist() == [expected]


def test_positions_and_seeds_beyond_32_bits_are_told_apart() -> None:
    seeds = np.array([7, 7, 7 + (1 << 32), 7], dtype=np.uint64)
    positions = np.array([1, 1 + (1 << 32), 1, 1])
    numbers = uniforms(seeds, positions).tolist()
    assert numbers[0] == numbers[3]
    assert len(set(numbers)) == 3


# --- penalties, bias, masks ---


def test_presence_and_frequency_count_generated_tokens_alone() -> None:
    row = state(prompt=(0, 0, 1), output=(4, 4, 4, 5), presence_penalty=0.5, frequency_penalty=0.25)
    expected = LOGITS.clone()
    expected[4] -= 0.5 + 3 * 0.25
    expected[5] -= 0.5 + 0.25
    torch.testing.assert_close(adjusted(LOGITS, row), expected)


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_before_the_first_token_nothing_is_penalised(name: str) -> None:
    row = state(prompt=(0, 1, 2), **{name: 2.0})
    assert torch.equal(adjusted(LOGITS, row), LOGITS)


def test_negative_penalties_encourage() -> None:
    row = state(output=(4,), presence_penalty=-2.0)
    assert float(adjusted(LOGITS, row)[4]) == float(LOGITS[4]) + 2.0


def test_repetition_counts_prompt_and_generated_tokens_once_each() -> None:
    row = state(prompt=(0, 0, 6), output=(1, 6, 6), repetition_penalty=2.0)
    expected = LOGITS.clone()
    for token in (0, 1):
        expected[token] /= 2  # positive
    expected[6] *= 2  # negative
    torch.testing.assert_close(adjusted(LOGITS, row), expected)


def test_penalties_are_the_same_wherever_the_first_tokens_were_made() -> None:
    """As on a decode engine, which gets them with the request."""
    params = {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.2}
    grown = state(temperature=0, **params)
    table = SamplingTable(VOCAB, (EOS,), CPU)
    table.set(0, grown.params, grown.prompt_token_ids, [])
    for token in (4, 5, 4):
        best = LOGITS.clone()
        best[token] = 50.0
        assert [item.token_id for item in sample_again(table, best[None], 1)] == [token]
    logits = LOGITS.clone()[None]
    sample_again(table, logits, 1)
    given_before = state(temperature=0, output=(4, 5, 4), **params)
    assert torch.equal(logits[0], adjusted(LOGITS, given_before))


def test_logit_bias_is_added() -> None:
    row = state(logit_bias={3: 5.0, 0: -100.0}, temperature=0)
    expected = LOGITS.clone()
    expected[3] += 5
    expected[0] -= 100
    torch.testing.assert_close(adjusted(LOGITS, row), expected)
    assert draw(row) == 3


def test_until_min_tokens_no_token_that_would_end_is_drawn() -> None:
    logits = torch.zeros(VOCAB)
    logits[EOS] = logits[5] = 20.0
    params = {"min_tokens": 2, "stop_token_ids": (5,)}
    assert not {EOS, 5} & set(draws(200, logits, **params))
    row = state(output=(1,), temperature=0, **params)
    assert draw(row, logits) not in (EOS, 5)
    row = state(output=(1, 1), temperature=0, **params)
    assert draw(row, logits) == EOS


def test_min_tokens_leaves_an_ignored_end_of_sequence_alone() -> None:
    logits = torch.zeros(VOCAB)
    logits[EOS] = 20.0
    assert draw(state(temperature=0, min_tokens=3, ignore_eos=True), logits) == EOS


def test_rows_are_adjusted_by_their_own_parameters_alone() -> None:
    logits = LOGITS.repeat(3, 1)
    rows = [state(output=(0,)), state(output=(0,), presence_penalty=2.0), state(output=(0,))]
    sample(logits, rows)
    assert torch.equal(logits[0], LOGITS)
    assert torch.equal(logits[2], LOGITS)
    assert float(logits[1, 0]) == 0.0


# --- logprobs ---


def test_logprobs_are_of_the_whole_distribution_before_temperature_and_cuts() -> None:
    row = state(seed=4, temperature=0.3, top_k=2, logprobs=3)
    (result,) = sample(LOGITS.clone()[None], [row])
    expected = torch.log_softmax(LOGITS, 0)
    assert result.logprob is not None
    assert result.logprob.logprob == pytest.approx(float(expected[result.token_id]))
    assert [token for token, _ in result.logprob.top] == [0, 1, 2]
    assert [value for _, value in result.logprob.top] == pytest.approx(expected[:3].tolist())


def test_logprobs_follow_penalties_and_bias() -> None:
    row = state(temperature=0, logit_bias={0: -100.0}, logprobs=1)
    (result,) = sample(LOGITS.clone()[None], [row])
    changed = LOGITS.clone()
    changed[0] -= 100
    assert result.logprob is not None
    assert result.logprob.logprob == pytest.approx(float(torch.log_softmax(changed, 0)[1]))
    assert result.logprob.top[0][0] == 1


def test_logprobs_zero_reports_the_sampled_token_alone_and_none_nothing() -> None:
    rows = [
        state(temperature=0, logprobs=0),
        state(temperature=0),
        state(temperature=0, logprobs=2),
    ]
    first, second, third = sample(LOGITS.repeat(3, 1), rows)
    assert first.logprob is not None
    assert first.logprob.top == ()
    assert second.logprob is None
    assert third.logprob is not None
    assert len(third.logprob.top) == 2


def test_impossible_tokens_have_a_finite_logprob() -> None:
    """JSON has no infinity."""
    row = state(temperature=0, min_tokens=1, stop_token_ids=tuple(range(14)), logprobs=20)
    logits = LOGITS.repeat(2)[None]
    (result,) = sample(logits, [row])
    assert result.logprob is not None
    values = [value for _, value in result.logprob.top]
    assert len(values) == 20
    assert min(values) == LOGPROB_FLOOR
    assert all(map(math.isfinite, values))
    json.dumps(values, allow_nan=False)
