"""Rotary position embedding as Triton kernels; same functions as `reference`, in which shapes are
stated. Queries and keys turn, and keys and values go to their pages, in one launch."""

import torch
import triton
import triton.language as tl

from tandem.ops.rotary import reference
from tandem.ops.tiles import FLOATS, is_plain, kernel


def supports(x: torch.Tensor) -> bool:
    """x is fp32, bf16 or fp16 and takes part in no graph."""
    return is_plain(x)


def rotate_and_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rot_dim: int,
    kv: torch.Tensor,
    token_pages: torch.Tensor,
    token_offsets: torch.Tensor,
) -> torch.Tensor:
    """See `reference.rotate_and_write`."""
    is_addressable = (
        q.stride(2) == k.stride(2) == v.stride(2) == 1
        and cos.is_contiguous()
        and sin.is_contiguous()
        and kv.dtype in FLOATS
        and kv[0].is_contiguous()
    )
    if not is_addressable:
        return reference.rotate_and_write(
            q, k, v, positions, cos, sin, rot_dim, kv, token_pages, token_offsets
        )
    num_tokens, num_heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not num_tokens:
        return out
    num_kv_heads, page_tokens = kv.shape[1], kv.shape[3]
    # Few tokens: small tiles, so that many programs start.
    tokens = 4 if num_tokens <= 512 else 16
    rotary_write_kernel[(triton.cdiv(num_tokens, tokens), num_heads + num_kv_heads)](
        q,
        k,
        v,
        positions,
        cos,
        sin,
        kv,
        token_pages,
        token_offsets,
        out,
        num_tokens,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        kv.stride(0),
        H=num_heads,
        D=head_dim,
        HALF=rot_dim // 2,
        PAGE_TOKENS=page_tokens,
        BT=tokens,
        BH=triton.next_power_of_2(rot_dim // 2),
        BD=triton.next_power_of_2(head_dim),
        BP=triton.next_power_of_2(max(1, head_dim - rot_dim)),
        num_warps=1 if tokens == 4 else 4,
    )
    return out


@triton.jit
def _rotate(
    p_x, p_out, b_from, b_to, m_t, b_cos, b_sin, D: tl.constexpr, HALF: tl.constexpr,
    BH: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One head of the tokens whose rows start at b_from in x, written to b_to in out."""
    o_h = tl.arange(0, BH)
    m = m_t[:, None] & (o_h < HALF)[None, :]
    dtype = p_out.dtype.element_ty
    p_first = p_x + b_from[:, None] + o_h[None, :]
    b_first = tl.load(p_first, mask=m, other=0.0).to(tl.float32)
    b_second = tl.load(p_first + HALF, mask=m, other=0.0).to(tl.float32)
    p_to = p_out + b_to[:, None] + o_h[None, :]
    tl.store(p_to, (b_first * b_cos - b_second * b_sin).to(dtype), mask=m)
    tl.store(p_to + HALF, (b_second * b_cos + b_first * b_sin).to(dtype), mask=m)
    if 2 * HALF < D:
        o_p = 2 * HALF + tl.arange(0, BP)
        m_p = m_t[:, None] & (o_p < D)[None, :]
        b_rest = tl.load(p_x + b_from[:, None] + o_p[None, :], mask=m_p)
        tl.store(p_out + b_to[:, None] + o_p[None, :], b_rest.to(dtype), mask=m_p)


@kernel
def rotary_write_kernel(
    p_q,
    p_k,
    p_v,
    p_positions,
    p_cos,
    p_sin,
    p_kv,
    p_pages,
    p_offsets,
    p_out,
    num_tokens,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    kv_page,
    H: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
    BP: tl.constexpr,
):
    """BT tokens of one query head, or of one K/V head."""
    i_h = tl.program_id(1)
    o_t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    m_t = o_t < num_tokens
    o_h = tl.arange(0, BH)
    m = m_t[:, None] & (o_h < HALF)[None, :]
    b_at = tl.load(p_positions + o_t, mask=m_t, other=0).to(tl.int64) * HALF
    b_cos = tl.load(p_cos + b_at[:, None] + o_h[None, :], mask=m, other=0.0)
    b_sin = tl.load(p_sin + b_at[:, None] + o_h[None, :], mask=m, other=0.0)
    if i_h < H:
        b_from = o_t * q_token + i_h * q_head
        b_to = (o_t * H + i_h) * D
        _rotate(p_q, p_out, b_from, b_to, m_t, b_cos, b_sin, D, HALF, BH, BP)
    else:
        i_kv = i_h - H
        b_page = tl.load(p_pages + o_t, mask=m_t, other=0).to(tl.int64)
        b_offset = tl.load(p_offsets + o_t, mask=m_t, other=0).to(tl.int64)
        b_key = b_page * kv_page + (i_kv * 2 * PAGE_TOKENS + b_offset) * D
        b_from = o_t * k_token + i_kv * k_head
        _rotate(p_k, p_kv, b_from, b_key, m_t, b_cos, b_sin, D, HALF, BH, BP)
        o_d = tl.arange(0, BD)
        m_d = m_t[:, None] & (o_d < D)[None, :]
        p_value = p_v + (o_t * v_token + i_kv * v_head)[:, None] + o_d[None, :]
        b_value = tl.load(p_value, mask=m_d)
        p_to = p_kv + (b_key + PAGE_TOKENS * D)[:, None] + o_d[None, :]
        tl.store(p_to, b_value.to(p_kv.dtype.element_ty), mask=m_d)
