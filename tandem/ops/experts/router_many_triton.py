"""The router of many tokens as Triton kernels for a GPU with tensor descriptors.

The gate is fp32 and so must its product with the hidden state be. Each entry of the gate is the sum
of three bf16 numbers, and the product of two bf16 numbers is exact in fp32: three matrix products
give what fp32 arithmetic gives. Matrix units cut off the ends of what they add up, though, so a
sum ends after a step of inputs and is added to the others as fp32.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tandem.ops.experts import routing
from tandem.ops.experts.routing import store_choices
from tandem.ops.tiles import kernel
from tandem.ops.tuning import tuned

# With fewer, too few programs walk all inputs one after the other.
_MIN_TOKENS = 1024
# A tile of experts. If it holds all, the choice is made where the products are.
_EXPERTS = 128


def takes(hidden: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether `route` can run: hidden in bf16, gate in fp32, rows at multiples of 16 bytes."""
    return (
        len(hidden) >= _MIN_TOKENS
        and hidden.is_cuda
        and torch.cuda.get_device_capability(hidden.device)[0] >= 9
        and hidden.dtype is torch.bfloat16
        and hidden.stride(1) == 1
        and hidden.stride(0) % 8 == 0
        and hidden.shape[1] % 8 == 0
        and hidden.data_ptr() % 16 == 0
        and gate.dtype is torch.float32
        and gate.is_contiguous()
        and (bias is None or bias.is_contiguous())
        and not (hidden.requires_grad and torch.is_grad_enabled())
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.route` of hidden @ gate^T; see `takes`."""
    (num_tokens, num_inputs), num_experts = hidden.shape, len(gate)
    device = hidden.device
    parts = torch.empty((3 * num_experts, num_inputs), dtype=hidden.dtype, device=device)
    experts_gate_kernel[(triton.cdiv(gate.numel(), 1024),)](
        gate, parts, gate.numel(), BLOCK=1024, num_warps=4
    )
    tiles = {"BT": 64, "BC": 64, "num_warps": 4, "num_stages": 4}
    tiles = tuned("experts_router_many", num_tokens, device, tiles)
    is_choosing = num_experts <= _EXPERTS
    logits, weights, ids = parts, parts, parts  # what is not written
    if is_choosing:
        weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=device)
        ids = torch.empty((num_tokens, top_k), dtype=torch.int64, device=device)
    else:
        logits = torch.empty((num_tokens, num_experts), dtype=torch.float32, device=device)
    columns = max(16, triton.next_power_of_2(num_experts)) if is_choosing else _EXPERTS
    grid = (triton.cdiv(num_tokens, tiles["BT"]), triton.cdiv(num_experts, columns))
    experts_router_product_kernel[grid](
        TensorDescriptor.from_tensor(hidden, [tiles["BT"], tiles["BC"]]),
        TensorDescriptor.from_tensor(parts, [columns, tiles["BC"]]),
        logits,
        gate if bias is None else bias,
        weights,
        ids,
        num_tokens,
        scale,
        E=num_experts,
        K=num_inputs,
        TOP_K=top_k,
        GROUPS=num_groups,
        TOPK_GROUPS=topk_groups,
        HAS_BIAS=bias is not None,
        IS_SOFTMAX=score == "softmax",
        IS_NORMALIZED=normalize,
        IS_CHOOSING=is_choosing,
        BE=columns,
        BG=triton.next_power_of_2(num_groups),
        BK=triton.next_power_of_2(top_k),
        **tiles,
    )
    if is_choosing:
        return weights, ids
    return routing.route(logits, bias, top_k, num_groups, topk_groups, normalize, scale, score)


@kernel
def experts_gate_kernel(p_gate, p_parts, numel, BLOCK: tl.constexpr):
    """Each entry as the sum of three of p_parts' dtype, the largest first."""
    o_g = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_g = o_g < numel
    b_left = tl.load(p_gate + o_g, mask=m_g, other=0.0)
    for part in tl.static_range(3):
        b_part = b_left.to(p_parts.dtype.element_ty)
        tl.store(p_parts + part * numel + o_g, b_part, mask=m_g)
        b_left -= b_part.to(tl.float32)


@kernel
def experts_router_product_kernel(
    x,
    parts,
    p_logits,
    p_bias,
    p_weights,
    p_ids,
    num_tokens,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    IS_CHOOSING: tl.constexpr,
    BT: tl.constexpr,
    BE: tl.constexpr,
    BG: tl.constexpr,
    BK: tl.constexpr,
    BC: tl.constexpr,
):
    """Logits of BT tokens and BE experts, or the choices of the tokens among them."""
    i_token = tl.program_id(0) * BT
    i_expert = tl.program_id(1) * BE
    b_acc = tl.zeros([BT, BE], tl.float32)
    for first in range(0, K, BC):
        # Rows beyond the experts are those of the next part, or zero; nobody asks for them.
        b_x = x.load([i_token, first])
        b_large = parts.load([i_expert, first])
        b_small = parts.load([E + i_expert, first])
        b_least = parts.load([2 * E + i_expert, first])
        b_sum = tl.dot(b_x, b_least.T, input_precision="ieee")
        b_sum = tl.dot(b_x, b_small.T, b_sum, input_precision="ieee")
        b_sum = tl.dot(b_x, b_large.T, b_sum, input_precision="ieee")
        b_acc += b_sum
    o_t = (i_token + tl.arange(0, BT)).to(tl.int64)
    if IS_CHOOSING:
        store_choices(
            b_acc,
            p_bias,
            p_weights,
            p_ids,
            o_t,
            num_tokens,
            scale,
            E,
            TOP_K,
            GROUPS,
            TOPK_GROUPS,
            HAS_BIAS,
            IS_SOFTMAX,
            IS_NORMALIZED,
            BT,
            BE,
            BG,
            BK,
        )
    else:
        o_e = i_expert + tl.arange(0, BE)
        m_out = (o_t < num_tokens)[:, None] & (o_e < E)[None, :]
        tl.store(p_logits + o_t[:, None] * E + o_e[None, :], b_acc, mask=m_out)
