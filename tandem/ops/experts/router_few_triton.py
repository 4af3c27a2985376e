"""The router of few tokens as two Triton kernels: the product with the gate, then the choice.

The gate is fp32 and its product with the hidden state must be, too: each entry of the gate is cut
into three bf16 terms, which hold its 24 bits, and every product of two bf16 numbers is exact in
fp32. So matrix instructions give what fp32 arithmetic gives. A program owns one run of inputs for a
tile of experts, so that all of the device reads the gate; who chooses sums the runs in order.
"""

import torch
import triton
import triton.language as tl

from tandem.ops.dependent import allow_next, dependent, wait_for_inputs
from tandem.ops.experts.routing import route_parts
from tandem.ops.tiles import kernel
from tandem.ops.tuning import Tiles, tuned

MAX_TOKENS = 256
_TOKENS = 16


def takes(hidden: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether `route` can run: few tokens of bf16, a gate in fp32."""
    return (
        0 < len(hidden) <= MAX_TOKENS
        and hidden.dtype is torch.bfloat16
        and hidden.stride(1) == 1
        and gate.dtype is torch.float32
        and gate.is_contiguous()
        and (bias is None or bias.is_contiguous())
        and not hidden.requires_grad
    )


def route(
    hidden: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    normalize: bool,
    scale: float,
    score: str = "sigmoid",
    tiles: Tiles | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.route` of hidden @ gate^T."""
    (num_tokens, num_inputs), num_experts = hidden.shape, len(gate)
    device = hidden.device
    if tiles is None:
        tiles = {"BX": 32, "BK": 256, "num_warps": 4}
        if num_tokens == 1:
            tiles = {"BX": 4, "BK": 1024, "num_warps": 4}
        tiles = tuned("experts_router", num_tokens, device, tiles)
    runs = triton.cdiv(num_inputs, tiles["BK"])
    parts = torch.empty((num_tokens, runs, num_experts), dtype=torch.float32, device=device)
    rows = _TOKENS if num_tokens > 1 else 1
    grid = (triton.cdiv(num_experts, tiles["BX"]), runs, triton.cdiv(num_tokens, rows))
    experts_logits_kernel[grid](
        hidden,
        gate,
        parts,
        num_tokens,
        hidden.stride(0),
        E=num_experts,
        K=num_inputs,
        RUNS=runs,
        BT=rows,
        **tiles,
        **dependent(device),
    )
    return route_parts(parts, bias, top_k, num_groups, topk_groups, normalize, scale, score)


@kernel
def experts_logits_kernel(
    p_hidden,
    p_gate,
    p_parts,
    num_tokens,
    hidden_row,
    E: tl.constexpr,
    K: tl.constexpr,
    RUNS: tl.constexpr,
    BT: tl.constexpr,
    BX: tl.constexpr,
    BK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """What BK inputs add to the logits of BX experts for BT tokens."""
    allow_next(IS_DEPENDENT)
    i_run = tl.program_id(1)
    o_x = tl.program_id(0) * BX + tl.arange(0, BX)
    o_k = i_run * BK + tl.arange(0, BK)
    o_t = tl.program_id(2).to(tl.int64) * BT + tl.arange(0, BT)
    m_x = (o_x < E)[None, :]
    m_k = (o_k < K)[None, :]
    m_t = (o_t < num_tokens)[:, None]
    p_g = p_gate + o_x[:, None] * K + o_k[None, :]
    b_gate = tl.load(p_g, mask=(o_x < E)[:, None] & m_k, other=0.0)
    if BT > 1:
        dtype = p_hidden.dtype.element_ty
        b_high = b_gate.to(dtype)
        b_rest = b_gate - b_high.to(tl.float32)
        b_mid = b_rest.to(dtype)
        b_low = (b_rest - b_mid.to(tl.float32)).to(dtype)
    wait_for_inputs(IS_DEPENDENT)
    p_x = p_hidden + o_t[:, None] * hidden_row + o_k[None, :]
    b_x = tl.load(p_x, mask=m_t & m_k, other=0.0)
    if BT > 1:
        # The small terms first: what they add up to is not lost against the large one.
        b_part = tl.dot(b_x, tl.trans(b_low), input_precision="ieee")
        b_part = tl.dot(b_x, tl.trans(b_mid), b_part, input_precision="ieee")
        b_part = tl.dot(b_x, tl.trans(b_high), b_part, input_precision="ieee")
    else:
        b_part = tl.sum(b_gate * b_x.to(tl.float32), 1)[None, :]
    p_to = p_parts + ((o_t * RUNS + i_run) * E)[:, None] + o_x[None, :]
    tl.store(p_to, b_part, mask=m_t & m_x)
