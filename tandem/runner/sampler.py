"""Chooses the next token of each row from its logits, on the device, all rows at once.

A draw depends only on (seed, number of generated tokens, logits): not on neighbours, not on which
engine runs it. So a seeded request gives the same text alone, in a batch, after preemption and
across prefill and decode. The host waits for nothing here.
"""

from collections.abc import Mapping

import numpy as np
import torch

from tandem.ops.sampling import draw, penalize
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
        where = (given["banned.row"], given["banned.token"])
        # A number of the host would be copied, and the copy waited for.
        logits[where] = torch.full_like(where[0], -torch.inf, dtype=logits.dtype)
    tokens = greedy
    if greedy is None or not given.keys().isdisjoint(("penalty.index", "bias.row", "banned.row")):
        tokens = None
    if "random.index" in given:
        index = given["random.index"]
        drawn = _draw(logits, plan, given)
        if len(index) == len(logits):
            tokens = drawn
        else:
            best = logits.argmax(dim=-1) if tokens is None else tokens
            tokens = best.index_copy(0, index, drawn)
    if tokens is None:
        tokens = logits.argmax(dim=-1)
    if "penalty.index" in given:
        counts.count(given["penalty.slot"], tokens[given["penalty.index"]])
    logprobs = None
    if "logprobs.index" in given:
        index = given["logprobs.index"]
        logprobs = _logprobs(logits[index], tokens[index], plan.max_logprobs)
    return SampledTokens(plan, tokens, logprobs)


def _penalize(logits: torch.Tensor, given: Tensors, counts: PenaltyCounts) -> None:
    penalize(
        logits,
        given["penalty.index"],
        given["penalty.slot"],
        counts.generated,
        counts.is_in_prompt,
        given["repetition"],
        given["presence"],
        given["frequency"],
    )


def _draw(logits: torch.Tensor, plan: SamplingPlan, given: Tensors) -> torch.Tensor:
    """int64 [n], of the rows in random.index."""
    return draw(
        logits,
        given["random.index"],
        given["temperature"],
        given["uniform"],
        given["top_k"],
        given["top_p"],
        given["min_p"],
        plan.max_top_k,
        given.get("short.index"),
        given.get("long.index"),
    )


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> torch.Tensor:
    """fp64 [n, 1 + 2 K]: see SampledTokens."""
    table = torch.log_softmax(logits, dim=-1)
    parts = [table.gather(1, tokens.unsqueeze(1))]
    if num_top:
        best = table.topk(num_top, dim=-1)
        parts += [best.values, best.indices]
    return torch.cat([part.double() for part in parts], dim=1)
