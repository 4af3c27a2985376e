"""Chooses the next token of each row from its logits, on the device, all rows at once.

A draw depends only on (seed, number of generated tokens, logits): not on neighbours, not on which
engine runs it. So a seeded request gives the same text alone, in a batch, after preemption and
across prefill and decode. The host waits for nothing here.
"""

from collections.abc import Mapping

import numpy as np
import torch

from tandem.runner.sampling_table import PenaltyCounts, SamplingPlan
from tandem.runner.staging import Fetch
from tandem.state.ticket import TokenLogprob

# JSON has no infinity: the floor that stands for "impossible".
LOGPROB_FLOOR = -9999.0

Tensors = Mapping[str, torch.Tensor]


class SampledTokens:
    """Tokens of one step: on the device at once, on the host when they have arrived."""

    def __init__(
        self, plan: SamplingPlan, tokens: torch.Tensor, logprobs: torch.Tensor | None
    ) -> None:
        """tokens: int64 [R].    logprobs: fp64 [n, 1 + 2 K] of the rows that want them: that of
        the token, the K best ones, their ids."""
        self.tokens = tokens
        self._plan = plan
        values = tokens
        if logprobs is not None:
            values = torch.cat([tokens, logprobs.view(torch.int64).flatten()])
        self._fetch = Fetch(values)

    def wait(self) -> tuple[list[int], list[TokenLogprob | None]]:
        """Tokens and what is reported of them, in row order."""
        plan = self._plan
        values = self._fetch.wait()
        tokens = values[: plan.num_rows].tolist()
        logprobs: list[TokenLogprob | None] = [None] * len(tokens)
        if len(values) == plan.num_rows:
            return tokens, logprobs
        num_top = plan.max_logprobs
        table = values[plan.num_rows :].view(np.float64).reshape(-1, 1 + 2 * num_top)
        table = table.clip(min=LOGPROB_FLOOR)
        places = plan.arrays["logprobs.index"].tolist()
        for row, wanted, place in zip(table.tolist(), plan.num_logprobs, places, strict=True):
            values_of, ids = row[1 : 1 + num_top], row[1 + num_top :]
            top = tuple((int(ids[i]), values_of[i]) for i in range(min(wanted, num_top)))
            logprobs[place] = TokenLogprob(logprob=row[0], top=top)
        return tokens, logprobs


def sample(
    logits: torch.Tensor,
    plan: SamplingPlan,
    given: Tensors,
    counts: PenaltyCounts,
    greedy: torch.Tensor | None = None,
) -> SampledTokens:
    """Sample one token a row.

    Args:
        logits: fp32 [R, vocab]; changed in place for rows with penalties, bias or min_tokens.
        plan, given: what the rows need, and its arrays on the device.
        counts: of the requests with penalties; their new tokens are counted.
        greedy: int64 [R], the best token of each row before any change, if it is known.

    Logprobs are those of the model after penalties and bias, before temperature and truncation.
    """
    if "penalty.index" in given:
        _penalize(logits, given, counts)
    if "bias.row" in given:
        where = (given["bias.row"], given["bias.token"])
        logits[where] = logits[where] + given["bias.value"]
    if "banned.row" in given:
        logits[given["banned.row"], given["banned.token"]] = -torch.inf
    is_changed = not given.keys().isdisjoint(("penalty.index", "bias.row", "banned.row"))
    tokens = logits.argmax(dim=-1) if greedy is None or is_changed else greedy
    if "random.index" in given:
        index = given["random.index"]
        if len(index) == len(tokens):
            tokens = _draw(logits, plan, given)
        else:
            tokens = tokens.index_copy(0, index, _draw(logits[index], plan, given))
    if "penalty.index" in given:
        counts.count(given["penalty.slot"], tokens[given["penalty.index"]])
    logprobs = None
    if "logprobs.index" in given:
        index = given["logprobs.index"]
        logprobs = _logprobs(logits[index], tokens[index], plan.max_logprobs)
    return SampledTokens(plan, tokens, logprobs)


def _penalize(logits: torch.Tensor, given: Tensors, counts: PenaltyCounts) -> None:
    """Keskar et al. 2019 for repetition; OpenAI's presence and frequency."""
    index, slots = given["penalty.index"], given["penalty.slot"]
    generated = counts.generated[slots]  # [n, vocab]
    is_generated = generated > 0
    values = logits[index]
    repetition = given["repetition"].unsqueeze(1)
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(is_generated | counts.is_in_prompt[slots], repeated, values)
    presence = given["presence"].unsqueeze(1)
    penalty = presence + given["frequency"].unsqueeze(1) * generated
    logits[index] = torch.where(is_generated, values - penalty, values)


def _draw(logits: torch.Tensor, plan: SamplingPlan, given: Tensors) -> torch.Tensor:
    """Temperature, then top-k, top-p (Holtzman et al. 2020), min-p (Nguyen et al. 2024), one
    uniform a row. Tokens stay in the order of their ids: nothing is sorted to draw.
    """
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / given["temperature"].unsqueeze(1)
    weights = scaled.exp()  # of the best token: 1
    if "short.index" in given:
        _cut(scaled, weights, given, "short.index", plan.max_top_k)
    if "long.index" in given:
        _cut(scaled, weights, given, "long.index", None)
    weights = torch.where(weights < given["min_p"].unsqueeze(1), 0.0, weights)
    ends = weights.cumsum(dim=-1, dtype=torch.float64)
    total = ends[:, -1]
    # Rounding must not push the point past the last possible token.
    last = torch.nextafter(total, torch.zeros_like(total))
    points = torch.minimum(given["uniform"] * total, last)
    places = torch.searchsorted(ends, points.unsqueeze(1), right=True).squeeze(1)
    return places.clamp(max=logits.shape[1] - 1)


def _cut(
    scaled: torch.Tensor, weights: torch.Tensor, given: Tensors, name: str, num_best: int | None
) -> None:
    """Set to zero the weights that top-k and top-p cut off, in the rows that `name` lists.

    Equal tokens are cut from the highest id on, so that every engine cuts the same set.
    num_best: how many of the best decide it; None for all.
    """
    index = given[name]
    own = scaled[index]  # [n, vocab]
    if num_best is None:
        best = own.sort(dim=-1, descending=True).values
    else:
        best = own.topk(num_best, dim=-1).values
    places = torch.arange(best.shape[1], device=best.device)
    is_kept = places < given["top_k"][index].unsqueeze(1)
    mass = best.exp().double() * is_kept
    before = mass.cumsum(dim=-1) - mass
    top_p = given["top_p"][index].unsqueeze(1)
    is_kept &= before < top_p * mass.sum(dim=-1, keepdim=True)
    num_kept = is_kept.sum(dim=-1, keepdim=True).clamp(min=1)
    worst = best.gather(1, num_kept - 1)
    is_above, is_equal = own > worst, own == worst
    num_equal = num_kept - is_above.sum(dim=-1, keepdim=True)
    is_equal &= is_equal.cumsum(dim=-1) <= num_equal
    weights[index] = torch.where(is_above | is_equal, weights[index], 0.0)


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> torch.Tensor:
    """fp64 [n, 1 + 2 K]: see SampledTokens."""
    table = torch.log_softmax(logits, dim=-1)
    parts = [table.gather(1, tokens.unsqueeze(1))]
    if num_top:
        best = table.topk(num_top, dim=-1)
        parts += [best.values, best.indices]
    return torch.cat([part.double() for part in parts], dim=1)
