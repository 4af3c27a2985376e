"""The most likely token as Triton kernels; same function as `reference`.

A row alone is half a megabyte: many programs look at a piece of it each, one joins them.
"""

import torch
import triton
import triton.language as tl

from tandem.ops.dependent import begin, dependent
from tandem.ops.greedy import reference
from tandem.ops.tiles import is_plain, kernel

_TILE = 4096
_MAX_PIECES = 1024


def supports(x: torch.Tensor) -> bool:
    """x is fp32, bf16 or fp16 and takes part in no graph."""
    return is_plain(x)


def best_tokens(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """See `reference.best_tokens`."""
    num_rows, vocab = logits.shape
    pieces = triton.cdiv(vocab, _TILE)
    if logits.stride(1) != 1 or not vocab or pieces > _MAX_PIECES:
        return reference.best_tokens(logits, out)
    device = logits.device
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int64, device=device)
    if not num_rows:
        return out
    values = torch.empty((num_rows, pieces), dtype=torch.float32, device=device)
    ids = torch.empty((num_rows, pieces), dtype=torch.int32, device=device)
    greedy_piece_kernel[(pieces, num_rows)](
        logits, values, ids, vocab, logits.stride(0), BV=_TILE, num_warps=8, **dependent(device)
    )
    greedy_join_kernel[(num_rows,)](
        values, ids, out, pieces, BP=triton.next_power_of_2(pieces), num_warps=1,
        **dependent(device),
    )  # fmt: skip
    return out


@kernel
def greedy_piece_kernel(
    p_logits,
    p_values,
    p_ids,
    vocab,
    logits_row,
    BV: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Best of BV tokens of one row."""
    begin(IS_DEPENDENT)
    i_piece = tl.program_id(0)
    i_row = tl.program_id(1).to(tl.int64)
    o_v = i_piece * BV + tl.arange(0, BV)
    m_v = o_v < vocab
    b_x = tl.load(p_logits + i_row * logits_row + o_v, mask=m_v, other=float("-inf"))
    b_x = b_x.to(tl.float32)
    # NaN counts as the largest, as in torch; beyond the vocabulary is nothing, not even -inf.
    b_x = tl.where(b_x != b_x, float("inf"), b_x)
    best = tl.max(b_x, 0)
    is_best = m_v & (b_x == best)
    o_to = i_row * tl.num_programs(0) + i_piece
    tl.store(p_values + o_to, best)
    tl.store(p_ids + o_to, tl.min(tl.where(is_best, o_v, 2147483647), 0))


@kernel
def greedy_join_kernel(
    p_values, p_ids, p_out, num_pieces, BP: tl.constexpr, IS_DEPENDENT: tl.constexpr
):
    """Best of the pieces of one row."""
    begin(IS_DEPENDENT)
    i_row = tl.program_id(0).to(tl.int64)
    o_p = tl.arange(0, BP)
    m_p = o_p < num_pieces
    b_value = tl.load(p_values + i_row * num_pieces + o_p, mask=m_p, other=float("-inf"))
    b_id = tl.load(p_ids + i_row * num_pieces + o_p, mask=m_p, other=2147483647)
    is_best = m_p & (b_value == tl.max(b_value, 0))
    tl.store(p_out + i_row, tl.min(tl.where(is_best, b_id, 2147483647), 0).to(tl.int64))
