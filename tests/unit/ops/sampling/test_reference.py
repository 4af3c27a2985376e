"""Draws against a loop over sorted tokens in float64, penalties against the formulas."""

import math

import pytest
import torch

from tandem.ops.sampling.reference import draw, penalize
from tests.gpu.cases import sampling_problem
from tests.tolerances import assert_close


def loop(logits, temperature, uniform, top_k, top_p, min_p):
    """One row: tokens from the best on, of equal ones the lowest id first, as long as they count;
    then the first one, in the order of ids, whose running sum passes uniform * sum."""
    scaled = ((logits - logits.max()) / temperature).tolist()
    best = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))[:top_k]
    total = math.fsum(math.exp(scaled[token]) for token in best)
    kept, mass = [], 0.0
    for token in best:
        if kept and mass >= top_p * total:
            break
        mass += math.exp(scaled[token])
        kept.append(token)
    kept = sorted(token for token in kept if math.exp(scaled[token]) >= min_p)
    point = uniform * math.fsum(math.exp(scaled[token]) for token in kept)
    mass = 0.0
    for token in kept:
        mass += math.exp(scaled[token])
        if mass > point:
            return token
    return kept[-1]


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("cuts", ["", "k", "p", "m", "kp", "kpm"])
def test_draws_are_those_of_a_loop_over_tokens(cuts, has_ties):
    problem = sampling_problem("cpu", 24, 90, cuts, 2.0, has_ties)
    logits, rows, *columns = problem[:7]
    found = draw(*problem).tolist()
    expected = [
        loop(logits[row], *(column[i].item() for column in columns))
        for i, row in enumerate(rows.tolist())
    ]
    assert found == expected


def test_the_few_best_tokens_decide_as_all_of_them_do():
    problem = list(sampling_problem("cpu", 24, 90, "kp", 2.0, True))
    cut = (problem[4] < 90).nonzero().flatten()
    problem[4][cut] = problem[4][cut].clamp(max=20)
    problem[7:] = [0, None, cut]
    expected = draw(*problem)
    problem[7:] = [20, cut, None]
    assert torch.equal(draw(*problem), expected)


def test_penalties_are_those_of_the_formulas():
    logits = torch.tensor([[1.0, -1.0, 2.0, -2.0], [1.0, 1.0, 1.0, 1.0]])
    generated = torch.tensor([[9, 9, 9, 9], [0, 0, 3, 1]]).int()
    is_in_prompt = torch.tensor([[True] * 4, [True, True, False, False]])
    one = torch.ones(1)
    penalize(
        logits, torch.tensor([0]), torch.tensor([1]), generated, is_in_prompt,
        2 * one, 0.5 * one, 0.25 * one,
    )  # fmt: skip
    expected = [[0.5, -2.0, 1.0 - 1.25, -4.0 - 0.75], [1.0] * 4]
    assert_close(logits, torch.tensor(expected).double())
