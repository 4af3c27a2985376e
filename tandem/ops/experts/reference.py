"""Mixture of experts in plain torch: the router's choice, and the experts' MLPs."""

import torch
import torch.nn.functional as F

from tandem.errors import ShapeError
from tandem.ops.activation import activate

SCORES = ("sigmoid", "softmax")
# Up to this many tokens, one sort costs less than several searches.
_MAX_SORTED = 32


def route(
    logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    normalize: bool,
    scale: float,
    score: str = "sigmoid",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts by corrected scores, weigh them by uncorrected ones.

    Args:
        logits: [T, E].    score: "sigmoid", or "softmax" over all experts; in fp32.
        correction_bias: [E], added to the scores for the choice alone; None for none.
        num_groups, topk_groups: experts form `num_groups` equal runs; only the `topk_groups` runs
            whose two best corrected scores sum highest take part.
        top_k: experts per token, no more than take part.
        normalize: divide the chosen scores by their sum. With "softmax" this is also the softmax
            over the chosen logits alone.
        scale: factor on the weights, after that.

    Returns: (weights fp32 [T, top_k], ids int64 [T, top_k]), best corrected score first; of equal
        ones the lowest id.
    Raises: ShapeError if `score` is unknown.
    Source: DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2 (sigmoid, the router of Nemotron-3);
        Shazeer et al. 2017, arXiv:1701.06538 (softmax).
    """
    if score not in SCORES:
        raise ShapeError(f"score={score!r} is unknown; use one of {', '.join(SCORES)}")
    scores = logits.float().sigmoid() if score == "sigmoid" else logits.float().softmax(-1)
    corrected = scores if correction_bias is None else scores + correction_bias.float()
    if topk_groups < num_groups:
        by_group = corrected.unflatten(1, (num_groups, -1))  # [T, groups, E']
        group_scores = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(-1)
        kept = _best(group_scores, topk_groups)
        is_dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, kept, False)
        corrected = by_group.masked_fill(is_dropped.unsqueeze(-1), -torch.inf).flatten(1)
    ids = _best(corrected, top_k)
    weights = scores.gather(1, ids)
    if normalize:
        # All scores may underflow to zero; the small term keeps 0 / 0 out.
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, ids


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices [T, count] of the largest scores; unlike topk's, their order is defined for ties."""
    if len(scores) <= _MAX_SORTED:
        return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    left, chosen = scores.clone(), []
    for _ in range(count):
        best = left.argmax(-1, keepdim=True)  # the first of equal ones
        left.scatter_(1, best, -torch.inf)
        chosen.append(best)
    return torch.cat(chosen, 1)


def experts_mlp(
    x: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    activation: str,
    base: torch.Tensor | None = None,
) -> torch.Tensor:
    """sum over k of weights[t, k] * down[ids[t, k]] @ activation(up[ids[t, k]] @ x[t]).

    Args:
        x: [T, h].    up: [E, I, h] for "relu2", [E, 2 I, h] (gate first) for "silu_gated".
        down: [E, h, I].    weights: fp32 [T, k].    ids: int64 [T, k], below E, distinct per token.
        base: [T, h] in x.dtype, added to the sum; not changed.

    Returns: [T, h] in x.dtype, summed in fp32. Experts without a token are not read.
    """
    out = x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
    # Pairs (token, k) sorted by expert: each expert is one product over an interval of them.
    order = torch.argsort(ids.flatten(), stable=True)
    tokens = order // ids.shape[1]
    pair_weights = weights.flatten()[order].unsqueeze(1).to(out.dtype)
    start = 0
    for expert, count in enumerate(torch.bincount(ids.flatten(), minlength=len(up)).tolist()):
        if count:
            here = slice(start, start + count)
            hidden = activate(F.linear(x[tokens[here]], up[expert]), activation)
            part = F.linear(hidden, down[expert]).to(out.dtype)
            out.index_add_(0, tokens[here], part * pair_weights[here])
            start += count
    if base is not None:
        out += base
    return out.to(x.dtype)
