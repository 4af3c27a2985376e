"""Chooses the next token of each row from its logits.

A draw depends only on (seed, number of generated tokens, logits): not on neighbours, not on which
engine runs it. So a seeded request gives the same text alone, in a batch, after preemption and
across prefill and decode.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tandem.scheduler.request import SamplingParams
from tandem.state.ticket import TokenLogprob

# JSON has no infinity: the floor that stands for "impossible".
LOGPROB_FLOOR = -9999.0


@dataclass
class SamplingState:
    """What sampling one request needs: its parameters and the tokens that penalties count."""

    params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    eos_token_ids: tuple[int, ...]
    seed: int
    prompt_unique: torch.Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.params.repetition_penalty != 1.0:
            self.prompt_unique = torch.tensor(sorted(set(self.prompt_token_ids)), dtype=torch.int64)


@dataclass(frozen=True)
class Sampled:
    token_id: int
    logprob: TokenLogprob | None


def sample(logits: torch.Tensor, rows: Sequence[SamplingState]) -> list[Sampled]:
    """Sample one token a row.

    Args:
        logits: fp32 [R, vocab]; changed in place for rows with penalties, bias or min_tokens.
        rows: R sampling states, in row order.

    Logprobs are those of the model after penalties and bias, before temperature and truncation.
    """
    for index, row in enumerate(rows):
        _adjust(logits[index], row)
    if all(row.params.temperature == 0 for row in rows):
        tokens = logits.argmax(dim=-1).tolist()
    else:
        greedy = logits.argmax(dim=-1).tolist()
        tokens = [
            greedy[index] if row.params.temperature == 0 else _draw(logits[index], row)
            for index, row in enumerate(rows)
        ]
    logprobs: list[TokenLogprob | None] = [None] * len(rows)
    wanted = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    if wanted:
        table = torch.log_softmax(logits[wanted], dim=-1)
        for place, index in enumerate(wanted):
            logprobs[index] = _logprob(
                table[place], tokens[index], rows[index].params.logprobs or 0
            )
    return [Sampled(token, logprob) for token, logprob in zip(tokens, logprobs, strict=True)]


def _adjust(logits: torch.Tensor, row: SamplingState) -> None:
    """Penalties (Keskar et al. 2019 for repetition; OpenAI's presence and frequency), bias,
    min_tokens."""
    params = row.params
    device = logits.device
    if params.repetition_penalty != 1.0:
        assert row.prompt_unique is not None
        output = torch.tensor(row.output_token_ids, dtype=torch.int64)
        seen = torch.cat([row.prompt_unique, output]).unique().to(device)
        values = logits[seen]
        logits[seen] = torch.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
    if (params.presence_penalty or params.frequency_penalty) and row.output_token_ids:
        ids, counts = torch.tensor(row.output_token_ids, dtype=torch.int64).unique(
            return_counts=True
        )
        penalty = params.presence_penalty + params.frequency_penalty * counts.float()
        logits[ids.to(device)] -= penalty.to(device)
    for token_id, bias in params.logit_bias.items():
        logits[token_id] += bias
    if len(row.output_token_ids) < params.min_tokens:
        ends = set(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= set(row.eos_token_ids)
        for token_id in ends:
            logits[token_id] = -torch.inf


def _draw(logits: torch.Tensor, row: SamplingState) -> int:
    """Temperature, then top-k, top-p (Holtzman et al. 2020), min-p (Nguyen et al. 2024), one
    uniform."""
    params = row.params
    probs = torch.softmax(logits.double() / params.temperature, dim=-1)
    is_cut = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    if is_cut:
        # Stable: equal probabilities keep id order, so that every engine cuts the same set.
        values, ids = probs.sort(descending=True, stable=True)
        if params.top_k > 0:
            values = values[: params.top_k]
        if params.top_p < 1.0:
            before = values.cumsum(0) - values
            values = values[before < params.top_p * values.sum()]
        if params.min_p > 0.0:
            values = values[values >= params.min_p * values[0]]
    else:
        values, ids = probs, None
    total = values.cumsum(0)
    point = _uniform(row.seed, len(row.output_token_ids)) * float(total[-1])
    place = int(torch.searchsorted(total, point, right=True))
    place = min(place, len(values) - 1)
    if float(values[place]) == 0.0:  # rounding pushed the point past the last possible token
        place = int(values.nonzero()[-1])
    return place if ids is None else int(ids[place])


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from a counter-based generator (Philox, Salmon et al. 2011)."""
    generator = np.random.Philox(key=seed & (2**64 - 1), counter=position)
    return float(np.random.Generator(generator).random())


def _logprob(row: torch.Tensor, token_id: int, num_top: int) -> TokenLogprob:
    def finite(value: float) -> float:
        return max(value, LOGPROB_FLOOR)

    values, ids = row.topk(num_top) if num_top else (row[:0], row[:0])
    top = tuple(
        (int(index), finite(float(value)))
        for value, index in zip(values.tolist(), ids.tolist(), strict=True)
    )
    return TokenLogprob(logprob=finite(float(row[token_id])), top=top)
