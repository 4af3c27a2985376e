"""Latent attention by its definition: keys and values made, then attention of each head."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tandem.config.model import LatentAttentionConfig, RotaryConfig
from tandem.layers.batch import ForwardBatch
from tandem.layers.latent_attention import LatentAttention
from tests.stepper import ThreadGroup, ThreadRank
from tests.unit.layers.building import HIDDEN, build, context, stored_tensors

NUM_TOKENS, PAGE_TOKENS, NUM_PAGES = 11, 4, 6
PAGES = [5, 0, 2]
X = torch.randn(NUM_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
CONFIG: dict[str, Any] = {
    "num_heads": 4,
    "latent_size": 12,
    "nope_dim": 6,
    "rope_dim": 4,
    "value_dim": 5,
    "scale": 0.3,
    "has_bias": False,
    "rotary": None,
}


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turn(x: torch.Tensor, theta: float, is_interleaved: bool) -> torch.Tensor:
    """Channel pairs as complex numbers; x is [..., tokens, channels]."""
    half = x.shape[-1] // 2
    frequencies = theta ** -(torch.arange(half).double() / half)
    angles = torch.outer(torch.arange(x.shape[-2]).double(), frequencies)
    pairs = (x[..., 0::2], x[..., 1::2]) if is_interleaved else x.chunk(2, dim=-1)
    turned = torch.complex(pairs[0].double(), pairs[1].double()) * torch.exp(1j * angles)
    parts = [turned.real.float(), turned.imag.float()]
    return torch.stack(parts, -1).flatten(-2) if is_interleaved else torch.cat(parts, -1)


def expected(config: LatentAttentionConfig, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    def project(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, stored[f"{name}.weight"], stored.get(f"{name}.bias"))

    if config.query_rank is None:
        q = project("q_proj", X)
    else:
        low = norm(project("q_a_proj", X), stored["q_a_layernorm.weight"])
        q = project("q_b_proj", low)
    q = q.view(NUM_TOKENS, config.num_heads, -1).transpose(0, 1)
    latent, k_rope = project("kv_a_proj_with_mqa", X).split(
        [config.latent_size, config.rope_dim], 1
    )
    latent = norm(latent, stored["kv_a_layernorm.weight"])
    kv = project("kv_b_proj", latent).view(NUM_TOKENS, config.num_heads, -1).transpose(0, 1)
    k, v = kv.split([config.nope_dim, config.value_dim], dim=-1)
    if config.rotary is not None:
        q_nope, q_rope = q.split([config.nope_dim, config.rope_dim], dim=-1)
        turned = [turn(x, config.rotary.theta, config.is_interleaved) for x in (q_rope, k_rope)]
        q, k_rope = torch.cat([q_nope, turned[0]], dim=-1), turned[1]
    k = torch.cat([k, k_rope.expand(config.num_heads, -1, -1)], dim=-1)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=config.scale)
    out = out.transpose(0, 1)
    if config.has_head_gate:
        out = out * project("g_proj", X).sigmoid().unsqueeze(-1)
    return project("o_proj", out.flatten(1))


def batch(latents: torch.Tensor, start: int, stop: int) -> ForwardBatch:
    positions = torch.arange(start, stop)
    return ForwardBatch(
        token_ids=positions,
        positions=positions,
        query_start=torch.tensor([0, stop - start]).int(),
        context_lens=torch.tensor([stop]).int(),
        page_table=torch.tensor([PAGES]).int(),
        slots=torch.zeros(1, dtype=torch.int64),
        has_state=torch.tensor([start > 0]),
        token_pages=torch.tensor(PAGES)[positions // PAGE_TOKENS],
        token_offsets=positions % PAGE_TOKENS,
        num_decode=int(start > 0 and stop - start == 1),
        state={0: {"latent": latents}},
    )


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rotary": RotaryConfig(4, 100.0), "has_bias": True},
        {"rotary": RotaryConfig(4, 100.0), "has_bias": True, "is_interleaved": True},
        {"query_rank": 8, "has_head_gate": True},
        {"query_rank": 8, "rotary": RotaryConfig(4, 100.0), "is_interleaved": True},
    ],
    ids=str,
)
def test_chunks_on_any_ranks_equal_the_definition(tp: int, options: dict[str, Any]) -> None:
    config = LatentAttentionConfig(**{**CONFIG, **options})
    stored = stored_tensors(LatentAttention, config)

    def run(rank: ThreadRank) -> torch.Tensor:
        layer = build(LatentAttention, config, stored, context(rank))
        width = config.latent_size + config.rope_dim
        latents = torch.full((NUM_PAGES, 1, 1, PAGE_TOKENS, width), float("nan"))
        edges = [0, 3, 9, 10, NUM_TOKENS]  # chunks, then two decode steps
        return torch.cat(
            [layer(X[a:b], batch(latents, a, b)) for a, b in itertools.pairwise(edges)]
        )

    reference = expected(config, stored)
    for out in ThreadGroup(tp).run(run):
        torch.testing.assert_close(out, reference, rtol=1e-4, atol=1e-4)
