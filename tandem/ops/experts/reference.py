"""Mixture of experts in plain torch: the sigmoid router, and the experts' MLPs."""

import torch
import torch.nn.functional as F

from tandem.ops.activation import activate


def route_sigmoid(
    logits: torch.Tensor,
    correction_bias: torch.Tensor,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    normalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts by corrected scores, weigh them by uncorrected ones.

    Args:
        logits: fp32 [T, E].    correction_bias: [E], added to the sigmoid scores for the choice
            alone.
        num_groups, topk_groups: experts form `num_groups` equal runs; only the `topk_groups` runs
            whose two best corrected scores sum highest take part.
        top_k: experts per token.    normalize: divide the chosen scores by their sum.
        scale: factor on the weights, after that.

    Returns: (weights fp32 [T, top_k], ids int64 [T, top_k]); the order of the k is not defined.
    Source: DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2; the router of Nemotron-3.
    """
    scores = logits.float().sigmoid()
    by_group = (scores + correction_bias.float()).unflatten(1, (num_groups, -1))  # [T, groups, E']
    if topk_groups < num_groups:
        group_scores = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(-1)
        kept = group_scores.topk(topk_groups, dim=-1, sorted=False).indices
        is_dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, kept, False)
        by_group = by_group.masked_fill(is_dropped.unsqueeze(-1), -torch.inf)
    ids = by_group.flatten(1).topk(top_k, dim=-1, sorted=False).indices
    weights = scores.gather(1, ids)
    if normalize:
        # All scores may underflow to zero; the small term keeps 0 / 0 out.
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, ids


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
