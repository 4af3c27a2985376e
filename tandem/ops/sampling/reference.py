"""Choosing tokens in plain torch: what every other implementation has to choose as well."""

import torch


def penalize(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    generated: torch.Tensor,
    is_in_prompt: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """Change the logits fp32 [R, vocab] of `rows` (int64 [n], distinct) in place.

    Args:
        slots: int64 [n], each row's place in the two tables.
        generated: int32 [slots, vocab], how often each token was generated.
        is_in_prompt: bool [slots, vocab].
        repetition: fp32 [n], over zero (Keskar et al. 2019): of tokens in prompt or answer.
        presence, frequency: fp32 [n], as OpenAI's: of tokens in the answer.
    """
    counts = generated[slots]  # [n, vocab]
    is_generated = counts > 0
    values = logits[rows]
    factor = repetition.unsqueeze(1)
    repeated = torch.where(values > 0, values / factor, values * factor)
    values = torch.where(is_generated | is_in_prompt[slots], repeated, values)
    penalty = presence.unsqueeze(1) + frequency.unsqueeze(1) * counts
    logits[rows] = torch.where(is_generated, values - penalty, values)


def draw(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    uniform: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    max_top_k: int,
    short: torch.Tensor | None,
    long: torch.Tensor | None,
) -> torch.Tensor:
    """One token for each of `rows`, from one number each.

    Temperature, then top-k, top-p (Holtzman et al. 2020), min-p (Nguyen et al. 2024). Tokens stay
    in the order of their ids: the draw is the first one whose running sum of weights passes
    uniform * sum.

    Args:
        logits: fp32 [R, vocab].
        rows: int64 [n], of logits.
        temperature: fp32 [n], over zero.
        uniform: fp64 [n] in [0, 1).
        top_k: int64 [n]; the vocabulary or more keeps all.
        top_p: fp64 [n]; over 1 keeps all.
        min_p: fp32 [n]; tokens with less than this share of the best one's weight are dropped.
        max_top_k: the largest top_k among `short`.
        short, long: int64 places among the n of those with top-k or top-p, where the few best
            tokens decide, or all; None where there are none.

    Of equal tokens those with the lowest ids are kept, so that every engine keeps the same.

    Returns: int64 [n].
    """
    own = logits if len(rows) == len(logits) else logits[rows]
    scaled = (own - own.amax(dim=-1, keepdim=True)) / temperature.unsqueeze(1)
    weights = scaled.exp()  # of the best token: 1
    if short is not None:
        _cut(scaled, weights, top_k, top_p, short, max_top_k)
    if long is not None:
        _cut(scaled, weights, top_k, top_p, long, None)
    weights = torch.where(weights < min_p.unsqueeze(1), 0.0, weights)
    ends = weights.cumsum(dim=-1, dtype=torch.float64)
    total = ends[:, -1]
    # Rounding must not push the point past the last possible token.
    last = torch.nextafter(total, torch.zeros_like(total))
    points = torch.minimum(uniform * total, last)
    places = torch.searchsorted(ends, points.unsqueeze(1), right=True).squeeze(1)
    return places.clamp(max=logits.shape[1] - 1)


def _cut(
    scaled: torch.Tensor,
    weights: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    index: torch.Tensor,
    num_best: int | None,
) -> None:
    """Set to zero the weights that top-k and top-p cut off, in the rows `index`.

    num_best: how many of the best tokens decide it; None for all.
    """
    own = scaled[index]  # [n, vocab]
    if num_best is None:
        best = own.sort(dim=-1, descending=True).values
    else:
        best = own.topk(num_best, dim=-1).values
    places = torch.arange(best.shape[1], device=best.device)
    is_kept = places < top_k[index].unsqueeze(1)
    mass = best.exp().double() * is_kept
    before = mass.cumsum(dim=-1) - mass
    is_kept &= before < top_p[index].unsqueeze(1) * mass.sum(dim=-1, keepdim=True)
    num_kept = is_kept.sum(dim=-1, keepdim=True).clamp(min=1)
    worst = best.gather(1, num_kept - 1)
    is_above, is_equal = own > worst, own == worst
    num_equal = num_kept - is_above.sum(dim=-1, keepdim=True)
    is_equal &= is_equal.cumsum(dim=-1) <= num_equal
    weights[index] = torch.where(is_above | is_equal, weights[index], 0.0)
